"""Which moments a reader is told of: those it overrides, of its own block, once a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import LAYERS, fresh, pixels

from sinklab.errors import InputError
from sinklab.hooks.cache import run_with_cache
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove


class Misspelled(Reader):
    def atention(self, site: Any, call: Any) -> None:
        raise AssertionError("never called")


def test_a_reader_that_would_never_be_told_of_anything_is_refused() -> None:
    """Design 5.2: no silent failure."""
    with pytest.raises(InputError, match="it has atention"):
        HookManager(fresh("timm dinov2"), Misspelled())
    with pytest.raises(InputError, match="at least one of"):
        HookManager(fresh("timm dinov2"), Reader())


def test_what_is_no_reader_is_refused() -> None:
    with pytest.raises(InputError, match="not the class Misspelled itself"):
        HookManager(fresh("timm dinov2"), Misspelled)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not function"):
        HookManager(fresh("timm dinov2"), lambda site, call: None)  # type: ignore[arg-type]


class Told(Reader):
    def __init__(self) -> None:
        self.projections: list[int] = []
        self.middles: dict[int, torch.Tensor] = {}
        self.count = 0

    def projected(self, site: Any, x: torch.Tensor, update: torch.Tensor) -> None:
        self.projections.append(site.layer)

    def resid_mid(self, site: Any, x: torch.Tensor) -> None:
        self.count += 1
        self.middles[site.layer] = x.clone()


@pytest.mark.parametrize("layers", [None, [0], [1]])
def test_blocks_that_share_a_projection_are_told_apart(layers: list[int] | None) -> None:
    model: Any = fresh("timm dinov2")
    model.blocks[1].attn.proj = model.blocks[0].attn.proj
    reader = Told()
    with torch.inference_mode(), HookManager(model, reader, layers=layers) as hooks:
        hooks.run(pixels("timm dinov2"))
    assert reader.projections == (layers or [0, 1])
    assert all(proof.update is not None and proof.update < 1e-5 for proof in prove(model, pixels("timm dinov2")))


def test_blocks_that_share_their_norms_are_told_apart() -> None:
    model: Any = fresh("timm dinov2")
    apart: Any = fresh("timm dinov2")
    model.blocks[1].norm2 = model.blocks[0].norm2
    apart.blocks[1].norm2.load_state_dict(apart.blocks[0].norm2.state_dict())
    together, alone = Told(), Told()
    for own, reader in ((model, together), (apart, alone)):
        with torch.inference_mode(), HookManager(own, reader) as hooks:
            hooks.run(pixels("timm dinov2"))
    assert together.count == alone.count == LAYERS
    assert all(torch.equal(together.middles[layer], alone.middles[layer]) for layer in range(LAYERS))


def test_a_module_on_meta_is_refused_before_it_runs() -> None:
    model = fresh("timm dinov2").to("meta")
    for attempt in (lambda: HookManager(model), lambda: prove(model, pixels("timm dinov2"))):
        with pytest.raises(InputError, match="on the meta device"):
            attempt()


@pytest.mark.parametrize(("argument", "said"), [({"device": "bogus"}, "bogus"), ({"names": 123}, "123")])
def test_what_is_no_device_and_no_name_is_refused_in_a_sentence(argument: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run_with_cache(fresh("timm dinov2"), pixels("timm dinov2"), **argument)


def test_a_gate_before_the_projection_is_told_of_after_its_call() -> None:
    from sinklab.models.vit import ViT, ViTShape

    told: list[tuple[str, int]] = []

    class Watching(Reader):
        def attention(self, site: Any, call: Any) -> None:
            told.append(("attention", site.layer))

        def gated(self, site: Any, factor: torch.Tensor) -> None:
            told.append(("gated", site.layer))
            assert factor.shape == (1, 2, 5, 4) and bool(((factor > 0) & (factor < 1)).all())

    shape: dict[str, Any] = {"image": 16, "patch": 8, "dim": 8, "depth": 2, "heads": 2}
    for gate, expected in (
        ("elementwise", [("attention", 0), ("gated", 0), ("attention", 1), ("gated", 1)]),
        ("none", [("attention", 0), ("attention", 1)]),
    ):
        told.clear()
        with torch.no_grad(), HookManager(ViT(ViTShape(**shape, gate=gate)).eval(), Watching()) as hooks:
            hooks.run(torch.randn(1, 3, 16, 16))
        assert told == expected
