"""What `topic_stats` does: choose replicas, run the queries, write the tables and the summary."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.read.store_facts import StoreFacts, group_names, read_stores
from batonmq.spark.stats import stats_queries
from batonmq.spark.steps.result_folder import Results, own_version
from batonmq.spark.steps.sql import Engine, Step, dicts

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


@dataclass(frozen=True, slots=True)
class Chosen:
    """One group's store that is read, and how many of its replicas are left aside.

    `broker` is the group's name: where clusters have one of the same name, `cluster#name`; the path
    of a store that has no identity. `log_bytes`: how much of its log is read, or less.
    """

    facts: StoreFacts
    broker: str
    others: int
    log_bytes: int


def one_per_group(patterns: Sequence[str], *, unconfirmed: bool = False) -> list[Chosen]:
    """Of the replicas of each group the one whose confirmed log is longest, then the lowest id.

    A store without an identity is a group of its own. `unconfirmed`: one without a confirmOffset
    may be among them. Raises FileNotFoundError, which names the pattern, if nothing
    matches one; StoreError for what is no store, or cannot be parsed.
    """
    groups: dict[tuple[str, str], list[tuple[StoreFacts, int]]] = {}
    for facts in read_stores(patterns):
        files = facts.log_files()
        if files and not unconfirmed:
            facts.confirmed_end()  # that there is one
        size = sum(file.size for file in files)
        if files and not unconfirmed:
            size = max(0, (facts.confirm_offset or 0) - files[0].start)
        group = (facts.cluster or "", facts.broker) if facts.broker else ("", facts.path)
        groups.setdefault(group, []).append((facts, size))
    chosen = []
    for group, name in sorted(group_names(groups).items()):
        facts, size = min(groups[group], key=lambda each: _rank(each[0]))
        chosen.append(Chosen(facts, name, len(groups[group]) - 1, size))
    return chosen


def _rank(facts: StoreFacts) -> tuple[int, int]:
    confirmed = -1 if facts.confirm_offset is None else facts.confirm_offset
    return -confirmed, facts.broker_id if facts.broker_id is not None else 1 << 62


def run(
    engine: Engine, request: StatsRequest, chosen: Sequence[Chosen], results: Results, step: Step
) -> dict[str, Any]:
    """Write all tables; they are views of the engine, then, too. The content of summary.json.

    Committed offsets are of a moment, so each run adds its snapshot to `consumer_lag`, a folder of
    its own, and leaves those of earlier runs. Raises OSError, StoreError.
    """
    results.begin()
    stores = [{"store": each.facts.path, "broker": each.broker} for each in chosen]
    engine.table("sources", pa.Table.from_pylist(stores))
    options: dict[str, str | bool] = {"mode": request.mode, "topic": ",".join(request.topics)}
    paths = [each.facts.uri for each in chosen]
    with step("counting messages"):
        engine.source("offsets", paths, {"table": "offsets", **options})
        options |= {"columns": stats_queries.MESSAGE_COLUMNS, "unconfirmed": request.unconfirmed}
        engine.source("messages", paths, {"table": "messages", **options})
        for name, query in stats_queries.views(request.bucket_ms).items():
            engine.define(name, query, keep=True)
    at = request.snapshot
    taken = {"day": f"{at:%Y-%m-%d}", "snapshot": f"{at:%Y-%m-%dT%H-%M-%S}"}
    with step("writing the tables"):
        at_ms = round(at.timestamp() * 1000)
        for name, query in stats_queries.tables(request.bucket_ms, at_ms).items():
            engine.define(name, query, keep=True)
            only = taken if name == LAG else {}
            table = results.table(name, () if only else ["day"], **only)
            engine.write(f"SELECT * FROM {name}", table)
    return _summary(engine, request, chosen)


def _summary(engine: Engine, request: StatsRequest, chosen: Sequence[Chosen]) -> dict[str, Any]:
    (sums,) = dicts(engine, stats_queries.SUMS)
    hottest, slowest = dicts(engine, stats_queries.HOTTEST), dicts(engine, stats_queries.SLOWEST)
    late = sums.pop("late")
    for name in ("first_bucket", "last_bucket"):
        at = sums[name]
        sums[name] = None if at is None else f"{at.astimezone(UTC):{_SHOWN}}"
    return {
        **sums,
        "bucket_ms": request.bucket_ms,
        "snapshot_at": f"{request.snapshot:{_SHOWN}}",
        "stored_before_born": late,
        "hottest_queue": hottest[0] if hottest else None,
        "slowest_group": slowest[0] if slowest else None,
        "stores": [
            {
                "store": each.facts.path, "broker": each.broker, "broker_id": each.facts.broker_id,
                "confirm_offset": each.facts.confirm_offset, "replicas_left_aside": each.others,
            }
            for each in chosen
        ],
        "inputs": list(request.stores),
        "generated_at": f"{datetime.now(UTC):{_SHOWN}}",
        "version": own_version(),
    }  # fmt: skip


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
