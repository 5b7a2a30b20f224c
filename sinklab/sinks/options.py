"""What a diagnosis is asked to do: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

from sinklab.errors import InputError
from sinklab.inputs import view_for
from sinklab.sinks.classify import RATIOS, SinkDefinition
from sinklab.sinks.rule import SinkRule

if TYPE_CHECKING:
    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """Options of `diagnose`; everything that the numbers depend on is saved in run.json and checked by --resume."""

    size: int | str = 224
    """Side of the centre crop, the short side being resized to size·256/224 (the paper's protocol); or "native", the
    model's own evaluation transform."""
    batch_size: int = 16
    dtype: str = "float32"
    """"bfloat16" runs the model under autocast; the statistics are fp32 or better either way."""
    workers: int = 0
    """Processes that decode images; 0 decodes in a thread beside the model."""
    limit: int | None = None
    """Use so many images, drawn from the list by `seed`."""
    seed: int = 0
    rule: SinkRule = field(default_factory=SinkRule.relaxed)
    definition: SinkDefinition = field(default_factory=SinkDefinition.causal)
    layers: tuple[int, ...] | None = None
    """Only these layers; None for all."""
    fast: bool = False
    """Compute z in the statistics pass: the model's output is equal to rounding, not bit for bit."""
    strict_images: bool = False
    """Stop at the first image that cannot be used, instead of listing it."""
    notes: tuple[str, ...] = ()
    """Why an option that was left open is what it is; run.json keeps it."""

    def __post_init__(self) -> None:
        self._check_kinds()
        for name in ("size", "batch_size", "workers", "limit", "seed"):  # NumPy's whole numbers are not JSON's
            if isinstance(number := getattr(self, name), Integral):
                object.__setattr__(self, name, int(number))
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype is one of {', '.join(DTYPES)}, not {self.dtype!r}.")
        if self.batch_size < 1:
            raise InputError(f"A batch holds at least one input, not {self.batch_size}.")
        if self.workers < 0:
            raise InputError(f"The number of workers is 0 or more, not {self.workers}.")
        if isinstance(self.size, str) and self.size != "native":
            raise InputError(f"--size is a number of pixels or 'native', not {self.size!r}.")
        if isinstance(self.size, int) and self.size < 1:
            raise InputError(f"--size is a positive number of pixels, not {self.size}.")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit is at least 1, not {self.limit}.")
        if self.definition.axis not in RATIOS:
            raise InputError(
                f"The definition {self.definition.name!r} goes by {self.definition.axis}; a run's definition goes by "
                f"{' or '.join(RATIOS)}."
            )
        if self.layers is not None and not self.layers:
            raise InputError("No layers were named: give at least one, or leave layers out for all of them.")

    def _check_kinds(self) -> None:
        """Raises InputError for a value of the wrong kind: better now than when a folder has been made."""
        wanted: dict[str, tuple[type | tuple[type, ...], str]] = {
            "size": ((Integral, str), "a number of pixels or 'native'"),
            "batch_size": (Integral, "a whole number"),
            "dtype": (str, "a word"),
            "workers": (Integral, "a whole number"),
            "limit": ((Integral, type(None)), "a whole number or None"),
            "seed": (Integral, "a whole number"),
            "rule": (SinkRule, "a SinkRule"),
            "definition": (SinkDefinition, "a SinkDefinition or its name"),
            "layers": ((tuple, type(None)), "several whole numbers or None"),
            "fast": (bool, "True or False"),
            "strict_images": (bool, "True or False"),
        }
        for name, (kind, words) in wanted.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise InputError(f"The option {name} is {words}, not {value!r}.")
        for layer in self.layers or ():
            if not isinstance(layer, int) or isinstance(layer, bool):
                raise InputError(f"A layer is a whole number, not {layer!r}.")

    def transform(self, model: Model) -> View:
        """How this model is shown its inputs. Raises InputError for a size that the model cannot take."""
        return view_for(model, self.size)

    def fitting(self, model: Model, *, rule: bool, batch_size: bool, size: bool = False) -> ScanOptions:
        """With what fits the model, for those that were left open (True): a training run's own size of pictures, or
        the rule and the batch size of a model of sequences."""
        own, usual = model.loaded.sequences, model.loaded.usual_size
        if own is None:
            return replace(self, size=usual) if size and usual is not None else self
        why = (own.rule_note,) if own.rule_note else ()
        options = replace(self, rule=SinkRule.named(own.rule), notes=why) if rule else self
        return replace(options, batch_size=own.batch_size) if batch_size else options

    def judging(self, settings: Mapping[str, Any]) -> ScanOptions:
        """The options for going on with a run of those settings (run.json's).

        `routed_count` was counted at the run's own attention threshold. `strict` and `mass` read other columns, so a
        run made at any threshold can be judged by them, and keeps it.
        """
        options = settings.get("options")
        counted_at = options.get("attention") if isinstance(options, Mapping) else None  # else: refused as damaged
        if self.rule.name == "relaxed" or counted_at is None:
            return self
        return replace(self, rule=replace(self.rule, attention=counted_at))

    def settings(self, model: Model, images: InputList, device: str) -> dict[str, Any]:
        """Everything that the head table depends on, for the run's fingerprint."""
        from sinklab.sinks.identity import model_identity

        return {
            "model": {**model_identity(model), "preprocessing": asdict(cast(Any, self.transform(model)))},
            "images": {"names_and_sizes": images.sha256, "count": len(images)},
            "options": {
                "size": self.size if model.loaded.sequences is None else None,  # of pictures
                "batch_size": self.batch_size,
                "dtype": self.dtype,
                "device": device,
                "attention": self.rule.attention,
                "layers": None if self.layers is None else list(self.layers),
                "fast": self.fast,
                "limit": self.limit,
                "seed": self.seed,
            },
        }
