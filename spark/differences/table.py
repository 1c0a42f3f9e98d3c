"""Tables `differences` and `acknowledged` of the data source: what tasks find in ranges of logs,
and the entries of lists of acknowledged sends. The audit joins them.

A task of `differences` reads one range of a group's log in all replicas. Only what a later step
needs leaves it: findings, counts, and, if they are wanted, one narrow row per message, without its
body. Free of Spark.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import field
from msgspec.structs import asdict

from batonmq.protocol.properties import TAGS, UNIQ_KEY
from batonmq.protocol.records.columns import Bools, Int64s
from batonmq.protocol.sysflag import INNER_BATCH, TRANSACTION_COMMIT, TRANSACTION_MASK
from batonmq.protocol.tags import tags_code
from batonmq.spark.differences.acked_list import ENTRY_SCHEMA, entry_rows, plan_lists
from batonmq.spark.differences.compare import Held, compare
from batonmq.spark.differences.log_findings import DIFFERENCES, LogFinding
from batonmq.spark.differences.replica_groups import LogFile, ReplicaGroup, find_groups, log_files
from batonmq.spark.differences.sides import open_sides
from batonmq.spark.read.columns import batch_of, binaries, integers_or_null, texts
from batonmq.spark.read.message_columns import PropertyPairs, split_properties
from batonmq.spark.read.options import MIB, Options, Positive, by
from batonmq.spark.read.storage import TextPart, even_parts, gather, split_paths


class AcknowledgedOptions(Options, frozen=True, kw_only=True):
    table: str = ""
    path: Annotated[tuple[str, ...], by(split_paths)] = ()
    more_paths: Annotated[tuple[str, ...], by(split_paths)] = field(name="paths", default=())

    @classmethod
    def what(cls) -> str:
        return "table=acknowledged"

    @property
    def paths(self) -> tuple[str, ...]:
        if not (self.path or self.more_paths):
            raise ValueError("no path: name one or several, as load(path) or option paths")
        return (*self.path, *self.more_paths)


class DifferencesOptions(AcknowledgedOptions, frozen=True, kw_only=True):
    """`group`: all stores are replicas of it. `messages`: a row of each is wanted. `whole_logs`:
    messages above what is confirmed, too, without comparing them. Sizes are bytes; `batch_bytes`:
    so much is compared at once.
    """

    group: str = ""
    unconfirmed: bool = False
    messages: bool = False
    whole_logs: bool = False
    split_bytes: Positive = 64 * MIB
    batch_bytes: Positive = 8 * MIB

    @classmethod
    def what(cls) -> str:
        return "table=differences"


@dataclass(frozen=True, slots=True)
class RangeTask:
    """Records that begin in [begin, end) of one file of a group's log."""

    group: ReplicaGroup
    file: LogFile
    begin: int
    end: int


