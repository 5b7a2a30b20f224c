"""`sinklab evaluate`: the options of the command line, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinklab import terminal
from sinklab.atomic import require_csv


def evaluate(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A run of `sinklab train lm`, the folder or .safetensors file of one of its models, or lm:NAME.",
        ),
    ],
    text: Annotated[
        str, typer.Option(help="stdlib (the source of Python's own library), enwik8=PATH, a file or a folder.")
    ] = "stdlib",
    members: Annotated[
        list[str] | None, typer.Option("--member", metavar="NAME", help="Only this training of the run; repeatable.")
    ] = None,
    splits: Annotated[str, typer.Option(help="Of train, validation and test, with commas.")] = "validation,test",
    context: Annotated[
        int | None, typer.Option(min=1, help="Bytes that the window holds [default: the training's].")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Bytes that the window moves on by [default: the training's].")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at once; the numbers do not depend on it.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write the table, as .csv.")
    ] = None,
) -> None:
    """Bits a byte (the column bpc) of trained language models on a text, by a window that slides over it."""
    with terminal.errors_as_sentences(lighter="a smaller --batch-size"):
        require_csv(output)
        from sinklab.training.lm_evaluate import evaluate_models, trained_models

        files = trained_models(run, members or ())

        from sinklab.data.text import open_text
        from sinklab.device import pick_device

        read = open_text(text)
        for remark in read.notes:
            terminal.note(remark)
        table = evaluate_models(
            files,
            read,
            splits=list(dict.fromkeys(name.strip() for name in splits.split(","))),
            context=context,
            stride=stride,
            batch=batch_size,
            device=pick_device(device),
            progress=lambda done, count: terminal.say(f"models {done}/{count}") if count > 1 else None,
        )
        if not table["same_text"].all():
            which = f"{next(iter(files))} was not" if len(files) == 1 else "not all of these models were"
            terminal.note(f"{which} trained on {read.name} with these splits.")
        columns = ["member", "split", "bpc", "bytes", "context", "stride"]
        rows = [
            [f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in table[columns].values
        ]
        terminal.table(f"Bits a byte (bpc), {read.name}", columns, rows)
        if output is not None:
            from sinklab.atomic import atomically

            with atomically(output) as stream:
                stream.write(table.to_csv(index=False, lineterminator="\n").encode())
