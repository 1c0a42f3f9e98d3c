"""Options of TCP sockets, whether a port is free, and the error that names who has it.

After a link is cut TCP retransmits at growing intervals for a quarter of an hour, and notices late
that the link works again. With a limit for unacknowledged bytes the connection fails instead, and a
new one can be made at once.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

from batonmq.process.listeners import holder_of

BACKLOG: Final = 1024
"""How many connections of clients wait until they are accepted."""

_IP = (socket.AF_INET, socket.AF_INET6)


def limit_unacknowledged(sock: socket.socket, limit_ms: int) -> None:
    """The connection fails once bytes that were sent are unacknowledged for `limit_ms`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def limit_unacknowledged_of(transport: asyncio.BaseTransport, limit_ms: int) -> None:
    """`limit_unacknowledged` for a transport; without effect if it has no TCP socket."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in _IP:
        limit_unacknowledged(sock, limit_ms)


def keep_alive(sock: socket.socket, *, every_s: int, failures: int) -> None:
    """An idle peer is probed every `every_s`; the connection fails after so many lost probes."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, failures)


def name_senders(sock: socket.socket) -> None:
    """The kernel names the process that sent each datagram of a Unix socket (SCM_CREDENTIALS)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def check_port_free(host: str, port: int) -> None:
    """Raises OSError (EADDRINUSE, EACCES, ...) if this process could not listen there."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def listening_socket(host: str, port: int) -> socket.socket:
    """One that others may accept from (socket activation). Raises OSError."""
    sock = socket.create_server((host, port), backlog=BACKLOG)
    sock.setblocking(False)
    return sock


def is_port_free(host: str, port: int) -> bool:
    try:
        check_port_free(host, port)
    except OSError:
        return False
    return True


class CannotListenError(OSError):
    """A port on which this process cannot listen: what it is for, which, and who has it."""

    def __init__(self, what: str, port: int, error: OSError) -> None:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            holder = holder_of(port)
            reason = f"it is taken by {holder}" if holder else "it is taken"
        super().__init__(f"{what} port {port}: {reason}")


@contextlib.contextmanager
def listening_as(what: str, port: int) -> Iterator[None]:
    """An OSError inside becomes a CannotListenError."""
    try:
        yield
    except CannotListenError:
        raise
    except OSError as error:
        raise CannotListenError(what, port, error) from error
