"""The sink without Spark or a cluster: order, keys, rows that wait, the list of what was acked."""

import asyncio
import json
import threading

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from batonmq.client.errors import NoRouteError
from batonmq.client.producer.sending import SendResult, SendStatus
from batonmq.protocol.message import MessageQueue
from batonmq.runtime import disk
from batonmq.spark.live import cluster, sink
from batonmq.spark.live import sink_sender as sender_module
from batonmq.spark.live.options import SinkOptions
from batonmq.spark.live.sink import Sent, TopicStreamWriter
from batonmq.spark.live.sink_sender import AckFile, SinkError, SinkSender, row_of

QUEUE = MessageQueue("T", "b", 0)


def rows_of(*bodies, prefix="job-0-0-", **more):
    return [row_of(n, prefix, {"body": body, **more}, "T") for n, body in enumerate(bodies)]


class Sender(SinkSender):
    """Sends into `stored`; `fails`: bodies whose request fails. Every queue is QUEUE."""

    def __init__(self, *, fails=(), **options):
        self.acks = []
        self.stored = []
        super().__init__(SinkOptions(("h:1",), ("T",), **options), self.acks.extend)
        self._fails = set(fails)

    async def start(self):
        pass

    async def close(self):
        pass

    async def _queue_of(self, row):
        return QUEUE if row.queue_id is not None else None

    async def _send(self, rows, queue):
        await asyncio.sleep(0)
        bodies = [row.message.body for row in rows]
        if self._fails & set(bodies):
            raise SinkError("refused")
        self.stored += bodies
        return SendResult(
            SendStatus.SEND_OK, "id", ",".join("0" * 31 + "1" for _ in rows), queue or QUEUE, 5
        )


@pytest.mark.parametrize("batch_messages", [1, 2])
@pytest.mark.parametrize("in_flight", [1, 3, 8])
def test_behind_a_failed_request_of_a_queue_nothing_is_sent(batch_messages, in_flight):
    bodies = [b"%d" % n for n in range(12)]

    async def run(sender):
        await sender.add(rows_of(*bodies, queue_id=0))
        await sender.finish()

    options = {"batch_messages": batch_messages, "in_flight": in_flight}
    whole = Sender(**options)
    asyncio.run(run(whole))
    assert whole.stored == bodies
    assert [ack["unique_key"] for ack in whole.acks] == [
        row.unique_key for row in rows_of(*bodies, queue_id=0)
    ]
    broken = Sender(fails=[b"4"], **options)
    with pytest.raises(SinkError, match="refused"):
        asyncio.run(run(broken))
    assert broken.stored == bodies[:4]
    assert len(broken.acks) == 4


def test_a_key_names_the_row_and_not_only_its_place():
    """What is done again in another order must give no row the key of another."""
    first = rows_of(b"a", b"b", b"c")
    assert [row.unique_key for row in rows_of(b"a", b"b", b"c")] == [r.unique_key for r in first]
    assert all(row.unique_key.startswith(f"job-0-0-{row.number}-") for row in first)
    again = rows_of(b"b", b"a", b"c")
    of_body = {row.unique_key: row.message.body for row in first}
    assert all(of_body.get(row.unique_key, row.message.body) == row.message.body for row in again)
    assert again[2].unique_key == first[2].unique_key
    twice = rows_of(b"a", b"a")
    assert twice[0].unique_key != twice[1].unique_key, "equal rows are two messages"


def test_everything_that_a_row_says_is_in_its_key():
    said = [
        {"body": "x"},
        {"body": "y"},
        {"body": "x", "topic": "U"},
        {"body": "x", "keys": "k"},
        {"body": "x", "tags": "k"},
        {"body": "x", "properties": [("a", "1")]},
        {"body": "x", "properties": [("a", "1"), ("b", "2")]},
        {"body": "x", "properties": [("a", "12")]},
        {"body": "x", "queue_id": 1},
        {"body": "x", "queue_id": 1, "broker": "b"},
        {"body": "x", "sharding_key": "k"},
    ]
    keys = [row_of(0, "j-", values, "T").unique_key for values in said]
    assert len(set(keys)) == len(said)
    turned = {"body": b"x", "properties": [("b", "2"), ("a", "1")]}
    assert row_of(0, "j-", turned, "T").unique_key == keys[6], "a map has no order"


class Quiet(Sender):
    """As a task makes one; its requests have one row each."""

    def __init__(self, options, acknowledged):
        super().__init__(batch_messages=1)
        self._acknowledged = acknowledged


PATIENCE_S = 60.0


def batch_of(*bodies):
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})


