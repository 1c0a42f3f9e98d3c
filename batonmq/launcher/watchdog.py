"""Children whose event loop stands still are ended, so that a hang becomes a kill.

A process that hangs holds its connections: a stock client waits out its own time-out for each
request to it. `Watchdog` decides and is pure; `NotifySocket` hears the children (sd_notify, see
`runtime/service_manager`), `activity_of` looks at them. A child is watched from its READY to its
STOPPING.

Silence alone proves nothing on a busy machine. Who is silent for the time-out hangs if none of its
threads wants the processor or waits for its disk (it is stopped, or waits for what does not come),
or if it has used the processor for the time-out once more (an endless loop). One that is starved
does neither. One that waits for its disk (state D) continues when the disk does; controllers that
miss its heartbeats elect another master meanwhile. A launcher that stood still itself has
received nothing meanwhile, so it counts from zero again (SAFETY R8 has the same for servers).
"""

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batonmq.runtime.service_manager import NOTIFY_SOCKET, READY, STOPPING, WATCHDOG, WATCHDOG_USEC
from batonmq.runtime.sockets import name_senders

TICK_MS: Final = 100
PAUSED_MS: Final = 300
IDLE_TICKS: Final = 2
"""A starved process may sleep for a moment between two waits for the processor."""
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid: struct ucred
_MESSAGE_SIZE_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process does at this moment. `cpu_ms`: the processor time that it has used so far.

    `busy`: one of its threads wants the processor, or waits for its disk."""

    busy: bool
    cpu_ms: int


@dataclass(slots=True)
class _Watched:
    heard_ms: int
    suspected_cpu_ms: int | None = None
    """Its processor time when it had been silent for the time-out."""
    idle_ticks: int = 0


class Watchdog:
    """Who was heard when. Times are ms of one clock that never goes back."""

    def __init__(self, timeout_ms: int, activity_of: Callable[[int], Activity]) -> None:
        """`activity_of` gets the pid of a process that is silent."""
        self._timeout_ms = timeout_ms
        self._activity_of = activity_of
        self._watched: dict[int, _Watched] = {}
        self._ticked_ms: int | None = None

    def heard(self, pid: int, message: bytes, now_ms: int) -> None:
        """A datagram came: assignments, one a line."""
        words = message.split(b"\n")
        if STOPPING in words:
            self.gone(pid)
        elif READY in words or (WATCHDOG in words and pid in self._watched):
            self._watched[pid] = _Watched(now_ms)

    def gone(self, pid: int) -> None:
        """Its process has ended, or ends by itself."""
        self._watched.pop(pid, None)

    def tick(self, now_ms: int) -> list[int]:
        """The pids that hang, each once. Call it every TICK_MS."""
        late_ms = 0 if self._ticked_ms is None else now_ms - self._ticked_ms - TICK_MS
        self._ticked_ms = now_ms
        if late_ms >= PAUSED_MS:
            self._watched = {pid: _Watched(now_ms) for pid in self._watched}
        hung = [pid for pid, watched in self._watched.items() if self._hangs(pid, watched, now_ms)]
        for pid in hung:
            self.gone(pid)
        return hung

    def _hangs(self, pid: int, watched: _Watched, now_ms: int) -> bool:
        if now_ms - watched.heard_ms < self._timeout_ms:
            return False
        activity = self._activity_of(pid)
        if watched.suspected_cpu_ms is None:
            watched.suspected_cpu_ms = activity.cpu_ms
        watched.idle_ticks = 0 if activity.busy else watched.idle_ticks + 1
        used_ms = activity.cpu_ms - watched.suspected_cpu_ms
        return watched.idle_ticks >= IDLE_TICKS or used_ms >= self._timeout_ms


def activity_of(pid: int) -> Activity:
    """From /proc. A process that is gone is not busy."""
    busy, ticks = False, 0
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # that thread has ended
            continue
        busy = busy or fields[0] in "RD"
        ticks += int(fields[11]) + int(fields[12])
    return Activity(busy, ticks * 1000 // CLOCK_TICKS)


class NotifySocket:
    """Where the children of this process send their datagrams. The kernel names the sender."""

    def __init__(self, heard: Callable[[int, bytes], None]) -> None:
        """`heard` gets pid and message. Needs a running loop."""
        self.name = f"@batonmq-{os.getpid()}-{secrets.token_hex(4)}"
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        name_senders(self._socket)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self.name[1:]}")
        self._loop.add_reader(self._socket.fileno(), self._read)

    def environ(self, timeout_s: float) -> dict[str, str]:
        """What a child needs to know."""
        return {NOTIFY_SOCKET: self.name, WATCHDOG_USEC: str(int(timeout_s * 1_000_000))}

    def close(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        while True:
            try:
                message, ancillary, _, _ = self._socket.recvmsg(
                    _MESSAGE_SIZE_MAX, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except BlockingIOError:
                return
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, _, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
                    self._heard(pid, message)
