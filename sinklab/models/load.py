"""One name, one model: `load` turns what a user writes into a plain module and all that must be known about it.

| name | loads |
|---|---|
| `demo` | a real DINOv2 ViT-S/14 that comes with the demo extra |
| `timm:NAME` | a timm vision transformer |
| `openclip:ARCH[/TAG or FILE]` | an open_clip vision tower |
| `hf:REPO_OR_DIR` | a Hugging Face vision or language model |
| `tlens:REPO_OR_DIR` | a language model as a TransformerLens bridge |
| `dinov2:NAME` | one of Meta's DINOv2 files |
| `lm:NAME` | a byte-level language model that comes with sinklab: phase-tiny, transformer-tiny |
| `toy:NAME` | a controlled model that comes with sinklab: nop, broadcast, pathway-penalty |
| `PATH` | a checkpoint file with a sidecar config, or a run folder, also one that trained a model |

With a local file nothing touches the network. Weights are loaded whole or not at all, and never rewritten.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.models.loaded import Loaded, Preprocessing
from sinklab.models.request import Request, close_matches, size_pair
from sinklab.models.tokens import TokenMap

if TYPE_CHECKING:
    from torch import nn

_NAMES = (
    ("demo", "a real DINOv2 ViT-S/14 (needs the demo extra)", "demo"),
    (
        "timm:NAME",
        "a timm ViT: DINOv2, DINOv3, CLIP, SigLIP, DeiT, EVA, plain; own weights or --weights FILE",
        "timm:vit_small_patch14_reg4_dinov2.lvd142m",
    ),
    ("openclip:ARCH[/TAG or FILE]", "an open_clip vision tower", "openclip:ViT-B-16/laion2b_s34b_b88k"),
    (
        "hf:REPO_OR_DIR",
        "a Hugging Face Dinov2, Dinov2WithRegisters, DINOv3, ViT, CLIP or SigLIP vision model, or a language model: "
        "GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma, BERT, RoBERTa, DistilBERT",
        "hf:facebook/dinov2-with-registers-base",
    ),
    ("tlens:REPO_OR_DIR", "one of these language models as a TransformerLens bridge", "tlens:openai-community/gpt2"),
    ("dinov2:NAME", "one of Meta's DINOv2 files, with --weights FILE", "dinov2:vitb14_reg"),
    ("lm:NAME", "a byte-level language model that comes with sinklab: phase-tiny, transformer-tiny", "lm:phase-tiny"),
    ("toy:NAME", "a controlled model that comes with sinklab: nop, broadcast, pathway-penalty", "toy:broadcast"),
    (
        "PATH",
        "a checkpoint file with a sidecar config beside it, or a run folder, also one that trained a model",
        "runs/demo",
    ),
)
_PREFIXES = ("timm", "openclip", "hf", "tlens", "dinov2", "toy", "lm")


def describe_names() -> list[dict[str, str]]:
    """What `load` takes, one row a kind of name: keys "name", "loads", "example"."""
    return [{"name": name, "loads": loads, "example": example} for name, loads, example in _NAMES]


def load(
    name: str,
    *,
    weights: str | Path | None = None,
    random_weights: bool = False,
    seed: int = 0,
    offline: bool = False,
    allow_pickle: bool = False,
    image_size: int | tuple[int, int] | None = None,
) -> Loaded:
    """A model by its name (see the module's table), in eval mode, without gradients, in the precision it is stored in.

    `weights` is a local file for the architecture named; `random_weights` draws them from `seed` instead, at
    `image_size` (pixels; one number or height and width) if given. `offline` forbids the network, `allow_pickle`
    allows files that may run code. Weights come out as float32, or bfloat16 if the file holds nothing else.

    Raises NotFoundError (no such model, file, tag, or cached copy) and InputError (weights that do not fit, with a
    report of every name; options that exclude each other; files that cannot be read).
    """
    request = Request(
        name=str(name),
        weights=Path(weights).expanduser() if weights is not None else None,
        random_weights=random_weights,
        seed=seed,
        offline=offline,
        allow_pickle=allow_pickle,
        image_size=size_pair(image_size),
    )
    if request.weights is not None and not request.weights.is_file():
        raise NotFoundError(f"There is no weights file {request.weights}.")
    return _dispatch(request.name, request)


def from_module(
    module: nn.Module,
    *,
    tokens: TokenMap | None = None,
    preprocessing: Preprocessing | None = None,
    name: str = "attached",
    tokenizer: Any | None = None,
) -> Loaded:
    """A model already in memory, left exactly as it is; see `sinklab.models.attached`."""
    from sinklab.models.attached import attached

    return attached(module, tokens=tokens, preprocessing=preprocessing, name=name, tokenizer=tokenizer)


def _dispatch(name: str, request: Request) -> Loaded:
    if name == "demo":
        from sinklab.models.demo import load_demo

        return load_demo(request)
    prefix, colon, rest = name.partition(":")
    if colon and prefix in _PREFIXES:
        return _by_prefix(prefix, rest.strip(), request)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_run(path, request)
    if path.is_file():
        return _from_sidecar(path, request)
    raise NotFoundError(_unknown(name))


def _by_prefix(prefix: str, rest: str, request: Request) -> Loaded:
    if not rest:
        raise InputError(f"{prefix}: needs a name after the colon, e.g. {_example(prefix)}.")
    if prefix == "timm":
        from sinklab.models.from_timm import load_timm

        return load_timm(rest, request)
    if prefix == "openclip":
        from sinklab.models.from_openclip import load_openclip

        return load_openclip(rest, request)
    if prefix == "lm":
        from sinklab.models.from_training import load_shipped_lm

        return load_shipped_lm(rest, request)
    if prefix == "toy":
        from sinklab.models.from_training import load_shipped

        return load_shipped(rest, request)
    if prefix == "tlens":
        from sinklab.models.from_transformerlens import load_lens

        return load_lens(rest, request)
    if prefix == "dinov2":
        from sinklab.models.from_dinov2 import load_dinov2

        return load_dinov2(rest, request)
    from sinklab.models.from_huggingface import load_huggingface

    return load_huggingface(rest, request)


def _example(prefix: str) -> str:
    return next(example for _, _, example in _NAMES if example.startswith(f"{prefix}:"))


def _from_run(folder: Path, request: Request) -> Loaded:
    from sinklab.models.from_training import load_trained, only_member, require_member_whole
    from sinklab.models.saved import request_from_run, require_same_weights

    trained = only_member(folder)
    if trained is not None:
        return load_trained(trained, request)
    require_member_whole(folder)
    again, digest = request_from_run(folder, request)
    named = Path(again.name).expanduser()
    by_library = again.name == "demo" or again.name.partition(":")[0] in _PREFIXES
    if not by_library and named.is_dir() and (named / "run.json").is_file():
        raise InputError(f"The run in {folder} names another run folder, {again.name}: name that one.")
    loaded = _dispatch(again.name, again)
    require_same_weights(loaded, digest, folder)
    return loaded


def _from_sidecar(path: Path, request: Request) -> Loaded:
    from sinklab.models.from_training import is_trained_model, load_trained, require_member_whole
    from sinklab.models.saved import images_come_second, read_sidecar, with_preprocessing

    if is_trained_model(path):
        return load_trained(path, request)
    require_member_whole(path)
    if _is_picture(path):
        raise InputError(f"{path} is a picture, not a model. {images_come_second(path, request)}")
    if request.weights is not None or request.random_weights:
        raise InputError(f"{path} is a checkpoint file itself: give neither another weights file nor random weights.")
    if not path.with_suffix(".json").is_file():
        from sinklab.models.from_vit import from_authors_file

        if (authors := from_authors_file(path, request)) is not None:
            return authors
    held = read_sidecar(path)
    asked = replace(request, weights=path, kwargs=held["kwargs"])
    prefix, _, rest = held["model"].partition(":")
    if prefix == "hf" and not rest:
        from sinklab.models.from_huggingface import from_settings

        loaded = from_settings(held["kwargs"], path, asked, label=path.name)
    elif held["model"] == "vit":
        from sinklab.models.from_vit import load_authors

        loaded = load_authors(path, request, held["kwargs"])
    elif prefix in ("timm", "openclip", "dinov2") and rest:
        loaded = _by_prefix(prefix, rest, asked)
    else:
        raise InputError(
            f"{path.with_suffix('.json')} names the model {held['model']!r}; "
            "what fits is timm:NAME, openclip:ARCH, dinov2:NAME, vit, or hf with the config's fields as kwargs."
        )
    # What gives this model again is the path itself: the sidecar says the rest.
    saved = {**request.saved(), "name": str(path.resolve())}
    loaded = replace(loaded, provenance=replace(loaded.provenance, request=saved))
    return with_preprocessing(loaded, held["preprocessing"], path.with_suffix(".json"))


def _is_picture(path: Path) -> bool:
    """Whether a file's name says that it is a picture, a list of pictures or a shard of them, not weights."""
    from sinklab.models.checkpoint import SUFFIXES

    if path.suffix.lower() in SUFFIXES:
        return False
    from mimetypes import guess_type

    return (guess_type(path.name)[0] or "").startswith("image/")


def _unknown(name: str) -> str:
    from sinklab.models.checkpoint import SUFFIXES

    prefixes = ", ".join(row["name"] for row in describe_names())
    if name.endswith(SUFFIXES) or "/" in name.partition(":")[0] or name.startswith((".", "~")):
        return f"There is no file or folder {name}."
    candidates = ["demo", *(f"{prefix}:{name.partition(':')[2]}" for prefix in _PREFIXES), *_registry_names(name)]
    return f"There is no model named {name!r}.{close_matches(name, candidates)} What can be named: {prefixes}."


def _registry_names(name: str) -> list[str]:
    """Full names whose last part is like what was written without a prefix ("vits14", "ViT-B-16", a timm name)."""
    from difflib import get_close_matches

    import open_clip
    import timm

    from sinklab.models.from_dinov2 import dinov2_names

    known = {"timm": timm.list_models(), "openclip": open_clip.list_models(), "dinov2": dinov2_names()}
    bare = name.partition(".")[0]
    return [f"{prefix}:{hit}" for prefix, names in known.items() for hit in get_close_matches(bare, names, n=2)]
