"""The controlled tasks' tables in Markdown, ours beside the paper's: results/toy_tables.json, toy_budget.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any

from sinklab.reports import toy_paper
from sinklab.reports.training import budget_sentence
from sinklab.reports.training_figures import arm_name
from sinklab.reports.training_tables import EDIT_NAME, EDITS_2, EDITS_3, plain, with_error

PATHWAY = {
    "task_mse": "task MSE",
    "inflow_0": "inflow, layer 0",
    "inflow_1": "inflow, layer 1",
    "delta_mse_without_attention": "ΔMSE without attention",
    "delta_mse_without_global": "ΔMSE without the pathway",
    "donor_cosine_sink": "donor cosine via the sink",
    "donor_cosine_global": "via g",
}
NOP = {"task_mse": "task MSE", "delta_rms_nop": "ΔRMS, NOP queries", "delta_rms_active": "ΔRMS, active queries"}
SINK = {
    "attention_nop": "attention to the sink, NOP queries",
    "attention_active": "attention to the sink, active queries",
    "value_norm_sink": "projected value, sink",
    "value_norm_other": "projected value, others",
    "value_ratio": "their ratio",
}
BROADCAST = {
    "task_mse": "task MSE",
    "donor_target_mse": "donor-target MSE",
    "delta_rms": "ΔRMS",
    "shared_energy": "shared energy",
    "donor_cosine": "donor cosine",
}


def toy_text(result: dict[str, Any]) -> str:
    """The block of docs/controlled-tasks.md."""
    parts = [
        "### Table 2: the NOP sink\n\n" + _made(result["nop"]) + "\n\n" + _table_2(result["nop"]["mean"]),
        "### Table 2 again: all of the paper's steps\n\n" + _made(result["nop-long"]) + "\n\n"
        + _table_2(result["nop-long"]["mean"]) + "\n\n" + _route(result) + "\n\n" + _uncentred(result["nop-uncentred"]),
        "### Table 3: the broadcast\n\n" + _made(result["broadcast"]) + "\n\n" + _table_3(result["broadcast"]["mean"]),
        "### Fig. 7B: the pathway, five seeds\n\n" + _made(result["pathway"]) + "\n\n"
        + _arms(result["pathway"]["mean"], toy_paper.PATHWAY),
        "### Fig. 11: the sweeps\n\n" + _sweeps(result),
        "### App. E.1: γ ≡ 1, and a denominator without gradient\n\n" + _made(result["e1"]) + "\n\n"
        + _arms(result["e1"]["mean"], toy_paper.E1) + "\n\n" + _shrunk(result["e1"]["update_rms"]),
    ]  # fmt: skip
    return "\n\n".join(parts)


def truth_text(result: dict[str, Any]) -> str:
    """The block "Named as they were trained" of docs/controlled-tasks.md."""
    rows = []
    for task in ("nop", "broadcast"):
        for seed, one in result[task]["seeds"].items():
            head = one["heads"][0]
            named = [f"{100 * one['named'][name]:.4g} %" for name in ("causal", "counts")]
            place = f"layer {head['layer']}, head {head['head']}"
            rows.append([task, seed, f"{one['events']:,} of {one['sequences']:,}", *named, place, head["verdict"]])
    heads = ["task", "seed", "sequences with a sink", "named so by `causal`", "by `counts`", "edited", "behaves as"]
    return markdown(heads, rows)


def budget_text(result: dict[str, Any]) -> str:
    """The block "How small a training may be" of docs/controlled-tasks.md."""
    rows = []
    for task in ("nop", "broadcast", "pathway"):
        held, missed = [], ""
        for rung in result[task]["rungs"]:
            seeds = rung["seeds"].values()
            held.append(f"{rung['steps']:,}: {sum(seed['holds'] for seed in seeds)} of {len(seeds)}")
            missed = missed if rung["steps"] >= result[task]["smallest"] else _most_missed(seeds)
        rows.append([f"`{task}`", ", ".join(held), f"{result[task]['smallest']:,}", missed])
    return markdown(["task", "steps tried: seeds that show all", "smallest", "the step before missed"], rows)


def _most_missed(seeds: Iterable[dict[str, Any]]) -> str:
    counted = Counter(name for seed in seeds for name in seed["missed"])
    return "; ".join(f"{name} ({count})" for name, count in counted.most_common())


def _made(entry: dict[str, Any]) -> str:
    """The command, the budget, the claims and the cost, in sentences."""
    checked, held = entry["claims"]["checked"], entry["claims"]["held"]
    said = f" {held} of {checked} claims hold." if checked else ""
    batches, size = entry["budget"]["evaluation"]
    said += f" Evaluated on {batches} × {size} sequences."
    cost = f"{entry['cpu_seconds_a_training']:.0f} CPU seconds a training on one thread"
    return f"{budget_sentence(entry['budget'])}{said} {cost}, {len(entry['seeds'])} seeds:\n`{entry['command']}`"


def _cell(row: dict[str, Any], name: str, paper: float | None) -> str:
    mean, sem = row.get(name), row.get(f"{name}_sem") or 0.0
    ours = "–" if mean is None else with_error(mean, sem)
    return ours if paper is None else f"{ours} ({plain(paper)})"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _table_2(means: list[dict[str, Any]]) -> str:
    by_edit = {row["edit"]: row for row in means}
    rows = [
        [
            EDIT_NAME.get(edit, edit),
            *(_cell(by_edit[edit], name, toy_paper.TABLE_2.get(edit, {}).get(name)) for name in NOP),
        ]
        for edit in EDITS_2
    ]
    sink = [[words, _cell(by_edit["baseline"], name, toy_paper.SINK[name])] for name, words in SINK.items()]
    return markdown(["edit", *NOP.values()], rows) + "\n\n" + markdown(["unedited", "ours (paper)"], sink)


def _route(result: dict[str, Any]) -> str:
    """What becomes of the two ways to lose the place as the sink is learned better."""
    told = []
    for name in ("nop", "nop-long"):
        by_edit = {row["edit"]: row for row in result[name]["mean"]}
        plain_mse = by_edit["baseline"]["task_mse"]
        added = {edit: by_edit[edit]["task_mse"] - plain_mse for edit in ("ordinary", "route", "route_clamped")}
        told.append(
            f"after {result[name]['budget']['steps']:,} steps {added['ordinary'] / added['route']:.2f} times what the "
            f"exact route adds and {added['ordinary'] / added['route_clamped']:.1f} times what the clamped one adds"
        )
    printed = {edit: toy_paper.TABLE_2[edit]["task_mse"] for edit in ("baseline", "ordinary", "route_clamped")}
    paper = (printed["ordinary"] - printed["baseline"]) / (printed["route_clamped"] - printed["baseline"])
    return f"The error that an ordinary value adds: {', '.join(told)}; in the paper {paper:.1f} times."


def _uncentred(entry: dict[str, Any]) -> str:
    rows = [row for row in entry["by_seed"] if row["edit"] == "baseline"]
    errors = ", ".join(f"{row['task_mse']:.3f} (attention {row['attention_nop']:.2f})" for row in rows)
    held = entry["claims"]
    return (
        f"With directions v as the paper draws them, of which LayerNorm hides the part along (1, …, 1), the same "
        f"trainings end at task errors of {errors}, seed by seed, and {held['held']} of {held['checked']} claims hold: "
        "how good a sink can get depends on v there, whatever the budget, so the paper's one table is of one v. The "
        f"laptop budget takes that part out (`centred`):\n`{entry['command']}`"
    )


def _table_3(means: list[dict[str, Any]]) -> str:
    rows = []
    for row in means:
        layer, edit = row["layer"], row["edit"]
        if layer < 0 or edit in EDITS_3:
            printed = toy_paper.TABLE_3.get((layer, edit), {})
            where = "" if layer < 0 else f"layer {layer}, "
            cells = [_cell(row, name, printed.get(name)) for name in BROADCAST]
            rows.append([where + EDIT_NAME.get(edit, edit), *cells])
    return markdown(["edit", *BROADCAST.values()], rows)


def _arms(means: list[dict[str, Any]], printed: dict[str, dict[str, float]]) -> str:
    rows = [
        [arm_name(row["arm"]), *(_cell(row, name, printed.get(row["arm"], {}).get(name)) for name in PATHWAY)]
        for row in means
    ]
    return markdown(["arm", *PATHWAY.values()], rows)


def _sweeps(result: dict[str, Any]) -> str:
    """How soon sinks form along the frequency, and how strong they are along the damping."""
    frequency, damping = result["sweep-frequency"], result["sweep-damping"]
    parts = [budget_sentence(frequency["budget"], "frequency") + f" {len(frequency['seeds'])} seeds each:"]
    parts[0] += f"\n`{frequency['command']}`\n`{damping['command']}`"
    rows = []
    for point, mine in _by_point(frequency):
        steps = ", ".join("–" if row["half_step"] is None else f"{row['half_step']:.0f}" for row in mine)
        rows.append(
            [f"{point:.1f}", _mean(mine, "score"), steps, _mean(mine, "value_ratio"), _mean(mine, "sigma1_share")]
        )
    heads = ["sink score at the end", "steps to half of it, seed by seed", "value ratio of the sink", "share of σ₁²"]
    parts.append(markdown(["share p of NOP tokens", *heads], rows))
    medians = {point: _steps(mine) for point, mine in _by_point(frequency)}
    formed = {point: steps for point, steps in medians.items() if steps is not None}
    soonest = [f"{point:.1f}" for point, steps in formed.items() if steps == min(formed.values())]
    first, last = min(formed.values()), max(formed, key=lambda point: formed[point])
    parts.append(
        "In the paper sinks form soonest near p = 0.5. Here, by the medians of these steps, "
        f"at p = {', '.join(soonest)} ({first:.0f} steps), and last at p = {last:.1f} ({formed[last]:.0f}): "
        "with an empty token at hand the order is another."
    )
    rows = [
        [f"{point:g}", _mean(mine, "score"), _mean(mine, "value_ratio"), _mean(mine, "sigma1_share")]
        for point, mine in _by_point(damping)
    ]
    parts.append(markdown(["γ", heads[0], heads[2], heads[3]], rows))
    return "\n\n".join(parts)


def _steps(rows: Sequence[dict[str, Any]]) -> float | None:
    known = [row["half_step"] for row in rows if row["half_step"] is not None]
    return median(known) if known else None


def _by_point(entry: dict[str, Any]) -> list[tuple[float, list[dict[str, Any]]]]:
    points = sorted({row["point"] for row in entry["by_seed"]})
    return [(point, [row for row in entry["by_seed"] if row["point"] == point]) for point in points]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows]
    return with_error(fmean(values), stdev(values) / len(values) ** 0.5)


def _shrunk(update_rms: dict[str, float]) -> str:
    said = ", ".join(f"{arm_name(arm)} {value:.2g}" for arm, value in update_rms.items())
    return (
        f"Root mean square of layer 1's attention update: {said}. In the paper this penalty shrinks it to about "
        f"{toy_paper.E1_UPDATE_RMS:.0e}: the whole branch, not what its tokens share. It is there to be looked at, "
        "never a default."
    )
