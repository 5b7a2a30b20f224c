"""Training language models: bits a byte that are known beforehand, going on bit for bit, two processes as one."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import environment
from torch import Tensor

from sinklab.data.text import Text, Windows, open_text
from sinklab.errors import InputError, NotFoundError
from sinklab.models.lm_file import read_lm
from sinklab.run import Run
from sinklab.training.compare import over_seeds, paired, read_results
from sinklab.training.distributed import Ranks
from sinklab.training.lm import read_lm_evaluation, sample, train_lm
from sinklab.training.lm_config import RATES, LMConfig, LMMember, lm_config_from, lm_members, make_lm_config
from sinklab.training.lm_measure import bits_per_byte, quick_bits, sliding
from sinklab.training.lm_recipe import build_model, build_optimizer, build_recipe, losses
from sinklab.training.loop import Diverged, Progress, Stopped, read_metrics

TINY = ("steps=6", "batch=4", "context=8", "stride=4", "record_every=1", "validate_every=2", "checkpoint_every=2")
MORE = ("validation_windows=4", "sample=5", "model.layers=1", "model.hidden=8")
WIDTH = {"phase-tiny": "model.phases=8", "transformer-tiny": "model.dim=8"}
CONTENT = b"the phases of many clocks meet, and one by one they agree. " * 20


def tiny(name: str = "phase-tiny", *more: str) -> LMConfig:
    return make_lm_config(name, [*TINY, *MORE, WIDTH[name.partition("+")[0]], *more])


@pytest.fixture
def text(tmp_path: Path) -> Text:
    (tmp_path / "clocks.txt").write_bytes(CONTENT)
    return open_text(tmp_path / "clocks.txt")


class Uniform(torch.nn.Module):
    """Every symbol as likely as any other."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(symbols))

    def final(self, tokens: Tensor) -> Tensor:
        return tokens.float()

    def readout(self, final: Tensor) -> Tensor:
        return self.logits.expand(*final.shape, -1)


class LooksBack(torch.nn.Module):
    """Knows for certain what comes next once it has seen `needed` bytes, and nothing before."""

    def __init__(self, symbols: int, needed: int) -> None:
        super().__init__()
        self.needed, self.none = needed, torch.nn.Parameter(torch.zeros(symbols))

    def final(self, tokens: Tensor) -> Tensor:
        known = torch.nn.functional.one_hot((tokens + 1) % len(self.none), len(self.none)) * 100.0
        known[:, : self.needed - 1] = 0
        return known

    def readout(self, final: Tensor) -> Tensor:
        return final


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run that must not depend on how often it was interrupted."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.json" and not path.name.startswith(".")
    }


@pytest.mark.parametrize(("length", "context", "stride"), [(50, 8, 3), (50, 8, 8), (9, 8, 1), (2, 8, 4), (51, 7, 7)])
def test_a_sliding_window_predicts_every_byte_but_the_first_once(length: int, context: int, stride: int) -> None:
    windows = sliding(length, context, stride)
    width = min(context, length - 1)
    predicted = Counter(first + place + 1 for first, skip in windows for place in range(skip, width))
    assert predicted == dict.fromkeys(range(1, length), 1)
    assert all(first >= 0 and first + width < length for first, _ in windows)
    assert all(skip >= context - stride for _, skip in windows[1:])


def test_a_stride_longer_than_the_context_is_refused() -> None:
    with pytest.raises(InputError, match="between 1 and the context, 8; 9"):
        sliding(50, 8, 9)


@pytest.mark.parametrize("split", ["validation", "test", "train"])
def test_a_uniform_model_has_as_many_bits_as_the_vocabulary(text: Text, split: str) -> None:
    bits = bits_per_byte(Uniform(len(text.symbols)), text, split, context=8, stride=3)
    assert bits.bpc == pytest.approx(math.log2(len(text.symbols)), abs=1e-6)
    assert bits.predicted == text.length(split) - 1
    assert quick_bits(Uniform(len(text.symbols)), Windows(text=text, length=9)) == pytest.approx(bits.bpc, abs=1e-6)


def test_what_a_model_needs_to_look_back_on_decides_with_the_stride(tmp_path: Path) -> None:
    (tmp_path / "circle").write_bytes(bytes(range(4)) * 100)
    circle = open_text(tmp_path / "circle", shares=(1, 1, 2))
    model = LooksBack(4, needed=5)
    blind = {stride: bits_per_byte(model, circle, "test", context=8, stride=stride).bpc for stride in (4, 8)}
    assert blind[4] == pytest.approx(2 * 4 / 199, abs=1e-6)  # only the first four predictions of all
    assert blind[8] == pytest.approx(2 * 4 * 25 / 199, abs=2 * 4 / 199)  # the first four of every window


