"""Spark jobs as processes of their own, as for an operator; none stays behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lab.cluster.processes import ROOT, spawn_talking, tail

DONE: Final = 0
FOUND: Final = 1
INTERRUPT_S: Final = 60.0
POLL_S: Final = 0.1

Arguments = Sequence[str | Path]


class JobFailed(RuntimeError):
    """A job ended with neither 0 nor 1; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """`code` 0: done; 1: done, and something was found. `document`: its answer (`--json`)."""

    code: int
    document: dict[str, Any]
    seconds: float


def run(folder: Path, name: str, arguments: Arguments) -> JobResult:
    """Runs `batonmq.spark.jobs.NAME` to its end; its log goes to `folder`. Raises JobFailed."""
    began = time.monotonic()
    with running(folder, name, [*arguments, "--json"]) as process:
        text, _ = process.communicate()
    check_ended(folder, name, process)
    document = json.loads(text) if text.strip() else {}
    return JobResult(process.returncode, document, time.monotonic() - began)


@contextlib.contextmanager
def running(folder: Path, name: str, arguments: Arguments) -> Iterator[subprocess.Popen[str]]:
    """The job, which is ended with the context."""
    argv = [sys.executable, "-m", f"batonmq.spark.jobs.{name}", *map(str, arguments)]
    process = spawn_talking(argv, folder / f"{name}.log", cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            end(process)


def check_ended(folder: Path, name: str, process: subprocess.Popen[str]) -> None:
    """Raises JobFailed."""
    if process.returncode not in (DONE, FOUND):
        log = folder / f"{name}.log"
        raise JobFailed(f"{name} ended with {process.returncode}, see {log}\n{tail(log)}")


def end(process: subprocess.Popen[Any]) -> None:
    """ctrl-C for the job; what is left of its group (the JVM) after 60 s is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(INTERRUPT_S)
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
