"""A folder of Parquet files, one for each batch of events, that is a whole table at any time.

    OUT/part-00000007.parquet  events of one batch; its metadata say what the table has with them
    OUT/_stream/checkpoint/    Spark's, unless it is elsewhere
    OUT/_stream/lock           held while a job runs, on a disk of this host

A commit is one file, which comes whole or not at all. The newest one decides what a batch adds.
Free of Spark.
"""

import re
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from batonmq.runtime import disk
from batonmq.runtime.durable_file import replace_file, sync_directory
from batonmq.runtime.lock_file import FolderLock
from batonmq.spark.read.storage import locate
from batonmq.spark.steps.sql import locked, names_in

Read = dict[str, tuple[int, int]]
"""Log -> (Raft index, part) of its newest event that was read. A stream reads each log in order."""
_STATE: Final = b"batonmq.state"
_PART: Final = re.compile(r"part-\d{8}\.parquet")


class HistoryState(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the table: batches up to `batch` of the checkpoint, so many events, and how far
    each log was `read`."""

    batch: int
    rows: int
    read: Read
    stream: ClassVar[str] = ""
    """None is noted: `read` says what the table has, whatever checkpoint it came by."""


class ParquetTable:
    """`open` first, `close` at the end. One job at a time."""

    own = "_stream"

    def __init__(self, output: str) -> None:
        """Raises ValueError for a URI that names no file system here."""
        self._storage, self.folder = locate(output)
        self.location = self._storage.uri(self.folder)
        self._growing = f"{self.folder}/{self.own}/growing"
        self._lock: FolderLock | None = None
        self._state: HistoryState | None = None
        self._number = 0

    def state(self) -> HistoryState | None:
        """None: nothing was committed yet."""
        return self._state

    @property
    def rows(self) -> int:
        return self._state.rows if self._state else 0

    def open(self) -> None:
        """Raises ValueError for a folder of other things or in use, OSError."""
        self._parts()  # nothing is made in a folder of other things
        self._lock = locked(f"{self.location}/{self.own}", "lock")
        if parts := self._parts():  # the job before may have committed until it released the lock
            place = f"{self.folder}/{parts[-1]}"
            with self._storage.file_system.open_input_file(place) as file:
                text = (pq.read_metadata(file).metadata or {}).get(_STATE)
            if text is None:
                raise ValueError(f"{place}: it is not of stream_history; name an empty folder")
            self._state = msgspec.json.decode(text, type=HistoryState)
            self._number = int(parts[-1].removeprefix("part-").removesuffix(".parquet"))

    def _parts(self) -> list[str]:
        """Its files, oldest first. Raises ValueError for a folder of other things, OSError."""
        names = names_in(self.location)
        parts = [name for name in names if _PART.fullmatch(name)]
        if others := sorted({*names} - {*parts, self.own}):
            raise ValueError(
                f"--output {self.location}: it holds {others[0]}, so this stream_history did not "
                "write it. Name a new folder, and a new --checkpoint if you give one; what an "
                "earlier version wrote is read beside it: epoch_history --history-parquet OLD,NEW"
            )
        return parts

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def commit(self, rows: pa.Table, state: HistoryState) -> None:
        """Makes rows part of the table, of which `state` says what it has then. Raises OSError."""
        place = f"{self.folder}/part-{self._number + 1:08d}.parquet"
        made = pa.BufferOutputStream()
        pq.write_table(rows.replace_schema_metadata({_STATE: msgspec.json.encode(state)}), made)
        if self._storage.root:
            system = self._storage.file_system
            with system.open_output_stream(self._growing) as stream:
                stream.write(made.getvalue())
            system.move(self._growing, place)
        else:
            # Spark's checkpoint must not be on the disk without it.
            replace_file(Path(self._growing), memoryview(made.getvalue()))
            disk.replace(self._growing, place)
            sync_directory(Path(self.folder))
        self._state, self._number = state, self._number + 1
