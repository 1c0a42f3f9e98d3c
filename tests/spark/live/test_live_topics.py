"""Topics of a real cluster: batches, streams and the sink, also while a master dies.

Each Spark query starts Python processes of its own, so what Spark has no part in is read by the
same code without it (`rows`, `step`).
"""

import json
import threading
import time
from collections import Counter

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from batonmq.blocking import BlockingAdmin, BlockingProducer
from batonmq.protocol.bodies import TopicConfig
from batonmq.protocol.message import Message, MessageQueue
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.offsets import DataLossError
from batonmq.spark.live.options import SinkOptions, TopicOptions
from batonmq.spark.live.sink import TopicWriter
from batonmq.spark.live.sink_sender import SinkError
from batonmq.spark.live.stream_plan import StreamPlan
from batonmq.spark.live.topic_read import TopicRead
from lab.cluster.client_writer import ClientWriter
from lab.cluster.processes import wait_for
from lab.cluster.writer import wait_acks
from tests.spark import table_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]
PATIENCE_S = 120.0


def make_topic(cluster, topic, queues=2):
    config = TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues)
    with BlockingAdmin(cluster.name_servers) as admin:
        admin.topics.create_or_update(config, broker="broker-a")


def send(cluster, topic, numbers, queues=2, body=None):
    """Sends `numbers`, each to the queue that it names modulo; {(queue, offset): number}."""
    sent = {}
    with BlockingProducer("live_tests", name_servers=cluster.name_servers) as producer:
        for queue_id in range(queues):
            mine = [n for n in numbers if n % queues == queue_id]
            for at in range(0, len(mine), 50):
                part = mine[at : at + 50]
                result = producer.send_batch(
                    [
                        Message.of(
                            topic, body or b"%d" % n, keys=f"k{n}", tags="odd" if n % 2 else "even"
                        )
                        for n in part
                    ],
                    queue=MessageQueue(topic, "broker-a", queue_id),
                )
                assert result.acknowledged
                sent |= {(queue_id, result.queue_offset + i): n for i, n in enumerate(part)}
    return sent


def options(cluster, topic, **more):
    return {"table": "topic", "nameServers": cluster.name_servers, "topic": topic, **more}


def read(session, cluster, topic, **more):
    return session.read.format("batonmq").options(**options(cluster, topic, **more)).load()


def rows(cluster, topic, **more):
    """The rows of a batch read as dicts, without Spark."""
    return table_rows.topic(options(cluster, topic, **more))


def step(cluster, topic, start=None, **more):
    """One batch of a stream to what there is now, without Spark: (its rows, where it ends)."""
    read = TopicRead(
        TopicOptions.from_mapping(
            options(cluster, topic, startingOffsets="earliest", **more), streaming=True
        )
    )
    plan = StreamPlan(read)
    try:
        start = plan.initial() if start is None else start
        end = plan.next_end(start, 0)
        return table_rows.taken(read, plan.tasks(start, end)), end
    finally:
        plan.close()


def places(found):
    """{(queue, offset): number} of rows; each place must be there once."""
    at = {(row["queue_id"], row["queue_offset"]): int(row["keys"][1:]) for row in found}
    assert len(at) == len(found), "a message came twice"
    return at


def start_stream(session, cluster, topic, folder, *, once=True, **more):
    frame = (
        session.readStream.format("batonmq")
        .options(**options(cluster, topic, columns="topic,queue_id,queue_offset,keys", **more))
        .load()
    )
    writer = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("path", str(folder / "out"))
    )
    return (writer.trigger(availableNow=True) if once else writer).start()


def stream(session, cluster, topic, folder, **more):
    """One run of a stream to what there is now; the rows of each of its batches."""
    query = start_stream(session, cluster, topic, folder, **more)
    query.awaitTermination()
    return [each.numInputRows for each in query.recentProgress if each.numInputRows]


def test_a_batch_is_what_was_sent(session, live_cluster):
    """Of several topics; the columns say what was stored, filters leave the rest."""
    make_topic(live_cluster, "BatchA")
    make_topic(live_cluster, "BatchB")
    sent = send(live_cluster, "BatchA", range(300))
    with BlockingProducer("live_tests", name_servers=live_cluster.name_servers) as producer:
        large = producer.send(Message.of("BatchB", b"large " * 2000, keys="k7"))
    epoch = live_cluster.wait_in_sync(3)["masterEpoch"]
    both = read(session, live_cluster, "BatchA, BatchB", maxOffsetsPerPartition="100")
    assert both.filter("tags = 'odd' and queue_id = 1").count() == 150
    # A frame that is used again has not kept the filters of its first use.
    found = both.collect()
    rows_a = [row for row in found if row.topic == "BatchA"]
    assert {(r.queue_id, r.queue_offset): int(r.body) for r in rows_a} == sent
    assert len(rows_a) == 300
    (row_b,) = [row for row in found if row.topic == "BatchB"]
    assert (row_b.body, row_b.unique_key) == (b"large " * 2000, large.msg_id)
    assert row_b.sys_flag & 1, "it was stored compressed"
    row = rows_a[0]
    assert {r.epoch for r in found} == {epoch}
    assert (row.broker, row.tags) == ("broker-a", "odd" if int(row.body) % 2 else "even")
    assert row.properties["KEYS"] == row["keys"] == f"k{int(row.body)}"


