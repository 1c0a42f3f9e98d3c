"""Topics of a real cluster in Spark: batches, streams and the sink, also while a master dies."""

import json
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
from cluster_process import wait_for

from batonmq.blocking import BlockingAdmin, BlockingProducer
from protocol.bodies import TopicConfig
from protocol.message import Message, MessageQueue
from tests.chaos.client_load import ClientWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
]
PATIENCE_S = 120.0


def make_topic(cluster, topic, queues=2):
    config = TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues)
    with BlockingAdmin(cluster.name_servers) as admin:
        admin.create_or_update_topic(config, broker="broker-a")


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


def places(frame):
    """{(queue, offset): number} of a frame; each place must be there once."""
    rows = frame.select("queue_id", "queue_offset", "keys").collect()
    found = {(row.queue_id, row.queue_offset): int(row["keys"][1:]) for row in rows}
    assert len(found) == len(rows), "a message came twice"
    return found


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


def test_a_batch_is_what_was_sent(live_session, live_cluster):
    """By offsets, by times, by tags, of several topics; the columns say what was stored."""
    make_topic(live_cluster, "BatchA")
    make_topic(live_cluster, "BatchB")
    sent = send(live_cluster, "BatchA", range(300))
    with BlockingProducer("live_tests", name_servers=live_cluster.name_servers) as producer:
        large = producer.send(Message.of("BatchB", b"large " * 2000, keys="k7"))
    epoch = live_cluster.wait_in_sync(3)["masterEpoch"]
    both = read(live_session, live_cluster, "BatchA, BatchB", maxOffsetsPerPartition="100")
    rows = both.collect()
    rows_a = [row for row in rows if row.topic == "BatchA"]
    assert {(r.queue_id, r.queue_offset): int(r.body) for r in rows_a} == sent
    assert len(rows_a) == 300
    (row_b,) = [row for row in rows if row.topic == "BatchB"]
    assert (row_b.body, row_b.unique_key) == (b"large " * 2000, large.msg_id)
    assert row_b.sys_flag & 1, "it was stored compressed"
    row = rows_a[0]
    assert {r.epoch for r in rows} == {epoch}
    assert (row.broker, row.tags) == ("broker-a", "odd" if int(row.body) % 2 else "even")
    assert row.properties["KEYS"] == row["keys"] == f"k{int(row.body)}"
    # A frame that is used again has not kept the filters of its first use.
    assert both.filter("tags = 'odd' and queue_id = 1").count() == 150
    assert both.count() == 301

    moment = sorted(r.store_at for r in rows_a)[150]
    older = {(r.queue_id, r.queue_offset) for r in rows_a if r.store_at < moment}
    text = moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    before = places(read(live_session, live_cluster, "BatchA", endingTimestamp=text))
    assert set(before) == older and older
    after = places(read(live_session, live_cluster, "BatchA", startingTimestamp=text))
    assert set(after) == set(sent) - older

    part = read(
        live_session,
        live_cluster,
        "BatchA",
        startingOffsets=json.dumps({"BatchA": {"broker-a": {"0": 10}}}),
        endingOffsets=json.dumps({"BatchA": {"broker-a": {"0": 20, "1": 5}}}),
    )
    assert sorted(places(part)) == [(0, n) for n in range(10, 20)] + [(1, n) for n in range(5)]
    odd = read(live_session, live_cluster, "BatchA", tags="odd || none")
    assert places(odd) == {place: n for place, n in sent.items() if n % 2}
    pushed = read(live_session, live_cluster, "BatchA", pushdown="true").filter(
        f"tags = 'even' and queue_offset >= 140 and store_at > '{moment - timedelta(hours=3)}'"
    )
    assert places(pushed) == {p: n for p, n in sent.items() if n % 2 == 0 and p[1] >= 140}


