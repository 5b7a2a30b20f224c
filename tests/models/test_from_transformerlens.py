"""TransformerLens bridges: read between their hook points, they give the table and the edits of the model beneath."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import language_models
import numpy as np
import pandas as pd
import pytest
import torch

import sinklab
from sinklab.hooks.manager import Reader

pytest.importorskip("transformer_lens")


def bridge(kind: str, folder: Path) -> Any:
    """A bridge as TransformerLens makes it of a module in memory."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    language_models.tokenizer(masked=kind == "bert").save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    beneath = language_models.build(kind, attention="eager")
    return TransformerBridge.boot_transformers("tiny", hf_model=beneath, tokenizer=tokenizer, device="cpu")


def assert_same_table(first: pd.DataFrame, second: pd.DataFrame) -> None:
    assert len(first) == len(second) > 0
    for name in first:
        if first[name].dtype.kind == "f":
            np.testing.assert_allclose(first[name], second[name], rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            assert (first[name] == second[name]).all(), name


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_a_bridge_gives_the_table_of_the_hugging_face_model(kind: str, tmp_path: Path) -> None:
    folder, text = language_models.save(tmp_path / "model", kind), language_models.save_text(tmp_path)
    ours, lens = (sinklab.load(f"{prefix}:{folder}") for prefix in ("hf", "tlens"))
    tables = [
        sinklab.diagnose(model, text=text, output=tmp_path / name, report=False).heads
        for name, model in (("ours", ours), ("lens", lens))
    ]
    assert_same_table(*tables)
    assert lens.tokens == ours.tokens and [site.kv_heads for site in lens.sites] == [
        site.kv_heads for site in ours.sites
    ]
    ids = language_models.ids()
    assert lens.loaded.classify is not None
    torch.testing.assert_close(lens.loaded.classify(lens.module, lens(ids)), lens.module(ids))


def test_a_bridge_in_memory_proves_itself_and_is_left_as_it_was(tmp_path: Path) -> None:
    held = bridge("gpt2", tmp_path)
    model, ids = sinklab.attach(held), language_models.ids()
    with torch.inference_mode():
        plain = held(ids)  # the first forward hangs up TransformerLens's own hooks
        hooks = sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in held.modules())
        proofs = sinklab.prove(model, ids)
        assert torch.equal(held(ids), plain)
    assert all(proof.difference == 0 and proof.update is not None and proof.update < 1e-5 for proof in proofs)
    assert hooks == sum(len(child._forward_hooks) + len(child._forward_pre_hooks) for child in held.modules())
    assert model.tokens.prefix == ("bos",)


class Pattern(Reader):
    """The patterns that are rebuilt from q and k."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def attention(self, site: Any, call: Any) -> None:
        self.kept.append(call.pattern())


def test_the_pattern_rebuilt_from_queries_and_keys_is_the_bridges_own(tmp_path: Path) -> None:
    held, ids, reader = bridge("llama", tmp_path), language_models.ids(), Pattern()
    with torch.no_grad(), sinklab.HookManager(sinklab.attach(held), reader) as hooks:
        hooks.run(ids)
        _, cache = held.run_with_cache(ids)
    for layer, pattern in enumerate(reader.kept[:2]):
        torch.testing.assert_close(pattern.float(), cache["pattern", layer], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("edit", ["zero", "route"])
def test_an_edit_does_to_a_bridge_what_it_does_to_the_model_beneath(edit: str, tmp_path: Path) -> None:
    folder, ids = language_models.save(tmp_path, "llama"), language_models.ids()
    change = getattr(sinklab.Edit, edit)(head=(0, 3), at=0)
    found = []
    for prefix in ("hf", "tlens"):
        model = sinklab.load(f"{prefix}:{folder}")
        with torch.inference_mode():
            plain = model(ids)
            with sinklab.HookManager(model) as hooks, hooks.edit([change]):
                found.append((plain, hooks.run(ids)))
    (plain, first), (_, second) = found
    assert not torch.allclose(plain, first, atol=1e-3)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_a_bridge_can_be_patched(tmp_path: Path) -> None:
    folder, text = language_models.save(tmp_path / "model", "gpt2"), language_models.save_text(tmp_path)
    for prefix in ("hf", "tlens"):
        run = sinklab.diagnose(
            f"{prefix}:{folder}",
            text=text,
            output=tmp_path / prefix,
            rule=sinklab.SinkRule.mass(0.05),
            report=False,
        )
        every = ("nop", "broadcast", "intermediate")
        sinklab.patch(run, classes=every, min_events=2, min_events_analysis=1, report=False)
    first, second = (sinklab.open_run(tmp_path / prefix).effects for prefix in ("hf", "tlens"))
    for name in ("patch_change", "kl"):
        np.testing.assert_allclose(first[name], second[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_padding_is_read_off_the_masked_logits(tmp_path: Path) -> None:
    held, ids, reader = bridge("gpt2", tmp_path), language_models.ids(), Pattern()
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with torch.no_grad(), sinklab.HookManager(held, reader) as hooks:
        hooks.run(ids, attention_mask=mask)
    assert (reader.kept[0][1, :, 3:, :3] == 0).all() and (reader.kept[0][0, :, 1:, 0] > 0).all()


def test_a_bridge_that_leaves_attention_to_the_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sinklab.InputError, match="Load the same model as hf:REPO_OR_DIR"):
        sinklab.attach(bridge("bert", tmp_path))


def test_folded_weights_are_noted(tmp_path: Path) -> None:
    held = bridge("gpt2", tmp_path)
    held.enable_compatibility_mode()
    model = sinklab.attach(held)
    assert "folded" in " ".join(model.provenance.notes)


def test_offline_a_name_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(sinklab.NotFoundError, match="gpt2 is not in the local model cache"):
        sinklab.load("tlens:gpt2-small", offline=True)


def test_without_a_tokenizer_a_bridge_is_refused(tmp_path: Path) -> None:
    folder = language_models.save(tmp_path, "gpt2")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(sinklab.InputError, match="needs a tokenizer"):
        sinklab.load(f"tlens:{folder}")
