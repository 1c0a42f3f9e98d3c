"""What `topic_stats` does: choose replicas, one pass over the log, tables, summary.

An engine runs two steps: each piece of a log is counted, and the counts of some topics become rows
of all tables. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from batonmq.spark.read.reading import Read, Work
from batonmq.spark.stats import scan, tables
from batonmq.spark.stats.output import Output, write_rows
from batonmq.spark.stats.replicas import Sources
from batonmq.spark.steps.engine import Engine
from batonmq.spark.steps.exchange import Exchange
from batonmq.spark.steps.result_folder import own_version
from batonmq.spark.steps.tables import grouped

Step = Callable[[str], AbstractContextManager[None]]
_HOT_MESSAGES: Final = 100
Row = dict[str, Any]
_OFFSETS_SCHEMA: Final = pa.schema(
    [
        ("group", pa.string()), ("topic", pa.string()), ("broker", pa.string()),
        ("queue_id", pa.int32()), ("offset", pa.int64()), ("max_offset", pa.int64()),
        ("lag", pa.int64()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """`stores`: patterns. `snapshot`: the moment of the committed offsets, in UTC, to the second.
    `topics` empty: all. `unconfirmed`: what lies above confirmOffset counts, too.
    """

    stores: tuple[str, ...]
    topics: tuple[str, ...]
    bucket_ms: int
    mode: str
    snapshot: datetime
    unconfirmed: bool = False

    @property
    def snapshot_ms(self) -> int:
        return round(self.snapshot.timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all tasks know: the exchange's folder and that of the tables."""

    wanted: Wanted
    brokers: dict[str, str]
    folder: str
    target: str
    buckets: int

    def exchange(self, name: str) -> Exchange:
        schemas = {
            "sizes": scan.SIZES_SCHEMA, "delays": scan.DELAYS_SCHEMA, "offsets": _OFFSETS_SCHEMA
        }  # fmt: skip
        return Exchange(f"{self.folder}/{name}", schemas[name], ["topic"], self.buckets)


@dataclass(frozen=True, slots=True)
class Count:
    """Counts the messages of a piece of a log."""

    shared: Shared
    read: Read

    def __call__(self, work: Work) -> None:
        assert work.facts is not None
        wanted, broker = self.shared.wanted, self.shared.brokers[work.facts.path]
        counts = scan.counted(self.read.run(work), broker, wanted.bucket_ms, wanted.topics)
        for name, table in zip(("sizes", "delays"), counts, strict=True):
            self.shared.exchange(name).send(f"{work.number:06}", table)


@dataclass(frozen=True, slots=True)
class Offsets:
    """Reads what groups of the chosen stores have committed."""

    shared: Shared
    read: Read

    def __call__(self, work: Work) -> None:
        wanted, brokers = self.shared.wanted.topics, self.shared.brokers
        rows = pa.Table.from_batches(self.read.run(work), self.read.schema)
        known = pa.array([brokers.get(store) for store in rows["store"].to_pylist()], pa.string())
        rows = rows.set_column(rows.column_names.index("broker"), "broker", known)
        rows = rows.filter(pc.is_valid(rows["broker"]))
        if wanted:
            rows = rows.filter(pc.is_in(rows["topic"], pa.array(wanted)))
        table = rows.select(_OFFSETS_SCHEMA.names).cast(_OFFSETS_SCHEMA)
        self.shared.exchange("offsets").send(f"{work.number:06}", table)


@dataclass(slots=True)
class Sums:
    """What the summary says, of some topics. `first_ms`, `last_ms`: buckets; null without one."""

    messages: int = 0
    bytes: int = 0
    topics: int = 0
    late: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    hottest: Row | None = None
    slowest: Row | None = None

    def add(self, other: Sums) -> None:
        self.messages += other.messages
        self.bytes += other.bytes
        self.topics += other.topics
        self.late += other.late
        firsts = [at for at in (self.first_ms, other.first_ms) if at is not None]
        lasts = [at for at in (self.last_ms, other.last_ms) if at is not None]
        self.first_ms, self.last_ms = min(firsts, default=None), max(lasts, default=None)
        hot = [each for each in (self.hottest, other.hottest) if each]
        slow = [each for each in (self.slowest, other.slowest) if each]
        self.hottest = max(hot, key=lambda row: row["times_even"], default=None)
        self.slowest = max(slow, key=lambda row: row["lag"], default=None)


