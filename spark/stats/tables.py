"""The tables of `topic_stats`, all made of the counts of `scan`; partitioned by UTC day.

All rows of a topic are made together, so that one task makes those of some topics and writes them.
`docs/spark-jobs.md` explains the columns. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.topic_name import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_TOPIC_PREFIX, SYSTEM_TOPICS
from batonmq.spark.read.columns import TIMESTAMP
from batonmq.spark.steps.tables import DAY_MS, grouped, percentiles, runs_of, sorted_by

_S, _L, _F = pa.string(), pa.int64(), pa.float64()
_SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
_QUEUE: Final = ["topic", "broker", "queue_id"]
_MESSAGES: Final = ("messages", "sum")
_BYTES: Final = ("bytes", "sum")


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


TABLES: Final[Mapping[str, pa.Schema]] = {
    "traffic": _schema(
        topic=_S, is_system=pa.bool_(), at=TIMESTAMP, messages=_L, bytes=_L,
        messages_per_s=_F, bytes_per_s=_F,
        **{f"size_{name}": _L for name in _SHARES}, **{f"delay_{name}_ms": _L for name in _SHARES},
        late=_L,
    ),
    "queues": _schema(
        topic=_S, broker=_S, queue_id=pa.int32(), at=TIMESTAMP, messages=_L, bytes=_L,
        first_offset=_L, last_offset=_L, first_store_at=TIMESTAMP,
    ),
    "hot_queues": _schema(
        topic=_S, broker=_S, queue_id=pa.int32(), messages=_L, bytes=_L, share=_F,
        even_share=_F, times_even=_F,
    ),
    "sizes": _schema(topic=_S, size=_L, messages=_L),
    "delays": _schema(topic=_S, delay_ms=_L, messages=_L),
    "consumer_lag": _schema(
        snapshot_at=TIMESTAMP, group=_S, topic=_S, broker=_S, queue_id=pa.int32(), offset=_L,
        max_offset=_L, lag=_L, oldest_store_at=TIMESTAMP, oldest_age_ms=_L,
    ),
}  # fmt: skip
"""Columns without those that are folders."""


def tables_of(
    sizes: pa.Table, delays: pa.Table, offsets: pa.Table, bucket_ms: int, snapshot_ms: int
) -> dict[str, pa.Table]:
    """The rows of all tables, of some topics: columns of TABLES and `day`, since 1970; times in ms.

    `sizes`, `delays`: the counts of `scan`; `offsets`: rows of the table of that name.
    """
    queues = grouped(
        sizes, [*_QUEUE, "bucket_ms"], messages=_MESSAGES, bytes=_BYTES,
        first_offset=("first_offset", "min"), last_offset=("last_offset", "max"),
        first_store_at=("first_store_ms", "min"),
    )  # fmt: skip
    queues = queues.rename_columns([n if n != "bucket_ms" else "at" for n in queues.column_names])
    queues = _with(queues, day=pc.divide(queues["at"], DAY_MS))
    return {
        "traffic": _traffic(sizes, delays, bucket_ms),
        "queues": queues,
        "hot_queues": _hot_queues(queues),
        "sizes": _values(sizes, "size"),
        "delays": _values(delays, "delay_ms"),
        "consumer_lag": _consumer_lag(offsets, queues, snapshot_ms),
    }


def _with(table: pa.Table, **columns: Any) -> pa.Table:
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def _traffic(sizes: pa.Table, delays: pa.Table, bucket_ms: int) -> pa.Table:
    """Per topic and bucket: volume, rates, percentiles."""
    keys = ["topic", "bucket_ms"]
    rows = grouped(sizes, keys, messages=_MESSAGES, bytes=_BYTES)
    rows = rows.join(grouped(delays, keys, late=("late", "sum")), keys)
    rows = rows.join(_percentiles(sizes, "size", "size_{}"), keys)
    rows = sorted_by(rows.join(_percentiles(delays, "delay_ms", "delay_{}_ms"), keys), *keys)
    rows = rows.set_column(rows.column_names.index("late"), "late", pc.fill_null(rows["late"], 0))
    return _with(
        rows,
        at=rows["bucket_ms"],
        day=pc.divide(rows["bucket_ms"], DAY_MS),
        is_system=pa.array([is_system(topic) for topic in rows["topic"].to_pylist()], pa.bool_()),
        messages_per_s=pc.divide(rows["messages"].cast(_F), bucket_ms / 1000),
        bytes_per_s=pc.divide(rows["bytes"].cast(_F), bucket_ms / 1000),
    )


def _percentiles(counts: pa.Table, value: str, name: str) -> pa.Table:
    """Of a value that is counted, by topic and bucket: columns `name` of each share."""
    keys = ["topic", "bucket_ms"]
    known = counts.filter(pc.is_valid(counts[value]))
    known = grouped(known, [*keys, value], messages=_MESSAGES)
    begins = runs_of(known, keys)
    values, counted = known[value].to_numpy(), known["messages"].to_numpy()
    found = percentiles(values, counted, list(_SHARES.values()), begins)
    named = {name.format(each): pa.array(of) for each, of in zip(_SHARES, found, strict=True)}
    return _with(known.select(keys).take(begins), **named)


def _hot_queues(queues: pa.Table) -> pa.Table:
    """Per queue and day its share of the topic's messages, against an even spread.

    The even share counts the queues that had a message on any day: a queue that was never written
    to is not in a log.
    """
    rows = grouped(queues, [*_QUEUE, "day"], messages=_MESSAGES, bytes=_BYTES)
    whole = grouped(rows, ["topic", "day"], whole=_MESSAGES)
    known = grouped(grouped(queues, _QUEUE), ["topic"], known=("queue_id", "count"))
    rows = rows.join(whole, ["topic", "day"]).join(known, ["topic"])
    rows = sorted_by(rows, *_QUEUE, "day")
    share = pc.divide(rows["messages"].cast(_F), rows["whole"].cast(_F))
    even = pc.divide(1.0, rows["known"].cast(_F))
    return _with(rows, share=share, even_share=even, times_even=pc.divide(share, even))


def _values(counts: pa.Table, name: str) -> pa.Table:
    """How many messages had each size or delay (`name`: size, delay_ms), per topic and day."""
    known = counts.filter(pc.is_valid(counts[name]))
    known = _with(known, day=pc.divide(known["bucket_ms"], DAY_MS))
    return grouped(known, ["topic", name, "day"], messages=_MESSAGES)


def _consumer_lag(offsets: pa.Table, queues: pa.Table, snapshot_ms: int) -> pa.Table:
    """How far each group was behind at the snapshot, and since when its oldest message waits.

    That message is located in the buckets of its queue: `oldest_store_at` is the time of the
    first message of its bucket, so it may be too early by less than one bucket. Null without lag,
    and where the log no longer has or not yet confirmed the message.
    """
    lag = pc.max_element_wise(offsets["lag"], 0, skip_nulls=False)
    rows = offsets.set_column(offsets.column_names.index("lag"), "lag", lag)
    # The first bucket that ends at or behind the offset holds the message that waits.
    places = queues.select([*_QUEUE, "last_offset", "first_store_at"])
    waiting = rows.join(places, _QUEUE, join_type="inner")
    behind = pc.greater_equal(waiting["last_offset"], waiting["offset"])
    waiting = waiting.filter(pc.and_(behind, pc.greater(waiting["lag"], 0)))
    keys = ["group", *_QUEUE]
    oldest = grouped(waiting, keys, oldest_store_at=("first_store_at", "min"))
    rows = sorted_by(rows.join(oldest, keys), *keys)
    age = pc.max_element_wise(
        pc.subtract(snapshot_ms, rows["oldest_store_at"]), 0, skip_nulls=False
    )
    snapshot = pa.repeat(snapshot_ms, len(rows))
    day = pa.repeat(snapshot_ms // DAY_MS, len(rows))
    return _with(rows, snapshot_at=snapshot, oldest_age_ms=age, day=day)


def is_system(topic: str) -> bool:
    """Topics of the broker itself, its retries and dead letters."""
    return topic in SYSTEM_TOPICS or topic.startswith(
        (SYSTEM_TOPIC_PREFIX, RETRY_PREFIX, DLQ_PREFIX)
    )
