"""One consume queue: where the messages of a (topic, queue) lie in the commit log. It is an array
of 20-byte units (`protocol.layout.UNIT`) in files of fixed size, named by the position of their
first unit. Unit n is message n.

The newest units are in a tail in memory; they reach the file in one `pwrite` at the flush tick or
when the tail is large. Recovery rebuilds the tail from the log. Commit-log offsets of units grow;
only leading units, and gaps of a damaged log, may be filler, (0, 0x7FFFFFFF, 0). One thread owns a
queue; only `sync_file` on the paths of `write_back` may run elsewhere. Origin: Java `ConsumeQueue`,
byte-compatible.
"""

import logging
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.protocol.records.codec import RecordHead
from batonmq.protocol.sysflag import has_queue_unit
from batonmq.runtime.durable_file import is_zero
from batonmq.store.disk_health import StoreHealth
from batonmq.store.file_handles import FileHandles
from batonmq.store.queue_files import QueueFiles

log = logging.getLogger(__name__)

_pack = UNIT.struct.pack
_unpack_each = UNIT.struct.iter_unpack
FILLER = _pack(0, FILLER_SIZE, 0)

# As Java, recovery reads at most this many files of a queue.
_RECOVERED_FILES_MAX = 3
_TAIL_BYTES_MAX = 64 * 1024
_FILLED_AT_ONCE = _TAIL_BYTES_MAX // UNIT_SIZE
_SCAN_UNITS = 1 << 15
_FIRST_SCAN_UNITS = 1 << 8


class Boundary(StrEnum):
    """Which unit a time selects, as in the header field `boundaryType`."""

    LOWER = "lower"
    UPPER = "upper"


class SharedByQueues:
    """What the queues of a store keep together. `dirty`: those for which `write_back` has something
    to do. `ends_total`: the sum of the next offsets of those that have a file or a unit;
    `begins_total`: of the first units in their files."""

    def __init__(self) -> None:
        self.dirty: dict[ConsumeQueue, None] = {}
        self.ends_total = 0
        self.begins_total = 0

    def add(self, share: tuple[int, int]) -> None:
        self.begins_total += share[0]
        self.ends_total += share[1]

    def take(self, share: tuple[int, int]) -> None:
        self.begins_total -= share[0]
        self.ends_total -= share[1]


