"""The push consumer against scripted servers."""

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import uvloop
from fake_cluster import FAST, TOPIC, FakeCluster, Topic, answer, late, silence

from batonmq import (
    ClientError,
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    MessageModel,
    MessageQueue,
    NoMasterError,
    NoRouteError,
    PushConsumer,
    UnsupportedByBrokerError,
)
from batonmq.client.consumer import membership, orderly_service
from batonmq.client.consumer.listener import Listener
from batonmq.client.consumer.options import ConsumeOptions, PullOptions, PushConsumerOptions
from batonmq.client.consumer.process_queue import FlowLimits, ProcessQueue
from batonmq.client.consumer.queue_reader import EXPIRED_MS
from batonmq.client.instance.client_instance import ClientInstance
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import GetConsumerStatusBody, ResetOffsetBody
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, ResponseError
from batonmq.protocol.fastjson import loads
from batonmq.protocol.message import MessageExt
from batonmq.protocol.records.codec import decode_record
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Processors
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.turns import GATHERED_AT_ONCE
from tests.shared.waiting import until

GROUP = "cg"
MANY = range(3 * GATHERED_AT_ONCE)


@dataclass
class Collector:
    """A listener that notes what it got, and answers what the test says."""

    bodies: list[bytes] = field(default_factory=list)
    messages: list[MessageExt] = field(default_factory=list)
    replies: list[ConsumeStatus] = field(default_factory=list)
    got: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(
        self, messages: Sequence[MessageExt], context: ConsumeContext
    ) -> ConsumeStatus:
        self.messages += messages
        self.bodies += [m.body for m in messages]
        self.got.set()
        self.got = asyncio.Event()
        return self.replies.pop(0) if self.replies else ConsumeStatus.SUCCESS

    async def until(self, count: int) -> None:
        while len(self.bodies) < count:
            await self.got.wait()


def from_first(**options: Any) -> PushConsumerOptions:
    return PushConsumerOptions(from_where=ConsumeFromWhere.FIRST, **options)


def consumer_of(
    cluster: FakeCluster,
    listener: Listener,
    options: PushConsumerOptions | None = None,
    *,
    orderly: bool = False,
    expression: str = "*",
) -> PushConsumer:
    consumer = PushConsumer(
        GROUP,
        listener,
        orderly=orderly,
        name_servers=cluster.name_server_addresses,
        options=options or from_first(),
        client_options=FAST,
    )
    consumer.subscribe(TOPIC, expression)
    return consumer


def fill(cluster: FakeCluster, count: int, start: int = 0, tag: str = "") -> list[bytes]:
    properties = f"TAGS\x01{tag}\x02" if tag else ""
    bodies = [b"m%03d" % i for i in range(start, start + count)]
    for i, body in enumerate(bodies):
        cluster.master().store(TOPIC, i % 4, body, properties)
    return bodies


async def test_all_messages_arrive_and_offsets_are_stored_on_close(cluster: FakeCluster) -> None:
    expected = fill(cluster, 20)
    collector = Collector()
    async with consumer_of(cluster, collector) as consumer:
        await collector.until(20)
        late = fill(cluster, 4, start=20)
        await collector.until(24)
        assert len(consumer.assigned_queues) == 4
    assert sorted(collector.bodies) == expected + late
    offsets = cluster.groups["broker-a"].offsets
    assert {offsets[GROUP, TOPIC, i] for i in range(4)} == {6}
    assert RequestCode.UNREGISTER_CLIENT in cluster.master().codes()


async def test_it_reads_from_the_slave_that_the_master_suggests(cluster: FakeCluster) -> None:
    """Every message comes once; what the slave cannot answer, or refuses, the master does. Progress
    goes to the master only."""
    group = cluster.groups["broker-a"]
    slave = next(broker for broker in cluster.brokers["broker-a"] if not broker.master)
    group.suggested_id = slave.broker_id
    expected = fill(cluster, 40)
    slave.before[RequestCode.PULL_MESSAGE] = [answer(ResponseCode.SYSTEM_BUSY, "not now")]
    collector = Collector()
    options = from_first(pull=PullOptions(batch=1))
    async with consumer_of(cluster, collector, options):
        await collector.until(40)
    assert sorted(collector.bodies) == expected
    at_slave = [r for r in slave.requests if r.code == RequestCode.PULL_MESSAGE]
    assert len(at_slave) > 1 and {r.ext["commitOffset"] for r in at_slave} == {"0"}
    assert {group.offsets[GROUP, TOPIC, i] for i in range(4)} == {10}


