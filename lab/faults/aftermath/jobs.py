"""Spark jobs as processes of their own, as an operator starts them; none stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.cluster.processes import spawn, spawn_talking, tail

DONE: Final = 0
FOUND: Final = 1
INTERRUPT_S: Final = 60.0
POLL_S: Final = 0.1
ROOT: Final = Path(__file__).resolve().parents[3]

Arguments = Sequence[str | Path]
Progress = Callable[[str], None]


class JobFailed(RuntimeError):
    """A job ended with neither 0 nor 1; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """`code` 0: done; 1: done, and something was found. `document`: its answer (`--json`)."""

    code: int
    document: dict[str, Any]
    seconds: float


def run_job(name: str, arguments: Arguments, folder: Path, master: str) -> JobResult:
    """Runs `batonmq.spark.jobs.NAME` to its end. Its output goes to `folder`/NAME.log.

    Raises JobFailed; on any other exception, such as ctrl-C, the job is ended first.
    """
    log = folder / f"{name}.log"
    began = time.monotonic()
    process = spawn_talking(_argv(name, [*arguments, "--json"], master), log)
    assert process.stdout is not None and process.stdin is not None
    try:
        text = process.stdout.read()
        code = process.wait()
    except BaseException:
        end(process)
        raise
    finally:
        process.stdout.close()
        process.stdin.close()
    if code not in (DONE, FOUND):
        raise JobFailed(f"{name} ended with {code}, see {log}\n{tail(log)}")
    return JobResult(code, json.loads(text) if text.strip() else {}, time.monotonic() - began)


@contextlib.contextmanager
def running_job(
    name: str, arguments: Arguments, folder: Path, master: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A job that goes on until the block ends (SIGINT then). Raises JobFailed if it does not end
    with 0 then, or has ended before."""
    log = folder / f"{name}.log"
    process = spawn(_argv(name, arguments, master), log, cwd=ROOT)
    try:
        yield process
        early = process.poll()
    finally:
        end(process)
    if early is not None or process.returncode != DONE:
        when = "when asked to" if early is None else "on its own"
        raise JobFailed(f"{name} ended with {process.returncode} {when}, see {log}\n{tail(log)}")


def end(process: subprocess.Popen[Any]) -> None:
    """ctrl-C for the job; what is left of its group (the JVM) after 60 s is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        pass
    deadline = time.monotonic() + INTERRUPT_S
    while _group_exists(process.pid) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _argv(name: str, arguments: Arguments, master: str) -> list[str]:
    given = [str(each) for each in arguments]
    return [sys.executable, "-m", f"batonmq.spark.jobs.{name}", "--master", master, *given]


def followed(path: Path, progress: Progress, over: threading.Event) -> threading.Thread:
    """Passes on each line of a growing file until `over` is set; the thread that does it."""

    def follow() -> None:
        position = 0
        while True:
            last = over.wait(POLL_S)
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                file.seek(position)
                while (line := file.readline()).endswith("\n"):
                    position = file.tell()
                    progress(line.rstrip())
            if last:
                return

    thread = threading.Thread(target=follow, name=f"follow-{path.name}", daemon=True)
    thread.start()
    return thread
