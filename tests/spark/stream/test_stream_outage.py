"""What only Spark itself can show: what a query says when no cluster answers, odd messages."""

import socket
import threading
from datetime import date, datetime

import pytest
from pyspark.errors import StreamingQueryException

from batonmq.spark.history import stream as module
from batonmq.spark.history.stream import HistoryStream, StreamPlan
from batonmq.spark.history.stream_events import events
from batonmq.spark.history.stream_output import StreamOutput

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]


def test_a_cluster_that_went_is_asked_again_and_one_that_never_was_is_not(
    session, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "PATIENCE", "100ms")
    told, stopping = [], threading.Event()

    def tell(line):
        told.append(line)
        stopping.set()

    stream = HistoryStream(StreamOutput(tmp_path / "out"), tell)
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        nobody = f"127.0.0.1:{reserved.getsockname()[1]}"
    plan = StreamPlan(nobody, str(tmp_path / "checkpoint"), 10, "1 seconds")
    with pytest.raises(StreamingQueryException, match="ClusterError"):
        stream.run(session, plan, stopping)
    assert told == []
    stream.counts.batches = 1
    stream.run(session, plan, stopping)
    (line,) = told
    assert nobody in line and line.endswith("next attempt in 5 s")


def test_messages_that_are_no_events_and_wild_times_stop_nothing(session):
    """Anybody may send to the topic of a Java broker."""
    event = '{"log":"a","raft_index":%d,"time_ms":%d,"kind":"elected","broker_name":"g"}'
    bodies = [
        event % (1, 1_795_000_000_000),
        event % (2, 9_200_000_000_000_000_000),
        event % (3, -9_200_000_000_000_000_000),
        '{"log":"a","raft_index":"x","time_ms":1,"kind":"elected"}',
        '{"log":"a"}',
        "nonsense",
        "[1]",
        "",
        event % (8, 1) + "\n" + event % (8, 1),
        event % (9, 1_795_000_000_000),
    ]
    afters = ["0-3", "1-0", "none", "0-0", "-", "", "5", None, "0-0", "9" * 40 + "-0"]
    rows = [
        ("b", 0, at, datetime(2026, 11, 22), body.encode(), {"BATON_AFTER": after})
        for at, (body, after) in enumerate(zip(bodies, afters, strict=True))
    ]
    schema = (
        "broker string, queue_id int, queue_offset bigint, store_at timestamp, body binary, "
        "properties map<string,string>"
    )
    found = events(session.createDataFrame(rows, schema).toArrow()).to_pylist()
    places = [(row["log"], row["raft_index"], row["queue_offset"]) for row in found]
    assert places == [("a", 1, 0), ("a", 2, 1), ("a", 3, 2), ("a", 9, 9)]
    assert [row["time"] is None for row in found] == [False, True, True, False]
    assert (found[0]["day"], found[1]["day"]) == (date(2026, 11, 18), None)
    assert [row["after"] for row in found] == [3, 1 << 16, None, None]
    assert {(row["file"], row["group"], row["broker"]) for row in found} == {(None, "g", "b")}
