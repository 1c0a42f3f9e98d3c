"""Reports to the service manager by sd_notify, for systemd and `batonmq up`. `READY=1` once it
serves, `STOPPING=1` when it ends, `WATCHDOG=1` several times within WATCHDOG_USEC. The watchdog is
fed from the loop: if the loop hangs, the manager ends the process. Nothing here fails or blocks. A
manager may also hold the listening sockets (LISTEN_FDS), so that connections wait in the queue
while the server is away."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG_USEC: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"
LISTEN_FDS: Final = "LISTEN_FDS"
LISTEN_PID: Final = "LISTEN_PID"
LISTEN_FDS_START: Final = 3
READY: Final = b"READY=1"
STOPPING: Final = b"STOPPING=1"
WATCHDOG: Final = b"WATCHDOG=1"
FEEDS: Final = 4  # reports per watchdog period, since some may be late


class ServiceManager:
    """`serving` and `stopping` are called on the loop, once or more."""

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self.watchdog_s = _watchdog_s(environ, pid)
        self._address = environ.get(NOTIFY_SOCKET, "")
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def serving(self) -> None:
        """The process serves from now on; its loop is watched."""
        if not self._address or self._socket is not None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._tell(READY)
        if self.watchdog_s > 0:
            self._feed()

    def stopping(self) -> None:
        """The process is ending; the watchdog is fed until then."""
        self._tell(STOPPING)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _feed(self) -> None:
        self._tell(WATCHDOG)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.watchdog_s / FEEDS, self._feed)

    def _tell(self, what: bytes) -> None:
        if self._socket is None:
            return
        address = self._address
        with contextlib.suppress(OSError):
            self._socket.sendto(what, f"\0{address[1:]}" if address.startswith("@") else address)


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float:
    """0 without a watchdog for this process."""
    usec = environ.get(WATCHDOG_USEC, "")
    if environ.get(WATCHDOG_PID, str(pid)) != str(pid) or not usec:
        return 0.0
    if not usec.isdecimal():
        log.warning("%s is %r, allowed are microseconds: no watchdog", WATCHDOG_USEC, usec)
        return 0.0
    return int(usec) / 1_000_000


def manager_of_this_process() -> ServiceManager:
    return ServiceManager(os.environ, os.getpid())


def held_listener(port: int) -> socket.socket | None:
    """The listening socket of a port if the manager holds one (sd_listen_fds); a descriptor of the
    caller's own."""
    count = os.environ.get(LISTEN_FDS, "")
    if os.environ.get(LISTEN_PID) != str(os.getpid()) or not count.isdecimal():
        return None
    for fd in range(LISTEN_FDS_START, LISTEN_FDS_START + int(count)):
        try:
            held = socket.socket(fileno=os.dup(fd))
            if held.type == socket.SOCK_STREAM and held.getsockname()[1:2] == (port,):
                return held
            held.close()
        except OSError:
            log.warning("%s is %s, but descriptor %d is no socket", LISTEN_FDS, count, fd)
    return None
