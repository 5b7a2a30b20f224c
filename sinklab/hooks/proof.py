"""Proof of attachment: what sinklab reads is what the model computes, site by site, on one image.

Letters: B batch, H heads, K key/value heads, Q queries, N keys, C model dim, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.phase import on_circle

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site

ROWS = 32  # queries a site whose pattern is rebuilt in float64
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 8e-2}
CACHES = ("cache", "past_key_values", "past_key_value")
"""Where Hugging Face's attention keeps keys and values for the next tokens: a second run must not add to them."""
STAND_IN = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 8e-2}


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was checked at one site. Every error is relative to the largest entry of what it is compared with, and NaN
    where there was nothing finite to compare."""

    layer: int
    name: str
    fired: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    difference: float
    """|output attached − output plain| of the attention module: exactly 0, but for nn.MultiheadAttention's stand-in."""
    row_sums: float
    """max |Σ_j A_ij − 1| over rebuilt rows."""
    kernel: float
    """|A v − z|: the pattern rebuilt from q, k, mask and scale gives the kernel's own z."""
    update: float | None
    """|Σ_h U_h + Γ b_O − (resid_mid − resid_pre)|; None where the block hides resid_mid. Where values are phases,
    Σ_h U_h is bound(v ⊙ a) of all heads' G, and the difference is taken on the circle."""
    limit: float
    """What the errors may come to in this precision."""
    note: str
    failures: tuple[str, ...]

    @property
    def largest(self) -> float:
        """The largest error of all that were measured; 0 where none was."""
        errors = (self.difference, self.row_sums, self.kernel, self.update or 0.0)
        return max((error for error in errors if not math.isnan(error)), default=0.0)

    @property
    def compared(self) -> bool:
        """Whether there was anything finite to compare: a site that gives NaN alone proves nothing."""
        return not math.isnan(self.kernel)