class ConsumeQueue:
    """Units of one (topic, queue id). Offsets are unit indexes unless the name has `phy`."""

    __slots__ = (
        "_files",
        "_health",
        "_minimum",
        "_minimum_phy",
        "_shared",
        "_tail",
        "_tail_position",
        "_unfilled",
        "ends_blank",
        "last_physical_end",
        "loaded_end",
        "queue_id",
        "topic",
    )

    def __init__(
        self,
        directory: str | Path,
        topic: str,
        queue_id: int,
        *,
        file_size: int = 6_000_000,
        handles: FileHandles | None = None,
        health: StoreHealth | None = None,
        shared: SharedByQueues | None = None,
    ) -> None:
        """Creates nothing on disk before the first `write_back`. `file_size` in bytes, rounded up
        to whole units. Call `load` if the folder may hold files."""
        self.topic = topic
        self.queue_id = queue_id
        handles = FileHandles(8) if handles is None else handles
        self._files = QueueFiles(directory, whole_units(file_size), handles)
        self._health = health or StoreHealth()
        self._shared = shared or SharedByQueues()
        self._tail = bytearray()
        self._tail_position = 0
        # How far the filler before the tail is written, during that write.
        self._unfilled: int | None = None
        self._minimum = 0
        # Where the record of unit `_minimum` begins; -1 if unknown.
        self._minimum_phy = -1
        #: End (exclusive) in the log of the last record built here; 0 if none.
        self.last_physical_end = 0
        #: Lower units were found in the files; the others were built by this process.
        self.loaded_end = 0
        #: Whether `load` found no unit in the last file: it may have lost them.
        self.ends_blank = False

    @property
    def max_offset(self) -> int:
        """Index behind the last unit (exclusive end)."""
        return (self._tail_position + len(self._tail)) // UNIT_SIZE

    @property
    def min_offset(self) -> int:
        """Index of the first unit whose record the log still has, as of `correct_min_offset`."""
        return self._minimum

    def __len__(self) -> int:
        return self.max_offset - self._minimum

    # Writing.

    def append_unit(self, phy_offset: int, size: int, tags_code: int) -> None:
        """Adds the next unit; `put_unit_at` checks the order. On a full disk it stays in memory
        (R45). Raises OSError if the disk fails."""
        tail = self._tail
        if not tail:
            self._begin_tail()
        self._shared.ends_total += 1
        tail += _pack(phy_offset, size, tags_code)
        self.last_physical_end = phy_offset + size
        if len(tail) >= _TAIL_BYTES_MAX and not self._health.pauses:
            _spill(self, self._health)

    def append_units(self, units: bytes) -> None:
        """`append_unit` for many, packed."""
        if len(units) > UNIT_SIZE:
            if not self._tail:
                self._begin_tail()
            self._shared.ends_total += len(units) // UNIT_SIZE - 1
            self._tail += units[:-UNIT_SIZE]
        self.append_unit(*UNIT.struct.unpack(units[-UNIT_SIZE:]))

    def _begin_tail(self) -> None:
        self._shared.dirty[self] = None
        if not self._files.starts:
            self._shared.add((self.first_in_files, self.max_offset))

    @property
    def _share(self) -> tuple[int, int]:
        """What this queue adds to the totals, begin and end: nothing for a mere position (R38)."""
        is_counted = bool(self._tail or self._files.starts)
        return (self.first_in_files, self.max_offset) if is_counted else (0, 0)

    @property
    def first_in_files(self) -> int:
        """The first unit in the files, or in the one that the tail will make; perhaps filler."""
        files, begin = self._files, self._tail_position
        return (files.starts[0] if files.starts else begin - begin % files.file_size) // UNIT_SIZE

    def put_unit_at(self, index: int, phy_offset: int, size: int, tags_code: int) -> bool:
        """Adds the unit of message `index`; False if this or a later one exists. Filler closes a
        gap (lost log). Raises CorruptLogError as `begin_at` does."""
        # Dispatch may repeat records after a start.
        if phy_offset + size <= self.last_physical_end:
            return False
        expected = self.max_offset
        if index < expected:
            log.warning(
                "consume_queue_behind topic=%s queue_id=%d index=%d expected=%d phy_offset=%d",
                self.topic, self.queue_id, index, expected, phy_offset,
            )  # fmt: skip
            return False
        if index > expected:
            self.begin_at(index, phy_offset)
        self.append_unit(phy_offset, size, tags_code)
        return True

    def begin_at(self, index: int, phy_offset: int) -> None:
        """The next unit is `index`, above the queue's end; what would be below is gone. Without
        files this is in memory only: the first unit creates its file, with filler. Raises
        CorruptLogError for a gap larger than a file behind messages that the log still has."""
        # A stated position (R38): the first file will begin there.
        if not self._files.starts and not self._tail:
            self._tail_position = index * UNIT_SIZE
            self._minimum = index
            self._minimum_phy = -1
            return
        missing = index - self.max_offset
        # So large a jump behind live messages is a wrong record. Without any it may be right: a
        # full disk and a kill lose units whose segments expired meanwhile.
        if len(self) and missing * UNIT_SIZE > self._files.file_size:
            raise CorruptLogError(
                self._files.directory,
                phy_offset,
                f"queue offset jumps from {self.max_offset} to {index}",
            )
        if not len(self):
            self._minimum = index
            self._minimum_phy = -1
        log.warning(
            "consume_queue_gap topic=%s queue_id=%d index=%d expected=%d phy_offset=%d",
            self.topic, self.queue_id, index, self.max_offset, phy_offset,
        )  # fmt: skip
        self._shared.dirty[self] = None
        self._shared.ends_total += missing
        while missing:
            count = min(missing, _FILLED_AT_ONCE)
            self._tail += FILLER * count
            missing -= count
            if len(self._tail) >= _TAIL_BYTES_MAX and not self._health.pauses:
                _spill(self, self._health)

    @property
    def folder(self) -> Path:
        """The folder of its files; it may not exist yet."""
        return Path(self._files.directory)

    def write_back(self) -> list[Path]:
        """Writes the tail to the files (page cache); the paths to sync since the last call, folders
        of new files included. Raises OSError (disk full); then nothing was taken and the next call
        tries again."""
        self.write_tail()
        self._shared.dirty.pop(self, None)
        return self._files.take_unsynced()

    @property
    def missing_file(self) -> str | None:
        """The next file that `write_back` creates; None if none."""
        first, last = self._tail_position, self._tail_position + len(self._tail) - UNIT_SIZE
        return self._files.missing_at(first, last) if self._tail else None

    def write_tail(self) -> None:
        """Writes the tail to the files (page cache). Raises OSError (disk full); then the tail
        stays whole for the next call."""
        if not self._tail:
            return
        first_of_file = self._tail_position - self._tail_position % self._files.file_size
        # The queue begins inside its first file: filler comes before its first unit.
        if self._tail_position > first_of_file and not self._files.starts:
            self._unfilled = first_of_file
        while self._unfilled is not None:
            count = min((self._tail_position - self._unfilled) // UNIT_SIZE, _FILLED_AT_ONCE)
            self._files.write(self._unfilled, memoryview(FILLER * count))
            self._unfilled += count * UNIT_SIZE
            if self._unfilled >= self._tail_position:
                self._unfilled = None
        # A copy: an exception that is kept would keep a view, and the tail could not grow.
        self._files.write(self._tail_position, memoryview(bytes(self._tail)))
        self._tail_position += len(self._tail)
        self._tail.clear()

    # Reading.

    def read_units(self, start_index: int, count: int) -> bytes:
        """Up to `count` units from `start_index` on, packed, from one file per call. Empty below
        the first file, at or above `max_offset`, or for count <= 0. Filler units have size
        FILLER_SIZE."""
        position = start_index * UNIT_SIZE
        tail_position = self._tail_position
        files = self._files
        first = files.starts[0] if files.starts else tail_position
        end = min(
            position + count * UNIT_SIZE,
            position - position % files.file_size + files.file_size,
            tail_position + len(self._tail),
        )
        if position < first or end <= position:
            return b""
        if position >= tail_position:
            return bytes(self._tail[position - tail_position : end - tail_position])
        units = files.read(position, min(end, tail_position))
        if end > tail_position:
            units += self._tail[: end - tail_position]
        return units

    def place_of(self, index: int) -> tuple[str, int]:
        """File and byte position of a unit."""
        return self._files.place_of(index * UNIT_SIZE)

    def replace_unit(self, index: int, phy_offset: int, size: int, tags_code: int) -> None:
        """Overwrites a damaged unit; durable with the next flush."""
        assert index * UNIT_SIZE < self._tail_position
        self._shared.dirty[self] = None
        self._files.write(index * UNIT_SIZE, memoryview(_pack(phy_offset, size, tags_code)))

    def unit_at(self, index: int) -> tuple[int, int, int] | None:
        """(phy_offset, size, tags_code) of one unit; None outside the queue."""
        units = self.read_units(index, 1)
        return UNIT.struct.unpack(units) if units else None

    def iter_units(self, start_index: int | None = None) -> Iterator[tuple[int, int, int, int]]:
        """(index, phy_offset, size, tags_code) from `start_index` (default min_offset) on."""
        index = self._minimum if start_index is None else start_index
        while units := self.read_units(index, _SCAN_UNITS):
            for phy_offset, size, tags_code in _unpack_each(units):
                yield index, phy_offset, size, tags_code
                index += 1

    # Searching.

    def _first_index_at_or_above(self, phy_offset: int) -> int:
        """The first unit (no filler) whose record begins at or above `phy_offset`."""
        starts = self._files.starts
        low = (starts[0] if starts else self._tail_position) // UNIT_SIZE
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
        """The unit that a time selects, by the records' store timestamps. LOWER: the first unit at
        or after it, or the end. UPPER: the last unit at or before it, or the first one. An empty
        queue gives min_offset. `store_timestamp_of(phy_offset, size)` returns ms, negative for a
        record that is gone, which counts as older than any time."""
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
        return max(low - 1, minimum) if upper else low

    # Bounds against the log.

    def correct_min_offset(self, log_min_offset: int) -> None:
        """Moves min_offset to the first unit whose record begins at or above the log's minimum."""
        if log_min_offset <= self._minimum_phy:
            return
        self._minimum = max(self._minimum, self._first_index_at_or_above(log_min_offset))
        unit = self.unit_at(self._minimum)
        is_known = unit is not None and unit[1] != FILLER_SIZE  # a filler has no record to compare
        self._minimum_phy = unit[0] if unit is not None and is_known else -1

    def truncate_dirty(self, phy_offset: int) -> list[Path] | None:
        """Drops units of records at or above `phy_offset`; None if there are none, else what to
        sync before the log is written there: a unit that came back would point into newer bytes."""
        if _ends_at_or_below(self, phy_offset):
            return None
        index = self._first_index_at_or_above(phy_offset)
        if index >= self.max_offset:
            return None
        self._shared.take(self._share)
        self._cut_to(index * UNIT_SIZE)
        self._shared.add(self._share)
        return self._files.take_unsynced()

    def end_below(self, phy_offset: int) -> int:
        """Behind the last unit of a record that begins below `phy_offset`."""
        if self.last_physical_end <= phy_offset:
            return self.max_offset
        return self._first_index_at_or_above(phy_offset)

    def check_cut(self, phy_offset: int, *, expects_none: bool) -> None:
        """Raises CorruptLogError if `truncate_dirty(phy_offset)` would cut units because of damage:
        one that points too far with lower ones behind it, or, with `expects_none` (the log is
        whole), any."""
        if _ends_at_or_below(self, phy_offset):
            return
        index = self._first_index_at_or_above(phy_offset)
        if index >= self.max_offset:
            return
        # Offsets of units grow with the log: a lower one behind is proof of damage.
        lower = any(
            offset < phy_offset and size != FILLER_SIZE
            for _, offset, size, _ in self.iter_units(index)
        )
        if lower or expects_none:
            raise CorruptLogError(
                *self.place_of(index), f"unit {index} points beyond the log's {phy_offset}"
            )

    def _cut_to(self, position: int) -> None:
        """Makes `position` (bytes) the end; what follows is removed or zeroed."""
        written_end = self._tail_position
        if position >= written_end:
            del self._tail[position - written_end :]  # nothing of it is on disk
        else:
            self._tail.clear()
            self._tail_position = position
            self._unfilled = None
            self._files.cut(position, written_end)
        if position // UNIT_SIZE <= self._minimum:
            self._minimum, self._minimum_phy = position // UNIT_SIZE, -1
        self.loaded_end = min(self.loaded_end, position // UNIT_SIZE)
        self.last_physical_end = 0
        unit = self.unit_at(self.max_offset - 1) if self.max_offset else None
        if unit is not None and unit[1] != FILLER_SIZE:
            self.last_physical_end = unit[0] + unit[1]

    def delete_expired(self, log_min_offset: int) -> int:
        """Removes files whose records are all gone from the log; how many. Corrects min_offset. The
        caller syncs `folder`; a file that returned after a crash would be removed again."""
        removed = 0
        self._shared.take(self._share)
        try:
            while has_expired_file(self, log_min_offset):
                self._files.drop_first()
                removed += 1
        finally:
            self._shared.add(self._share)
        if removed:
            self._minimum = max(self._minimum, self.first_in_files)
            self._minimum_phy = -1
        self.correct_min_offset(log_min_offset)
        return removed

    # Life.

    def load(self, safe_offset: int = 0) -> list[Path]:
        """Finds the files and the end of what can be trusted; the paths to sync.

        An empty last file is removed. At most the last three files are scanned, up to the first
        unit that no writer made (offset < 0 or size <= 0); a crash leaves holes there, so the rest
        is cut. Raises CorruptLogError if that would cut units of records below the log offset
        `safe_offset`, which no crash can damage, or for a file that is missing or of another
        length: then the caller may `destroy` the queue and rebuild it.
        """
        assert not self._tail
        try:
            return self._load(safe_offset)
        finally:
            self._shared.add(self._share)

    def _load(self, safe_offset: int) -> list[Path]:
        files = self._files
        self.ends_blank = files.load()
        if not files.starts:
            self._tail_position = self._minimum = self.last_physical_end = self.loaded_end = 0
            return []
        self._minimum = files.starts[0] // UNIT_SIZE
        self._tail_position = files.end
        start = files.starts[-_RECOVERED_FILES_MAX:][0]
        position, first, last = _good_end(files, start)
        is_clear = files.is_clear_behind(position)
        if not is_clear and _has_safe_unit(files, position, safe_offset):
            raise CorruptLogError(
                *files.place_of(position), "a unit that no writer made, with synced ones behind it"
            )
        self.ends_blank = self.ends_blank or position <= files.starts[-1]
        self.loaded_end = files.end // UNIT_SIZE
        if not is_clear or not last or _is_filler(last):
            self._cut_to(position)
            return files.take_unsynced()
        self._tail_position, self.loaded_end = position, position // UNIT_SIZE
        phy_offset, size, _ = UNIT.struct.unpack(last)
        self.last_physical_end = phy_offset + size
        if start == files.starts[0] and not _is_filler(first):
            self._minimum_phy = UNIT.struct.unpack(first)[0]
        return []

    def close(self) -> None:
        """Writes the tail and closes descriptors; not synced."""
        self.write_back()
        self._files.close()

    def forget_files(self) -> None:
        """Starts as an empty queue; the caller now owns the files."""
        self._shared.take(self._share)
        self._files.forget()
        self._unfilled = None
        self._shared.dirty.pop(self, None)
        self._minimum_phy = -1
        self._tail.clear()
        self._tail_position = self._minimum = self.last_physical_end = self.loaded_end = 0


def has_expired_file(queue: ConsumeQueue, log_min_offset: int) -> bool:
    """Whether no record of the first file is in the log any more. Never of the only file: its name
    keeps the queue's place."""
    starts = queue._files.starts
    if len(starts) < 2:
        return False
    last_unit = queue.unit_at(starts[1] // UNIT_SIZE - 1)
    assert last_unit is not None
    return last_unit[1] == FILLER_SIZE or last_unit[0] < log_min_offset


def is_message(head: RecordHead, queue: ConsumeQueue, index: int) -> bool:
    """Whether this record of the log is the message of unit `index`."""
    return (
        head.kind == "message"
        and has_queue_unit(head.sys_flag)
        and (head.queue_offset, head.queue_id) == (index, queue.queue_id)
        and head.topic == queue.topic.encode("utf-8")
    )


def whole_units(file_size: int) -> int:
    """Bytes of one file, rounded up as in Java."""
    return -(-file_size // UNIT_SIZE) * UNIT_SIZE


def _spill(queue: ConsumeQueue, health: StoreHealth) -> None:
    """Writes the tail; on a full disk it stays in memory (R45). Raises OSError if the
    disk fails."""
    try:
        queue.write_tail()
    except OSError as error:
        health.pause_or_raise(error)


def _good_end(files: QueueFiles, position: int) -> tuple[int, bytes, bytes]:
    """The end of the good units from `position` on, and the first and last of them ("" if none)."""
    chunk_units = _FIRST_SCAN_UNITS
    first = last = b""
    while position < files.end:
        space = files.file_size - position % files.file_size
        units = files.read(position, position + min(chunk_units * UNIT_SIZE, space))
        good = _good_units(units) * UNIT_SIZE
        if good:
            first = first or units[:UNIT_SIZE]
            last = units[good - UNIT_SIZE : good]
        position += good
        if good < len(units):
            break
        chunk_units = min(4 * chunk_units, _SCAN_UNITS)
    return position, first, last


def _has_safe_unit(files: QueueFiles, position: int, safe_offset: int) -> bool:
    """Whether a unit of a record below `safe_offset` follows the one at `position`."""
    chunk_units = _FIRST_SCAN_UNITS
    written = files.next_data(position + UNIT_SIZE)
    while written is not None:
        position = written - written % UNIT_SIZE
        space = files.file_size - position % files.file_size
        units = files.read(position, position + min(chunk_units * UNIT_SIZE, space))
        if not is_zero(units):
            for phy_offset, size, _ in _unpack_each(units):
                if 0 <= phy_offset < safe_offset and 0 < size < FILLER_SIZE:
                    return True
        chunk_units = min(4 * chunk_units, _SCAN_UNITS)
        written = files.next_data(position + len(units))
    return False


def _is_filler(unit: bytes) -> bool:
    return bool(UNIT.struct.unpack(unit)[1] == FILLER_SIZE)


def _good_units(units: bytes) -> int:
    """How many leading units a writer may have made: offset >= 0, size > 0. Byte columns in C, no
    loop: a size is bad if its four bytes are zero, a field is negative if its first byte is no
    ASCII."""
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
    return good


def _ends_at_or_below(queue: ConsumeQueue, phy_offset: int) -> bool:
    """Whether the newest unit alone shows that no record of `queue` ends above `phy_offset`."""
    return 0 < queue.last_physical_end <= phy_offset
