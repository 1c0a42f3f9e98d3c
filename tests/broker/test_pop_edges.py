"""POP at its limits, as stock clients use it; and what its consumers ask beside it."""

import asyncio
import json
from typing import Any
from unittest.mock import Mock

import pytest
import test_pop as pops
from heartbeats import heartbeat
from lone_broker import (
    HeldConfirms,
    Rig,
    end_of,
    expire_all_but_last,
    lone_broker,
    make_group,
    pop_header,
    position,
    send_header,
    topic_header,
    until,
)
from test_pop import clock as clock

from batonmq.broker.pop import pop_processor
from batonmq.broker.pop.pop_processor import PopProcessor
from batonmq.protocol.bodies import SetMessageRequestModeRequestBody
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import UNIT_SIZE
from batonmq.protocol.numbers import INT_MAX
from batonmq.protocol.properties import PROPERTIES_SIZE_MAX
from batonmq.protocol.records.codec import NewMessage, decode_records
from batonmq.store.queries import StoreQueries
from batonmq.store.reader import GetMessageResult
from tests.shared.turns import counted_turns


@pytest.mark.parametrize("is_v2", [False, True])
async def test_r30_a_failed_message_is_acked_under_the_name_of_its_retry_topic(
    tmp_path, clock, is_v2
):
    """The stock client names the real topic, and the handle still has the flag."""
    retry = "%RETRY%g+T" if is_v2 else "%RETRY%g_T"
    async with lone_broker(tmp_path, broker={"enable_retry_topic_v2": is_v2}) as rig:
        for body in (b"acked", b"put off"):
            await rig.send("T", body)
        await pops.pop(rig)
        clock.now_ms += 61_000
        await until(lambda: end_of(rig, retry) == 2)
        (_, one), (_, two) = pops.messages(await pops.pop(rig))
        assert one.flag == ("2" if is_v2 else "1")
        assert (await pops.ack(rig, one, topic=retry)).code == 0
        later = pops.named(two, topic=retry, invisibleTime=90_000)
        assert (await rig.ask(200053, later)).code == 0
        table = rig.service.features.pop.table
        assert len(table) == 1 and table.wake_ms > clock.now_ms + 89_000
        entry = {"b": "AQ==", "c": "g", "it": 90_000, "pt": clock.now_ms, "q": 0, "r": one.flag,
                 "rq": 0, "so": 1, "t": retry}  # fmt: skip
        body = json.dumps({"acks": [entry], "brokerName": "broker-a"}).encode()
        assert (await rig.ask(200151, body=body)).code == 0 and len(table) == 0
        clock.now_ms += 3_600_000
        assert (await pops.pop(rig)).code == 210


async def sets_mode(rig: Rig, topic: str, mode: str) -> None:
    body = {"consumerGroup": "g", "mode": mode, "popShareQueueNum": 0, "topic": topic}
    assert (await rig.ask(401, body=json.dumps(body).encode())).code == 0


@pytest.mark.parametrize("by_new_master", [False, True])
async def test_r46_a_group_that_pulls_again_gets_what_pop_left_under_the_second_name(
    rig, clock, by_new_master
):
    """A stock consumer that pulls reads `%RETRY%g` and `%RETRY%g_my_topic`."""
    topic, left = "my_topic", "%RETRY%g+my_topic"

    async def sets_mode_of_new_topic(rig: Rig) -> None:
        await rig.send(topic, b"failed")
        await sets_mode(rig, topic, "POP")

    await sets_mode_of_new_topic(rig)
    await pops.pop(rig, topic=topic)
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, left) == 1)
    await rig.send(topic, b"open")
    await until(lambda: end_of(rig, topic) == 2)
    if by_new_master:
        pulls = SetMessageRequestModeRequestBody(consumer_group="g", mode="PULL", topic=topic)
        rig.service.topics.put_request_mode(pulls)
        rig.service.role_left()
        rig.service.master_opened()
    else:
        await sets_mode(rig, topic, "PULL")
    await until(lambda: end_of(rig, "%RETRY%g") == 1)
    (failed,) = decode_records((await rig.pull("%RETRY%g")).body)
    assert (failed.body, failed.reconsume_times) == (b"failed", 1)
    assert failed.properties["RETRY_TOPIC"] == topic
    await pops.pop(rig, topic=topic)  # by a member that has not heard of it
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, "%RETRY%g") == 2)
    assert end_of(rig, left) == 1
    await until(lambda: len(rig.service.features.pop.table) == 0)
    rig.service.role_left()
    rig.service.master_opened()
    await until(lambda: rig.service.features.pop.is_loaded)
    assert end_of(rig, "%RETRY%g") == 2


