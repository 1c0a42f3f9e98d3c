"""POP at a broker: who gets what, until when, and what a new master makes of it."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from failing_disk import failing
from heartbeats import heartbeat
from lone_broker import (
    HeldConfirms,
    Rig,
    crashed,
    end_of,
    expire_all_but_last,
    lone_broker,
    pop_header,
    refuse,
    unconfirmed,
    until,
)

from batonmq.broker.pop import pop_service, pop_table
from batonmq.broker.pop.pop_table import CheckPoint, PopTable
from batonmq.broker.write import log_features
from batonmq.protocol.bodies import QueryAssignmentRequestBody
from batonmq.protocol.layout import UNIT_SIZE
from batonmq.protocol.message import MessageExt
from batonmq.protocol.pop import PopHandle, parse_offset_info
from batonmq.protocol.records.codec import decode_records
from batonmq.protocol.topic_name import POP_TOPIC
from batonmq.remoting.command import RemotingCommand

GOLDEN = Path(__file__).parents[1] / "golden" / "java-5.3.3-pop"
RETRY = "%RETRY%g_T"


class Clock:
    """The wall clock. It stands where a test puts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1_800_000_000_000
        monkeypatch.setattr(log_features, "wall_ms", lambda: self.now_ms)
        monkeypatch.setattr(log_features, "MAX_PAUSE_MS", 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def golden(code: int, number: int = 0) -> Any:
    return json.loads((GOLDEN / f"broker-{code}.json").read_text())["examples"][number]


async def pop(rig: Rig, **changed: object) -> RemotingCommand:
    return await rig.ask(200050, pop_header(**changed))


def messages(reply: RemotingCommand) -> list[tuple[MessageExt, PopHandle]]:
    """What came with a POP, each with its handle as a client makes it."""
    assert reply.code == 0, reply.remark
    ext, found = reply.ext, []
    starts = parse_offset_info(ext["startOffsetInfo"])
    offsets = parse_offset_info(ext["msgOffsetInfo"])
    for message in decode_records(reply.body):
        if text := message.properties.get("POP_CK"):
            found.append((message, PopHandle.decode(text)))
            continue
        key = ("0", message.queue_id)
        assert message.queue_offset in offsets[key]
        times = int(ext["popTime"]), int(ext["invisibleTime"])
        handle = PopHandle(
            starts[key][0],
            *times,
            int(ext["reviveQid"]),
            "0",
            "broker-a",
            message.queue_id,
            message.queue_offset,
        )
        found.append((message, handle))
    return found


def bodies(reply: RemotingCommand) -> list[bytes]:
    return sorted(message.body for message, _ in messages(reply))


def named(handle: PopHandle, **changed: object) -> dict[str, str]:
    fields: dict[str, object] = {
        "consumerGroup": "g",
        "topic": "T",
        "queueId": handle.queue_id,
        "offset": handle.queue_offset,
        "extraInfo": handle.encode(),
    }
    return {key: str(value) for key, value in (fields | changed).items()}


async def ack(rig: Rig, handle: PopHandle, **changed: object) -> RemotingCommand:
    return await rig.ask(200051, named(handle, **changed))


def progress_of(rig: Rig) -> int:
    """The offset from which a new master reads."""
    return rig.service.tables.offsets.query(pop_service.PROGRESS_GROUP, POP_TOPIC, 0)


async def slices(count: int = 4) -> None:
    """Until the service has done some more of them."""
    done, next_due = [0], PopTable.next_due

    def counted(table: PopTable, now_ms: int) -> CheckPoint | None:
        done[0] += 1
        return next_due(table, now_ms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PopTable, "next_due", counted)
        await until(lambda: done[0] > count)


async def test_acked_messages_do_not_come_again_and_others_do_with_a_count(rig, clock):
    for queue in range(4):
        await rig.send("T", b"%d" % queue, queue=queue, KEYS=f"k{queue}")
    first = await pop(rig)
    got = {message.body: handle for message, handle in messages(first)}
    assert sorted(got) == [b"0", b"1", b"2", b"3"] and first.ext["restNum"] == "0"
    assert (await pop(rig)).code == 210, "all of it is in flight"
    for body in (b"0", b"1", b"2"):
        assert (await ack(rig, got[body])).code == 0
    clock.now_ms += 60_200
    await until(lambda: end_of(rig, RETRY) == 1)
    ((again, handle),) = messages(await pop(rig))
    assert (again.body, again.topic, again.reconsume_times) == (b"3", "T", 1)
    assert again.properties["1ST_POP_TIME"] == first.ext["popTime"] and again.keys == "k3"
    assert handle.flag == "1" and handle.queue_offset == 0
    assert (await ack(rig, handle)).code == 0
    clock.now_ms += 3_600_000
    assert (await pop(rig)).code == 210 and end_of(rig, RETRY) == 1
    assert len(rig.service.features.pop.table) == 0


async def test_the_golden_pop_ack_and_other_time(rig, clock):
    """The stock client's own requests; the answers have the fields of Java's."""
    for number in range(6):
        await rig.send("PopTopic", b"pop %d" % number, queue=number % 4)
    asked, answered = (json.loads(golden(200050)[side]["header"]) for side in GOLD)
    reply = await rig.ask(200050, asked["extFields"] | {"bornTime": str(clock.now_ms)})
    assert reply.code == 0 and reply.remark == answered["remark"]
    assert reply.ext.keys() == answered["extFields"].keys()
    assert sorted(reply.ext["startOffsetInfo"].split(";")) == [
        "0 0 0", "0 1 0", "0 2 0", "0 3 0"
    ]  # fmt: skip
    asked, answered = (json.loads(golden(200053)[side]["header"]) for side in GOLD)
    times = reply.ext["popTime"], reply.ext["invisibleTime"]
    handle = "0 {} {} 0 0 broker-a 1 0".format(*times)
    later = await rig.ask(200053, asked["extFields"] | {"extraInfo": handle})
    assert later.code == 0 and later.ext.keys() == answered["extFields"].keys()
    asked = json.loads(golden(200051)["request"]["header"])
    handle = "0 {} {} 0 0 broker-a 3 0".format(*times)
    fields = asked["extFields"] | {"extraInfo": handle, "offset": "0"}
    assert (await rig.ask(200051, fields)).code == 0
    assert len(rig.service.features.pop.table) == 5


GOLD = ("request", "response")


async def test_another_invisible_time_counts_from_now(rig, clock):
    await rig.send("T", b"x")
    ((_, handle),) = messages(await pop(rig))
    clock.now_ms += 50_000
    later = await rig.ask(200053, named(handle, invisibleTime=20_000))
    assert later.ext == {
        "popTime": str(clock.now_ms), "invisibleTime": "20000", "reviveQid": "0"
    }  # fmt: skip
    new = handle._replace(pop_time=clock.now_ms, invisible_time=20_000)
    clock.now_ms += 15_000
    assert (await ack(rig, handle)).code == 0, "an old handle acks nothing"
    assert (await pop(rig)).code == 210
    clock.now_ms += 5_200
    await until(lambda: end_of(rig, RETRY) == 1)
    gone = await rig.ask(200053, named(new, invisibleTime=1000))
    assert gone.code == 0 and gone.ext["popTime"] == str(clock.now_ms), "as in Java"
    assert len(rig.service.features.pop.table) == 0
    ((again, _),) = messages(await pop(rig))
    assert again.reconsume_times == 1


async def test_too_many_failures_end_in_the_dead_letters(rig, clock):
    body = b'{"groupName":"g","retryMaxTimes":2,"retryQueueNums":1}'
    assert (await rig.ask(200, body=body)).code == 0
    await rig.send("T", b"poison")
    for count in range(3):
        ((message, _),) = messages(await pop(rig, invisibleTime=1000))
        assert message.reconsume_times == count
        clock.now_ms += 1_200
        await until(lambda: len(rig.service.features.pop.table) == 0)
    assert (await pop(rig)).code == 210
    (dead,) = decode_records((await rig.pull("%DLQ%g")).body)
    assert (dead.body, dead.reconsume_times) == (b"poison", 3)


async def test_a_batch_is_acked_by_bits(rig, clock):
    for number in range(10):
        await rig.send("T", b"%d" % number)
    reply = await pop(rig)
    bits = base64.b64encode((0b11_0000_0101).to_bytes(2, "little")).decode()
    entry = {
        "b": bits, "c": "g", "it": 60000, "pt": int(reply.ext["popTime"]), "q": 0, "r": "0",
        "rq": 0, "so": 0, "t": "T"
    }  # fmt: skip
    body = json.dumps({"acks": [entry], "brokerName": "broker-a"}).encode()
    assert (await rig.ask(200151, body=body)).code == 0
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, RETRY) == 6)
    left = [b"%d" % number for number in (1, 3, 4, 5, 6, 7)]
    assert bodies(await pop(rig)) == left
    for wrong, what in (({"b": "*"}, "base64"), ({"r": "3"}, "0, 1 and 2")):
        body = json.dumps({"acks": [entry | wrong]}).encode()
        refused = await rig.ask(200151, body=body)
        assert refused.code == 29 and what in (refused.remark or "")


