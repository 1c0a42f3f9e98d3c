"""Which nodes may connect to the Raft port, and what replaces parts of pysyncobj.

- *Members only.* pysyncobj's transport accepts utility commands that change the cluster, read-only
  nodes, frames of any length and any pickle. Here a connection begins with a greeting (see
  `membership`): under the password if there is one, from a configured peer of the same cluster with
  the same list of members. Both sides check, and both report why they refuse.
- *Frames of bounded length* (`GuardedConnection`): a native `i32` length, as pysyncobj writes it,
  and a body, encrypted if there is a password. Until the other side is *admitted* a body is one
  greeting in JSON, at most 8 KiB; anything else ends the connection before its bytes are kept.
  Afterwards it is `32-byte key, u64 number, zlib(pickle)`: the random number that this side sent in
  its greeting, and a count from 0. Pickles may have plain values only (`restricted_loads`).
- *Strangers* (not admitted yet) get two seconds and one short frame. At most `_STRANGERS_MAX` are
  open; a new one replaces the oldest.
- *TLS*, if it is on: both sides show a certificate before the greeting.
- *The side with the greater address dials*, as in pysyncobj.
- *Names are looked up outside the Raft thread* (`BackgroundResolver`). pysyncobj asks in the
  thread that also sends heartbeats: a silent name server would cost a leader its lead. It also
  keeps an address for ten minutes, and would not find a container that restarts with another.

`tests/controller/test_raft_node.py` pins the names of pysyncobj 0.3.17 that this module uses.
"""

import _socket
import functools
import io
import ipaddress
import logging
import os
import pickle
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any, Final

import pysyncobj.dns_resolver
import pysyncobj.pickle
import pysyncobj.syncobj
import pysyncobj.tcp_connection
import pysyncobj.tcp_server
import pysyncobj.transport
from pysyncobj.node import Node
from pysyncobj.tcp_connection import CONNECTION_STATE, TcpConnection
from pysyncobj.tcp_server import SERVER_STATE

from batonmq.controller.raft.cipher import Cipher
from batonmq.controller.raft.log import DigestWatch, RaftProblems
from batonmq.controller.raft.membership import Greeting, Membership, decode_greeting
from batonmq.controller.raft.messages import MendedTransport
from batonmq.runtime.clock import boot_s
from batonmq.runtime.sockets import keep_alive, limit_unacknowledged, look_up
from batonmq.runtime.tls import PortTls, tls_reason
from batonmq.runtime.tls_listener import TlsBytes, is_hello

log = logging.getLogger(__name__)

# pysyncobj replaces it for the whole process, with one that works on Windows only.
socket.inet_ntop = _socket.inet_ntop

GREETING_BYTES_MAX: Final = 8 << 10
FRAME_BYTES_MAX: Final = 192 << 20
"""A batch of 64 MiB that does not compress; encrypted it is half as long again; and a margin."""

_STRANGER_S: Final = 2.0
"""How long a connection may be open before its greeting is complete."""
_DIAL_S: Final = 1.0
"""The same for a connection that this node dialled: TCP would wait far longer for a cut link."""
_STRANGERS_MAX: Final = 64
_BACKLOG: Final = 128
_APART_S: Final = 2.0
"""A member that is not connected for longer is reported as a problem."""

PLAIN_BYTES_MAX: Final = 128 << 20
OTHER_PASSWORD: Final = b"batonmq raft: refused, this node has another password"
"""Sent in the clear. Its only effect is a line in the other node's log."""
_LENGTH: Final = struct.Struct("i")
_HEAD: Final = struct.Struct(">32sQ")
_UNANSWERED_MS: Final = 2_000
"""A peer whose TCP acknowledges nothing for this long is dialled again: TCP itself would retry more
and more rarely."""