async def test_r30_what_one_pop_takes_fits_into_a_frame(tmp_path, clock):
    async with lone_broker(tmp_path, mapped_file_size_commit_log=64 << 20) as rig:
        for queue in range(4):
            sent = await rig.send("T", bytes([queue]) * (4 << 20), queue=queue)
            assert sent.code == 0, sent.remark
        first = await pops.pop(rig)
        assert len(pops.messages(first)) == 3 and first.ext["restNum"] == "1"
        assert len(rig.service.features.pop.table) == 3
        second = await pops.pop(rig)
        assert len({body[:1] for body in pops.bodies(first) + pops.bodies(second)}) == 4


async def test_r54_a_count_at_its_limit_ends_no_revive(rig, clock):
    header = send_header("T", 0, {}) | {"j": str(INT_MAX)}
    assert (await rig.ask(310, header, b"counted")).code == 0
    await rig.send("U", b"other")
    await pops.pop(rig)
    await pops.pop(rig, topic="U", consumerGroup="h")
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, "%RETRY%h_U") == 1 and end_of(rig, "%DLQ%g") == 1)
    (dead,) = decode_records((await rig.pull("%DLQ%g")).body)
    assert dead.reconsume_times == INT_MAX


@pytest.mark.parametrize("left", [0, 20, 40, 120, 2000])
@pytest.mark.parametrize("separator", [b"\x01", b"="])  # the second one: no pair at all
async def test_r54_properties_without_space_for_a_handle_stop_no_group(rig, clock, left, separator):
    """As logs of earlier brokers, and of Java's, have them: all of it comes to the group, or is a
    dead letter."""
    pad = b"pad" + separator + b"x" * (PROPERTIES_SIZE_MAX - 26 - left) + b"\x02"
    for topic in ("T", "%RETRY%g_T"):
        await rig.send("T", b"small")
        rig.service.topics.of_group("%RETRY%g_T", 1)
        message = NewMessage(topic, 0, b"padded", pad, 0, None, None, 0, bytes(8))
        rig.service.store.appender.put_message(message, stored=True)
        rig.service.path.schedule_flush()
    await until(lambda: end_of(rig, "%RETRY%g_T") == 1)
    first = await pops.pop(rig)
    assert sorted(pops.bodies(first)) == [b"padded", b"padded", b"small", b"small"]
    table = rig.service.features.pop.table
    clock.now_ms += 61_000
    await until(lambda: len(table) == 0)
    again = pops.bodies(await pops.pop(rig))
    assert len(again) + end_of(rig, "%DLQ%g") == 4 and again.count(b"small") == 2


async def test_r55_a_mastership_that_begins_again_knows_what_is_in_flight(rig, clock):
    """A higher epoch of the same master, which did not stand down in between."""
    for number in range(3):
        await rig.send("T", b"%d" % number)
    handles = [handle for _, handle in pops.messages(await pops.pop(rig))]
    await pops.ack(rig, handles[0])
    rig.service.path.acks.fail_all(14, "role changed")
    rig.service.store.prepare_master()
    rig.service.master_opened()
    popped = rig.service.features.pop
    await until(lambda: popped.is_loaded)
    assert len(popped.table) == 2
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, "%RETRY%g_T") == 2)
    assert pops.bodies(await pops.pop(rig)) == [b"1", b"2"]


async def test_a_held_orderly_pop_gets_a_postponed_message_in_its_time(rig, clock):
    for number in range(3):
        await rig.send("T", b"%d" % number)
    order = {"order": "true", "queueId": 0}
    handles = [handle for _, handle in pops.messages(await pops.pop(rig, **order))]
    assert (await rig.ask(200053, pops.named(handles[1], invisibleTime=10_000))).code == 0
    wait = {"pollTime": 30_000, "bornTime": clock.now_ms}
    waits = asyncio.ensure_future(pops.pop(rig, **order, **wait))
    await until(lambda: rig.service.pop.held == 1)
    for at in (0, 2):
        assert (await pops.ack(rig, handles[at])).code == 0
    clock.now_ms += 10_200
    assert pops.bodies(await waits)[0] == b"1"


