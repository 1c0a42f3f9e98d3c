"""Spark jobs in one session, in a process of its own; none stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from lab.cluster.processes import spawn_talking, tail

DONE: Final = 0
FOUND: Final = 1
INTERRUPT_S: Final = 60.0
POLL_S: Final = 0.1
ROOT: Final = Path(__file__).resolve().parents[3]

Arguments = Sequence[str | Path]


class JobFailed(RuntimeError):
    """A job ended with neither 0 nor 1; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """`code` 0: done; 1: done, and something was found. `document`: its answer (`--json`)."""

    code: int
    document: dict[str, Any]
    seconds: float


class Jobs:
    """A process with one Spark session, see `one_session`: it starts at once, and jobs wait for it.

    `folder`: where logs go. Use it as a context; nothing of it stays.
    """

    def __init__(self, folder: Path, master: str) -> None:
        self._folder = folder
        self._log = folder / "spark.log"
        argv = [sys.executable, "-m", "lab.faults.aftermath.one_session", "--master", master]
        self._process = spawn_talking([*argv, "--folder", str(folder)], self._log, cwd=ROOT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        end(self._process)
        self._process.stdout.close()

    def begin(self, name: str, arguments: Arguments) -> None:
        """Ask for a job; it begins when the session is there."""
        request = {"job": name, "arguments": [*map(str, arguments)]}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` tells why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """ctrl-C for the job that runs."""
        self._process.send_signal(signal.SIGINT)

    def answer(self, name: str) -> tuple[int, str]:
        """(exit code, what it printed) of the job, at its end. Raises JobFailed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"code": self._process.wait()}
        code = int(answer["code"])
        if not line or code not in (DONE, FOUND):
            log = self._folder / f"{name}.log" if line else self._log
            raise JobFailed(f"{name} ended with {code}, see {log}\n{tail(log)}")
        return code, str(answer["text"])

    def run(self, name: str, arguments: Arguments) -> JobResult:
        """Runs `batonmq.spark.jobs.NAME` to its end. Raises JobFailed."""
        began = time.monotonic()
        self.begin(name, [*arguments, "--json"])
        code, text = self.answer(name)
        document = json.loads(text) if text.strip() else {}
        return JobResult(code, document, time.monotonic() - began)


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
