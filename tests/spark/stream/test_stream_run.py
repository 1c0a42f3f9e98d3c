"""The run of the query, without Spark: when it ends, and what it does then."""

import json
import threading
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException

from batonmq.history.event import HistoryEvent
from batonmq.spark.jobs import stream_history
from batonmq.spark.jobs.stream_history import write_failovers
from batonmq.spark.read.columns import TABLES
from batonmq.spark.read.history_table import event_rows
from batonmq.spark.topic_table.history_stream import HistoryPlan, HistoryStream
from batonmq.spark.topic_table.parquet_table import ParquetTable
from batonmq.spark.topic_table.table_stream import StreamLost

PLAN = HistoryPlan(controllers="127.0.0.1:9878", checkpoint="/nowhere", trigger="10 seconds")


class Query:
    """Ends by itself after `looks`, or when it is stopped."""

    def __init__(self, looks=10**6, error=None):
        self.looks, self.error = looks, error
        self.stopped_in_batch = None
        self.batch = threading.Event()

    def awaitTermination(self, _):
        self.looks -= 1
        if self.error is not None:
            raise self.error
        return self.looks < 0 or self.stopped_in_batch is not None

    def stop(self):
        self.stopped_in_batch = self.batch.is_set()


@pytest.fixture
def stream(queries):
    """That of one query."""
    return lambda query: queries(query)[0]


def test_it_ends_when_all_is_read(stream):
    query = Query(looks=2)
    stream(query).run(None, threading.Event())
    assert query.stopped_in_batch is None


def test_a_batch_that_is_under_way_is_finished_before_the_end(stream, monkeypatch):
    query, stopping, entered = Query(), threading.Event(), threading.Event()
    run = stream(query)

    def commit(rows, number):
        query.batch.set()
        entered.set()
        stopping.wait(10)
        query.batch.clear()

    monkeypatch.setattr(run, "_commit", commit)
    worker = threading.Thread(target=run._take, args=(Batch(), 0))
    worker.start()
    assert entered.wait(10)
    stopping.set()
    run.run(None, stopping)
    worker.join()
    assert query.stopped_in_batch is False


class Stopping(Query):
    """Its stop waits, as Spark's does, for a batch that has just begun, and cuts off what runs."""

    def __init__(self, error):
        super().__init__()
        self.cut_off, self.run, self.taken = error, None, []

    def stop(self):
        if not self.taken:
            taking = threading.Thread(target=self.take)
            taking.start()
            taking.join(5)
        self.error = self.cut_off

    def take(self):
        try:
            self.run._take(Batch(), 1)
        except InterruptedError as error:
            self.taken.append(str(error))


def test_a_batch_that_begins_while_the_stream_stops_is_left_for_the_next_start(stream, monkeypatch):
    """To wait for the stop, which waits for it, would last for ever; a return would tell Spark that
    it was done."""
    query, stopping = Stopping(failed("java.io.EOFException")), threading.Event()
    query.run = run = stream(query)
    monkeypatch.setattr(run, "_commit", pytest.fail)
    stopping.set()
    run.run(None, stopping)
    assert query.taken == ["the stream is being stopped"]


def test_the_last_batch_that_fails_while_the_stream_stops_is_told(stream, monkeypatch):
    query, stopping = Stopping(failed("java.io.IOException")), threading.Event()
    query.run = run = stream(query)

    def fail(rows, number):
        stopping.set()
        raise OSError("the disk is full")

    monkeypatch.setattr(run, "_commit", fail)
    with pytest.raises(OSError, match="full"):
        run._take(Batch(), 0)
    with pytest.raises(OSError, match="the disk is full"):
        run.run(None, stopping)


def test_what_the_query_failed_with_is_raised(stream):
    query = Query(error=ValueError("no cluster"))
    with pytest.raises(ValueError, match="no cluster"):
        stream(query).run(None, threading.Event())
    assert query.stopped_in_batch is False


def failed(text):
    return StreamingQueryException(
        "[STREAM_FAILED] Query terminated with exception: Traceback (most recent call last):\n"
        f'  File "x.py", line 3, in latestOffset\n{text}\n\n\tat org.apache.spark.Some.java\n'
    )


OUTAGE = (
    "batonmq.spark.live.cluster.ClusterError: no controller answers (tried for 20 ms: option x)"
)


@pytest.fixture
def queries(tmp_path, monkeypatch):
    """Runs of queries, one after the other; the lines; the stream. Pauses are passed over."""
    lines = []
    made = HistoryStream(ParquetTable(str(tmp_path / "out")), PLAN, lines.append)
    monkeypatch.setattr("batonmq.spark.topic_table.table_stream.PAUSE_S", 0.001)

    def of(*runs):
        left = list(runs)
        monkeypatch.setattr(made, "_start", lambda session: left.pop(0))
        return made, lines, left

    return of


def test_an_outage_of_the_cluster_is_a_pause(queries):
    untraced = f"[SOURCE] Failed when Python streaming data source perform latestOffset: {OUTAGE}"
    down = [Query(error=failed(text)) for text in (OUTAGE, OUTAGE, untraced)]
    stream, lines, left = queries(*down, Query(looks=2))
    stream.counts.batches = 1
    stream.run(None, threading.Event())
    assert left == []
    assert lines == ["no controller answers (tried for 20 ms: option x); next attempt in 0 s"] * 3
    assert all(query.stopped_in_batch is False for query in down)


def test_a_pause_ends_when_the_stream_is_stopped(queries, monkeypatch):
    stream, lines, _ = queries(Query(error=failed(OUTAGE)))
    stream.counts.batches = 1
    monkeypatch.setattr("batonmq.spark.topic_table.table_stream.PAUSE_S", 3600)
    stopping = threading.Event()
    monkeypatch.setattr(stream, "_report", lambda line: (lines.append(line), stopping.set()))
    stream.run(None, stopping)
    assert len(lines) == 1


