"""TCP sockets: options, who listens on a port, and the order in which a killed process closes.

After a cut link TCP retransmits at growing intervals for 15 minutes. With a limit for
unacknowledged bytes the connection fails earlier, and a new one can be made. Error texts name the
process that holds a port, from /proc.

The kernel closes a killed process's descriptors one by one, the highest first. With 9,000
connections that takes 250 ms or more, so the peer of a low descriptor notices late. So sockets
whose end must be noticed early get high descriptors (`LowDescriptors`).
"""

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from batonmq.protocol.message_id import split_address
from batonmq.protocol.numbers import PORT_MAX

BACKLOG: Final = 1024  # how many connections may wait until they are accepted

_LISTEN: Final = "0A"
_COMMAND_CHARS_MAX: Final = 120

HELD_MAX: Final = 12_288
_SHARE: Final = 1 / 2  # of the descriptors that this process may have

_IP = (socket.AF_INET, socket.AF_INET6)


def limit_unacknowledged(sock: socket.socket, limit_ms: int) -> None:
    """Makes the connection fail once sent bytes are unacknowledged for `limit_ms`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def limit_unacknowledged_of(transport: asyncio.BaseTransport, limit_ms: int) -> None:
    """`limit_unacknowledged` for a transport; without effect if it has no TCP socket."""
    if (sock := _tcp_socket_of(transport)) is not None:
        limit_unacknowledged(sock, limit_ms)


def _tcp_socket_of(transport: asyncio.BaseTransport) -> socket.socket | None:
    sock: socket.socket | None = transport.get_extra_info("socket")
    return sock if sock is not None and sock.family in _IP else None


def descriptor_of(transport: asyncio.BaseTransport) -> int:
    """-1 if it has no TCP socket."""
    sock = _tcp_socket_of(transport)
    return -1 if sock is None else int(sock.fileno())


def keep_alive_of(transport: asyncio.BaseTransport, *, every_s: int, failures: int) -> None:
    """As `keep_alive`, of a transport; without effect if it has no TCP socket."""
    if (sock := _tcp_socket_of(transport)) is not None:
        keep_alive(sock, every_s=every_s, failures=failures)


def keep_alive(sock: socket.socket, *, every_s: int, failures: int) -> None:
    """Probes an idle peer every `every_s`. The connection fails after `failures` lost probes, or
    after TCP_USER_TIMEOUT if the socket has one (tcp(7))."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, failures)


def name_senders(sock: socket.socket) -> None:
    """Lets the kernel name the sender of each datagram of a Unix socket (SCM_CREDENTIALS)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def descriptors_allowed() -> int:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if allowed == resource.RLIM_INFINITY else allowed


def descriptors_in_use() -> int:
    """Roughly how many descriptors are in use: a new one gets the lowest free number."""
    try:
        descriptor = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 0)
    except OSError:
        return descriptors_allowed()
    os.close(descriptor)
    return descriptor


def address_of(transport: asyncio.BaseTransport, end: Literal["peername", "sockname"]) -> str:
    """host:port of one end of a connection, [host]:port for IPv6; "?" if it is not known."""
    address = transport.get_extra_info(end)
    # Of a UNIX socket it is a path.
    if not isinstance(address, tuple) or len(address) < 2:
        return "?"
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_address(host: str, port: str | int) -> str:
    """host:port, the same for all spellings of an IP address."""
    host = host.strip("[]").partition("%")[0]
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        host = str(mapped or address)
    return f"{host}:{port}"


def accepted_at(port: int) -> list[tuple[str, int]]:
    """Peer addresses and descriptors of the connections at our port, oldest first. Takes 10 µs for
    each descriptor."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            peer = _peer_at(int(entry), port)
            if peer:
                found.append((os.fstat(int(entry)).st_ino, peer, int(entry)))
    return [(peer, descriptor) for _, peer, descriptor in sorted(found)]


