"""What /proc says of processes, and child processes that end with us whatever happens."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
STOP_GRACE_S: Final = 15.0
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ProcStat:
    """The fields of /proc/PID/stat that the bench reads. `cpu_ticks` = user + system."""

    pid: int
    command: str
    state: str
    cpu_ticks: int


def parse_stat(text: str) -> ProcStat:
    """Reads one /proc/PID/stat line. A command may hold blanks and brackets itself."""
    head, _, tail = text.rpartition(")")
    pid, _, command = head.partition("(")
    fields = tail.split()
    return ProcStat(int(pid), command, fields[0], int(fields[11]) + int(fields[12]))


def parse_status_kib(text: str, name: str) -> int:
    """A memory line of /proc/PID/status, such as `RssAnon`, in KiB. Raises KeyError if absent."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise KeyError(name)


def parse_busy_ticks(text: str) -> int:
    """Ticks that all cores together did not idle, from /proc/stat; time stolen from us included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split()[1:9])
    return user + nice + system + irq + softirq + steal


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that these processes, with all their threads, have used so far."""
    return sum(parse_stat(_read(pid, "stat")).cpu_ticks for pid in pids) / CLOCK_TICKS


def rss_anon_mib(pids: Iterable[int]) -> float:
    """Anonymous resident memory of these processes together, MiB."""
    return sum(parse_status_kib(_read(pid, "status"), "RssAnon") for pid in pids) / 1024


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processor time of named groups of processes between two looks, in seconds.

    `others_s` is what processes outside all groups (and outside the bench) used, with what the
    hypervisor took: the noise of the machine.
    """

    seconds: Mapping[str, float]
    wall_s: float
    others_s: float = 0.0

    @property
    def others_percent(self) -> float:
        """The noise, in percent of one core."""
        return 100 * self.others_s / self.wall_s

    def micros_per(self, count: int) -> dict[str, float]:
        """Microseconds of each group for one of `count` things done in that time."""
        return {name: used * 1e6 / max(1, count) for name, used in self.seconds.items()}


class CpuMeter:
    """Looks at groups of processes when made; `stop` tells what they used since."""

    def __init__(self, groups: Mapping[str, Sequence[int]]) -> None:
        self._groups = {name: list(pids) for name, pids in groups.items() if pids}
        self._all = {os.getpid(), *(pid for pids in self._groups.values() for pid in pids)}
        self._before = {name: cpu_seconds(pids) for name, pids in self._groups.items()}
        self._others_before = self._others()
        self._began = time.monotonic()

    def _others(self) -> float:
        busy = parse_busy_ticks(Path("/proc/stat").read_text()) / CLOCK_TICKS
        return busy - cpu_seconds(self._all)

    def stop(self) -> CpuUse:
        used = {name: cpu_seconds(pids) - self._before[name] for name, pids in self._groups.items()}
        others = max(0.0, self._others() - self._others_before)
        return CpuUse(used, time.monotonic() - self._began, others)


def _end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, number)


def spawn(
    argv: Sequence[str],
    log: Path,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    end_signal: signal.Signals = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, so that ctrl-C reaches only us. It ends with us,
    by `end_signal`, should we be killed."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env=None if env is None else dict(env),
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, end_signal),
        )


def spawn_talking(argv: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """As `spawn`, with pipes to its standard input and output (text, one line each)."""
    with log.open("ab") as errors:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def stop_all(processes: Iterable[subprocess.Popen[bytes] | subprocess.Popen[str]]) -> None:
    """SIGTERM to all of them, SIGKILL after 15 s; returns when all have been reaped."""
    living = [process for process in processes if process.poll() is None]
    for process in living:
        process.terminate()
    deadline = time.monotonic() + STOP_GRACE_S
    for process in living:
        try:
            process.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tail(path: Path, size: int = 1500) -> str:
    """The end of a log, for a report of what failed."""
    try:
        return path.read_bytes()[-size:].decode(errors="replace")
    except OSError:
        return ""
