"""What bad input gets: exit code 2, one clear sentence on standard error, no traceback, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from command_line import PICTURE, environment, in_process, sinklab, tiny_state, write_checkpoint, write_pictures

from sinklab.run import Run

SIZE = ("--size", PICTURE, "--device", "cpu", "--no-report")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), 3)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def assert_refused(ended: CompletedProcess[str], *said: str, folder: Path | None = None) -> None:
    """Exit code 2 and one sentence that says what it should; if named, `folder` is not there."""
    assert ended.returncode == 2, (ended.returncode, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    refusal = [line for line in ended.stderr.splitlines() if line.startswith("sinklab: ")]
    assert len(refusal) == 1, ended.stderr
    assert refusal[0].endswith((".", ":", "?")), refusal[0]
    for words in said:
        assert words in ended.stderr, ended.stderr
    assert folder is None or not folder.exists()


def assert_done(ended: CompletedProcess[str], run: Path) -> Run:
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    return Run.open(run)


def test_a_model_that_does_not_exist_is_named(pictures: Path, run: Path) -> None:
    ended = sinklab("diagnose", "nosuchmodel", pictures, "-o", run, *SIZE)
    assert_refused(ended, "'nosuchmodel'", "demo", "timm:NAME", folder=run)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:vit_smal_patch16_224", "vit_small_patch16_224"),
        ("openclip:ViT-B-33", "ViT-B-32"),
        ("dinov2:vits15", "vits14"),
        ("nowhere/model.pth", "There is no file or folder nowhere/model.pth"),
        ("timm:", "needs a name"),
    ],
)
def test_a_name_nearly_right_gets_the_right_one(name: str, said: str, pictures: Path, run: Path) -> None:
    assert_refused(in_process("diagnose", name, pictures, "-o", run, "--offline", *SIZE), said, folder=run)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("timm:vit_tiny_patch16_224", ()),
        ("hf:nobody/no-such-model", ()),
        ("openclip:ViT-B-32/openai", ()),
    ],
)
def test_offline_a_model_of_the_hub_is_refused_without_the_network(
    name: str, options: tuple[str, ...], pictures: Path, run: Path, tmp_path: Path
) -> None:
    ended = in_process("diagnose", name, pictures, "-o", run, "--offline", *options, *SIZE)
    assert_refused(ended, "offline", folder=run)


def test_a_network_without_attention_is_refused(pictures: Path, run: Path) -> None:
    ended = in_process("diagnose", "timm:resnet18", pictures, "-o", run, "--random-weights", *SIZE)
    assert_refused(ended, "resnet18", "ViT", folder=run)


def test_an_image_that_does_not_exist_is_named(model: Path, run: Path, tmp_path: Path) -> None:
    ended = in_process("diagnose", model, tmp_path / "none.png", "-o", run, *SIZE)
    assert_refused(ended, "none.png", folder=run)


def test_a_folder_without_images_is_named(model: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no picture")
    ended = in_process("diagnose", model, tmp_path / "empty", "-o", run, *SIZE)
    assert_refused(ended, "empty", "no images", folder=run)


def test_damaged_images_are_skipped_counted_named_and_listed(model: Path, run: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mixed", 4)
    (folder / "001.png").write_bytes(b"\x89PNG but nothing more")
    whole = (folder / "002.png").read_bytes()
    (folder / "002.png").write_bytes(whole[: len(whole) // 2])
    ended = in_process("diagnose", model, folder, "-o", run, *SIZE)
    done = assert_done(ended, run)
    assert "2 of the images could not be used" in ended.stderr
    assert [entry["image"] for entry in done.config["images"]["skipped"]] == ["001.png", "002.png"]
    for entry in done.config["images"]["skipped"]:
        assert f"{entry['image']}: {entry['reason']}" in ended.stderr
    assert done.config["images"]["count"] == 4
    assert set(done.heads["image"]) == {"000.png", "003.png"}
    assert set(done.heads["image_index"]) == {0, 3}


def test_a_hostile_name_is_shown_and_not_obeyed(model: Path, run: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mixed", 2)
    name = "\x1b[31mred\nsinklab: all is well\u202e.png"
    (folder / name).write_bytes(b"no")
    ended = in_process("diagnose", model, folder, "-o", run, *SIZE)
    assert "\x1b" not in ended.stderr and "\u202e" not in ended.stderr
    assert r"  \x1b[31mred\nsinklab: all is well\u202e.png: " in ended.stderr
    assert assert_done(ended, run).config["images"]["skipped"][0]["image"] == name
    strict = in_process("diagnose", model, folder, "-o", run, "--overwrite", "--strict-images", *SIZE)
    assert_refused(strict, r"\x1b[31mred\nsinklab")


@pytest.mark.parametrize("place", [0, 2])
def test_strict_images_stops_at_the_first_damaged_one(place: int, model: Path, run: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mixed", 3)
    (folder / f"00{place}.png").write_bytes(b"no")
    ended = in_process("diagnose", model, folder, "-o", run, "--strict-images", "--batch-size", 1, *SIZE)
    assert_refused(ended, f"00{place}.png", "cannot be used")
    assert not (run / "summary.json").exists()


def test_images_of_which_none_can_be_used_are_refused(model: Path, run: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "broken", 2)
    for path in folder.iterdir():
        path.write_bytes(b"no")
    ended = in_process("diagnose", model, folder, "-o", run, *SIZE)
    assert_refused(ended, "None of the 2 images can be used", "000.png", folder=run)


def test_an_image_smaller_than_a_patch_is_skipped_and_says_so(model: Path, run: Path, tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "mixed", 2)
    write_pictures(tmp_path / "small", 1, side=15)
    shutil.copy(tmp_path / "small" / "000.png", folder / "small.png")
    done = assert_done(in_process("diagnose", model, folder, "-o", run, *SIZE), run)
    (skipped,) = done.config["images"]["skipped"]
    assert skipped["image"] == "small.png" and "smaller than one patch of 16x16" in skipped["reason"]


def test_a_size_smaller_than_a_patch_is_refused(model: Path, pictures: Path, run: Path) -> None:
    ended = in_process("diagnose", model, pictures, "-o", run, "--size", 15, "--device", "cpu")
    assert_refused(ended, "15x15", "smaller than one patch of 16x16", folder=run)


def test_the_edge_that_a_size_loses_is_said(model: Path, pictures: Path, run: Path) -> None:
    ended = in_process("diagnose", model, pictures, "-o", run, "--size", 40, "--device", "cpu", "--no-report")
    done = assert_done(ended, run)
    (note,) = [note for note in done.config["notes"] if "multiple of the patch" in note]
    assert "40x40" in note and "8 rows and 8 columns" in note
    assert ended.stderr.count(note) == 1
    assert set(done.heads["tokens"]) == {1 + 2 * 2}


def test_a_run_that_exists_is_left_alone(model: Path, pictures: Path, run: Path) -> None:
    assert_done(in_process("diagnose", model, pictures, "-o", run, *SIZE), run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ended = in_process("diagnose", model, pictures, "-o", run, *SIZE)
    assert_refused(ended, "--resume", "--overwrite")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    other = in_process("diagnose", model, pictures, "-o", run, "--resume", "--dtype", "bfloat16", *SIZE)
    assert_refused(other, "--dtype float32 → bfloat16")
    twin = write_checkpoint(run.parent / "twin", tiny_state(seed=1))  # the same architecture, other weights
    assert_refused(in_process("diagnose", twin, pictures, "-o", run, "--resume", *SIZE), "the model's weights")
    fewer = in_process("diagnose", model, pictures / "001.png", "-o", run, "--resume", *SIZE)
    assert_refused(fewer, "inputs", "cannot be resumed")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert_done(in_process("diagnose", model, pictures, "-o", run, "--overwrite", "--limit", 1, *SIZE), run)
    assert Run.open(run).heads["image"].nunique() == 1


@pytest.mark.parametrize("option", [(), ("--overwrite",), ("--resume",)], ids=["plain", "overwrite", "resume"])
def test_a_folder_of_somebody_elses_is_left_alone(
    option: tuple[str, ...], model: Path, pictures: Path, run: Path
) -> None:
    run.mkdir()
    (run / "thesis.txt").write_text("years of work")
    ended = in_process("diagnose", model, pictures, "-o", run, *option, *SIZE)
    assert_refused(ended, "no sinklab run")
    assert [path.name for path in run.iterdir()] == ["thesis.txt"]


def test_a_file_in_the_place_of_the_run_is_left_alone(model: Path, pictures: Path, run: Path) -> None:
    run.write_text("mine")
    assert_refused(in_process("diagnose", model, pictures, "-o", run, *SIZE), "is a file")
    assert run.read_text() == "mine"


def test_two_processes_cannot_write_into_one_folder(model: Path, pictures: Path, run: Path) -> None:
    with Run.create(run, settings={"options": {}}):
        ended = in_process("diagnose", model, pictures, "-o", run, "--overwrite", *SIZE)
    assert_refused(ended, "Another process is writing into")


def test_weights_of_another_architecture_are_refused_with_a_report(pictures: Path, run: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", tiny_state(), depth=3)
    ended = in_process("diagnose", model, pictures, "-o", run, *SIZE)
    assert_refused(ended, "do not fit", "missing", "blocks.2.", "matched", folder=run)
    wider = write_checkpoint(tmp_path / "wider", tiny_state(), embed_dim=64)
    assert_refused(in_process("diagnose", wider, pictures, "-o", run, *SIZE), "other shape", folder=run)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>please log in</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"hello", "safetensors"),
    ],
    ids=["empty", "page", "pointer", "text"],
)
def test_a_file_that_is_no_checkpoint_is_called_what_it_is(
    content: bytes, said: str, pictures: Path, run: Path, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "model")
    broken = model.with_suffix(".pth")
    broken.write_bytes(content)
    assert_refused(in_process("diagnose", broken, pictures, "-o", run, *SIZE), said, folder=run)


def test_nan_in_the_weights_marks_those_heads_and_the_report_says_so(pictures: Path, run: Path, tmp_path: Path) -> None:
    state = tiny_state()
    state["blocks.1.attn.qkv.weight"][0, 0] = torch.nan  # a query row of head 0: its z, and so the stream, turns NaN
    model = write_checkpoint(tmp_path / "model", state)
    ended = in_process("diagnose", model, pictures, "-o", run, "--size", PICTURE, "--device", "cpu")
    heads = assert_done(ended, run).heads
    assert heads[heads["layer"] == 0]["finite"].all()
    assert not heads[(heads["layer"] == 1) & (heads["head"] == 0)]["finite"].any()
    lost = heads[~heads["finite"]]
    assert (lost["sink_index"] == -1).all() and (lost["sink_kind"] == "none").all()
    assert lost[["inflow", "entropy", "stable_rank"]].isna().all().all()
    assert "not finite" in (run / "report.html").read_text()


def test_a_shape_that_the_position_table_cannot_meet_is_refused(pictures: Path, run: Path, tmp_path: Path) -> None:
    import open_clip

    told: dict[str, Any] = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "head_width": 32, "patch_size": 16},
    }
    clip = open_clip.CLIP(
        **told, text_cfg={"context_length": 8, "vocab_size": 16, "width": 32, "heads": 1, "layers": 1}
    )
    path = tmp_path / "clip.pth"
    torch.save(clip.state_dict(), path)
    path.with_suffix(".json").write_text(json.dumps({"model": "openclip:ViT-B-16", "kwargs": told}))
    ended = in_process("diagnose", path, pictures, "-o", run, "--size", 48, "--device", "cpu")
    assert_refused(ended, "32x32", "48x48", "--size native", folder=run)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--resume", "--overwrite"), "give one of them"),
        (("--epsilon", "0.3"), "--epsilon belongs to --rule strict"),
        (("--rule", "strict", "--mass", "0.3"), "--mass belongs to --rule mass"),
        (("--rule", "mass", "--attention", "0.5"), "--attention belongs to --rule relaxed"),
        (("--rule", "strict", "--epsilon", "0.6"), "0.6"),
        (("--attention", "0.4"), "0.4"),
        (("--layers", "2"), "Layer 2 does not exist"),
        (("--layers", "1-0"), "1-0"),
        (("--layers", "a"), "'a'"),
        (("--size", "big"), "'big'"),
        (("--batch-size", "0"), "at least one input"),
        (("--limit", "0"), "0"),
        (("--workers", "-1"), "-1"),
        (("--device", "tpu"), "'tpu'"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_that_cannot_be_met_is_named(
    options: tuple[str, ...], said: str, model: Path, pictures: Path, run: Path
) -> None:
    ended = in_process("diagnose", model, pictures, "-o", run, "--device", "cpu", "--size", PICTURE, *options)
    assert_refused(ended, said, folder=run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_named(model: Path, pictures: Path, run: Path) -> None:
    ended = in_process("diagnose", model, pictures, "-o", run, "--size", PICTURE, "--device", "cuda")
    assert_refused(ended, "no CUDA device", folder=run)


def test_a_report_of_what_is_no_run_is_refused(tmp_path: Path) -> None:
    assert_refused(in_process("report", tmp_path / "nowhere"), "There is no run folder")
    assert_refused(in_process("report", tmp_path), "not a sinklab run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with very little room, where this machine lets one be made."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can make a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let a small file system be made")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_said_and_leaves_no_half_written_file(
    model: Path, small_disk: Path, tmp_path: Path, in_a_full_run: Callable[[Path], None]
) -> None:
    run = small_disk / "run"
    ended = in_process("diagnose", model, write_pictures(tmp_path / "many", 12), "-o", run, "--batch-size", 1, *SIZE)
    assert_refused(ended, "the disk is full")
    in_a_full_run(run)


def test_a_file_size_limit_is_said_and_leaves_no_half_written_file(
    model: Path, run: Path, tmp_path: Path, in_a_full_run: Callable[[Path], None]
) -> None:
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); from sinklab.cli import main; main()"
    )
    words = ["diagnose", model, write_pictures(tmp_path / "many", 12), "-o", run, "--batch-size", 1, *SIZE]
    command = [sys.executable, "-c", limited, *map(str, words)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert_refused(ended, "cannot be written")
    in_a_full_run(run)


@pytest.fixture
def in_a_full_run() -> Callable[[Path], None]:
    def look(run: Path) -> None:
        assert not [path for path in run.rglob("*") if ".tmp-" in path.name]
        if (run / "run.json").exists():
            assert Run.open(run).config["status"] == "running"
            Run.open(run).parts()  # raises if one is damaged
        assert not (run / "report.html").exists()

    return look
