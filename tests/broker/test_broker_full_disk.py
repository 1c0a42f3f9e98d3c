"""R45 as clients and operators see it: writes are refused with the reason, the status, and the
recovery."""

import asyncio
import errno
import json

from batonmq.broker.replication.controlled import FULL_MS, HAND_OVER_AGAIN_MS, UnfitHandover
from batonmq.protocol.bodies import PROBLEMS_KEY, KVTable
from batonmq.protocol.codes import RequestCode, ResponseCode
from tests.broker.lone_broker import lone_broker, until
from tests.shared.failing_disk import failing


async def test_r45_sends_are_refused_with_the_reason_and_taken_again_by_themselves(tmp_path):
    """1 a send finds no disk space: it waits. 2 the next one is refused, status says why. 3 there
    is space: the first is answered with 0, though no other write comes."""

    async def problems(rig):
        reply = await rig.ask(RequestCode.GET_BROKER_RUNTIME_INFO)
        return json.loads(KVTable.decode(reply.body).table[PROBLEMS_KEY])

    async with lone_broker(tmp_path, flush_interval_consume_queue=20, slave_timeout=60_000) as rig:
        assert (await rig.send(body=b"before")).code == ResponseCode.SUCCESS
        assert await problems(rig) == []
        # Only the log: else the queues of `before`, written later, may find the full disk first.
        with failing("pwrite /commitlog ENOSPC"):
            first = asyncio.ensure_future(rig.send(body=b"waits"))
            await until(lambda: not rig.service.store.appender.is_writable)
            refused = await rig.send(body=b"refused")
            assert refused.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert refused.remark.startswith("the disk is full: ")
            reported = await problems(rig)
            assert [problem.partition(":")[0] for problem in reported] == [
                "refuses writes",
                "its disk is full",
            ]
            assert "No space left" in reported[1]
            assert not first.done()
        assert (await first).code == ResponseCode.SUCCESS
        await until(lambda: rig.service.store.appender.is_writable)
        assert await problems(rig) == []
        assert (await rig.send(body=b"after")).code == ResponseCode.SUCCESS
        body = (await rig.pull()).body
        assert b"refused" not in body
        assert all(text in body for text in (b"before", b"waits", b"after"))


async def test_r40_a_broker_whose_disk_failed_leaves_no_clean_stop(tmp_path, monkeypatch):
    async with lone_broker(tmp_path) as rig:
        assert (await rig.send()).code == ResponseCode.SUCCESS
        service = rig.service
        monkeypatch.setattr(service, "_on_fatal", lambda error: None)
        await asyncio.to_thread(service.store.flush)
        service.store.health.log_failed(OSError(errno.EIO, "Input/output error"))
        service.fatal(OSError(errno.EIO, "Input/output error"))
    assert (tmp_path / "abort").exists() and (tmp_path / "suspect").exists()


def test_r45_a_master_whose_disk_is_full_hands_over_at_most_once_in_30_s():
    handover = UnfitHandover()
    assert not handover.due("full", 1_000)
    assert not handover.due("", 1_000 + FULL_MS)  # there was space meanwhile
    assert not handover.due("full", 10_000)
    assert not handover.due("full", 10_000 + FULL_MS - 1)
    assert handover.due("full", 10_000 + FULL_MS)
    assert not handover.due("", 13_000)  # another one led
    assert not handover.due("full", 14_000)
    assert not handover.due("full", 20_000)
    assert handover.due("full", 10_000 + FULL_MS + HAND_OVER_AGAIN_MS)
    handover.failed(50_000)
    assert not handover.due("full", 50_000 + FULL_MS - 1)
    assert handover.due("full", 50_000 + FULL_MS)