class GuardedConnection(TcpConnection):  # type: ignore[misc]
    """Replaces pysyncobj's `TcpConnection`. `on_refused(why)` is called if this side refuses it."""

    admitted = False
    born_s = 0.0
    remote = ""
    on_refused: Callable[[str], None] | None = None
    _TcpConnection__readBuffer: bytes
    _TcpConnection__writeBuffer: bytes
    _own_key = b""
    _other_key = b""
    tls: PortTls | None = None
    """Set on an accepted connection until its first bytes show whether it speaks TLS."""
    _session: TlsBytes | None = None
    _sent = 0
    _received = 0

    def setSockoptKeepalive(self) -> None:
        """Called for each new socket. pysyncobj sets the sizes of both buffers."""
        sock: socket.socket = self._TcpConnection__socket
        keep_alive(sock, every_s=1, failures=3)
        limit_unacknowledged(sock, _UNANSWERED_MS)
        try:
            host, port = sock.getpeername()[:2]
            self.remote = f"{host}:{port}"
        # Not connected yet: this side dials, and knows whom.
        except OSError:
            pass

    @property
    def connected(self) -> bool:
        return bool(self.state == CONNECTION_STATE.CONNECTED)

    def admit(self, own_nonce: str, other_nonce: str) -> None:
        """From now on messages pass. The nonces are those of the two greetings."""
        self._own_key, self._other_key = bytes.fromhex(own_nonce), bytes.fromhex(other_nonce)
        self._sent = self._received = 0
        self.admitted = True

    def disconnect(self) -> None:
        self.admitted = False
        self._session = None
        super().disconnect()

    def dial_tls(self, tls: PortTls, context: ssl.SSLContext, host: str) -> None:
        """Call it before anything is sent."""
        self._session = TlsBytes(
            context, server_side=False, server_hostname=host, admits=tls.admits
        )

    def greet(self, greeting: Greeting) -> None:
        self._write(self._seal(greeting.encode()))

    def send(self, message: Any) -> None:
        if not self.admitted:
            return
        # The key and the number make each frame one of this connection, at this place: a recorded
        # one is refused.
        head = _HEAD.pack(self._other_key, self._sent)
        self._sent += 1
        self._write(self._seal(head + zlib.compress(pickle.dumps(message, 5), 3)))

    def refuse(self, why: str) -> None:
        """Ends the connection and reports why."""
        on_refused = self.on_refused
        self.disconnect()
        if on_refused is not None:
            on_refused(why)

    # Overrides of pysyncobj's methods.

    def _TcpConnection__processRead(self) -> bool:
        """Reads only until one frame is complete, so that a flood cannot fill the memory."""
        plain = b""
        if self._session is not None:
            plain, self._TcpConnection__readBuffer = self._TcpConnection__readBuffer, plain
        more: bool = super()._TcpConnection__processRead()
        if self.state == CONNECTION_STATE.DISCONNECTED:
            return False
        if self.tls is not None and not self._has_begun(self.tls):
            return more and self.connected
        if self._session is not None and not self._decrypt(self._session, plain):
            return False
        size = self._frame_size()
        if size is None:
            return more and self.state != CONNECTION_STATE.DISCONNECTED
        return more and len(self._TcpConnection__readBuffer) < _LENGTH.size + size

    def _has_begun(self, tls: PortTls) -> bool:
        """Finds out by its first bytes whether an accepted connection speaks TLS. False until they
        are here, or if it is refused."""
        # A plain frame that begins like a TLS hello would be longer than a greeting may be.
        first: bytes = self._TcpConnection__readBuffer
        speaks_tls = is_hello(first)
        if speaks_tls is None:
            return False
        self.tls = None
        if speaks_tls:
            self._session = TlsBytes(tls.context(), server_side=True, admits=tls.admits)
        elif tls.mode == "enforcing":
            self.refuse("it speaks without TLS, and this port takes TLS only")
            return False
        return True

    def _decrypt(self, session: TlsBytes, plain: bytes) -> bool:
        """Decrypts what was read and appends it to `plain`. False: the connection has ended."""
        raw: bytes = self._TcpConnection__readBuffer
        error = ""
        try:
            plain += session.feed(raw)
        except ssl.SSLError as failure:
            error = tls_reason(failure)
        self._TcpConnection__readBuffer = plain
        self._send_raw(session.to_send())  # an alert, too
        if error and self.connected:
            self.refuse(error)
        return self.connected

    def _TcpConnection__processParseMessage(self) -> Any:
        size = self._frame_size()
        end = _LENGTH.size + (size or 0)
        buffer: bytes = self._TcpConnection__readBuffer
        if size is None or len(buffer) < end:
            return None
        body = buffer[_LENGTH.size : end]
        try:
            message = self._open(body)
        # Whatever the bytes of a stranger cause, it ends this connection and not the thread.
        except Exception as error:
            self._cannot_read(body, error)
            return None
        self._TcpConnection__readBuffer = buffer[end:]
        return message

    def _frame_size(self) -> int | None:
        """The size of the first frame in the buffer; None if it is not known yet, or refused."""
        buffer: bytes = self._TcpConnection__readBuffer
        if len(buffer) < _LENGTH.size:
            return None
        size = int(_LENGTH.unpack_from(buffer)[0])
        allowed = FRAME_BYTES_MAX if self.admitted else GREETING_BYTES_MAX
        if 0 < size <= allowed:
            return size
        self.refuse(f"a frame of {size} bytes, {allowed} are allowed")
        return None

    def _open(self, body: bytes) -> Any:
        plain = body if self.encryptor is None else self.encryptor.decrypt(body)
        if not self.admitted:
            return decode_greeting(plain)
        key, number = _HEAD.unpack_from(plain)
        if key != self._own_key or number != self._received:
            raise ValueError("a frame of another connection, or out of order")
        self._received += 1
        return restricted_loads(_inflate(plain[_HEAD.size :]))

    def _cannot_read(self, body: bytes, error: Exception) -> None:
        if self.admitted:
            self.refuse(f"a frame that cannot be read: {error!r}")
        elif body == OTHER_PASSWORD:
            self.refuse(
                "it has another Raft password (raftPasswordFile), or one of the two has none"
            )
        else:
            self._write(OTHER_PASSWORD)
            what = "without the Raft password of this node (raftPasswordFile)"
            self.refuse("no greeting of a controller" if self.encryptor is None else what)

    def _seal(self, plain: bytes) -> bytes:
        return plain if self.encryptor is None else bytes(self.encryptor.encrypt(plain))

    def _write(self, body: bytes) -> None:
        frame = _LENGTH.pack(len(body)) + body
        if self._session is not None:
            self._session.write(frame)
            frame = self._session.to_send()
        self._send_raw(frame)

    def _send_raw(self, data: bytes) -> None:
        self._TcpConnection__writeBuffer += data
        self._TcpConnection__trySendBuffer()


