"""What `topic_stats` does: choose replicas, one pass over the log, tables, summary.

An engine runs two steps: each piece of a log is counted, and the counts of some topics become rows
of all tables. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.engine import Engine
from batonmq.spark.exchange import Exchange
from batonmq.spark.read.reading import Read, Work
from batonmq.spark.stats import scan, tables
from batonmq.spark.stats.output import Output, write_rows
from batonmq.spark.stats.replicas import Sources

Step = Callable[[str], AbstractContextManager[None]]
_HOT_MESSAGES: Final = 100
_OFFSETS_SCHEMA: Final = pa.schema(
    [
        ("group", pa.string()), ("topic", pa.string()), ("broker", pa.string()),
        ("queue_id", pa.int32()), ("offset", pa.int64()), ("max_offset", pa.int64()),
        ("lag", pa.int64()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """`snapshot`: the moment of the committed offsets, in UTC. `topics` empty: all. `unconfirmed`:
    what lies above confirmOffset counts, too.
    """

    patterns: tuple[str, ...]
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

    def send(self, name: str, task: str, table: pa.Table) -> None:
        self.exchange(name).send(task, table)

    def receive(self, name: str, bucket: int) -> Iterator[tables.Row]:
        for batch in self.exchange(name).receive(bucket).to_batches():
            yield from batch.to_pylist()


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
            self.shared.send(name, f"{work.number:06}", table)


@dataclass(frozen=True, slots=True)
class Offsets:
    """Reads what groups of the chosen stores have committed."""

    shared: Shared
    read: Read

    def __call__(self, work: Work) -> None:
        rows: list[tables.Row] = []
        for batch in self.read.run(work):
            for row in batch.to_pylist():
                broker = self.shared.brokers.get(row["store"])
                if broker and (not self.shared.wanted.topics or self._is_wanted(row["topic"])):
                    rows.append({**row, "broker": broker})
        table = pa.Table.from_pylist(rows, _OFFSETS_SCHEMA)
        self.shared.send("offsets", f"{work.number:06}", table)

    def _is_wanted(self, topic: str) -> bool:
        return topic in self.shared.wanted.topics


@dataclass(slots=True)
class Sums:
    """What the summary says, of some topics. `first_ms`, `last_ms`: buckets; null without one."""

    messages: int = 0
    bytes: int = 0
    topics: int = 0
    late: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    hottest: tables.Row | None = None
    slowest: tables.Row | None = None

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
        made = tables.tables_of(
            shared.receive("sizes", bucket),
            shared.receive("delays", bucket),
            shared.receive("offsets", bucket),
            wanted.bucket_ms,
            wanted.snapshot_ms,
        )
        snapshot = f"{wanted.snapshot:%Y-%m-%dT%H-%M-%S}"
        for name, rows in made.items():
            write_rows(Path(shared.target), name, rows, bucket, snapshot)
        return _sums_of(made)


def _sums_of(made: dict[str, list[tables.Row]]) -> Sums:
    traffic = made["traffic"]
    hot = [row for row in made["hot_queues"] if row["messages"] >= _HOT_MESSAGES]
    behind: dict[tuple[str, str], tables.Row] = {}
    for row in made["consumer_lag"]:
        new = {"group": row["group"], "topic": row["topic"], "lag": 0, "oldest_age_ms": None}
        sums = behind.setdefault((row["group"], row["topic"]), new)
        sums["lag"] += row["lag"] or 0
        ages = [age for age in (sums["oldest_age_ms"], row["oldest_age_ms"]) if age is not None]
        sums["oldest_age_ms"] = max(ages, default=None)
    return Sums(
        sum(row["messages"] for row in traffic),
        sum(row["bytes"] for row in traffic),
        len({row["topic"] for row in traffic}),
        sum(row["late"] for row in traffic),
        min((row["at"] for row in traffic), default=None),
        max((row["at"] for row in traffic), default=None),
        max(hot, key=lambda row: row["times_even"], default=None),
        max((r for r in behind.values() if r["lag"]), key=lambda row: row["lag"], default=None),
    )


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
        read, plan = scan.reading(sources, "offsets")
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
        "first_bucket": None if first is None else tables.moment(first),
        "last_bucket": None if last is None else tables.moment(last),
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
        "inputs": list(wanted.patterns),
        "generated_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "version": _version(),
    }


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


def _version() -> str:
    try:
        return version("batonmq")
    except PackageNotFoundError:
        return "from a source tree"
