"""One replica's side of a stretch of the log: its bytes, and the records that begin in it.

Free of Spark.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from operator import attrgetter

import numpy as np

from batonmq.protocol.records.columns import Int64s
from batonmq.spark.differences.replica_groups import LogFile, ReplicaGroup
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.log_range import RECORD_BYTES_MAX, Block, LogRange, RangeReader
from batonmq.spark.read.selection import HIGH
from batonmq.spark.read.storage import OpenFile

# A stretch is read with so much behind its end, for its last record.
_PAD_BYTES = 1 << 16


class HeldFile(OpenFile):
    """A file of which one piece is held in memory; what lies elsewhere is read."""

    _at = 0
    _data = b""

    def hold(self, offset: int, size: int) -> None:
        """From now on hold the piece [offset, offset + size), or what the file has of it."""
        self._at, self._data = offset, super().read_at(offset, size)

    def read_at(self, offset: int, size: int) -> bytes:
        skip = offset - self._at
        if skip >= 0 and skip + size <= len(self._data):
            return self._data[skip : skip + size]
        return super().read_at(offset, size)


class Items:
    """What a side holds: blocks of whole records, and damaged stretches, in the log's order.

    `starts`, `ends`: the log offsets of all records.
    """

    def __init__(self, items: Sequence[Block | Damage] = ()) -> None:
        self.blocks = [item for item in items if isinstance(item, Block)]
        self.damages = [item for item in items if isinstance(item, Damage)]
        none = [np.empty(0, np.int64)]
        self.starts: Int64s = np.concatenate([*(b.starts for b in self.blocks), *none])
        self.ends: Int64s = np.concatenate([*(b.ends for b in self.blocks), *none])
        self._bases = [block.base + int(block.records.start[0]) for block in self.blocks]

    # Both are asked for each place that differs, so neither may pass over all: with a bad record
    # beside each good one there are as many blocks and stretches as places.

    def record_at(self, offset: int) -> Block | None:
        """The record that begins at a log offset, as a block of its own."""
        which = bisect_right(self._bases, offset) - 1
        if which < 0:
            return None
        block = self.blocks[which]
        at = int(np.searchsorted(block.records.start, offset - block.base))
        one = block.keep(slice(at, at + 1))
        return one if len(one.records) and int(one.starts[0]) == offset else None

    def damage_at(self, offset: int) -> Damage | None:
        """The damaged stretch that holds the byte at a log offset."""
        which = bisect_right(self.damages, offset, key=attrgetter("offset")) - 1
        found = self.damages[which] if which >= 0 else None
        return found if found is not None and offset < found.offset + found.size else None


class Side:
    """One replica's file of the log, from which stretches are read; `limit`: nothing above is.

    `gone`: why it has no such file, though it should; "" if it has it.
    """

    def __init__(self, index: int, group: ReplicaGroup, file: LogFile, stack: ExitStack) -> None:
        """Raises OSError."""
        replica, path = group.replicas[index], file.paths[index]
        self.index = index
        self.path = path or f"{replica.facts.path}/commitlog/{file.start:020d}"
        self.confirm = replica.confirm
        self.limit = min(replica.end, file.end)
        self.gone = ""
        self._held: HeldFile | None = None
        if path is not None:
            opened = replica.facts.storage.file_system.open_input_file(path)
            self._held = stack.enter_context(HeldFile(path, opened))
        else:
            is_there = replica.facts.storage.exists(self.path)
            self.gone = f"{self.path} is {'empty' if is_there else 'missing'}"
        self._start, self._end = file.start, file.end
        self._loose_from = HIGH if replica.end <= replica.confirm else replica.confirm

    def hold(self, begin: int, end: int) -> None:
        """Read a stretch; the next reads should lie in it. Raises OSError."""
        if self._held is not None:
            size = min(end + _PAD_BYTES, self.limit) - begin
            self._held.hold(begin - self._start, max(0, size))

    def read(self, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of the log; fewer where the file or the limit ends."""
        size = min(end, self.limit) - begin
        if self._held is None or size <= 0:
            return b""
        return self._held.read_at(begin - self._start, size)

    def items(self, begin: int, end: int) -> Items:
        """What begins in a stretch. Raises OSError."""
        end = min(end, self.limit)
        if self._held is None or begin >= end:
            return Items()
        wanted = LogRange(
            self.path, self._start, self._end, begin, end, self.limit, begin == self._start,
            self._loose_from,
        )  # fmt: skip
        reader = RangeReader(self._held, wanted, end - begin, RECORD_BYTES_MAX)
        return Items(list(reader.blocks()))


def open_sides(group: ReplicaGroup, file: LogFile, stack: ExitStack) -> Iterator[Side]:
    """The sides of all replicas that are to be read in this file. Raises OSError."""
    for index, replica in enumerate(group.replicas):
        if replica.first <= file.start < replica.end:
            yield Side(index, group, file, stack)
