"""The messages of one range as their queues number them, and consume queues against them.

Queue offsets of a queue follow each other in the log. A queue's units point to ascending log
offsets, so those that belong to a range are found in each queue file by bisection; nothing is
sorted or moved between tasks. A message whose unit is not among them is looked up at its own place
in the queue, so a damaged unit misleads no search. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.protocol.records.columns import Bools, Int64s, Records
from batonmq.protocol.sysflag import INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK
from batonmq.protocol.topic_name import DUE_TOPICS, LMQ_PREFIX, METADATA_TOPIC
from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.replica_groups import ReplicaGroup, ReplicaStore
from batonmq.spark.read.queues import Queue, Units, decode_units, last_written
from batonmq.spark.read.storage import OpenFile
from batonmq.spark.read.store_facts import StoreFile
from batonmq.spark.severity import CRITICAL

# So many units are read as they are; more are first narrowed down.
_FEW_UNITS: Final = 4096
_NEIGHBOURS: Final = 3
#: Messages with a place in a queue.
NUMBERED_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        *((name, pa.int64()) for name in ("queue_id", "queue_offset", "start", "size", "tags")),
    ]
)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Numbered:
    """Messages of one queue in the order of the log: queue offsets, log offsets, sizes, hashes of
    their tags."""

    offsets: Int64s
    starts: Int64s
    sizes: Int64s
    tags: Int64s

    def keep(self, wanted: Bools) -> Numbered:
        columns = (self.offsets, self.starts, self.sizes, self.tags)
        return Numbered(*(column[wanted] for column in columns))


_NONE: Final = Numbered(*[np.empty(0, np.int64)] * 4)
Queues = dict[tuple[str, int], Numbered]


def numbered(
    records: Records, topics: pa.Array, base: int, tags: Int64s, wanted: Bools
) -> pa.Table:
    """Wanted messages of a block; without those that have no place in a queue, or take several."""
    transaction = records.sys_flag & TRANSACTION_MASK
    queued = wanted & ((transaction == 0) | (transaction == TRANSACTION_COMMIT))
    queued &= records.sys_flag & INNER_BATCH == 0
    columns = [topics, records.queue_id, records.queue_offset, records.start + base, records.size]
    table = pa.table([*columns, tags], schema=NUMBERED_SCHEMA)
    return table.filter(pc.and_(pa.array(queued), pc.not_equal(topics, METADATA_TOPIC)))


def by_queue(messages: pa.Table) -> Queues:
    """Messages of a range, by topic and queue id."""
    table = messages.sort_by([(n, "ascending") for n in ("topic", "queue_id", "start")])
    topics, *columns = table.combine_chunks().columns
    codes = topics.combine_chunks().dictionary_encode()
    which, (queue_id, *rest) = codes.indices.to_numpy(), [c.to_numpy() for c in columns]
    names = codes.dictionary.to_pylist()
    fresh = (np.diff(which) != 0) | (np.diff(queue_id) != 0)
    edges = [0, *(np.flatnonzero(fresh) + 1).tolist(), len(which)] if len(which) else []
    return {
        (names[which[a]], int(queue_id[a])): Numbered(*(c[a:b] for c in rest))
        for a, b in pairwise(edges)
    }


def runs_of(group: ReplicaGroup, queues: Queues) -> Iterator[Row]:
    """A row, of RANGE_SCHEMA, for each run of messages whose queue offsets follow each other."""
    for (topic, queue_id), each in queues.items():
        cuts = (np.flatnonzero(np.diff(each.offsets) != 1) + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(each.offsets)]):
            start = int(each.starts[begin])
            epoch, doubt = group.epoch_at(start)
            yield {
                "group": group.name,
                "topic": topic,
                "queue_id": queue_id,
                "queue_offset": int(each.offsets[begin]),
                "physical_offset": start,
                "last_offset": int(each.offsets[end - 1]),
                "last_start": int(each.starts[end - 1]),
                "epoch": epoch,
                "detail": doubt,
            }


def check_queues(
    group: ReplicaGroup, replica: ReplicaStore, messages: Queues, begin: int, end: int
) -> Iterator[LogFinding | Row]:
    """Units of one replica that are wrong or missing for messages, or point to none.

    `messages` are all in [begin, end) of the log; only those count that the replica confirms. A
    message that its queue does not reach yet, or no longer, makes no finding: rows have their
    number.
    """
    checker = _Checker(group, replica, begin, min(end, replica.confirm))
    listed = {(queue.topic, queue.queue_id): queue for queue in replica.queues}
    for key in sorted(messages.keys() | listed.keys()):
        # These queues show messages of other topics a second time.
        if key[0].startswith(LMQ_PREFIX):
            continue
        mine = messages.get(key, _NONE)
        kept = (mine.starts + mine.sizes <= replica.confirm) & (mine.starts >= replica.first)
        mine = mine.keep(kept)
        if key in listed:
            yield from checker.queue(listed[key], mine)
        elif len(mine.offsets):
            yield checker.behind(*key, mine.offsets, 0)


class _Checker:
    def __init__(self, group: ReplicaGroup, replica: ReplicaStore, begin: int, end: int) -> None:
        self._group = group
        self._replica = replica
        self._begin, self._end = begin, end
        self._with_tags = replica.tags_are_hashes

    def queue(self, queue: Queue, messages: Numbered) -> Iterator[LogFinding | Row]:
        """Findings of one queue against its messages."""
        with_tags = self._with_tags and queue.topic not in DUE_TOPICS
        right = np.zeros(len(messages.offsets), np.bool_)
        order = np.argsort(messages.offsets, kind="stable")
        ascending = messages.offsets[order]
        for file in queue.files:
            units = self._units(file)
            if len(units) and len(order):
                row = order[np.minimum(np.searchsorted(ascending, units.index), len(order) - 1)]
                fits = messages.offsets[row] == units.index
                same = fits & (messages.starts[row] == units.offset)
                same &= messages.sizes[row] == units.size
                if with_tags:
                    same &= messages.tags[row] == units.tags_code
                right[row[same]] = True
                units = units.keep(~fits)
            # What is left points here, but the message of its number lies elsewhere, or nowhere.
            for index, offset in zip(units.index.tolist(), units.offset.tolist(), strict=True):
                what = f"the unit points to {offset}, where no message of this queue offset lies"
                yield self._finding("queue_wrong", queue, index, offset, None, what, file.path)
        left = np.flatnonzero(~right)
        if not len(left):
            return
        reach = self._reach(queue)
        beyond = messages.offsets[left] >= reach
        if beyond.any():
            behind = messages.offsets[left[beyond]]
            yield self.behind(queue.topic, queue.queue_id, behind, reach)
        for row in left[~beyond].tolist():
            expected = int(messages.starts[row]), int(messages.sizes[row]), int(messages.tags[row])
            yield from self._at(queue, int(messages.offsets[row]), expected, with_tags=with_tags)

    def behind(self, topic: str, queue_id: int, offsets: Int64s, reach: int) -> Row:
        """A row that counts messages which a queue does not reach."""
        return {
            "group": self._group.name,
            "replicas": [self._replica.name],
            "topic": topic,
            "queue_id": queue_id,
            "queue_offset": int(offsets.min()),
            "reach": reach,
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

    def _units(self, file: StoreFile) -> Units:
        """The units of one queue file that point into the range."""
        with self._replica.storage.open(file.path) as opened:
            low, high = 0, opened.size // UNIT_SIZE
            if high > _FEW_UNITS:
                low = max(0, _first_at(opened, high, self._begin) - _NEIGHBOURS)
                high = _first_at(opened, high, self._end) + _NEIGHBOURS
            data = opened.read_at(low * UNIT_SIZE, (high - low) * UNIT_SIZE)
        units, _ = decode_units(data, file.start // UNIT_SIZE + low)
        return units.keep((units.offset >= self._begin) & (units.offset < self._end))

    def _at(
        self, queue: Queue, offset: int, expected: tuple[int, int, int], *, with_tags: bool
    ) -> Iterator[LogFinding]:
        """What is wrong with the unit of one message: its log offset, size and hash of tags."""
        start, size, tags = expected
        place = offset * UNIT_SIZE
        file = next((each for each in queue.files if each.start <= place < each.end), None)
        kind, what, path = "queue_missing", "no file holds its unit", None
        if file is None:
            if queue.files and place < queue.files[0].start:
                return  # expired, or made before the queue
        else:
            path = file.path
            with self._replica.storage.open(path) as opened:
                data = opened.read_at(place - file.start, UNIT_SIZE)
            unit = UNIT.struct.unpack(data.ljust(UNIT_SIZE, b"\0"))
            if unit[1] == FILLER_SIZE:
                return  # the queue begins behind it
            is_there = unit[:2] == (start, size)
            if is_there and (unit[2] == tags or not with_tags):
                return
            what = "its unit was never written"
            if any(unit):
                kind, what = "queue_wrong", f"its unit points to {unit[1]} bytes at {unit[0]}"
            if is_there:
                what = f"its unit has tags code {unit[2]}, its tags make {tags}"
        yield self._finding(kind, queue, offset, start, size, what, path)

    def _finding(
        self,
        kind: str,
        queue: Queue,
        queue_offset: int,
        start: int,
        size: int | None,
        detail: str,
        file: str | None,
    ) -> LogFinding:
        epoch, doubt = self._group.epoch_at(start)
        return LogFinding(
            self._group.name, CRITICAL, kind, detail + doubt, (self._replica.name,), queue.topic,
            queue.queue_id, queue_offset, start, size, epoch, file=file,
        )  # fmt: skip


def _first_at(file: OpenFile, count: int, start: int) -> int:
    """Index in a file of the first unit that points to `start` or behind; units ascend."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        data = file.read_at(max(0, middle - 1) * UNIT_SIZE, _NEIGHBOURS * UNIT_SIZE)
        offsets = sorted(_place(data, at) for at in range(0, len(data), UNIT_SIZE))
        # One damaged unit does not decide: of three neighbours the middle one does.
        if offsets[len(offsets) // 2] >= start:
            high = middle
        else:
            low = middle + 1
    return low


def _place(data: bytes, at: int) -> int:
    unit = UNIT.struct.unpack_from(data, at)
    if unit[1] == FILLER_SIZE:
        return -1
    return int(unit[0]) if any(unit) else 1 << 62  # not written yet
