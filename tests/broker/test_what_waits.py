"""What waits is not lost, hidden, early, or of a topic that is gone (R55, R56)."""

import asyncio
import errno
import os
from collections.abc import Callable

import pytest
from lone_broker import (
    Rig,
    end_header,
    end_of,
    lone_broker,
    make_group,
    messages,
    run_with_broker,
    topic_header,
    until,
)
from test_transactions import COMMIT, NO_CHECKS, half

from batonmq.broker.schedule.timer_queue import TimerQueue
from batonmq.broker.tables.delay_offset import TimerProgress
from batonmq.broker.tables.offset_clamp import queue_end
from batonmq.broker.write import log_features
from batonmq.protocol.bodies import HeartbeatData, ProducerData
from batonmq.protocol.codes import ResponseCode
from batonmq.store.commit_log import CommitLog
from batonmq.store.message_store import MessageStore

HOUR_MS = 3_600_000
NO_CHECKS_A_DAY = {"transaction_time_out": 24 * HOUR_MS}  # the clock is hours ahead


# What was dropped from memory (R55).


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def leave_and_lead_again(rig: Rig, write: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the role actions do it while the disk is full; then there is room."""
    service = rig.service
    store = service.store
    store.end_turn()
    service.path.acks.fail_all(ResponseCode.SERVICE_NOT_AVAILABLE, "role changed")
    store.stop_writes()
    service.role_left()
    monkeypatch.setattr(CommitLog, "_write", write)
    store.health.space_again()
    store.prepare_master()
    service.master_opened()


async def test_r55_a_commit_that_never_reached_the_log_is_forgotten(tmp_path, monkeypatch):
    async with lone_broker(tmp_path, broker=NO_CHECKS, slave_timeout=60_000) as rig:
        sent = await half(rig)
        write = CommitLog._write
        monkeypatch.setattr(CommitLog, "_write", full)
        asked = asyncio.ensure_future(rig.ask(37, end_header(sent, COMMIT)))
        await until(lambda: rig.service.store.appender.has_buffered)
        await leave_and_lead_again(rig, write, monkeypatch)
        assert (await asked).code != 0 and end_of(rig, "T", 1) == 0
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
        await until(lambda: end_of(rig, "T", 1) == 1)


async def test_r55_a_topic_whose_record_never_reached_the_log_is_forgotten(tmp_path, monkeypatch):
    async with lone_broker(tmp_path, slave_timeout=60_000) as rig:
        await rig.ask(17, topic_header(queues=3))
        topics = rig.service.topics
        before = topics.get("T")
        write = CommitLog._write
        monkeypatch.setattr(CommitLog, "_write", full)
        asked = [
            asyncio.ensure_future(rig.send("NEW", b"x")),
            asyncio.ensure_future(rig.ask(17, topic_header(queues=5))),
            asyncio.ensure_future(rig.ask(200, {}, b'{"groupName":"newgroup"}')),
        ]
        await until(lambda: rig.service.tables.groups.get("newgroup") is not None)
        await until(lambda: topics.get("NEW") is not None and topics.get("T") != before)
        await leave_and_lead_again(rig, write, monkeypatch)
        await asyncio.gather(*asked)
        assert topics.get("NEW") is None and topics.get("T") == before
        assert rig.service.tables.groups.get("newgroup") is None
        assert (await rig.send("NEW", b"acknowledged")).code == 0
        log = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
        assert b'"topicName":"NEW"' in log, "the other members learn of it (R31)"


async def test_r55_a_mastership_that_begins_again_delivers_nothing_twice(tmp_path, clock):
    async with lone_broker(tmp_path, broker=NO_CHECKS_A_DAY) as rig:
        for number in range(3):
            await rig.send("T", b"%d" % number, DELAY="1", UNIQ_KEY=f"K{number}")
        await half(rig)
        rig.service.store.prepare_master()
        rig.service.master_opened()
        clock.ahead_ms = HOUR_MS
        await until(lambda: end_of(rig, "T") == 3)
        rig.service.store.prepare_master()
        rig.service.master_opened()
        await rig.send("T", b"last", DELAY="1", UNIQ_KEY="K4")
        clock.ahead_ms = 2 * HOUR_MS
        await until(lambda: end_of(rig, "T") >= 4)
        assert [one.body for one in await messages(rig, "T")] == [b"0", b"1", b"2", b"last"]
        assert len(rig.service.features.transactions) == 1


@pytest.mark.parametrize("wait", [{"DELAY": "1"}, {"TIMER_DELAY_SEC": "1"}])
async def test_r30_a_mastership_that_begins_again_knows_what_the_last_one_put(
    rig, clock, monkeypatch, wait
):
    """Two deliveries and their progress are in the log, and no slave has acked them yet."""
    service, store = rig.service, rig.service.store
    for number in range(2):
        await rig.send("T", b"%d" % number, UNIQ_KEY=f"K{number}", **wait)
    with monkeypatch.context() as unconfirmed:
        unconfirmed.setattr(MessageStore, "advance_confirm_offset", lambda store, _: 0)
        clock.ahead_ms = HOUR_MS
        await until(lambda: queue_end(store, "T", 0) == 2 and not store.appender.has_buffered)
        service.master_opened()
        await rig.send("Other")
    await rig.send("T", b"last")
    await until(lambda: end_of(rig, "T") >= 3)
    assert [one.body for one in await messages(rig, "T")] == [b"0", b"1", b"last"]


# Transactions (R56).


async def test_r56_two_transactions_of_one_unique_key_both_end(tmp_path):
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        fields = {"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "K1"}
        halves = [await rig.send(name, name.encode(), **fields) for name in ("ORDERS", "BILLS")]
        halves.append(await rig.send("BILLS", b"other queue", queue=1, **fields))
        for sent in halves:
            assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
        ends = (end_of(rig, "ORDERS"), end_of(rig, "BILLS"), end_of(rig, "BILLS", 1))
        assert ends == (1, 1, 1) and len(rig.service.features.transactions) == 0


async def test_r56_an_overdue_half_is_checked_when_its_producer_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(log_features, "MAX_PAUSE_MS", 1)
    async with lone_broker(tmp_path, broker={"transaction_time_out": 1}) as rig:
        features, asked = rig.service.features, []
        monkeypatch.setattr(features.producers, "ask", lambda *args: asked.append(args))
        with monkeypatch.context() as away:
            away.setattr(features.producers, "channel", lambda group, topic: None)
            await half(rig)
            await until(lambda: bool(features.transactions._table._without_producer))
        body = HeartbeatData(client_id="c", producer_data_set=[ProducerData(group_name="pg")])
        assert (await rig.ask(34, {}, body.encode())).code == 0
        await until(lambda: bool(asked))


# Topics that became smaller, or went.


async def test_r56_what_waits_for_a_queue_that_went_comes_into_one_that_is_read(tmp_path, clock):
    async with lone_broker(tmp_path, broker=NO_CHECKS) as rig:
        await rig.ask(17, topic_header(queues=16))
        await rig.send("T", b"delayed", queue=15, DELAY="3")
        await rig.send("T", b"timed", queue=14, TIMER_DELAY_SEC="10", UNIQ_KEY="K2")
        fields = {"TRAN_MSG": "true", "PGROUP": "pg", "UNIQ_KEY": "K3"}
        sent = await rig.send("T", b"half", queue=13, **fields)
        assert (await rig.ask(17, topic_header(queues=8))).code == 0
        clock.ahead_ms = 60_000
        assert (await rig.ask(37, end_header(sent, COMMIT))).code == 0
        await until(lambda: all(end_of(rig, "T", queue) == 1 for queue in (5, 6, 7)))
        found = [(await messages(rig, "T", queue))[0].body for queue in (5, 6, 7)]
        assert found == [b"half", b"timed", b"delayed"]


@pytest.mark.parametrize("restarts", [False, True])
def test_r56_what_waited_for_a_deleted_topic_comes_into_none_made_again(tmp_path, clock, restarts):
    sent = []

    async def first(rig: Rig) -> None:
        await rig.send("T", b"first")
        await rig.send("T", b"old, level 5", DELAY="5")
        await rig.send("T", b"old, timed", TIMER_DELAY_SEC="60", UNIQ_KEY="K2")
        sent.append(await half(rig, "K3"))
        await rig.ask(215, {"topic": "T"})
        await until(lambda: rig.service.topics.get("T") is None)
        await rig.send("T", b"new")
        await rig.send("T", b"new, delayed", DELAY="6", UNIQ_KEY="K4")

    async def then(rig: Rig) -> None:
        clock.ahead_ms = HOUR_MS
        reply = await rig.ask(37, end_header(sent[0], COMMIT))
        assert reply.code == 17, reply.remark
        await until(lambda: end_of(rig, "T") >= 2)
        found = [one.body for queue in (0, 1) for one in await messages(rig, "T", queue)]
        assert found == [b"new", b"new, delayed"]

    async def both(rig: Rig) -> None:
        await first(rig)
        await then(rig)

    lives: list[Callable[[Rig], object]] = [first, then] if restarts else [both]
    for life in lives:
        run_with_broker(tmp_path, life, broker=NO_CHECKS_A_DAY)


def test_r56_a_restart_does_not_forget_that_a_topic_was_deleted(tmp_path):
    async def before(rig: Rig) -> None:
        for number in range(10):
            await rig.send("T", b"old %d" % number)
        await rig.ask(215, {"topic": "T"})
        await until(lambda: rig.service.topics.get("T") is None)
        for number in range(5):
            await rig.send("T", b"new %d" % number)

    async def after(rig: Rig) -> None:
        pulled = await rig.pull("T", offset=10)
        assert (pulled.code, pulled.ext["nextBeginOffset"]) == (21, "0")
        await make_group(rig, "g2")
        assert (await rig.commit(10, group="g2")).code == 29

    for life in (before, after):
        run_with_broker(tmp_path, life)


# Clocks.


async def test_r56_a_delay_beyond_what_the_log_keeps_is_refused(tmp_path):
    async with lone_broker(tmp_path, file_reserved_time=1) as rig:
        refused = await rig.send("T", b"x", DELAY="18")
        assert refused.code == 13 and "fileReservedTime" in (refused.remark or "")
        assert (await rig.send("T", b"x", DELAY="17")).code == 0
        retry = await rig.send("%RETRY%g", b"x", DELAY="18")
        assert retry.code == 0, "a retry waits less"
        _, waits = await messages(rig, "SCHEDULE_TOPIC_XXXX", 16)
        assert waits.properties["DELAY"] == "17"


async def test_r56_a_delay_comes_not_early_where_the_heirs_clock_is_behind(tmp_path, clock):
    async with lone_broker(tmp_path) as rig:
        assert (await rig.send("T", b"in two hours", DELAY="18")).code == 0
    clock.ahead_ms = -60_000
    async with lone_broker(tmp_path) as rig:
        await until(lambda: rig.service.features.schedule._queues.wake_ms > HOUR_MS)
        assert end_of(rig, "T") == 0


async def test_r56_timers_keep_their_turn_after_a_clock_was_ahead(tmp_path, clock):
    async with lone_broker(tmp_path) as rig:
        await rig.send("T", b"3000 s", TIMER_DELAY_SEC="3000")
        clock.ahead_ms = HOUR_MS
        await until(lambda: end_of(rig, "T") == 1)
        clock.ahead_ms = 0
        await rig.send("T", b"2000 s", TIMER_DELAY_SEC="2000", UNIQ_KEY="A")
        await rig.send("T", b"1 s", TIMER_DELAY_SEC="1", UNIQ_KEY="B")
        clock.ahead_ms = 2_000
        await until(lambda: end_of(rig, "T") == 2)
        assert [one.body for one in await messages(rig, "T")] == [b"3000 s", b"1 s"]
    async with lone_broker(tmp_path) as rig:
        clock.ahead_ms = 2 * HOUR_MS
        await until(lambda: end_of(rig, "T") == 3)
        assert [one.body for one in await messages(rig, "T")][2:] == [b"2000 s"]


def test_r56_a_heir_delivers_what_a_clock_made_early_neither_twice_nor_never():
    first = TimerQueue(TimerProgress(), 0, 0)
    for due_ms in (500, 900):
        first.seen(due_ms)
    while first.next_due(1000) is not None:  # the clock is ahead
        first.done()
    first.clock_shows(100)
    for due_ms in (700, 300):
        assert first.seen(due_ms)
    assert first.next_due(300) == 3 and first.done(), "not behind the one before it"
    successor = TimerQueue(first.progress(), 0, 4)
    successor.clock_shows(250)  # behind again
    seen = [successor.seen(due_ms) for due_ms in (500, 900, 700, 300, 950)]
    assert seen == [False, False, True, False, True]
    for offset in (2, 4):
        assert successor.next_due(950) == offset and successor.done()
    successor.clock_shows(951)
    assert successor.progress().early_to == 0
