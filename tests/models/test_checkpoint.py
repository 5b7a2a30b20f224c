"""Files of weights: every kind a user may have lying about, good and bad."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sinklab.errors import InputError, NotFoundError
from sinklab.models.checkpoint import read

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


def test_safetensors_and_torch_files_hold_the_same_tensors(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    torch.save(WEIGHTS, tmp_path / "w.pth")
    for name in ("w.safetensors", "w.pth"):
        state = read(tmp_path / name).state
        assert state.keys() == WEIGHTS.keys()
        assert all(torch.equal(state[key], WEIGHTS[key]) for key in WEIGHTS)


def test_safetensors_are_recognised_under_another_ending(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "w.bin")
    assert read(tmp_path / "w.bin").state.keys() == WEIGHTS.keys()


def test_the_digest_is_the_files_own(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pth")
    assert read(tmp_path / "w.pth").sha256 == hashlib.sha256((tmp_path / "w.pth").read_bytes()).hexdigest()


@pytest.mark.parametrize("nest", ["teacher", "model", "state_dict", "model_ema", "module"])
def test_weights_inside_a_training_checkpoint_are_found(tmp_path: Path, nest: str) -> None:
    torch.save({nest: WEIGHTS, "epoch": 3}, tmp_path / "w.pth")
    held = read(tmp_path / "w.pth")
    assert held.state.keys() == WEIGHTS.keys()
    assert any(repr(nest) in note for note in held.notes)


def test_averaged_weights_come_before_raw_ones(tmp_path: Path) -> None:
    averaged = {name: value + 1 for name, value in WEIGHTS.items()}
    torch.save({"model": WEIGHTS, "model_ema": averaged}, tmp_path / "w.pth")
    assert torch.equal(read(tmp_path / "w.pth").state["a.bias"], averaged["a.bias"])


def test_shards_are_read_together(tmp_path: Path) -> None:
    for number, name in enumerate(WEIGHTS):
        save_file({name: WEIGHTS[name]}, tmp_path / f"part-{number}.safetensors")
    listed = {name: f"part-{number}.safetensors" for number, name in enumerate(WEIGHTS)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    assert read(tmp_path / "model.safetensors.index.json").state.keys() == WEIGHTS.keys()
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"part-1\.safetensors"):
        read(tmp_path / "model.safetensors.index.json")


def test_a_pickle_of_other_objects_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save({"model": WEIGHTS, "args": argparse.Namespace(lr=1.0)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="--allow-pickle"):
        read(tmp_path / "w.pth")
    assert read(tmp_path / "w.pth", allow_pickle=True).state.keys() == WEIGHTS.keys()


def test_a_whole_pickled_module_needs_permission(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "w.pt")
    with pytest.raises(InputError, match="--allow-pickle"):
        read(tmp_path / "w.pt")
    assert set(read(tmp_path / "w.pt", allow_pickle=True).state) == {"weight", "bias"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_torchscript_archive_needs_permission(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), str(tmp_path / "w.pt"))
    with pytest.raises(InputError, match="TorchScript.*--allow-pickle"):
        read(tmp_path / "w.pt")
    assert set(read(tmp_path / "w.pt", allow_pickle=True).state) == {"weight", "bias"}


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_a_truncated_file_is_named_as_such(tmp_path: Path, ending: str, share: float) -> None:
    whole = tmp_path / f"whole{ending}"
    large = {"a": torch.randn(200, 200)}
    if ending == ".pth":
        torch.save(large, whole)
    else:
        save_file(large, whole)
    cut = tmp_path / f"cut{ending}"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
    with pytest.raises(InputError, match="truncated"):
        read(cut)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>403</html>", "web page"),
        (b"\n<html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b"not weights at all", "not a file of weights"),
        (b"\x93NUMPY\x01\x00", "not a file of weights"),
    ],
)
def test_what_is_no_weights_file_gets_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(InputError, match=said):
        read(tmp_path / "w.pth")


def test_a_web_page_named_safetensors_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"<!doctype html><html>login</html>")
    with pytest.raises(InputError, match="web page"):
        read(tmp_path / "w.safetensors")


def test_a_file_without_named_tensors_gets_a_sentence(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "w.pth")
    with pytest.raises(InputError, match="no named tensors"):
        read(tmp_path / "w.pth")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.pth"):
        read(tmp_path / "none.pth")


def test_bfloat16_is_kept_and_float16_widened(tmp_path: Path) -> None:
    for kind, kept in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ):
        torch.save({name: value.to(kind) for name, value in WEIGHTS.items()}, tmp_path / "w.pth")
        held = read(tmp_path / "w.pth")
        assert held.dtype == kept
        assert bool(held.notes) == (kind != torch.float32)
