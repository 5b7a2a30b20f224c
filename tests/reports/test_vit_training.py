"""The page of a vision transformer training: its numbers are those of the members' own files, finished or not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd
import pytest
from browser import Page, chromium, open_browser
from command_line import in_process
from damaged import damaged

from sinklab.comparison import diagnosed as compared
from sinklab.comparison import sink_counts, table_14, table_15
from sinklab.errors import InputError
from sinklab.models.vit_file import read_vit
from sinklab.reports.training import write_training_report
from sinklab.reports.vit_figures import mean_line, thinned, variant_styles
from sinklab.run import Run
from sinklab.training.loop import Progress
from sinklab.training.vit import train_vit
from sinklab.training.vit_config import config_names, make_config
from sinklab.watching import sink_scores

TINY = (
    *("image=16", "dim=12", "depth=3", "heads=2", "views=2", "projector_hidden=8", "projector_dim=4", "slices=8"),
    *("batch=4", "epochs=3", "warmup_epochs=0.5", "procedural=8", "validation_images=4", "score_images=2"),
    *("score_every=2", "record_every=1", "checkpoint_every=1"),
)
ARMS = ("baseline-tiny", "gated-global-penalty-registers-tiny")
SEEDS = (0, 1)
STEPS = 6
FIGURES = {"vit-validation", "vit-losses", "vit-common-mode", "vit-common-mode-layers", "vit-inflow-layers",
           "vit-sink-events"}  # fmt: skip
TABLES = {"members", "variants", "curves", "layers", "validation"}
BINARY = chromium()


class Halted(Exception):
    """What ends a training here as a power cut would."""


def trained(path: Path, *, resume: bool = False, halt: tuple[str, int] | None = None) -> Run:
    """Two arms and two seeds; `halt` is the member and step at which it ends."""

    def progress(name: str, state: Progress) -> None:
        if (name, state.step) == halt:
            raise Halted

    configs = [make_config(arm, TINY) for arm in ARMS]
    run = train_vit(path, configs, seeds=SEEDS, resume=resume, score=sink_scores, progress=progress)
    assert run is not None
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = trained(tmp_path_factory.mktemp("vit") / "run")
    write_training_report(made)
    return made


@pytest.fixture(scope="module")
def halted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended within the third of its four trainings."""
    path = tmp_path_factory.mktemp("halted") / "run"
    with pytest.raises(Halted):
        trained(path, halt=(f"seed-1/{ARMS[0]}", 4))
    return path