def test_requests_go_on_while_spark_makes_the_next_batch(monkeypatch, tmp_path):
    """A batch may take longer than sendTimeout; answers must not lie in the sockets until then."""
    asked, answered = threading.Event(), threading.Event()
    requests = []

    class Watched(Quiet):
        def __init__(self, options, acknowledged):
            super().__init__(options, lambda acks: (acknowledged(acks), answered.set()))

        async def _send(self, rows, queue):
            answer = asyncio.Event()
            requests.append((asyncio.get_running_loop(), answer))
            asked.set()
            if rows[0].number == 0:
                await answer.wait()
            return await super()._send(rows, queue)

    def batches():
        yield batch_of(b"a", b"b")
        assert asked.wait(PATIENCE_S)
        loop, answer = requests[0]
        loop.call_soon_threadsafe(answer.set)  # the broker answers now
        assert answered.wait(PATIENCE_S), "no request was answered while the next batch was made"
        yield batch_of(b"c")

    monkeypatch.setattr(sink, "SinkSender", Watched)
    threads = threading.active_count()
    options = SinkOptions(("h:1",), ("T",), ack_folder=str(tmp_path / "acks"))
    sent = asyncio.run(sink._send(options, "job", 4, batches()))
    assert (sent.job, sent.partition, sent.messages) == ("job", 0, 3)
    assert threading.active_count() == threads, "the loop's thread ends with the task"
    (file,) = (tmp_path / "acks").iterdir()
    assert file.name.startswith("acks-job-4-0-") and file.suffix == ".jsonl"
    keys = [json.loads(line)["unique_key"] for line in file.read_text().splitlines()]
    assert [key.rpartition("-")[0] for key in keys] == [f"job-4-0-{n}" for n in range(3)]


def test_rows_are_made_beside_the_loop(monkeypatch):
    """A batch may have very many; answers must not lie in the sockets until then."""

    def watched(*given):
        makers.add(threading.current_thread())
        return row_of(*given)

    makers = set()
    monkeypatch.setattr(sink, "SinkSender", Quiet)
    monkeypatch.setattr(sink, "row_of", watched)
    batches = iter([batch_of(b"a", b"b"), batch_of(), batch_of(b"c")])
    sent = asyncio.run(sink._send(SinkOptions(("h:1",), ("T",)), "job", 0, batches))
    assert sent.messages == 3
    assert makers and threading.current_thread() not in makers


def test_a_batch_that_cannot_be_made_ends_the_task_with_its_error(monkeypatch):
    def batches():
        yield batch_of(b"a")
        raise OSError("shuffle block is gone")

    monkeypatch.setattr(sink, "SinkSender", Quiet)
    threads = threading.active_count()
    with pytest.raises(OSError, match="shuffle block is gone"):
        asyncio.run(sink._send(SinkOptions(("h:1",), ("T",)), "job", 0, batches()))
    assert threading.active_count() == threads


def test_ack_report_is_a_folder_that_all_workers_mean_alike():
    given = {"nameServers": "h:1", "topic": "T"}
    for text, path in (
        ("/data/acks", "/data/acks"),
        ("file:///data/acks", "/data/acks"),
        ("file:/data/acks", "/data/acks"),
        ("file://localhost/data/acks", "/data/acks"),
        ("FILE:///data/acks", "/data/acks"),
        ("", ""),
    ):
        assert SinkOptions.from_mapping({**given, "ackReport": text}).ack_folder == path
    for text in ("acks", "./acks", "s3://bucket/acks", "hdfs:///acks", "file://host/a", "file:a"):
        with pytest.raises(ValueError, match=r"ackReport=.* an absolute path, or file:///path"):
            SinkOptions.from_mapping({**given, "ackReport": text})


def test_the_name_of_a_list_is_durable_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(sender_module, "sync_directory", synced.append)
    with AckFile(str(tmp_path), "acks-") as report:
        report.add([{"topic": "T"}])
        assert synced == []
    assert synced == [tmp_path]


def test_what_was_acknowledged_is_written_before_the_task_goes_on(tmp_path):
    """Whole lines at once and unbuffered: what a killed task leaves behind can be read."""
    acks = [{"topic": "T", "queue_offset": n, "unique_key": f"k{n}"} for n in range(1000)]
    with AckFile(str(tmp_path / "a"), "acks-") as report:
        assert list((tmp_path / "a").iterdir()) == [], "a file comes with its first line"
        for at in range(0, 1000, 100):
            report.add(acks[at : at + 100])
            (file,) = (tmp_path / "a").iterdir()
            assert [json.loads(line) for line in file.read_text().splitlines()] == acks[: at + 100]
    with AckFile(str(tmp_path / "b"), "acks-"):
        pass
    assert list((tmp_path / "b").iterdir()) == []
    with AckFile("", "acks-") as uncounted:
        uncounted.add(acks)
    assert uncounted.count == report.count == 1000


