"""What `topic_stats` does: choose replicas, run the queries, write the tables and the summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.stats import stats_queries
from batonmq.spark.stats.chosen_replicas import Sources
from batonmq.spark.steps.result_folder import Results, own_version
from batonmq.spark.steps.sql import Engine, dicts

Step = Callable[[str], AbstractContextManager[None]]
LAG: Final = "consumer_lag"
_SHOWN: Final = "%Y-%m-%d %H:%M:%S"


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """`stores`: patterns. `snapshot`: the moment of the committed offsets, in UTC, to the second.
    `topics` empty: all. `unconfirmed`: what lies above confirmOffset counts, too.
    """

    stores: tuple[str, ...]
    topics: tuple[str, ...]
    bucket_ms: int
    mode: str
    snapshot: datetime
    unconfirmed: bool = False


def run(
    engine: Engine, request: StatsRequest, sources: Sources, results: Results, step: Step
) -> dict[str, Any]:
    """Write all tables; they are views of the engine, then, too. The content of summary.json.

    Committed offsets are of a moment, so each run adds its snapshot to `consumer_lag`, a folder of
    its own, and leaves those of earlier runs. Raises OSError, StoreError.
    """
    results.begin()
    stores = [(each.store, each.broker) for each in sources.chosen]
    columns = [pa.array(values, pa.string()) for values in zip(*stores, strict=True)]
    engine.table("sources", pa.table(columns, names=["store", "broker"]))
    options = {"mode": request.mode, "topic": ",".join(request.topics)}
    paths = [each.uri for each in sources.chosen]
    with step("counting messages"):
        engine.source("offsets", paths, {"table": "offsets", **options})
        loose = str(request.unconfirmed).lower()
        columns_of = {"columns": stats_queries.MESSAGE_COLUMNS, "unconfirmed": loose}
        engine.source("messages", paths, {"table": "messages", **columns_of, **options})
        for name, query in stats_queries.views(request.bucket_ms).items():
            engine.define(name, query, keep=True)
    snapshot = request.snapshot
    taken = {"day": f"{snapshot:%Y-%m-%d}", "snapshot": f"{snapshot:%Y-%m-%dT%H-%M-%S}"}
    with step("writing the tables"):
        moment_ms = round(snapshot.timestamp() * 1000)
        for name, query in stats_queries.tables(request.bucket_ms, moment_ms).items():
            engine.define(name, query, keep=True)
            is_lag = name == LAG
            table = results.table(name, **taken) if is_lag else results.table(name, ["day"])
            engine.write(f"SELECT * FROM {name}", table)
    return _summary(engine, request, sources)


def _summary(engine: Engine, request: StatsRequest, sources: Sources) -> dict[str, Any]:
    (sums,) = dicts(engine, stats_queries.SUMS)
    hottest, slowest = dicts(engine, stats_queries.HOTTEST), dicts(engine, stats_queries.SLOWEST)
    return {
        "messages": sums["messages"],
        "bytes": sums["bytes"],
        "topics": sums["topics"],
        "first_bucket": _moment(sums["first_bucket"]),
        "last_bucket": _moment(sums["last_bucket"]),
        "bucket_ms": request.bucket_ms,
        "snapshot_at": f"{request.snapshot:{_SHOWN}}",
        "stored_before_born": sums["late"],
        "hottest_queue": hottest[0] if hottest else None,
        "slowest_group": slowest[0] if slowest else None,
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
        "inputs": list(request.stores),
        "generated_at": f"{datetime.now(UTC):{_SHOWN}}",
        "version": own_version(),
    }


def _moment(at: datetime | None) -> str | None:
    return None if at is None else f"{at.astimezone(UTC):{_SHOWN}}"


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