@pytest.mark.parametrize("name", ["phase-tiny", "transformer-tiny"])
def test_bits_do_not_depend_on_batch_size(text: Text, name: str) -> None:
    config = tiny(name)
    model = build_model(config, len(text.symbols), 0).double()
    found = [bits_per_byte(model, text, "train", context=8, stride=3, batch=batch).bpc for batch in (1, 7, 64, 1000)]
    assert max(found) - min(found) < 1e-12


def test_processes_share_an_evaluation_window_by_window(text: Text) -> None:
    windows = sliding(text.length("train"), 8, 3)
    shares = [windows[Ranks(rank=rank, world=3).share] for rank in range(3)]
    assert sorted(window for share in shares for window in share) == windows


@pytest.mark.parametrize("name", ["phase-tiny", "transformer-tiny"])
def test_constant_text_is_learned_to_zero_bits(tmp_path: Path, name: str) -> None:
    (tmp_path / "one").write_bytes(b"a" * 600)
    held = open_text(tmp_path / "one", vocabulary="bytes")
    run = train_lm(tmp_path / "run", [tiny(name, "steps=150", "lr=0.05", "validate_every=150")], text=held)
    (member,) = run.config["members"]
    assert read_lm_evaluation(run, member)["validation_bpc"] < 0.02
    assert read_lm_evaluation(run, member)["test_bpc"] < 0.02
    assert (run.path / "training" / member / "sample.txt").read_bytes() == b"a" * (8 + 5)


@pytest.mark.parametrize("name", ["phase-tiny", "transformer-tiny"])
def test_training_on_a_text_makes_it_likelier(text: Text, tmp_path: Path, name: str) -> None:
    run = train_lm(tmp_path / "run", [tiny(name, "steps=120", "lr=0.02")], text=text)
    lines = read_metrics(run.path / "training" / run.config["members"][0] / "metrics.jsonl")
    assert lines[-1]["bpc"] < lines[0]["bpc"] - 1
    assert lines[-1]["bpc"] == pytest.approx(lines[-1]["total"] / math.log(2), rel=1e-5)
    assert lines[-1]["validation"] < lines[1]["validation"] - 1


@pytest.mark.parametrize("name", ["phase-tiny", "transformer-tiny"])
def test_a_run_that_was_stopped_and_resumed_is_the_run_that_was_not(text: Text, tmp_path: Path, name: str) -> None:
    train_lm(tmp_path / "whole", [tiny(name)], [0, 1], text=text)

    def stop(member: LMMember, state: Progress) -> None:
        if member.seed == 0 and state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        train_lm(tmp_path / "parts", [tiny(name)], [0, 1], text=text, progress=stop)
    assert not (tmp_path / "parts/training" / f"seed-0/{name}" / "model.safetensors").exists()
    run = train_lm(tmp_path / "parts", [tiny(name)], [0, 1], text=text, resume=True)
    assert run.config["status"] == "complete"
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_the_best_weights_by_validation_are_the_models_and_the_last_are_kept_beside_them(
    text: Text, tmp_path: Path
) -> None:
    run = train_lm(tmp_path / "run", [tiny("phase-tiny", "steps=40", "lr=1.0", "validate_every=1")], text=text)
    folder = run.path / "training/seed-0/phase-tiny"
    lines = read_metrics(folder / "metrics.jsonl")
    best = min(lines, key=lambda line: line["validation"])
    assert best["step"] < 40
    saved = json.loads((folder / "model.json").read_text())
    assert (saved["step"], saved["validation"]) == (best["step"], best["validation"])
    held, last = read_lm(folder / "model.safetensors"), read_lm(folder / "last.safetensors")
    windows = Windows(text=text, length=9, limit=4)
    assert quick_bits(held.model, windows) == pytest.approx(best["validation"], abs=1e-5)
    assert quick_bits(last.model, windows) == pytest.approx(lines[-1]["validation"], abs=1e-5)
    assert read_lm_evaluation(run, "seed-0/phase-tiny")["best_step"] == best["step"]


