"""What the report on epochs takes out of the Parquet tables of `epoch_history`, each time bounded.

A table is read batch by batch; only sums, bins and top rows are kept, and 8 bytes for each number
of which a percentile is shown. Times are ms since 1970 in UTC, durations ms; None: not known. Free
of Spark.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from itertools import repeat
from math import floor, log10
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batonmq.spark.report.quantities import percentile

#: More broker groups than this are counted but not drawn; those that cost most are.
GROUPS_SHOWN: Final = 30
FAILOVERS_LISTED: Final = 50
TRUNCATIONS_LISTED: Final = 50
FINDINGS_LISTED: Final = 200
LEADERS_LISTED: Final = 30
#: Bins of the distribution per decade of ms.
BINS_PER_DECADE: Final = 6
PARTS: Final = ("detect_ms", "elect_ms", "role_ms", "open_ms", "first_ack_ms")
SEVERITIES: Final = ("critical", "warning", "info")
DAY_MS: Final = 86_400_000
_ORDINAL_1970: Final = date(1970, 1, 1).toordinal()
_HELD_BYTES: Final = 16 << 20
_NULL: Final = "__HIVE_DEFAULT_PARTITION__"


class Row(dict[str, Any]):
    """A row whose columns are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass(frozen=True, slots=True)
class Totals:
    """All groups together; `first_ms` and `last_ms` are None if there was no event at all."""

    groups: int
    first_ms: int | None
    last_ms: int | None
    masterships: int
    failovers: int
    set_changes: int
    outages: int
    unavailable_ms: int
    open_groups: int


@dataclass(frozen=True, slots=True)
class Group:
    """One broker group. `open_since_ms`: it had no master at the end, and since when."""

    name: str
    masterships: int
    failovers: int
    set_changes: int
    outages: int
    unavailable_ms: int
    longest_ms: int
    is_open: bool
    open_since_ms: int | None


@dataclass(frozen=True, slots=True)
class Kind:
    """Changes of master of one kind; the medians are of the parts that are known."""

    kind: str
    number: int
    told: int
    unavailable_ms: int
    median_ms: int | None
    p99_ms: int | None
    longest_ms: int | None
    unclean: int
    idle: int
    incomplete: int
    truncated_bytes: int
    parts_ms: dict[str, int | None]


