"""The tables of `topic_stats`, each a query; `docs/spark-jobs.md` explains their columns.

They read three views: `messages` and `offsets` of the data source, and `sources`, the chosen stores
(store, broker). Texts are for `steps.sql`: both of its engines read them.
"""

from collections.abc import Mapping
from typing import Final

from batonmq.protocol.topic_name import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_TOPIC_PREFIX, SYSTEM_TOPICS

MESSAGE_COLUMNS: Final = "store,topic,queue_id,queue_offset,size,born_at,store_at"
_DIGITS: Final = 6
"""Sizes and delays are grouped by so many binary digits: exact below 64, else at most 1/32 too
small. So a histogram has some hundred rows, however many messages there are."""


def _coarse(value: str) -> str:
    """A value >= 0 with its highest binary digits, the others zero."""
    surplus = f"CAST(greatest(length(bin({value})) - {_DIGITS}, 0) AS INT)"
    return f"shiftleft(shiftright({value}, {surplus}), {surplus})"


def _share(value: str, part: str) -> str:
    """The least value that so large a part does not exceed; null without any."""
    return f"CAST(percentile_disc({part}) WITHIN GROUP (ORDER BY {value}) AS BIGINT)"


def _is_system(topic: str) -> str:
    """Whether it is a topic of the broker itself, of retries or dead letters."""
    names = ", ".join(f"'{name}'" for name in sorted(SYSTEM_TOPICS))
    prefixes = (SYSTEM_TOPIC_PREFIX, RETRY_PREFIX, DLQ_PREFIX)
    begins = " OR ".join(f"left({topic}, {len(each)}) = '{each}'" for each in prefixes)
    return f"({topic} IN ({names}) OR {begins})"


def _total(value: str) -> str:
    return f"CAST(sum({value}) AS BIGINT)"


def views(bucket_ms: int) -> Mapping[str, str]:
    """What the tables are made of. `counted`: a row for each message that is counted, with its
    bucket of time; `lags`: a row for each queue that a group has committed an offset of.
    """
    return {
        "counted": f"""
            SELECT topic, broker, queue_id, queue_offset, size, {_coarse("size")} AS size_group,
                store_ms, store_ms - store_ms % {bucket_ms} AS bucket_ms,
                delay_ms, {_coarse("delay_ms")} AS delay_group, late
            FROM (
                SELECT m.topic, s.broker, m.queue_id, m.queue_offset,
                    CAST(m.size AS BIGINT) AS size, unix_millis(m.store_at) AS store_ms,
                    CASE WHEN m.born_at IS NOT NULL THEN
                        greatest(unix_millis(m.store_at) - unix_millis(m.born_at), 0)
                    END AS delay_ms,
                    CASE WHEN m.born_at > m.store_at THEN 1 ELSE 0 END AS late
                FROM messages m JOIN sources s ON m.store = s.store
                WHERE m.store_at IS NOT NULL
            ) one
        """,
        "lags": """
            SELECT o.group AS consumer, o.topic, s.broker, o.queue_id, o.offset AS next_offset,
                o.max_offset, CASE WHEN o.lag < 0 THEN 0 ELSE o.lag END AS lag
            FROM offsets o JOIN sources s ON o.store = s.store
        """,
    }


_HOT_QUEUES: Final = f"""
    WITH mine AS (
        SELECT topic, broker, queue_id, day, {_total("messages")} AS messages,
            {_total("bytes")} AS bytes
        FROM queues GROUP BY topic, broker, queue_id, day
    ), whole AS (
        SELECT topic, day, {_total("messages")} AS messages FROM mine GROUP BY topic, day
    ), known AS (
        SELECT topic, count(*) AS queues
        FROM (SELECT DISTINCT topic, broker, queue_id FROM mine) each_queue GROUP BY topic
    )
    SELECT topic, broker, queue_id, messages, bytes, share, even_share,
        share / even_share AS times_even, day
    FROM (
        SELECT m.topic, m.broker, m.queue_id, m.messages, m.bytes, m.day,
            CAST(m.messages AS DOUBLE) / CAST(w.messages AS DOUBLE) AS share,
            1.0e0 / CAST(k.queues AS DOUBLE) AS even_share
        FROM mine m JOIN whole w ON m.topic = w.topic AND m.day = w.day
            JOIN known k ON m.topic = k.topic
    ) shared
"""


