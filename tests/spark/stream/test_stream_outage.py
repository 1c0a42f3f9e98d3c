"""What only Spark itself can show: what a query says when no cluster answers."""

import socket
import threading

import pytest
from pyspark.errors import StreamingQueryException

from batonmq.spark.history import stream as module
from batonmq.spark.history.stream import HistoryStream, StreamSettings
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
    plan = StreamSettings(nobody, str(tmp_path / "checkpoint"), 10, "1 seconds")
    with pytest.raises(StreamingQueryException, match="ClusterError"):
        stream.run(session, plan, stopping)
    assert told == []
    stream.counts.batches = 1
    stream.run(session, plan, stopping)
    (line,) = told
    assert nobody in line and line.endswith("next attempt in 5 s")
