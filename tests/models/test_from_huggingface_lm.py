"""hf: language models from folders made here: the same logits as transformers, whole weights, their own tokenizer."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import language_models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sinklab
from sinklab.data.text import open_text
from sinklab.data.text_tokens import Reading, token_sequences
from sinklab.inputs import find_inputs
from sinklab.models.tokens import TokenMap

KINDS = tuple(language_models.MODELS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_gives_the_models_own_logits_after_its_final_norm(kind: str, tmp_path: Path) -> None:
    model = sinklab.load(f"hf:{language_models.save(tmp_path, kind)}")
    ids, own = language_models.ids(), language_models.model(kind)
    final = model(ids)
    assert model.loaded.classify is not None
    torch.testing.assert_close(final, own.base_model(ids).last_hidden_state, rtol=0, atol=0)
    torch.testing.assert_close(model.loaded.classify(model.module, final), own(ids).logits, rtol=1e-5, atol=1e-5)
    assert model.loaded.extra["weights"]["missing"] == 0 and not model.provenance.notes


def test_causal_models_count_their_first_token_apart_and_others_both_ends(tmp_path: Path) -> None:
    causal = sinklab.load(f"hf:{language_models.save(tmp_path / 'a', 'qwen3')}")
    masked = sinklab.load(f"hf:{language_models.save(tmp_path / 'b', 'bert')}")
    assert causal.tokens == TokenMap.sequence(("bos",), ordinary="text")
    assert masked.tokens == TokenMap.sequence(("special",), ordinary="text", suffix=("special",))
    assert "key_value_heads" not in causal.describe() and causal.sites[0].kv_heads == 2


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_windows_begin_with_what_the_tokenizer_has_for_it(kind: str, tmp_path: Path) -> None:
    model = sinklab.load(f"hf:{language_models.save(tmp_path / 'model', kind)}")
    text, words = language_models.save_text(tmp_path), language_models.tokenizer(masked=kind == "bert")
    found = find_inputs(model, text=text)
    first = np.frombuffer(found[0].content(), dtype="int64").tolist()
    spelled = words.convert_ids_to_tokens(first)
    assert len(first) == language_models.POSITIONS
    assert spelled[0] == ("[CLS]" if kind == "bert" else "<s>") and (spelled[-1] == "[SEP]") == (kind == "bert")
    inside = " ".join(spelled[1:-1] if kind == "bert" else spelled[1:])
    assert inside.partition(" ")[2] in language_models.TEXT  # the split may begin within a word


def test_without_a_beginning_of_sequence_the_first_token_of_text_is_counted_as_one(tmp_path: Path) -> None:
    model = sinklab.load(f"hf:{language_models.save(tmp_path, 'llama', bos=False)}")
    assert model.tokens.prefix == ("bos",) and "counted as bos" in " ".join(model.provenance.notes)


def test_the_first_token_of_a_window_may_be_a_sink_of_its_own_kind(tmp_path: Path) -> None:
    model = sinklab.load(f"hf:{language_models.save(tmp_path / 'model', 'bert')}")
    run = sinklab.diagnose(
        model, text=language_models.save_text(tmp_path), output=tmp_path / "run", report=False, limit=4
    )
    heads = run.heads
    ends = heads["sink_index"].isin([0, language_models.POSITIONS - 1])
    assert ((heads["sink_kind"] == "special") == ends).all() and set(heads["sink_kind"]) <= {"special", "text"}
    assert (heads.loc[ends, "sink_column"] == -1).all()
    assert (heads.loc[~ends, "sink_column"] == heads.loc[~ends, "sink_index"] - 1).all()


def test_a_tokenizer_of_another_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    folder = language_models.save(tmp_path / "model", "gpt2")
    written = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = written["model"]["vocab"]
    vocabulary["cat"], vocabulary["word0"] = 60_000, vocabulary["cat"]
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(sinklab.InputError, match="the id 60000, and the model has vectors for 48 ids"):
        find_inputs(sinklab.load(f"hf:{folder}"), text=language_models.save_text(tmp_path))


def test_without_a_tokenizer_ids_can_be_given_and_text_cannot(tmp_path: Path) -> None:
    folder = language_models.save(tmp_path / "model", "gpt2")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    model = sinklab.load(f"hf:{folder}")
    assert model(language_models.ids()).shape == (2, 14, language_models.WIDTH)
    with pytest.raises(sinklab.InputError, match="no tokenizer came with it") as told:
        find_inputs(model, text=language_models.save_text(tmp_path))
    named = re.findall(r"(sinklab(?:\.\w+)*)\.(\w+)", str(told.value))
    assert len(named) == 3 and all(hasattr(importlib.import_module(module), name) for module, name in named)


def test_without_a_text_the_librarys_source_is_read_and_a_note_says_so(tmp_path: Path) -> None:
    model = sinklab.load(f"hf:{language_models.save(tmp_path / 'model', 'gpt2')}")
    wanted = model.loaded.sequences
    assert wanted is not None and wanted.tokenizer is not None
    knows_all = replace(wanted, tokenizer=replace(wanted.tokenizer, unknown=None))  # or the text would be refused
    model = replace(model, loaded=replace(model.loaded, sequences=knows_all))
    notes = " ".join(find_inputs(model, limit=2).notes)
    assert "no text was named" in notes and "not known to have learned from" in notes


def test_a_file_without_a_weight_loads_nothing_and_says_which(tmp_path: Path) -> None:
    folder = language_models.save(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.self_attn.k_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(sinklab.InputError, match=r"missing +1 +model.layers.1.self_attn.k_proj.weight"):
        sinklab.load(f"hf:{folder}")


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_file_without_the_head_is_the_bare_model(kind: str, tmp_path: Path) -> None:
    folder = language_models.save(tmp_path, kind)
    language_models.build(kind).base_model.save_pretrained(folder)
    model = sinklab.load(f"hf:{folder}")
    assert model.loaded.classify is None and "no language model's head" in " ".join(model.provenance.notes)
    ids = language_models.ids()
    assert torch.equal(model(ids), language_models.model(kind).base_model(ids).last_hidden_state)


def test_random_weights_need_no_file_and_come_from_their_seed(tmp_path: Path) -> None:
    folder = language_models.save(tmp_path, "gpt2")
    (folder / "model.safetensors").unlink()
    first, again, other = (sinklab.load(f"hf:{folder}", random_weights=True, seed=seed) for seed in (1, 1, 2))
    ids = language_models.ids()
    assert torch.equal(first(ids), again(ids)) and not torch.equal(first(ids), other(ids))
    with pytest.raises(sinklab.InputError, match="takes no image size"):
        sinklab.load(f"hf:{folder}", random_weights=True, image_size=32)


def test_other_model_types_are_refused_with_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    with pytest.raises(sinklab.InputError, match="gemma2.*bert.*gpt2.*qwen3"):
        sinklab.load(f"hf:{tmp_path}", random_weights=True)


def test_a_module_in_memory_is_read_as_its_folder_is(tmp_path: Path) -> None:
    text = language_models.save_text(tmp_path)
    loaded = sinklab.load(f"hf:{language_models.save(tmp_path / 'model', 'gpt2')}")
    attached = sinklab.attach(language_models.build("gpt2"), tokenizer=language_models.tokenizer())
    tables = [
        sinklab.diagnose(model, text=text, output=tmp_path / name, report=False, limit=3).heads
        for name, model in (("a", loaded), ("b", attached))
    ]
    assert tables[0].equals(tables[1])
    bare = sinklab.attach(language_models.build("gpt2").transformer)
    assert bare.loaded.classify is None and bare.tokens == loaded.tokens
    given = sinklab.attach(language_models.build("bert"), tokens=TokenMap.sequence((), ordinary="text"))
    assert given.tokens.prefix == ()
    with pytest.raises(sinklab.InputError, match="takes no tokenizer"):
        sinklab.attach(torch.nn.Linear(2, 2), tokens=bare.tokens, tokenizer=language_models.tokenizer())


def test_longer_sequences_than_the_positions_are_refused(tmp_path: Path) -> None:
    model = sinklab.load(f"hf:{language_models.save(tmp_path, 'roberta')}")
    with pytest.raises(sinklab.InputError, match="up to 32 tokens"):
        model(language_models.ids(1, 33))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantized"),
        ("roberta", {"pad_token_id": None}, "lacks pad_token_id"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type"),
    ],
)
def test_a_config_that_cannot_be_read_is_a_sentence(
    kind: str, changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    folder = language_models.save(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises((sinklab.InputError, LookupError), match=words):
        sinklab.load(f"hf:{folder}")


def test_a_window_of_nothing_but_the_tokenizers_own_tokens_is_a_sentence() -> None:
    reading = Reading(
        name="bert", encode=lambda text: [1], length=2, before=(0,), after=(1,), unknown=None, vocabulary=5
    )
    with pytest.raises(sinklab.InputError, match="takes 2 tokens at once, and 2 of them are its own"):
        token_sequences(open_text("stdlib"), reading)


def test_a_size_is_not_asked_of_a_model_of_sequences(tmp_path: Path) -> None:
    with pytest.raises(sinklab.InputError, match="A size is of pictures"):
        sinklab.diagnose("lm:transformer-tiny", output=tmp_path / "run", size=64, limit=2)
    assert not (tmp_path / "run").exists()