async def test_r58_a_turn_copies_a_large_message_for_a_few_pops(rig, clock, monkeypatch):
    monkeypatch.setattr(pop_processor, "SLICE_BYTES", 3000)
    await rig.send("T", b"first")
    for number in range(9):
        await pops.pop(rig, consumerGroup=f"g{number}")
    wait = {"pollTime": 30_000, "bornTime": clock.now_ms}
    waits = [
        asyncio.ensure_future(pops.pop(rig, consumerGroup=f"g{number}", **wait))
        for number in range(9)
    ]
    pop, given = rig.service.pop, []
    await until(lambda: pop.held == 9)
    run_slice = pop._run_slice

    def noted():
        before = pop.messages_total
        run_slice()
        given.append(pop.messages_total - before)

    pop._run_slice = noted
    await rig.send("T", b"x" * 1000)
    assert all(reply.code == 0 for reply in await asyncio.gather(*waits))
    assert max(given) == 3 and sum(given) == 9


@pytest.mark.counts_turns
async def test_r58_many_pops_of_a_wide_topic_share_a_turn(rig, clock):
    """Each looks at all queues, in slices: thousands at a time would stop the loop for seconds."""
    assert (await rig.ask(17, topic_header("wide", 2000))).code == 0
    rig.answer_ms = 60_000  # counting lines takes long on a busy machine
    count, pop = 40, rig.service.pop
    poll = {"topic": "wide", "pollTime": 60_000, "bornTime": clock.now_ms}
    held = [
        asyncio.create_task(rig.ask(200050, pop_header(consumerGroup=f"g{number}", **poll)))
        for number in range(count)
    ]
    await until(lambda: pop.held == count)
    with counted_turns() as turns:
        pop.read_again(None)
        await until(lambda: pop.held < count)
        await until(lambda: pop.held == count)
    assert turns.lines < 60 * pop_processor.LOOKS_A_TURN
    pop.role_changed()
    assert {reply.code for reply in await asyncio.gather(*held)} == {2}


async def test_r58_pops_wait_while_too_much_is_not_confirmed(rig, clock, monkeypatch):
    """What they take is in memory until then."""
    monkeypatch.setattr(pop_processor, "MEMORY_MAX", 1000)
    await rig.send("T", b"x" * 1000)
    for group in "ab":
        await make_group(rig, group)
    held = HeldConfirms(rig.service.path)
    wait = {"pollTime": 30_000, "bornTime": clock.now_ms}
    first = asyncio.ensure_future(pops.pop(rig, consumerGroup="a", **wait))
    pop = rig.service.pop
    await until(lambda: pop.messages_total == 1)
    second = asyncio.ensure_future(pops.pop(rig, consumerGroup="b", **wait))
    await until(lambda: pop.held == 1)
    held.release()
    assert (await first).code == (await second).code == 0


async def test_a_reset_clears_the_block_of_an_orderly_pop(rig, clock):
    for number in range(3):
        await rig.send("T", b"%d" % number)
    order = {"order": "true", "queueId": 0}
    assert pops.bodies(await pops.pop(rig, **order)) == [b"0", b"1", b"2"]
    assert (await pops.pop(rig, **order)).code == 210
    reset = {"topic": "T", "group": "g", "timestamp": "0", "queueId": "0", "offset": "1"}
    assert (await rig.ask(222, reset)).code == 0
    assert pops.bodies(await pops.pop(rig, **order)) == [b"1", b"2"]


@pytest.mark.parametrize("others", [1, 40])
async def test_a_group_that_cannot_be_had_loses_no_other_entry_of_a_heartbeat(tmp_path, others):
    async with lone_broker(tmp_path, broker={"auto_create_subscription_group": False}) as rig:
        await rig.send("T")
        known = [f"known{number}" for number in range(others)]
        for group in known:
            await rig.ask(200, {}, json.dumps({"groupName": group}).encode())
        beat = heartbeat("c1", "T", group="not_there")
        for group in known:
            beat.consumer_data_set += heartbeat("c1", "T", group=group).consumer_data_set
        reply = await rig.ask(34, {}, beat.encode())
        assert reply.code == 0 and "not_there" in (reply.remark or "")
        for group in known:
            assert (await rig.ask(38, {"consumerGroup": group})).code == 0
        assert (await rig.ask(204, {"producerGroup": "p", "topic": "T"})).code == 0
        assert (await rig.ask(38, {"consumerGroup": "not_there"})).code == 1


