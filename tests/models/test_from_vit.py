"""Vision transformers by path: members of a training run with their probe, and the paper's own checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sinklab
from sinklab.errors import InputError, NotFoundError
from sinklab.models.from_vit import is_authors
from sinklab.models.vit import ViT, ViTShape
from sinklab.models.vit_file import described
from sinklab.training.checkpoint import save_model

SMALL: dict[str, Any] = {"image": 32, "patch": 8, "dim": 24, "depth": 2, "heads": 3}
NAMES = (
    ("attn.gate.", "attn.gate_proj."),
    ("pathway.pool.", "gp.w_P."),
    ("pathway.value.", "gp.W_VG."),
    ("pathway.out.", "gp.W_OG."),
    ("pathway.recipient.", "gp.gate."),
)


def drawn(**changes: Any) -> ViT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ViT(ViTShape(**SMALL | changes)).eval()


def pixels() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def as_authors(vit: ViT) -> dict[str, Tensor]:
    """A network's weights as the paper's scripts name them, with parts that are not of the backbone."""
    state: dict[str, Tensor] = {}
    for name, value in vit.state_dict().items():
        for here, there in NAMES:
            name = name.replace(here, there)
        state[f"backbone.{name}"] = value.clone()
    return state | {"projector.0.weight": torch.zeros(2, 2), "probe.1.weight": torch.zeros(3, 24)}


def member(folder: Path, *, probe: bool = True, pictures: dict[str, Any] | None = None, **changes: Any) -> ViT:
    vit = drawn(**changes)
    own = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 5)) if probe else None
    about = {
        **described(vit.shape),
        "arm": "baseline",
        "seed": 0,
        "step": 3,
        "preprocessing": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"},
        "pictures": pictures,
    }
    save_model(folder / "model.safetensors", vit, about, beside={"probe": own})
    return vit


def test_a_member_is_its_network_shown_as_it_was_trained(tmp_path: Path) -> None:
    vit = member(tmp_path, gate="elementwise", pathway="learned", registers=2)
    for named in (tmp_path, tmp_path / "model.safetensors"):
        model = sinklab.load(str(named))
        assert torch.equal(model(pixels()), vit(pixels()))
        assert model.tokens.prefix == ("cls", "register", "register")
        assert model.preprocessing is not None and model.preprocessing.mean == (0.1, 0.2, 0.3)
        assert model.preprocessing.interpolation == "bilinear" and model.loaded.usual_size == 32
        assert not any(parameter.requires_grad for parameter in model.module.parameters())


def test_the_saved_probe_classifies_by_the_cls_token(tmp_path: Path) -> None:
    member(tmp_path)
    model = sinklab.load(str(tmp_path))
    tokens = model(pixels())
    assert model.loaded.classify is not None
    logits = model.loaded.classify(model.module, tokens)
    moved = tokens.clone()
    moved[:, 1:] += 1
    assert logits.shape == (2, 5) and torch.equal(model.loaded.classify(model.module, moved), logits)
    member(tmp_path / "without", probe=False)
    assert sinklab.load(str(tmp_path / "without")).loaded.classify is None


def test_a_run_of_one_member_is_that_member_and_of_several_asks_which(tmp_path: Path) -> None:
    vit = member(tmp_path / "training/seed-0/baseline-tiny")
    about = {"purpose": "training", "members": ["seed-0/baseline-tiny"]}
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert torch.equal(sinklab.load(str(tmp_path))(pixels()), vit(pixels()))
    member(tmp_path / "training/seed-1/baseline-tiny")
    (tmp_path / "run.json").write_text(
        json.dumps(about | {"members": ["seed-0/baseline-tiny", "seed-1/baseline-tiny"]})
    )
    with pytest.raises(InputError, match="trained 2 models: name the folder of one"):
        sinklab.load(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"registers": 2},
        {"gate": "elementwise"},
        {"gate": "headwise"},
        {"pathway": "learned", "pathway_scale": 0.5, "state_dim": 8},
        {"pathway": "hier", "gate": "elementwise", "registers": 1, "state_dim": 8},
    ],
)
def test_a_checkpoint_with_the_authors_names_gives_the_same_outputs(tmp_path: Path, changes: dict[str, Any]) -> None:
    vit = drawn(**changes)
    path = tmp_path / "theirs.safetensors"
    save_file(as_authors(vit), path)
    (tmp_path / "theirs.json").write_text(json.dumps({"model": "vit", "kwargs": {"heads": 3}}))
    model = sinklab.load(str(path))
    assert torch.equal(model(pixels()), vit(pixels()))
    assert any("left out: probe.1.weight, projector.0.weight" in note for note in model.provenance.notes)
    assert f"{len(vit.state_dict())} weights taken" in " ".join(model.provenance.notes)
    again = sinklab.load(**model.provenance.request)
    assert torch.equal(again(pixels()), vit(pixels()))


def test_a_width_of_the_papers_needs_no_sidecar_and_another_asks_for_the_heads(tmp_path: Path) -> None:
    vit = drawn(dim=384, heads=6, depth=1)
    torch.save({"epoch": 1, "model": as_authors(vit)}, tmp_path / "theirs.pth")
    model = sinklab.load(str(tmp_path / "theirs.pth"))
    assert len(model.sites) == 1 and model.sites[0].heads == 6 and torch.equal(model(pixels()), vit(pixels()))
    save_file(as_authors(drawn()), tmp_path / "narrow.safetensors")
    with pytest.raises(InputError, match='width of 24.*narrow.json says it: {"model": "vit"'):
        sinklab.load(str(tmp_path / "narrow.safetensors"))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = as_authors(drawn(dim=384, heads=6, gate="elementwise"))
    del state["backbone.blocks.1.attn.gate_proj.bias"]
    save_file(state, tmp_path / "theirs.safetensors")
    with pytest.raises(InputError, match=r"missing: blocks\.1\.attn\.gate\.bias"):
        sinklab.load(str(tmp_path / "theirs.safetensors"))
    with pytest.raises(InputError, match="The weights of theirs.safetensors do not fit the model whole"):
        sinklab.load(str(tmp_path / "theirs.safetensors"))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"head": 6}, "theirs.json has the kwargs head, which no vision transformer has; what fits is image, patch, "),
        ({"heads": "6"}, "theirs.json: heads is '6', which is not of the type int"),
        ({"heads": 6.5}, "theirs.json: heads is 6.5, which is not of the type int"),
        ({"qkv_bias": 1}, "theirs.json: qkv_bias is 1, which is not of the type bool"),
        ({"heads": 0}, "theirs.safetensors: A vision transformer's heads is at least 1, not 0"),
        ({"heads": 7}, "theirs.safetensors: 7 heads do not divide a width of 384"),
    ],
)
def test_a_sidecar_that_says_what_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, kwargs: dict[str, Any], words: str
) -> None:
    save_file(as_authors(drawn(dim=384, heads=6)), tmp_path / "theirs.safetensors")
    (tmp_path / "theirs.json").write_text(json.dumps({"model": "vit", "kwargs": kwargs}))
    with pytest.raises(InputError, match=words) as refused:
        sinklab.load(str(tmp_path / "theirs.safetensors"))
    assert "__init__" not in str(refused.value) and "says it:" not in str(refused.value)


def test_a_sidecar_may_say_what_weights_do_not(tmp_path: Path) -> None:
    vit = drawn(pathway="learned", pathway_scale=1.0, norm_eps=1e-6)
    save_file(as_authors(vit), tmp_path / "theirs.safetensors")
    kwargs = {"heads": 3, "norm_eps": 1e-6, "pathway_scale": 1, "layer_scale": 0.5}
    (tmp_path / "theirs.json").write_text(json.dumps({"model": "vit", "kwargs": kwargs}))
    assert torch.equal(sinklab.load(str(tmp_path / "theirs.safetensors"))(pixels()), vit(pixels()))


@pytest.mark.parametrize("inside", [True, False], ids=["backbone", "bare"])
@pytest.mark.parametrize("kept", ["w_P", "W_VG", "gate"])
def test_half_a_pathway_names_the_weights_that_are_missing(tmp_path: Path, kept: str, inside: bool) -> None:
    state = as_authors(drawn(dim=384, heads=6, pathway="learned", pathway_scale=1.0))
    state = {name: value for name, value in state.items() if ".gp." not in name or f".gp.{kept}." in name}
    if not inside:
        state = {name.removeprefix("backbone."): state[name] for name in state if name.startswith("backbone.")}
    torch.save(state, tmp_path / "gp.pth")
    parts = {"w_P": "pool", "W_VG": "value", "W_OG": "out"}
    missing = [f"blocks.0.pathway.{here}.weight" for there, here in parts.items() if there != kept]
    with pytest.raises(InputError, match="gp.pth: The weights have a global pathway") as refused:
        sinklab.load(str(tmp_path / "gp.pth"))
    assert str(refused.value).endswith(f"missing: {', '.join(missing)}.")


def test_a_pathways_gate_of_another_size_is_said(tmp_path: Path) -> None:
    state = as_authors(drawn(dim=384, heads=6, pathway="hier"))
    state["backbone.blocks.0.gp.gate.weight"] = torch.zeros(2, 384)
    torch.save(state, tmp_path / "gp.pth")
    with pytest.raises(InputError, match="recipient.weight has 2 rows; a pathway's gate has 1 .learned. or 3 .hier."):
        sinklab.load(str(tmp_path / "gp.pth"))


def test_timms_names_are_not_taken_for_the_authors(tmp_path: Path) -> None:
    plain = drawn().state_dict()
    assert not is_authors(plain) and is_authors(as_authors(drawn()))
    assert is_authors(drawn(pathway="learned", pathway_scale=1.0).state_dict())  # ls3 is nobody else's
    save_file(plain, tmp_path / "plain.safetensors")
    with pytest.raises(NotFoundError, match="does not say which architecture"):
        sinklab.load(str(tmp_path / "plain.safetensors"))


def test_a_model_of_drawn_pictures_is_diagnosed_on_held_out_ones_and_patched_again(tmp_path: Path) -> None:
    pictures = {"kind": "procedural", "count": 6, "size": 32, "seed": 0, "split": "validation"}
    member(tmp_path / "m", pictures=pictures)
    run = sinklab.diagnose(str(tmp_path / "m"), output=tmp_path / "run", limit=4, rule=sinklab.SinkRule.mass(0.01))
    assert run.config["images"]["size"] == [32, 32] and run.config["images"]["count"] == 4
    assert (run.path / "overlays/pictures.json").is_file() and not run.config["notes"]
    assert all(name.startswith("validation-0-") for name in run.heads["image"])
    patched = sinklab.patch(run, edits=("zero",), classes=("nop", "broadcast", "intermediate"), per_class=1, block0=1)
    assert patched.config["patch"]["status"] == "complete"
