"""`sinklab patch`: the options of the command line, and nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sinklab import terminal
from sinklab.cli_diagnose import renew_report, say_which
from sinklab.errors import InputError, NothingToEdit


def patch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished diagnosis, or of a training run's.")
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGES", help="Where the run's images are now; by default where they were."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Where a language model's text is now; by default where the run found it.")
    ] = None,
    heads: Annotated[str, typer.Option(help="auto, or layer:head pairs like 5:3,0:2.")] = "auto",
    edits: Annotated[
        str, typer.Option(help="Some of zero, mean, donor, ordinary, route, zero_ordinary; null, of a model of phases.")
    ] = "zero,mean,donor,ordinary,route,zero_ordinary",
    classes: Annotated[
        str, typer.Option("--class", help="Whose heads: nop, broadcast, intermediate.")
    ] = "nop,broadcast",
    per_class: Annotated[int, typer.Option(help="Heads a class in layers from 1 on.")] = 16,
    block0: Annotated[int, typer.Option(help="Heads a class in block 0.")] = 4,
    min_events: Annotated[int, typer.Option(help="Events that make a head eligible.")] = 50,
    min_events_analysis: Annotated[int, typer.Option(help="Edited inputs that a verdict needs.")] = 20,
    heldout: Annotated[
        str,
        typer.Option(
            metavar="SHARE|FOLDER", help="Inputs that are not edited and give the mean values; a folder of images."
        ),
    ] = "0.25",
    joint: Annotated[
        bool, typer.Option("--joint", help="Also edit a class's heads together: the first, the first two, ..., all.")
    ] = False,
    metric: Annotated[str, typer.Option(help="Some of patch, logits, cls.")] = "patch,logits,cls",
    labels: Annotated[
        Path | None, typer.Option(help="CSV with image and label (a class number), for the change of cross-entropy.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Edits of your own (.json, .toml), made together in every input.")
    ] = None,
    bootstrap: Annotated[int, typer.Option(help="Draws behind every interval.")] = 2000,
    seed: Annotated[int, typer.Option(help="For donors, drawn tokens, held-out inputs and intervals.")] = 0,
    rows: Annotated[int, typer.Option(help="Edits that run at once.")] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode images; 0 decodes in a thread.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier patching of this run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier patching of this run.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Tables only.")] = False,
) -> None:
    """Edit the sinks of a diagnosed run, one head at a time, and measure what the model then says.

    Tells NOP from broadcast by cause: what happens if the sink's value is zeroed, averaged, swapped with another
    image's, made ordinary, or if no token may attend to the sink.

    Many GPUs or machines: torchrun --nproc-per-node N -m sinklab patch ...
    """
    with terminal.errors_as_sentences(lambda: f"What was measured is kept in {run}: the same command with --resume."):
        from sinklab.interventions.choose import parse_heads
        from sinklab.interventions.plan import read_plan
        from sinklab.patching import patch as run_patch

        chosen: dict[str, Any] = {
            "heads": _tuple(parse_heads(heads)),
            "edits": _names(edits),
            "classes": _names(classes),
            "per_class": per_class,
            "block0": block0,
            "min_events": min_events,
            "min_events_analysis": min_events_analysis,
            "joint": joint,
            "metrics": _names(metric),
            "bootstrap": bootstrap,
            "seed": seed,
            "rows": rows,
            "plan": None if plan is None else tuple(read_plan(plan)),
            "labels": {} if labels is None else _labels(labels),
        }
        chosen |= {"device": device, "workers": workers, "resume": resume, "overwrite": overwrite}
        chosen |= {"report": not no_report, "command": ["sinklab", *sys.argv[1:]]}
        from sinklab.trained import not_diagnosed_sentence, to_patch

        trained = to_patch(run)  # of a training run, all its models
        nothing: list[NothingToEdit] = []
        if left := not_diagnosed_sentence(run, trained or []):
            terminal.note(left)
        for number, one in enumerate(trained or [run], 1):
            say_which(number, len(trained or [run]), one)
            try:
                with terminal.progress("passes") as progress:  # an input may give values, and be edited
                    places: dict[str, Any] = {"images": images or None, "text": text, "held_out": _held_out(heldout)}
                    done = run_patch(one, progress=progress, **places, **chosen)
            except NothingToEdit as error:  # of a training run's models some may have no sink
                nothing.append(error)
                if len(nothing) == len(trained or [run]):
                    raise
                terminal.note(f"{one}: {error}")
                continue
            if os.environ.get("RANK", "0") == "0":
                _tell(done, "tables/effects.csv" if no_report else "report.html")
        if trained and not no_report:
            renew_report(run)


def _tell(run: Any, result: str) -> None:
    """What was found, and where it is."""
    from sinklab.reports.spoken import causal_lines

    for note in (run.config.get("patch") or {}).get("notes", []):
        terminal.say(f"sinklab: note: {note}")
    terminal.verdict(causal_lines(run))
    print(run.path / result)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _tuple(pairs: list[tuple[int, int]] | None) -> tuple[tuple[int, int], ...] | None:
    return None if pairs is None else tuple(pairs)


def _held_out(text: str) -> float | str:
    """A share of the run's images, or a folder."""
    try:
        return float(text)
    except ValueError:
        if not Path(text).exists():
            raise InputError(f"--heldout is a share like 0.25 or a folder of images; there is no {text!r}.") from None
        return text


def _labels(path: Path) -> dict[str, int]:
    """image → class number from a CSV file."""
    import csv

    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except FileNotFoundError as error:
        raise InputError(f"There is no file {path}.") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a table of images and labels: {error}.") from error
    if not rows or not {"image", "label"} <= rows[0].keys():
        raise InputError(f"{path} needs rows under the columns image and label.")
    found: dict[str, int] = {}
    for number, row in enumerate(rows, start=2):
        image, label = row["image"], (row["label"] or "").strip()
        if not image or not label.isascii() or not label.isdigit() or len(label) > 9:
            raise InputError(
                f"Line {number} of {path} needs an image and a class number from 0, not {image!r}, {label!r}."
            )
        if found.setdefault(image, int(label)) != int(label):
            raise InputError(f"Line {number} of {path} gives {image!r} another label than an earlier line.")
    return found
