"""The page of a language model training: its numbers are the tables', its differences those of one seed."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pandas as pd
import pytest
from browser import Page, chromium, open_browser
from command_line import in_process
from damaged import damaged

import sinklab
from sinklab.data.text import open_text
from sinklab.errors import InputError
from sinklab.reports.lm_figures import ablation_rows, median_curve
from sinklab.reports.lm_sinks import families_sentence
from sinklab.reports.lm_training import legible, tokens_per_second
from sinklab.reports.training import write_training_report
from sinklab.run import Run, plain
from sinklab.training.lm import train_lm
from sinklab.training.lm_config import make_lm_config
from sinklab.training.lm_tables import chosen_points, differences_table, pairs, points_table

TINY = ("steps=6", "batch=4", "context=16", "stride=8", "record_every=1", "validate_every=2", "checkpoint_every=6",
        "validation_windows=4", "sample=12", "model.layers=1", "model.hidden=8")  # fmt: skip
WIDTH = {"phase": "model.phases=8", "transformer": "model.dim=8"}
CONTENT = b"the phases of many clocks meet, and one by one they agree. " * 20
BINARY = chromium()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Two models of three seeds, a sweep, and a model with two ablations; all reported."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "clocks.txt").write_bytes(CONTENT)
    text = open_text(folder / "clocks.txt")
    plans: dict[str, tuple[list[str], list[int], str | None]] = {
        "seeds": (["phase-tiny", "transformer-tiny"], [0, 1, 2], None),
        "sweep": (["phase-tiny", "transformer-tiny"], [0, 1], "lr"),
        "ablations": (["phase-tiny", "phase-tiny+no-gates", "phase-tiny+no-ffn"], [0, 1], None),
    }
    made = {}
    for name, (models, seeds, sweep) in plans.items():
        configs = [make_lm_config(model, [*TINY, WIDTH[model.partition("-")[0]]]) for model in models]
        made[name] = train_lm(folder / name, configs, seeds, text=text, sweep=sweep)
        write_training_report(made[name])
    return made


@pytest.fixture(scope="module")
def diagnosed(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of a phase model and a transformer, each diagnosed by the command."""
    folder = tmp_path_factory.mktemp("diagnosed")
    (folder / "clocks.txt").write_bytes(CONTENT)
    configs = [make_lm_config(f"{family}-tiny", [*TINY, width]) for family, width in WIDTH.items()]
    run = train_lm(folder / "run", configs, text=open_text(folder / "clocks.txt"))
    write_training_report(run)
    words = ("--text", folder / "clocks.txt", "--rule", "mass", "--mass", "0.05", "--device", "cpu")
    ended = in_process("diagnose", run.path, *words)
    assert ended.returncode == 0, ended.stderr
    return run.path


def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def cells(text: str, label: str) -> list[list[str]]:
    """The cells of the table in the region of that name, row by row."""
    part = text.split(f'aria-label="{label}"')[1].split("</table>")[0]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", part.split("<tbody>")[1], flags=re.DOTALL)
    return [
        [re.sub(r"<.*?>", " ", cell).strip() for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows
    ]


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("seeds", {"lm-curves"}),
        ("sweep", {"lm-curves", "lm-learning-rate"}),
        ("ablations", {"lm-curves", "lm-ablations"}),
    ],
)
def test_the_page_has_its_figures_with_their_numbers_beside_them(
    runs: dict[str, Run], name: str, figures: set[str]
) -> None:
    text, folder = page(runs[name].path), runs[name].path
    assert set(re.findall(r'<figure id="([^"]+)">', text)) == figures
    there = {path.name for path in (folder / "figures").iterdir()}
    assert there == {f"{figure}.{ending}" for figure in figures for ending in ("csv", "png", "svg")}
    for target in re.findall(r'href="((?:tables|figures|diagnosed)/[^"]+)"', text):
        assert (folder / target).is_file(), target
    assert "nan" not in re.sub(r"<svg.*?</svg>|<pre.*?</pre>", "", text, flags=re.DOTALL).split()


def test_the_results_on_the_page_are_mean_spread_and_median_of_the_evaluations(runs: dict[str, Run]) -> None:
    run = runs["seeds"]
    for name, shown in zip(("phase-tiny", "transformer-tiny"), cells(page(run.path), "Results"), strict=True):
        found = [
            json.loads((run.path / f"training/seed-{seed}/{name}/evaluation.json").read_text()) for seed in range(3)
        ]
        values = [each["validation_bpc"] for each in found]
        mean = sum(values) / 3
        spread = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
        assert shown[:3] == [name, f"{median(values):.3f}", f"{mean:.3f} ± {spread:.3f}"]
        assert shown[3] == f"{median(each['test_bpc'] for each in found):.3f}"
        assert shown[8] == f"{found[0]['parameters']:,}"