@pytest.mark.parametrize("slave_has_it", [True, False])
async def test_a_damaged_message_stops_no_queue_and_is_never_delivered(
    cluster: FakeCluster, slave_has_it: bool
) -> None:
    """1. A byte of a message has flipped on the master's disk. 2. It is read at a slave. 3. Where
    that cannot answer, it is asked for until the master has it again (a failover, a repair)."""
    expected = fill(cluster, 8)
    master = cluster.master()
    slave = next(broker for broker in cluster.brokers["broker-a"] if not broker.master)
    good, is_rotten = master._pull_now, True

    def rotten(request: RemotingCommand) -> RemotingCommand:
        reply = good(request)
        if is_rotten and b"m000" in reply.body:
            reply.body = bytes(reply.body).replace(b"m000", b"m040")
        return reply

    master._pull_now = rotten  # type: ignore[method-assign]
    if not slave_has_it:
        busy = answer(ResponseCode.SYSTEM_BUSY, "not now")
        slave.before[RequestCode.PULL_MESSAGE] = [busy] * 1_000
    collector = Collector()
    async with consumer_of(cluster, collector):
        if not slave_has_it:
            await until(lambda: slave.codes().count(RequestCode.PULL_MESSAGE) > 2)
            assert b"m000" not in collector.bodies
            is_rotten = False
        await collector.until(8)
    assert sorted(collector.bodies) == expected


async def asked(
    cluster: FakeCluster, code: int, ext: dict[str, str], body: bytes = b""
) -> RemotingCommand:
    """What the consumer answers to its master."""
    (connection,) = cluster.master().connections
    return await connection.invoke(RemotingCommand.request(code, ext, body), 5_000)


async def test_brokers_ask_a_member_and_set_its_offsets(cluster: FakeCluster) -> None:
    """221, 307 and 309 for an operator; 220 moves it to another offset."""
    expected = fill(cluster, 8)
    collector = Collector()
    async with consumer_of(cluster, collector) as consumer:
        await collector.until(8)
        first = consumer.assigned_queues[0]
        group = {"topic": TOPIC, "group": GROUP}
        status = await asked(cluster, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, group)
        assert GetConsumerStatusBody.decode(status.body).message_queue_table[first] == 2

        running = {"consumerGroup": GROUP, "clientId": consumer.client_id}
        info = loads((await asked(cluster, RequestCode.GET_CONSUMER_RUNNING_INFO, running)).body)
        assert info["properties"]["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert info["statusTable"][TOPIC]["consumeOKTPS"] == pytest.approx(8 / 60)
        assert len(info["mqTable"]) == 4 and len(info["subscriptionSet"]) == 2

        collector.replies = [ConsumeStatus.RECONSUME_LATER]
        record = cluster.groups["broker-a"].queues[TOPIC, 0][1]
        direct = running | {"brokerName": "broker-a"}
        done = await asked(cluster, RequestCode.CONSUME_MESSAGE_DIRECTLY, direct, record)
        assert loads(done.body)["consumeResult"] == "CR_LATER"
        bad = await asked(cluster, RequestCode.CONSUME_MESSAGE_DIRECTLY, direct, b"none")
        assert bad.code == 1 and "cannot be read" in (bad.remark or "")
        assert len(collector.bodies) == 9

        table = ResetOffsetBody(offset_table={first: 1}).encode()
        (connection,) = cluster.master().connections
        connection.oneway(
            RemotingCommand.request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, group, table)
        )
        await collector.until(10)
        assert collector.bodies[-1] == expected[4]
        stranger = {"topic": TOPIC, "group": "other"}
        refused = await asked(cluster, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, stranger)
        assert refused.code == 1 and "other" in (refused.remark or "")


async def test_an_sql92_expression_is_checked_at_the_start(cluster: FakeCluster) -> None:
    master = cluster.master()
    consumer = consumer_of(cluster, Collector())
    consumer.subscribe(TOPIC, "a >", expression_type="SQL92")
    master.before[RequestCode.CHECK_CLIENT_CONFIG] = [
        answer(ResponseCode.SUBSCRIPTION_PARSE_FAILED, "refused: a >")
    ]
    with pytest.raises(ResponseError, match="refused: a >"):
        await consumer.start()
    with pytest.raises(BatonError, match="XPATH"):
        consumer.subscribe(TOPIC, "/a", expression_type="XPATH")
    consumer = consumer_of(cluster, Collector())
    consumer.subscribe(TOPIC, "a > 1", expression_type="SQL92")
    master.before[RequestCode.CHECK_CLIENT_CONFIG] = [answer(ResponseCode.SUCCESS)]
    async with consumer:
        await until(lambda: RequestCode.PULL_MESSAGE in master.codes())
    pull = next(r for r in master.requests if r.code == RequestCode.PULL_MESSAGE)
    assert (pull.ext["expressionType"], pull.ext["subscription"]) == ("SQL92", "a > 1")


async def test_only_subscribed_tags_arrive_and_the_rest_counts_as_done(
    cluster: FakeCluster,
) -> None:
    fill(cluster, 4, tag="Other")
    wanted = fill(cluster, 4, start=4, tag="Mine")
    fill(cluster, 4, start=8, tag="Other")
    collector = Collector()
    async with consumer_of(cluster, collector, expression="Mine || Never"):
        await collector.until(4)
    assert sorted(collector.bodies) == wanted
    offsets = cluster.groups["broker-a"].offsets
    assert all(offsets[GROUP, TOPIC, i] >= 2 for i in range(4))


async def test_a_plain_function_runs_in_a_thread_and_may_block(cluster: FakeCluster) -> None:
    fill(cluster, 2)
    threads: list[str] = []
    both = threading.Barrier(2, timeout=5)

    def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        both.wait()
        threads.append(threading.current_thread().name)

    async with consumer_of(cluster, listener):
        await until(lambda: len(threads) == 2)
    assert all(name.startswith(f"consume-{GROUP}") for name in threads)


