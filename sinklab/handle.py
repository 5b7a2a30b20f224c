"""One name, one handle: the plain module, its tokens, its preprocessing, its attention sites, and where it came from.

`models` hands out modules and `hooks` finds their sites; neither knows the other, and this is where they meet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.hooks.site import Site
    from sinklab.models.loaded import Loaded, Preprocessing, Provenance, SequenceInput
    from sinklab.models.tokens import TokenMap


GATED_UPDATE = (
    "rules, classes, value_ratio_out, update_norm, stable_rank and rank1_energy are of the ungated update; "
    "value_ratio_gated, update_norm_gated and stable_rank_gated are of what is really added"
)
"""Which number of a run used what, where a gate multiplies z before the output projection."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Model:
    """A model under study. Call it with pixels [B 3 H W], or sequences, for its final tokens [B N C].

    The module is the library's own, untouched: nothing is rewritten, folded or centred.
    """

    loaded: Loaded
    sites: tuple[Site, ...]
    """One attention layer each, in order."""

    def __repr__(self) -> str:
        """In one line; the network itself is `module`."""
        heads = sorted({site.heads for site in self.sites})
        prefix = " + ".join(f"{self.tokens.prefix.count(kind)} {kind}" for kind in dict.fromkeys(self.tokens.prefix))
        rest = "patches of " + "x".join(map(str, self.tokens.patch_size))
        if self.loaded.sequences is not None:
            rest = f"sequences of {'' if self.loaded.sequences.exact else 'up to '}{self.loaded.sequences.tokens}"
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"Model({self.name!r}: {self.provenance.architecture}, {len(self.sites)} layers of "
            f"{' or '.join(map(str, heads))} heads, tokens {prefix + ' + ' if prefix else ''}{rest}, "
            f"{kind} on {self.device})"
        )

    @property
    def name(self) -> str:
        """What the user asked for."""
        return self.loaded.provenance.name

    @property
    def module(self) -> nn.Module:
        """The plain nn.Module."""
        return self.loaded.module

    @property
    def tokens(self) -> TokenMap:
        """CLS, registers and the grid of patches; or the beginning of a text, and the text."""
        return self.loaded.tokens

    @property
    def preprocessing(self) -> Preprocessing | None:
        """Mean, std, interpolation and evaluation size, from the model's own configuration; None for sequences."""
        return self.loaded.preprocessing

    @property
    def provenance(self) -> Provenance:
        """Source, hash, versions, activation, LayerScale statistics."""
        return self.loaded.provenance

    @property
    def device(self) -> Any:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> Any:
        """The parameters' floating point type."""
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [B 3 H W] → final tokens [B N C], after the final norm where the model has one.

        A model of sequences takes [B N C] or token ids [B N]. Raises InputError for what is no such batch, of a size or
        of numbers that the model cannot take.
        """
        import torch

        if self.loaded.sequences is not None:
            require_sequences(self.name, self.loaded.sequences, pixels)
        else:
            if not isinstance(pixels, torch.Tensor) or pixels.dim() != 4:
                given = f"shape {list(pixels.shape)}" if isinstance(pixels, torch.Tensor) else _kind_of(pixels)
                raise InputError(f"{self.name} takes pixels [batch 3 height width], not {given}.")
            self.check_size(*pixels.shape[-2:])
            if not pixels.is_floating_point():
                raise InputError(f"{self.name} takes pixels as floating point numbers, not {_named(pixels.dtype)}.")
        try:
            return self.loaded.forward(self.module, pixels)
        except RuntimeError as error:
            other = pixels.is_floating_point() and pixels.dtype != self.dtype
            if not other or isinstance(error, torch.OutOfMemoryError) or "type" not in str(error):
                raise
            raise InputError(
                f"{self.name} computes in {_named(self.dtype)}, and its input is {_named(pixels.dtype)}: convert it "
                "(input.to(model.dtype)), or run under autocast."
            ) from error

    def with_module(self, module: nn.Module) -> Model:
        """The same handle round another copy of the module; its sites are found anew."""
        from sinklab.hooks.site import find_sites

        return Model(loaded=replace(self.loaded, module=module), sites=tuple(find_sites(module)))

    def check_size(self, height: int, width: int) -> str | None:
        """Whether an input of that size can be read; raises InputError with a sentence if not.

        Returns a sentence about pixels at the edge that no whole patch covers, or None.
        """
        if self.loaded.sequences is not None:
            if self.tokens.tokens(height, width) < 2:
                raise InputError("A sequence of one token has nothing else to attend to: give longer ones.")
            return None
        if self.tokens.tokens(height, width) < 2:
            raise InputError(
                f"An image of {height}x{width} pixels is one token to {self.name}: it has nothing else to attend to, "
                "and there is no sink to diagnose. Give larger images."
            )
        fixed = self.loaded.fixed_size
        if fixed is not None and fixed != (height, width):
            raise InputError(
                f"{self.name} takes images of {fixed[0]}x{fixed[1]} only (its position table meets no other shape), "
                f"not {height}x{width}: give that size, or let pictures be resized to it (--size native)."
            )
        lost = self.tokens.edge_lost(height, width)
        if lost == (0, 0):
            return None
        patch = "x".join(map(str, self.tokens.patch_size))
        return (
            f"{height}x{width} is not a multiple of the patch ({patch}): the model does not see the last "
            f"{lost[0]} rows and {lost[1]} columns of pixels."
        )

    def describe(self) -> dict[str, Any]:
        """Everything that run.json keeps about the model."""
        after = {site.parts.after for site in self.sites if site.parts.after is not None}
        after |= {"bound" for site in self.sites if site.parts.phase is not None}
        gated = any(site.parts.gate is not None for site in self.sites)
        return {
            **asdict(self.provenance),
            "layers": len(self.sites),
            "heads": max(site.heads for site in self.sites),
            "prefix": list(self.tokens.prefix),
            **({"suffix": list(self.tokens.suffix)} if self.tokens.suffix else {}),
            "patch_size": list(self.tokens.patch_size),
            "ordinary": self.tokens.ordinary,
            "preprocessing": None if self.preprocessing is None else asdict(self.preprocessing),
            "update": f"measured before the {' and '.join(sorted(after))}"
            if after
            else "as added, LayerScale included",
            **({"gated_update": GATED_UPDATE} if gated else {}),
            "sites": [
                {"layer": s.layer, "name": s.name, "heads": s.heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim}
                | {"axis": s.axis}
                for s in self.sites
            ],
        }


def require_sequences(name: str, wanted: SequenceInput, given: Any) -> None:
    """Raise InputError unless that is a batch of the model's sequences: as long, and of ids that exist."""
    import torch

    channels = () if wanted.channels is None else (wanted.channels,)
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else ()
    least = wanted.tokens if wanted.exact else 1
    if len(shape) != 2 + len(channels) or shape[2:] != channels or not least <= shape[1] <= wanted.tokens:
        kinds = "token ids [batch tokens]" if wanted.channels is None else f"[batch tokens {wanted.channels}]"
        long = f"exactly {wanted.tokens}" if wanted.exact else f"up to {wanted.tokens}"
        said = f"shape {list(shape)}" if isinstance(given, torch.Tensor) else _kind_of(given)
        raise InputError(f"{name} takes {kinds} of {long} tokens, not {said}.")
    if wanted.channels is not None:
        if not given.is_floating_point():
            raise InputError(f"{name} takes tokens of floating point numbers, not {_named(given.dtype)}.")
        return
    if given.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name} takes token ids, whole numbers (int64 or int32), not {_named(given.dtype)}.")
    if wanted.ids is not None and given.numel():
        low, high = (int(end) for end in given.aminmax())
        if low < 0 or high >= wanted.ids:
            strange = low if low < 0 else high
            raise InputError(f"{name} has the token ids 0 to {wanted.ids - 1}; {strange} is none of them.")


