"""`sinklab.diagnose` from Python: the same run as the command's, as an object."""

from __future__ import annotations

import copy
from pathlib import Path

import pandas as pd
import pytest
import timm
import torch
from command_line import PICTURE, TINY, in_process, tiny_state, write_checkpoint, write_pictures

import sinklab
from sinklab.diagnosis import pick_device
from sinklab.errors import InputError, NotFoundError
from sinklab.sinks.table import head_schema


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> sinklab.Model:
    return sinklab.load(str(checkpoint))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), 4)


def test_the_example_of_the_readme_works(model: sinklab.Model, pictures: Path, tmp_path: Path) -> None:
    rule = sinklab.SinkRule.relaxed(fraction=0.5)
    run = sinklab.diagnose(model, str(pictures), output=tmp_path / "mine", rule=rule, size=PICTURE)
    assert list(run.heads.columns) == head_schema().names
    assert len(run.heads) == 4 * 2 * 2
    assert {"class_causal", "class_counts"} <= set(run.sinks.columns)
    assert len(run.sinks) == rule.events(run.heads).sum() > 0
    assert run.report() == run.path / "report.html"
    again = sinklab.open_run(run.path)
    pd.testing.assert_frame_equal(again.heads, run.heads, check_exact=True)
    assert again.summary == run.summary


def test_the_command_and_the_function_write_the_same_table(
    checkpoint: Path, model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    told = ("--size", PICTURE, "--device", "cpu", "--no-report")
    assert in_process("diagnose", checkpoint, pictures, "-o", tmp_path / "a", *told).returncode == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = sinklab.diagnose(model, pictures, output=tmp_path / "b", size=PICTURE, device="cpu", report=False)
    finally:
        torch.set_num_threads(threads)
    pd.testing.assert_frame_equal(sinklab.open_run(tmp_path / "a").heads, run.heads, check_exact=True)


def test_a_module_in_memory_is_measured_and_left_as_it_was(pictures: Path, tmp_path: Path) -> None:
    module = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
    module.load_state_dict(tiny_state())
    before, pixels = copy.deepcopy(module.state_dict()), torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        said = module(pixels)
    run = sinklab.diagnose(sinklab.attach(module), pictures, output=tmp_path / "run", size=PICTURE, report=False)
    assert run.heads["finite"].all()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    with torch.no_grad():
        assert torch.equal(module(pixels), said)
    assert not module.training and all(weight.requires_grad for weight in module.parameters())


def test_progress_is_told_from_nothing_to_all(model: sinklab.Model, pictures: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    sinklab.diagnose(
        model,
        pictures,
        output=tmp_path / "run",
        size=PICTURE,
        batch_size=2,
        report=False,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(0, 4), (2, 4), (4, 4)]


def test_the_callers_random_state_and_threads_are_left_alone(
    model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    sinklab.diagnose(model, pictures, output=tmp_path / "run", size=PICTURE, limit=2, report=False)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_a_model_without_sinks_gets_a_report_that_says_so(pictures: Path, tmp_path: Path) -> None:
    state = tiny_state()
    for name, value in state.items():
        if name.endswith(("qkv.weight", "qkv.bias")):
            value[: 2 * TINY["embed_dim"]] = 0  # every query attends to all keys alike
    model = sinklab.load(str(write_checkpoint(tmp_path / "model", state)))
    run = sinklab.diagnose(model, pictures, output=tmp_path / "run", size=PICTURE)
    assert (run.heads["inflow"] - 1 / 5).abs().max() < 1e-6
    assert len(run.sinks) == 0
    assert "no head" in (run.path / "report.html").read_text().lower()


def test_an_unfinished_run_is_not_opened_as_a_finished_one(tmp_path: Path) -> None:
    from sinklab.run import Run

    Run.create(tmp_path / "run", settings={}).close()
    with pytest.raises(InputError, match="not complete"):
        sinklab.open_run(tmp_path / "run")
    with pytest.raises(NotFoundError):
        sinklab.open_run(tmp_path / "nowhere")


def test_a_layer_that_does_not_exist_is_refused(model: sinklab.Model, pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="Layer 7 does not exist"):
        sinklab.diagnose(model, pictures, output=tmp_path / "run", size=PICTURE, layers=[0, 7])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": []}, "No layers were named"),
        ({"layers": 1}, "layers are several whole numbers"),
        ({"layers": [0, "1"]}, "layers are several whole numbers"),
        ({"layers": ["1"]}, "A layer is a whole number"),
        ({"definition": None}, "The option definition is a SinkDefinition"),
        ({"rule": "strict"}, "The option rule is a SinkRule"),
        ({"batch_size": 2.5}, "The option batch_size is a whole number, not 2.5"),
        ({"batch_size": True}, "The option batch_size is a whole number, not True"),
        ({"workers": None}, "The option workers"),
        ({"limit": 1.0}, "limit"),
        ({"seed": "a", "limit": 2}, "The option seed"),
        ({"size": 32.0}, "The option size"),
        ({"dtype": None}, "The option dtype"),
        ({"fast": "no"}, "The option fast"),
    ],
    ids=str,
)
def test_an_option_of_the_wrong_kind_is_refused_before_a_folder_is_made(
    options: dict[str, object], said: str, model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        sinklab.diagnose(model, pictures, output=tmp_path / "run", **{"size": PICTURE, **options})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fast", [False, True])
def test_what_the_scan_would_stumble_over_is_refused_before_a_folder_is_made(
    fast: bool, pictures: Path, tmp_path: Path
) -> None:
    module = timm.create_model("vit_tiny_patch16_224", **TINY).eval()
    wrong = sinklab.TokenMap(prefix=("cls", "register"), patch_size=(16, 16))
    with pytest.raises(InputError, match="the map does not belong to this model"):
        sinklab.diagnose(
            sinklab.attach(module, tokens=wrong), pictures, output=tmp_path / "run", size=PICTURE, fast=fast
        )
    assert not (tmp_path / "run").exists()


def test_a_model_in_training_mode_with_dropout_is_refused_before_anything_is_written(
    pictures: Path, tmp_path: Path
) -> None:
    module = timm.create_model("vit_tiny_patch16_224", **TINY, attn_drop_rate=0.1).train()
    with pytest.raises(InputError, match="eval"):
        sinklab.diagnose(sinklab.attach(module), pictures, output=tmp_path / "run", size=PICTURE)
    assert not (tmp_path / "run").exists()
    assert module.training


@pytest.mark.parametrize("name", ["tpu", "cpu:x", "CUDA", ""])
def test_a_device_that_no_torch_knows_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="--device"):
        pick_device(name)


def test_auto_finds_a_device_that_is_there() -> None:
    assert torch.zeros(1, device=pick_device("auto")).item() == 0
