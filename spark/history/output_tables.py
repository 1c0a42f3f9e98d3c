"""The tables of epoch_history: their columns, and the rows of one task. Free of Spark.

Each table but `unavailability` is in folders `group=…/day=…`: a row's day is the UTC date of its
first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from batonmq.protocol.codes import LONG_MAX
from batonmq.spark.read.columns import KINDS, TIMESTAMP, columns_of
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
EVENTS, ELECTIONS = "events", "elections"
_ROWS_MAX: Final = 20_000
FOLDED: Final = columns_of("string: part grp; long: many; binary: packed")
"""Rows of a table (`part`), packed into one: how many, and themselves. Without `packed`: how many
events or elections a group has."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """The time of rows to write, [since, until) in ms."""

    since_ms: int = 0
    until_ms: int = LONG_MAX

    @classmethod
    def of(cls, since: datetime | None, until: datetime | None) -> TimeSpan:
        """Without a zone a time is UTC. Raises ValueError if nothing is between them."""
        span = cls(_ms(since, 0), _ms(until, LONG_MAX))
        if since and until and span.since_ms >= span.until_ms:
            raise ValueError(f"--since {since} must be before --until {until}")
        return span

    def has(self, at_ms: int | None) -> bool:
        """Rows without a time stay."""
        return at_ms is None or self.since_ms <= at_ms < self.until_ms

    def has_day(self, day: int) -> bool:
        """Days are whole; `day` counts from 1970."""
        return (day + 1) * DAY_MS > self.since_ms and day * DAY_MS < self.until_ms


def _ms(moment: datetime | None, default: int) -> int:
    if moment is None:
        return default
    zoned = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return round(zoned.timestamp() * 1000)


@dataclass(slots=True)
class FoldedRows:
    """Rows of all tables on their way out of a task, as batches of FOLDED.

    `last_day`: that of findings without a time.
    """

    span: TimeSpan
    last_day: int
    _held: dict[str, list[Row]] = field(default_factory=dict)
    _rows: int = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= _ROWS_MAX

    def add(self, table: str, row: Row, group: str, day_ms: int | None, at_ms: int | None) -> None:
        """A row of a group, and of the day of a time in ms; left out if its time `at_ms` is not
        wanted."""
        if not self.span.has(at_ms):
            return
        if day_ms is None and table == "findings":
            day_ms = self.last_day * DAY_MS
        self._put(table, row, group, None if day_ms is None else day_ms // DAY_MS)

    def add_day(self, row: Row, group: str, day: int) -> None:
        """A row of `unavailability` for a day counted from 1970, if it is wanted."""
        if self.span.has_day(day):
            self._put(BY_GROUP, row, group, day)

    def _put(self, table: str, row: Row, group: str, day: int | None) -> None:
        self._held.setdefault(table, []).append({**row, "group": group or None, "day": day})
        self._rows += 1

    def take(self) -> Iterator[pa.RecordBatch]:
        """What is held; then nothing is."""
        for name, rows in self._held.items():
            schema = written_schema(name)
            columns = [_column([row[each.name] for row in rows], each.type) for each in schema]
            yield folded_row(name, len(rows), _packed(pa.Table.from_arrays(columns, schema=schema)))
        self._held.clear()
        self._rows = 0


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    # Rows have ms, columns us.
    given = pa.timestamp("ms", "UTC") if kind == TIMESTAMP else kind
    return pa.array(values, given).cast(kind)


def folded_row(
    part: str, many: int, packed: bytes | None = None, group: str | None = None
) -> pa.RecordBatch:
    row = {"part": part, "grp": group, "many": many, "packed": packed}
    return pa.RecordBatch.from_pylist([row], FOLDED)


def _packed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


def unpacked(packed: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    """The rows of one table."""
    for each in packed:
        yield from pa.ipc.open_stream(each)


def table_of(name: str, packed: Iterable[bytes]) -> pa.Table:
    """All rows of one table."""
    return pa.Table.from_batches(unpacked(packed), written_schema(name))


def written_schema(name: str) -> pa.Schema:
    """The columns of a table with its folders."""
    kinds = {"group": KINDS["string"], "day": KINDS["day"]}
    return pa.schema([*TABLES[name], *((each, kinds[each]) for each in FOLDERS[name])])
