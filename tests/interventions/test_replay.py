"""Resuming at a layer equals running the whole network, on every family, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES, HEADS, LAYERS, fresh, pixels
from torch import Tensor

import sinklab
from sinklab.hooks.manager import HookManager
from sinklab.interventions.edit import Edit
from sinklab.interventions.replay import resuming, unedited
from sinklab.interventions.suffix import Members, null_check, run_rows

VISION = [name for name, family in FAMILIES.items() if not family.text]
OWN = ("a user's own", "timm grouped rope")


def handle(name: str, dtype: torch.dtype = torch.float32) -> sinklab.Model:
    tokens = sinklab.TokenMap(prefix=(), patch_size=(8, 8)) if name in OWN else None
    return sinklab.attach(fresh(name).to(dtype), tokens=tokens)


def traces(model: torch.nn.Module) -> list[Any]:
    return [
        (name, sorted(child.__dict__), len(child._forward_hooks), len(child._forward_pre_hooks))
        for name, child in model.named_modules()
    ]


def members(rows: list[tuple[int, int, int, str]], dim: int) -> Members:
    """(layer, head, key, edit) a row; the edit is zero or route."""
    value = {i: torch.zeros(dim, dtype=torch.float64) for i, row in enumerate(rows) if row[3] == "zero"}
    columns = [torch.tensor(column) for column in list(zip(*rows, strict=True))[:3]]
    return Members(
        origin=torch.zeros(len(rows) + 1, dtype=torch.int64),
        row=torch.arange(1, len(rows) + 1),
        layer=columns[0],
        head=columns[1],
        key=columns[2],
        routes=torch.tensor([row[3] == "route" for row in rows]),
        value=value,
        factor={},
    )


@pytest.mark.parametrize("name", VISION)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_resuming_without_an_edit_gives_the_whole_forwards_tokens(name: str, layer: int) -> None:
    model, x = handle(name), pixels(name, batch=1)
    before = traces(model.module)
    with torch.inference_mode():
        start = unedited(model, x, [layer])
        with resuming(model, start, layer, torch.zeros(3, dtype=torch.int64)):
            resumed = model(x)
    assert resumed.shape[0] == 3 and resumed.shape[1:] == start.tokens.shape[1:]
    torch.testing.assert_close(resumed, start.tokens.expand_as(resumed), rtol=1e-4, atol=1e-5)
    assert traces(model.module) == before


@pytest.mark.parametrize("name", VISION)
def test_edits_in_one_batch_equal_whole_forwards_one_by_one(name: str) -> None:
    """float64: a whole forward with hooks.edit for each, against all of them resumed together."""
    model, x = handle(name, torch.float64), pixels(name, batch=1).double()
    site = model.sites[1]
    rows = [(1, head, key, edit) for head in range(HEADS) for key in (0, 5) for edit in ("zero", "route")]
    with torch.inference_mode():
        start = unedited(model, x, [1])
        tokens, editor = run_rows(model, start, 1, members(rows, site.head_dim))
        for number, (layer, head, key, edit) in enumerate(rows, start=1):
            one = (Edit.zero if edit == "zero" else Edit.route)(head=(layer, head), at=key)
            with HookManager(model) as hooks, hooks.edit([one]):
                whole = hooks.run(x)
            torch.testing.assert_close(tokens[number], whole[0], rtol=1e-9, atol=1e-10)
    assert editor.fired.tolist() == [0] + [1] * len(rows)
    assert float(editor.error.max()) < 1e-9
    assert not torch.equal(tokens[0], tokens[1])


@pytest.mark.parametrize("name", ["timm dinov2 registers", "openclip", "timm grouped rope", "hf dinov3"])
def test_a_null_edit_leaves_every_bit(name: str) -> None:
    model, x = handle(name), pixels(name, batch=1)
    rows = [(1, head, 4, "zero") for head in range(HEADS)]
    with torch.inference_mode():
        null_check(model, unedited(model, x, [1]), 1, members(rows, model.sites[1].head_dim))


def test_blocks_that_return_tuples_are_resumed_too() -> None:
    from families import OwnBlock, Patches

    class Pair(OwnBlock):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), "beside"

    class Unpacked(Patches):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x, beside = block(x)
                assert beside == "beside"
            return x

    torch.manual_seed(0)
    tokens = sinklab.TokenMap(prefix=(), patch_size=(8, 8))
    model = sinklab.attach(Unpacked(Pair).eval(), tokens=tokens)
    x = pixels("timm dinov2", batch=1)
    with torch.inference_mode():
        start = unedited(model, x, [1])
        with resuming(model, start, 1, torch.zeros(2, dtype=torch.int64)):
            torch.testing.assert_close(model(x), start.tokens.expand(2, -1, -1))


def test_nothing_is_left_after_an_error_while_resuming() -> None:
    """Complaint 15."""
    model, x = handle("openclip tokens first"), pixels("openclip tokens first", batch=1)
    before = traces(model.module)
    with torch.inference_mode():
        start = unedited(model, x, [1])
        with pytest.raises(RuntimeError), resuming(model, start, 1, torch.zeros(2, dtype=torch.int64)):
            raise RuntimeError
    assert traces(model.module) == before


def test_several_layers_edited_in_one_row_fire_once_each() -> None:
    model, x = handle("timm dinov2", torch.float64), pixels("timm dinov2", batch=1).double()
    both = members([(0, 1, 3, "zero"), (1, 2, 0, "route")], model.sites[0].head_dim)
    both = Members(**{**both.__dict__, "row": torch.tensor([1, 1]), "origin": torch.zeros(2, dtype=torch.int64)})
    with torch.inference_mode():
        tokens, editor = run_rows(model, unedited(model, x, [0]), 0, both)
        with HookManager(model) as hooks, hooks.edit([Edit.zero(head=(0, 1), at=3), Edit.route(head=(1, 2), at=0)]):
            whole = hooks.run(x)
    assert editor.fired.tolist() == [0, 2]
    torch.testing.assert_close(tokens[1], whole[0], rtol=1e-9, atol=1e-10)
