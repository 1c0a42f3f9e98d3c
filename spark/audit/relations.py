"""What can only be seen across ranges of the log, as Spark queries over the rows of a scan.

Shuffled are: hashes of unique keys with log offsets (duplicates), one row per queue and range
(gaps), and findings themselves, which are few. Bodies and whole messages never are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from batonmq.protocol.topic_name import (
    DLQ_PREFIX,
    OFFSET_MOVED_TOPIC,
    OLD_SYSTEM_TOPIC_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_TOPIC_PREFIX,
)
from batonmq.spark.audit.findings import (
    BEHIND,
    FINDING,
    FINDING_NAMES,
    INFO,
    MESSAGE,
    QUEUE,
    Finding,
)
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.audit.sequence import step_finding

#: Topics in which keys repeat by design: retries, delays, halves of transactions.
REPEATING_TOPICS: Final = (
    RETRY_PREFIX, DLQ_PREFIX, SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX,
    OFFSET_MOVED_TOPIC,
)  # fmt: skip
_BREAKS_MAX: Final = 10_000
_LONGS: Final = ("queue_offset", "physical_offset", "size", "epoch")


def finding_frame(source: DataFrame, **columns: Column | str | None) -> DataFrame:
    """Rows of the table of findings: `columns`, and of the others those that `source` has."""
    made = []
    for name in FINDING_NAMES:
        if name in columns:
            value = columns[name]
            column = value if isinstance(value, Column) else F.lit(value)
        elif name in source.columns:
            column = F.col(name)
        else:
            column = F.lit(None)
        made.append(column.cast(_type(name)).alias(name))
    return source.select(*made)


def finding_schema() -> StructType:
    """The columns of the table of findings, for Spark."""
    return StructType([StructField(name, _spark_type(name)) for name in FINDING_NAMES])


def _type(name: str) -> str:
    return str(_spark_type(name).simpleString())


def _spark_type(name: str) -> Any:
    if name == "replicas":
        return ArrayType(StringType())
    if name == "queue_id":
        from pyspark.sql.types import IntegerType

        return IntegerType()
    return LongType() if name in _LONGS else StringType()


def scan_findings(rows: DataFrame, kinds: Mapping[str, int]) -> DataFrame:
    """The findings of the ranges; what is missing here and extra there is one, `reordered`.

    `kinds`: how many there are of each, so that nothing is paired where nothing can be.
    """
    found = rows.where(F.col("part") == FINDING)
    if kinds.get("queue_wrong"):
        # A unit that leads into another range is seen from both.
        place = ["group", "replicas", "topic", "queue_id", "queue_offset"]
        wrong = F.col("kind") == "queue_wrong"
        found = found.where(~wrong).union(found.where(wrong).dropDuplicates(place))
    if not kinds.get("missing") or not kinds.get("extra"):
        return finding_frame(found)
    key = ["group", "replicas", "identity", "severity", "n"]
    window = Window.partitionBy("group", "replicas", "identity", "severity", "kind")
    is_pair = F.col("kind").isin("missing", "extra") & F.col("identity").isNotNull()
    numbered = found.where(is_pair).withColumn(
        "n", F.row_number().over(window.orderBy("physical_offset"))
    )
    missing = numbered.where(F.col("kind") == "missing")
    extra = numbered.where(F.col("kind") == "extra")
    there = extra.select(
        *key,
        F.col("physical_offset").alias("there"),
        F.col("queue_id").alias("there_queue"),
        F.col("queue_offset").alias("there_offset"),
    )
    moved = missing.join(there, key)
    detail = F.concat(
        F.lit("in this replica it lies at "), "there", F.lit(", queue "), "there_queue",
        F.lit(" offset "), "there_offset",
    )  # fmt: skip
    rest = [
        side.join(moved.select(*key), key, "left_anti").select(*found.columns)
        for side in (missing, extra)
    ]
    return (
        finding_frame(found.where(~is_pair))
        .union(finding_frame(moved, kind="reordered", detail=detail))
        .union(finding_frame(rest[0]))
        .union(finding_frame(rest[1]))
    )


def queue_breaks(rows: DataFrame, groups: Mapping[str, ReplicaGroup]) -> tuple[list[Finding], bool]:
    """(findings, all) where a range does not continue a queue where the one before ended, or a
    queue does not begin with 0 though the log does, of which nothing can have expired.

    At most 10,000 of them; `all`: whether there are no more.
    """
    window = Window.partitionBy("group", "topic", "queue_id").orderBy("physical_offset")
    whole = [group.name for group in groups.values() if not group.first]
    before = F.lag("last_offset").over(window)
    steps = (
        rows.where(F.col("part") == QUEUE)
        .select(
            "group",
            "topic",
            "queue_id",
            "queue_offset",
            "physical_offset",
            F.coalesce(before, F.when(F.col("group").isin(whole), -1)).alias("before"),
        )
        .where(F.col("before").isNotNull() & (F.col("queue_offset") != F.col("before") + 1))
        .limit(_BREAKS_MAX + 1)
        .collect()
    )
    findings = [
        step_finding(
            groups[row.group], row.topic, row.queue_id, row.before, row.queue_offset,
            row.physical_offset,
        )
        for row in steps[:_BREAKS_MAX]
    ]  # fmt: skip
    return findings, len(steps) <= _BREAKS_MAX


def queues_behind(rows: DataFrame) -> DataFrame:
    """Queues that do not reach the end of their confirmed messages: they are made from the log."""
    behind = (
        rows.where(F.col("part") == BEHIND)
        .groupBy("group", "replicas", "topic", "queue_id")
        .agg(
            F.sum("amount").alias("amount"),
            F.min("queue_offset").alias("queue_offset"),
            F.max("last_offset").alias("reach"),
        )
    )
    detail = F.concat(
        F.lit("the consume queue ends at "), "reach", F.lit("; "), "amount",
        F.lit(" confirmed messages have no unit yet"),
    )  # fmt: skip
    return finding_frame(behind, severity=INFO, kind="queue_behind", detail=detail)


def duplicates(rows: DataFrame) -> DataFrame:
    """Every place but the first of a unique key that is in a topic more than once.

    Only (hash, log offset) of each message is shuffled; the few that repeat are then looked up.
    """
    agreed = (F.col("part") == MESSAGE) & (F.col("amount") == 1)
    messages = rows.where(agreed & F.col("unique_key").isNotNull())
    for prefix in REPEATING_TOPICS:
        messages = messages.where(~F.col("topic").startswith(prefix))
    hashed = messages.withColumn("hash", F.xxhash64("topic", "unique_key"))
    repeated = (
        hashed.groupBy("group", "hash")
        .agg(F.min("physical_offset").alias("low"), F.max("physical_offset").alias("high"))
        .where(F.col("low") < F.col("high"))
        .select("group", "hash")
    )
    places = hashed.join(repeated, ["group", "hash"])
    window = Window.partitionBy("group", "topic", "unique_key")
    first = F.min(F.struct("physical_offset", "queue_id", "queue_offset")).over(window)
    again = places.withColumn("first", first).where(
        F.col("physical_offset") > F.col("first.physical_offset")
    )
    detail = F.concat(
        F.lit("first at "), "first.physical_offset", F.lit(", queue "), "first.queue_id",
        F.lit(" offset "), "first.queue_offset",
    )  # fmt: skip
    return finding_frame(again.drop("replicas"), severity=INFO, kind="duplicated", detail=detail)


__all__ = [
    "REPEATING_TOPICS",
    "duplicates",
    "finding_frame",
    "finding_schema",
    "queue_breaks",
    "queues_behind",
    "scan_findings",
]
