"""TLS on remoting ports: modes, by the first byte; who is refused; what strangers cost."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from batonmq.protocol.errors import ConnectError
from batonmq.remoting.command import RemotingCommand, encode_frame
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from batonmq.runtime import authority as authority_module
from batonmq.runtime import followed_files, tls_listener
from batonmq.runtime import tls as tls_module
from batonmq.runtime.authority import Authority, NodeCertificate, check_certificate
from batonmq.runtime.durable_file import replace_file
from batonmq.runtime.tls import ClientTls, DialTls, Tls, TlsError
from tests.shared import remoting_ends
from tests.shared.certificates import HOSTS, authority, client_tls, node_tls
from tests.shared.remoting_ends import handled
from tests.shared.waiting import until


def echo(cmd: RemotingCommand, connection: Connection) -> RemotingCommand:
    return RemotingCommand.response_to(cmd, body=cmd.body)


@asynccontextmanager
async def serving(tls: Tls | None) -> AsyncIterator[tuple[RemotingServer, str]]:
    server = RemotingServer(handled(10, echo), tls=tls.for_clients if tls else None)
    async with remoting_ends.serving(server) as address:
        yield server, address


def dialling(
    tls: ClientTls | None, processors: Processors | None = None, connect_timeout_ms: int = 3000
) -> AbstractAsyncContextManager[RemotingClient]:
    dials = DialTls(tls) if tls is not None else None
    return remoting_ends.dialling(
        RemotingClient(processors, tls=dials, connect_timeout_ms=connect_timeout_ms)
    )


async def ask(address: str, tls: ClientTls | None, body: bytes = b"x") -> bytes:
    async with dialling(tls) as client:
        return (await client.invoke(address, RemotingCommand.request(10, body=body))).body


@pytest.fixture
def made(tmp_path: Path) -> Authority:
    return authority(tmp_path / "tls")


async def test_a_handshake_that_hangs_does_not_keep_a_request_from_another_broker(
    made: Authority,
) -> None:
    """A process that is just starting listens, and shakes no hands yet: whoever learns of another
    master ends the dial, as it closes a silent connection."""
    dialled, never = asyncio.Event(), asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dialled.set()
        await never.wait()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as silent:
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        request = RemotingCommand.request(30)
        async with dialling(client_tls(made), connect_timeout_ms=60_000) as client:
            asking = asyncio.create_task(client.invoke(address, request, 60_000))
            async with asyncio.timeout(20):
                await dialled.wait()
                client.close_connection(address)
                with pytest.raises(ConnectError, match="was ended"):
                    await asking
            never.set()


async def test_one_permissive_port_serves_plain_and_tls(made: Authority) -> None:
    tls = node_tls(made, server_mode="permissive")
    async with serving(tls) as (_, address):
        for body in (b"", b"small", os.urandom(3_000_000)):
            assert await ask(address, None, body) == body
            assert await ask(address, client_tls(made), body) == body
        both = [ask(address, client_tls(made) if n % 2 else None) for n in range(100)]
        assert await asyncio.gather(*both) == [b"x"] * 100


async def test_a_permissive_port_knows_who_is_connected_without_tls_and_with_it(
    made: Authority,
) -> None:
    tls = node_tls(made, server_mode="permissive")
    async with serving(tls) as (_, address):
        async with dialling(None) as plain, dialling(client_tls(made)) as encrypted:
            local = (await plain.connection(address)).local
            other = (await encrypted.connection(address)).local
            await plain.invoke(address, RemotingCommand.request(10))
            await encrypted.invoke(address, RemotingCommand.request(10))
            state = tls.state
            assert (state.plain, state.plain_peers, state.plain_taken) == (1, [local], 1)
            assert (state.encrypted, state.encrypted_peers) == (1, [other])
            assert state.server_mode == "permissive" and not state.dials
        async with asyncio.timeout(20):
            await until(lambda: not tls.peers.plain and not tls.peers.encrypted)
        assert tls.state.plain_taken == 1


async def test_an_enforcing_port_refuses_plain_connections_and_says_so(
    made: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger=tls_listener.__name__)
    async with serving(node_tls(made)) as (_, address):
        for _ in range(20):
            with pytest.raises(ConnectError):
                await ask(address, None)
        assert await ask(address, client_tls(made)) == b"x"
    refusals = [r.getMessage() for r in caplog.records if r.name == tls_listener.__name__]
    assert refusals and all("takes TLS only" in line for line in refusals)


@pytest.mark.parametrize("least", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_have_modern_suites_only(
    made: Authority, least: ssl.TLSVersion
) -> None:
    async with serving(node_tls(made)) as (_, address):
        context = ssl.create_default_context(cafile=str(made.trust))
        context.maximum_version = least
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname="127.0.0.1"
        )
        cipher = writer.get_extra_info("cipher")
        assert cipher[1] in ("TLSv1.2", "TLSv1.3")
        assert "GCM" in cipher[0] or "CHACHA20" in cipher[0]
        writer.close()
        for old in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.warns(DeprecationWarning):
                context.minimum_version = context.maximum_version = old
            with pytest.raises((ssl.SSLError, ConnectionResetError)):
                await asyncio.open_connection(host, int(port), ssl=context)


async def test_a_server_of_another_authority_or_host_is_refused(
    made: Authority, tmp_path: Path
) -> None:
    other = authority(tmp_path / "other")
    async with serving(node_tls(made)) as (_, address):
        with pytest.raises(ConnectError, match="certificate of the peer is refused"):
            await ask(address, client_tls(other))
        assert await ask(address, client_tls(other, auth_server=False)) == b"x"
    path = str(made.issue("elsewhere.pem", ["broker/a/2"], ["elsewhere.example"]).path)
    tls = node_tls(made)
    config = tls.config
    there = Tls(
        type(config)(
            server_mode="enforcing",
            server_cert_path=path,
            server_key_path=path,
            server_trust_cert_path=str(made.trust),
        ),
        check_certificate,
    )
    async with serving(there) as (_, address):
        with pytest.raises(ConnectError, match="IP address mismatch"):
            await ask(address, client_tls(made))
        assert await ask(address, client_tls(made, check_host=False)) == b"x"


@pytest.mark.parametrize(
    ("need", "wanted"),
    [
        ("require", {"": False, "good": True, "strange": False, "late": False}),
        ("optional", {"": True, "good": True, "strange": False, "late": False}),
        ("none", {"": True, "good": True, "strange": True}),
    ],
)
async def test_a_port_that_needs_client_certificates(
    made: Authority, tmp_path: Path, need: str, wanted: dict[str, bool]
) -> None:
    other = authority(tmp_path / "other")
    shown = {
        "": client_tls(made),
        "good": showing(made, made.issue("admin.pem", ["admin"], [])),
        "strange": showing(made, other.issue("admin.pem", ["admin"], [])),
        "late": showing(made, made.issue("late.pem", ["admin"], [], days=-1)),
    }
    async with serving(node_tls(made, server_need_client_auth=need)) as (_, address):
        for name, taken in wanted.items():
            if taken:
                assert await ask(address, shown[name]) == b"x"
            else:
                with pytest.raises(ConnectError):
                    await ask(address, shown[name])


def showing(made: Authority, certificate: NodeCertificate) -> ClientTls:
    """A client that trusts `made`, with this certificate."""
    path = str(certificate.path)
    return client_tls(made, cert_path=path, key_path=path)


async def answer_to(address: str, data: bytes) -> bytes:
    """What comes back until the server closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_r58_garbage_behind_the_first_byte_ends_only_its_connection(made: Authority) -> None:
    record = b"\x16\x03\x01"
    pieces = [
        record + b"\xff\xff" + b"x" * 70_000,  # an oversized record
        record + b"\x00\x05\x01\x00\x00\x01\x00",  # a hello of no bytes
        b"\x16" * 40,
        b"\x16\x03\x01\x00\x00" * 100,
        b"\x15\x03\x01\x00\x02\x02\x28",  # an alert
        b"\x80\x2e\x01\x00\x02",  # SSL 2
        os.urandom(300),
    ]
    async with serving(node_tls(made)) as (_, address):
        for piece in pieces:
            await asyncio.wait_for(answer_to(address, piece), 10)
            assert await ask(address, client_tls(made)) == b"x"


