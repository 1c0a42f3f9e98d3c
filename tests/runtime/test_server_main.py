"""What a server prints if it cannot start: one line, and no traceback."""

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest

from batonmq.runtime import server_main
from batonmq.runtime.server_main import COLLECTION_MAX_S, START_HOOK, ShortCollections
from lab.cluster.fault_points import fault_environment


def namesrv(folder: Path, *arguments: str, port: int = 1) -> subprocess.CompletedProcess[str]:
    config = folder / "namesrv.yaml"
    config.write_text(f"namesrv:\n  listenPort: {port}\n  bindAddress: 127.0.0.1\n")
    argv = [sys.executable, "-m", "batonmq.namesrv.main", "-c", str(config), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=30)


def test_a_pid_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wanted = tmp_path / "file" / "pid"
    done = namesrv(tmp_path, "--pid-file", str(wanted))
    assert (done.returncode, done.stderr) == (1, f"namesrv: --pid-file {wanted}: File exists\n")


def test_a_port_in_use_is_named_in_words(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = namesrv(tmp_path, port=port)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"namesrv: namesrv port {port}: it is taken by process {os.getpid()} (")
    assert "Errno" not in last


SERVER = """
import asyncio, os, signal, sys
from batonmq.runtime.recent_events import RecentEvents, records_event
from batonmq.runtime.server_main import run_server

class Core:
    recent_events = RecentEvents()
    @records_event
    def tick(self, error):
        raise error("the floor is above the roof")

async def serve(main):
    loop, tick = asyncio.get_running_loop(), Core().tick
    async def task(): tick(AssertionError)
    how = {HOW!r}
    if how == "timer": loop.call_later(0, tick, AssertionError)
    elif how == "task": loop.create_task(task())
    else: loop.call_later(0, tick, ValueError)
    if how == "error": loop.call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)
    if how == "pid":
        while not os.path.exists(sys.argv[4]): await asyncio.sleep(0.01)
        print(os.getpid())
        os.kill(os.getpid(), signal.SIGTERM)
    await main.stopped()

raise SystemExit(run_server("lift", {}, serve))
"""


FAILS = """
import asyncio
from batonmq.runtime.server_main import run_server
from batonmq.protocol.errors import BatonError

async def serve(main):
    loop = asyncio.get_running_loop()
    for why in ("the disk is gone", "so is the log"):
        loop.call_soon(main.fail, BatonError(why))
    await main.stopped()

raise SystemExit(run_server("lift", {}, serve))
"""


def lift(
    folder: Path, *arguments: str, how: str | None = None, stderr: IO[str] | int = PIPE, **env: str
) -> subprocess.CompletedProcess[str]:
    """A server that fails this way; by default it fails as a service does that has to stop."""
    config = folder / "lift.yaml"
    config.write_text("")
    script = SERVER.replace("{HOW!r}", repr(how)) if how else FAILS
    argv = [sys.executable, "-c", script, "-c", str(config), *arguments]
    env = os.environ | env
    return subprocess.run(argv, stdout=PIPE, stderr=stderr, text=True, timeout=30, env=env)


def test_a_failed_assertion_ends_the_process_also_if_its_log_is_on_a_full_disk(
    tmp_path: Path,
) -> None:
    """It continued without the timer that had failed."""
    with Path("/dev/full").open("w") as full:
        done = lift(tmp_path, how="timer", stderr=full, PYTHONUNBUFFERED="")
    assert done.returncode == 1


@pytest.mark.parametrize(("how", "code"), [("timer", 1), ("task", 1), ("error", 0)])
def test_a_failed_assertion_ends_the_process_wherever_it_fails(
    how: str, code: int, tmp_path: Path
) -> None:
    """A timer whose callback fails is not armed again: without it the process would only seem to
    live. Another error of a callback is logged; what it belongs to may continue."""
    done = lift(tmp_path, how=how)
    assert done.returncode == code, done.stderr
    assert "the floor is above the roof" in done.stderr
    assert ("a rule of its own does not hold" in done.stderr) == (code == 1)
    assert ("the last 1 events, oldest first" in done.stderr) == (code == 1)


def test_a_service_that_has_to_stop_exits_with_1_and_the_first_reason(tmp_path: Path) -> None:
    done = lift(tmp_path)
    log, last = done.stderr.splitlines()
    assert (done.returncode, last) == (1, "lift: stopped: the disk is gone")
    assert "server_started name=lift" in log


def test_r53_no_room_for_the_pid_file_ends_no_start_and_it_is_written_later(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "lift.pid"
    full = fault_environment(disk="replace lift.pid EDQUOT once")
    done = lift(tmp_path, "--pid-file", str(pid_file), how="pid", **full)
    assert f"pid_file_not_written path={pid_file}" in done.stderr
    assert (done.returncode, pid_file.read_text()) == (0, done.stdout), "it served"


@pytest.mark.parametrize(
    "generation, took_s, kept", [(2, 2 * COLLECTION_MAX_S, True), (2, 0.0, False), (1, 9.0, False)]
)
def test_r58_what_survives_a_long_collection_is_not_scanned_again(
    monkeypatch: pytest.MonkeyPatch, generation: int, took_s: float, kept: bool
) -> None:
    times = iter([1.0, 1.0 + took_s])
    monkeypatch.setattr(server_main, "boot_s", lambda: next(times))
    kept_objects: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: kept_objects.append("all"))
    collections = ShortCollections()
    for phase in ("start", "stop"):
        collections(phase, {"generation": generation})
    assert bool(kept_objects) == kept


def test_a_start_hook_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    done = lift(tmp_path, **{START_HOOK: "no.such.module"})
    assert (done.returncode, done.stderr) == (2, f"lift: {START_HOOK}: No module named 'no'\n")
