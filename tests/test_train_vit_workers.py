"""A training whose pictures are read by processes, and a signal to all of them, as torchrun and a terminal send it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import environment, in_process

from sinklab.training.loop import read_metrics

SETTINGS = (
    *("image=16", "dim=12", "depth=2", "heads=2", "views=2", "projector_hidden=8", "projector_dim=4", "slices=8"),
    *("batch=4", "epochs=2000", "warmup_epochs=0.5", "procedural=8", "validation_images=4", "score_images=2"),
    *("score_every=5000", "record_every=1"),
)
WORDS = ["train", "vit", "--device", "cpu", *(word for change in SETTINGS for word in ("--set", change))]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="there are no process groups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.5])
def test_a_signal_to_the_whole_group_while_workers_start_stops_as_at_any_other_time(
    tmp_path: Path, number: signal.Signals, seconds: float
) -> None:
    member = tmp_path / "run/training/seed-0/baseline-tiny"
    command = [sys.executable, "-m", "sinklab", *WORDS, "--workers", "2", "-o", str(tmp_path / "run")]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        try:
            while not member.exists() and process.poll() is None:
                time.sleep(0.005)
            time.sleep(seconds)
            os.killpg(process.pid, number)
            _, said = process.communicate(timeout=100)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, said
    assert "sinklab: stopped. What was trained is kept" in said and "Traceback" not in said and "Aborted" not in said
    if seconds > 1:  # the first step had been begun
        assert (member / "checkpoint.safetensors").is_file()
        assert [line["step"] for line in read_metrics(member / "metrics.jsonl")][:1] == [1]


def test_no_process_of_a_training_outlives_it(tmp_path: Path) -> None:
    import multiprocessing

    words = [*WORDS, "--set", "epochs=1", "--workers", "2", "-o", tmp_path / "run"]
    ended = in_process(*words)
    assert ended.returncode == 0, ended.stderr
    assert multiprocessing.active_children() == []
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()).isdisjoint({signal.SIGINT, signal.SIGTERM})
