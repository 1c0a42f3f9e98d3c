"""One consume queue: where the messages of a (topic, queue) lie in the commit log.

A queue is an array of 20-byte units in files of fixed size, each file named by the byte position
of its first unit. Unit n of the queue is message n of that queue, so position = index x 20.

    commit-log offset i64 | record size i32 | tags code i64        (big endian)

Origin: Java `ConsumeQueue`; the files are byte-compatible. The newest units live in a tail in
memory and reach the file in one `pwrite` when the flush tick comes or the tail is large: a queue is
derived from the log, so recovery rebuilds what a crash took from the tail.

Invariant: units of one queue have growing commit-log offsets; only leading units (and gaps of a
damaged log) may be filler, (0, 0x7FFFFFFF, 0). One thread owns a queue; only `sync_file` on the
paths that `write_back` returned may run elsewhere.
"""

import logging
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from epoch.durable_file import sync_directory, sync_file, write_all, zero_range
from protocol.errors import CorruptLogError
from store.file_handles import FileHandles

log = logging.getLogger(__name__)

UNIT = struct.Struct(">qiq")
UNIT_SIZE = UNIT.size
assert UNIT_SIZE == 20
FILLER_SIZE = 0x7FFFFFFF
FILLER = UNIT.pack(0, FILLER_SIZE, 0)

# Recovery looks at no more than this many files of a queue, as Java does.
_RECOVERED_FILES_MAX = 3
_TAIL_BYTES_MAX = 64 * 1024
_SCAN_UNITS = 1 << 15
_FIRST_SCAN_UNITS = 1 << 8
_NAME_DIGITS = 20

_pack = UNIT.pack


class Boundary(StrEnum):
    """Which unit a time stands for, spelled as the `boundaryType` header field."""

    LOWER = "lower"
    UPPER = "upper"