async def test_in_order_a_queue_is_blocked_until_its_messages_are_acked(rig, clock):
    for number in range(5):
        await rig.send("T", b"%d" % number)
    order = {"order": "true", "maxMsgNums": 2, "queueId": 0}
    first = await pop(rig, **order, attemptId="a")
    assert first.ext["reviveQid"] == "999" and first.ext["orderCountInfo"] == "0 0 0"
    (_, one), (_, two) = messages(first)
    assert (await pop(rig, **order)).code == 210
    clock.now_ms += 1
    assert bodies(await pop(rig, **order, attemptId="a")) == [b"0", b"1"], "a lost answer"
    clock.now_ms += 1
    reply = await pop(rig, **order, attemptId="a")
    (_, one), (_, two) = messages(reply)
    assert reply.ext["orderCountInfo"] == "0 0 0", "as of the same attempt"
    assert (await ack(rig, two)).code == 0
    assert (await pop(rig, **order)).code == 210, "the first is not done"
    waits = asyncio.ensure_future(pop(rig, **order, pollTime=10_000, bornTime=clock.now_ms))
    await until(lambda: rig.service.pop.held == 1)
    assert (await ack(rig, one)).code == 0
    assert bodies(await waits) == [b"2", b"3"]
    offsets = rig.service.tables.offsets
    await until(lambda: offsets.query("g", "T", 0) == 2)
    (_, three), _ = messages(await waits)
    unknown = await ack(rig, three._replace(queue_offset=1))
    assert unknown.code == 13
    put_off = await rig.ask(200053, named(three, invisibleTime=90_000))
    assert put_off.ext["invisibleTime"] == "90000"
    clock.now_ms += 89_000
    assert (await pop(rig, **order)).code == 210
    clock.now_ms += 1_001
    assert bodies(await pop(rig, **order)) == [b"2", b"3"], "in its own queue, in its place"
    clock.now_ms += pop_table.ORDER_KEPT_MS + 61_000
    await until(lambda: not len(rig.service.features.pop.table))  # R58: abandoned for a day


