"""`sinklab diagnose`: the options of the command line, and those that other commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinklab import terminal
from sinklab.errors import InputError, NotFoundError, printable
from sinklab.run import noun_in
from sinklab.settings import layer_numbers, safe_name


class RuleName(StrEnum):
    """When a head is sunk."""

    relaxed = "relaxed"
    strict = "strict"
    mass = "mass"


class DefinitionName(StrEnum):
    """Which meaning of NOP and broadcast the report leads with."""

    causal = "causal"
    counts = "counts"


class Dtype(StrEnum):
    """The model's precision."""

    float32 = "float32"
    bfloat16 = "bfloat16"


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="demo, timm:NAME, openclip:ARCH[/TAG or FILE], hf:REPO_OR_DIR, tlens:REPO_OR_DIR, dinov2:NAME, a PATH "
        "(`sinklab models`).",
    ),
]
Weights = Annotated[Path | None, typer.Option(help="A local weights file for the architecture named.")]
RandomWeights = Annotated[
    bool, typer.Option("--random-weights", help="Draw the weights from --seed, for images of --size.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Also read weights files that may run code when they are opened.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.")]
Seed = Annotated[int, typer.Option(help="For --limit and --random-weights.")]
Size = Annotated[
    str,
    typer.Option(help="Pixels: short side to size*256/224, then a centre crop; or native, the model's own transform."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]


def diagnose(
    model: ModelName = "demo",
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGES",
            help="Files, folders, @list.txt, WebDataset .tar shards (glob or {000..009}), or demo [default: demo; of a "
            "training run what its training validated on].",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Language models: stdlib, enwik8=PATH, a file or a folder [default: what they learned from; hf: and "
            "tlens: stdlib, the source of Python's library, which they are not known to have learned from]."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RUN", help="The run folder; default runs/MODEL.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Pixels: short side to size*256/224, then a centre crop; or native, the model's own transform "
            "[default: 224; of a training run its own]."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Inputs at once [default: 16; controlled tasks: 256].")] = None,
    device: Device = "auto",
    dtype: Annotated[
        Dtype, typer.Option(help="Precision of the model; statistics are fp32 or better.")
    ] = Dtype.float32,
    workers: Annotated[int, typer.Option(help="Processes that decode images; 0 decodes in a thread.")] = 0,
    limit: Annotated[
        int | None,
        typer.Option(
            help="Use this many inputs, drawn by --seed [default: all; of a text 512 windows, evenly spread]."
        ),
    ] = None,
    seed: Seed = 0,
    rule: Annotated[
        RuleName | None, typer.Option(help="When a head counts as sunk [default: relaxed; some tasks: mass].")
    ] = None,
    attention: Annotated[
        float | None, typer.Option(help="relaxed: attention that makes a query routed [default: 0.5].")
    ] = None,
    fraction: Annotated[
        float | None, typer.Option(help="relaxed: share of queries that must be routed [default: 0.9].")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="strict: every query gives 1 - epsilon, at most 0.5 [default: 0.5].")
    ] = None,
    mass: Annotated[float | None, typer.Option(help="mass: the least inflow [default: 0.3].")] = None,
    definition: Annotated[
        DefinitionName, typer.Option(help="Definition of NOP and broadcast that the report leads with.")
    ] = DefinitionName.causal,
    layers: Annotated[str | None, typer.Option(help="Only these layers, e.g. 1-23 or 0,5,7-9.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Tables only.")] = False,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Compute z in the statistics pass: output equal to rounding, not bit for bit."),
    ] = False,
    strict_images: Annotated[
        bool, typer.Option("--strict-images", help="Stop at the first image that cannot be used.")
    ] = False,
    weights: Weights = None,
    random_weights: RandomWeights = False,
    allow_pickle: AllowPickle = False,
    offline: Offline = False,
) -> None:
    """Measure every attention head on every image, name its sinks, and write a report.

    Many GPUs or machines: torchrun --nproc-per-node N -m sinklab diagnose ...
    """
    from sinklab.trained import to_diagnose

    folder = output or Path("runs") / safe_name(model)
    with terminal.errors_as_sentences(lambda: _how_to_go_on(folder, overwrite)):
        options = {
            "text": text,
            "rule": _rule(rule, attention, fraction, epsilon, mass),
            "definition": definition.value,
            "layers": layer_numbers(layers),
            "size": None if size is None else size_of(size),
            "batch_size": batch_size,
            "dtype": dtype.value,
            "device": device,
            "workers": workers,
            "limit": limit,
            "seed": seed,
            "fast": fast,
            "strict_images": strict_images,
            "overwrite": overwrite,
            "resume": resume,
            "report": not no_report,
            "command": ["sinklab", *sys.argv[1:]],
        }
        if resume and overwrite:
            raise InputError("--resume goes on with a run and --overwrite replaces it: give one of them.")
        from sinklab.data.images import find_images

        found = find_images(images, limit=limit, seed=seed) if images else None  # before the model: the quicker error
        trained = to_diagnose(model, output)  # of a training run, all its models
        refused: list[Exception] = []
        to_do = _to_do(Path(model).expanduser(), trained, found, resume or overwrite) if trained else [(model, folder)]
        for number, (name, into) in enumerate(to_do, 1):
            folder, handle = into, None
            say_which(number, len(to_do), name)
            try:
                handle = load_model(
                    name, weights, random_weights, seed, offline, allow_pickle, dtype.value, size_of(size or "224")
                )
                _one(handle, found, into, options)
            except (InputError, NotFoundError) as error:  # of a training run's models one may not be readable
                refused.append(error)
                begun = handle is not None and (into / "run.json").is_file()
                if begun or len(refused) == len(to_do):
                    raise
                terminal.note(f"{name}: {error}")
        if trained and output is None and not no_report:
            renew_report(Path(model).expanduser())