def test_differences_on_the_page_are_those_of_one_seed(runs: dict[str, Run]) -> None:
    run = runs["seeds"]
    training = run.table("training").pivot(index="seed", columns="config", values="test_bpc")
    gap = training["phase-tiny"] - training["transformer-tiny"]
    (shown,) = [row for row in cells(page(run.path), "Differences by seed") if row[1] == "test"]
    signed = [f"{value:+.3f}".replace("-", "−") for value in (gap.median(), gap.mean(), *gap)]
    assert shown == ["phase-tiny − transformer-tiny", "test", *signed]


def test_seeds_that_only_one_model_has_make_no_difference() -> None:
    rows = [
        {
            "seed": seed,
            "config": name,
            "lr": 0.01,
            "steps": 1,
            "parameters": 9,
            "validation_bpc": bits,
            "test_bpc": bits,
        }
        for name, bits_by_seed in (("phase-tiny", {0: 2.0, 1: 3.0, 2: None}), ("transformer-tiny", {1: 1.0, 2: 5.0}))
        for seed, bits in bits_by_seed.items()
    ]
    found = differences_table(pd.DataFrame(rows))
    assert found[found["measure"] == "test_bpc"][["seed", "difference"]].values.tolist() == [[1, 2.0]]
    assert points_table(pd.DataFrame(rows))[["seeds", "diverged"]].values.tolist() == [[2, 1], [2, 0]]


def test_phase_models_are_paired_with_transformers_and_ablations_with_the_whole() -> None:
    names = ["phase-tiny", "phase-tiny+no-gates", "transformer-tiny", "phase-1m", "phase-5m+no-ffn"]
    assert pairs(names) == [("phase-tiny", "transformer-tiny"), ("phase-tiny+no-gates", "phase-tiny")]


def test_the_chosen_rate_has_the_lowest_median_validation(runs: dict[str, Run]) -> None:
    run = runs["sweep"]
    medians = run.table("training").groupby(["config", "lr"])["validation_bpc"].median()
    for name in ("phase-tiny", "transformer-tiny"):
        best = medians[name].idxmin()
        assert run.config["chosen"][name] == best
        (marked,) = [row for row in cells(page(run.path), "Results") if row[0] == name and "chosen" in row[5]]
        assert marked[5].split()[0] == f"{best:g}" and marked[1] == f"{medians[name].min():.3f}"


def test_a_rate_that_diverged_is_never_chosen_while_another_did_not() -> None:
    rows = [
        {"config": "a", "lr": lr, "validation_bpc": bits} for lr, bits in ((1.0, None), (0.1, 7.0), (2.0, float("nan")))
    ]
    assert chosen_points(rows) == {"a": 0.1}


