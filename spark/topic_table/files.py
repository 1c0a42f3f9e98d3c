"""What a task does: it writes its messages as rows into Parquet files, and reports them in one row.

No row leaves its task. A file counts only once a commit names it. Those of a task that was
repeated, or of a batch that was not committed, are left for the table's clean-up. Free of Spark.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batonmq.spark.read.storage import Storage, locate
from batonmq.spark.topic_table.rows import Fresh, RowMaker, RowPlan

DAY, HOUR, NONE = "day", "hour", "none"
REPORT: Final = pa.schema([("report", pa.binary())])
_GROUP_BYTES: Final = 32 << 20
_STATS: Final = ("_queue_offset", "_store_at")
"""Columns whose least and greatest values Delta keeps of each file."""

Queues = dict[str, dict[str, tuple[int, int]]]
"""broker -> queue id -> (first offset, end offset)."""


class NewFile(msgspec.Struct, frozen=True):
    """One file of a table. `path`: below the table's folder. `part`: the day or hour of all its
    rows as "2026-11-28" or "2026-11-28T10"; None: no partition, or no time."""

    path: str
    size: int
    rows: int
    part: str | None
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


class FilePlan(msgspec.Struct, frozen=True):
    """Where the rows of a batch go. `hive`: partitions are folders, as in Delta tables."""

    rows: RowPlan
    folder: str
    partition: str
    hive: bool


def write(plan: FilePlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The task: one row, a `TaskReport` as JSON."""
    maker, report = RowMaker(plan.rows), TaskReport()
    storage, folder = locate(plan.folder)
    growing: dict[str | None, _File] = {}
    for messages in batches:
        if not messages.num_rows:
            continue
        rows = maker.rows(messages)
        _note(report, rows)
        for part, some in _parts(rows, plan.partition):
            if part not in growing:
                growing[part] = _File(storage, folder, plan, part)
            growing[part].add(some)
    report.files = [file.close() for file in growing.values()]
    report.fresh, report.broken = maker.fresh, maker.broken
    yield pa.record_batch([pa.array([msgspec.json.encode(report)], pa.binary())], schema=REPORT)


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


def _parts(rows: pa.RecordBatch, unit: str) -> Iterator[tuple[str | None, pa.RecordBatch]]:
    if unit == NONE:
        yield None, rows
        return
    starts = pc.floor_temporal(rows.column("_store_at"), unit=unit)
    for start in pc.unique(starts).to_pylist():
        if start is None:
            yield None, rows.filter(pc.is_null(starts))
        else:
            text = start.strftime("%Y-%m-%d" if unit == DAY else "%Y-%m-%dT%H")
            yield text, rows.filter(pc.equal(starts, pa.scalar(start, starts.type)))


def part_values(part: str | None, unit: str) -> dict[str, str | None]:
    """A partition by the columns of a Delta table."""
    if unit == NONE:
        return {}
    day, _, hour = (part or "").partition("T")
    found: dict[str, str | None] = {"_day": day or None}
    return found if unit == DAY else found | {"_hour": str(int(hour)) if hour else None}


class _File:
    """A Parquet file that grows."""

    def __init__(self, storage: Storage, folder: str, plan: FilePlan, part: str | None) -> None:
        below = "data/"
        if plan.hive:
            values = part_values(part, plan.partition)
            below = "".join(f"{n}={v or '__HIVE_DEFAULT_PARTITION__'}/" for n, v in values.items())
        self._path = f"{below}part-{uuid.uuid4().hex}.parquet"
        self._part, self._rows, self._held = part, 0, 0
        self._system, self._whole = storage.file_system, f"{folder}/{self._path}"
        self._group: list[pa.RecordBatch] = []
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}
        self._system.create_dir(self._whole.rpartition("/")[0])
        self._writer = pq.ParquetWriter(
            self._whole, plan.rows.schema, filesystem=self._system, compression="snappy"
        )

    def add(self, rows: pa.RecordBatch) -> None:
        self._group.append(rows)
        self._held += rows.nbytes
        self._rows += rows.num_rows
        for name in _STATS:
            found = pc.min_max(rows.column(name)).as_py()
            if found["min"] is not None:
                self._least[name] = min(found["min"], self._least.get(name, found["min"]))
                self._most[name] = max(found["max"], self._most.get(name, found["max"]))
        if self._held >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._group:
            self._writer.write_table(pa.Table.from_batches(self._group))
        self._group, self._held = [], 0

    def close(self) -> NewFile:
        self._flush()
        self._writer.close()
        size = self._system.get_file_info(self._whole).size
        stats = {"numRecords": self._rows, "minValues": self._least, "maxValues": self._most,
                 "nullCount": {}}  # fmt: skip
        text = json.dumps(stats, default=lambda at: f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond:06}Z")
        return NewFile(self._path, size, self._rows, self._part, text)
