"""What `topic_stats` does: choose replicas, one pass over the log, tables, summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq.spark.stats import scan, tables
from batonmq.spark.stats.output import LAG, Output
from batonmq.spark.stats.replicas import Sources
from batonmq.spark.work import Work

Step = Callable[[str], AbstractContextManager[None]]


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


def run(
    session: SparkSession, wanted: Wanted, sources: Sources, output: Output, step: Step
) -> dict[str, Any]:
    """Write and publish all tables; the content of summary.json."""
    work = Work(session, output.work_folder, small=sources.is_small())
    with step("counting messages"):
        messages = scan.read_messages(
            session, sources, wanted.topics, mode=wanted.mode, unconfirmed=wanted.unconfirmed
        )
        counted = scan.counted(messages, wanted.bucket_ms, sources)
        counts = work.keep(counted, "counts")
    with step("writing the tables"):
        traffic = _written(output, work, "traffic", tables.traffic(counts, wanted.bucket_ms))
        queues = _written(output, work, "queues", tables.queues(counts))
        hot = _written(output, work, "hot_queues", tables.hot_queues(queues))
        for name, value in (("sizes", "size"), ("delays", "delay_ms")):
            output.write(name, tables.values(counts, value), small=work.small)
        late = tables.consumer_lag(session, sources, wanted.topics, queues, wanted.snapshot)
        lag = _written(output, work, LAG, late, wanted.snapshot)
    summary = _summary(wanted, sources, traffic, hot, lag)
    output.publish(summary)
    return summary


def _summary(
    wanted: Wanted, sources: Sources, traffic: DataFrame, hot: DataFrame, lag: DataFrame
) -> dict[str, Any]:
    total = traffic.agg(
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.count_distinct("topic").alias("topics"),
        F.min("at").cast("string").alias("first"),
        F.max("at").cast("string").alias("last"),
        F.sum("late").alias("late"),
    ).first()
    hottest = hot.where("messages >= 100").orderBy(F.desc("times_even")).first()
    slowest = (
        lag.groupBy("group", "topic")
        .agg(F.sum("lag").alias("lag"), F.max("oldest_age_ms").alias("oldest_age_ms"))
        .where("lag > 0")
        .orderBy(F.desc("lag"))
        .first()
    )
    assert total is not None  # of an aggregate without groups there is always one row
    return {
        "messages": total.messages or 0,
        "bytes": total.bytes or 0,
        "topics": total.topics,
        "first_bucket": total.first,
        "last_bucket": total["last"],
        "bucket_ms": wanted.bucket_ms,
        "snapshot_at": f"{wanted.snapshot:%Y-%m-%d %H:%M:%S}",
        "stored_before_born": total.late or 0,
        "hottest_queue": None if hottest is None else _plain(hottest, "topic", "broker",
                                                             "queue_id", "times_even"),
        "slowest_group": None if slowest is None else _plain(slowest, "group", "topic", "lag",
                                                             "oldest_age_ms"),
        "stores": [
            {
                "store": each.store, "broker": each.broker, "broker_id": each.broker_id,
                "confirm_offset": each.confirm_offset, "replicas_left_aside": each.others,
            }
            for each in sources.chosen
        ],
        "inputs": list(wanted.patterns),
        "generated_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        "version": _version(),
    }  # fmt: skip


def _written(
    output: Output, work: Work, name: str, frame: DataFrame, snapshot: datetime | None = None
) -> DataFrame:
    """Write a table that is used further: as it was kept, or as it is read back."""
    kept = work.keep_small(frame)
    written = output.write(name, kept, snapshot, small=work.small)
    return kept if work.small else written


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


def _plain(row: Any, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _version() -> str:
    try:
        return version("batonmq")
    except PackageNotFoundError:
        return "from a source tree"


__all__ = ["Wanted", "lines", "run"]
