"""What the time lines of the report on epochs are drawn from, thinned where it is much.

A group with few rows is drawn row by row. For one with many the time is cut into equal bins, and a
bin has the colour of what filled it most: every bin is drawn, so thinning leaves no hole that looks
like an outage. Times are ms since 1970 in UTC. Free of Spark.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from batonmq.spark.report.epoch_tables import DAY_MS, EpochTables, Group, Row, dearness

_MARKS_TOTAL: Final = 3_000
_MARKS_MOST: Final = 400
_DAYS_DRAWN: Final = 4_000
_CELLS_DRAWN: Final = 12_000


@dataclass(frozen=True, slots=True)
class Mastership:
    """A master of a group in [start, end). `masterships` above 1: a bin, and who filled it most."""

    group: str
    broker_id: int
    start_ms: int
    end_ms: int
    epoch: int | None = None
    ended_by: str | None = None
    is_open: bool = False
    is_bin: bool = False
    masterships: int = 1
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A change of master: from when to when writes were impossible; None where unknown."""

    group: str
    kind: str
    epoch: int | None
    cause: str | None
    before: int | None
    master: int | None
    at_ms: int
    end_ms: int | None
    unavailable_ms: int | None


@dataclass(frozen=True, slots=True)
class SetSize:
    """The size of a set from a time on; `least` of its bin, if it is one."""

    group: str
    at_ms: int
    size: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Day:
    """Outages of a day (`group` empty: of all groups)."""

    group: str
    at_ms: int
    outages: int
    unavailable_ms: int
    longest_ms: int


