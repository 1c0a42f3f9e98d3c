"""The producer against scripted servers: what it sends, and how it gets through a failover."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FAST, TOPIC, answer, producing, silence

from batonmq import (
    ClientError,
    Message,
    MessageIllegalError,
    MessageQueue,
    NoRouteError,
    Producer,
    SendFailedError,
    SendStatus,
)
from batonmq.client.errors import NoNameServerError, SendAttempt
from batonmq.client.instance import name_servers
from batonmq.client.producer import sending as sending_core
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.records.codec import decode_record
from tests.shared.waiting import until

GOLDEN = Path(__file__).parents[2] / "golden"
SEND = RequestCode.SEND_MESSAGE_V2
FENCED = ResponseCode.SERVICE_NOT_AVAILABLE


async def test_send_is_acknowledged_and_spread_over_all_queues() -> None:
    async with producing() as (cluster, producer):
        results = [await producer.send(Message(TOPIC, b"m%d" % i)) for i in range(8)]
        assert all(r.status is SendStatus.SEND_OK and r.acknowledged for r in results)
        assert sorted(r.queue.queue_id for r in results) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [r.attempts for r in results] == [1] * 8
        assert len({r.msg_id for r in results}) == 8
        assert {len(r.offset_msg_id) for r in results} == {32}
        assert sorted(cluster.groups["broker-a"].bodies(TOPIC)) == [b"m%d" % i for i in range(8)]


async def test_send_frame_has_the_fields_of_a_java_client() -> None:
    """The golden frame of a Java producer tells which ext fields a broker may count on."""
    golden = json.loads((GOLDEN / "java-5.3.3/remoting/broker-310.json").read_text())
    java = json.loads(golden["examples"][0]["request"]["header"])["extFields"]
    async with producing() as (cluster, producer):
        message = Message.of(TOPIC, "hello", tags="TagA", keys="key0")
        await producer.send(message)
        request = next(r for r in cluster.master().requests if r.code == SEND)
        ours: dict[str, Any] = dict(request.ext)
        assert ours.keys() == java.keys()
        same = ("c", "d", "f", "h", "j", "k", "m", "n")
        assert {k: ours[k] for k in same} == {k: java[k] for k in same}
        assert ours["i"].count("\x02") == java["i"].count("\x02")
        assert "UNIQ_KEY" not in message.properties, "the user's object stays as it was"


async def test_large_bodies_travel_compressed_and_are_read_back() -> None:
    async with producing() as (cluster, producer):
        await producer.send(Message(TOPIC, b"x" * 6000), queue=MessageQueue(TOPIC, "broker-a", 1))
        record = decode_record(cluster.groups["broker-a"].queues[TOPIC, 1][0])
        assert record.sys_flag == 769
        assert len(record.body) < 100
        assert record.uncompressed_body() == b"x" * 6000


async def test_selector_and_given_queue_decide() -> None:
    async with producing() as (_, producer):
        first = await producer.send(Message(TOPIC, b"a"), selector=lambda queues, m: queues[2])
        second = await producer.send(Message(TOPIC, b"b"), queue=MessageQueue(TOPIC, "broker-a", 2))
        assert [first.queue.queue_id, second.queue.queue_id] == [2, 2]
        assert [first.queue_offset, second.queue_offset] == [0, 1]


async def test_batch_is_one_request_with_consecutive_offsets() -> None:
    async with producing() as (cluster, producer):
        batch = [Message.of(TOPIC, f"b{i}", keys=f"k{i}") for i in range(3)]
        result = await producer.send_batch(batch, queue=MessageQueue(TOPIC, "broker-a", 0))
        assert len(result.msg_id.split(",")) == len(result.offset_msg_id.split(",")) == 3
        records = [decode_record(r) for r in cluster.groups["broker-a"].queues[TOPIC, 0]]
        assert [r.queue_offset for r in records] == [0, 1, 2]
        assert [r.keys for r in records] == ["k0", "k1", "k2"]
        assert cluster.master().codes().count(RequestCode.SEND_BATCH_MESSAGE) == 1


async def test_a_caller_may_name_its_messages() -> None:
    """The same keys again: a repeat is recognised by them."""
    async with producing() as (cluster, producer):
        queue = MessageQueue(TOPIC, "broker-a", 0)
        for _ in range(2):
            one = await producer.send(Message(TOPIC, b"1"), queue=queue, unique_key="job-0")
            two = await producer.send_batch(
                [Message(TOPIC, b"2"), Message(TOPIC, b"3")],
                queue=queue,
                unique_keys=["job-1", "job-2"],
            )
            assert (one.msg_id, two.msg_id) == ("job-0", "job-1,job-2")
        records = [decode_record(r) for r in cluster.groups["broker-a"].queues[TOPIC, 0]]
        assert [r.uniq_key for r in records] == ["job-0", "job-1", "job-2"] * 2


async def test_oneway_asks_for_no_answer() -> None:
    async with producing() as (cluster, producer):
        broker = cluster.master()
        changed = broker.changed
        await producer.send_oneway(Message(TOPIC, b"o"))
        await changed.wait()
        request = next(r for r in broker.requests if r.code == SEND)
        assert request.is_oneway


async def test_unknown_topic_is_created_by_its_first_send() -> None:
    async with producing() as (cluster, producer):
        result = await producer.send(Message("New", b"1"))
        assert result.acknowledged
        assert cluster.groups["broker-a"].topics["New"].write_queues == 4
        assert len(await producer.publish_queues("New")) == 4


async def test_without_auto_creation_an_unknown_topic_says_what_to_do() -> None:
    async with producing() as (cluster, producer):
        del cluster.groups["broker-a"].topics["TBW102"]
        with pytest.raises(NoRouteError) as error:
            await producer.send(Message("Nowhere", b"1"))
        text = str(error.value)
        assert "no route for topic Nowhere at" in text
        assert all(address in text for address in cluster.name_server_addresses)
        assert "mqctl updateTopic" in text


async def test_illegal_messages_are_refused_before_any_request() -> None:
    async with producing() as (cluster, producer):
        for message in (
            Message("bad topic", b"x"),
            Message(TOPIC, b""),
            Message(TOPIC, b"x" * (4 * 1024 * 1024 + 1)),
            Message("SCHEDULE_TOPIC_XXXX", b"x"),
            Message(TOPIC, b"x", properties={"a": "b\x02c"}),
            Message(TOPIC, b"x", properties={"a": "v" * 40000}),
        ):
            with pytest.raises(MessageIllegalError):
                await producer.send(message)
        with pytest.raises(MessageIllegalError):
            await producer.send_batch([])
        with pytest.raises(MessageIllegalError):
            await producer.send_batch([Message(TOPIC, b"1"), Message("U", b"2")])
        assert SEND not in cluster.master().codes()


async def test_g1_a_stored_but_unconfirmed_message_is_told_apart() -> None:
    """Codes 10, 11 and 12 carry a send header, but are no acknowledgement."""
    async with producing() as (cluster, producer):
        header = {"msgId": "0" * 32, "queueId": "0", "queueOffset": "5"}
        expected = {
            10: SendStatus.FLUSH_DISK_TIMEOUT,
            11: SendStatus.SLAVE_NOT_AVAILABLE,
            12: SendStatus.FLUSH_SLAVE_TIMEOUT,
        }
        for code, status in expected.items():
            cluster.master().before[SEND].append(answer(code, "late", header))
            result = await producer.send(Message(TOPIC, b"x"))
            assert result.status is status
            assert not result.acknowledged
            assert result.queue_offset == 5


@pytest.mark.parametrize("code", [1, 2, 14, 215, 1500])
async def test_a_busy_or_deposed_master_is_asked_again(code: int) -> None:
    async with producing() as (cluster, producer):
        cluster.master().before[SEND] += [answer(code, "slave"), answer(code, "slave")]
        result = await producer.send(Message(TOPIC, b"x"))
        assert result.acknowledged
        assert result.attempts == 3


async def test_a_hinted_master_that_leads_no_more_is_asked_only_once() -> None:
    """1 the master hands over and says to whom; 2 that one lost its mastership since; 3 what the
    name servers say counts again."""
    async with producing() as (cluster, producer):
        other = cluster.brokers["broker-a"][1]
        hint = {"batonMasterAddress": other.address, "batonMasterEpoch": "8"}
        cluster.master().before[SEND].append(answer(FENCED, "handed over", hint))
        other.before[SEND] += [answer(FENCED, "fenced")] * 500
        result = await producer.send(Message(TOPIC, b"x"))
        assert result.acknowledged
        assert result.address == cluster.master().address
        assert other.codes().count(SEND) == 1


@pytest.mark.parametrize(
    ("code", "tries"), [(3, 1), (13, 1), (29, 1), (16, 3), (17, 3), (204, 3), (205, 3)]
)
async def test_a_refusal_is_final_at_once_or_after_a_few_tries(code: int, tries: int) -> None:
    async with producing() as (cluster, producer):
        cluster.master().before[SEND] += [answer(code, "unserved")] * 4
        with pytest.raises(SendFailedError, match="unserved") as error:
            await producer.send(Message(TOPIC, b"x"))
        assert (error.value.code, len(error.value.attempts)) == (code, tries)


async def test_a_killed_master_is_bridged_inside_one_deadline() -> None:
    """1 The master dies; 2 there is none; 3 another is elected; the send under way succeeds."""
    async with producing() as (cluster, producer):
        await producer.send(Message(TOPIC, b"before"))
        await cluster.kill_master()
        sending = asyncio.ensure_future(producer.send(Message(TOPIC, b"after")))
        asked = len(cluster.name_servers[0].requests)
        await until(lambda: len(cluster.name_servers[0].requests) >= asked + 3)
        assert not sending.done()
        cluster.elect(cluster.brokers["broker-a"][1])
        result = await sending
        assert result.acknowledged
        assert result.address == cluster.brokers["broker-a"][1].address
        assert cluster.groups["broker-a"].bodies(TOPIC).count(b"after") == 1


async def test_a_hung_master_costs_its_election_not_the_deadline() -> None:
    """The master takes the request and is silent; the name servers then name another."""
    async with producing() as (cluster, producer):
        await producer.send(Message(TOPIC, b"before"))
        old = cluster.master()
        old.before[SEND].append(silence)
        sending = asyncio.ensure_future(producer.send(Message(TOPIC, b"after"), timeout_ms=60_000))
        await until(lambda: not old.before[SEND])
        cluster.elect(cluster.brokers["broker-a"][1])
        result = await sending
        assert result.acknowledged
        assert result.attempts == 2


async def test_a_name_server_that_still_tells_the_old_master_is_overruled() -> None:
    async with producing() as (cluster, producer):
        await producer.send(Message(TOPIC, b"before"))
        cluster.name_servers[0].stale = cluster.broker_datas()
        cluster.depose()
        cluster.elect(cluster.brokers["broker-a"][1])
        result = await producer.send(Message(TOPIC, b"after"))
        assert result.acknowledged
        assert result.attempts == 2


async def test_a_hung_name_server_does_not_hold_up_a_failover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with producing() as (cluster, producer):
        await producer.send(Message(TOPIC, b"before"))
        monkeypatch.setattr(name_servers, "SHARE_MS", 60_000)
        cluster.name_servers[0].before[RequestCode.GET_ROUTEINFO_BY_TOPIC] += [silence] * 100
        cluster.depose()
        cluster.elect(cluster.brokers["broker-a"][1])
        assert (await producer.send(Message(TOPIC, b"after"), timeout_ms=30_000)).acknowledged


async def test_another_group_takes_over_while_one_has_no_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending_core, "AVOID_MS", 60_000)
    polling = replace(FAST, route_poll_ms=5)
    async with producing(groups=2, client_options=polling) as (cluster, producer):
        await producer.publish_queues(TOPIC)
        await cluster.kill_master("broker-b")
        results = [await producer.send(Message(TOPIC, b"%d" % i)) for i in range(12)]
        assert {r.queue.broker_name for r in results} == {"broker-a"}
        assert sum(r.attempts for r in results) <= 13, "the dead group is tried once"
        cluster.elect(cluster.brokers["broker-b"][1])
        took: set[str] = set()
        while len(took) < 2:
            took.add((await producer.send(Message(TOPIC, b"after"))).queue.broker_name)


async def test_the_deadline_ends_it_and_tells_what_was_tried() -> None:
    async with producing() as (cluster, producer):
        await producer.send(Message(TOPIC, b"before"))
        await cluster.kill_master()
        with pytest.raises(SendFailedError) as error:
            await producer.send(Message(TOPIC, b"x"), timeout_ms=60)
        assert error.value.attempts
        assert "not acknowledged" in str(error.value)


async def test_without_name_servers_the_error_names_them() -> None:
    async with Producer("pg", name_servers="127.0.0.1:1") as producer:
        with pytest.raises((NoNameServerError, SendFailedError), match=r"127\.0\.0\.1:1"):
            await producer.send(Message(TOPIC, b"x"), timeout_ms=50)


async def test_producers_are_made_known_to_the_masters() -> None:
    async with producing() as (cluster, producer):
        codes = cluster.master().codes
        await producer.send(Message(TOPIC, b"x"))
        await until(lambda: RequestCode.HEART_BEAT in codes())
        await producer.close()
        assert RequestCode.UNREGISTER_CLIENT in codes()


def test_a_failed_send_says_each_reason_once() -> None:
    unknown = [SendAttempt("-", "-", n, -1, "no name server answers") for n in range(2)]
    masterless = SendAttempt("broker-a", "-", 2, -1, "the group has no master")
    refused = SendAttempt("broker-a", "h:1", 3, 14, "slave")
    assert str(SendFailedError("T", [*unknown, masterless, refused], 9)) == (
        "send to topic T not acknowledged after 4 attempts in 9 ms (last: no name server answers; "
        "broker-a: the group has no master; broker-a at h:1: code 14 slave)"
    )
    assert "after 1 attempt in 9 ms" in str(SendFailedError("T", [refused], 9))


async def test_keys_differ_after_each_start() -> None:
    """A producer that is made before a fork is started in several processes."""
    async with producing() as (_, producer):
        ids = producer.client.client_id, producer._ids._head
        await producer.close()
        await producer.start()
        assert producer.client.client_id != ids[0] and producer._ids._head != ids[1]


async def test_a_client_is_refused_in_another_loop_before_anything_is_sent() -> None:
    async with producing() as (cluster, producer):
        await producer.send(Message(TOPIC, b"1"))
        sent = cluster.master().codes().count(SEND)

        for send in (producer.send, producer.send_oneway):
            with pytest.raises(ClientError, match="in the event loop that started it"):
                await asyncio.to_thread(asyncio.run, send(Message(TOPIC, b"2")))
        assert (await producer.send(Message(TOPIC, b"3"))).acknowledged
        assert cluster.master().codes().count(SEND) == sent + 1
