"""The run of the query, without Spark: when it ends, and what it does then."""

import json
import threading
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException

from batonmq.history.message import HISTORY_AFTER
from batonmq.spark.history.stream import HistoryLost, HistoryStream, StreamPlan
from batonmq.spark.history.stream_output import StreamOutput
from batonmq.spark.jobs.stream_history import _interval, write_failovers

PLAN = StreamPlan("127.0.0.1:9876", "/nowhere", 10, "10 seconds")


class Query:
    """Ends by itself after `looks`, or when it is stopped."""

    def __init__(self, looks=10**6, error=None):
        self.looks, self.error = looks, error
        self.stopped_in_batch = None
        self.batch = None

    def awaitTermination(self, _):
        self.looks -= 1
        if self.error is not None:
            raise self.error
        return self.looks < 0 or self.stopped_in_batch is not None

    def stop(self):
        self.stopped_in_batch = self.batch.is_set()


@pytest.fixture
def stream(tmp_path, monkeypatch):
    made = HistoryStream(StreamOutput(tmp_path / "out"), print)

    def of(query):
        monkeypatch.setattr(made, "_start", lambda session, plan: query)
        query.batch = threading.Event()
        return made

    return of


def test_it_ends_when_all_is_read(stream):
    query = Query(looks=2)
    stream(query).run(None, PLAN, threading.Event())
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
    run.run(None, PLAN, stopping)
    worker.join()
    assert query.stopped_in_batch is False


def test_what_the_query_failed_with_is_raised(stream):
    query = Query(error=ValueError("no cluster"))
    with pytest.raises(ValueError, match="no cluster"):
        stream(query).run(None, PLAN, threading.Event())
    assert query.stopped_in_batch is False


def failed(text):
    return StreamingQueryException(
        "[STREAM_FAILED] Query terminated with exception: Traceback (most recent call last):\n"
        f'  File "x.py", line 3, in latestOffset\n{text}\n\n\tat org.apache.spark.Some.java\n'
    )


OUTAGE = (
    "batonmq.spark.live.cluster.ClusterError: no master of broker-b answered (with patience 20 ms)"
)


@pytest.fixture
def queries(tmp_path, monkeypatch):
    """Runs of queries, one after the other; what was told; the stream. Pauses are passed over."""
    told = []
    made = HistoryStream(StreamOutput(tmp_path / "out"), told.append)
    monkeypatch.setattr("batonmq.spark.history.stream.PAUSE_S", 0.001)

    def of(*runs):
        left = list(runs)

        def start(session, plan):
            query = left.pop(0)
            query.batch = threading.Event()
            return query

        monkeypatch.setattr(made, "_start", start)
        return made, told, left

    return of


def test_an_outage_of_the_cluster_is_a_pause(queries):
    down = [Query(error=failed(OUTAGE)) for _ in range(3)]
    stream, told, left = queries(*down, Query(looks=2))
    stream.counts.batches = 1
    stream.run(None, PLAN, threading.Event())
    assert left == []
    assert told == ["no master of broker-b answered (with patience 20 ms); next attempt in 0 s"] * 3
    assert all(query.stopped_in_batch is False for query in down)


def test_a_pause_ends_when_the_stream_is_stopped(queries, monkeypatch):
    stream, told, _ = queries(Query(error=failed(OUTAGE)))
    stream.counts.batches = 1
    monkeypatch.setattr("batonmq.spark.history.stream.PAUSE_S", 3600)
    stopping = threading.Event()
    monkeypatch.setattr(stream, "_report", lambda line: (told.append(line), stopping.set()))
    stream.run(None, PLAN, stopping)
    assert len(told) == 1


@pytest.mark.parametrize("trigger", [None, "10 seconds"])
def test_a_cluster_that_never_answered_ends_it(queries, trigger):
    """Its address may be wrong; and who reads what is there now wants an end."""
    stream, _, _ = queries(Query(error=failed(OUTAGE)))
    stream.counts.batches = 1 if trigger is None else 0
    with pytest.raises(StreamingQueryException, match="ClusterError"):
        stream.run(None, replace(PLAN, trigger=trigger), threading.Event())


def test_lost_events_end_it_with_the_way_out(queries):
    text = (
        "batonmq.spark.live.offsets.DataLossError: topic T, broker b, queue 0: [3, 9) is gone; "
        "set failOnDataLoss=false to continue with what there is"
    )
    stream, _, _ = queries(Query(error=failed(text)))
    stream.counts.batches = 1
    with pytest.raises(HistoryLost) as caught:
        stream.run(None, PLAN, threading.Event())
    assert str(caught.value) == (
        "topic T, broker b, queue 0: [3, 9) is gone; --accept-loss continues behind what is lost"
    )


def test_triggers_are_spelled_for_spark():
    assert [_interval(each) for each in ("10s", "500ms", "5m", "2 min", "1h", "7")] == [
        "10 seconds",
        "500 milliseconds",
        "5 minutes",
        "2 minutes",
        "1 hours",
        "7 seconds",
    ]
    with pytest.raises(ValueError, match="must be a time"):
        _interval("soon")


BUSY = "\n[STREAM_FAILED] terminated with exception: Python worker failed to connect back. XXKST"


