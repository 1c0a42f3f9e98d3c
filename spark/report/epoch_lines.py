"""What the time lines of the report on epochs are drawn from, thinned in Spark where it is much.

A group with few rows is drawn row by row. For one with many the time is cut into equal bins, and a
bin has the colour of what filled it most: every bin is drawn, so thinning leaves no hole that looks
like an outage. Times are ms since 1970 in UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from batonmq.spark.report.epoch_tables import EpochTables, Group, with_ms

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
    few = [group.name for group in groups if group.masterships <= bound]
    many = [group.name for group in groups if group.masterships > bound]
    frame = tables.table("masterships").select(
        "group",
        F.coalesce("broker_id", F.lit(0)).alias("broker_id"),
        F.unix_millis(F.coalesce("opened_at", "first_ack_at", "began_at")).alias("start"),
        F.unix_millis("ended_at").alias("end"),
        "master_epoch",
        "ended_by",
        "address",
    )
    drawn: list[Mastership] = []
    if few:
        drawn += _each_mastership(frame.where(F.col("group").isin(few)), first_ms, last_ms)
    if many:
        drawn += _binned_masterships(
            frame.where(F.col("group").isin(many)), first_ms, last_ms, bound
        )
    return drawn


def _each_mastership(frame: DataFrame, first_ms: int, last_ms: int) -> Iterator[Mastership]:
    for row in frame.orderBy("group", "start").collect():
        start = first_ms if row.start is None else row.start
        end = last_ms if row.end is None else max(start, row.end)
        yield Mastership(
            row.group, row.broker_id, start, end, row.master_epoch, row.ended_by,
            row.end is None, address=row.address,
        )  # fmt: skip


def _binned_masterships(
    frame: DataFrame, first_ms: int, last_ms: int, bound: int
) -> Iterator[Mastership]:
    """At most `bound` bins a group, each of the broker that was master for most of it."""
    width = _bin_width(first_ms, last_ms, bound)
    end = F.coalesce("end", F.lit(last_ms))
    from_bin, to_bin = _bin(F.col("start"), first_ms, width), _bin(end, first_ms, width)
    bins = F.sequence(from_bin, F.greatest(from_bin, F.least(to_bin, F.lit(bound - 1))))
    start_of_bin = F.lit(first_ms) + F.col("bin") * width
    inside = F.least(end, start_of_bin + width) - F.greatest("start", start_of_bin)
    by_broker = (
        frame.where(F.col("start").isNotNull())
        .withColumn("bin", F.explode(bins))
        .groupBy("group", "bin", "broker_id")
        .agg(F.sum(inside).alias("ms"), F.count("*").alias("n"))
    )
    by_bin = by_broker.groupBy("group", "bin").agg(
        F.max_by("broker_id", F.struct("ms", "broker_id")).alias("broker_id"),
        F.sum("n").alias("n"),
    )
    for row in by_bin.orderBy("group", "bin").collect():
        start = first_ms + row.bin * width
        yield Mastership(
            row.group, row.broker_id, start, min(last_ms, start + width), is_bin=True,
            masterships=row.n,
        )  # fmt: skip


def changes(tables: EpochTables, groups: Sequence[Group]) -> list[Change]:
    """Changes of master, of each group the longest ones (at most `rows_each`)."""
    bound = rows_each(len(groups))
    if not groups:
        return []
    end = F.coalesce(F.when(F.col("idle"), F.col("opened_at")), "first_ack_at", "opened_at")
    frame = tables.table("failovers").where(F.col("group").isin([g.name for g in groups]))
    if any(group.masterships > bound for group in groups):
        dearest = Window.partitionBy("group").orderBy(
            F.desc(F.coalesce("unclean", F.lit(False))),
            F.desc_nulls_last("unavailable_ms"),
            F.desc("elected_at"),
        )
        frame = frame.withColumn("place", F.row_number().over(dearest)).where(f"place <= {bound}")
    rows = (
        with_ms(frame.withColumn("end_at", end), "detected_at", "elected_at", "end_at")
        .select(
            "group", "kind", "master_epoch", "cause", "master_before", "master", "detected_at",
            "elected_at", "end_at", "unavailable_ms",
        )
        .orderBy("group", "elected_at")
        .collect()
    )  # fmt: skip
    drawn = []
    for row in rows:
        if row.unavailable_ms is not None and row.end_at is not None:
            at = row.end_at - row.unavailable_ms
        else:
            at = next((t for t in (row.detected_at, row.elected_at, row.end_at) if t), None)
        if at is not None:
            drawn.append(
                Change(
                    row.group, row.kind or "unknown", row.master_epoch, row.cause,
                    row.master_before, row.master, at, row.end_at, row.unavailable_ms,
                )
            )  # fmt: skip
    return drawn


def set_sizes(
    tables: EpochTables, groups: Sequence[Group], first_ms: int, last_ms: int
) -> list[SetSize]:
    """Sizes of sets in the order of time; of a group with many changes the least of each bin."""
    bound = rows_each(len(groups))
    few = [group.name for group in groups if 0 < group.set_changes <= bound]
    many = [group.name for group in groups if group.set_changes > bound]
    size = F.coalesce("size_after", F.size("set_after").cast("long"))
    frame = with_ms(tables.table("set_changes"), "at").withColumn("size", size)
    frame = frame.where("at is not null and size is not null")
    drawn: list[SetSize] = []
    if few:
        rows = frame.where(F.col("group").isin(few)).orderBy("group", "at").collect()
        seen: set[str] = set()
        for row in rows:
            if row.group not in seen and row.set_before:
                drawn.append(SetSize(row.group, first_ms, len(row.set_before)))
            seen.add(row.group)
            drawn.append(SetSize(row.group, row.at, row["size"], _what_changed(row)))
    if many:
        width = _bin_width(first_ms, last_ms, bound)
        rows = (
            frame.where(F.col("group").isin(many))
            .groupBy("group", _bin(F.col("at"), first_ms, width).alias("bin"))
            .agg(
                F.min("size").alias("least"),
                F.max_by("size", "at").alias("last"),
                F.count("*").alias("n"),
            )
            .orderBy("group", "bin")
            .collect()
        )
        for row in rows:
            at = first_ms + row.bin * width
            text = f"the least of {row.n} changes"
            drawn.append(SetSize(row.group, at, row.least, text))
            if row["last"] != row.least:
                drawn.append(SetSize(row.group, at + width - 1, row["last"], "then"))
    return drawn


def days(tables: EpochTables) -> list[Day]:
    """Per day over all groups, the latest `_DAYS_DRAWN` at most."""
    return _days(tables, [F.lit("").alias("group")], F.col("day"), None)[-_DAYS_DRAWN:]


def group_days(
    tables: EpochTables, groups: Sequence[Group], first_ms: int, last_ms: int
) -> tuple[int, list[Day]]:
    """(days of one cell, cells): per group and day; several days a cell where it is many."""
    number = (last_ms - first_ms) // 86_400_000 + 2
    step = max(1, -(-number * len(groups) // _CELLS_DRAWN))
    place = F.unix_date("day") - F.unix_date("day") % step
    cells = _days(tables, ["group"], F.date_from_unix_date(place), [g.name for g in groups])
    return step, cells


def _days(
    tables: EpochTables, by: list[str] | list[Column], day: Column, names: list[str] | None
) -> list[Day]:
    frame = tables.table("unavailability").where("day is not null and `group` is not null")
    if names is not None:
        frame = frame.where(F.col("group").isin(names))
    rows = (
        frame.groupBy(*by, (F.unix_date(day).cast("long") * 86_400_000).alias("at"))
        .agg(
            F.coalesce(F.sum("outages"), F.lit(0)).alias("outages"),
            F.coalesce(F.sum("unavailable_ms"), F.lit(0)).alias("ms"),
            F.coalesce(F.max("longest_ms"), F.lit(0)).alias("longest"),
        )
        .orderBy("group", "at")
        .collect()
    )
    return [Day(row.group, row.at, row.outages, row.ms, row.longest) for row in rows]


def _bin_width(first_ms: int, last_ms: int, bins: int) -> int:
    return max(1, -(-(last_ms - first_ms) // bins))


def _bin(at: Column, first_ms: int, width: int) -> Column:
    return F.greatest(F.lit(0), F.floor((at - first_ms) / width)).cast("long")


def _what_changed(row: object) -> str:
    parts = []
    for name, verb in (("joined", "joined"), ("left", "left")):
        who = getattr(row, name)
        if who:
            parts.append(f"{', '.join(map(str, who))} {verb}")
    reason = getattr(row, "reason", None)
    return "; ".join(parts) + (f" ({reason})" if reason else "")


__all__ = [
    "Change",
    "Day",
    "Mastership",
    "SetSize",
    "changes",
    "days",
    "group_days",
    "masterships",
    "rows_each",
    "set_sizes",
]
