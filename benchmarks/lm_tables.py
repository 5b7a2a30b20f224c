"""Language models at a laptop's budget, from finished runs: what stands beside the paper's numbers in docs/.

    python benchmarks/lm_tables.py [--seeds RUN] [--sweep RUN] [--ablations RUN] [--output results/lm_tables.json]

Each RUN is the folder of a finished `sinklab train lm`; the three may be given one by one, as they are finished, and
what is in the file already stays. Of each: bits a byte over seeds, differences by seed, tokens a second, budget, text,
conditions and, of models that `sinklab diagnose RUN` and `sinklab patch RUN` looked at, what their sinks are.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from pathlib import Path
from typing import Any

from toy_budget import write

from sinklab.errors import InputError
from sinklab.reports import lm_sinks
from sinklab.reports.lm_training import budget_sentences, members_of, tokens_per_second
from sinklab.reports.sections import records
from sinklab.run import Run, plain
from sinklab.training.lm_tables import differences_table, points_table

ENTRIES = {
    "seeds": "both models, several seeds",
    "sweep": "both models over the learning rates",
    "ablations": "a phase model and what is taken out of it",
    "larger": "both models at 1M, as far as a laptop takes them",
}


def summary(path: Path) -> dict[str, Any]:
    """One run's entry. Raises InputError for a run that is no finished training of language models."""
    run = Run.open(path)
    config, settings = run.config, run.config.get("settings", {})
    if settings.get("kind") != "lm" or config.get("status") != "complete":
        raise InputError(
            f"{path} is not a finished run of `sinklab train lm` (status {config.get('status')}): go on with --resume."
        )
    training, timings, swept = run.table("training"), config.get("timings", {}), settings["sweep"] is not None
    results = records(points_table(training))
    for row in results:
        row["tokens_per_second"] = tokens_per_second(training, timings, row["config"], row["lr"], swept)
    sinks = lm_sinks.read_sinks(run.path, members_of(config))
    text = settings["text"]
    return {
        "command": typed(config.get("command", [])),
        "budget": budget_sentences(config),
        "training": {name: {key: own[key] for key in ("steps", "batch", "context", "stride", "lr")}
                     for name, own in settings["configs"].items()},
        "seeds": settings["seeds"],
        "text": {"name": text["name"], "sha256": text["sha256"], "symbols": len(text.get("symbols", [])),
                 "bytes": {name: last - first for name, (first, last) in text["splits"].items()}},
        "results": results,
        "differences": records(differences_table(training)),
        "sinks": records(sinks),
        "judged": lm_sinks.judged_by(sinks) if len(sinks) else "",
        "phases": dict(lm_sinks.phase_sentences(run.path, sinks)) if len(sinks) else {},
        "sentence": lm_sinks.families_sentence(sinks) if len(sinks) else "",
        "notes": config.get("notes", []),
        "seconds": {name: one.get("train_seconds") for name, one in timings.items()},
        "conditions": {
            "device": settings["device"], "threads": config.get("threads"), "processes": config.get("processes"),
            "compiled": settings["compile"], "versions": config.get("versions"), "begun": config.get("created"),
            "shared": "wall seconds on a machine that others used too: a speed is a lower bound",
        },
    }  # fmt: skip


def typed(command: list[str]) -> str:
    """The command without paths of one machine: the run's folder is left out, of a text its file's name stays."""
    words, shown = list(command), []
    while words:
        word = words.pop(0)
        if word in ("-o", "--output"):
            words = words[1:]
        elif word == "--text" and words:
            shown += [word, words.pop(0).rpartition("/")[2]]
        elif word not in ("--resume", "--overwrite") and not word.startswith("--output="):
            shown.append(word)
    return shlex.join(shown)


def finite(value: Any) -> Any:
    """The same without numbers that JSON lacks: null in their place."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    """Read what is named and write it into the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, words in ENTRIES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="RUN", help=words)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "lm_tables.json")
    options = parser.parse_args()
    for name in ENTRIES:
        path = getattr(options, name)
        if path is None:
            continue
        try:
            found = summary(path)
        except InputError as error:
            print(f"{name}: left as it is. {error}")
            continue
        write(options.output, name, finite(json.loads(json.dumps(plain(found)))))
        print(name, [(row["config"], row["lr"], row["validation_bpc_median"]) for row in found["results"]])


if __name__ == "__main__":
    main()