def test_wrong_use_is_refused_by_name(live_session, live_cluster):
    for more, told in (
        ({"startOffsets": "latest"}, "unknown option startoffsets"),
        ({"columns": "store"}, "table topic has no store"),
        ({"maxOffsetsPerTrigger": "5"}, "streams only"),
    ):
        with pytest.raises(Exception, match=told):
            read(live_session, live_cluster, "BatchA", **more).collect()
    with pytest.raises(Exception, match="no route for topic Nowhere"):
        read(live_session, live_cluster, "Nowhere").collect()
    with pytest.raises(Exception, match="cannot be streamed"):
        frame = live_session.readStream.format("batonmq").option("table", "epochs").load("/tmp")
        frame.writeStream.format("noop").start().awaitTermination()


def test_a_stream_gives_each_message_once_over_several_runs(live_session, live_cluster, tmp_path):
    """Two topics, rate limits, a topic that grows, and runs that find more or nothing."""
    make_topic(live_cluster, "StreamA")
    make_topic(live_cluster, "StreamB")
    sent_a = send(live_cluster, "StreamA", range(100))
    sent_b = send(live_cluster, "StreamB", range(40))
    given = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "60"}
    sizes = stream(live_session, live_cluster, "StreamA,StreamB", tmp_path, **given)
    assert sizes == [60, 60, 20]
    make_topic(live_cluster, "StreamA", queues=3)
    more = send(live_cluster, "StreamA", range(100, 130), queues=3)
    stream(live_session, live_cluster, "StreamA,StreamB", tmp_path, **given)
    assert stream(live_session, live_cluster, "StreamA,StreamB", tmp_path, **given) == []
    out = live_session.read.parquet(str(tmp_path / "out"))
    assert places(out.filter("topic = 'StreamA'")) == sent_a | more
    assert places(out.filter("topic = 'StreamB'")) == sent_b


def test_a_stream_outlives_its_master(live_session, live_cluster, tmp_path):
    """kill -9 of the master while the stream reads and a writer writes: each message once."""
    make_topic(live_cluster, "Failover", queues=1)
    query = start_stream(
        live_session, live_cluster, "Failover", tmp_path, once=False, startingOffsets="earliest"
    )
    old = live_cluster.master()
    with ClientWriter(live_cluster.name_servers, "Failover", 0, "broker-a") as writer:
        wait_for("rows in the stream", lambda: query.lastProgress is not None, PATIENCE_S)
        live_cluster.kill(old)
        live_cluster.wait_new_master(old["address"])
        before = len(writer.acks)
        wait_for("acks of the new master", lambda: len(writer.acks) > before + 20, PATIENCE_S)
    query.processAllAvailable()
    assert query.isActive and query.exception() is None
    query.stop()
    found = places(live_session.read.parquet(str(tmp_path / "out")))
    acked = {(0, ack.queue_offset): ack.number for ack in writer.acks}
    assert found.items() >= acked.items()
    assert sorted(found) == [(0, n) for n in range(len(found))]
    live_cluster.wait_in_sync(3)
    epochs = read(live_session, live_cluster, "Failover", columns="epoch").distinct().collect()
    assert len(epochs) == 2, "messages of before and after the failover"


