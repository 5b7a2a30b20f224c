"""Put measured numbers into README.md and docs: `python benchmarks/fill_readme.py`; --check fails if they are old.

The text between `<!-- demo:begin -->` and `<!-- demo:end -->` comes from results/demo.json, that between the speed
marks from results/diagnose.json, that between the patch marks from results/patch.json. Those of
docs/controlled-tasks.md are of results/toy_tables.json, toy_truth.json and toy_budget.json, those of
docs/language-models.md of lm_tables.json and kuramoto.json, those of docs/vision-training.md of vit_study.json,
vit_memory.json and vit_dry_run.json, those of docs/settings.md of the config dataclasses. A block whose file is not
there is left as it is. A number stands in one place: the result file.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for its neighbours, when it is loaded from elsewhere
README = HERE.parent / "README.md"
DOCS = HERE.parent / "docs"
NAMES = ("controlled-tasks.md", "language-models.md", "settings.md", "vision-training.md")
PAGES = (README, *(DOCS / name for name in NAMES))
KIND = {"cls": "[CLS]", "register": "a register", "patch": "a patch"}


def demo_text(result: dict[str, Any]) -> str:
    """What a newcomer sees in the demo's report, in the report's own numbers: heads, or events, and said which."""
    heads, causal, images = result["sunk_heads"], result["classes"]["causal"], result["images"]
    as_class = {name: [head for head in heads if head["class"] == name] for name in causal}
    quiet = min(as_class["nop"], key=lambda head: head["median_value_ratio_out"])
    loud = max(as_class["broadcast"], key=lambda head: head["event_inflow"])
    number = {name: _count(len(mine), "head") for name, mine in as_class.items()}
    height, width = result["conditions"]["size"]
    return (
        f"**What you see.** On {images} photographs at {height}x{width} px, {len(heads)} of the {result['pairs']} "
        "heads of this DINOv2 ViT-S/14 sink in at least one of them. A head that sinks in one photograph is an "
        f"*event*; there are {result['events']}: {causal['nop']} NOP, {causal['broadcast']} broadcast and "
        f"{causal['intermediate']} intermediate ones (definition `causal`). By most of its events a head is a NOP "
        f"({number['nop']}), a broadcast ({number['broadcast']}) or intermediate ({number['intermediate']}). "
        f"{result['near_a_limit']} events lie within 20 % of a limit of the definition; the report's *How sure* says "
        f"what hangs on it. {_tells(quiet, images)} to {KIND[quiet['kind']]}, whose projected value is there "
        f"{quiet['median_value_ratio_out']:.2g} times as long as the mean of the other tokens' values: attending there "
        f"changes almost nothing, a NOP. {_tells(loud, images)} to {KIND[loud['kind']]}, whose value is "
        f"{loud['median_value_ratio_out']:.2g} times as long, and the update that the head adds has stable rank "
        f"{loud['median_stable_rank']:.2f}: every token receives nearly the same vector, a broadcast. (Ratios and rank "
        "are medians over the head's events, inflow is their mean; all stand in the report's *Layer by layer*.)"
    )


def _tells(head: dict[str, Any], images: int) -> str:
    return (
        f"Layer {head['layer']}, head {head['head']} sinks in {head['events']} of {images} photographs "
        f"(inflow {head['event_inflow']:.2f})"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def patch_text(result: dict[str, Any]) -> str:
    """What `sinklab patch` costs and says on the demo: results/patch.json, key "demo"."""
    demo = result["demo"]
    means = []
    for name, edits in demo["class_means"].items():
        said = ", ".join(f"{edit} {float(mean):.2g}" for edit, mean in edits.items())
        heads = _count(demo["class_heads"][name], f"{name.upper() if name == 'nop' else name} head")
        means.append(f"of {heads} {said}")
    return (
        f"On the demo that is {demo['rows']} edited passes in {demo['seconds']:.0f} s of one CPU core; a whole forward "
        f"for each edit on every photograph takes {demo['times_as_long']['whole forwards, every image']:.1f} times as "
        f"long. The mean relative change of the patch tokens is, as in the report, {'; '.join(means)}."
    )


def speed_text(result: dict[str, Any]) -> str:
    """The benchmark's table, as `diagnose.py` words it."""
    return str(result["markdown"]).strip()


def toy_text(result: dict[str, Any]) -> str:
    """The controlled tasks' tables; loaded only where they are asked for."""
    from toy_words import toy_text as words

    return words(result)


def lm_text(result: dict[str, Any]) -> str:
    """The language models' tables; loaded only where they are asked for."""
    from lm_words import lm_text as words

    return words(result)


def study_text(result: dict[str, Any]) -> str:
    """The study of tiny vision transformers."""
    from vit_words import study_text as words

    return words(result)


def kuramoto_text(result: dict[str, Any]) -> str:
    """What a phase-state layer costs."""
    from lm_words import kuramoto_text as words

    return words(result)


def truth_text(result: dict[str, Any]) -> str:
    """What the freshly trained tasks were named: `toy_truth.py`."""
    from toy_words import truth_text as words

    return words(result)


def dry_run_text(result: dict[str, Any]) -> str:
    """ViT-L, two steps of it."""
    from vit_words import dry_run_text as words

    return words(result)


def budget_text(result: dict[str, Any]) -> str:
    """What the controlled tasks need: `toy_budget.py`."""
    from toy_words import budget_text as words

    return words(result)


def memory_text(result: dict[str, Any]) -> str:
    """What a GPU must hold."""
    from vit_words import memory_text as words

    return words(result)


def settings_blocks() -> dict[str, Any]:
    """Block → what fills it, for those that come from the code and not from a result."""
    from setting_words import lm_settings, toy_settings, vit_settings

    return {"vit-settings": vit_settings, "lm-settings": lm_settings, "toy-settings": toy_settings}


def filled(text: str) -> str:
    """A page with every block whose result file exists."""
    for name, told in settings_blocks().items() if "-settings:begin -->" in text else ():
        text = replaced(text, name, told())
    files = {"demo": "demo.json", "speed": "diagnose.json", "patch": "patch.json", "toy": "toy_tables.json"}
    files |= {"lm": "lm_tables.json", "kuramoto": "kuramoto.json", "truth": "toy_truth.json"}
    files |= {
        "budget": "toy_budget.json",
        "dry-run": "vit_dry_run.json",
        "study": "vit_study.json",
        "memory": "vit_memory.json",
    }
    written = {"demo": demo_text, "speed": speed_text, "patch": patch_text, "toy": toy_text}
    written |= {"lm": lm_text, "kuramoto": kuramoto_text, "truth": truth_text}
    written |= {"budget": budget_text, "dry-run": dry_run_text, "study": study_text, "memory": memory_text}
    for name, words in written.items():
        if f"<!-- {name}:begin -->" not in text:
            continue
        path = HERE / "results" / files[name]
        if path.is_file():
            text = replaced(text, name, words(json.loads(path.read_text())))
    return text


def replaced(text: str, name: str, words: str) -> str:
    """A page with the block of a name filled, if it has one."""
    block = f"<!-- {name}:begin -->\n{words}\n<!-- {name}:end -->"
    return re.sub(rf"<!-- {name}:begin -->.*?<!-- {name}:end -->", lambda _: block, text, flags=re.DOTALL)


def main() -> None:
    """Fill, or check."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if "--check" in sys.argv and before != after:
            sys.exit(f"{page.name} is out of date: run python benchmarks/fill_readme.py")
        page.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
