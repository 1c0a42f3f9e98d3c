"""The stream against what the controllers wrote down, through failovers and deaths of its driver.

Under `make soak` the driver is a process that is killed with its JVM in the middle of a batch; else
it fails in this process, between the table's commit and the checkpoint's.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from batonmq.spark.jobs import stream_history
from batonmq.spark.topic_table.history_stream import HistoryPlan, HistoryStream
from batonmq.spark.topic_table.parquet_table import ParquetTable
from lab.cluster.processes import ROOT, wait_for
from lab.cluster.up import ClusterProcess
from tests.spark.running_streams import dying
from tests.spark.spark_session import SMALL
from tests.spark.stream.history_watch import Leaders, in_files

SOAK = os.environ.get("BATONMQ_SOAK") == "1"
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SPARK_S = 300
"""A bound for a wait in vain: a JVM takes its time on a busy machine."""


class Job:
    """`stream_history` as a process group of its own: Python, the JVM, and Python workers."""

    def __init__(self, cluster: ClusterProcess, output: Path, log: Path) -> None:
        self.output, self.log = output, log
        self.started: list[subprocess.Popen[str]] = []
        self.controllers = ";".join(cluster.controllers)
        self.options = ["--controllers", self.controllers, "--output", str(output), "--json"]
        self.argv = [
            *(sys.executable, "-m", "batonmq.spark.jobs.stream_history", "--master", "local[1]"),
            *self.options,
            *("--trigger", "200ms", "--max-events", "30"),
            *(each for pair in SMALL.items() for each in ("--conf", "=".join(pair))),
            # A Python process may take long to start while the machine has other work.
            *("--conf", "spark.python.authenticate.socketTimeout=120s"),
        ]

    def start(self) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            process = subprocess.Popen(
                self.argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                start_new_session=True, env=os.environ | {"JAVA_TOOL_OPTIONS": SHORT_LIVED},
            )  # fmt: skip
        self.started.append(process)
        return process

    def until(self, process: subprocess.Popen[str], what: str, done: Callable[[], Any]) -> Any:
        def look() -> Any:
            found = done()
            assert found or process.poll() is None, f"it ended:\n{self.log.read_text()[-3000:]}"
            return found

        return wait_for(what, look, SPARK_S)

    def rows(self) -> list[dict[str, Any]]:
        """The table as a reader without Spark finds it."""
        if not any(self.output.glob("part-*.parquet")):
            return []
        return pq.read_table(self.output).to_pylist()

    def kill_in_a_batch(self, process: subprocess.Popen[str]) -> None:
        self.until(process, "a batch under way", lambda: self.under_way)
        kill(process)

    @property
    def under_way(self) -> bool:
        """Whether a batch is being read or written: Spark's checkpoint has its offsets, and not
        that it is done."""
        checkpoint = self.output / "_stream" / "checkpoint"
        ends = {path.name for path in checkpoint.glob("commits/[0-9]*")}
        return bool({path.name for path in checkpoint.glob("offsets/[0-9]*")} - ends)


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def ms(moment: Any) -> int:
    return 0 if moment is None else round(moment.timestamp() * 1000)


@pytest.fixture
def job_of(tmp_path: Path) -> Iterator[Callable[[ClusterProcess], Job]]:
    """Makes the job of a cluster; whatever of it still runs ends with the test."""
    made: list[Job] = []

    def make(cluster: ClusterProcess) -> Job:
        made.append(Job(cluster, tmp_path / "out", tmp_path / "job.log"))
        return made[-1]

    yield make
    for job in made:
        for process in job.started:
            if process.poll() is None:
                kill(process)


@contextmanager
def killed_driver(job: Job) -> Iterator[None]:
    """The job as a process, until it was killed in the middle of a batch."""
    with ThreadPoolExecutor(1) as pool:
        process = job.start()
        job.until(process, "the first rows", job.rows)
        killed = pool.submit(job.kill_in_a_batch, process)
        yield
        killed.result()


@contextmanager
def dying_driver(job: Job, session: SparkSession) -> Iterator[None]:
    """The stream in this process, until it failed behind its second commit, that of a failover."""
    plan = HistoryPlan(controllers=job.controllers, trigger="200 milliseconds")
    table = ParquetTable(str(job.output))
    table.open()
    try:
        with dying(HistoryStream(table, plan, lambda _: None), session, ParquetTable, last=1):
            wait_for("the first rows", job.rows, SPARK_S)
            yield
    finally:
        table.close()


def test_each_event_comes_once_through_kills_and_failovers(
    session: SparkSession, live_cluster: ClusterProcess, job_of: Callable[[ClusterProcess], Job]
) -> None:
    cluster = live_cluster
    job, leaders = job_of(cluster), Leaders(cluster)
    cluster.wait_in_sync(3)
    with killed_driver(job) if SOAK else dying_driver(job, session):
        old = leaders.master()
        cluster.kill(old)
        leaders.other_master(old)
    assert job.rows()

    # with another leading controller
    with killed_driver(job) if SOAK else nullcontext():
        first = leaders.leader()
        cluster.kill(first)
        leaders.other_leader(first)

    # what is left
    cluster.wait_in_sync(3)
    written = in_files(cluster)
    # the job takes the session of the tests: no other JVM is started
    done = CliRunner().invoke(stream_history.main, [*job.options, "--available-now"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    events = {name: json.loads(line) for name, line in in_files(cluster).items()}
    rows = job.rows()
    assert told["total"] == len(rows)
    assert told["events"] > 0
    assert told["repeats"] > 0 or SOAK, "the batch of the driver that died"
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