@pytest.fixture(scope="module")
def diagnosed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model diagnosed by the command, under a rule that the inflow of such networks meets."""
    path = tmp_path_factory.mktemp("diagnosed") / "run"
    shutil.copytree(run.path, path)
    ended = in_process("diagnose", path, "--device", "cpu", "--rule", "mass", "--mass", "0.25")
    assert ended.returncode == 0, ended.stderr
    return path


def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def words(folder: Path) -> str:
    """The page without its figures and tags."""
    text = re.sub(r"<(svg|style).*?</\1>", "", page(folder), flags=re.DOTALL)
    return " ".join(re.sub(r"<.*?>", " ", text).split())


def cells(text: str, label: str) -> list[list[str]]:
    """The cells of the table in the region of that name, row by row."""
    part = text.split(f'aria-label="{label}"')[1].split("</table>")[0]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", part.split("<tbody>")[1], flags=re.DOTALL)
    return [
        [" ".join(re.sub(r"<.*?>", " ", cell).split()) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in rows
    ]


def lines(folder: Path, member: str, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "training" / member / name).read_text().splitlines()]


def evaluation(folder: Path, member: str) -> dict[str, Any]:
    rows = json.loads((folder / "training" / member / "evaluation.json").read_text())
    whole = {row["metric"]: row["value"] for row in rows if row["layer"] is None}
    return whole | {"common_mode": {row["layer"]: row["value"] for row in rows if row["metric"] == "common_mode"}}


def test_the_page_has_its_figures_and_tables_and_asks_for_nothing_else(run: Run) -> None:
    text = page(run.path)
    assert set(re.findall(r'<figure id="([^"]+)">', text)) == FIGURES
    there = {path.name for path in (run.path / "figures").iterdir()}
    assert there == {f"{figure}.{ending}" for figure in FIGURES for ending in ("csv", "png", "svg")}
    assert {path.stem for path in (run.path / "tables").iterdir()} == TABLES | {"training"}
    targets = set(re.findall(r'(?:href|src)="([^"#]+)"', text))
    assert targets and all((run.path / target).is_file() for target in targets)
    assert not re.findall(r"url\((?!#)", text) and "@import" not in text and "<script" not in text
    assert "nan" not in words(run.path).split()


def test_the_results_are_mean_and_spread_of_the_evaluations_and_each_seeds_own(run: Run) -> None:
    rows = cells(page(run.path), "Results")
    assert [row[0] for row in rows] == [name for arm in ARMS for name in (arm, "seed 0", "seed 1")]
    saved = run.table("variants").set_index("config")
    for arm in ARMS:
        found = [evaluation(run.path, f"seed-{seed}/{arm}") for seed in SEEDS]
        shares = [mean(value for layer, value in one["common_mode"].items() if layer) for one in found]
        accuracy, loss = ([one[name] for one in found] for name in ("probe_accuracy", "probe_loss"))
        inflows = []
        for seed in SEEDS:
            last = lines(run.path, f"seed-{seed}/{arm}", "metrics.jsonl")[-1]
            inflows.append(max(last["max_inflow_1"], last["max_inflow_2"]))
        shown = rows[[row[0] for row in rows].index(arm) :][:3]
        assert shown[0][1] == f"{100 * mean(accuracy):.1f} ± {100 * stdev(accuracy):.1f}"
        for column, values in ((2, loss), (3, shares), (4, inflows)):
            assert shown[0][column] == f"{mean(values):.3f} ± {stdev(values):.3f}"
            assert [row[column].split()[0] for row in shown[1:]] == [f"{value:.3f}" for value in values]
        model, _ = read_vit(run.path / f"training/seed-0/{arm}/model.safetensors")
        assert shown[0][5] == f"{sum(each.numel() for each in model.parameters()):,}"
        assert shown[0][6:] == ["2", str(STEPS)]
        assert saved.loc[arm, "max_inflow_mean"] == pytest.approx(mean(inflows))
        assert saved.loc[arm, "common_mode_std"] == pytest.approx(stdev(shares))


def test_the_curves_are_the_lines_of_the_metrics(run: Run) -> None:
    curves, losses = run.table("curves"), pd.read_csv(run.path / "figures/vit-losses.csv")
    layers, inflow = run.table("layers"), pd.read_csv(run.path / "figures/vit-inflow-layers.csv")
    events = pd.read_csv(run.path / "figures/vit-sink-events.csv")
    for member in run.config["members"]:
        told = lines(run.path, member, "metrics.jsonl")
        own = curves[curves["member"] == member].reset_index(drop=True)
        assert list(own["step"]) == [line["step"] for line in told] == list(range(1, STEPS + 1))
        for name in ("total", "sigreg", "invariance", "probe"):
            assert list(own[name]) == [line[name] for line in told]
            assert list(losses.loc[losses["member"] == member, name]) == [line[name] for line in told]
        assert own["penalty"].isna().all() == ("penalty" not in told[0])
        scored = [line for line in told if "relaxed_nop" in line]
        assert [line["step"] for line in scored] == [2, 4, 6]
        for name in ("relaxed_nop", "strict_broadcast", "relaxed_intermediate"):
            assert list(events.loc[events["member"] == member, name]) == [line[name] for line in scored]
        for table in (layers, inflow):
            mine = table[table["member"] == member].set_index(["step", "layer"])["max_inflow"]
            expected = {(line["step"], layer): line[f"max_inflow_{layer}"] for line in scored for layer in range(3)}
            assert mine.to_dict() == expected
        shares = [mean(line[f"common_mode_{layer}"] for layer in (1, 2)) for line in scored]
        assert list(own["common_mode"].dropna()) == pytest.approx(shares)


def test_validation_and_the_last_shares_are_those_that_were_saved(run: Run) -> None:
    validation = pd.read_csv(run.path / "figures/vit-validation.csv")
    ends = pd.read_csv(run.path / "figures/vit-common-mode.csv")
    for member in run.config["members"]:
        told = lines(run.path, member, "validation.jsonl")
        own = validation[validation["member"] == member]
        assert list(own["epoch"]) == [1, 2, 3] and list(own["step"]) == [2, 4, 6]
        for name in ("probe_accuracy", "probe_loss"):
            assert list(own[name]) == [line[name] for line in told]
        last = ends[(ends["member"] == member) & (ends["panel"] == "end")].set_index("layer")["common_mode"]
        assert last.to_dict() == evaluation(run.path, member)["common_mode"]


def test_the_page_tells_budget_and_what_the_variants_differ_in(run: Run) -> None:
    said = words(run.path)
    assert "Every variant: 6 steps of 4 images in 2 views, 24 images seen in 3 epochs of 8 images." in said
    rows = {row[0]: row[1:] for row in cells(page(run.path), "What the variants differ in")}
    assert rows["registers"] == ["0", "4"] and rows["gate"] == ["none", "elementwise"]
    assert set(rows) == {"registers", "gate", "pathway", "penalty"}  # tiny ones begin with the same LayerScale
    assert "sinklab diagnose RUN , with this folder for RUN" in said


def test_an_unfinished_run_has_a_page_that_says_what_is_missing(halted: Path) -> None:
    ended = in_process("report", halted)
    assert ended.returncode == 0 and ended.stdout.strip() == str(halted / "report.html"), ended.stderr
    said = words(halted)
    assert "2 of 4 trainings are finished." in said and "go" in said
    assert f"seed-1/{ARMS[0]} (step 3 of 6) and seed-1/{ARMS[1]} (no step kept)" in said
    rows = cells(page(halted), "Results")
    assert [row[6] for row in rows if row[0] in ARMS] == ["1 of 2", "1 of 2"]
    assert [row[-1] for row in rows if row[0] == "seed 1"] == ["3 of 6", "0 of 6"]
    assert [row[1] for row in rows if row[0] == "seed 1"] == ["–", "–"]
    curves = pd.read_csv(halted / "tables/curves.csv")
    assert list(curves.loc[curves["member"] == f"seed-1/{ARMS[0]}", "step"]) == [1, 2, 3]


def test_a_run_that_has_only_begun_has_a_page(run: Run, tmp_path: Path) -> None:
    path = damaged(run.path, tmp_path / "run", "run.json", {"status": "running"})
    shutil.rmtree(path / "training")
    write_training_report(Run.open(path))
    assert "No training is finished yet." in words(path) and "<figure" not in page(path)
    assert not list((path / "figures").iterdir())  # those of the earlier page are gone


def test_a_resumed_run_gives_the_same_page(run: Run, halted: Path, tmp_path: Path) -> None:
    shutil.copytree(halted, tmp_path / "run")
    again = trained(tmp_path / "run", resume=True)
    write_training_report(again)
    assert page(again.path) == page(run.path)
    for path in sorted((run.path / "figures").iterdir()):
        assert (again.path / "figures" / path.name).read_bytes() == path.read_bytes(), path.name


def test_the_page_is_written_again_without_torch_and_the_same(diagnosed: Path) -> None:
    before = {path: path.read_bytes() for path in [diagnosed / "report.html", *(diagnosed / "figures").iterdir()]}
    program = f"import sys; sys.argv = ['sinklab', 'report', {str(diagnosed)!r}]\n"
    program += "from sinklab.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
    program += "assert 'torch' not in sys.modules and 'sinklab.reports.vit_training' in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("metrics.jsonl", None, "its metrics.jsonl has no line of step 6"),
        ("metrics.jsonl", '{"step": 1, "total": 2.0}\n{"st', "its metrics.jsonl has no line of step 6"),
        ("metrics.jsonl", '{"step": 6, "total": "low"}\n', "its metrics.jsonl has 'low' in place of a number"),
        ("evaluation.json", "[]", "its evaluation.json is none"),
        ("evaluation.json", None, "it has no evaluation.json"),
    ],
)
def test_a_damaged_member_is_a_sentence_that_says_how_to_mend_it(
    run: Run, tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    path = damaged(run.path, tmp_path / "run", f"training/seed-1/{ARMS[0]}/{name}", content)
    ended = in_process("report", path)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    said = " ".join(ended.stderr.split())
    assert said.startswith(f"sinklab: {path / 'training/seed-1' / ARMS[0]} is damaged")
    assert sentence in said and "with the options of the training and --resume, writes it again" in said


def test_settings_that_lack_what_the_page_needs_are_a_sentence(run: Run, tmp_path: Path) -> None:
    path = damaged(run.path, tmp_path / "run", "run.json", {"pictures": {}})
    with pytest.raises(InputError, match="is damaged, and the report needs it"):
        write_training_report(Run.open(path))


def test_epochs_that_are_lost_are_noted(run: Run, tmp_path: Path) -> None:
    member = f"seed-0/{ARMS[1]}"
    first = json.dumps(lines(run.path, member, "validation.jsonl")[0])
    path = damaged(run.path, tmp_path / "run", f"training/{member}/validation.jsonl", f"{first}\n{{")
    write_training_report(Run.open(path))
    assert f"{member}: validation.jsonl tells of 1 of 3 epochs" in words(path)


def test_diagnosed_models_add_tables_14_and_15_as_compare_has_them(diagnosed: Path) -> None:
    counts = sink_counts(compared([diagnosed]))
    for name, table in (("table14", table_14(counts, "mass")), ("table15", table_15(counts))):
        pd.testing.assert_frame_equal(pd.read_csv(diagnosed / f"tables/{name}.csv"), table, check_dtype=False)
    whole = table_14(counts, "mass").set_index(["definition", "arm", "kind"])
    shown = [row for row in cells(page(diagnosed), "Sinks an image, by token") if len(row) > 1]
    totals = [row for row in shown if row[1] == "any"]
    assert [row[0] for row in totals] == [*ARMS, *ARMS]  # of either definition, each before its tokens
    for row, definition in zip(totals, ("causal", "causal", "counts", "counts"), strict=True):
        expected = whole.loc[(definition, row[0], "all")]
        for cell, name in zip(row[2:6], ("nop", "broadcast", "intermediate", "all"), strict=True):
            assert cell == f"{expected[name]:.2f} ± {expected[f'{name}_std']:.2f}"
    for member in Run.open(diagnosed).config["members"]:
        assert f'<a href="diagnosed/{member}/report.html">{member}</a>' in page(diagnosed)
        assert (diagnosed / f"diagnosed/{member}/report.html").is_file()
    assert "That is not measured yet" not in page(diagnosed)


def test_the_pathways_own_share_is_the_diagnosis(diagnosed: Path) -> None:
    ends = pd.read_csv(diagnosed / "figures/vit-common-mode.csv")
    ends = ends[ends["panel"] == "end"]
    assert ends.loc[ends["config"] == ARMS[0], "pathway"].isna().all()
    for seed in SEEDS:
        member = f"seed-{seed}/{ARMS[1]}"
        own = pd.read_csv(diagnosed / f"diagnosed/{member}/tables/common_mode.csv")
        expected = own[own["update"] == "pathway"].set_index("layer")["share"].to_dict()
        assert ends[ends["member"] == member].set_index("layer")["pathway"].to_dict() == expected
        assert set(expected) == {0, 1, 2}


def test_diagnoses_that_are_gone_leave_no_table(diagnosed: Path, tmp_path: Path) -> None:
    shutil.copytree(diagnosed, tmp_path / "run")
    shutil.rmtree(tmp_path / f"run/diagnosed/seed-1/{ARMS[0]}")
    write_training_report(Run.open(tmp_path / "run"))
    assert f"Not diagnosed yet: seed-1/{ARMS[0]}." in words(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/diagnosed")
    write_training_report(Run.open(tmp_path / "run"))
    assert "That is not measured yet" in words(tmp_path / "run")
    assert {path.stem for path in (tmp_path / "run/tables").iterdir()} == TABLES | {"training"}


def test_counts_under_two_rules_are_not_tabulated(diagnosed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(diagnosed, path)
    member = f"seed-1/{ARMS[0]}"
    words_of = ("--device", "cpu", "--rule", "relaxed", "--overwrite", "--no-report", "-o", path / "diagnosed" / member)
    ended = in_process("diagnose", path / "training" / member, *words_of)
    assert ended.returncode == 0, ended.stderr
    write_training_report(Run.open(path))
    assert "The models were diagnosed under 2 rules" in words(path)
    assert not (path / "tables/table14.csv").exists() and "Table 14" not in page(path)


def test_every_named_variant_of_a_size_is_drawn_in_a_way_of_its_own() -> None:
    names = [name for name in config_names() if name.endswith(("-L", "-S"))]
    styles = variant_styles(names)
    looks = {(style["color"], str(style["linestyle"]), style["marker"]) for style in styles.values()}
    assert len(looks) == len(names)


def test_a_mean_over_seeds_ends_with_the_first_seed_that_ends() -> None:
    table = pd.DataFrame({"seed": [0, 0, 1], "step": [1, 2, 1], "total": [1.0, 9.0, 3.0]})
    assert mean_line(table, "step", "total").to_dict("list") == {"step": [1], "total": [2.0]}


def test_a_thinned_line_keeps_its_mean() -> None:
    line = pd.DataFrame({"step": range(1, 1001), "total": [step**0.5 for step in range(1, 1001)]})
    thin = thinned(line, 100)
    assert len(thin) == 100 and thin["step"].iloc[0] == 5.5
    assert thin["total"].mean() == pytest.approx(line["total"].mean())
    assert thinned(line.head(100), 100).equals(line.head(100))


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert BINARY is not None
    with open_browser(BINARY) as tab:
        yield tab


@pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")
def test_the_page_opens_on_a_desktop_and_a_phone_without_a_complaint_or_sideways_scrolling(
    browser: Page, diagnosed: Path
) -> None:
    path = diagnosed / "report.html"
    for width in (320, 390, 1280):
        browser.open(path, width=width)
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.startswith("data:")] == [path.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
