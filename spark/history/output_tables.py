"""The tables of epoch_history: their columns, and the rows of one task. Free of Spark.

Each table but `unavailability` is in folders `group=…/day=…`: a row's day is the UTC date of its
first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from batonmq.protocol.codes import LONG_MAX
from batonmq.spark.read.columns import TIMESTAMP, columns_of
from batonmq.spark.report.quantities import DAY_MS

TABLES: Final = {
    "masterships": columns_of("""
        long: master_epoch broker_id; string: address
        time: began_at opened_at first_ack_at ended_at
        string: ended_by; long: duration_ms; texts: seen_by
    """),
    "failovers": columns_of("""
        long: master_epoch; string: kind cause how detected_by; long: master_before master
        string: address; longs: set_before sync_state_set
        time: detected_at elected_at role_at opened_at first_ack_at
        long: silent_ms detect_ms elect_ms role_ms open_ms first_ack_ms
        long: unavailable_ms without_writes_ms held_ms; bool: idle unclean overtaken complete
        long: truncated_bytes; string: clock_problem
    """),
    "unavailability": columns_of("long: outages unavailable_ms longest_ms; bool: open; day: day"),
    "set_changes": columns_of("""
        time: at; long: master_epoch sync_state_set_epoch
        longs: set_before set_after joined left; long: size_after; string: reason kind
    """),
    "truncations": columns_of("time: at; long: broker_id master_epoch from_offset to_offset bytes"),
    "findings": columns_of("string: severity kind text subject evidence; time: at"),
    "controllers": columns_of("time: at; string: leader leader_before; long: controller_epoch"),
}
"""Columns without those that are folders."""
Row = Mapping[str, Any]
"""Values by columns; times are ms, days count from 1970."""
BY_GROUP: Final = "unavailability"
"""It has one row for each day of each group: a file for each would be nothing but files."""
FOLDERS: Final = {name: ("group",) if name == BY_GROUP else ("group", "day") for name in TABLES}
GROUP: Final = "group"
_ROWS_MAX: Final = 20_000
_OF_TABLES: Final = {each.name: each.type for table in TABLES.values() for each in table}
FOLDED: Final = pa.schema([
    *columns_of("string: part group; day: day; long: events elections"),
    *((name, kind) for name, kind in _OF_TABLES.items() if name != "day"),
])  # fmt: skip
"""The columns of all tables. A row is of one of them, its `part`, and null elsewhere; of the part
GROUP: how many events and elections a group has."""


def query_of(name: str) -> str:
    """A table out of the view `folded`."""
    names = dict.fromkeys((*TABLES[name].names, *FOLDERS[name]))
    columns = ", ".join(f"f.{each} AS {each}" for each in names)
    return f"SELECT {columns} FROM folded f WHERE f.part = '{name}'"


def span_of(since: datetime | None, until: datetime | None) -> range:
    """The time of rows to write, [since, until) in ms. Without a zone a time is UTC. Raises
    ValueError if nothing is between them."""
    span = range(_ms(since, 0), _ms(until, LONG_MAX))
    if since and until and not span:
        raise ValueError(f"--since {since} must be before --until {until}")
    return span


def _ms(moment: datetime | None, default: int) -> int:
    if moment is None:
        return default
    zoned = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return round(zoned.timestamp() * 1000)


@dataclass(slots=True)
class FoldedRows:
    """Rows of all tables on their way out of a task. `last_day`: of findings without a time."""

    span: range
    last_day: int
    _held: list[Row] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self._held) >= _ROWS_MAX

    def add(self, table: str, row: Row, group: str, day_ms: int | None, at_ms: int | None) -> None:
        """A row of a group, and of the day of a time in ms; left out if its time `at_ms` is not
        wanted; rows without one stay."""
        if at_ms is not None and at_ms not in self.span:
            return
        if day_ms is None and table == "findings":
            day_ms = self.last_day * DAY_MS
        self._put(table, row, group or None, None if day_ms is None else day_ms // DAY_MS)

    def add_day(self, row: Row, group: str, day: int) -> None:
        """A row of `unavailability` for a day counted from 1970, if some of it is wanted."""
        if self.span.start < (day + 1) * DAY_MS and day * DAY_MS < self.span.stop:
            self._put(BY_GROUP, row, group, day)

    def add_group(self, group: str, events: int, elections: int) -> None:
        self._put(GROUP, {"events": events, "elections": elections}, group, None)

    def _put(self, part: str, row: Row, group: str | None, day: int | None) -> None:
        self._held.append({**row, "part": part, "group": group, "day": day})

    def take(self) -> pa.RecordBatch:
        """What is held; then nothing is."""
        columns = []
        for name, kind in zip(FOLDED.names, FOLDED.types, strict=True):
            # Rows have ms, columns us.
            given = pa.timestamp("ms", "UTC") if kind == TIMESTAMP else kind
            values = [row.get(name) for row in self._held]
            columns.append(pa.array(values, given).cast(kind))
        self._held.clear()
        return pa.RecordBatch.from_arrays(columns, schema=FOLDED)
