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


def test_a_cluster_that_went_is_asked_again_and_one_that_never_was_is_not(session, tmp_path):
    told, stopping = [], threading.Event()

    def tell(line):
        told.append(line)
        stopping.set()

    with socket.create_server(("127.0.0.1", 0)) as reserved:
        nobody = f"127.0.0.1:{reserved.getsockname()[1]}"
    place = str(tmp_path / "checkpoint")
    plan = HistoryPlan(controllers=nobody, checkpoint=place, trigger="1 seconds", patience="100ms")
    stream = HistoryStream(ParquetTable(str(tmp_path / "out")), plan, tell)
    with pytest.raises(StreamingQueryException, match="ClusterError"):
        stream.run(session, stopping)
    assert told == []
    stream.counts.batches = 1
    stream.run(session, stopping)
    (line,) = told
    assert nobody in line and line.endswith("next attempt in 5 s")