async def test_a_notification_looks_again_at_its_deadline(rig, clock):
    """A message wakes one of two. The same attempt has it then, so it blocks neither."""
    await rig.send("T", b"0", queue=1)
    await pop(rig)
    fields = {"consumerGroup": "g", "topic": "T", "queueId": "-1", "pollTime": "10000"}
    fields |= {"bornTime": str(clock.now_ms), "order": "true", "attemptId": "a"}
    waits = [asyncio.ensure_future(rig.ask(200054, fields)) for _ in range(2)]
    await until(lambda: rig.service.pop.held == 2)
    await rig.send("T", b"x")
    await until(lambda: rig.service.pop.held == 1)
    assert bodies(await pop(rig, order="true", attemptId="a")) == [b"x"]
    rig.service.pop.tick(rig.service.path.clock_ms() + 10_000)
    assert [(await each).ext["hasMsg"] for each in waits] == ["true", "true"]


async def test_a_waiting_pop_gets_the_next_message_that_passes_its_filter(rig, clock):
    await rig.send("T", b"0", TAGS="B")
    wait = {"pollTime": 10_000, "bornTime": clock.now_ms}
    tag = asyncio.ensure_future(pop(rig, exp="A || C", **wait))
    sql = asyncio.ensure_future(
        pop(rig, consumerGroup="h", expType="SQL92", exp="size > 3", **wait)
    )
    fields = {"consumerGroup": "n", "topic": "T", "queueId": "0", "pollTime": "10000"}
    reported = await rig.ask(200054, fields | {"bornTime": str(clock.now_ms)})
    assert reported.ext == {"hasMsg": "true", "pollingFull": "false"}
    await until(lambda: rig.service.pop.held == 2)
    held = [one for of in rig.service.pop._hold._by_owner.values() for one in of]
    assert not any(one.request.size for one in held), "R58: a body would be kept for a minute"
    info = {"consumerGroup": "g", "topic": "T", "queueId": "-1"}
    assert (await rig.ask(200055, info)).ext == {"pollingNum": "1"}
    await rig.send("T", b"1", TAGS="B", size="3")
    await rig.send("T", b"2", TAGS="C", size="2")
    assert bodies(await tag) == [b"2"]
    await rig.send("T", b"3", TAGS="B", size="9")
    assert bodies(await sql) == [b"3"]
    peek = {"consumerGroup": "p", "topic": "T", "queueId": "0", "maxMsgNums": "2"}
    for _ in range(2):
        assert bodies(await rig.ask(200052, peek)) == [b"0", b"1"], "nothing is taken"
    waits = asyncio.ensure_future(pop(rig, exp="A", **wait))
    await until(lambda: rig.service.pop.held == 1)
    while rig.service.pop.tick(1 << 60):
        pass
    assert (await waits).code == 210


