"""A run folder: what was asked, what came out, and enough to go on after a kill or to read it years later.

with Run.create("runs/mine", settings={"options": {"dtype": "float32"}}) as run:
    done = run.done_batches()
    with run.part_writer(rank=0) as parts:
        parts.add(0, frame)
    run.write_json("summary.json", summary)
    run.update(status="complete")
Run.open("runs/mine").heads
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sinklab.atomic import FolderLock, WriteError, atomically, is_leftover, remove_temporaries, write_error
from sinklab.config import CONFIG, SCHEMA_VERSION, new_config, own_version, read_config, read_object
from sinklab.errors import InputError, NotFoundError
from sinklab.parts import Part, PartWriter, part_paths, read_parts, read_rows, to_arrow
from sinklab.sealed import read_sealed, write_sealed
from sinklab.settings import differences, fingerprint, library_versions, plain, require_text, utc_now

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["PartWriter", "Run", "WriteError", "differences", "fingerprint", "library_versions", "plain", "utc_now"]

RESULTS = (
    *("heads", "effects", "training", "diagnosed", "tensorboard", "tables", "overlays", "figures"),
    *("sinks.parquet", "summary.json", "report.html"),
)
"""What a run writes beside run.json, and all that `overwrite` removes; anything else in the folder is the user's."""


