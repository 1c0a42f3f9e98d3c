"""Processor time, memory and the noise of the machine, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")


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


def parse_memory_kib(text: str, name: str) -> int:
    """A memory line of /proc/PID/smaps_rollup, such as `Pss_Anon`, in KiB. Raises KeyError if it is
    absent."""
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


def anon_mib(pids: Iterable[int]) -> float:
    """Anonymous resident memory of these processes together, MiB; of a page that processes share
    since a fork each has its part."""
    return sum(parse_memory_kib(_read(pid, "smaps_rollup"), "Pss_Anon") for pid in pids) / 1024


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processor time of named groups of processes between two readings, in seconds.

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
    """Reads the use of groups of processes when made; `stop` returns their use since then."""

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
