"""A controlled task's own measures of an edit, row by row, and as the tables of the paper give them.

Letters: R rows, N tokens, C model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.data.toy import task_from
from sinklab.data.toy_effects import ERRORS, columns_of, groups_of, task_effects
from sinklab.data.toy_sequences import SIZE

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from sinklab.data.toy import ToyTask
    from sinklab.handle import Model

KEYS = ["layer", "head", "class", "edit"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskEffects:
    """Measures rows of edits by the task that their model was trained on."""

    task: ToyTask
    read: Callable[[int], Tensor]
    """image_index → that sequence [N C], for the donors."""

    @property
    def columns(self) -> tuple[str, ...]:
        """What `measure` gives."""
        return columns_of(self.task)

    def measure(self, rows: pd.DataFrame, x: Tensor, before: Tensor, after: Tensor) -> dict[str, Tensor]:
        """Column → [R], for rows with inputs and outputs [R N C]."""
        import torch

        donors = rows["donor_index"].to_numpy()
        read = {index: self.read(int(index)) for index in set(donors) if index >= 0}
        donor = torch.stack([read[index].to(x) if index >= 0 else x[i] for i, index in enumerate(donors)])
        return task_effects(self.task, x, donor, before, after)


def task_of(model: Model) -> ToyTask | None:
    """The controlled task of a model; None for all others."""
    about = None if model.loaded.sequences is None else model.loaded.sequences.task
    return None if about is None else task_from(about["kind"], about["seed"], about["config"])


def task_table(effects: pd.DataFrame, task: ToyTask) -> pd.DataFrame:
    """tables/task_effects.csv: layer, head, class, edit, metric, mean, sem, batches, sequences.

    Means are over batches of 256 evaluation sequences, of those that were edited, and so is their standard error
    (App. A); "baseline" is no edit. `delta_rms_GROUP` is the root mean square of the output's change over the group's
    tokens; `closed_form_error` the largest gap between an update's change and A_:s (u'_s − u_s), over the update, in a
    batch (of routing: from attention without s); `donor_improvement` how much nearer the output comes to the donor's
    target.
    """
    import numpy as np
    import pandas as pd

    single = effects[effects["joint"] == 0]
    errors = [name for name in ERRORS if name in columns_of(task)]
    rows: list[dict[str, Any]] = []
    for key, own in single.groupby(["layer", "head", "class"], sort=True):
        base = own.drop_duplicates("image_index")
        base = base.assign(edit="baseline", **{name: base[f"{name}_before"] for name in errors})
        base = base.drop(columns="identity_error", errors="ignore")
        base = base.assign(**{f"moved_{group}": 0.0 for group in groups_of(task)}, shared_energy=np.nan)
        if "payload_cosine" in base:
            base["payload_cosine"] = np.nan
        edits = ["baseline", *dict.fromkeys(own["edit"])]
        for edit in edits:
            some = base if edit == "baseline" else own[own["edit"] == edit]
            batches = _by_batch(some, task, errors)
            for metric in batches.columns:
                values = batches[metric].dropna().to_numpy()
                if not len(values):
                    continue
                sem = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
                about = dict(zip(KEYS, (*key, edit), strict=True))
                numbers = {"mean": float(values.mean()), "sem": sem, "batches": len(values), "sequences": len(some)}
                rows.append(about | {"metric": metric} | numbers)
    return pd.DataFrame(rows)


def _by_batch(rows: pd.DataFrame, task: ToyTask, errors: list[str]) -> pd.DataFrame:
    """One line an evaluation batch, one column a metric."""
    import pandas as pd

    grouped = rows.groupby(rows["image_index"] // SIZE)
    found = {name: grouped[name].mean() for name in errors}
    for group in groups_of(task):
        found[f"delta_rms_{group}"] = (grouped[f"moved_{group}"].sum() / grouped[f"tokens_{group}"].sum()) ** 0.5
    found["shared_energy"] = grouped["shared_energy"].mean()
    if "identity_error" in rows:  # Eq. 14, checked in float64 for every edit
        found["closed_form_error"] = grouped["identity_error"].max()
    if "payload_cosine" in rows:
        found["payload_cosine"] = grouped["payload_cosine"].mean()
        before = grouped["donor_target_mse_before"].mean()
        found["donor_improvement"] = before - found["donor_target_mse"]
    return pd.DataFrame(found)