def test_a_commit_is_told_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    options = SinkOptions(("h:1",), ("T",), ack_folder=str(tmp_path))
    writer = TopicStreamWriter(options, StructType([StructField("body", BinaryType())]), False)
    sent = [Sent("job", 0, 3), None, Sent("job", 1, 4)]
    writer.commit(sent, 7)
    (file,) = tmp_path.iterdir()
    assert file.name == "_committed-job-7.json"
    written = {"job": "job", "batch": 7, "messages": 7, "partitions": {"0": 3, "1": 4}}
    assert json.loads(file.read_text()) == written

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(disk, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        writer.commit(sent, 8)
    assert not (tmp_path / "_committed-job-8.json").exists()
    assert json.loads(file.read_text()) == written


def test_large_properties_count_as_well(monkeypatch):
    """Else a request of many rows with small bodies would be too large for a broker."""
    sender = Sender(batch_messages=1000, batch_bytes=1 << 20)
    sizes = []

    async def send(rows, queue):
        sizes.append(len(rows))
        return SendResult(SendStatus.SEND_OK, "id", "", queue or QUEUE, 5)

    async def run():
        properties = [("a", "x" * 30_000)]
        rows = [row_of(n, "j-", {"body": b"x", "properties": properties}, "T") for n in range(200)]
        await sender.add(rows)
        await sender.finish()

    monkeypatch.setattr(sender, "_send", send)
    asyncio.run(run())
    assert sum(sizes) == 200 and max(sizes) == 34


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"body": b"x" * (4 << 20 | 1)}, "the message body has 4194305 bytes, at most 4194304"),
        ({"body": b"x", "properties": [("a", "b\x01c")]}, "holds a separator"),
        ({"body": b"x", "properties": [("a", "b" * 40_000)]}, "the properties have"),
        ({"body": b"x", "topic": "a b"}, "topic"),
    ],
)
def test_the_row_that_cannot_be_sent_is_named(values, says):
    """And not the fifty that go in one request with it."""
    rows = [row_of(n, "job-0-0-", {"body": b"%d" % n}, values.get("topic", "T")) for n in range(5)]
    rows[3] = row_of(3, "job-0-0-", values, "T")

    async def run():
        sender = SinkSender(SinkOptions(("127.0.0.1:1",), ("T",)), lambda acks: None)
        await sender.start()
        try:
            await sender._send(rows if "topic" not in values else rows[3:4], None)
        finally:
            await sender.close()

    with pytest.raises(SinkError, match=rf"^row 3 of their partition .*: .*{says}"):
        asyncio.run(run())


def test_a_cluster_whose_brokers_all_start_is_waited_for_and_an_unknown_topic_is_not(monkeypatch):
    down = [True, False, True, False]

    async def is_down(client, deadline_ms):
        return down.pop(0)

    monkeypatch.setattr(sender_module, "is_down", is_down)

    def send(*answers, timeout_ms=60_000):
        left = list(answers)

        async def request(rows, queue, timeout_ms):
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        async def run():
            options = SinkOptions(("127.0.0.1:1",), ("T",), send_timeout_ms=timeout_ms)
            sender = SinkSender(options, lambda acks: None)
            monkeypatch.setattr(sender, "_request", request)
            return await sender._send(rows_of(b"a"), None)

        return asyncio.run(run())

    unknown = NoRouteError("T", ["ns:1"])
    stored = SendResult(SendStatus.SEND_OK, "id", "", QUEUE, 5)
    assert send(unknown, unknown, unknown, unknown, stored) is stored
    down += [False, False]
    with pytest.raises(SinkError, match=r"row 0 .*: no route for topic T at ns:1: create it"):
        send(unknown, unknown)
    down.append(True)
    with pytest.raises(SinkError, match=r"not acknowledged in 1 ms .*: no route at the name"):
        send(unknown, timeout_ms=1)


@pytest.mark.parametrize("status", [each for each in SendStatus if each is not SendStatus.SEND_OK])
def test_g1_what_is_stored_and_not_confirmed_is_sent_again_and_not_counted(monkeypatch, status):
    """Only code 0 is an acknowledgement. The request is repeated as it was, under the same keys."""
    results = [
        SendResult(status, "first", "", QUEUE, 5),
        SendResult(SendStatus.SEND_OK, "second", "", QUEUE, 6),
    ]
    keys, acks = [], []

    async def request(rows, queue, timeout_ms):
        keys.append([row.unique_key for row in rows])
        return results[len(keys) - 1]

    async def run():
        sender = SinkSender(SinkOptions(("127.0.0.1:1",), ("T",)), acks.extend)
        monkeypatch.setattr(sender, "_request", request)
        return await sender._send(rows_of(b"a"), None)

    monkeypatch.setattr(cluster, "pause_ms", lambda *_: 0)
    assert asyncio.run(run()) is results[1]
    assert len(keys) == 2 and keys[0] == keys[1]
