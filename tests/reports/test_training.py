"""A training's page: drawn from saved tables, whole, the same every time, and without torch."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from browser import Page, chromium, open_browser
from damaged import damaged

from sinklab.errors import InputError
from sinklab.reports.training import budget_sentence, write_training_report
from sinklab.reports.training_figures import sweep_ends
from sinklab.reports.training_tables import limit_words, plain, with_error
from sinklab.run import Run
from sinklab.training.toy import train_toy
from sinklab.training.toy_config import make_config

TINY = ("tokens=6", "dim=8", "steps=6", "batch=4", "record_every=2", "score_every=2", "evaluation_batches=2",
        "evaluation_size=8")  # fmt: skip
FIGURES = {
    "nop": {"fig2-edits", "fig2-spectrum", "training-curves"},
    "nop-branch": {"fig2-spectrum", "training-curves"},
    "sweep": {"fig11-sink-score", "fig2-spectrum", "training-curves"},
    "frequency": {"fig11-sink-score", "fig2-spectrum", "training-curves"},
    "broadcast": {"fig3-edits", "fig3-query-key", "fig3-stable-rank", "fig2-spectrum", "training-curves"},
    "pathway": {"fig7-pathway", "fig3-stable-rank", "fig2-spectrum", "training-curves"},
    "e1": {"fig7-pathway", "fig3-stable-rank", "fig2-spectrum", "training-curves"},
}
SWEEPS = {"sweep": "damping", "frequency": "frequency"}
BINARY = chromium()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One reported run of each sort; of one seed or two."""
    made = {}
    for name in FIGURES:
        kind = "nop-branch" if name in SWEEPS else "pathway" if name == "e1" else name
        wide = ("hidden=16",) if kind in ("broadcast", "pathway") else ("frequency_steps=6",) * (kind == "nop-branch")
        config = make_config(kind, "e1" if name == "e1" else "laptop", [*TINY, *wide])
        seeds = [0] if name == "nop-branch" else [0, 1]
        made[name] = train_toy(tmp_path_factory.mktemp(name) / "run", config, seeds, sweep=SWEEPS.get(name))
        write_training_report(made[name])
    return made


def page(run: Run) -> str:
    return (run.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_has_every_figure_of_its_task_with_its_numbers_beside_it(runs: dict[str, Run], name: str) -> None:
    text = page(runs[name])
    assert set(re.findall(r'<figure id="([^"]+)">', text)) == FIGURES[name]
    there = {path.name for path in (runs[name].path / "figures").iterdir()}
    assert there == {f"{figure}.{ending}" for figure in FIGURES[name] for ending in ("csv", "png", "svg")}
    for target in re.findall(r'href="((?:tables|figures)/[^"]+)"', text):
        assert (runs[name].path / target).is_file(), target
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL).lower().replace("nano", "").split()


@pytest.mark.parametrize("name", FIGURES)
def test_the_page_names_its_budget(runs: dict[str, Run], name: str) -> None:
    budget = runs[name].config["budget"]
    assert budget_sentence(budget, SWEEPS.get(name)).split(":")[0] in page(runs[name]).replace("&#39;", "'")
    assert f"{budget['steps']} steps of 4 fresh sequences" in page(runs[name])


def test_a_task_that_is_not_the_papers_is_said_on_the_page(runs: dict[str, Run]) -> None:
    assert "empty token that the loss leaves out" in page(runs["nop-branch"])
    assert "empty token" not in page(runs["nop"]) and "no part along (1, …, 1)" in page(runs["nop"])
    assert "no part along" not in page(runs["broadcast"])


def test_a_budget_is_said_with_its_share_of_the_papers() -> None:
    told = {"variant": "laptop", "changed": {"steps": 800}, "steps": 800, "batch": 64, "of_paper": 800 * 64 / 30.72e6}
    assert budget_sentence(told) == (
        "The “laptop” budget with steps = 800: 800 steps of 64 fresh sequences for each training, 0.17 % of the "
        "paper’s sequences."
    )
    assert "as many as the paper’s." in budget_sentence({**told, "changed": {}, "of_paper": 1.0})


def test_the_pathways_page_shows_the_saved_numbers(runs: dict[str, Run]) -> None:
    table = runs["pathway"].table("pathway")
    row = table[(table["level"] == "mean") & (table["arm"] == "global+penalty")].iloc[0]
    text = page(runs["pathway"])
    for name in ("task_mse", "inflow_1", "delta_mse_without_attention", "donor_cosine_global"):
        assert with_error(row[name], row[f"{name}_sem"]) in text
    assert "paper 0.140" in text and "paper 1.64" in text and "paper 0.309" not in text
    assert "paper 0.309" in page(runs["e1"]) and "paper 0.140" not in page(runs["e1"])


def test_claims_that_fail_are_said_to_fail(runs: dict[str, Run]) -> None:
    held = runs["nop"].table("claims").groupby("claim")["holds"].all()
    assert 0 < held.sum() < len(held)  # six steps confirm little
    text = page(runs["nop"])
    assert f"{held.sum()} of the task’s {len(held)} claims hold on every seed" in text
    assert text.count("✓") == runs["nop"].table("claims")["holds"].sum() and "✗" in text