def _kind_of(given: Any) -> str:
    return "None" if given is None else f"a {type(given).__name__}"


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def load(
    name: str,
    *,
    weights: str | Path | None = None,
    random_weights: bool = False,
    seed: int = 0,
    offline: bool = False,
    allow_pickle: bool = False,
    image_size: int | tuple[int, int] | None = None,
) -> Model:
    """A model by name, ready to be diagnosed.

    Names: `demo`, `timm:NAME`, `openclip:ARCH[/TAG or FILE]`, `hf:REPO_OR_DIR`, `tlens:REPO_OR_DIR`, `dinov2:NAME`,
    `toy:NAME`, or the path of a checkpoint with a sidecar config or of a run folder, one that trained a model included
    (`sinklab models` prints the table). With a local file nothing touches the network.

    Args:
        weights: a local file for the architecture named.
        random_weights: draw the weights from `seed` (at `image_size` if given).
        offline: never touch the network.
        allow_pickle: also read files that may run code when they are opened.

    Raises NotFoundError (no such model, file or copy) and InputError (weights that do not fit, with a report).
    """
    from sinklab.models.load import load as load_plain

    if not isinstance(name, (str, Path)):
        raise InputError(f"A model is loaded by its name or path, which are text, not {name!r}.")
    loaded = load_plain(
        name,
        weights=weights,
        random_weights=random_weights,
        seed=seed,
        offline=offline,
        allow_pickle=allow_pickle,
        image_size=image_size,
    )
    return _handle(loaded)


def attach(
    module: nn.Module,
    *,
    tokens: TokenMap | None = None,
    preprocessing: Preprocessing | None = None,
    name: str = "attached",
    tokenizer: Any | None = None,
) -> Model:
    """A handle for a model already in memory; wrappers (torch.compile, DDP, FSDP) are looked through.

    `tokens` and `preprocessing` are inferred for timm, OpenCLIP, Hugging Face and TransformerLens classes; for others
    give at least the tokens. A language model reads text with `tokenizer` (transformers'), or else ids. Raises
    InputError where they cannot be known, NotFoundError where no attention layer is found.
    """
    from sinklab.hooks.wrappers import unwrap
    from sinklab.models.load import from_module

    return _handle(
        from_module(unwrap(module), tokens=tokens, preprocessing=preprocessing, name=name, tokenizer=tokenizer)
    )


def as_model(given: Model | nn.Module | str) -> Model:
    """The handle itself, or that of a name (`load`) or of a module in memory (`attach`)."""
    if isinstance(given, Model):
        return given
    if isinstance(given, (str, Path)):
        return load(given)
    from torch import nn

    if isinstance(given, nn.Module):
        return attach(given, name=type(given).__name__)
    raise InputError(
        f"A model is a name, an nn.Module, or what sinklab.load and sinklab.attach give, not {type(given).__name__}."
    )


def _handle(loaded: Loaded) -> Model:
    from sinklab.hooks.refusals import refuse_meta
    from sinklab.hooks.site import find_sites

    refuse_meta(loaded.module)
    try:
        return Model(loaded=loaded, sites=tuple(find_sites(loaded.module)))
    except NotFoundError as error:
        raise NotFoundError(f"{loaded.provenance.name} was loaded, but cannot be read. {error}") from error
