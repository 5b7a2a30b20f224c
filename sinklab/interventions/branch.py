"""Whole branches switched off or handed another input's state: attention's update, and the global pathway's.

    with attention_off(model, layers=[1]):              # o ← 0 in layer 1; the pathway's update stays
        tokens = model(pixels)
    with donor_state(model, {1: states[1]}):            # g of other inputs in place of layer 1's own
        tokens = model(pixels)
    measure_branches(model, pixels, donors)             # every layer, every edit, one row an input

For a sinklab handle or any nn.Module whose attention sites can be found; the pathway's edits also need one
`models.pathway.GlobalPathway` in the layer's block. "Attention Sinks", Sec. 5 and App. E.

Letters: B inputs, N tokens, C model dim, G dim of the global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.refusals import refuse_meta
from sinklab.hooks.site import Site, find_sites
from sinklab.hooks.wrappers import run_eagerly, unwrap
from sinklab.interventions.effect import effects
from sinklab.models.pathway import GlobalPathway
from sinklab.sinks.common_mode import pathways_in

if TYPE_CHECKING:
    import pandas as pd

BRANCH_EDITS = ("attention_off", "pathway_off", "donor_state")


@contextmanager
def attention_off(model: Any, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Within, attention's output is 0 in these layers, all by default; its LayerScale scales nothing, then.

    A reader still sees the attention run. Raises NotFoundError for a layer that the model has not, and on leaving for a
    layer that never ran.
    """
    sites = _chosen(model, layers)
    with _attached(model) as held:
        for site in sites:
            held.off(site.attention, f"attention of layer {site.layer}")
        yield


