"""One replica's side of a stretch of the log: its bytes, and the records that begin in it.

Free of Spark.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from batonmq.spark.audit.replicas import LogFile, ReplicaGroup
from batonmq.spark.read.log_range import Block, Damage, LogRange, RangeReader
from batonmq.spark.read.record_columns import Int64s
from batonmq.spark.read.selection import HIGH
from batonmq.spark.read.storage import OpenFile

# A stretch is read with so much behind its end, for its last record.
_PAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Stretch:
    """Records that begin in [begin, end) of one file of a group's log; log offsets."""

    file: LogFile
    begin: int
    end: int


class HeldFile:
    """A file of which one piece is held in memory; what lies elsewhere is read."""

    def __init__(self, inner: OpenFile) -> None:
        self._inner = inner
        self._at = 0
        self._data = b""

    def hold(self, offset: int, size: int) -> None:
        """From now on hold the piece [offset, offset + size), or what the file has of it."""
        self._at = offset
        self._data = self._inner.read_at(offset, size)

    def size(self) -> int:
        return self._inner.size

    def read_at(self, size: int, offset: int) -> bytes:
        skip = offset - self._at
        if skip >= 0 and skip + size <= len(self._data):
            return self._data[skip : skip + size]
        return self._inner.read_at(offset, size)

    def close(self) -> None:
        self._inner.__exit__()


@dataclass(frozen=True, slots=True)
class Items:
    """What a side holds: blocks of whole records, and damaged stretches, in the log's order."""

    blocks: tuple[Block, ...]
    damages: tuple[Damage, ...]

    @property
    def starts(self) -> Int64s:
        """Log offsets of the records."""
        parts = [block.records.start + block.base for block in self.blocks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    @property
    def ends(self) -> Int64s:
        parts = [b.records.start + b.records.size + b.base for b in self.blocks]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def damage_at(self, offset: int) -> Damage | None:
        """The damaged stretch that holds the byte at a log offset."""
        for damage in self.damages:
            if damage.offset <= offset < damage.offset + damage.size:
                return damage
        return None


class Side:
    """One replica's file of the log, from which stretches are read; `limit`: nothing above is."""

    def __init__(self, index: int, opened: OpenFile, group: ReplicaGroup, file: LogFile) -> None:
        replica = group.replicas[index]
        self.index = index
        self.path = opened.path
        self.first = replica.first
        self.confirm = replica.confirm
        self.limit = min(replica.end, file.end)
        self._held = HeldFile(opened)
        self._file = OpenFile(opened.path, self._held)
        self._start = file.start
        self._end = file.end
        self._loose_from = HIGH if replica.end <= replica.confirm else replica.confirm

    def hold(self, stretch: Stretch) -> None:
        """Read a stretch; the next reads should lie in it."""
        end = min(stretch.end + _PAD_BYTES, self.limit)
        self._held.hold(stretch.begin - self._start, max(0, end - stretch.begin))

    def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of the log; fewer where the file or the limit ends."""
        return self._file.read_at(begin - self._start, min(end, self.limit) - begin)

    def items(self, stretch: Stretch, *, check_crc: bool, record_bytes_max: int) -> Items:
        """What begins in a stretch."""
        end = min(stretch.end, self.limit)
        if stretch.begin >= end:
            return Items((), ())
        wanted = LogRange(
            self.path, self._start, self._end, stretch.begin, end, self.limit,
            stretch.begin == self._start, self._loose_from,
        )  # fmt: skip
        reader = RangeReader(
            self._file,
            wanted,
            check_crc=check_crc,
            window_bytes=end - stretch.begin,
            record_bytes_max=record_bytes_max,
        )
        blocks: list[Block] = []
        damages: list[Damage] = []
        for item in reader.blocks():
            if isinstance(item, Block):
                blocks.append(item)
            else:
                damages.append(item)
        return Items(tuple(blocks), tuple(damages))


class Absent:
    """The side of a replica that should have a file and has none."""

    def __init__(self, index: int, group: ReplicaGroup, file: LogFile) -> None:
        replica = group.replicas[index]
        self.index = index
        self.path = f"{replica.facts.path}/commitlog/{file.start:020d}"
        is_there = replica.storage.exists(self.path)
        self.what = f"{self.path} is {'empty' if is_there else 'missing'}"
        self.first = replica.first
        self.confirm = replica.confirm
        self.limit = min(replica.end, file.end)

    def hold(self, stretch: Stretch) -> None:
        pass

    def read(self, begin: int, end: int) -> bytes:
        return b""

    def items(self, stretch: Stretch, *, check_crc: bool, record_bytes_max: int) -> Items:
        return Items((), ())


def open_sides(group: ReplicaGroup, file: LogFile, stack: ExitStack) -> Iterator[Side | Absent]:
    """The sides of all replicas that are to be read in this file. Raises OSError."""
    for index, replica in enumerate(group.replicas):
        if not replica.first <= file.start < replica.end:
            continue
        path = file.paths[index]
        if path is None:
            yield Absent(index, group, file)
        else:
            yield Side(index, stack.enter_context(replica.storage.open(path)), group, file)
