"""Listens on a port that accepts TLS. The first byte of a connection is peeked: 0x16 begins a TLS
handshake, and cannot begin a plain frame (its length would be 369 MB). Then the loop gets the
socket, so a plain connection has no extra layer.

Until a peer has sent its first byte and ended its handshake it is unproven: it has PROVE_S for
that, and there are UNPROVEN_MAX places (R58). Origin: Java HandshakeHandler of NettyRemotingServer.
For Raft, whose sockets a library owns, `TlsBytes` takes and gives bytes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from batonmq.runtime.eviction import Crowd
from batonmq.runtime.sockets import BACKLOG, listening_sockets, plain_address, without_delay
from batonmq.runtime.tls import Names, PortTls, node_names, refused_names, tls_reason

log = logging.getLogger(__name__)

PROVE_S: Final = 5.0
UNPROVEN_MAX: Final = 1_024
TLS_FIRST: Final = b"\x16"
_AT_ONCE: Final = 16
_SHORT_S: Final = 1.0

Factory = Callable[[], asyncio.BaseProtocol]


class Listening(Protocol):
    """The part of `asyncio.Server` that is used."""

    @property
    def sockets(self) -> Any: ...
    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


async def listen(
    factory: Factory,
    tls: PortTls | None,
    *,
    name: str,
    host: str = "",
    port: int = 0,
    held: socket.socket | None = None,
    unproven_max: int | None = None,
) -> Listening:
    """Listens on `host` and `port`, or on the socket `held`. `unproven_max`: places for unproven
    peers; None: UNPROVEN_MAX. Raises OSError."""
    loop = asyncio.get_running_loop()
    if tls is None or tls.mode == "disabled":
        where: dict[str, Any] = {"host": host, "port": port} if held is None else {"sock": held}
        return await loop.create_server(factory, backlog=BACKLOG, **where)
    sockets = [held] if held is not None else listening_sockets(host, port)
    return TlsListener(factory, tls, sockets, name, unproven_max or UNPROVEN_MAX)


class TlsListener:
    """Accepts from `sockets`, which it owns."""

    def __init__(
        self,
        factory: Factory,
        tls: PortTls,
        sockets: Sequence[socket.socket],
        name: str,
        unproven_max: int,
    ) -> None:
        self.sockets = list(sockets)
        self._factory = factory
        self._tls = tls
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._unproven: Crowd[_Arrival] = Crowd(unproven_max)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        for sock in self.sockets:
            sock.setblocking(False)
            self._accept_from(sock)

    def _accept_from(self, sock: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no descriptor is free
                log.warning("accept_paused endpoint=%s reason=%s", self._name, error.strerror)
                self._loop.remove_reader(sock.fileno())
                self._loop.call_later(_SHORT_S, self._accept_from, sock)
                return
            accepted.setblocking(False)
            without_delay(accepted)
            self._arrived(_Arrival(accepted, plain_address(*address[:2])))

    def _arrived(self, arrival: _Arrival) -> None:
        crowded_out = self._unproven.add(arrival, arrival.peer)
        if crowded_out is not None:
            crowded_out.end("too many connections that are not proven")
        task = self._loop.create_task(self._admit(arrival))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, arrival: _Arrival) -> None:
        sock = arrival.sock
        too_late = f"no TLS handshake within {PROVE_S:g} s"
        timer = self._loop.call_later(PROVE_S, arrival.end, too_late)
        owned = False
        try:
            first = await arrival.first_byte(self._loop)
            if not first or arrival.ended:
                # A health check that only connects is not logged.
                if arrival.ended and arrival.ended != too_late:
                    self._refuse(arrival, arrival.ended)
                return
            if first == TLS_FIRST:
                owned = True
                await self._loop.connect_accepted_socket(
                    self._factory, sock, ssl=self._tls.context(), ssl_handshake_timeout=PROVE_S
                )
            elif self._tls.mode == "permissive":
                owned = True
                await self._loop.connect_accepted_socket(self._factory, sock)
            else:
                self._refuse(arrival, "it speaks without TLS, and this port takes TLS only")
        except OSError as error:  # ssl.SSLError among them
            self._refuse(arrival, arrival.ended or tls_reason(error))
        finally:
            timer.cancel()
            self._unproven.remove(arrival)
            if not owned:
                sock.close()

    def _refuse(self, arrival: _Arrival, reason: str) -> None:
        if not self._closed:
            text = "connection_refused endpoint=%s peer=%s reason=%r"
            log.warning(text, self._name, arrival.peer, reason)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for sock in self.sockets:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        while (arrival := self._unproven.take_one()) is not None:
            arrival.end("the server is closing")

    async def wait_closed(self) -> None:
        if self._tasks:
            await asyncio.wait(set(self._tasks))


class _Arrival:
    """An unproven connection. `ended`: why it was given up."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.ended = ""

    def end(self, reason: str) -> None:
        """Shuts the socket down, which wakes its reader; the owner still closes it."""
        self.ended = self.ended or reason
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is gone

    async def first_byte(self, loop: asyncio.AbstractEventLoop) -> bytes:
        """Peeks the first byte; empty at the end of the connection. Raises OSError."""
        while True:
            try:
                return self.sock.recv(1, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                pass
            readable = loop.create_future()
            loop.add_reader(self.sock.fileno(), _wake, readable)
            try:
                await readable
            finally:
                loop.remove_reader(self.sock.fileno())


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_PIECE: Final = 1 << 16
_HELLO: Final = b"\x16\x03"


def is_hello(first: bytes) -> bool | None:
    """Whether a connection begins with a TLS handshake; None: more bytes are needed."""
    if len(first) < 3 and _HELLO.startswith(first[:2]):
        return None
    return first.startswith(_HELLO) and 1 <= first[2] <= 4


class TlsBytes:
    """TLS for a connection whose socket a library owns: bytes in, bytes out. Not thread-safe."""

    def __init__(
        self,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        server_hostname: str | None = None,
        admits: Callable[[Names], bool] = lambda names: True,
    ) -> None:
        self._admits = admits
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(
            self._incoming, self._outgoing, server_side, server_hostname
        )
        self._ready = False
        self._early = b""
        if not server_side:
            self.feed(b"")

    def feed(self, data: bytes) -> bytes:
        """Takes received bytes; returns decrypted ones. Raises ssl.SSLError; then `to_send` must
        still be sent."""
        self._incoming.write(data)
        plain = []
        try:
            if not self._ready:
                self._session.do_handshake()
                names = node_names(self._session.getpeercert())
                if not self._admits(names):
                    raise ssl.SSLError(1, refused_names(names))
                self._ready = True
                early, self._early = self._early, b""
                self.write(early)
            while piece := self._session.read(_PIECE):
                plain.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return b"".join(plain)

    def write(self, plain: bytes) -> None:
        """Encrypts `data`; before the end of the handshake it is kept until then."""
        if not self._ready:
            self._early += plain
        elif plain:
            self._session.write(plain)

    def to_send(self) -> bytes:
        return self._outgoing.read()
