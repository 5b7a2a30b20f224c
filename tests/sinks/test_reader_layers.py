"""The reader of a forward pass: every layer once, nothing kept, the same numbers however layers are finished."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from families import FAMILIES, HEADS, LAYERS, Patches, fresh, module, pixels
from torch import Tensor, nn

from sinklab.errors import NotFoundError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.site import find_sites
from sinklab.sinks import reader as reader_module
from sinklab.sinks.reader import StatisticsReader


def read(model: nn.Module, x: Tensor, layers: list[int] | None = None, **options: Any) -> tuple[Any, Any, Any]:
    reader = StatisticsReader(find_sites(model), **options)
    with torch.inference_mode(), HookManager(model, reader, layers=layers) as hooks:
        hooks.run(x)
    return reader.take()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-9, equal_nan=True, msg=name)


@pytest.mark.parametrize("pending", [0, 10**9])
@pytest.mark.parametrize("name", ["timm dinov2", "hf llama", "openclip"])
def test_layers_finished_one_by_one_or_all_together_are_the_same(
    name: str, pending: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(module(name), pixels(name))[1]
    monkeypatch.setattr(reader_module, "PENDING_BYTES", pending)
    same(read(module(name), pixels(name))[1], expected)


@pytest.mark.parametrize("name", ["timm dinov2", "timm beit", "openclip", "hf llama"])
def test_an_image_is_read_alike_alone_and_in_a_batch(name: str) -> None:
    x = pixels(name, batch=3)
    together = read(module(name), x)[1]
    alone = [read(module(name), image[None])[1] for image in x]
    for column, values in together.items():
        joined = torch.cat([one[column] for one in alone])
        torch.testing.assert_close(values, joined, rtol=1e-4, atol=1e-6, equal_nan=True, msg=column)


def test_columns_are_batch_by_layer_by_head_on_the_cpu() -> None:
    layers, found, tokens = read(module("timm dinov2"), pixels("timm dinov2", batch=3))
    assert (layers, tokens) == (list(range(LAYERS)), [17] * LAYERS)
    assert {tuple(values.shape) for values in found.values()} == {(3, LAYERS, HEADS)}
    assert found["finite"].dtype == torch.bool and found["sink_index"].dtype == torch.int64
    assert all(values.device.type == "cpu" for values in found.values())


def test_layers_that_were_left_out_are_not_in_the_table() -> None:
    whole = read(module("timm dinov2"), pixels("timm dinov2"))[1]
    layers, found, _ = read(module("timm dinov2"), pixels("timm dinov2"), layers=[1])
    assert layers == [1]
    same(found, {name: values[:, 1:] for name, values in whole.items()})


def test_taking_forgets_and_taking_nothing_is_an_error() -> None:
    """Complaint 16: an empty table would pass for a model without sinks."""
    reader, model = StatisticsReader(find_sites(module("timm dinov2"))), module("timm dinov2")
    with torch.inference_mode(), HookManager(model, reader) as hooks:
        hooks.run(pixels("timm dinov2"))
        reader.take()
        with pytest.raises(NotFoundError, match="No forward pass has been read"):
            reader.take()
        hooks.run(pixels("timm dinov2", seed=2))
        assert reader.take()[0] == list(range(LAYERS))


def test_no_tensor_of_a_forward_outlives_it() -> None:
    """Complaint 19: memory does not grow with the number of images."""
    kept: list[weakref.ref[Tensor]] = []

    class Watched(StatisticsReader):
        def attention(self, site: Any, call: Any) -> None:
            kept.extend(weakref.ref(tensor) for tensor in (call.q, call.k, call.v, call.z))
            super().attention(site, call)

    reader = Watched(find_sites(module("timm dinov2")))
    with torch.inference_mode(), HookManager(module("timm dinov2"), reader) as hooks:
        hooks.run(pixels("timm dinov2"))
        gc.collect()
        assert len(kept) == 4 * LAYERS and not any(tensor() is not None for tensor in kept)


@pytest.mark.parametrize("name", ["timm dinov2", "openclip tokens first", "hf llama"])
def test_the_sinks_norm_is_over_the_median_norm_of_the_layers_input(name: str) -> None:
    class Streams(Reader):
        norms: dict[int, Tensor]

        def resid_pre(self, site: Any, x: Tensor) -> None:
            self.norms[site.layer] = x.double().norm(dim=-1)

    streams = Streams()
    streams.norms = {}
    with torch.inference_mode(), HookManager(module(name), streams) as hooks:
        hooks.run(pixels(name))
    found = read(module(name), pixels(name))[1]
    for layer, norms in streams.norms.items():
        assert norms.shape == (2, FAMILIES[name].tokens)
        expected = norms.gather(1, found["sink_index"][:, layer]) / norms.median(1, keepdim=True).values
        torch.testing.assert_close(found["token_norm_ratio"][:, layer].double(), expected, rtol=1e-5, atol=0)


def test_layers_with_different_numbers_of_tokens_are_read_side_by_side() -> None:
    """Pooling between blocks: their moments cannot be stacked, and need not be."""
    from families import OwnAttention

    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.attn = nn.LayerNorm(32), nn.LayerNorm(32), OwnAttention()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.norm1(x))
            return (x + self.norm2(x))[:, ::2]

    torch.manual_seed(0)
    layers, found, tokens = read(Patches(Halving).eval(), pixels("timm dinov2"))
    assert (layers, tokens) == ([0, 1], [16, 8])
    assert bool(found["finite"].all()) and found["queries"][0, :, 0].tolist() == [16, 8]


@pytest.mark.parametrize("hiding", range(LAYERS))
def test_layers_with_and_without_a_mask_are_read_side_by_side(hiding: int) -> None:
    """Models that alternate local and global attention: what is hidden in one layer is not hidden in the next."""
    import torch.nn.functional as F
    from families import OwnAttention, OwnBlock

    class MaybeCausal(OwnAttention):
        causal = False

        def forward(self, x: Tensor) -> Tensor:
            heads = self.into(x).unflatten(-1, (3, *self.shape)).permute(2, 0, 3, 1, 4)
            return self.back(F.scaled_dot_product_attention(*heads, is_causal=self.causal).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = Patches(OwnBlock).eval()
    for block in model.blocks:
        block.mixer = MaybeCausal()
    model.blocks[hiding].mixer.causal = True
    together = read(model, pixels("timm dinov2"))[1]
    assert together["queries"][:, 1 - hiding].unique().tolist() == [16]
    assert together["queries"][:, hiding].max() <= 15  # the first query sees one key
    for layer in range(LAYERS):
        alone = read(model, pixels("timm dinov2"), layers=[layer])[1]
        same(alone, {name: values[:, layer : layer + 1] for name, values in together.items()})


@pytest.mark.parametrize("threshold", [0.5, 0.3, 0.9])
def test_routed_queries_are_those_that_give_the_sink_at_least_the_threshold(threshold: float) -> None:
    calls: list[Any] = []

    class Calls(Reader):
        def attention(self, site: Any, call: Any) -> None:
            calls.append(call)

    model = fresh("timm dinov2")
    for block in model.blocks:
        block.attn.qkv.weight.mul_(2.0)
    with torch.inference_mode(), HookManager(model, Calls()) as hooks:
        hooks.run(pixels("timm dinov2"))
    found = read(model, pixels("timm dinov2"), attention=threshold)[1]
    for layer, call in enumerate(calls):
        sink = found["sink_index"][:, layer]
        paid = call.pattern().gather(-1, sink[..., None, None].expand(-1, -1, 17, 1))[..., 0]
        sure = ((paid - threshold).abs() > 1e-5).all(-1)
        counted = (paid >= threshold).sum(-1)
        assert torch.equal(found["routed_count"][:, layer][sure], counted[sure])
        torch.testing.assert_close(found["routed_fraction"][:, layer][sure], counted[sure].double() / 17)
        assert counted.max() > 0


def test_a_fast_reader_reads_once_and_gives_the_model_its_z() -> None:
    model = module("timm dinov2")
    reader = StatisticsReader(find_sites(model), fast=True)
    with torch.inference_mode(), HookManager(model, reader, attend=reader.attend) as hooks:
        hooks.run(pixels("timm dinov2"))
    same_layers, found, _ = reader.take()
    assert same_layers == list(range(LAYERS)) and bool(found["finite"].all())
