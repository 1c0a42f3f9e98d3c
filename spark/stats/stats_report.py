"""The page on topics: how much, how large, how late, which queues are hot, who is behind.

Each figure is a query over the tables of `topic_stats`, which are views of the engine, bounded in
its rows. Times are ms since 1970 in UTC. "User" topics are those that are not of the broker itself.
The words are in `report/templates/stats.html`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any, Final

from batonmq.spark.report import traffic_figures as figures
from batonmq.spark.report.page import render
from batonmq.spark.report.quantities import (
    DURATION_TICKS_MS,
    SIZE_TICKS,
    bytes_text,
    duration_text,
    rate_text,
)
from batonmq.spark.steps.sql import Engine, dicts

TOPICS_NAMED: Final = 7
_BARS: Final = 240
_POINTS: Final = (0.5, 0.95, 0.99)
_BEHIND: Final = """
    SELECT unix_millis(l.snapshot_at) AS at, l.group AS group, l.topic AS topic,
        CAST(sum(l.lag) AS BIGINT) AS lag, max(l.oldest_age_ms) AS oldest_age_ms,
        CAST(sum(CASE WHEN l.lag > 0 THEN 1 ELSE 0 END) AS BIGINT) AS queues_behind,
        count(*) AS queues
    FROM consumer_lag l GROUP BY l.snapshot_at, l.group, l.topic
"""
_HOT: Final = """
    WITH mine AS (
        SELECT h.topic, h.broker, h.queue_id, CAST(sum(h.messages) AS BIGINT) AS messages,
            CAST(sum(h.bytes) AS BIGINT) AS bytes, max(h.even_share) AS even_share
        FROM hot_queues h JOIN user_topics u ON h.topic = u.topic
        GROUP BY h.topic, h.broker, h.queue_id
    )
    SELECT *, CAST(messages AS DOUBLE) / whole AS share,
        CAST(messages AS DOUBLE) / whole / even_share AS times_even
    FROM (
        SELECT *, CAST(sum(messages) OVER (PARTITION BY topic) AS BIGINT) AS whole FROM mine
    ) one
"""


_TOPICS: Final = """
    SELECT topic, is_system, CAST(sum(messages) AS BIGINT) AS messages,
        CAST(sum(bytes) AS BIGINT) AS bytes, max(messages_per_s) AS peak,
        max(delay_p99_ms) AS delay_p99_ms, max(size_max) AS size_max,
        min(unix_millis(t.at)) AS first_ms, max(unix_millis(t.at)) AS last_ms
    FROM traffic t GROUP BY topic, is_system
    ORDER BY is_system, messages DESC, topic LIMIT 100
"""
_TOTALS: Final = """
    SELECT CAST(sum(CASE WHEN is_system THEN 0 ELSE messages END) AS BIGINT) AS messages,
        CAST(sum(CASE WHEN is_system THEN 0 ELSE bytes END) AS BIGINT) AS bytes,
        CAST(sum(CASE WHEN is_system THEN messages ELSE 0 END) AS BIGINT) AS of_system,
        count(DISTINCT CASE WHEN NOT is_system THEN topic END) AS topics,
        min(CASE WHEN NOT is_system THEN unix_millis(t.at) END) AS first_ms,
        max(CASE WHEN NOT is_system THEN unix_millis(t.at) END) AS last_ms,
        CAST(sum(late) AS BIGINT) AS late
    FROM traffic t
"""
_LAST: Final = """
    SELECT b.* FROM behind b WHERE b.at = (SELECT max(o.at) FROM behind o)
    ORDER BY CASE WHEN b.lag IS NULL THEN 1 ELSE 0 END, b.lag DESC, b.group, b.topic LIMIT 100
