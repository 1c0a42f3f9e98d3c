"""A broker registers again, also where the connection leads nowhere any more."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from unittest.mock import Mock

from batonmq.broker import name_server_registrar
from batonmq.broker.name_server_registrar import (
    MasterToRegister,
    NameServerRegistrar,
    RegistrationByMembers,
    RouteRegistration,
)
from batonmq.protocol.bodies import DataVersion
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.runtime import tasks


class _NameServer:
    """Takes registrations, and remembers of each the topics, or None for all, and whether it said
    that there are others."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.came = asyncio.Event()
        self.answers = asyncio.Event()
        self.answers.set()
        self.code = ResponseCode.SUCCESS
        processors = Processors()
        processors.register(RequestCode.REGISTER_BROKER, self._register)
        processors.register(
            RequestCode.UNREGISTER_BROKER, lambda cmd, _: RemotingCommand.response_to(cmd)
        )
        self.server = RemotingServer(processors, name="namesrv")

    async def _register(self, cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        self.seen.append((cmd.body.decode(), "batonPartial" in cmd.ext))
        self.last = connection
        self.came.set()
        await self.answers.wait()
        return RemotingCommand.response_to(cmd, self.code)

    async def next_one(self) -> tuple[str, bool]:
        await asyncio.wait_for(self.came.wait(), 10)
        self.came.clear()
        return self.seen[-1]


def _current(topics: Collection[str] | None) -> RouteRegistration:
    named = "all" if topics is None else " ".join(sorted(topics))
    return RouteRegistration("c", "b", 0, "a:1", "a:2", named.encode(), topics is not None)


@contextlib.asynccontextmanager
async def _registered(
    server: _NameServer | None = None,
) -> AsyncIterator[tuple[_NameServer, NameServerRegistrar]]:
    """At a name server that has the whole table."""
    server, client = server or _NameServer(), RemotingClient(None)
    address = f"127.0.0.1:{await server.server.listen('127.0.0.1', 0)}"
    registrar = NameServerRegistrar(client, (address,), 60_000, _current)
    registrar.start()
    assert await server.next_one() == ("all", False)
    while not registrar.registered[address]:  # noqa: ASYNC110  it has no event of its own
        await asyncio.sleep(0)
    try:
        yield server, registrar
    finally:
        await registrar.close()
        await client.close()
        await server.server.close()


async def test_a_name_server_that_does_not_answer_is_dialled_again(monkeypatch):
    monkeypatch.setattr(name_server_registrar, "RPC_TIMEOUT_MS", 20)
    monkeypatch.setattr(name_server_registrar, "RETRY_MS", 1)
    connections: list[Connection] = []

    class FirstLeadsNowhere(_NameServer):
        async def _register(self, cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
            connections.append(connection)
            if connection is connections[0]:
                await asyncio.get_running_loop().create_future()
            return await super()._register(cmd, connection)

    async with _registered(FirstLeadsNowhere()):
        assert connections[-1] is not connections[0]


async def test_new_topics_travel_alone_and_together():
    """1 the whole table. 2 a topic: it alone. 3 a thousand more in the same moment: one
    registration. 4 the connection is lost: the whole table. 5 the role changes: the whole table."""
    async with _registered() as (server, registrar):
        registrar.topics_changed(("T",))
        assert await server.next_one() == ("T", True)
        for number in range(1000):
            registrar.topics_changed((f"T{number:03d}",))
        named, is_partial = await server.next_one()
        assert is_partial and named == " ".join(f"T{number:03d}" for number in range(1000))
        server.last.abort("the name server starts again")
        assert await server.next_one() == ("all", False)
        registrar.topics_changed(("T",))
        registrar.changed()
        assert await server.next_one() == ("all", False)


async def test_a_send_that_made_its_topic_waits_for_name_servers(monkeypatch):
    """1 nothing is due: at once. 2 a topic: with the answer of the name server, not before. 3 the
    name server does not answer: after KNOWN_S. 4 it does not have this broker: at once.
    5 this broker stops."""
    reported: list[object] = []
    async with _registered() as (server, registrar):
        (address,) = registrar.registered
        registrar.when_known(lambda: reported.append("nothing due"))
        assert reported == ["nothing due"]
        monkeypatch.setattr(name_server_registrar, "KNOWN_S", 3600)
        registrar.topics_changed(("T",))
        registrar.when_known(lambda: reported.append(server.seen[-1]))
        assert len(reported) == 1
        await asyncio.wait_for(registrar.known(), 10)
        assert reported[1:] == [("T", True)]
        monkeypatch.setattr(name_server_registrar, "KNOWN_S", 0.001)
        monkeypatch.setattr(registrar._client, "connection", lambda _: asyncio.Event().wait())
        registrar.topics_changed(("U",))
        await asyncio.wait_for(registrar.known(), 10)
        assert ("U", True) not in server.seen
        monkeypatch.setattr(name_server_registrar, "KNOWN_S", 3600)
        registrar.registered[address] = False
        registrar.topics_changed(("V",))
        await asyncio.wait_for(registrar.known(), 10)
        registrar.registered[address] = True
        registrar.topics_changed(("W",))
        registrar.when_known(lambda: reported.append("the end"))
        assert len(reported) == 2
        await registrar.close()
        assert reported[2:] == ["the end"]


async def test_r32_the_kernel_asks_a_silent_name_server_whether_it_has_the_connection():
    """One that lost power comes back without routes, and nothing is sent to it for 30 s."""
    async with _registered() as (_, registrar):
        (address,) = registrar.registered
        connection = registrar._client.live_connection(address)
        assert connection is not None and connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1


async def test_after_a_refusal_the_whole_table_is_sent(monkeypatch):
    """The refused topics would never be sent again, if others came next."""
    monkeypatch.setattr(name_server_registrar, "RETRY_MS", 1)
    async with _registered() as (server, registrar):
        server.code = ResponseCode.SYSTEM_ERROR
        registrar.topics_changed(("T",))
        assert await server.next_one() == ("T", True)
        registrar.topics_changed(("U",))
        server.code = ResponseCode.SUCCESS
        assert await server.next_one() == ("all", False)


async def test_a_change_under_way_is_not_known_by_the_answer_to_the_one_before(monkeypatch):
    monkeypatch.setattr(name_server_registrar, "KNOWN_S", 3600)
    async with _registered() as (server, registrar):
        reported: list[tuple[str, bool]] = []
        server.answers.clear()
        registrar.topics_changed(("T",))
        assert await server.next_one() == ("T", True)
        registrar.topics_changed(("U",))
        registrar.when_known(lambda: reported.append(server.seen[-1]))
        server.answers.set()
        await asyncio.wait_for(registrar.known(), 10)
        assert reported == [("U", True)]


async def test_r54_a_registration_that_cannot_be_made_is_tried_again(monkeypatch):
    """Else this broker would be missing at that name server until its next start."""
    monkeypatch.setattr(tasks, "AGAIN_S", 0)
    failures: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context["exception"])
    )
    async with _registered() as (server, registrar):
        with monkeypatch.context() as broken:
            broken.setattr(registrar, "_current", Mock(side_effect=[KeyError("T"), _current(None)]))
            registrar.topics_changed(("T",))
            assert await server.next_one() == ("all", False)
    assert [type(failure) for failure in failures] == [KeyError]


