"""Attention whose values are phases: found, attached to, and proved through G, the tangent and the bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phase_models import ids, kuramoto
from torch import Tensor

from sinklab.errors import InputError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.phase import on_circle
from sinklab.hooks.proof import prove
from sinklab.hooks.site import find_sites
from sinklab.models.lm_config import ABLATIONS


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_every_layer_is_a_site_whose_values_are_cosines_and_sines(heads: int) -> None:
    sites = find_sites(kuramoto(heads=heads))
    assert [site.name for site in sites] == ["blocks.0.attention", "blocks.1.attention"]
    assert {(site.heads, site.head_dim, site.axis) for site in sites} == {(heads, 12 // heads, "contribution")}


@pytest.mark.parametrize("changes", [{"heads": 1}, {"wrap": True, "phase_init": "uniform"}, *ABLATIONS.values()])
def test_the_heads_resultants_lead_to_what_the_block_adds(changes: dict[str, Any]) -> None:
    for proof in prove(kuramoto(**changes), ids()):
        assert proof.update is not None and proof.update < 1e-12 and not proof.failures


def test_a_block_that_adds_something_else_is_refused() -> None:
    model = kuramoto()
    model.blocks[1].attention.tangent = torch.nn.Softplus()
    with pytest.raises(InputError, match=r"blocks\.1\.attention.*do not add up"):
        prove(model, ids())


def test_the_heads_shares_lie_in_g_where_their_phases_are() -> None:
    """Σ_h places_h z_h is G, as the model itself puts it together."""
    model, seen = kuramoto(heads=3), {}

    class Both(Reader):
        def attention(self, site: Any, call: Any) -> None:
            seen["z"] = call.z

        def projected(self, site: Any, x: Tensor, update: Tensor) -> None:
            seen["G"] = x

    with HookManager(model, Both(), layers=[1]) as hooks:
        hooks.run(ids())
    places = find_sites(model)[1].output_weight()
    torch.testing.assert_close(torch.einsum("bhqd,hcd->bqc", seen["z"], places), seen["G"], rtol=0, atol=1e-15)


def test_whole_turns_are_no_difference_between_angles() -> None:
    turns = torch.tensor([0.0, 7.0, -13.0]).double()
    torch.testing.assert_close(on_circle(0.3 + 2 * torch.pi * turns), torch.full((3,), 0.3).double())
