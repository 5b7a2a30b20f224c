"""The command as a user meets it: what is printed where, and what each option changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import PICTURE, environment, in_process, sinklab, tiny_state, write_checkpoint, write_pictures

from sinklab.run import Run

IMAGES = 5
KEYS = ["image", "layer", "head"]
Diagnose = Callable[..., Run]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_state(depth=4), depth=4)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), IMAGES)


@pytest.fixture(scope="module")
def diagnose(model: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Diagnose:
    """Runs the command with more options, and gives its run."""

    def call(*options: str | Path, model: Path = model) -> Run:
        run = tmp_path_factory.mktemp("runs") / "run"
        size = () if "--size" in options else ("--size", PICTURE)
        ended = in_process("diagnose", model, pictures, "-o", run, "--device", "cpu", "--no-report", *size, *options)
        assert ended.returncode == 0, ended.stderr
        return Run.open(run)

    return call


@pytest.fixture(scope="module")
def plain(diagnose: Diagnose) -> Run:
    return diagnose()


# What is printed.


def test_standard_output_holds_the_path_of_the_report_and_nothing_else(
    model: Path, pictures: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = sinklab("diagnose", model, pictures, "-o", run, "--size", PICTURE, "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{run / 'report.html'}\n"
    assert (run / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert f"images {IMAGES}/{IMAGES}" in ended.stderr
    assert "\x1b" not in ended.stderr and "\r" not in ended.stderr  # a log file stays readable
    assert "Traceback" not in ended.stderr
    assert re.search(r"^(None|\d+) of \d+ heads sinks?\b.* \(rule relaxed, definition causal\)\.$", ended.stderr, re.M)

    config = Run.open(run).config
    assert config["status"] == "complete"
    assert config["command"][:2] == ["sinklab", "diagnose"]
    for name in ("sinks.parquet", "summary.json", "tables/spectrum.csv", "overlays/pictures.json"):
        assert (run / name).is_file()
    assert list(run.glob("figures/*.png")) and list(run.glob("figures/*.svg")) and list(run.glob("tables/*.csv"))

    before = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    again = in_process("report", run)
    assert (again.returncode, again.stdout) == (0, f"{run / 'report.html'}\n")
    assert (run / "report.html").read_bytes() == before


def test_a_terminal_shows_a_bar_that_fits_its_width(model: Path, pictures: Path, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    words = ["diagnose", model, pictures, "-o", tmp_path / "run", "--size", PICTURE, "--device", "cpu", "--no-report"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sinklab", *map(str, words)],
        env=environment(COLUMNS="40", TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=follower,
        stdin=follower,
        text=True,
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # Linux says so when the last writer has gone
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    assert process.communicate(timeout=60)[0] == f"{tmp_path / 'run' / 'summary.json'}\n"
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    bars = [line for line in re.split(r"[\r\n]+", text) if re.search(r"\d/5\b", line)]
    assert bars and "━" in text
    assert f"{IMAGES}/{IMAGES}" in bars[-1]
    assert all(len(line) <= 40 for line in bars)


def test_doctor_prints_the_proof_of_every_site(model: Path, pictures: Path) -> None:
    ended = in_process("doctor", model, pictures / "000.png", "--size", PICTURE, "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("\t") for line in ended.stdout.splitlines()]
    header = next(row for row in rows if row[0] == "site")
    sites = [row for row in rows if re.fullmatch(r"blocks\.\d\.attn", row[0])]
    assert len(sites) == 4
    for row in sites:
        assert len(row) == len(header)
        told = dict(zip(header, row, strict=True))
        assert (told["fired"], told["heads"], told["dim"], told["|Δout|"]) == ("1", "2", "16", "0")
        assert all(float(told[name]) < 1e-4 for name in ("|rows-1|", "|Av-z|", "|ΣU-Δx|"))
        assert told["dtype"].endswith("float32")
    tables = [block.splitlines() for block in ended.stdout.split("\n\n")]
    assert [lines[0].startswith("# ") for lines in tables] == [True, True, True, False]
    assert all(len({line.count("\t") for line in lines[1:]}) == 1 for lines in tables[:3])
    assert re.fullmatch(r"All 4 sites agree \(largest error \de-\d\d, limit 1e-04\)\.\n", "\n".join(tables[3]) + "\n")


def test_models_lists_every_kind_of_name(capsys: pytest.CaptureFixture[str]) -> None:
    ended = in_process("models")
    assert ended.returncode == 0
    names = [line.split("\t")[0] for line in ended.stdout.splitlines()]
    for name in ("demo", "timm:NAME", "hf:REPO_OR_DIR", "PATH"):
        assert name in names
    assert any(name.startswith("openclip:") for name in names) and any(name.startswith("dinov2:") for name in names)


def test_a_command_that_does_not_exist_is_an_error_of_use() -> None:
    assert in_process("diagnoze").returncode == 2
    assert in_process("diagnose", "--no-such-option").returncode == 2


# What the options change.


def test_the_strict_rule_counts_queries_one_by_one(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose("--rule", "strict", "--epsilon", "0.4")
    pd.testing.assert_frame_equal(run.heads, plain.heads, check_exact=True)
    expected = plain.heads[plain.heads["min_attention"] >= 0.6]
    assert run.sinks[KEYS].to_numpy().tolist() == expected[KEYS].to_numpy().tolist()
    assert run.config["rule"]["name"] == "strict" and run.config["rule"]["epsilon"] == 0.4


def test_the_mass_rule_is_a_threshold_on_the_inflow(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose("--rule", "mass", "--mass", "0.35")
    expected = plain.heads[plain.heads["inflow"] >= 0.35]
    assert 0 < len(expected) < len(plain.heads)
    assert run.sinks[KEYS].to_numpy().tolist() == expected[KEYS].to_numpy().tolist()


def test_the_relaxed_rule_takes_its_two_thresholds(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose("--attention", "0.6", "--fraction", "0.4")
    assert (run.heads["routed_count"] <= plain.heads["routed_count"]).all()
    expected = run.heads[run.heads["routed_count"] * 10 >= 4 * run.heads["queries"]]
    assert 0 < len(expected) < len(run.heads)
    assert run.sinks[KEYS].to_numpy().tolist() == expected[KEYS].to_numpy().tolist()


def test_the_definition_leads_the_summary_and_both_are_in_the_table(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose("--definition", "counts", "--rule", "mass")
    assert run.config["definition"]["name"] == "counts" and plain.config["definition"]["name"] == "causal"
    assert run.config["definition"] == run.summary["definition"]
    assert {"class_causal", "class_counts"} <= set(run.sinks.columns)


def test_layers_are_a_part_of_the_whole_table(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose("--layers", "1-2")
    expected = plain.heads[plain.heads["layer"].isin([1, 2])].reset_index(drop=True)
    pd.testing.assert_frame_equal(run.heads, expected, check_exact=True)
    assert set(run.table("spectrum")["layer"]) == {1, 2}
    assert set(diagnose("--layers", "0,2-3").heads["layer"]) == {0, 2, 3}


def test_a_limit_draws_by_the_seed(diagnose: Diagnose, plain: Run) -> None:
    chosen = {seed: list(diagnose("--limit", "2", "--seed", seed).heads["image"].unique()) for seed in "0123"}
    assert all(len(images) == 2 and set(images) < set(plain.heads["image"]) for images in chosen.values())
    assert len({tuple(images) for images in chosen.values()}) > 1
    again = diagnose("--limit", "2", "--seed", "1")
    assert list(again.heads["image"].unique()) == chosen["1"]
    assert again.config["seeds"]["images"] == 1 and again.config["options"]["limit"] == 2


def assert_equal_to_rounding(run: Run, plain: Run) -> None:
    real = [column for column in plain.heads if pd.api.types.is_float_dtype(plain.heads[column])]
    pd.testing.assert_frame_equal(run.heads.drop(columns=real), plain.heads.drop(columns=real))
    for column in real:
        np.testing.assert_allclose(run.heads[column], plain.heads[column], rtol=1e-4, atol=1e-6, err_msg=column)


def test_fast_is_equal_to_rounding(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose("--fast")
    assert_equal_to_rounding(run, plain)
    assert run.config["options"]["fast"] is True


def test_bfloat16_is_near_and_says_so(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose("--dtype", "bfloat16")
    assert run.config["dtype"] == "bfloat16"
    assert run.heads["finite"].all()
    difference = (run.heads["inflow"] - plain.heads["inflow"]).abs()
    assert difference.max() > 0 and difference.median() < 0.02


def test_native_size_is_the_models_own_transform(diagnose: Diagnose) -> None:
    run = diagnose("--size", "native")
    assert run.config["options"]["size"] == "native"
    assert run.config["images"]["size"] == run.config["model"]["preprocessing"]["size"] == [32, 32]
    assert set(run.heads["tokens"]) == {5}


def test_another_size_gives_another_grid(diagnose: Diagnose) -> None:
    run = diagnose("--size", "48")
    assert set(run.heads["tokens"]) == {1 + 3 * 3}
    assert run.heads["sink_row"].between(-1, 2).all()


def test_a_run_folder_stands_for_its_model(diagnose: Diagnose, plain: Run) -> None:
    run = diagnose(model=plain.path)
    pd.testing.assert_frame_equal(run.heads, plain.heads, check_exact=True)
    assert run.config["model"]["sha256"] == plain.config["model"]["sha256"]


def test_weights_and_random_weights_need_no_network(pictures: Path, tmp_path: Path) -> None:
    words = ("--size", PICTURE, "--device", "cpu", "--no-report", "--offline", "--layers", 0, "--limit", 1)
    name = "timm:vit_tiny_patch16_224"
    first = in_process("diagnose", name, pictures, "-o", tmp_path / "a", "--random-weights", "--seed", 3, *words)
    second = in_process("diagnose", name, pictures, "-o", tmp_path / "b", "--random-weights", "--seed", 3, *words)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    pd.testing.assert_frame_equal(Run.open(tmp_path / "a").heads, Run.open(tmp_path / "b").heads, check_exact=True)


def test_random_weights_are_drawn_for_images_of_the_size_asked_for(pictures: Path, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--no-report", "--layers", 0, "--limit", 1, "--random-weights")
    name = "openclip:ViT-B-32"  # takes images of one size only
    ended = in_process("diagnose", name, pictures, "-o", tmp_path / "a", "--size", 64, *words)
    assert ended.returncode == 0, ended.stderr
    assert set(Run.open(tmp_path / "a").heads["tokens"]) == {1 + 2 * 2}
    again = in_process("diagnose", tmp_path / "a", pictures, "-o", tmp_path / "b", "--size", 64, *words[:-1])
    assert again.returncode == 0, again.stderr
    pd.testing.assert_frame_equal(Run.open(tmp_path / "a").heads, Run.open(tmp_path / "b").heads, check_exact=True)
    small = in_process("doctor", name, pictures, "--size", 16, "--random-weights", "--device", "cpu")
    assert small.returncode == 2 and "smaller than one patch" in small.stderr and "Traceback" not in small.stderr


def test_a_mistyped_architecture_is_told_its_neighbours() -> None:
    for command in (("diagnose", "timm:vit_tinyy_patch16_224", "demo"), ("doctor", "timm:vit_tinyy_patch16_224")):
        ended = in_process(*command, "--random-weights")
        assert ended.returncode == 2 and "vit_tiny_patch16_224" in ended.stderr


def test_images_can_be_files_a_list_and_an_archive(model: Path, pictures: Path, plain: Run, tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "shard-000.tar", "w") as archive:
        archive.add(pictures / "002.png", "002.png")
    (tmp_path / "list.txt").write_text(f"# chosen\n{pictures / '003.png'}\n")
    sources = (pictures / "001.png", f"@{tmp_path / 'list.txt'}", tmp_path / "shard-{000..000}.tar")
    run = tmp_path / "run"
    ended = in_process("diagnose", model, *sources, "-o", run, "--size", PICTURE, "--device", "cpu", "--no-report")
    assert ended.returncode == 0, ended.stderr
    heads = Run.open(run).heads
    assert [Path(image).name for image in heads["image"].unique()] == ["001.png", "003.png", "002.png"]
    for i, original in enumerate(("001.png", "003.png", "002.png")):
        mine, theirs = heads[heads["image_index"] == i], plain.heads[plain.heads["image"] == original]
        assert mine["sink_index"].tolist() == theirs["sink_index"].tolist()
        np.testing.assert_allclose(mine["inflow"], theirs["inflow"], rtol=1e-4)


def test_run_json_says_what_made_the_run(plain: Run) -> None:
    config = plain.config
    assert config["schema_version"] == 1 and config["status"] == "complete"
    assert len(config["images"]["list_sha256"]) == len(config["model"]["sha256"]) == 64
    assert config["images"]["count"] == IMAGES and config["images"]["skipped"] == []
    assert (config["model"]["layers"], config["model"]["heads"], config["model"]["prefix"]) == (4, 2, ["cls"])
    assert {"torch", "timm", "python"} <= set(config["versions"])
    assert config["dtype"] == "float32" and config["device"].startswith("cpu") and config["tf32"] is False
    assert config["timings"]["images"] == IMAGES and config["timings"]["images_per_second"] > 0
    assert json.loads((plain.path / "run.json").read_text()) == config
