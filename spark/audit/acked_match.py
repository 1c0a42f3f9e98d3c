"""Which message each entry of an acknowledged list is: by its place, else by its key or its id.

By place is one join, and the only one in which whole logs and whole lists are moved; its result
keeps only what is remarkable. What is not found there is looked up in one more pass over the
messages, which are filtered by the wanted keys before anything is moved.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from batonmq.protocol.topic_name import OLD_SYSTEM_TOPIC_PREFIX, SCHEDULE_TOPIC, SYSTEM_TOPIC_PREFIX
from batonmq.spark.audit.acked_list import is_placed
from batonmq.spark.audit.findings import MESSAGE

PLACE: Final = ("group", "topic", "queue_id", "queue_offset")
#: What was found for an entry; UNLISTED are messages without one.
FOUND: Final = "found"
UNSEEN: Final = "unseen"
UNLISTED: Final = "unlisted"
#: Up to so many wanted entries are sent to every executor.
BROADCAST_MAX: Final = 200_000
_COLUMNS: Final = (
    *PLACE, "unique_key", "batch_key", "physical_offset", "size", "epoch", "have", "lack",
    "body_crc", "amount",
)  # fmt: skip
_SHOWN: Final = ("topic", "queue_id", "queue_offset", "size", "epoch", "body_crc")
#: Here messages wait for their time or their commit; the answer names their own topic all the same.
_WAITING: Final = (SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX)


def messages_of(rows: DataFrame) -> DataFrame:
    """The messages of a scan; their columns begin with m_."""
    columns = (F.col(name).alias(f"m_{name}") for name in _COLUMNS)
    return rows.where(F.col("part") == MESSAGE).select(*columns)


def at_places(entries: DataFrame, messages: DataFrame, facts: DataFrame) -> DataFrame:
    """Entries with a place, against the messages that the replicas agree on in their topics.

    Rows with something to report, and `case`: FOUND where a replica lacks it, its body is
    another, or no replica confirms it; UNSEEN; UNLISTED. `facts`: of each `m_group` where its
    log is `confirm`ed to.
    """
    topics = entries.where(F.col("group").isNotNull() & F.col("topic").isNotNull())
    topics = topics.select("group", "topic").distinct()
    there = [F.col("m_group") == F.col("group"), F.col("m_topic") == F.col("topic")]
    theirs = messages.where("m_amount = 1").join(F.broadcast(topics), there, "left_semi")
    placed = entries.where(is_placed() & F.col("group").isNotNull())
    same = [F.col(name) == F.col(f"m_{name}") for name in PLACE]
    key = F.col("unique_key")
    same.append(key.isNull() | (key == F.col("m_unique_key")) | (key == F.col("m_batch_key")))
    joined = placed.withColumn("is_entry", F.lit(True)).join(theirs, same, "full_outer")
    case = (
        F.when(F.col("is_entry").isNull(), UNLISTED)
        .when(F.col("m_physical_offset").isNull(), UNSEEN)
        .otherwise(FOUND)
    )
    remarkable = (F.col("m_lack") != 0) | other_body() | is_unconfirmed()
    joined = joined.withColumn("case", case).drop("is_entry")
    joined = joined.join(F.broadcast(facts), "m_group", "left")
    return joined.where((F.col("case") != FOUND) | F.coalesce(remarkable, F.lit(False)))


def other_body() -> Column:
    """Whether the body that was sent is not the one of the message; false if that is unknown."""
    sent = F.col("body_crc").bitwiseAND(0x7FFFFFFF)
    return F.coalesce(sent != F.col("m_body_crc"), F.lit(False))


def is_unconfirmed() -> Column:
    """Whether no replica confirms the message."""
    end = F.col("m_physical_offset") + F.col("m_size")
    return F.coalesce(end > F.col("confirm"), F.lit(False))


def looked_up(entries: DataFrame, messages: DataFrame, count: int) -> DataFrame:
    """Entries with the first message of their key or id, or a doubtful one at their place.

    `doubt`: 1 if only replicas have it that the others deny; null if there is none. Copies count
    together. `id_offset`: the log offset that the message id names. `count`: how many entries.
    """
    has_key, text = F.col("unique_key").isNotNull(), F.lit("\0")
    placed = is_placed() & F.col("group").isNotNull()
    by_id = ~has_key & ~placed
    last = F.conv(F.substring("msg_id", -16, 16), 16, 10).try_cast("bigint")
    entries = entries.withColumn("id_offset", F.when(by_id, last))
    link = (
        F.when(has_key, F.concat(F.lit("k"), "unique_key"))
        .when(placed, F.concat_ws("\0", F.lit("p"), *PLACE))
        .otherwise(F.concat(F.lit("i"), "group", text, F.col("id_offset").cast("string")))
    )
    entries = entries.withColumn("link", link)
    wanted = entries.where(F.col("link").isNotNull()).select("link").distinct()
    if count <= BROADCAST_MAX:
        wanted = F.broadcast(wanted)
    links = [
        F.concat(F.lit("k"), "m_unique_key"),
        F.concat(F.lit("k"), "m_batch_key"),
        F.concat(F.lit("i"), "m_group", text, F.col("m_physical_offset").cast("string")),
        F.when(
            F.col("m_amount") == 0,
            F.concat_ws("\0", F.lit("p"), *(f"m_{name}" for name in PLACE)),
        ),
    ]
    first = F.struct(
        (1 - F.col("m_amount")).alias("doubt"),
        "m_physical_offset",
        *(f"m_{name}" for name in _SHOWN),
    )
    copies = (
        messages.withColumn("m_link", F.explode(F.array_compact(F.array(*links))))
        .join(wanted, F.col("m_link") == F.col("link"), "left_semi")
        .groupBy("m_group", "m_link")
        .agg(
            F.min(first).alias("first"),
            F.bit_or("m_have").alias("m_have"),
            F.bit_and("m_lack").alias("m_lack"),
        )
        .select("m_group", "m_link", "m_have", "m_lack", "first.*")
    )
    if count <= BROADCAST_MAX:
        copies = F.broadcast(copies)
    same = F.col("link") == F.col("m_link")
    in_group = F.col("group").isNull() | (F.col("group") == F.col("m_group"))
    return entries.join(copies, [same, in_group], "left").drop("link", "m_link")


def judged(matched: DataFrame, kept: DataFrame, first: int) -> DataFrame:
    """`looked_up` entries with their `outcome`, and whether they lie `elsewhere`.

    `kept`: where queues begin in the log. `first`: where the log of a group begins that is not
    known. Columns `first` and `confirm` of an entry's group may be null with it.
    """
    log_first = F.coalesce("first", F.lit(first))
    matched = matched.join(F.broadcast(kept), ["group", "topic", "queue_id"], "left")
    nameless = F.col("group").isNull() & F.col("unique_key").isNull()
    id_old = F.coalesce(F.col("id_offset") < log_first, F.lit(False))
    may_have_expired = F.col("kept_from").isNull() | (F.col("queue_offset") < F.col("kept_from"))
    outcome = (
        F.when(F.col("doubt") == 0, FOUND)
        .when(F.col("doubt") == 1, "lost")
        .when(nameless, "unchecked")
        .when(log_first == 0, "lost")
        .when(id_old, "expired")
        .when(F.col("id_offset").isNotNull(), "lost")
        .when(F.col("queue_offset").isNull() | F.col("kept_from").isNull(), "unchecked")
        .when(may_have_expired, "expired")
        .otherwise("lost")
    )
    differs = reduce(
        Column.__or__, [F.col(name) != F.col(f"m_{name}") for name in PLACE if name != "group"]
    )
    waits = reduce(Column.__or__, [F.col("m_topic").startswith(name) for name in _WAITING])
    # A copy for a retry does not prove a move of the message itself, unless that may have expired.
    moved = differs & ~waits & ((log_first == 0) | ~may_have_expired)
    elsewhere = (F.col("doubt") == 0) & F.col("queue_offset").isNotNull() & moved
    return matched.withColumn("outcome", outcome).withColumn(
        "elsewhere", F.coalesce(elsewhere, F.lit(False))
    )


__all__ = [
    "BROADCAST_MAX",
    "FOUND",
    "PLACE",
    "UNLISTED",
    "UNSEEN",
    "at_places",
    "is_unconfirmed",
    "judged",
    "looked_up",
    "messages_of",
    "other_body",
]
