"""What people wrap round a model is looked through, and what hides it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from families import LAYERS, fresh, module, pixels
from torch import nn

from sinklab.errors import InputError
from sinklab.hooks.manager import HookManager
from sinklab.hooks.site import find_sites
from sinklab.hooks.wrappers import unwrap
from sinklab.sinks.reader import StatisticsReader


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def read(model: nn.Module, name: str = "timm dinov2") -> dict[str, torch.Tensor]:
    reader = StatisticsReader(find_sites(model))
    with torch.no_grad(), HookManager(model, reader) as hooks:
        hooks.run(pixels(name))
    return reader.take()[1]


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_is_looked_through() -> None:
    """Complaint 23."""
    model = fresh("timm dinov2").requires_grad_(True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert unwrap(wrapped) is model
    assert torch.equal(read(wrapped)["inflow"], read(model)["inflow"])


def test_a_nest_of_wrappers_is_looked_through() -> None:
    model = fresh("timm dinov2")
    wrapped = torch.compile(nn.DataParallel(torch.compile(model, backend="eager")), backend="eager")
    assert unwrap(wrapped) is model
    assert len(find_sites(wrapped)) == LAYERS


def test_a_wrapper_inside_the_model_is_looked_through_too() -> None:
    """Blocks compiled one by one, as training scripts do: each is a compiled module inside a plain one."""
    model, plain = fresh("timm dinov2"), read(module("timm dinov2"))
    for block in model.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        model(pixels("timm dinov2"))
    kept = [block._compiled_call_impl for block in model.blocks]
    assert torch.equal(read(model)["inflow"], plain["inflow"])
    assert [block._compiled_call_impl for block in model.blocks] == kept


def test_blocks_replaced_by_compiled_modules_are_read() -> None:
    """model.blocks[i] = torch.compile(model.blocks[i]), compiled and run before anything is attached."""
    model, plain = fresh("timm dinov2"), read(module("timm dinov2"))
    for position, block in enumerate(model.blocks):
        model.blocks[position] = torch.compile(block, backend="eager")
    with torch.no_grad():
        model(pixels("timm dinov2"))
    assert torch.equal(read(model)["inflow"], plain["inflow"])


def test_a_compiled_function_and_other_things_are_refused_with_what_to_give() -> None:
    with pytest.raises(InputError, match="give the model itself, not a compiled function"):
        unwrap(torch.compile(lambda x: x, backend="eager"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not to str"):
        unwrap("model")  # type: ignore[arg-type]
