"""The tables of `topic_stats`, all made of the counts of `scan`; partitioned by UTC day.

| table | one row per | columns |
|---|---|---|
| `traffic` | topic, bucket | `at`, `is_system`, `messages`, `bytes`, `messages_per_s`, `bytes_per_s`, `size_p50`, `size_p95`, `size_p99`, `size_max`, `delay_p50_ms`, `delay_p95_ms`, `delay_p99_ms`, `delay_max_ms`, `late` (stored before they were born: clocks) |
| `queues` | topic, broker, queue, bucket | `at`, `messages`, `bytes`, `first_offset`, `last_offset`, `first_store_at` |
| `hot_queues` | topic, broker, queue, day | `messages`, `bytes`, `share`, `even_share`, `times_even` |
| `sizes`, `delays` | topic, value, day | `size` (bytes) or `delay_ms`, `messages` |
| `consumer_lag` | snapshot, group, topic, broker, queue | `snapshot_at`, `offset`, `max_offset`, `lag`, `oldest_store_at`, `oldest_age_ms` |
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq.spark.stats.replicas import Sources
from batonmq.spark.stats.scan import group_of, is_system, not_below_zero

TABLES: Final = ("traffic", "queues", "hot_queues", "sizes", "delays", "consumer_lag")
_SHARES: Final = "array(0.5D, 0.95D, 0.99D, 1.0D)"


def traffic(counts: DataFrame, bucket_ms: int) -> DataFrame:
    """Per topic and bucket: volume, rates, percentiles."""
    sizes = (
        counts.where("is_delay = 0")
        .groupBy("topic", "bucket_ms")
        .agg(
            F.sum("messages").alias("messages"),
            F.sum("bytes").alias("bytes"),
            _percentiles("size").alias("s"),
        )
    )
    delays = (
        counts.where("is_delay = 1")
        .groupBy("topic", "bucket_ms")
        .agg(_percentiles("delay_ms").alias("d"), F.sum("late").alias("late"))
    )
    seconds = bucket_ms / 1000
    return sizes.join(delays, ["topic", "bucket_ms"], "left").select(
        "topic",
        is_system(F.col("topic")).alias("is_system"),
        _at("bucket_ms", "at"),
        "messages",
        "bytes",
        (F.col("messages") / seconds).alias("messages_per_s"),
        (F.col("bytes") / seconds).alias("bytes_per_s"),
        *(_nth("s", n, f"size_{name}") for n, name in enumerate(("p50", "p95", "p99", "max"))),
        *(_nth("d", n, f"delay_{name}_ms") for n, name in enumerate(("p50", "p95", "p99", "max"))),
        "late",
        _day("bucket_ms"),
    )


def queues(counts: DataFrame) -> DataFrame:
    """Per queue and bucket."""
    return (
        counts.where("is_delay = 0")
        .groupBy("topic", "broker", "queue_id", "bucket_ms")
        .agg(
            F.sum("messages").alias("messages"),
            F.sum("bytes").alias("bytes"),
            F.min("first_offset").alias("first_offset"),
            F.max("last_offset").alias("last_offset"),
            F.min("first_store_ms").alias("first_store_ms"),
        )
        .select(
            "topic",
            "broker",
            "queue_id",
            _at("bucket_ms", "at"),
            "messages",
            "bytes",
            "first_offset",
            "last_offset",
            _at("first_store_ms", "first_store_at"),
            _day("bucket_ms"),
        )
    )


def hot_queues(queue_rows: DataFrame) -> DataFrame:
    """Per queue and day its share of the topic's messages, against an even spread.

    The even share counts the queues that had a message on any day: a queue that was never written
    to is not in a log.
    """
    whole = queue_rows.groupBy("topic", "day").agg(F.sum("messages").alias("of"))
    known = queue_rows.groupBy("topic").agg(F.count_distinct("broker", "queue_id").alias("queues"))
    even = 1 / F.col("queues")
    share = F.col("messages") / F.col("of")
    return (
        queue_rows.groupBy("topic", "broker", "queue_id", "day")
        .agg(F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes"))
        .join(whole, ["topic", "day"])
        .join(known, "topic")
        .select(
            "topic",
            "broker",
            "queue_id",
            "messages",
            "bytes",
            share.alias("share"),
            even.alias("even_share"),
            (share / even).alias("times_even"),
            "day",
        )
    )


def values(counts: DataFrame, name: str) -> DataFrame:
    """How many messages had each size or delay (`name`: size, delay_ms), per topic and day."""
    return (
        counts.where(f"is_delay = {int(name == 'delay_ms')} and {name} is not null")
        .groupBy("topic", name, _day("bucket_ms"))
        .agg(F.sum("messages").alias("messages"))
        .select("topic", name, "messages", "day")
    )


def consumer_lag(
    session: SparkSession,
    sources: Sources,
    topics: Sequence[str],
    queue_rows: DataFrame,
    snapshot: datetime,
) -> DataFrame:
    """How far each group was behind at `snapshot`, and since when its oldest message waits.

    That message is located in the buckets of its queue: `oldest_store_at` is the time of the
    first message of its bucket, so it may be too early by less than one bucket. Null without lag,
    and where the log no longer has or not yet confirmed the message.
    """
    offsets = (
        session.read.format("batonmq")
        .option("paths", json.dumps(sources.patterns))
        .option("table", "offsets")
        .load()
        .where(F.col("store").isin([each.store for each in sources.chosen]))
        .select(
            "group",
            "topic",
            group_of(F.col("store"), sources).alias("broker"),
            "queue_id",
            "offset",
            "max_offset",
            not_below_zero(F.col("lag")).alias("lag"),
        )
    )
    if topics:
        offsets = offsets.where(F.col("topic").isin(list(topics)))
    places = queue_rows.select("topic", "broker", "queue_id", "last_offset", "first_store_at")
    # The first bucket that ends at or behind the offset holds the message that waits.
    waiting = (
        offsets.where("lag > 0")
        .join(places, ["topic", "broker", "queue_id"])
        .where("last_offset >= offset")
        .groupBy("group", "topic", "broker", "queue_id")
        .agg(F.min("first_store_at").alias("oldest_store_at"))
    )
    at = F.lit(snapshot).cast("timestamp")
    age = F.unix_millis(at) - F.unix_millis("oldest_store_at")
    return offsets.join(waiting, ["group", "topic", "broker", "queue_id"], "left").select(
        at.alias("snapshot_at"), "group", "topic", "broker", "queue_id", "offset", "max_offset",
        "lag", "oldest_store_at", not_below_zero(age).alias("oldest_age_ms"),
        F.to_date(at).alias("day"),
    )  # fmt: skip


def _percentiles(name: str) -> Column:
    """p50, p95, p99 and the largest of values that are counted."""
    return F.expr(f"percentile({name}, {_SHARES}, messages)")


def _nth(name: str, index: int, alias: str) -> Column:
    return F.round(F.get(F.col(name), index)).cast("long").alias(alias)


def _at(name: str, alias: str) -> Column:
    return F.timestamp_millis(F.col(name)).alias(alias)


def _day(name: str) -> Column:
    return F.to_date(F.timestamp_millis(F.col(name))).alias("day")


__all__ = ["TABLES", "consumer_lag", "hot_queues", "queues", "traffic", "values"]
