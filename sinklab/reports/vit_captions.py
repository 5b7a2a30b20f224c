"""The figures of a vision transformer training with their words: how to read each, its counts, its numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sinklab.reports import vit_figures as figures
from sinklab.reports.captions import Drawn, drawn_twice
from sinklab.reports.palette import CLASS_NAME, CLASSES
from sinklab.reports.wording import fixed, joined, number, percent, plural
from sinklab.training.vit_tables import EVENTS, PER_LAYER, TERMS

if TYPE_CHECKING:
    import pandas as pd

WHO = ["member", "seed", "config"]


def draw_all(
    saved: Mapping[str, pd.DataFrame], ends: pd.DataFrame, alike: Mapping[str, float], chance: float | None
) -> list[Drawn]:
    """The figures of a page. saved: name → table of `vit_tables`; ends: `ends_table` with a column `pathway`.

    alike: VARIANT-SIZE → inflow where all tokens get alike; chance: accuracy of guessing, None where it is not known.
    """
    curves, validation, layers = saved["curves"], saved["validation"], saved["layers"]
    configs = list(dict.fromkeys(str(name) for name in saved["members"]["config"]))
    drawn = []
    if validation["probe_accuracy"].notna().any():
        drawn.append(_validation(validation, configs, chance))
    if curves["total"].notna().any():
        drawn.append(_losses(curves, configs))
    if curves["common_mode"].notna().any() or len(ends):
        drawn.append(_common_mode(ends, curves, configs))
    if layers["common_mode"].notna().any():
        drawn.append(_common_mode_layers(layers, configs))
    if layers["max_inflow"].notna().any():
        drawn.append(_inflow(layers, configs, alike))
    if curves[list(EVENTS)].notna().any(axis=None):
        drawn.append(_events(curves, configs))
    return drawn


def last_means(table: pd.DataFrame, x: str, column: str, configs: Sequence[str]) -> dict[str, float]:
    """Variant → its mean over seeds at the last x that all its seeds have."""
    found = {}
    for name in configs:
        line = figures.mean_line(table[table["config"] == name], x, column)
        if len(line):
            found[name] = float(line[column].iloc[-1])
    return found


def _losses(curves: pd.DataFrame, configs: Sequence[str]) -> Drawn:
    names = [name for name in TERMS if curves[name].notna().any()]
    said = [f"{name} {number(value, 3)}" for name, value in last_means(curves, "step", "total", configs).items()]
    penalty = (
        " The penalty is attention’s mean common-mode share in the penalised blocks (Eq. 5); only the variants that "
        "have one are in its panel."
        if "penalty" in names
        else ""
    )
    return drawn_twice(
        "vit-losses",
        lambda width: figures.draw_losses(curves, figures.variant_styles(configs), width),
        title="The loss and what it consists of",
        reading="Of the batch of the step. The total is what is minimised: λ times SIGReg, 1 − λ times the invariance, "
        "the probe’s cross-entropy, and the penalty times its own weight where there is one. Totals of variants with "
        f"and without a penalty are sums of different things.{penalty}",
        counts=_counts(curves, "step"),
        alt=f"Total loss at the end: {'; '.join(said)}.",
        table=curves[[*WHO, "step", *names]].dropna(subset=names, how="all"),
    )


def _validation(validation: pd.DataFrame, configs: Sequence[str], chance: float | None) -> Drawn:
    ends = last_means(validation, "epoch", "probe_accuracy", configs)
    best = validation.groupby(["config", "epoch"])["probe_accuracy"].mean().groupby("config").max()
    said = [f"{name} {percent(value)} (best epoch {percent(float(best[name]))})" for name, value in ends.items()]
    guess = f" Guessing has {percent(chance)}." if chance is not None else ""
    images = sorted({int(each) for each in validation["images"].dropna()})
    return drawn_twice(
        "vit-validation",
        lambda width: figures.draw_validation(validation, figures.variant_styles(configs), chance, width),
        title="What the online probe gets right, epoch by epoch",
        reading="The probe is a linear map of the [CLS] token, trained beside the network without touching it; it is "
        f"scored on centre crops of {' or '.join(f'{each:,}' for each in images)} validation images.{guess}",
        counts=_counts(validation, "epoch"),
        alt=f"Accuracy of the probe at the end: {'; '.join(said)}.",
        table=validation,
    )


def _common_mode(ends: pd.DataFrame, curves: pd.DataFrame, configs: Sequence[str]) -> Drawn:
    import pandas as pd

    final = ends[ends["layer"] > 0].groupby(["config", "member"], sort=False)[["common_mode", "pathway"]].mean()
    means = final.groupby("config", sort=False).mean()
    said = [f"{name} {fixed(float(row['common_mode']))}"
            + (f", its pathway {fixed(float(row['pathway']))}" if row["pathway"] == row["pathway"] else "")
            for name, row in means.iterrows()]  # fmt: skip
    dotted = (
        " Dotted is the share of the pathway’s own update, on the images of the diagnosis."
        if ends["pathway"].notna().any()
        else ""
    )
    left = (
        f"Left, or above, each block at the end, on all validation images.{dotted} Right, or below, as training goes on"
        if len(ends)
        else "As training goes on"
    )
    both = [
        ends.assign(panel="end")[["panel", *WHO, "layer", "common_mode", "pathway"]],
        curves.dropna(subset=["common_mode"]).assign(panel="training")[["panel", *WHO, "step", "common_mode"]],
    ]
    return drawn_twice(
        "vit-common-mode",
        lambda width: figures.draw_common_mode(ends, curves, figures.variant_styles(configs), width),
        title="How much of attention’s update all tokens have in common",
        reading="E(ō²) / E(o²) of what attention adds, 1 where every token gets one vector, as a broadcast sink "
        f"makes it (Eq. 5). {left}, the mean of blocks from 1 on, on the few validation images that are scored "
        "then.",
        counts=_counts(curves.dropna(subset=["common_mode"]), "step"),
        alt=f"Mean common-mode share of blocks from 1 on at the end: {'; '.join(said) or 'no training is finished'}.",
        table=pd.concat([part for part in both if len(part)], ignore_index=True).reindex(
            columns=["panel", *WHO, "layer", "step", "common_mode", "pathway"]
        ),
    )


def _common_mode_layers(layers: pd.DataFrame, configs: Sequence[str]) -> Drawn:
    return drawn_twice(
        "vit-common-mode-layers",
        lambda width: figures.draw_layers(layers, "common_mode", configs, {}, width),
        title="Common-mode share of every block, as training goes on",
        reading="A panel a variant, a line a block, from the first to the last along the colours. Where an output gate "
        "stands, the share is of the update behind it; without the gate it is in the numbers, as common_mode_ungated.",
        counts=_counts(layers, "step", thin=False),
        alt=f"Common-mode share at the end, lowest and highest block: {_extremes(layers, 'common_mode', configs)}.",
        table=layers[[*WHO, "step", "layer", *PER_LAYER[:2]]],
    )


def _inflow(layers: pd.DataFrame, configs: Sequence[str], alike: Mapping[str, float]) -> Drawn:
    same = sorted({fixed(alike[name], 3) for name in configs if name in alike})
    return drawn_twice(
        "vit-inflow-layers",
        lambda width: figures.draw_layers(layers, "max_inflow", configs, alike, width),
        title="Largest mean inflow of every block, as training goes on",
        reading="Of the block’s heads the one whose dominant key draws most attention, averaged over queries and over "
        "the images that are scored. Near 1 a head sends all its attention to one token; the dashed line, "
        f"{' or '.join(same)}, is where all tokens get alike.",
        counts=_counts(layers, "step", thin=False),
        alt=f"Largest mean inflow at the end, lowest and highest block: {_extremes(layers, 'max_inflow', configs)}.",
        table=layers[[*WHO, "step", "layer", "max_inflow"]],
    )


def _events(curves: pd.DataFrame, configs: Sequence[str]) -> Drawn:
    names = list(EVENTS)
    shown = curves.dropna(subset=names, how="all")
    said = []
    for rule in ("relaxed", "strict"):
        ends = {name: last_means(shown, "step", f"{rule}_{name}", configs) for name in CLASSES}
        own = [
            f"{config} {joined([f'{number(ends[name][config])} {CLASS_NAME[name]}' for name in CLASSES])}"
            for config in configs
            if all(config in each for each in ends.values()) and any(ends[name][config] for name in CLASSES)
        ]
        said.append(f"{rule} rule: {'; '.join(own) or 'none'}")
    never = "" if (shown[names] > 0).any(axis=None) else " No model had an event at any time."
    return drawn_twice(
        "vit-sink-events",
        lambda width: figures.draw_events(curves, figures.variant_styles(configs), width),
        title="Sink events an image, as training goes on",
        reading="How many heads of blocks from 1 on are sunk in an image, by class (definition “causal”): relaxed, "
        "where at least 0.9 of the queries give the sink half of their attention or more; strict, where all do."
        + never,
        counts=_counts(shown, "step"),
        alt=f"Sink events an image at the end. {'. '.join(said)}.",
        table=shown[[*WHO, "step", *names]],
    )


def _extremes(layers: pd.DataFrame, column: str, configs: Sequence[str]) -> str:
    """ "baseline-tiny 0.84 (block 0) and 0.99 (block 5); …"."""
    said = []
    for name in configs:
        mine = layers[layers["config"] == name]
        blocks = sorted(int(layer) for layer in mine["layer"].unique())
        means = {layer: last_means(mine[mine["layer"] == layer], "step", column, [name]) for layer in blocks}
        ends = {layer: found[name] for layer, found in means.items() if name in found}
        if ends:
            low, high = min(ends, key=lambda layer: ends[layer]), max(ends, key=lambda layer: ends[layer])
            said.append(f"{name} {fixed(ends[low], 3)} (block {low}) and {fixed(ends[high], 3)} (block {high})")
    return "; ".join(said)


def _counts(table: pd.DataFrame, x: str, *, thin: bool = True) -> str:
    seeds, each = int(table["seed"].nunique()), table.groupby("member")[x].nunique()
    means = f"; lines are means over seeds{', thin ones the seeds' if thin else ''}" if seeds > 1 else ""
    most = int(each.max()) if len(each) else 0
    drawn = (
        f" Of {most:,} numbers a line, {figures.MOST_POINTS} means of neighbours are drawn; the CSV has all."
        if most > figures.MOST_POINTS
        else ""
    )
    return f"n = {plural(seeds, 'seed')}{means}.{drawn}"