def test_all_models_of_a_seed_see_the_same_batches_and_seeds_differ(text: Text, tmp_path: Path) -> None:
    recipes = [
        build_recipe(LMMember(seed=seed, config=tiny(name)), text, tmp_path)
        for seed, name in ((0, "phase-tiny"), (0, "transformer-tiny"), (1, "phase-tiny"))
    ]
    first = [recipe.batch(0) for recipe in recipes]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def test_only_matrices_decay() -> None:
    for name in ("phase-tiny", "transformer-tiny"):
        model = build_model(tiny(name), 20, 0)
        for embedding in (True, False):
            decayed, free = build_optimizer(model, tiny(name, f"decay_embedding={embedding}")).param_groups
            assert all(weight.ndim == 2 for weight in decayed["params"])
            others = [weight for weight in free["params"] if weight.ndim == 2]
            assert len(others) == (0 if embedding else 1)
            assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
            assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)


def test_the_rate_rises_then_falls_to_its_floor() -> None:
    config = tiny("phase-tiny", "steps=100", "warmup=0.1")
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1
    assert rates[55] == pytest.approx(0.55) and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))


def test_bfloat16_trains_and_its_loss_is_close(text: Text) -> None:
    for name in ("phase-tiny", "transformer-tiny"):
        model, tokens = build_model(tiny(name), len(text.symbols), 0), text.batch(0, 0, 4, 8)
        wide, narrow = (losses(model, tokens, tiny(name, f"bf16={on}"), Ranks())["total"] for on in (False, True))
        assert narrow.dtype == torch.float32
        assert float(narrow.detach()) == pytest.approx(float(wide.detach()), rel=0.02)
        narrow.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_sweep_trains_every_rate_and_chooses_the_best_by_validation(text: Text, tmp_path: Path) -> None:
    run = train_lm(tmp_path / "run", [tiny()], [0, 1], text=text, sweep="lr")
    assert run.config["members"] == [f"seed-{s}/phase-tiny/lr={rate:g}" for s in (0, 1) for rate in RATES]
    table = run.table("training")
    medians = table.groupby("lr")["validation_bpc"].median()
    assert run.config["chosen"] == {"phase-tiny": medians.idxmin()}
    results = read_results([run.path])
    assert len(results) == 2 * 2  # seeds and splits, of the chosen rate alone
    kept = table[table["lr"] == medians.idxmin()]["test_bpc"]
    assert sorted(results[results["measure"] == "test_bpc"]["value"]) == sorted(kept)


def test_a_rate_of_a_sweep_that_diverges_is_recorded_and_not_chosen(
    text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinklab.training.lm_config.RATES", (1e-3, 1e9))
    wild = tiny("transformer-tiny", "steps=30", "clip=1e9", "warmup=0")
    run = train_lm(tmp_path / "run", [wild], text=text, sweep="lr")
    assert run.config["chosen"] == {"transformer-tiny": 1e-3}
    assert any("lr=1e+09: " in note and "the training has diverged" in note for note in run.config["notes"])
    assert len(read_results([run.path])) == 2
    with pytest.raises(Diverged):
        train_lm(tmp_path / "alone", [replace(wild, lr=1e9)], text=text)


def test_runs_are_compared_over_seeds_and_in_pairs(text: Text, tmp_path: Path) -> None:
    train_lm(tmp_path / "a", [tiny(), tiny("transformer-tiny")], [0, 1, 2], text=text)
    train_lm(tmp_path / "b", [tiny("phase-tiny", "lr=0.001")], [1, 2, 5], text=text)
    results = read_results([tmp_path / "a", tmp_path / "b"])
    summary = over_seeds(results).set_index(["run", "arm", "measure"])
    own = results[(results["arm"] == "transformer-tiny") & (results["measure"] == "test_bpc")]["value"]
    row = summary.loc[((tmp_path / "a").as_posix(), "transformer-tiny", "test_bpc")]
    assert (row["seeds"], row["median"]) == (3, own.median())
    assert row["std"] == pytest.approx(own.std(ddof=1))
    table = paired(results)
    assert list(table[table["measure"] == "test_bpc"]["seeds"]) == [3, 2]
    values = results[results["measure"] == "test_bpc"].set_index(["run", "arm", "seed"])["value"]
    a, b = ((tmp_path / name).as_posix() for name in "ab")
    gaps = [values[b, "phase-tiny", seed] - values[a, "phase-tiny", seed] for seed in (1, 2)]
    other = table[(table["run"] == b) & (table["measure"] == "test_bpc")].iloc[0]
    assert other["mean"] == pytest.approx(sum(gaps) / 2)
    assert other["less"] == sum(gap < 0 for gap in gaps)


def test_runs_that_do_not_compare_are_refused(text: Text, tmp_path: Path) -> None:
    train_lm(tmp_path / "a", [tiny()], text=text)
    with pytest.raises(InputError, match="the same folder was given twice"):
        read_results([tmp_path / "a", tmp_path / "a"])
    with pytest.raises(NotFoundError, match="There is no run folder"):
        read_results([tmp_path / "nothing"])
    config = json.loads((tmp_path / "a/run.json").read_text())
    (tmp_path / "a/run.json").write_text(json.dumps(config | {"status": "running"}))
    with pytest.raises(InputError, match="is not finished"):
        read_results([tmp_path / "a"])


def test_a_run_is_resumed_with_its_own_text_only(text: Text, tmp_path: Path) -> None:
    train_lm(tmp_path / "run", [tiny()], text=text)
    (tmp_path / "other.txt").write_bytes(CONTENT.replace(b"one", b"two"))
    with pytest.raises(InputError, match="made with other settings"):
        train_lm(tmp_path / "run", [tiny()], text=tmp_path / "other.txt", resume=True)


def test_a_text_that_is_too_short_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"short text " * 10)
    with pytest.raises(InputError, match="The validation split of short has 5 bytes"):
        train_lm(tmp_path / "run", [tiny()], text=tmp_path / "short")
    assert not (tmp_path / "run").exists()


