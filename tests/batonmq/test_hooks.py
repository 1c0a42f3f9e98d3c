"""The plain `Hook` protocol: what a hook sees of each kind of step, and that it changes none."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
from fake_cluster import TOPIC, FakeCluster, answer, one_by_one

from batonmq import (
    ClientOptions,
    ConsumeCall,
    ConsumeContext,
    ConsumeStatus,
    Hook,
    Message,
    MessageExt,
    MessageIllegalError,
    MessageQueue,
    Producer,
    PullConsumer,
    Reception,
    SendCall,
    SendFailedError,
    TransactionProducer,
    TransactionState,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.records.codec import decode_record

Q0 = MessageQueue(TOPIC, "broker-a", 0)


class Notes:
    """Marks what is sent, and notes each step at its end with its error."""

    def __init__(self) -> None:
        self.ended: list[tuple[SendCall | ConsumeCall, BaseException | None]] = []
        self.receptions: list[Reception] = []

    def received(self, reception: Reception) -> None:
        self.receptions.append(reception)

    @contextmanager
    def sending(self, call: SendCall) -> Iterator[None]:
        first = call.messages[0]
        marked = {**first.properties, "mark": "1"}
        call.messages = [replace(first, properties=marked), *call.messages[1:]]
        with self._noted(call):
            yield

    @contextmanager
    def consuming(self, call: ConsumeCall) -> Iterator[None]:
        with self._noted(call):
            yield

    @contextmanager
    def _noted(self, call: SendCall | ConsumeCall) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.ended.append((call, error))
            raise
        self.ended.append((call, None))


class Broken:
    """Raises or swallows at one moment of each step, as a broken exporter may."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    @contextmanager
    def _step(self, call: SendCall | ConsumeCall) -> Iterator[None]:
        if self.moment == "enter":
            call.messages = []
            raise RuntimeError("no exporter")
        try:
            yield
        except Exception:
            if self.moment != "swallow":
                raise
        if self.moment == "exit":
            raise RuntimeError("no exporter")

    def sending(self, call: SendCall) -> AbstractContextManager[None]:
        return self._step(call)

    def received(self, reception: Reception) -> None:
        raise RuntimeError("no exporter")

    def consuming(self, call: ConsumeCall) -> AbstractContextManager[None]:
        if self.moment == "call":
            raise RuntimeError("no exporter")
        return self._step(call)


def producer_of(cluster: FakeCluster, hook: Hook) -> Producer:
    options = ClientOptions(suspicion_ms=20, hook=hook)
    return Producer("pg", name_servers=cluster.name_server_addresses, client_options=options)


def refuse_one(cluster: FakeCluster) -> None:
    refused = answer(ResponseCode.MESSAGE_ILLEGAL, "no")
    cluster.master().before[RequestCode.SEND_MESSAGE_V2].append(refused)


async def consume(
    cluster: FakeCluster, hook: Hook, count: int, fails: Sequence[bytes] = ()
) -> None:
    """Until `count` calls of the listener are over; it raises for the bodies of `fails`, once."""
    done, left = asyncio.Event(), list(fails)

    async def listener(messages: Sequence[MessageExt], _: ConsumeContext) -> ConsumeStatus:
        nonlocal count
        count -= 1
        if count <= 0:
            done.set()
        if messages[0].body in left:
            left.remove(messages[0].body)
            raise ValueError("no")
        return ConsumeStatus.SUCCESS

    async with one_by_one(cluster, listener, ClientOptions(hook=hook)):
        await done.wait()


async def test_a_hook_sees_each_kind_of_send(cluster: FakeCluster) -> None:
    notes = Notes()
    async with producer_of(cluster, notes) as producer:
        one = await producer.send(Message(TOPIC, b"1"), queue=Q0)
        two = await producer.send_batch([Message(TOPIC, b"2"), Message(TOPIC, b"3")], queue=Q0)
        refuse_one(cluster)
        with pytest.raises(SendFailedError) as failed:
            await producer.send(Message(TOPIC, b"4"), queue=Q0)
        with pytest.raises(MessageIllegalError, match="empty"):
            await producer.send_batch([])
        await producer.send_oneway(Message(TOPIC, b"5"), queue=Q0)
    calls = [call for call, _ in notes.ended]
    assert all(isinstance(call, SendCall) and call.group == "pg" for call in calls)
    bodies = [[message.body for message in call.messages] for call in calls]
    assert bodies == [[b"1"], [b"2", b"3"], [b"4"], [b"5"]]
    assert calls[0] == SendCall("pg", calls[0].messages, Q0, one.msg_id, acknowledged=True)
    assert calls[1] == SendCall("pg", calls[1].messages, Q0, two.msg_id, acknowledged=True)
    for unanswered in calls[2:]:
        assert unanswered == SendCall("pg", unanswered.messages)
    assert [error for _, error in notes.ended] == [None, None, failed.value, None]
    stored = map(decode_record, cluster.groups["broker-a"].queues[TOPIC, 0])
    assert ["mark" in each.properties for each in stored][:2] == [True, True]