class EpochTables:
    """The tables below one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._held: dict[str, list[tuple[Path, pq.ParquetFile]]] = {}

    def rows(self, name: str, columns: str, groups: Iterable[str] | None = None) -> Iterator[Row]:
        """Rows of a table with `group` and those columns (parted by blanks); of these groups only.

        `day` is ms, a column that a table lacks is null. None if the table was never written.
        Raises OSError.
        """
        wanted = columns.split()
        chosen = None if groups is None else set(groups)
        root = self._folder / name
        for path, file in self._files(name):
            folders = dict(part.split("=", 1) for part in path.relative_to(root).parts[:-1])
            known = {key: _name(value) for key, value in folders.items()}
            if chosen is None or known.get("group") in chosen:
                yield from _rows(file, known, wanted)

    def _files(self, name: str) -> Iterator[tuple[Path, pq.ParquetFile]]:
        """The files of a table; those of small tables are read and opened once."""
        held = self._held.get(name)
        if held is not None:
            yield from held
            return
        paths = sorted((self._folder / name).rglob("*.parquet"))
        if sum(path.stat().st_size for path in paths) <= _HELD_BYTES:
            self._held[name] = [
                (path, pq.ParquetFile(pa.BufferReader(path.read_bytes()))) for path in paths
            ]
            yield from self._held[name]
            return
        for path in paths:
            with pq.ParquetFile(path) as file:
                yield path, file

    def failovers(self, columns: str, groups: Iterable[str] | None = None) -> Iterator[Row]:
        """Rows of table failovers. Their `unavailable_ms` is all the time without writes, noticed
        or not; what was silence before a session closed is no part of that."""
        needed = f"{columns} kind detect_ms unavailable_ms without_writes_ms"
        for row in self.rows("failovers", needed, groups):
            whole, seen = row.without_writes_ms, row.unavailable_ms
            missed = None if whole is None or seen is None else whole - seen
            planned = row.kind == "planned_switch"
            row["detect_part_ms"] = row.detect_ms if planned else missed
            row["unavailable_ms"] = whole
            yield row

    def groups(self) -> tuple[Totals, list[Group]]:
        """Sums over all, and the groups that cost most (at most GROUPS_SHOWN), by name."""
        sums = _sums_of_groups(self)
        if not sums:
            return Totals(0, None, None, 0, 0, 0, 0, 0, 0), []
        dearest = heapq.nsmallest(
            GROUPS_SHOWN, sums.items(),
            key=lambda each: (-each[1].unavailable_ms, -each[1].masterships, each[0]),
        )  # fmt: skip
        every = list(sums.values())
        totals = Totals(
            groups=len(sums),
            first_ms=min(
                (s.first_ms for s in map(_Sums.bounded, every) if s.first_ms), default=None
            ),
            last_ms=max((s.last_ms for s in map(_Sums.bounded, every) if s.last_ms), default=None),
            masterships=sum(each.masterships for each in every),
            failovers=sum(each.failovers for each in every),
            set_changes=sum(each.set_changes for each in every),
            outages=sum(each.outages for each in every),
            unavailable_ms=sum(each.unavailable_ms for each in every),
            open_groups=sum(each.is_open for each in every),
        )
        shown = [
            Group(
                name, of.masterships, of.failovers, of.set_changes, of.outages, of.unavailable_ms,
                of.longest_ms, of.is_open, of.lost_ms if of.is_open else None,
            )
            for name, of in dearest
        ]  # fmt: skip
        return totals, sorted(shown, key=lambda group: group.name)

    def kinds(self) -> list[Kind]:
        """Per kind of election."""
        columns = "idle unclean complete truncated_bytes elect_ms role_ms open_ms first_ack_ms"
        kinds: dict[str, _KindSums] = {}
        for row in self.failovers(columns):
            kinds.setdefault(row.kind or "unknown", _KindSums()).add(row)
        return [kinds[name].kind(name) for name in sorted(kinds)]

    def duration_bins(self) -> list[tuple[str, int, int]]:
        """(kind, bin, number) of durations that are known; bin n begins at 10^(n / per decade)."""
        found: Counter[tuple[str, int]] = Counter(
            (row.kind or "unknown", _bin(row.unavailable_ms))
            for row in self.failovers("")
            if row.unavailable_ms is not None
        )
        return [(kind, place, number) for (kind, place), number in sorted(found.items())]

    def overall_percentiles(self) -> tuple[int | None, int | None]:
        """Median and 99th percentile of all known durations but those of first elections."""
        known = array(
            "q",
            (
                row.unavailable_ms
                for row in self.failovers("")
                if row.kind != "first_election" and row.unavailable_ms is not None
            ),
        )
        return percentile(known, 0.5), percentile(known, 0.99)

    def dearest(self) -> list[Row]:
        """Rows of `failovers` with times in ms: unclean ones first, then by cost."""
        columns = (
            "master_epoch cause master_before master detected_at elected_at opened_at first_ack_at "
            "elect_ms role_ms open_ms first_ack_ms idle unclean complete truncated_bytes "
            "clock_problem"
        )
        rows = (
            row for row in self.failovers(columns) if row.kind != "first_election" or row.unclean
        )
        return heapq.nsmallest(FAILOVERS_LISTED, rows, key=dearness)

    def truncations(self) -> tuple[int, int, list[Row]]:
        """(number, bytes, the largest of them)."""
        sums = [0, 0]

        def counted() -> Iterator[Row]:
            for row in self.rows(
                "truncations", "at broker_id master_epoch from_offset to_offset bytes"
            ):
                sums[0], sums[1] = sums[0] + 1, sums[1] + (row.bytes or 0)
                yield row

        largest = heapq.nsmallest(
            TRUNCATIONS_LISTED, counted(), key=lambda row: (-(row.bytes or 0), row.at or 0)
        )
        return sums[0], sums[1], largest

    def findings(self) -> tuple[dict[str, int], list[Row]]:
        """(severity -> number, the gravest of them)."""
        numbers: Counter[str] = Counter()

        def counted() -> Iterator[Row]:
            for row in self.rows("findings", "severity kind text subject evidence at"):
                numbers[row.severity] += 1
                yield row

        gravest = heapq.nsmallest(FINDINGS_LISTED, counted(), key=_gravity)
        return dict(numbers), gravest

    def leaders(self) -> tuple[int, list[Row]]:
        """(changes of the leading controller, the latest of them)."""
        number = [0]

        def counted() -> Iterator[Row]:
            for row in self.rows("controllers", "at leader leader_before controller_epoch"):
                number[0] += 1
                yield row

        latest = heapq.nlargest(LEADERS_LISTED, counted(), key=lambda row: row.at or 0)
        return number[0], latest


def dearness(row: Row) -> tuple[bool, bool, int, int]:
    """The order of changes of master: unclean ones first, then by cost, then the latest."""
    ms = row.unavailable_ms
    return not row.unclean, ms is None, -(ms or 0), -(row.elected_at or 0)


def _gravity(row: Row) -> tuple[int, str, str, bool, int]:
    known = row.severity in SEVERITIES
    rank = SEVERITIES.index(row.severity) if known else len(SEVERITIES)
    return rank, row.kind or "", row.group or "", row.at is None, row.at or 0


def _name(folder: str) -> str | None:
    return None if folder == _NULL else unquote(folder)


def _rows(file: pq.ParquetFile, known: dict[str, str | None], wanted: list[str]) -> Iterator[Row]:
    here = [name for name in dict.fromkeys(wanted) if name in file.schema_arrow.names]
    base: dict[str, Any] = dict.fromkeys(wanted) | {"group": known.get("group")}
    if "day" in wanted and (day := known.get("day")):
        base["day"] = (date.fromisoformat(day).toordinal() - _ORDINAL_1970) * DAY_MS
    for batch in file.iter_batches(columns=here):
        columns = [_values(column) for column in batch.columns]
        for values in zip(*columns, strict=True) if here else repeat((), batch.num_rows):
            row = Row(base)
            row.update(zip(here, values, strict=True))
            yield row


def _values(column: pa.Array) -> list[Any]:
    """The values; times and days as ms."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    elif pa.types.is_date(column.type):
        column = pc.multiply(column.cast(pa.int32()).cast(pa.int64()), DAY_MS)
    values: list[Any] = column.to_pylist()
    return values