class _DeafNameServer(_NameServer):
    """Answers slaves. Of relayed registrations it remembers the body and the master's address."""

    async def _register(self, cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
        if cmd.ext["brokerId"] == "0" and "batonRelayed" not in cmd.ext:
            await asyncio.get_running_loop().create_future()
        if "batonRelayed" in cmd.ext:
            assert cmd.ext["heartbeatTimeoutMillis"] == "10000"
            self.seen.append((cmd.body.decode(), "batonPartial" in cmd.ext))
            self.came.set()
        return RemotingCommand.response_to(cmd)


class _Slave:
    """A broker that can register the master which it follows."""

    def __init__(self, name_server: str) -> None:
        self.follows, self.version = "", DataVersion(counter=1)
        self.client = RemotingClient(None)
        self.by_members = RegistrationByMembers(self.client, list, self._of_master)
        slave = RouteRegistration("c", "b", 2, "s:1", "s:2", b"")
        self.registrar = NameServerRegistrar(
            self.client, (name_server,), 60_000, lambda _: slave, by_members=self.by_members
        )
        processors = Processors()
        self.by_members.register(processors)
        self.server = RemotingServer(processors, name="slave")

    def _of_master(self, topics: Collection[str] | None) -> MasterToRegister:
        if not self.follows:
            return None
        named = b"none" if topics is not None else b"all"
        master = RouteRegistration("c", "b", 0, self.follows, "m:2", named, topics is not None)
        return replace(master, is_relayed=True), self.version

    async def close(self) -> None:
        await self.registrar.close()
        await self.server.close()
        await self.client.close()


async def test_r32_a_slave_registers_the_master_that_a_name_server_does_not_answer(monkeypatch):
    """All topics, then only that the master lives; all again when they changed."""
    monkeypatch.setattr(name_server_registrar, "UNANSWERED_S", 0)
    monkeypatch.setattr(name_server_registrar, "ASKS_APART_S", 0)
    monkeypatch.setattr(name_server_registrar, "RPC_TIMEOUT_MS", 100)
    monkeypatch.setattr(name_server_registrar, "RETRY_MS", 1)
    deaf = _DeafNameServer()
    name_server = f"127.0.0.1:{await deaf.server.listen('127.0.0.1', 0)}"
    slaves = [_Slave(name_server) for _ in range(2)]
    addresses = [f"127.0.0.1:{await each.server.listen('127.0.0.1', 0)}" for each in slaves]
    slaves[1].follows = "a:1"  # the first one does not
    for slave in slaves:
        slave.registrar.start()
        async with asyncio.timeout(10):
            await slave.registrar.known()
            while not slave.registrar.registered[name_server]:  # noqa: ASYNC110
                await asyncio.sleep(0)
    client = RemotingClient(None)
    by_members = RegistrationByMembers(client, lambda: addresses, lambda _: None)
    master = NameServerRegistrar(client, (name_server,), 60_000, _current, by_members=by_members)
    master.start()
    assert await deaf.next_one() == ("all", False)
    deaf.came.clear()
    assert await deaf.next_one() == ("none", True)
    slaves[1].version = DataVersion(counter=2)
    async with asyncio.timeout(10):
        while deaf.seen.count(("all", False)) < 2:
            await deaf.next_one()
    assert not master.registered[name_server]
    await master.close()
    for slave in slaves:
        await slave.close()
    await client.close()
    await deaf.server.close()


async def test_r32_a_slave_registers_only_the_master_that_it_follows_where_it_is_registered():
    deaf, stranger = _DeafNameServer(), RemotingClient(None)
    name_server = f"127.0.0.1:{await deaf.server.listen('127.0.0.1', 0)}"
    slave = _Slave(name_server)
    at = f"127.0.0.1:{await slave.server.listen('127.0.0.1', 0)}"

    async def ask(master: str, where: str) -> str:
        fields = {"nameServer": where, "masterAddr": master}
        request = RemotingCommand.request(RequestCode.BATON_REGISTER_MASTER, fields)
        return (await stranger.invoke(at, request, 3000)).remark or ""

    assert "not registered there" in await ask("m:1", name_server)
    slave.registrar.start()
    async with asyncio.timeout(10):
        while not slave.registrar.registered[name_server]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert "follows no such master" in await ask("m:1", name_server)
    slave.follows = "m:1"
    assert "follows no such master" in await ask("m:2", name_server)
    assert "not registered there" in await ask("m:1", "127.0.0.1:1")
    assert not deaf.seen
    assert await ask("m:1", name_server) == "" and deaf.seen == [("all", False)]
    await slave.close()
    await stranger.close()
    await deaf.server.close()
