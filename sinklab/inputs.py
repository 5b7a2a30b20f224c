"""What a model is shown: pictures, a controlled task's sequences, or windows of a text; and how it is shown them.

`models` says what a model takes and `data` what there is; this is where they meet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from pathlib import Path

    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.models.loaded import SequenceInput


def find_inputs(
    model: Model,
    given: InputList | None = None,
    *,
    text: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> InputList:
    """The inputs that were given or, for None, the model's own.

    Those are the demo photographs (of a model that sinklab trained on pictures, those of its validation), a controlled
    task's sequences or, of a language model, windows of a text: the one named, or that which the model was trained on,
    where that can be found (the standard library's source).
    Raises InputError where they are not what the model reads, and NotFoundError where there are none.
    """
    wanted = model.loaded.sequences
    if text is not None and (wanted is None or wanted.task is not None):
        raise InputError(f"{model.name} reads {'images' if wanted is None else 'its task'}, not a text.")
    if given is not None:
        if (given.noun == "image") != (wanted is None):
            reads = "images" if wanted is None else "sequences"
            raise InputError(f"{model.name} reads {reads}, and {given.noun}s were given ({', '.join(given.sources)}).")
        return given
    if wanted is None:
        if model.loaded.pictures is not None:
            from sinklab.data.validated import found_again

            return found_again(model.loaded.pictures, model.name).sample(limit, seed=seed)
        from sinklab.data.images import find_images

        return find_images(["demo"], limit=limit, seed=seed)
    if wanted.task is not None:
        from sinklab.data.toy_sequences import toy_sequences

        return toy_sequences(wanted.task).sample(limit, seed=seed)
    return _windows(model.name, wanted, text, limit)


def own_pictures(model: Model, *, limit: int | None = None, seed: int = 0) -> InputList | None:
    """The pictures that a model's training validated on; None where it has none, or they are no longer there."""
    if model.loaded.pictures is None:
        return None
    try:
        return find_inputs(model, limit=limit, seed=seed)
    except (InputError, NotFoundError):
        return None


def _windows(name: str, wanted: SequenceInput, text: str | Path | None, limit: int | None) -> InputList:
    from sinklab.data.text import open_text
    from sinklab.data.text_sequences import text_sequences

    if wanted.vocabulary is None and wanted.tokenizer is None:
        raise InputError(
            f"{name} reads token ids, and no tokenizer came with it: give one (sinklab.attach(..., tokenizer=...)), or "
            "put its files beside the weights, or give ids: sinklab.data.sequences.SequenceList, its refs "
            "sinklab.data.text_tokens.TokenWindow."
        )
    if text is None and wanted.text not in (None, "stdlib"):
        raise InputError(f"The model was trained on {wanted.text}: name that text, or another, with --text.")
    opened = open_text("stdlib" if text is None else text)
    if wanted.vocabulary is not None:
        opened = opened.numbered_by(bytes(wanted.vocabulary), shipped=name.startswith("lm:"))
    named = replace(opened, name="stdlib" if text is None else str(text))
    if wanted.tokenizer is None:
        learned = wanted.text is not None and (wanted.text == opened.name or wanted.text_sha256 == opened.sha256)
        return text_sequences(named, wanted.tokens, limit=limit, whole=not learned)  # not what was trained on
    from sinklab.data.text_tokens import Reading, token_sequences

    found = token_sequences(named, Reading(length=wanted.tokens, **vars(wanted.tokenizer)), limit=limit)
    if text is not None:
        return found
    unlearned = (
        "no text was named: the library source of this Python is read, "
        f"which {name} is not known to have learned from; --text names another."
    )
    return replace(found, notes=(unlearned, *found.notes))


def view_for(model: Model, size: int | str) -> View:
    """How the model is shown its inputs; `size` is the side of the crop of pictures, or "native".

    Raises InputError for a size that cannot be.
    """
    wanted = model.loaded.sequences
    if wanted is not None:
        from sinklab.data.sequences import SequenceView
        from sinklab.models.request import DEFAULT_SIDE

        if size not in (DEFAULT_SIDE, "native"):
            raise InputError(f"A size is of pictures, in pixels; this model reads sequences, and {size} was asked for.")

        return SequenceView(
            tokens=wanted.tokens,
            prefix=model.tokens.prefix_tokens,
            suffix=len(model.tokens.suffix),
            channels=wanted.channels,
            vocabulary=wanted.vocabulary,
        )
    from sinklab.data.images import ImageTransform

    p, patch = model.preprocessing, model.tokens.patch_size
    assert p is not None
    plain: dict[str, Any] = {"interpolation": p.interpolation, "mean": p.mean, "std": p.std, "patch_size": patch}
    if isinstance(size, str):
        return ImageTransform.native(p.size, crop_fraction=p.crop_fraction, crop_mode=p.crop_mode, **plain)
    return ImageTransform.paper(size, **plain)
