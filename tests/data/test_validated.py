"""The pictures that a training validated on are found again from any folder, and others are not taken for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import write_pictures

from sinklab.data.labelled import labelled_images
from sinklab.data.procedural import ProceduralImages
from sinklab.data.validated import found_again, where_found
from sinklab.errors import InputError, NotFoundError


def kept(sources: list[str], *, count: int = 3, learned_from: bool = False) -> dict[str, Any]:
    """What a training keeps of its pictures, through a file and back."""
    told = where_found(labelled_images(sources), count=count, learned_from=learned_from)
    again: dict[str, Any] = json.loads(json.dumps(told))
    return again


def write_table(path: Path, pictures: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"bytes": one.read_bytes(), "path": one.name} for one in sorted(pictures.glob("*.png"))]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": rows, "label": [number % 2 for number in range(len(rows))]}), path)
    return path


def test_a_relative_folder_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path / "photos/cats", 4)
    monkeypatch.chdir(tmp_path)
    told = kept(["photos"])
    assert told["sources"] == ["photos"]
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    found = found_again(told, "m")
    assert [ref.id for ref in found] == ["cats/000.png", "cats/001.png", "cats/002.png"]
    assert found[0].content() == (tmp_path / "photos/cats/000.png").read_bytes()
    assert any("the first 3 of 4 images of photos, as its training validated on." in note for note in found.notes)


def test_lists_and_patterns_are_found_again_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path / "photos", 4)
    (tmp_path / "list.txt").write_text("photos/003.png\nphotos/001.png\n")
    monkeypatch.chdir(tmp_path)
    told = [kept(["@list.txt"]), kept(["photos/00{0..2}.png"])]
    monkeypatch.chdir("/")
    assert [Path(ref.path).name for ref in found_again(told[0], "m")] == ["003.png", "001.png"]
    assert [Path(ref.path).name for ref in found_again(told[1], "m")] == ["000.png", "001.png", "002.png"]


def test_rows_of_tables_are_pictures_with_names_of_their_own(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "photos", 3)
    for folder in ("a", "b"):
        write_table(tmp_path / folder / "0.parquet", pictures)
    found = found_again(kept([str(tmp_path / "a"), str(tmp_path / "b")], count=5), "m")
    assert [ref.id for ref in found] == ["a/0.parquet/0", "a/0.parquet/1", "a/0.parquet/2", "b/0.parquet/0"] + [
        "b/0.parquet/1"
    ]
    assert found[4].content() == (pictures / "001.png").read_bytes()


def test_what_is_gone_or_changed_asks_for_images_after_the_model(tmp_path: Path) -> None:
    photos = write_pictures(tmp_path / "photos", 4)
    table = write_table(tmp_path / "table.parquet", photos)
    told, rows = kept([str(photos)], learned_from=True), kept([str(table)])
    (photos / "003.png").unlink()
    with pytest.raises(InputError, match=r"m learned from and was validated on .*it had 4, and there are 3.*after the"):
        found_again(told, "m")
    for path in [*photos.iterdir(), table]:
        path.unlink()
    for gone in (told, rows):
        with pytest.raises(NotFoundError, match=r"no longer there\. Give images after the model\."):
            found_again(gone, "m")


def test_pictures_that_lie_nowhere_are_asked_for_and_drawn_ones_are_drawn() -> None:
    class Own:
        classes = ()

    with pytest.raises(InputError, match=r"does not name\. Give images after the model\."):
        found_again(where_found(Own(), count=3), "m")
    drawn = ProceduralImages(count=5, size=16, split="validation")
    found = found_again(where_found(drawn, count=3), "m")
    assert len(found) == 5 and any("No images were named: drawn pictures" in note for note in found.notes)
