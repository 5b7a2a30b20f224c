"""`sinklab patch`: the same effects however the work is divided, interrupted or ordered; and its refusals."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import PICTURE, environment, in_process, sinklab, write_checkpoint, write_pictures

from sinklab.diagnosis import Diagnosis, open_run

OPTIONS = ("--no-report", "--device", "cpu")
KEYS = ["image", "layer", "head", "class", "joint", "edit"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of one model on the same pictures: a folder, a list in the other order, one picture unreadable."""
    folder = tmp_path_factory.mktemp("patching")
    write_checkpoint(folder)
    pictures = write_pictures(folder / "pictures", 12)
    (pictures / "005.png").write_bytes(b"not a picture")
    for name, backwards in (("forwards", False), ("backwards", True)):
        listed = sorted(pictures.iterdir(), reverse=backwards)
        (folder / f"{name}.txt").write_text("\n".join(str(path) for path in listed))
    rule = ("--rule", "mass", "--mass", "0.25", "--size", PICTURE, "--no-report", "--device", "cpu")
    for name in ("run", "forwards", "backwards"):
        images = pictures if name == "run" else f"@{folder / name}.txt"
        done = in_process("diagnose", folder / "tiny.safetensors", images, "-o", folder / name, *rule)
        assert done.returncode == 0, done.stderr
    return folder


def copy_of(place: Path, name: str, source: str = "run") -> Path:
    if (place / name).exists():
        shutil.rmtree(place / name)
    shutil.copytree(place / source, place / name)
    return place / name


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Diagnosis:
    done = in_process("patch", copy_of(place, "alone"), "--joint", *OPTIONS)
    assert done.returncode == 0, done.stderr
    return open_run(place / "alone")


def test_every_row_fired_and_names_its_donor(undisturbed: Diagnosis) -> None:
    effects = undisturbed.effects
    assert len(effects) > 60 and set(effects["edit"]) >= {"zero", "donor", "ordinary", "route", "zero_ordinary"}
    assert (effects["fired"] >= 1).all() and (effects["image"] != effects["donor"]).all()
    assert "005.png" not in {*effects["image"], *effects["donor"]}
    assert (effects["identity_error"] < 1e-5).all() and (effects["prefix_error"] < 1e-5).all()
    single = effects[effects["joint"] == 0]
    assert (single.loc[single["edit"] == "zero_ordinary", "edited_index"] >= 1).all()
    control = single["edit"] == "zero_ordinary"
    assert (single.loc[~control, "edited_index"] == single.loc[~control, "sink_index"]).all()
    assert (single.loc[control, "edited_index"] != single.loc[control, "sink_index"]).all()


def test_only_images_on_which_the_head_is_an_event_are_edited(undisturbed: Diagnosis) -> None:
    events = {(r.image, r.layer, r.head, r.class_causal) for r in undisturbed.sinks.itertuples()}
    single = undisturbed.effects[lambda table: table["joint"] == 0]
    edited = set(zip(single["image"], single["layer"], single["head"], single["class"], strict=True))
    held = set(undisturbed.config["patch"]["heldout"]["images"])
    chosen = {(h["class"], h["layer"], h["head"]) for h in undisturbed.config["patch"]["heads"]}
    assert edited == {e for e in events if e[0] not in held and (e[3], e[1], e[2]) in chosen}
    assert len(held) == 3 and not held & set(undisturbed.effects["image"])


def test_held_out_means_are_the_mean_value_of_held_out_events(place: Path, undisturbed: Diagnosis) -> None:
    """By hand: v at the sink of each held-out event, averaged; editing to it equals Edit.set_value."""
    import torch

    import sinklab as package
    from sinklab.data.images import find_images, open_image
    from sinklab.sinks.options import ScanOptions

    model = package.load(str(place / "alone"))
    transform, refs = ScanOptions(size=PICTURE).transform(model), list(find_images(str(place / "pictures")))
    pixels = {ref.id: transform(open_image(ref), ref.id)[None] for ref in refs if ref.id != "005.png"}

    class Values(package.Reader):
        def attention(self, site: object, call: object) -> None:
            self.v[site.layer] = call.v  # type: ignore[attr-defined]

    held = undisturbed.config["patch"]["heldout"]["images"]
    means = undisturbed.effects[lambda table: (table["edit"] == "mean") & (table["joint"] == 0)]
    row = means.iloc[0]
    events = undisturbed.sinks[
        lambda t: t["image"].isin(held) & (t["layer"] == row["layer"]) & (t["head"] == row["head"])
    ]
    collected = []
    for image, sink in zip(events["image"], events["sink_index"], strict=True):
        reader = Values()
        reader.v = {}  # type: ignore[attr-defined]
        with torch.inference_mode(), package.HookManager(model, reader) as hooks:
            hooks.run(pixels[image])
        collected.append(reader.v[row["layer"]][0, row["head"], sink].double())  # type: ignore[attr-defined]
    mean = torch.stack(collected).mean(0)
    edit = package.Edit.set_value(mean, head=(int(row["layer"]), int(row["head"])), at=int(row["sink_index"]))
    with torch.inference_mode(), package.HookManager(model) as hooks:
        before = hooks.run(pixels[row["image"]])[0].double()
        with hooks.edit([edit]):
            after = hooks.run(pixels[row["image"]])[0].double()
    counted = [token for token in range(1, 5) if token != row["sink_index"]]
    change = (after - before)[counted].norm() / before[counted].norm()
    assert row["patch_change"] == pytest.approx(float(change), rel=1e-4)


