"""From finished effects to the tables and the words that a report needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinklab.device import device_name
from sinklab.interventions.checks import TOLERANCE
from sinklab.interventions.experiment import cost
from sinklab.interventions.measure import POSITIONS
from sinklab.interventions.summary import summarise_effects
from sinklab.interventions.task import task_of, task_table
from sinklab.interventions.verdict import FEW
from sinklab.settings import utc_now

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.interventions.choose import Choice
    from sinklab.interventions.design import Design
    from sinklab.interventions.experiment import Experiment


def write_results(
    experiment: Experiment, choice: Choice, design: Design, null_edits: Mapping[int, int], seconds: float
) -> None:
    """Tables and run.json from the finished effects; by rank 0 alone."""
    import torch

    run, o = experiment.run, experiment.options
    kept = (run.config["patch"].get("checks") or {}) if not null_edits else {}  # nothing was left to be measured
    effects, away = experiment.effects(), experiment.held_out()
    images = int(run.heads["image"].nunique())
    least = FEW if images < o.min_events_analysis else o.min_events_analysis
    notes = _notes(experiment, choice, design, effects, images)
    table, verdicts = summarise_effects(
        effects, min_images=least, draws=o.bootstrap, seed=o.seed, noun=experiment.images.noun
    )
    run.write_table("tables/effects.csv", table)
    run.write_table("tables/causal_verdicts.csv", verdicts)
    task = task_of(experiment.model)
    if task is not None and o.plan is None:
        run.write_table("tables/task_effects.csv", task_table(effects, task))
    if POSITIONS in effects:
        run.write_table("tables/position_effects.csv", position_table(effects))
    values = experiment.values()
    per_head = effects[effects["joint"] == 0].groupby(["class", "layer", "head"])["image"].nunique()
    kind = torch.bfloat16 if run.config["dtype"] == "bfloat16" else experiment.model.dtype
    counts = cost(design, len(experiment.model.sites), o.rows)
    about = {
        "status": "complete",
        "finished": utc_now(),
        "edits": list(o.edits),
        "classes": list(o.classes),
        "definition": experiment.definition,
        "heads": [
            {
                "class": head.kind,
                "layer": head.layer,
                "head": head.head,
                "events": head.events,
                "edited_images": int(per_head.get((head.kind, head.layer, head.head), 0)),
                "heldout_images": values.counts.get((head.layer, head.head), 0),
            }
            for head in choice.heads
        ],
        "min_events": o.min_events,
        "min_events_used": choice.min_events,
        "min_events_analysis": least,
        "notes": notes,
        "images": {
            "edited": int(effects["image"].nunique()),
            "heldout": len(away) if experiment.folder is None else len(experiment.folder),
            "donors": int(effects["donor"].nunique()),
            "rows": len(effects),
        },
        "heldout": {"sentence": _held_out(experiment, away, images), "images": away},
        "checks": {
            "null_edits": len(null_edits) or kept.get("null_edits", 0),  # one batch a layer, on every rank
            "null_layers": sorted(null_edits) or kept.get("null_layers", []),
            "null_bit_identical": True,
            "identity_error_max": float(effects["identity_error"].max()),
            "identity_tolerance": TOLERANCE[kind],
            "prefix_error_max": float(effects["prefix_error"].max()),
            "kept_queries": int(effects["kept_queries"].sum()),
        },
        "bootstrap": o.bootstrap,
        "seed": o.seed,
        "device": device_name(experiment.model.device),
        "dtype": run.config["dtype"],
        "timings": {**counts, "seconds": round(seconds, 3)} if null_edits else run.config["patch"].get("timings", {}),
    }
    run.update(patch={**run.config["patch"], **about})


def position_table(effects: pd.DataFrame) -> pd.DataFrame:
    """tables/position_effects.csv: mean change of the loss at each position, over the sequences a head was edited in.

    Columns layer, head, class, edit, position (of the token that is read; the next one is predicted), loss_change in
    nats, sem, sequences.
    """
    import numpy as np
    import pandas as pd

    found = []
    single = effects[(effects["joint"] == 0) & effects[POSITIONS].notna()]
    for key, own in single.groupby(["layer", "head", "class", "edit"], sort=True):
        changes = np.stack(own[POSITIONS].to_list()).astype("float64")  # [n N−1]
        spread = changes.std(axis=0, ddof=1) / len(own) ** 0.5 if len(own) > 1 else np.full(changes.shape[1], np.nan)
        about = dict(zip(("layer", "head", "class", "edit"), key, strict=True))
        numbers = {"position": range(changes.shape[1]), "loss_change": changes.mean(0), "sem": spread}
        found.append(pd.DataFrame(about | numbers | {"sequences": len(own)}))
    names = ["layer", "head", "class", "edit", "position", "loss_change", "sem", "sequences"]
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=names)


def _same_everywhere(effects: Any, noun: str) -> list[str]:
    """A note on heads whose sink has one and the same value in every image: swapping it says nothing there."""
    own = effects[(effects["joint"] == 0) & effects["edit"].isin(["donor", "mean"])]
    largest = own.groupby(["layer", "head"])["patch_change"].max()
    heads = [f"L{layer}H{head}" for (layer, head), change in largest.items() if change == 0]
    if not heads:
        return []
    verb = "Heads" if len(heads) > 1 else "Head"
    return [
        f"{verb} {', '.join(heads)}: the sink's value is the same in every {noun}, so a donor's and the mean change "
        "nothing there, whatever the sink does."
    ]


def _notes(experiment: Experiment, choice: Choice, design: Design, effects: pd.DataFrame, images: int) -> list[str]:
    """What is worth knowing beside the numbers; a plan is given no verdict, so nothing is said about one."""
    noun = experiment.images.noun
    o, notes = experiment.options, [*choice.notes, *design.notes]
    if o.plan is None and images < o.min_events_analysis:
        notes.append(
            f"With {images} {noun}s a head is judged from {FEW} edited {noun}s on, not from {o.min_events_analysis}."
        )
    notes += _same_everywhere(effects, noun)
    if o.labels:
        known = len(set(o.labels) & set(effects["image"]))
        notes.append(f"{known} of {effects['image'].nunique()} edited {noun}s have a label.")
    return notes


def _held_out(experiment: Experiment, away: Sequence[str], images: int) -> str:
    """Where the mean values come from."""
    noun = experiment.images.noun
    if experiment.folder is not None:
        return f"Mean values come from {len(experiment.folder)} images of a folder of their own."
    if away:
        return f"Mean values come from {len(away)} of {images} {noun}s, drawn by the seed and not edited."
    return f"No {noun}s were held out, as no mean was asked for."
