"""The command line: `sinklab report`, `doctor`, `models`; other commands have files of their own.

Heavy libraries load inside the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinklab import terminal
from sinklab.cli_compare import compare
from sinklab.cli_diagnose import (
    AllowPickle,
    Device,
    Dtype,
    ModelName,
    Offline,
    RandomWeights,
    Size,
    Weights,
    diagnose,
    load_model,
    size_of,
)
from sinklab.cli_evaluate import evaluate
from sinklab.cli_patch import patch
from sinklab.cli_train import app as train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in the help are what the user may leave out, not markup
    help="What is an attention sink computing: nothing (NOP), or something shared (broadcast)?",
)


app.command()(diagnose)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]) -> None:
    """Write report.html again from a run's saved tables; of a training of vision transformers before its end, too."""
    with terminal.errors_as_sentences():
        from sinklab.diagnosis import open_run
        from sinklab.reports.training import shown_unfinished, write_training_report
        from sinklab.run import Run

        training = Run.open(run)
        print(write_training_report(training) if shown_unfinished(training) else open_run(run).report())


app.command()(patch)
app.add_typer(train, name="train")
app.command()(evaluate)
app.command()(compare)


@app.command()
def doctor(
    model: ModelName = "demo",
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help="One image; the first of several is used.")
    ] = None,
    size: Size = "224",
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Precision to examine.")] = Dtype.float32,
    seed: Annotated[int, typer.Option(help="For --random-weights.")] = 0,
    weights: Weights = None,
    random_weights: RandomWeights = False,
    allow_pickle: AllowPickle = False,
    offline: Offline = False,
) -> None:
    """Prove the attachment to a model, site by site, and compare its precision with float64 on one image."""
    with terminal.errors_as_sentences():
        from sinklab.data.images import find_images

        found = find_images(images) if images else None
        handle = load_model(model, weights, random_weights, seed, offline, allow_pickle, dtype.value, size_of(size))
        from sinklab.device import pick_device
        from sinklab.inputs import find_inputs
        from sinklab.sinks.doctor import examine
        from sinklab.sinks.options import ScanOptions
        from sinklab.sinks.scan import check_input, first_readable, unchecked

        handle.module.to(pick_device(device))
        options = ScanOptions(size=size_of(size), dtype=dtype.value)
        transform = options.transform(handle)
        shown = find_inputs(handle, found)
        said = shown.notes if shown.noun == "image" else ()  # of a text one window is read: which are is no matter
        notes = [*said, *check_input(handle, transform)]
        pixels = first_readable(shown, transform, strict=False)
        examined = examine(handle, pixels, dtype=dtype.value)
        for note in (*handle.provenance.notes, *notes, *unchecked(examined.proofs)):
            terminal.note(note)
        terminal.examination(examined)


@app.command()
def models() -> None:
    """The names that MODEL can be."""
    with terminal.errors_as_sentences():
        from sinklab.models.load import describe_names

        rows = [[row["name"], row["loads"], row["example"]] for row in describe_names()]
        terminal.table("Models", ["name", "loads", "example"], rows)


def main() -> None:
    """The console script."""
    terminal.warnings_as_lines()
    app()
