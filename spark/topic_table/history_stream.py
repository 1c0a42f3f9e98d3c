"""The history of failovers as a table: each batch of events becomes one commit of a Parquet folder.

Beside its batch the table notes how far each log was read. So events that come again under a new
checkpoint, which begins with the oldest event, are left out.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from batonmq.spark.read.columns import TABLES
from batonmq.spark.topic_table.parquet_table import HistoryState, ParquetTable, Read
from batonmq.spark.topic_table.table_stream import StreamCounts, StreamSettings, TableStream

_ORDER = [(name, "ascending") for name in ("log", "raft_index", "part")]


@dataclass(slots=True)
class EventCounts(StreamCounts):
    events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPlan(StreamSettings):
    """`patience` is shorter than that of topics: a controller has its answer at hand."""

    controllers: str
    events_max: int = 10_000
    patience: str = "20s"


class HistoryStream(TableStream):
    """One run. `on_commit` runs behind each batch with new events."""

    name = "stream_history"
    continues = "; events that the table has are passed over"

    def __init__(
        self,
        table: ParquetTable,
        plan: HistoryPlan,
        report: Callable[[str], None],
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(table, plan, report)
        self.counts: EventCounts = EventCounts()
        self._on_commit = on_commit

    def _has_read(self) -> bool:
        return bool(self._table.state() or self.counts.batches)

    def _stream_id(self) -> str:
        # Not asked for: the checkpoint may lie where only Spark can read.
        return HistoryState.stream

    def _source(self) -> dict[str, Any]:
        return {
            "table": "history", "controllers": self._plan.controllers,
            "maxOffsetsPerTrigger": str(self._plan.events_max),
        }  # fmt: skip

    def _add(self, batch: DataFrame, stream: str, number: int, state: HistoryState | None) -> None:
        rows = batch.toArrow()
        fresh, read = take(rows, state.read if state else {})
        total = self._table.rows + len(fresh)
        now = HistoryState(batch=number, rows=total, read=read)
        self._table.commit(with_day(fresh), now)
        counts, repeats = self.counts, len(rows) - len(fresh)
        counts.files += 1
        counts.batches += 1
        counts.events += len(fresh)
        counts.repeats += repeats
        if len(fresh):
            self._tell(fresh, repeats)
            self._on_commit()

    def _tell(self, fresh: pa.Table, repeats: int) -> None:
        newest: datetime | None = pc.max(fresh["time"]).as_py()
        age_s = max(0.0, time.time() - newest.timestamp()) if newest is not None else 0
        self._report(
            f"{len(fresh)} events{f', {repeats} repeats' if repeats else ''}; "
            f"{self._table.rows} in all; the newest is {age_s:.0f} s old"
        )


def take(rows: pa.Table, read: Mapping[str, tuple[int, int]]) -> tuple[pa.Table, Read]:
    """Rows (of table history) that are newer than what was read, in the order of each log; and what
    is read with them."""
    rows = rows.cast(TABLES["history"]).sort_by(_ORDER)
    now = dict(read)
    new = []
    for log, index, part in zip(*(rows[name].to_pylist() for name, _ in _ORDER), strict=True):
        before = now.get(log, (-1, -1))
        now[log] = max(before, (index, part))
        new.append(now[log] > before)
    return rows.filter(pa.array(new, pa.bool_())), now


def with_day(rows: pa.Table) -> pa.Table:
    """With two more columns: the broker group (null for events of the controllers alone), and the
    day (UTC)."""
    rows = rows.append_column("group", rows["broker_name"])
    return rows.append_column("day", pc.cast(rows["time"], pa.date32()))