@dataclass(frozen=True, slots=True)
class MakeTables:
    """Writes the rows of some topics into all tables."""

    shared: Shared

    def __call__(self, bucket: int) -> Sums:
        shared, wanted = self.shared, self.shared.wanted
        sizes, delays, offsets = (
            shared.exchange(name).receive(bucket) for name in ("sizes", "delays", "offsets")
        )
        made = tables.tables_of(sizes, delays, offsets, wanted.bucket_ms, wanted.snapshot_ms)
        snapshot = f"{wanted.snapshot:%Y-%m-%dT%H-%M-%S}"
        for name, rows in made.items():
            write_rows(Path(shared.target), name, rows, bucket, snapshot)
        return _sums_of(made)


def _sums_of(made: dict[str, pa.Table]) -> Sums:
    traffic, hot = made["traffic"], made["hot_queues"]
    hot = hot.filter(pc.greater_equal(hot["messages"], _HOT_MESSAGES))
    behind = grouped(
        made["consumer_lag"], ["group", "topic"], lag=("lag", "sum"),
        oldest_age_ms=("oldest_age_ms", "max"),
    )  # fmt: skip
    return Sums(
        pc.sum(traffic["messages"]).as_py() or 0,
        pc.sum(traffic["bytes"]).as_py() or 0,
        pc.count_distinct(traffic["topic"]).as_py(),
        pc.sum(traffic["late"]).as_py() or 0,
        pc.min(traffic["at"]).as_py(),
        pc.max(traffic["at"]).as_py(),
        _greatest(hot, "times_even"),
        _greatest(behind.filter(pc.greater(behind["lag"], 0)), "lag"),
    )


def _greatest(rows: pa.Table, name: str) -> Row | None:
    """The first row with the greatest value."""
    found: list[Row] = rows.sort_by([(name, "descending")]).slice(0, 1).to_pylist()
    return found[0] if found else None


def run(
    engine: Engine, wanted: Wanted, sources: Sources, output: Output, step: Step
) -> dict[str, Any]:
    """Write and publish all tables; the content of summary.json. Raises OSError, StoreError."""
    brokers = {each.store: each.broker for each in sources.chosen}
    buckets = engine.buckets(sources.log_bytes)
    shared = Shared(wanted, brokers, output.work_folder, output.table(""), buckets)
    with step("counting messages"):
        read, plan = scan.messages_of(sources, mode=wanted.mode, unconfirmed=wanted.unconfirmed)
        _all(engine.map(Count(shared, read), plan))
        read, plan = scan.reading(sources, "offsets", mode=wanted.mode)
        _all(engine.map(Offsets(shared, read), plan))
    sums = Sums()
    with step("writing the tables"):
        for each in engine.map(MakeTables(shared), range(shared.buckets)):
            sums.add(each)
    summary = _summary(wanted, sources, sums)
    output.publish(summary)
    return summary


def _all(results: Iterable[None]) -> None:
    for _ in results:
        pass


def _summary(wanted: Wanted, sources: Sources, sums: Sums) -> dict[str, Any]:
    first, last = sums.first_ms, sums.last_ms
    hottest, slowest = sums.hottest, sums.slowest
    return {
        "messages": sums.messages,
        "bytes": sums.bytes,
        "topics": sums.topics,
        "first_bucket": _moment(first),
        "last_bucket": _moment(last),
        "bucket_ms": wanted.bucket_ms,
        "snapshot_at": f"{wanted.snapshot:%Y-%m-%d %H:%M:%S}",
        "stored_before_born": sums.late,
        "hottest_queue": hottest
        and {name: hottest[name] for name in ("topic", "broker", "queue_id", "times_even")},
        "slowest_group": slowest,
        "stores": [
            {
                "store": each.store,
                "broker": each.broker,
                "broker_id": each.broker_id,
                "confirm_offset": each.confirm_offset,
                "replicas_left_aside": each.others,
            }
            for each in sources.chosen
        ],
        "inputs": list(wanted.stores),
        "generated_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "version": own_version(),
    }


def _moment(ms: int | None) -> str | None:
    return None if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people."""
    printed = [
        f"{summary['messages']:,} messages, {summary['bytes']:,} bytes, {summary['topics']} topics"
    ]
    if hottest := summary["hottest_queue"]:
        printed.append(
            f"hottest queue: {hottest['topic']}, {hottest['broker']} queue {hottest['queue_id']}, "
            f"{hottest['times_even']:.2f} times an even share"
        )
    if slowest := summary["slowest_group"]:
        printed.append(
            f"slowest group: {slowest['group']} on {slowest['topic']}, "
            f"{slowest['lag']:,} messages behind"
        )
    return printed
