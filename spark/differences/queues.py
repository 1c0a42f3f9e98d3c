"""The messages of one range as their queues number them, and consume queues against them.

Queue offsets of a queue follow each other in the log. A queue's units point to ascending log
offsets, so those that belong to a range are found in each queue file by bisection; nothing is
sorted or moved between tasks. A message whose unit is not among them is looked up at its own place
in the queue, so a damaged unit misleads no search. Free of Spark.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.protocol.records.columns import Bools, Int64s
from batonmq.protocol.sysflag import INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK
from batonmq.protocol.topic_name import DUE_TOPICS, LMQ_PREFIX, METADATA_TOPIC
from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.replica_groups import ReplicaGroup, ReplicaStore
from batonmq.spark.read.columns import columns_of
from batonmq.spark.read.log_range import Block
from batonmq.spark.read.queues import Queue, Units, decode_units, last_written
from batonmq.spark.read.storage import OpenFile
from batonmq.spark.read.store_facts import StoreFile
from batonmq.spark.severity import CRITICAL

# So many units are read as they are; more are first narrowed down.
_FEW_UNITS: Final = 4096
_NEIGHBOURS: Final = 3
#: Messages with a place in a queue; `tags` is the hash of their tags.
NUMBERED: Final = columns_of("string: topic; long: queue_id queue_offset start size tags")
Row = dict[str, Any]
Numbered = npt.NDArray[np.int64]
"""Messages of one queue in the order of the log: four lines of numbers, queue offsets, log offsets,
sizes, hashes of tags."""


def numbered(block: Block, topics: pa.Array, tags: Int64s, wanted: Bools) -> pa.Table:
    """Wanted messages of a block; without those that have no place in a queue, or take several."""
    records = block.records
    transaction = records.sys_flag & TRANSACTION_MASK
    queued = wanted & ((transaction == 0) | (transaction == TRANSACTION_COMMIT))
    queued &= records.sys_flag & INNER_BATCH == 0
    columns = [records.queue_id, records.queue_offset, block.starts, records.size, tags]
    table = pa.table([topics, *columns], schema=NUMBERED)
    return table.filter(pc.and_(pa.array(queued), pc.not_equal(topics, METADATA_TOPIC)))


def by_queue(messages: pa.Table) -> dict[tuple[str, int], Numbered]:
    """Messages of a range, by topic and queue id."""
    table = messages.sort_by([(n, "ascending") for n in ("topic", "queue_id", "start")])
    topics, *columns = table.combine_chunks().columns
    codes = topics.combine_chunks().dictionary_encode()
    which, names = codes.indices.to_numpy(), codes.dictionary.to_pylist()
    queue_id, *rest = (column.to_numpy() for column in columns)
    cuts = np.flatnonzero((np.diff(which) != 0) | (np.diff(queue_id) != 0)) + 1
    edges = [0, *cuts.tolist(), len(which)] if len(which) else []
    return {
        (names[which[a]], int(queue_id[a])): np.array([column[a:b] for column in rest])
        for a, b in pairwise(edges)
    }


def runs_of(group: ReplicaGroup, queues: dict[tuple[str, int], Numbered]) -> Iterator[Row]:
    """A row for each run of messages whose queue offsets follow each other."""
    for (topic, queue_id), (offsets, starts, *_) in queues.items():
        cuts = (np.flatnonzero(np.diff(offsets) != 1) + 1).tolist()
        for begin, end in pairwise([0, *cuts, len(offsets)]):
            start = int(starts[begin])
            epoch, doubt = group.epoch_at(start)
            yield {
                "part": "queue", "group": group.name, "topic": topic, "queue_id": queue_id,
                "queue_offset": int(offsets[begin]), "physical_offset": start,
                "last_offset": int(offsets[end - 1]), "last_start": int(starts[end - 1]),
                "epoch": epoch, "detail": doubt,
            }  # fmt: skip


def check_queues(
    group: ReplicaGroup,
    replica: ReplicaStore,
    messages: dict[tuple[str, int], Numbered],
    begin: int,
    end: int,
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
        mine = messages.get(key, np.empty((4, 0), np.int64))
        offsets, starts, sizes, _ = mine
        kept = (starts + sizes <= replica.confirm) & (starts >= replica.first)
        if key in listed:
            yield from checker.queue(listed[key], mine[:, kept])
        elif kept.any():
            yield checker.behind(*key, offsets[kept], 0)


@dataclass(frozen=True, slots=True)
class _Checker:
    """Of one replica and range."""

    group: ReplicaGroup
    replica: ReplicaStore
    begin: int
    end: int

    def queue(self, queue: Queue, messages: Numbered) -> Iterator[LogFinding | Row]:
        """Findings of one queue against its messages."""
        with_tags = self.replica.tags_are_hashes and queue.topic not in DUE_TOPICS
        offsets, starts, sizes, tags = messages
        right = np.zeros(len(offsets), np.bool_)
        order = np.argsort(offsets, kind="stable")
        ascending = offsets[order]
        for file in queue.files:
            units = self._units(file)
            if len(units) and len(order):
                row = order[np.minimum(np.searchsorted(ascending, units.index), len(order) - 1)]
                fits = offsets[row] == units.index
                same = fits & (starts[row] == units.offset) & (sizes[row] == units.size)
                if with_tags:
                    same &= tags[row] == units.tags_code
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
        beyond = offsets[left] >= reach
        if beyond.any():
            yield self.behind(queue.topic, queue.queue_id, offsets[left[beyond]], reach)
        for row in left[~beyond].tolist():
            yield from self._at(queue, *messages[:, row].tolist(), with_tags=with_tags)

    def behind(self, topic: str, queue_id: int, offsets: Int64s, reach: int) -> Row:
        """A row that counts messages which a queue does not reach."""
        return {
            "part": "behind", "group": self.group.name, "replicas": [self.replica.name],
            "topic": topic, "queue_id": queue_id, "queue_offset": int(offsets.min()),
            "reach": reach, "amount": len(offsets),
        }  # fmt: skip

    def _reach(self, queue: Queue) -> int:
        """The queue offset behind the last written unit; zeros before it are no end."""
        for file in reversed(queue.files):
            with self.replica.storage.open(file.path) as opened:
                written = last_written(opened)
            if written:
                return file.start // UNIT_SIZE + written
        return queue.files[0].start // UNIT_SIZE if queue.files else 0

    def _units(self, file: StoreFile) -> Units:
        """The units of one queue file that point into the range."""
        with self.replica.storage.open(file.path) as opened:
            low, high = 0, opened.size // UNIT_SIZE
            if high > _FEW_UNITS:
                low = max(0, _first_at(opened, high, self.begin) - _NEIGHBOURS)
                high = _first_at(opened, high, self.end) + _NEIGHBOURS
            data = opened.read_at(low * UNIT_SIZE, (high - low) * UNIT_SIZE)
        units, _ = decode_units(data, file.start // UNIT_SIZE + low)
        return units.keep((units.offset >= self.begin) & (units.offset < self.end))

    def _at(
        self, queue: Queue, offset: int, start: int, size: int, tags: int, *, with_tags: bool
    ) -> Iterator[LogFinding]:
        """What is wrong with the unit of one message."""
        place = offset * UNIT_SIZE
        file = next((each for each in queue.files if each.start <= place < each.end), None)
        kind, what, path = "queue_missing", "no file holds its unit", None
        if file is None:
            if queue.files and place < queue.files[0].start:
                return  # expired, or made before the queue
        else:
            path = file.path
            with self.replica.storage.open(path) as opened:
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
        offset: int,
        start: int,
        size: int | None,
        detail: str,
        file: str | None,
    ) -> LogFinding:
        epoch, doubt = self.group.epoch_at(start)
        return LogFinding(
            self.group.name, CRITICAL, kind, detail + doubt, (self.replica.name,), queue.topic,
            queue.queue_id, offset, start, size, epoch, file=file,
        )  # fmt: skip


def _first_at(file: OpenFile, count: int, start: int) -> int:
    """Index in a file of the first unit that points to `start` or behind; units ascend."""

    def place(index: int) -> int:
        # One damaged unit does not decide: of three neighbours the middle one does.
        data = file.read_at(max(0, index - 1) * UNIT_SIZE, _NEIGHBOURS * UNIT_SIZE)
        whole = memoryview(data)[: len(data) // UNIT_SIZE * UNIT_SIZE]  # a file may be cut anywhere
        places = sorted(map(_place, UNIT.struct.iter_unpack(whole)))
        return places[len(places) // 2]

    return bisect_left(range(count), start, key=place)


def _place(unit: tuple[int, ...]) -> int:
    if unit[1] == FILLER_SIZE:
        return -1
    return unit[0] if any(unit) else 1 << 62  # not written yet
