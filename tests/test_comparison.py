"""`sinklab compare` of vision transformers: Tables 14 and 15 are means over seeds of what each run's heads say."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import stdev

import pandas as pd
import pytest
from command_line import in_process, write_pictures

from sinklab.comparison import diagnosed, sink_counts, table_14, table_15
from sinklab.diagnosis import open_run
from sinklab.errors import InputError
from sinklab.reports.variants import Compared, differing_images
from sinklab.run import Run
from sinklab.sinks.rule import SinkRule
from sinklab.training.compare import differing_budgets

SETTINGS = (
    *("image=16", "dim=12", "depth=2", "heads=2", "views=2", "projector_hidden=8", "projector_dim=4", "slices=8"),
    *("batch=4", "epochs=1", "warmup_epochs=0.5", "procedural=8", "validation_images=4", "score_images=2"),
    *("score_every=2", "record_every=1"),
)
SMALL = ["vit", "--device", "cpu", *(word for change in SETTINGS for word in ("--set", change))]
ARMS = ("gated-global-penalty-registers-tiny", "baseline-tiny")
"""Not in the order of the alphabet, which is not that of the configs."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms and two seeds, diagnosed under a rule that the smallest inflow of these networks meets."""
    path = tmp_path_factory.mktemp("trained") / "run"
    words = [word for arm in ARMS for word in ("--config", arm)]
    for command in (
        ["train", *SMALL, *words, "--seeds", "0-1", "-o", path],
        ["diagnose", path, "--device", "cpu", "--rule", "mass", "--mass", "0.25", "--no-report"],
    ):
        ended = in_process(*command)
        assert ended.returncode == 0, ended.stderr
    return path


def test_cells_are_means_over_seeds_of_the_events_that_the_heads_show(trained: Path) -> None:
    counts = sink_counts(diagnosed([trained]))
    table = table_14(counts, "mass").set_index(["arm", "definition", "kind"])
    for arm in ARMS:
        per_image = []
        for seed in (0, 1):
            heads = open_run(trained / "diagnosed" / f"seed-{seed}" / arm).heads
            heads = heads[heads["layer"] > 0]
            events = heads["inflow"].astype(float) >= 0.25
            per_image.append((events.sum() / 4, (events & (heads["value_ratio_head"] <= 0.2)).sum() / 4))
        row = table.loc[(arm, "counts", "all")]
        assert row["all"] == pytest.approx((per_image[0][0] + per_image[1][0]) / 2)
        assert row["nop"] == pytest.approx((per_image[0][1] + per_image[1][1]) / 2)
        assert row["nop_std"] == pytest.approx(stdev(nop for _, nop in per_image))
        assert (row["seeds"], row["images"], row["not_finite"], row["rule"]) == (2, 4, 0, "mass ≥ 0.25")
    rules = table_15(counts)
    assert list(dict.fromkeys(rules["rule"]))[:2] == ["relaxed", "mass ≥ 0.25"] and len(rules) == 2 * 6 * 2


def test_tables_are_printed_and_written(trained: Path, tmp_path: Path) -> None:
    ended = in_process("compare", trained, "-o", tmp_path / "c.csv")
    assert ended.returncode == 0, ended.stderr
    assert "rule mass ≥ 0.25, by token (Table 14)" in ended.stdout and "(Table 15)" in ended.stdout
    assert (
        "less: seeds where it is below 0" in ended.stdout
        and "common_mode: mean share over blocks from 1" in ended.stdout
    )
    assert " ± " in ended.stdout.split("(Table 14)")[1].split("(Table 15)")[0]
    assert "note:" not in ended.stderr
    results = pd.read_csv(tmp_path / "c.csv")
    assert set(results["measure"]) == {"probe_accuracy", "probe_loss", "common_mode"}
    own = pd.read_csv(trained / "tables/training.csv")
    mean = own[(own["metric"] == "common_mode") & (own["layer"] > 0)].groupby(["arm", "seed"])["value"].mean()
    shares = results[results["measure"] == "common_mode"].set_index(["arm", "seed"])["value"]
    assert shares.sort_index().to_dict() == pytest.approx(mean.sort_index().to_dict())
    for name in ("table14", "table15"):
        assert list(dict.fromkeys(pd.read_csv(tmp_path / f"c-{name}.csv")["arm"])) == list(ARMS)


def test_diagnosed_runs_are_compared_by_themselves_and_seeds_told_from_their_names(trained: Path) -> None:
    paths = [trained / "diagnosed" / f"seed-{seed}" / ARMS[0] for seed in (0, 1)]
    found = diagnosed(paths)
    assert [(one.arm, one.seed) for one in found] == [(ARMS[0], 0), (ARMS[0], 1)]
    ended = in_process("compare", *paths)
    assert ended.returncode == 0 and "Over seeds" not in ended.stdout and "(Table 14)" in ended.stdout
    assert set(table_15(sink_counts(found))["seeds"]) == {2}  # an arm's seeds may lie in folders of their own
    with pytest.raises(InputError, match="given twice"):
        diagnosed([paths[0], paths[0]])
    ended = in_process("compare", trained, paths[0])
    assert ended.returncode == 2 and "compared with training runs" in ended.stderr


