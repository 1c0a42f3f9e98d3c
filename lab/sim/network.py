"""The network of the simulation: ordered streams with delays, cuts, resets and deaths.

A blocked pair of hosts loses nothing, as with TCP: bytes wait until the block ends, or until the
time-out that the sender set for unacknowledged bytes. A stream may deliver its bytes in any pieces.
The streams of a killed process end, unless its host vanished with it.
"""

import asyncio
import errno
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from lab.sim.loop import SimLoop, SimProcess, at_world

_END = object()
_CONNECT_TRIES_S = 3.0


class SimNetwork:
    """`rng` decides about delays; hosts are named by their addresses."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.blocked: set[frozenset[str]] = set()
        self.one_way: set[tuple[str, str]] = set()  # (from, to): bytes this way do not arrive
        self.slow_links: dict[frozenset[str], float] = {}  # seconds more for each message
        self.listeners: dict[tuple[str, int], tuple[SimProcess, Callable[[], Any]]] = {}
        self.endpoints: dict[str, tuple[SimProcess, Any]] = {}  # by gRPC address
        self.transports: list[SimTransport] = []
        self.streams: list[Any] = []  # of gRPC
        self.waiting: list[Pipe] = []
        self._more = asyncio.Event()
        self.slow = False
        self.muted = False
        #: Gets sender, receiver and each message of Raft before it leaves.
        self.raft_watch: Callable[[str, str, Any], None] = lambda *_: None
        self._next_port = 40_000
        loop.network = self

    def delay_s(self) -> float:
        roll = self.rng.random()
        if roll < (0.2 if self.slow else 0.01):
            return self.rng.uniform(0.005, 0.08)
        return 0.0001 + 0.0014 * self.rng.random()

    def delay_between_s(self, one: str, other: str) -> float:
        more = self.slow_links.get(frozenset((one, other)), 0.0) if self.slow_links else 0.0
        return self.delay_s() + more

    def is_blocked(self, one: str, other: str) -> bool:
        """Whether what `one` sends does not reach `other`."""
        if self.one_way and (one, other) in self.one_way:
            return True
        return bool(self.blocked) and frozenset((one, other)) in self.blocked

    def is_unreachable(self, one: str, other: str) -> bool:
        """Whether `one` cannot connect to `other`, or receives no answer."""
        return self.is_blocked(one, other) or self.is_blocked(other, one)

    def block(self, one: str, other: str) -> None:
        self.blocked.add(frozenset((one, other)))

    def heal_link(self, cut: frozenset[str] | tuple[str, str]) -> None:
        """Ends one of `blocked`, or of `one_way`."""
        if isinstance(cut, tuple):
            self.one_way.discard(cut)
        else:
            self.blocked.discard(cut)
        self._healed()

    def heal(self) -> None:
        self.blocked.clear()
        self.one_way.clear()
        self.slow_links.clear()
        self._healed()

    def _healed(self) -> None:
        waiting, self.waiting = self.waiting, []
        for pipe in waiting:
            pipe.pump()
        self.more_is_reachable()

    def more_is_reachable(self) -> None:
        """A link was healed, or a server listens again."""
        self._more.set()
        self._more = asyncio.Event()

    async def until(self, is_reachable: Callable[[], bool]) -> None:
        while not is_reachable():
            await self._more.wait()

    def reset_one(self) -> None:
        """Some connection breaks, as by a proxy."""
        self.transports = [t for t in self.transports if not t.ended and not t.process.dead]
        if self.transports:
            transport = self.rng.choice(self.transports)
            for end in (transport, transport.peer):
                if not end.process.dead:
                    end.process.post(end.break_off, ConnectionResetError(errno.ECONNRESET, "reset"))

    # Streams.

    def listen(self, process: SimProcess, factory: Callable[[], Any], host: str, port: int) -> Any:
        key = (process.host, port)
        if key in self.listeners:
            raise OSError(errno.EADDRINUSE, f"{key} is taken")
        self.listeners[key] = (process, factory)
        process.on_kill.append(lambda: self.unlisten(key, process))
        return _Server(self, key, process)

    def is_up(self, host: str) -> bool:
        return any(key[0] == host for key in self.listeners)

    def unlisten(self, key: tuple[str, int], process: SimProcess) -> None:
        if self.listeners.get(key, (None,))[0] is process:
            del self.listeners[key]

    async def connect(
        self, process: SimProcess, factory: Callable[[], Any], host: str, port: int
    ) -> Any:
        await asyncio.sleep(self.delay_between_s(process.host, host))
        try:
            async with asyncio.timeout(_CONNECT_TRIES_S):
                await self.until(lambda: not self.is_unreachable(process.host, host))
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, "timed out") from None
        listener = self.listeners.get((host, port))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{host}:{port}")
        server, make = listener
        protocol = factory()
        self._next_port += 1
        near = SimTransport(self, process, (server.host, port), (process.host, self._next_port))
        far = SimTransport(self, server, near.address, near.peer_address)
        near.peer, far.peer = far, near
        near.out = Pipe(self, process.host, server, far.receive)
        far.out = Pipe(self, server.host, process, near.receive)
        near.out.sender, far.out.sender = near, far
        near.protocol = protocol
        self.transports.append(near)
        server.post(far.accepted, make)
        self.loop.call_soon(protocol.connection_made, near)
        await asyncio.sleep(0)  # as in asyncio, `connection_made` was called when this returns
        return near, protocol


class _Server:
    def __init__(self, network: SimNetwork, key: tuple[str, int], process: SimProcess) -> None:
        self._network, self._key, self._process = network, key, process
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self._key

    def close(self) -> None:
        self._network.unlisten(self._key, self._process)

    async def wait_closed(self) -> None:
        pass


class Pipe:
    """One direction between two processes, in order."""

    def __init__(
        self, network: SimNetwork, source: str, target: SimProcess, deliver: Callable[[Any], None]
    ) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._deliver = deliver
        self._queue: deque[tuple[float, Any]] = deque()
        self._armed = False
        self._watched = False
        self.sender: SimTransport | None = None

    def send(self, item: Any) -> None:
        network = self._network
        if network.muted:
            return
        target = self._target
        delay_s = network.delay_between_s(self._source, target.host)
        self._queue.append((network.loop.now_s + delay_s, item))
        if not self._armed or target.dead:
            self.pump()

    def drop_unsent(self) -> None:
        self._queue.clear()

    def pump(self) -> None:
        target = self._target
        if not self._queue or (self._armed and not target.dead):
            return
        network = self._network
        if target.dead:
            if target.vanished:
                self._watch()
            return
        if network.is_blocked(self._source, target.host):
            network.waiting.append(self)
            self._watch()
            return
        self._armed = True
        target.post_at(max(self._queue[0][0], network.loop.now_s), self._fire)

    def _watch(self) -> None:
        """Bytes wait: the sender's kernel gives up some time later."""
        sender = self.sender
        if sender is None or self._watched or not sender.give_up_s:
            return
        self._watched = True
        loop = self._network.loop
        at_world(loop, loop.time() + sender.give_up_s, self._give_up)

    def _give_up(self) -> None:
        self._watched = False
        sender, target = self.sender, self._target
        if sender is None or sender.ended or sender.process.dead or not self._queue:
            return
        waited = self._network.loop.time() - self._queue[0][0]
        if waited >= sender.give_up_s * 0.9:
            sender.process.post(sender.break_off, TimeoutError(errno.ETIMEDOUT, "timed out"))
        elif target.vanished or self._network.is_blocked(self._source, target.host):
            self._watch()

    def _fire(self) -> None:
        """In the target, which may hang until much later than it was due, or end in the middle."""
        self._armed = False
        network, target, queue = self._network, self._target, self._queue
        try:
            now_s = network.loop.now_s
            while queue and queue[0][0] <= now_s and not target.dead:
                if network.is_blocked(self._source, target.host):
                    break
                self._deliver(queue.popleft()[1])
        finally:
            self.pump()


