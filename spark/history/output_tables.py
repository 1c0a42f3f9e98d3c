"""The tables of epoch_history: their columns, and the rows of one task. Free of Spark.

Each table but `unavailability` is in folders `group=…/day=…`: a row's day is the UTC date of its
first time.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Final

import msgspec
import pyarrow as pa

from batonmq.spark.steps.parquet_tables import DAY_MS, Time, day_of, schema_of, table_of


class Mastership(msgspec.Struct, frozen=True):
    """One mastership. `ended_at` None: it is still master."""

    master_epoch: int
    broker_id: int
    address: str | None
    began_at: Time | None
    opened_at: Time | None
    first_ack_at: Time | None
    ended_at: Time | None
    ended_by: str | None
    duration_ms: int | None
    seen_by: tuple[str, ...]


class Failover(msgspec.Struct, frozen=True):
    """One change of master."""

    master_epoch: int
    kind: str
    cause: str
    how: str
    detected_by: str | None
    master_before: int | None
    master: int
    address: str | None
    set_before: tuple[int, ...]
    sync_state_set: tuple[int, ...]
    detected_at: Time | None
    elected_at: Time | None
    role_at: Time | None
    opened_at: Time | None
    first_ack_at: Time | None
    silent_ms: int | None
    detect_ms: int | None
    elect_ms: int | None
    role_ms: int | None
    open_ms: int | None
    first_ack_ms: int | None
    unavailable_ms: int | None
    without_writes_ms: int | None
    held_ms: int | None
    idle: bool
    unclean: bool
    overtaken: bool
    complete: bool
    truncated_bytes: int
    clock_problem: str | None


class Unavailability(msgspec.Struct, frozen=True):
    """One day of a group: outages that began on it, ms without writes in it, ms of the longest one
    that touches it on all its days, and whether one is open at its end."""

    outages: int
    unavailable_ms: int
    longest_ms: int
    open: bool
    day: date


class SetChange(msgspec.Struct, frozen=True):
    """One change of a SyncStateSet."""

    at: Time
    master_epoch: int
    sync_state_set_epoch: int
    set_before: tuple[int, ...]
    set_after: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    size_after: int
    reason: str | None
    kind: str


class Truncation(msgspec.Struct, frozen=True):
    """One cut."""

    at: Time
    broker_id: int
    master_epoch: int
    from_offset: int
    to_offset: int
    bytes: int


class ToCheck(msgspec.Struct, frozen=True):
    """One finding; `evidence` is JSON."""

    severity: str
    kind: str
    text: str
    subject: str
    evidence: str
    at: Time | None


class Controller(msgspec.Struct, frozen=True):
    """One change of the leading controller."""

    at: Time
    leader: str | None
    leader_before: str | None
    controller_epoch: int


Row = Mastership | Failover | Unavailability | SetChange | Truncation | ToCheck | Controller
_NAMES: Final[Mapping[type[Row], str]] = {
    Mastership: "masterships",
    Failover: "failovers",
    Unavailability: "unavailability",
    SetChange: "set_changes",
    Truncation: "truncations",
    ToCheck: "findings",
    Controller: "controllers",
}
TABLES: Final = {name: schema_of(row) for row, name in _NAMES.items()}
"""Columns without those that are folders."""
BY_GROUP: Final = "unavailability"
"""It has one row for each day of each group: a file for each would be nothing but files."""
SUMS: Final = "sums"
_ROWS_MAX: Final = 20_000
_S: Final = pa.string()
FOLDED: Final = pa.schema([("part", _S), ("many", pa.int64()), ("packed", pa.binary())])
"""Rows of a table (`part`), packed into one: how many, and themselves; or what a task counted."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """The time of rows to write, [since, until) in ms; None: no bound."""

    since_ms: int | None = None
    until_ms: int | None = None

    @classmethod
    def of(cls, since: datetime | None, until: datetime | None) -> TimeSpan:
        """Without a zone a time is UTC. Raises ValueError if nothing is between them."""
        span = cls(_ms(since), _ms(until))
        if None not in (span.since_ms, span.until_ms) and span.since_ms >= span.until_ms:  # type: ignore[operator]
            raise ValueError(f"--since {since} must be before --until {until}")
        return span

    def has(self, at_ms: int | None) -> bool:
        """Rows without a time stay."""
        if at_ms is None:
            return True
        return (self.since_ms is None or at_ms >= self.since_ms) and (
            self.until_ms is None or at_ms < self.until_ms
        )

    def has_day(self, day: int) -> bool:
        """Days are whole; `day` counts from 1970."""
        since = 0 if self.since_ms is None else self.since_ms // DAY_MS
        return day >= since and (self.until_ms is None or day * DAY_MS < self.until_ms)


def _ms(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    zoned = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment
    return round(zoned.timestamp() * 1000)


@dataclass(slots=True)
class FoldedRows:
    """Rows of all tables on their way out of a task, as batches of FOLDED.

    `last_day`: that of findings without a time.
    """

    span: TimeSpan
    last_day: int
    _held: dict[str, list[tuple[str, date | None, Row]]] = field(default_factory=dict)
    _rows: int = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= _ROWS_MAX

    def add(self, row: Row, group: str, day_ms: int | None, at_ms: int | None) -> bool:
        """A row of a group, and of the day of a time in ms. False if its time `at_ms` is not
        wanted."""
        if not self.span.has(at_ms):
            return False
        day = None if day_ms is None else day_ms // DAY_MS
        if day is None and isinstance(row, ToCheck):
            day = self.last_day
        self._put(group, day, row)
        return True

    def add_day(self, row: Unavailability, group: str, day: int) -> bool:
        """A row for a day counted from 1970; False as in `add`."""
        if not self.span.has_day(day):
            return False
        self._put(group, None, row)
        return True

    def _put(self, group: str, day: int | None, row: Row) -> None:
        on_day = None if day is None else day_of(day)
        self._held.setdefault(_NAMES[type(row)], []).append((group, on_day, row))
        self._rows += 1

    def take(self) -> Iterator[pa.RecordBatch]:
        """What is held; then nothing is."""
        for name, held in self._held.items():
            groups, days, rows = zip(*held, strict=True)
            table = table_of([*map(msgspec.structs.astuple, rows)], TABLES[name])
            table = table.append_column("group", pa.array([each or None for each in groups], _S))
            if name != BY_GROUP:
                table = table.append_column("day", pa.array(days, pa.date32()))
            yield folded_row(name, len(held), _packed(table))
        self._held.clear()
        self._rows = 0


def sums_row(sums: object) -> pa.RecordBatch:
    """A row for what a task counted."""
    return folded_row(SUMS, 1, pickle.dumps(sums))


def folded_row(part: str, many: int, packed: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"part": part, "many": many, "packed": packed}], FOLDED)


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


def written_schema(name: str) -> pa.Schema:
    """The columns of a table with its folders."""
    day = [] if name == BY_GROUP else [pa.field("day", pa.date32())]
    return pa.schema([*TABLES[name], pa.field("group", _S), *day])