def _peer_at(descriptor: int, port: int) -> str:
    """The peer of a connection at `port`; "" if the descriptor is anything else."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return ""
    sock = socket.socket(fileno=descriptor)
    try:
        if sock.family not in _IP or sock.getsockname()[1] != port:
            return ""
        return plain_address(*sock.getpeername()[:2])
    finally:
        sock.detach()  # it belongs to another


def hang_up(peer: str, descriptor: int) -> None:
    """Ends a connection whose socket a library owns; without effect if the descriptor
    was reused."""
    with contextlib.suppress(OSError):
        held = os.dup(descriptor)  # from here on this is certainly the same socket
        try:
            sock = socket.socket(fileno=held)
        except OSError:  # it is no socket
            os.close(held)
            return
        with sock:
            if sock.family in _IP and plain_address(*sock.getpeername()[:2]) == peer:
                sock.shutdown(socket.SHUT_RDWR)


def check_port_free(host: str, port: int) -> None:
    """Raises OSError (EADDRINUSE, EACCES, ...) if this process could not listen there."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket from which other processes may accept (socket activation). Raises OSError."""
    sock = socket.create_server((host, port), backlog=BACKLOG)
    sock.setblocking(False)
    return sock


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """One for each address of `host`; with port 0 all have the same. Raises OSError."""
    found: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        ):
            bound = int(found[0].getsockname()[1]) if found else port
            at = (str(address[0]), bound)
            found.append(socket.create_server(at, family=family, backlog=BACKLOG))
    except BaseException:
        for sock in found:
            sock.close()
        raise
    return found


def without_delay(sock: socket.socket) -> None:
    """Sends small writes at once (TCP_NODELAY)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def dialled_place(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ip]:port", for `create_connection`. Raises ValueError."""
    host, port = split_address(address)
    # uvloop would dial the lower 16 bits of it, where any other process may listen.
    if not 0 < port <= PORT_MAX:
        raise ValueError(f"port {port} of {address!r}: 1 to {PORT_MAX} are allowed")
    return host, port


def look_up(host: str) -> str:
    """An address of `host`, an IPv4 one if it has any. Blocks. Raises OSError, which names it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"host name {host!r}: {error.strerror}") from error
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


look_up_once: Final = functools.cache(look_up)


def is_port_free(host: str, port: int) -> bool:
    try:
        check_port_free(host, port)
    except OSError:
        return False
    return True


class CannotListenError(OSError):
    """A port that this process cannot listen on: its purpose, and who has it."""

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


def holder_of(port: int) -> str:
    """The process that listens on a port, as a text; "" if none is visible."""
    inodes = _listening("thread-self", port)
    if not inodes:
        return ""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and inodes & _sockets(folder.name):
            return f"process {folder.name} ({_command(folder)})"
    return "a process of another user, container or namespace"


def listens(pid: int, port: int) -> bool:
    """Whether that process itself listens on the port, on any address of its network."""
    return bool(_listening(str(pid), port) & _sockets(str(pid)))


def _listening(process: str, port: int) -> set[str]:
    """Inodes of the sockets that listen on a port, in the network of a process."""
    return {inode for number, inode in _listeners(process) if number == port}


def _listeners(process: str) -> Iterator[tuple[int, str]]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                yield int(fields[1].rpartition(":")[2], 16), fields[9]


def _sockets(process: str) -> set[str]:
    """Inodes of its open sockets; none if the process is gone or not ours."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(entry.path).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "unknown"
    text = b" ".join(words).decode(errors="replace")
    return text if len(text) <= _COMMAND_CHARS_MAX else f"{text[:_COMMAND_CHARS_MAX]}…"


class LowDescriptors:
    """Occupies all low free descriptors until `free`, so that new sockets get higher ones."""

    def __init__(self) -> None:
        limit = min(HELD_MAX, int(descriptors_allowed() * _SHARE))
        self._held: list[int] = []
        if limit <= 0:
            return
        try:
            descriptor = os.open(os.devnull, os.O_RDONLY)
            self._held.append(descriptor)
            while descriptor < limit:
                descriptor = os.dup(descriptor)
                self._held.append(descriptor)
        except OSError:  # optional: other uses of descriptors come first
            self.free()

    def free(self) -> None:
        held, self._held = self._held, []
        for descriptor in held:
            os.close(descriptor)
