"""The events of all controllers, each once, in the order in which they were applied.

Several files have the same event; its key is (log, raft_index, part). One shuffle brings together
what has the same key: the content of the first controller counts, a bit mask has the controllers,
and the smallest and the largest hash of the content show whether they agree. Damaged lines have a
key of their file, so the files are read once.

Columns: the key; `seq` (log_no, raft_index, part), by which events are ordered as
`batonmq.history.merge` does: logs by their earliest time; the fields of the event with
times in ms, null for unknown (0 or less); of `json` what tables need, in `detail`; `told` (bit mask
of controllers), `copies`, `disagree`, `one`, `other` (two controllers with different contents).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from batonmq.history.event import ON_BROKER_CLOCK
from batonmq.spark.failovers.sources import CONTROLLERS_MAX, EVENT_FIELDS
from batonmq.spark.schemas import HISTORY_COLUMNS

_TIMES: Final = {column.name: column.field for column in HISTORY_COLUMNS if column.is_time}
_DETAIL: Final = "role STRING, reason STRING, fromOffset LONG, toOffset LONG"
_KEY: Final = ("log", "raft_index", "part")
_CONTENT: Final = tuple(name for name in EVENT_FIELDS if name not in _KEY)
_SETS: Final = ("set_before", "sync_state_set")
PART_BITS: Final = 12
PLACE: Final = (
    f"(shiftleft(raft_index, {PART_BITS}) | CAST(least(part, {(1 << PART_BITS) - 1}) AS BIGINT))"
)
"""SQL: raft index and part as one number in their order; aggregations of numbers need no sort."""
_LOGS_MAX: Final = 10_000
_LOGS_INLINE: Final = 20
_SHARED_MAX: Final = 10_000
_DAMAGED: Final = "damaged:"


def merged(rows: DataFrame, controllers: Sequence[str]) -> DataFrame:
    """The events of all `controllers`, each once, and one row per damaged file.

    A damaged file's row has `kind` null, its path in `damaged_file`, the number of its lines in
    `copies` and one reason in `reason`. Raises ValueError for too many controllers.
    """
    if len(controllers) > CONTROLLERS_MAX:
        raise ValueError(
            f"{len(controllers)} controllers: at most {CONTROLLERS_MAX} can be distinguished; "
            "read fewer histories at once"
        )
    lines = _lines(rows, controllers)
    # The repartition is the shuffle that the aggregation needs anyway: with it there is one sort.
    joined = (
        lines.repartition(*_KEY)
        .groupBy(*_KEY)
        .agg(
            F.min("line").alias("line"),
            F.bit_or("bit").alias("told"),
            F.count("*").alias("copies"),
            F.min(F.struct("line.hash", "line.who")).alias("low"),
            F.max(F.struct("line.hash", "line.who")).alias("high"),
        )
    )
    is_damaged = F.col("log").startswith(_DAMAGED) & (F.col("raft_index") < 0)
    detail = F.from_json("line.json", _DETAIL)
    fields = [
        F.expr(f"nullif(greatest(unix_millis(line.{name}), 0), 0)").alias(_TIMES[name])
        if name in _TIMES
        else F.col(f"line.{name}").alias(name)
        for name in _CONTENT
    ]
    return joined.select(
        *_KEY,
        F.when(is_damaged, F.substring("log", len(_DAMAGED) + 1, 4096)).alias("damaged_file"),
        *fields,
        F.coalesce("line.broker_name", F.lit("")).alias("group"),
        detail.alias("detail"),
        "told",
        "copies",
        (~is_damaged & (F.col("low.hash") != F.col("high.hash"))).alias("disagree"),
        F.least("low.who", "high.who").alias("one"),
        F.greatest("low.who", "high.who").alias("other"),
    )


def _lines(rows: DataFrame, controllers: Sequence[str]) -> DataFrame:
    """The key of each line, all else of it as `line`, and the bit of its controller."""
    bit = F.lit(0).cast("long")
    rank = F.lit(len(controllers))
    who = F.coalesce("controller", "file")
    for number, name in enumerate(controllers):
        bit = F.when(who == name, F.lit(1 << number).cast("long")).otherwise(bit)
        rank = F.when(who == name, F.lit(number)).otherwise(rank)
    damaged = F.col("corrupt").isNotNull()
    # A hash ignores null and the ends of arrays: a value that moves to the next column would not
    # change it.
    kept = [
        F.coalesce(F.size(name), F.lit(0)) if name in _SETS else F.isnotnull(name)
        for name in _CONTENT
    ]
    return rows.select(
        F.when(damaged, F.concat(F.lit(_DAMAGED), "corrupt.file"))
        .otherwise(F.col("log"))
        .alias("log"),
        F.when(damaged, -1).otherwise(F.col("raft_index")).alias("raft_index"),
        F.when(damaged, 0).otherwise(F.col("part")).alias("part"),
        F.struct(
            rank.alias("rank"),
            F.coalesce("line_offset", F.lit(0)).alias("line_offset"),
            F.xxhash64(*_CONTENT, *kept).alias("hash"),
            who.alias("who"),
            *[F.col(name) for name in _CONTENT if name != "reason"],
            F.coalesce("corrupt.reason", "reason").alias("reason"),
        ).alias("line"),
        F.when(damaged, 0).otherwise(bit).alias("bit"),
    )


def overview(events: DataFrame, controllers: Sequence[str]) -> DataFrame:
    """(log, group, day): what of them there is, in a few numbers; one pass over few columns.

    `day`, `first_ms` and `last_ms` are of events on controllers' clocks; a broker's clock may be
    years off, and its reports have a null day. `begins` is the earliest time of all, `any_first_ms`
    and `any_last_ms` are also of all; `timeless` counts those without a time. `low<n>` and
    `high<n>` are the first and the last PLACE of
    controller n.
    """
    reported = ", ".join(f"'{kind}'" for kind in sorted(ON_BROKER_CLOCK))
    own_ms = F.expr(f"CASE WHEN kind NOT IN ({reported}) THEN time_ms END")
    has = [F.col("told").bitwiseAND(F.lit(1 << n)) != 0 for n in range(len(controllers))]
    ends = [F.min(F.when(mine, F.expr(PLACE))).alias(f"low{n}") for n, mine in enumerate(has)]
    ends += [F.max(F.when(mine, F.expr(PLACE))).alias(f"high{n}") for n, mine in enumerate(has)]
    return (
        events.where("kind IS NOT NULL")
        .groupBy("log", "group", F.to_date(F.timestamp_millis(own_ms)).alias("day"))
        .agg(
            F.count("*").alias("events"),
            F.sum("copies").alias("lines"),
            F.min(F.coalesce("time_ms", F.lit(0))).alias("begins"),
            F.min(own_ms).alias("first_ms"),
            F.max(own_ms).alias("last_ms"),
            F.min("time_ms").alias("any_first_ms"),
            F.max("time_ms").alias("any_last_ms"),
            F.count_if(F.col("time_ms").isNull()).alias("timeless"),
            *ends,
        )
    )


@dataclass(frozen=True, slots=True)
class Logs:
    """The logs in the order of their earliest time, with the first and last place of each.

    `ranges`: (log, number of the controller, its name, low, high), as PLACE counts. `shared`: the
    groups that are in several logs, with these logs in order.
    """

    names: tuple[str, ...]
    ranges: tuple[tuple[str, int, str, int, int], ...]
    shared: Mapping[str, tuple[str, ...]]

    def group_in(self, group: str, log: str) -> str:
        """The name in tables of a group in that log."""
        logs = self.shared.get(group, ())
        return group if log not in logs[:-1] else f"{group} ({log})"


def logs_of(overview_rows: DataFrame, controllers: Sequence[str]) -> Logs:
    """Raises ValueError for too many logs, or groups of several logs: not one cluster's history."""
    ends = [F.min(f"low{n}").alias(f"low{n}") for n in range(len(controllers))]
    ends += [F.max(f"high{n}").alias(f"high{n}") for n in range(len(controllers))]
    rows = (
        overview_rows.groupBy("log")
        .agg(F.min("begins").alias("begins"), *ends)
        .limit(_LOGS_MAX + 1)
        .collect()
    )
    if len(rows) > _LOGS_MAX:
        raise ValueError(f"more than {_LOGS_MAX} logs: these are histories of many clusters")
    rows = sorted(rows, key=lambda row: (row["begins"], row["log"]))
    names = tuple(row["log"] for row in rows)
    shared: dict[str, tuple[str, ...]] = {}
    if len(names) > 1:
        several = (
            overview_rows.where("`group` <> ''")
            .groupBy("group")
            .agg(F.collect_set("log").alias("logs"))
            .where("size(logs) > 1")
            .limit(_SHARED_MAX + 1)
            .collect()
        )
        if len(several) > _SHARED_MAX:
            raise ValueError(
                f"more than {_SHARED_MAX} groups are in several logs: these are histories "
                "of several clusters; read those of one at a time"
            )
        shared = {row["group"]: tuple(sorted(row["logs"], key=names.index)) for row in several}
    ranges = tuple(
        (row["log"], n, name, row[f"low{n}"], row[f"high{n}"])
        for row in rows
        for n, name in enumerate(controllers)
        if row[f"low{n}"] is not None
    )
    return Logs(names, ranges, shared)


