"""A diagnosed run taken up again: its model and its inputs are found, and checked against what it was made with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.settings import asked_dtype, differences, fingerprint

if TYPE_CHECKING:
    from sinklab.data.input_list import InputList
    from sinklab.diagnosis import Diagnosis
    from sinklab.handle import Model
    from sinklab.interventions.experiment import Experiment
    from sinklab.interventions.options import PatchOptions
    from sinklab.sinks.ranks import Ranks


def experiment_on(
    run: Diagnosis,
    model: Model | None,
    images: Any,
    text: str | Path | None,
    options: PatchOptions,
    held_out: str | Path | None,
    device: str | None,
    workers: int,
    own: Ranks,
) -> Experiment:
    """Everything that is needed, checked against what the run was made with."""
    from sinklab.data.images import find_images
    from sinklab.handle import load
    from sinklab.interventions.experiment import Experiment
    from sinklab.sinks.options import ScanOptions

    config = run.config
    if model is None:
        if not config["model"].get("request"):
            raise InputError("This run's model was attached from memory: give it to patch as model=.")
        model = load(str(run.path.resolve()))  # whole, or a folder called demo would be the demo model
        if config["settings"]["model"].get("parameters_dtype") == "float32":  # as the command widened it
            model.module.float()
    options = options.fitting(model)
    found = _images(run, model, images, text)
    if held_out is not None and found.noun != "image":
        raise InputError(f"--heldout is a share like 0.25 in a run of {found.noun}s, not a folder of images.")
    folder = None if held_out is None else find_images([str(held_out)])
    if folder is not None and set(_pictures(folder)) & set(_pictures(found)):
        raise InputError("Held-out images are images that are not edited, but some of them are the run's own.")
    if device is not None:
        model.module.to(pick_device(device, own.local))
    scan = ScanOptions(size=config["options"]["size"] or 224, dtype=asked_dtype(config))
    said = scan.settings(model, found, model.device.type)["model"]
    changed = differences(config["settings"]["model"], said)
    if changed:
        raise InputError(f"The run {run.path} was made with another model: {'; '.join(changed)}.")
    settings = {
        "run": config["fingerprint"],
        # an input that could not be used may come back when the diagnosis is resumed: the draws then change
        "inputs": fingerprint({"usable": list(run.read_heads(["image"])["image"].unique())}),
        "rule": {key: value for key, value in config["rule"].items() if key != "sentence"},
        "definition": config["definition"],
        "held_out_images": None if folder is None else folder.sha256,
        "device": model.device.type,
        **({"together": model.loaded.sequences.together} if model.loaded.sequences is not None else {}),
        "options": options.settings(),
    }
    return Experiment(
        model=model,
        run=run,
        images=found,
        transform=scan.transform(model),
        options=options,
        settings=settings,
        fingerprint=fingerprint(settings),
        ranks=own,
        folder=folder,
        workers=workers,
    )


def _pictures(images: InputList) -> list[tuple[str, int | None]]:
    return [(ref.path, ref.offset) for ref in images]


def _images(run: Diagnosis, model: Model, images: Any, text: str | Path | None = None) -> InputList:
    """The run's own list of inputs, found again. InputError if it is another list now."""
    from sinklab.data.images import find_images
    from sinklab.inputs import find_inputs, own_pictures
    from sinklab.sinks.resume import check_unchanged

    about, limit = run.config["images"], run.config["options"].get("limit")
    seed = run.config["seeds"]["images"]
    mine = None if images else own_pictures(model, limit=limit, seed=seed)
    if mine is not None and mine.sha256 != about["list_sha256"] and list(mine.sources) != about["sources"]:
        mine = None  # the run saw others
    pictures = images or (about["sources"] if model.loaded.sequences is None else None)
    given = mine if mine is not None or pictures is None else find_images(pictures, limit=limit, seed=seed)
    own = model.loaded.sequences
    if text is None and own is not None and own.task is None and given is None:
        text = about["sources"][0]
    found = find_inputs(model, given, text=text, limit=limit, seed=seed)
    if found.sha256 == about["list_sha256"]:
        check_unchanged(run, found)
    else:
        where = "where the run found them" if [text] == about["sources"] or not (images or text) else "there"
        holder = "the folder" if found.noun == "image" else "the text (--text)"
        raise InputError(
            f"The {found.noun}s are not those of the run {run.path} any longer: it saw {about['count']}, and {where} "
            f"are {len(found)}, or some were changed or renamed. Give {holder} that holds them."
        )
    return found