@contextmanager
def pathway_off(model: Any, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Within, the global pathway's update is 0 in these layers, which equals g ← 0; by default in all that have one.

    Raises NotFoundError for a layer without a pathway or a model with none, and on leaving for one that never ran.
    """
    pathways = find_pathways(model, layers)
    with _attached(model) as held:
        for layer, pathway in pathways.items():
            held.off(pathway, f"pathway of layer {layer}")
        yield


@contextmanager
def donor_state(model: Any, states: Mapping[int, Tensor]) -> Iterator[None]:
    """Within, these layers' pathways hand out the given states, layer → g [B G], in place of their own.

    Each token still takes by its own gate γ. `pathway_states` reads states. Raises NotFoundError for a layer without a
    pathway, and on leaving for one that never ran; InputError for states that do not fit, or fit other inputs.
    """
    if not isinstance(states, Mapping) or not states:
        raise InputError("donor_state takes the states of one layer at least, as {layer: g [batch state]}.")
    pathways = find_pathways(model, list(states))
    for layer, pathway in pathways.items():
        size, given = pathway.value.out_features, states[layer]
        if not isinstance(given, Tensor) or given.dim() != 2 or given.shape[1] != size:
            raise InputError(f"The state of layer {layer} is [batch {size}], not {_shape(given)}.")
    with _attached(model) as held:
        for layer, pathway in pathways.items():
            held.replace(pathway, states[layer], layer)
        yield


def find_pathways(model: Any, layers: Sequence[int] | None = None) -> dict[int, GlobalPathway]:
    """layer → its global pathway, for these layers or all that have one.

    Raises NotFoundError where a layer that is asked for, or the whole model, has none, InputError where one has two.
    """
    found: dict[int, GlobalPathway] = {}
    for site in _chosen(model, layers):
        own = pathways_in(site)
        if len(own) > 1:
            raise InputError(f"Layer {site.layer} has {len(own)} global pathways; an edit knows one a layer.")
        if own:
            found[site.layer] = own[0]
        elif layers is not None:
            raise NotFoundError(f"Layer {site.layer} has no global pathway (block {site.block!r}) to edit.")
    if not found:
        raise NotFoundError(
            "This model has no global pathway in any layer: pathway_off and donor_state are for models built with one "
            "(sinklab.models.pathway.GlobalPathway in their blocks); attention_off works without."
        )
    return found


def pathway_states(model: Any, inputs: Any, layers: Sequence[int] | None = None) -> dict[int, Tensor]:
    """layer → the state g [B G] that its pathway computes of these inputs."""
    states: dict[int, Tensor] = {}
    pathways = find_pathways(model, layers)

    def keep(layer: int) -> Callable[..., None]:
        def hook(pathway: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[layer] = pathway.state(args[0] if args else kwargs["h"])

        return hook

    with ExitStack() as stack, torch.no_grad(), run_eagerly(_module(model)):
        for layer, pathway in pathways.items():
            stack.callback(pathway.register_forward_pre_hook(keep(layer), with_kwargs=True).remove)
        _run(model, inputs)
    silent = sorted(pathways.keys() - states.keys())
    if silent:
        raise NotFoundError(f"The pathway of layer {silent[0]} never ran: it has no state to read.")
    return states


def measure_branches(
    model: Any,
    inputs: Tensor,
    donors: Tensor,
    *,
    layers: Sequence[int] | None = None,
    counted: Tensor | None = None,
    toward: Tensor | None = None,
) -> pd.DataFrame:
    """What each branch edit, in one layer at a time, does to the final tokens of each input.

    Args:
        inputs: what the model takes, [B ...]. donors: as many others; row b's state goes to input b.
        layers: by default all. A layer without a pathway has `attention_off` alone.
        counted: the tokens that count, [N] or [B N] bool; by default a handle's patches, or whatever its tokens are
            beside prefix tokens, else all.
        toward: where the donor's state is to move an input's mean token, [B C]; by default from its own mean final
            token to the donor's.

    One row a (layer, edit, input): layer, edit, input, and of `effect.effects` patch_change (√ of mean squared change
    over that of the tokens), cls_change, shared_energy, donor_cosine; the cosine for `donor_state` alone.
    """
    import pandas as pd

    if not isinstance(inputs, Tensor) or not isinstance(donors, Tensor) or inputs.shape != donors.shape:
        shapes = [
            list(given.shape) if isinstance(given, Tensor) else type(given).__name__ for given in (inputs, donors)
        ]
        raise InputError(f"Every input has a donor of the same shape: inputs are {shapes[0]}, donors {shapes[1]}.")
    sites = _chosen(model, layers)
    pathways = _some_pathways(model, [site.layer for site in sites])
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        plain, other = _run(model, inputs), _run(model, donors)
        mask, cls = _counted(model, inputs, plain, counted)
        toward = _mean(other, mask) - _mean(plain, mask) if toward is None else toward
        states = pathway_states(model, donors, sorted(pathways)) if pathways else {}
        for site in sites:
            edits: dict[str, Any] = {"attention_off": attention_off(model, [site.layer])}
            if site.layer in pathways:
                edits["pathway_off"] = pathway_off(model, [site.layer])
                edits["donor_state"] = donor_state(model, {site.layer: states[site.layer]})
            for name, edit in edits.items():
                with edit:
                    after = _run(model, inputs)
                for row in range(len(plain)):
                    aim = toward[row] if name == "donor_state" else None
                    found = effects(plain[row], after[row, None], mask[row, None], cls=cls, toward_donor=aim)
                    numbers = {key: float(value[0]) for key, value in found.items()}
                    rows.append({"layer": site.layer, "edit": name, "input": row, **numbers})
    return pd.DataFrame(rows)


def _module(model: Any) -> nn.Module:
    return unwrap(model if isinstance(model, nn.Module) else getattr(model, "module", model))


def _run(model: Any, inputs: Any) -> Tensor:
    """Final tokens [B N C]."""
    tokens = _module(model)(inputs) if isinstance(model, nn.Module) else model(inputs)
    if not isinstance(tokens, Tensor) or tokens.dim() != 3:
        raise InputError(f"Branch edits are measured on final tokens [batch token channel], not on {_shape(tokens)}.")
    return tokens


def _shape(given: Any) -> str:
    return str(list(given.shape)) if isinstance(given, Tensor) else type(given).__name__


def _chosen(model: Any, layers: Sequence[int] | None) -> list[Site]:
    """The sites of these layers, in order."""
    module = _module(model)
    refuse_meta(module)
    sites = list(getattr(model, "sites", None) or find_sites(module))
    if layers is None:
        return sites
    unknown = sorted(set(layers) - {site.layer for site in sites})
    if unknown:
        raise NotFoundError(f"Layer {unknown[0]} does not exist: this model has layers 0 to {len(sites) - 1}.")
    return [site for site in sites if site.layer in set(layers)]


def _some_pathways(model: Any, layers: Sequence[int]) -> dict[int, GlobalPathway]:
    """The pathways of these layers; none where the model has none."""
    try:
        found = find_pathways(model)
    except NotFoundError:
        return {}
    return {layer: pathway for layer, pathway in found.items() if layer in layers}


def _counted(model: Any, inputs: Tensor, plain: Tensor, given: Tensor | None) -> tuple[Tensor, int | None]:
    """Which tokens count [B N], and the index of CLS."""
    tokens: Any = getattr(model, "tokens", None)
    batch, number = plain.shape[:2]
    kinds = [] if tokens is None else [tokens.kind(index, number) for index in range(number)]
    cls = kinds.index("cls") if "cls" in kinds else None
    if given is None:
        given = torch.tensor([tokens is None or kinds[index] == tokens.ordinary for index in range(number)])
    if given.dtype != torch.bool or given.shape not in ((number,), (batch, number)):
        raise InputError(f"counted is a mask of {number} tokens, [N] or [B N] bool, not {list(given.shape)}.")
    return given.to(plain.device).expand(batch, number), cls


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Mean over the counted tokens [B C]."""
    return (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class _Held:
    """Hooks on modules, and which of them fired."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.fired: dict[str, int] = {}

    def off(self, module: nn.Module, name: str) -> None:
        self.fired[name] = 0

        def zero(module: Any, args: Any, result: Any) -> Any:
            self.fired[name] += 1
            if isinstance(result, tuple):
                return (torch.zeros_like(result[0]), *result[1:])
            return torch.zeros_like(result)

        self._stack.callback(module.register_forward_hook(zero).remove)

    def replace(self, pathway: GlobalPathway, state: Tensor, layer: int) -> None:
        name = f"pathway of layer {layer}"
        self.fired[name] = 0

        def give(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            h = args[0] if args else kwargs["h"]
            if len(h) != len(state):
                raise InputError(f"The states of layer {layer} are of {len(state)} inputs, but {len(h)} came.")
            self.fired[name] += 1
            return (h, state.to(h)), {}

        self._stack.callback(pathway.register_forward_pre_hook(give, with_kwargs=True).remove)


@contextmanager
def _attached(model: Any) -> Iterator[_Held]:
    """Hooks that go when the block ends, however it ends; an edit that never fired is an error, if nothing else is."""
    with ExitStack() as stack:
        stack.enter_context(run_eagerly(_module(model)))
        held = _Held(stack)
        yield held
    silent = [name for name, times in held.fired.items() if not times]
    if silent:
        raise NotFoundError(f"{len(silent)} of {len(held.fired)} branch edits never fired; the first is {silent[0]}.")
