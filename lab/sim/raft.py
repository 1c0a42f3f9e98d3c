"""Raft ports of the controllers over the simulated network.

The node, its tick thread, journal and snapshots are the real ones (`controller.raft`), and so are
pysyncobj's core and `MendedTransport`, which judges the messages. Replaced are sockets, poller and
the greeting of connections. The side with the greater address dials, as in pysyncobj.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pysyncobj.pickle
from pysyncobj.node import Node, TCPNode
from pysyncobj.tcp_connection import CONNECTION_STATE
from pysyncobj.transport import Transport

from batonmq.controller.raft.messages import MendedTransport
from batonmq.runtime.clock import boot_s
from lab.sim.loop import SimLoop, SimProcess, current_process
from lab.sim.network import SimTransport
from lab.sim.threads import Event, current_thread

_LENGTH = struct.Struct(">I")
_UNACKNOWLEDGED_S = 2.0
_RETRY_S = 0.075


class TickPoller:
    """Where the tick thread waits: for a time, a message, or a command."""

    def __init__(self) -> None:
        self._inbox: deque[Callable[[], None]] = deque()
        self._thread: Any = None
        self._notified = False

    def subscribe(self, *_: object) -> None:
        """There are no descriptors."""

    unsubscribe = subscribe

    def put(self, handle: Callable[[], None]) -> None:
        """Has it called in the tick thread."""
        self._inbox.append(handle)
        self.notify()

    def notify(self) -> None:
        self._notified = True
        if self._thread is not None:
            self._thread.wake()

    def poll(self, timeout: float) -> None:
        self._thread = thread = current_thread()
        assert thread is not None
        if not self._notified:
            thread.pause(timeout)
        self._notified = False
        while self._inbox:
            self._inbox.popleft()()


class Notifier:
    """As pysyncobj's PipeNotifier. `RaftLog.close` closes the two descriptors."""

    def __init__(self, poller: TickPoller) -> None:
        self._poller = poller
        self._PipeNotifier__pipeR, self._PipeNotifier__pipeW = os.pipe()
        current_process().on_kill.append(self._close)

    def _close(self) -> None:
        for fd in (self._PipeNotifier__pipeR, self._PipeNotifier__pipeW):
            os.close(fd)

    def notify(self) -> None:
        self._poller.notify()


class ThreadTime:
    """As the module `time`, for the tick thread."""

    @staticmethod
    def sleep(seconds: float) -> None:
        thread = current_thread()
        assert thread is not None
        thread.pause(seconds)


class RaftStream(asyncio.Protocol):
    """One end of a connection. `node` is the peer, None until it has said who it is."""

    def __init__(self, owner: SimRaftTransport, node: TCPNode | None) -> None:
        self._owner = owner
        self.node = node
        self._buffer = bytearray()
        self._transport: SimTransport | None = None

    @property
    def state(self) -> int:
        up = self._transport is not None and not self._transport.ended and self.node is not None
        state: int = CONNECTION_STATE.CONNECTED if up else CONNECTION_STATE.DISCONNECTED
        return state

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.give_up_s = _UNACKNOWLEDGED_S
        if self.node is not None:
            self.send(self._owner.own_address)
            self._owner.poller.put(lambda: self._owner.connected(self))

    def send(self, message: Any) -> None:
        if self._transport is not None:
            if self.node is not None:
                self._owner.watch(self._owner.own_address, self.node.id, message)
            data = pysyncobj.pickle.dumps(message)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            message = pysyncobj.pickle.loads(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            self._owner.poller.put(lambda each=message: self._received(each))  # type: ignore[misc]

    def _received(self, message: Any) -> None:
        if self.node is None:
            self.node = TCPNode(message)
            self._owner.connected(self)
        else:
            self._owner.received(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.poller.put(lambda: self._owner.disconnected(self))

    def disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()


class SimRaftTransport(MendedTransport):
    """Takes the place of `GuardedTransport`; its methods run in the tick thread."""

    def __init__(
        self,
        core: Any,
        own: TCPNode,
        others: Iterable[TCPNode],
        *,
        membership: object,
        problems: object,
        digests: Any = None,
        tls: object = None,
    ) -> None:
        Transport.__init__(self, core, own, others)
        self.digests = digests
        self.own_address = own.address
        self.poller: TickPoller = core._poller
        self._syncObj = core
        self._selfNode = own
        self._nodes = set(others)
        self._connections: dict[Node, RaftStream] = {}
        self._ready = True
        self._send_random_sleep_duration = 0
        self._bindOverEvent = Event()
        self._bindOverEvent.set()
        self._dialling: dict[TCPNode, float] = {}
        self._process: SimProcess = current_process()
        self._loop: SimLoop = self._process.loop
        self.watch: Callable[[str, str, Any], None] = self._loop.network.raft_watch
        host, _, port = own.address.rpartition(":")
        self._server = self._loop.network.listen(
            self._process, lambda: RaftStream(self, None), host, int(port)
        )
        core.addOnTickCallback(self._onTick)

    @property
    def is_apart(self) -> bool:
        """As that of `GuardedTransport`."""
        return len(self._connections) < len(self._nodes)

    def _maybeBind(self) -> None:
        """It is bound from the start."""

    def _connectIfNecessary(self) -> None:
        for node in sorted(self._nodes, key=lambda node: node.id):
            if self.own_address <= node.address or node in self._connections:
                continue
            now_s = boot_s()
            if now_s >= self._dialling.get(node, 0.0):
                # One dial at a time: its end says when the next one may begin.
                self._dialling[node] = now_s + 60.0
                self._process.spawn(self._dial(node))

    async def _dial(self, node: TCPNode) -> None:
        host, _, port = node.address.rpartition(":")
        try:
            async with asyncio.timeout(1.0):
                await self._loop.create_connection(lambda: RaftStream(self, node), host, int(port))
        except (OSError, TimeoutError):
            self._dialling[node] = boot_s() + _RETRY_S

    def connected(self, stream: RaftStream) -> None:
        node = stream.node
        if node is None or stream.state != CONNECTION_STATE.CONNECTED:
            return
        before = self._connections.get(node)
        self._connections[node] = stream
        self._dialling.pop(node, None)
        if before is not None and before is not stream:
            before.disconnect()
        self._onNodeConnected(node)

    def received(self, stream: RaftStream, message: Any) -> None:
        if self._connections.get(stream.node) is stream:
            self._onMessageReceived(stream.node, message)

    def disconnected(self, stream: RaftStream) -> None:
        node = stream.node
        if node is not None:
            self._dialling[node] = boot_s() + _RETRY_S
        if self._connections.get(node) is not stream:
            return
        del self._connections[node]
        was_connected = self._syncObj.isNodeConnected(node)
        self._onNodeDisconnected(node)
        if was_connected:
            self.connection_broke(node)

    def destroy(self) -> None:
        self._server.close()
        for stream in list(self._connections.values()):
            stream.disconnect()
