"""What a real query says when no cluster answers: the stream must understand it."""

import socket
import threading
import warnings

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from spark.history_stream import stream as module
from spark.history_stream.output import StreamOutput
from spark.history_stream.stream import HistoryStream, StreamPlan
from spark.session import open_session

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]


@pytest.fixture
def session():
    theirs = SparkSession.getActiveSession()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = open_session(
            "stream-outage",
            master="local[1]",
            settings={
                "spark.ui.enabled": "false",
                "spark.sql.shuffle.partitions": "1",
                # A Python process may take long to start while the machine has other work.
                "spark.python.authenticate.socketTimeout": "120s",
            },
        )
        made.sparkContext.setLogLevel("OFF")
        yield made
        if theirs is None:
            made.stop()


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
    assert nobody in line and line.endswith("asked again in 5 s")