async def test_a_hook_sees_the_half_of_a_transaction(cluster: FakeCluster) -> None:
    notes = Notes()
    producer = TransactionProducer(
        "tg",
        lambda message: TransactionState.UNKNOWN,
        name_servers=cluster.name_server_addresses,
        client_options=ClientOptions(suspicion_ms=20, hook=notes),
    )
    async with producer:
        done = await producer.send_in_transaction(
            Message(TOPIC, b"1"), lambda message: TransactionState.UNKNOWN, queue=Q0
        )
    ((call, error),) = notes.ended
    assert isinstance(call, SendCall) and error is None
    assert (call.group, call.msg_id, call.acknowledged) == ("tg", done.send.msg_id, True)
    assert call.messages[0].properties["TRAN_MSG"] == "true"


async def test_a_hook_sees_each_call_of_a_listener(cluster: FakeCluster) -> None:
    for body in (b"1", b"2"):
        cluster.master().store(TOPIC, 0, body)
    notes = Notes()
    await consume(cluster, notes, 2, fails=[b"2"])
    seen = [
        (call.group, call.queue, call.messages[0].body, call.succeeded, type(error))
        for call, error in notes.ended
        if isinstance(call, ConsumeCall)
    ]
    assert seen[:2] == [("cg", Q0, b"1", True, type(None)), ("cg", Q0, b"2", False, ValueError)]


@pytest.mark.parametrize("hook", [None, Notes()], ids=["without", "with"])
async def test_a_hook_sees_what_a_pull_consumer_gets_and_does(
    cluster: FakeCluster, hook: Notes | None
) -> None:
    cluster.master().store(TOPIC, 0, b"1")
    consumer = PullConsumer(
        "cg",
        name_servers=cluster.name_server_addresses,
        client_options=ClientOptions(suspicion_ms=20, hook=hook),
    )
    async with consumer:
        assert not (await consumer.pull(Q0, 1)).messages
        await consumer.assign([Q0])
        polled = await consumer.poll()
        pulled = (await consumer.pull(Q0, 0)).messages
        with consumer.processing(*polled):
            pass
        with pytest.raises(ValueError, match="no"), consumer.processing(*pulled):
            raise ValueError("no")
    if hook is None:
        return
    assert [(each.group, each.topic) for each in hook.receptions] == [("cg", TOPIC)] * 2
    assert [list(each.messages) for each in hook.receptions] == [polled, list(pulled)]
    calls = [call for call, _ in hook.ended]
    assert [(c.queue, c.succeeded) for c in calls if isinstance(c, ConsumeCall)] == [
        (Q0, True),
        (Q0, False),
    ]


async def test_a_broken_hook_changes_nothing_of_what_is_polled(cluster: FakeCluster) -> None:
    cluster.master().store(TOPIC, 0, b"1")
    options = ClientOptions(suspicion_ms=20, hook=Broken("enter"))
    async with PullConsumer(
        "cg", name_servers=cluster.name_server_addresses, client_options=options
    ) as consumer:
        await consumer.assign([Q0])
        (message,) = await consumer.poll()
        with consumer.processing(message):
            assert message.body == b"1"


@pytest.mark.parametrize("moment", ["enter", "exit", "swallow"])
async def test_a_broken_hook_changes_nothing_of_a_send(
    cluster: FakeCluster, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with producer_of(cluster, Broken(moment)) as producer:
        for number in range(5):
            sent = await producer.send(Message(TOPIC, b"%d" % number), queue=Q0)
            assert sent.acknowledged
        refuse_one(cluster)
        with pytest.raises(SendFailedError):
            await producer.send(Message(TOPIC, b"x"), queue=Q0)
    assert cluster.groups["broker-a"].bodies(TOPIC) == [b"0", b"1", b"2", b"3", b"4"]
    logged = [record for record in caplog.records if "hook_failed" in record.message]
    counts = [] if moment == "swallow" else ["count=1", "count=2", "count=4"]
    assert [record.message.split()[-1] for record in logged] == counts
    assert [bool(record.exc_info) for record in logged] == [c == "count=1" for c in counts]


@pytest.mark.parametrize("moment", ["call", "enter", "exit", "swallow"])
async def test_a_broken_hook_changes_nothing_of_a_listener_call(
    cluster: FakeCluster, moment: str
) -> None:
    broker = cluster.master()
    for body in (b"1", b"2", b"3"):
        broker.store(TOPIC, 0, body)
    await consume(cluster, Broken(moment), 3, fails=[b"2"])
    backs = [r for r in broker.requests if r.code == RequestCode.CONSUMER_SEND_MSG_BACK]
    assert len(backs) == 1, "only the message whose listener failed"
