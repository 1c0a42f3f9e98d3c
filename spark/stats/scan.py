"""The one pass over the log: a small table of counts, from which all statistics are made.

Rows of the log become counts by queue, bucket of time and size, and by topic, bucket and delay.
Sizes and delays are kept to six binary digits (below 64 exactly, else at most 1/32 too small), so
there are at most some hundred of each, however many messages there are: memory and what is shuffled
do not grow with the log but with queues x buckets. Percentiles of counts are exact; so a percentile
of sizes or delays is at most 3.2 % below the true one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq.protocol.topic_name import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_TOPIC_PREFIX, SYSTEM_TOPICS
from batonmq.spark.stats.replicas import Sources

COLUMNS: Final = "store,topic,queue_id,queue_offset,size,born_at,store_at"
_DIGITS: Final = 6


def read_messages(
    session: SparkSession,
    sources: Sources,
    topics: Sequence[str],
    *,
    mode: str,
    unconfirmed: bool = False,
) -> DataFrame:
    """The messages of the chosen stores, without bodies; `topics` empty: all of them."""

    frame = (
        session.read.format("batonmq")
        .option("paths", json.dumps(sources.patterns))
        .option("table", "messages")
        .option("columns", COLUMNS)
        .option("mode", mode)
        .option("unconfirmed", str(unconfirmed).lower())
        .load()
        .where(F.col("store").isin([each.store for each in sources.chosen]))  # not even planned
    )
    return frame.where(F.col("topic").isin(list(topics))) if topics else frame


def counted(messages: DataFrame, bucket_ms: int, sources: Sources) -> DataFrame:
    """Counts of two kinds (`is_delay` is which); `broker` is the name of the group:

    0: broker, topic, queue_id, bucket_ms, size -> messages, bytes, first_offset, last_offset,
    first_store_ms; 1: topic, bucket_ms, delay_ms -> messages, late (clocks: born after stored).
    """
    store_ms = F.unix_millis("store_at")
    delay_ms = store_ms - F.unix_millis("born_at")
    prepared = messages.where("store_at is not null").select(
        "store",
        "topic",
        "queue_id",
        (store_ms - store_ms % bucket_ms).alias("bucket_ms"),
        coarse(F.col("size").cast("long")).alias("size"),
        coarse(not_below_zero(delay_ms)).alias("delay_ms"),
        F.col("size").cast("long").alias("bytes"),
        "queue_offset",
        store_ms.alias("store_ms"),
        (delay_ms < 0).alias("late"),
    )
    sets = [
        [F.col(name) for name in ("store", "topic", "queue_id", "bucket_ms", "size")],
        [F.col(name) for name in ("topic", "bucket_ms", "delay_ms")],
    ]
    counts = prepared.groupingSets(
        sets, "store", "topic", "queue_id", "bucket_ms", "size", "delay_ms"
    ).agg(
        F.grouping("size").cast("int").alias("is_delay"),
        F.count("*").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.min("queue_offset").alias("first_offset"),
        F.max("queue_offset").alias("last_offset"),
        F.min("store_ms").alias("first_store_ms"),
        F.count_if("late").alias("late"),
    )
    return counts.withColumn("broker", group_of(F.col("store"), sources)).drop("store")


def group_of(store: Column, sources: Sources) -> Column:
    """The name of the broker group of a store: one store of each is read."""
    pairs = [F.lit(text) for each in sources.chosen for text in (each.store, each.broker)]
    return F.element_at(F.create_map(*pairs), store)


def coarse(value: Column) -> Column:
    """The value with its six highest binary digits, the others zero; null stays null."""
    # log2 of a whole power may round below it: the length of the binary text is exact.
    surplus = F.greatest(F.length(F.bin(value)) - _DIGITS, F.lit(0))
    return F.call_function("shiftleft", F.call_function("shiftright", value, surplus), surplus)


def not_below_zero(value: Column) -> Column:
    """Null stays null: `greatest` alone would make it 0."""
    return F.when(value < 0, F.lit(0)).otherwise(value)


def is_system(topic: Column) -> Column:
    """Topics of the broker itself, its retries and dead letters."""
    return (
        topic.isin(sorted(SYSTEM_TOPICS))
        | topic.startswith(SYSTEM_TOPIC_PREFIX)
        | topic.startswith(RETRY_PREFIX)
        | topic.startswith(DLQ_PREFIX)
    )


__all__ = [
    "COLUMNS",
    "coarse",
    "counted",
    "group_of",
    "is_system",
    "not_below_zero",
    "read_messages",
]
