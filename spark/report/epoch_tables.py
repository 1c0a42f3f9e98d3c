"""What the report on epochs takes out of the Parquet tables of `epoch_history`, each time bounded.

Only sums, bins and top rows reach the driver: its memory depends on the bounds here, not on how
many failovers there were. Times are ms since 1970 in UTC, durations ms; None: not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

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

_SCHEMAS: Final = {
    "masterships": """master_epoch LONG, broker_id LONG, address STRING, began_at TIMESTAMP,
        opened_at TIMESTAMP, first_ack_at TIMESTAMP, ended_at TIMESTAMP, ended_by STRING""",
    "failovers": """master_epoch LONG, kind STRING, cause STRING, how STRING, detected_by STRING,
        master_before LONG, master LONG, address STRING, detected_at TIMESTAMP,
        elected_at TIMESTAMP, role_at TIMESTAMP, opened_at TIMESTAMP, first_ack_at TIMESTAMP,
        silent_ms LONG, detect_ms LONG, elect_ms LONG, role_ms LONG, open_ms LONG,
        first_ack_ms LONG, unavailable_ms LONG, without_writes_ms LONG, held_ms LONG,
        idle BOOLEAN, unclean BOOLEAN,
        complete BOOLEAN, truncated_bytes LONG, clock_problem STRING""",
    "unavailability": """outages LONG, unavailable_ms LONG, longest_ms LONG, open BOOLEAN""",
    "set_changes": """at TIMESTAMP, set_before ARRAY<LONG>, set_after ARRAY<LONG>,
        joined ARRAY<LONG>, left ARRAY<LONG>, size_after LONG, reason STRING""",
    "truncations": """at TIMESTAMP, broker_id LONG, master_epoch LONG, from_offset LONG,
        to_offset LONG, bytes LONG""",
    "findings": """severity STRING, kind STRING, text STRING, subject STRING, evidence STRING,
        at TIMESTAMP""",
    "controllers": """at TIMESTAMP, leader STRING, leader_before STRING, controller_epoch LONG""",
}


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
    """The tables below one folder, read through Spark with the columns that the page needs."""

    def __init__(self, session: SparkSession, folder: str) -> None:
        self._session = session
        self._folder = folder
        self._read: dict[str, DataFrame] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._read.values():
            frame.unpersist()

    def table(self, name: str) -> DataFrame:
        """One table; without rows if it was never written.

        Read once and kept (on disk where memory is short): a folder per group and day is many small
        files, and opening them is what takes the time.
        """
        if name not in self._read:
            self._read[name] = self._open(name).persist(StorageLevel.MEMORY_AND_DISK)
        return self._read[name]

    def _open(self, name: str) -> DataFrame:
        schema = f"{_SCHEMAS[name]}, `group` STRING, day DATE"
        path = Path(self._folder) / name
        # Partition columns by their schema: a group called 007 stays a text.
        rows = (
            self._session.read.schema(schema).parquet(str(path))
            if path.exists()
            else self._session.createDataFrame([], schema)
        )
        if name == "failovers":
            # The page counts all the time in which writes were impossible, noticed or not. What was
            # silence before a session closed is no part of that.
            rows = rows.withColumn(
                "detect_part_ms",
                F.when(F.col("kind") == "planned_switch", F.col("detect_ms")).otherwise(
                    F.col("without_writes_ms") - F.col("unavailable_ms")
                ),
            ).withColumn("unavailable_ms", F.col("without_writes_ms"))
        return rows

    def groups(self) -> tuple[Totals, list[Group]]:
        """Sums over all, and the groups that cost most (at most GROUPS_SHOWN), by name."""
        facts = _per_group(self)
        rolled = (
            facts.rollup("group")
            .agg(
                F.grouping("group").alias("is_total"),
                F.count("*").alias("groups"),
                *(F.sum(name).alias(name) for name in _SUMS),
                F.max("longest_ms").alias("longest_ms"),
                F.min("first_ms").alias("first_ms"),
                F.max("last_ms").alias("last_ms"),
                F.sum("is_open").alias("is_open"),
                F.max("lost_ms").alias("lost_ms"),
            )
            .orderBy(F.desc("is_total"), F.desc("unavailable_ms"), F.desc("masterships"), "group")
            .limit(GROUPS_SHOWN + 1)
        )
        total, *rest = rolled.collect() or [None]
        if total is None:
            return Totals(0, None, None, 0, 0, 0, 0, 0, 0), []
        totals = Totals(
            groups=total.groups,
            first_ms=total.first_ms,
            last_ms=total.last_ms,
            open_groups=total.is_open,
            **{name: total[name] for name in _SUMS},
        )
        shown = [
            Group(
                name=row["group"],
                longest_ms=row.longest_ms,
                is_open=bool(row.is_open),
                open_since_ms=row.lost_ms if row.is_open else None,
                **{name: row[name] for name in _SUMS},
            )
            for row in rest
        ]
        return totals, sorted(shown, key=lambda group: group.name)

    def kinds(self) -> list[Kind]:
        """Per kind of election."""
        rows = (
            self.table("failovers")
            .groupBy("kind")
            .agg(
                F.count("*").alias("number"),
                F.count("unavailable_ms").alias("told"),
                F.coalesce(F.sum("unavailable_ms"), F.lit(0)).alias("sum"),
                F.percentile_approx("unavailable_ms", 0.5).alias("median"),
                F.percentile_approx("unavailable_ms", 0.99).alias("p99"),
                F.max("unavailable_ms").alias("longest"),
                F.count_if("unclean").alias("unclean"),
                F.count_if("idle").alias("idle"),
                F.count_if(~F.col("complete")).alias("incomplete"),
                F.coalesce(F.sum("truncated_bytes"), F.lit(0)).alias("truncated"),
                *(F.percentile_approx(_part(name), 0.5).alias(name) for name in PARTS),
            )
            .collect()
        )
        return [
            Kind(
                row.kind or "unknown",
                row.number,
                row.told,
                row["sum"],
                row.median,
                row.p99,
                row.longest,
                row.unclean,
                row.idle,
                row.incomplete,
                row.truncated,
                {name: row[name] for name in PARTS},
            )
            for row in rows
        ]

    def duration_bins(self) -> list[tuple[str, int, int]]:
        """(kind, bin, number) of durations that are known; bin n begins at 10^(n / per decade)."""
        place = F.floor(F.log10(F.greatest("unavailable_ms", F.lit(1))) * BINS_PER_DECADE + 1e-9)
        rows = (
            self.table("failovers")
            .where("unavailable_ms is not null")
            .groupBy("kind", place.alias("bin"))
            .count()
            .collect()
        )
        return sorted((row.kind or "unknown", row.bin, row["count"]) for row in rows)

    def overall_percentiles(self) -> tuple[int | None, int | None]:
        """Median and 99th percentile of all known durations but those of first elections."""
        row = (
            self.table("failovers")
            .where("kind != 'first_election'")
            .agg(F.percentile_approx("unavailable_ms", [0.5, 0.99]).alias("both"))
            .first()
        )
        return (None, None) if row is None or row.both is None else (row.both[0], row.both[1])

    def dearest(self) -> list[Any]:
        """Rows of `failovers` with times in ms: unclean ones first, then by cost."""
        wanted = self.table("failovers").where("kind != 'first_election' or unclean")
        return (
            with_ms(wanted, "detected_at", "elected_at", "opened_at", "first_ack_at")
            .orderBy(
                F.desc(F.coalesce("unclean", F.lit(False))),
                F.desc_nulls_last("unavailable_ms"),
                F.desc("elected_at"),
            )
            .limit(FAILOVERS_LISTED)
            .collect()
        )

    def truncations(self) -> tuple[int, int, list[Any]]:
        """(number, bytes, the largest of them)."""
        cuts = self.table("truncations")
        row = cuts.agg(F.count("*").alias("n"), F.sum("bytes").alias("size")).first()
        if row is None or not row.n:
            return 0, 0, []
        largest = with_ms(cuts, "at").orderBy(F.desc("bytes"), "at").limit(TRUNCATIONS_LISTED)
        return row.n, row["size"] or 0, largest.collect()

    def findings(self) -> tuple[dict[str, int], list[Any]]:
        """(severity -> number, the gravest of them)."""
        found = self.table("findings")
        numbers = {
            row.severity: row["count"] for row in found.groupBy("severity").count().collect()
        }
        if not numbers:
            return {}, []
        grave = F.array_position(F.array(*map(F.lit, SEVERITIES)), F.col("severity"))
        rank = F.when(grave == 0, len(SEVERITIES) + 1).otherwise(grave)
        gravest = with_ms(found, "at").orderBy(rank, "kind", "group", F.asc_nulls_last("at"))
        return numbers, gravest.limit(FINDINGS_LISTED).collect()

    def leaders(self) -> tuple[int, list[Any]]:
        """(changes of the leading controller, the latest of them)."""
        changes = self.table("controllers")
        number = changes.count()
        if not number:
            return 0, []
        return number, with_ms(changes, "at").orderBy(F.desc("at")).limit(LEADERS_LISTED).collect()


_DAY_MS: Final = 86_400_000
_SUMS: Final = ("masterships", "failovers", "set_changes", "outages", "unavailable_ms")


def with_ms(frame: DataFrame, *names: str) -> DataFrame:
    """These timestamps as ms since 1970: no time zone of the driver may touch them."""
    return frame.withColumns({name: F.unix_millis(name) for name in names})


def _part(name: str) -> Column:
    """A part of its time without writes; no client waited for the first write of an idle one."""
    if name == "detect_ms":
        return F.col("detect_part_ms")
    if name != "first_ack_ms":
        return F.col(name)
    return F.when(~F.coalesce("idle", F.lit(False)), F.col(name))


def _per_group(tables: EpochTables) -> DataFrame:
    """One row per group with its sums, from four tables."""
    changes_of_master = tables.table("failovers")
    parts = [
        _sums(
            tables.table("masterships"),
            masterships=F.count("*"),
            first_ms=F.min(F.unix_millis("began_at")),
            last_ms=_latest("began_at", "opened_at", "first_ack_at", "ended_at"),
            # Still without a master only if no mastership has begun since.
            lost_ms=F.max(F.unix_millis("ended_at")),
        ),
        _sums(
            changes_of_master,
            failovers=F.count_if(F.coalesce("kind", F.lit("")) != "first_election"),
            first_ms=F.min(F.unix_millis(F.coalesce("detected_at", "elected_at"))),
            last_ms=_latest("elected_at", "opened_at", "first_ack_at"),
        ),
        _sums(
            tables.table("set_changes"),
            set_changes=F.count("*"),
            first_ms=F.min(F.unix_millis("at")),
            last_ms=_latest("at"),
        ),
        _sums(
            tables.table("unavailability"),
            outages=F.sum("outages"),
            unavailable_ms=F.sum("unavailable_ms"),
            longest_ms=F.max("longest_ms"),
            is_open=F.max(F.col("open").cast("int")),
            first_day_ms=F.min(F.unix_date("day").cast("long") * _DAY_MS),
            last_day_ms=F.max((F.unix_date("day").cast("long") + 1) * _DAY_MS),
        ),
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
    return (
        whole.where("`group` is not null")
        .groupBy("group")
        .agg(
            *(_or_zero(F.sum(name), name) for name in _SUMS),
            _or_zero(F.max("longest_ms"), "longest_ms"),
            # A wrong clock must not stretch the pictures: days without outages count, too.
            F.greatest(F.min("first_ms"), F.max("first_day_ms")).alias("first_ms"),
            F.least(F.max("last_ms"), F.max("last_day_ms")).alias("last_ms"),
            _or_zero(F.max("is_open"), "is_open"),
            F.max("lost_ms").alias("lost_ms"),
        )
    )


def _sums(frame: DataFrame, **values: Column) -> DataFrame:
    names = (
        *_SUMS, "longest_ms", "first_ms", "last_ms", "is_open", "lost_ms", "first_day_ms",
        "last_day_ms",
    )  # fmt: skip
    made = [values.get(name, F.max(F.lit(None))).cast("long").alias(name) for name in names]
    return frame.groupBy("group").agg(*made)


def _latest(*names: str) -> Column:
    return F.greatest(*(F.max(F.unix_millis(name)) for name in names), F.lit(None))


def _or_zero(column: Column, name: str) -> Column:
    return F.coalesce(column, F.lit(0)).alias(name)


__all__ = [
    "BINS_PER_DECADE",
    "FAILOVERS_LISTED",
    "FINDINGS_LISTED",
    "GROUPS_SHOWN",
    "PARTS",
    "SEVERITIES",
    "EpochTables",
    "Group",
    "Kind",
    "Totals",
    "with_ms",
]
