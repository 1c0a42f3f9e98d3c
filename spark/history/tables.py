"""The tables of epoch_history: their columns, and the files of one task. Free of Spark.

Each table is Parquet in folders `group=…/day=…` as Spark names them: a row's day is the UTC date of
its first time. A task writes whole groups, so its files are its own: one that is repeated replaces
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from batonmq.spark.steps.tables import (
    DAY_MS,
    Time,
    day_of,
    partition_of,
    schema_of,
    table_of,
    write_empty,
    write_part,
)


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
_BY_GROUP: Final = "unavailability"
"""It has one row for each day of each group: a file for each would be nothing but files."""
_ROWS_MAX: Final = 50_000


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
class TableFiles:
    """The rows of one task, written below `folder` as files `part-<task>-<n>`.

    `last_day`: that of findings without a time. `counts`: the rows of each table. Flush it at the
    end.
    """

    folder: Path
    task: int
    span: TimeSpan
    last_day: int
    counts: Counter[str] = field(default_factory=Counter)
    _held: dict[tuple[str, str, int | None], list[Row]] = field(default_factory=dict)
    _rows: int = 0
    _files: int = 0

    def add(self, row: Row, group: str, day_ms: int | None, at_ms: int | None) -> bool:
        """A row, in the folder of a group and of the day of a time in ms. False if its time `at_ms`
        is not wanted."""
        if not self.span.has(at_ms):
            return False
        day = None if day_ms is None else day_ms // DAY_MS
        if day is None and isinstance(row, ToCheck):
            day = self.last_day
        self._put((_NAMES[type(row)], group, day), row)
        return True

    def add_day(self, row: Unavailability, group: str, day: int) -> bool:
        """A row for a day counted from 1970; False as in `add`."""
        if not self.span.has_day(day):
            return False
        self._put((_BY_GROUP, group, None), row)
        return True

    def _put(self, key: tuple[str, str, int | None], row: Row) -> None:
        self._held.setdefault(key, []).append(row)
        self.counts[key[0]] += 1
        self._rows += 1
        if self._rows >= _ROWS_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what is held. Raises OSError."""
        for (table, group, day), rows in self._held.items():
            on = {} if table == _BY_GROUP else {"day": None if day is None else day_of(day)}
            place = self.folder / table / partition_of(group=group, **on)
            self._files += 1
            path = place / f"part-{self.task:05}-{self._files:05}.parquet"
            write_part(path, table_of([*map(msgspec.structs.astuple, rows)], TABLES[table]))
        self._held.clear()
        self._rows = 0


def write_missing(folder: Path) -> None:
    """A file without rows for each table that has none. Raises OSError."""
    for table, schema in TABLES.items():
        day = {} if table == _BY_GROUP else {"day": pa.date32()}
        write_empty(folder / table, schema, group=pa.string(), **day)