def test_the_curve_of_a_model_is_the_median_of_its_seeds_metrics(runs: dict[str, Run]) -> None:
    run = runs["seeds"]
    curve = median_curve(run.table("curves"), "phase-tiny", 0.01, "validation_bpc").set_index("step")["validation_bpc"]
    told: dict[int, list[float]] = {}
    for seed in range(3):
        lines = (run.path / f"training/seed-{seed}/phase-tiny/metrics.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):
            if "validation" in line:
                told.setdefault(line["step"], []).append(line["validation"])
    assert {step: median(values) for step, values in told.items()} == pytest.approx(curve.to_dict())
    assert set(told) == {2, 4, 6}


def test_an_ablation_is_held_against_the_whole_model_of_its_seed(runs: dict[str, Run]) -> None:
    run = runs["ablations"]
    bits = run.table("training").pivot(index="seed", columns="config", values="validation_bpc")
    shown = ablation_rows(run.table("differences"))
    for row in shown.to_dict("records"):
        assert row["difference"] == pytest.approx(
            bits.loc[row["seed"], row["config"]] - bits.loc[row["seed"], "phase-tiny"]
        )
    assert len(shown) == 4
    plotted = pd.read_csv(run.path / "figures/lm-ablations.csv")
    medians = plotted.groupby("config", sort=False)["difference"].median()
    assert list(medians) == sorted(medians, reverse=True)


def test_the_page_names_the_text_the_budget_and_every_sample(runs: dict[str, Run]) -> None:
    text = page(runs["seeds"].path)
    length = len(CONTENT) * 9 // 10
    assert "6 steps of 4 sequences of 16 bytes" in text and f"{length:,} bytes of the training split" in text
    assert "clocks.txt" in text
    for member in runs["seeds"].config["members"]:
        content = (runs["seeds"].path / f"training/{member}/sample.txt").read_bytes()
        assert f">{legible(content)}</pre>" in text and member in text


def test_a_sample_cannot_steer_the_page() -> None:
    assert legible(b"a\x1b[2J\xff\nb\t") == "a\\x1b[2J\ufffd\nb\t"


def test_speed_is_the_median_over_seeds_of_what_was_trained_in_one_go() -> None:
    training = pd.DataFrame({"config": ["a"] * 3, "seed": [0, 1, 2]})
    timings = {f"seed-{seed}/a": {"tokens_per_second": pace} for seed, pace in enumerate((10.0, None, 30.0))}
    assert tokens_per_second(training, timings, "a", 0.1, False) == 20.0
    assert tokens_per_second(training, {}, "a", 0.1, False) is None


def test_a_divergence_is_noted_and_has_no_sample(runs: dict[str, Run], tmp_path: Path) -> None:
    shutil.copytree(runs["sweep"].path, tmp_path / "run")
    run = Run.open(tmp_path / "run")
    training = run.table("training")
    lost = (training["config"] == "phase-tiny") & (training["lr"] == 0.001) & (training["seed"] == 0)
    training.loc[lost, ["parameters", "train_bpc", "validation_bpc", "test_bpc"]] = None
    run.write_table("tables/training.csv", training)
    run.write_table("tables/points.csv", points_table(training))
    run.update(notes=["seed-0/phase-tiny/lr=0.001: The loss is nan after 2 steps"])
    (run.path / "training/seed-0/phase-tiny/lr=0.001/sample.txt").unlink()
    write_training_report(run)
    text = page(run.path)
    assert "The loss is nan after 2 steps" in text and "seed-0/phase-tiny/lr=0.001</b>" not in text
    (row,) = [row for row in cells(text, "Results") if row[0] == "phase-tiny" and row[5] == "0.001"]
    assert row[6] == "1 of 2"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", {"status": "running"}, r"is not complete \(status: running\): go on with --resume"),
        ("tables/points.csv", None, "tables/points.csv is damaged, and the report needs it .*no table 'points'"),
        ("tables/curves.csv", "step\n1\n", "tables is damaged, and the report needs it"),
        ("training/seed-1/phase-tiny/sample.txt", None, "training is damaged, and the report needs it"),
    ],
)
def test_a_run_that_cannot_be_reported_on_is_refused_with_a_sentence(
    runs: dict[str, Run], tmp_path: Path, name: str, content: object, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        write_training_report(Run.open(damaged(runs["seeds"].path, tmp_path / "run", name, content)))


def test_the_page_opens_from_the_tables_without_torch_and_the_same_every_time(runs: dict[str, Run]) -> None:
    run = runs["ablations"]
    before = {path: path.read_bytes() for path in [run.path / "report.html", *(run.path / "figures").iterdir()]}
    program = f"import sys; sys.argv = ['sinklab', 'report', {str(run.path)!r}]\n"
    program += "from sinklab.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
    program += "assert 'torch' not in sys.modules and 'sinklab.reports.lm_training' in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(run.path / "report.html")
    assert {path: path.read_bytes() for path in before} == before


def test_diagnosing_a_training_adds_what_its_sinks_are(diagnosed: Path) -> None:
    text, rows = page(diagnosed), cells(page(diagnosed), "Sinks")
    assert [row[0] for row in rows] == ["seed-0/phase-tiny", "seed-0/transformer-tiny"]
    assert (
        "In 1 phase model" in text
        and "; in 1 transformer model" in text
        and "<strong>seed-0/phase-tiny.</strong>" in text
    )
    for row in rows:
        summary = sinklab.open_run(diagnosed / "diagnosed" / row[0]).summary
        classes = summary["by_definition"]["causal"]
        assert row[1] == f"{summary['heads_that_sink']['in_any_image']} of {summary['pairs']}"
        assert sum(int(cell) for cell in row[2:5]) == summary["heads_that_sink"]["in_any_image"] > 0
        assert (
            sum(classes[name]["total"] for name in ("nop", "broadcast", "intermediate")) == summary["events"]["total"]
        )
        assert row[8] == "not patched" and f'href="diagnosed/{row[0]}/report.html"' in text
    saved = pd.read_csv(diagnosed / "tables/sinks.csv")
    events = [sinklab.open_run(diagnosed / "diagnosed" / name).sinks for name in saved["member"]]
    assert list(saved["median_ratio"]) == pytest.approx([each["value_ratio_out"].median() for each in events])
    assert list(saved["median_stable_rank"]) == pytest.approx([each["stable_rank"].median() for each in events])


def test_patching_a_training_adds_what_the_interventions_say_and_passes_by_models_without_a_sink(
    diagnosed: Path, tmp_path: Path
) -> None:
    shutil.copytree(diagnosed, tmp_path / "run")
    (text,) = diagnosed.parent.glob("clocks.txt")
    bare = sinklab.load(str(tmp_path / "run/training/seed-0/phase-tiny"))
    rule = sinklab.SinkRule.mass(0.99)
    quiet = tmp_path / "run/diagnosed/seed-0/phase-tiny"
    assert not len(sinklab.diagnose(bare, text=text, output=quiet, rule=rule, overwrite=True).sinks)
    words = ("--text", text, "--min-events", "1", "--bootstrap", "20", "--device", "cpu")
    ended = in_process("patch", tmp_path / "run", *words)
    assert ended.returncode == 0, ended.stderr
    assert "seed-0/phase-tiny: The run has no event of class nop or broadcast" in ended.stderr
    assert [row[8] for row in cells(page(tmp_path / "run"), "Sinks")][0] == "no head to edit"
    saved = pd.read_csv(tmp_path / "run/tables/sinks.csv")
    for row, member in list(zip(saved.to_dict("records"), saved["member"], strict=True))[1:]:
        verdicts = pd.read_csv(tmp_path / f"run/diagnosed/{member}/tables/causal_verdicts.csv")
        heads = verdicts[verdicts["level"] == "head"]
        counted = sum(
            row[f"{name}_{said}"] for name in ("nop", "broadcast") for said in ("agree", "disagree", "undecided")
        )
        assert counted == len(heads.drop_duplicates(["layer", "head", "class"]))
    assert "not patched" not in page(tmp_path / "run")


def test_phase_and_transformer_are_set_against_each_other_in_one_sentence() -> None:
    row = {"heads": 4, "sinking": 2, "nop": 1, "broadcast": 1, "intermediate": 0, "bos": 2, "special": 0, "text": 0}
    medians = {"median_ratio": 0.25, "median_stable_rank": 1.5}
    rows = [{**row, **medians, "config": "phase-tiny"}] * 2 + [
        {**row, **medians, "config": "transformer-tiny", "sinking": 0, "nop": 0, "broadcast": 0, "bos": 0}
    ]
    said = families_sentence(pd.DataFrame(rows))
    assert said.startswith("In 2 phase models 4 of 8 heads") and "2 NOP and 2 broadcast" in said
    assert said.endswith("; in 1 transformer model none of 4 heads sinks.") and said.count(".\u202f") == 0


def test_the_docs_tables_are_the_runs_numbers(
    runs: dict[str, Run], diagnosed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    tables, words = (importlib.import_module(name) for name in ("lm_tables", "lm_words"))
    found = {name: tables.summary(run.path) for name, run in runs.items()} | {"seeds": tables.summary(diagnosed)}
    told = words.lm_text(json.loads(json.dumps(tables.finite(plain(found)))))
    bits = runs["ablations"].table("training").groupby("config")["validation_bpc"].median()
    gaps = ablation_rows(runs["ablations"].table("differences")).groupby("config")["difference"].median()
    for name, gap in gaps.items():
        (row,) = [line for line in told.splitlines() if line.startswith(f"| {name} |")]
        assert f"| {bits[name]:.3f} |" in row and row.endswith(f"| {gap:+.3f} |".replace("-", "−"))
    sweep = runs["sweep"].table("points")
    for row in sweep[sweep["chosen"]].to_dict("records"):
        assert f"**{row['validation_bpc_median']:.3f}**" in told
    assert "1.637 ± 0.010" in told and "`seed-0/phase-tiny`: " in told and str(diagnosed.parent) not in told


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert BINARY is not None
    with open_browser(BINARY) as tab:
        yield tab


@pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", ["sweep", "ablations"])
def test_the_page_opens_on_a_desktop_and_a_phone_without_a_complaint_or_sideways_scrolling(
    browser: Page, runs: dict[str, Run], name: str
) -> None:
    path = runs[name].path / "report.html"
    for width in (320, 390, 1280):
        browser.open(path, width=width)
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.startswith("data:")] == [path.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
