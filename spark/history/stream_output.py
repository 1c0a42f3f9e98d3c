"""The output folder: a Parquet table that is whole after any crash, and the note of what is in it.

    OUT/group=.../day=.../part-00000007-0.parquet   the table
    OUT/_stream/commit.json                         what was read, and the files of the last commit
    OUT/_stream/staging/00000008/                   files of the next commit
    OUT/_stream/checkpoint/                         Spark's, unless it is elsewhere
    OUT/_stream/lock                                held while a job runs

A commit is one replacement of `commit.json`, which holds both what was read and which staged files
belong to the table. Staged files get their place after it; a job that was killed in between moves
them when it starts again. Readers pass over names that begin with an underscore. The folder must be
on a file system with atomic renames. Free of Spark.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from batonmq.runtime.durable_file import replace_file, sync_directory
from batonmq.spark.read.columns import TABLES

Read = dict[str, tuple[int, int]]
"""Log -> (Raft index, part) of its newest event that was read. A stream reads each log in order."""
VERSION: Final = 3
"""Until version 2 the job read a topic."""
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


def output_folder(text: str) -> Path:
    """A path, or a `file:` address of this host. Raises ValueError for what has no renames."""
    path = re.sub(r"^file:(//(localhost)?)?(?=/(?!/))", "", text, flags=re.IGNORECASE)
    if not path or _ADDRESS.match(path):
        raise ValueError(
            f"--output {text!r}: files are renamed into the table, which an object store cannot "
            "do: it must be a path (or file:///path) that the driver and the executors see; copy "
            "the table from there. --checkpoint may be elsewhere"
        )
    return Path(path).resolve()


class StreamOutput:
    """`open` first, `close` at the end. One job at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read: Read = {}
        self.commits = 0
        self.rows = 0
        self.batch: int | None = None
        """The checkpoint's number of the last batch; None where nothing is known of it."""
        self._own = folder / "_stream"
        self._lock = -1

    @property
    def checkpoint(self) -> Path:
        return self._own / "checkpoint"

    @property
    def staging(self) -> Path:
        """Where the files of the next commit go."""
        return self._own / "staging" / f"{self.commits + 1:08d}"

    def open(self) -> None:
        """Raises ValueError for a folder of other things or in use, OSError."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--output {self.folder}: it must be a folder")
        if not self._own.is_dir() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(
                f"--output {self.folder}: it is not empty and not of stream_history; name an empty "
                "folder, or one that stream_history wrote"
            )
        self._own.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ValueError(f"--output {self.folder}: another job writes there") from None
        self._load()

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def check_follows(self, batch: int) -> None:
        """Raises ValueError if the checkpoint is further than the table: it would lack a part."""
        held = self.batch if self.commits else -1
        if held is not None and batch > held + 1:
            has = f"has nothing behind batch {held}" if held >= 0 else "has no batch yet"
            raise ValueError(
                f"the checkpoint continues with batch {batch}, and {self.folder} {has}: it is the "
                "checkpoint of another table, or the table is an old copy. Begin with a new folder "
                f"as --checkpoint (the default one: remove {self.checkpoint}); events that the "
                "table has are passed over"
            )

    def begin(self) -> Path:
        """An empty place for the files of the next commit; those of one that failed are gone."""
        self._clear()
        return self.staging

    def commit(self, read: Read, rows: int, batch: int) -> int:
        """Makes what was staged part of the table; `read` is what is read by then, `batch` the
        checkpoint's number of it.

        Returns the number of files. Raises OSError.
        """
        number = self.commits + 1
        files = [
            [
                str(path.relative_to(self.staging)),
                _final(path.relative_to(self.staging), number, at),
            ]
            for at, path in enumerate(sorted(self.staging.rglob("*.parquet")))
        ]
        for staged, _ in files:
            _sync(self.staging / staged)
        _sync_folders(self._own, [self.staging / staged for staged, _ in files])
        document = {
            "version": VERSION,
            "commit": number,
            "rows": self.rows + rows,
            "batch": batch,
            "files": files,
            "read": read,
        }
        replace_file(self._own / "commit.json", json.dumps(document, indent=1).encode())
        self._take(document)
        return len(files)

    def _load(self) -> None:
        path = self._own / "commit.json"
        try:
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            return
        except ValueError as error:
            raise ValueError(f"{path}: it cannot be read: {error}") from error
        if document.get("version") != VERSION:
            raise ValueError(
                f"{path}: version {document.get('version')!r}; this program continues a table of "
                f"version {VERSION}: name a new folder as --output"
            )
        self._take(document)

    def _take(self, document: dict[str, Any]) -> None:
        read = {log: (index, part) for log, (index, part) in document["read"].items()}
        self.commits = document["commit"] - 1
        staging = self.staging
        for staged, final in document["files"] if staging.is_dir() else ():
            source, place = staging / staged, self.folder / final
            if source.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, place)
            elif not place.exists():
                raise ValueError(f"{place}: committed, and neither there nor at {source}")
        _sync_folders(self.folder, [self.folder / final for _, final in document["files"]])
        self.read, self.commits, self.rows = read, document["commit"], document["rows"]
        self.batch = document.get("batch")
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._own / "staging", ignore_errors=True)


def _final(staged: Path, number: int, at: int) -> str:
    return str(staged.with_name(f"part-{number:08d}-{at}.parquet"))


def _sync_folders(top: Path, files: list[Path]) -> None:
    """Makes the names of these files durable, and those of their folders up to `top`."""
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(top)}
    for folder in sorted(folders):
        if folder.is_dir():  # old days may be removed by whoever owns the table
            sync_directory(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- events as files, each event once --------------------------------------------------------------

_ORDER = [(name, "ascending") for name in ("log", "raft_index", "part")]


def take(rows: pa.Table, read: Mapping[str, tuple[int, int]]) -> tuple[pa.Table, Read]:
    """Rows (of table history) that are newer than what was read, in the order of each log; and what
    is read with them."""
    rows = rows.cast(TABLES["history"]).sort_by(_ORDER)
    now = dict(read)
    new = []
    for log, *position in zip(*(rows[name].to_pylist() for name, _ in _ORDER), strict=True):
        place = (position[0], position[1])
        new.append(log not in now or place > now[log])
        if new[-1]:
            now[log] = place
    return rows.filter(pa.array(new, pa.bool_())), now


def write_events(rows: pa.Table, folder: Path) -> None:
    """One file for each broker group (null for events of the controllers alone) and day (UTC), in
    the order of the rows. Raises OSError."""
    day = pc.cast(rows["time"], pa.date32())
    rows = rows.append_column("group", rows["broker_name"]).append_column("day", day)
    folders = pa.schema([rows.schema.field(name) for name in ("group", "day")])
    ds.write_dataset(
        rows, folder, format="parquet", partitioning=ds.partitioning(folders, flavor="hive"),
        use_threads=False, existing_data_behavior="overwrite_or_ignore",
    )  # fmt: skip
