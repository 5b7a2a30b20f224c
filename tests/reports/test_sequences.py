"""Reports of runs of sequences: they speak of sequences and tokens, and their numbers are those of the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic_effects import Edited, write_effects
from synthetic_run import SavedRun, synthetic_run

import sinklab
from sinklab.errors import InputError
from sinklab.models.tokens import SEQUENCE_KINDS
from sinklab.reports.causal_plan import edit_words
from sinklab.reports.nouns import IMAGES, Words, sequences
from sinklab.reports.page import write_report
from sinklab.reports.spoken import verdict_lines
from sinklab.run import noun_in
from sinklab.sealed import read_sealed

SEEN = re.compile(r"\b(image|photograph|picture|patch|crop|pixel|px\b)\w*", re.IGNORECASE)
KINDS = ("nop", "broadcast")
EDITED = tuple(Edited(layer=1, head=head, named="broadcast", behaves="broadcast", reason="as planted")
               for head in range(3))  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Both controlled models that come with the package, on 256 sequences each."""
    folder = tmp_path_factory.mktemp("sequences")
    yield {
        kind: sinklab.diagnose(f"toy:{kind}", output=folder / kind, limit=256, device="cpu", command=None)
        for kind in KINDS
    }


def edited(run: Any, path: Path, **patch: Any) -> SavedRun:
    """The run with edits planted into it, in a folder of its own."""
    copied = SavedRun(path=path, config=deepcopy(run.config), heads=run.heads, sinks=run.heads.head(0))
    sentence = {"sentence": "64 of 256 sequences, drawn from seed 0, were held out for the means."}
    return write_effects(copied, EDITED, **({"notes": [], "heldout": sentence} | patch))


def read_aloud(page: str) -> str:
    """The page's text and what its pictures are said to show; commands and names of files are not prose."""
    page = re.sub(r"<style>.*?</style>|<code>.*?</code>", " ", page, flags=re.DOTALL)
    said = re.findall(r'aria-label="([^"]*)"', page)
    return " ".join(unescape(" ".join([re.sub(r"<[^>]+>", " ", page), *said])).split())


