"""The run of the query, without Spark: when it ends, and what it does then."""

import threading

import pytest

from spark.history_stream.output import StreamOutput
from spark.history_stream.stream import HistoryStream, StreamPlan
from spark.jobs.stream_history import _interval

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

    def commit(batch):
        query.batch.set()
        entered.set()
        stopping.wait(10)
        query.batch.clear()

    class Batch:
        def persist(self): ...

        def unpersist(self): ...

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