async def test_r30_what_is_popped_leaves_when_its_record_is_confirmed(rig, clock):
    await rig.send("T", b"x")
    offsets = rig.service.tables.offsets
    with unconfirmed(rig):
        waits = asyncio.ensure_future(pop(rig))
        await until(lambda: len(rig.service.features.pop.table) == 1)
        assert (await pop(rig)).code == 210, "another does not get it"
        assert not waits.done() and offsets.query("g", "T", 0) == -1
    ((_, handle),) = messages(await waits)
    assert offsets.query("g", "T", 0) == 1
    with unconfirmed(rig):
        done = asyncio.ensure_future(ack(rig, handle))
        await until(lambda: len(rig.service.features.pop.table) == 0)
        again = asyncio.ensure_future(ack(rig, handle))
        # It was handled once a later request on its connection is answered.
        assert [(await pop(rig)).code for _ in range(2)] == [210, 210]
        assert not done.done() and not again.done(), "nor what another try finds done"
    assert (await done).code == (await again).code == 0


async def test_r30_a_new_master_has_what_is_in_flight_and_where_the_group_is(tmp_path, clock):
    """The table of offsets is older than the log, as on a slave that was elected."""
    handles: list[PopHandle] = []

    async with lone_broker(tmp_path) as rig:
        for number in range(8):
            await rig.send("T", b"%d" % number, queue=0)
        handles.extend(handle for _, handle in messages(await pop(rig, maxMsgNums=4)))
        assert (await ack(rig, handles[0])).code == 0
        handles.extend(handle for _, handle in messages(await pop(rig, maxMsgNums=2)))
        assert (await ack(rig, handles[4])).code == 0
        later = await rig.ask(200053, named(handles[3], invisibleTime=600_000))
        handles[3] = handles[3]._replace(pop_time=int(later.ext["popTime"]))
    crashed(tmp_path, "consumerOffset.json")
    async with lone_broker(tmp_path) as rig:
        await until(lambda: rig.service.features.pop.is_loaded)
        assert rig.service.tables.offsets.query("g", "T", 0) == 6
        assert (await ack(rig, handles[1])).code == 0, "a handle of the old master"
        assert bodies(await pop(rig)) == [b"6", b"7"]
        clock.now_ms += 60_200
        await until(lambda: end_of(rig, RETRY) == 4)
        came = bodies(await pop(rig))
        assert came == [b"2", b"5", b"6", b"7"], "neither what was acked nor what waits longer"
        clock.now_ms += 540_000
        await until(lambda: end_of(rig, RETRY) == 9)


async def test_r30_a_new_master_reads_little_however_long_the_oldest_takes(rig, clock, monkeypatch):
    monkeypatch.setattr(pop_service, "SPAN_MIN", 16)
    service, offsets = rig.service.features.pop, rig.service.tables.offsets
    await rig.send("T", b"old")
    ((_, old),) = messages(await pop(rig, invisibleTime=3_600_000))
    for _ in range(40):
        await rig.send("T", b"new")
        ((_, handle),) = messages(await pop(rig))
        assert (await ack(rig, handle)).code == 0
    await until(lambda: service.table.next_record - service.table.oldest_record <= 16)
    progress = pop_service.PROGRESS_GROUP
    await until(lambda: offsets.query(progress, POP_TOPIC, 0) == service.table.oldest_record)
    rig.service.role_left()
    assert (await ack(rig, old)).code == 14
    rig.service.master_opened()
    await until(lambda: service.is_loaded)
    assert len(service.table) == 1
    clock.now_ms += 3_600_200
    await until(lambda: end_of(rig, RETRY) == 1)


async def test_a_new_master_continues_when_records_expire_while_it_reads_them(tmp_path, clock):
    async with lone_broker(tmp_path, mapped_file_size_consume_queue=2 * UNIT_SIZE) as rig:
        service = rig.service.features.pop
        for _ in range(3):
            await rig.send("T", b"one")
            ((_, handle),) = messages(await pop(rig))
            assert (await ack(rig, handle)).code == 0
        rig.service.role_left()
        rig.service.tables.offsets.commit(pop_service.PROGRESS_GROUP, POP_TOPIC, 0, 0)
        rig.service.master_opened()
        assert not service.is_loaded
        expire_all_but_last(rig, POP_TOPIC)
        await until(lambda: service.is_loaded)
        await rig.send("T", b"another")
        ((message, _),) = messages(await pop(rig))
        assert message.body == b"another"


