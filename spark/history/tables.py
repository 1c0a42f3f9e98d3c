"""The tables of epoch_history: their columns, and the files of one task. Free of Spark.

Each table is Parquet in folders `group=…/day=…` as Spark names them: a row's day is the UTC date of
its first time. A task writes whole groups, so its files are its own: one that is repeated replaces
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from batonmq.spark.history.overview import DAY_MS
from batonmq.spark.read.arrow_parts import TIMESTAMP
from batonmq.spark.steps.tables import day_of, partition_of, table_of, write_part

_STRING: Final = pa.string()
_LONG: Final = pa.int64()
_BOOL: Final = pa.bool_()
_IDS: Final = pa.list_(_LONG)
_TYPES: Final = {"s": _STRING, "l": _LONG, "b": _BOOL, "i": _IDS, "t": TIMESTAMP}


def _schema(text: str) -> pa.Schema:
    """Of `name:kind`; s string, l long, b boolean, i ids, t time."""
    named = [each.split(":") for each in text.split()]
    return pa.schema([(name, _TYPES[kind]) for name, kind in named])


TABLES: Final[Mapping[str, pa.Schema]] = {
    "masterships": _schema(
        "master_epoch:l broker_id:l address:s began_at:t opened_at:t first_ack_at:t ended_at:t "
        "ended_by:s duration_ms:l"
    ).append(pa.field("seen_by", pa.list_(_STRING))),
    "failovers": _schema(
        "master_epoch:l kind:s cause:s how:s detected_by:s master_before:l master:l address:s "
        "set_before:i sync_state_set:i detected_at:t elected_at:t role_at:t opened_at:t "
        "first_ack_at:t silent_ms:l detect_ms:l elect_ms:l role_ms:l open_ms:l first_ack_ms:l "
        "unavailable_ms:l without_writes_ms:l held_ms:l idle:b unclean:b overtaken:b complete:b "
        "truncated_bytes:l clock_problem:s"
    ),
    "unavailability": _schema("outages:l unavailable_ms:l longest_ms:l open:b").append(
        pa.field("day", pa.date32())
    ),
    "set_changes": _schema(
        "at:t master_epoch:l sync_state_set_epoch:l set_before:i set_after:i joined:i left:i "
        "size_after:l reason:s kind:s"
    ),
    "truncations": _schema("at:t broker_id:l master_epoch:l from_offset:l to_offset:l bytes:l"),
    "findings": _schema("severity:s kind:s text:s subject:s evidence:s at:t"),
    "controllers": _schema("at:t leader:s leader_before:s controller_epoch:l"),
}
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
    _held: dict[tuple[str, str, int | None], list[Sequence[Any]]] = field(default_factory=dict)
    _rows: int = 0
    _files: int = 0

    def add(
        self, table: str, group: str, day_ms: int | None, at_ms: int | None, row: Sequence[Any]
    ) -> bool:
        """A row without folders; times in ms. False if its time `at_ms` is not wanted."""
        if not self.span.has(at_ms):
            return False
        day = None if day_ms is None else day_ms // DAY_MS
        if day is None and table == "findings":
            day = self.last_day
        self._put((table, group, day), row)
        return True

    def add_day(self, group: str, day: int, row: Sequence[Any]) -> bool:
        """A row of table unavailability for a day counted from 1970; False as in `add`."""
        if not self.span.has_day(day):
            return False
        self._put((_BY_GROUP, group, None), (*row, day_of(day)))
        return True

    def _put(self, key: tuple[str, str, int | None], row: Sequence[Any]) -> None:
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
            write_part(path, table_of(rows, TABLES[table]))
        self._held.clear()
        self._rows = 0


def write_empty(folder: Path) -> None:
    """A file without rows for each table that has none: it has the columns. Raises OSError."""
    for table, schema in TABLES.items():
        place = folder / table
        if not place.exists():
            place.mkdir(parents=True)
            more = [] if table == _BY_GROUP else [pa.field("day", pa.date32())]
            for each in [pa.field("group", _STRING), *more]:
                schema = schema.append(each)
            pq.write_table(schema.empty_table(), place / "part-00000-00000.parquet")