async def test_two_members_share_the_queues_and_one_inherits_all(cluster: FakeCluster) -> None:
    """Notice 40 makes both rebalance at once, not after 20 s."""
    one, two = Collector(), Collector()
    first, second = consumer_of(cluster, one), consumer_of(cluster, two)
    await first.start()
    assert len(first.assigned_queues) == 4
    await second.start()
    await until(lambda: len(first.assigned_queues) == len(second.assigned_queues) == 2)
    assert not set(first.assigned_queues) & set(second.assigned_queues)
    expected = fill(cluster, 8)
    await until(lambda: len(one.bodies) + len(two.bodies) == 8)
    assert sorted(one.bodies + two.bodies) == expected
    await first.close()
    await until(lambda: len(second.assigned_queues) == 4)
    await second.close()


async def test_a_member_that_joins_goes_on_at_the_stored_offsets(cluster: FakeCluster) -> None:
    """Progress that reached the broker is not consumed again by the next owner."""
    fill(cluster, 8)
    one, two = Collector(), Collector()
    options = from_first(persist_ms=1)
    first, second = consumer_of(cluster, one, options), consumer_of(cluster, two)
    offsets = cluster.groups["broker-a"].offsets
    await first.start()
    await until(lambda: [offsets.get((GROUP, TOPIC, i)) for i in range(4)] == [2] * 4)
    await second.start()
    await until(lambda: len(first.assigned_queues) == 2)
    late = fill(cluster, 4, start=8)
    await until(lambda: len(one.bodies) + len(two.bodies) >= 12)
    assert sorted(one.bodies[8:] + two.bodies) == late
    await first.close()
    await second.close()


async def test_a_queue_given_away_hands_over_its_offset(cluster: FakeCluster) -> None:
    """Consumed, not yet persisted (every 5 s), then the queue goes to another member: the offset is
    stored at once, not lost with the queue."""
    collector = Collector()
    offsets = cluster.groups["broker-a"].offsets
    async with consumer_of(cluster, collector) as consumer:
        fill(cluster, 4)
        queue = MessageQueue(TOPIC, "broker-a", 3)
        await until(lambda: consumer._offsets.known(queue) == 1)
        cluster.groups["broker-a"].topics[TOPIC].read_queues = 3
        await consumer.client.routes.refresh(TOPIC)
        await consumer.rebalance()
        assert queue not in consumer.assigned_queues
        assert offsets[GROUP, TOPIC, 3] == 1


async def test_a_killed_master_is_followed_to_the_new_one(cluster: FakeCluster) -> None:
    """1 master dies while a pull is held; 2 another is elected; 3 new messages arrive, the old ones
    do not come again, and the new master learns the offsets and the members."""
    fill(cluster, 4)
    collector = Collector()
    async with consumer_of(cluster, collector):
        await collector.until(4)
        await cluster.kill_master()
        new = cluster.brokers["broker-a"][1]
        cluster.elect(new)
        late = fill(cluster, 4, start=4)
        await collector.until(8)
        assert sorted(collector.bodies[4:]) == late
        await until(lambda: bool(new.members[GROUP]))
    offsets = cluster.groups["broker-a"].offsets
    assert {offsets[GROUP, TOPIC, i] for i in range(4)} == {2}


async def test_a_deposed_master_is_left_for_the_new_one(cluster: FakeCluster) -> None:
    """But not if it is elected again before its last replies have come."""
    collector, old = Collector(), cluster.master()
    async with consumer_of(cluster, collector) as consumer:
        cluster.depose()
        cluster.elect(cluster.brokers["broker-a"][1])
        expected = fill(cluster, 4)
        await collector.until(4)
        assert sorted(collector.bodies) == expected
        await until(lambda: not old.connections)
        new = cluster.master().address
        consumer.client._close_if_no_master(new)
        assert consumer.client.remoting.live_connection(new)


@pytest.mark.parametrize("lags", [False, True])
async def test_pulls_held_by_a_hung_master_are_given_up_for_the_new_one(
    cluster: FakeCluster, lags: bool
) -> None:
    """The old master's sockets stay open and silent; a look at the route finds the new master. A
    name server that lags behind hides it for one look."""
    collector = Collector()
    old = cluster.master()
    old.before[RequestCode.PULL_MESSAGE] += [silence] * 5
    options = from_first(pull=PullOptions(held_check_ms=10))
    async with consumer_of(cluster, collector, options):
        await until(lambda: old.codes().count(RequestCode.PULL_MESSAGE) >= 4)
        if lags:
            cluster.name_servers[0].stale = cluster.broker_datas()
        cluster.elect(cluster.brokers["broker-a"][1])
        expected = fill(cluster, 4)
        await collector.until(4)
        assert sorted(collector.bodies) == expected


