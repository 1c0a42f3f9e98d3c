"""Delay levels at a broker: where a delayed message waits, when it comes, and how often."""

import json
from typing import Any

import pytest
from lone_broker import crashed, end_of, lone_broker, messages, refuse, send_header, spoil, until

from batonmq.broker.schedule import delivery
from batonmq.broker.schedule.delivery_progress import DeliveryProgress, ProgressRecord
from batonmq.broker.tables.delay_offset import DelayOffsetManager, TimerProgress
from batonmq.broker.write.put_hooks import PutHooks
from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.properties import encode_properties
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.topic_name import PROGRESS_TOPIC, SCHEDULE_TOPIC
from batonmq.runtime.clock import wall_ms
from batonmq.store.config import DelayLevels, StoreConfig


async def test_r30_a_delayed_message_waits_in_the_queue_of_its_level_and_comes_once(rig, clock):
    sent = await rig.send("T", b"later", queue=2, DELAY="3", TAGS="A", KEYS="k1")
    assert (sent.code, sent.ext["queueId"], sent.ext["queueOffset"]) == (0, "2", "0")
    (waiting,) = await messages(rig, SCHEDULE_TOPIC, 2)
    assert waiting.properties["REAL_TOPIC"] == "T" and waiting.properties["REAL_QID"] == "2"
    unit = rig.service.store.queries.units(SCHEDULE_TOPIC, 2, 0, 1)[0]
    assert unit[2] == waiting.store_timestamp + 10_000, "the unit says when it is due"
    clock.ahead_ms = 9_000
    await rig.send("Other")
    assert end_of(rig, "T", 2) == 0, "not early"
    clock.ahead_ms = 10_001
    await until(lambda: end_of(rig, "T", 2) == 1)
    (came,) = await messages(rig, "T", 2)
    assert (came.body, came.tags, came.keys) == (b"later", "A", "k1")
    assert came.born_timestamp == waiting.born_timestamp
    assert came.born_host == waiting.born_host
    # As in Java: what it waited for is still to be seen.
    assert {"DELAY": "3", "REAL_TOPIC": "T"}.items() <= came.properties.items()
    table = json.loads((await rig.ask(45)).body)["offsetTable"]
    assert table == {"3": 1}
    clock.ahead_ms = 100_000
    await rig.send("Other")
    assert end_of(rig, "T", 2) == 1, "once"


async def test_r30_a_restart_continues_where_the_log_says(tmp_path, clock):
    """Two are delivered before the stop, of which the file knows nothing; one after it."""

    async with lone_broker(tmp_path) as rig:
        for _ in range(2):
            await rig.send(DELAY="1")
        await rig.send(DELAY="2")
        clock.ahead_ms = 1_100
        await until(lambda: end_of(rig, "T") == 2)
    crashed(tmp_path, "delayOffset.json")
    async with lone_broker(tmp_path) as rig:
        clock.ahead_ms = 5_100
        await until(lambda: end_of(rig, "T") == 3)


async def test_a_backlog_comes_in_slices_and_whole(rig, clock):
    count = 3 * delivery.SLICE + 5
    clock.stopped_at_ms = wall_ms()
    for number in range(count):
        await rig.send(body=b"%d" % number, DELAY="1")
    taken = list[int]()
    core: Any = rig.service.features.schedule._queues
    delivered = core.delivered
    core.delivered = lambda queue_id, n: (taken.append(n), delivered(queue_id, n))
    clock.stopped_at_ms = wall_ms() + 1_500
    await until(lambda: end_of(rig, "T") == count)
    assert max(taken) <= delivery.SLICE and sum(taken) == count
    bodies = [one.body for one in await messages(rig, "T")]
    assert bodies == [b"%d" % number for number in range(len(bodies))]


async def test_r30_a_master_that_takes_no_writes_delivers_nothing(rig, clock):
    """Neither without a lease nor within a planned switch; afterwards it does."""
    path = rig.service.path
    await rig.send(DELAY="1")
    path.hold.begin()
    end = rig.service.store.max_phy_offset
    clock.ahead_ms = 2_000
    for _ in range(50):
        await rig.ask(45)
    assert rig.service.store.max_phy_offset == end
    path.hold.release()
    await until(lambda: end_of(rig, "T") == 1)
    rig.service.role_left()
    await rig.send(DELAY="1")
    clock.ahead_ms = 9_000
    for _ in range(50):
        await rig.ask(45)
    assert end_of(rig, "T") == 1
    rig.service.master_opened()
    await until(lambda: end_of(rig, "T") == 2)


