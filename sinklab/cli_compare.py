"""`sinklab compare`: the options of the command line, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sinklab import terminal
from sinklab.atomic import require_csv
from sinklab.errors import InputError


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of finished training runs, or of diagnosed runs.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Also write every seed's values, as .csv; sinks beside it, as FILE-table14.csv and FILE-table15.csv.",
        ),
    ] = None,
) -> None:
    """Training runs side by side: median, mean and spread over seeds, and differences paired by seed.

    Of models that were diagnosed also the paper's Tables 14 and 15: sinks per image, means over seeds.
    """
    with terminal.errors_as_sentences():
        require_csv(output)
        from sinklab.comparison import diagnosed, is_training, not_diagnosed

        kinds = {is_training(run) for run in runs}
        if len(kinds) > 1:
            raise InputError("Training runs are compared with training runs, and diagnosed runs with diagnosed runs.")
        looked_at = diagnosed(runs)  # what refuses does so before anything is said
        if kinds == {True}:
            _trainings(runs, output)
            if missing := not_diagnosed(runs, looked_at):
                terminal.note(f"not diagnosed, and so not in Tables 14 and 15: {', '.join(missing)}.")
        if looked_at:
            _sinks(looked_at, output)


def _trainings(runs: list[Path], output: Path | None) -> None:
    """What the trainings measured, printed and written."""
    from sinklab.training.compare import (
        MEANINGS,
        differing_budgets,
        differing_texts,
        left_out,
        over_seeds,
        paired,
        read_results,
    )

    results = read_results(runs)
    if names := differing_texts(runs):
        terminal.note(
            f"the runs were trained on different texts or splits ({', '.join(names)}): bits a byte do not compare."
        )
    if told := differing_budgets(runs):
        terminal.note(
            f"the vision transformers were not trained alike ({'; '.join(told)}): differences may come of that."
        )
    if missing := left_out(runs, results):
        terminal.note(f"left out, for there are no numbers of them: {', '.join(missing)}.")
    summary = over_seeds(results)
    columns = ["run", "arm", "measure", "seeds", "median", "mean", "std"]
    said = "".join(f"; {name}: {words}" for name, words in MEANINGS.items() if name in set(results["measure"]))
    terminal.table(f"Over seeds{said}", columns, _written(summary[columns]), titled=True)
    differences = paired(results)
    if len(differences):
        first = results.iloc[0]
        print()
        title = f"Difference from {first['arm']} of {first['run']}, seed by seed; less: seeds where it is below 0"
        terminal.table(title, list(differences.columns), _written(differences), titled=True)
    if output is not None:
        _write(output, results)


def _sinks(runs: list[Any], output: Path | None) -> None:
    """Tables 14 and 15, printed and written."""
    from sinklab.comparison import not_finite_sentences, sink_counts, table_14, table_15

    counts, rule = sink_counts(runs), runs[0].rule
    for sentence in not_finite_sentences(counts):
        terminal.note(sentence)
    tables = {"table14": table_14(counts, rule.name), "table15": table_15(counts)}
    titles = {
        "table14": f"Sinks per image in layers from 1 on, rule {rule.label}, by token (Table 14)",
        "table15": "Sinks per image in layers from 1 on, by rule (Table 15)",
    }
    for name, table in tables.items():
        print()
        shown = _with_spread(table)
        terminal.table(titles[name], list(shown.columns), _written(shown), titled=True)
        if output is not None:
            _write(output.with_name(f"{output.stem}-{name}.csv"), table)


def _with_spread(table: Any) -> Any:
    """The table with "mean ± standard deviation" in one cell, where there are several seeds."""
    shown = table.drop(columns=[name for name in table if name.endswith("_std")])
    for name in [name.removesuffix("_std") for name in table if name.endswith("_std")]:
        pairs = zip(table[name], table[f"{name}_std"], strict=True)
        shown[name] = [_cell(mean) + (f" ± {_cell(std)}" if std == std else "") for mean, std in pairs]
    return shown if table["not_finite"].any() else shown.drop(columns="not_finite")


def _write(path: Path, table: Any) -> None:
    from sinklab.atomic import atomically

    with atomically(path) as stream:
        stream.write(table.to_csv(index=False, lineterminator="\n").encode())


def _written(frame: Any) -> list[list[str]]:
    """Cells as text: four digits after the point, nothing where there is no number."""
    return [[_cell(value) for value in row] for row in frame.itertuples(index=False)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4f}"
    return str(value)