class Run:
    """One run folder. `create` makes, resumes or replaces one; `join` is for ranks above 0; `open` reads one."""

    def __init__(self, path: Path, config: dict[str, Any], lock: FolderLock | None = None, *, resumed: bool = False):
        self.path = path
        self.config = config
        """run.json as it stands."""
        self.resumed = resumed
        self._lock = lock
        self._heads: tuple[object, pd.DataFrame] | None = None

    @classmethod
    def create(
        cls, path: str | Path, *, settings: Mapping[str, Any], overwrite: bool = False, resume: bool = False
    ) -> Run:
        """Start a run in `path`, or go on with the one there (`resume`), or replace it (`overwrite`).

        `settings` is everything that the numbers depend on; a run is resumed only under equal settings, and the error
        names those that differ. `resume` where there is nothing yet starts afresh, so that one command serves both.
        `overwrite` replaces sinklab's runs only and removes only what a run writes. The folder stays locked until
        `close`. Raises InputError, and WriteError where the folder cannot be made.
        """
        path = Path(path)
        require_text(path, "The folder")
        if overwrite and resume:
            raise InputError("--resume goes on with a run and --overwrite replaces it: give one of them.")
        _refuse(path, overwrite or resume)  # before anything is written into a folder that is not ours
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(path, error) from error
        lock = FolderLock(path)
        try:
            _refuse(path, overwrite or resume)  # again: another process may just have finished there
            occupied = (path / CONFIG).exists()
            if occupied and resume:
                run = cls(path, read_config(path), lock, resumed=True)
                run._check_settings(settings)
                remove_temporaries(path)
                return run
            run = cls(path, new_config(settings), lock)
            if occupied:
                read_config(path, whole=False)
                run._clear()
            else:
                remove_temporaries(path)  # of a process killed before it had a run.json
            run.write_json(CONFIG, run.config)
            return run
        except BaseException:
            lock.release()
            raise

    @classmethod
    def join(cls, path: str | Path, *, settings: Mapping[str, Any], rank: int) -> Run:
        """For rank 1 and above, once rank 0 has created the run: the same check of settings, and a lock of its own."""
        assert rank > 0, "rank 0 creates"
        run = cls.open(path)
        run._check_settings(settings)
        run._lock = FolderLock(run.path, rank)
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """A run to read. Raises NotFoundError where there is none, InputError for one that cannot be understood."""
        path = Path(path)
        if not path.is_dir():
            raise NotFoundError(f"There is no run folder {path}.")
        return cls(path, read_config(path))

    def close(self) -> None:
        """Let other processes write into the folder; harmless when repeated."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.config.get('status', 'no status')})"

    # Writing: every file is whole or absent; each of these raises WriteError. Names are relative to the folder.

    def update(self, **fields: Any) -> None:
        """Set fields of run.json and save it."""
        self.config = {**self.config, **plain(fields)}
        self.write_json(CONFIG, self.config)

    def write_bytes(self, name: str, content: bytes) -> Path:
        path = self._inside(name)
        with atomically(path) as stream:
            stream.write(content)
        return path

    def write_text(self, name: str, content: str) -> Path:
        return self.write_bytes(name, content.encode())

    def write_json(self, name: str, content: Any) -> Path:
        """Save as strict JSON: NaN and infinity become null (see `plain`)."""
        return self.write_text(name, json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_table(self, name: str, frame: pd.DataFrame, *, schema: pa.Schema | None = None) -> Path:
        """Save a table without its index, as Parquet or CSV by the name's ending; `schema` is Parquet's."""
        path = self._inside(name)
        if path.suffix not in (".parquet", ".csv"):
            raise InputError(f"A table is saved as .parquet or .csv, not as {name}.")
        if path.suffix == ".csv":
            return self.write_text(name, frame.to_csv(index=False, lineterminator="\n"))
        with atomically(path) as stream:
            write_sealed(to_arrow(frame, schema), stream)
        return path

    def part_writer(
        self, rank: int = 0, *, schema: pa.Schema | None = None, every_batches: int = 16, every_seconds: float = 20.0
    ) -> PartWriter:
        """The writer of this rank's head parts."""
        heads, settings = self.path / "heads", self.config.get("fingerprint", "")
        return PartWriter(
            heads, settings, rank, schema=schema, every_batches=every_batches, every_seconds=every_seconds
        )

    # Reading.

    def parts(self) -> list[Part]:
        """What the head parts say about themselves. Raises InputError for a damaged or foreign one, naming it."""
        return read_parts(self.path / "heads", self.config.get("fingerprint", ""))

    def done_batches(self) -> set[int]:
        """Numbers of the batches that lie in parts, of all ranks."""
        return {batch for part in self.parts() for batch in part.batches}

    def skipped(self) -> list[tuple[str, str]]:
        """(image, reason) of the images that could not be used, in the order of the list."""
        rows = [(batch, i, row) for part in self.parts() for i, (batch, *row) in enumerate(part.skipped)]
        return [(image, reason) for _, _, (image, reason) in sorted(rows)]

    @property
    def heads(self) -> pd.DataFrame:
        """One row per image, layer and head, of all parts, sorted by image_index, layer and head.

        The table is kept until a part comes or goes; what is handed out may be changed freely.
        """
        state = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in part_paths(self.path / "heads")]
        if self._heads is None or self._heads[0] != state:
            self._heads = (state, self.read_heads())
        return self._heads[1].copy(deep=False)

    def read_heads(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Like `heads`, read afresh, and only some columns if they are named. Raises NotFoundError without any part."""
        parts = self.parts()
        if not parts:
            raise NotFoundError(f"The run {self.path} has no head table yet.")
        return read_rows(parts, columns)

    @property
    def sinks(self) -> pd.DataFrame:
        """The rows that are sink events under the run's rule, with their classes."""
        return self._table("sinks.parquet")

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        loaded: dict[str, Any] = read_object(self._existing("summary.json"))
        return loaded

    def table(self, name: str) -> pd.DataFrame:
        """A table of `tables/` by its name without ending. Raises NotFoundError, naming those there are."""
        known = sorted(path.stem for path in (self.path / "tables").glob("*.csv"))
        if name not in known:
            raise NotFoundError(f"The run {self.path} has no table {name!r}; it has: {', '.join(known) or 'none'}.")
        return self._table(f"tables/{name}.csv")

    def _table(self, name: str) -> pd.DataFrame:
        import pandas as pd

        path = self._existing(name)
        if path.suffix == ".parquet":
            return read_sealed(path).to_pandas()
        try:
            return pd.read_csv(path, keep_default_na=False, na_values=[""])  # null is the name of an edit
        except ValueError as error:  # pandas' own errors among them
            raise InputError(f"{path} cannot be read as a table: {error}.") from error

    def _existing(self, name: str) -> Path:
        path = self._inside(name)
        if not path.is_file():
            raise NotFoundError(f"The run {self.path} has no {name} (its status: {self.config.get('status')}).")
        return path

    def _inside(self, name: str) -> Path:
        assert not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts, name
        return self.path / name

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises InputError, naming what differs, unless the run was made with these settings."""
        before = self.config.get("settings", {})
        if self.config.get("fingerprint") != fingerprint(before):
            raise InputError(
                f"The fingerprint in {self.path / CONFIG} is not that of the settings in it: the file was changed or "
                "is damaged, and the run cannot be resumed. Use --overwrite, or another folder."
            )
        changed = differences(before, settings)
        if changed:
            raise InputError(
                f"The run {self.path} was made with other settings and cannot be resumed with these: "
                f"{'; '.join(changed)}. Give the same settings, --overwrite, or another folder."
            )

    def _clear(self) -> None:
        """Remove an earlier run's results. A kill in between leaves a folder that says so and can be overwritten."""
        from shutil import rmtree

        self.write_json(CONFIG, {"schema_version": SCHEMA_VERSION, "sinklab": own_version(), "status": "replaced"})
        for path in (self.path / name for name in RESULTS):
            try:
                if path.is_dir() and not path.is_symlink():
                    rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise WriteError(f"{path} cannot be removed: {error.strerror or error}.", error.errno) from error
        remove_temporaries(self.path)


def _refuse(path: Path, may_exist: bool) -> None:
    """Raises InputError unless `path` is free, or holds a run that the user wants to resume or overwrite."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a run needs a folder.")
    if not path.is_dir() or all(is_leftover(entry.name) for entry in path.iterdir()):
        return
    if not (path / CONFIG).is_file():
        raise InputError(f"{path} is not empty and holds no sinklab run ({CONFIG}): choose another folder.")
    if not may_exist:
        raise InputError(
            f"{path} holds a run already: --resume goes on with it, --overwrite replaces it, or choose another folder."
        )


def noun_in(run: Path) -> str:
    """What the inputs of the run in a folder are called; "image" where its run.json does not say."""
    try:
        noun = json.loads((run / "run.json").read_text(encoding="utf-8"))["images"]["noun"]
    except (OSError, ValueError, LookupError, TypeError):  # whoever needs the file says what is wrong with it
        return "image"
    return noun if isinstance(noun, str) else "image"
