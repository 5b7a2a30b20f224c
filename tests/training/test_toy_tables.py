"""The tables of a training say what its evaluations say: differences and means, worked out again in other ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from sinklab.run import Run
from sinklab.training.budget import budget
from sinklab.training.loop import read_metrics
from sinklab.training.toy import load_toy, train_toy
from sinklab.training.toy_claims import pathway_claims
from sinklab.training.toy_config import TrainConfig, make_config, members
from sinklab.training.toy_tables import over_seeds
from sinklab.training.toy_views import components

TINY = ("tokens=6", "dim=8", "steps=6", "batch=4", "record_every=2", "score_every=2", "checkpoint_every=6")
FEW = ("evaluation_batches=3", "evaluation_size=8")


def tiny(kind: str, *more: str) -> TrainConfig:
    wide = ("hidden=16",) if kind in ("broadcast", "pathway") else ()
    return make_config(kind, "laptop", [*TINY, *FEW, *wide, *more])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One finished run a task, of two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        kind: train_toy(folder / kind, tiny(kind), [0, 1]) for kind in ("nop", "nop-branch", "broadcast", "pathway")
    }


def number(run: Run, seed: int, arm: str, layer: int, edit: str, metric: str) -> float:
    table = run.table("training")
    keys = {"seed": seed, "arm": arm, "layer": layer, "edit": edit, "metric": metric}
    found = table[(table[list(keys)] == pd.Series(keys)).all(axis=1)]["mean"]
    assert len(found) == 1
    return float(found.iloc[0])


def test_the_growth_of_the_error_is_the_difference_of_two_task_errors(runs: dict[str, Run]) -> None:
    run = runs["pathway"]
    table = run.table("pathway")
    assert list(table["arm"].unique()) == ["attention", "global", "global+penalty"]
    for row in table[table["level"] == "seed"].to_dict("records"):
        plain = number(run, row["seed"], row["arm"], -1, "baseline", "task_mse")
        without = number(run, row["seed"], row["arm"], 1, "attention_off", "task_mse")
        assert row["delta_mse_without_attention"] == pytest.approx(without - plain, abs=1e-12)
        assert row["task_mse"] == plain
        if row["arm"] == "attention":
            assert math.isnan(row["delta_mse_without_global"]) and math.isnan(row["donor_cosine_global"])
        else:
            without = number(run, row["seed"], row["arm"], 1, "pathway_off", "task_mse")
            assert row["delta_mse_without_global"] == pytest.approx(without - plain, abs=1e-12)


@pytest.mark.parametrize(("kind", "name", "column"), [
    ("nop", "table2", "delta_rms_nop"), ("broadcast", "table3", "delta_rms"), ("pathway", "pathway", "inflow_1"),
])  # fmt: skip
def test_a_mean_row_is_the_mean_of_its_seeds_with_their_standard_error(
    runs: dict[str, Run], kind: str, name: str, column: str
) -> None:
    table = runs[kind].table(name)
    keys = [key for key in ("arm", "layer", "edit") if key in table]
    seeds = table[table["level"] == "seed"].groupby(keys)[column]
    means = table[table["level"] == "mean"].set_index(keys)
    assert (means["seeds"] == 2).all() and means["seed"].isna().all()
    for key, values in seeds:
        row = means.loc[key if len(keys) > 1 else key[0]]  # type: ignore[index]
        assert row[column] == pytest.approx(values.mean(), nan_ok=True)
        assert row[f"{column}_sem"] == pytest.approx(values.sem(), nan_ok=True)


def test_one_seed_has_no_spread_over_seeds_and_no_number_stays_none() -> None:
    table = over_seeds([({"edit": "zero"}, 4, {"a": (2.0, 0.5), "b": (math.nan, math.nan)})])
    assert table["a"].tolist() == [2.0, 2.0] and table["a_sem"].tolist() == [0.5, 0.0] and table["b"].isna().all()


def test_the_curves_are_the_metrics_line_by_line(runs: dict[str, Run]) -> None:
    run = runs["broadcast"]
    curves = run.table("curves")
    for name in run.config["members"]:
        lines = read_metrics(run.path / "training" / name / "metrics.jsonl")
        mine = curves[curves["member"] == name]
        assert mine["step"].tolist() == [line["step"] for line in lines] == [2, 4, 6]
        assert mine["loss"].tolist() == [line["loss"] for line in lines]
        assert mine["sink_1"].tolist() == [line["sink_1"] for line in lines]


@pytest.mark.parametrize("kind", ["nop", "nop-branch", "broadcast", "pathway"])
def test_the_spectrum_is_that_of_the_saved_weights(runs: dict[str, Run], kind: str) -> None:
    run = runs[kind]
    table = run.table("spectrum_training")
    for name in run.config["members"]:
        held = load_toy(run.path / "training" / name / "model.safetensors")
        for layer, block in enumerate(held.model.blocks):
            q, k = block.attention.q_proj.weight, block.attention.k_proj.weight  # type: ignore[union-attr]
            expected = torch.linalg.svdvals((q.T @ k).double())
            mine = table[(table["seed"] == held.seed) & (table["arm"] == held.arm) & (table["layer"] == layer)]
            assert mine["rank"].tolist() == list(range(1, 9))
            assert torch.allclose(torch.tensor(mine["sigma"].to_numpy()), expected, rtol=1e-4, atol=1e-5)
            assert mine["share"].sum() == pytest.approx(1)


def test_principal_components_are_those_of_the_singular_value_decomposition() -> None:
    points = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.arange(1, 7)
    places, shares = components(points)
    centred = points - points.mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    assert torch.allclose(places.abs(), (u * s)[:, :2].abs())
    assert torch.allclose(shares, s.square()[:2] / s.square().sum())


def test_points_on_a_line_lie_on_the_first_component_alone() -> None:
    points = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None] * torch.tensor([[3.0, 4.0]])
    places, shares = components(points)
    assert shares[0] == pytest.approx(1) and torch.allclose(places[:, 1], torch.zeros(9, dtype=torch.float64))
    assert torch.allclose(places[:, 0], torch.linspace(-5, 5, 9, dtype=torch.float64))


def test_queries_and_keys_mark_the_source_of_every_sequence_once(runs: dict[str, Run]) -> None:
    run = runs["broadcast"]
    table = run.table("qk_pca")
    marked = table[table["source"]].groupby(["seed", "arm", "layer", "role", "sequence"]).size()
    assert (marked == 1).all() and len(marked) == 2 * 2 * 2 * 12
    held = load_toy(run.path / "training/seed-1/broadcast/model.safetensors")
    sources = held.task.sources(held.task.batch(0, 256, purpose="evaluation").x)[:12]  # type: ignore[union-attr]
    mine = table[(table["seed"] == 1) & (table["layer"] == 0) & (table["role"] == "key") & table["source"]]
    assert mine["token"].tolist() == sources.tolist()
    assert ((table["explained_1"] >= table["explained_2"]) & (table["explained_1"] <= 1)).all()


def test_stable_ranks_lie_between_one_and_the_number_of_tokens(runs: dict[str, Run]) -> None:
    table = runs["pathway"].table("stable_ranks")
    assert len(table) == 2 * 3 * 2 * 256 and table["stable_rank"].between(1 - 1e-9, 6).all()


def test_claims_are_checked_for_every_seed_and_only_where_their_arms_are(runs: dict[str, Run], tmp_path: Path) -> None:
    for kind, each in (("nop", 8), ("broadcast", 4), ("pathway", 3)):
        table = runs[kind].table("claims")
        assert table.groupby("seed").size().to_dict() == {0: each, 1: each}
        inside = (table["low"] <= table["value"]) & (table["value"] <= table["high"])
        assert (table["holds"] == inside).all()
    alone = train_toy(tmp_path, tiny("pathway", "trained=attention"), [0])
    assert len(alone.table("claims")) == 0 and len(alone.table("pathway")) == 2


def test_a_pathway_that_does_no_work_confirms_nothing() -> None:
    """Neither branch matters: their ratio would be a small negative number, and a limit from above would hold it."""

    def row(layer: int, edit: str, metric: str, mean: float) -> dict[str, Any]:
        return {"layer": layer, "edit": edit, "metric": metric, "mean": mean}

    rows = [row(-1, "baseline", "task_mse", 1.0), row(1, "attention_off", "task_mse", 1.5),
            row(1, "pathway_off", "task_mse", 0.9), row(1, "baseline", "inflow", 0.1)]  # fmt: skip
    assert not pathway_claims({"global": rows, "global+penalty": rows})[2].holds


def test_a_plain_branch_training_has_a_twin_in_which_nothing_is_flagged(runs: dict[str, Run]) -> None:
    run = runs["nop-branch"]
    assert run.config["members"][:2] == ["seed-0/nop-branch", "seed-0/nothing-flagged"]
    table = run.table("training")
    flagged = table[(table["arm"] == "nothing-flagged") & (table["metric"] == "attention_flagged")]["mean"]
    assert len(flagged) == 2 and flagged.isna().all()
    weights = [run.config["first_weights"][name] for name in run.config["members"][:2]]
    assert weights[0] == weights[1]


def test_the_twin_can_be_left_out_and_no_sweep_has_one() -> None:
    assert len(members(tiny("nop-branch", "beside=false"), [0])) == 1
    assert len(members(tiny("nop-branch", "threshold=10"), [0])) == 1
    assert [member.arm for member in members(tiny("nop-branch", "dampings=0,1"), [0], "damping")] == [
        "gamma=0", "gamma=1",
    ]  # fmt: skip


def test_the_points_of_a_sweep_stand_in_its_curves(tmp_path: Path) -> None:
    config = tiny("nop-branch", "frequencies=0.2,0.5", "frequency_steps=4")
    curves = train_toy(tmp_path, config, [0], sweep="frequency").table("curves")
    assert curves.groupby("arm")["point"].first().to_dict() == pytest.approx({"p=0.200": 0.2, "p=0.500": 0.5})


def test_a_budget_names_its_variant_what_differs_and_its_share_of_the_papers() -> None:
    found = budget(make_config("nop", "laptop", ["steps=800"]))
    assert (found["variant"], found["changed"]) == ("laptop", {"steps": 800})
    assert found["of_paper"] == pytest.approx(800 * 64 / (30_000 * 1024))
    uniform = budget(make_config("pathway", "e1"))
    assert (uniform["variant"], uniform["changed"], uniform["chosen"]["penalty_layers"]) == ("paper", {}, "mean")
    for kind in ("nop", "nop-branch", "broadcast", "pathway"):
        assert budget(make_config(kind, "paper"))["of_paper"] == 1
    swept = budget(make_config("nop-branch", "paper"), "frequency")
    assert (swept["steps"], swept["of_paper"]) == (20_000, 1)
