"""What a model is shown: pictures for a vision model, drawn sequences for a controlled one; and how it is shown them.

`models` says what a model takes and `data` what there is; this is where they meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError

if TYPE_CHECKING:
    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model


def find_inputs(model: Model, given: InputList | None = None, *, limit: int | None = None, seed: int = 0) -> InputList:
    """The inputs that were given or, for None, a model's own: the demo photographs, a controlled task's sequences.

    Raises InputError where they are not what the model reads, and NotFoundError where there are none.
    """
    wanted = model.loaded.sequences
    if given is not None:
        if (given.noun == "image") != (wanted is None):
            reads = "images" if wanted is None else "sequences"
            raise InputError(f"{model.name} reads {reads}, and {given.noun}s were given ({', '.join(given.sources)}).")
        return given
    if wanted is None:
        from sinklab.data.images import find_images

        return find_images(["demo"], limit=limit, seed=seed)
    from sinklab.data.toy_sequences import toy_sequences

    assert wanted.task is not None
    return toy_sequences(wanted.task).sample(limit, seed=seed)


def view_for(model: Model, size: int | str) -> View:
    """How the model is shown its inputs; `size` is the side of the crop of pictures, or "native".

    Raises InputError for a size that cannot be.
    """
    wanted = model.loaded.sequences
    if wanted is not None:
        from sinklab.data.sequences import SequenceView

        return SequenceView(
            tokens=wanted.tokens,
            prefix=model.tokens.prefix_tokens,
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
