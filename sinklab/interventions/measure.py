"""A group's rows of edits: run, checked, and measured against the unedited images of the same batch.

A group is one image or, for a model of short sequences, several that run together.

Letters: G images of the group, R rows, N tokens, C model dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sinklab.errors import InputError
from sinklab.interventions.effect import ANSWERS, EFFECTS, answers, effects, exact, next_token_answers
from sinklab.interventions.replay import Unedited, unedited
from sinklab.interventions.suffix import Members, check_identity, null_check, run_rows

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    from torch import Tensor

    from sinklab.handle import Model
    from sinklab.interventions.design import Design
    from sinklab.interventions.edit import Edit
    from sinklab.interventions.task import TaskEffects
    from sinklab.interventions.values import Values

POSITIONS = "loss_change_by_position"
"""Change of the loss on the next token at each position of a sequence but the last, in nats."""
NULL_ROWS = 4
"""Edits that put back what is there, in the first batch of every layer: what they test is the same for every row."""
PREFIX_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
VALUE_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-2, torch.bfloat16: 0.3, torch.float16: 0.1}


def effect_schema(extra: Sequence[str] = (), *, positions: bool = False) -> pyarrow.Schema:
    """Columns of `effects/part-*.parquet`: one row per (image, layer, head, class, edit, joint).

    `extra` are a task's own measures, at the end; `positions` asks for a language model's change of loss by position.
    """
    import pyarrow as pa

    columns = {"image": pa.string(), "image_index": pa.int64(), "layer": pa.int16(), "head": pa.int16()}
    columns |= {"edit": pa.string(), "class": pa.string(), "joint": pa.int16()}
    columns |= {"sink_index": pa.int32(), "sink_kind": pa.string(), "edited_index": pa.int32(), "donor": pa.string()}
    columns |= dict.fromkeys(EFFECTS, pa.float64())
    columns |= {"fired": pa.int32(), "kept_queries": pa.int32(), "identity_error": pa.float64()}
    columns |= {"prefix_error": pa.float64()}
    columns |= dict.fromkeys((*ANSWERS, *extra), pa.float64())
    columns |= {POSITIONS: pa.list_(pa.float32())} if positions else {}
    return pa.schema(list(columns.items()))


@dataclass(eq=False)
class Measure:
    """Measures groups of images of one design with one model; also keeps the worst of what its checks saw."""

    model: Model
    design: Design
    values: Values
    rows_at_once: int
    """Edits of one image that run at once; a group runs so many for each of its images."""
    metrics: frozenset[str]
    plan: Sequence[Edit]
    labels: Mapping[str, int]
    """Image → class number, for the change of cross-entropy; may be empty."""
    height: int
    width: int
    task: TaskEffects | None = None
    """What a controlled task says of an edited output."""
    null_edits: dict[int, int] = field(default_factory=dict)
    """Layer → how many edits that put back what is there were checked to leave every bit."""

    def __post_init__(self) -> None:
        self._rows_of = self.design.rows.groupby("image_index").indices
        self._members_of = self.design.members.groupby("row").indices

    def rehearse(self, index: int, pixels: Tensor) -> None:
        """Edits that put back what is there, in the first layer that this image is edited in: every bit must stay."""
        rows = self._of_images([index])
        layer = int(rows["start"].min())
        self._null_check(unedited(self.model, pixels, [layer]), layer, rows[rows["start"] == layer], {index: 0})

    def group(self, indices: Sequence[int], pixels: Tensor) -> pd.DataFrame:
        """The effects of a group of images, pixels [G 3 H W], in the columns of `effect_schema`."""
        import pandas as pd

        rows, places = self._of_images(indices), {index: number for number, index in enumerate(indices)}
        starts = sorted(int(layer) for layer in rows["start"].unique())
        start = unedited(self.model, pixels, starts)
        single = rows.loc[rows["joint"] == 0, ["image_index", "layer", "head", "sink_index"]].drop_duplicates()
        check_value(self.values, places, start, list(single.itertuples(index=False, name=None)))
        found = []
        for layer in starts:
            own = rows[rows["start"] == layer]
            turn = own.groupby("image_index").cumcount() // self.rows_at_once
            found += [self._batch(start, layer, own[turn == t], places) for t in range(int(turn.max()) + 1)]
        table = pd.concat(found).sort_index()
        for name in self.schema.names:
            if name not in table:
                table[name] = float("nan") if name != POSITIONS else None
        return table[self.schema.names]

    @property
    def schema(self) -> pyarrow.Schema:
        """Of the effects of this model."""
        own = self.model.loaded.sequences
        text = own is not None and own.task is None and own.predicts_next and self.model.loaded.classify is not None
        return effect_schema(() if self.task is None else self.task.columns, positions=text)

    def _of_images(self, indices: Sequence[int]) -> pd.DataFrame:
        rows = [place for index in indices for place in self._rows_of[index]]
        return self.design.rows.iloc[rows]

    def _null_check(self, start: Unedited, layer: int, rows: pd.DataFrame, places: Mapping[int, int]) -> int:
        """Put back what is there in a few heads of this layer; returns how many. Always so many rows: the same bits."""
        few = rows.drop_duplicates(["layer", "head"]).iloc[:NULL_ROWS]
        members, _ = self._of(few, places, null=True, rows_at_least=NULL_ROWS)
        null_check(self.model, start, layer, members)
        return len(members.row)

    def _batch(self, start: Unedited, layer: int, rows: pd.DataFrame, places: Mapping[int, int]) -> pd.DataFrame:
        members, sinks = self._of(rows, places)
        if layer not in self.null_edits:
            self.null_edits[layer] = self._null_check(start, layer, rows, places)
        tokens, editor = run_rows(self.model, start, layer, members)
        gap = self._check(start, tokens, editor.error, layer)
        found: dict[str, Any] = {
            name: values.numpy() for name, values in self._effects(rows, start, tokens, members, sinks).items()
        }
        first = len(start.tokens)
        if POSITIONS in self.schema.names and "logits" in self.metrics:
            found |= self._next_tokens(start, tokens, members.origin[first:])
        found |= {"fired": editor.fired[first:].numpy(), "kept_queries": editor.kept[first:].numpy()}
        prefix_error = gap[members.origin[first:]].numpy()
        return rows.assign(**found, identity_error=editor.error[first:].numpy(), prefix_error=prefix_error)

    def _of(
        self, rows: pd.DataFrame, places: Mapping[int, int], *, null: bool = False, rows_at_least: int = 0
    ) -> tuple[Members, Tensor]:
        """The members of these rows, and (row, sink) pairs [M 2]; `null` members have no values of their own."""
        images = [places[int(index)] for index in rows["image_index"]]
        images += [0] * (rows_at_least - len(images))
        origin = torch.tensor([*range(len(places)), *images])
        taken = [self._members_of[int(row)] for row in rows.index]
        table = self.design.members.iloc[[place for own in taken for place in own]]
        place = torch.tensor([number for number, own in enumerate(taken) for _ in own])
        value, factor, routes = {}, {}, torch.zeros(len(table), dtype=torch.bool)
        unread: set[int] = set()
        zeros: dict[int, Tensor] = {}
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
            elif source == "null":
                unread.add(i)
            elif source == "zero":
                if layer not in zeros:
                    zeros[layer] = torch.zeros(self.model.sites[layer].head_dim, dtype=torch.float64)
                value[i] = zeros[layer]
            elif source not in ("value", "scale") and not null:
                value[i] = torch.tensor(self.values.of(source, layer, head, other))
        whole = {name: torch.tensor(table[name].to_numpy("int64")) for name in ("layer", "head", "key")}
        sinks = torch.stack([place, torch.tensor(table["sink"].to_numpy("int64"))], 1)
        members = Members(
            origin=origin,
            row=len(places) + place,
            routes=routes,
            value=value,
            factor=factor,
            own=frozenset(unread),
            **whole,
        )
        return members, sinks

    def _effects(
        self, rows: pd.DataFrame, start: Unedited, tokens: Tensor, members: Members, sinks: Tensor
    ) -> dict[str, Tensor]:
        map_, first = self.model.tokens, len(start.tokens)
        map_.check(tokens.shape[1], self.height, self.width)
        counted = torch.zeros(len(rows), tokens.shape[1], dtype=torch.bool)
        ordinary = map_.ordinary_among(tokens.shape[1])
        counted[:, ordinary.start : ordinary.stop] = True
        known = sinks[sinks[:, 1] >= 0]
        counted[known[:, 0], known[:, 1]] = False
        cls = map_.prefix.index("cls") if "cls" in map_.prefix and "cls" in self.metrics else None
        origin = members.origin[first:]
        before = tokens[0] if first == 1 else tokens[origin]
        toward = self._toward_donors(rows, tokens[:first, ordinary.start : ordinary.stop], origin)
        found = effects(before, tokens[first:], counted, cls=cls, toward_donor=toward)
        classify = self.model.loaded.classify
        if classify is not None and "logits" in self.metrics and self.model.loaded.sequences is None:
            logits = classify(self.model.module, tokens)
            labels = [self.labels.get(str(image)) for image in rows["image"]]
            found |= answers(logits[0] if first == 1 else logits[origin], logits[first:], labels)
        if self.task is not None:
            found |= self.task.measure(rows, start.pixels[origin], tokens[origin], tokens[first:])
        return found

    def _next_tokens(self, start: Unedited, tokens: Tensor, origin: Tensor) -> dict[str, Any]:
        """What a language model then says, row by row: a whole batch of logits could fill the memory."""
        classify, first = self.model.loaded.classify, len(start.tokens)
        assert classify is not None
        found: dict[str, list[Any]] = {name: [] for name in (*ANSWERS, POSITIONS)}
        plain = [classify(self.model.module, tokens[image : image + 1])[0] for image in range(first)]
        for row, image in enumerate(origin.tolist()):
            logits = classify(self.model.module, tokens[first + row : first + row + 1])[0]
            numbers, change = next_token_answers(plain[image], logits, start.pixels[image])
            for name, value in numbers.items():
                found[name].append(float(value))
            found[POSITIONS].append(change.float().cpu().numpy())
        return found

    def _toward_donors(self, rows: pd.DataFrame, ordinary: Tensor, origin: Tensor) -> Tensor | None:
        """mean P_donor − mean P_own, [R C] float64, NaN without a donor's; `ordinary`: the group's tokens [G n C]."""
        own = exact(ordinary).mean(1)  # [G C]
        donors = [self.values.patches(int(index)) for index in rows["donor_index"]]
        if all(donor is None for donor in donors):
            return None
        nothing = torch.full_like(own[0], torch.nan)
        given = [nothing if donor is None else torch.tensor(donor).to(own) for donor in donors]
        return torch.stack(given) - own[origin.to(own.device)]

    def _check(self, start: Unedited, tokens: Tensor, error: Tensor, layer: int) -> Tensor:
        """The gaps [G] between the resumed and the whole forward, once both checks have passed."""
        require_finite(start.tokens, "The final tokens of an input are not finite without any edit")
        require_finite(tokens, f"An edit that begins in layer {layer} makes the final tokens not finite")
        whole, resumed = exact(start.tokens).flatten(1), exact(tokens[: len(start.tokens)]).flatten(1)
        size = torch.linalg.vector_norm(whole, dim=-1).clamp_min(1e-12)
        gap = (torch.linalg.vector_norm(resumed - whole, dim=-1) / size).cpu()
        kind = coarsest(start, tokens)
        if not float(gap.max()) <= PREFIX_TOLERANCE[kind]:
            raise InputError(
                f"Resuming at layer {layer} gives other tokens than the whole forward (off by {float(gap.max()):.1e}): "
                "this model carries something past its blocks, so edits cannot reuse what comes before them."
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


def check_value(
    values: Values, places: Mapping[int, int], start: Unedited, heads: Sequence[tuple[int, int, int, int]]
) -> None:
    """Raise InputError if a kept value of a group's images is not the one of the forward that just ran.

    places: image_index → place in the group; heads: (image_index, layer, head, sink).
    """
    for index, layer, head, key in heads:
        kept, call = values.sink(index, layer, head), start.calls.get(layer)
        if kept is None or call is None:
            continue
        own = call.v[places[index], call.kv_head[head], key].cpu().double()
        size = float(torch.linalg.vector_norm(own).clamp_min(1e-12))
        gap = float(torch.linalg.vector_norm(own - torch.tensor(kept)) / size)
        if not gap <= VALUE_TOLERANCE[call.v.dtype]:
            raise InputError(
                f"The value kept of head {layer}:{head} is not the one that the input gives now (off by {gap:.1e}): "
                "the weights or the inputs changed. Patch again with --overwrite."
            )