def _to_do(run: Path, trained: list[tuple[str, Path]], images: Any, again: bool) -> list[tuple[str, Path]]:
    """The models of a training run that are looked at now; which are not is said."""
    from sinklab.trained import not_begun, unfinished_sentence

    to_do, said = (trained, "") if again else not_begun(trained, images)
    for sentence in filter(None, [unfinished_sentence(run), said]):
        terminal.note(sentence)
    return to_do


def _one(handle: Any, images: Any, output: Path, options: dict[str, Any]) -> None:
    """One model's diagnosis, with its bar and what is said at the end."""
    from sinklab.diagnosis import diagnose as run_diagnosis

    noun = "image" if handle.loaded.sequences is None else "sequence"
    with terminal.progress(f"{noun}s") as progress:
        run = run_diagnosis(handle, images, output, progress=progress, **options)
    if os.environ.get("RANK", "0") == "0":
        _tell(run, run.config["notes"], noun, "report.html" if options["report"] else "summary.json")


def say_which(number: int, count: int, name: object) -> None:
    """Before the progress and the notes of one of several models: which it is."""
    if count > 1:
        terminal.say(f"sinklab: model {number} of {count}: {name}")


def renew_report(trained: Path) -> None:
    """The report of a training run, with what its models' sinks were found to be."""
    if os.environ.get("RANK", "0") == "0":
        from sinklab.trained import renew_report as renew

        if problem := renew(trained):
            terminal.note(f"the report of {trained} was not written again. {problem}")


def _tell(run: Any, notes: Sequence[str], noun: str, result: str) -> None:
    """What was found, and where it is."""
    for note in notes:  # at the end, so that a refusal stands alone
        terminal.note(note)
    _say_skipped(run.skipped(), noun)
    from sinklab.reports.spoken import verdict_lines

    terminal.verdict(verdict_lines(run))
    print(run.path / result)


def size_of(text: str) -> int | str:
    if text == "native":
        return text
    if not text.isdigit() or int(text) == 0:
        raise InputError(f"--size is a number of pixels or native, not {text!r}.")
    return int(text)


def _rule(
    name: RuleName | None, attention: float | None, fraction: float | None, epsilon: float | None, mass: float | None
) -> Any:
    """The rule with its own thresholds; one that belongs to another rule is refused, not ignored. None if left open."""
    from sinklab.sinks.rule import SinkRule

    if name is None:
        if all(value is None for value in (attention, fraction, epsilon, mass)):
            return None
        name = RuleName.relaxed
    given = {"attention": attention, "fraction": fraction, "epsilon": epsilon, "mass": mass}
    own = {"relaxed": ("attention", "fraction"), "strict": ("epsilon",), "mass": ("mass",)}
    for option, value in given.items():
        if value is not None and option not in own[name.value]:
            owner = next(rule for rule, options in own.items() if option in options)
            raise InputError(f"--{option} belongs to --rule {owner}, but the rule is {name.value}.")
    chosen = {option: value for option, value in given.items() if value is not None}
    if "mass" in chosen:
        chosen["threshold"] = chosen.pop("mass")
    return SinkRule(name=name.value, **chosen)  # type: ignore[arg-type]


def load_model(
    name: str,
    weights: Path | None,
    random_weights: bool,
    seed: int,
    offline: bool,
    allow_pickle: bool,
    dtype: str,
    size: int | str,
) -> Any:
    from sinklab.handle import load

    handle = load(
        name,
        weights=weights,
        random_weights=random_weights,
        seed=seed,
        offline=offline,
        allow_pickle=allow_pickle,
        image_size=size if random_weights and isinstance(size, int) else None,
    )
    if dtype == "float32":
        handle.module.float()  # weights stored in bfloat16 are widened without loss
    return handle


def _how_to_go_on(output: Path, overwrite: bool) -> str:
    """After Ctrl-C: what the user types next; nothing where no run was begun."""
    if not (output / "run.json").is_file():
        return ""
    noun = noun_in(output)
    instead = " in place of --overwrite" if overwrite else ""
    return f"The {noun}s finished so far are kept in {output}: the same command with --resume{instead} goes on."


def _say_skipped(skipped: list[tuple[str, str]], noun: str) -> None:
    if not skipped:
        return
    terminal.say(f"sinklab: {len(skipped)} of the {noun}s could not be used (listed in run.json):")
    for image, reason in skipped[:10]:
        terminal.say(f"  {printable(image)}: {printable(reason)}")
    if len(skipped) > 10:
        terminal.say(f"  … and {len(skipped) - 10} more")