@pytest.mark.parametrize("trigger", [None, "10 seconds"])
def test_a_cluster_that_never_answered_ends_it(queries, trigger):
    """Its address may be wrong; and who reads what is there now wants an end."""
    stream, _, _ = queries(Query(error=failed(OUTAGE)))
    stream._plan = replace(PLAN, trigger=trigger)
    stream.counts.batches = 1 if trigger is None else 0
    with pytest.raises(StreamingQueryException, match="ClusterError"):
        stream.run(None, threading.Event())


def test_lost_events_end_it_with_the_way_out(queries):
    text = (
        "batonmq.spark.live.offsets.DataLossError: events behind (log a, …) may be lost; "
        "set failOnDataLoss=false to continue with what there is"
    )
    stream, _, _ = queries(Query(error=failed(text)))
    stream.counts.batches = 1
    with pytest.raises(StreamLost) as caught:
        stream.run(None, threading.Event())
    assert str(caught.value) == (
        "events behind (log a, …) may be lost; --accept-loss continues behind what is lost"
    )


BUSY = "\n[STREAM_FAILED] terminated with exception: Python worker failed to connect back. XXKST"


@pytest.mark.parametrize("trigger", [None, "10 seconds"])
def test_a_busy_machine_gets_a_few_more_chances(queries, trigger):
    """Also before the first batch: it says nothing about the cluster."""
    stream, lines, left = queries(*(Query(error=failed(BUSY)) for _ in range(5)), Query(looks=1))
    stream._plan = replace(PLAN, trigger=trigger)
    stream.run(None, threading.Event())
    assert left == [] and lines == ["no Python process within 10 s; next attempt in 0 s"] * 5
    stream, lines, _ = queries(*(Query(error=failed(BUSY)) for _ in range(6)))
    with pytest.raises(StreamingQueryException, match="connect back"):
        stream.run(None, threading.Event())


class Batch:
    """Events of the history as a query hands them over, by their Raft indexes."""

    def __init__(self, *indexes, log="a"):
        fields = {"log": log, "time_ms": 1_795_000_000_000, "kind": "elected"}
        events = [HistoryEvent(raft_index=index, **fields) for index in indexes]
        schema = TABLES["history"]
        self.rows = pa.Table.from_batches([event_rows(schema, events)] if events else [], schema)

    def toArrow(self):
        return self.rows


@pytest.fixture
def taking(tmp_path):
    """(stream, its lines)."""
    lines = []
    table = ParquetTable(str(tmp_path / "out"))
    table.open()
    yield HistoryStream(table, PLAN, lines.append), lines
    table.close()


def test_the_table_has_the_events_and_the_failovers_follow_it(taking, tmp_path):
    stream, lines = taking
    stream._on_commit = lambda: lines.append(
        write_failovers(str(tmp_path / "out"), str(tmp_path / "failovers"))
    )
    stream._take(Batch(21, 20), 0)
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert [(row["raft_index"], row["log"]) for row in rows] == [(20, "a"), (21, "a")]
    assert {(row["group"], str(row["day"])) for row in rows} == {(None, "2026-11-18")}
    assert lines[-1] is None and lines[-2].startswith("2 events; 2 in all")
    for batch, events in ((1, 3), (1, 3)):
        stream._take(Batch(22), batch)
        summary = json.loads((tmp_path / "failovers" / "summary.json").read_text())
        assert summary["events"] == events
    assert lines.count(None) == 2  # nothing was new in the last one


def test_what_the_table_has_is_passed_over_in_each_log(taking):
    """A batch comes again after a crash; a new checkpoint begins with the oldest event."""
    stream, lines = taking
    stream._take(Batch(7, 9), 0)
    stream._take(Batch(1, log="0"), 1)
    stream._take(Batch(5, 7, 9, 12), 0)
    stream._take(Batch(1, 2, log="0"), 1)
    assert stream._table.state().read == {"a": (12, 0), "0": (2, 0)}
    assert (stream.counts.events, stream.counts.repeats) == (5, 4)
    assert lines[-1].startswith("1 events, 1 repeats; 5 in all")


def test_failovers_inside_the_table_are_refused(tmp_path):
    """A reader of the table's folder would find them, too."""
    folder = str(tmp_path / "out")
    given = [
        "--controllers",
        "h:1",
        "--output",
        folder,
        "--failovers",
        f"file://{folder}/failovers",
    ]
    done = CliRunner().invoke(stream_history.main, given)
    assert done.exit_code == 2 and "it lies in --output, whose readers" in done.stderr


def test_a_batch_that_does_not_follow_the_table_ends_the_query(taking):
    stream, _ = taking
    with pytest.raises(
        ValueError, match=r"/nowhere continues with batch 4, and .* none of its batches"
    ):
        stream._take(Batch(20), 4)
    stream._take(Batch(), 0)
    stream._take(Batch(20), 1)
    stream._take(Batch(20), 1)  # again, as after a crash
    assert (stream.counts.events, stream.counts.repeats) == (1, 1)
    with pytest.raises(ValueError, match="nothing behind batch 1"):
        stream._take(Batch(22), 3)


def test_why_a_commit_failed_is_told_and_not_the_trace_of_spark(taking, monkeypatch):
    stream, _ = taking
    query = Query(error=failed(f"[FOREACH_BATCH_USER_FUNCTION_ERROR] Traceback:\n{OUTAGE}"))
    monkeypatch.setattr(stream, "_start", lambda session: query)
    with pytest.raises(ValueError, match="continues with batch 4"):
        stream._take(Batch(20), 4)
    with pytest.raises(ValueError, match="continues with batch 4"):
        stream.run(None, threading.Event())