def test_offsets_times_and_tags_choose_what_is_read(live_cluster):
    make_topic(live_cluster, "Choice")
    sent = send(live_cluster, "Choice", range(300))
    everything = rows(live_cluster, "Choice")
    assert places(everything) == sent
    moment = sorted(row["store_at"] for row in everything)[150]
    older = {(r["queue_id"], r["queue_offset"]) for r in everything if r["store_at"] < moment}
    text = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    assert set(places(rows(live_cluster, "Choice", endingTimestamp=text))) == older and older
    after = places(rows(live_cluster, "Choice", startingTimestamp=text))
    assert set(after) == set(sent) - older
    part = rows(
        live_cluster,
        "Choice",
        startingOffsets=json.dumps({"Choice": {"broker-a": {"0": 10}}}),
        endingOffsets=json.dumps({"Choice": {"broker-a": {"0": 20, "1": 5}}}),
    )
    assert sorted(places(part)) == [(0, n) for n in range(10, 20)] + [(1, n) for n in range(5)]
    odd = rows(live_cluster, "Choice", tags="odd || none")
    assert places(odd) == {place: n for place, n in sent.items() if n % 2}
    with pytest.raises(ClusterError, match="no route for topic Nowhere"):
        rows(live_cluster, "Nowhere")


def test_a_stream_gives_each_message_once_over_several_runs(session, live_cluster, tmp_path):
    """Two topics, rate limits, a topic that grows, and runs that find more or nothing."""
    make_topic(live_cluster, "StreamA")
    make_topic(live_cluster, "StreamB")
    sent_a = send(live_cluster, "StreamA", range(100))
    sent_b = send(live_cluster, "StreamB", range(40))
    given = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "80"}
    sizes = stream(session, live_cluster, "StreamA,StreamB", tmp_path, **given)
    assert sizes == [80, 60]
    make_topic(live_cluster, "StreamA", queues=3)
    more = send(live_cluster, "StreamA", range(100, 130), queues=3)
    stream(session, live_cluster, "StreamA,StreamB", tmp_path, **given)
    out = session.read.parquet(str(tmp_path / "out")).collect()
    assert places([row for row in out if row.topic == "StreamA"]) == sent_a | more
    assert places([row for row in out if row.topic == "StreamB"]) == sent_b


def test_a_stream_outlives_its_master(session, live_cluster, tmp_path):
    """kill -9 of the master while the stream reads and a writer writes: each message once."""
    make_topic(live_cluster, "Failover", queues=1)
    query = start_stream(
        session, live_cluster, "Failover", tmp_path, once=False, startingOffsets="earliest"
    )
    old = live_cluster.master()
    with ClientWriter(live_cluster.name_servers, "Failover") as writer:
        wait_for("rows in the stream", lambda: query.lastProgress is not None, PATIENCE_S)
        live_cluster.kill(old)
        live_cluster.wait_new_master(old["address"])
        wait_acks(writer, 20, PATIENCE_S)
    query.processAllAvailable()
    assert query.isActive and query.exception() is None
    query.stop()
    found = places(session.read.parquet(str(tmp_path / "out")).collect())
    acked = {(0, ack.queue_offset): ack.number for ack in writer.acks}
    assert found.items() >= acked.items()
    assert sorted(found) == [(0, n) for n in range(len(found))]
    live_cluster.wait_in_sync(3)
    epochs = {row["epoch"] for row in rows(live_cluster, "Failover", columns="epoch")}
    assert len(epochs) == 2, "messages of before and after the failover"