def test_two_processes_give_the_effects_of_one(place: Path, undisturbed: Diagnosis) -> None:
    from test_ranks import torchrun

    two = copy_of(place, "two")
    done = torchrun("patch", str(two), "--joint", *OPTIONS)
    assert done.returncode == 0, done.stderr
    pd.testing.assert_frame_equal(open_run(two).effects, undisturbed.effects, check_exact=True)
    assert (two / "tables/effects.csv").read_bytes() == (place / "alone/tables/effects.csv").read_bytes()
    assert {path.name[:8] for path in (two / "effects").glob("part-*")} == {"part-000", "part-001"}


def test_the_order_of_the_images_changes_nothing(place: Path) -> None:
    tables = []
    for name in ("forwards", "backwards"):
        done = in_process("patch", place / name, "--joint", *OPTIONS)
        assert done.returncode == 0, done.stderr
        effects = open_run(place / name).effects
        tables.append(effects.drop(columns="image_index").sort_values(KEYS, ignore_index=True))
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_workers_change_nothing_and_rows_at_once_change_rounding_only(place: Path, undisturbed: Diagnosis) -> None:
    done = sinklab("patch", copy_of(place, "workers"), "--joint", "--workers", "2", *OPTIONS)
    assert done.returncode == 0, done.stderr
    pd.testing.assert_frame_equal(open_run(place / "workers").effects, undisturbed.effects, check_exact=True)
    assert in_process("patch", copy_of(place, "rows"), "--joint", "--rows", "1", *OPTIONS).returncode == 0
    found, expected = open_run(place / "rows").effects, undisturbed.effects
    for column in ("patch_change", "cls_change", "shared_energy"):
        np.testing.assert_allclose(found[column], expected[column], rtol=1e-3, atol=1e-5)


