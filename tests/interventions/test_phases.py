"""Interventions where values are phases: what each edit does to the resultant, the pull and the circle, in float64."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from phase_models import handle, ids, kuramoto
from torch import Tensor

import sinklab
from sinklab.errors import InputError
from sinklab.hooks.change import Changes
from sinklab.hooks.manager import HookManager, Reader
from sinklab.hooks.seam import AttentionCall
from sinklab.interventions.checks import own_error
from sinklab.interventions.design import EDITS, PHASE_EDITS
from sinklab.interventions.options import PatchOptions
from sinklab.interventions.values import Values, circular_mean, require_on_circle


class Call(Reader):
    """Layer 1's call and phases."""

    def resid_pre(self, site: Any, x: Tensor) -> None:
        self.theta = x

    def attention(self, site: Any, call: AttentionCall) -> None:
        self.call, self.phase = call, site.parts.phase


def caught(**changes: Any) -> Call:
    reader = Call()
    with torch.no_grad(), HookManager(kuramoto(phase_std=1.5, **changes), reader, layers=[1]) as hooks:
        hooks.run(ids())
    return reader


ROWS, HEADS, KEYS = torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([3, 0])


def test_null_leaves_exactly_the_pull_of_all_other_keys() -> None:
    """a'_i = Σ_{u≠s} A_iu sin(θ_u − θ_i), written out pair by pair; the rows are not brought back to sum 1."""
    seen = caught()
    changes = Changes(seen.call)
    changes.give_own(ROWS, HEADS, KEYS)
    z = changes.applied(seen.call.z)
    a = seen.phase.tangent(z, seen.call.v)
    pattern = seen.call.pattern()
    for row, head, key in zip(ROWS.tolist(), HEADS.tolist(), KEYS.tolist(), strict=True):
        theta = seen.theta[row, :, 3 * head : 3 * head + 3]
        kept = pattern[row, head].clone()
        kept[:, key] = 0
        expected = torch.einsum("ij,ijm->im", kept, (theta[None] - theta[:, None]).sin())
        torch.testing.assert_close(a[row, head], expected, rtol=1e-12, atol=1e-13)
    untouched = torch.ones(2, 2, dtype=torch.bool)
    untouched[ROWS, HEADS] = False
    assert torch.equal(z[untouched], seen.call.z[untouched])


def test_to_drop_the_sink_from_the_resultant_pulls_like_null() -> None:
    """One's own phase pulls nowhere: zero and null differ in G, and not in what follows from it."""
    seen, moved = caught(), []
    for ask in ("zero", "null"):
        changes = Changes(seen.call)
        if ask == "null":
            changes.give_own(ROWS, HEADS, KEYS)
        else:
            changes.set_value(ROWS, HEADS, KEYS, torch.zeros(2, 6, dtype=torch.float64))
        moved.append(changes.applied(seen.call.z))
    assert float((moved[0] - moved[1]).abs().max()) > 1e-3
    a = [seen.phase.tangent(z, seen.call.v) for z in moved]
    torch.testing.assert_close(a[0], a[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("changes", [{}, {"values": "rotated"}, {"tangent": "none"}])
def test_the_identity_of_null_holds_and_notices_what_is_wrong(changes: dict[str, Any]) -> None:
    seen = caught(**changes)
    asked = Changes(seen.call)
    asked.give_own(ROWS, HEADS, KEYS)
    before, after = seen.call.z[ROWS, HEADS], asked.applied(seen.call.z)[ROWS, HEADS]
    pairs = seen.call.pairs(ROWS, HEADS)
    assert float(own_error(pairs, before, after, KEYS, seen.phase).max()) < 1e-14
    assert float(own_error(pairs, before, before, KEYS, seen.phase).min()) > 1e-4
    assert float(own_error(pairs, before, after, KEYS + 1, seen.phase).min()) > 1e-4


def test_a_head_that_reads_its_own_takes_no_other_edit() -> None:
    seen = caught()
    changes = Changes(seen.call)
    changes.give_own(ROWS, HEADS, KEYS)
    changes.hide(ROWS[:1], HEADS[:1], KEYS[:1])
    with pytest.raises(InputError, match="takes no other edit"):
        changes.applied(seen.call.z)


def unit(*angles: float) -> np.ndarray:
    return np.concatenate([np.cos(angles), np.sin(angles)])


def test_the_mean_of_phases_lies_on_the_circle_between_them() -> None:
    mean = circular_mean([unit(3.0, 0.1, 0.0), unit(-3.0, 0.3, math.pi)])
    np.testing.assert_allclose(mean, unit(math.pi, 0.2, 0.0), atol=1e-12)  # the last two cancel
    np.testing.assert_allclose(np.hypot(*np.split(mean, 2)), 1, rtol=0, atol=1e-15)


def test_a_value_off_the_circle_is_refused() -> None:
    row = {"image_index": 0, "layer": 0, "head": 0, "what": "sink", "for_index": -1}
    table = pd.DataFrame([row | {"vector": 1.5 * unit(0.1, 0.2)}])
    with pytest.raises(InputError, match="off the circle by 5.0e-01"):
        Values(table, [0], phases=True)
    require_on_circle(unit(1.0, 2.0), "a test")


def test_null_is_of_the_battery_of_phases_and_of_no_other() -> None:
    options, phases = PatchOptions(), handle(kuramoto())
    assert options.fitting(phases).edits == PHASE_EDITS
    assert PatchOptions(edits=("null", "route")).fitting(phases).edits == ("null", "route")
    toy = sinklab.load("toy:nop")
    assert options.fitting(toy).edits == EDITS
    with pytest.raises(InputError, match="null gives every query its own phases"):
        PatchOptions(edits=("null",)).fitting(toy)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("phases")
    (folder / "letters.txt").write_text("".join(random.Random(0).choices("abcdefghijk", k=6000)))
    model = handle(kuramoto(phase_std=1.5))
    options: dict[str, Any] = {"text": folder / "letters.txt", "limit": 8, "report": False}
    run = sinklab.diagnose(model, output=folder / "run", rule=sinklab.SinkRule.mass(threshold=0.05), **options)
    classes = ["nop", "broadcast", "intermediate"]
    return sinklab.patch(run, model, classes=classes, metrics=["patch"], min_events=1, report=False, bootstrap=20)


def test_every_edit_of_a_run_does_what_it_says(patched: Any) -> None:
    effects = patched.effects
    assert set(effects["edit"]) == set(PHASE_EDITS)
    assert float(effects["identity_error"].max()) < 1e-12 and int(effects["fired"].min()) == 1
    assert patched.config["patch"]["checks"]["null_bit_identical"] is True


def test_zero_and_null_move_the_model_alike(patched: Any) -> None:
    wide = patched.effects.pivot(index=["image_index", "layer", "head", "class"], columns="edit", values="patch_change")
    np.testing.assert_allclose(wide["zero"], wide["null"], rtol=1e-6, atol=1e-12)
    assert float(wide["null"].max()) > 1e-3


def test_the_tables_name_the_edit_null(patched: Any) -> None:
    """pandas takes the word for a missing number, unless it is told."""
    table = patched.table("effects")
    assert "null" in set(table["name"]) and not table["name"].isna().any()


def test_the_values_of_a_run_are_on_the_circle(patched: Any) -> None:
    rows = pd.concat(pd.read_parquet(path) for path in (patched.path / "effects/values").glob("*.parquet"))
    vectors = np.stack(rows.loc[rows["layer"] >= 0, "vector"].to_list())
    np.testing.assert_allclose(np.hypot(*np.split(vectors, 2, axis=1)), 1, atol=1e-14)
