"""The figures of a training's page with their words: how to read each, its counts, and its numbers as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sinklab.reports import training_effects as effects
from sinklab.reports import training_figures as figures
from sinklab.reports.captions import Drawn, drawn_twice
from sinklab.reports.sections import records
from sinklab.reports.wording import fixed, joined, number, plural

if TYPE_CHECKING:
    import pandas as pd


def draw_all(kind: str, saved: dict[str, pd.DataFrame], sweep: str | None, tokens: int) -> list[Drawn]:
    """A task's figures, what it is about first. saved: name → table of the run's tables/; tokens of a sequence."""
    drawn = []
    if kind == "nop":
        drawn.append(_nop(saved["table2"]))
    if kind == "broadcast":
        drawn += [_broadcast(saved["table3"]), _queries_and_keys(saved["qk_pca"]), _ranks(saved["stable_ranks"])]
    if kind == "pathway":
        drawn += [_pathway(saved["pathway"]), _ranks(saved["stable_ranks"])]
    if sweep is not None:
        drawn.append(_sweep(saved["curves"], sweep, tokens))
    spectrum = _spectrum(saved["spectrum_training"], saved["curves"], sweep)
    return [*drawn, spectrum, _curves(saved["curves"], sweep)]


def _nop(table: pd.DataFrame) -> Drawn:
    shown = table[table["edit"].isin(effects.EDITS)]
    means = {row["edit"]: row["delta_rms_nop"] for row in records(shown[shown["level"] == "mean"])}
    words = joined([f"{edit} {number(means[edit])}" for edit in effects.EDITS])
    return drawn_twice(
        "fig2-edits",
        lambda width: effects.draw_nop(shown, width),
        title="Editing a sink that holds nothing (Table 2)",
        reading="How far the output moves when the sink’s value becomes 0, another sequence’s, an ordinary token’s, or "
        "when nobody may attend to it. Of a sink that holds nothing, zero and donor take nothing away; an ordinary "
        "value, and losing the place, reach all NOP queries.",
        counts=_counts(table),
        alt=f"ΔRMS of the NOP queries by edit of the sink: {words}.",
        table=shown,
    )


def _broadcast(table: pd.DataFrame) -> Drawn:
    shown = table[(table["layer"] >= 0) & table["edit"].isin(effects.SOURCE_EDITS)]
    donors = shown[(shown["level"] == "mean") & (shown["edit"] == "donor")]
    words = joined([f"{number(row['donor_cosine'])} in layer {int(row['layer'])}" for row in records(donors)])
    return drawn_twice(
        "fig3-edits",
        lambda width: effects.draw_broadcast(shown, width),
        title="Editing the source of a broadcast (Table 3)",
        reading="How far the recipients’ output moves when the source’s value becomes 0, another sequence’s source’s, "
        "or an ordinary token’s; when an ordinary token’s value becomes 0 (control); when nobody may attend to the "
        "source; and without attention at all. The donor cosine says whether the donor’s payload arrives.",
        counts=_counts(table),
        alt=f"Cosine between the change by the donor’s value and the donor’s payload: {words}.",
        table=shown,
    )


def _pathway(table: pd.DataFrame) -> Drawn:
    rows = {row["arm"]: row for row in records(table[table["level"] == "mean"])}
    said = []
    for arm, row in rows.items():
        without = f"{number(row['delta_mse_without_attention'])} without attention"
        if row["delta_mse_without_global"] == row["delta_mse_without_global"]:  # not NaN: the arm has a pathway
            without += f", {number(row['delta_mse_without_global'])} without the pathway"
        said.append(f"{figures.arm_name(arm)} {without}")
    return drawn_twice(
        "fig7-pathway",
        lambda width: effects.draw_pathway(table, width),
        title="Where the broadcast goes (Fig. 7B)",
        reading="Left, the largest inflow of a layer’s attention. Middle, how much the error grows when the last "
        "layer’s attention or its global pathway is switched off. Right, whether another sequence’s payload arrives "
        "when its source’s value, or its state g, is put in. The claims say that a pathway alone leaves the sink in "
        "place, and that the penalty on what attention’s update has in common moves its work to g.",
        counts=_counts(table),
        alt=f"Growth of the error when the last layer loses a branch: {'; '.join(said)}.",
        table=table,
    )


def _queries_and_keys(table: pd.DataFrame) -> Drawn:
    seed, arm = table["seed"].iloc[0], table["arm"].iloc[0]
    shown = table[(table["seed"] == seed) & (table["arm"] == arm)]
    layers = shown.drop_duplicates("layer")
    shares = joined(
        [f"{row['explained_1'] + row['explained_2']:.0%} of layer {row['layer']}" for row in records(layers)]
    )
    return drawn_twice(
        "fig3-query-key",
        lambda width: effects.draw_queries_and_keys(table, width),
        title="Queries and keys (Fig. 3C)",
        reading="Queries and keys on the two directions in which they vary most together, layer by layer. Where a "
        "sink works, the keys of j*, the source, lie apart from the other keys, on the side to which all queries "
        "point.",
        counts=f"n = {plural(int(shown['sequence'].nunique()), 'sequence')} of seed {seed}; components of 256.",
        alt=f"Scatter of queries and keys; the two components hold {shares}’s variance.",
        table=shown,
    )


def _ranks(ranks: pd.DataFrame) -> Drawn:
    spread = effects.rank_spread(ranks)
    words = joined([f"layer {row['layer']} {figures.arm_name(row['arm'])} {fixed(row['q50'])}"
                    for row in records(spread)])  # fmt: skip
    return drawn_twice(
        "fig3-stable-rank",
        lambda width: effects.draw_ranks(spread, width),
        title="Stable rank of attention’s update (Fig. 3D)",
        reading="Median, middle half and 5th to 95th percentile over sequences. 1, the dashed line, is an update in "
        "which every token gets a multiple of one vector.",
        counts=f"n = {plural(int(spread['sequences'].iloc[0]), 'sequence')} a line, of "
        f"{plural(int(ranks['seed'].nunique()), 'seed')}.",
        alt=f"Median stable rank of attention’s update: {words}.",
        table=spread,
    )


def _sweep(curves: pd.DataFrame, sweep: str, tokens: int) -> Drawn:
    points, sign, ends = figures.sweep_points(curves), figures.SWEEP_SIGN[sweep], figures.sweep_ends(curves, tokens)
    means = {row["arm"]: row for row in records(ends.groupby("arm")[["score", "half_step"]].mean().reset_index())}
    said = []
    for arm, point in points.items():
        half, after = means[arm]["half_step"], ""
        if sweep == "frequency":
            after = ", no sink formed" if math.isnan(half) else f", half of it after {plural(round(half), 'step')}"
        said.append(f"{number(means[arm]['score'])} at {sign} = {point:.3g}{after}")
    what = {
        "frequency": "p is the share of tokens that are to be left alone; at the end a formed sink’s score grows with "
        "p, for so many queries go to the sink. What differs is how soon: the right panel has the first step with half "
        "of the final score, for points at which a sink formed: a last score of "
        f"{number(figures.FORMED / tokens)} or more, twice what a token has where all are attended to alike.",
        "damping": "γ is what remains of the update that flagged tokens are to get: 0 asks for none, 1 for all. The "
        "more is to remain, the weaker the sink.",
    }[sweep]
    return drawn_twice(
        "fig11-sink-score",
        lambda width: figures.draw_sweep(curves, sweep, tokens, width),
        title=f"Sinks along the {sweep} of NOP tokens (Fig. 11)",
        reading=f"The largest attention that one position receives, averaged over queries and sequences. {what}",
        counts=f"n = {plural(len(points), 'point')}, {plural(int(curves['seed'].nunique()), 'seed')} each"
        f"{_means(curves)}.",
        alt=f"Sink score at the end: {'; '.join(said)}.",
        table=curves[["step", "seed", "arm", "point", "sink_0"]].dropna(subset=["sink_0"]),
    )


def _spectrum(spectrum: pd.DataFrame, curves: pd.DataFrame, sweep: str | None) -> Drawn:
    points, sign = figures.sweep_points(curves), figures.SWEEP_SIGN.get(sweep or "", "")
    first = figures.over_seeds(spectrum[spectrum["rank"] == 1], ["arm", "layer"], "share")
    layers = spectrum["layer"].nunique()
    said = []
    for row in records(first):
        arm, layer, share = row["arm"], row["layer"], row["share"]
        name = f"{sign} = {points[arm]:.3g}" if points else figures.arm_name(arm)
        said.append(name + (f", layer {layer}, " if layers > 1 else " ") + number(float(share)))
    return drawn_twice(
        "fig2-spectrum",
        lambda width: figures.draw_spectrum(spectrum, points, sign, width),
        title="Spectrum of Θ = W_Q W_Kᵀ (Fig. 2B)",
        reading="Singular values in falling order. A sink that one direction of the stream decides leaves one of them "
        "standing out; attention that routes nothing has none that does.",
        counts=f"n = {plural(int(spectrum['seed'].nunique()), 'seed')}{_means(spectrum)}.",
        alt=f"Share of the first singular value, σ₁² / Σσ²: {'; '.join(said)}.",
        table=spectrum,
    )


def _curves(curves: pd.DataFrame, sweep: str | None) -> Drawn:
    ends = curves.dropna(subset=["loss"]).sort_values("step").groupby("arm", sort=False)["loss"]
    rows: dict[Any, Any] = {arm: values.iloc[-1] for arm, values in ends}
    words = joined([f"{figures.arm_name(arm)} {number(float(loss))}" for arm, loss in rows.items()])
    return drawn_twice(
        "training-curves",
        lambda width: figures.draw_curves(curves, sweep, width),
        title="Loss and sink scores while training",
        reading="The task’s loss on the batch of the step, and the largest attention that one token receives, on "
        "fresh sequences.",
        counts=f"n = {plural(int(curves['seed'].nunique()), 'seed')}{_means(curves)}.",
        alt=f"Loss of the task at the end: {words}. {_score_words(curves)}",
        table=curves,
    )


def _score_words(curves: pd.DataFrame) -> str:
    """ "Sink score at the end: NOP head 0.5." """
    names = sorted(str(name) for name in curves if str(name).startswith("sink_"))
    last = curves.dropna(subset=names).sort_values("step").groupby(["arm", "seed"], sort=False)[names].last()
    said = []
    for row in records(last.groupby("arm", sort=False).mean().reset_index()):
        layers = joined([number(row[name]) for name in names])
        said.append(f"{figures.arm_name(row['arm'])} {layers}")
    where = " (layer by layer)" if len(names) > 1 else ""
    return f"Sink score at the end{where}: {'; '.join(said)}."


def _means(table: pd.DataFrame) -> str:
    return "; lines are means over seeds, thin ones the seeds" if table["seed"].nunique() > 1 else ""


def _counts(table: pd.DataFrame) -> str:
    seeds = int(table["seeds"].max())
    over = "bars are means with their standard errors, dots the seeds" if seeds > 1 else "bars are its means"
    return f"n = {plural(seeds, 'seed')}; {over}."