def test_a_saved_model_and_its_config_come_back(text: Text, tmp_path: Path) -> None:
    run = train_lm(tmp_path / "run", [tiny("phase-tiny+no-gates")], [3], text=text)
    path = run.path / "training/seed-3/phase-tiny+no-gates/model.safetensors"
    held = read_lm(path)
    assert lm_config_from(held.saved["family"], held.saved["config"]) == tiny("phase-tiny+no-gates")
    assert (held.saved["kind"], held.saved["arm"], held.saved["seed"]) == ("lm", "phase-tiny+no-gates", 3)
    assert (held.symbols, held.context) == (text.symbols, 8)
    member = LMMember(seed=3, config=tiny("phase-tiny+no-gates"))
    assert sample(held.model, text, member) == (path.parent / "sample.txt").read_bytes()
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match="are not a trained language model"):
        read_lm(path)
    with pytest.raises(NotFoundError, match="there is no .*gone.safetensors"):
        read_lm(path.with_name("gone.safetensors"))


def test_configs_are_changed_by_name_and_refused_with_a_sentence() -> None:
    assert make_lm_config("phase-1m", ["model.bound=none", "steps=5"]).model.bound == "none"  # type: ignore[union-attr]
    for change, kind, sentence in (
        ("stepz=1", NotFoundError, "phase-1m has nothing called 'stepz' to set; it has name, model., context"),
        ("model.size=1", NotFoundError, "phase-1m's model has nothing called 'size'"),
        ("model=1", NotFoundError, "nothing called 'model'"),
        ("name=../x", InputError, "not a value to set"),
        ("steps=many", InputError, "steps is of type int, which 'many' is not"),
        ("stride=500", InputError, "stride is at most the context"),
        ("warmup=2", InputError, "warmup is a share"),
        ("betas=0.9,1.5", InputError, "betas are two numbers"),
    ):
        with pytest.raises(kind, match=sentence):
            make_lm_config("phase-1m", [change])
    with pytest.raises(InputError, match="different models; phase-1m, phase-1m"):
        lm_members([make_lm_config("phase-1m")] * 2, [0])


def test_two_processes_train_the_model_of_one_to_rounding(text: Text, tmp_path: Path) -> None:
    name = "phase-tiny"
    program = tmp_path / "both.py"
    program.write_text(
        "import sys\n"
        "from sinklab.training.lm import train_lm\n"
        "from sinklab.training.lm_config import make_lm_config\n"
        "train_lm(sys.argv[1], [make_lm_config(sys.argv[3], sys.argv[4:])], text=sys.argv[2])\n"
    )
    changes = [*TINY, *MORE, WIDTH[name], "batch=5"]  # shares of three and two rows
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    words = [sys.executable, str(program), str(tmp_path / "two"), str(tmp_path / "clocks.txt"), name, *changes]
    started = [
        subprocess.Popen(words, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **world), stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    one = train_lm(tmp_path / "one", [make_lm_config(name, changes)], text=text)
    assert contents(tmp_path / "two").keys() == contents(one.path).keys()
    ours, theirs = (read_metrics(tmp_path / run / "training/seed-0" / name / "metrics.jsonl") for run in ("one", "two"))
    for line, other in zip(ours, theirs, strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    weights: list[Any] = [
        read_lm(tmp_path / run / "training/seed-0" / name / "last.safetensors").model.state_dict()
        for run in ("one", "two")
    ]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=1e-4)
    evaluations = [read_lm_evaluation(Run.open(tmp_path / run), f"seed-0/{name}") for run in ("one", "two")]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)
