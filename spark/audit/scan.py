"""A task of the audit: one range of a group's log, in all replicas, as rows.

Only what a later step needs leaves the task: findings, one row per queue, counts, and, if keys or
an acknowledged list are to be checked, one narrow row per message, without its body. Free of Spark.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from batonmq.protocol.properties import TAGS
from batonmq.protocol.tags import tags_code
from batonmq.spark.audit.compare import Comparison, Held
from batonmq.spark.audit.findings import (
    COUNT,
    MESSAGE,
    Finding,
    finding_rows,
    scan_batch,
    scan_columns,
)
from batonmq.spark.audit.keys import unique_keys
from batonmq.spark.audit.queue_check import check_queues
from batonmq.spark.audit.replicas import LogFile, ReplicaGroup
from batonmq.spark.audit.sequence import Collector, check_sequence
from batonmq.spark.audit.sides import Stretch, open_sides
from batonmq.spark.read.arrow_parts import binaries, integers_or_null, texts
from batonmq.spark.read.property_columns import split_properties
from batonmq.spark.read.record_columns import Bools, Int64s

_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """What tasks do. `messages`: a row of each message, too; sizes are bytes."""

    check_crc: bool = True
    unconfirmed: bool = False
    messages: bool = True
    queues: bool = True
    range_bytes: int = 64 << 20
    chunk_bytes: int = 8 << 20
    record_bytes_max: int = 32 << 20


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Records that begin in [begin, end) of one file; `group` is a number."""

    group: int
    file: LogFile
    begin: int
    end: int


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


def run_task(
    task: RangeTask, group: ReplicaGroup, options: ScanOptions
) -> Iterator[pa.RecordBatch]:
    """The rows of one range; see `findings.SCAN_SCHEMA`. Raises OSError."""
    comparison = Comparison(
        group,
        check_crc=options.check_crc,
        unconfirmed=options.unconfirmed,
        record_bytes_max=options.record_bytes_max,
    )
    collector = Collector()
    top = max(replica.end if options.unconfirmed else replica.confirm for replica in group.replicas)
    messages = agreed = compared = 0
    damaged: list[Finding] = []
    with ExitStack() as stack:
        sides = list(open_sides(group, task.file, stack))
        for begin in range(task.begin, task.end, options.chunk_bytes):
            stretch = Stretch(task.file, begin, min(begin + options.chunk_bytes, task.end))
            result = comparison.of(sides, stretch)
            yield from _batches(finding_rows(result.findings))
            compared += result.compared_bytes
            damaged += [f for f in result.findings if f.kind == "damaged"]
            for held in result.held:
                counts = held.is_true & (held.ends <= top)
                messages += int(np.count_nonzero(counts))
                alike = counts & (held.lack == 0) & (held.have & (held.have - 1) != 0)
                agreed += int(np.count_nonzero(alike))
                yield from _tell(held, group, options, collector, top)
    rows: list[dict[str, Any]] = []
    if options.queues:
        numbered = collector.numbered()
        said = list(check_sequence(group, numbered))
        for side in sides:
            said += check_queues(group, group.replicas[side.index], numbered, task.begin, task.end)
        rows += [row for row in said if isinstance(row, dict)]
        rows += finding_rows(row for row in said if isinstance(row, Finding))
    rows.append(
        {
            "part": COUNT,
            "group": group.name,
            "amount": messages,
            "agreed": agreed,
            "size": compared,
        }
    )
    yield from _batches(rows)


def _tell(
    held: Held, group: ReplicaGroup, options: ScanOptions, collector: Collector, top: int
) -> Iterator[pa.RecordBatch]:
    """Note the messages of a block for their queues, and make rows of them if they are wanted."""
    records = held.records
    if not len(records) or not (options.queues or options.messages):
        return
    topics = texts(binaries(held.window, records.topic_at, records.topic_length))
    pairs = split_properties(held.window, records.properties_at, records.properties_length)
    if options.queues:
        wanted = held.is_true & (held.ends <= top)
        collector.add(held.base, records, topics, _hashes(pairs.column(TAGS)), wanted)
    if not options.messages:
        return
    starts = records.start + held.base
    epochs, missing, current = _epochs(group, starts, held.have)
    own, of_batch = unique_keys(pairs)
    rows = len(records)
    yield scan_columns(
        MESSAGE,
        {
            "group": pa.repeat(pa.scalar(group.name), rows),
            "topic": topics,
            "queue_id": pa.array(records.queue_id),
            "queue_offset": pa.array(records.queue_offset),
            "physical_offset": pa.array(starts),
            "size": pa.array(records.size),
            "epoch": integers_or_null(epochs, missing, pa.int64()),
            "unique_key": own,
            "batch_key": of_batch,
            "have": pa.array(held.have),
            "lack": pa.array(held.lack),
            "body_crc": pa.array(records.body_crc),
            "amount": pa.array((held.is_true & current).astype(np.int64)),
        },
        rows,
    )


def _hashes(tags: pa.Array) -> Int64s:
    """The hash of each tag, 0 where there is none."""
    named = tags.dictionary_encode()
    codes = np.array([0, *(tags_code(tag) for tag in named.dictionary.to_pylist())], np.int64)
    which = named.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    return codes[which]


def _epochs(group: ReplicaGroup, starts: Int64s, have: Int64s) -> tuple[Int64s, Bools, Bools]:
    """(epochs, missing, current) of log offsets: their epochs by the replicas that have them
    (bits), by all if none of those has one; missing where the lists disagree. `current`: one that
    has it gives it the latest epoch that any list does; otherwise a later master continued without
    it, and it will be truncated.
    """
    said = [replica.facts.epoch_of(starts) for replica in group.replicas]
    everybody = np.full(len(starts), -1, np.int64)
    low, high = _least_and_latest(said, have)
    all_low, latest = _least_and_latest(said, everybody)
    low, high = np.where(high < 0, all_low, low), np.where(high < 0, latest, high)
    current = np.zeros(len(starts), np.bool_)
    for index, (epochs, unknown) in enumerate(said):
        current |= ((have >> index) & 1 == 1) & (unknown | (epochs == latest))
    return high, low != high, current


def _least_and_latest(
    said: Sequence[tuple[Int64s, Bools]], wanted: Int64s
) -> tuple[Int64s, Int64s]:
    """The least and the latest epoch in the wanted (bits) of several lists: the greatest
    number there is, and -1, where none of them has one.
    """
    least = np.full(len(wanted), np.iinfo(np.int64).max)
    latest = np.full(len(wanted), -1, np.int64)
    for index, (epochs, unknown) in enumerate(said):
        tells = ~unknown & ((wanted >> index) & 1 == 1)
        least = np.where(tells, np.minimum(least, epochs), least)
        latest = np.where(tells, np.maximum(latest, epochs), latest)
    return least, latest


def _batches(rows: Sequence[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(rows), _ROWS):
        yield scan_batch(rows[at : at + _ROWS])
