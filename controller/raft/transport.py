"""Who may connect to the Raft port, and what takes pysyncobj's place under it.

- *Members only.* The stock transport takes utility commands that change the cluster, read-only
  nodes, frames of any length and anything that unpickles. Here a connection begins with a greeting
  (see `greeting`): it must be under the password if there is one, name a configured peer, the same
  cluster and the same list of members. Both sides check, and both say why they refuse.
- *Strangers* have two seconds and one short frame. They hold at most `_STRANGERS_MAX` connections;
  the oldest goes for a new one.
- *The side with the greater address dials*, as in pysyncobj; a dial that takes longer than a second
  is begun anew, since TCP would try ever more seldom while a link is cut.

The hooks stand on pysyncobj 0.3.17's own names; `tests/controller/test_raft_node.py` pins both.
"""

import functools
import logging
import os
import pickle
import time
from typing import Any, Final

import pysyncobj.pickle
import pysyncobj.syncobj
import pysyncobj.tcp_connection
import pysyncobj.tcp_server
import pysyncobj.transport
from pysyncobj.node import Node
from pysyncobj.tcp_connection import CONNECTION_STATE

from controller.raft import password, resolver
from controller.raft.connection import GuardedConnection
from controller.raft.digest_watch import DigestWatch
from controller.raft.greeting import Greeting, Membership
from controller.raft.messages import MendedTransport
from controller.raft.plain_pickle import restricted_loads
from controller.raft.troubles import Troubles

__all__ = ["GuardedTransport", "install", "restricted_loads"]

log = logging.getLogger(__name__)

_STRANGER_S: Final = 2.0
_DIAL_S: Final = 1.0
_STRANGERS_MAX: Final = 64
_BACKLOG: Final = 128
_APART_S: Final = 2.0
"""A member that is away for so long is called a trouble."""