@pytest.mark.parametrize("trigger", [None, "10 seconds"])
def test_a_busy_machine_gets_a_few_more_chances(queries, trigger):
    """Also before the first batch: it says nothing about the cluster."""
    plan = replace(PLAN, trigger=trigger)
    stream, told, left = queries(*(Query(error=failed(BUSY)) for _ in range(5)), Query(looks=1))
    stream.run(None, plan, threading.Event())
    assert left == [] and told == ["no Python process within 10 s; next attempt in 0 s"] * 5
    stream, told, _ = queries(*(Query(error=failed(BUSY)) for _ in range(6)))
    with pytest.raises(StreamingQueryException, match="connect back"):
        stream.run(None, plan, threading.Event())


class Batch:
    """Messages of the history as a query hands them over: (offset, Raft index, that in front)."""

    def __init__(self, *rows):
        event = b'{"log":"a","raft_index":%d,"time_ms":1795000000000,"kind":"elected"}'
        self.rows = []
        for offset, index, after in rows:
            properties = [] if after is None else [(HISTORY_AFTER, f"{after}-0")]
            self.rows.append(("b", 0, offset, None, event % index, properties))

    def toArrow(self):
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(MESSAGES)
        arrays = [pa.array(c, kind) for c, kind in zip(columns, MESSAGES.types, strict=True)]
        return pa.Table.from_arrays(arrays, schema=MESSAGES)


MESSAGES = pa.schema(
    [
        ("broker", pa.string()), ("queue_id", pa.int32()), ("queue_offset", pa.int64()),
        ("store_at", pa.timestamp("us", "UTC")), ("body", pa.binary()),
        ("properties", pa.map_(pa.string(), pa.string())),
    ]
)  # fmt: skip


@pytest.fixture
def taking(tmp_path):
    """(stream, what it told)."""
    told = []
    output = StreamOutput(tmp_path / "out")
    output.open()
    yield HistoryStream(output, told.append), told
    output.close()


def test_a_topic_that_has_lost_its_beginning_and_holes_are_told_once(taking):
    stream, told = taking
    stream._take(Batch((7, 20, 19), (8, 21, 20)), 0)
    begins, counted = told
    assert begins.startswith("the topic begins at offset 7 in b: what stood before has expired")
    assert counted.startswith("2 events; 2 in all")
    del told[:]
    stream._take(Batch((9, 30, None), (10, 31, 30)), 1)
    stream._take(Batch((11, 32, 31)), 2)
    assert [line.split()[:4] for line in told] == [
        ["2", "events;", "4", "in"],
        ["1", "hole:", "log", "a,"],
        ["1", "events;", "5", "in"],
    ]
    assert "between Raft index 21 and 30:" in told[1]
    stream._take(Batch((12, 40, None)), 3)
    assert told[-1].startswith("2 holes; the last one: log a, between Raft index 32 and 40:")
    assert stream.counts.events == 6


def test_the_table_has_the_events_and_the_failovers_follow_it(taking, tmp_path):
    stream, told = taking
    stream._on_commit = lambda: told.append(
        write_failovers(tmp_path / "out", str(tmp_path / "told"))
    )
    stream._take(Batch((7, 20, 19), (8, 20, 19), (9, 21, 20)), 0)
    files = [*(tmp_path / "out").glob("group=*/day=2026-11-18/*.parquet")]
    (rows,) = (pq.read_table(path).to_pylist() for path in files)
    assert [(row["raft_index"], row["queue_offset"], row["log"]) for row in rows] == [
        (20, 7, "a"),
        (21, 9, "a"),
    ]
    assert told[-1] is None and told[-2].startswith("2 events, 1 repeats; 2 in all")
    for batch, events in ((1, 3), (1, 3)):
        stream._take(Batch((10, 22, 21)), batch)
        summary = json.loads((tmp_path / "told" / "summary.json").read_text())
        assert summary["events"] == events
    assert told.count(None) == 2  # nothing was new in the last one


def test_a_batch_that_does_not_follow_the_table_ends_the_query(taking):
    stream, _ = taking
    with pytest.raises(ValueError, match="the checkpoint continues with batch 4"):
        stream._take(Batch((7, 20, 19)), 4)
    stream._take(Batch(), 0)  # nothing in it is an event
    stream._take(Batch((7, 20, 19)), 1)
    stream._take(Batch((7, 20, 19)), 1)  # again, as after a crash
    assert (stream.counts.events, stream.counts.repeats) == (1, 1)
    with pytest.raises(ValueError, match="nothing behind batch 1"):
        stream._take(Batch((9, 22, 20)), 3)


def test_why_a_commit_failed_is_told_and_not_the_trace_of_spark(taking, monkeypatch):
    stream, _ = taking
    query = Query(error=failed(f"[FOREACH_BATCH_USER_FUNCTION_ERROR] Traceback:\n{OUTAGE}"))
    query.batch = threading.Event()
    monkeypatch.setattr(stream, "_start", lambda session, plan: query)
    with pytest.raises(ValueError, match="continues with batch 4"):
        stream._take(Batch((7, 20, 19)), 4)
    with pytest.raises(ValueError, match="continues with batch 4"):
        stream.run(None, PLAN, threading.Event())
