"""Whatever is wrong in a run's folder, `report` and `--resume` end in one sentence and exit code 2, or simply work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import PICTURE, in_process, write_checkpoint, write_pictures

from sinklab.run import Run

Config = dict[str, Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_checkpoint(folder)
    write_pictures(folder / "pictures", 3)
    return folder


def words(place: Path, run: Path) -> list[str]:
    options = ["--size", PICTURE, "--device", "cpu", "--batch-size", 1, "--rule", "mass", "--mass", "0.01"]
    return [str(word) for word in ("diagnose", place / "tiny.safetensors", place / "pictures", "-o", run, *options)]


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    ended = in_process(*words(place, place / "run"))
    assert ended.returncode == 0, ended.stderr
    return place / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def assert_a_sentence(*command: object) -> str:
    ended = in_process(*command)
    assert ended.returncode == 2, (ended.returncode, ended.stderr, ended.stdout)
    said = [line for line in ended.stderr.splitlines() if line.startswith("sinklab: ")]
    assert len(said) == 1 and said[0].endswith("."), ended.stderr
    return said[0]


def nested(depth: int) -> str:
    return '{"schema_version": 1, "sinklab": "0", "settings": ' + '{"a":' * depth + "1" + "}" * depth + "}"


def without(key: str) -> Callable[[Config], object]:
    return lambda config: config.pop(key)


def with_(**changes: object) -> Callable[[Config], object]:
    return lambda config: config.update(changes)


CHANGES: dict[str, Callable[[Config], object]] = {
    "rule null": with_(rule=None),
    "rule missing": without("rule"),
    "rule text": with_(rule="relaxed"),
    "rule without its name": lambda config: config["rule"].pop("name"),
    "rule without a threshold": lambda config: config["rule"].pop("threshold"),
    "rule of text": lambda config: config["rule"].update(threshold="a"),
    "rule unknown": lambda config: config["rule"].update(name="loose"),
    "rule out of range": lambda config: config["rule"].update(threshold=7),
    "definition null": with_(definition=None),
    "definition unknown": with_(definition="mine"),
    "definition missing": without("definition"),
    "model a list": with_(model=[1]),
    "model missing": without("model"),
    "model's numbers text": lambda config: config["model"].update(parameters="many", layer_scale={"min": "a"}),
    "images a number": with_(images=3),
    "skipped garbage": lambda config: config["images"].update(skipped=[3]),
    "settings a list": with_(settings=[]),
    "status a list": with_(status=["complete"]),
    "notes text": with_(notes="a note"),
    "half a character": lambda config: config["model"].update(name="\ud800"),
    "schema of text": with_(schema_version="one"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_report_of_a_damaged_run_json_is_a_sentence_that_names_it(run: Path, change: str) -> None:
    config = json.loads((run / "run.json").read_text())
    CHANGES[change](config)
    (run / "run.json").write_text(json.dumps(config))
    said = assert_a_sentence("report", run)
    assert "run.json" in said or "schema version" in said, said


@pytest.mark.parametrize("change", ["settings a list", "model a list", "half a character"])
def test_resuming_over_a_damaged_run_json_is_a_sentence(place: Path, run: Path, change: str) -> None:
    config = json.loads((run / "run.json").read_text())
    CHANGES[change](config)
    (run / "run.json").write_text(json.dumps(config))
    assert_a_sentence(*words(place, run), "--resume")


@pytest.mark.parametrize(
    "content",
    [nested(200), nested(100_000), "[" * 100_000, "null", '"run"', "\ufeff{}", "{}", '{"a": ' + "9" * 5000 + "}", ""],
    ids=["deep", "deeper", "lists", "null", "text", "mark", "empty object", "long number", "nothing"],
)
def test_a_run_json_that_is_no_run_is_a_sentence(place: Path, run: Path, content: str) -> None:
    (run / "run.json").write_text(content)
    for command in (["report", run], [*words(place, run), "--resume"]):
        assert "run.json" in assert_a_sentence(*command)


def test_settings_that_were_changed_in_run_json_are_noticed(place: Path, run: Path) -> None:
    config = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**config, "settings": {"images": "x", "options": [1]}}))
    assert "The fingerprint in" in assert_a_sentence(*words(place, run), "--resume")
    assert in_process("report", run).returncode == 0  # the tables and all that the page shows are whole


def test_a_fingerprint_that_is_not_that_of_its_settings_is_called_so(place: Path, run: Path) -> None:
    config = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**config, "fingerprint": "0" * 64}))
    assert "The fingerprint in" in assert_a_sentence(*words(place, run), "--resume")
    assert "other settings" in assert_a_sentence("report", run)


FILES = ["overlays/columns.parquet", "overlays/pictures.json", "tables/spectrum.csv"]
GARBAGE = {
    "words": b"not what it was",
    "nothing": b"",
    "bytes": bytes(range(256)) * 9,
    "list": b"[1, 2]",
    "other json": b'{"pictures": {"a": "../../run.json"}, "grid": [], "prefix_tokens": "x"}',
    "deep": b"[" * 100_000,
    "other table": b"layer,head,sigma_1\n0,0,1\n",
    "text for numbers": b"layer,head,sigma_1,sigma_2,sigma_sum,frobenius,sigma1_share\n0,0,a,b,c,d,e\n",
    "a row twice": b"layer,head,sigma_1,sigma_2,sigma_sum,frobenius,sigma1_share\n" + b"0,0,1,1,1,1,1\n" * 2,
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_report_names_the_damaged_file(run: Path, name: str, garbage: str) -> None:
    (run / name).write_bytes(GARBAGE[garbage])
    said = assert_a_sentence("report", run)
    assert f"{name} is damaged, and the report needs it" in said and "--resume" in said


def test_a_damaged_photograph_is_named_as_damage(run: Path) -> None:
    next(run.glob("overlays/*.jpg")).write_bytes(b"no picture")
    assert "overlays/pictures.json is damaged" in assert_a_sentence("report", run)


def test_resuming_writes_damaged_results_again(place: Path, run: Path, whole: Path) -> None:
    for name in (*FILES, "sinks.parquet", "summary.json"):
        (run / name).write_bytes(b"garbage")
    ended = in_process(*words(place, run), "--resume")
    assert ended.returncode == 0, ended.stderr
    assert Run.open(run).summary == Run.open(whole).summary
    assert (run / "report.html").exists()


def test_tables_and_the_summary_of_a_damaged_run_are_refused_by_name(run: Path) -> None:
    (run / "summary.json").write_text("[")
    (run / "tables" / "spectrum.csv").write_bytes(b"")
    opened = Run.open(run)
    with pytest.raises(ValueError, match=r"summary\.json cannot be read as JSON"):
        opened.summary  # noqa: B018
    with pytest.raises(ValueError, match=r"spectrum\.csv cannot be read as a table"):
        opened.table("spectrum")