def acks_in(folder):
    texts = [path.read_text() for path in folder.glob("*.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines(True) if "\n" in line]


def test_the_sink_loses_nothing_when_the_master_dies(live_session, live_cluster, tmp_path):
    """kill -9 in the middle of a write: every row is in the log, every ack is true."""
    make_topic(live_cluster, "Sink")
    count = 20_000
    frame = live_session.range(0, count, 1, 4).selectExpr(
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
    (told,) = [json.loads(p.read_text()) for p in folder.glob("_committed-*.json")]
    assert told["messages"] == len(acks) == len({a["unique_key"] for a in acks}) == count
    rows = read(
        live_session,
        live_cluster,
        "Sink",
        columns="queue_id,queue_offset,unique_key,keys,body,properties",
    ).collect()
    at = {(row.queue_id, row.queue_offset): row for row in rows}
    for ack in acks:
        row = at[ack["queue_id"], ack["queue_offset"]]
        assert (ack["topic"], ack["broker"]) == ("Sink", "broker-a")
        assert row.unique_key == ack["unique_key"]
    by_key = {row.unique_key: row for row in rows}
    assert len(by_key) == count, "a repeat has the key of the first sending"
    assert sorted(int(row.body[4:]) for row in by_key.values()) == list(range(count))
    assert all(row.properties["n"] == row["keys"][1:] for row in by_key.values())


def test_a_stream_into_a_topic_repeats_a_batch_under_the_same_keys(
    live_session, live_cluster, tmp_path
):
    make_topic(live_cluster, "From")
    make_topic(live_cluster, "Into")
    send(live_cluster, "From", range(50))

    def run():
        frame = (
            live_session.readStream.format("batonmq")
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
    rows = read(live_session, live_cluster, "Into", columns="unique_key,keys,queue_id").collect()
    keys = Counter(row.unique_key for row in rows)
    assert len(keys) == 50 and set(keys.values()) == {2}
    assert len({(row.unique_key, row["keys"], row.queue_id) for row in rows}) == 50


def test_the_sink_refuses_what_it_cannot_send(live_session, live_cluster):
    def write(expression, mode="append", **more):
        frame = live_session.range(3).selectExpr(*expression)
        given = {"nameServers": live_cluster.name_servers, "topic": "Into", **more}
        frame.write.format("batonmq").mode(mode).options(**given).save()

    with pytest.raises(Exception, match="cannot be overwritten: use mode append"):
        write(["'x' body"], mode="overwrite")
    with pytest.raises(Exception, match="row 0 of its partition has no body"):
        write(["cast(null as string) body"])
    with pytest.raises(Exception, match=r"queue_id 9: no such queue; there are Into@broker-a:0"):
        write(["'x' body", "9 queue_id"])


def test_lost_offsets_fail_the_read_or_are_passed_over(live_session, live_cluster, tmp_path):
    """An end beyond the queue's; a topic deleted and made anew under a stream's checkpoint."""
    make_topic(live_cluster, "Lost", queues=1)
    sent = send(live_cluster, "Lost", range(60), queues=1)
    beyond = {"endingOffsets": '{"Lost": {"broker-a": {"0": 99}}}'}
    told = r"topic Lost, broker broker-a, queue 0: asked for offsets \[0, 99\), available are"
    with pytest.raises(Exception, match=told + r" \[0, 60\)"):
        read(live_session, live_cluster, "Lost", **beyond).collect()
    loose = read(live_session, live_cluster, "Lost", failOnDataLoss="false", **beyond)
    assert places(loose) == sent

    given = {"startingOffsets": "earliest"}
    assert stream(live_session, live_cluster, "Lost", tmp_path, **given) == [60]
    with BlockingAdmin(live_cluster.name_servers) as admin:
        admin.delete_topic("Lost", "DefaultCluster")
    wait_for("the topic made anew", lambda: _made(live_cluster), PATIENCE_S)
    again = send(live_cluster, "Lost", range(100, 120), queues=1)
    with pytest.raises(Exception, match=r"asked for offsets \[60, 60\), available are \[0, 20\)"):
        stream(live_session, live_cluster, "Lost", tmp_path, **given)
    rows = stream(live_session, live_cluster, "Lost", tmp_path, failOnDataLoss="false", **given)
    assert rows == [20]
    out = live_session.read.parquet(str(tmp_path / "out"))
    assert Counter(int(r["keys"][1:]) for r in out.collect()) == Counter(
        [*sent.values(), *again.values()]
    )


def _made(cluster):
    try:
        make_topic(cluster, "Lost", queues=1)
    except Exception:
        time.sleep(0.05)
        return False
    return True
