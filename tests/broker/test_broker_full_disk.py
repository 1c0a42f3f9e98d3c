"""R45 as clients and operators see it: code 14 with the reason, the status, and the way back."""

import asyncio
import errno
import json
import os
from unittest.mock import AsyncMock

from batonmq.broker.replication.replication import FULL_MS, HAND_OVER_AGAIN_MS, WithoutRoom
from batonmq.protocol.bodies import PROBLEMS_KEY, KVTable
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.runtime import disk
from tests.broker.lone_broker import run_with_broker, until


def test_r45_sends_are_refused_with_the_reason_and_taken_again_by_themselves(tmp_path, monkeypatch):
    """1 a send finds no room: it waits. 2 the next one is refused, status tells why. 3 there is
    room: the first is answered with 0, though no other write comes."""

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def problems(rig):
        reply = await rig.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        return json.loads(KVTable.decode(reply.body).table[PROBLEMS_KEY])

    async def play(rig):
        assert (await rig.send(body=b"before")).code == ResponseCode.SUCCESS
        assert await problems(rig) == []
        monkeypatch.setattr(disk, "pwrite", full)
        first = asyncio.ensure_future(rig.send(body=b"waits"))
        await until(lambda: not rig.service.store.appender.is_writable)
        refused = await rig.send(body=b"refused")
        assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
        assert refused.remark.startswith("the disk is full: ")
        told = await problems(rig)
        assert [problem.partition(":")[0] for problem in told] == [
            "refuses writes",
            "its disk is full",
        ]
        assert "No space left" in told[1]
        assert not first.done()
        monkeypatch.setattr(disk, "pwrite", os.pwrite)
        assert (await first).code == ResponseCode.SUCCESS
        await until(lambda: rig.service.store.appender.is_writable)
        assert await problems(rig) == []
        assert (await rig.send(body=b"after")).code == ResponseCode.SUCCESS
        body = (await rig.pull()).body
        assert b"refused" not in body
        assert all(text in body for text in (b"before", b"waits", b"after"))

    run_with_broker(tmp_path, play, flush_interval_consume_queue=20, slave_timeout=60_000)


def test_r40_a_broker_whose_disk_failed_leaves_no_clean_stop(tmp_path, monkeypatch):
    async def play(rig):
        assert (await rig.send()).code == ResponseCode.SUCCESS
        service = rig.service
        monkeypatch.setattr(service, "_on_fatal", lambda error: None)
        await asyncio.to_thread(service.store.flush)
        service.store.health.log_failed(OSError(errno.EIO, "Input/output error"))
        service.fatal(OSError(errno.EIO, "Input/output error"))

    run_with_broker(tmp_path, play)
    assert (tmp_path / "abort").exists() and (tmp_path / "suspect").exists()


def test_r45_a_master_without_room_hands_over_and_not_again_and_again():
    without_room = WithoutRoom()
    assert not without_room.due("full", 1_000)
    assert not without_room.due("", 1_000 + FULL_MS)  # there was room meanwhile
    assert not without_room.due("full", 10_000)
    assert not without_room.due("full", 10_000 + FULL_MS - 1)
    assert without_room.due("full", 10_000 + FULL_MS)
    assert not without_room.due("", 13_000)  # another one led
    assert not without_room.due("full", 14_000)
    assert not without_room.due("full", 20_000)
    assert without_room.due("full", 10_000 + FULL_MS + HAND_OVER_AGAIN_MS)
    without_room.failed(50_000)
    assert not without_room.due("full", 50_000 + FULL_MS - 1)
    assert without_room.due("full", 50_000 + FULL_MS)


def test_r45_the_master_is_given_up_by_a_planned_switch(tmp_path, monkeypatch):
    """It refuses writes for want of room: who has it is asked, once it has lasted."""

    async def play(rig):
        service, now_ms = rig.service, 1_000_000
        manager = service.replication.manager = AsyncMock()
        manager.lease_valid = lambda now_ms: True
        service.replication.tick(now_ms)
        service.replication.tick(now_ms + FULL_MS)
        service.store.room.set_watermark("more than 90 % of it is used")
        service.replication.tick(now_ms + FULL_MS)
        service.replication.tick(now_ms + 2 * FULL_MS)
        service.replication.tick(now_ms + 2 * FULL_MS + 1)
        await until(lambda: manager.hand_over.await_count == 1)
        await until(lambda: not service.replication._tasks)
        now_ms += 2 * FULL_MS
        service.replication.tick(now_ms + HAND_OVER_AGAIN_MS - 1)
        assert not service.replication._tasks
        manager.hand_over.return_value = False  # nobody is there
        monkeypatch.setattr(service.path, "clock_ms", lambda: now_ms + HAND_OVER_AGAIN_MS)
        service.replication.tick(now_ms + HAND_OVER_AGAIN_MS)
        await until(lambda: not service.replication._tasks)
        service.replication.tick(now_ms + HAND_OVER_AGAIN_MS + FULL_MS)
        await until(lambda: manager.hand_over.await_count == 3)
        service.replication.manager = None
        service.store.room.set_watermark("")

    run_with_broker(tmp_path, play)
