"""What `make demo` finds, as numbers for the README; writes benchmarks/results/demo.json."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from tempfile import TemporaryDirectory

import sinklab
from sinklab.reports.sureness import near_any
from sinklab.reports.tables import head_table
from sinklab.sinks.classify import both_definitions
from sinklab.sinks.table import sink_table

RESULT = Path(__file__).parent / "results" / "demo.json"


def main() -> None:
    """Diagnose the demo model on the demo photographs and keep what the README quotes, as the report counts it."""
    with TemporaryDirectory() as folder:
        run = sinklab.diagnose("demo", "demo", output=Path(folder) / "run", report=False)
        heads, summary, config = run.heads, run.summary, run.config
    rule, definition = sinklab.SinkRule.relaxed(), sinklab.SinkDefinition.causal()
    table = head_table(heads, sink_table(heads, rule), rule, both_definitions())
    sunk = table[table["events"] > 0].sort_values(["events", "layer", "head"], ascending=[False, True, True])
    found = [
        {
            "layer": int(head["layer"]),
            "head": int(head["head"]),
            "events": int(head["events"]),
            "class": head["class_causal"],
            "of_that_class": int(head[f"{head['class_causal']}_causal"]),
            "kind": head["kind"],
            "event_inflow": round(float(head["event_inflow"]), 3),
            "median_value_ratio_head": round(float(head["median_value_ratio_head"]), 3),
            "median_value_ratio_out": round(float(head["median_value_ratio_out"]), 3),
            "median_stable_rank": round(float(head["median_stable_rank"]), 3),
        }
        for head in sunk.to_dict("records")
    ]
    result = {
        "conditions": {
            "versions": config["versions"],
            "device": config["device"],
            "machine": platform.machine(),
            "created": config["created"],
            "size": config["images"]["size"],
        },
        "images": summary["images"],
        "pairs": summary["pairs"],
        "heads_that_sink": summary["heads_that_sink"],
        "events": summary["events"]["total"],
        "classes": {
            name: {label: own[label]["total"] for label in ("nop", "broadcast", "intermediate")}
            for name, own in summary["by_definition"].items()
        },
        "near_a_limit": near_any(heads[rule.events(heads)], definition),
        "sunk_heads": found,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(RESULT)


if __name__ == "__main__":
    main()
