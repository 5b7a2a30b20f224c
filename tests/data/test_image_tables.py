"""Tables of pictures: what Hugging Face's datasets writes is read row by row, from Parquet and from Arrow."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from sinklab.data.decode import UnreadableImage
from sinklab.data.image_tables import ImageTable, _mapped, table_files
from sinklab.data.labelled import labelled_images
from sinklab.errors import InputError, NotFoundError


def pixels(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels(seed)).save(stream, "png")
    return stream.getvalue()


def table(count: int = 5, *, names: list[str] | None = None, first: int = 0) -> pa.Table:
    rows = [{"bytes": png(first + i), "path": None} for i in range(count)]
    held = pa.table({"image": rows, "label": [(first + i) % 3 for i in range(count)]})
    if names is None:
        return held
    told = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    return held.replace_schema_metadata({"huggingface": json.dumps(told)})


def write(path: Path, held: pa.Table, group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(held, path, row_group_size=group)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, held.schema) as writer:
            writer.write_table(held, max_chunksize=group)
    return path


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_pictures_and_labels_come_row_by_row_through_all_files(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"data/a.{ending}", table(5, names=["cat", "dog", "owl"]))
    write(tmp_path / f"data/b.{ending}", table(3, names=["cat", "dog", "owl"], first=5))
    found = ImageTable(table_files(tmp_path))
    assert len(found) == 8 and found.classes == ("cat", "dog", "owl")
    assert [found.label(i) for i in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    for i in (7, 0, 4, 5):
        assert torch.equal(found.picture(i), torch.from_numpy(pixels(i)).permute(2, 0, 1))


def test_numbers_without_names_are_their_own_names_and_rows_without_bytes_are_said(tmp_path: Path) -> None:
    held = table(4).set_column(0, "img", pa.array([png(0), png(1), None, b"damaged"]))
    found = ImageTable([write(tmp_path / "a.parquet", held)])
    assert found.classes == ("0", "1", "2") and found.label(3) == 0
    with pytest.raises(UnreadableImage, match="a.parquet/2"):
        found.picture(2)
    with pytest.raises(UnreadableImage, match="a.parquet/3"):
        found.picture(3)


def test_validation_tables_have_the_training_tables_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", table(3))
    assert ImageTable([path], classes=("2", "1", "0")).label(0) == 2
    with pytest.raises(InputError, match="'2' is none of the 2 classes"):
        ImageTable([path], classes=("0", "1"))


def test_what_is_no_table_of_images_is_refused(tmp_path: Path) -> None:
    assert table_files(tmp_path / "photo.jpg") == [] and table_files(tmp_path) == []
    write(tmp_path / "run/heads/part-0.parquet", pa.table({"head": [1]}))
    assert table_files(tmp_path) == []  # a table without pictures in a folder of photographs
    with pytest.raises(NotFoundError):
        ImageTable([])
    with pytest.raises(NotFoundError, match="no file nowhere.arrow"):
        ImageTable(table_files("nowhere.arrow"))
    with pytest.raises(InputError, match="holds no images"):
        ImageTable([write(tmp_path / "a.parquet", pa.table({"text": ["a"]}))])
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a whole Parquet file"):
        ImageTable([tmp_path / "b.parquet"])


def test_hugging_faces_own_files_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [Image.fromarray(pixels(i)) for i in range(4)], "label": [0, 1, 1, 0]}
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(str(tmp_path / "disk"))
    saved.to_parquet(str(tmp_path / "table" / "train.parquet"))
    for folder in ("disk", "table"):
        found = ImageTable(table_files(tmp_path / folder))
        assert found.classes == ("a", "b") and [found.label(i) for i in range(4)] == [0, 1, 1, 0]
        assert torch.equal(found.picture(3), torch.from_numpy(pixels(3)).permute(2, 0, 1))


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables_with_different_columns_are_not_read_together(tmp_path: Path, ending: str) -> None:
    whole = write(tmp_path / f"a.{ending}", table(2))
    bare = write(tmp_path / f"b.{ending}", table(2).drop_columns("label"))
    other = write(tmp_path / f"c.{ending}", table(2).drop_columns("image"))
    for files in ((whole, bare), (bare, whole)):
        with pytest.raises(InputError, match="tables given together have the same ones"):
            ImageTable(files)
    with pytest.raises(InputError, match="holds no images"):
        ImageTable([whole, other])


def test_a_label_beyond_the_names_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names 2 classes, but a row has the label 2"):
        ImageTable([write(tmp_path / "a.parquet", table(3, names=["cat", "dog"]))])


def test_half_an_arrow_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", table(5))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match=r"a\.arrow is not a whole Arrow file: .*[^.]\.$"):
        ImageTable([path])


def photo_folder(root: Path) -> Path:
    for name in ("cats", "dogs"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "1.png").write_bytes(png(len(name)))
    return root


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_tables_beside_photographs_do_not_take_their_place(tmp_path: Path, ending: str) -> None:
    """A sinklab run's head table, a damaged file and a table of file names leave photographs what they are."""
    run = photo_folder(tmp_path) / "runs/mine"
    write(run / f"heads/part-0.{ending}", pa.table({"image": ["cats/1.png"], "head": [1]}))
    write(run / f"kept/pictures.{ending}", table(3))  # pictures, but a run's own
    (run / "run.json").write_text(json.dumps({"schema_version": 1, "sinklab": "0.1.0"}))
    (tmp_path / f"cats/damaged.{ending}").write_bytes(b"nothing")
    write(tmp_path / f"index.{ending}", table(0).select(["label"]).add_column(0, "image", pa.array([], pa.string())))
    write(tmp_path / f".hidden/pictures.{ending}", table(3))
    assert table_files(tmp_path) == []
    found = labelled_images([tmp_path])
    assert len(found) == 2 and found.classes == ("cats", "dogs")


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_damaged_table_among_tables_is_named_and_not_left_out(tmp_path: Path, ending: str) -> None:
    bad = tmp_path / f"b.{ending}"
    bad.write_bytes(b"nothing")
    assert table_files(tmp_path) == [bad]  # there is nothing else that it could be
    whole = write(tmp_path / f"a.{ending}", table(3))
    assert table_files(tmp_path) == [whole, bad]
    with pytest.raises(InputError, match=rf"b\.{ending} is not a whole"):
        labelled_images([tmp_path])


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2]),
        pa.array(["a.png", "b.png"]),
        pa.array([[1, 2], [3]], pa.list_(pa.uint8())),
        pa.array([{"path": "a.png"}, {"path": "b.png"}]),
    ],
    ids=["integers", "names", "lists", "paths"],
)
def test_a_column_that_can_hold_no_pictures_is_refused_before_a_picture_is_asked_for(
    tmp_path: Path, ending: str, column: Any
) -> None:
    path = write(tmp_path / f"a.{ending}", pa.table({"image": column, "label": [0, 1]}))
    for files in ([path], table_files(tmp_path)):
        with pytest.raises(InputError, match="holds no images: its column image is of type"):
            ImageTable(files)
    whole = write(tmp_path / f"b.{ending}", pa.table({"image": [png(0), png(1)], "label": [0, 1]}))
    with pytest.raises(InputError, match="its column image is of type"):
        ImageTable([whole, path])


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
)
def test_bytes_of_every_kind_are_pictures(tmp_path: Path, kind: Any) -> None:
    column = pa.array([png(0), png(1)])
    held = pa.table({"image": column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)})
    found = ImageTable([write(tmp_path / "a.arrow", held)])
    assert torch.equal(found.picture(1), torch.from_numpy(pixels(1)).permute(2, 0, 1))


def test_the_hash_follows_the_names_of_classes(tmp_path: Path) -> None:
    hashes = set()
    for names in (["cat", "dog", "owl"], ["cat", "dog", "eel"]):
        hashes.add(ImageTable([write(tmp_path / "a.arrow", table(3, names=names))]).sha256)
        _mapped.cache_clear()
    assert len(hashes) == 2
