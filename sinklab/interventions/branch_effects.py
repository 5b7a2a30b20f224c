"""Branch edits on a diagnosed run: what each branch of each layer does, in a model with a global pathway and in
sinklab's own vision transformers without one, so that attention's part in either can be set side by side.

Every edit of `interventions.branch` in one layer at a time, on up to IMAGES of the run's inputs, drawn by the seed; the
donor of an input is another of the run's, as in the experiment on heads. One process does it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from sinklab.errors import NotFoundError, NothingToEdit
from sinklab.interventions.branch import find_pathways, measure_branches
from sinklab.interventions.draw import donors, shuffled
from sinklab.settings import asked_dtype, fingerprint

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.handle import Model
    from sinklab.interventions.choose import Choice
    from sinklab.interventions.experiment import Experiment

IMAGES = 64
TOGETHER = 8
"""Inputs of one forward; fixed, so that which ones run together follows from the draw alone."""
MEASURES = ("patch_change", "shared_energy", "donor_cosine")
TABLE = "tables/branch_effects.csv"


def has_pathway(model: Model) -> bool:
    """Whether any layer has a global pathway."""
    try:
        return bool(find_pathways(model))
    except NotFoundError:
        return False


def has_branches(model: Model) -> bool:
    """Whether the branches of a model are edited: it has a pathway, or is a vision transformer beside such models."""
    return model.provenance.family == "vit" or has_pathway(model)


def choice_or_branches(experiment: Experiment) -> Choice | None:
    """The heads to edit; None, with a warning, where there are none but branches. NotFoundError where neither."""
    try:
        return experiment.choice()
    except NothingToEdit as error:
        if experiment.options.heads is not None or not has_branches(experiment.model):
            raise
        warnings.warn(f"No head is edited, only the branches: {error}", stacklevel=3)
        return None


def write_branch_effects(experiment: Experiment, *, again: bool = False) -> bool:
    """`tables/branch_effects.csv`, and what run.json says of it under "branches"; whether there is such a table.

    A table of the same settings is left as it is, unless `again`. A model that `has_branches` denies, or a run of one
    input, has none.
    """
    run, model, seed = experiment.run, experiment.model, experiment.options.seed
    ids = list(dict.fromkeys(run.heads["image"]))
    if len(ids) < 2 or not has_branches(model):
        return False
    settings = {"run": run.config["fingerprint"], "seed": seed, "images": IMAGES, "together": TOGETHER}
    about = run.config.get("branches") or {}
    if not again and about.get("fingerprint") == fingerprint(settings) and (run.path / TABLE).is_file():
        return True
    rows = branch_rows(experiment, ids)
    run.write_table(TABLE, branch_table(rows))
    noun, count = experiment.images.noun, int(rows["image"].nunique())
    chosen = (
        f"{count} of the run's {len(ids)} {noun}s, drawn by the seed" if count < len(ids) else f"all {count} {noun}s"
    )
    run.update(
        branches={
            "fingerprint": fingerprint(settings),
            "settings": settings,
            "images": count,
            "sentence": f"One layer's branch at a time, on {chosen}; a donor is another {noun} of the run.",
        }
    )
    return True


def branch_rows(experiment: Experiment, ids: list[str]) -> pd.DataFrame:
    """One row a (layer, edit, image) with MEASURES."""
    import pandas as pd
    import torch

    from sinklab.sinks.scan import as_input, precision

    seed, view = experiment.options.seed, experiment.transform
    refs = {ref.id: ref for ref in experiment.images}
    donor_of = donors(ids, seed)
    chosen = sorted(shuffled(ids, seed, "branches")[:IMAGES], key=ids.index)

    def shown(names: list[str]) -> Any:
        return as_input(experiment.model, torch.stack([view.of(refs[name].content(), name) for name in names]))

    found = []
    with precision(asked_dtype(experiment.run.config), experiment.model.device):
        for first in range(0, len(chosen), TOGETHER):
            some = chosen[first : first + TOGETHER]
            table = measure_branches(experiment.model, shown(some), shown([donor_of[name] for name in some]))
            found.append(table.assign(image=[some[row] for row in table["input"]]))
    return pd.concat(found, ignore_index=True)[["layer", "edit", "image", *MEASURES]]


def branch_table(rows: pd.DataFrame) -> pd.DataFrame:
    """layer, edit, measure, mean, sem (of the mean over images; NaN for one), images (those with a number)."""
    long = rows.melt(["layer", "edit", "image"], list(MEASURES), "measure", "value").dropna(subset="value")
    groups = long.groupby(["layer", "edit", "measure"], sort=False)["value"]
    table = groups.agg(mean="mean", sem="sem", images="count").reset_index()
    order = {name: place for place, name in enumerate(MEASURES)}
    edits = {name: place for place, name in enumerate(dict.fromkeys(rows["edit"]))}
    keys = table.assign(edit=table["edit"].map(edits), measure=table["measure"].map(order))
    return table.loc[keys.sort_values(["layer", "edit", "measure"]).index].reset_index(drop=True)
