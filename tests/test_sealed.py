"""Whatever bit of a table's file changes: it is refused by name, or what is read is what was written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sinklab.errors import InputError
from sinklab.parts import PartWriter, read_parts, read_rows, to_arrow
from sinklab.run import Run
from sinklab.sealed import DamagedTable, column_digest, read_sealed, write_sealed


def frame(rows: int = 60) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    layers = np.arange(rows) % 3
    return pd.DataFrame(
        {
            "image": [f"{i // 3}.png" for i in range(rows)],
            "image_index": np.arange(rows) // 3,
            "layer": layers.astype("int16"),
            "head": np.zeros(rows, "int16"),
            "inflow": np.where(layers == 2, np.nan, draw.normal(size=rows)).astype("float32"),
            "finite": layers < 2,
        }
    )


def flips(path: Path, count: int) -> list[tuple[int, int]]:
    """(byte, bit) everywhere in the file, and closer together in its last kilobytes, where the footer lies."""
    size, draw = path.stat().st_size, np.random.default_rng(1)
    places = [*draw.integers(0, size, count), *draw.integers(max(0, size - 3000), size, count), *range(size - 8, size)]
    return [(int(place), int(draw.integers(8))) for place in places]


def flipped(content: bytes, byte: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[byte] ^= 1 << bit
    return bytes(changed)


def test_a_part_with_a_flipped_bit_is_refused_by_name_or_reads_the_same(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "f" * 64) as parts:
        parts.add(0, frame(), [("gone.png", "the file is empty")])
        parts.add(1, None)
    (path,) = tmp_path.iterdir()
    content, (whole,) = path.read_bytes(), read_parts(tmp_path, "f" * 64)
    refused = 0
    for byte, bit in flips(path, 400):
        path.write_bytes(flipped(content, byte, bit))
        try:
            read = read_parts(tmp_path, "f" * 64)
            rows, some = read_rows(read), read_rows(read, ["inflow"])
        except InputError as error:
            assert path.name in str(error), (byte, bit)
            refused += 1
            continue
        assert read == [whole], (byte, bit)
        pd.testing.assert_frame_equal(rows, frame())
        pd.testing.assert_frame_equal(some, frame()[["inflow"]])
    assert refused > 400


@pytest.mark.parametrize("name", ["sinks.parquet", "overlays/columns.parquet"])
def test_a_table_of_a_run_with_a_flipped_bit_is_refused_by_name_or_reads_the_same(tmp_path: Path, name: str) -> None:
    with Run.create(tmp_path / "r", settings={}) as run:
        path = run.write_table(name, frame())
        content, refused = path.read_bytes(), 0
        for byte, bit in flips(path, 200):
            path.write_bytes(flipped(content, byte, bit))
            try:
                read = run.sinks if name == "sinks.parquet" else read_sealed(path).to_pandas()
            except InputError as error:
                assert path.name in str(error), (byte, bit)
                refused += 1
                continue
            pd.testing.assert_frame_equal(read, frame())
        assert refused > 200


def test_every_kind_of_column_comes_back(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": ["a", None, "ü"],
            "vector": pa.array([[1.0, 2.0], None, []], pa.list_(pa.float64())),
            "pair": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2)),
            "flag": [True, None, False],
            "number": pa.array([1, None, 3], pa.int8()),
            "when": pa.array([0, 1, None], pa.timestamp("s")),
        }
    )
    with (tmp_path / "t.parquet").open("wb") as stream:
        write_sealed(table, stream, {"more": 1})
    assert read_sealed(tmp_path / "t.parquet").to_pylist() == table.to_pylist()
    assert read_sealed(tmp_path / "t.parquet", ["flag", "other"]).column_names == ["flag"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1, 2]), pa.array([2, 1])),
        (pa.array([1, 2]), pa.array([1, 2], pa.int32())),
        (pa.array([0.0]), pa.array([-0.0])),
        (pa.array([0.0]), pa.array([None], pa.float64())),
        (pa.array(["a", "b"]), pa.array(["ab", ""])),
        (pa.array([[1], [2, 3]]), pa.array([[1, 2], [3]])),
        (pa.array([None, 1]), pa.array([1, None])),
    ],
)
def test_other_values_have_another_digest(one: pa.Array, other: pa.Array) -> None:
    assert column_digest(one) != column_digest(other)
    halves = pa.chunked_array([one.slice(0, 1), one.slice(1)])
    assert column_digest(halves) == column_digest(one)


def test_a_table_without_digests_is_not_taken_on_trust(tmp_path: Path) -> None:
    pq.write_table(to_arrow(frame()), tmp_path / "t.parquet")
    with pytest.raises(DamagedTable, match=r"t\.parquet is damaged, or was not written by sinklab"):
        read_sealed(tmp_path / "t.parquet")
