"""R45: a broker that is started on a full disk waits for room, and can be stopped meanwhile."""

import asyncio
from unittest.mock import Mock

import pytest

from batonmq.broker.broker_endpoint import STARTING
from batonmq.broker.metrics import BrokerMetrics
from batonmq.broker.service import BrokerService
from batonmq.protocol.codes import ResponseCode
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime import start_retry
from batonmq.runtime.metrics import MetricsPage
from batonmq.runtime.server_main import started
from tests.broker.lone_broker import Rig, run_with_broker, sections_of, until
from tests.shared.failing_disk import failing, open_below, walk_errors


def write_one(folder):
    """A store with a message, which was not closed cleanly."""

    async def play(rig):
        assert (await rig.send()).code == ResponseCode.SUCCESS

    run_with_broker(folder, play)
    (folder / "abort").touch()


@pytest.mark.parametrize("prepare", [lambda folder: None, write_one], ids=["first", "again"])
def test_r45_a_start_continues_whichever_file_the_full_disk_refuses(tmp_path, monkeypatch, prepare):
    """The n-th call that needs room fails, for each n; nothing stays open of what was given up."""
    monkeypatch.setattr(start_retry, "SPACE_POLL_S", 0)

    def start(rule, number):
        folder = tmp_path / str(number)
        prepare(folder)

        async def play(rig):
            assert (await rig.send()).code == ResponseCode.SUCCESS

        with failing(rule) as struck:
            run_with_broker(folder, play)
            assert not open_below(folder)
            return bool(struck)

    assert walk_errors("room * ENOSPC", start) > 5


def test_r45_it_says_what_is_missing_and_can_be_stopped(tmp_path, caplog):
    async def play():
        service = BrokerService(sections_of(tmp_path / "store"), lambda error: None)
        rig = Rig(service, RemotingClient())
        stop = asyncio.Event()
        with failing("room store ENOSPC"):
            start = asyncio.ensure_future(started(service.start(), stop.wait()))
            await until(lambda: bool(service.endpoint.start_retry.missing))
            asked = asyncio.ensure_future(rig.ask(28))
            await until(lambda: len(service.endpoint) == 1)
            service.endpoint.tick(1 << 62)
            reply = await asked
            metrics, page = BrokerMetrics(service), MetricsPage({}, 10)
            assert metrics.why_not_ready() == [reply.remark]
            await metrics.collect(page)
            assert not page.families
            stop.set()
            assert not await start
        await rig.client.close()
        return reply

    reply = asyncio.run(play())
    missing = f"{tmp_path / 'store'}: No space left on device"
    assert STARTING in reply.remark and missing in reply.remark, reply.remark
    (reported,) = [
        r.getMessage() for r in caplog.records if "start_waits_for_disk_space" in r.message
    ]
    assert missing in reported, "once, with the folder"


def test_another_error_of_the_disk_ends_the_start(tmp_path):
    with failing("room * EIO once"), pytest.raises(OSError, match="Input/output error"):
        run_with_broker(tmp_path / "store", lambda rig: asyncio.sleep(0))


def test_a_broker_that_cannot_register_on_a_full_disk_refuses_late_requests(tmp_path, monkeypatch):
    """The endpoint is open by then, and has ended its own timer."""
    config = sections_of(tmp_path / "store")

    async def play():
        service = BrokerService(config, lambda error: None)
        monkeypatch.setattr(service.replication, "start", asyncio.Event().wait)
        ticks = Mock(return_value=False)
        monkeypatch.setattr(service.relay, "tick", ticks)
        start = asyncio.ensure_future(service.start())
        await until(lambda: service.endpoint.processors.handlers != {})
        await until(lambda: not service.endpoint._tasks._running)
        before = ticks.call_count
        await until(lambda: ticks.call_count > before + 1)
        start.cancel()
        await asyncio.wait((start,))

    asyncio.run(asyncio.wait_for(play(), 20))