async def test_r39_messages_of_a_deleted_topic_do_not_come_back(rig, clock):
    await rig.send("T", b"old")
    ((_, handle),) = messages(await pop(rig))
    waits = asyncio.ensure_future(pop(rig, pollTime=10_000, bornTime=clock.now_ms))
    await until(lambda: rig.service.pop.held == 1)
    assert (await rig.ask(215, {"topic": "T"})).code == 0
    assert (await waits).code == 17
    assert (await ack(rig, handle)).code == 17
    await until(lambda: "T" not in rig.service.store.deleting_topics)
    await rig.send("T", b"new")
    assert bodies(await pop(rig)) == [b"new"], "the group begins again"
    rig.service.role_left()
    rig.service.master_opened()
    clock.now_ms += 61_000
    await until(lambda: end_of(rig, RETRY) == 1)
    assert bodies(await pop(rig)) == [b"new"]


async def test_r39_a_message_waits_while_its_topic_may_be_deleted(rig, clock):
    """The deletion may never be confirmed: then the message comes again."""
    await rig.send("T")
    await pop(rig)
    deleting, table = rig.service.store.deleting_topics, rig.service.features.pop.table
    deleting["T"] = 1
    clock.now_ms += 61_000
    await until(lambda: table.wake_ms > clock.now_ms)
    assert len(table) == 1
    del deleting["T"]
    clock.now_ms += 2 * pop_service.WAITS_MS
    await until(lambda: end_of(rig, RETRY) == 1)


async def test_a_reset_is_followed_also_by_the_next_master(rig, clock):
    for number in range(3):
        await rig.send("T", b"%d" % number, queue=0)
    assert len(messages(await pop(rig))) == 3
    fields = {"topic": "T", "group": "g", "timestamp": "0", "queueId": "0", "offset": "1"}
    assert (await rig.ask(222, fields)).code == 0
    rig.service.role_left()
    rig.service.master_opened()
    await until(lambda: rig.service.features.pop.is_loaded)
    assert bodies(await pop(rig)) == [b"1", b"2"]
    assert len(rig.service.features.pop.table) == 3


async def test_modes_and_assignments(tmp_path):
    async with lone_broker(tmp_path) as rig:
        assert (
            await rig.ask(34, body=heartbeat("c1", "PopTopic", group="pop_group").encode())
        ).code == 0
        mode = bytes.fromhex(golden(401)["request"]["body_hex"])
        assert (await rig.ask(401, body=mode)).code == 17
        await rig.send("PopTopic", b"x")
        assert (await rig.ask(401, body=mode)).code == 0
        for topic, number in (("PopTopic", 0), ("%RETRY%pop_group", 1)):
            asked = QueryAssignmentRequestBody(
                client_id="c1", consumer_group="pop_group", strategy_name="AVG", topic=topic
            )
            reply = await rig.ask(400, body=asked.encode())
            expected = json.loads(bytes.fromhex(golden(400, number)["response"]["body_hex"]))
            assert json.loads(reply.body) == expected
        asked.strategy_name = "NONE"
        reply = await rig.ask(400, body=asked.encode())
        assert json.loads(reply.body) == {"messageQueueAssignments": None}
        table = json.loads((await rig.ask(402)).body)["messageRequestModeMap"]
        assert table == {"PopTopic": {"pop_group": json.loads(mode)}}
        assert (await rig.ask(25, body=b"autoCreateSubscriptionGroup=false")).code == 0
        for wrong, code in (
            ({"mode": "PUSH"}, 29),
            ({"topic": "%RETRY%pop_group"}, 16),
            ({"consumerGroup": "nobody"}, 26),
        ):
            refused = await rig.ask(401, body=json.dumps(json.loads(mode) | wrong).encode())
            assert refused.code == code and refused.remark
        # As in Java, a group may be given its mode before its first member comes.
        assert (await rig.ask(25, body=b"autoCreateSubscriptionGroup=true")).code == 0
        early = json.dumps(json.loads(mode) | {"consumerGroup": "early"}).encode()
        assert (await rig.ask(401, body=early)).code == 0
        assert rig.service.topics.groups.get("early") is not None
    async with lone_broker(tmp_path) as rig:
        modes = rig.service.tables.request_modes
        known = modes.get("PopTopic", "pop_group")
        assert known is not None and known.mode == "POP" and known.pop_share_queue_num == 8