def test_the_same_tables_give_the_same_bytes_without_a_model(runs: dict[str, Run], tmp_path: Path) -> None:
    source = runs["broadcast"].path
    shutil.copytree(source, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/training")
    for path in (tmp_path / "run/figures").iterdir():
        path.unlink()
    write_training_report(Run.open(tmp_path / "run"))
    for path in [source / "report.html", *(source / "figures").iterdir()]:
        assert (tmp_path / "run" / path.relative_to(source)).read_bytes() == path.read_bytes(), path.name


def test_reporting_on_a_training_never_loads_torch(runs: dict[str, Run]) -> None:
    program = f"import sys; sys.argv = ['sinklab', 'report', {str(runs['pathway'].path)!r}]\n"
    program += "from sinklab.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
    program += "assert 'torch' not in sys.modules and 'sinklab.reports.training' in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(runs["pathway"].path / "report.html")


def test_a_figure_of_an_earlier_report_goes(runs: dict[str, Run], tmp_path: Path) -> None:
    shutil.copytree(runs["nop"].path, tmp_path / "run")
    (tmp_path / "run/figures/fig7-pathway.svg").write_text("old")
    (tmp_path / "run/figures/mine.svg").write_text("the user's")
    write_training_report(Run.open(tmp_path / "run"))
    assert not (tmp_path / "run/figures/fig7-pathway.svg").exists()
    assert (tmp_path / "run/figures/mine.svg").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tables/pathway.csv", "level,arm\nmean,1\n", "tables.* is damaged, and the report needs it"),
        ("tables/claims.csv", None, "tables/claims.csv is damaged, and the report needs it .*no table 'claims'"),
        ("run.json", {"status": "running"}, r"is not complete \(status: running\): go on with --resume"),
        ("run.json", {"purpose": "x"}, "is not a training"),
    ],
)
def test_a_run_that_cannot_be_reported_on_is_refused_with_a_sentence(
    runs: dict[str, Run], tmp_path: Path, name: str, content: object, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        write_training_report(Run.open(damaged(runs["pathway"].path, tmp_path / "run", name, content)))


def test_a_number_is_printed_to_the_place_of_its_error() -> None:
    assert with_error(0.02343, 0.00042) == "0.0234 ± 0.0004"
    assert with_error(1.7249, 0.1) == "1.72 ± 0.10"
    assert with_error(0.5, 0.0) == "0.500" and with_error(float("nan"), float("nan")) == "–"
    assert plain(0.000648) == "0.00065" and plain(-2e-9) == with_error(-2e-9, 1e-9) == "-2e-09"


def test_limits_are_said_as_they_are_meant() -> None:
    inf = float("inf")
    said = [limit_words(0.95, inf), limit_words(-inf, 0.05), limit_words(0, 0), limit_words(0.5, 2)]
    assert said == ["≥ 0.95", "≤ 0.05", "exactly 0", "0.5 to 2"]


def test_half_of_the_final_score_is_reached_at_the_first_step_that_has_it() -> None:
    curves = pd.DataFrame({"arm": "p=0.500", "seed": 0, "step": [10, 20, 30, 40], "sink_0": [0.1, 0.3, 0.2, 0.6]})
    assert sweep_ends(curves, 32).to_dict("records") == [{"arm": "p=0.500", "seed": 0, "score": 0.6, "half_step": 20}]


def test_where_no_sink_formed_there_is_no_step_with_half_of_it() -> None:
    """Of 32 tokens that are all attended to alike each receives 1/32, from the first step on."""
    curves = pd.DataFrame({"arm": "p=0.050", "seed": 0, "step": [10, 20], "sink_0": [1 / 32, 1.9 / 32]})
    assert math.isnan(sweep_ends(curves, 32)["half_step"].iloc[0])
    curves["sink_0"] = [1 / 32, 2 / 32]
    assert sweep_ends(curves, 32)["half_step"].iloc[0] == 10


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert BINARY is not None
    with open_browser(BINARY) as tab:
        yield tab


@pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("name", FIGURES)
def test_the_page_opens_on_a_desktop_and_a_phone_without_a_complaint_or_sideways_scrolling(
    browser: Page, runs: dict[str, Run], name: str
) -> None:
    path = runs[name].path / "report.html"
    for width in (320, 390, 1280):
        browser.open(path, width=width)
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.startswith("data:")] == [path.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.filterwarnings("error")
def test_a_model_of_many_layers_has_room_for_each_panel() -> None:
    import pandas as pd

    from sinklab.reports.training_figures import draw_curves

    row = {"seed": 0, "arm": "broadcast", "point": float("nan"), "loss": 1.0}
    scores = {f"sink_{layer}": 0.5 for layer in range(21)}
    curves = pd.DataFrame([{**row, **scores, "step": step, "loss": 1 / step} for step in (1, 2)])
    figure = draw_curves(curves)
    figure.draw_without_rendering()
    widths = [axes.get_position().width * figure.get_figwidth() for axes in figure.axes]
    heights = [axes.get_position().height * figure.get_figheight() for axes in figure.axes]
    assert len(widths) == 22 and min(widths) > 1.2 and min(heights) > 1.2
