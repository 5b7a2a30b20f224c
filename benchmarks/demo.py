"""What `make demo` finds, as numbers for the README; writes benchmarks/results/demo.json."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from tempfile import TemporaryDirectory

import sinklab

RESULT = Path(__file__).parent / "results" / "demo.json"


def main() -> None:
    """Diagnose the demo model on the demo photographs and keep what the README quotes."""
    with TemporaryDirectory() as folder:
        run = sinklab.diagnose("demo", "demo", output=Path(folder) / "run", report=False)
        heads, summary, config = run.heads, run.summary, run.config
    columns = ["inflow", "value_ratio_head", "value_ratio_out", "stable_rank"]
    first = heads[heads["layer"] == 0].groupby("head")[columns].agg(["mean", "median"])
    events = sinklab.SinkRule.relaxed().events(heads)
    block0 = [
        {
            "head": int(head),
            "events": int(events[(heads["layer"] == 0) & (heads["head"] == head)].sum()),
            "mean_inflow": round(float(row["inflow", "mean"]), 3),
            "median_value_ratio_head": round(float(row["value_ratio_head", "median"]), 3),
            "median_value_ratio_out": round(float(row["value_ratio_out", "median"]), 3),
            "median_stable_rank": round(float(row["stable_rank", "median"]), 3),
            "kind": str(heads[(heads["layer"] == 0) & (heads["head"] == head)]["sink_kind"].mode()[0]),
        }
        for head, row in first.iterrows()
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
        "block0": block0,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(RESULT)


if __name__ == "__main__":
    main()
