"""`sinklab.diagnose` from Python: the same run as the command's, as an object."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import timm
import torch
from command_line import PICTURE, TINY, in_process, tiny_state, write_checkpoint, write_pictures

import sinklab
from sinklab.device import pick_device
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


def test_layers_can_be_told_as_the_command_takes_them(model: sinklab.Model, pictures: Path, tmp_path: Path) -> None:
    run = sinklab.diagnose(model, pictures, tmp_path / "run", size=PICTURE, layers="1-1", report=False)
    assert set(run.heads["layer"]) == {1} and run.config["options"]["layers"] == [1]
    with pytest.raises(InputError, match="not '1-'"):
        sinklab.diagnose(model, pictures, tmp_path / "other", size=PICTURE, layers="1-")


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": "4"}, {"size": (32, 48)}, {"size": 32.0}, {"workers": 1.5}, {"seed": "a"}, {"limit": True},
     {"definition": {"name": "causal"}}, {"rule": 0.5}, {"layers": []}, {"layers": 3}, {"dtype": torch.float32}],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_an_argument_of_the_wrong_type_is_refused_with_a_sentence_that_names_it(
    wrong: dict[str, Any], model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    name = next(iter(wrong))
    with pytest.raises(InputError, match=f"(?i){name.rstrip('s')}"):
        sinklab.diagnose(model, pictures, tmp_path / "run", **{"size": PICTURE, **wrong})
    assert not (tmp_path / "run").exists()


def test_a_rule_can_be_named_and_a_device_be_torchs(model: sinklab.Model, pictures: Path, tmp_path: Path) -> None:
    run = sinklab.diagnose(
        model, pictures, tmp_path / "run", size=PICTURE, rule="mass", device=torch.device("cpu"), report=False
    )
    assert run.config["rule"] == sinklab.SinkRule.mass().as_dict()


def test_the_folder_of_a_run_is_named_after_its_model(
    model: sinklab.Model, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sinklab.diagnose(model, pictures, size=PICTURE, report=False).path == Path("runs/tiny.safetensors")
    attached = sinklab.attach(model.module, name="my ViT")
    assert sinklab.diagnose(attached, pictures, size=PICTURE, report=False).path == Path("runs/my-ViT")


def test_sites_where_the_update_was_not_checked_are_named_in_run_json(
    model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    module = copy.deepcopy(model.module)
    for block in module.blocks:  # type: ignore[union-attr]
        block.forward = types.MethodType(_renamed_forward, block)
        block.before, block.after = block.norm1, block.norm2
        del block.norm1, block.norm2
    sinklab.sites.register(type(module.blocks[0].attn), lambda attention: _parts(attention))  # type: ignore[index]
    try:
        with pytest.warns(UserWarning, match="blocks.0.attn, blocks.1.attn"):
            run = sinklab.diagnose(sinklab.attach(module), pictures, tmp_path / "run", size=PICTURE, report=False)
    finally:
        del sinklab.sites._registered[type(module.blocks[0].attn)]  # type: ignore[index]
    assert [note for note in run.config["notes"] if "not checked at blocks.0.attn, blocks.1.attn" in note]
    plain = sinklab.diagnose(model, pictures, tmp_path / "plain", size=PICTURE, report=False)
    assert not [note for note in plain.config["notes"] if "not checked" in note]


def _renamed_forward(block: Any, x: torch.Tensor, **_: Any) -> torch.Tensor:
    x = x + block.attn(block.before(x))
    return x + block.mlp(block.after(x))


def _parts(attention: Any) -> Any:
    return sinklab.sites.AttentionParts(heads=attention.num_heads, projection=attention.proj)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": []}, "(?i)layer"),
        ({"layers": 1}, "(?i)layer"),
        ({"layers": [0, "1"]}, "(?i)layer"),
        ({"layers": ["1"]}, "(?i)layer"),
        ({"definition": None}, "definition"),
        ({"batch_size": 2.5}, "batch_size is a whole number.*not 2.5"),
        ({"batch_size": True}, "batch_size is a whole number.*not True"),
        ({"workers": None}, "The option workers"),
        ({"limit": 1.0}, "limit"),
        ({"seed": "a", "limit": 2}, "seed"),
        ({"size": 32.0}, "size"),
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


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_run_json_names_the_precision_that_a_model_really_has_and_patch_takes_it_as_it_was(
    checkpoint: Path, pictures: Path, tmp_path: Path, kind: torch.dtype
) -> None:
    model = sinklab.load(str(checkpoint))
    model.module.to(kind)
    rule = sinklab.SinkRule.mass(0.2)
    run = sinklab.diagnose(model, pictures, output=tmp_path / "run", size=PICTURE, rule=rule, report=False)
    named = str(kind).removeprefix("torch.")
    assert (run.config["dtype"], run.config["autocast"]) == (named, False)
    seen: list[bool] = []
    model.module.blocks[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    sinklab.patch(run, model, min_events=1, bootstrap=9, report=False)
    assert seen and not any(seen)
    assert run.config["patch"]["dtype"] == named
