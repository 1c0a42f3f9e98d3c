"""Timed messages at a broker: to the millisecond, once, recalled, and again after a restart."""

import asyncio
import json
import struct

import pytest
from lone_broker import (
    Clock,
    Rig,
    crashed,
    end_of,
    expire_all_but_last,
    lone_broker,
    messages,
    refuse,
    send_header,
    unconfirmed,
    until,
)

from batonmq.broker.schedule import delivery
from batonmq.broker.write import log_features
from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.layout import UNIT_SIZE
from batonmq.protocol.message_id import RecallHandle, decode_handle
from batonmq.protocol.properties import encode_properties
from batonmq.protocol.topic_name import SCHEDULE_TOPIC, TIMER_TOPIC
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import wall_ms

RECALLS: dict[str, object] = {"recall_message_enable": True}


@pytest.mark.parametrize(
    ("wish", "value", "ahead_ms"),
    [
        ("TIMER_DELAY_SEC", "60", 60_000),
        ("TIMER_DELAY_MS", "60007", 60_007),
        ("TIMER_DELIVER_MS", "", 60_003),
    ],
)
async def test_a_timed_message_comes_at_its_millisecond(rig, clock, wish, value, ahead_ms):
    first = wall_ms()
    sent = await rig.send("T", b"timed", queue=3, **{wish: value or str(first + ahead_ms)})
    last = wall_ms()
    assert sent.code == 0 and sent.ext["queueId"] == "3"
    (waiting,) = await messages(rig, TIMER_TOPIC)
    out_ms = int(waiting.properties["TIMER_OUT_MS"])
    assert first + ahead_ms <= out_ms <= last + ahead_ms, "not rounded"
    assert rig.service.store.queries.units(TIMER_TOPIC, 0, 0, 1)[0][2] == out_ms
    handle = decode_handle(sent.ext["recallHandle"])
    assert handle == RecallHandle("T", "broker-a", out_ms + 1, "KEY1")
    await until(lambda: len(rig.service.features.timers) == 1)
    clock.stopped_at_ms = out_ms - 1
    await rig.send("T", b"earlier", queue=3, TIMER_DELIVER_MS=str(out_ms - 1))
    await until(lambda: end_of(rig, "T", 3) > 0)
    assert [one.body for one in await messages(rig, "T", 3)] == [b"earlier"]
    clock.stopped_at_ms = out_ms
    await until(lambda: end_of(rig, "T", 3) == 2)
    _, came = await messages(rig, "T", 3)
    assert came.body == b"timed" and came.properties["REAL_TOPIC"] == "T"
    assert int(came.properties["TIMER_DEQUEUE_MS"]) == out_ms


