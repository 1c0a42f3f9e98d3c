"""The events that all controllers told, each once, in the order in which they were applied.

Several files tell the same event; its key is (log, raft_index, part). One shuffle brings together
what has the same key: the content of the first controller counts, a bit mask tells who told it, and
the smallest and the largest hash of the content tell whether they agree. Damaged lines go the same
way under a key of their file, so the files are read once.

Columns: the key; `seq` (log_no, raft_index, part), by which events are ordered as
`batonmq.history_events` does: logs by their earliest time; the fields of the event with times in
ms, null for unknown (0 or less); the numbers of `json` that stories need; `told` (bit mask of
controllers), `copies`, `disagree`, `one`, `other` (two controllers that told it differently).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.failovers.sources import CONTROLLERS_MAX, EVENT_FIELDS

_TIMES: Final = {
    "time": "time_ms",
    "detected_at": "detected_ms",
    "proposed_at": "proposed_ms",
    "started_at": "started_ms",
    "leader_seen_at": "leader_seen_ms",
}
_DETAIL: Final = (
    "role STRING, master LONG, target LONG, drainedOffset LONG, heldMs LONG, waitedMs LONG, "
    "fromOffset LONG, toOffset LONG, appliedMs LONG, maxOffset LONG, confirmOffset LONG, "
    "reason STRING"
)
_LOGS_MAX: Final = 10_000
_DAMAGED: Final = "damaged:"


def merged(told: DataFrame, controllers: Sequence[str]) -> DataFrame:
    """What all `controllers` told, each event once, and one row per damaged file.

    A damaged file's row has `kind` null, its path in `damaged_file`, the number of its lines in
    `copies` and one reason in `reason`. Raises ValueError for too many controllers.
    """
    if len(controllers) > CONTROLLERS_MAX:
        raise ValueError(
            f"{len(controllers)} controllers: at most {CONTROLLERS_MAX} can be told apart; "
            "read fewer histories at once"
        )
    bit = F.lit(0).cast("long")
    rank = F.lit(len(controllers))
    who = F.coalesce("controller", "file")
    for number, name in enumerate(controllers):
        bit = F.when(who == name, F.lit(1 << number).cast("long")).otherwise(bit)
        rank = F.when(who == name, F.lit(number)).otherwise(rank)
    damaged = F.col("corrupt").isNotNull()
    content = [name for name in EVENT_FIELDS if name not in ("log", "raft_index", "part")]
    lines = told.select(
        F.when(damaged, F.concat(F.lit(_DAMAGED), "corrupt.file"))
        .otherwise(F.col("log"))
        .alias("log"),
        F.when(damaged, -1).otherwise(F.col("raft_index")).alias("raft_index"),
        F.when(damaged, 0).otherwise(F.col("part")).alias("part"),
        F.struct(
            rank.alias("rank"),
            F.coalesce("line_offset", F.lit(0)).alias("line_offset"),
            F.xxhash64(*content).alias("hash"),
            who.alias("who"),
            *[F.col(name) for name in content if name != "reason"],
            F.coalesce("corrupt.reason", "reason").alias("reason"),
        ).alias("line"),
        F.when(damaged, 0).otherwise(bit).alias("bit"),
    )
    key = ("log", "raft_index", "part")
    # The repartition is the shuffle that the aggregation needs anyway: with it there is one sort.
    joined = (
        lines.repartition(*key)
        .groupBy(*key)
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
        for name in content
        if name != "json"
    ]
    return joined.select(
        *key,
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


def ordered(events: DataFrame) -> DataFrame:
    """With `seq`: a number per log, in the order of their earliest time; few rows are joined."""
    session = events.sparkSession
    logs = (
        events.where("kind is not null")
        .groupBy("log")
        .agg(F.min(F.coalesce("time_ms", F.lit(0))).alias("begins"))
        .limit(_LOGS_MAX + 1)
        .collect()
    )
    if len(logs) > _LOGS_MAX:
        raise ValueError(f"more than {_LOGS_MAX} logs: these are histories of many clusters")
    names = [row.log for row in sorted(logs, key=lambda row: (row.begins, row.log))]
    numbers = session.createDataFrame(
        [(name, number) for number, name in enumerate(names)], "log STRING, log_no INT"
    )
    return events.join(F.broadcast(numbers), "log", "left").withColumn(
        "seq", F.struct("log_no", "raft_index", "part")
    )


__all__ = ["merged", "ordered"]
