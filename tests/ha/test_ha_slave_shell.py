"""The slave's shell against a master on a real socket, and a store that fails when told to."""

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from batonmq.epoch.entry import EpochEntry
from batonmq.ha.links import OpenLinks
from batonmq.ha.received_log import LocalLog
from batonmq.ha.slave_core import SlaveCore, SlavePhase
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.slave_shell import SlaveShell
from batonmq.ha.wire import (
    SlaveFrameReader,
    SlaveHandshake,
    TransferHeader,
    encode_master_handshake,
    encode_slave_handshake,
    encode_transfer_header,
)
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.role_view import RoleView
from batonmq.store.disk_health import StoreHealth
from tests.ha.cores import identity
from tests.shared.waiting import until

EPOCH_1 = (EpochEntry(1, 0),)
HANDSHAKE = encode_master_handshake(0, EPOCH_1, identity(2))
BEAT = encode_transfer_header(TransferHeader(0, 0, 1, 0, 0))
BYTES = encode_transfer_header(TransferHeader(4, 0, 1, 0, 0)) + b"data"


def view(address: str, broker_id: int = 2, **changed: Any) -> RoleView:
    named = identity(broker_id)
    plain = RoleView(
        named.cluster_name, named.broker_name, master_broker_id=broker_id,
        master_ha_address=address, master_incarnation=named.incarnation, master_epoch=1,
    )  # fmt: skip
    return replace(plain, **changed)


def empty_store(**parts: Any) -> SimpleNamespace:
    """A log without a byte; `parts` take the place of its own."""
    whole: dict[str, Any] = {
        "min_phy_offset": 0,
        "max_phy_offset": 0,
        "confirm_offset": 0,
        "log": SimpleNamespace(flushed_offset=0, health=StoreHealth()),
        "epochs": Mock(entries=()),
        "slave_log": Mock(append_replicated=Mock(return_value=4)),
        "trust": Mock(must_refetch=True),
        "advance_confirm_offset": Mock(),
    }
    return SimpleNamespace(**(whole | parts))


class Scene:
    """A slave that follows the master which this test plays."""

    def __init__(self, store: SimpleNamespace, shell: SlaveShell, listener: Mock) -> None:
        self.store, self.shell, self.listener = store, shell, listener
        self.acks: list[int] = []
        self.writer: asyncio.StreamWriter | None = None
        self._reader = SlaveFrameReader()
        self.streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self.streams = asyncio.Queue()

    async def answer_handshake(self) -> asyncio.StreamWriter:
        """The slave has dialled and sent its handshake; the master answers."""
        self.reader, self.writer = await self.streams.get()
        while self._reader.handshake is None:
            self._reader.feed(await self.reader.read(4096))
        self.writer.write(HANDSHAKE)
        return self.writer

    async def ack(self) -> int:
        """The next ack that reaches the master."""
        while not self.acks:
            data = await self.reader.read(4096)
            assert data, "the slave hung up"
            self.acks += self._reader.feed(data)[1]
        return self.acks.pop(0)

    async def ended(self) -> None:
        """The slave has closed the connection, and acked nothing more before."""
        rest = await self.reader.read()
        assert not rest or not self._reader.feed(rest)[1]


@contextlib.asynccontextmanager
async def dialled(
    store: SimpleNamespace | None = None, java_master: Mock | None = None, **changed: Any
) -> AsyncIterator[Scene]:
    """A slave that has begun to dial."""
    held = empty_store() if store is None else store
    listener = Mock()
    server = await asyncio.start_server(lambda r, w: scene.streams.put_nowait((r, w)), "::1", 0)
    address = f"::1:{server.sockets[0].getsockname()[1]}"
    if java_master is not None:
        changed["master_incarnation"] = ""
    core = SlaveCore(identity(1), view(address, **changed), LocalLog(0, 0, 0, ()), SlavePolicy(), 0)
    shell = SlaveShell(core, held, listener, lambda: 0, java_master or Mock(), OpenLinks())
    scene = Scene(held, shell, listener)
    shell.start()
    try:
        async with asyncio.timeout(10):
            yield scene
    finally:
        shell.close()
        if scene.writer is not None:
            scene.writer.close()
            await scene.writer.wait_closed()
        server.close()
        await server.wait_closed()


async def test_r2_a_connection_that_was_given_up_is_not_taken_for_the_new_masters():
    """1. The slave dials master 2. 2. A view names master 3: the dial is given up, 3 is dialled.
    3. Only now the first connection stands: nothing is sent on it, the second one is used."""
    loop, dialled = asyncio.get_running_loop(), []

    async def create_connection(factory: Any, host: str, port: int, ssl: Any) -> None:
        dialled.append(factory())
        await asyncio.Event().wait()

    loop.create_connection = create_connection
    core = SlaveCore(identity(1), view("h:2"), LocalLog(0, 0, 0, ()), SlavePolicy(), 0)
    shell = SlaveShell(core, empty_store(), Mock(), lambda: 0, Mock(), OpenLinks())
    shell.start()
    await asyncio.sleep(0)
    shell.follow(view("h:3", 3))
    first, second = Mock(spec=asyncio.Transport), Mock(spec=asyncio.Transport)
    dialled[0].connection_made(first)
    assert core.phase is SlavePhase.CONNECTING
    await until(lambda: len(dialled) == 2)
    dialled[1].connection_made(second)
    assert core.phase is SlavePhase.HANDSHAKE
    second.write.assert_called_once_with(
        encode_slave_handshake(SlaveHandshake(1, identity=identity(1)))
    )
    first.write.assert_not_called()
    first.abort.assert_called_once()
    shell.close()


