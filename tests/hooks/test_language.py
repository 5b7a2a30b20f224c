"""Language models: what is read under SDPA agrees with the attentions that eager transformers hands out.

The statistics are worked out here from those attentions and from the value projections' outputs, in float64, with a
loop over heads; the model that is read runs the fused kernel.
"""

from __future__ import annotations

from typing import Any

import language_models
import pytest
import torch

import sinklab
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.proof import prove
from sinklab.hooks.site import find_sites
from sinklab.sinks.reader import StatisticsReader

KINDS = tuple(language_models.MODELS)
TOKENS = 11


def padding(kind: str) -> torch.Tensor:
    """The second sequence has four tokens of padding: in front for causal models, behind for the others."""
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :4] = 0
    return mask if kind in language_models.CAUSAL else mask.flip(1)


def eager(kind: str, mask: torch.Tensor | None) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """A [B H N N], v [B K N D] and W_O [C, H·D] of every layer, from eager transformers; float64."""
    model, values = language_models.build(kind, attention="eager"), []
    weights, handles = [], []
    ends = {"gpt2": ("attn.c_attn", "attn.c_proj"), "distilbert": ("attention.v_lin", "attention.out_lin")}
    bert = ("attention.self.value", "attention.output.dense")
    llama = ("self_attn.v_proj", "self_attn.o_proj")
    value, projection = ends.get(kind, bert if kind in ("bert", "roberta") else llama)
    for name, child in model.named_modules():
        if name.endswith(value):
            handles.append(child.register_forward_hook(lambda module, args, result: values.append(result)))
        if name.endswith(projection):
            weights.append(child.weight.T if kind == "gpt2" else child.weight)
    given = {} if mask is None else {"attention_mask": mask}
    attentions = model(language_models.ids(2, TOKENS), output_attentions=True, **given).attentions
    if kind == "gpt2":
        values = [result.chunk(3, -1)[2] for result in values]
    dim = weights[0].shape[1] // language_models.HEADS
    split = [result.unflatten(-1, (-1, dim)).transpose(1, 2).double() for result in values]
    return [a.double() for a in attentions], split, [weight.double() for weight in weights]


def naive(pattern: torch.Tensor, visible: torch.Tensor, v: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """Of one head: A [N N], which keys a query sees [N N], v [N D], W_h [C D]."""
    counted = visible.sum(-1) >= 2
    a, seen = pattern[counted], visible[counted]
    inflow = a.sum(0) / len(a)
    sink = int(inflow.argmax())
    keys = [j for j in range(len(v)) if seen[:, j].any() and j != sink]
    ratios = {}
    for name, vectors in (("value_ratio_head", v), ("value_ratio_out", v @ weight.T)):
        norms = vectors.norm(dim=-1)
        ratios[name] = float(norms[sink] / norms[keys].mean())
    entropy = -(a * a.clamp_min(1e-300).log()).sum(-1).mean()
    paid = a[:, sink][seen[:, sink]]
    return {
        "sink_index": sink,
        "inflow": float(inflow[sink]),
        "entropy": float(entropy),
        "min_attention": float(paid.min()),
        "stable_rank_head": float((z := a @ v).square().sum() / torch.linalg.matrix_norm(z, 2) ** 2),
        **ratios,
    }


def visible_keys(kind: str, mask: torch.Tensor | None) -> torch.Tensor:
    """[B N N] bool."""
    sees = torch.ones(2, TOKENS, TOKENS, dtype=torch.bool)
    if kind in language_models.CAUSAL:
        sees = sees.tril()
    if kind == "mistral":  # its window of five
        sees = sees.triu(-4)
    return sees if mask is None else sees & mask[:, None, :].bool()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_agrees_with_the_eager_attentions(kind: str, padded: bool) -> None:
    mask = padding(kind) if padded else None
    patterns, values, weights = eager(kind, mask)
    model = language_models.model(kind)
    reader = StatisticsReader(find_sites(model))
    with torch.inference_mode(), HookManager(model, reader) as hooks:
        hooks.run(language_models.ids(2, TOKENS), **({} if mask is None else {"attention_mask": mask}))
    _, found, _ = reader.take()
    sees, dim, group = visible_keys(kind, mask), values[0].shape[-1], language_models.HEADS // values[0].shape[1]
    for layer in range(language_models.LAYERS):
        for image in range(2):
            for head in range(language_models.HEADS):
                own = weights[layer][:, head * dim : (head + 1) * dim]
                wanted = naive(patterns[layer][image, head], sees[image], values[layer][image, head // group], own)
                for name, number in wanted.items():
                    told = float(found[name][image, layer, head])
                    assert told == pytest.approx(number, rel=2e-4, abs=2e-5), (name, layer, image, head)


@pytest.mark.parametrize("kind", KINDS)
def test_the_heads_and_the_bias_are_what_the_block_adds(kind: str) -> None:
    proofs = prove(language_models.model(kind), language_models.ids(1))
    assert len(proofs) == language_models.LAYERS
    assert all(proof.update is not None and proof.update < 1e-5 for proof in proofs)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "bert", "distilbert"])
def test_an_edit_of_a_value_changes_the_update_by_the_attention_paid_times_its_change(kind: str) -> None:
    model = language_models.model(kind)
    head, key = 3, 2

    class Streams(Reader):
        def __init__(self) -> None:
            self.mid: torch.Tensor | None = None
            self.call: Any = None

        def attention(self, site: Any, call: Any) -> None:
            self.call = self.call or (call if site.layer == 0 else None)

        def resid_mid(self, site: Any, x: torch.Tensor) -> None:
            if site.layer == 0:
                self.mid = x.double()

    def run(edits: list[Any]) -> Streams:
        reader = Streams()
        with torch.inference_mode(), HookManager(model, reader) as hooks, hooks.edit(edits):
            hooks.run(language_models.ids(1))
        return reader

    plain = run([])
    edited = run([sinklab.Edit.zero(head=(0, head), at=key)])
    site, call = find_sites(model)[0], plain.call
    paid = call.pattern()[0, head, :, key]
    update = call.v[0, call.kv_head[head], key].double() @ site.output_weight()[head].T
    assert plain.mid is not None and edited.mid is not None
    torch.testing.assert_close((edited.mid - plain.mid)[0], -paid[:, None] * update, rtol=1e-4, atol=1e-5)


def test_the_output_weight_of_conv1d_is_turned_round() -> None:
    model = language_models.model("gpt2")
    site, weight = find_sites(model)[0], model.transformer.h[0].attn.c_proj.weight
    assert site.output_weight().shape == (4, 32, 8)
    torch.testing.assert_close(site.output_weight()[1], weight[8:16].T.double())
    query = model.transformer.h[0].attn.c_attn.weight[:, :32].T
    assert site.parts.query_weight is not None and torch.equal(site.parts.query_weight(), query)


def test_tensors_come_under_transformer_lens_names() -> None:
    pytest.importorskip("transformer_lens")
    _, cache = sinklab.run_with_cache(language_models.model("llama"), language_models.ids())
    assert cache["v", 1].shape == (2, 14, 2, 12) and cache["z", 1].shape == (2, 14, 4, 12)


def test_eager_attention_is_refused_with_the_way_to_load_the_model() -> None:
    model = language_models.build("gpt2", attention="eager")
    with pytest.raises(sinklab.NotFoundError, match="set_attn_implementation"):
        prove(model, language_models.ids(1))
