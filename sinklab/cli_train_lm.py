"""`sinklab train lm`: the options of the command line, and nothing else."""

from __future__ import annotations

import math
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinklab import terminal
from sinklab.errors import InputError
from sinklab.settings import safe_name, seed_numbers
from sinklab.terminal_training import training


class LMSweepName(StrEnum):
    """What a language model can be trained along."""

    lr = "lr"


class VocabularyName(StrEnum):
    """Which bytes are tokens."""

    observed = "observed"
    bytes = "bytes"


def train_lm_command(
    config: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="phase or transformer, -tiny (minutes on one core), -1m or -5m; ablations after plus signs, like "
            "phase-tiny+no-gates; several with commas.",
        ),
    ] = "phase-tiny",
    text: Annotated[
        str, typer.Option(help="stdlib (the source of Python's own library), enwik8=PATH, a file or a folder.")
    ] = "stdlib",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RUN", help="The run folder; default runs/NAME.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; the same as --set lr=.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change one value of the training (steps=500) or of the model (model.layers=2); repeatable.",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds like 0-4 or 0,2,5, of first weights and batches.")] = "0",
    sweep: Annotated[
        LMSweepName | None,
        typer.Option(help="lr: train at each of four peak learning rates, and choose by validation."),
    ] = None,
    vocabulary: Annotated[
        VocabularyName, typer.Option(help="observed: tokens are the bytes that occur in the text; bytes: all 256.")
    ] = VocabularyName.observed,
    split: Annotated[str, typer.Option(help="Shares of train, validation and test, where the text gives none.")] = (
        "90,5,5"
    ),
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 where precision allows it.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the step with torch.compile.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder, bit for bit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
) -> None:
    """Train byte-level language models: phases that synchronise (Kuramoto attention), or a transformer to match.

    Many GPUs or machines: torchrun --nproc-per-node N -m sinklab train lm ...
    """
    output = output or Path("runs") / safe_name(config)
    with terminal.errors_as_sentences(
        lambda: f"What was trained is kept in {output}: the same command with --resume goes on.",
        lighter="a smaller --set batch=…, context=… or evaluation_batch=…, or a smaller --config",
    ):
        if resume and overwrite:
            raise InputError("--resume goes on with a run and --overwrite replaces it: give one of them.")
        from sinklab.training.lm_config import lm_members, make_lm_config

        rate = [] if lr is None else [f"lr={lr!r}"]
        told = [*rate, *(changes or ()), *(["bf16=true"] if bf16 else [])]
        configs = [make_lm_config(name.strip(), told) for name in config.split(",")]
        numbers = seed_numbers(seeds)
        kind = None if sweep is None else sweep.value
        planned = lm_members(configs, numbers, kind)
        shares = _shares(split)

        from sinklab.data.text import open_text
        from sinklab.device import pick_device
        from sinklab.training.lm import train_lm

        read = open_text(text, vocabulary=vocabulary.value, shares=shares)
        for remark in read.notes:
            terminal.note(remark)
        with training([member.name for member in planned], "validation", "bits a byte") as tell:

            def progress(member: Any, state: Any) -> None:
                tell(member.name, state.step, state.steps, state.loss / math.log(2), state.score, state.seconds_left)

            run = train_lm(
                output,
                configs,
                numbers,
                text=read,
                sweep=kind,
                device=pick_device(device, int(os.environ.get("LOCAL_RANK", "0"))),
                compile=compile,
                resume=resume,
                overwrite=overwrite,
                command=["sinklab", *sys.argv[1:]],
                progress=progress,
            )
        if os.environ.get("RANK", "0") == "0":
            from sinklab.reports.training import write_training_report

            print(write_training_report(run))


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 < share < math.inf for share in shares):
        raise InputError(f"--split is three positive shares like 90,5,5, not {text!r}.")
    return shares
