"""`sinklab train`: the options of the command line, and nothing else. `lm` has a file of its own."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sinklab import terminal
from sinklab.cli_train_lm import train_lm_command
from sinklab.cli_train_vit import train_vit_command
from sinklab.errors import InputError
from sinklab.settings import seed_numbers
from sinklab.terminal_training import training

TASKS = {
    "nop": "One attention head learns to do nothing (NOP) on half of the tokens.",
    "nop-branch": "The same head, its own update supervised; --sweep trains along frequency or damping.",
    "broadcast": "Two layers learn to give every token what one of them holds.",
    "pathway": "The broadcast task with a global pathway beside attention, arm against arm.",
}
"""The controlled tasks."""
app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train a model, and measure what its sinks do: the controlled tasks, a language model, or vision transformers "
    "(vit).",
)


class SweepName(StrEnum):
    """What nop-branch can be trained along."""

    frequency = "frequency"
    damping = "damping"


def train_task(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="RUN", help="The run folder; default runs/TASK.")
    ] = None,
    config: Annotated[
        str, typer.Option(metavar="NAME", help="laptop (minutes on two cores), paper (the full budget); pathway: e1.")
    ] = "laptop",
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the config; repeatable.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds like 0-4 or 0,2,5; each has its own task and first weights.")] = "0",
    sweep: Annotated[
        SweepName | None, typer.Option(help="nop-branch: train along the frequency or the damping of NOP tokens.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the step with torch.compile.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder, bit for bit.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
) -> None:
    task = str(context.command.name)
    output = output or Path("runs") / task
    with terminal.errors_as_sentences(
        lambda: f"What was trained is kept in {output}: the same command with --resume goes on.",
        lighter="a smaller --set batch=… or evaluation_size=…, or a smaller model",
    ):
        if resume and overwrite:
            raise InputError("--resume goes on with a run and --overwrite replaces it: give one of them.")
        from sinklab.training.toy_config import make_config, members

        chosen = make_config(task, config, changes or ())
        if (
            sweep is not None
            and sweep.value == "frequency"
            and any(each.startswith("steps=") for each in changes or ())
        ):
            raise InputError("Along the frequency every point takes frequency_steps: set that in place of steps.")
        numbers = seed_numbers(seeds)
        planned = members(chosen, numbers, None if sweep is None else sweep.value)

        from sinklab.device import pick_device
        from sinklab.training.toy import train_toy

        with training([member.name for member in planned]) as tell:

            def progress(member: Any, state: Any) -> None:
                tell(member.name, state.step, state.steps, state.loss, state.score, state.seconds_left)

            run = train_toy(
                output,
                chosen,
                numbers,
                sweep=None if sweep is None else sweep.value,
                device=pick_device(device),
                compile=compile,
                resume=resume,
                overwrite=overwrite,
                command=["sinklab", *sys.argv[1:]],
                progress=progress,
            )
        from sinklab.reports.training import write_training_report

        print(write_training_report(run))


for name, words in TASKS.items():
    app.command(name, help=words)(train_task)
app.command("lm")(train_lm_command)
app.command("vit")(train_vit_command)