def test_the_trainings_own_page_has_the_same_tables(trained: Path, tmp_path: Path) -> None:
    ended = in_process("report", trained)
    assert ended.returncode == 0 and ended.stdout.strip() == str(trained / "report.html"), ended.stderr
    ended = in_process("compare", trained, "-o", tmp_path / "c.csv")
    assert ended.returncode == 0, ended.stderr
    for name in ("table14", "table15"):
        assert (trained / f"tables/{name}.csv").read_bytes() == (tmp_path / f"c-{name}.csv").read_bytes()


def test_runs_under_two_rules_are_refused(trained: Path) -> None:
    found = diagnosed([trained])
    other = trained.parent / "other"
    ended = in_process("diagnose", trained / "training/seed-0" / ARMS[0], "--device", "cpu", "--no-report", "-o", other)
    assert ended.returncode == 0, ended.stderr
    with pytest.raises(InputError, match=r"these runs have 2: mass ≥ 0\.25 \(.*\); relaxed \(.*other\)\."):
        diagnosed([found[0].run.path, other])
    assert SinkRule.from_dict(found[0].run.config["rule"]) == SinkRule.mass(0.25)


def test_runs_of_different_images_are_refused_before_anything_is_said(trained: Path, tmp_path: Path) -> None:
    run, member = tmp_path / "run", f"seed-1/{ARMS[0]}"
    shutil.copytree(trained, run)
    photos = write_pictures(tmp_path / "photos", 3)
    mass = ("--device", "cpu", "--rule", "mass", "--mass", "0.25", "--no-report", "--overwrite")
    ended = in_process("diagnose", run / "training" / member, photos, *mass, "-o", run / "diagnosed" / member)
    assert ended.returncode == 0, ended.stderr
    ended = in_process("compare", run, "-o", tmp_path / "c.csv")
    assert ended.returncode == 2 and ended.stdout == "" and not (tmp_path / "c.csv").exists()
    assert f"{run}/{member} on 3 images ({photos})" in ended.stderr
    assert f"{run}/seed-1/{ARMS[1]} on 4 images (drawn pictures" in ended.stderr
    ended = in_process("report", run)
    assert ended.returncode == 0, ended.stderr
    assert "diagnosed on different images" in (run / "report.html").read_text(encoding="utf-8")
    assert not (run / "tables/table14.csv").exists()


def test_members_that_were_not_diagnosed_are_named(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / f"diagnosed/seed-1/{ARMS[1]}")
    ended = in_process("compare", run)
    assert ended.returncode == 0, ended.stderr
    assert f"not diagnosed, and so not in Tables 14 and 15: {run}/seed-1/{ARMS[1]}." in ended.stderr


def test_heads_that_are_not_finite_are_counted_and_said(trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run, member = tmp_path / "run", f"seed-1/{ARMS[1]}"
    shutil.copytree(trained, run)
    path = run / "training" / member / "model.safetensors"
    weights = load_file(path)
    weights["blocks.1.attn.qkv.weight"][:] = float("nan")
    save_file(weights, path)
    mass = ("--device", "cpu", "--rule", "mass", "--mass", "0.25", "--overwrite")
    ended = in_process("diagnose", run, *mass)
    assert ended.returncode == 0, ended.stderr
    ended = in_process("compare", run, "-o", tmp_path / "c.csv")
    assert ended.returncode == 0, ended.stderr
    said = f"{member}: 8 of 8 (image, head) pairs in layers from 1 on are not finite and count as no sink."
    assert said in ended.stderr and said in (run / "report.html").read_text(encoding="utf-8")
    table = pd.read_csv(tmp_path / "c-table15.csv").set_index(["arm", "rule", "definition"])
    assert table.loc[(ARMS[1], "relaxed", "counts"), "not_finite"] == 0.5  # one of two seeds
    assert table.loc[(ARMS[0], "relaxed", "counts"), "not_finite"] == 0


def test_tasks_are_compared_on_as_many_sequences_each_of_their_own(tmp_path: Path) -> None:
    """Every seed of a controlled task draws its own sequences: their lists differ, their number has not to."""

    def one(seed: int, count: int) -> Compared:
        images = {"count": count, "noun": "sequence", "list_sha256": str(seed), "sources": [f"nop, seed {seed}"]}
        run = Run.create(tmp_path / f"{seed}-{count}", settings={})
        run.update(model={"family": "toy"}, images=images)
        run.close()
        return Compared(run=run, source="r", arm="nop", seed=seed, member=f"seed-{seed}/nop")

    assert differing_images([one(0, 16), one(1, 16)]) == ""
    said = differing_images([one(2, 16), one(3, 8)])
    assert "seed-2/nop on 16 sequences" in said and "seed-3/nop on 8 sequences" in said


def test_vision_transformers_that_were_not_trained_alike_are_told_apart(tmp_path: Path) -> None:
    def run(name: str, **changes: int) -> Path:
        configs = {arm: {"variant": arm, "registers": at, "epochs": 2, "lr": 0.1} for at, arm in enumerate("ab")}
        with Run.create(tmp_path / name, settings={"configs": {a: {**c, **changes} for a, c in configs.items()}}):
            return tmp_path / name

    assert differing_budgets([run("one"), run("again")]) == []
    assert differing_budgets([tmp_path / "one", run("longer", epochs=8)]) == ["epochs 2, 8"]
