"""A folder of Parquet files that is a whole table after any crash, and the note of what is in it.

    OUT/group=.../day=.../part-00000007-0.parquet   the table
    OUT/_stream/commit.json                         what was read, and the files of the last commit
    OUT/_stream/staging/00000008/                   files of the next commit
    OUT/_stream/checkpoint/                         Spark's, unless it is elsewhere
    OUT/_stream/lock                                held while a job runs

A commit is one replacement of `commit.json`, which holds both what was read and which staged files
belong to the table. Staged files get their place after it; a job that was killed in between moves
them when it starts again. The folder must be on a file system with atomic renames. Free of Spark.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from batonmq.runtime import disk
from batonmq.runtime.durable_file import replace_file, sync_below, sync_directory

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


class HistoryState(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the table: batches up to `batch` of the checkpoint, so many events, and how far
    each log was `read`."""

    batch: int
    rows: int
    read: Read
    stream: ClassVar[str] = ""
    """None is noted: `read` says what the table has, whatever checkpoint it came by."""


class _Commit(HistoryState, frozen=True, kw_only=True):
    """The note. `files`: [place below the staging folder, place below the table's]."""

    version: int
    commit: int
    files: list[tuple[str, str]]


class ParquetTable:
    """`open` first, `close` at the end. One job at a time."""

    own = "_stream"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder)
        self._own = folder / self.own
        self._last: _Commit | None = None
        self._lock = -1

    def state(self) -> HistoryState | None:
        """None: nothing was committed yet."""
        return self._last

    @property
    def rows(self) -> int:
        return self._last.rows if self._last else 0

    @property
    def _number(self) -> int:
        """Of the next commit."""
        return self._last.commit + 1 if self._last else 1

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

    def begin(self) -> Path:
        """An empty place for the files of the next commit. Raises OSError."""
        # The commit takes all that lies there, so what a failed batch left must be gone for sure.
        disk.rmtree(self._own / "staging")
        return self._staging(self._number)

    def commit(self, batch: int, rows: int, read: Read) -> int:
        """Makes what was staged, so many rows, part of the table; `read`: how far it is then.

        Returns the number of files. Raises OSError.
        """
        number = self._number
        staging = self._staging(number)
        staged = [path.relative_to(staging) for path in sorted(staging.rglob("*.parquet"))]
        sync_below(staging, [staging / path for path in staged])
        _sync_folders(self._own, [staging / path for path in staged])
        files = [
            (str(path), str(path.with_name(f"part-{number:08d}-{at}.parquet")))
            for at, path in enumerate(staged)
        ]
        commit = _Commit(
            version=VERSION, commit=number, files=files, batch=batch, rows=self.rows + rows,
            read=read,
        )  # fmt: skip
        note = msgspec.json.format(msgspec.json.encode(commit), indent=1)
        replace_file(self._own / "commit.json", note)
        self._take(commit)
        return len(files)

    def _load(self) -> None:
        path = self._own / "commit.json"
        try:
            document = msgspec.json.decode(path.read_bytes())
            version = document.get("version")
            commit = msgspec.convert(document, _Commit) if version == VERSION else None
        except FileNotFoundError:
            return
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: it cannot be read: {error}") from error
        if commit is None:
            raise ValueError(
                f"{path}: version {version!r}; this program continues a table of version "
                f"{VERSION}: name a new folder as --output"
            )
        self._take(commit)

    def _take(self, commit: _Commit) -> None:
        """Gives the files of a commit their places, as far as they have not got them."""
        staging = self._staging(commit.commit)
        for staged, final in commit.files if staging.is_dir() else ():
            source, place = staging / staged, self.folder / final
            if source.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, place)
            elif not place.exists():
                raise ValueError(f"{place}: committed, and neither there nor at {source}")
        _sync_folders(self.folder, [self.folder / final for _, final in commit.files])
        self._last = commit
        disk.rmtree(self._own / "staging")

    def _staging(self, number: int) -> Path:
        return self._own / "staging" / f"{number:08d}"


def _sync_folders(top: Path, files: list[Path]) -> None:
    """Makes the names of these files durable, and those of their folders up to `top`."""
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(top)}
    for folder in sorted(folders):
        if folder.is_dir():  # old days may be removed by whoever owns the table
            sync_directory(folder)