async def test_g8_a_bad_record_that_cannot_be_taken_back_ends_the_process():
    """1. A master sends a record whose CRC does not fit. 2. It is cut again, and the disk fails: a
    slave that continued would take what comes next behind the bad bytes."""
    failure = OSError(errno.EIO, "the disk fails")
    log = Mock(
        append_replicated=Mock(side_effect=CorruptLogError("file", 7, "the CRC does not fit")),
        drop_unverified=Mock(side_effect=failure),
    )
    async with dialled(empty_store(slave_log=log)) as scene:
        writer = await scene.answer_handshake()
        assert await scene.ack() == 0
        writer.write(BYTES)
        await scene.ended()
        scene.listener.on_fatal.assert_called_once_with(failure)
        assert scene.shell.core.phase is SlavePhase.STOPPED


async def test_r37_a_log_that_failed_acks_nothing_and_is_no_full_disk():
    """The disk may be full as well; more space would not bring back what is lost."""
    full = OSError(errno.ENOSPC, "no space")
    async with dialled() as scene:
        writer = await scene.answer_handshake()
        assert await scene.ack() == 0
        writer.write(BEAT)
        assert await scene.ack() == 0, "a heartbeat is answered"
        scene.store.log.health.log_failed(OSError(errno.EIO, "a sync failed"))
        scene.store.slave_log.append_replicated.side_effect = full
        writer.write(BEAT + BYTES)
        await scene.ended()
        scene.listener.on_fatal.assert_called_once_with(full)
        assert scene.shell.core.phase is SlavePhase.STOPPED


async def test_r25_nothing_is_acked_behind_an_epoch_that_the_list_does_not_take():
    """The connection ends, and the next handshake compares the histories again."""
    async with dialled() as scene:
        scene.store.epochs.append.return_value = False
        writer = await scene.answer_handshake()
        assert await scene.ack() == 0
        writer.write(encode_transfer_header(TransferHeader(4, 0, 2, 0, 0)) + b"data")
        await scene.ended()
        assert scene.shell.core.phase is SlavePhase.READY
        scene.listener.on_fatal.assert_not_called()


async def test_r27_a_member_whose_next_byte_is_gone_says_so_as_long_as_it_is():
    """Each connection finds histories that fit, and then that the master's log begins behind."""
    store = empty_store(max_phy_offset=4, epochs=Mock(entries=EPOCH_1))
    gone = encode_transfer_header(TransferHeader(0, 50, 1, 0, 0))
    async with dialled(store, sync_state_set=frozenset({1, 2})) as scene:
        for _ in range(2):
            reader, writer = await scene.streams.get()
            frames = SlaveFrameReader()
            while frames.handshake is None:
                frames.feed(await reader.read(4096))
            writer.write(encode_master_handshake(100, EPOCH_1, identity(2)) + gone)
            while await reader.read(4096):
                pass
            writer.close()
            assert "the master's begins at 50" in scene.shell.problem
            scene.shell.follow(scene.shell.core.view)
        scene.listener.on_diverged.assert_called_once()


async def test_r24_a_disk_that_fails_when_a_slave_is_trusted_again_ends_the_process():
    """The slave has caught up, and the file of its suspicion cannot be removed."""
    failure = OSError(errno.EIO, "cannot unlink")
    trust = Mock(must_refetch=False, clear_suspect=Mock(side_effect=failure))
    async with dialled(empty_store(trust=trust)) as scene:
        writer = await scene.answer_handshake()
        writer.write(BEAT)
        await until(lambda: scene.listener.on_fatal.called)
        scene.listener.on_fatal.assert_called_once_with(failure)


async def test_r24_a_slave_that_caught_up_over_a_bad_record_is_not_trusted():
    """It found the record in its first handshake, and has fetched nothing in its place."""
    async with dialled() as scene:
        writer = await scene.answer_handshake()
        assert await scene.ack() == 0
        writer.write(BEAT)
        assert await scene.ack() == 0
        assert scene.shell.core.is_caught_up
        scene.store.trust.clear_suspect.assert_not_called()


async def test_r21_a_question_to_a_java_master_that_failed_is_no_proof():
    """Whatever failed: the connection ends, and the next one asks again."""
    java = Mock(identity=Mock(side_effect=ValueError("no such reply")))
    async with dialled(java_master=java) as scene:
        await scene.answer_handshake()
        await scene.ended()
        assert scene.shell.core.phase is SlavePhase.READY
        java.identity.assert_called_once()