async def test_what_is_wrong_is_named_and_stores_nothing(rig, clock):
    await rig.send("T", b"x")
    ((_, handle),) = messages(await pop(rig))
    end = rig.service.store.max_phy_offset
    for change, code, what in (
        ({"maxMsgNums": 33}, 29, "1 to 32"),
        ({"maxMsgNums": "many"}, 29, "maxMsgNums"),
        ({"invisibleTime": 0}, 29, "invisibleTime"),
        ({"topic": "No"}, 17, "No"),
        ({"queueId": 99}, 29, "queueId 99"),
        ({"expType": "SQL92", "exp": "size >"}, 23, ""),
        ({"expType": "XYZ"}, 23, "TAG and SQL92"),
        ({"consumerGroup": ""}, 29, "consumerGroup"),
    ):
        refused = await pop(rig, **change)
        assert refused.code == code and what in (refused.remark or ""), (change, refused.remark)
    for wrong, code, what in (
        ({"extraInfo": "1 2 3"}, 29, "popTime"),
        ({"extraInfo": "0 1 1 0 7 broker-a 0 0"}, 29, "flag(0|1|2)"),
        ({"extraInfo": "0 1 1 0 0 broker-a 0 " + "9" * 99}, 29, "extraInfo"),
        ({"topic": "No"}, 17, "No"),
        ({"queueId": 99}, 13, "queueId 99"),
        ({"offset": 5}, 208, "offset 5"),
    ):
        for request in (200051, 200053):
            reply = await rig.ask(request, named(handle, invisibleTime=1000, **wrong))
            assert reply.code == code and what in (reply.remark or ""), (wrong, reply.remark)
    assert rig.service.store.max_phy_offset == end
    assert (await ack(rig, handle)).code == 0 and (await ack(rig, handle)).code == 0


async def test_what_is_in_flight_is_bounded(tmp_path, clock):
    async with lone_broker(tmp_path, broker={"pop_in_flight_max": 2}) as rig:
        for number in range(4):
            await rig.send("T", b"%d" % number)
        (_, one), _ = messages(await pop(rig, maxMsgNums=2))
        full = await pop(rig)
        assert full.code == 209 and "popInFlightMax" in (full.remark or "")
        assert (await ack(rig, one)).code == 0
        assert len(messages(await pop(rig))) == 2


async def test_r45_an_ack_sent_again_waits_for_the_record_that_a_full_disk_keeps(tmp_path, clock):
    async with lone_broker(tmp_path, flush_interval_consume_queue=20, slave_timeout=60_000) as rig:
        await rig.send("T", b"0")
        ((_, handle),) = messages(await pop(rig))
        # Of the log only: a queue's writer must not find the full disk before the ack does.
        with failing("pwrite /commitlog ENOSPC"):
            acks = [asyncio.ensure_future(ack(rig, handle))]
            await until(lambda: rig.service.store.appender.has_buffered)
            acks.append(asyncio.ensure_future(ack(rig, handle)))
            for _ in range(3):
                await rig.ask(45)
            assert not any(one.done() for one in acks)
        assert [(await one).code for one in acks] == [0, 0]


async def test_r30_an_orderly_group_continues_when_the_ack_is_confirmed(rig, clock):
    """Its offset is what a new master goes by: it would leave out what is not known to be done."""
    for number in range(2):
        await rig.send("T", b"%d" % number)
    order = {"order": "true", "maxMsgNums": 1, "queueId": 0}
    ((_, one),) = messages(await pop(rig, **order))
    offsets, held = rig.service.tables.offsets, HeldConfirms(rig.service.path)
    done = asyncio.ensure_future(ack(rig, one))
    await until(lambda: rig.service.features.pop.table.next_record == 2)
    await rig.ask(45)
    assert offsets.query("g", "T", 0) <= 0 and not done.done()
    held.release()
    assert (await done).code == 0
    await until(lambda: offsets.query("g", "T", 0) == 1)