async def test_r45_a_master_with_a_full_disk_still_answers_pulls_as_master(tmp_path):
    async with lone_broker(tmp_path, mapped_file_size_consume_queue=2 * UNIT_SIZE) as rig:
        for number in range(9):
            await rig.send("T", b"%d" % number)
        expire_all_but_last(rig, "T")
        below, above = await rig.pull("T", offset=0), await rig.pull("T", offset=100)
        rig.service.store.disk_space.set_watermark("more than 90 % of it is used")
        for offset, before in ((0, below), (100, above)):
            full = await rig.pull("T", offset=offset)
            assert (full.code, full.ext["nextBeginOffset"]) == (
                before.code,
                before.ext["nextBeginOffset"],
            )


@pytest.mark.parametrize("ratio", [0, 40])
async def test_a_new_group_begins_at_0_only_while_that_is_in_memory(tmp_path, ratio):
    async with lone_broker(tmp_path, access_message_in_memory_max_ratio=ratio) as rig:
        for _ in range(20):
            await rig.send("T", b"x" * 1000)
        assert (await rig.committed("new")).code == (0 if ratio else 22)


async def test_statistics_show_what_a_group_pulled_and_has_not_committed(rig):
    for number in range(9):
        await rig.send("T", b"%d" % number)
    await rig.pull("T", offset=0, count=6)
    assert (await rig.commit(2)).code == 0
    stats = await rig.ask(208, {"consumerGroup": "g", "topic": "T"})
    assert b'"pullOffset":6' in stats.body and b'"consumerOffset":2' in stats.body


async def test_r54_a_popped_message_without_a_dead_letter_topic_is_set_aside(rig, clock):
    """`%DLQ%` and the group are too long for a name. What came behind it is given back."""
    group, topic = "g" * 252, "%RETRY%any"
    await rig.send(topic, b"poison")
    config = {"groupName": group, "retryMaxTimes": 0}
    assert (await rig.ask(200, {}, json.dumps(config).encode())).code == 0
    assert pops.bodies(await pops.pop(rig, topic=topic, consumerGroup=group)) == [b"poison"]
    await rig.send("T", b"good")
    assert pops.bodies(await pops.pop(rig)) == [b"good"]
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, "%RETRY%g_T") == 1)
    await until(lambda: not len(rig.service.features.pop.table))
    assert "message 0 of %RETRY%any" in rig.service.path.aside.problem


@pytest.mark.parametrize("limit", [16, 0])
async def test_r54_what_was_popped_comes_back_whatever_clients_may_send_by_now(rig, clock, limit):
    """As a retry, and as a dead letter."""
    config = {"groupName": "g", "retryMaxTimes": limit}
    assert (await rig.ask(200, {}, json.dumps(config).encode())).code == 0
    await rig.send("T", b"x" * 200_000)
    assert len(pops.messages(await pops.pop(rig))) == 1
    assert (await rig.ask(25, {}, b"maxMessageSize=100000\n")).code == 0
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, "%RETRY%g_T" if limit else "%DLQ%g") == 1)
    await until(lambda: not len(rig.service.features.pop.table))


async def test_stock_clients_can_read_each_refusal_of_a_pop(tmp_path, clock, monkeypatch):
    """With a map of fields that lacks popTime they see an exception, and pause for 3 s."""
    async with lone_broker(tmp_path, broker={"pop_in_flight_max": 2}) as rig:
        await rig.send("T")
        found = await pops.pop(rig)
        ((_, handle),) = pops.messages(found)
        late = {"pollTime": 100, "bornTime": clock.now_ms - 1000}
        refused = {
            210: await pops.pop(rig),
            19: await rig.ask(200052, position() | {"maxMsgNums": "1"}),
            208: await rig.ask(200053, pops.named(handle, offset=5, invisibleTime=1000)),
        }
        for code, reply in refused.items():
            assert reply.code == code
            assert not reply.has_ext or reply.ext.keys() == found.ext.keys()
        await rig.send("T")
        assert (late_reply := await pops.pop(rig, **late)).code == 210 and not late_reply.has_ext
        await pops.pop(rig)
        full = await pops.pop(rig)
        assert full.code == 209 and not full.has_ext


