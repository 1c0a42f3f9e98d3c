"""What a server tells its service manager, and how a launcher judges what it hears."""

import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from batonmq.launcher.watchdog import (
    IDLE_TICKS,
    PAUSED_MS,
    TICK_MS,
    Activity,
    NotifySocket,
    Watchdog,
    activity_of,
)
from batonmq.runtime.service_manager import (
    NOTIFY_SOCKET,
    READY,
    STOPPING,
    WATCHDOG,
    WATCHDOG_PID,
    WATCHDOG_USEC,
    ServiceManager,
)

TIMEOUT_MS = 2000
PID = 7


class Life:
    """A watchdog whose clock is moved by hand, ticked as the launcher ticks it."""

    def __init__(self, *, busy: bool = False, cpu_share: float = 0.0) -> None:
        """What its process does while it is silent."""
        self.watchdog = Watchdog(
            TIMEOUT_MS, lambda pid: Activity(busy, int(cpu_share * self.now_ms))
        )
        self.now_ms = 1_000_000
        self.hung: list[int] = []
        self.watchdog.tick(self.now_ms)

    def hear(self, message: bytes, pid: int = PID) -> None:
        self.watchdog.heard(pid, message, self.now_ms)

    def live(self, ms: int, *, fed: bool) -> None:
        for _ in range(0, ms, TICK_MS):
            self.now_ms += TICK_MS
            if fed:
                self.hear(WATCHDOG)
            self.hung += self.watchdog.tick(self.now_ms)


def test_a_silent_process_is_hung_once_after_the_time_out() -> None:
    life = Life()
    life.hear(READY)
    life.live(10_000, fed=True)
    life.live(TIMEOUT_MS, fed=False)
    assert life.hung == []
    life.live((IDLE_TICKS - 1) * TICK_MS, fed=False)
    assert life.hung == [PID]
    life.live(10_000, fed=False)
    assert life.hung == [PID]


def test_a_starved_process_lives_however_long_it_is_silent() -> None:
    """It waits for the processor and gets a fiftieth of it: a turn of its loop lasts long."""
    life = Life(busy=True, cpu_share=0.02)
    life.hear(READY)
    life.live(60_000, fed=False)
    assert life.hung == []


def test_an_endless_loop_is_a_hang() -> None:
    life = Life(busy=True, cpu_share=1.0)
    life.hear(READY)
    life.live(2 * TIMEOUT_MS - TICK_MS, fed=False)
    assert life.hung == []
    life.live(TICK_MS, fed=False)
    assert life.hung == [PID]


def test_what_is_known_of_a_process_is_what_it_does() -> None:
    busy = activity_of(os.getpid())
    assert busy.busy, "it runs this line"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waiting:
        try:
            while activity_of(waiting.pid).busy:
                os.sched_yield()
        finally:
            waiting.kill()
    assert not activity_of(waiting.pid).busy


_CLONE = {"x86_64": 56, "aarch64": 220}
_WAITS = """
import ctypes, signal
CLONE_VFORK = 0x4000
if ctypes.CDLL(None).syscall({number}, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    input()
"""
"""As vfork: the parent is in state D until the child ends."""


def test_r50_a_process_that_waits_for_its_disk_does_not_hang() -> None:
    waits = _WAITS.format(number=_CLONE[platform.machine()])
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE) as waiting:
        try:
            stat = Path(f"/proc/{waiting.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "D":
                os.sched_yield()
            watchdog = Watchdog(TIMEOUT_MS, activity_of)
            watchdog.heard(waiting.pid, READY, 0)
            hung = [watchdog.tick(ms) for ms in range(0, 5 * TIMEOUT_MS, TICK_MS)]
            assert not any(hung)
        finally:
            waiting.kill()


def test_a_process_that_was_starved_for_less_than_the_time_out_lives() -> None:
    life = Life()
    life.hear(READY)
    for silence_ms in (300, 1000, TIMEOUT_MS - TICK_MS):
        life.live(silence_ms, fed=False)
        life.live(TICK_MS, fed=True)
    assert life.hung == []


def test_nobody_is_watched_before_ready_and_after_stopping() -> None:
    life = Life()
    life.hear(WATCHDOG)
    life.live(3 * TIMEOUT_MS, fed=False)
    life.hear(READY)
    life.hear(STOPPING)
    life.hear(WATCHDOG)
    life.live(3 * TIMEOUT_MS, fed=False)
    assert life.hung == []


def test_the_end_of_a_process_ends_its_watch() -> None:
    life = Life()
    life.hear(READY)
    life.watchdog.gone(PID)
    life.live(3 * TIMEOUT_MS, fed=False)
    assert life.hung == []


@pytest.mark.parametrize("late_ms", [PAUSED_MS, 60_000])
def test_a_launcher_that_stood_still_hears_again_before_it_judges(late_ms: int) -> None:
    life = Life()
    life.hear(READY)
    life.live(TIMEOUT_MS - TICK_MS, fed=False)
    life.now_ms += TICK_MS + late_ms
    assert life.watchdog.tick(life.now_ms) == []
    life.live(TIMEOUT_MS - TICK_MS, fed=False)
    assert life.hung == []
    life.live(IDLE_TICKS * TICK_MS, fed=False)
    assert life.hung == [PID]


def test_what_a_server_sends_comes_to_the_launcher_under_its_pid() -> None:
    async def talk() -> None:
        heard: list[tuple[int, bytes]] = []
        reported = asyncio.Event()

        def hear(pid: int, message: bytes) -> None:
            heard.append((pid, message))
            reported.set()

        notify = NotifySocket(hear)
        manager = ServiceManager(notify.environ(0.008), os.getpid())
        manager.serving()
        manager.serving()

        async def until(done: Callable[[], bool]) -> None:
            while not done():
                reported.clear()
                await reported.wait()

        await until(lambda: len(heard) >= 4)
        manager.stopping()
        await until(lambda: heard[-1][1] == STOPPING)
        manager.close()
        notify.close()
        assert {pid for pid, _ in heard} == {os.getpid()}
        assert [message for _, message in heard[:3]] == [READY, WATCHDOG, WATCHDOG]

    uvloop.run(asyncio.wait_for(talk(), 20))


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({WATCHDOG_USEC: "2000000"}, 2.0),
        ({WATCHDOG_USEC: "2000000", WATCHDOG_PID: str(PID)}, 2.0),
        ({WATCHDOG_USEC: "2000000", WATCHDOG_PID: "1"}, 0.0),
        ({WATCHDOG_USEC: "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_time_out_is_the_one_of_this_process(environ: dict[str, str], seconds: float) -> None:
    assert ServiceManager(environ, PID).watchdog_s == seconds


async def test_a_manager_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    manager = ServiceManager({NOTIFY_SOCKET: str(tmp_path / "gone"), WATCHDOG_USEC: "1000"}, 1)
    manager.serving()
    await asyncio.sleep(0)
    manager.stopping()
    manager.close()
