"""A task of the audit: one range of a group's log, in all replicas.

Only what a later step needs leaves the task: findings, one row per queue, counts, and, if keys or
an acknowledged list are to be checked, one narrow row per message, without its body. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.properties import TAGS, UNIQ_KEY
from batonmq.protocol.records.columns import Bools, Int64s, take_fields
from batonmq.protocol.tags import tags_code
from batonmq.spark.differences.compare import Comparison, Held
from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.queues import (
    NUMBERED_SCHEMA,
    by_queue,
    check_queues,
    numbered,
    runs_of,
)
from batonmq.spark.differences.replica_groups import LogFile, ReplicaGroup
from batonmq.spark.differences.sides import Stretch, open_sides
from batonmq.spark.read.columns import binaries, integers_or_null, texts
from batonmq.spark.read.message_columns import PropertyPairs, split_properties

#: A record as the replicas hold it. `have`, `lack`: bit i is replica i of the group. `amount`: 1;
#: 0: the other replicas hold something else, or those that have it are behind a later epoch.
#: `batch_key`: the unique key of the batch in which it was sent.
MESSAGE_SCHEMA: Final = pa.schema(
    [
        ("group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("physical_offset", pa.int64()),
        ("size", pa.int64()),
        ("epoch", pa.int64()),
        ("unique_key", pa.string()),
        ("batch_key", pa.string()),
        ("have", pa.int64()),
        ("lack", pa.int64()),
        ("body_crc", pa.int64()),
        ("amount", pa.int64()),
    ]
)
_QUEUE: Final = [("group", pa.string()), ("topic", pa.string()), ("queue_id", pa.int32())]
#: Messages of a queue in one range whose queue offsets follow each other: the first, with its
#: epoch, and the queue offset and log offset of the last one.
#: `detail`: the epoch of each replica, if they differ.
RANGE_SCHEMA: Final = pa.schema(
    [
        *_QUEUE,
        *(
            (n, pa.int64())
            for n in ("queue_offset", "physical_offset", "last_offset", "last_start", "epoch")
        ),
        ("detail", pa.string()),
    ]
)
#: Messages of a range that a replica's queue does not reach, which ends at `reach`.
BEHIND_SCHEMA: Final = pa.schema(
    [
        *_QUEUE,
        ("replicas", pa.list_(pa.string())),
        *((n, pa.int64()) for n in ("queue_offset", "reach", "amount")),
    ]
)


@dataclass(frozen=True, slots=True)
class ScanSettings:
    """`unconfirmed`: what lies above confirmOffset is compared, too. `messages`: a row of each is
    wanted. `chunk_bytes`: so much is compared at once.
    """

    unconfirmed: bool = False
    queues: bool = True
    messages: bool = True
    chunk_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Records that begin in [begin, end) of one file; `group` is a number."""

    group: int
    file: LogFile
    begin: int
    end: int


class GroupCounts(msgspec.Struct):
    """One group: messages in its confirmed log, those that two or more replicas hold alike, and the
    bytes of the log that were compared.
    """

    messages: int = 0
    agreed: int = 0
    log_bytes: int = 0


@dataclass(slots=True)
class Scanned:
    """What ranges have. `queues`, `behind`: rows of RANGE_SCHEMA, BEHIND_SCHEMA."""

    counts: GroupCounts = field(default_factory=GroupCounts)
    findings: list[LogFinding] = field(default_factory=list)
    queues: list[dict[str, Any]] = field(default_factory=list)
    behind: list[dict[str, Any]] = field(default_factory=list)
    messages: list[pa.Table] = field(default_factory=list)


