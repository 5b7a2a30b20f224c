from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinklab.atomic import FolderLock, WriteError, atomically, remove_temporaries
from sinklab.errors import InputError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole_and_under_its_name_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "x.json"
    with atomically(path) as stream:
        stream.write(b"half")
        assert not path.exists()
        stream.write(b" and half")
    assert path.read_bytes() == b"half and half"
    assert names(path.parent) == ["x.json"]


def test_an_error_in_the_block_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomically(path) as stream:
        stream.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["x.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the always-full device is Linux's")
def test_a_full_disk_is_a_sentence_and_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"old")
    (tmp_path / f".x.json.tmp-{os.getpid()}").symlink_to("/dev/full")  # the temporary file, on a disk without room
    with (
        pytest.raises(WriteError, match=r"x\.json cannot be written: the disk is full") as error,
        atomically(path) as stream,
    ):
        stream.write(bytes(1_000_000))
    assert error.value.errno == errno.ENOSPC
    assert isinstance(error.value, InputError) and isinstance(error.value, OSError)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["x.json"]


LIMITED = """
import resource, sys
from pathlib import Path
from sinklab.atomic import WriteError, atomically
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with atomically(Path(sys.argv[1])) as stream:
        stream.write(bytes(200_000))
except WriteError as error:
    print(error)
"""


def test_a_limit_of_the_system_is_a_sentence_too(tmp_path: Path) -> None:
    code = [sys.executable, "-c", LIMITED, str(tmp_path / "x.bin")]
    result = subprocess.run(code, capture_output=True, text=True, check=True)
    assert "x.bin cannot be written: the file would be larger than this system allows" in result.stdout
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot be written"), atomically(tmp_path / "file" / "x.json"):
        pass


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    for name in (".run.json.tmp-1", "heads/.part-000-00000.parquet.tmp-22", "run.json", "heads/.keep"):
        (tmp_path / name).write_text("")
    remove_temporaries(tmp_path)
    assert names(tmp_path) == ["heads", "run.json"]
    assert names(tmp_path / "heads") == [".keep"]


def test_a_folder_has_one_writer_a_rank(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(InputError, match="Another process is writing into"):
        FolderLock(tmp_path)
    beside = FolderLock(tmp_path, rank=1)
    with pytest.raises(InputError, match="Another process"):
        FolderLock(tmp_path, rank=1)
    first.release()
    with pytest.raises(InputError, match="Another process"):  # rank 1 of the earlier run is still at work
        FolderLock(tmp_path)
    beside.release()
    again = FolderLock(tmp_path)
    again.release()
    again.release()


HOLDING = """
import sys, time
from pathlib import Path
from sinklab.atomic import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="Another process"):
        FolderLock(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    FolderLock(tmp_path).release()