async def test_r30_what_a_new_master_reads_from_waits_for_the_groups_offsets(
    rig, clock, monkeypatch
):
    """1. All that was popped is acked. 2. A record is confirmed, its waiter was not called yet:
    the offset stays. 3. A mastership ends and its last record is cut: what it was about to note is
    not noted by the next."""
    store, path, offsets = rig.service.store, rig.service.path, rig.service.tables.offsets
    orderly = {"consumerGroup": "o"}
    await rig.send("T")
    ((_, handle),) = messages(await pop(rig))
    assert (await ack(rig, handle)).code == 0
    await until(lambda: progress_of(rig) == 2)
    ((_, handle),) = messages(await pop(rig, **orderly, queueId=0, order="true"))
    noted, commit = [], offsets.commit

    def commits(group: str, topic: str, queue_id: int, offset: int) -> None:
        if group == pop_service.PROGRESS_GROUP:
            noted.append(offset)
        commit(group, topic, queue_id, offset)

    monkeypatch.setattr(offsets, "commit", commits)
    held, end = HeldConfirms(path), store.max_phy_offset
    done = asyncio.ensure_future(ack(rig, handle, **orderly))
    await until(lambda: store.max_phy_offset > end)
    store.advance_confirm_offset(store.max_phy_offset)
    await slices()
    assert not done.done()
    assert set(noted) == {2}
    held.release()
    assert (await done).code == 0
    await until(lambda: progress_of(rig) == 4)

    await rig.send("T")
    ((_, handle),) = messages(await pop(rig))
    await slices()
    held, end = HeldConfirms(path), store.max_phy_offset
    cut = asyncio.ensure_future(ack(rig, handle))
    await until(lambda: store.max_phy_offset > end)
    await slices()
    rig.service.role_left()
    path.acks.fail_all(14, "the role changed")
    assert (await cut).code == 14
    store.slave_log.truncate_to(end)
    store.prepare_master()
    held.release()
    rig.service.master_opened()
    await rig.send("T", bytes(1000))
    await slices()
    assert set(noted) == {2, 4}, "the pop is still in flight"


async def test_r30_what_was_put_off_in_order_stays_so_when_it_is_written_again(
    rig, clock, monkeypatch
):
    """A new master reads the copy alone."""
    monkeypatch.setattr(pop_service, "SPAN_MIN", 0)
    service, order = rig.service.features.pop, {"order": "true", "queueId": 0}
    for number in range(3):
        await rig.send("T", b"%d" % number)
    (_, one), (_, two), _ = messages(await pop(rig, **order))
    assert (await ack(rig, one)).code == 0
    assert (await rig.ask(200053, named(two, invisibleTime=90_000))).code == 0
    for _ in range(5):
        await rig.send("U")
        ((_, handle),) = messages(await pop(rig, topic="U"))
        assert (await ack(rig, handle, topic="U")).code == 0
    await until(lambda: progress_of(rig) > 2)
    rig.service.role_left()
    rig.service.master_opened()
    await until(lambda: service.is_loaded)
    copy = service.table.order_of(("g", "T", 0))
    assert copy is not None and copy.open == {1, 2}
    clock.now_ms += 89_000
    assert (await pop(rig, **order)).code == 210
    clock.now_ms += 1_001
    assert bodies(await pop(rig, **order)) == [b"1", b"2"]


async def test_r30_of_messages_given_back_in_part_the_rest_follows_and_none_comes_twice(
    rig, clock, monkeypatch
):
    for number in range(3):
        await rig.send("T", b"%d" % number)
    assert len(messages(await pop(rig, queueId=0))) == 3
    refused = refuse(rig, monkeypatch, RETRY, once=b"1")
    clock.now_ms += 60_200
    await until(lambda: refused)
    clock.now_ms += 2_000
    await until(lambda: end_of(rig, RETRY) >= 3)
    assert bodies(await pop(rig)) == [b"0", b"1", b"2"]
    assert end_of(rig, RETRY) == 3


async def test_r39_a_new_master_counts_nothing_that_was_popped_before_the_topic_was_made_again(
    rig, clock
):
    await rig.send("T", b"old")
    assert len(messages(await pop(rig))) == 1
    assert (await rig.ask(215, {"topic": "T"})).code == 0
    await until(lambda: "T" not in rig.service.store.deleting_topics)
    await rig.send("T", b"new")
    rig.service.role_left()
    rig.service.master_opened()
    await until(lambda: rig.service.features.pop.is_loaded)
    assert bodies(await pop(rig)) == [b"new"]


async def test_an_ack_of_the_next_offset_is_answered_as_java_does(rig, clock):
    await rig.send("T")
    ((_, handle),) = messages(await pop(rig))
    assert (await ack(rig, handle._replace(queue_offset=1))).code == 0
    assert (await ack(rig, handle._replace(queue_offset=2))).code == 208
    assert len(rig.service.features.pop.table) == 1


