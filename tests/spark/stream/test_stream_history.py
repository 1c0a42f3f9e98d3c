"""The stream against what the controllers wrote down, through failovers and its driver's death."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from click.testing import CliRunner
from pyspark.sql import SparkSession

from batonmq.spark.jobs import stream_history
from batonmq.spark.topic_table.history_stream import HistoryPlan, HistoryStream
from batonmq.spark.topic_table.parquet_table import ParquetTable
from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess
from tests.spark.running_streams import PATIENCE_S, SOAK, dying, running
from tests.spark.spark_session import SMALL

Name = tuple[str, int, int]


def in_files(cluster: ClusterProcess) -> dict[Name, dict[str, Any]]:
    """Every event that any controller wrote down; all that did wrote the same line."""
    found: dict[Name, str] = {}
    for path in cluster.data_dir.glob("namesrv-*/controller/history-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                event = json.loads(line)
                name = (event["log"], event["raft_index"], event.get("part", 0))
                assert found.setdefault(name, line) == line, path
    return {name: json.loads(line) for name, line in found.items()}


def rows_in(output: Path) -> list[dict[str, Any]]:
    """The table as a reader without Spark finds it."""
    return pq.read_table(output).to_pylist() if any(output.glob("part-*.parquet")) else []


def leader_changes(output: Path) -> int:
    return sum(row["kind"] == "controller_leader_changed" for row in rows_in(output))


def ms(moment: Any) -> int:
    return 0 if moment is None else round(moment.timestamp() * 1000)


@contextmanager
def opened(table: ParquetTable) -> Iterator[None]:
    table.open()
    try:
        yield
    finally:
        table.close()


def test_each_event_comes_once_through_kills_and_failovers(
    session: SparkSession, live_cluster: ClusterProcess, tmp_path: Path
) -> None:
    cluster, output = live_cluster, tmp_path / "out"
    controllers = ";".join(cluster.controllers)
    options = ["--controllers", controllers, "--output", str(output), "--json"]
    small = [part for pair in SMALL.items() for part in ("--conf", "=".join(pair))]
    often = [*options, "--trigger", "200ms", "--master", "local[1]", *small]
    plan = HistoryPlan(controllers=controllers, trigger="200 milliseconds")
    table = ParquetTable(str(output))
    first, second = (HistoryStream(table, plan, lambda _: None) for _ in range(2))

    cluster.wait_in_sync(3)
    with nullcontext() if SOAK else opened(table), dying(first, session, 1, stream_history, often):
        wait_for("the first rows", lambda: rows_in(output), PATIENCE_S)
        old = cluster.master()
        cluster.kill(old)
        cluster.wait_new_master(old["address"])
    with opened(table), running(second, session):
        before = leader_changes(output)
        leading = cluster.controllers.index(cluster.controller)
        cluster.kill(cluster.document["nameServers"][leading])
        wait_for("another one", lambda: leader_changes(output) > before, PATIENCE_S)
    assert second.counts.repeats > 0, "the batch of the driver that died"

    # what is left
    cluster.wait_in_sync(3)
    written = in_files(cluster)
    done = CliRunner().invoke(stream_history.main, [*options, "--available-now"])
    assert done.exit_code == 0, done.output
    events, rows = in_files(cluster), rows_in(output)
    assert json.loads(done.stdout)["total"] == len(rows)
    names = [(row["log"], row["raft_index"], row["part"]) for row in rows]
    assert len(set(names)) == len(names) and written.keys() <= set(names)
    for row, name in zip(rows, names, strict=True):
        event = events[name]
        assert row["kind"] == event["kind"]
        assert row["group"] == row["broker_name"] == event.get("broker_name")
        assert row["sync_state_set"] == event.get("sync_state_set")
        assert row["max_offset"] == event.get("max_offset")
        assert row["unclean"] is event.get("unclean", False)
        assert (ms(row["time"]), ms(row["proposed_at"])) == (
            event["time_ms"],
            event.get("proposed_ms", 0),
        )
        assert str(row["day"]) == time.strftime("%Y-%m-%d", time.gmtime(event["time_ms"] / 1000))
        assert row["file"] is None and row["line_offset"] is None
