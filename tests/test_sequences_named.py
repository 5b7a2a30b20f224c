"""Sentences in runs of sequences do not speak of images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from command_line import in_process

import sinklab
from sinklab.errors import InputError
from sinklab.interventions.draw import donors, held_out
from sinklab.sinks.arguments import require_arguments
from sinklab.sinks.resume import check_unchanged

SEEN = re.compile(r"\b(image|photograph|picture)", re.IGNORECASE)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> sinklab.Diagnosis:
    return sinklab.diagnose("toy:nop", output=tmp_path_factory.mktemp("named") / "run", limit=64, report=False)


def said(function: Any, *given: Any, **named: Any) -> str:
    with pytest.raises(InputError) as caught:
        function(*given, **named)
    return str(caught.value)


def test_a_sequence_has_no_donor_and_none_held_out_if_it_is_alone(tmp_path: Path) -> None:
    for sentence in (said(donors, ["a"], 0, "sequence"), said(held_out, ["a"], 0.5, 0, "sequence")):
        assert "sequence" in sentence and not SEEN.search(sentence)
    sinklab.diagnose("toy:nop", output=tmp_path / "run", limit=1, report=False)
    refused = in_process("patch", tmp_path / "run", "--min-events", 1)
    assert refused.returncode == 2 and "With one sequence none can be held out: give more." in refused.stderr


def test_other_settings_are_named_without_images(run: sinklab.Diagnosis) -> None:
    sentence = said(sinklab.diagnose, "toy:nop", output=run.path, limit=32, resume=True)
    assert "the inputs' count 64 → 32" in sentence and not SEEN.search(sentence)


def test_sequences_that_were_changed_are_called_sequences(run: sinklab.Diagnosis) -> None:
    from sinklab.data.toy_sequences import toy_sequences

    model = sinklab.load("toy:broadcast")
    assert model.loaded.sequences is not None and model.loaded.sequences.task is not None
    sentence = said(check_unchanged, run, toy_sequences(model.loaded.sequences.task))
    assert "64 of the sequences that the run" in sentence and not SEEN.search(sentence)


@pytest.mark.parametrize("name", ["batch_size", "limit"])
def test_a_number_of_the_wrong_kind_is_of_inputs(name: str) -> None:
    sentence = said(require_arguments, images=None, layers=None, size=224, **{name: "many"})
    assert "inputs" in sentence and not SEEN.search(sentence)


@pytest.mark.parametrize(("words", "wanted"), [
    (("--metric", "logits"), "--metric logits needs a classifier"),
    (("--metric", "patch,logits"), "--metric logits needs a classifier"),
    (("--metric", "cls"), "class token"),
    (("--heldout", "nan"), "a share of the inputs between 0 and 1"),
    (("--heldout", "."), "a share like 0.25 in a run of sequences"),
])  # fmt: skip
def test_what_a_run_of_sequences_cannot_be_patched_with_is_said(
    words: tuple[str, str], wanted: str, run: sinklab.Diagnosis
) -> None:
    refused = in_process("patch", run.path, *words)
    assert refused.returncode == 2 and wanted in refused.stderr
    assert not (run.path / "effects").exists()


def test_a_batch_of_nothing_is_refused_without_images(tmp_path: Path) -> None:
    refused = in_process("diagnose", "toy:nop", "-o", tmp_path / "run", "--batch-size", "0")
    assert refused.returncode == 2 and "at least one input" in refused.stderr
