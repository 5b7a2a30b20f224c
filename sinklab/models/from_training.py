"""Models that sinklab trained: shipped ones (`toy:NAME`), members of a training run, and their files by path.

A training run's folder holds `training/MEMBER/model.safetensors` with model.json beside it, whose "format" says what
kind of model it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models.loaded import Loaded, SequenceInput
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sinklab.models.request import Request

FORMATS = ("sinklab-toy-1", "sinklab-lm-1", "sinklab-vit-1")
WEIGHTS = "model.safetensors"
STATE = "checkpoint.safetensors"
"""What a training goes on from."""
BY_MASS = (
    "half of this task's queries have nothing to do and only they go to the sink, so sinks are found by their mass"
)


def is_trained_model(path: Path) -> bool:
    """Whether a weights file has a .json beside it that says sinklab trained it."""
    return saved_format(path) in FORMATS


def saved_format(path: Path) -> str | None:
    """The "format" in the .json beside a weights file; None where there is no such thing."""
    import json

    try:
        held = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = held.get("format") if isinstance(held, dict) else None
    return found if isinstance(found, str) else None


def members_in(folder: Path) -> dict[str, Path]:
    """Member → weights file of a training run, or of a member's own folder (then named "."); empty for other folders.

    A member that is still in training has no weights yet and is left out. Raises InputError for a run.json that does
    not name its members, NotFoundError where none has weights.
    """
    import json

    if (folder / WEIGHTS).is_file() and is_trained_model(folder / WEIGHTS):
        return {".": folder / WEIGHTS}
    try:
        held = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(held, dict) or held.get("purpose") != "training":
        return {}
    listed = held.get("members", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        raise InputError(f"{folder / 'run.json'} is damaged: its 'members' are not the names of trained models.")
    found = {name: folder / "training" / name / WEIGHTS for name in listed}
    present = {name: path for name, path in found.items() if path.is_file()}
    if not present:
        raise NotFoundError(f"The training run {folder} has no trained model yet: go on with it, with --resume.")
    return present


def members_named(folder: Path) -> list[str]:
    """All members that a training run's run.json names, with weights or without; none of another folder."""
    import json

    try:
        held = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    listed = held.get("members") if isinstance(held, dict) and held.get("purpose") == "training" else None
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def require_member_whole(path: Path) -> None:
    """Raise InputError, saying what to do, for a member's folder, or a file in it, that gives no model as it is."""
    folder = path if path.is_dir() else path.parent
    left = [name for name in (STATE, "metrics.jsonl", "evaluation.json") if (folder / name).is_file()]
    if not left or (folder / "run.json").is_file() or not (path.is_dir() or path.name in (STATE, WEIGHTS)):
        return
    again = "the training's own command (sinklab train …) with --resume"
    if not (folder / WEIGHTS).is_file():
        raise InputError(
            f"{folder} is a training that is not finished, it has no {WEIGHTS} yet: {again} goes on with it."
        )
    if saved_format(folder / WEIGHTS) not in FORMATS:
        about = WEIGHTS.replace(".safetensors", ".json")
        wrong = "does not say so" if (folder / about).is_file() else "is missing"
        raise InputError(f"{folder} holds trained weights, but {about}, which says what they are of, {wrong}: {again} "
                         "makes it again.")  # fmt: skip
    if path.name == STATE:
        raise InputError(f"{path} is what a training goes on from, not a model: name {folder / WEIGHTS}, or {folder}.")


def only_member(folder: Path) -> Path | None:
    """The weights of a training run's one member; None for another folder. InputError where there are several."""
    found, planned = members_in(folder), max(len(members_named(folder)), 1)
    if max(len(found), planned) > 1:
        named = ", ".join(str(path.parent) for path in list(found.values())[:3])
        which = (
            f"trained {len(found)} models" if len(found) == planned else f"trains {planned} models, {len(found)} so far"
        )
        raise InputError(f"The run {folder} {which}: name the folder of one of them ({named}, …).")
    return next(iter(found.values()), None)


def load_trained(path: Path, request: Request) -> Loaded:
    """The model of a weights file that sinklab wrote."""
    if request.weights is not None or request.random_weights:
        raise InputError(f"{path} is a trained model itself: give neither another weights file nor random weights.")
    saved, name = {**request.saved(), "name": str(path.resolve())}, _short(path)
    if saved_format(path) == "sinklab-lm-1":
        return load_language_model(path, saved, name=name)
    if saved_format(path) == "sinklab-vit-1":
        from sinklab.models.from_vit import load_member

        return load_member(path, saved, name=name)
    return load_toy_model(path, saved, name=name)


