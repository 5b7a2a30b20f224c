"""The language models' tables in Markdown, from results/lm_tables.json and results/kuramoto.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from toy_words import markdown

PAPER = (
    ("1M parameters, validation", "1.637 ± 0.010", "1.616 ± 0.004"),
    ("5M parameters, five seeds, median", "1.448", "1.452"),
    ("5M parameters, five seeds, mean", "1.468", "1.456"),
)
"""Bits a byte on enwik8 that the paper prints: what, Kuramoto, transformer."""
DASH = "–"


def lm_text(result: dict[str, Any]) -> str:
    """The block of docs/language-models.md; a part whose run was not read is left out."""
    parts = []
    if "seeds" in result:
        parts += ["### Seeds", _made(result["seeds"]), _results(result["seeds"]), _differences(result["seeds"])]
    if "larger" in result:
        parts += ["### The first steps at 1M", _made(result["larger"]), _results(result["larger"])]
    parts += ["### The paper’s", _paper()]
    if "sweep" in result:
        parts += ["### Learning rates", _made(result["sweep"]), _rates(result["sweep"])]
    if "ablations" in result:
        parts += ["### Ablations", _made(result["ablations"]), _ablations(result["ablations"])]
    for name in ("seeds", "sweep", "ablations"):
        if name in result and result[name]["sinks"]:
            parts += ["### What their sinks are", _sinks(result[name])]
            break
    return "\n\n".join(part for part in parts if part)


def _made(entry: Mapping[str, Any]) -> str:
    """Text, budget, cost and command."""
    text, seconds = entry["text"], [one for one in entry["seconds"].values() if one]
    cost = f" {median(seconds):.0f} s a training (median), " if seconds else " "
    conditions = entry["conditions"]
    threads = conditions["threads"]
    on = f"{conditions['device']}, {threads} thread{'' if threads == 1 else 's'}"
    return (
        f"Text `{text['name']}`, {text['symbols']} symbols. {' '.join(entry['budget'])}{cost}{on}; "
        f"{conditions['shared']}:\n`{entry['command']}`"
    )


def bits(value: float | None) -> str:
    return DASH if value is None else f"{value:.3f}"


def _spread(row: Mapping[str, Any], name: str) -> str:
    std = row[f"{name}_std"]
    return bits(row[f"{name}_mean"]) + (f" ± {std:.3f}" if std is not None else "")


def _chosen(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in entry["results"] if row["chosen"]]


def _results(entry: Mapping[str, Any]) -> str:
    rows = [
        [
            row["config"],
            bits(row["validation_bpc_median"]),
            _spread(row, "validation_bpc"),
            bits(row["test_bpc_median"]),
            _spread(row, "test_bpc"),
            DASH if row["parameters"] is None else f"{row['parameters']:,.0f}",
            f"{row['lr']:g}",
            DASH if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
        ]
        for row in _chosen(entry)
    ]
    heads = [
        "model",
        "validation, median",
        "mean ± std",
        "test, median",
        "mean ± std",
        "parameters",
        "peak lr",
        "bytes/s",
    ]
    return markdown(heads, rows)


def _differences(entry: Mapping[str, Any]) -> str:
    """ "Seed by seed, phase-tiny − transformer-tiny is +0.020 …"."""
    said = []
    for split in ("validation", "test"):
        rows = [row for row in entry["differences"] if row["measure"] == f"{split}_bpc" and "+" not in row["config"]]
        if rows:
            gaps = ", ".join(signed(row["difference"]) for row in rows)
            middle = signed(median(row["difference"] for row in rows))
            said.append(f"{rows[0]['config']} − {rows[0]['against']} on {split} is {gaps} (median {middle})")
    return f"Seed by seed, {'; '.join(said)}." if said else ""


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _paper() -> str:
    told = (
        "Kuramoto Attention trains on enwik8 (90 million bytes to learn from, 5 million each for validation and test). "
        "Another text and another budget than ours above: bits do not compare, only who is ahead and by how much. The "
        "`-1m` and `-5m` models at their default steps, about thirty times through those bytes, are for this table; "
        "they want a GPU and were not trained here."
    )
    return told + "\n\n" + markdown(["enwik8", "Kuramoto", "transformer"], PAPER)


def _rates(entry: Mapping[str, Any]) -> str:
    rates = sorted({row["lr"] for row in entry["results"]})
    rows = []
    for name in dict.fromkeys(row["config"] for row in entry["results"]):
        by_rate = {row["lr"]: row for row in entry["results"] if row["config"] == name}
        cells = [_rate_cell(by_rate[rate]) if rate in by_rate else DASH for rate in rates]
        rows.append([name, *cells])
    return markdown(["validation, median", *(f"lr {rate:g}" for rate in rates)], rows)


def _rate_cell(row: Mapping[str, Any]) -> str:
    said = bits(row["validation_bpc_median"]) + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
    return f"**{said}**" if row["chosen"] else said


def _ablations(entry: Mapping[str, Any]) -> str:
    gaps: dict[str, list[float]] = {}
    for row in entry["differences"]:
        if row["measure"] == "validation_bpc" and "+" in row["config"]:
            gaps.setdefault(row["config"], []).append(row["difference"])
    rows = [
        [row["config"], bits(row["validation_bpc_median"]), bits(row["test_bpc_median"]),
         signed(median(gaps[row["config"]])) if row["config"] in gaps else DASH]
        for row in _chosen(entry)
    ]  # fmt: skip
    return markdown(["model", "validation, median", "test, median", "more than the whole, by seed"], rows)


def _sinks(entry: Mapping[str, Any]) -> str:
    rows = [
        [
            row["member"],
            f"{row['sinking']} of {row['heads']}",
            *(str(row[name]) for name in ("nop", "broadcast", "intermediate", "bos", "text")),
            *(DASH if row[name] is None else f"{row[name]:.2f}" for name in ("median_ratio", "median_stable_rank")),
            _patched(row),
        ]
        for row in entry["sinks"]
    ]
    heads = ["model", "heads that sink", "NOP", "broadcast", "intermediate", "on the first token", "on a text token",
             "ratio", "stable rank", "heads whose class the interventions confirm"]  # fmt: skip
    judged = f"Judged by the {entry['judged']}."
    phases = "\n".join(f"- `{member}`: {words}" for member, words in entry["phases"].items())
    return f"{entry['sentence']} {judged}\n\n{markdown(heads, rows)}\n\n{phases}".rstrip()


def _patched(row: Mapping[str, Any]) -> str:
    told = [row.get(f"{name}_{said}") for name in ("nop", "broadcast") for said in ("agree", "disagree", "undecided")]
    if any(count is None for count in told):
        return DASH
    counts = [float(count or 0) for count in told]
    return f"{counts[0] + counts[3]:.0f} of {sum(counts):.0f}, {counts[2] + counts[5]:.0f} undecided"


def kuramoto_text(result: dict[str, Any]) -> str:
    """What a phase-state layer costs, a row a shape."""
    rows: list[Sequence[str]] = []
    for row in result["rows"].values():
        beside, direct = row["phase_over_transformer"], row.get("direct_over_phase")
        rows.append(
            [
                str(row["width"]),
                f"{row['tokens']} × {row['batch']}",
                "yes" if row["compiled"] else "no",
                *(f"{beside[name]:.2f} ({beside[f'{name}_least']:.2f}–{beside[f'{name}_most']:.2f})"
                  for name in ("forward", "step")),
                *(f"{direct[name]:.0f}" if direct else DASH for name in ("forward", "step")),
            ]
        )  # fmt: skip
    said = result["conditions"]
    heads = ["width", "tokens × batch", "compiled", "forward, over a transformer layer’s", "step, over its",
             "formula written out, forward over ours", "step"]  # fmt: skip
    return (
        f"Ratios within a round, medians (least to most) over rounds, one thread’s CPU clock ({said['cpu']}, torch "
        f"{said['torch']}). A step is forward and backward.\n\n" + markdown(heads, rows)
    )
