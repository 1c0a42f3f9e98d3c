"""No answer of code 0 before what it stands for is confirmed (R1, R30, R31), whatever was asked;
and nothing is stored while a planned switch holds the sends (R33)."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from lone_broker import (
    Rig,
    end_header,
    lone_broker,
    long_send_header,
    send_header,
    topic_header,
    unconfirmed,
    until,
)

from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.bodies import (
    LockBatchRequestBody,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    SubscriptionGroupList,
    TopicConfig,
    TopicConfigList,
)
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.message import MessageQueue
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.properties import encode_properties
from batonmq.protocol.topic_name import TRANS_HALF_TOPIC
from batonmq.remoting.command import RemotingCommand

PopRequest = Callable[[], Coroutine[Any, Any, RemotingCommand]]
SETTINGS: dict[str, object] = {"transaction_time_out": 3_600_000, "recall_message_enable": True}


async def round_trips(rig: Rig) -> None:
    """What could have been answered by now was."""
    for _ in range(3):
        await rig.ask(45)


async def end_of_transaction(rig: Rig) -> PopRequest:
    sent = await rig.send("T", TRAN_MSG="true", PGROUP="pg")
    return lambda: rig.ask(37, end_header(sent, "8"))


async def checks_from_the_start(rig: Rig) -> PopRequest:
    sent = await rig.send("T", TRAN_MSG="true", PGROUP="pg")
    return lambda: rig.ask(323, {"msgId": sent.ext["msgId"]})


async def send_back(rig: Rig) -> PopRequest:
    sent = await rig.send("T")
    _, offset = decode_offset_msg_id(sent.ext["msgId"])
    return lambda: rig.ask(36, {"offset": str(offset), "group": "g", "delayLevel": "0"})


async def reply(rig: Rig) -> PopRequest:
    """To a requester that has gone: code 1, and stored nevertheless."""
    return lambda: rig.ask(325, send_header("R", 0, {"REPLY_TO_CLIENT": "nobody"}), b"answer")


async def new_topic(rig: Rig) -> PopRequest:
    return lambda: rig.ask(17, topic_header("New"))


async def new_group(rig: Rig) -> PopRequest:
    return lambda: rig.ask(200, body=SubscriptionGroupConfig(group_name="new").encode())


async def deleted_topic(rig: Rig) -> PopRequest:
    await rig.send("T")
    return lambda: rig.ask(215, {"topic": "T"})


async def new_topics(rig: Rig) -> PopRequest:
    topics = TopicConfigList(topic_config_list=[TopicConfig(topic_name=f"N{n}") for n in range(2)])
    return lambda: rig.ask(18, body=topics.encode())


async def new_groups(rig: Rig) -> PopRequest:
    groups = [SubscriptionGroupConfig(group_name=f"new{n}") for n in range(2)]
    return lambda: rig.ask(225, body=SubscriptionGroupList(group_config_list=groups).encode())


async def deleted_group(rig: Rig) -> PopRequest:
    await (await new_group(rig))()
    return lambda: rig.ask(207, {"groupName": "new", "cleanOffset": "true"})


async def forbidden_topic(rig: Rig) -> PopRequest:
    await (await new_group(rig))()
    return lambda: rig.ask(353, {"group": "new", "topic": "T", "readable": "false"})


async def request_mode(rig: Rig) -> PopRequest:
    await rig.send("T")
    mode = SetMessageRequestModeRequestBody(consumer_group="g", topic="T", mode="POP")
    return lambda: rig.ask(401, body=mode.encode())


async def recall(rig: Rig) -> PopRequest:
    sent = await rig.send("T", TIMER_DELAY_SEC="60")
    fields = {"producerGroup": "pg", "topic": "T", "recallHandle": sent.ext["recallHandle"]}
    return lambda: rig.ask(370, fields)


async def lock(rig: Rig) -> PopRequest:
    queue = MessageQueue("T", "broker-a", 0)
    body = LockBatchRequestBody(client_id="a", consumer_group="g", mq_set=[queue]).encode()
    return lambda: rig.ask(41, body=body)


@pytest.mark.parametrize(
    "prepare",
    [
        end_of_transaction,
        checks_from_the_start,
        send_back,
        reply,
        new_topic,
        new_topics,
        new_group,
        new_groups,
        forbidden_topic,
        request_mode,
        recall,
        lock,
        deleted_topic,
        deleted_group,
    ],
)
async def test_r30_r31_an_answer_waits_for_its_confirmation(tmp_path, prepare):
    async with lone_broker(tmp_path, broker=SETTINGS) as rig:
        ask = await prepare(rig)
        end = rig.service.store.max_phy_offset
        with unconfirmed(rig):
            waits = asyncio.ensure_future(ask())
            await until(lambda: rig.service.store.max_phy_offset > end)
            await round_trips(rig)
            assert not waits.done()
        assert (await waits).code == (1 if prepare is reply else 0)


async def test_r1_a_batch_waits_for_its_last_message(rig):
    items = [
        BatchItem(bytes(100), encode_properties({"UNIQ_KEY": f"K{n}"}).encode()) for n in (1, 2)
    ]
    await rig.send("T")
    with unconfirmed(rig):
        header = send_header("T", 0, {}) | {"m": "true"}
        waits = asyncio.ensure_future(rig.ask(320, header, encode_batch(items)))
        await until(lambda: len(rig.service.path.acks) == 1)
        (waiting,) = rig.service.path.acks._replies
        assert waiting[0] == rig.service.store.appender.end
    assert (await waits).code == 0


async def test_r8_r30_a_renewed_lock_is_answered_by_who_is_shown_to_be_master(rig):
    queue = MessageQueue("T", "broker-a", 0)
    body = LockBatchRequestBody(client_id="a", consumer_group="g", mq_set=[queue]).encode()
    assert (await rig.ask(41, body=body)).code == 0
    with unconfirmed(rig):
        sent = asyncio.ensure_future(rig.send("T"))
        await until(lambda: len(rig.service.path.acks) == 1)
        renewal = asyncio.ensure_future(rig.ask(41, body=body))
        await round_trips(rig)
        assert not renewal.done() and not sent.done()
    assert (await renewal).code == (await sent).code == 0
    locks, now_ms = rig.service.tables.locks, rig.service.path.clock_ms()
    rig.service.path.gate.follow(2, "other:1")
    locks.renew_all(now_ms - 3_600_000)
    for _ in range(3):
        rig.service.locks.tick(now_ms + 61_000)
    assert locks.wrapper().locks == {"g": {"a": [("T", 0)]}}, "the log says who has it"


@pytest.mark.parametrize("code", [10, 310, 320])
async def test_r33_a_send_of_any_kind_is_held(rig, code):
    header = long_send_header() if code == 10 else send_header("T", 0, {})
    body = encode_batch([BatchItem(b"x", b"")]) if code == 320 else b"x"
    sent = await rig.send("T")
    end, path = rig.service.store.max_phy_offset, rig.service.path
    path.hold.begin()
    waits = asyncio.ensure_future(rig.ask(code, header | {"m": str(code == 320).lower()}, body))
    await until(lambda: len(path.hold) == 1)
    _, offset = decode_offset_msg_id(sent.ext["msgId"])
    fields = {"offset": str(offset), "group": "g", "delayLevel": "0"}
    assert (await rig.ask(36, fields)).code == 14, "a retry is refused at once"
    assert rig.service.store.max_phy_offset == end and not waits.done()
    path.hold.release()
    assert (await waits).code == 0 and rig.service.store.max_phy_offset > end


async def test_r28_a_pull_between_the_confirmed_and_the_written_end_is_not_sent_elsewhere(rig):
    """A queue of which one message, or none, is shown, and two more are written."""
    await rig.send("T", queue=0)
    await rig.send("T", queue=1)
    with unconfirmed(rig):
        sends = [asyncio.ensure_future(rig.send("T", queue=q)) for q in (0, 0, 2, 2)]
        await until(lambda: len(rig.service.path.acks) == 4)
        for queue, end in ((0, 3), (2, 2)):
            codes = [(await rig.pull(queue=queue, offset=at)).code for at in range(1, end + 2)]
            assert codes == [19] * end + [21]
    for each in sends:
        assert (await each).code == 0


async def test_r28_the_end_of_a_queue_is_what_is_confirmed_unless_the_whole_log_is_asked_for(rig):
    """Request 30 with `committed` false: what a master's log holds, of which nothing is shown."""
    where = {"topic": "T", "queueId": "0"}
    whole = where | {"committed": "false"}
    await rig.send()
    with unconfirmed(rig):
        sent = asyncio.ensure_future(rig.send())
        await until(lambda: len(rig.service.path.acks) == 1)
        for asked, end in ((where, "1"), (where | {"committed": "true"}, "1"), (whole, "2")):
            assert (await rig.ask(30, asked)).ext["offset"] == end
    assert (await sent).code == 0
    rig.service.path.gate.follow(2, "other:1")
    assert (await rig.ask(30, where)).ext["offset"] == "2"
    refused = await rig.ask(30, whole)
    assert refused.code != 0 and "not the master" in (refused.remark or "")


