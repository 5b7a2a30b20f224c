"""`sinklab train vit`: the options of the command line, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sinklab import terminal
from sinklab.errors import InputError
from sinklab.settings import seed_numbers
from sinklab.terminal_training import training

if TYPE_CHECKING:
    from sinklab.training.loop import Progress


def train_vit_command(
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="VARIANT-SIZE such as baseline-L or global-penalty-tiny; several with commas, or repeated.",
        ),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="SOURCE", help="Class folders, WebDataset shards, Parquet or Arrow; default: built-in."
        ),
    ] = None,
    validation: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help="Images to validate on; default: those of --data.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RUN", help="The run folder; default runs/NAME.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the config; repeatable.")
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds like 0-2 or 0,5: first weights, order, views and directions.")
    ] = "0",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes a rank that read images and, on a CPU, make their views.")
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps; meta with --steps.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    shard: Annotated[
        bool, typer.Option("--fsdp", help="Under torchrun: share the weights out (FSDP2), for G.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="A dry run of so many steps on random pixels, one image a step; writes nothing."),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard, where that package is installed.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
) -> None:
    """Train vision transformers under LeJEPA: plain, with registers, gated, or with a global pathway and its penalty.

    Start it with torchrun to use several GPUs: torchrun --nproc-per-node 4 -m sinklab train vit …
    """
    names = [name.strip() for told in config or ["baseline-tiny"] for name in told.split(",")]
    output = output or Path("runs") / (names[0] if len(names) == 1 else "vit")
    with terminal.errors_as_sentences(
        lambda: f"What was trained is kept in {output}: the same command with --resume goes on.",
        lighter="a smaller --set batch=… or more --set accumulate=…, a smaller --config, or fewer --workers",
    ):
        if resume and overwrite:
            raise InputError("--resume goes on with a run and --overwrite replaces it: give one of them.")
        from sinklab.training.vit_config import make_config

        chosen = [make_config(name, changes or ()) for name in names]
        numbers = seed_numbers(seeds)
        if steps is None and device == "meta":
            raise InputError("--device meta computes nothing, so nothing can be trained there: give --steps 2 too.")
        if steps is not None:
            if os.environ.get("RANK", "0") != "0":  # a dry run is of one process
                return
            from sinklab.training.vit_dry_run import dry_run

            for one in chosen:
                print(json.dumps(dry_run(one, steps=steps, device="cpu" if device == "auto" else device)))
            return
        board = None
        if tensorboard:
            from sinklab.board import Board

            board = Board(output)
        from sinklab.device import pick_device
        from sinklab.training.vit import train_vit
        from sinklab.watching import sink_scores

        shown = scored = None
        if images:
            from sinklab.data.labelled import labelled_images

            shown = labelled_images(images)
            scored = labelled_images(validation, classes=shown.classes or None) if validation else None
        elif validation:
            raise InputError("--validation belongs to --data: the built-in images bring their own.")
        members = [f"seed-{seed}/{one.name}" for seed in numbers for one in chosen]
        with training(members) as tell:

            def progress(name: str, state: Progress) -> None:
                tell(name, state.step, state.steps, state.loss, {}, state.seconds_left)
                if board is not None:
                    board.follow(name)

            run = train_vit(
                output,
                chosen,
                shown,
                validation=scored,
                seeds=numbers,
                device=pick_device(device),
                workers=workers,
                compile=compile,
                shard=shard,
                resume=resume,
                overwrite=overwrite,
                command=["sinklab", *sys.argv[1:]],
                score=sink_scores,
                progress=progress,
            )
        for name in members if board is not None and run is not None else ():
            assert board is not None
            board.follow(name)
        if run is not None and os.environ.get("RANK", "0") == "0":
            from sinklab.reports.training import write_training_report

            print(write_training_report(run))
