"""What a task does: it writes its messages as rows into Parquet files, and reports them in one row.

No row leaves its task. A file counts only once a commit names it. Those of a task that was
repeated, or of a batch that was not committed, are left for the table's clean-up. Free of Spark.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.spark.read.storage import locate
from batonmq.spark.steps.sql import write_files
from batonmq.spark.topic_table.rows import Fresh, RowMaker, RowPlan

DAY, HOUR, NONE = "day", "hour", "none"
PARTS: Final = {NONE: (), DAY: ("_day",), HOUR: ("_day", "_hour")}
"""The columns of each partitioning; in Iceberg they are only folders."""
PART_TYPES: Final = {"_day": pa.date32(), "_hour": pa.int32()}
REPORT: Final = pa.schema([("report", pa.binary())])
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
FILE_PREFIX: Final = "part-"
"""So the names of our files begin: others' files in the folder are left alone."""
_STATS: Final = ("_queue_offset", "_store_at")
"""Columns whose least and greatest values Delta keeps of each file."""

Queues = dict[str, dict[str, tuple[int, int]]]
"""broker -> queue id -> (first offset, end offset)."""


class NewFile(msgspec.Struct, frozen=True):
    """One file of a table. `path`: below the table's folder. `part`: the values of PARTS that all
    its rows have; None: no time."""

    path: str
    size: int
    part: dict[str, str | None]
    stats: str


class TaskReport(msgspec.Struct):
    """What a task did. `newest_us`: when the last message was stored, us since 1970."""

    files: list[NewFile] = []
    queues: Queues = {}
    fresh: Fresh = {}
    rows: int = 0
    broken: int = 0
    newest_us: int = 0

    def add(self, other: TaskReport) -> None:
        self.files += other.files
        for broker, queues in other.queues.items():
            for queue, (begin, end) in queues.items():
                mine = self.queues.setdefault(broker, {})
                low, high = mine.get(queue, (begin, end))
                mine[queue] = (min(low, begin), max(high, end))
        for name, kinds in other.fresh.items():
            self.fresh.setdefault(name, set()).update(kinds)
        self.rows += other.rows
        self.broken += other.broken
        self.newest_us = max(self.newest_us, other.newest_us)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Where the rows of a batch go: `below` the folder of the table."""

    rows: RowPlan
    folder: str
    below: str
    partition: str


def write(plan: FilePlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The task: one row, a `TaskReport` as JSON."""
    maker, report = RowMaker(plan.rows), TaskReport()
    storage, folder = locate(plan.folder)
    files = write_files(
        _rows(maker, report, plan.partition, batches), storage.file_system,
        f"{folder}{plan.below}", f"{FILE_PREFIX}{uuid.uuid4().hex}",
        [pa.field(name, PART_TYPES[name]) for name in PARTS[plan.partition]],
    )  # fmt: skip
    report.files += [_new_file(file, folder) for file in files]
    report.fresh, report.broken = maker.fresh, maker.broken
    yield pa.record_batch([pa.array([msgspec.json.encode(report)], pa.binary())], schema=REPORT)


def _rows(
    maker: RowMaker, report: TaskReport, partition: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Rows with the columns of their partition."""
    for messages in filter(len, batches):
        rows = maker.rows(messages)
        _note(report, rows)
        at = rows.column("_store_at")
        for name in PARTS[partition]:
            value = pc.hour(at) if name == "_hour" else at
            rows = rows.append_column(name, value.cast(PART_TYPES[name]))
        yield rows


def _note(report: TaskReport, rows: pa.RecordBatch) -> None:
    report.rows += rows.num_rows
    newest = pc.max(rows.column("_store_at").cast(pa.int64())).as_py()
    report.newest_us = max(report.newest_us, newest or 0)
    table = pa.table([rows.column(n) for n in ("_broker", "_queue_id", "_queue_offset")],
                     names=["broker", "queue", "at"])  # fmt: skip
    found = table.group_by(["broker", "queue"]).aggregate([("at", "min"), ("at", "max")])
    for row in found.to_pylist():
        queues = {str(row["queue"]): (row["at_min"], row["at_max"] + 1)}
        report.add(TaskReport(queues={row["broker"]: queues}))


def _new_file(file: Any, folder: str) -> NewFile:
    """What pyarrow knows of a file that it has written."""
    path = file.path.removeprefix(folder).lstrip("/")
    pairs = [each.split("=", 1) for each in path.split("/") if "=" in each]
    part = {name: None if value == _NULL else value for name, value in pairs}
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            name, stats = column.path_in_schema, column.statistics
            if name in _STATS and stats is not None and stats.has_min_max:
                least[name] = min(stats.min, least.get(name, stats.min))
                most[name] = max(stats.max, most.get(name, stats.max))
    statistics = {"numRecords": file.metadata.num_rows, "minValues": least, "maxValues": most,
            "nullCount": {}}  # fmt: skip
    text = json.dumps(statistics, default=lambda at: f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond:06}Z")
    return NewFile(path, file.size, part, text)