async def test_what_is_due_already_is_stored_at_once_and_a_level_counts_more(tmp_path, monkeypatch):
    """Else the service sleeps until its first message is due, not until it would look again."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(log_features, "MAX_PAUSE_MS", 3_600_000)
    async with lone_broker(tmp_path) as rig:
        for wish in ({"TIMER_DELIVER_MS": "1"}, {"TIMER_DELAY_SEC": "-5"}):
            sent = await rig.send("T", **wish)
            assert sent.code == 0 and "recallHandle" not in sent.ext
        assert end_of(rig, "T") == 2 and end_of(rig, TIMER_TOPIC) == 0
        await rig.send("T", DELAY="3", TIMER_DELAY_SEC="5")
        (waiting,) = await messages(rig, SCHEDULE_TOPIC, 2)
        assert "TIMER_DELAY_SEC" not in waiting.properties
        due_ms = wall_ms() + 3_600_000
        clock.stopped_at_ms = due_ms - 20
        await rig.send("T", TIMER_DELIVER_MS=str(due_ms))
        await until(lambda: len(rig.service.features.timers) == 1)
        for _ in range(20):  # turns of the loop, in which the service falls asleep
            await asyncio.sleep(0)
        clock.stopped_at_ms = due_ms
        await until(lambda: end_of(rig, "T") == 3)


@pytest.mark.parametrize(
    ("wish", "code", "named"),
    [
        ({"TIMER_DELAY_SEC": "259201"}, 13, "timerMaxDelaySec"),
        ({"TIMER_DELIVER_MS": "9999999999999"}, 13, "timerMaxDelaySec"),
        ({"TIMER_DELAY_MS": "soon"}, 13, "TIMER_DELAY_MS"),
        ({"TIMER_DELAY_MS": "1" * 30}, 13, "TIMER_DELAY_MS"),
        ({"TIMER_DELIVER_MS": "5", "TIMER_DEL_UNIQKEY": "T+K"}, 13, "due already"),
        ({"TIMER_DELAY_SEC": "5", "TIMER_DEL_UNIQKEY": "Other+K"}, 13, "its own topic only"),
    ],
)
async def test_an_invalid_delivery_time_is_refused_and_not_stored(rig, wish, code, named):
    await rig.send("T")
    end = rig.service.store.max_phy_offset
    refused = await rig.send("T", **wish)
    assert refused.code == code and named in (refused.remark or "")
    items = [BatchItem(b"x", encode_properties({"TIMER_DELAY_SEC": "1"}).encode())]
    batch = await rig.ask(320, send_header("T", 0, {}) | {"m": "true"}, encode_batch(items))
    assert batch.code == 13
    assert rig.service.store.max_phy_offset == end


async def test_timers_can_be_switched_off_and_never_outlive_the_log(tmp_path):
    async with lone_broker(tmp_path / "off", timer_wheel_enable=False) as rig:
        refused = await rig.send("T", TIMER_DELAY_SEC="5")
        assert refused.code == 1 and "timerWheelEnable" in (refused.remark or "")
    async with lone_broker(tmp_path / "short", file_reserved_time=1) as rig:
        assert (await rig.send("T", TIMER_DELAY_SEC="3601")).code == 13
        assert (await rig.send("T", TIMER_DELAY_SEC="3599")).code == 0


FORGED = RecallHandle("T", "broker-a", wall_ms() + 86_400_000, "K\x02TIMER_OUT_MS\x015").encode()


async def recall(rig: Rig, sent: RemotingCommand, **changed: str) -> RemotingCommand:
    fields = {"producerGroup": "pg", "topic": "T", "recallHandle": sent.ext["recallHandle"]}
    return await rig.ask(370, fields | changed)


async def comes_again(rig: Rig, clock: Clock, key: str) -> None:
    """A message of a key whose recall is over is delivered: nothing is left of the recall."""
    count, due_ms = end_of(rig, "T"), wall_ms() + clock.ahead_ms + 20_000
    sent = await rig.send("T", key.encode(), TIMER_DELIVER_MS=str(due_ms), UNIQ_KEY=key)
    assert "recallHandle" in sent.ext, "it waits"
    clock.ahead_ms += 30_000
    await until(lambda: end_of(rig, "T") > count)
    assert (await messages(rig, "T"))[-1].body == key.encode()


async def test_a_recalled_message_never_comes_also_after_a_restart(tmp_path, clock):
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        first = await rig.send("T", b"recalled", TIMER_DELAY_SEC="60", UNIQ_KEY="K1")
        second = await rig.send("T", b"recalled too", TIMER_DELAY_SEC="60", UNIQ_KEY="K2")
        await rig.send("T", b"kept", TIMER_DELAY_SEC="60", UNIQ_KEY="K3")
        answer = await recall(rig, first)
        assert (answer.code, answer.ext["msgId"]) == (0, "K1")
        assert answer.ext["MSG_REGION"] == "DefaultRegion", "stock clients trace no recall else"
        assert (await recall(rig, second)).code == 0
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        clock.ahead_ms = 70_000
        await until(lambda: len(rig.service.features.timers) == 0 and end_of(rig, "T") == 1)
        assert [one.body for one in await messages(rig, "T")] == [b"kept"]
        for key in ("K1", "K2"):
            await comes_again(rig, clock, key)


async def test_a_recall_that_is_over_takes_back_nothing_after_a_restart(tmp_path, clock):
    """A new master reads it again beside what waits still."""

    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        await rig.send("T", b"waits", TIMER_DELAY_SEC="900", UNIQ_KEY="K0")
        first = await rig.send("T", b"recalled", TIMER_DELAY_SEC="60", UNIQ_KEY="K1")
        assert (await recall(rig, first)).code == 0
        clock.ahead_ms = 70_000
        await until(lambda: len(rig.service.features.timers) == 1)
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        await until(lambda: len(rig.service.features.timers) == 1)
        await rig.send("T", b"again", TIMER_DELIVER_MS=str(wall_ms() + 80_000), UNIQ_KEY="K1")
        await until(lambda: len(rig.service.features.timers) == 2)
        clock.ahead_ms = 100_000
        await until(lambda: len(rig.service.features.timers) == 1)
        await rig.send("T", b"last")
        assert [one.body for one in await messages(rig, "T")] == [b"again", b"last"]


async def test_a_recall_takes_back_every_copy_of_a_send_that_was_tried_again(tmp_path, clock):
    """A failover may leave a message in the queue twice: the answer named the second one only, and
    the first one used the recall up."""
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        copies = [
            await rig.send("T", b"copy", TIMER_DELAY_SEC=wait, UNIQ_KEY="K")
            for wait in ("50", "60")
        ]
        assert (await recall(rig, copies[1])).code == 0
        clock.ahead_ms = 70_000
        await until(lambda: len(rig.service.features.timers) == 0)
        await rig.send("T", b"last")
        assert [one.body for one in await messages(rig, "T")] == [b"last"]
        await comes_again(rig, clock, "K")


@pytest.mark.parametrize(
    ("changed", "code", "named"),
    [
        ({"recallHandle": "no base64!"}, 604, "recall handle"),
        ({"recallHandle": "djE="}, 604, "v1"),
        ({"topic": "U"}, 17, "U"),
        ({"topic": "V"}, 604, "topic T"),
        ({"recallHandle": RecallHandle("T", "b", 1, "K").encode()}, 604, "broker b"),
        ({"recallHandle": RecallHandle("T", "broker-a", 1, "K").encode()}, 604, "due already"),
        ({"recallHandle": RecallHandle("T", "broker-a", 9 << 50, "K").encode()}, 604, "beyond"),
        ({"recallHandle": RecallHandle("T", "broker-a", 10**4000, "K").encode()}, 604, "v1"),
        ({"recallHandle": RecallHandle("T", "broker-a", 10**14, "").encode()}, 604, "empty"),
        # A property of the recall's own: it was stored as an ordinary message of the topic.
        ({"recallHandle": FORGED}, 604, "separator"),
        ({"recallHandle": ""}, 29, "recallHandle"),
    ],
)
async def test_a_bad_recall_is_refused_by_name(tmp_path, changed, code, named):
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        await rig.send("V")
        sent = await rig.send("T", TIMER_DELAY_SEC="60")
        end = rig.service.store.max_phy_offset
        refused = await recall(rig, sent, **changed)
        assert refused.code == code and named in (refused.remark or "")
        assert rig.service.store.max_phy_offset == end


async def test_recall_is_off_unless_it_is_switched_on(rig):
    sent = await rig.send("T", TIMER_DELAY_SEC="60")
    refused = await recall(rig, sent)
    assert refused.code == 16 and "recallMessageEnable" in (refused.remark or "")


async def test_r30_a_restart_continues_where_the_log_says(tmp_path, clock):
    """Two are delivered before the crash, of which the files know nothing; the rest after it."""

    async with lone_broker(tmp_path) as rig:
        for second in (30, 10, 20, 90):
            await rig.send("T", b"%d" % second, TIMER_DELAY_SEC=str(second))
        clock.ahead_ms = 25_000
        await until(lambda: end_of(rig, "T") == 2)
    crashed(tmp_path, "delayOffset.json", "timercheck")
    async with lone_broker(tmp_path) as rig:
        await until(lambda: len(rig.service.features.timers) == 2)
        clock.ahead_ms = 100_000
        await until(lambda: end_of(rig, "T") == 4)
        bodies = [one.body for one in await messages(rig, "T")]
        assert bodies == [b"10", b"20", b"30", b"90"]


async def test_a_backlog_is_read_and_delivered_in_slices(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(delivery, "READ_UNITS", 7)
    monkeypatch.setattr(delivery, "SLICE", 5)

    async with lone_broker(tmp_path) as rig:
        for number in range(40):
            await rig.send("T", b"%d" % number, TIMER_DELAY_SEC=str(20 + number % 2))
    async with lone_broker(tmp_path) as rig:
        clock.ahead_ms = 30_000
        await until(lambda: end_of(rig, "T") == 40)


async def test_a_queue_that_was_read_is_not_read_again_at_each_turn(rig, monkeypatch):
    timers = rig.service.features.timers
    await rig.send("T", b"later", TIMER_DELAY_SEC="60")
    await until(lambda: len(timers) == 1)
    slices: list[int] = []
    slice_, timers._slice = timers._slice, lambda now_ms: slices.append(now_ms) or slice_(now_ms)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(slices) < 10


async def test_r45_refused_progress_stops_no_timer(tmp_path, clock):
    """What is due was recalled, so nothing is to be put but how far the timer is, and the disk is
    full. What is due later comes when there is room."""
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        store, timers = rig.service.store, rig.service.features.timers
        recalled = await rig.send("T", b"recalled", TIMER_DELAY_SEC="20", UNIQ_KEY="K1")
        assert (await recall(rig, recalled)).code == 0
        await rig.send("T", b"later", TIMER_DELAY_SEC="40", UNIQ_KEY="K2")
        await until(lambda: len(timers) == 3)
        store.disk_space.set_watermark("it is full")
        clock.ahead_ms = 30_000
        await until(lambda: len(timers) == 1)
        store.disk_space.set_watermark("")
        clock.ahead_ms = 50_000
        await until(lambda: end_of(rig, "T") == 1)


async def test_r30_r45_refused_progress_is_written_when_there_is_disk_space(tmp_path, clock):
    """Also when nothing becomes due any more: what is done would count as waiting for good."""
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        store, timers = rig.service.store, rig.service.features.timers
        recalled = await rig.send("T", b"recalled", TIMER_DELAY_SEC="20", UNIQ_KEY="K1")
        assert (await recall(rig, recalled)).code == 0
        await until(lambda: len(timers) == 2)
        store.disk_space.set_watermark("it is full")
        clock.ahead_ms = 60_000
        await until(lambda: len(timers) == 0)
        assert not knows(timers)
        store.disk_space.set_watermark("")
        await until(lambda: knows(timers))
        assert rig.service.tables.delays.timer.next_offset == 2


async def test_a_new_master_continues_when_messages_expire_while_it_reads_them(tmp_path, clock):
    async with lone_broker(tmp_path, mapped_file_size_consume_queue=2 * UNIT_SIZE) as rig:
        timers = rig.service.features.timers
        for number in range(6):
            await rig.send("T", b"%d" % number, TIMER_DELAY_SEC="20")
        timers.end()
        timers.begin()
        expire_all_but_last(rig, TIMER_TOPIC)
        clock.ahead_ms = 30_000
        await until(lambda: end_of(rig, "T") > 0)
        assert [one.body for one in await messages(rig, "T")] == [b"5"]


async def test_java_finds_its_check_point_and_ours_is_its_answer(tmp_path, clock):
    """60, and config/timercheck: the time, and the first offset that may still wait."""

    async with lone_broker(tmp_path) as rig:
        await rig.send("T", TIMER_DELAY_SEC="10")
        clock.ahead_ms = 20_000
        await until(lambda: end_of(rig, "T") == 1)
        answer = struct.unpack(">7q", (await rig.ask(60)).body)
        assert answer[0] <= wall_ms() and answer[2:4] == (1, 1)
        assert json.loads((await rig.ask(45)).body)["offsetTable"] == {}
    check = (tmp_path / "config" / "timercheck").read_bytes()
    assert len(check) == 4096 and struct.unpack(">7q", check[:56])[2] == 1
    for name in ("delayOffset.json", "delayOffset.json.bak"):
        (tmp_path / "config" / name).write_text('{"dataVersion":{},"offsetTable":{1:0}}')
    async with lone_broker(tmp_path) as rig:
        assert rig.service.tables.delays.timer.next_offset == 1


def knows(timers: delivery.TimerService) -> bool:
    """Whether they know up to when all is delivered."""
    return timers.delivered_until_ms() > wall_ms() - delivery.DAY_MS // 2


async def test_60_says_up_to_when_all_is_delivered(rig, clock):
    """A Java slave that takes over begins there; from 0 on it would walk for half an hour. Never
    beyond a message that waits, and never so near to now that one could have been missed."""

    async def read_ms() -> int:
        return int(struct.unpack(">7q", (await rig.ask(60)).body)[0])

    timers = rig.service.features.timers
    await until(lambda: knows(timers))
    assert wall_ms() - 60_000 < await read_ms() <= wall_ms() - delivery.LATE_MS
    before_ms = wall_ms()
    await rig.send("T", TIMER_DELAY_SEC="2")
    await until(lambda: len(timers) == 1)
    timers.end()
    # It does not know: but nothing that waits was stored a day ago.
    assert before_ms - 60_000 < await read_ms() + delivery.DAY_MS <= wall_ms()
    timers.begin()
    clock.ahead_ms = delivery.LATE_MS + 1000
    await until(lambda: knows(timers))
    assert await read_ms() < before_ms + 2000, "it waits still"


async def test_r30_60_says_nothing_of_what_is_delivered_and_not_confirmed(rig, clock):
    """That may be cut: a Java slave that took over would begin behind it."""
    timers = rig.service.features.timers
    await rig.send("T", TIMER_DELAY_SEC="20")
    await until(lambda: len(timers) == 1)
    with unconfirmed(rig):
        clock.ahead_ms = 60_000
        await until(lambda: len(timers) == 0)
        assert not knows(timers)
    await until(lambda: knows(timers))


async def test_how_many_wait_for_which_topic(tmp_path, clock, monkeypatch):
    """GET_TIMER_METRICS (61). Kept from the first request on, counted in slices, and from zero by a
    new master."""
    monkeypatch.setattr(delivery, "COUNTED_UNITS", 2)

    async def counts(rig: Rig) -> dict[str, int]:
        body = json.loads((await rig.ask(61)).body)
        return {topic: each["count"] for topic, each in body["timingCount"].items()}

    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        assert await counts(rig) == {}
        for at in (10, 60, 60, 60):
            await rig.send("T", TIMER_DELAY_SEC=str(at), UNIQ_KEY=f"K{at}")
        recalled = await rig.send("T", TIMER_DELAY_SEC="30", UNIQ_KEY="RECALLED")
        await rig.send("U", TIMER_DELAY_SEC="60")
        timers = rig.service.features.timers
        await until(lambda: len(timers) == 6)
        assert await counts(rig) == {"T": 5, "U": 1}
        assert (await recall(rig, recalled)).code == 0
        await until(lambda: len(timers) == 7)
        version = json.loads((await rig.ask(61)).body)["dataVersion"]
        assert await counts(rig) == {"T": 4, "U": 1}
        clock.ahead_ms = 31_000
        await until(lambda: len(timers) == 4)
        assert await counts(rig) == {"T": 3, "U": 1}
        assert json.loads((await rig.ask(61)).body)["dataVersion"] != version
        timers.end()
        assert await counts(rig) == {}
        timers.begin()
        await until(lambda: len(timers) == 4)
        assert await counts(rig) == {"T": 3, "U": 1}
        clock.ahead_ms = 61_000
        await until(lambda: len(timers) == 0)
        assert await counts(rig) == {}


async def test_r30_a_new_master_delivers_nothing_before_it_has_read_the_recalls(
    tmp_path, clock, monkeypatch
):
    """What was recalled is due by the time of the next mastership, and is read first."""

    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        first = await rig.send("T", b"recalled", TIMER_DELAY_SEC="20", UNIQ_KEY="K1")
        for _ in range(5):
            await rig.send("T", b"kept", TIMER_DELAY_SEC="90")
        assert (await recall(rig, first)).code == 0
        await rig.send("T", b"soon", TIMER_DELAY_SEC="5")
        clock.ahead_ms = 6_000
        await until(lambda: end_of(rig, "T") == 1)
    clock.ahead_ms = 30_000
    monkeypatch.setattr(delivery, "READ_UNITS", 2)
    async with lone_broker(tmp_path, broker=RECALLS) as rig:
        await until(lambda: len(rig.service.features.timers) == 5)
        assert [one.body for one in await messages(rig, "T")] == [b"soon"]


async def test_r30_r45_a_refused_timer_message_comes_when_there_is_disk_space(
    rig, clock, monkeypatch
):
    monkeypatch.setattr(delivery, "REFUSED_MS", 1)
    assert (await rig.send("T", b"timed", TIMER_DELAY_SEC="60")).code == 0
    await until(lambda: len(rig.service.features.timers) == 1)
    with monkeypatch.context() as full:
        refused = refuse(rig, full, "T")
        clock.ahead_ms = 60_100
        await until(lambda: len(refused) > 1)
        assert len(rig.service.features.timers) == 1
    await until(lambda: end_of(rig, "T") == 1)
    (came,) = await messages(rig, "T")
    assert came.body == b"timed"
