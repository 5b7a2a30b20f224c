"""One image's rows of edits: run, checked, and measured against the unedited image of the same batch.

Letters: R rows, N tokens, C model dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sinklab.errors import InputError
from sinklab.interventions.effect import ANSWERS, EFFECTS, answers, effects, exact
from sinklab.interventions.replay import Unedited, unedited
from sinklab.interventions.suffix import Members, check_identity, null_check, run_rows

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    from torch import Tensor

    from sinklab.handle import Model
    from sinklab.interventions.design import Design
    from sinklab.interventions.edit import Edit
    from sinklab.interventions.values import Values

NULL_ROWS = 4
"""Edits that put back what is there, in the first batch of every layer: what they test is the same for every row."""
PREFIX_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
VALUE_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.1}


def effect_schema() -> pyarrow.Schema:
    """Columns of `effects/part-*.parquet`: one row per (image, layer, head, class, edit, joint)."""
    import pyarrow as pa

    columns = {"image": pa.string(), "image_index": pa.int64(), "layer": pa.int16(), "head": pa.int16()}
    columns |= {"edit": pa.string(), "class": pa.string(), "joint": pa.int16()}
    columns |= {"sink_index": pa.int32(), "sink_kind": pa.string(), "edited_index": pa.int32(), "donor": pa.string()}
    columns |= dict.fromkeys(EFFECTS, pa.float64())
    columns |= {"fired": pa.int32(), "kept_queries": pa.int32(), "identity_error": pa.float64()}
    columns |= {"prefix_error": pa.float64()}
    columns |= dict.fromkeys(ANSWERS, pa.float64())
    return pa.schema(list(columns.items()))


@dataclass(eq=False)
class Measure:
    """Measures images of one design with one model; also keeps the worst of what its checks saw."""

    model: Model
    design: Design
    values: Values
    rows_at_once: int
    metrics: frozenset[str]
    plan: Sequence[Edit]
    labels: Mapping[str, int]
    """Image → class number, for the change of cross-entropy; may be empty."""
    height: int
    width: int
    null_edits: dict[int, int] = field(default_factory=dict)
    """Layer → how many edits that put back what is there were checked to leave every bit."""

    def __post_init__(self) -> None:
        rows, members = self.design.rows, self.design.members
        self._by_image = {int(index): rows[rows["image_index"] == index] for index in rows["image_index"].unique()}
        places = members.groupby("row").indices
        self._members = {int(row): members.iloc[places[row]] for row in members["row"].unique()}

    def rehearse(self, index: int, pixels: Tensor) -> None:
        """Edits that put back what is there, in the first layer that this image is edited in: every bit must stay."""
        rows = self._by_image[index]
        layer = int(rows["start"].min())
        few = rows[rows["start"] == layer].drop_duplicates(["layer", "head"]).iloc[:NULL_ROWS]
        members, _ = self._of(few, null=True)
        null_check(self.model, unedited(self.model, pixels, [layer]), layer, members, 1 + NULL_ROWS)

    def image(self, index: int, pixels: Tensor) -> pd.DataFrame:
        """The effects of one image, pixels [1 3 H W], in the columns of `effect_schema`."""
        import pandas as pd

        rows = self._by_image[index]
        starts = sorted(int(layer) for layer in rows["start"].unique())
        start = unedited(self.model, pixels, starts)
        single = rows.loc[rows["joint"] == 0, ["layer", "head", "sink_index"]].drop_duplicates()
        check_value(self.values, index, start, list(single.itertuples(index=False, name=None)))
        found = []
        for layer in starts:
            own = rows[rows["start"] == layer]
            for first in range(0, len(own), self.rows_at_once):
                found.append(self._batch(index, start, layer, own.iloc[first : first + self.rows_at_once]))
        table = pd.concat(found).sort_index()
        for name in (*EFFECTS, *ANSWERS):
            if name not in table:
                table[name] = float("nan")
        return table[effect_schema().names]

    def _batch(self, index: int, start: Unedited, layer: int, rows: pd.DataFrame) -> pd.DataFrame:
        members, sinks = self._of(rows)
        number = 1 + len(rows)
        if layer not in self.null_edits:
            few, _ = self._of(rows.drop_duplicates(["layer", "head"]).iloc[:NULL_ROWS])
            null_check(self.model, start, layer, few, 1 + NULL_ROWS)
            self.null_edits[layer] = len(few.row)
        tokens, editor = run_rows(self.model, start, layer, members, number)
        gap = self._check(start, tokens, editor.error, layer)
        found = {name: values.numpy() for name, values in self._effects(index, rows, tokens, sinks).items()}
        found |= {"fired": editor.fired[1:].numpy(), "kept_queries": editor.kept[1:].numpy()}
        return rows.assign(**found, identity_error=editor.error[1:].numpy(), prefix_error=gap)

    def _of(self, rows: pd.DataFrame, *, null: bool = False) -> tuple[Members, Tensor]:
        """The members of these rows, and (row, sink) pairs [M 2]; `null` members have no values of their own."""
        import pandas as pd

        table = pd.concat([self._members[int(row)].assign(place=i) for i, row in enumerate(rows.index, start=1)])
        value, factor, routes = {}, {}, torch.zeros(len(table), dtype=torch.bool)
        for i, (layer, head, source, other) in enumerate(
            table[["layer", "head", "source", "from_index"]].itertuples(index=False)
        ):
            if source == "plan":
                edit = self.plan[other]
                source, given = edit.kind, edit.value
                if edit.factor is not None:
                    factor[i] = edit.factor
                if given is not None:
                    value[i] = torch.tensor(given, dtype=torch.float64)
            if source == "route":
                routes[i] = True
            elif source == "zero":
                value[i] = torch.zeros(self.model.sites[layer].head_dim, dtype=torch.float64)
            elif source not in ("value", "scale") and not null:
                value[i] = torch.tensor(self.values.of(source, layer, head, other))
        whole = {name: torch.tensor(table[name].to_numpy("int64")) for name in ("layer", "head", "key")}
        place = torch.tensor(table["place"].to_numpy("int64"))
        sinks = torch.stack([place - 1, torch.tensor(table["sink"].to_numpy("int64"))], 1)
        return Members(row=place, routes=routes, value=value, factor=factor, **whole), sinks

    def _effects(self, index: int, rows: pd.DataFrame, tokens: Tensor, sinks: Tensor) -> dict[str, Tensor]:
        map_, after = self.model.tokens, tokens[1:]
        map_.check(tokens.shape[1], self.height, self.width)
        counted = torch.zeros(len(rows), tokens.shape[1], dtype=torch.bool)
        counted[:, map_.prefix_tokens :] = True
        known = sinks[sinks[:, 1] >= 0]
        counted[known[:, 0], known[:, 1]] = False
        cls = map_.prefix.index("cls") if "cls" in map_.prefix and "cls" in self.metrics else None
        donors = rows["donor_index"].unique()
        donor = self.values.patches(int(donors[0]))
        assert len(donors) == 1
        own = exact(tokens[0, map_.prefix_tokens :]).mean(0)
        toward = None if donor is None else torch.tensor(donor).to(own) - own
        found = effects(tokens[0], after, counted, cls=cls, toward_donor=toward)
        if self.model.loaded.classify is not None and "logits" in self.metrics:
            logits = self.model.loaded.classify(self.model.module, tokens)
            found |= answers(logits[0], logits[1:], self.labels.get(str(rows["image"].iloc[0])))
        return found

    def _check(self, start: Unedited, tokens: Tensor, error: Tensor, layer: int) -> float:
        """The gap between the resumed and the whole forward, once both checks have passed."""
        require_finite(start.tokens, "The final tokens of an image are not finite without any edit")
        require_finite(tokens, f"An edit that begins in layer {layer} makes the final tokens not finite")
        whole, resumed = exact(start.tokens[0]), exact(tokens[0])
        gap = float(torch.linalg.vector_norm(resumed - whole) / torch.linalg.vector_norm(whole).clamp_min(1e-12))
        kind = coarsest(start, tokens)
        if not gap <= PREFIX_TOLERANCE[kind]:
            raise InputError(
                f"Resuming at layer {layer} gives other tokens than the whole forward (off by {gap:.1e}): this model "
                "carries something past its blocks, so edits cannot reuse what comes before them."
            )
        check_identity(float(error.max()), kind, layer)
        return gap


def require_finite(tokens: Tensor, said: str) -> None:
    """Raise InputError, in these words, for tokens with a NaN or Inf."""
    if not bool(torch.isfinite(tokens).all()):
        raise InputError(f"{said}: there is nothing that an effect could be measured on.")


def coarsest(start: Unedited, tokens: Tensor) -> torch.dtype:
    """The coarsest type that attention or output had: under autocast the output may be fp32 again."""
    order: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    seen = [tokens.dtype, *(call.q.dtype for call in start.calls.values())]
    if torch.is_autocast_enabled(tokens.device.type):
        seen.append(torch.get_autocast_dtype(tokens.device.type))
    return max(seen, key=order.index)


def check_value(values: Values, index: int, start: Unedited, heads: Sequence[tuple[int, int, int]]) -> None:
    """Raise InputError if a kept value of this image is not the one of the forward that just ran.

    heads: (layer, head, sink) triples.
    """
    for layer, head, key in heads:
        kept, call = values.sink(index, layer, head), start.calls.get(layer)
        if kept is None or call is None:
            continue
        own = call.v[0, call.kv_head[head], key].cpu().double()
        size = float(torch.linalg.vector_norm(own).clamp_min(1e-12))
        gap = float(torch.linalg.vector_norm(own - torch.tensor(kept)) / size)
        if not gap <= VALUE_TOLERANCE[call.v.dtype]:
            raise InputError(
                f"The value kept of head {layer}:{head} is not the one that the image gives now (off by {gap:.1e}): "
                "the weights or the pictures changed. Patch again with --overwrite."
            )
