"""`sinklab compare` of vision transformers: Tables 14 and 15 are means over seeds of what each run's heads say."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from command_line import in_process

from sinklab.comparison import diagnosed, sink_counts, table_14, table_15
from sinklab.diagnosis import open_run
from sinklab.errors import InputError
from sinklab.sinks.rule import SinkRule

SETTINGS = (
    *("image=16", "dim=12", "depth=2", "heads=2", "views=2", "projector_hidden=8", "projector_dim=4", "slices=8"),
    *("batch=4", "epochs=1", "warmup_epochs=0.5", "procedural=8", "validation_images=4", "score_images=2"),
    *("score_every=2", "record_every=1"),
)
SMALL = ["vit", "--device", "cpu", *(word for change in SETTINGS for word in ("--set", change))]
ARMS = ("baseline-tiny", "gated-global-penalty-registers-tiny")


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
        assert row["seeds"] == 2
    rules = table_15(counts)
    assert list(dict.fromkeys(rules["rule"]))[:2] == ["relaxed", "mass"] and len(rules) == 2 * 6 * 2


def test_tables_are_printed_and_written(trained: Path, tmp_path: Path) -> None:
    ended = in_process("compare", trained, "-o", tmp_path / "c.csv")
    assert ended.returncode == 0, ended.stderr
    assert "(Table 14)" in ended.stdout and "(Table 15)" in ended.stdout
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
    with pytest.raises(InputError, match="these runs have 2"):
        diagnosed([found[0].run.path, other])
    assert SinkRule.from_dict(found[0].run.config["rule"]) == SinkRule.mass(0.25)
