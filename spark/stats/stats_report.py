"""The page on topics: how much, how large, how late, which queues are hot, who is behind.

The words are in `report/templates/stats.html`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from batonmq.spark.report import traffic_figures as figures
from batonmq.spark.report.page import Figure, write_page
from batonmq.spark.report.quantities import (
    DURATION_TICKS_MS,
    SIZE_TICKS,
    bytes_text,
    duration_text,
    rate_text,
)
from batonmq.spark.stats.stats_tables import LAGS_DRAWN, StatsTables


def write_stats_report(out_dir: str, summary: Mapping[str, Any]) -> str:
    """Write OUT/report.html from the tables below OUT, whole or not at all; its path."""
    tables = StatsTables(out_dir)
    totals, topics = tables.totals(), tables.topics()
    hottest, grid = tables.hot()
    last, lines = tables.lags()
    mine = [row for row in topics if not row.is_system]
    facts = {
        "generated_at": "", "version": "", "snapshot_at": "", **summary,
        "totals": totals, "topics": topics, "hottest": hottest, "lags": last,
        "peak": max(mine, key=lambda row: row.peak, default=None),
        "latest": max(mine, key=lambda row: row.delay_p99_ms or -1, default=None),
        **_traffic(tables, totals, int(summary["bucket_ms"])), **_lags(last, lines),
        "heat": _heat(grid) if grid else None,
    }  # fmt: skip
    for row in hottest:
        row.share = row.messages / row.of
    return write_page(f"{out_dir}/report.html", "stats.html", facts)


def _traffic(tables: StatsTables, totals: Any, bucket_ms: int) -> dict[str, Any]:
    """Volume, sizes and delays; None where there is nothing to draw."""
    if totals.first_ms is None:
        return dict.fromkeys(
            ("bar_ms", "volumes", "bytes_figure", "sizes", "size_lines", "delays", "delay_lines")
        )
    width, rows = tables.series(totals.first_ms, totals.last_ms, bucket_ms)
    messages, volume = {}, {}
    for name, group in groupby(rows, key=lambda row: row[0]):
        points = list(group)
        messages[name] = [(at, n * 1000 / width) for _, at, n, _ in points]
        volume[name] = [(at, size * 1000 / width) for _, at, _, size in points]
    drawn: dict[str, Any] = {
        "bar_ms": width,
        "volumes": figures.rates_figure(
            messages, width, "messages/s", lambda v: f"{rate_text(v)} messages"
        ),
        "bytes_figure": figures.rates_figure(
            volume, width, "bytes/s", lambda v: f"{bytes_text(v)}/s"
        ),
    }
    kinds: tuple[tuple[str, str, str, Sequence[int], Callable[[float], str]], ...] = (
        ("size", "size", "", SIZE_TICKS, bytes_text),
        ("delay", "delay_ms", "_ms", DURATION_TICKS_MS, duration_text),
    )
    for name, column, unit, ticks, text in kinds:
        bins, at = tables.values(column)
        marks = dict(zip(("p50", "p95", "p99"), at or [], strict=False))
        title = "size of a record" if name == "size" else name
        found = tables.percentiles(name, unit, width, totals.first_ms)
        drawn[f"{name}s"] = (
            figures.histogram_figure(bins, marks, title, ticks, text) if bins else None
        )
        drawn[f"{name}_lines"] = (
            figures.percentiles_figure(found, name, ticks, text) if found else None
        )
    return drawn


def _heat(grid: Sequence[Any]) -> Figure:
    return figures.queue_heat_figure(
        [
            (topic, [(f"{r.broker}, queue {r.queue_id}", r.messages, r.times_even) for r in rows])
            for topic, rows in groupby(grid, key=lambda r: r.topic)
        ]
    )


def _lags(last: Sequence[Any], lines: Sequence[Any]) -> dict[str, Any]:
    behind = [(r.group, r.topic, r.lag, r.oldest_age_ms) for r in last if r.lag][:LAGS_DRAWN]
    by_name = {
        f"{group} · {topic}": [(row.at, row.lag) for row in rows]
        for (group, topic), rows in groupby(lines, key=lambda r: (r.group, r.topic))
    }
    several = any(len(points) > 1 for points in by_name.values())
    return {
        "lag": figures.lag_figure(behind) if behind else None,
        "lag_lines": figures.lag_lines_figure(by_name) if several else None,
    }