def page_of(run: Any) -> str:
    return (run.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_about_sequences_speaks_of_no_picture(kind: str, runs: dict[str, Any]) -> None:
    words = read_aloud(page_of(runs[kind]))
    assert SEEN.findall(words) == []
    assert "256 sequences of 32 tokens" in words and "32 tokens of 64 numbers" in words and "None" not in words


def test_a_page_about_edited_sequences_speaks_of_no_picture(tmp_path: Path, runs: dict[str, Any]) -> None:
    run = edited(runs["broadcast"], tmp_path)
    words = read_aloud(write_report(run).read_text(encoding="utf-8"))
    assert SEEN.findall(words) == []
    assert "relative change of the tokens other than the sink" in words and "in another sequence, the donor" in words
    for name in ("fig6-causal-effects", "fig6-joint-effects"):
        assert "change of other tokens" in read_aloud((tmp_path / f"figures/{name}.svg").read_text())


def test_a_page_about_a_plan_for_sequences_speaks_of_no_picture(tmp_path: Path, runs: dict[str, Any]) -> None:
    plan = [{"layer": 1, "head": 0, "edit": "zero", "at": at} for at in ("sink", "token", "patch", 3)]
    run = edited(runs["broadcast"], tmp_path, settings={"options": {"plan": plan}})
    words = read_aloud(write_report(run).read_text(encoding="utf-8"))
    assert SEEN.findall(words) == [] and "the value of every ordinary token is set to zero" in words


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_terminal_says_of_sequences_names_no_picture(kind: str, runs: dict[str, Any]) -> None:
    lines = verdict_lines(runs[kind])
    assert lines and SEEN.findall(" ".join(lines)) == []
    assert noun_in(runs[kind].path) == "sequence"


@pytest.mark.parametrize(("kind", "shown", "absent"), [
    ("nop", "sink is first token", "sink is ordinary token"), ("broadcast", "sink is ordinary token", "first token")
])  # fmt: skip
def test_a_legend_names_the_kinds_that_are_there_and_no_other(
    kind: str, shown: str, absent: str, runs: dict[str, Any]
) -> None:
    for name in ("fig7-value-and-rank", "lemma3-routes"):
        drawn = read_aloud((runs[kind].path / f"figures/{name}.svg").read_text(encoding="utf-8"))
        assert shown in drawn and absent not in drawn
    kinds = set(pd.read_csv(runs[kind].path / "figures/fig4-token-kinds.csv")["kind"])
    assert kinds == set(SEQUENCE_KINDS)


def test_a_column_of_the_first_token_stands_only_where_the_model_has_one(runs: dict[str, Any]) -> None:
    assert "all_on_bos" in pd.read_csv(runs["nop"].path / "tables/table15.csv")
    assert "On the first token" in read_aloud(page_of(runs["nop"]))
    bare = pd.read_csv(runs["broadcast"].path / "tables/table15.csv")
    assert not [name for name in bare if str(name).startswith("all_on")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_the_page_are_those_of_the_tables(kind: str, runs: dict[str, Any]) -> None:
    run, words = runs[kind], read_aloud(page_of(runs[kind]))
    heads = pd.read_csv(run.path / "tables/heads.csv")
    sunk, events = int((heads["events"] > 0).sum()), int(heads["events"].sum())
    assert sunk == 1 and f"{sunk} of {len(heads)} head" in words
    assert f"n = 256 sequences, {events} events" in words
    table = pd.read_csv(run.path / "tables/table14.csv").set_index(["blocks", "definition", "kind"])
    own = table.loc[("1+" if kind == "broadcast" else "0", "causal", "all")]
    means = " ".join(f"{own[name]:.2f}" for name in ("nop", "broadcast", "intermediate", "all"))
    assert f"causal any {means} {own['events']}" in words


@pytest.mark.parametrize("kind", KINDS)
def test_a_strip_shows_the_attention_that_was_saved_and_marks_the_sink(kind: str, runs: dict[str, Any]) -> None:
    run, layer = runs[kind], int(kind == "broadcast")
    columns = read_sealed(run.path / "overlays/columns.parquet").to_pandas()
    assert json.loads((run.path / "overlays/pictures.json").read_text())["pictures"] == {}
    name = f"overlay-{kind}-layer{layer}-head0"
    drawn = pd.read_csv(run.path / f"figures/{name}.csv")
    both = drawn.merge(columns, on=["image", "layer", "head", "query"], suffixes=("", "_saved"))
    assert len(both) == len(drawn) == 4 * 32 and (both["attention"] - both["attention_saved"]).abs().max() < 1e-6
    heads = run.heads.set_index(["image", "layer", "head"])
    for (image, sink), rows in drawn.groupby(["image", "sink_index"]):
        assert heads.loc[(image, layer, 0), "sink_index"] == sink
        assert rows["attention"].mean() == pytest.approx(heads.loc[(image, layer, 0), "inflow"], abs=1e-5)
        assert f"{image}: sink is token {sink}" in read_aloud((run.path / f"figures/{name}.svg").read_text())


def test_what_the_task_says_stands_head_by_head_with_the_baseline_first(tmp_path: Path, runs: dict[str, Any]) -> None:
    run = edited(runs["broadcast"], tmp_path)
    place = {"layer": 1, "head": 0, "class": "broadcast", "batches": 64, "sequences": 16384}
    values = [
        ("zero", "task_mse", 0.5, 0.01),
        ("baseline", "task_mse", 0.0123, 0.0004),
        ("zero", "delta_rms_recipients", 0.7, 0),
    ]
    rows = [place | {"edit": edit, "metric": name, "mean": mean, "sem": sem} for edit, name, mean, sem in values]
    run.write_table("tables/task_effects.csv", pd.DataFrame(rows))
    words = read_aloud(write_report(run).read_text(encoding="utf-8"))
    assert "What the task itself says" in words and "n = 64 batches, 16,384 sequences" in words
    assert "baseline 0.0123 ± 4.0e\u221204 – zero 0.500 ± 0.010 0.700 ± 0" in words
    assert "Task MSE: the mean squared error against the task’s target; ΔRMS: the root mean square" in words
    assert "Donor-target" not in words and SEEN.findall(words) == []


def test_a_damaged_table_of_the_task_is_named(tmp_path: Path, runs: dict[str, Any]) -> None:
    run = edited(runs["broadcast"], tmp_path)
    run.write_text("tables/task_effects.csv", "layer,head\n1,0\n")
    with pytest.raises(InputError, match=r"task_effects\.csv is damaged"):
        write_report(run)


def test_a_measure_of_the_task_among_the_effects_is_a_column(tmp_path: Path, runs: dict[str, Any]) -> None:
    run = edited(runs["broadcast"], tmp_path)
    effects = pd.read_csv(tmp_path / "tables/effects.csv")
    added = effects[effects["measure"] == "patch_change"].assign(measure="task_mse")
    run.write_table("tables/effects.csv", pd.concat([effects, added]))
    assert "Task MSE" in read_aloud(write_report(run).read_text(encoding="utf-8"))


def test_a_run_that_does_not_say_what_it_measured_measured_images(tmp_path: Path) -> None:
    assert Words.of({}) == Words.of({"images": {"count": 3}, "model": {"prefix": ["cls"]}}) == IMAGES
    run = synthetic_run(tmp_path, plants=(), overlays=False)
    one = write_report(run).read_bytes()
    run.config["images"]["noun"] = "image"
    assert write_report(run).read_bytes() == one and noun_in(tmp_path) == "image"


def test_every_phrase_for_sequences_is_free_of_the_words_for_images() -> None:
    for prefix, ordinary in (((), "token"), (("bos",), "token"), (("bos", "special"), "text")):
        words = sequences("sequence", prefix, ordinary)
        said = [value for name, value in vars(words).items() if isinstance(value, str) and name != "template"]
        assert SEEN.findall(" ".join(said)) == []
        assert words.kinds == tuple(kind for kind in SEQUENCE_KINDS if kind in (*prefix, ordinary))


def test_a_plan_names_the_tokens_of_its_model() -> None:
    words = sequences("sequence", ("bos",), "text")
    edit = {"edit": "zero", "layer": 0, "head": 2, "at": "bos"}
    assert edit_words(edit, words) == "L0H2: the value of the first token is set to zero"
