"""The page on topics: how much, how large, how late, which queues are hot, who is behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from batonmq.spark.report.page import (
    Card,
    Cell,
    Column,
    Facts,
    Page,
    Picture,
    ReportSummary,
    Section,
    Table,
    Words,
    write_page,
)
from batonmq.spark.report.quantities import (
    DURATION_TICKS_MS,
    SIZE_TICKS,
    UNKNOWN,
    bytes_text,
    count_text,
    counted,
    duration_text,
    moment_text,
    rate_text,
)
from batonmq.spark.report.traffic_figures import (
    histogram_figure,
    lag_figure,
    lag_lines_figure,
    percentiles_figure,
    queue_heat_figure,
    rates_figure,
)
from batonmq.spark.stats.stats_tables import LAGS_DRAWN, StatsTables

_ZOOM = "Drag to zoom in, double-click to see all again."


def write_stats_report(out_dir: str, summary: Mapping[str, Any]) -> str:
    """Write OUT/report.html from the tables below OUT, whole or not at all; its path."""
    tables = StatsTables(out_dir)
    totals, topics = tables.totals(), tables.topics()
    hottest, grid = tables.hot()
    last, lines = tables.lags()
    sections = [
        *_traffic(tables, totals, summary),
        _queues(hottest, grid),
        _consumers(last, lines, summary),
        Section("topics", "Topics", _topics(topics)),
        _reading(summary),
    ]
    page = Page(
        "Topic statistics",
        _subtitle(totals, summary),
        _summaries(totals, hottest, last),
        _cards(totals, topics, hottest, last),
        [section for section in sections if section.parts],
    )
    return write_page(f"{out_dir}/report.html", page)


def _subtitle(totals: Any, summary: Mapping[str, Any]) -> str:
    made = f" Made {summary['generated_at']}." if summary.get("generated_at") else ""
    if totals.first_ms is None:
        return f"No message of a user's topic.{made}"
    end = totals.last_ms + int(summary["bucket_ms"])
    return (
        f"{counted(totals.topics, 'topic')}, {moment_text(totals.first_ms)} to {moment_text(end)} "
        f"({duration_text(end - totals.first_ms)}). All times are UTC.{made}"
    )


def _summaries(totals: Any, hottest: Sequence[Any], last: Sequence[Any]) -> list[ReportSummary]:
    said = []
    behind = [row for row in last if row.lag]
    if behind:
        worst = behind[0]
        age = (
            f"; the oldest waits for {duration_text(worst.oldest_age_ms)}"
            if worst.oldest_age_ms is not None
            else ""
        )
        said.append(
            ReportSummary(
                f"{worst.group} is {counted(worst.lag, 'message')} behind on {worst.topic}{age}.",
                "warn",
            )
        )
    elif last:
        said.append(ReportSummary("No consumer group is behind.", "good"))
    if hottest and hottest[0].times_even >= 2 and hottest[0].messages >= 100:
        hot = hottest[0]
        said.append(
            ReportSummary(
                f"Queue {hot.queue_id} of {hot.topic} on {hot.broker or UNKNOWN} gets "
                f"{hot.times_even:.1f} times an even share.",
                "warn",
            )
        )
    if totals.late:
        said.append(
            ReportSummary(
                f"{counted(totals.late, 'message')} stored before they were born: clocks of "
                "producers and brokers differ, delays are too small.",
                "warn",
            )
        )
    return said


def _cards(
    totals: Any, topics: Sequence[Any], hottest: Sequence[Any], last: Sequence[Any]
) -> list[Card]:
    mine = [row for row in topics if not row.is_system]
    peak = max(mine, key=lambda row: row.peak, default=None)
    latest = max(
        (row for row in mine if row.delay_p99_ms is not None),
        key=lambda row: row.delay_p99_ms, default=None,
    )  # fmt: skip
    behind = [row for row in last if row.lag]
    hot = hottest[0] if hottest else None
    return [
        Card(
            "Messages",
            count_text(totals.messages or 0),
            f"and {count_text(totals.of_system or 0)} of system topics",
        ),
        Card("Volume", bytes_text(totals.bytes or 0), "records in the log, each once"),
        Card("Peak of a topic", rate_text(peak and peak.peak), peak.topic if peak else ""),
        Card(
            "Worst p99 delay",
            duration_text(latest.delay_p99_ms if latest else None),
            f"born to stored, {latest.topic}" if latest else "",
        ),
        Card(
            "Hottest queue",
            f"{hot.times_even:.1f}×" if hot else UNKNOWN,
            f"an even share: {hot.topic}, queue {hot.queue_id}" if hot else "",
            "warn" if hot and hot.times_even >= 2 and hot.messages >= 100 else "",
        ),
        Card(
            "Most behind",
            count_text(behind[0].lag) if behind else "0",
            f"{behind[0].group} on {behind[0].topic}" if behind else "no group is behind",
            "warn" if behind else "good" if last else "",
        ),
    ]  # fmt: skip


_PERCENTILES: Final = ("p50", "p95", "p99")
_OVER_TIME: Final = "Over time: the mean of the topics' p50 (by messages), their worst p95 and p99."


def _traffic(tables: StatsTables, totals: Any, summary: Mapping[str, Any]) -> list[Section]:
    if totals.first_ms is None:
        return []
    width, rows = tables.series(totals.first_ms, totals.last_ms, int(summary["bucket_ms"]))
    seconds = width / 1000
    messages, volume = {}, {}
    for name, group in groupby(rows, key=lambda row: row[0]):
        points = list(group)
        messages[name] = [(at, n / seconds) for _, at, n, _ in points]
        volume[name] = [(at, size / seconds) for _, at, _, size in points]
    of = f"Each bar is {duration_text(width)}."
    flows = [
        Picture(
            "messages",
            rates_figure(messages, width, "messages/s", lambda v: f"{rate_text(v)} messages"),
            f"Messages per second, by topic. {of} {_ZOOM}",
        ),
        Picture(
            "bytes",
            rates_figure(volume, width, "bytes/s", lambda v: f"{bytes_text(v)}/s"),
            f"Bytes per second, by topic. {of}",
        ),
    ]
    sizes = _distribution(
        tables, "size", "sizes", "Sizes of records in the log, all user topics.", "size of a record"
    )
    delays = _distribution(
        tables, "delay_ms", "delays", "From born at the producer to stored at the broker.", "delay"
    )
    if found := tables.percentiles("size", "", width, totals.first_ms):
        lines = _lines(found)
        figure = percentiles_figure(lines, "size", ticks=SIZE_TICKS, text=bytes_text)
        sizes.append(Picture("sizes-over-time", figure, _OVER_TIME))
    if found := tables.percentiles("delay", "_ms", width, totals.first_ms):
        lines = _lines(found)
        figure = percentiles_figure(lines, "delay", ticks=DURATION_TICKS_MS, text=duration_text)
        delays.append(Picture("delays-over-time", figure, _OVER_TIME))
    return [
        Section("volume", "Messages and bytes over time", flows),
        Section("size", "How large messages are", sizes),
        Section("delay", "How late messages are stored", delays),
    ]


def _lines(found: Sequence[Sequence[Any]]) -> dict[str, list[tuple[int, float]]]:
    return {name: [(row[0], row[at]) for row in found] for at, name in enumerate(_PERCENTILES, 1)}


def _distribution(tables: StatsTables, name: str, key: str, text: str, title: str) -> list[Picture]:
    bins, points = tables.values(name)
    if not bins:
        return []
    is_size = name == "size"
    lines = dict(zip(("p50", "p95", "p99"), points or [], strict=False))
    figure = histogram_figure(
        bins, lines, title, ticks=SIZE_TICKS if is_size else DURATION_TICKS_MS,
        text=bytes_text if is_size else duration_text,
    )  # fmt: skip
    return [Picture(key, figure, f"{text} The axis is logarithmic.")]


def _queues(hottest: Sequence[Any], grid: Sequence[Any]) -> Section:
    if not grid:
        return Section("queues", "Hot queues", [])
    topics = [
        (topic, [(f"{r.broker}, queue {r.queue_id}", r.messages, r.times_even) for r in rows])
        for topic, rows in groupby(grid, key=lambda r: r.topic)
    ]  # fmt: skip
    columns = [
        Column("Topic", "name"), Column("Broker", "name"), Column("Queue", "number"),
        Column("Messages", "number"), Column("Bytes", "number"), Column("Share", "number"),
        Column("Times even", "number"),
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            r.topic, r.broker or UNKNOWN, str(r.queue_id), count_text(r.messages),
            bytes_text(r.bytes), f"{100 * r.messages / r.of:.1f} %", f"{r.times_even:.2f}",
        ]
        for r in hottest
    ]  # fmt: skip
    return Section(
        "queues",
        "Hot queues",
        [
            Picture(
                "queue-heat",
                queue_heat_figure(topics),
                "The largest topics; each cell is a queue, coloured by its messages against an "
                "even spread over the topic's queues.",
            ),
            Table(f"The {len(rows)} queues most above an even share.", columns, rows),
        ],
    )


def _consumers(last: Sequence[Any], lines: Sequence[Any], summary: Mapping[str, Any]) -> Section:
    title = "How far consumers are behind"
    if not last:
        return Section("consumers", title, [Words("No group has committed an offset.")])
    parts: list[Picture | Table | Words] = []
    behind = [row for row in last if row.lag][:LAGS_DRAWN]
    if behind:
        parts.append(
            Picture(
                "lag",
                lag_figure([(r.group, r.topic, r.lag, r.oldest_age_ms) for r in behind]),
                f"Messages not yet consumed at {summary.get('snapshot_at', UNKNOWN)}, and how long "
                "the oldest of them has waited.",
            )
        )
    by_name = {
        f"{group} · {topic}": [(row.at, row.lag) for row in rows]
        for (group, topic), rows in groupby(lines, key=lambda r: (r.group, r.topic))
    }
    if any(len(points) > 1 for points in by_name.values()):
        parts.append(
            Picture("lag-over-time", lag_lines_figure(by_name), "From run to run of this job.")
        )
    columns = [
        Column("Group", "name"), Column("Topic", "name"), Column("Behind", "number"),
        Column("Oldest waits", "number"), Column("Queues behind", "number"),
    ]  # fmt: skip
    rows = [
        [
            r.group, r.topic, count_text(r.lag), duration_text(r.oldest_age_ms),
            f"{r.queues_behind} of {r.queues}",
        ]
        for r in last
    ]  # fmt: skip
    parts.append(
        Table(f"{counted(len(rows), 'group and topic', 'groups and topics')}.", columns, rows)
    )
    return Section("consumers", title, parts)


def _topics(topics: Sequence[Any]) -> list[Table]:
    columns = [
        Column("Topic", "name"), Column("Messages", "number"), Column("Bytes", "number"),
        Column("Peak", "number"), Column("Largest", "number"), Column("Worst p99 delay", "number"),
        Column("First", "time"), Column("Last", "time"),
    ]  # fmt: skip
    tables = []
    for is_system, caption in (
        (False, "User topics"),
        (True, "System topics, retries, dead letters"),
    ):
        rows: list[list[Cell]] = [
            [
                r.topic,
                count_text(r.messages),
                bytes_text(r.bytes),
                rate_text(r.peak),
                bytes_text(r.size_max),
                duration_text(r.delay_p99_ms),
                moment_text(r.first_ms),
                moment_text(r.last_ms),
            ]
            for r in topics
            if r.is_system == is_system
        ]
        if rows:
            tables.append(Table(f"{caption}, the largest first.", columns, rows))
    return tables


def _reading(summary: Mapping[str, Any]) -> Section:
    stores = []
    for each in summary.get("stores", [])[:50]:
        others = counted(each["replicas_left_aside"], "other replica")
        stores.append(f"{each['store']} ({each['broker']}, {others} left aside)")
    return Section(
        "reading",
        "How to read this, and what it was made from",
        [
            Facts(
                {
                    "messages": "records of the commit log below the confirmed end, each once: of "
                    "every broker group only the replica with the longest confirmed log is read",
                    "sizes, delays": "kept to six binary digits: at most 3.2 % too small",
                    "waits": "the time of the first message of the bucket that holds the oldest "
                    "unconsumed one: too long by less than one bucket of "
                    f"{duration_text(summary.get('bucket_ms'))}",
                    "behind": "to the end of the consume queue of that replica, by the offsets "
                    "that it keeps",
                    "stores": "; ".join(stores) or UNKNOWN,
                    "made by": f"BatonMQ {summary.get('version', '')} topic_stats",
                }
            )
        ],
    )