def _consumer_lag(snapshot_ms: int) -> str:
    # The first bucket that ends at or behind the offset holds the message that waits.
    return f"""
        SELECT timestamp_millis({snapshot_ms}) AS snapshot_at, w.consumer AS group, w.topic,
            w.broker, w.queue_id, w.next_offset AS offset, w.max_offset, w.lag,
            w.oldest_store_at, CASE WHEN w.oldest_store_at IS NOT NULL THEN
                greatest({snapshot_ms} - unix_millis(w.oldest_store_at), 0)
            END AS oldest_age_ms
        FROM (
            SELECT l.consumer, l.topic, l.broker, l.queue_id, l.next_offset, l.max_offset,
                l.lag, min(q.first_store_at) AS oldest_store_at
            FROM lags l LEFT JOIN queues q ON l.topic = q.topic AND l.broker = q.broker
                AND l.queue_id = q.queue_id AND l.lag > 0 AND q.last_offset >= l.next_offset
            GROUP BY l.consumer, l.topic, l.broker, l.queue_id, l.next_offset, l.max_offset,
                l.lag
        ) w
    """


def tables(bucket_ms: int, snapshot_ms: int) -> Mapping[str, str]:
    """The query of each table, in this order: later ones read `queues`. `day`: a folder."""
    at = "timestamp_millis(bucket_ms)"
    seconds = f"{bucket_ms / 1000}e0"
    shares = ", ".join(
        f"{_share(f'{kind}_group', part)} AS {kind}_{name}{unit}"
        for kind, unit in (("size", ""), ("delay", "_ms"))
        for name, part in (("p50", "0.5"), ("p95", "0.95"), ("p99", "0.99"))
    )
    day = f"CAST({at} AS DATE)"

    def histogram(kind: str, name: str) -> str:
        return f"""
            SELECT topic, {kind}_group AS {name}, count(*) AS messages, {day} AS day
            FROM counted WHERE {kind}_group IS NOT NULL GROUP BY topic, {kind}_group, {day}
        """

    return {
        "traffic": f"""
            SELECT topic, {_is_system("topic")} AS is_system, {at} AS at, count(*) AS messages,
                {_total("size")} AS bytes,
                CAST(count(*) AS DOUBLE) / {seconds} AS messages_per_s,
                CAST(sum(size) AS DOUBLE) / {seconds} AS bytes_per_s,
                {shares}, max(size) AS size_max, max(delay_ms) AS delay_max_ms,
                {_total("late")} AS late, {day} AS day
            FROM counted GROUP BY topic, bucket_ms
        """,
        "queues": f"""
            SELECT topic, broker, queue_id, {at} AS at, count(*) AS messages,
                {_total("size")} AS bytes, min(queue_offset) AS first_offset,
                max(queue_offset) AS last_offset, timestamp_millis(min(store_ms)) AS first_store_at,
                {day} AS day
            FROM counted GROUP BY topic, broker, queue_id, bucket_ms
        """,
        "hot_queues": _HOT_QUEUES,
        "sizes": histogram("size", "size"),
        "delays": histogram("delay", "delay_ms"),
        "consumer_lag": _consumer_lag(snapshot_ms),
    }


TABLES: Final = tuple(tables(1000, 0))
SUMS: Final = f"""
    SELECT CAST(coalesce(sum(messages), 0) AS BIGINT) AS messages,
        CAST(coalesce(sum(bytes), 0) AS BIGINT) AS bytes, count(DISTINCT topic) AS topics,
        min(t.at) AS first_bucket, max(t.at) AS last_bucket, coalesce({_total("late")}, 0) AS late
    FROM traffic t
"""
HOTTEST: Final = """
    SELECT topic, broker, queue_id, times_even FROM hot_queues WHERE messages >= 100
    ORDER BY times_even DESC, topic, broker, queue_id, day LIMIT 1
"""
SLOWEST: Final = f"""
    SELECT l.group AS group, l.topic AS topic, {_total("l.lag")} AS lag,
        max(l.oldest_age_ms) AS oldest_age_ms
    FROM consumer_lag l GROUP BY l.group, l.topic HAVING sum(l.lag) > 0
    ORDER BY 3 DESC, 1, 2 LIMIT 1
"""
