"""Child processes of the launcher: started, watched, stopped; none outlives it.

The kernel ends a child with its parent (PR_SET_PDEATHSIG), so a launcher that is killed leaves no
process. A process that a user starts again by hand with the same arguments is found by its pid file
and watched, too, but it is no child.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from batonmq.launcher.current import serves
from batonmq.launcher.forks import ForkServer, ServerProcess
from batonmq.launcher.layout import Layout, Node, held_addresses
from batonmq.launcher.watchdog import TICK_MS, NotifySocket, Watchdog, activity_of
from batonmq.runtime import disk
from batonmq.runtime.backoff import Backoff
from batonmq.runtime.clock import boot_ms
from batonmq.runtime.durable_file import shift_files
from batonmq.runtime.sockets import listening_socket

TERM_GRACE_S: Final = 10.0
HUNG_GRACE_S: Final = 0.1
ADOPT_POLL_S: Final = 0.2
LIVED_MS: Final = 3_000
RESPAWN_FIRST_MS: Final = 200
RESPAWN_MAX_MS: Final = 5_000
LOG_BYTES_MAX: Final = 50 << 20
LOGS_KEPT: Final = 5
ROTATE_LOOK_S: Final = 30.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """One process of the cluster. `pid` is None while none serves."""

    node: Node
    log_path: Path
    process: ServerProcess | None = None
    pid: int | None = None
    started_ms: int = 0
    listeners: list[socket.socket] = field(default_factory=list)
    """Held for it while it is away for a moment, so that no connection is refused."""
    hung: bool = False
    leaving: bool = False
    """It is being removed, and not started again."""
    pauses: Backoff = field(default_factory=lambda: Backoff(RESPAWN_FIRST_MS, RESPAWN_MAX_MS))


ChildChanged = Callable[[Node, int | None, str], None]
"""Is called with the node, its pid or None if it has ended, and how it started or ended."""


def describe_exit(code: int) -> str:
    """`exit 1`, `SIGKILL`: how a process ended, for people."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Children:
    """All processes of one cluster. `changed` is called from the loop for every start and end;
    `respawn` says whether a process that has ended is started again."""

    def __init__(
        self,
        layout: Layout,
        fork_server: ForkServer,
        changed: ChildChanged,
        respawn: Callable[[str], bool],
        watchdog_s: float = 0.0,
    ) -> None:
        """`watchdog_s`: how long the loop of a child may stand still before it is ended; 0: it is
        not watched."""
        self.by_name = {
            node.name: Child(node, node.data_dir / "process.log") for node in layout.nodes
        }
        self.layout = layout
        self._changed = changed
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.respawn = respawn
        self.stopping = False
        self._watchdog_s = watchdog_s
        self._watchdog = Watchdog(int(watchdog_s * 1000), activity_of)
        self._notify: NotifySocket | None = None
        self._fork_server = fork_server
        self._watching: asyncio.Task[None] | None = None
        self._rotating: asyncio.Task[None] | None = None

    async def start_all(self) -> None:
        """Raises OSError, once no start is under way: `stop_all` ends only what has a pid."""
        if self._watchdog_s > 0:
            self._notify = NotifySocket(
                lambda pid, message: self._watchdog.heard(pid, message, boot_ms())
            )
            self._watching = asyncio.create_task(self._watch_loops(), name="watch-loops")
        self._rotating = asyncio.create_task(self._rotate_logs(), name="rotate-logs")
        starts = (self.start(name) for name in self.by_name)
        for failure in await asyncio.gather(*starts, return_exceptions=True):
            if failure is not None:
                raise failure

    async def add(self, node: Node) -> None:
        """Starts one process more. Raises OSError."""
        # A new mapping: loops that wait within an iteration hold the one before.
        self.by_name = {**self.by_name, node.name: Child(node, node.data_dir / "process.log")}
        try:
            await self.start(node.name)
        except OSError:
            self._forget(node.name)
            raise

    async def remove(self, name: str) -> None:
        child = self.by_name[name]
        child.leaving = True
        await self.stop(name)
        while not (watcher := self._watchers[name]).done():
            await asyncio.wait({watcher}, timeout=ADOPT_POLL_S)
            await self.stop(name)  # it may have been within its start
        self._forget(name)

    def _forget(self, name: str) -> None:
        self.by_name = {each: child for each, child in self.by_name.items() if each != name}
        self._watchers.pop(name, None)

    async def start(self, name: str) -> None:
        """Starts one process. Its output goes to `process.log` in its data folder."""
        child = self.by_name[name]
        before = self._watchers.pop(name, None)
        if before is not None and before is not asyncio.current_task():
            before.cancel()  # it waited for a process that a user starts by hand
        # Its pid may be of another process by now, also of another server.
        child.node.pid_file.unlink(missing_ok=True)
        with child.log_path.open("ab"):  # the new process would have nowhere to say why it ended
            pass
        watched = self._notify.environ(self._watchdog_s) if self._notify is not None else {}
        child.process = await self._fork_server.start(
            _argv(child.node),
            child.log_path,
            os.environ | {"PYTHONUNBUFFERED": "1"} | watched,
            self._listeners_for(child),
        )
        child.pid = child.process.pid
        child.started_ms = boot_ms()
        self._changed(child.node, child.pid, "started")
        self._watchers[name] = asyncio.create_task(self._watch(child), name=f"watch-{name}")

    def _listeners_for(self, child: Child) -> list[socket.socket]:
        """None of one that is not started again. Where a port is taken, its own start says so."""
        if not child.listeners and self.respawn(child.node.name):
            with contextlib.suppress(OSError):
                for host, port in held_addresses(self.layout, child.node):
                    child.listeners.append(listening_socket(host, port))
        return child.listeners

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_LOOK_S)
            for child in self.by_name.values():
                try:
                    await asyncio.to_thread(rotate_log, child.log_path)
                except OSError as error:
                    log.warning("log_not_rotated path=%s reason=%s", child.log_path, error)

    async def _watch_loops(self) -> None:
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            for pid in self._watchdog.tick(boot_ms()):
                for child in self.by_name.values():
                    if child.pid == pid:
                        await self._end_hung(child, pid)

    async def _end_hung(self, child: Child, pid: int) -> None:
        """SIGABRT first: faulthandler writes to its log where the loop stands. Nothing waits for
        that longer than a moment; a process that is stopped takes SIGKILL only."""
        child.hung = True
        _signal(pid, signal.SIGABRT)
        if not await self._gone(child, pid, HUNG_GRACE_S):
            _signal(pid, signal.SIGKILL)

    async def _watch(self, child: Child) -> None:
        assert child.process is not None
        code = await child.process.wait()
        self._watchdog.gone(child.process.pid)
        child.pid = None
        how = describe_exit(code)
        if child.hung:
            child.hung = False
            how = f"{how}, its loop stood still for {self._watchdog_s:g} s"
        if code > 0 or self._pauses(child):
            _close_listeners(child)  # it may be away for long
        self._changed(child.node, None, how)
        if self._is_over(child):
            return
        if self.respawn(child.node.name):
            await self._start_again(child)  # this watcher ends, `start` makes the next one
        else:
            await self._watch_adopted(child)

    def _is_over(self, child: Child) -> bool:
        return self.stopping or child.leaving

    def _pauses(self, child: Child) -> bool:
        """Whether it ended so soon that it is not started again at once."""
        return boot_ms() - child.started_ms < LIVED_MS

    async def _start_again(self, child: Child) -> None:
        """One that lived a while comes back at once: its clients wait."""
        if not self._pauses(child):
            child.pauses.reset()
        else:
            await asyncio.sleep(child.pauses.next_ms() / 1000)
        while not self._is_over(child):
            try:
                await self.start(child.node.name)
                return
            except OSError as exc:
                how = f"cannot be started again: {disk.described(exc)}"
                self._changed(child.node, None, how)
            await asyncio.sleep(child.pauses.next_ms() / 1000)

    async def _watch_adopted(self, child: Child) -> None:
        """Waits for a process that a user starts in the place of a dead child."""
        while not self._is_over(child):
            await asyncio.sleep(ADOPT_POLL_S)
            pid = serves(child.node.pid_file)
            alive = pid is not None
            if alive and child.pid is None:
                child.pid = pid
                self._changed(child.node, pid, "started by hand")
            elif not alive and child.pid is not None:
                child.pid = None
                self._changed(child.node, None, "ended")

    async def stop(self, name: str) -> None:
        """Ends one process: SIGTERM, and SIGKILL after 10 s."""
        child = self.by_name[name]
        pid = child.pid
        _close_listeners(child)
        if pid is None:
            return
        _signal(pid, signal.SIGTERM)
        if not await self._gone(child, pid, TERM_GRACE_S):
            _signal(pid, signal.SIGKILL)
            await self._gone(child, pid, 2.0)

    async def stop_all(self, order: list[list[str]]) -> None:
        """Ends all processes, one group of names after the other."""
        self.stopping = True
        for task in filter(None, (self._watching, self._rotating)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for names in order:
            await asyncio.gather(*(self.stop(name) for name in names))
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        if self._notify is not None:
            self._notify.close()

    async def _gone(self, child: Child, pid: int, seconds: float) -> bool:
        ours = child.process is not None and child.process.pid == pid
        try:
            async with asyncio.timeout(seconds):
                if ours:
                    assert child.process is not None
                    await child.process.wait()
                else:
                    while serves(child.node.pid_file) == pid:  # noqa: ASYNC110  no child: no event
                        await asyncio.sleep(0.05)
        except TimeoutError:
            return False
        child.pid = None
        return True


def _argv(node: Node) -> list[str]:
    """Its command line, by the interpreter that `mqctl roll --python` chose, if that was used."""
    try:
        chosen = os.fsdecode(disk.read_bytes(node.python_file)).strip()
    except FileNotFoundError:
        chosen = ""
    return [chosen or sys.executable, *node.argv[1:]]


def rotate_log(path: Path, size_max: int = LOG_BYTES_MAX, kept: int = LOGS_KEPT) -> None:
    """Keeps a `process.log` above `size_max` bytes as `.1`, the one before as `.2` and so on, and
    empties it. Its process writes to it by appending, and needs no signal. What it writes within
    the copy is lost. Raises OSError; trying again then drops no further log."""
    copy, whole = Path(f"{path}.new"), Path(f"{path}.0")
    if not whole.exists():  # else the launcher was killed, or a rename failed, behind the copy
        if not path.exists() or path.stat().st_size <= size_max:
            return
        try:
            shutil.copyfile(path, copy)
            copy.replace(whole)  # before the only other copy is emptied
            os.truncate(path, 0)
        except OSError:
            copy.unlink(missing_ok=True)
            whole.unlink(missing_ok=True)
            raise
    shift_files(path, kept)


def _close_listeners(child: Child) -> None:
    for sock in child.listeners:
        sock.close()
    child.listeners.clear()


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def tail_of_log(child: Child) -> str:
    """The last three lines of a child's log, for the report of its end."""
    try:
        with child.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-3:])


assert sys.platform == "linux", "the launcher relies on prctl and /proc"
