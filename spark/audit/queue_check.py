"""Consume queues of one replica against the messages of a range of the log.

A queue's units point to ascending log offsets, so those that belong to a range are found in each
queue file by bisection; nothing is sorted or moved between tasks. A message whose unit is not among
them is looked up at its own place in the queue, so a damaged unit misleads no search.
Free of Spark.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.protocol.topic_name import DUE_TOPICS, LMQ_PREFIX
from batonmq.spark.audit.findings import BEHIND, CRITICAL, Finding
from batonmq.spark.audit.replicas import Replica, ReplicaGroup
from batonmq.spark.audit.sequence import Numbered
from batonmq.spark.read.queues import (
    Queue,
    Units,
    decode_units,
    last_written,
)
from batonmq.spark.read.record_columns import Int64s
from batonmq.spark.read.storage import OpenFile
from batonmq.spark.read.store_facts import Segment

# So many units are read as they are; more are first narrowed down.
_FEW_UNITS: Final = 4096
_NEIGHBOURS: Final = 3


def check_queues(
    group: ReplicaGroup,
    replica: Replica,
    messages: Numbered,
    begin: int,
    end: int,
    damaged: Sequence[tuple[int, int]] = (),
) -> Iterator[Finding | dict[str, Any]]:
    """Units of one replica that are wrong or missing for messages, or point to none.

    `messages` are all in [begin, end) of the log; only those count that the replica confirms. A
    message that its queue does not reach yet, or no longer, makes no finding: the rows have their
    number. Nor does a unit that points into `damaged` stretches [begin, end).
    """
    checker = _Checker(group, replica, begin, end, damaged)
    wanted = {(topic, queue_id): rows for topic, queue_id, rows in messages.queues()}
    listed = {(queue.topic, queue.queue_id): queue for queue in replica.queues}
    for key in sorted(wanted.keys() | listed.keys()):
        # These queues show messages of other topics a second time.
        if key[0].startswith(LMQ_PREFIX):
            continue
        rows = wanted.get(key, slice(0, 0))
        kept = messages.start[rows] + messages.size[rows] <= replica.confirm
        kept &= messages.start[rows] >= replica.first
        columns = [
            column[rows][kept]
            for column in (
                messages.queue_offset, messages.start, messages.size, messages.tags_code,
            )
        ]  # fmt: skip
        queue = listed.get(key)
        if queue is not None:
            yield from checker.queue(queue, *columns)
        elif len(columns[0]):
            yield checker.behind(*key, columns[0], 0)


class _Checker:
    def __init__(
        self,
        group: ReplicaGroup,
        replica: Replica,
        begin: int,
        end: int,
        damaged: Sequence[tuple[int, int]],
    ) -> None:
        self._damaged = damaged
        self._group = group
        self._replica = replica
        self._begin = begin
        self._end = min(end, replica.confirm)
        self._with_tags = replica.tags_are_hashes

    def queue(
        self, queue: Queue, offsets: Int64s, starts: Int64s, sizes: Int64s, tags: Int64s
    ) -> Iterator[Finding | dict[str, Any]]:
        """Findings of one queue against its messages."""
        with_tags = self._with_tags and queue.topic not in DUE_TOPICS
        right = np.zeros(len(offsets), np.bool_)
        order = np.argsort(offsets, kind="stable")
        ascending = offsets[order]
        for file in queue.files:
            units = self._units(file)
            if not len(units):
                continue
            at = np.minimum(np.searchsorted(ascending, units.index), max(len(order) - 1, 0))
            if len(order):
                row = order[at]
                fits = offsets[row] == units.index
                same = fits & (starts[row] == units.offset) & (sizes[row] == units.size)
                if with_tags:
                    same &= tags[row] == units.tags_code
                right[row[same]] = True
                units = units.keep(~fits)
            for bad_from, bad_to in self._damaged:
                units = units.keep((units.offset < bad_from) | (units.offset >= bad_to))
            # What is left points here, but the message of its number lies elsewhere, or nowhere.
            for index in range(len(units)):
                yield self._wrong(queue, units, index, file)
        left = np.flatnonzero(~right)
        if not len(left):
            return
        reach = self._reach(queue)
        beyond = offsets[left] >= reach
        if beyond.any():
            yield self.behind(queue.topic, queue.queue_id, offsets[left[beyond]], reach)
        for row in left[~beyond].tolist():
            expected = int(starts[row]), int(sizes[row]), int(tags[row])
            finding = self._at(queue, int(offsets[row]), expected, with_tags)
            if finding is not None:
                yield finding

    def behind(self, topic: str, queue_id: int, offsets: Int64s, reach: int) -> dict[str, Any]:
        """A row that counts messages which a queue does not reach."""
        return {
            "part": BEHIND,
            "group": self._group.name,
            "replicas": [self._replica.name],
            "topic": topic,
            "queue_id": queue_id,
            "queue_offset": int(offsets.min()),
            "last_offset": reach,
            "amount": len(offsets),
        }

    def _reach(self, queue: Queue) -> int:
        """The queue offset behind the last written unit; zeros before it are no end."""
        for file in reversed(queue.files):
            with self._replica.storage.open(file.path) as opened:
                written = last_written(opened)
            if written:
                return file.start // UNIT_SIZE + written
        return queue.files[0].start // UNIT_SIZE if queue.files else 0

    def _units(self, file: Segment) -> Units:
        """The units of one queue file that point into the range."""
        first = file.start // UNIT_SIZE
        with self._replica.storage.open(file.path) as opened:
            low, high = 0, opened.size // UNIT_SIZE
            if high > _FEW_UNITS:
                low = _first_at(opened, high, self._begin)
                high = _first_at(opened, high, self._end)
                low, high = max(0, low - _NEIGHBOURS), high + _NEIGHBOURS
            data = opened.read_at(low * UNIT_SIZE, (high - low) * UNIT_SIZE)
        units, _ = decode_units(data, first + low)
        return units.keep((units.offset >= self._begin) & (units.offset < self._end))

    def _at(
        self, queue: Queue, offset: int, expected: tuple[int, int, int], with_tags: bool
    ) -> Finding | None:
        """What is wrong with the unit of one message, None if nothing is."""
        start, size, tags = expected
        for file in queue.files:
            if file.start <= offset * UNIT_SIZE < file.end:
                break
        else:
            if queue.files and offset * UNIT_SIZE < queue.files[0].start:
                return None  # expired, or made before the queue
            return self._finding(
                "queue_missing", queue, offset, start, size, "no file holds its unit", None
            )
        with self._replica.storage.open(file.path) as opened:
            data = opened.read_at(offset * UNIT_SIZE - file.start, UNIT_SIZE)
        found = (
            int.from_bytes(data[:8], "big", signed=True),
            int.from_bytes(data[8:12], "big", signed=True),
            int.from_bytes(data[12:], "big", signed=True),
        )
        if found[1] == FILLER_SIZE:
            return None  # the queue begins behind it
        if not any(found):
            return self._finding(
                "queue_missing", queue, offset, start, size, "its unit was never written", file.path
            )
        if found[:2] == (start, size) and (found[2] == tags or not with_tags):
            return None
        what = f"its unit points to {found[1]} bytes at {found[0]}"
        if found[:2] == (start, size):
            what = f"its unit has tags code {found[2]}, its tags make {tags}"
        return self._finding("queue_wrong", queue, offset, start, size, what, file.path)

    def _wrong(self, queue: Queue, units: Units, at: int, file: Segment) -> Finding:
        what = (
            f"the unit points to {int(units.offset[at])}, where no message of this queue offset "
            "lies"
        )
        index = int(units.index[at])
        return self._finding(
            "queue_wrong", queue, index, int(units.offset[at]), None, what, file.path
        )

    def _finding(
        self,
        kind: str,
        queue: Queue,
        queue_offset: int,
        start: int,
        size: int | None,
        detail: str,
        file: str | None,
    ) -> Finding:
        epoch, doubt = self._group.epoch_at(start)
        return Finding(
            self._group.name, CRITICAL, kind, detail + doubt, (self._replica.name,), queue.topic,
            queue.queue_id, queue_offset, start, size, epoch, file=file,
        )  # fmt: skip


def _first_at(file: OpenFile, count: int, start: int) -> int:
    """Index in a file of the first unit that points to `start` or behind; units ascend."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        begin = max(0, middle - 1)
        data = file.read_at(begin * UNIT_SIZE, _NEIGHBOURS * UNIT_SIZE)
        offsets = sorted(_place(data, at) for at in range(0, len(data), UNIT_SIZE))
        # One damaged unit does not decide: of three neighbours the middle one does.
        if offsets[len(offsets) // 2] >= start:
            high = middle
        else:
            low = middle + 1
    return low


def _place(data: bytes, at: int) -> int:
    unit = UNIT.struct.unpack_from(data, at)
    offset, size, _ = unit
    if size == FILLER_SIZE:
        return -1
    return offset if any(unit) else 1 << 62  # not written yet