def apart(rows: DataFrame, logs: Logs) -> DataFrame:
    """Rows with `log` and `group`, where a group of several logs has a name of its own in each."""
    names = [
        (group, log, logs.group_in(group, log))
        for group, logs_of_it in logs.shared.items()
        for log in logs_of_it
    ]
    if not names:
        return rows
    known = rows.sparkSession.createDataFrame(names, "`group` STRING, log STRING, named STRING")
    columns = [
        F.coalesce("named", "group").alias(name) if name == "group" else F.col(name)
        for name in rows.columns
    ]
    return rows.join(F.broadcast(known), ["group", "log"], "left").select(columns)


def ordered(events: DataFrame, logs: Logs) -> DataFrame:
    """With `seq`: a number per log, in the order of their earliest time."""
    numbered = F.lit(None).cast("int")
    if len(logs.names) <= _LOGS_INLINE:
        for number, name in enumerate(logs.names):
            numbered = F.when(F.col("log") == name, F.lit(number)).otherwise(numbered)
        events = events.withColumn("log_no", numbered)
    else:
        known = events.sparkSession.createDataFrame(
            [(name, number) for number, name in enumerate(logs.names)], "log STRING, log_no INT"
        )
        events = events.join(F.broadcast(known), "log", "left")
    return events.withColumn("seq", F.struct("log_no", "raft_index", "part"))


__all__ = ["PART_BITS", "PLACE", "Logs", "apart", "logs_of", "merged", "ordered", "overview"]