async def test_r39_messages_of_a_deleted_topic_do_not_come_back(rig, clock):
    await rig.send("T", DELAY="1")
    await rig.send("U", DELAY="1")
    assert (await rig.ask(215, {"topic": "T"})).code == 0
    await until(lambda: "T" not in rig.service.store.deleting_topics)
    await rig.send("T", b"in the topic made again")
    clock.ahead_ms = 2_000
    await until(lambda: end_of(rig, "U") == 1)
    assert rig.service.store.queries.next_offset_in_queue("T", 0) == 1
    assert rig.service.tables.delays.table == {1: 2}


async def test_r30_r45_refused_progress_of_a_level_is_written_when_there_is_disk_space(rig, clock):
    """What waited was of a topic that is deleted, so nothing else is put."""
    await rig.send("T", DELAY="1")
    assert (await rig.ask(215, {"topic": "T"})).code == 0
    schedule, room = rig.service.features.schedule, rig.service.store.disk_space
    room.set_watermark("it is full")
    clock.ahead_ms = 2_000
    await until(lambda: schedule._queues.offset_of(0) == 1)
    assert rig.service.tables.delays.table == {}
    room.set_watermark("")
    await until(lambda: rig.service.tables.delays.table == {1: 1})


@pytest.mark.parametrize("level", ["x", "1.5", "9" * 12, "\u0663"])
async def test_an_invalid_delay_is_refused_and_not_stored(rig, level):
    await rig.send()
    end = rig.service.store.max_phy_offset
    refused = await rig.send(DELAY=level)
    assert refused.code == 13 and "delay level" in (refused.remark or "")
    items = [BatchItem(b"x", encode_properties({"DELAY": "1"}).encode())]
    header = send_header("T", 0, {}) | {"m": "true"}
    batch = await rig.ask(320, header, encode_batch(items))
    assert batch.code == 13 and "batch" in (batch.remark or "")
    assert rig.service.store.max_phy_offset == end


def message(topic: str, delay: str) -> NewMessage:
    return NewMessage(topic, 3, b"", f"DELAY\x01{delay}\x02".encode(), 0, None, None, 0, bytes(8))


@pytest.mark.parametrize(
    ("topic", "delay", "queue"),
    [
        ("T", "2", 1),
        ("T", "99", 17),
        ("%RETRY%g", "3", 2),
        ("T", "0", None),
        ("T", "-1", None),
        ("%DLQ%g", "3", None),
    ],
)
def test_which_messages_wait_and_where(topic, delay, queue):
    """A level above the last counts as the last; dead letters do not wait."""
    one = message(topic, delay)
    PutHooks(StoreConfig()).apply(one, 0)
    if queue is None:
        assert (one.topic, one.queue_id) == (topic, 3)
    else:
        assert (one.topic, one.queue_id) == (SCHEDULE_TOPIC, queue)
        assert f"DELAY\x01{queue + 1}\x02" in one.properties.decode()


@pytest.mark.parametrize("text", ["", "1x", "s", "1s,5s", "10"])
def test_an_invalid_list_of_levels_stops_the_start(text):
    with pytest.raises(ValueError, match="messageDelayLevel"):
        StoreConfig(message_delay_level=text)
    assert DelayLevels("1s 2m").delay_ms(2) == 120_000


async def test_r44_progress_above_the_end_of_a_queue_goes_back_to_it(rig, clock):
    """An unclean election cut delayed messages: others get their offsets, and are delivered."""
    service = rig.service
    await rig.send(DELAY="1")
    service.role_left()
    service.tables.delays.set_all({1: 40, 2: 7})
    service.master_opened()
    clock.ahead_ms = 2_000
    await rig.send(DELAY="1")
    clock.ahead_ms = 9_000
    await until(lambda: end_of(rig, "T") == 1)
    assert service.tables.delays.table[1] == 2


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"v":9}', b'{"v":0}', b'{"delays":{"x":1}}', b"\xff"]
)
def test_a_progress_record_that_cannot_be_read_is_named(body):
    with pytest.raises(RemoteProtocolError, match="progress record"):
        ProgressRecord.decode(body)


async def test_clients_do_not_write_what_the_broker_writes(rig):
    for topic in (PROGRESS_TOPIC, SCHEDULE_TOPIC):
        assert (await rig.send(topic)).code == 16


