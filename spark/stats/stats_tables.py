"""What the report on topics takes out of the tables of `topic_stats`, each time bounded.

Times are ms since 1970 in UTC. "User" topics are those that are not of the broker itself. Files are
read in a stream: only groups are held. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow import acero

from batonmq.spark.stats.tables import TABLES
from batonmq.spark.steps.tables import percentiles

TOPICS_NAMED: Final = 7
TOPICS_LISTED: Final = 100
HOT_LISTED: Final = 50
LAGS_LISTED: Final = 100
LAGS_DRAWN: Final = 20
HEAT_TOPICS: Final = 20
HEAT_QUEUES: Final = 2_000
_BARS: Final = 240
_SNAPSHOTS: Final = 500
_POINTS: Final = (0.5, 0.95, 0.99)
Row = Any
"""A row of a result, its columns as attributes."""


class StatsTables:
    """The tables below one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        traffic = self._grouped("traffic", ["topic", "is_system"], {"messages": "sum"})
        self._system = [row.topic for row in traffic if row.is_system]

    def _grouped(
        self,
        name: str,
        keys: Sequence[str],
        sums: Mapping[str, str],
        *,
        only: pc.Expression | None = None,
        **made: pc.Expression,
    ) -> list[Row]:
        """Rows with `keys` and the columns of `sums` (column: function), both of the table or of
        `made`. `only`: rows to look at."""
        names = [*keys, *(each for each in sums if each not in keys)]
        data = ds.dataset(self._folder / name, schema=TABLES[name], format="parquet")
        steps = [acero.Declaration("scan", acero.ScanNodeOptions(data))]
        if only is not None:
            steps.append(acero.Declaration("filter", acero.FilterNodeOptions(only)))
        columns = [made.get(each, pc.field(each)) for each in names]
        steps.append(acero.Declaration("project", acero.ProjectNodeOptions(columns, names)))
        how = [([each], f"hash_{function}", None, each) for each, function in sums.items()]
        steps.append(acero.Declaration("aggregate", acero.AggregateNodeOptions(how, keys=keys)))
        found = acero.Declaration.from_sequence(steps).to_table(use_threads=False)
        return [SimpleNamespace(**row) for row in found.to_pylist()]

    def topics(self) -> list[Row]:
        """Per topic: messages, bytes, peak rate, worst delays of a bucket; the largest ones."""
        sums = {
            "messages": "sum", "bytes": "sum", "peak": "max", "delay_p99_ms": "max",
            "size_max": "max", "first_ms": "min", "last_ms": "max",
        }  # fmt: skip
        rows = self._grouped(
            "traffic", ["topic", "is_system"], sums,
            peak=pc.field("messages_per_s"), first_ms=_ms("at"), last_ms=_ms("at"),
        )  # fmt: skip
        rows.sort(key=lambda row: (row.is_system, -row.messages, row.topic))
        return rows[:TOPICS_LISTED]

    def totals(self) -> Row:
        """Of user topics and of all: messages, bytes, first and last bucket."""
        sums = {
            "messages": "sum", "bytes": "sum", "late": "sum", "first_ms": "min", "last_ms": "max"
        }  # fmt: skip
        rows = self._grouped(
            "traffic", ["topic", "is_system"], sums, first_ms=_ms("at"), last_ms=_ms("at")
        )
        mine = [row for row in rows if not row.is_system]
        return SimpleNamespace(
            messages=sum(row.messages for row in mine),
            bytes=sum(row.bytes for row in mine),
            of_system=sum(row.messages for row in rows if row.is_system),
            topics=len(mine),
            first_ms=min((row.first_ms for row in mine), default=None),
            last_ms=max((row.last_ms for row in mine), default=None),
            late=sum(row.late for row in rows),
        )

    def series(
        self, first_ms: int, last_ms: int, bucket_ms: int
    ) -> tuple[int, list[tuple[str, int, int, int]]]:
        """(ms of a bar, [(topic, bar ms, messages, bytes)]): the largest topics and the others."""
        buckets = (last_ms - first_ms) // bucket_ms + 1
        width = bucket_ms * -(-buckets // _BARS)
        mine = ~pc.field("is_system")
        whole = self._grouped("traffic", ["topic"], {"messages": "sum"}, only=mine)
        whole.sort(key=lambda row: (-row.messages, row.topic))
        largest = [row.topic for row in whole[:TOPICS_NAMED]]
        is_named = pc.is_in(pc.field("topic"), pa.array(largest, pa.string()))
        rows = self._grouped(
            "traffic", ["topic", "bar"], {"messages": "sum", "bytes": "sum"}, only=mine,
            topic=pc.if_else(is_named, pc.field("topic"), pc.scalar(pa.scalar(None, pa.string()))),
            bar=_bar(first_ms, width),
        )  # fmt: skip
        rank = {topic: at for at, topic in enumerate(largest)}
        named = [(row.topic or "other topics", row.bar, row.messages, row.bytes) for row in rows]
        return width, sorted(named, key=lambda row: (rank.get(row[0], len(rank)), row[1]))

    def values(self, name: str) -> tuple[list[tuple[int, int]], list[float] | None]:
        """Of `size` or `delay_ms` over user topics: ([(value, messages)], p50 p95 p99)."""
        table = "sizes" if name == "size" else "delays"
        rows = self._grouped(table, [name], {"messages": "sum"}, only=self._of_users())
        counts = sorted((getattr(row, name), row.messages) for row in rows)
        values, messages = np.array(counts, np.int64).reshape(-1, 2).T
        if not counts:
            return counts, None
        return counts, [float(each[0]) for each in percentiles(values, messages, _POINTS)]

    def percentiles(self, prefix: str, suffix: str, width: int, first_ms: int) -> list[Row]:
        """Per bar, of its buckets and user topics: the mean p50 by messages, the worst p95, p99.

        Rows of (bar, p50, p95, p99).
        """
        names = [f"{prefix}_{each}{suffix}" for each in ("p50", "p95", "p99")]
        sums = {"weight": "sum", "messages": "sum", names[1]: "max", names[2]: "max"}
        weight = pc.field(names[0]).cast(pa.float64()) * pc.field("messages").cast(pa.float64())
        rows = self._grouped(
            "traffic", ["bar"], sums, only=~pc.field("is_system") & pc.field(names[0]).is_valid(),
            bar=_bar(first_ms, width), weight=weight,
        )  # fmt: skip
        found = [
            (row.bar, row.weight / row.messages, getattr(row, names[1]), getattr(row, names[2]))
            for row in rows
        ]
        return sorted(found)

    def hot(self) -> tuple[list[Row], list[Row]]:
        """(queues by how much above an even share, queues of the largest topics for a grid)."""
        whole = self._grouped(
            "hot_queues", ["topic", "broker", "queue_id"],
            {"messages": "sum", "bytes": "sum", "even_share": "max"}, only=self._of_users(),
        )  # fmt: skip
        of: dict[str, int] = {}
        for row in whole:
            of[row.topic] = of.get(row.topic, 0) + row.messages
        for row in whole:
            row.of = of[row.topic]
            row.times_even = row.messages / row.of / row.even_share
        hottest = sorted(whole, key=lambda row: (-row.times_even, -row.messages))[:HOT_LISTED]
        topics = set(sorted(of, key=lambda topic: -of[topic])[:HEAT_TOPICS])
        grid = [row for row in whole if row.topic in topics]
        grid.sort(key=lambda row: (-row.of, row.topic, row.broker, row.queue_id))
        return hottest, grid[:HEAT_QUEUES]

    def lags(self) -> tuple[list[Row], list[Row]]:
        """(groups and topics of the last snapshot by lag, lag of the worst over all snapshots)."""
        whole = self._grouped(
            "consumer_lag", ["at", "group", "topic"],
            {"lag": "sum", "oldest_age_ms": "max", "queues_behind": "sum", "queues": "sum"},
            at=_ms("snapshot_at"), queues=pc.scalar(1),
            queues_behind=pc.coalesce(pc.field("lag") > 0, pc.scalar(False)).cast(pa.int64()),
        )  # fmt: skip
        newest = max((row.at for row in whole), default=None)
        last = [row for row in whole if row.at == newest]
        last.sort(key=lambda row: (row.lag is None, -(row.lag or 0), row.group, row.topic))
        last = last[:LAGS_LISTED]
        worst = {(row.group, row.topic) for row in [row for row in last if row.lag][:TOPICS_NAMED]}
        lines = [row for row in whole if (row.group, row.topic) in worst]
        lines.sort(key=lambda row: -row.at)
        lines = lines[: _SNAPSHOTS * len(worst)]
        return last, sorted(lines, key=lambda row: (row.group, row.topic, row.at))

    def _of_users(self) -> pc.Expression:
        return ~pc.is_in(pc.field("topic"), pa.array(self._system, pa.string()))


def _ms(name: str) -> pc.Expression:
    return pc.divide(pc.field(name).cast(pa.int64()), pc.scalar(1000))


def _bar(first_ms: int, width: int) -> pc.Expression:
    """Where the bar begins that has a time `at`, which is not before the first."""
    past = pc.subtract(_ms("at"), pc.scalar(first_ms))
    whole = pc.multiply(pc.divide(past, pc.scalar(width)), pc.scalar(width))
    return pc.add(whole, pc.scalar(first_ms))