def acks_in(folder):
    texts = [path.read_text() for path in folder.glob("*.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines(True) if "\n" in line]


def test_the_sink_loses_nothing_when_the_master_dies(session, live_cluster, tmp_path):
    """kill -9 in the middle of a write: every row is in the log, every ack is true."""
    make_topic(live_cluster, "Sink")
    count = 20_000
    frame = session.range(0, count, 1, 2).selectExpr(
        "concat('row ', id) body", "concat('k', id) keys", "map('n', string(id)) properties"
    )
    folder = tmp_path / "acks"
    writer = frame.write.format("batonmq").mode("append")
    writer = writer.options(
        nameServers=live_cluster.name_servers, topic="Sink", ackReport=str(folder), inFlight="2"
    )
    old = live_cluster.master()

    def kill_within():
        wait_for("the first acks", lambda: acks_in(folder), PATIENCE_S)
        live_cluster.kill(old)

    killer = threading.Thread(target=kill_within)
    killer.start()
    writer.save()
    killer.join(PATIENCE_S)
    live_cluster.wait_in_sync(3)
    acks = acks_in(folder)
    assert len({ack["msg_id"][:16] for ack in acks}) == 2, "two masters have acknowledged"
    (committed,) = [json.loads(p.read_text()) for p in folder.glob("_committed-*.json")]
    assert committed["messages"] == len(acks) == len({a["unique_key"] for a in acks}) == count
    found = rows(
        live_cluster, "Sink", columns="queue_id,queue_offset,unique_key,keys,body,properties"
    )
    at = {(row["queue_id"], row["queue_offset"]): row for row in found}
    for ack in acks:
        assert (ack["topic"], ack["broker"]) == ("Sink", "broker-a")
        assert at[ack["queue_id"], ack["queue_offset"]]["unique_key"] == ack["unique_key"]
    by_key = {row["unique_key"]: row for row in found}
    assert len(by_key) == count, "a repeat has the key of the first sending"
    assert sorted(int(row["body"][4:]) for row in by_key.values()) == list(range(count))
    assert all(dict(row["properties"])["n"] == row["keys"][1:] for row in by_key.values())


def test_a_stream_into_a_topic_repeats_a_batch_under_the_same_keys(session, live_cluster, tmp_path):
    make_topic(live_cluster, "From")
    make_topic(live_cluster, "Into")
    send(live_cluster, "From", range(50))

    def run():
        frame = (
            session.readStream.format("batonmq")
            .options(**options(live_cluster, "From", startingOffsets="earliest"))
            .load()
            .selectExpr("body", "'Into' topic", "keys", "tags", "keys sharding_key")
        )
        query = (
            frame.writeStream.format("batonmq")
            .options(nameServers=live_cluster.name_servers)
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    (tmp_path / "commits" / "0").unlink()  # as if the job had died before it noted batch 0
    (tmp_path / "commits" / ".0.crc").unlink()
    run()
    found = rows(live_cluster, "Into", columns="unique_key,keys,queue_id")
    keys = Counter(row["unique_key"] for row in found)
    assert len(keys) == 50 and set(keys.values()) == {2}
    assert len({(row["unique_key"], row["keys"], row["queue_id"]) for row in found}) == 50


def test_the_sink_refuses_what_it_cannot_send(live_cluster):
    make_topic(live_cluster, "Refusing")
    given = {"nameServers": live_cluster.name_servers, "topic": "Refusing"}
    schema = StructType().add("body", "binary").add("queue_id", "integer")
    writer = TopicWriter(SinkOptions.from_mapping(given), schema, overwrite=False)
    with pytest.raises(SinkError, match=r"queue_id 9: no such queue; there are Refusing@broker-a"):
        writer.write(iter([pa.RecordBatch.from_pylist([{"body": b"x", "queue_id": 9}])]))
    assert rows(live_cluster, "Refusing") == []


def test_lost_offsets_fail_the_read_or_are_passed_over(live_cluster):
    """An end beyond the queue's; a topic deleted and made anew under a stream's checkpoint."""
    make_topic(live_cluster, "Lost", queues=1)
    sent = send(live_cluster, "Lost", range(60), queues=1)
    beyond = {"endingOffsets": '{"Lost": {"broker-a": {"0": 99}}}'}
    says = r"topic Lost, broker broker-a, queue 0: requested offsets \[0, 99\), available are"
    with pytest.raises(DataLossError, match=says + r" \[0, 60\)"):
        rows(live_cluster, "Lost", **beyond)
    assert places(rows(live_cluster, "Lost", failOnDataLoss="false", **beyond)) == sent

    first, checkpoint = step(live_cluster, "Lost")
    assert places(first) == sent
    with BlockingAdmin(live_cluster.name_servers) as admin:
        admin.topics.delete("Lost", "DefaultCluster")
    wait_for("the topic made anew", lambda: _made(live_cluster), PATIENCE_S)
    again = send(live_cluster, "Lost", range(100, 120), queues=1)
    with pytest.raises(DataLossError, match=r"offsets \[60, 60\), available are \[0, 20\)"):
        step(live_cluster, "Lost", checkpoint)
    loose, end = step(live_cluster, "Lost", checkpoint, failOnDataLoss="false")
    assert places(loose) == again
    assert step(live_cluster, "Lost", end) == ([], end)


def _made(cluster):
    try:
        make_topic(cluster, "Lost", queues=1)
    except Exception:
        time.sleep(0.05)
        return False
    return True
