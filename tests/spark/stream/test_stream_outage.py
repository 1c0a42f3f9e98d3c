"""What only Spark itself can show: what a query says when no cluster answers."""

import socket
import threading

import pytest
from pyspark.errors import StreamingQueryException

from batonmq.spark.topic_table.history_stream import HistoryPlan, HistoryStream
from batonmq.spark.topic_table.parquet_table import ParquetTable

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]
SECRET = "hidden-secret"


def test_a_cluster_that_went_is_asked_again_and_one_that_never_was_is_not(
    session, tmp_path, monkeypatch
):
    """Neither the error, the plan nor the checkpoint shows the secret of the options."""
    lines, stopping = [], threading.Event()

    def tell(line):
        lines.append(line)
        stopping.set()

    with socket.create_server(("127.0.0.1", 0)) as reserved:
        unreachable = f"127.0.0.1:{reserved.getsockname()[1]}"
    place = tmp_path / "checkpoint"
    plan = HistoryPlan(
        controllers=unreachable, checkpoint=str(place), trigger="1 seconds", patience="100ms"
    )
    stream = HistoryStream(ParquetTable(str(tmp_path / "out")), plan, tell)
    source = stream._source() | {"accessKey": "admin", "secretKey": SECRET}
    monkeypatch.setattr(stream, "_source", lambda: source)
    with pytest.raises(StreamingQueryException, match="ClusterError") as failed:
        stream.run(session, stopping)
    assert lines == []
    stream.counts.batches = 1
    stream.run(session, stopping)
    (line,) = lines
    assert unreachable in line and line.endswith("next attempt in 5 s")
    shown = session.readStream.format("batonmq").options(**source).load()
    plans = shown._jdf.queryExecution().toString()
    assert SECRET not in f"{plans}{failed.value}{line}"
    for file in place.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