async def test_r58_half_open_handshakes_hold_no_place(
    made: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More idle and half-open connections than places: a client that comes last gets in, and all
    strangers are gone after their time."""
    monkeypatch.setattr(tls_listener, "UNPROVEN_MAX", 8)
    monkeypatch.setattr(tls_listener, "PROVE_S", 0.5)
    hello = _client_hello()
    async with serving(node_tls(made)) as (_, address):
        host, _, port = address.rpartition(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(30)]
        for sock in idle[::2]:
            sock.sendall(hello[: len(hello) // 2])
        assert await ask(address, client_tls(made)) == b"x"
        for sock in idle:
            sock.setblocking(False)
        loop = asyncio.get_running_loop()

        async def ended(sock: socket.socket) -> None:
            try:
                while await loop.sock_recv(sock, 4096):
                    pass
            except ConnectionResetError:
                pass

        await asyncio.wait_for(asyncio.gather(*map(ended, idle)), 20)
        for sock in idle:
            sock.close()


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def test_a_server_that_closes_says_its_farewell_under_tls(made: Authority) -> None:
    said: list[int] = []

    def heard(cmd: RemotingCommand, connection: Connection) -> None:
        said.append(int(cmd.ext["taken"]))

    async with (
        serving(node_tls(made)) as (server, address),
        dialling(client_tls(made), handled(77, heard)) as client,
    ):
        await client.invoke(address, RemotingCommand.request(10))
        (connection,) = server.connections
        connection.farewell = lambda taken: RemotingCommand.request(77, {"taken": taken})
        connection.close("the server stops")
        (theirs,) = client.connections
        await until(lambda: said == [1] and theirs.closed)


async def test_open_connections_outlive_new_certificates_and_a_bad_one_is_refused(
    made: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = node_tls(made)
    path = Path(tls.config.server_cert_path)
    async with serving(tls) as (server, address), dialling(client_tls(made)) as client:
        await client.invoke(address, RemotingCommand.request(10))
        first = await _serial(address)
        renewed = made.renew()[0].path.read_bytes()
        assert tls.reload() and await _serial(address) != first
        second = await _serial(address)
        await client.invoke(address, RemotingCommand.request(10))
        assert len(server.connections) == 1, "the first connection is still the one in use"
        for bad in (b"", b"nonsense", renewed[:300], made.trust.read_bytes()):
            replace_file(path, bad)
            assert not tls.reload() and tls.refusal
            assert await _serial(address) == second
        made.issue(path.name, ["broker/a/1"], HOSTS, days=-1)
        assert not tls.reload() and "valid from" in tls.refusal
    assert "files_not_reloaded" in caplog.text and "PRIVATE" not in caplog.text


async def _serial(address: str) -> str:
    """The serial number that a new connection sees."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found: Any = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return str(hash(found))


async def test_another_authority_takes_over_and_no_connection_is_refused(made: Authority) -> None:
    """Each step alone, with a server and a client at the step before and after it."""
    tls = node_tls(made)
    dials = DialTls(client_tls(made))
    first = made.trust.read_bytes()

    async def dialled() -> None:
        async with remoting_ends.dialling(RemotingClient(tls=dials)) as client:
            assert (await client.invoke(address, RemotingCommand.request(10))).code == 0

    async with serving(tls) as (_, address), dialling(client_tls(made)) as open_since_before:
        await open_since_before.connection(address)
        assert made.rotation() == "none"
        made.trust_next()
        assert made.rotation() == "trusted" and made.trust.read_bytes().startswith(first)
        await dialled()  # before the server has taken it
        assert tls.reload() and len(tls.state.trusted) == 2
        await dialled()
        made.issue("late.pem", ["broker/a/2"], HOSTS)  # by the old one still
        made.issue_by_next()
        assert made.rotation() == "renewed"
        await dialled()
        assert tls.reload()
        await dialled()
        with pytest.raises(ConnectError):
            replace_file(made.folder / "former.crt", first)
            await ask(address, ClientTls(trust_cert_path=str(made.folder / "former.crt")))
        made.drop_former()
        assert made.rotation() == "none" and first not in made.trust.read_bytes()
        await dialled()
        assert tls.reload() and len(tls.state.trusted) == 1
        await dialled()
        assert check_certificate(tls.config)
        reply = await open_since_before.invoke(address, RemotingCommand.request(10))
        assert reply.code == 0


def test_a_change_of_the_authority_continues_after_a_crash_in_each_step(
    made: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.issue("a.pem", ["broker/a/1"], HOSTS)
    made.issue("b.pem", ["broker/a/2"], HOSTS)

    class Crash(Exception):
        pass

    def crashes_at(name: str) -> None:
        def write(path: Path, data: bytes, **more: Any) -> None:
            if path.name == name:
                raise Crash
            replace_file(path, data, **more)

        monkeypatch.setattr(authority_module, "replace_file", write)

    crashes_at("ca.pem")
    with pytest.raises(Crash):
        made.trust_next()
    assert made.rotation() == "none" and (made.folder / "ca-next.key").exists()
    made.issue("c.pem", ["broker/a/3"], HOSTS)  # a broker that joins meanwhile
    monkeypatch.undo()
    made.trust_next()
    crashes_at("b.pem")
    with pytest.raises(Crash):
        made.issue_by_next()
    assert made.rotation() == "issuing"
    monkeypatch.undo()
    made.issue_by_next()
    assert made.rotation() == "renewed"
    crashes_at("ca.pem")
    with pytest.raises(Crash):
        made.drop_former()
    assert made.rotation() == "renewed"
    monkeypatch.undo()
    made.drop_former()
    assert made.rotation() == "none" and len(made.issued()) == 3


async def test_r58_a_crowd_that_begins_handshakes_and_stops(made: Authority) -> None:
    """2,000 of them: the server keeps UNPROVEN_MAX sockets, the oldest goes first. A client that
    was there is answered meanwhile on its connection, and one that comes last gets in."""
    hello = _client_hello()
    async with serving(node_tls(made)) as (server, address), dialling(client_tls(made)) as living:
        before = (await living.connection(address)).local
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        descriptors = len(os.listdir("/proc/self/fd"))
        crowd: list[socket.socket] = []
        try:
            for number in range(2_000):
                crowd.append(socket.socket())
                crowd[-1].setblocking(False)
                await loop.sock_connect(crowd[-1], (host, int(port)))
                crowd[-1].send(hello[: 1 + number % (len(hello) - 1)])
                if number % 100 == 0:
                    reply = await living.invoke(address, RemotingCommand.request(10, body=b"y"))
                    assert reply.body == b"y"
            assert await ask(address, client_tls(made)) == b"x"
            ours = len(os.listdir("/proc/self/fd")) - descriptors - len(crowd)
            assert ours <= tls_listener.UNPROVEN_MAX + 16
            assert (await living.connection(address)).local == before
        finally:
            for sock in crowd:
                sock.close()
        async with asyncio.timeout(20):
            await until(lambda: len(server.connections) == 1)


class _Talk:
    """A TLS client whose bytes the test sends itself."""

    def __init__(self, made: Authority, address: str) -> None:
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cafile=str(made.trust))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._where = host, int(port)

    async def __aenter__(self) -> _Talk:
        self._reader, self._writer = await asyncio.open_connection(*self._where)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writer.close()

    async def until_done(self, step: Any) -> Any:
        """Sends what the session has to send, a byte at a time."""
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                for byte in self._outgoing.read():
                    self._writer.write(bytes([byte]))
                    await self._writer.drain()
                    await asyncio.sleep(0)
                data = await self._reader.read(1 << 16)
                assert data, "the server closed"
                self._incoming.write(data)

    async def exchange(self, request: bytes) -> bytes:
        await self.until_done(self._session.do_handshake)
        self._session.write(request)
        return bytes(await self.until_done(lambda: self._session.read(1 << 16)))


async def test_r58_a_client_that_sends_byte_by_byte_is_served(made: Authority) -> None:
    async with serving(node_tls(made)) as (_, address), _Talk(made, address) as slow:
        request = encode_frame(RemotingCommand.request(10, body=b"slow"))
        assert (await slow.exchange(request)).endswith(b"slow")


async def test_r58_hellos_beyond_every_limit_end_only_their_connection(made: Authority) -> None:
    """A hello that names 16 MiB, in records of the full length; one of as many records as the
    peer likes, without an end."""
    record = b"\x16\x03\x01\x40\x00"
    pieces = [
        record + b"\x01\xff\xff\xff\x03\x03" + b"x" * (0x4000 - 6) + (record + b"x" * 0x4000) * 40,
        (b"\x16\x03\x01\x00\x01\x01") + b"\x16\x03\x01\x00\x01\x00" * 5_000,
    ]
    async with serving(node_tls(made)) as (server, address):
        for piece in pieces:
            async with asyncio.timeout(20):
                await answer_to(address, piece)
            assert await ask(address, client_tls(made)) == b"x"
        async with asyncio.timeout(20):
            await until(lambda: not server.connections)


async def test_r58_a_port_without_tls_closes_what_begins_with_a_handshake(made: Authority) -> None:
    async with serving(None) as (_, address), dialling(None) as living:
        await living.invoke(address, RemotingCommand.request(10))
        async with asyncio.timeout(20):
            assert await answer_to(address, _client_hello()) == b""
            with pytest.raises(ConnectError):
                await ask(address, client_tls(made))
        await living.invoke(address, RemotingCommand.request(10))
        assert len(living.connections) == 1


async def test_r58_a_client_cannot_renegotiate(made: Authority) -> None:
    """`R` asks s_client for it: TLS 1.2 has it, and a server that takes part pays for it."""
    async with serving(node_tls(made)) as (_, address), dialling(client_tls(made)) as living:
        await living.invoke(address, RemotingCommand.request(10))
        stranger = await asyncio.create_subprocess_exec(
            "openssl", "s_client", "-connect", address, "-tls1_2",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        assert stranger.stdin is not None and stranger.stdout is not None
        said = b""
        async with asyncio.timeout(30):
            while b"Verify return code" not in said:
                said += await stranger.stdout.read(4096)
            stranger.stdin.write(b"R\n")
            said, _ = await stranger.communicate()
        assert b"RENEGOTIATING" in said and b"no renegotiation" in said
        await living.invoke(address, RemotingCommand.request(10))
        assert len(living.connections) == 1


def test_no_half_of_a_certificate_is_ever_in_use(
    made: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are written in place between two readings of a reload: as `cp` does it, without a
    rename."""
    tls = node_tls(made)
    path = Path(tls.config.server_cert_path)
    before = path.read_bytes()
    renewed = made.renew()[0].path.read_bytes()
    path.write_bytes(before)
    read = tls_module.pem_of
    for cut in (0, 100, len(renewed) // 2, len(renewed) - 30, len(renewed)):
        path.write_bytes(before)

        def meanwhile(client: ClientTls, cut: int = cut) -> tuple[bytes, bytes, bytes]:
            path.write_bytes(renewed[:cut])
            return read(client)

        with monkeypatch.context() as writing:
            writing.setattr(tls_module, "pem_of", meanwhile)
            assert not tls.reload() and tls.refusal
        assert tls.pem == (made.trust.read_bytes(), before, before)
    assert tls.reload() and tls.pem[1:] == (renewed, renewed)


async def test_hundreds_of_signals_cost_one_reading_of_the_files(
    made: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = node_tls(made)
    monkeypatch.setattr(followed_files, "SIGNALLED_S", 0.0)
    for _ in range(200):
        tls.reload_soon()
    assert tls.version == 1
    async with asyncio.timeout(20):
        await until(lambda: tls.version > 1)
    assert tls.version == 2
    tls.reload_soon()
    async with asyncio.timeout(20):
        await until(lambda: tls.version > 2)
    tls.reload_soon()
    tls.close()


async def test_certificates_that_are_not_valid_yet_and_empty_trust(
    made: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither serves, at a start or a reload; and none of a client opens a port."""
    tls = node_tls(made, server_need_client_auth="require")
    good = made.issue("admin.pem", ["admin"], []).path
    with monkeypatch.context() as later:
        later.setattr(authority_module, "_EARLIER", -timedelta(days=1))
        early = made.issue("early.pem", ["admin"], HOSTS).path
    config = tls.config
    served, unripe = Path(config.server_cert_path), early.read_bytes()
    kept, trusted = served.read_bytes(), made.trust.read_bytes()  # noqa: ASYNC240
    async with serving(tls) as (_, address):
        with pytest.raises(ConnectError):
            await ask(address, client_tls(made, cert_path=str(early)))
        shown = client_tls(made, cert_path=str(good))
        assert await ask(address, shown) == b"x"
        replace_file(served, unripe)
        assert not tls.reload() and "valid from" in tls.refusal
        with pytest.raises(TlsError, match="valid from"):
            Tls(config, check_certificate)
        replace_file(served, kept)
        for bad in (b"", b"\n", trusted[:200]):
            replace_file(made.trust, bad)
            assert not tls.reload() and tls.refusal
            with pytest.raises(TlsError):
                Tls(config, check_certificate)
            with pytest.raises(TlsError):
                DialTls(shown)
        replace_file(made.trust, trusted)
        assert tls.reload() and await ask(address, shown) == b"x"
