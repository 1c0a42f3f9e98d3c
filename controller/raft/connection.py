"""One TCP connection between nodes: frames of bounded length, and nothing unpickled from strangers.

A frame is a native `i32` length, as pysyncobj writes it, and a sealed body. Until the other side is
*admitted* (see `transport`) a body is one greeting in JSON, at most 8 KiB; anything longer, or not
under the password, ends the connection at once, before its bytes are kept. Afterwards a body is
`32-byte key, u64 number, zlib(pickle)`: the key is the random number that this side sent, the
number counts up from 0, so a recorded or repeated frame is refused. Pickles are of plain values
only (`restricted_loads`): unpickling one runs no code.

Uses private names of pysyncobj 0.3.17's `TcpConnection`.
"""

import base64
import hashlib
import io
import pickle
import socket
import struct
import zlib
from collections.abc import Callable
from typing import Any, Final

from cryptography.fernet import Fernet
from pysyncobj.tcp_connection import CONNECTION_STATE, TcpConnection

from batonmq.controller.raft.membership import Greeting, decode_greeting
from batonmq.process.sockets import keep_alive, limit_unacknowledged

GREETING_BYTES_MAX: Final = 8 << 10
FRAME_BYTES_MAX: Final = 192 << 20
"""A batch of 64 MiB that does not compress, half as long again when encrypted, and some room."""
PLAIN_BYTES_MAX: Final = 128 << 20
OTHER_PASSWORD: Final = b"batonmq raft: refused, this node has another password"
"""Sent in the clear; all that it causes is a line in the other node's log."""

_LENGTH: Final = struct.Struct("i")
_HEAD: Final = struct.Struct(">32sQ")
_UNANSWERED_MS: Final = 2_000
"""A peer that acknowledges nothing for this long is dialled anew: TCP would retry ever more seldom,
and reach it late after a cut link is repaired."""


class GuardedConnection(TcpConnection):  # type: ignore[misc]
    """Replaces pysyncobj's `TcpConnection`. `on_refused(why)` is called when it is refused."""

    admitted = False
    born_s = 0.0
    remote = ""
    on_refused: Callable[[str], None] | None = None
    _TcpConnection__readBuffer: bytes
    _TcpConnection__writeBuffer: bytes
    _own_key = b""
    _other_key = b""
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
        except OSError:
            pass  # not connected yet: this side dials

    @property
    def connected(self) -> bool:
        return bool(self.state == CONNECTION_STATE.CONNECTED)

    def admit(self, own_nonce: str, other_nonce: str) -> None:
        """Lets messages pass from now on. The nonces are those of the two greetings."""
        self._own_key, self._other_key = bytes.fromhex(own_nonce), bytes.fromhex(other_nonce)
        self._sent = self._received = 0
        self.admitted = True

    def disconnect(self) -> None:
        self.admitted = False
        super().disconnect()

    def greet(self, greeting: Greeting) -> None:
        self._write(self._seal(greeting.encode()))

    def send(self, message: Any) -> None:
        if not self.admitted:
            return
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
        """Reads only until a frame is whole, so that a flood cannot fill the memory."""
        more: bool = super()._TcpConnection__processRead()
        if self.state == CONNECTION_STATE.DISCONNECTED:
            return False
        size = self._frame_size()
        if size is None:
            return more and self.state != CONNECTION_STATE.DISCONNECTED
        return more and len(self._TcpConnection__readBuffer) < _LENGTH.size + size

    def _TcpConnection__processParseMessage(self) -> Any:
        size = self._frame_size()
        end = _LENGTH.size + (size or 0)
        buffer: bytes = self._TcpConnection__readBuffer
        if size is None or len(buffer) < end:
            return None
        body = buffer[_LENGTH.size : end]
        try:
            message = self._open(body)
        except Exception as error:
            self._cannot_read(body, error)
            return None
        self._TcpConnection__readBuffer = buffer[end:]
        return message

    def _frame_size(self) -> int | None:
        """Bytes of the frame that the buffer begins with; None if unknown yet, or just refused."""
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
        self._TcpConnection__writeBuffer += _LENGTH.pack(len(body)) + body
        self._TcpConnection__trySendBuffer()


def _inflate(data: bytes) -> bytes:
    """Raises ValueError for data that would grow above PLAIN_BYTES_MAX."""
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


def encryptor(password: bytes) -> Fernet:
    """Fernet (AES-128-CBC, HMAC-SHA256) under the password; replaces pysyncobj's key derivation."""
    key = hashlib.sha256(b"BatonMQ Raft port\0" + password).digest()
    return Fernet(base64.urlsafe_b64encode(key))