def plan_tasks(
    number: int, group: ReplicaGroup, files: Sequence[LogFile], range_bytes: int
) -> list[RangeTask]:
    """The ranges of a group's log that at least one replica is to be read in."""
    tasks = []
    for file in files:
        end = min(file.end, max(replica.end for replica in group.replicas))
        if file.start >= end:
            continue
        count = -(-(end - file.start) // range_bytes)
        cuts = [file.start + (end - file.start) * part // count for part in range(count)] + [end]
        tasks += [RangeTask(number, file, begin, stop) for begin, stop in pairwise(cuts)]
    return tasks


def scan_range(task: RangeTask, group: ReplicaGroup, request: ScanSettings, into: Scanned) -> None:
    """Compare one range; what it has goes `into`. Raises OSError."""
    comparison = Comparison(group, request.unconfirmed)
    top = max(replica.end if request.unconfirmed else replica.confirm for replica in group.replicas)
    tables = [NUMBERED_SCHEMA.empty_table()]
    with ExitStack() as stack:
        sides = list(open_sides(group, task.file, stack))
        for begin in range(task.begin, task.end, request.chunk_bytes):
            stretch = Stretch(task.file, begin, min(begin + request.chunk_bytes, task.end))
            result = comparison.of(sides, stretch)
            into.findings += result.findings
            into.counts.log_bytes += result.compared_bytes
            for held in result.held:
                counts = held.is_true & (held.ends <= top)
                alike = counts & (held.lack == 0) & (held.have & (held.have - 1) != 0)
                into.counts.messages += int(np.count_nonzero(counts))
                into.counts.agreed += int(np.count_nonzero(alike))
                if len(held.records) and (request.queues or request.messages):
                    tables += _tell(held, group, request, counts, into)
    if not request.queues:
        return
    queues = by_queue(pa.concat_tables(tables))
    into.queues += runs_of(group, queues)
    for side in sides:
        replica = group.replicas[side.index]
        for told in check_queues(group, replica, queues, task.begin, task.end):
            into.findings.append(told) if isinstance(told, LogFinding) else into.behind.append(told)


def _tell(
    held: Held, group: ReplicaGroup, request: ScanSettings, counts: Bools, into: Scanned
) -> list[pa.Table]:
    """Rows of the messages of a block, and those that count for their queues."""
    records = held.records
    topics = texts(binaries(held.window, records.topic_at, records.topic_length))
    pairs = split_properties(held.window, records.properties_at, records.properties_length)
    starts = records.start + held.base
    if request.messages:
        epochs, missing, current = _epochs(group, starts, held.have)
        into.messages.append(pa.table([
            pa.repeat(pa.scalar(group.name), len(records)), topics,
            pa.array(records.queue_id).cast(pa.int32()), records.queue_offset, starts,
            records.size, integers_or_null(epochs, missing, pa.int64()), *_unique_keys(pairs),
            held.have, held.lack, records.body_crc, (held.is_true & current).astype(np.int64),
        ], schema=MESSAGE_SCHEMA))  # fmt: skip
    if not request.queues:
        return []
    table = numbered(records, topics, held.base, _hashes(pairs.column(TAGS)), counts)
    return [table]


def _hashes(tags: pa.Array) -> Int64s:
    """The hash of each tag, 0 where there is none."""
    named = tags.dictionary_encode()
    codes = np.array([0, *(tags_code(tag) for tag in named.dictionary.to_pylist())], np.int64)
    which = named.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    return codes[which]


def _unique_keys(pairs: PropertyPairs) -> tuple[pa.Array, pa.Array]:
    """(own keys, keys of batches) of each row as strings; null where a row has none.

    A message of a batch carries two: its own first, then the one of the whole batch, which readers
    of properties see as the last of a repeated name. Only its own key identifies it.
    """
    raw = np.frombuffer(UNIQ_KEY.encode(), np.uint8)
    named = np.flatnonzero(pairs.name_length == len(raw))
    if len(named):
        found = take_fields(pairs.data, pairs.name_at[named], np.dtype(("u1", len(raw))))
        named = named[(found == raw).all(axis=1)]
    last = pairs.column(UNIQ_KEY)
    _, at = np.unique(pairs.row[named], return_index=True)
    if len(at) == len(named):
        return last, pa.nulls(pairs.rows, pa.string())
    columns = ("row", "name_at", "name_length", "value_at", "value_length")
    own = replace(pairs, **{n: getattr(pairs, n)[named[at]] for n in columns}).column(UNIQ_KEY)
    return own, pc.if_else(pc.equal(own, last), None, last)


def _epochs(group: ReplicaGroup, starts: Int64s, have: Int64s) -> tuple[Int64s, Bools, Bools]:
    """(epochs, missing, current) of log offsets: their epochs by the replicas that have them
    (bits), by all if none of those has one; missing where the lists disagree. `current`: one that
    has it gives it the latest epoch that any list does; otherwise a later master continued without
    it, and it will be truncated.
    """
    lists = [replica.facts.epoch_of(starts) for replica in group.replicas]
    epochs = np.array([each for each, _ in lists])
    tells = ~np.array([unknown for _, unknown in lists])
    has = (have >> np.arange(len(lists))[:, None]) & 1 == 1
    least = np.iinfo(np.int64).max

    def span(of: Bools) -> tuple[Int64s, Int64s]:
        low: Int64s = np.where(of, epochs, least).min(axis=0)
        high: Int64s = np.where(of, epochs, -1).max(axis=0)
        return low, high

    low, high = span(tells & has)
    all_low, latest = span(tells)
    low, high = np.where(high < 0, all_low, low), np.where(high < 0, latest, high)
    current = (has & (~tells | (epochs == latest))).any(axis=0)
    return high, low != high, current