class SimTransport(asyncio.Transport):
    """One end of a stream. Bytes are taken at `write`, as a kernel with room takes them."""

    def __init__(
        self,
        network: SimNetwork,
        process: SimProcess,
        peer_address: tuple[str, int],
        address: tuple[str, int],
    ) -> None:
        super().__init__()
        self._network = network
        self.process = process
        self.peer_address = peer_address
        self.address = address
        self.peer: SimTransport
        self.out: Pipe
        self.protocol: Any = None
        self.ended = False
        self.give_up_s = 0.0  # how long bytes may be unacknowledged; 0: without limit
        self._unread: deque[Any] | None = None  # while reading is paused
        process.on_kill.append(self._killed)

    def accepted(self, make: Callable[[], Any]) -> None:
        self.protocol = make()
        self.protocol.connection_made(self)

    def _killed(self) -> None:
        if not self.ended:
            self.ended = True
            if not self.process.vanished:
                self.out.send(_END)

    def write(self, data: Any) -> None:
        if not self.ended:
            self.out.send(bytes(data))

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self.out.send(_END)
            self._network.loop.call_soon(self.protocol.connection_lost, None)

    def break_off(self, error: OSError) -> None:
        """The connection broke; what was not delivered is lost."""
        if not self.ended:
            self.ended = True
            self.out.drop_unsent()
            self.out.send(_END)
            if self.protocol is not None:
                self.protocol.connection_lost(error)

    def probe(self, every_s: float, silent_s: float = 0.0) -> None:
        """Keep-alive: a host that came back without this connection resets it; one that does not
        answer for `give_up_s` counts as gone."""
        loop = self._network.loop

        def ask() -> None:
            network, host = self._network, self.peer_address[0]
            if self.ended or self.process.dead:
                return
            is_cut = network.is_unreachable(self.process.host, host)
            if is_cut or (self.peer.process.vanished and not network.is_up(host)):
                if silent_s + every_s < self.give_up_s:
                    self.probe(every_s, silent_s + every_s)
                else:
                    self.process.post(self.break_off, TimeoutError(errno.ETIMEDOUT, "timed out"))
            elif self.peer.process.vanished:
                self.process.post(self.break_off, ConnectionResetError(errno.ECONNRESET, "reset"))
            else:
                self.probe(every_s)

        at_world(loop, loop.time() + every_s, ask)

    def break_unseen(self) -> None:
        """The connection broke, and the other end hears nothing of it."""
        if not self.ended:
            self.ended = True
            self.out.drop_unsent()
            self.protocol.connection_lost(ConnectionResetError(errno.ECONNRESET, "reset"))

    def is_closing(self) -> bool:
        return self.ended

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername":
            return self.peer_address
        if name == "sockname":
            return self.address
        return _Socket(self) if name == "socket" else default

    def pause_reading(self) -> None:
        if self._unread is None:
            self._unread = deque()

    def resume_reading(self) -> None:
        unread, self._unread = self._unread, None
        for data in unread or ():
            self._network.loop.call_soon(self.receive, data)

    def receive(self, data: Any) -> None:
        if self.ended:
            return
        if self._unread is not None:
            self._unread.append(data)
            return
        if data is _END:
            self.ended = True
            self.protocol.connection_lost(None)
            return
        # A stream keeps no borders of messages: readers must put frames together.
        cut = len(data)
        if self._network.rng.random() < 0.2:
            cut = self._network.rng.randint(1, len(data))
        for piece in (data[:cut], data[cut:]):
            if piece and not self.ended:
                self._feed(piece)

    def _feed(self, piece: bytes) -> None:
        if not isinstance(self.protocol, asyncio.BufferedProtocol):
            self.protocol.data_received(piece)
            return
        while piece and not self.ended:
            buffer: Any = self.protocol.get_buffer(-1)
            count = min(len(buffer), len(piece))
            buffer[:count] = piece[:count]
            self.protocol.buffer_updated(count)
            piece = piece[count:]


class _Socket:
    """What the servers ask of a socket: the time-out for unacknowledged bytes, probes of an idle
    peer, its descriptor."""

    family = socket.AF_INET

    def __init__(self, transport: SimTransport) -> None:
        self._transport = transport

    def fileno(self) -> int:
        return -1

    def setsockopt(self, level: int, option: int, value: int) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            self._transport.give_up_s = value / 1000
        elif (level, option) == (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL):
            self._transport.probe(value)