def _inflate(data: bytes) -> bytes:
    """Raises ValueError for data that would grow above PLAIN_BYTES_MAX."""
    # R58: a few kB may grow to gigabytes.
    inflating = zlib.decompressobj()
    plain = inflating.decompress(data, PLAIN_BYTES_MAX)
    if not inflating.eof:
        raise ValueError(f"more than {PLAIN_BYTES_MAX} bytes, or cut short")
    return plain


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles str, bytes, numbers, None and containers of them, and nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        # Protocol 2 writes bytes as _codecs.encode(text, "latin1"), and empty bytes as bytes().
        if (module_name, global_name) == ("_codecs", "encode"):
            return _encode_latin1
        if global_name == "bytes" and module_name in ("__builtin__", "builtins"):
            return bytes
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed")


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding} is not allowed")
    return text.encode("latin1")


def restricted_loads(data: bytes) -> Any:
    """Reads a pickle of plain values. Raises UnpicklingError for a pickle that names code."""
    return _PlainUnpickler(io.BytesIO(data)).load()


def _refuse_load(file: object) -> Any:
    raise pickle.UnpicklingError("snapshots are not pickles here")


def _configured_journal(journal: object) -> object:
    return journal


def _configured_snapshots(_name: object, _batch: int, _fork: bool, snapshots: Any, *_: Any) -> Any:
    return snapshots


