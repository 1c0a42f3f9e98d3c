"""HA connections of both modes: SlaveLink and MasterLink are the two ends."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from batonmq.ha.proof import STRANGERS_MAX
from batonmq.runtime.eviction import Crowd
from batonmq.runtime.sockets import address_of, dialled_place, limit_unacknowledged_of, listening_as
from batonmq.runtime.tls import PortTls, node_names, refused_names, tls_reason
from batonmq.runtime.tls_listener import Listening, listen

log = logging.getLogger(__name__)

UNACKNOWLEDGED_MS: Final = 2_500
"""TCP_USER_TIMEOUT of HA connections; a live kernel acknowledges within milliseconds."""
WAIT_S: Final = 0.5


class OpenLinks:
    """The listener, and the number of open connections: a transport needs the loop until it is
    closed. `tls`: for outgoing connections; None: without TLS."""

    def __init__(self) -> None:
        self.tls: PortTls | None = None
        self._server: Listening | None = None
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    def made(self) -> None:
        self._open += 1
        self._none.clear()

    def refuses(self, transport: asyncio.Transport) -> bool:
        """Whether the peer's certificate belongs to no replica of this group; logs it."""
        if self.tls is None:
            return False
        names = node_names(transport.get_extra_info("peercert"))
        if self.tls.admits(names):
            return False
        peer = address_of(transport, "peername")
        log.warning("ha_refused peer=%s reason=%r", peer, refused_names(names))
        return True

    def lost(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._none.set()

    async def listen(
        self, new_link: Callable[[], asyncio.Protocol], host: str, port: int, tls: PortTls | None
    ) -> int:
        """Opens haListenPort (0: any free one); returns the port. `tls`: for this port, and for
        connections to a master."""
        self.tls = tls
        with listening_as("HA", port):
            self._server = await listen(
                new_link, tls, name="ha", host=host, port=port, unproven_max=STRANGERS_MAX
            )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening, and waits until the connections that were ended are closed."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
        await self._none.wait()


R = TypeVar("R")


class WaitingLinks(Generic[R]):
    """Connections of slaves to a replica that is not master yet, oldest first. A role change
    reaches all replicas at once, so slaves often connect before the winner's epoch is durable. They
    wait here without an answer, at most half a second: a refused slave would come back 20 ms later
    and delay the new master's first ack (R9). At most STRANGERS_MAX wait (R58)."""

    def __init__(self) -> None:
        self._places: Crowd[SlaveLink[R]] = Crowd(STRANGERS_MAX)
        self._timers: dict[SlaveLink[R], asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, link: SlaveLink[R]) -> None:
        crowded_out = self._places.add(link, link.address)
        if crowded_out is not None:
            self._close(crowded_out)
        loop = asyncio.get_running_loop()
        self._timers[link] = loop.call_later(WAIT_S, self._close, link)

    def remove(self, link: SlaveLink[R]) -> None:
        """Removes a link; without effect if it does not wait."""
        self._places.remove(link)
        timer = self._timers.pop(link, None)
        if timer is not None:
            timer.cancel()

    def take_all(self) -> list[SlaveLink[R]]:
        links = list(self._timers)
        for link in links:
            self.remove(link)
        return links

    def end_all(self) -> None:
        for link in self.take_all():
            link.end()

    def _close(self, link: SlaveLink[R]) -> None:
        self.remove(link)
        link.end()


class ByteRate:
    """Bytes in the last full second, from a growing total."""

    def __init__(self) -> None:
        self._since_ms = 0
        self._total = 0
        self._per_second = 0

    def sample(self, total: int, now_ms: int) -> int:
        """Takes the present total; returns bytes per second."""
        elapsed_ms = now_ms - self._since_ms
        if elapsed_ms >= 1_000:
            self._per_second = (total - self._total) * 1_000 // elapsed_ms
            self._since_ms, self._total = now_ms, total
        return self._per_second


class MasterSide(Protocol[R]):
    """Serves slaves' connections: the shell of a mastership."""

    def attach(self, link: SlaveLink[R]) -> None: ...

    def received(self, link: SlaveLink[R], data: bytes) -> None: ...

    def lost(self, link: SlaveLink[R]) -> None: ...


class SlaveSide(Protocol[R]):
    """Gets the events of the connection to a master."""

    def made(self, link: MasterLink[R]) -> None: ...

    def received(self, link: MasterLink[R], data: memoryview) -> None: ...

    def lost(self, link: MasterLink[R], reason: str) -> None: ...


def is_certified(transport: asyncio.BaseTransport | None) -> bool:
    """Whether the peer has shown a certificate that was checked."""
    context = None if transport is None else transport.get_extra_info("sslcontext")
    return context is not None and context.verify_mode is ssl.CERT_REQUIRED


class SlaveLink(asyncio.Protocol, Generic[R]):
    """One accepted HA connection. `attach` gives it to the master's shell (`adopt`), or lets it
    wait for one; until then its bytes are kept."""

    def __init__(
        self,
        connection_id: int,
        attach: Callable[[SlaveLink[R]], None],
        left: Callable[[SlaveLink[R]], None],
        open_links: OpenLinks,
        reader: R,
        early_max: int,
    ) -> None:
        """`early_max`: the most bytes before `adopt`."""
        self.connection_id = connection_id
        self._open_links = open_links
        self.address = "?"
        self.rate = ByteRate()
        self.reader = reader
        self._early_max = early_max
        self.transport: asyncio.Transport | None = None
        self._attach = attach
        self._left = left
        self._shell: MasterSide[R] | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._open_links.made()
        self.address = address_of(transport, "peername")
        self.transport = transport
        limit_unacknowledged_of(transport, UNACKNOWLEDGED_MS)
        if self._open_links.refuses(transport):
            transport.abort()
            return
        self._attach(self)

    @property
    def is_certified(self) -> bool:
        return is_certified(self.transport)

    def adopt(self, shell: MasterSide[R]) -> None:
        """This replica is master: `shell` serves the connection, beginning with the kept bytes."""
        self._shell = shell
        shell.attach(self)
        # The handshake came while it waited: no further bytes would call the shell.
        early, self._early = self._early, b""
        if early:
            shell.received(self, early)

    def data_received(self, data: bytes) -> None:
        if self._shell is not None:
            self._shell.received(self, data)
            return
        # A slave waits after its handshake, so more bytes than that are not a handshake.
        self._early += data
        if len(self._early) > self._early_max:
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_links.lost()
        self._left(self)  # if it still waited for a mastership
        shell, self._shell, self.transport = self._shell, None, None
        if shell is not None:
            shell.lost(self)

    def end(self) -> None:
        """Closes the socket and releases all views of the log. No event follows."""
        transport, self.transport, self._shell = self.transport, None, None
        if transport is not None:
            transport.abort()

    def end_after_flush(self) -> None:
        """Closes once everything sent is delivered; `end` may interrupt that."""
        self._shell = None
        if self.transport is not None:
            self.transport.close()


class MasterLink(asyncio.BufferedProtocol, Generic[R]):
    """The connection to the master. All received bytes are handled before the next read."""

    def __init__(
        self, shell: SlaveSide[R], buffer: memoryview, open_links: OpenLinks, reader: R
    ) -> None:
        self._open_links = open_links
        self._counted = False
        self.reader = reader
        self.transport: asyncio.Transport | None = None
        self._shell: SlaveSide[R] | None = shell
        self._buffer = buffer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._open_links.made()
        self._counted = True
        self.transport = transport
        limit_unacknowledged_of(transport, UNACKNOWLEDGED_MS)
        # None: this end was ended while it connected.
        if self._shell is None or self._open_links.refuses(transport):
            transport.abort()
        else:
            self._shell.made(self)

    @property
    def is_certified(self) -> bool:
        return is_certified(self.transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._shell is not None:
            self._shell.received(self, self._buffer[:nbytes])

    def connection_lost(self, exc: Exception | None) -> None:
        self._count_lost()
        shell, self._shell, self.transport = self._shell, None, None
        if shell is not None:
            shell.lost(self, str(exc) if exc is not None else "closed by the master")

    def end(self) -> None:
        transport, self.transport, self._shell = self.transport, None, None
        if transport is not None:
            transport.abort()

    async def dial(self, loop: asyncio.AbstractEventLoop, address: str) -> str:
        """Connects to `host:port`; why that failed, "" if it did not."""
        tls = self._open_links.tls
        try:
            host, port = dialled_place(address)
            await loop.create_connection(
                lambda: self, host, port, ssl=tls.dials if tls is not None else None
            )
        except asyncio.CancelledError:
            self._dial_cancelled()
            raise
        except (OSError, ValueError) as error:
            refused = isinstance(error, ssl.SSLError)
            level = logging.WARNING if refused else logging.DEBUG
            reason = tls_reason(error)
            log.log(level, "ha_dial_failed address=%s reason=%s", address, reason)
            return reason or "no answer"
        return ""

    def _dial_cancelled(self) -> None:
        """Connecting was cancelled, perhaps after it succeeded. uvloop then closes the transport
        without the `connection_lost` that `OpenLinks` waits for."""
        self.end()
        self._count_lost()

    def _count_lost(self) -> None:
        if self._counted:
            self._counted = False
            self._open_links.lost()


class LinkTasks:
    """Tasks of one connection of a slave: connecting, and questions about its master."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # Not within another coroutine: cancelled before its first step, that would leave `work`
        # open, and Python complains on stderr.
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """The connection ends: cancels its tasks, except for the calling one."""
        # A proof that fails hangs up by itself, and continues after that.
        running = asyncio.current_task() if self._tasks else None
        for task in self._tasks:
            if task is not running:
                task.cancel()
