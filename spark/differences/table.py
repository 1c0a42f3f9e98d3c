"""Tables `differences` and `acknowledged` of the data source: what tasks find in ranges of logs,
and the entries of lists of acknowledged sends. The audit joins them.

A row of `differences` is one of several things, by its column `part`:

| part | |
|---|---|
| `finding` | what one range shows by itself |
| `message` | a message as the replicas hold it (option `messages`) |
| `queue` | the first and last message of a queue in the range |
| `behind` | messages that the queue of a replica does not reach yet |
| `count` | messages, those that replicas hold alike, bytes |

Free of Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import pyarrow as pa
from msgspec import Meta

from batonmq.spark.differences.acked_list import ENTRY_SCHEMA, Piece, entry_rows, plan_lists
from batonmq.spark.differences.log_findings import IDENTIFIED_SCHEMA, finding_table
from batonmq.spark.differences.replica_groups import ReplicaGroup, find_groups, log_files
from batonmq.spark.differences.scan import (
    BEHIND_SCHEMA,
    MESSAGE_SCHEMA,
    RANGE_SCHEMA,
    RangeTask,
    Scanned,
    ScanSettings,
    plan_tasks,
    scan_range,
)
from batonmq.spark.read.columns import widened
from batonmq.spark.read.options import MIB, Options, by
from batonmq.spark.read.storage import split_paths

_COUNT_SCHEMA: Final = pa.schema(
    [("group", pa.string()), *((n, pa.int64()) for n in ("messages", "agreed", "log_bytes"))]
)
DIFFERENCES: Final = pa.unify_schemas(
    [pa.schema([("part", pa.string())]), IDENTIFIED_SCHEMA, MESSAGE_SCHEMA, RANGE_SCHEMA,
     BEHIND_SCHEMA, _COUNT_SCHEMA]
)  # fmt: skip


class _Paths(Options, frozen=True, kw_only=True):
    table: str = ""
    path: Annotated[tuple[str, ...], by(split_paths)] = ()
    more_paths: Annotated[tuple[str, ...], by(split_paths)] = msgspec.field(
        name="paths", default=()
    )

    @classmethod
    def what(cls) -> str:
        return "table=acknowledged"

    @staticmethod
    def table_of(options: Mapping[str, str]) -> str:
        named = (text for name, text in options.items() if name.lower() == "table")
        return next(named, "").strip().lower()

    @property
    def paths(self) -> tuple[str, ...]:
        if not (self.path or self.more_paths):
            raise ValueError("no path: name one or several, as load(path) or option paths")
        return (*self.path, *self.more_paths)


class DifferencesOptions(_Paths, frozen=True, kw_only=True):
    """`group`: all stores are replicas of it. `whole_logs`: messages above what is confirmed, too,
    without comparing them. Sizes are bytes.
    """

    group: str = ""
    unconfirmed: bool = False
    messages: bool = False
    queues: bool = True
    whole_logs: bool = False
    split_bytes: Annotated[int, Meta(ge=1)] = 64 * MIB
    batch_bytes: Annotated[int, Meta(ge=1)] = 8 * MIB

    @classmethod
    def what(cls) -> str:
        return "table=differences"


@dataclass(frozen=True, slots=True)
class RangeWork:
    """Ranges that one task compares, and the groups that they are of."""

    groups: dict[int, ReplicaGroup]
    tasks: tuple[RangeTask, ...]


@dataclass(frozen=True, slots=True)
class DifferencesRead:
    """One read of table `differences`."""

    options: DifferencesOptions

    @property
    def schema(self) -> pa.Schema:
        return DIFFERENCES

    def plan(self) -> list[RangeWork]:
        """Raises ValueError, StoreError, OSError."""
        options = self.options
        groups = find_groups(
            options.paths, group=options.group or None, unconfirmed=options.unconfirmed,
            with_tails=options.whole_logs,
        )  # fmt: skip
        tasks = [
            task
            for number, group in enumerate(groups)
            for task in plan_tasks(number, group, log_files(group), options.split_bytes)
        ]
        return [
            RangeWork({task.group: groups[task.group] for task in pack}, tuple(pack))
            for pack in packed(tasks, options.split_bytes)
        ]

    def run(self, work: RangeWork) -> Iterator[pa.RecordBatch]:
        """Raises OSError."""
        options = self.options
        settings = ScanSettings(
            options.unconfirmed, options.queues, options.messages, options.batch_bytes
        )
        for task in work.tasks:
            group, found = work.groups[task.group], Scanned()
            scan_range(task, group, settings, found)
            yield from _rows("finding", finding_table(found.findings, IDENTIFIED_SCHEMA))
            yield from _rows("queue", pa.Table.from_pylist(found.queues, RANGE_SCHEMA))
            yield from _rows("behind", pa.Table.from_pylist(found.behind, BEHIND_SCHEMA))
            for table in found.messages:
                yield from _rows("message", table)
            counts = {"group": group.name, **msgspec.structs.asdict(found.counts)}
            yield from _rows("count", pa.Table.from_pylist([counts], _COUNT_SCHEMA))


def packed(tasks: Sequence[RangeTask], size_bytes: int) -> list[list[RangeTask]]:
    """Small ranges put together up to a size, so that many small logs are no swarm of tasks."""
    packs: list[list[RangeTask]] = []
    filled = size_bytes
    for task in tasks:
        size = task.end - task.begin
        if not packs or filled + size > size_bytes:
            packs.append([])
            filled = 0
        packs[-1].append(task)
        filled += size
    return packs


def _rows(part: str, table: pa.Table) -> Iterator[pa.RecordBatch]:
    return widened(table, DIFFERENCES, part=part)


@dataclass(frozen=True, slots=True)
class AcknowledgedRead:
    """One read of table `acknowledged`: entries, and the first line of a piece that is none."""

    options: _Paths

    @property
    def schema(self) -> pa.Schema:
        return ENTRY_SCHEMA

    def plan(self) -> list[tuple[int, Piece]]:
        """Raises FileNotFoundError, OSError."""
        return list(enumerate(plan_lists(self.options.paths)[0]))

    def run(self, work: tuple[int, Piece]) -> Iterator[pa.RecordBatch]:
        return entry_rows(*work)


def table_read(options: Mapping[str, str]) -> DifferencesRead | AcknowledgedRead:
    """The read of one of these tables. Raises ValueError for bad options."""
    named = _Paths.table_of(options)
    if named == "differences":
        return DifferencesRead(DifferencesOptions.from_mapping(options))
    return AcknowledgedRead(_Paths.from_mapping(options))
