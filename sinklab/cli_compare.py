"""`sinklab compare`: the options of the command line, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sinklab import terminal
from sinklab.atomic import require_csv


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished training runs.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write every seed's values, as .csv.")
    ] = None,
) -> None:
    """Training runs side by side: median, mean and spread over seeds, and differences paired by seed."""
    with terminal.errors_as_sentences():
        require_csv(output)
        from sinklab.training.compare import differing_texts, left_out, over_seeds, paired, read_results

        results = read_results(runs)
        if names := differing_texts(runs):
            terminal.note(f"the runs were trained on different texts ({', '.join(names)}): bits a byte do not compare.")
        if missing := left_out(runs, results):
            terminal.note(f"left out, for there are no numbers of them: {', '.join(missing)}.")
        summary = over_seeds(results)
        columns = ["run", "arm", "measure", "seeds", "median", "mean", "std"]
        terminal.table("Over seeds", columns, _written(summary[columns]), titled=True)
        differences = paired(results)
        if len(differences):
            first = results.iloc[0]
            print()
            title = f"Difference from {first['arm']} of {first['run']}, seed by seed"
            terminal.table(title, list(differences.columns), _written(differences), titled=True)
        if output is not None:
            from sinklab.atomic import atomically

            with atomically(output) as stream:
                stream.write(results.to_csv(index=False, lineterminator="\n").encode())


def _written(frame: Any) -> list[list[str]]:
    """Cells as text: four digits after the point, nothing where there is no number."""
    return [[_cell(value) for value in row] for row in frame.itertuples(index=False)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4f}"
    return str(value)
