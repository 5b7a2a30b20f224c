"""The entry: which name goes where, what excludes what, and what bad names get."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sinklab.errors import InputError, NotFoundError
from sinklab.models.load import describe_names, load


def test_importing_the_entry_loads_no_heavy_library() -> None:
    code = (
        "import sys, sinklab.models.load\n"
        "heavy = {'torch', 'timm', 'open_clip', 'transformers', 'numpy', 'onnx', 'safetensors'} & sys.modules.keys()\n"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert ended.returncode == 0, ended.stderr


def test_every_kind_of_name_has_a_row() -> None:
    rows = describe_names()
    kinds = {"demo", "timm", "openclip", "hf", "tlens", "dinov2", "toy", "lm", "PATH"}
    assert {row["name"].partition(":")[0] for row in rows} == kinds
    assert all(row.keys() == {"name", "loads", "example"} and all(row.values()) for row in rows)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nonsense", "What can be named: demo, timm:NAME"),
        ("dem", "Close: demo"),
        ("vits14", "Close: dinov2:vits14"),
        ("vit_small_patch14_dinov2", "Close: timm:vit_small_patch14_dinov2"),
        ("ViT-B-16", "Close: openclip:ViT-B-16"),
        ("tim:vit_tiny_patch16_224", "Close: timm:vit_tiny_patch16_224"),
        ("./weights.pth", "There is no file or folder"),
        ("models/thing", "There is no file or folder"),
        ("weights.safetensors", "There is no file or folder"),
    ],
)
def test_an_unknown_name_gets_close_ones_and_the_list(name: str, said: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        load(name)
    assert said in str(caught.value)


def test_a_prefix_alone_gets_an_example() -> None:
    for prefix in ("timm", "openclip", "hf", "dinov2"):
        with pytest.raises(InputError, match=f"e.g. {prefix}:"):
            load(f"{prefix}:")


def test_options_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="choose one"):
        load("timm:test_vit", weights=tmp_path / "w.pth", random_weights=True)
    with pytest.raises(NotFoundError, match="no weights file"):
        load("timm:test_vit", weights=tmp_path / "none.pth")
    for size in ((1, 2, 3), (0, 5), "224", 1.5, True):
        with pytest.raises(InputError, match="image_size"):
            load("timm:test_vit", random_weights=True, image_size=size)  # type: ignore[arg-type]


def test_weights_that_are_not_there_are_not_drawn_at_random(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("timm:vit_tiny_patch16_224", "openclip:ViT-B-32/openai", "hf:facebook/dinov2-small"):
        with pytest.raises(NotFoundError, match="offline"):
            load(name, offline=True)
    with pytest.raises(NotFoundError, match="random weights"):
        load("timm:vit_small_patch16_36x1_224", offline=True)  # timm has none for it


@pytest.mark.parametrize("family", ["timm", "dinov2", "openclip", "hf", "sidecar"])
def test_with_a_local_file_nothing_touches_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    path = local_model(family, tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load(path[0], weights=path[1]).provenance.sha256  # and not told to stay offline


def local_model(family: str, folder: Path) -> tuple[str, Path | None]:
    """A name and a weights file to load it from, both on this machine."""
    import json

    import huggingface_models
    import timm

    from sinklab.models import from_openclip, openclip_names

    if family == "hf":
        huggingface_models.save("dinov2", folder)
        return f"hf:{folder}", None
    if family == "openclip":
        tower = from_openclip.build(openclip_names.config_of("ViT-S-32-alt", {}))
        torch.save(tower.state_dict(), folder / "w.pt")
        return f"openclip:ViT-S-32-alt/{folder}/w.pt", None
    name = "vit_small_patch14_dinov2.lvd142m" if family == "dinov2" else "test_vit"
    torch.save(timm.create_model(name).state_dict(), folder / "w.pt")
    if family == "sidecar":
        (folder / "w.json").write_text(json.dumps({"model": "timm:test_vit"}))
        return str(folder / "w.pt"), None
    return ("dinov2:vits14" if family == "dinov2" else "timm:test_vit"), folder / "w.pt"
