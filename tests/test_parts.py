from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sinklab.atomic import WriteError
from sinklab.errors import InputError
from sinklab.parts import PartWriter, part_paths, read_parts, read_rows, to_arrow

SCHEMA = pa.schema(
    [
        ("image", pa.string()),
        ("image_index", pa.int64()),
        ("layer", pa.int16()),
        ("head", pa.int16()),
        ("inflow", pa.float32()),
        ("finite", pa.bool_()),
    ]
)


def frame(*indices: int) -> pd.DataFrame:
    """Two layers of two heads for each image."""
    rows = [(f"{i}.png", i, layer, head) for i in indices for layer in (0, 1) for head in (0, 1)]
    table = pd.DataFrame(rows, columns=["image", "image_index", "layer", "head"])
    table = table.astype({"layer": "int16", "head": "int16"})
    table["inflow"] = np.sin(table.image_index + table["layer"] * 0.5 + table["head"] * 0.25).astype(np.float32)
    table["finite"] = table["head"] == 0
    return table


def test_rows_come_back_sorted_whatever_the_order_and_the_ranks(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "f", 1, every_batches=1) as other, PartWriter(tmp_path, "f", 0) as parts:
        other.add(3, frame(7, 6))
        parts.add(2, frame(5, 4))
        parts.add(0, frame(0, 1))
        other.add(1, frame(3, 2))
    pd.testing.assert_frame_equal(read_rows(read_parts(tmp_path, "f")), frame(*range(8)))
    assert [path.name for path in part_paths(tmp_path)] == [
        "part-000-00000.parquet",
        "part-001-00000.parquet",
        "part-001-00001.parquet",
    ]


def test_a_part_knows_its_batches_and_what_was_skipped(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "f") as parts:
        parts.add(4, frame(0))
        parts.add(5, None, [("a.png", "the file is empty"), ("b.png", "naïve ☀")])
    (part,) = read_parts(tmp_path, "f")
    assert part.batches == (4, 5)
    assert part.skipped == ((5, "a.png", "the file is empty"), (5, "b.png", "naïve ☀"))


def test_a_part_is_written_when_enough_batches_are_done(tmp_path: Path) -> None:
    parts = PartWriter(tmp_path, "f", every_batches=2, every_seconds=1e9)
    counts = []
    for batch in range(5):
        parts.add(batch, frame(batch))
        counts.append(len(part_paths(tmp_path)))
    assert counts == [0, 1, 1, 2, 2]


def test_a_part_is_written_when_enough_time_has_passed(tmp_path: Path) -> None:
    parts = PartWriter(tmp_path, "f", every_batches=1000, every_seconds=0.0)
    parts.add(0, frame(0))
    assert len(part_paths(tmp_path)) == 1


def test_finished_batches_are_written_when_the_work_is_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), PartWriter(tmp_path, "f") as parts:
        parts.add(0, frame(0))
        raise KeyboardInterrupt
    assert read_parts(tmp_path, "f")[0].batches == (0,)


def test_a_new_writer_goes_on_counting(tmp_path: Path) -> None:
    for batch in range(3):
        with PartWriter(tmp_path, "f") as parts:
            parts.add(batch, frame(batch))
    assert [path.name[9:14] for path in part_paths(tmp_path)] == ["00000", "00001", "00002"]


def test_types_do_not_depend_on_which_part_a_row_came_from(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "f", schema=SCHEMA, every_batches=1) as parts:
        parts.add(0, frame(0))
        parts.add(1, None)  # nothing but skipped images
        parts.add(2, frame(1).iloc[:0])
        parts.add(3, frame(2).astype({"image": "category", "layer": "int64", "inflow": "float64"}))
        parts.add(4, frame(3).astype({"image": object})[list(reversed(frame(3).columns))])
    read = read_rows(read_parts(tmp_path, "f"))
    pd.testing.assert_frame_equal(read, frame(0, 2, 3))
    assert all(pq.read_schema(path).equals(SCHEMA) for path in part_paths(tmp_path))


def test_parts_without_any_row_read_as_an_empty_table(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "f", schema=SCHEMA) as parts:
        parts.add(0, None)
    assert list(read_rows(read_parts(tmp_path, "f")).columns) == SCHEMA.names
    assert len(read_rows(read_parts(tmp_path, "f"))) == 0


def test_not_a_number_and_infinity_survive(tmp_path: Path) -> None:
    table = frame(0)
    table["inflow"] = np.array([np.nan, np.inf, -np.inf, 0.1], np.float32)
    with PartWriter(tmp_path, "f", schema=SCHEMA) as parts:
        parts.add(0, table)
    pd.testing.assert_frame_equal(read_rows(read_parts(tmp_path, "f")), table)


def test_some_columns_can_be_read_alone(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "f") as parts:
        parts.add(0, frame(1, 0))
    read = read_rows(read_parts(tmp_path, "f"), ["inflow", "image"])
    pd.testing.assert_frame_equal(read, frame(0, 1)[["inflow", "image"]])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the always-full device is Linux's")
@pytest.mark.parametrize("images", [1, 20_000])
def test_a_full_disk_is_a_sentence_and_keeps_the_parts_before_it(tmp_path: Path, images: int) -> None:
    full = tmp_path / f".part-000-00001.parquet.tmp-{os.getpid()}"
    sentence = pytest.raises(WriteError, match=r"part-000-00001\.parquet cannot be written: the disk is full")
    with sentence, PartWriter(tmp_path, "f", every_batches=1) as parts:
        parts.add(0, frame(0))
        full.symlink_to("/dev/full")
        parts.add(1, frame(*range(1, images + 1)))
    assert [path.name for path in tmp_path.iterdir()] == ["part-000-00000.parquet"]
    assert read_parts(tmp_path, "f")[0].batches == (0,)


@pytest.mark.parametrize("damage", ["cut", "words", "empty", "foreign"])
def test_a_damaged_or_foreign_part_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "part-000-00000.parquet"
    with PartWriter(tmp_path, "f") as parts:
        parts.add(0, frame(0))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "foreign":
        frame(0).to_parquet(path)
    else:
        path.write_bytes(b"words" if damage == "words" else b"")
    with pytest.raises(InputError, match=r"part-000-00000\.parquet is not a whole part of a sinklab run .*--resume"):
        read_parts(tmp_path, "f")


def test_a_part_of_a_run_with_other_settings_is_named(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "g") as parts:
        parts.add(0, frame(0))
    with pytest.raises(InputError, match=r"part-000-00000\.parquet was written by a run with other settings"):
        read_parts(tmp_path, "f")


def test_a_batch_in_two_parts_is_an_error_that_names_both(tmp_path: Path) -> None:
    for rank in (0, 1):
        with PartWriter(tmp_path, "f", rank) as parts:
            parts.add(0, frame(rank))
    with pytest.raises(InputError, match=r"Batch 0 lies both in .*part-000-00000\.parquet and in .*part-001-00000"):
        read_parts(tmp_path, "f")


def test_a_row_that_comes_twice_is_an_error(tmp_path: Path) -> None:
    with PartWriter(tmp_path, "f") as parts:
        parts.add(0, frame(0))
        parts.add(1, frame(0))
    with pytest.raises(InputError, match="two rows for image_index 0, layer 0, head 0"):
        read_rows(read_parts(tmp_path, "f"))


def test_text_of_every_kind_becomes_plain_strings() -> None:
    table = pd.DataFrame({"a": ["x", "y"], "b": pd.Categorical(["x", "y"]), "c": np.array(["x", "y"], object)})
    assert [str(kind) for kind in to_arrow(table).schema.types] == ["string"] * 3