def _may_stand(core: Any) -> bool:
    may: bool = core._SyncObj__transport.may_stand()
    return may


def install() -> None:
    """Replaces pysyncobj's unpickler, connections, resolver, clock, journal, snapshots, and the
    condition under which it begins a term. Idempotent.

    From then on the settings `journalFile` and `serializer` are the objects themselves, opened by
    the node that they belong to: one process may hold several nodes.
    """
    pysyncobj.pickle.loads = restricted_loads
    pysyncobj.pickle.load = _refuse_load
    if not isinstance(pysyncobj.dns_resolver._g_resolver, BackgroundResolver):
        pysyncobj.dns_resolver._g_resolver = BackgroundResolver()
    pysyncobj.syncobj.createJournal = _configured_journal
    pysyncobj.syncobj.Serializer = _configured_snapshots
    pysyncobj.syncobj.getEncryptor = Cipher
    pysyncobj.syncobj.HAS_CRYPTO = True
    # pysyncobj calls this only to decide whether an election whose time has come may begin.
    pysyncobj.syncobj.SyncObj._SyncObj__connectedToAnyone = _may_stand
    pysyncobj.transport.TcpConnection = GuardedConnection
    pysyncobj.tcp_server.TcpConnection = GuardedConnection
    for module in (pysyncobj.syncobj, pysyncobj.transport, pysyncobj.tcp_connection):
        module.monotonicTime = boot_s