def prove(model: Any, *inputs: Any, **kwargs: Any) -> list[Proof]:
    """Run the model plain and attached on the same input, and compare.

    Args:
        model: a handle or an nn.Module; inputs: what one forward takes, one image is enough.

    Raises InputError naming the first site at which anything does not agree, and NotFoundError if a site does not
    fire exactly once. A NaN is not a failure of attachment: what is finite is compared, and a site that has nothing
    finite says so (`Proof.compared`) instead of an error of 0.
    """
    if not inputs and not kwargs:
        raise InputError("prove needs what one forward of the model takes: prove(model, pixels).")
    reader = _ProofReader()
    with torch.no_grad():
        call = model if not isinstance(model, torch.nn.Module) else None
        manager = HookManager(model, reader)
        plain = (call or manager.module)(*inputs, **kwargs)
        with manager as hooks:
            # _ProofReader hangs its lockstep comparison on the attention modules itself, after the manager's hooks
            handles = [
                site.attention.register_forward_hook(reader.lockstep(site), with_kwargs=True) for site in hooks.sites
            ]
            try:
                attached = hooks.run(*inputs, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()
    proofs = [reader.proof(site, hooks.fired[site.name]) for site in hooks.sites]
    failed = [proof for proof in proofs if proof.failures]
    if failed:
        more = f" It is the first of {len(failed)} such sites of {len(proofs)}." if len(failed) > 1 else ""
        raise InputError(
            f"The attachment to site {failed[0].name!r} is not faithful: {'; '.join(failed[0].failures)}.{more}"
        )
    difference, dtype = _difference(_tensor(attached), _tensor(plain))
    # under autocast the output may be fp32 again, but the stand-in has rounded as coarsely as the attention does
    allowed = max(STAND_IN[kind] for kind in (dtype, *(seen["dtype"] for seen in reader.seen.values())))
    if difference > (allowed if any(site.parts.stand_in for site in hooks.sites) else 0.0):
        raise InputError(
            f"Attached, the model's output changes by {difference:.2e}: it cannot be read without changing it."
        )
    return proofs


def _tensor(result: Any) -> Tensor:
    if isinstance(result, torch.Tensor):
        return result
    values = result.values() if isinstance(result, dict) else result
    try:
        return next(value for value in values if isinstance(value, torch.Tensor))
    except (TypeError, StopIteration):
        raise NotFoundError(f"The model returned {type(result).__name__}, in which no tensor was found.") from None


def _difference(a: Tensor, b: Tensor, *, finite_only: bool = False) -> tuple[float, torch.dtype]:
    """max |a − b| over max |b|; NaN if neither has a finite entry. Where one alone is finite they differ by infinity,
    unless only entries that are finite in both are asked for."""
    if torch.equal(a, b):  # a NaN equals nothing
        return (0.0 if bool(torch.isfinite(b).any()) or not b.numel() else math.nan), b.dtype
    here, there = torch.isfinite(a), torch.isfinite(b)
    if not bool((here & there).any() if finite_only else (here | there).any()):
        return math.nan, b.dtype
    gap = torch.where(here & there, (a.double() - b.double()).abs(), 0.0).max()
    if not finite_only and bool((here != there).any()):
        return math.inf, b.dtype
    return float(gap / torch.where(there, b.double().abs(), 0.0).max().clamp_min(1e-30)), b.dtype


class _ProofReader(Reader):
    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._before: dict[str, Tensor] = {}
        self._velocity: dict[str, Tensor] = {}
        self._again = False

    def resid_pre(self, site: Site, x: Tensor) -> None:
        self._before[site.name] = x.detach()[:1].clone()
        if site.parts.phase is not None:
            self._velocity[site.name] = site.parts.phase.velocity(self._before[site.name])

    def attention(self, site: Site, call: AttentionCall) -> None:
        z = call.z
        assert z is not None
        step = max(1, call.q.shape[2] // ROWS)
        rows = slice(0, None, step)
        errors: dict[str, float] = {"row_sums": 0.0, "kernel": 0.0}
        mask = None if call.mask is None else _first_of_batch(call.mask)
        first = replace(call, q=call.q[:1], k=call.k[:1], v=call.v[:1], mask=mask)
        pattern = first.pattern(rows)  # [1 H q N]
        sums = pattern.sum(-1)
        sums = sums[sums > 0]  # a row with every key masked sums to zero, in the kernel too
        errors["row_sums"] = float((sums - 1).abs().max()) if len(sums) else math.nan
        rebuilt = pattern @ first.v[:, first.kv_head].double()
        errors["kernel"], _ = _difference(rebuilt.to(torch.float64), z[:1, :, rows].double(), finite_only=True)
        self.seen[site.name] = {**errors, "dtype": z.dtype, "kv": first.k.shape[1], "z": z.detach()[:1]}
        if site.parts.phase is not None:
            self.seen[site.name]["own"] = site.parts.phase.own(first.v, first.q.shape[2])

    def projected(self, site: Site, x: Tensor, update: Tensor) -> None:
        if self._again or site.name not in self.seen:  # no call was seen: the manager is about to say so
            return
        seen = self.seen[site.name]
        z = seen.pop("z")
        if site.parts.phase is not None:
            seen["update"] = self._phase_update(site, z, seen.pop("own"))
            return
        x = (x.transpose(0, 1) if site.tokens_first and x.shape[0] != z.shape[0] else x)[:1]
        weight, bias = site.output_weight(), site.output_bias()
        # with a gate or a norm between z and W_O, what is really added comes from the projection's own input
        heads = z if site.parts.after is None else x.reshape(1, -1, site.heads, site.head_dim).transpose(1, 2)
        if site.parts.after is not None and site.parts.head_scale is not None:  # it has acted on that input already
            weight = weight / site.parts.head_scale().detach().double().reshape(-1, 1, 1)
        total = torch.einsum("bhqd,hcd->bqc", heads.double(), weight)
        seen["update"] = total if bias is None else total + bias

    def _phase_update(self, site: Site, z: Tensor, own: Tensor) -> Tensor:
        """The heads' G, its tangent, and the bound: what the block should add, [1 N k] in float64."""
        phase = site.parts.phase
        assert phase is not None
        a = phase.tangent(z.double(), own.double()).transpose(1, 2).flatten(2)  # [1 N k]
        x = self._velocity.pop(site.name).double() * a
        return phase.increment(x.to(phase.dtype)).double()

    def resid_mid(self, site: Site, x: Tensor) -> None:
        expected = self.seen.get(site.name, {}).get("update")
        if not isinstance(expected, torch.Tensor):
            return
        before, after = self._before.pop(site.name).double(), x[:1].double()
        if after.shape != expected.shape:
            self.seen[site.name] |= {"update": None, "shapes": (tuple(expected.shape[1:]), tuple(after.shape[1:]))}
            return
        added = after - before
        apart = added - expected if site.parts.phase is None else on_circle(added - expected)  # up to whole turns
        finite = torch.isfinite(added) & torch.isfinite(expected)
        gap = torch.where(finite, apart.abs(), torch.zeros_like(added)).max()
        size = torch.where(finite, expected, torch.zeros_like(expected)).abs().max()
        # the residual stream itself rounds: with a tiny LayerScale that is all that can be seen of the update
        coarser = max(x.dtype, self.seen[site.name]["dtype"], key=lambda kind: torch.finfo(kind).eps)  # autocast
        rounding = 4 * torch.finfo(coarser).eps * torch.where(finite, after, torch.zeros_like(after)).abs().max()
        self.seen[site.name]["update"] = float(gap / size.clamp_min(1e-30)) if bool(finite.any()) else math.nan
        self.seen[site.name]["update_ok"] = bool(gap <= RELATIVE[coarser] * size + rounding)

    def lockstep(self, site: Site) -> Any:
        """Run the attention module once more on the same input, unread, and compare what it returns."""

        def hook(module: Any, args: Any, kwargs: Any, result: Any) -> None:
            self._again = True
            kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
            try:
                with torch._C.DisableTorchFunction():
                    # the stand-in hangs on the instance; any other forward that hangs there is the model's own
                    own = type(module).forward if site.parts.stand_in else None
                    plain = own(module, *args, **kwargs) if own else module.forward(*args, **kwargs)
            finally:
                self._again = False
            self.seen[site.name]["difference"], _ = _difference(_tensor(result), _tensor(plain))

        return hook

    def proof(self, site: Site, fired: int) -> Proof:
        seen = self.seen[site.name]
        dtype = seen["dtype"]
        failures = []
        allowed = STAND_IN[dtype] if site.parts.stand_in else 0.0
        if seen["difference"] > allowed:
            failures.append(f"its output changes by {seen['difference']:.2e} when attached")
        if seen["row_sums"] > 1e-9:
            failures.append(f"rows of the pattern sum to 1 only within {seen['row_sums']:.2e}")
        if seen["kernel"] > RELATIVE[dtype]:
            failures.append(
                f"the pattern rebuilt from q and k does not give the kernel's z (off by {seen['kernel']:.2e})"
            )
        if seen["kv"] not in (site.heads, site.kv_heads):
            failures.append(f"{site.kv_heads} key/value heads were declared, {seen['kv']} arrived")
        if "shapes" in seen:
            failures.append(
                "its attention runs over {} tokens and channels where the residual stream has {}: a window, or a "
                "rearrangement of tokens, cannot be read as one layer".format(*seen["shapes"])
            )
        if seen.get("update_ok") is False:
            failures.append(
                f"the heads' updates and bias do not add up to what the block adds (off by {seen['update']:.2e}); a "
                "block that normalises the update after W_O (post-norm), or adds the MLP in parallel, cannot be "
                "decomposed by head"
            )
        update = seen.get("update")
        return Proof(
            layer=site.layer,
            name=site.name,
            fired=fired,
            heads=site.heads,
            kv_heads=site.kv_heads,
            head_dim=site.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            difference=seen["difference"],
            row_sums=seen["row_sums"],
            kernel=seen["kernel"],
            update=update if isinstance(update, float) else None,
            limit=RELATIVE[dtype],
            note=", ".join(_notes(site, seen)),
            failures=tuple(failures),
        )


def _notes(site: Site, seen: dict[str, Any]) -> list[str]:
    told = [f"{site.parts.after} after attention"] if site.parts.after else []
    if site.parts.stand_in and not told:
        told.append("stand-in")
    if math.isnan(seen["kernel"]):
        told.append("not finite: nothing compared")
    return told


def _first_of_batch(mask: Tensor) -> Tensor:
    return mask[:1] if mask.dim() == 4 and mask.shape[0] > 1 else mask