"""


def stats_page(engine: Engine, summary: Mapping[str, Any]) -> str:
    """The page as HTML, of the views `traffic`, `hot_queues`, `sizes`, `delays`, `consumer_lag`."""

    def rows(query: str) -> list[Any]:
        return [SimpleNamespace(**row) for row in dicts(engine, query)]

    engine.define("user_topics", "SELECT DISTINCT topic FROM traffic WHERE NOT is_system")
    engine.define("hot", _HOT)
    engine.define("behind", _BEHIND)
    topics = rows(_TOPICS)
    (totals,) = rows(_TOTALS)
    order = "times_even DESC, messages DESC, topic, broker, queue_id"
    hottest = rows(f"SELECT * FROM hot ORDER BY {order} LIMIT 50")
    last = rows(_LAST)
    worst = {(row.group, row.topic) for row in [row for row in last if row.lag][:TOPICS_NAMED]}
    lines = rows("SELECT b.* FROM behind b ORDER BY b.at DESC LIMIT 100000") if worst else []
    lines = [row for row in lines if (row.group, row.topic) in worst][: 500 * len(worst)]
    lines.sort(key=lambda row: (row.group, row.topic, row.at))
    mine = [row for row in topics if not row.is_system]
    facts = {
        "generated_at": "", "version": "", "snapshot_at": "", **summary,
        "totals": totals, "topics": topics, "hottest": hottest, "lags": last,
        "peak": max(mine, key=lambda row: row.peak, default=None),
        "latest": max(mine, key=lambda row: row.delay_p99_ms or -1, default=None),
        **_traffic(engine, totals, int(summary["bucket_ms"])), "lag_lines": _lag_lines(lines),
    }  # fmt: skip
    return render("stats.html", facts)


def _histogram(
    engine: Engine, table: str, column: str
) -> tuple[list[tuple[int, int]], list[float]]:
    """([(value, messages)], p50 p95 p99) of user topics."""
    found = dicts(engine, f"""
        SELECT value, messages, CAST(sum(messages) OVER (ORDER BY value) AS BIGINT) AS so_far FROM (
            SELECT t.{column} AS value, CAST(sum(t.messages) AS BIGINT) AS messages
            FROM {table} t JOIN user_topics u ON t.topic = u.topic GROUP BY t.{column}
        ) counted ORDER BY value
    """)  # fmt: skip
    parts = [part * found[-1]["so_far"] for part in _POINTS] if found else []
    points = [next(row["value"] for row in found if row["so_far"] >= part) for part in parts]
    return [(row["value"], row["messages"]) for row in found], [float(each) for each in points]


def _lines(engine: Engine, bar: str, prefix: str, unit: str) -> list[tuple[Any, ...]]:
    """(bar, p50, p95, p99) of user topics: the mean p50 by messages, the worst p95 and p99."""
    p50, p95, p99 = (f"{prefix}_{name}{unit}" for name in ("p50", "p95", "p99"))
    found = dicts(engine, f"""
        SELECT {bar} AS bar,
            sum(CAST({p50} AS DOUBLE) * CAST(messages AS DOUBLE))
                / CAST(sum(messages) AS DOUBLE) AS p50,
            max({p95}) AS p95, max({p99}) AS p99
        FROM traffic t WHERE NOT is_system AND {p50} IS NOT NULL GROUP BY {bar} ORDER BY 1
    """)  # fmt: skip
    return [tuple(row.values()) for row in found]


def _traffic(engine: Engine, totals: Any, bucket_ms: int) -> dict[str, Any]:
    """Volume, sizes and delays; None where there is nothing to draw."""
    if totals.first_ms is None:
        return dict.fromkeys(
            ("bar_ms", "volumes", "bytes_figure", "sizes", "size_lines", "delays", "delay_lines")
        )
    buckets = (totals.last_ms - totals.first_ms) // bucket_ms + 1
    width = bucket_ms * -(-buckets // _BARS)
    past = f"(unix_millis(t.at) - {totals.first_ms})"
    bar = f"{past} - {past} % {width} + {totals.first_ms}"
    engine.define("largest", f"""
        SELECT topic, row_number() OVER (ORDER BY messages DESC, topic) AS place FROM (
            SELECT topic, sum(messages) AS messages FROM traffic WHERE NOT is_system GROUP BY topic
        ) each_topic ORDER BY place LIMIT {TOPICS_NAMED}
    """)  # fmt: skip
    # Bars of the largest topics, in their order, then of all others together.
    series = dicts(engine, f"""
        SELECT coalesce(r.topic, 'other topics') AS named, {bar} AS bar,
            CAST(sum(t.messages) AS BIGINT) AS messages, CAST(sum(t.bytes) AS BIGINT) AS bytes
        FROM traffic t LEFT JOIN largest r ON t.topic = r.topic WHERE NOT t.is_system
        GROUP BY r.topic, r.place, {bar} ORDER BY coalesce(r.place, 1000), {bar}
    """)  # fmt: skip
    messages: dict[str, list[Any]] = {}
    volume: dict[str, list[Any]] = {}
    for row in series:
        messages.setdefault(row["named"], []).append((row["bar"], row["messages"] * 1000 / width))
        volume.setdefault(row["named"], []).append((row["bar"], row["bytes"] * 1000 / width))
    rates, rate = figures.rates_figure, lambda v: f"{rate_text(v)} messages"
    drawn: dict[str, Any] = {
        "bar_ms": width, "volumes": rates(messages, width, "messages/s", rate),
        "bytes_figure": rates(volume, width, "bytes/s", lambda v: f"{bytes_text(v)}/s"),
    }  # fmt: skip
    kinds: tuple[tuple[str, str, str, Sequence[int], Callable[[float], str]], ...] = (
        ("size", "size", "", SIZE_TICKS, bytes_text),
        ("delay", "delay_ms", "_ms", DURATION_TICKS_MS, duration_text),
    )
    for name, column, unit, ticks, text in kinds:
        bins, at = _histogram(engine, f"{name}s", column)
        marks = dict(zip(("p50", "p95", "p99"), at, strict=False))
        title = "size of a record" if name == "size" else name
        found = _lines(engine, bar, name, unit)
        drawn[f"{name}s"] = (
            figures.histogram_figure(bins, marks, title, ticks, text) if bins else None
        )
        drawn[f"{name}_lines"] = (
            figures.percentiles_figure(found, name, ticks, text) if found else None
        )
    return drawn


def _lag_lines(rows: Sequence[Any]) -> Any:
    """None with one snapshot alone."""
    by_name = {
        f"{group} · {topic}": [(row.at, row.lag) for row in its]
        for (group, topic), its in groupby(rows, key=lambda r: (r.group, r.topic))
    }
    several = any(len(points) > 1 for points in by_name.values())
    return figures.lag_lines_figure(by_name) if several else None