class BackgroundResolver:
    """Replaces pysyncobj's DnsCachingResolver; any thread may call it.

    At most one look-up per name is under way. A failed one keeps the address known before: the
    host may be up while the name service is down.
    """

    def __init__(self, look_up: Callable[[str], str] = look_up) -> None:
        self._look_up = look_up
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._under_way: dict[str, threading.Thread] = {}

    def setTimeouts(self, cache_s: float, fail_cache_s: float) -> None:
        """Has no effect: results are not cached by time."""

    def setPreferredAddrFamily(self, family: object) -> None:
        """IPv4 is preferred, as pysyncobj's default is."""

    def resolve(self, host: str) -> str | None:
        """The last address found, None before the first. Does not block; starts a look-up."""
        if _is_address(host):
            return host
        with self._lock:
            if host not in self._under_way:
                thread = threading.Thread(
                    target=self._refresh, args=(host,), name=f"resolve-{host}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    log.warning("raft_name_unknown host=%s reason=%s", host, error)
                else:
                    self._under_way[host] = thread
            return self._known.get(host)

    def _refresh(self, host: str) -> None:
        try:
            address = self._look_up(host)
        except (OSError, UnicodeError) as error:
            log.debug("raft_name_unknown host=%s reason=%s", host, error)
            address = ""
        with self._lock:
            before = self._known.get(host)
            if address and address != before:
                self._known[host] = address
                log.info("raft_name_resolved host=%s address=%s before=%s", host, address, before)
            del self._under_way[host]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class GuardedTransport(MendedTransport):
    """pysyncobj's TCP transport for a fixed set of members."""

    def __init__(
        self,
        core: Any,
        self_node: Node,
        other_nodes: set[Node],
        *,
        membership: Membership,
        problems: RaftProblems,
        digests: DigestWatch | None = None,
        tls: PortTls | None = None,
    ) -> None:
        self.digests = digests
        self._tls = tls if tls is not None and tls.mode != "disabled" else None
        self._membership = membership
        self._problems = problems
        self._nonces: dict[GuardedConnection, str] = {}
        self._greeted: dict[GuardedConnection, Greeting] = {}
        self._apart_since: dict[Node, float] = dict.fromkeys(other_nodes, boot_s())
        super().__init__(core, self_node, other_nodes)

    # Connections, dialled and accepted.

    def _maybeBind(self) -> None:
        was_ready = self.ready
        if was_ready and self._server._TcpServer__state == SERVER_STATE.UNBINDED:
            # pysyncobj closes the port for good if one accept fails, for example without a
            # descriptor. It is bound again.
            log.warning("raft_port_lost reason='a connection could not be accepted'")
            self._ready, self._bindAttempts, was_ready = False, 0, False
        super()._maybeBind()
        if self._ready and not was_ready:
            # pysyncobj's backlog is five: strangers could keep a member waiting for seconds.
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
        conn.tls = self._tls
        conn.on_refused = functools.partial(self._refused, conn)
        super()._onNewIncomingConnection(conn)

    def _onOutgoingConnected(self, conn: GuardedConnection) -> None:
        conn.setOnMessageReceivedCallback(functools.partial(self._answered, conn))
        node, tls = self._connToNode(conn), self._tls
        if tls is not None and node is not None and (context := tls.dials) is not None:
            conn.dial_tls(tls, context, node.host)
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
                pre_vote=True,
                rules=self._membership.rules,
                log=self._membership.log,
            )
        )

    def _answered(self, conn: GuardedConnection, message: Any) -> None:
        """The dialling side received the other's greeting."""
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
            self._admit(conn, node, own, message)

    def _onIncomingMessageReceived(self, conn: GuardedConnection, message: Any) -> None:
        """The dialled side received the first greeting, or the one that completes it."""
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
            # Also before a refusal: the other side then finds the difference and reports it.
            self._greet(conn, echo=message.nonce)
            if difference:
                if node is not None:
                    self._problems.note(node.id, difference)
                conn.refuse(difference)
            return
        node = self._nodeAddrToNode[first.address]
        own = self._nonces[conn]
        if (message.address, message.nonce, message.echo) != (first.address, first.nonce, own):
            conn.refuse("a greeting that was not for this node")
            return
        # Admitted only now, by a greeting that repeats our random number: the first one may have
        # been recorded, and must not displace the member's connection.
        self._unknownConnections.discard(conn)
        before = self._connections.get(node)
        self._connections[node] = conn
        if before is not None and before is not conn:
            before.disconnect()
        self._admit(conn, node, own, first)

    def _admit(self, conn: GuardedConnection, node: Node, own: str, other: Greeting) -> None:
        self._forget(conn)
        conn.admit(own, other.nonce)
        if other.pre_vote:
            self._without_pre_vote.discard(node)
        else:
            self._without_pre_vote.add(node)
        self._apart_since.pop(node, None)
        self.announced = {**self.announced, node.id: other.rules}
        self._problems.clear(node.id)
        conn.setOnMessageReceivedCallback(functools.partial(self._onMessageReceived, node))
        self._onNodeConnected(node)

    # Ends of connections.

    def _refused(self, conn: GuardedConnection, why: str) -> None:
        node = self._connToNode(conn)
        if node is not None:
            self._problems.note(node.id, why)
        else:
            self._problems.stranger(conn.remote, why, boot_s())

    def _onDisconnected(self, conn: GuardedConnection) -> None:
        self._forget(conn)
        node = self._connToNode(conn)
        if node is not None:
            self._apart_since.setdefault(node, boot_s())
            self._without_pre_vote.discard(node)
            self.announced = {k: v for k, v in self.announced.items() if k != node.id}
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
                self._problems.note_missing(node.id, "does not answer on its Raft port")

    @property
    def is_apart(self) -> bool:
        """Whether the connection to some member is missing."""
        return bool(self._apart_since)

    def setOnUtilityMessageCallback(self, message: str, callback: object) -> None:
        """Ignores all: strangers could use them to change the cluster."""

    def send(self, node: Node, message: Any) -> bool:
        # pysyncobj would count a message on a connection that is not admitted as sent.
        conn = self._connections.get(node)
        if conn is None or not conn.admitted:
            return False
        return super().send(node, message)
