"""A connection that is ended while its dial has not returned yet must not be waited for."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import uvloop

from batonmq.ha.links import MasterLink, OpenLinks
from batonmq.ha.slave_core import SlaveCore
from batonmq.ha.slave_effects import Hangup
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.ha.slave_shell import SlaveShell, local_log
from batonmq.protocol.role_view import RoleView
from batonmq.store.disk_health import StoreHealth
from tests.ha.cores import identity


class HangsUpAtOnce(SlaveCore):
    """Ends the connection in the turn after the one in which it was made, as a slave does whose
    master's handshake is already there and shows that it cannot follow."""

    hang_up = staticmethod(lambda: None)

    def connected(self, log, now_ms):
        asyncio.get_running_loop().call_soon(self.hang_up)
        return []


async def test_a_dial_cancelled_after_its_connection_was_made_is_counted_as_closed():
    """1. The connection is made; the core hangs up before `create_connection` has returned.
    2. The dial is cancelled, and uvloop closes the transport without a `connection_lost`.
    3. Whoever waits for the last open link continues: a broker once could not stop here.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    view = RoleView(
        "C",
        "broker-a",
        master_broker_id=1,
        master_ha_address=f"{host}:{port}",
        master_incarnation="i",
        master_epoch=1,
    )
    epochs = SimpleNamespace(entries=())
    store = SimpleNamespace(
        min_phy_offset=0,
        max_phy_offset=0,
        confirm_offset=0,
        log=SimpleNamespace(flushed_offset=0, health=StoreHealth()),
        epochs=epochs,
    )
    core = HangsUpAtOnce(identity(2), view, local_log(store), SlavePolicy(), 0)
    links, made = OpenLinks(), asyncio.Event()
    count_made = links.made
    links.made = lambda: (count_made(), made.set())
    shell = SlaveShell(core, store, SimpleNamespace(), lambda: 0, None, links)
    core.hang_up = lambda: shell._perform([Hangup("it cannot be followed")])
    shell.start()
    try:
        async with asyncio.timeout(10):
            await made.wait()
            shell.close()
            await links.close()
    finally:
        server.close()


@pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_master_at_a_port_that_no_host_has_is_not_dialled(new_loop):
    """uvloop would dial the lower 16 bits, where another process listens."""

    async def dial():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        link = MasterLink(Mock(), memoryview(bytearray(1)), OpenLinks(), Mock())
        try:
            assert "65535 are allowed" in await link.dial(loop, f"{host}:{65_536 + port}")
        finally:
            link.end()
            server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(dial())