def boot_s() -> float:
    """CLOCK_BOOTTIME: after a machine slept, a leader's time is over as for everybody else (R8)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _refuse_load(file: object) -> Any:
    raise pickle.UnpicklingError("snapshots are not pickles here")


def _configured_journal(journal: object) -> object:
    return journal


def _configured_snapshots(_name: object, _batch: int, _fork: bool, snapshots: Any, *_: Any) -> Any:
    return snapshots


def install() -> None:
    """Puts unpickler, connections, resolver, clock, journal, snapshots in place. Idempotent.

    From then on the settings `journalFile` and `serializer` are the objects themselves, opened by
    the node that they belong to: several nodes may live in one process.
    """
    pysyncobj.pickle.loads = restricted_loads
    pysyncobj.pickle.load = _refuse_load
    resolver.install()
    pysyncobj.syncobj.createJournal = _configured_journal
    pysyncobj.syncobj.Serializer = _configured_snapshots
    pysyncobj.syncobj.getEncryptor = password.encryptor
    pysyncobj.syncobj.HAS_CRYPTO = True
    pysyncobj.transport.TcpConnection = GuardedConnection
    pysyncobj.tcp_server.TcpConnection = GuardedConnection
    for module in (pysyncobj.syncobj, pysyncobj.transport, pysyncobj.tcp_connection):
        module.monotonicTime = boot_s


class GuardedTransport(MendedTransport):
    """pysyncobj's TCP transport for a fixed set of members."""

    def __init__(
        self,
        core: Any,
        self_node: Node,
        other_nodes: set[Node],
        *,
        membership: Membership,
        troubles: Troubles,
        digests: DigestWatch | None = None,
    ) -> None:
        self.digests = digests
        self._membership = membership
        self._troubles = troubles
        self._nonces: dict[GuardedConnection, str] = {}
        self._greeted: dict[GuardedConnection, Greeting] = {}
        self._apart_since: dict[Node, float] = dict.fromkeys(other_nodes, boot_s())
        super().__init__(core, self_node, other_nodes)

    # Connections, dialled and taken.

    def _maybeBind(self) -> None:
        was_ready = self._ready
        super()._maybeBind()
        if self._ready and not was_ready:
            # pysyncobj queues five: strangers could keep a member waiting for seconds.
            self._server._TcpServer__socket.listen(_BACKLOG)

    def addNode(self, node: Node) -> None:
        super().addNode(node)
        dialled = self._connections.get(node)
        if dialled is not None:
            dialled.on_refused = functools.partial(self._refused, dialled)

    def _connectIfNecessarySingle(self, node: Node) -> bool:
        dialled = self._connections.get(node)
        before = dialled.state if dialled is not None else None
        connected = bool(super()._connectIfNecessarySingle(node))
        if before == CONNECTION_STATE.DISCONNECTED and connected:
            dialled.born_s = boot_s()
        return connected

    def _onNewIncomingConnection(self, conn: GuardedConnection) -> None:
        if len(self._unknownConnections) >= _STRANGERS_MAX:
            min(self._unknownConnections, key=lambda each: each.born_s).refuse("too many strangers")
        conn.born_s = boot_s()
        conn.on_refused = functools.partial(self._refused, conn)
        super()._onNewIncomingConnection(conn)

    def _onOutgoingConnected(self, conn: GuardedConnection) -> None:
        conn.setOnMessageReceivedCallback(functools.partial(self._answered, conn))
        self._greet(conn, echo="")

    def _greet(self, conn: GuardedConnection, echo: str) -> None:
        nonce = self._nonces.setdefault(conn, os.urandom(32).hex())
        conn.greet(
            Greeting(
                address=self._selfNode.address,
                cluster=self._membership.cluster,
                members=self._membership.members,
                nonce=nonce,
                echo=echo,
            )
        )

    def _answered(self, conn: GuardedConnection, message: Any) -> None:
        """The dialling side: the other's greeting has come."""
        node = self._connToNode(conn)
        if node is None or not isinstance(message, Greeting):
            conn.refuse("no greeting")
        elif message.echo != self._nonces.get(conn):
            conn.refuse("a greeting that answers another one")
        elif message.address != node.address:
            conn.refuse(f"{message.address} answers there")
        elif difference := self._membership.difference(message):
            conn.refuse(difference)
        else:
            own = self._nonces[conn]
            self._greet(conn, echo=message.nonce)
            self._admit(conn, node, own, message.nonce)

    def _onIncomingMessageReceived(self, conn: GuardedConnection, message: Any) -> None:
        """The side that was dialled: a greeting, and later the one that ends it."""
        if not isinstance(message, Greeting):
            conn.refuse("no greeting")
            return
        first = self._greeted.get(conn)
        if first is None:
            node = self._nodeAddrToNode.get(message.address)
            difference = self._membership.difference(message)
            if node is None and not difference:
                difference = f"{message.address} is no member"
            if node is not None and self._shouldConnect(node):
                difference = "this node is the one to dial"
            self._greeted[conn] = message
            self._greet(conn, echo=message.nonce)  # refused or not: the other side says why as well
            if difference:
                if node is not None:
                    self._troubles.note(node.id, difference)
                conn.refuse(difference)
            return
        node = self._nodeAddrToNode[first.address]
        own = self._nonces[conn]
        if (message.address, message.nonce, message.echo) != (first.address, first.nonce, own):
            conn.refuse("a greeting that was not for this node")
            return
        self._unknownConnections.discard(conn)
        before = self._connections.get(node)
        self._connections[node] = conn
        if before is not None and before is not conn:
            before.disconnect()
        self._admit(conn, node, own, first.nonce)

    def _admit(self, conn: GuardedConnection, node: Node, own: str, other: str) -> None:
        self._forget(conn)
        conn.admit(own, other)
        self._apart_since.pop(node, None)
        self._troubles.clear(node.id)
        conn.setOnMessageReceivedCallback(functools.partial(self._onMessageReceived, node))
        self._onNodeConnected(node)

    # Ends of connections.

    def _refused(self, conn: GuardedConnection, why: str) -> None:
        node = self._connToNode(conn)
        if node is not None:
            self._troubles.note(node.id, why)
        else:
            self._troubles.stranger(conn.remote, why, boot_s())

    def _onDisconnected(self, conn: GuardedConnection) -> None:
        self._forget(conn)
        node = self._connToNode(conn)
        if node is not None:
            self._apart_since.setdefault(node, boot_s())
        was_connected = node is not None and self._syncObj.isNodeConnected(node)
        super()._onDisconnected(conn)
        if was_connected:
            self.connection_broke(node)

    def _forget(self, conn: GuardedConnection) -> None:
        self._nonces.pop(conn, None)
        self._greeted.pop(conn, None)

    def _onTick(self) -> None:
        super()._onTick()
        now = boot_s()
        for conn in [c for c in self._unknownConnections if c.born_s + _STRANGER_S < now]:
            conn.refuse(f"no greeting within {_STRANGER_S:g} s")
        for conn in [c for c in self._connections.values() if not c.admitted]:
            if conn.state != CONNECTION_STATE.DISCONNECTED and conn.born_s + _DIAL_S < now:
                conn.disconnect()
        for node, since in self._apart_since.items():
            if since + _APART_S < now:
                self._troubles.note_missing(node.id, "does not answer on its Raft port")

    def setOnUtilityMessageCallback(self, message: str, callback: object) -> None:
        """None is taken: they are for strangers, and change the cluster."""

    def send(self, node: Node, message: Any) -> bool:
        conn = self._connections.get(node)
        if conn is None or not conn.admitted:
            return False
        return super().send(node, message)
