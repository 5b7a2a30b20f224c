"""Compare the names and shapes of a checkpoint with those of an architecture, and load only what fits whole.

A checkpoint is loaded entirely or not at all: the report says what matched, what was renamed, what is missing,
unexpected or of another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinklab.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn

_SHOWN = 6
"""Names listed per heading; the count is always given."""
_SHAPES_SHOWN = 10
"""Lines of names whose shapes differ."""


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """What became of every name, on both sides."""

    matched: tuple[str, ...]
    """In the model and in the file under the same name."""
    renamed: tuple[str, ...]
    """In the model, found in the file under another name or put together from several."""
    missing: tuple[str, ...]
    """In the model, not in the file."""
    unexpected: tuple[str, ...]
    """In the file, unknown to the model."""
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(name, the model's shape, the file's shape)."""
    ignored: tuple[str, ...]
    """In the file and left aside on purpose: heads, text towers, mask tokens, optimiser counters."""

    @property
    def fits(self) -> bool:
        """Whether every weight of the model is there in its shape, and nothing is left over."""
        return not (self.missing or self.unexpected or self.mismatched)

    def counts(self) -> dict[str, int]:
        """How many names under each heading."""
        return {
            "matched": len(self.matched),
            "renamed": len(self.renamed),
            "missing": len(self.missing),
            "unexpected": len(self.unexpected),
            "mismatched": len(self.mismatched),
            "ignored": len(self.ignored),
        }

    def text(self) -> str:
        """One line a heading, with the count and the first names, and one line for each of the first other shapes."""
        rows = [
            ("matched", self.matched),
            ("renamed", self.renamed),
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("other shape", tuple(name for name, _, _ in self.mismatched)),
            ("ignored", self.ignored),
        ]
        lines = []
        for title, names in rows:
            apart = title == "other shape"
            lines.append(f"  {title:<11} {len(names):>5}  {'' if apart else _first(names)}".rstrip())
            lines += self._shapes() if apart else []
        return "\n".join(lines)

    def _shapes(self) -> list[str]:
        some = self.mismatched[:_SHAPES_SHOWN]
        lines = [f"      {name}: model {list(model)}, file {list(file)}" for name, model, file in some]
        more = len(self.mismatched) - len(some)
        return [*lines, f"      … and {more} more"] if more else lines


def _first(names: tuple[str, ...]) -> str:
    more = f", … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def compare(
    model: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    original: Mapping[str, Tensor],
    *,
    ignored: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
) -> KeyReport:
    """Lay `state` (already renamed) beside the model's own names and shapes.

    `original` is the file as it was read, `ignored` names what the renaming left aside; names in `state` that the
    model lacks count as ignored rather than unexpected if they start with one of `optional`.
    """
    same, renamed, mismatched = [], [], []
    for name, value in model.items():
        if name not in state:
            continue
        if tuple(value.shape) != tuple(state[name].shape):
            mismatched.append((name, tuple(value.shape), tuple(state[name].shape)))
        elif original.get(name) is state[name]:
            same.append(name)
        else:
            renamed.append(name)
    surplus = [name for name in state if name not in model]
    spared = tuple(name for name in surplus if name.startswith(optional)) if optional else ()
    return KeyReport(
        matched=tuple(same),
        renamed=tuple(renamed),
        missing=tuple(name for name in model if name not in state),
        unexpected=tuple(name for name in surplus if name not in spared),
        mismatched=tuple(mismatched),
        ignored=tuple(ignored) + spared,
    )


def require_fit(report: KeyReport, *, file: str, architecture: str, advice: str = "") -> None:
    """Raise InputError with the whole report unless the checkpoint fits the architecture."""
    if not report.fits:
        ending = f"\n{advice}" if advice else ""
        raise InputError(
            f"The weights in {file} do not fit the architecture {architecture}; nothing was loaded.\n"
            f"{report.text()}{ending}"
        )


def require_floats(state: Mapping[str, Tensor], file: str) -> None:
    """Raise InputError if weights are integers (quantised, with scales that are elsewhere), booleans or complex."""
    strange = [name for name, value in state.items() if not value.is_floating_point()]
    if strange:
        kind = str(state[strange[0]].dtype).removeprefix("torch.")
        raise InputError(
            f"{len(strange)} of the weights in {file} are not floating point numbers, first {strange[0]} ({kind}): "
            "what fits is float32, float16 or bfloat16; a quantised model has to be widened first."
        )


def fill(
    build: Callable[[], nn.Module], state: Mapping[str, Tensor], dtype: dtype, file: str = "the checkpoint"
) -> nn.Module:
    """The module that `build` makes, holding `state`, whose names and shapes must fit (see `compare`).

    Drawing random weights only to overwrite them takes longer than reading a large checkpoint, so the module is laid
    out on the meta device and given the tensors, unless it keeps tables that no checkpoint holds.
    """
    import torch

    module = on_meta(build)
    names = [*module.state_dict()]
    if any(name not in set(names) for name, _ in module.named_buffers()):
        with torch.random.fork_rng(devices=[]):
            module = build()
    numbers = {name for name, value in module.state_dict().items() if value.is_floating_point()}
    require_floats({name: state[name] for name in names if name in numbers}, file)
    module.load_state_dict({name: _owned(state[name], dtype) for name in names}, strict=True, assign=True)
    return module


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """What `build` makes, with names and shapes but no memory."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build()


def _owned(value: Tensor, dtype: dtype) -> Tensor:
    """The tensor in `dtype` (integers stay), contiguous, sharing memory with no other weight."""
    value = value.to(dtype) if value.is_floating_point() else value
    shared = value.untyped_storage().nbytes() != value.numel() * value.element_size()
    return value.clone() if shared or not value.is_contiguous() else value


def frozen(module: nn.Module) -> nn.Module:
    """The module in eval mode, its parameters without gradients."""
    return module.eval().requires_grad_(False)
