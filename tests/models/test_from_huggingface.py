"""Hugging Face vision models from local folders, old and new parameter names, whole CLIPs and SigLIPs."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_models import KINDS, build, final_tokens, save
from safetensors.torch import load_file, save_file

from sinklab.errors import InputError, NotFoundError
from sinklab.models.load import load

PATCH = 14


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_models_own(tmp_path: Path, kind: str) -> None:
    tower = save(kind, tmp_path)
    loaded = load(f"hf:{tmp_path}", offline=True)
    pixels = torch.randn(2, 3, 28, 28)
    assert torch.equal(loaded.forward(loaded.module, pixels), final_tokens(tower, pixels))
    assert loaded.module.config._attn_implementation == "sdpa"
    assert not loaded.module.training and not any(value.requires_grad for value in loaded.module.parameters())
    assert pickle.loads(pickle.dumps(loaded.forward)) is loaded.forward


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(28, 28), (56, 28), (45, 60)])
def test_the_token_map_counts_what_comes_out_at_any_size(tmp_path: Path, kind: str, size: tuple[int, int]) -> None:
    save(kind, tmp_path)
    loaded = load(f"hf:{tmp_path}", offline=True)
    tokens = loaded.forward(loaded.module, torch.randn(1, 3, *size))
    assert loaded.tokens.prefix == KINDS[kind].prefix
    assert tokens.shape[1] == loaded.tokens.tokens(*size) == len(KINDS[kind].prefix) + (size[0] // 14) * (size[1] // 14)


def newest_names(folder: Path, tower: Any) -> None:
    """Write the file again with the names that the module has now."""
    save_file({name: value.contiguous() for name, value in tower.state_dict().items()}, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["dinov2", "dinov2 swiglu", "registers", "vit", "dinov3"])
def test_old_and_new_parameter_names_load_alike(tmp_path: Path, kind: str) -> None:
    tower = save(kind, tmp_path)
    old = load(f"hf:{tmp_path}", offline=True)
    newest_names(tmp_path, tower)
    new = load(f"hf:{tmp_path}", offline=True)
    assert all(torch.equal(value, new.module.state_dict()[name]) for name, value in old.module.state_dict().items())
    assert new.extra["weights"]["renamed"] == 0 and old.extra["weights"]["renamed"] > 0


@pytest.mark.parametrize("kind", ["dinov2", "vit"])
def test_the_names_of_transformers_four_load(tmp_path: Path, kind: str) -> None:
    """`attention.attention.query` and `attention.output.dense`, whatever save_pretrained writes today."""
    tower = save(kind, tmp_path)
    newest_names(tmp_path, tower)
    state = {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        name = re.sub(r"^layers\.", "encoder.layer.", name)
        for new, old in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            name = name.replace(f"attention.{new}.", f"attention.attention.{old}.")
        name = name.replace("attention.o_proj.", "attention.output.dense.")
        if kind == "vit":
            name = name.replace("mlp.fc1.", "intermediate.dense.").replace("mlp.fc2.", "output.dense.")
        state[name] = value
    save_file(state, tmp_path / "model.safetensors")
    pixels = torch.randn(1, 3, 28, 28)
    loaded = load(f"hf:{tmp_path}", offline=True)
    assert torch.equal(loaded.forward(loaded.module, pixels), final_tokens(tower, pixels))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_of_a_whole_model_the_vision_half_is_read(tmp_path: Path, kind: str) -> None:
    tower = save(kind, tmp_path)
    loaded = load(f"hf:{tmp_path}", offline=True)
    assert loaded.provenance.architecture in ("CLIPVisionModel", "SiglipVisionModel")
    assert loaded.extra["weights"]["ignored"] > 0
    assert loaded.provenance.parameters < sum(value.numel() for value in tower.parameters()) + 1
    assert loaded.provenance.activation == ("QuickGELU" if kind == "clip" else "GELUTanh")


def test_siglips_pool_is_not_built(tmp_path: Path) -> None:
    save("siglip vision", tmp_path)
    assert not hasattr(load(f"hf:{tmp_path}", offline=True).module, "head")


def test_a_missing_or_foreign_tensor_is_reported_and_nothing_loaded(tmp_path: Path) -> None:
    tower = save("dinov2", tmp_path)
    state = {name: value.contiguous() for name, value in tower.state_dict().items()}
    state["stranger"] = torch.ones(1)
    state["embeddings.position_embeddings"] = torch.zeros(1, 10, 32)
    del state["encoder.layer.1.norm1.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="nothing was loaded") as caught:
        load(f"hf:{tmp_path}", offline=True)
    for part in ("stranger", "encoder.layer.1.norm1.weight", ": model [1, 5, 32], file [1, 10, 32]"):
        assert part in str(caught.value)


def test_metas_names_load_into_hugging_faces_network(tmp_path: Path) -> None:
    from sinklab.models import rename

    tower = save("registers", tmp_path)
    hub = rename.hub_from_huggingface(tower.state_dict())
    torch.save({f"backbone.{name}": value for name, value in hub.items()}, tmp_path / "meta.pth")
    loaded = load(f"hf:{tmp_path}", weights=tmp_path / "meta.pth", offline=True)
    pixels = torch.randn(1, 3, 28, 28)
    assert torch.equal(loaded.forward(loaded.module, pixels), final_tokens(tower, pixels))


def test_a_training_scripts_prefix_is_taken_off(tmp_path: Path) -> None:
    tower = save("vit", tmp_path)
    torch.save({f"module.encoder.{key}": value for key, value in tower.state_dict().items()}, tmp_path / "w.pth")
    loaded = load(f"hf:{tmp_path}", weights=tmp_path / "w.pth", offline=True)
    pixels = torch.randn(1, 3, 28, 28)
    assert torch.equal(loaded.forward(loaded.module, pixels), final_tokens(tower, pixels))


def test_a_pytorch_bin_and_shards_load(tmp_path: Path) -> None:
    tower = save("vit", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tower.state_dict(), tmp_path / "pytorch_model.bin")
    assert load(f"hf:{tmp_path}", offline=True).provenance.source == "pytorch_model.bin"
    (tmp_path / "pytorch_model.bin").unlink()
    tower.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert "shards" in load(f"hf:{tmp_path}", offline=True).provenance.source


def test_a_bfloat16_model_stays_bfloat16(tmp_path: Path) -> None:
    build("dinov2").bfloat16().save_pretrained(tmp_path)
    loaded = load(f"hf:{tmp_path}", offline=True)
    assert {value.dtype for value in loaded.module.parameters()} == {torch.bfloat16}
    assert loaded.forward(loaded.module, torch.randn(1, 3, 28, 28)).dtype == torch.bfloat16


def test_random_weights_need_a_config_only(tmp_path: Path) -> None:
    save("vit", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"model\.safetensors"):
        load(f"hf:{tmp_path}", offline=True)
    first, again = (load(f"hf:{tmp_path}", random_weights=True, seed=2, image_size=56) for _ in range(2))
    assert first.extra["position_table"]["grid"] == [4, 4]
    assert torch.equal(first.module.embeddings.cls_token, again.module.embeddings.cls_token)
    assert first.module.config._attn_implementation == "sdpa"
    with pytest.raises(InputError, match="square"):
        load(f"hf:{tmp_path}", random_weights=True, image_size=(56, 28))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
            {"size": (224, 224), "crop_fraction": 0.875, "crop_mode": "center"},
        ),
        ({"size": {"height": 384, "width": 384}, "resample": 2}, {"size": (384, 384), "crop_mode": "squash"}),
        ({"size": 224, "resample": 1}, {"size": (224, 224), "interpolation": "lanczos"}),
        ({"do_normalize": False, "size": {"height": 28, "width": 28}}, {"mean": (0, 0, 0), "std": (1, 1, 1)}),
        ({"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}, {"mean": (0.1, 0.2, 0.3), "size": (28, 28)}),
    ],
)
def test_preprocessing_is_read_from_its_file(tmp_path: Path, written: dict[str, Any], expected: dict[str, Any]) -> None:
    save("dinov2", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    loaded = load(f"hf:{tmp_path}", offline=True)
    assert {name: getattr(loaded.preprocessing, name) for name in expected} == expected
    assert not any("preprocessing assumed" in note for note in loaded.provenance.notes)


def test_assumed_preprocessing_is_noted(tmp_path: Path) -> None:
    save("clip vision", tmp_path)
    loaded = load(f"hf:{tmp_path}", offline=True)
    assert loaded.preprocessing.mean == pytest.approx((0.4814, 0.4578, 0.4082), abs=1e-3)
    assert any("preprocessing assumed" in note for note in loaded.provenance.notes)


def test_what_is_no_model_folder_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        load(f"hf:{tmp_path}")
    with pytest.raises(NotFoundError, match="There is no folder"):
        load(f"hf:{tmp_path}/nowhere")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(InputError, match="not readable JSON"):
        load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "swin"}')
    with pytest.raises(InputError, match="model_type 'swin'.*dinov2_with_registers"):
        load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    with pytest.raises(InputError, match="timm:vit_tiny_patch16_224"):
        load(f"hf:{tmp_path}")


def test_loading_leaves_transformers_verbosity_as_it_was(tmp_path: Path) -> None:
    save("dinov2", tmp_path)
    level = transformers.logging.get_verbosity()
    load(f"hf:{tmp_path}", offline=True)
    assert transformers.logging.get_verbosity() == level
