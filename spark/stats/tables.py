"""The tables of `topic_stats`, all made of the counts of `scan`; partitioned by UTC day.

All rows of a topic are made together, so that one task makes those of some topics and writes them.
`docs/spark-jobs.md` explains the columns. Free of Spark.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime
from itertools import groupby
from typing import Any, Final

import pyarrow as pa

from batonmq.protocol.topic_name import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_TOPIC_PREFIX, SYSTEM_TOPICS
from batonmq.spark.read.arrow_parts import TIMESTAMP

_S, _L, _F = pa.string(), pa.int64(), pa.float64()
_DAY_MS: Final = 86_400_000
_SHARES: Final = (0.5, 0.95, 0.99, 1.0)
_NAMES: Final = ("p50", "p95", "p99", "max")


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


TABLES: Final[Mapping[str, pa.Schema]] = {
    "traffic": _schema(
        topic=_S, is_system=pa.bool_(), at=TIMESTAMP, messages=_L, bytes=_L,
        messages_per_s=_F, bytes_per_s=_F,
        **{f"size_{name}": _L for name in _NAMES}, **{f"delay_{name}_ms": _L for name in _NAMES},
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
Row = dict[str, Any]


def tables_of(
    sizes: Iterable[Row],
    delays: Iterable[Row],
    offsets: Iterable[Row],
    bucket_ms: int,
    snapshot_ms: int,
) -> dict[str, list[Row]]:
    """The rows of all tables, of some topics, with their `day`. `sizes`, `delays`: the counts of
    `scan`; `offsets`: rows of the table of that name.
    """
    sizes, delays = list(sizes), list(delays)
    queues = list(_queues(sizes))
    return {
        "traffic": list(_traffic(sizes, delays, bucket_ms)),
        "queues": queues,
        "hot_queues": list(_hot_queues(queues)),
        "sizes": list(_values(sizes, "size")),
        "delays": list(_values(delays, "delay_ms")),
        "consumer_lag": list(_consumer_lag(offsets, queues, snapshot_ms)),
    }


def _grouped(rows: Iterable[Row], *names: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    for found, theirs in groupby(sorted(rows, key=key), key):
        yield found, list(theirs)


def _sum(rows: Iterable[Row], name: str) -> int:
    return sum(row[name] for row in rows)


def _traffic(sizes: list[Row], delays: list[Row], bucket_ms: int) -> Iterator[Row]:
    """Per topic and bucket: volume, rates, percentiles."""
    late = dict(_grouped(delays, "topic", "bucket_ms"))
    seconds = bucket_ms / 1000
    for (topic, at), rows in _grouped(sizes, "topic", "bucket_ms"):
        theirs = late.get((topic, at), [])
        messages, size = _sum(rows, "messages"), _sum(rows, "bytes")
        of_sizes = _percentiles(rows, "size")
        of_delays = _percentiles(theirs, "delay_ms")
        yield {
            "topic": topic, "is_system": is_system(topic), "at": at, "messages": messages,
            "bytes": size, "messages_per_s": messages / seconds, "bytes_per_s": size / seconds,
            **{f"size_{name}": of_sizes[n] for n, name in enumerate(_NAMES)},
            **{f"delay_{name}_ms": of_delays[n] for n, name in enumerate(_NAMES)},
            "late": _sum(theirs, "late"), "day": at // _DAY_MS,
        }  # fmt: skip


def _percentiles(rows: Iterable[Row], name: str) -> list[int | None]:
    counts: Counter[int] = Counter()
    for row in rows:
        if row[name] is not None:
            counts[row[name]] += row["messages"]
    found = percentiles(sorted(counts.items()), _SHARES)
    return [None] * len(_SHARES) if found is None else [int(value + 0.5) for value in found]


def percentiles(
    counted: Sequence[tuple[float, int]], shares: Sequence[float]
) -> list[float] | None:
    """Of values that are counted, ascending; between two of them by distance. None: no value."""
    total = sum(count for _, count in counted)
    if not total:
        return None
    found = []
    for share in shares:
        place = (total - 1) * share
        low, high = _nth(counted, int(place)), _nth(counted, min(int(place) + 1, total - 1))
        found.append(low + (high - low) * (place - int(place)))
    return found


def _nth(counted: Sequence[tuple[float, int]], place: int) -> float:
    for value, count in counted:
        if place < count:
            return value
        place -= count
    return counted[-1][0]


def _queues(sizes: list[Row]) -> Iterator[Row]:
    """Per queue and bucket."""
    for key, rows in _grouped(sizes, "topic", "broker", "queue_id", "bucket_ms"):
        topic, broker, queue_id, at = key
        yield {
            "topic": topic, "broker": broker, "queue_id": queue_id, "at": at,
            "messages": _sum(rows, "messages"), "bytes": _sum(rows, "bytes"),
            "first_offset": min(row["first_offset"] for row in rows),
            "last_offset": max(row["last_offset"] for row in rows),
            "first_store_at": min(row["first_store_ms"] for row in rows), "day": at // _DAY_MS,
        }  # fmt: skip


def _hot_queues(queues: list[Row]) -> Iterator[Row]:
    """Per queue and day its share of the topic's messages, against an even spread.

    The even share counts the queues that had a message on any day: a queue that was never written
    to is not in a log.
    """
    whole: Counter[tuple[str, int]] = Counter()
    known: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for row in queues:
        whole[row["topic"], row["day"]] += row["messages"]
        known[row["topic"]].add((row["broker"], row["queue_id"]))
    for key, rows in _grouped(queues, "topic", "broker", "queue_id", "day"):
        topic, broker, queue_id, day = key
        messages = _sum(rows, "messages")
        share, even = messages / whole[topic, day], 1 / len(known[topic])
        yield {
            "topic": topic, "broker": broker, "queue_id": queue_id, "messages": messages,
            "bytes": _sum(rows, "bytes"), "share": share, "even_share": even,
            "times_even": share / even, "day": day,
        }  # fmt: skip


def _values(counts: list[Row], name: str) -> Iterator[Row]:
    """How many messages had each size or delay (`name`: size, delay_ms), per topic and day."""
    known = ({**row, "day": row["bucket_ms"] // _DAY_MS} for row in counts if row[name] is not None)
    for (topic, value, day), rows in _grouped(known, "topic", name, "day"):
        yield {"topic": topic, name: value, "messages": _sum(rows, "messages"), "day": day}


def _consumer_lag(offsets: Iterable[Row], queues: list[Row], snapshot_ms: int) -> Iterator[Row]:
    """How far each group was behind at the snapshot, and since when its oldest message waits.

    That message is located in the buckets of its queue: `oldest_store_at` is the time of the
    first message of its bucket, so it may be too early by less than one bucket. Null without lag,
    and where the log no longer has or not yet confirmed the message.
    """
    places: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in queues:
        places[row["topic"], row["broker"], row["queue_id"]].append(row)
    for row in offsets:
        lag = None if row["lag"] is None else max(0, row["lag"])
        place = row["topic"], row["broker"], row["queue_id"]
        # The first bucket that ends at or behind the offset holds the message that waits.
        waiting = [
            each["first_store_at"]
            for each in places.get(place, ())
            if lag and each["last_offset"] >= row["offset"]
        ]
        oldest = min(waiting, default=None)
        yield {
            **row, "snapshot_at": snapshot_ms, "lag": lag, "oldest_store_at": oldest,
            "oldest_age_ms": None if oldest is None else max(0, snapshot_ms - oldest),
            "day": snapshot_ms // _DAY_MS,
        }  # fmt: skip


def is_system(topic: str) -> bool:
    """Topics of the broker itself, its retries and dead letters."""
    return topic in SYSTEM_TOPICS or topic.startswith(
        (SYSTEM_TOPIC_PREFIX, RETRY_PREFIX, DLQ_PREFIX)
    )


def day_text(day: int) -> str:
    """The name of a day that counts from 1970."""
    return date.fromordinal(719_163 + day).isoformat()


def table_of(name: str, rows: Sequence[Row]) -> pa.Table:
    """Rows of a table, times in ms, as its columns."""
    arrays = []
    for column, kind in zip(TABLES[name].names, TABLES[name].types, strict=True):
        values = [row[column] for row in rows]
        if kind == TIMESTAMP:
            arrays.append(pa.array(values, pa.timestamp("ms", "UTC")).cast(kind))
        else:
            arrays.append(pa.array(values, kind))
    return pa.Table.from_arrays(arrays, schema=TABLES[name])


def moment(ms: int) -> str:
    """In UTC, as summaries have it."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
