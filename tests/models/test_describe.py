"""What is read off a module: activation, LayerScale, wrappers."""

from __future__ import annotations

import warnings

import open_clip.transformer
import pytest
import timm
import torch
from torch import nn

from sinklab.models.describe import activation_note, activation_of, inner, layer_scale_of, versions_of

SMALL = {"img_size": 28, "patch_size": 14, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}


def test_the_activation_is_read_from_the_module() -> None:
    def timm_activation(name: str) -> str:
        with torch.device("meta"):
            return activation_of(timm.create_model(name))

    assert timm_activation("vit_tiny_patch16_224") == "GELU"
    assert timm_activation("vit_base_patch16_clip_quickgelu_224") == "QuickGELU"
    assert timm_activation("vit_giant_patch14_dinov2") == "SwiGLU"
    assert timm_activation("eva02_tiny_patch14_224") == "SwiGLU"
    assert timm_activation("vit_small_patch16_dinov3") == "GELU"
    assert timm_activation("vit_relpos_small_patch16_224") == "GELU"  # its position network has a ReLU of its own
    tower = open_clip.transformer.VisionTransformer(28, 14, 32, 1, 2, 2.0, act_layer=open_clip.transformer.QuickGELU)
    assert activation_of(tower) == "QuickGELU"
    assert activation_of(nn.Linear(2, 2)) == "unknown"


def test_layer_scale_statistics_are_of_the_attention_branch() -> None:
    model = timm.create_model("vit_small_patch14_dinov2", **SMALL)
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.ls1.gamma.fill_(-1.0 - number)
            block.ls2.gamma.fill_(99.0)
    assert layer_scale_of(model) == {"min": 1.0, "median": 1.0, "max": 2.0}
    assert layer_scale_of(timm.create_model("vit_tiny_patch16_224", **SMALL)) is None


@pytest.mark.parametrize(
    ("label", "activation", "quick", "warned"),
    [
        ("openai", "GELU", None, True),
        ("openai", "QuickGELU", None, False),
        ("vit_base_patch16_clip_224.openai_ft_in1k", "GELU", None, False),
        ("laion2b_s34b_b79k", "GELU", None, False),
        ("laion2b_s34b_b79k", "QuickGELU", False, True),
        ("some_tag", "GELU", True, True),
        ("metaclip_400m", "GELU", None, True),
    ],
)
def test_a_mismatched_activation_is_warned_of(label: str, activation: str, quick: bool | None, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        notes = activation_note(label, activation, quick)
    assert bool(notes) == bool(caught) == warned


def test_wrappers_are_looked_through() -> None:
    class DataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    network = nn.Linear(2, 2)
    assert inner(DataParallel(torch.compile(network))) is network
    assert inner(network) is network


def test_versions_are_those_installed() -> None:
    assert versions_of("timm") == {"torch": torch.__version__.partition("+")[0], "timm": timm.__version__}
