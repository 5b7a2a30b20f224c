"""Figures of what a trained controlled model does: Tables 2 and 3 as bars, Figs. 3C, 3D and 7B.

Every function takes a table that the training saved and a width in inches, and returns a matplotlib Figure. Bars are
means over seeds with their standard errors; dots are the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklab.reports import drawing
from sinklab.reports.palette import CLASS_COLOUR, INK, MUTED, PAPER, QUIET
from sinklab.reports.tables import each_row
from sinklab.reports.training_figures import ARM_COLOUR, arm_name
from sinklab.reports.wording import number

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EDITS = ("zero", "donor", "ordinary", "route")
SOURCE_EDITS = ("zero", "donor", "ordinary", "zero_ordinary", "route", "attention_off")
SHORT = {"zero_ordinary": "control", "attention_off": "attn off"}


def draw_nop(table: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Table 2: how far each edit of the sink moves NOP and active queries. table: tables/table2.csv."""
    groups = (("nop", "NOP queries", CLASS_COLOUR["nop"]), ("active", "active queries", CLASS_COLOUR["intermediate"]))
    with drawing.paper(width, 3.2) as figure:
        axes = figure.subplots()
        for place, (name, words, colour) in enumerate(groups):
            at = [edit + 0.39 * (place - 0.5) for edit in range(len(EDITS))]
            _bars(axes, table, "edit", EDITS, f"delta_rms_{name}", at, 0.36, [colour] * len(EDITS), words)
        axes.set_xticks(range(len(EDITS)), list(EDITS))
        axes.tick_params(axis="x", length=0)
        axes.set(title="ΔRMS of the output", ylim=(0, None))
        axes.grid(axis="y")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def draw_broadcast(table: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Table 3: how far each edit of the source moves the output, and the donor's cosine. table: tables/table3.csv."""
    layers = sorted(int(layer) for layer in table["layer"].unique() if layer >= 0)
    narrow, colour = drawing.is_narrow(width), CLASS_COLOUR["broadcast"]
    lines = drawing.panel_rows(len(layers), width, 3)
    with drawing.paper(width, 0.3 + (2.3 if narrow else 3.0) * lines) as figure:
        drawn = drawing.panels(figure, len(layers), lines)
        for layer, axes in zip(layers, drawn, strict=True):
            rows = table[table["layer"] == layer]
            edits = [edit for edit in SOURCE_EDITS if edit in set(rows["edit"])]
            places = range(len(edits))
            colours = [colour if edit != "zero_ordinary" else QUIET for edit in edits]
            _bars(axes, rows, "edit", edits, "delta_rms", list(places), 0.7, colours, "")
            donor = rows[(rows["level"] == "mean") & (rows["edit"] == "donor")]["donor_cosine"].iloc[0]
            axes.set_xticks(places, [SHORT.get(edit, edit) for edit in edits], fontsize=7.5)
            axes.tick_params(axis="x", length=0)
            axes.set_title(f"ΔRMS, layer {layer} (donor cosine {number(float(donor))})")
            axes.set_ylim(bottom=0)
            axes.grid(axis="y")
    return figure


def draw_queries_and_keys(table: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Fig. 3C: queries and keys on their two first principal components, j* marked. table: tables/qk_pca.csv."""
    first = table[(table["seed"] == table["seed"].iloc[0]) & (table["arm"] == table["arm"].iloc[0])]
    layers = sorted(int(layer) for layer in first["layer"].unique())
    narrow = drawing.is_narrow(width)
    lines = drawing.panel_rows(len(layers), width, 3)
    with drawing.paper(width, 0.5 + (3.1 if narrow else 3.6) * lines) as figure:
        for layer, axes in zip(layers, drawing.panels(figure, len(layers), lines), strict=True):
            rows = first[first["layer"] == layer]
            keys = rows["role"] == "key"
            source = rows["source"].astype(bool)
            styles: list[tuple[Any, dict[str, Any]]] = [
                (~keys, {"s": 7, "color": QUIET, "marker": "o", "label": "query"}),
                (keys & ~source, {"s": 9, "color": MUTED, "marker": "x", "linewidths": 0.7, "label": "key"}),
                (keys & source, {"s": 34, "color": CLASS_COLOUR["broadcast"], "marker": "D", "edgecolors": INK,
                                 "linewidths": 0.7, "label": "key of j*"}),
            ]  # fmt: skip
            for chosen, style in styles:
                axes.scatter(rows[chosen]["pc_1"], rows[chosen]["pc_2"], **style)
            shares = rows.iloc[0]
            axes.set_title(f"Layer {layer}")
            axes.set_xlabel(f"component 1 ({shares['explained_1']:.0%} of the variance)")
            axes.set_ylabel(f"component 2 ({shares['explained_2']:.0%})")
            axes.axhline(0, color=QUIET, linewidth=0.5, zorder=0)
            axes.axvline(0, color=QUIET, linewidth=0.5, zorder=0)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure


def rank_spread(ranks: pd.DataFrame) -> pd.DataFrame:
    """One row per (arm, layer): quantiles of the stable rank over sequences and seeds. ranks: stable_ranks.csv."""
    import pandas as pd

    parts = ranks.groupby(["arm", "layer"], sort=False)["stable_rank"]
    shares = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}
    quantiles = pd.DataFrame({name: parts.quantile(share) for name, share in shares.items()})
    table = quantiles.join(parts.size().rename("sequences")).reset_index()
    order = {arm: place for place, arm in enumerate(dict.fromkeys(ranks["arm"]))}
    return table.sort_values(["layer", "arm"], key=lambda one: one.map(order) if one.name == "arm" else one)


def draw_ranks(spread: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Fig. 3D: the stable rank of attention's update, by layer and arm. spread: `rank_spread`."""
    rows = list(each_row(spread))
    with drawing.paper(width, 0.9 + 0.3 * len(rows)) as figure:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            colour = ARM_COLOUR.get(str(row.arm), INK)
            axes.hlines(place, row.q05, row.q95, color=colour, linewidth=1)
            axes.hlines(place, row.q25, row.q75, color=colour, linewidth=5)
            axes.plot(row.q50, place, marker="o", color=PAPER, markeredgecolor=INK, markersize=5, markeredgewidth=0.8)
        axes.axvline(1, color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        several = spread["arm"].nunique() > 1
        names = [f"layer {row.layer}" + (f", {arm_name(row.arm)}" if several else "") for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.tick_params(axis="y", length=0)
        axes.set(
            ylim=(len(rows) - 0.4, -0.6),
            xlabel="stable rank of attention’s update",
            xlim=(0.95, max(1.3, 1.03 * float(spread["q95"].max()))),
        )
        axes.grid(axis="x")
    return figure


def draw_pathway(table: pd.DataFrame, width: float = drawing.WIDE) -> Figure:
    """Fig. 7B: inflow, error without a branch, and the donor's cosine, arm by arm. table: tables/pathway.csv."""
    layers = sorted(str(name) for name in table if str(name).startswith("inflow_") and not str(name).endswith("_sem"))
    last = int(layers[-1].removeprefix("inflow_"))
    panels = [
        ("Attention’s largest inflow", [(name, f"layer {name.removeprefix('inflow_')}") for name in layers]),
        (f"ΔMSE without, in layer {last}", [(f"delta_mse_without_{name}", name) for name in ("attention", "global")]),
        (f"Donor cosine, layer {last}", [("donor_cosine_sink", "via the sink"), ("donor_cosine_global", "via g")]),
    ]
    arms, narrow = list(dict.fromkeys(table["arm"])), drawing.is_narrow(width)
    with drawing.paper(width, 7.0 if narrow else 3.4) as figure:
        lines = drawing.panel_rows(len(panels), width, len(panels))
        for (title, columns), axes in zip(panels, drawing.panels(figure, len(panels), lines), strict=True):
            wide = 0.8 / len(arms)
            for place, arm in enumerate(arms):
                for group, (column, _) in enumerate(columns):
                    at = group + wide * (place - (len(arms) - 1) / 2)
                    label = arm_name(arm) if not group else ""
                    colour = ARM_COLOUR.get(arm, INK)
                    _bars(axes, table, "arm", [arm], column, [at], 0.9 * wide, [colour], label)
            axes.set_xticks(range(len(columns)), [words for _, words in columns])
            axes.tick_params(axis="x", length=0)
            axes.set_title(title)
            axes.axhline(0, color=MUTED, linewidth=0.7)
            axes.grid(axis="y")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=1 if narrow else 5)
    return figure


def _bars(
    axes: Axes,
    table: pd.DataFrame,
    key: str,
    names: Sequence[str],
    value: str,
    at: Sequence[float],
    wide: float,
    colours: Sequence[str],
    label: str,
) -> None:
    """A bar a name at `at`, its standard error over seeds, and a dot a seed; what is not defined is left out."""
    for place, name, colour in zip(at, names, colours, strict=True):
        mine = table[table[key] == name]
        mean = mine[mine["level"] == "mean"]
        if not len(mean) or mean[value].isna().all():
            continue
        height, error = float(mean[value].iloc[0]), float(mean[f"{value}_sem"].iloc[0])
        axes.bar(place, height, wide, color=colour, alpha=0.65, label=label, zorder=2)
        label = ""  # once in the legend
        seeds = mine[mine["level"] == "seed"][value].dropna()
        if len(seeds) > 1:
            axes.vlines(place, height - error, height + error, color=INK, linewidth=1.3, zorder=4)
            axes.plot([place + min(0.1, wide / 4)] * len(seeds), seeds, linestyle="none", marker="o", markersize=3,
                      color=colour, markeredgecolor=INK, markeredgewidth=0.5, zorder=3)  # fmt: skip