def rows_each(groups: int) -> int:
    """How many rows of one group are drawn one by one, and how many bins replace more."""
    return max(100, min(_MARKS_MOST, _MARKS_TOTAL // max(1, groups)))


def masterships(
    tables: EpochTables, groups: Sequence[Group], first_ms: int, last_ms: int
) -> list[Mastership]:
    """Who was master when; a mastership without an end lasts until `last_ms`."""
    bound = rows_each(len(groups))
    many = {
        group.name: _Bins(first_ms, last_ms, bound) for group in groups if group.masterships > bound
    }
    drawn = []
    columns = "broker_id opened_at first_ack_at began_at ended_at master_epoch ended_by address"
    for row in tables.rows("masterships", columns, [group.name for group in groups]):
        times = (row.opened_at, row.first_ack_at, row.began_at)
        start = next((each for each in times if each is not None), None)
        if row.group in many:
            if start is not None:
                end = last_ms if row.ended_at is None else row.ended_at
                many[row.group].add(start, end, row.broker_id or 0)
            continue
        start = first_ms if start is None else start
        end = last_ms if row.ended_at is None else max(start, row.ended_at)
        drawn.append(Mastership(
            row.group, row.broker_id or 0, start, end, row.master_epoch, row.ended_by,
            row.ended_at is None, address=row.address,
        ))  # fmt: skip
    drawn.sort(key=lambda each: (each.group, each.start_ms))
    return drawn + [each for name in sorted(many) for each in many[name].masterships(name)]


class _Bins:
    """At most `bound` bins of a group, each of the broker that was master for most of it."""

    def __init__(self, first_ms: int, last_ms: int, bound: int) -> None:
        self._first_ms, self._last_ms, self._bound = first_ms, last_ms, bound
        self._width = _bin_width(first_ms, last_ms, bound)
        self._filled: dict[int, dict[int, list[int]]] = {}

    def add(self, start_ms: int, end_ms: int, broker_id: int) -> None:
        from_bin = _bin(start_ms, self._first_ms, self._width)
        to_bin = max(from_bin, min(_bin(end_ms, self._first_ms, self._width), self._bound - 1))
        for place in range(from_bin, to_bin + 1):
            begin_ms = self._first_ms + place * self._width
            inside_ms = min(end_ms, begin_ms + self._width) - max(start_ms, begin_ms)
            filled = self._filled.setdefault(place, {}).setdefault(broker_id, [0, 0])
            filled[0] += inside_ms
            filled[1] += 1

    def masterships(self, group: str) -> Iterator[Mastership]:
        for place, brokers in sorted(self._filled.items()):
            start_ms = self._first_ms + place * self._width
            yield Mastership(
                group, max(brokers, key=lambda who: (brokers[who][0], who)), start_ms,
                min(self._last_ms, start_ms + self._width), is_bin=True,
                masterships=sum(number for _, number in brokers.values()),
            )  # fmt: skip


def changes(tables: EpochTables, groups: Sequence[Group]) -> list[Change]:
    """Changes of master, of each group the longest ones (at most `rows_each`)."""
    bound = rows_each(len(groups))
    columns = (
        "master_epoch cause master_before master detected_at elected_at opened_at first_ack_at "
        "idle unclean"
    )
    found: dict[str, list[Row]] = {}
    for row in tables.failovers(columns, [group.name for group in groups]):
        rows = found.setdefault(row.group, [])
        rows.append(row)
        if len(rows) > 4 * bound:
            found[row.group] = heapq.nsmallest(bound, rows, key=dearness)
    drawn = []
    for name in sorted(found):
        kept = heapq.nsmallest(bound, found[name], key=dearness)
        kept.sort(key=lambda row: (row.elected_at is not None, row.elected_at or 0))
        drawn += [made for row in kept if (made := _change(row)) is not None]
    return drawn


def _change(row: Row) -> Change | None:
    """None for one without any time."""
    ends = (row.opened_at if row.idle else None, row.first_ack_at, row.opened_at)
    end = next((each for each in ends if each is not None), None)
    if row.unavailable_ms is not None and end is not None:
        at = end - row.unavailable_ms
    else:
        at = next((each for each in (row.detected_at, row.elected_at, end) if each), None)
    if at is None:
        return None
    return Change(
        row.group, row.kind or "unknown", row.master_epoch, row.cause, row.master_before,
        row.master, at, end, row.unavailable_ms,
    )  # fmt: skip


def set_sizes(
    tables: EpochTables, groups: Sequence[Group], first_ms: int, last_ms: int
) -> list[SetSize]:
    """Sizes of sets in the order of time; of a group with many changes the least of each bin."""
    bound = rows_each(len(groups))
    many = {group.name for group in groups if group.set_changes > bound}
    width = _bin_width(first_ms, last_ms, bound)
    few: dict[str, list[Row]] = {}
    bins: dict[tuple[str, int], list[Any]] = {}
    columns = "at set_before set_after size_after joined left reason"
    for row in tables.rows("set_changes", columns, [g.name for g in groups if g.set_changes]):
        after = row.size_after
        row["size"] = after if after is not None or row.set_after is None else len(row.set_after)
        if row.at is None or row.size is None:
            continue
        if row.group not in many:
            few.setdefault(row.group, []).append(row)
            continue
        place = (row.group, _bin(row.at, first_ms, width))
        least = bins.setdefault(place, [row.size, row.at, row.size, 0])
        least[0] = min(least[0], row.size)
        if row.at >= least[1]:
            least[1:3] = row.at, row.size
        least[3] += 1
    drawn: list[SetSize] = []
    for name in sorted(few):
        rows = sorted(few[name], key=lambda row: row.at)
        if rows[0].set_before:
            drawn.append(SetSize(name, first_ms, len(rows[0].set_before)))
        drawn += [SetSize(name, row.at, row.size, _what_changed(row)) for row in rows]
    for (name, nth), (least_size, _, last, number) in sorted(bins.items()):
        at = first_ms + nth * width
        drawn.append(SetSize(name, at, least_size, f"the least of {number} changes"))
        if last != least_size:
            drawn.append(SetSize(name, at + width - 1, last, "then"))
    return drawn


def days(tables: EpochTables) -> list[Day]:
    """Per day over all groups, the latest `_DAYS_DRAWN` at most."""
    return _days(tables, None, 1)[-_DAYS_DRAWN:]


def group_days(
    tables: EpochTables, groups: Sequence[Group], first_ms: int, last_ms: int
) -> tuple[int, list[Day]]:
    """(days of one cell, cells): per group and day; several days a cell where it is many."""
    number = (last_ms - first_ms) // DAY_MS + 2
    step = max(1, -(-number * len(groups) // _CELLS_DRAWN))
    return step, _days(tables, [group.name for group in groups], step)


def _days(tables: EpochTables, names: list[str] | None, step: int) -> list[Day]:
    """By group if `names` are given; `step` days a cell."""
    sums: dict[tuple[str, int], list[int]] = {}
    for row in tables.rows("unavailability", "day outages unavailable_ms longest_ms", names):
        if row.day is None or row.group is None:
            continue
        at = row.day - row.day % (step * DAY_MS)
        of = sums.setdefault((row.group if names is not None else "", at), [0, 0, 0])
        of[0] += row.outages or 0
        of[1] += row.unavailable_ms or 0
        of[2] = max(of[2], row.longest_ms or 0)
    return [Day(group, at, *of) for (group, at), of in sorted(sums.items())]


def _bin_width(first_ms: int, last_ms: int, bins: int) -> int:
    return max(1, -(-(last_ms - first_ms) // bins))


def _bin(at: int, first_ms: int, width: int) -> int:
    return max(0, (at - first_ms) // width)


def _what_changed(row: Row) -> str:
    parts = [f"{', '.join(map(str, row[verb]))} {verb}" for verb in ("joined", "left") if row[verb]]
    reason = row.reason
    return "; ".join(parts) + (f" ({reason})" if reason else "")
