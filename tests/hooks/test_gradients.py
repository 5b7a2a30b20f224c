"""Reading does not disturb training: gradients are the plain ones, and checkpointing's second forward is not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import LAYERS, fresh, pixels
from torch import Tensor, nn

from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.site import find_sites
from sinklab.sinks.reader import StatisticsReader


class Moments(Reader):
    """Every moment of a forward pass, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def resid_pre(self, site: Any, x: Tensor) -> None:
        self.seen.append(f"{site.layer} pre")

    def attention(self, site: Any, call: Any) -> None:
        self.seen.append(f"{site.layer} attention")

    def projected(self, site: Any, x: Tensor, update: Tensor) -> None:
        self.seen.append(f"{site.layer} projected")

    def resid_mid(self, site: Any, x: Tensor) -> None:
        self.seen.append(f"{site.layer} mid")

    def resid_post(self, site: Any, x: Tensor) -> None:
        self.seen.append(f"{site.layer} post")


ONCE = [f"{layer} {moment}" for layer in range(LAYERS) for moment in ("pre", "attention", "projected", "mid", "post")]


def loss(returned: Any) -> Tensor:
    returned = getattr(returned, "last_hidden_state", returned)
    return (returned[0] if isinstance(returned, tuple) else returned).square().sum()


def trained(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A model in training mode, and its gradients without sinklab and without checkpointing."""
    model = fresh(name).train().requires_grad_(True)
    loss(model(pixels(name))).backward()
    return model, taken(model)


def taken(model: nn.Module) -> list[Tensor]:
    """The gradients, which are cleared."""
    held = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return held


@pytest.mark.parametrize("name", ["timm dinov2", "timm eva02", "openclip", "hf dinov2"])
def test_gradients_are_the_plain_gradients(name: str) -> None:
    model, plain = trained(name)
    with HookManager(model, StatisticsReader(find_sites(model))) as hooks:
        loss(hooks.run(pixels(name))).backward()
    for own, expected in zip(taken(model), plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("where", ["inside", "after"])
@pytest.mark.parametrize("name", ["timm dinov2", "hf dinov2"])
def test_checkpointing_is_read_once_wherever_the_backward_runs(name: str, where: str) -> None:
    model, plain = trained(name)
    (model.set_grad_checkpointing if name.startswith("timm") else model.activation_checkpointing_enable)()
    reader = Moments()
    with HookManager(model, reader) as hooks:
        value = loss(hooks.run(pixels(name)))
        if where == "inside":
            value.backward()
    if where == "after":
        value.backward()
    assert reader.seen == ONCE
    assert set(hooks.fired.values()) == {1}
    assert all(torch.equal(own, expected) for own, expected in zip(taken(model), plain, strict=True))


def test_checkpointing_with_a_stand_in_is_read_once_if_the_backward_runs_inside() -> None:
    model, plain = trained("openclip")
    model.set_grad_checkpointing()
    reader = Moments()
    with HookManager(model, reader) as hooks:
        loss(hooks.run(pixels("openclip"))).backward()
    assert reader.seen == ONCE
    for own, expected in zip(taken(model), plain, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max()))


def test_an_epoch_of_forward_and_backward_is_read_forward_by_forward() -> None:
    model, _ = trained("timm dinov2")
    model.set_grad_checkpointing()
    reader = StatisticsReader(find_sites(model))
    with HookManager(model, reader) as hooks:
        for step in range(3):
            loss(hooks.run(pixels("timm dinov2", seed=step))).backward()
            layers, found, _ = reader.take()
            assert layers == list(range(LAYERS)) and bool(found["finite"].all())
    assert set(hooks.fired.values()) == {3}
