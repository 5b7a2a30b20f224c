"""HookManager: the with-block that attaches to a model, reads every attention call, and leaves nothing behind.

    with HookManager(model, reader) as hooks:
        hooks.run(pixels)

Attachment is proved, never assumed: an attention module that runs without a visible attention call, runs two, or
never runs at all is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.change import Change, Changes, edited_by
from sinklab.hooks.eager import listen
from sinklab.hooks.reader import Reader as Reader
from sinklab.hooks.reader import on_factor, on_input, on_output, on_projection, overrides, recomputing, require_reader
from sinklab.hooks.refusals import many_calls, no_call, refuse_dropout, refuse_meta
from sinklab.hooks.seam import SDPA, AttentionCall, Seam, plain_kernel, read_call
from sinklab.hooks.site import Site, find_sites
from sinklab.hooks.stand_in import standing_in
from sinklab.hooks.wrappers import run_eagerly, unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn


class HookManager:
    """Attach to a model for the length of a with-block.

    Args:
        model: a sinklab model handle, or any nn.Module that `find_sites` understands; wrappers are looked through.
        reader: told of every attention call and, where it overrides them, of the residual stream.
        attend: (site, call) → z [B H Q D], in place of the model's own kernel; the reader then gets that z.
        layers: attach to these layers only (numbers of `Site.layer`); None for all.

    Managers of one model may overlap, and be left in any order. The one entered last attends first; its `call.run()`
    is what the earlier ones make of the call. Every reader is told of the z that the model goes on with, whoever made
    it, and of the model's own q, k, v and mask.

    The model's output is bit-identical while reading (`nn.MultiheadAttention`: equal to rounding, because its
    fast path cannot be seen and is not used while attached).
    Raises InputError for a model in training mode with dropout, and NotFoundError on leaving a block in which a
    reader read nothing or a site never fired.
    """

    def __init__(
        self,
        model: Any,
        reader: Reader | None = None,
        *,
        attend: Callable[[Site, AttentionCall], Tensor] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.module: nn.Module = unwrap(
            getattr(model, "module", model) if not isinstance(model, torch.nn.Module) else model
        )
        refuse_meta(self.module)
        sites = list(getattr(model, "sites", None) or find_sites(self.module))
        projections = [id(site.parts.projection) for site in sites]
        shared = {number for number in projections if projections.count(number) > 1}
        if layers is not None:
            unknown = sorted(set(layers) - {site.layer for site in sites})
            if unknown:
                raise NotFoundError(f"Layer {unknown[0]} does not exist: this model has layers 0 to {len(sites) - 1}.")
            sites = [site for site in sites if site.layer in set(layers)]
        if reader is not None:
            require_reader(reader)
        self.sites = sites
        self.reader = reader
        self._shared = shared
        self.attend = attend
        self.fired: dict[str, int] = {}
        self._running: list[Site] = []
        self._updated: Site | None = None  # its attention has run, its resid_mid is still to come
        self._calls: dict[str, int] = {}
        self._stack: ExitStack | None = None
        self._thread = 0
        self._expected = True
        self._edits: list[tuple[Change, list[int]]] = []

    def __enter__(self) -> HookManager:
        if self._stack is not None:
            raise InputError("This HookManager is already attached; make a second one to attach twice.")
        refuse_dropout(self.module)
        self.fired = {site.name: 0 for site in self.sites}
        self._running, self._updated, self._calls = [], None, {}
        self._thread = get_ident()
        with ExitStack() as stack:
            stack.enter_context(run_eagerly(self.module))
            stack.enter_context(standing_in([s.attention for s in self.sites if s.parts.stand_in]))
            for site in self.sites:
                self._hook(stack, site)
            stack.enter_context(Seam(self._compute, self._tell))
            self._stack = stack.pop_all()  # from here on the caller's with-block owns it
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._stack is not None
        stack, self._stack = self._stack, None
        stack.close()
        if kind is None and self._expected and (self.reader is not None or self.attend is not None):
            self._check_fired()

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        """One forward of the model; every site must fire exactly once in it. Returns the model's output."""
        if self._stack is None:
            raise InputError("The HookManager is not attached: call run() inside its with-block.")
        before = dict(self.fired)
        forward = self.model if not isinstance(self.model, torch.nn.Module) else self.module
        result = forward(*inputs, **kwargs)
        for site in self.sites:
            count = self.fired[site.name] - before[site.name]
            if count != 1:
                raise NotFoundError(
                    f"Site {site.name!r} fired {count} times in one forward, not once "
                    f"({sum(self.fired[s.name] > before[s.name] for s in self.sites)} of {len(self.sites)} fired)."
                )
        return result

    @contextmanager
    def edit(self, edits: Sequence[Change]) -> Iterator[None]:
        """Within, the attention calls run as the edits ask (`sinklab.Edit`); those of one head act in their order.

        The model's own kernel computes the edited heads from the changed values and mask; other heads keep the very
        tensors they had. A reader sees the call's own q, k, v and mask, and the edited z. Raises NotFoundError for a
        layer or head that does not exist, and on leaving for an edit that never fired.
        """
        if isinstance(edits, (str, Mapping)) or not isinstance(edits, Sequence):
            raise InputError(f"edit() takes a list of edits, not {edits!r}.")
        for edit in edits:
            if not hasattr(edit, "request"):
                raise InputError(f"An edit is made with sinklab.Edit, not {edit!r}.")
            edit.check(self.sites)
        if self.attend is not None:
            raise InputError("A manager with attend= computes z itself: make the change there, not with edit().")
        counted: list[tuple[Change, list[int]]] = [(edit, [0]) for edit in edits]
        before = self._edits
        self._edits = [*before, *counted]
        places = [
            (id(site.attention), getattr(edit, "head", None))
            for edit in edits
            for site in self.sites
            if site.layer in edit.layers
        ]
        try:
            with edited_by(self, places):
                yield
        finally:
            self._edits = before
        silent = [edit for edit, fired in counted if not fired[0]]
        if silent:
            raise NotFoundError(f"{len(silent)} of {len(edits)} edits never fired; the first is {silent[0]}.")

    def expect_nothing(self) -> None:
        """Leave the block without complaint although no forward ran in it; for callers who know that none could."""
        self._expected = False

    def _hook(self, stack: ExitStack, site: Site) -> None:
        def on_start(module: Any, args: Any) -> None:
            if recomputing():
                if self.attend is not None or self._edits:
                    raise InputError(
                        f"Site {site.name!r} runs a second time in backward (gradient checkpointing), where it cannot "
                        "be edited: switch checkpointing off."
                    )
                return
            self._running.append(site)
            self._calls[site.name] = 0

        def on_end(module: Any, args: Any, result: Any) -> None:
            if recomputing():
                return
            # always_call=True runs this after an exception too, with no result: then only the stack is put right
            if self._running and self._running[-1] is site:
                self._running.pop()
            if result is None:
                return
            if not self._calls.get(site.name) and get_ident() != self._thread:
                raise InputError(
                    f"Site {site.name!r} ran in another thread than the one that attached to it, where its attention "
                    "cannot be seen: run the model in that thread, or give each thread a model of its own."
                )
            if self._calls.get(site.name, 0) != 1:
                raise NotFoundError(no_call(site) if not self._calls.get(site.name) else many_calls(site, self._calls))
            self.fired[site.name] += 1
            self._updated = site

        def in_attention() -> bool:
            return id(site.parts.projection) not in self._shared or self._running[-1:] == [site]

        def after_attention() -> bool:
            """Is this the first norm since the site's attention? Blocks may share their norms."""
            own = self._updated is site
            self._updated = None if own else self._updated
            return own

        def keep(handle: Any) -> None:
            stack.callback(handle.remove)

        keep(site.attention.register_forward_pre_hook(on_start))
        keep(site.attention.register_forward_hook(on_end, always_call=True))
        if site.parts.eager is not None:
            here = (lambda: self._running[-1:] == [site], partial(self._z, site), partial(self._heard, site))
            for handle in listen(site, *here):
                keep(handle)
        reader = self.reader
        if reader is None:
            return
        if overrides(reader, "resid_pre"):
            keep(site.block_module.register_forward_pre_hook(on_input(reader.resid_pre, site), with_kwargs=True))
        if overrides(reader, "gated") and site.parts.gate is not None:
            keep(site.parts.gate.register_forward_hook(on_factor(reader, site, in_attention)))
        if overrides(reader, "resid_post"):
            keep(site.block_module.register_forward_hook(on_output(reader.resid_post, site)))
        if overrides(reader, "resid_mid") and site.second_norm is not None:
            keep(
                site.second_norm.register_forward_pre_hook(
                    on_input(reader.resid_mid, site, after_attention), with_kwargs=True
                )
            )
        if overrides(reader, "projected"):
            keep(site.parts.projection.register_forward_hook(on_projection(reader, site, in_attention)))

    def _compute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """z of an attention call, edited as this manager was asked to."""
        if not self._running:  # a pooling head, or a layer that was not asked for
            return SDPA(*args, **kwargs)
        site, call = self._running[-1], read_call(args, kwargs)
        # the model's own arguments, so that the kernel chosen is the model's own
        return self._z(site, call, lambda: SDPA(*args, **kwargs))

    def _z(self, site: Site, call: AttentionCall, own: Callable[[], Tensor] | None = None) -> Tensor:
        """z of this call: that which `own` computes, or which the call has, or `attend`'s; edited."""
        if call.q.shape[1] != site.heads or call.v.shape[-1] != site.head_dim:
            raise InputError(
                f"Site {site.name!r} declares {site.heads} heads of dim {site.head_dim}, but its attention ran with "
                f"{call.q.shape[1]} heads of dim {call.v.shape[-1]}."
            )
        z = self.attend(site, call) if self.attend is not None else call.z if own is None else own()
        assert z is not None
        if self._edits:
            with plain_kernel():
                z = self._edited(site, call, z)
        return z

    def _tell(self, args: Sequence[Any], kwargs: Mapping[str, Any], z: Tensor) -> None:
        if self._running:
            self._heard(self._running[-1], read_call(args, kwargs).with_z(z))

    def _heard(self, site: Site, call: AttentionCall) -> None:
        """Count the call, and tell the reader of it."""
        self._calls[site.name] += 1
        if self.reader is not None:
            self.reader.attention(site, call)

    def _edited(self, site: Site, call: AttentionCall, z: Tensor) -> Tensor:
        changes, tokens = Changes(call), getattr(self.model, "tokens", None)
        for edit, fired in self._edits:
            if site.layer in edit.layers:
                fired[0] += edit.request(site, changes, tokens)
        return changes.applied(z)

    def _check_fired(self) -> None:
        silent = [site.name for site in self.sites if not self.fired[site.name]]
        if len(silent) == len(self.sites):
            raise NotFoundError(
                "Nothing was read: no attention site fired inside the with-block. Run the model inside it (a compiled "
                "wrapper bypasses hooks: call hooks.run(...) or the unwrapped module)."
            )
        if silent:
            raise NotFoundError(
                f"{len(silent)} of {len(self.sites)} attention sites never fired, the first is {silent[0]!r}."
            )
