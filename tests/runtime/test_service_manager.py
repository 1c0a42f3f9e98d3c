"""The watchdog of a service manager: for whom it is meant, and how often it is fed."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from batonmq.runtime.service_manager import (
    FEEDS,
    NOTIFY_SOCKET,
    READY,
    STOPPING,
    WATCHDOG,
    WATCHDOG_USEC,
    ServiceManager,
)

PID = 77


def test_it_is_fed_several_times_within_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[float] = []
    timer = SimpleNamespace(cancel=lambda: None)
    loop = SimpleNamespace(call_later=lambda after_s, feed: timers.append(after_s) or timer)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        environ = {NOTIFY_SOCKET: str(tmp_path / "notify"), WATCHDOG_USEC: "3000000"}
        process = ServiceManager(environ, PID)
        process.serving()
        process.serving()
        process.stopping()
        process.close()
        manager.setblocking(False)
        seen = [manager.recv(100) for _ in range(3)]
        with pytest.raises(BlockingIOError):
            manager.recv(100)
    assert seen == [READY, WATCHDOG, STOPPING]
    assert timers == [3.0 / FEEDS] and FEEDS >= 2