def plan_tasks(group: ReplicaGroup, range_bytes: int) -> Iterator[RangeTask]:
    """The ranges of a group's log that at least one replica is to be read in. Raises ValueError."""
    top = max(replica.end for replica in group.replicas)
    for file in log_files(group):
        end = min(file.end, top)
        for begin, stop in even_parts(file.start, end, -((file.start - end) // range_bytes)):
            yield RangeTask(group, file, begin, stop)


@dataclass(frozen=True, slots=True)
class DifferencesRead:
    """One read of table `differences`."""

    options: DifferencesOptions

    @property
    def schema(self) -> pa.Schema:
        return DIFFERENCES

    def plan(self) -> list[tuple[RangeTask, ...]]:
        """Small ranges share a task, so that many small logs are no swarm of them. Raises
        ValueError, StoreError, OSError.
        """
        options = self.options
        groups = find_groups(
            options.paths, group=options.group or None, unconfirmed=options.unconfirmed,
            with_tails=options.whole_logs,
        )  # fmt: skip
        tasks = [task for each in groups for task in plan_tasks(each, options.split_bytes)]
        return gather(tasks, lambda task: task.end - task.begin, options.split_bytes)

    def run(self, work: Sequence[RangeTask]) -> Iterator[pa.RecordBatch]:
        """Raises OSError."""
        for task in work:
            yield from scan_range(task, self.options)


def scan_range(task: RangeTask, options: DifferencesOptions) -> Iterator[pa.RecordBatch]:
    """Compare one range. Raises OSError."""
    group = task.group
    top = max(each.end if options.unconfirmed else each.confirm for each in group.replicas)
    rows: list[dict[str, Any]] = []
    messages: list[pa.RecordBatch] = []
    counted = dict.fromkeys(("messages", "agreed", "log_bytes"), 0)
    with ExitStack() as stack:
        sides = list(open_sides(group, task.file, stack))
        for begin in range(task.begin, task.end, options.batch_bytes):
            end = min(begin + options.batch_bytes, task.end)
            for found in compare(group, sides, begin, end, unconfirmed=options.unconfirmed):
                if isinstance(found, int):
                    counted["log_bytes"] += found
                    continue
                if isinstance(found, LogFinding):
                    rows.append({"part": "finding", **asdict(found)})
                    continue
                counts = found.is_true & (found.block.ends <= top)
                # `have & have - 1` is 0 where only one bit is set: one replica alone is no proof.
                alike = counts & (found.lack == 0) & (found.have & (found.have - 1) != 0)
                counted["messages"] += int(np.count_nonzero(counts))
                counted["agreed"] += int(np.count_nonzero(alike))
                if options.messages:
                    messages.append(_messages(found, group, counts))
    if rows:
        yield pa.RecordBatch.from_pylist(rows, DIFFERENCES)
    yield from messages
    yield batch_of(DIFFERENCES, 1, {"part": "count", "group": group.name, **counted})


def _messages(held: Held, group: ReplicaGroup, counts: Bools) -> pa.RecordBatch:
    """Rows of the messages of a block; `counts`: those that are true and confirmed."""
    block, records = held.block, held.block.records
    topics = texts(binaries(block.window, records.topic_at, records.topic_length))
    pairs = split_properties(block.window, records.properties_at, records.properties_length)
    epochs, missing, current = _epochs(group, block.starts, held.have)
    unique_key, batch_key = _unique_keys(pairs)
    named = pairs.column(TAGS).dictionary_encode()
    codes = np.array([0, *(tags_code(tag) for tag in named.dictionary.to_pylist())], np.int64)
    which = named.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    transaction = records.sys_flag & TRANSACTION_MASK
    queued = counts & ((transaction == 0) | (transaction == TRANSACTION_COMMIT))
    queued &= records.sys_flag & INNER_BATCH == 0
    return batch_of(DIFFERENCES, len(records), {
        "part": "message", "group": group.name, "topic": topics, "queue_id": records.queue_id,
        "queue_offset": records.queue_offset, "physical_offset": block.starts,
        "size": records.size, "epoch": integers_or_null(epochs, missing, pa.int64()),
        "unique_key": unique_key, "batch_key": batch_key, "have": held.have, "lack": held.lack,
        "body_crc": records.body_crc, "amount": (held.is_true & current).astype(np.int64),
        "tags": codes[which], "is_queued": queued,
    })  # fmt: skip


def _unique_keys(pairs: PropertyPairs) -> tuple[pa.Array, pa.Array]:
    """(own keys, keys of batches) of each row as strings; null where a row has none.

    A message of a batch carries two: its own first, then the one of the whole batch, which readers
    of properties see as the last of a repeated name. Only its own key identifies it.
    """
    own, last = pairs.column(UNIQ_KEY, first=True), pairs.column(UNIQ_KEY)
    return own, pc.if_else(pc.equal(own, last), None, last)


def _epochs(group: ReplicaGroup, starts: Int64s, have: Int64s) -> tuple[Int64s, Bools, Bools]:
    """(epochs, missing, current) of log offsets: their epochs by the replicas that have them
    (bits), by all if none of those has one; missing where the lists disagree. `current`: one that
    has it gives it the latest epoch that any list does; otherwise a later master continued without
    it, and it will be truncated.
    """
    lists = [replica.facts.epoch_of(starts) for replica in group.replicas]
    epochs = np.array([each for each, _ in lists])
    knows = ~np.array([unknown for _, unknown in lists])
    has = (have >> np.arange(len(lists))[:, None]) & 1 == 1
    least = np.iinfo(np.int64).max

    def span(of: Bools) -> tuple[Int64s, Int64s]:
        low: Int64s = np.where(of, epochs, least).min(axis=0)
        high: Int64s = np.where(of, epochs, -1).max(axis=0)
        return low, high

    low, high = span(knows & has)
    all_low, latest = span(knows)
    low, high = np.where(high < 0, all_low, low), np.where(high < 0, latest, high)
    current = (has & (~knows | (epochs == latest))).any(axis=0)
    return high, low != high, current


@dataclass(frozen=True, slots=True)
class AcknowledgedRead:
    """One read of table `acknowledged`: entries, and the first line of a piece that is none."""

    options: AcknowledgedOptions

    @property
    def schema(self) -> pa.Schema:
        return ENTRY_SCHEMA

    def plan(self) -> list[tuple[int, TextPart]]:
        """Raises FileNotFoundError, OSError."""
        return list(enumerate(plan_lists(self.options.paths)[0]))

    def run(self, work: tuple[int, TextPart]) -> Iterator[pa.RecordBatch]:
        return entry_rows(*work)


def table_read(table: str, options: Mapping[str, str]) -> DifferencesRead | AcknowledgedRead:
    """The read of one of these tables. Raises ValueError for bad options."""
    if table == "differences":
        return DifferencesRead(DifferencesOptions.from_mapping(options))
    return AcknowledgedRead(AcknowledgedOptions.from_mapping(options))