async def test_r30_a_new_master_does_not_take_a_group_back_to_what_it_popped(tmp_path, clock):
    """It has continued with pulls since then."""

    async with lone_broker(tmp_path) as rig:
        for number in range(8):
            await rig.send("T", b"%d" % number)
        assert len(messages(await pop(rig, maxMsgNums=4))) == 4
        rig.service.tables.offsets.commit("g", "T", 0, 7)
    async with lone_broker(tmp_path) as rig:
        await until(lambda: rig.service.features.pop.is_loaded)
        assert len(rig.service.features.pop.table) == 4
        assert rig.service.tables.offsets.query("g", "T", 0) == 7


async def test_r30_progress_also_waits_for_records_without_a_pending_reply(rig, clock, monkeypatch):
    """What is in flight is written again further on, and not confirmed there: a replica that lacks
    it reads from the first record on."""
    await rig.send("T")
    await pop(rig, invisibleTime=3_600_000)
    for _ in range(2):
        await rig.send("T")
        ((_, handle),) = messages(await pop(rig))
        assert (await ack(rig, handle)).code == 0
    await until(lambda: progress_of(rig) == 0)
    held, table = HeldConfirms(rig.service.path), rig.service.features.pop.table
    monkeypatch.setattr(pop_service, "SPAN_MIN", 0)
    await until(lambda: table.oldest_record == 5)
    await slices()
    assert progress_of(rig) == 0
    held.release()
    await until(lambda: progress_of(rig) == 5)


async def test_r30_r33_nothing_is_popped_or_acked_while_a_planned_switch_drains_the_log(rig, clock):
    for _ in range(2):
        await rig.send("T")
    ((_, handle),) = messages(await pop(rig, maxMsgNums=1))
    end = rig.service.store.appender.end
    rig.service.path.hold.begin()
    assert (await pop(rig)).code == 210
    later = await rig.ask(200053, named(handle, invisibleTime=600_000))
    for refused in (await ack(rig, handle), later):
        assert refused.code == 14 and "changing" in (refused.remark or "")
    assert rig.service.store.appender.end == end
    rig.service.path.hold.release()
    assert (await ack(rig, handle)).code == 0
    assert len(messages(await pop(rig))) == 1


async def test_r30_what_was_taken_and_not_confirmed_is_not_the_next_masterships(rig, clock):
    """The record of the pop may be cut: the group continues at its offset."""
    service = rig.service.features.pop
    await rig.send("T")
    await until(lambda: service.is_loaded)
    service.positions.take(("g", "T", 0), 1)
    rig.service.role_left()
    rig.service.master_opened()
    await until(lambda: service.is_loaded)
    assert len(messages(await pop(rig))) == 1


async def test_r30_a_change_of_the_time_is_answered_when_it_is_confirmed(rig, clock):
    """And what was popped, or acked in order, and is not confirmed moves no offset of the group."""
    for _ in range(2):
        await rig.send("T")
    order = {"order": "true", "maxMsgNums": 1, "queueId": 0, "consumerGroup": "o"}
    ((_, handle),) = messages(await pop(rig, maxMsgNums=1))
    ((_, one),) = messages(await pop(rig, **order))
    path, offsets = rig.service.path, rig.service.tables.offsets
    held, records = HeldConfirms(path), rig.service.features.pop.table.next_record
    later = asyncio.ensure_future(rig.ask(200053, named(handle, invisibleTime=600_000)))
    acked = asyncio.ensure_future(ack(rig, one, consumerGroup="o"))
    popped = asyncio.ensure_future(pop(rig))
    await until(lambda: rig.service.features.pop.table.next_record == records + 3)
    await rig.ask(45)
    assert not later.done() and not acked.done() and not popped.done()
    before = offsets.query("g", "T", 0), offsets.query("o", "T", 0)
    path.acks.fail_all(14, "the role changed")
    assert [(await each).code for each in (later, acked, popped)] == [14, 14, 14]
    assert (offsets.query("g", "T", 0), offsets.query("o", "T", 0)) == before
    held.release()


async def test_r30_nothing_is_popped_before_a_new_master_knows_what_is_in_flight(rig, clock):
    """Its log ends with a pop that is not confirmed yet."""
    for number in range(2):
        await rig.send("T", b"%d" % number)
    service, held = rig.service.features.pop, HeldConfirms(rig.service.path)
    lost = asyncio.ensure_future(pop(rig, maxMsgNums=1))
    await until(lambda: len(service.table) == 1)
    rig.service.role_left()
    rig.service.path.acks.fail_all(14, "the role changed")
    await lost
    rig.service.master_opened()
    assert (await pop(rig)).code == 210 and len(service.table) == 0
    held.release()
    await until(lambda: service.is_loaded)
    assert bodies(await pop(rig)) == [b"1"]