async def test_a_rebalance_asks_a_broker_for_the_members_once_for_all_topics(
    cluster: FakeCluster,
) -> None:
    consumer = consumer_of(cluster, Collector())
    for topic in ("T2", "T3"):
        cluster.add_topic(topic, 2)
        consumer.subscribe(topic)
    async with consumer:
        await until(lambda: len(consumer.assigned_queues) == 8)
        codes = cluster.master().codes
        asked = codes().count(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
        await consumer.rebalance()
        assert codes().count(RequestCode.GET_CONSUMER_LIST_BY_GROUP) == asked + 1


async def test_a_failed_message_goes_back_to_its_broker(cluster: FakeCluster) -> None:
    msg_id, _ = cluster.master().store(TOPIC, 0, b"bad")
    collector = Collector(replies=[ConsumeStatus.RECONSUME_LATER])
    async with consumer_of(cluster, collector):
        await until(lambda: bool(cluster.master().sent_back))
    request = cluster.master().sent_back[0]
    assert request.ext["originMsgId"] == msg_id
    assert request.ext["originTopic"] == TOPIC
    assert request.ext["maxReconsumeTimes"] == "16"
    assert cluster.groups["broker-a"].offsets[GROUP, TOPIC, 0] == 1


async def test_an_exception_of_the_listener_counts_as_failed(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind is logged whole once, and then how often it came."""
    caplog.set_level(logging.ERROR)
    fill(cluster, 9)
    cluster.master().store(TOPIC, 0, b"other")

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        raise KeyError("?") if messages[0].body == b"other" else ValueError("no")

    async with consumer_of(cluster, listener):
        await until(lambda: len(cluster.master().sent_back) == 10)
    reported = [record for record in caplog.records if "listener_failed" in record.message]
    counts = [record.message.split()[-1] for record in reported if "ValueError" in record.message]
    assert counts == ["count=1", "count=2", "count=4", "count=8"]
    assert all(record.exc_info for record in reported if "count=1" in record.message)
    assert len(reported) == 5


async def test_flow_control_stops_pulling_until_messages_are_consumed(cluster: FakeCluster) -> None:
    fill(cluster, 400)
    gate = asyncio.Event()
    count = 0

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        nonlocal count
        await gate.wait()
        count += len(messages)

    limits = FlowLimits(messages=10)
    options = from_first(pull=PullOptions(batch=8, limits=limits))
    async with consumer_of(cluster, listener, options) as consumer:
        await until(lambda: all(len(r.process_queue) == 16 for r in consumer._readers.values()))
        pulls = cluster.master().codes().count(RequestCode.PULL_MESSAGE)
        assert pulls == 8, "two pulls of 8 per queue, then no more"
        gate.set()
        await until(lambda: count == 400)


async def test_an_offset_outside_the_queue_is_moved_by_the_broker(cluster: FakeCluster) -> None:
    group = cluster.groups["broker-a"]
    for i in range(4):
        group.first_offset[TOPIC, i] = 100
        group.offsets[GROUP, TOPIC, i] = 7
    expected = fill(cluster, 4)
    collector = Collector()
    async with consumer_of(cluster, collector):
        await collector.until(4)
    assert sorted(collector.bodies) == expected
    assert {group.offsets[GROUP, TOPIC, i] for i in range(4)} == {101}


@pytest.mark.parametrize(
    ("where", "expected"),
    [(ConsumeFromWhere.FIRST, 6), (ConsumeFromWhere.LAST, 2), (ConsumeFromWhere.TIMESTAMP, 4)],
)
async def test_where_a_new_group_starts(
    cluster: FakeCluster, where: ConsumeFromWhere, expected: int
) -> None:
    """Four messages are there, two of them at or after the timestamp; two come later."""
    broker = cluster.master()
    for i in range(4):
        broker.store(TOPIC, 0, b"m%d" % i)
    third = decode_record(cluster.groups["broker-a"].queues[TOPIC, 0][2])
    options = PushConsumerOptions(from_where=where, start_timestamp_ms=third.store_timestamp)
    collector = Collector()
    async with consumer_of(cluster, collector, options):
        for i in (4, 5):
            broker.store(TOPIC, 0, b"m%d" % i)
        await collector.until(expected)
    assert collector.bodies == [b"m%d" % i for i in range(6 - expected, 6)]


async def test_orderly_consumption_without_queue_locks_says_so(cluster: FakeCluster) -> None:
    cluster.master().unsupported.add(RequestCode.LOCK_BATCH_MQ)
    consumer = consumer_of(cluster, Collector(), orderly=True)
    with pytest.raises(UnsupportedByBrokerError) as error:
        await consumer.start()
    assert "LOCK_BATCH_MQ (41)" in str(error.value)
    assert "orderly=False" in str(error.value)


async def test_orderly_consumption_keeps_the_order_through_a_failure(cluster: FakeCluster) -> None:
    broker = cluster.master()
    for i in range(6):
        broker.store(TOPIC, 0, b"%d" % i)
    collector = Collector(replies=[ConsumeStatus.SUCCESS, ConsumeStatus.RECONSUME_LATER])
    options = from_first(consume=ConsumeOptions(orderly_suspend_ms=1))
    async with consumer_of(cluster, collector, options, orderly=True):
        await collector.until(7)
        assert len(broker.locks) == 4
    assert collector.bodies == [b"0", b"1", b"1", b"2", b"3", b"4", b"5"]
    assert collector.messages[2].reconsume_times == 1
    assert not broker.locks, "given back on close"
    assert cluster.groups["broker-a"].offsets[GROUP, TOPIC, 0] == 6


async def test_orderly_consumption_of_a_trickle_misses_no_wake_up(cluster: FakeCluster) -> None:
    """Each message comes just when the queue has run dry."""
    broker = cluster.master()
    collector = Collector()
    async with consumer_of(cluster, collector, orderly=True):
        for i in range(100):
            broker.store(TOPIC, 0, b"%d" % i)
            if i % 3:
                await collector.until(i)
        await collector.until(100)
    assert collector.bodies == [b"%d" % i for i in range(100)]


async def test_a_message_from_the_retry_topic_shows_its_own_topic(cluster: FakeCluster) -> None:
    cluster.groups["broker-a"].topics[f"%RETRY%{GROUP}"] = Topic(1, 1)
    cluster.master().store(f"%RETRY%{GROUP}", 0, b"again", f"RETRY_TOPIC\x01{TOPIC}\x02")
    collector = Collector()
    async with consumer_of(cluster, collector):
        await collector.until(1)
    assert collector.messages[0].topic == TOPIC
    offsets = cluster.groups["broker-a"].offsets
    assert offsets[GROUP, f"%RETRY%{GROUP}", 0] == 1


async def test_ack_index_splits_a_batch(cluster: FakeCluster) -> None:
    """SUCCESS with ack_index 0 of three: the other two go back to the broker."""
    broker = cluster.master()
    for i in range(3):
        broker.store(TOPIC, 0, b"%d" % i)

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        assert len(messages) == 3
        context.ack_index = 0
        context.delay_level = 5

    options = from_first(consume=ConsumeOptions(batch=10))
    async with consumer_of(cluster, listener, options):
        await until(lambda: len(broker.sent_back) == 2)
    assert {r.ext["delayLevel"] for r in broker.sent_back} == {"5"}
    assert cluster.groups["broker-a"].offsets[GROUP, TOPIC, 0] == 3


async def test_close_waits_for_the_call_in_progress_and_stores_its_offset(
    cluster: FakeCluster,
) -> None:
    cluster.master().store(TOPIC, 0, b"slow")
    began, finish = asyncio.Event(), asyncio.Event()

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        began.set()
        await finish.wait()

    consumer = consumer_of(cluster, listener)
    await consumer.start()
    await began.wait()
    closing = asyncio.ensure_future(consumer.close())
    await until(lambda: RequestCode.PULL_MESSAGE in cluster.master().codes())
    finish.set()
    await closing
    assert cluster.groups["broker-a"].offsets[GROUP, TOPIC, 0] == 1


async def test_a_queue_locked_by_another_member_is_left_alone(cluster: FakeCluster) -> None:
    broker = cluster.master()
    broker.locks[GROUP, TOPIC, 2] = "somebody"
    async with consumer_of(cluster, Collector(), orderly=True) as consumer:
        assert [q.queue_id for q in consumer.assigned_queues] == [0, 1, 3]
        del broker.locks[GROUP, TOPIC, 2]
        await consumer.rebalance()
        assert len(consumer.assigned_queues) == 4


def test_a_locks_time_counts_from_before_the_request_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker counts from when it got the request: a late answer grants no longer time."""
    now_ms = sent_ms = 1_000_000
    monkeypatch.setattr(orderly_service, "boot_ms", lambda: now_ms)
    queue, process_queue = MessageQueue(TOPIC, "broker-a", 0), ProcessQueue(0)

    async def answer_late(*_: object, **__: object) -> frozenset[MessageQueue]:
        nonlocal now_ms
        now_ms += 5_000
        return frozenset({queue})

    calls = Mock(lock_queues=answer_late)
    service = orderly_service.OrderlyService.__new__(orderly_service.OrderlyService)
    service._calls, service._group, service._readers = calls, GROUP, set()
    assert asyncio.run(service._lock([Mock(queue=queue, process_queue=process_queue)]))
    assert process_queue.locked_until_ms == sent_ms + orderly_service.LOCK_LIVE_MS


async def test_r31_after_a_failover_the_new_master_hears_all_offsets_again(
    cluster: FakeCluster,
) -> None:
    """1. Offsets are stored on the master and not dirty any more. 2. It dies before its slave had
    them. 3. The new master hears all of them, though nothing was consumed since."""
    fill(cluster, 8)
    collector = Collector()
    options = from_first(persist_ms=10)
    async with consumer_of(cluster, collector, options) as consumer:
        await collector.until(8)
        await consumer._offsets.persist()
        offsets = cluster.groups["broker-a"].offsets
        await until(lambda: len(offsets) == 4)
        stored = dict(offsets)
        offsets.clear()
        await consumer._offsets.persist()
        assert not offsets, "nothing is dirty"
        await cluster.kill_master()
        cluster.elect(cluster.brokers["broker-a"][1])
        await until(lambda: offsets == stored)


async def test_broadcasting_reads_every_queue_and_keeps_offsets_in_a_file(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    expected = fill(cluster, 8)
    options = from_first(model=MessageModel.BROADCASTING, offset_dir=tmp_path)
    one, two, again = Collector(), Collector(), Collector()
    async with consumer_of(cluster, one, options):
        other = from_first(model=MessageModel.BROADCASTING, offset_dir=tmp_path / "other")
        async with consumer_of(cluster, two, other):
            await one.until(8)
            await two.until(8)
    assert sorted(one.bodies) == sorted(two.bodies) == expected
    late = fill(cluster, 4, start=8)
    async with consumer_of(cluster, again, options):
        await again.until(4)
    assert sorted(again.bodies) == late
    assert cluster.groups["broker-a"].offsets == {}
    assert (tmp_path / "DEFAULT" / f"{GROUP}.json").exists()


async def test_a_garbled_offset_file_is_named(cluster: FakeCluster, tmp_path: Path) -> None:
    path = tmp_path / "DEFAULT" / f"{GROUP}.json"
    path.parent.mkdir()
    path.write_text("{nonsense")
    options = PushConsumerOptions(model=MessageModel.BROADCASTING, offset_dir=tmp_path)
    with pytest.raises(BatonError, match=str(path)):
        await consumer_of(cluster, Collector(), options).start()


async def test_a_topic_that_does_not_exist_yet_is_waited_for(cluster: FakeCluster) -> None:
    for group in cluster.groups.values():
        del group.topics[TOPIC]
    collector = Collector()
    async with consumer_of(cluster, collector) as consumer:
        assert consumer.assigned_queues == ()
        cluster.add_topic(TOPIC)
        expected = fill(cluster, 4)
        await consumer.rebalance()
        await collector.until(4)
        assert sorted(collector.bodies) == expected


async def test_an_unknown_member_makes_itself_known_and_asks_again(cluster: FakeCluster) -> None:
    """A new master does not know the group yet: the first list is empty or without us."""
    broker = cluster.master()
    broker.before[RequestCode.GET_CONSUMER_LIST_BY_GROUP].append(
        answer(ResponseCode.SYSTEM_ERROR, "no consumer for this group")
    )
    async with consumer_of(cluster, Collector()) as consumer:
        assert len(consumer.assigned_queues) == 4
        assert broker.codes().count(RequestCode.HEART_BEAT) >= 2


def test_a_group_without_a_master_holds_up_no_queue_of_another() -> None:
    """It is given up for this rebalance after its first calls, not asked for each of its queues."""

    async def main() -> None:
        client = ClientInstance("h:9876")
        options = PushConsumerOptions(model=MessageModel.BROADCASTING)
        consumer = PushConsumer(GROUP, Collector(), client=client, options=options)
        consumer.subscribe(TOPIC)
        consumer._service = Mock(acquire=AsyncMock(return_value=True))
        given_up, asked = asyncio.Event(), list[MessageQueue]()

        async def read(queue: MessageQueue, **_: object) -> int:
            if queue.broker_name == "dead":
                asked.append(queue)
                await given_up.wait()
                raise NoMasterError("dead")
            return 0

        consumer._offsets = Mock(read=read)
        queues = [MessageQueue(TOPIC, name, i) for name in ("alive", "dead", "well") for i in MANY]
        brokers = {name: {0: f"{name}:1"} for name in ("alive", "dead", "well")}
        client.connect(Processors())
        client.routes._adopt(TopicRoute(TOPIC, (), tuple(queues), brokers, {}))
        rebalanced = asyncio.ensure_future(consumer._rebalance())
        of_others = tuple(q for q in queues if q.broker_name != "dead")
        await until(lambda: consumer.assigned_queues == of_others)
        assert not rebalanced.done()
        given_up.set()
        assert await rebalanced is False
        assert len(asked) == GATHERED_AT_ONCE
        for reader in consumer._readers.values():
            await reader.stop()
        await client.disconnect()

    uvloop.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(
    "ext",
    [{}, {"nextBeginOffset": "?", "minOffset": "0", "maxOffset": "9"}],
    ids=["no offsets", "no number"],
)
async def test_an_answer_that_cannot_be_read_does_not_end_a_queue(
    cluster: FakeCluster, ext: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expected = fill(cluster, 8)
    cluster.master().before[RequestCode.PULL_MESSAGE] = [
        answer(ResponseCode.SUCCESS, ext=ext) for _ in range(4)
    ]
    collector = Collector()
    async with consumer_of(cluster, collector):
        await collector.until(8)
    assert sorted(collector.bodies) == expected
    assert "to a pull cannot be read" in caplog.text


@pytest.mark.parametrize("how", ["ended", "silent"])
async def test_a_queue_that_is_read_no_more_is_taken_up_anew(
    cluster: FakeCluster, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector()
    async with consumer_of(cluster, collector) as consumer:
        readers = consumer._readers
        await until(lambda: all(reader._asked_ms for reader in readers.values()))
        before = dict(readers)
        queue = min(before)
        if how == "ended":
            await before[queue].pause()
            before[queue]._task = task = asyncio.ensure_future(asyncio.sleep(0))
            await task
        else:
            before[queue]._asked_ms = boot_ms() - EXPIRED_MS
        await consumer.rebalance()
        assert {q for q in before if readers[q] is not before[q]} == {queue}
        expected = fill(cluster, 8)
        await collector.until(8)
        assert sorted(collector.bodies) == expected
    assert caplog.text.count("queue_expired") == 1


async def test_r57_a_group_that_begins_at_the_end_keeps_its_place_through_a_rebalance(
    cluster: FakeCluster,
) -> None:
    """1. A new group begins at the end of queues whose first messages have expired. 2. 40 messages
    come while its member works at the first. 3. A second member takes half of the queues: it
    begins where the group began, not at the end of now."""
    for queue in range(4):
        cluster.groups["broker-a"].first_offset[TOPIC, queue] = 1000
    seen: set[bytes] = set()
    busy, run_in_turns = asyncio.Event(), asyncio.Event()

    async def slow(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        busy.set()
        await run_in_turns.wait()
        seen.update(each.body for each in messages)

    async def quick(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        seen.update(each.body for each in messages)

    options = PushConsumerOptions(consume=ConsumeOptions(concurrency=1))
    members = [
        PushConsumer(
            GROUP,
            listener,
            name_servers=cluster.name_server_addresses,
            options=options,
            client_options=ClientOptions(instance_name=name, suspicion_ms=20),
        )
        for listener, name in ((slow, "a"), (quick, "b"))
    ]
    for consumer in members:
        consumer.subscribe(TOPIC)
    async with members[0] as first:
        assert len(first.assigned_queues) == 4
        sent = {b"%d" % number for number in range(40)}
        for number in range(40):
            cluster.master().store(TOPIC, number % 4, b"%d" % number)
        await busy.wait()
        async with members[1]:
            await until(lambda: len(first.assigned_queues) == 2)
            run_in_turns.set()
            await until(lambda: seen == sent)


async def test_r57_a_rebalance_that_close_meets_half_way_hands_its_queues_over(
    cluster: FakeCluster,
) -> None:
    """Else their next owner would read what this member has consumed, and wait for their locks."""
    broker = cluster.master()
    fill(cluster, 8)
    collector, came, go_on = Collector(), asyncio.Event(), asyncio.Event()
    consumer = consumer_of(cluster, collector, orderly=True)
    await consumer.start()
    await collector.until(8)
    await until(lambda: all(not len(r.process_queue) for r in consumer._readers.values()))
    broker.before[RequestCode.UPDATE_CONSUMER_OFFSET] = [late(broker, came, go_on)]
    consumer.unsubscribe(TOPIC)
    await came.wait()
    closing = asyncio.ensure_future(consumer.close())
    await until(lambda: consumer._service is None)
    go_on.set()
    await closing
    offsets = cluster.groups["broker-a"].offsets
    assert [offsets.get((GROUP, TOPIC, queue)) for queue in range(4)] == [2, 2, 2, 2]
    assert broker.locks == {}


async def test_r57_a_queue_whose_lock_is_granted_while_its_consumer_closes_is_unlocked(
    cluster: FakeCluster,
) -> None:
    broker = cluster.master()
    came, go_on = asyncio.Event(), asyncio.Event()
    broker.before[RequestCode.LOCK_BATCH_MQ] = [late(broker, came, go_on)]
    starting = asyncio.ensure_future(consumer_of(cluster, Collector(), orderly=True).start())
    await came.wait()
    starting.cancel()
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([starting])
    assert starting.cancelled() and RequestCode.LOCK_BATCH_MQ in broker.codes()
    assert broker.locks == {}


async def test_a_broadcasting_consumer_that_cannot_store_its_offsets_is_closed_all_the_same(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cluster, 4)
    options = from_first(model=MessageModel.BROADCASTING, offset_dir=tmp_path)
    collector = Collector()
    consumer = consumer_of(cluster, collector, options)
    await consumer.start()
    await collector.until(4)
    monkeypatch.setattr(disk, "replace", Mock(side_effect=OSError(28, "No space")))
    with pytest.raises(OSError, match="No space"):
        await consumer.close()
    assert not consumer.client.running
    assert RequestCode.UNREGISTER_CLIENT in cluster.master().codes()


async def test_a_queue_whose_broker_answers_without_an_offset_is_taken_up_later(
    cluster: FakeCluster,
) -> None:
    without = [answer(ResponseCode.SUCCESS) for _ in range(4)]
    cluster.master().before[RequestCode.QUERY_CONSUMER_OFFSET] = without
    async with consumer_of(cluster, Collector()) as consumer:
        assert not consumer.assigned_queues
        await consumer.rebalance()
        assert len(consumer.assigned_queues) == 4


async def test_a_rebalance_that_fails_in_whatever_way_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it a member would never take up the queues of another one that ends."""
    monkeypatch.setattr(membership, "_UNSETTLED_MS", 1)
    rebalances = membership.Rebalances(Mock(), GROUP, MessageModel.CLUSTERING, 60_000)
    again = asyncio.Event()
    calls: list[int] = []

    async def rebalance() -> bool:
        rebalances.begins()
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyError("offset")
        again.set()
        return True

    rebalances.soon()
    loop = asyncio.ensure_future(rebalances.repeat(rebalance, settled=True))
    await again.wait()
    loop.cancel()
    assert calls == [0, 1] and caplog.text.count("rebalance_failed") == 1


@pytest.mark.parametrize("turns", [1, 2, 5, 9])
async def test_closing_continues_if_its_caller_is_cancelled(
    cluster: FakeCluster, turns: int
) -> None:
    """At whatever await: else its tasks and connections would stay until the program ends."""
    fill(cluster, 4)
    collector = Collector()
    consumer = consumer_of(cluster, collector)
    await consumer.start()
    await collector.until(4)
    closing = asyncio.ensure_future(consumer.close())
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await until(lambda: not consumer.client.running)
    assert not consumer.assigned_queues and not cluster.master().members[GROUP]


async def test_a_second_close_waits_for_the_first(cluster: FakeCluster) -> None:
    """It would end the listener call that the first one waits for."""
    fill(cluster, 1)
    began, finish = threading.Event(), threading.Event()

    def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        began.set()
        finish.wait(10)

    consumer = consumer_of(cluster, listener)  # type: ignore[arg-type]
    await consumer.start()
    await asyncio.to_thread(began.wait)
    closing = [asyncio.ensure_future(consumer.close()) for _ in range(2)]
    await until(lambda: consumer._service is None)
    assert not any(task.done() for task in closing)
    finish.set()
    await asyncio.gather(*closing)
    assert cluster.groups["broker-a"].offsets[GROUP, TOPIC, 0] == 1


async def test_a_listener_that_closes_its_consumer_is_told_how_to(cluster: FakeCluster) -> None:
    fill(cluster, 1)
    reported: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def listener(messages: Sequence[MessageExt], context: ConsumeContext) -> None:
        try:
            await consumer.close()
        except ClientError as error:
            reported.set_result(error)

    consumer = consumer_of(cluster, listener)  # type: ignore[arg-type]
    async with consumer:
        assert "set an event in the listener" in str(await reported)
    assert not consumer.client.running


async def test_a_client_instance_has_one_consumer_of_a_group(cluster: FakeCluster) -> None:
    """Brokers take two for one member: both would read every queue."""
    client = ClientInstance(cluster.name_server_addresses)
    await client.start()
    first, second = (PushConsumer(GROUP, Collector(), client=client) for _ in range(2))
    for consumer in (first, second):
        consumer.subscribe(TOPIC)
    async with first:
        with pytest.raises(ClientError, match=f"a consumer of group {GROUP} already"):
            await second.start()
        await second.close()
    async with second:
        assert second.assigned_queues
    await client.close()


async def test_a_subscription_of_a_running_consumer_is_announced_at_once(
    cluster: FakeCluster,
) -> None:
    """Brokers filter by the last heartbeat, and the next one may be 30 s away."""
    cluster.add_topic("T2", 1)
    async with consumer_of(cluster, Collector()) as consumer:
        consumer.subscribe("T2", "a > 1", expression_type="SQL92")
        sent = cluster.master().requests
        await until(lambda: any(b'"T2"' in r.body for r in sent if r.code == 34))


@pytest.mark.parametrize(
    ("topic", "failure", "ids", "taken", "settled"),
    [
        (TOPIC, None, ["c"], True, True),
        (TOPIC, None, ["c"], False, False),
        (TOPIC, None, None, True, False),
        (TOPIC, NoRouteError(TOPIC, ()), ["c"], True, False),
        (f"%RETRY%{GROUP}", NoRouteError(TOPIC, ()), ["c"], True, True),
        (TOPIC, NoMasterError("broker-a"), ["c"], True, False),
    ],
    ids=["all", "a queue is missing", "no member list", "no topic", "no retries yet", "no master"],
)
async def test_a_rebalance_is_complete_once_it_has_the_queues_of_all_topics(
    topic: str, failure: Exception | None, ids: list[str] | None, taken: bool, settled: bool
) -> None:
    queues = (MessageQueue(topic, "broker-a", 0),)
    route = TopicRoute(topic, (), queues, {"broker-a": {0: "h:1"}}, {})
    client = Mock(
        client_id="c", routes=Mock(get=AsyncMock(return_value=route, side_effect=failure))
    )
    rebalances = membership.Rebalances(client, GROUP, MessageModel.CLUSTERING, 60_000)
    rebalances._ids = AsyncMock(return_value=ids)  # type: ignore[method-assign]
    assert await rebalances.of_topics([topic], (), AsyncMock(return_value=taken)) is settled


async def test_another_master_of_the_same_queues_causes_no_rebalance() -> None:
    queues = (MessageQueue(TOPIC, "broker-a", 0),)
    before, after = (
        TopicRoute(TOPIC, (), queues, {"broker-a": {0: h}}, {}) for h in ("h:1", "h:2")
    )
    client = Mock(client_id="c", routes=Mock(get=AsyncMock(return_value=before)))
    rebalances = membership.Rebalances(client, GROUP, MessageModel.CLUSTERING, 60_000)
    rebalances._ids = AsyncMock(return_value=["c"])  # type: ignore[method-assign]
    await rebalances.of_topics([TOPIC], (), AsyncMock(return_value=True))
    rebalances.route_changed(after)
    assert not rebalances._wanted.is_set()
    rebalances.route_changed(TopicRoute(TOPIC, (), (), {}, {}))
    assert rebalances._wanted.is_set()
