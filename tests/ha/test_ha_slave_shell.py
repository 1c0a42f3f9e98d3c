"""The slave's shell where its events cross."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

from batonmq.ha.links import OpenLinks
from batonmq.ha.received_log import LocalLog
from batonmq.ha.slave_core import SlaveCore, SlavePhase
from batonmq.ha.slave_effects import AppendEpoch, SendToMaster
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.slave_shell import SlaveShell
from batonmq.ha.wire import SlaveHandshake, encode_slave_handshake
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.role_view import RoleView
from batonmq.store.health import StoreHealth
from tests.ha.cores import identity

VIEW = RoleView(
    "C", "b", master_broker_id=2, master_ha_address="h:2", master_incarnation="x", master_epoch=1
)


def test_r2_a_connection_that_was_given_up_is_not_taken_for_the_new_masters() -> None:
    """1. The slave dials master 2. 2. A view names master 3: the dial is given up, 3 is dialled.
    3. Only now the first connection stands: nothing is sent on it, the second one is used."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        dialled = []

        async def create_connection(factory, host, port):  # type: ignore[no-untyped-def]
            dialled.append(factory())
            await asyncio.Event().wait()

        store = SimpleNamespace(
            min_phy_offset=0,
            max_phy_offset=0,
            confirm_offset=0,
            log=SimpleNamespace(flushed_offset=0, health=StoreHealth()),
            epochs=SimpleNamespace(entries=()),
        )
        core = SlaveCore(identity(1), VIEW, LocalLog(0, 0, 0, ()), SlavePolicy(), 0)
        shell = SlaveShell(core, store, Mock(), lambda: 0, Mock(), OpenLinks())  # type: ignore[arg-type]
        shell._loop = Mock(wraps=loop)
        shell._loop.create_connection = create_connection
        shell.start()
        await asyncio.sleep(0)
        shell.follow(
            replace(VIEW, master_broker_id=3, master_ha_address="h:3", master_incarnation="y")
        )
        first, second = Mock(spec=asyncio.Transport), Mock(spec=asyncio.Transport)
        dialled[0].connection_made(first)
        assert core.phase is SlavePhase.CONNECTING
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        dialled[1].connection_made(second)
        assert core.phase is SlavePhase.HANDSHAKE
        second.write.assert_called_once_with(
            encode_slave_handshake(SlaveHandshake(1, identity=identity(1)))
        )
        first.write.assert_not_called()
        first.abort.assert_called_once()
        shell.close()

    asyncio.run(play())


def test_g8_a_bad_record_that_cannot_be_taken_back_ends_the_process() -> None:
    """1. A master sends a record whose CRC does not fit. 2. It is cut again, and the disk fails: a
    slave that went on would take what comes next behind the bad bytes."""

    async def play() -> None:
        failure = OSError(errno.EIO, "the disk fails")
        store = SimpleNamespace(
            log=SimpleNamespace(health=StoreHealth()),
            slave_log=SimpleNamespace(drop_unverified=Mock(side_effect=failure)),
        )
        core = SlaveCore(identity(1), VIEW, LocalLog(0, 0, 0, ()), SlavePolicy(), 0)
        listener = Mock()
        shell = SlaveShell(core, store, listener, lambda: 0, Mock(), OpenLinks())  # type: ignore[arg-type]
        bad = Mock(feed=Mock(side_effect=CorruptLogError("file", 7, "the CRC does not fit")))
        shell.received(Mock(reader=bad), memoryview(b"x"))
        listener.on_fatal.assert_called_once_with(failure)
        assert core.phase is SlavePhase.STOPPED

    asyncio.run(play())


def shell_of(store: SimpleNamespace) -> tuple[SlaveShell, Mock, Mock]:
    """A shell, its listener, and the transport of a connection that it has."""
    core = SlaveCore(identity(1), VIEW, LocalLog(0, 0, 0, ()), SlavePolicy(), 0)
    listener = Mock()
    shell = SlaveShell(core, store, listener, lambda: 0, Mock(), OpenLinks())  # type: ignore[arg-type]
    shell._link = Mock()
    return shell, listener, shell._link.transport


