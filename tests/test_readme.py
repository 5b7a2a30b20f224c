"""The README's numbers come from the result files, and every command in it exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from sinklab.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def fill_readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fill_readme", ROOT / "benchmarks" / "fill_readme.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> list[str]:
    """Every line in a code block of the README that calls sinklab, without its comment."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("sinklab ") or "-m sinklab " in line]


def test_the_readmes_numbers_are_those_of_the_result_files(fill_readme: ModuleType) -> None:
    assert {path.name for path in fill_readme.PAGES} >= {"README.md", "controlled-tasks.md", "language-models.md"}
    for path in fill_readme.PAGES:
        text = path.read_text(encoding="utf-8")
        assert fill_readme.filled(text) == text, f"{path.name}: run python benchmarks/fill_readme.py"


def test_the_paper_stands_beside_ours_in_the_controlled_tasks_tables() -> None:
    """A row of each table, with the paper's number as it is printed and ours as the result file has it."""
    text = (ROOT / "docs/controlled-tasks.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/results/toy_tables.json").read_text())
    rows = {row[0].strip(): row[1:] for row in (line.strip("| ").split("|") for line in text.splitlines()) if row[1:]}
    for name, at, paper in (
        ("zero", 1, "(0.00785)"),
        ("layer 1, donor", 4, "(0.944)"),
        ("with the pathway", 2, "(0.908)"),
    ):
        assert rows[name][at].strip().endswith(paper), rows[name]
    (mean,) = [row["task_mse"] for row in result["pathway"]["mean"] if row["arm"] == "global+penalty"]
    shown = float(rows["pathway and penalty"][0].split("±")[0])
    assert abs(shown - mean) < 0.006 and rows["pathway and penalty"][0].strip().endswith("(0.144)")
    for entry in result.values():
        assert entry["command"] in text and entry["seconds"]


def test_what_a_phase_layer_costs_stands_in_the_docs_as_it_was_measured() -> None:
    text = (ROOT / "docs/language-models.md").read_text(encoding="utf-8")
    block = text.split("<!-- kuramoto:begin -->")[1].split("<!-- kuramoto:end -->")[0]
    rows = json.loads((ROOT / "benchmarks/results/kuramoto.json").read_text())["rows"].values()
    shown = [line.strip("| ").split(" | ") for line in block.strip().splitlines() if re.match(r"\| \d", line)]
    assert [(int(cells[0]), cells[2], float(cells[4].split()[0])) for cells in shown] == [
        (row["width"], "yes" if row["compiled"] else "no", round(row["phase_over_transformer"]["step"], 2))
        for row in rows
    ]


def test_a_number_changed_by_hand_is_found_and_put_right(fill_readme: ModuleType) -> None:
    if not (ROOT / "benchmarks" / "results" / "demo.json").is_file():
        pytest.skip("there is no result file yet")
    block = re.search(r"<!-- demo:begin -->.*?<!-- demo:end -->", README, flags=re.DOTALL)
    assert block is not None
    changed = README.replace(block[0], block[0].replace("On ", "On 1", 1))
    assert changed != README
    assert fill_readme.filled(changed) == fill_readme.filled(README)


def test_the_readme_says_the_demos_numbers_as_the_report_counts_them() -> None:
    """Heads and events of the result file agree with each other, and the README names both units."""
    result = json.loads((ROOT / "benchmarks/results/demo.json").read_text())
    heads, causal = result["sunk_heads"], result["classes"]["causal"]
    assert len(heads) == result["heads_that_sink"]["in_any_image"]
    assert sum(head["events"] for head in heads) == sum(causal.values()) == result["events"]
    block = re.search(r"<!-- demo:begin -->(.*?)<!-- demo:end -->", README, flags=re.DOTALL)
    assert block is not None and f"{len(heads)} of the {result['pairs']} heads" in block[1]
    named = re.findall(r"Layer (\d+), head (\d+) sinks in (\d+) of 12 photographs \(inflow ([\d.]+)\)", block[1])
    saved = {(str(h["layer"]), str(h["head"]), str(h["events"]), f"{h['event_inflow']:.2f}") for h in heads}
    assert len(named) == 2 and set(named) <= saved


def test_a_block_without_its_result_file_is_left_alone_and_one_with_it_is_filled(
    fill_readme: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill_readme, "HERE", tmp_path)
    assert fill_readme.filled(README) == README
    (tmp_path / "results").mkdir()
    means = {"nop": {"zero": 0.0431, "ordinary": 0.26}, "broadcast": {"zero": 0.054}}
    times = {"whole forwards, every image": 5.25}
    written = {"demo": {"rows": 65, "seconds": 17.9, "class_means": means, "times_as_long": times}}
    written["demo"]["class_heads"] = {"nop": 2, "broadcast": 1}
    (tmp_path / "results/patch.json").write_text(json.dumps(written))
    block = fill_readme.filled(README).split("<!-- patch:begin -->")[1].split("<!-- patch:end -->")[0]
    assert (
        "65 edited passes in 18 s of one CPU core" in block
        and "2 NOP heads zero 0.043, ordinary 0.26" in block
        and "1 broadcast head zero 0.054" in block
    )


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_is_understood(command: str) -> None:
    words = shlex.split(command, comments=True)
    ended = CliRunner().invoke(app, [*words[words.index("sinklab") + 1 :], "--help"])
    assert ended.exit_code == 0, ended.output
    for option in (word.partition("=")[0] for word in words[words.index("sinklab") :] if word.startswith("-")):
        assert option in ended.output


def test_the_readme_shows_the_commands() -> None:
    assert {"diagnose", "doctor", "report", "patch", "models"} <= {word for line in commands() for word in line.split()}


def test_every_option_that_the_readme_names_exists() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    runner = CliRunner()
    known = "".join(
        runner.invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output for name in ("diagnose", "doctor", "patch")
    )
    named = set(re.findall(r"`(--[a-z][a-z-]*)", prose))
    assert named and not {option for option in named if option not in known}


def test_every_file_that_the_readme_shows_is_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_tree_in_the_readme_names_files_that_exist() -> None:
    tree = README[README.index("## The tree") : README.index("## Sources")]
    names = set(re.findall(r"\b(\w+\.py)\b", tree))
    existing = {path.name for path in (ROOT / "sinklab").rglob("*.py")}
    assert names and names <= existing