@pytest.mark.parametrize("wait", [{"DELAY": "1"}, {"TIMER_DELAY_SEC": "1"}])
async def test_r39_what_is_due_waits_while_its_topic_may_be_deleted(rig, clock, monkeypatch, wait):
    """The deletion may never be confirmed: then the message comes, and it comes once."""
    monkeypatch.setattr(delivery, "REFUSED_MS", 1)
    await rig.send("T", b"later", **wait)
    deliverer = rig.service.features.schedule._deliverer
    answers: list[bool] = []

    def deliver(message: NewMessage, stored_at: int) -> bool:
        answers.append(real(message, stored_at))
        return answers[-1]

    real, deliverer.deliver = deliverer.deliver, deliver
    deleting = rig.service.store.deleting_topics
    deleting["T"] = 1
    clock.ahead_ms = 5_000
    await until(lambda: len(answers) == 2)
    assert answers == [False, False] and end_of(rig, "T") == 0
    del deleting["T"]
    await until(lambda: end_of(rig, "T") == 1)


async def test_an_inner_batch_is_refused_and_not_stored(rig):
    """Several messages in one record are for topics of another kind (BatchCQ)."""
    await rig.send("T")
    flagged = {**send_header("T", 0, {}), "f": str(0x80)}
    item = BatchItem(b"one", encode_properties({"INNER_NUM": "2"}).encode())
    for reply in (
        await rig.send("T", INNER_NUM="2"),
        await rig.ask(310, flagged, b"x"),
        await rig.ask(320, {**send_header("T", 0, {}), "m": "true"}, encode_batch([item])),
    ):
        assert (reply.code, "BatchCQ" in (reply.remark or "")) == (13, True), reply
    assert end_of(rig, "T") == 1
    assert (await rig.send("T", NOT_INNER_NUM="2")).code == 0


async def test_r30_what_was_delivered_before_one_was_refused_comes_once(rig, clock, monkeypatch):
    for number in range(3):
        await rig.send("T", b"%d" % number, DELAY="1")
    refuse(rig, monkeypatch, "T", once=b"1")
    clock.ahead_ms = 1_100
    await until(lambda: end_of(rig, "T") >= 3)
    assert [message.body for message in await messages(rig, "T")] == [b"0", b"1", b"2"]


async def test_r17_g8_a_waiting_message_that_went_bad_makes_the_log_suspect(tmp_path, clock):
    """So a replica that has it whole becomes master: no queue waits for it without end."""

    async with lone_broker(tmp_path) as rig:
        await rig.send("T", b"rotten", DELAY="1")
        await rig.send("T", b"last")
        await rig.pull("T")
    log = spoil(tmp_path, b"rotten")
    async with lone_broker(tmp_path) as rig:
        trust = rig.service.store.trust
        clock.ahead_ms = 1_100
        await until(lambda: bool(trust.reason))
        assert str(log) in trust.reason and end_of(rig, "T") == 1


def test_r30_what_a_mastership_took_over_unconfirmed_ends_with_it(tmp_path):
    """It may be cut, and the messages that it speaks of with it."""
    table = DelayOffsetManager(tmp_path / "delayOffset.json")
    progress = DeliveryProgress(table)
    timer, later = TimerProgress(done_ms=7, done_offset=3), TimerProgress(done_ms=8)
    progress.apply_record(ProgressRecord(delays={1: 4}).encode(), 800)
    progress.take_over_record(ProgressRecord(delays={1: 5}, timer=timer).encode(), 900)
    assert progress.timer == timer
    progress.delivered({2: 3}, later)
    assert progress.delays == {1: 5, 2: 3} and progress.timer == later
    assert table.table == {1: 4}
    progress.role_left()
    assert progress.delays == {1: 4} and progress.timer == TimerProgress()
    assert progress.owed is None


def test_r30_an_older_record_that_is_confirmed_takes_nothing_back(tmp_path):
    """Two are on their way to the slaves when the first is confirmed; the third found no space."""
    progress = DeliveryProgress(DelayOffsetManager(tmp_path / "delayOffset.json"))
    records = []
    for number in (1, 2, 3):
        progress.delivered({1: number}, TimerProgress(done_ms=number))
        record = progress.owed
        assert record is not None
        records.append(record)
        if number < 3:
            progress.noted(record, 100 * number)
        if number == 2:
            progress.apply_record(records[0].encode(), 100)
            assert progress.delays == {1: 2} and progress.timer == TimerProgress(done_ms=2)
    for number, record in enumerate(records, 1):
        progress.apply_record(record.encode(), 100 * number)
        assert progress.delays == {1: 3} and progress.timer == TimerProgress(done_ms=3)


async def test_r30_r45_refused_progress_ends_with_its_mastership(rig, clock):
    """What was delivered with it may be cut: the next one would leave messages out."""
    features = rig.service.features
    await rig.send("T", DELAY="1")
    features.progress.delivered({5: 9})
    features.end()
    features.begin()
    clock.ahead_ms = 1_100
    await until(lambda: end_of(rig, "T") == 1)
    assert json.loads((await rig.ask(45)).body)["offsetTable"] == {"1": 1}
