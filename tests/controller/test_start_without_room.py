"""R53: a first start of a controller on a full disk waits for disk space, and reports that."""

import asyncio
import contextlib
import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from local_log import alone

from batonmq.client.admin.admin import Admin
from batonmq.controller.config import ControllerConfig
from batonmq.controller.raft.node import RaftLog
from batonmq.controller.requests import OutcomeUnknownError
from batonmq.controller.rules.commands import RegisterBroker
from batonmq.controller.service import ControllerService
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.protocol.errors import NotLeaderError
from batonmq.runtime import start_retry
from batonmq.runtime.server_main import started
from tests.shared.failing_disk import failing, open_below, walk_errors
from tests.shared.ports import free_ports
from tests.shared.waiting import opened, until

ADVICE = "the disk fails: look into the kernel's log, and replace it; then restart this controller"
REGISTER = RegisterBroker(broker_name="b", incarnation="life", register_check_code="code")


def config_in(folder: Path) -> ControllerConfig:
    return alone(
        folder,
        free_ports(3),
        # It is started many times: its elections need not be long.
        raft_election_timeout_min_ms=50,
        raft_election_timeout_max_ms=60,
        raft_heartbeat_ms=10,
    )


def test_r53_a_first_start_goes_on_whatever_finds_no_room(tmp_path, monkeypatch):
    """The n-th call that needs room fails, for each n; nothing stays open of what was given up."""
    monkeypatch.setattr(start_retry, "SPACE_POLL_S", 0)

    def start(rule: str, number: int) -> bool:
        folder = tmp_path / str(number)

        async def play() -> None:
            service = ControllerService(config_in(folder))
            await service.start()
            try:
                async with asyncio.timeout(10):
                    while not service.requests.state.groups:
                        await opened(service.gate)
                        with contextlib.suppress(NotLeaderError, OutcomeUnknownError):
                            assert (await service.requests.submit(REGISTER)).ok
            finally:
                await service.close()

        with failing(rule) as struck:
            asyncio.run(play())
            assert not open_below(folder)
            return bool(struck)

    assert walk_errors("room * ENOSPC", start) > 5


def test_r53_a_waiting_controller_says_what_is_missing_and_can_be_stopped(tmp_path):
    config = config_in(tmp_path / "store")

    async def play() -> list[str]:
        service, stop = ControllerService(config), asyncio.Event()
        with failing("room store ENOSPC"):
            start = asyncio.ensure_future(started(service.start(), stop.wait()))
            async with Admin("127.0.0.1:1") as admin:
                controller = admin.controller(config.self_peer.remoting_address)
                await until(lambda: service.requests.metadata().problems)
                told = await controller.metadata()
            stop.set()
            assert not await start
        assert told.log is not None
        return list(told.log.problems)

    (problem,) = asyncio.run(play())
    assert "waits for disk space" in problem and str(tmp_path / "store") in problem


async def test_r53_a_name_server_answers_while_its_controller_waits_for_room(tmp_path):
    namesrv = NamesrvConfig(
        listen_port=0, bind_address="127.0.0.1", enable_controller_in_namesrv=True
    )
    service, stop = NamesrvService(namesrv, config_in(tmp_path / "store")), asyncio.Event()
    answers = asyncio.Event()
    with failing("room store ENOSPC"):
        start = asyncio.ensure_future(started(service.start(answers.set), stop.wait()))
        await asyncio.wait_for(answers.wait(), 10)
        async with Admin(f"127.0.0.1:{service.port}") as admin:
            assert (await admin.cluster.info()).broker_addr_table == {}
        stop.set()
        assert not await start


def test_r53_a_start_that_gets_no_descriptors_for_its_port_closes_its_files(tmp_path, monkeypatch):
    service = ControllerService(config_in(tmp_path / "store"))
    no_more = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(RaftLog, "_join", Mock(side_effect=[no_more, ValueError("the second try")]))
    monkeypatch.setattr(start_retry, "SPACE_POLL_S", 0)
    with pytest.raises(ValueError, match="the second try"):
        asyncio.run(service.start())
    assert not open_below(tmp_path)


async def test_a_controller_serves_without_the_history_that_its_disk_cannot_open(tmp_path):
    """It explains, and decides nothing."""
    with failing("open history-n0.jsonl EIO"):
        service = ControllerService(config_in(tmp_path / "store"))
        await service.start()
    try:
        await opened(service.gate)
        (problem,) = service.requests.metadata().problems
        assert f"history-n0.jsonl: Input/output error; {ADVICE}" in problem
    finally:
        await service.close()


def test_another_error_of_the_disk_ends_the_start(tmp_path):
    async def play() -> None:
        with failing("room * EIO once"):
            await ControllerService(config_in(tmp_path / "store")).start()

    with pytest.raises(OSError, match="Input/output error"):
        asyncio.run(play())
