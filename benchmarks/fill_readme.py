"""Put measured numbers into README.md: `python benchmarks/fill_readme.py`; with --check, fail if it is out of date.

The text between `<!-- demo:begin -->` and `<!-- demo:end -->` comes from results/demo.json, that between the speed
marks from results/diagnose.json. A number stands in one place: the result file.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"


def demo_text(result: dict[str, Any]) -> str:
    """What a newcomer sees in the demo's report."""
    sunk = result["heads_that_sink"]
    sunk_on_cls = [head for head in result["block0"] if head["kind"] == "cls" and head["events"]]
    quiet = min(sunk_on_cls, key=lambda head: head["median_value_ratio_out"])
    loud = max(result["block0"], key=lambda h: h["mean_inflow"])
    causal = result["classes"]["causal"]
    height, width = result["conditions"]["size"]
    return (
        f"**What you see.** On {result['images']} photographs at {height}x{width} px, {sunk['in_any_image']} of the "
        f"{result['pairs']} heads of this DINOv2 ViT-S/14 sink in at least one of them; of the {result['events']} sink "
        f"events {causal['nop']} are NOPs, {causal['broadcast']} broadcasts and {causal['intermediate']} lie between "
        "(definition `causal`). Both kinds stand side by side in block 0. "
        f"Head {quiet['head']} turns to [CLS] (mean inflow {quiet['mean_inflow']:.2f}), whose projected value has "
        f"{quiet['median_value_ratio_out']:.2f} times the norm of the other tokens' values: attending there changes "
        f"almost nothing, a NOP. Head {loud['head']} turns to a patch (mean inflow {loud['mean_inflow']:.2f}) with "
        f"{loud['median_value_ratio_out']:.1f} times the others' norm, and the update that it adds has stable rank "
        f"{loud['median_stable_rank']:.3f}: every token receives the same vector, a broadcast. (Ratios and rank are "
        "medians over all photographs.)"
    )


def speed_text(result: dict[str, Any]) -> str:
    """The benchmark's table, as `diagnose.py` words it."""
    return str(result["markdown"]).strip()


def filled(text: str) -> str:
    """The README with every block whose result file exists."""
    for name, words in (("demo", demo_text), ("speed", speed_text)):
        path = HERE / "results" / {"demo": "demo.json", "speed": "diagnose.json"}[name]
        if path.is_file():
            block = f"<!-- {name}:begin -->\n{words(json.loads(path.read_text()))}\n<!-- {name}:end -->"
            text = re.sub(rf"<!-- {name}:begin -->.*?<!-- {name}:end -->", lambda _, b=block: b, text, flags=re.DOTALL)
    return text


def main() -> None:
    """Fill, or check."""
    before = README.read_text()
    after = filled(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else "README.md is out of date: run python benchmarks/fill_readme.py")
    README.write_text(after)


if __name__ == "__main__":
    main()