def load_shipped(name: str, request: Request) -> Loaded:
    """One of the models that come with sinklab, `toy:NAME`."""
    from sinklab.models.toy_file import shipped_toy

    if request.weights is not None or request.random_weights:
        raise InputError(f"toy:{name} brings its own weights: give neither a weights file nor random weights.")
    return load_toy_model(shipped_toy(name), request.saved(), name=f"toy:{name}")


def load_shipped_lm(name: str, request: Request) -> Loaded:
    """One of the small language models that come with sinklab, `lm:NAME`."""
    from sinklab.models.lm_file import shipped_lm

    if request.weights is not None or request.random_weights:
        raise InputError(f"lm:{name} brings its own weights: give neither a weights file nor random weights.")
    return load_language_model(shipped_lm(name), request.saved(), name=f"lm:{name}")


def load_toy_model(path: Path, saved_request: dict[str, Any], *, name: str) -> Loaded:
    """A controlled model: tokens are vectors, the sequences are drawn from its own task.

    Where the sink can only take the queries that have nothing to do, which are about half of them, the rule that looks
    at all queries would never see it: those tasks are judged by the sink's mass.
    """
    from sinklab.models.checkpoint import sha256_of
    from sinklab.models.describe import provenance
    from sinklab.models.toy_file import read_toy

    module, saved = read_toy(path)
    config = saved["config"]
    idle = saved["kind"] in ("nop", "nop-branch")
    dedicated = saved["kind"] == "nop" or bool(config.get("dedicated"))
    module.requires_grad_(False)
    return Loaded(
        module=module,
        tokens=TokenMap.sequence(("bos",) if dedicated else ()),
        preprocessing=None,
        provenance=provenance(
            module,
            name=name,
            family="toy",
            architecture=f"{type(module).__name__} ({saved['arm']})",
            source=f"trained by sinklab, {saved['kind']}, seed {saved['seed']}, {config['steps']} steps",
            sha256=sha256_of(path),
            request=saved_request,
        ),
        forward=forward_sequences,
        sequences=SequenceInput(
            tokens=int(config["tokens"]),
            exact=True,
            channels=int(config["dim"]),
            task={name: saved[name] for name in ("kind", "seed", "config", "signature")},
            rule="mass" if idle else "relaxed",
            rule_note=BY_MASS if idle else "",
            batch_size=256,
            together=64,
        ),
        extra={"arm": saved["arm"]},
    )


def load_language_model(path: Path, saved_request: dict[str, Any], *, name: str) -> Loaded:
    """A byte-level language model: the first token is told apart, and the answers are next-byte distributions."""
    from sinklab.models.checkpoint import sha256_of
    from sinklab.models.describe import provenance
    from sinklab.models.lm_file import read_lm

    held = read_lm(path)
    module, about = held.model.requires_grad_(False), held.saved
    return Loaded(
        module=module,
        tokens=TokenMap.sequence(("bos",), ordinary="text"),
        preprocessing=None,
        provenance=provenance(
            module,
            name=name,
            family="lm",
            architecture=f"{type(module).__name__} ({about['config']['name']})",
            source=f"trained by sinklab on {about['text']['name']}, seed {about['seed']}, {about['step']} steps",
            sha256=sha256_of(path),
            request=saved_request,
        ),
        forward=_final,
        classify=_readout,
        sequences=SequenceInput(
            tokens=held.context,
            ids=len(held.symbols),
            vocabulary=tuple(held.symbols),
            text=about["text"]["name"],
            text_sha256=about["text"].get("sha256"),
            together=4,
        ),
    )


def forward_sequences(module: nn.Module, sequences: Tensor) -> Tensor:
    """Sequences [B N C] → the stream after the last layer [B N C]."""
    tokens: Tensor = module(sequences)
    return tokens


def _short(path: Path) -> str:
    """A name for reports: the run's folder and the member's."""
    parts = path.resolve().parent.parts
    if "training" in parts:
        at = len(parts) - 1 - parts[::-1].index("training")
        return "/".join((*parts[at - 1 : at], *parts[at + 1 :]))
    return path.stem


def _final(module: Any, ids: Tensor) -> Tensor:
    """Token ids [B N] → what the readout is linear in [B N C]."""
    tokens: Tensor = module.final(ids)
    return tokens


def _readout(module: Any, final: Tensor) -> Tensor:
    """[B N C] → logits [B N V]."""
    logits: Tensor = module.readout(final)
    return logits