def _bin(ms: int) -> int:
    return floor(log10(max(ms, 1)) * BINS_PER_DECADE + 1e-9)


def _add(values: dict[str, array[int]], name: str, value: int | None) -> None:
    if value is not None:
        values.setdefault(name, array("q")).append(value)


class _KindSums:
    """Changes of master of one kind, while they are counted."""

    def __init__(self) -> None:
        self.number = self.unclean = self.idle = self.incomplete = self.truncated_bytes = 0
        self.values: dict[str, array[int]] = {}

    def add(self, row: Row) -> None:
        self.number += 1
        self.unclean += bool(row.unclean)
        self.idle += bool(row.idle)
        self.incomplete += row.complete is False
        self.truncated_bytes += row.truncated_bytes or 0
        _add(self.values, "all", row.unavailable_ms)
        # A part of its time without writes; no client waited for the first write of an idle one.
        _add(self.values, "detect_ms", row.detect_part_ms)
        for name in PARTS[1:]:
            if name != "first_ack_ms" or not row.idle:
                _add(self.values, name, row[name])

    def kind(self, name: str) -> Kind:
        parts = {part: percentile(self.values.get(part, ()), 0.5) for part in PARTS}
        every = self.values.get("all", array("q"))
        return Kind(
            name, self.number, len(every), sum(every), percentile(every, 0.5),
            percentile(every, 0.99), max(every, default=None), self.unclean, self.idle,
            self.incomplete, self.truncated_bytes, parts,
        )  # fmt: skip


@dataclass(slots=True)
class _Sums:
    """One group, while it is counted."""

    masterships: int = 0
    failovers: int = 0
    set_changes: int = 0
    outages: int = 0
    unavailable_ms: int = 0
    longest_ms: int = 0
    is_open: bool = False
    first_ms: int | None = None
    last_ms: int | None = None
    lost_ms: int | None = None
    first_day_ms: int | None = None
    last_day_ms: int | None = None

    def time(self, *times: int | None, first: int | None) -> None:
        for ms in times:
            if ms is not None and (self.last_ms is None or ms > self.last_ms):
                self.last_ms = ms
        if first is not None and (self.first_ms is None or first < self.first_ms):
            self.first_ms = first

    def bounded(self) -> _Sums:
        """A wrong clock must not stretch the pictures: days without outages count, too."""
        firsts = [each for each in (self.first_ms, self.first_day_ms) if each is not None]
        lasts = [each for each in (self.last_ms, self.last_day_ms) if each is not None]
        return _Sums(first_ms=max(firsts, default=None), last_ms=min(lasts, default=None))


def _sums_of_groups(tables: EpochTables) -> dict[str, _Sums]:
    """The sums of each group, from four tables."""
    sums: dict[str, _Sums] = {}
    for row in tables.rows("masterships", "began_at opened_at first_ack_at ended_at"):
        if row.group is not None:
            of = sums.setdefault(row.group, _Sums())
            of.masterships += 1
            began, ended = row.began_at, row.ended_at
            of.time(began, row.opened_at, row.first_ack_at, ended, first=began)
            # Still without a master only if no mastership has begun since.
            of.lost_ms = max(
                (each for each in (of.lost_ms, ended) if each is not None), default=None
            )
    for row in tables.rows("failovers", "kind detected_at elected_at opened_at first_ack_at"):
        if row.group is not None:
            of = sums.setdefault(row.group, _Sums())
            of.failovers += row.kind != "first_election"
            first = row.detected_at if row.detected_at is not None else row.elected_at
            of.time(row.elected_at, row.opened_at, row.first_ack_at, first=first)
    for row in tables.rows("set_changes", "at"):
        if row.group is not None:
            of = sums.setdefault(row.group, _Sums())
            of.set_changes += 1
            of.time(row.at, first=row.at)
    for row in tables.rows("unavailability", "day outages unavailable_ms longest_ms open"):
        if row.group is not None:
            of = sums.setdefault(row.group, _Sums())
            of.outages += row.outages or 0
            of.unavailable_ms += row.unavailable_ms or 0
            of.longest_ms = max(of.longest_ms, row.longest_ms or 0)
            of.is_open = of.is_open or bool(row.open)
            if row.day is not None:
                of.first_day_ms = min(of.first_day_ms or row.day, row.day)
                of.last_day_ms = max(of.last_day_ms or 0, row.day + DAY_MS)
    return sums
