"""The messages of one range of the log as their queues number them: gaps, and steps back.

Free of Spark.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa

from batonmq.protocol.sysflag import INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK
from batonmq.protocol.topic_name import METADATA_TOPIC
from batonmq.spark.audit.findings import CRITICAL, QUEUE, WARNING, Finding
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.read.record_columns import Bools, Int64s, Records

#: Records of these topics have no place in a consume queue.
_UNQUEUED: Final = (METADATA_TOPIC,)


@dataclass(frozen=True, slots=True)
class Numbered:
    """Messages with a place in a queue, by (topic, queue, log offset); topics by their codes."""

    topics: tuple[str, ...]
    topic: Int64s
    queue_id: Int64s
    queue_offset: Int64s
    start: Int64s
    size: Int64s
    tags_code: Int64s

    def __len__(self) -> int:
        return len(self.start)

    def queues(self) -> Iterator[tuple[str, int, slice]]:
        """(topic, queue id, which rows) of each queue."""
        if not len(self):
            return
        fresh = (np.diff(self.topic) != 0) | (np.diff(self.queue_id) != 0)
        edges = [0, *(np.flatnonzero(fresh) + 1).tolist(), len(self)]
        for begin, end in pairwise(edges):
            yield self.topics[int(self.topic[begin])], int(self.queue_id[begin]), slice(begin, end)


@dataclass(slots=True)
class Collector:
    """Gathers the messages of a range, block by block, in any order."""

    _codes: dict[str, int] = field(default_factory=dict)
    _parts: list[tuple[Int64s, ...]] = field(default_factory=list)

    def add(
        self, base: int, records: Records, topics: pa.Array, tags: Int64s, wanted: Bools
    ) -> None:
        """Messages of a block: `topics` a string column, `tags` their hashes; only `wanted` ones.

        Those without a place in a queue, and batches that take several, are left out.
        """
        transaction = records.sys_flag & TRANSACTION_MASK
        wanted = wanted & ((transaction == 0) | (transaction == TRANSACTION_COMMIT))
        wanted = wanted & (records.sys_flag & INNER_BATCH == 0)
        named = topics.dictionary_encode()
        names = named.dictionary.to_pylist()
        known = [-1 if n in _UNQUEUED else self._codes.setdefault(n, len(self._codes))
                 for n in names]  # fmt: skip
        codes = np.array(known, np.int64)[named.indices.to_numpy(zero_copy_only=False)]
        wanted = wanted & (codes >= 0)
        self._parts.append(
            tuple(
                column[wanted]
                for column in (
                    codes, records.queue_id, records.queue_offset, records.start + base,
                    records.size, tags,
                )
            )
        )  # fmt: skip

    def numbered(self) -> Numbered:
        """All of them, sorted."""
        columns = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]
        if not columns:
            columns = [np.empty(0, np.int64)] * 6
        topic, queue_id, queue_offset, start, size, tags = columns
        order = np.lexsort((start, queue_id, topic))
        return Numbered(
            tuple(self._codes),
            topic[order],
            queue_id[order],
            queue_offset[order],
            start[order],
            size[order],
            tags[order],
        )


def check_sequence(group: ReplicaGroup, messages: Numbered) -> Iterator[Finding | dict[str, Any]]:
    """Findings within the range, and for each queue a row with its first and last offset."""
    for topic, queue_id, rows in messages.queues():
        offsets, starts = messages.queue_offset[rows], messages.start[rows]
        for at in np.flatnonzero(np.diff(offsets) != 1).tolist():
            before, after = int(offsets[at]), int(offsets[at + 1])
            yield step_finding(group, topic, queue_id, before, after, int(starts[at + 1]))
        yield {
            "part": QUEUE,
            "group": group.name,
            "topic": topic,
            "queue_id": queue_id,
            "queue_offset": int(offsets[0]),
            "physical_offset": int(starts[0]),
            "last_offset": int(offsets[-1]),
            "amount": len(offsets),
        }


def step_finding(
    group: ReplicaGroup, topic: str, queue_id: int, before: int, after: int, start: int
) -> Finding:
    """What it means that `after` follows `before` in a queue, and not the next number."""
    epoch, doubt = group.epoch_at(start)
    severity, kind, first = CRITICAL, "gap", before + 1
    if after > before:
        missing = after - before - 1
        what = f"{missing} queue offset{'s' * (missing > 1)} from {before + 1} on"
        detail = f"{what} have no message in the log" if missing > 1 else f"{what} has no message"
    elif after == 0:
        severity, kind, first = WARNING, "reordered", after
        detail = (
            f"the queue begins again at 0 behind {before}, as if it was deleted and created again"
        )
    else:
        kind, first = "reordered", after
        detail = f"queue offset {after} follows {before} in the log"
    return Finding(
        group.name, severity, kind, detail + doubt, (), topic, queue_id, first, start, epoch=epoch
    )