class ConsumeQueue:
    """Units of one (topic, queue id). Offsets are unit indexes unless a name says otherwise."""

    __slots__ = (
        "_directory",
        "_dirty",
        "_file_size",
        "_handles",
        "_minimum",
        "_starts",
        "_tail",
        "_tail_position",
        "last_physical_end",
        "loaded_end",
        "queue_id",
        "topic",
    )

    def __init__(
        self,
        directory: Path,
        topic: str,
        queue_id: int,
        *,
        file_size: int = 6_000_000,
        handles: FileHandles | None = None,
    ) -> None:
        """Nothing is created on disk before the first unit is written back.

        `file_size` in bytes, rounded up to whole units. Call `load` if the folder may hold files.
        """
        self.topic = topic
        self.queue_id = queue_id
        self._directory = str(directory)
        self._file_size = -(-file_size // UNIT_SIZE) * UNIT_SIZE
        self._handles = FileHandles(8) if handles is None else handles
        # Byte positions of the files' first units, ascending and without gaps.
        self._starts: list[int] = []
        self._tail = bytearray()
        self._tail_position = 0
        self._minimum = 0
        # Files and folders to sync: with a new file also the folders that lead to it.
        self._dirty: set[str] = set()
        #: End (exclusive) in the commit log of the last record built here; 0 if none.
        self.last_physical_end = 0
        #: Units below it were found in the files; the others are this process's own.
        self.loaded_end = 0

    # -- what is there

    @property
    def max_offset(self) -> int:
        """Index behind the last unit (exclusive end)."""
        return (self._tail_position + len(self._tail)) // UNIT_SIZE

    @property
    def min_offset(self) -> int:
        """Index of the first unit whose record the log still has, as of `correct_min_offset`."""
        return self._minimum

    @property
    def directory(self) -> Path:
        return Path(self._directory)

    def __len__(self) -> int:
        return self.max_offset - self._minimum

    def __bool__(self) -> bool:
        return True

    # -- writing

    def append_unit(self, phy_offset: int, size: int, tags_code: int) -> None:
        """Add the next unit. The caller vouches for order; `put_unit_at` checks it."""
        tail = self._tail
        tail += _pack(phy_offset, size, tags_code)
        self.last_physical_end = phy_offset + size
        if len(tail) >= _TAIL_BYTES_MAX:
            self._write_tail()

    def put_unit_at(self, index: int, phy_offset: int, size: int, tags_code: int) -> bool:
        """Add the unit of message `index`; False if it (or a later one) is already built.

        An empty queue whose first unit is not 0 begins with filler up to `index` in its first
        file, and `index` becomes its minimum. A gap inside a queue (the log between was lost) is
        closed with filler too. Raises CorruptLogError if the gap is larger than a file.
        """
        if phy_offset + size <= self.last_physical_end:
            return False
        expected = self.max_offset
        if index < expected:
            log.warning(
                "consume_queue_behind topic=%s queue_id=%d index=%d expected=%d phy_offset=%d",
                self.topic,
                self.queue_id,
                index,
                expected,
                phy_offset,
            )
            return False
        if index > expected:
            self._fill_to(index, phy_offset)
        self.append_unit(phy_offset, size, tags_code)
        return True

    def _fill_to(self, index: int, phy_offset: int) -> None:
        position = index * UNIT_SIZE
        if not self._starts and not self._tail and self._tail_position == 0:
            start = position - position % self._file_size
            self._tail_position = start
            self._tail += FILLER * ((position - start) // UNIT_SIZE)
            self._minimum = index
            return
        missing = index - self.max_offset
        if missing * UNIT_SIZE > self._file_size:
            raise CorruptLogError(
                self._directory,
                phy_offset,
                f"queue offset jumps from {self.max_offset} to {index}",
            )
        log.warning(
            "consume_queue_gap topic=%s queue_id=%d index=%d expected=%d phy_offset=%d",
            self.topic,
            self.queue_id,
            index,
            self.max_offset,
            phy_offset,
        )
        self._tail += FILLER * missing

    def write_back(self) -> list[Path]:
        """Bring the tail into the files (page cache); the paths to sync since the last call.

        Folders of new files are among them; `sync_file` takes them as well.
        """
        if self._tail:
            self._write_tail()
        if not self._dirty:
            return []
        paths = [Path(path) for path in sorted(self._dirty, reverse=True)]
        self._dirty.clear()
        return paths

    def flush(self) -> None:
        """Everything appended so far is durable on return."""
        for path in self.write_back():
            sync_file(path)

    def _write_tail(self) -> None:
        # After an OSError (disk full) the tail is still whole: the next call tries again.
        tail = memoryview(self._tail)
        position = self._tail_position
        done = 0
        try:
            while done < len(tail):
                start = position - position % self._file_size
                count = min(len(tail) - done, start + self._file_size - position)
                self._ensure_file(start)
                path = self._path(start)
                write_all(self._handles.fd(path), tail[done : done + count], position - start)
                self._dirty.add(path)
                done += count
                position += count
        finally:
            tail.release()
        self._tail_position = position
        self._tail.clear()

    def _ensure_file(self, start: int) -> None:
        if self._starts and self._starts[-1] >= start:
            return
        assert not self._starts or self._starts[-1] + self._file_size == start
        if not self._starts:
            os.makedirs(self._directory, exist_ok=True)
            self._dirty.update(map(str, self.directory.parents[:2]))
        path = self._path(start)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.ftruncate(fd, self._file_size)
        finally:
            os.close(fd)
        self._dirty.add(self._directory)
        self._starts.append(start)

    # -- reading

    def read_units(self, start_index: int, count: int) -> bytes:
        """Up to `count` units from `start_index` on, packed; within one file per call.

        Empty below the first file, at or above `max_offset`, or for count <= 0. Filler units are
        handed out as they are: their size is FILLER_SIZE.
        """
        position = start_index * UNIT_SIZE
        tail_position = self._tail_position
        first = self._starts[0] if self._starts else tail_position
        end = min(
            position + count * UNIT_SIZE,
            position - position % self._file_size + self._file_size,
            tail_position + len(self._tail),
        )
        if position < first or end <= position:
            return b""
        if position >= tail_position:
            return bytes(self._tail[position - tail_position : end - tail_position])
        units = self._read_file(position, min(end, tail_position))
        if end > tail_position:
            units += self._tail[: end - tail_position]
        return units

    def place_of(self, index: int) -> tuple[str, int]:
        """File and byte position in it of one unit."""
        position = index * UNIT_SIZE
        return self._path(position - position % self._file_size), position % self._file_size

    def replace_unit(self, index: int, phy_offset: int, size: int, tags_code: int) -> None:
        """Put a unit that was damaged in its file anew; durable with the next flush."""
        assert index * UNIT_SIZE < self._tail_position
        path, position = self.place_of(index)
        write_all(self._handles.fd(path), _pack(phy_offset, size, tags_code), position)
        self._dirty.add(path)

    def unit_at(self, index: int) -> tuple[int, int, int] | None:
        """(phy_offset, size, tags_code) of one unit, or None outside the queue."""
        units = self.read_units(index, 1)
        return UNIT.unpack(units) if units else None

    def iter_units(self, start_index: int | None = None) -> Iterator[tuple[int, int, int, int]]:
        """(index, phy_offset, size, tags_code) from `start_index` (default min_offset) on."""
        index = self._minimum if start_index is None else start_index
        while units := self.read_units(index, _SCAN_UNITS):
            for phy_offset, size, tags_code in UNIT.iter_unpack(units):
                yield index, phy_offset, size, tags_code
                index += 1

    def _read_file(self, position: int, end: int) -> bytes:
        start = position - position % self._file_size
        path = self._path(start)
        data = os.pread(self._handles.fd(path), end - position, position - start)
        if len(data) != end - position:
            raise CorruptLogError(
                path, position - start, f"{len(data)} bytes where {end - position} belong"
            )
        return data

    def _path(self, start: int) -> str:
        return f"{self._directory}/{start:0{_NAME_DIGITS}d}"

    # -- searching

    def _first_index_at_or_above(self, phy_offset: int) -> int:
        """The first unit (filler aside) whose record begins at or above `phy_offset`."""
        low = self._starts[0] // UNIT_SIZE if self._starts else self._tail_position // UNIT_SIZE
        high = self.max_offset
        while low < high:
            middle = (low + high) // 2
            unit = self.unit_at(middle)
            assert unit is not None
            if unit[1] != FILLER_SIZE and unit[0] >= phy_offset:
                high = middle
            else:
                low = middle + 1
        return low

    def offset_by_time(
        self, timestamp_ms: int, boundary: Boundary, store_timestamp_of: Callable[[int, int], int]
    ) -> int:
        """The unit that stands for a time; the records' own store timestamps decide.

        LOWER: the first unit at or after the time; behind the end if all are older. UPPER: the
        last unit at or before it; 0 if all are younger. An empty queue gives its min_offset.
        `store_timestamp_of(phy_offset, size)` returns ms, or a negative number for a record that
        is gone, which counts as older than any time.
        """
        minimum, low, high = self._minimum, self._minimum, self.max_offset
        if low == high:
            return minimum
        upper = boundary is Boundary.UPPER
        while low < high:
            middle = (low + high) // 2
            unit = self.unit_at(middle)
            assert unit is not None
            filler = unit[1] == FILLER_SIZE
            stored_ms = -1 if filler else store_timestamp_of(unit[0], unit[1])
            if stored_ms < timestamp_ms or (upper and stored_ms == timestamp_ms):
                low = middle + 1
            else:
                high = middle
        if not upper:
            return low
        return low - 1 if low > minimum else 0

    # -- bounds against the log

    def correct_min_offset(self, log_min_offset: int) -> None:
        """Move min_offset to the first unit whose record begins at or above the log's minimum."""
        self._minimum = max(self._minimum, self._first_index_at_or_above(log_min_offset))

    def truncate_dirty(self, phy_offset: int) -> bool:
        """Drop the units of records beginning at or above `phy_offset`; True if any was there.

        Durable on return: a unit that came back after a crash would point into newer bytes.
        The queue keeps its place: the next unit gets the index of the first one dropped.
        """
        index = self._first_index_at_or_above(phy_offset)
        if index >= self.max_offset:
            return False
        self._cut_to(index * UNIT_SIZE)
        return True

    def check_cut(self, phy_offset: int, *, expects_none: bool) -> None:
        """Whether `truncate_dirty(phy_offset)` would only cut what is to be cut.

        Units grow with the log, so one that points too far, with lower ones behind it, is damage;
        so is any, if the log is known to be whole (`expects_none`). Raises CorruptLogError.
        """
        index = self._first_index_at_or_above(phy_offset)
        if index >= self.max_offset:
            return
        lower = any(
            offset < phy_offset and size != FILLER_SIZE
            for _, offset, size, _ in self.iter_units(index)
        )
        if lower or expects_none:
            raise CorruptLogError(
                *self.place_of(index), f"unit {index} points beyond the log's {phy_offset}"
            )

    def _cut_to(self, position: int) -> None:
        """Make `position` (bytes) the end; what was behind it is removed or zeroed, and synced."""
        written_end = self._tail_position
        if position >= written_end:
            del self._tail[position - written_end :]
        else:
            self._tail.clear()
            self._tail_position = position
            self._zero_from(position, written_end)
        self._minimum = min(self._minimum, position // UNIT_SIZE)
        self.loaded_end = min(self.loaded_end, position // UNIT_SIZE)
        self._refresh_last_physical_end()

    def _zero_from(self, position: int, written_end: int) -> None:
        removed = False
        # The first file stays, even if emptied: its name keeps the queue's place.
        while len(self._starts) > 1 and self._starts[-1] >= position:
            start = self._starts.pop()
            self._handles.forget(self._path(start))
            os.unlink(self._path(start))
            self._dirty.discard(self._path(start))
            removed = True
        if removed:
            sync_directory(Path(self._directory))
        start = self._starts[-1]
        end = min(written_end, start + self._file_size)
        path = self._path(start)
        if position < end and zero_range(self._handles.fd(path), position - start, end - start):
            sync_file(Path(path))

    def _refresh_last_physical_end(self) -> None:
        self.last_physical_end = 0
        unit = self.unit_at(self.max_offset - 1) if self.max_offset else None
        if unit is not None and unit[1] != FILLER_SIZE:
            self.last_physical_end = unit[0] + unit[1]

    def delete_expired(self, log_min_offset: int) -> int:
        """Remove files all of whose records the log no longer has; never the last file.

        Returns how many were removed, and corrects min_offset.
        """
        removed = 0
        while len(self._starts) > 1:
            last_unit = self.unit_at(self._starts[1] // UNIT_SIZE - 1)
            assert last_unit is not None
            if last_unit[1] != FILLER_SIZE and last_unit[0] >= log_min_offset:
                break
            start = self._starts.pop(0)
            self._handles.forget(self._path(start))
            os.unlink(self._path(start))
            self._dirty.discard(self._path(start))
            removed += 1
        if removed:
            sync_directory(Path(self._directory))
            self._minimum = max(self._minimum, self._starts[0] // UNIT_SIZE)
        self.correct_min_offset(log_min_offset)
        return removed

    # -- life

    def load(self, safe_offset: int = 0) -> None:
        """Find the files, and the end of what can be trusted in them.

        An empty last file is removed. Scans at most the last three files, up to the first unit
        that no writer made (offset < 0 or size <= 0); what is behind it is cut off, as a crash
        leaves holes there. Raises CorruptLogError if that would cut units of records below the log
        offset `safe_offset`, which no crash can have hurt, for a file of another length or a
        missing one: the caller may `destroy` the queue and build it anew from the log.
        """
        assert not self._tail
        self._starts = self._find_files()
        if not self._starts:
            self._tail_position = self._minimum = self.last_physical_end = self.loaded_end = 0
            return
        self._minimum = self._starts[0] // UNIT_SIZE
        files_end = self._starts[-1] + self._file_size
        self._tail_position = files_end
        position = self._starts[-_RECOVERED_FILES_MAX:][0]
        chunk_units = _FIRST_SCAN_UNITS
        while position < files_end:
            position, chunk_end = self._scan(position, chunk_units)
            if position < chunk_end:
                break
            chunk_units = min(4 * chunk_units, _SCAN_UNITS)
        if position < files_end and self._has_safe_unit(position, files_end, safe_offset):
            raise CorruptLogError(
                *self.place_of(position // UNIT_SIZE),
                "a unit that no writer made, with synced ones behind it",
            )
        self.loaded_end = files_end // UNIT_SIZE
        self._cut_to(position)

    def _has_safe_unit(self, position: int, files_end: int, safe_offset: int) -> bool:
        """Whether a unit of a record below `safe_offset` stands behind the one at `position`."""
        position += UNIT_SIZE
        while position < files_end:
            file_end = position - position % self._file_size + self._file_size
            chunk_end = min(position + _SCAN_UNITS * UNIT_SIZE, file_end)
            units = self._read_file(position, chunk_end)
            if not any(units):
                return False  # as far as was ever written
            for phy_offset, size, _ in UNIT.iter_unpack(units):
                if 0 <= phy_offset < safe_offset and 0 < size < FILLER_SIZE:
                    return True
            position = chunk_end
        return False

    def _scan(self, position: int, chunk_units: int) -> tuple[int, int]:
        """Ends, in bytes, of the good units from `position` on and of the chunk looked at."""
        start = position - position % self._file_size
        chunk_end = min(position + chunk_units * UNIT_SIZE, start + self._file_size)
        units = self._read_file(position, chunk_end)
        # Byte columns in C instead of units in a loop: a size is bad if its four bytes are zero,
        # a field is negative if its first byte is no ASCII.
        sizes = 0
        for column in range(8, 12):
            sizes |= int.from_bytes(units[column::UNIT_SIZE], "big")
        count = len(units) // UNIT_SIZE
        good = sizes.to_bytes(count, "big").find(b"\0")
        if good < 0:
            good = count
        for column in (0, 8):
            signs = units[column::UNIT_SIZE][:good]
            if not signs.isascii():
                good = next(index for index, sign in enumerate(signs) if sign > 0x7F)
        return position + good * UNIT_SIZE, chunk_end

    def _find_files(self) -> list[int]:
        try:
            names = sorted(n for n in os.listdir(self._directory) if n.isdigit())
        except FileNotFoundError:
            return []
        starts: list[int] = []
        for name in names:
            path = f"{self._directory}/{name}"
            size = os.stat(path).st_size
            if size == 0 and name == names[-1]:
                os.unlink(path)
                break
            if size != self._file_size:
                raise CorruptLogError(
                    path, 0, f"file of {size} bytes where {self._file_size} belong"
                )
            start = int(name)
            if starts and start != starts[-1] + self._file_size:
                raise CorruptLogError(
                    self._path(starts[-1] + self._file_size), 0, "consume queue file is missing"
                )
            starts.append(start)
        return starts

    def close(self) -> None:
        """Write back and let go of descriptors; not synced (see `flush`)."""
        self.write_back()
        for start in self._starts:
            self._handles.forget(self._path(start))

    def destroy(self) -> None:
        """Remove all files and start as an empty queue."""
        for start in self._starts:
            self._handles.forget(self._path(start))
        shutil.rmtree(self._directory, ignore_errors=True)
        self._starts.clear()
        self._tail.clear()
        self._dirty.clear()
        self._tail_position = self._minimum = self.last_physical_end = self.loaded_end = 0