async def test_held_pulls_are_refused_in_slices_when_the_role_changes(rig, monkeypatch):
    """300 pulls wait, every second one of our client: those are refused, the others wait."""
    await rig.send()
    pulls = rig.service.pull
    monkeypatch.setattr(pulls, "_relay", SimpleNamespace(enabled=True))
    waiting = [asyncio.ensure_future(rig.pull(offset=1, suspend_ms=60_000)) for _ in range(300)]
    await until(lambda: pulls.held == 300)
    (held_ones,) = pulls._hold._by_owner.values()
    for number, held in enumerate(held_ones):
        held.pull = replace(held.pull, ours=number % 2 == 0)
    pulls.role_changed()
    assert pulls.held == 64  # of a slice of 128, in this turn
    await until(lambda: pulls.held == 150)
    await rig.send()
    replies = await asyncio.gather(*waiting)
    codes = [reply.code for reply in replies]
    assert (codes.count(0), codes.count(ResponseCode.SYSTEM_BUSY)) == (150, 150)


async def test_a_role_change_answers_the_pulls_that_wait(rig):
    """Else a consumer learns of it when its pull's time is over, 20 s later."""
    assert (await rig.send()).code == 0
    pull = asyncio.ensure_future(rig.pull(offset=1, suspend_ms=20_000))
    await until(lambda: rig.service.pull.held == 1)
    rig.service.role_left()
    reply = await pull
    assert reply.code == 2 and "role of this broker changed" in (reply.remark or "")
    assert rig.service.pull.held == 0


@pytest.mark.parametrize("wish", [{"WAIT": "false"}, {"WAIT": "false", "DELAY": "1"}, {}])
async def test_r29_a_send_that_asks_for_less_waits_all_the_same(rig, wish):
    with unconfirmed(rig):
        waits = asyncio.ensure_future(rig.send("T", **wish))
        await until(lambda: rig.service.store.max_phy_offset > 0)
        await round_trips(rig)
        assert not waits.done()
    assert (await waits).code == 0


@pytest.mark.parametrize("wish", [{}, {"TRAN_MSG": "true", "PGROUP": "pg"}])
async def test_a_message_without_a_body_is_refused_as_java_does(rig, wish):
    refused = await rig.send("T", b"", **wish)
    assert refused.code == ResponseCode.MESSAGE_ILLEGAL and "body" in (refused.remark or "")
    asked = await rig.ask(325, send_header("R", 0, {"REPLY_TO_CLIENT": "nobody"}))
    assert asked.code == ResponseCode.MESSAGE_ILLEGAL
    shown = rig.service.store.queries.max_offset_in_queue
    assert [shown(topic, 0) for topic in ("T", "R", TRANS_HALF_TOPIC)] == [0, 0, 0]