def test_a_patching_killed_again_and_again_ends_as_an_undisturbed_one(place: Path, undisturbed: Diagnosis) -> None:
    run = copy_of(place, "killed")
    command = [sys.executable, "-m", "sinklab", "patch", str(run), "--joint", *OPTIONS, "--resume"]
    slow = environment(SINKLAB_TEST_SLOW="1")
    for wait in (4.0, 5.0, 6.0):
        process = subprocess.Popen(command, env=slow, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = sinklab("patch", run, "--joint", *OPTIONS, "--resume")
    assert done.returncode == 0, done.stderr
    pd.testing.assert_frame_equal(open_run(run).effects, undisturbed.effects, check_exact=True)
    assert (run / "tables/effects.csv").read_bytes() == (place / "alone/tables/effects.csv").read_bytes()


def test_a_second_patching_is_refused_replaced_or_gone_on_with(place: Path) -> None:
    run = copy_of(place, "again", "alone")
    before = (run / "tables/effects.csv").read_bytes()
    refused = in_process("patch", run, *OPTIONS)
    assert refused.returncode == 2 and "patched already" in refused.stderr
    other = in_process("patch", run, "--resume", "--seed", "1", "--joint", *OPTIONS)
    assert other.returncode == 2 and "seed 0 → 1" in other.stderr
    same = in_process("patch", run, "--resume", "--joint", *OPTIONS)
    assert same.returncode == 0 and (run / "tables/effects.csv").read_bytes() == before
    replaced = in_process("patch", run, "--overwrite", "--edits", "zero,route", "--class", "broadcast", *OPTIONS)
    assert replaced.returncode == 0, replaced.stderr
    assert set(open_run(run).effects["edit"]) == {"zero", "route"}


def test_a_folder_of_held_out_images_gives_the_means(place: Path) -> None:
    away = write_pictures(place / "away", 5, side=52)
    run = copy_of(place, "folder")
    done = in_process("patch", run, "--heldout", away, *OPTIONS)
    assert done.returncode == 0, done.stderr
    about = open_run(run).config["patch"]
    assert about["images"]["heldout"] == 5 and about["heldout"]["images"] == []
    assert "mean" in set(open_run(run).effects["edit"])
    same = in_process("patch", copy_of(place, "folder2"), "--heldout", place / "pictures", *OPTIONS)
    assert same.returncode == 2 and "not edited" in same.stderr


def test_a_plan_is_made_in_every_image(place: Path) -> None:
    (place / "plan.toml").write_text(
        '[[edits]]\nedit = "zero"\nlayer = 0\nhead = 1\nat = "sink"\n\n'
        '[[edits]]\nedit = "scale"\nfactor = 0.5\nlayer = 1\nhead = 0\nat = "patch"\n'
    )
    run = copy_of(place, "planned")
    both = in_process("patch", run, "--plan", place / "plan.toml", "--heads", "0:1", *OPTIONS)
    assert both.returncode == 2 and "takes the place of the battery" in both.stderr
    done = in_process("patch", run, "--plan", place / "plan.toml", *OPTIONS)
    assert done.returncode == 0 and "is judged" not in done.stderr, done.stderr
    effects = open_run(run).effects
    assert len(effects) == 11 and (effects["fired"] == 5).all() and (effects["patch_change"] > 0).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads", "0"], "layer:head pairs"),
        (["--heads", "9:9"], "no event of class"),
        (["--plan", "nowhere.json"], "no plan"),
        (["--edits", "melt"], "not melt"),
        (["--edits", "zero,zero"], "twice"),
        (["--class", "sunk"], "not sunk"),
        (["--heldout", "2"], "between 0 and 1"),
        (["--heldout", "nowhere"], "no 'nowhere'"),
        (["--metric", "beauty"], "not beauty"),
        (["--bootstrap", "0"], "from 1 on"),
        (["--plan", "nowhere.json"], "no plan"),
        (["--labels", "nowhere.csv"], "no file"),
        (["--resume", "--overwrite"], "give one of them"),
    ],
)
def test_what_does_not_fit_is_a_sentence_and_leaves_the_run_as_it_was(place: Path, words: list[str], said: str) -> None:
    run = place / "run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = in_process("patch", run, *words, *OPTIONS)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--workers", "-1"], "workers is 0 or more"), (["--plan", "huge.json"], "makes the final tokens not finite")],
)
def test_a_refused_overwriting_keeps_what_is_there_or_says_that_it_runs(
    place: Path, undisturbed: Diagnosis, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (place / "huge.json").write_text('[{"edit": "scale", "factor": 1e38, "layer": 0, "head": 0, "at": "patch"}]')
    run = copy_of(place, "kept", "alone")
    before = (run / "tables/effects.csv").read_bytes()
    done = in_process("patch", run, "--overwrite", *words, *OPTIONS)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    status = json.loads((run / "run.json").read_text())["patch"]["status"]
    if status == "complete":
        assert (run / "tables/effects.csv").read_bytes() == before
    else:
        assert status == "running" and not (run / "tables/effects.csv").exists()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("000.png,1000", "the classes are 0 to 999"),
        ("other.png,1", "None of the 1 labelled images"),
        ("000.png,-1", "Line 2"),
        ("000.png,1.7", "Line 2"),
        ("000.png,1\n000.png,2", "Line 3"),
        ("000.png,inf", "Line 2"),
        ("", "needs rows"),
    ],
)
def test_labels_that_do_not_fit_are_a_sentence(place: Path, rows: str, said: str) -> None:
    (place / "labels.csv").write_text(f"image,label\n{rows}\n")
    done = in_process("patch", place / "run", "--labels", place / "labels.csv", *OPTIONS)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert "patch" not in json.loads((place / "run" / "run.json").read_text())


def test_a_run_in_a_folder_called_demo_is_patched_with_its_own_model(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of(place, "demo")
    monkeypatch.chdir(place)
    done = in_process("patch", "demo", "--edits", "zero", *OPTIONS)
    assert done.returncode == 0, done.stderr


def test_one_image_is_edited_where_no_donor_is_needed(place: Path) -> None:
    one = write_pictures(place / "one", 1)
    options = ("--rule", "mass", "--mass", "0.25", "--size", PICTURE, *OPTIONS)
    assert in_process("diagnose", place / "tiny.safetensors", one, "-o", place / "single", *options).returncode == 0
    refused = in_process("patch", place / "single", *OPTIONS)
    assert refused.returncode == 2 and "With one image none can be held out" in refused.stderr
    done = in_process("patch", place / "single", "--edits", "zero,route", *OPTIONS)
    assert done.returncode == 0, done.stderr
    effects = open_run(place / "single").effects
    assert (effects["donor"] == "").all() and effects["donor_cosine"].isna().all() and len(effects) > 0


def test_another_model_or_other_images_are_refused(place: Path) -> None:
    run = copy_of(place, "moved")
    empty = write_pictures(place / "others", 3)
    assert "not those of the run" in in_process("patch", run, empty, *OPTIONS).stderr
    config = json.loads((run / "run.json").read_text())
    config["settings"]["model"]["weights"] = "0" * 64
    (run / "run.json").write_text(json.dumps(config))
    done = in_process("patch", run, *OPTIONS)
    assert done.returncode == 2 and "another model" in done.stderr
    assert in_process("patch", place / "nowhere", *OPTIONS).returncode == 2


def test_a_locked_run_is_refused(place: Path) -> None:
    from sinklab.atomic import FolderLock

    run = copy_of(place, "locked")
    lock = FolderLock(run)
    try:
        done = sinklab("patch", run, *OPTIONS)
    finally:
        lock.release()
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "patch" not in json.loads((run / "run.json").read_text())
