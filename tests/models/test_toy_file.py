"""The controlled models that come with sinklab are what they are said to be, by the claims of the tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

import sinklab
from sinklab.errors import InputError, NotFoundError
from sinklab.hooks.manager import HookManager
from sinklab.models.toy_file import NAMES, read_toy, shipped_toy
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.rule import SinkRule
from sinklab.training.toy import TrainedToy, load_toy
from sinklab.training.toy_claims import best_layer, broadcast_claims, nop_claims
from sinklab.training.toy_measure import WHOLE, evaluate, look_up


def shipped(name: str) -> TrainedToy:
    return load_toy(shipped_toy(name))


def heads(held: TrainedToy, layer: int) -> pd.DataFrame:
    """The statistics of one layer on fresh sequences, as `sinklab diagnose` takes them."""
    reader = StatisticsReader(HookManager(held.model).sites)
    with torch.no_grad(), HookManager(held.model, reader) as hooks:
        hooks.run(held.task.batch(0, 128, purpose="evaluation").x)
    layers, table, tokens = reader.take()
    place = layers.index(layer)
    columns = {name: values[:, place, 0].numpy() for name, values in table.items()}
    return pd.DataFrame({**columns, "layer": layer, "queries": tokens[place]})


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_small_and_can_be_read_faithfully(name: str) -> None:
    assert shipped_toy(name).stat().st_size < 500_000
    held = shipped(name)
    proofs = sinklab.prove(held.model, held.task.batch(0, 1, purpose="evaluation").x)
    assert len(proofs) == (1 if name == "nop" else 2)


def test_the_nop_model_shows_every_claim_and_is_called_nop() -> None:
    held = shipped("nop")
    checked = nop_claims(evaluate(held.model, held.task, batches=2, size=256))
    assert [claim for claim in checked if not claim.holds] == []
    rows = heads(held, 0)
    events = rows[SinkRule.mass().events(rows)]  # half of the queries are active: no rule of nine tenths can see it
    assert len(events) > 0.9 * len(rows)
    assert set(SinkDefinition.causal().classify(events)) == {"nop"}


def test_the_broadcast_model_shows_every_claim_and_is_called_broadcast() -> None:
    held = shipped("broadcast")
    rows = evaluate(held.model, held.task, batches=2, size=256)
    assert [claim for claim in broadcast_claims(rows) if not claim.holds] == []
    measured = heads(held, best_layer(rows))
    events = measured[SinkRule.relaxed().events(measured)]
    assert len(events) > 0.5 * len(measured)
    assert set(SinkDefinition.causal().classify(events)) == {"broadcast"}


def test_in_the_penalised_model_the_pathway_does_the_sinks_work() -> None:
    held = shipped("pathway-penalty")
    rows = evaluate(held.model, held.task, batches=2, size=256)
    plain = look_up(rows, WHOLE, "baseline", "task_mse")
    without = {edit: look_up(rows, 1, edit, "task_mse") - plain for edit in ("attention_off", "pathway_off")}
    assert look_up(rows, 1, "baseline", "inflow") < 0.15
    assert without["attention_off"] < 0.05 * without["pathway_off"]
    assert look_up(rows, 1, "donor_state", "donor_cosine") > 0.7 > 0.3 > abs(look_up(rows, 1, "donor", "donor_cosine"))


def test_other_names_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no controlled model 'sorting'; nop, broadcast"):
        shipped_toy("sorting")
    path = tmp_path / "nop.safetensors"
    path.write_bytes(shipped_toy("nop").read_bytes())
    with pytest.raises(NotFoundError, match="there is no .*nop.json"):
        read_toy(path)
    saved = json.loads(shipped_toy("nop").with_suffix(".json").read_text())
    for changed in ({"kind": "sorting"}, {"config": {**saved["config"], "dim": 32}}):
        path.with_suffix(".json").write_text(json.dumps(saved | changed))
        with pytest.raises(InputError, match="nop.safetensors and its .json are not a trained controlled model"):
            read_toy(path)