def test_r37_a_log_that_failed_acks_nothing_and_is_no_full_disk() -> None:
    """A disk may be full as well; room would not bring back what is lost."""

    async def play() -> None:
        store = SimpleNamespace(log=SimpleNamespace(health=StoreHealth()), max_phy_offset=0)
        shell, listener, transport = shell_of(store)
        shell._run([SendToMaster(b"ack")])
        transport.write.assert_called_once_with(b"ack")
        store.log.health.log_failed(OSError(errno.EIO, "a sync failed"))
        shell._run([SendToMaster(b"ack")])
        transport.write.assert_called_once()
        full = OSError(errno.ENOSPC, "no room")
        reader = Mock(feed=Mock(side_effect=full))
        shell.received(Mock(reader=reader), memoryview(b"x"))
        listener.on_fatal.assert_called_once_with(full)
        assert shell.core.phase is SlavePhase.STOPPED

    asyncio.run(play())


def test_r25_nothing_is_acked_behind_an_epoch_that_the_list_does_not_take() -> None:
    """The connection ends, and the next handshake compares the histories anew."""

    async def play() -> None:
        epochs = SimpleNamespace(append=Mock(return_value=False), entries=())
        store = SimpleNamespace(log=SimpleNamespace(health=StoreHealth()), epochs=epochs)
        shell, listener, transport = shell_of(store)
        shell._run([AppendEpoch(3, 10), SendToMaster(b"ack")])
        transport.write.assert_not_called()
        assert shell._link is None and shell.core.phase is SlavePhase.READY
        listener.on_fatal.assert_not_called()
        shell.close()

    asyncio.run(play())


def test_r24_a_disk_that_fails_when_a_slave_is_trusted_again_ends_the_process() -> None:
    """The slave is level, and the file of its suspicion cannot be removed."""

    async def play() -> None:
        failure = OSError(errno.EIO, "cannot unlink")
        trust = Mock(clear_suspect=Mock(side_effect=failure), must_refetch=False)
        log = SimpleNamespace(flushed_offset=0, health=StoreHealth())
        shell, listener, _ = shell_of(SimpleNamespace(log=log, trust=trust))
        shell.core = Mock(is_caught_up=True, turn_ended=Mock(return_value=[]), wakeup_ms=1_000)
        shell.core.stop.return_value = []
        shell._end_turn()
        listener.on_fatal.assert_called_once_with(failure)
        shell._end_turn()

    asyncio.run(play())


def test_r24_a_slave_that_is_level_over_a_bad_record_is_not_trusted() -> None:
    """It found the record in its first handshake, and has fetched nothing in its place."""

    async def play() -> None:
        trust = Mock(must_refetch=True)
        log = SimpleNamespace(flushed_offset=0, health=StoreHealth())
        shell, _, _ = shell_of(SimpleNamespace(log=log, trust=trust))
        shell.core = Mock(is_caught_up=True, turn_ended=Mock(return_value=[]), wakeup_ms=1_000)
        shell._end_turn()
        trust.clear_suspect.assert_not_called()

    asyncio.run(play())


def test_r21_a_question_to_a_java_master_that_failed_is_no_proof() -> None:
    """Whatever failed: the connection ends, and the next one asks again."""

    async def play() -> None:
        store = SimpleNamespace(log=SimpleNamespace(health=StoreHealth()))
        shell, _, transport = shell_of(store)
        shell.core.phase = SlavePhase.PROVING
        shell._java_master = Mock(identity=Mock(side_effect=ValueError("no such reply")))
        await shell._prove(VIEW)
        transport.write.assert_not_called()
        assert shell._link is None and shell.core.phase is SlavePhase.READY
        shell.close()

    asyncio.run(play())