async def test_a_late_notification_says_whether_there_are_messages(rig, clock):
    """As in Java; only a POP that comes late is refused."""
    asked = position() | {"pollTime": "100", "bornTime": str(clock.now_ms - 1000)}
    for has_message in ("true", "false"):
        if has_message == "true":
            await rig.send("T")
        reply = await rig.ask(200054, asked)
        assert (reply.code, reply.ext["hasMsg"]) == (0, has_message)
        await pops.pop(rig)


async def test_a_peek_finds_the_only_queue_with_a_message(rig, clock, monkeypatch):
    monkeypatch.setattr("batonmq.broker.pop.pop_reader.BUDGET", 1)
    await rig.send("T", b"x", queue=2)
    asked = {"consumerGroup": "g", "topic": "T", "queueId": "-1", "maxMsgNums": "1"}
    for _ in range(20):  # it begins with any queue
        assert pops.bodies(await rig.ask(200052, asked)) == [b"x"]


@pytest.mark.parametrize("ratio", [0, 40])
async def test_a_new_group_that_wants_the_end_gets_all_only_while_it_is_in_memory(
    tmp_path, clock, ratio
):
    async with lone_broker(tmp_path, access_message_in_memory_max_ratio=ratio) as rig:
        for number in range(3):
            await rig.send("T", b"%d" % number)
        popped = pops.bodies(await pops.pop(rig, initMode=1))
        assert popped == ([b"0", b"1", b"2"] if ratio else [b"2"])


async def test_a_batch_of_acks_counts_whatever_became_of_one_topic(rig, clock):
    assert (await rig.ask(200151, body=b'{"acks":[]}')).code == 208
    await rig.send("T")
    reply = await pops.pop(rig)
    entry = {"b": "AQ==", "c": "g", "it": 60000, "pt": int(reply.ext["popTime"]), "q": 0, "r": "0",
             "rq": 0, "so": 0, "t": "T"}  # fmt: skip
    acks = [entry | {"t": "deleted"}, entry]
    assert (await rig.ask(200151, body=json.dumps({"acks": acks}).encode())).code == 0
    assert len(rig.service.features.pop.table) == 0


async def test_what_is_left_counts_all_queues_of_the_topic(rig, clock):
    for queue in (0, 0, 1, 2):
        await rig.send("T", queue=queue)
    assert (await pops.pop(rig, maxMsgNums=1)).ext["restNum"] == "3"
    assert (await rig.ask(200055, position(topic="No"))).code == 17


async def test_a_queue_that_cannot_be_read_keeps_no_message_of_the_others(rig, clock, monkeypatch):
    """And none of them is given twice for it."""
    for queue in range(3):
        assert (await rig.send(queue=queue, body=b"%d" % queue)).code == 0
    read = StoreQueries.get_message

    def get_message(self: StoreQueries, topic: str, queue_id: int, *more: Any) -> GetMessageResult:
        if queue_id == 1:
            raise CorruptLogError("queue 1", 0, "Input/output error")
        return read(self, topic, queue_id, *more)

    monkeypatch.setattr(StoreQueries, "get_message", get_message)
    found = pops.messages(await pops.pop(rig))
    assert sorted(message.body for message, _ in found) == [b"0", b"2"]
    refused = await pops.pop(rig)
    assert refused.code != 0 and "Input/output error" in (refused.remark or "")


async def test_an_error_at_the_deadline_of_a_held_pop_ends_only_that_one(rig, clock, monkeypatch):
    await rig.send()
    assert pops.messages(await pops.pop(rig))
    held = asyncio.ensure_future(pops.pop(rig, pollTime=500))
    await until(lambda: rig.service.pop.held)
    monkeypatch.setattr(PopProcessor, "_continue", Mock(side_effect=OSError("too many files")))
    refused = await held
    assert refused.code == ResponseCode.SYSTEM_ERROR and "too many files" in (refused.remark or "")
