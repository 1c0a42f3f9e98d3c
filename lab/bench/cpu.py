"""Processor time and memory of processes, or of trees of them, and the noise of the machine."""

import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

_SAMPLE_S = 0.2


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that these processes, with all their threads, have used so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def anon_mib(pids: Iterable[int]) -> float:
    """Anonymous resident memory of these processes together, MiB. A page that is shared since a
    fork is divided among its processes."""
    texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(re.findall(r"^Pss_Anon:\s+(\d+)", text, re.M)[0]) for text in texts) / 1024


def busy_seconds() -> float:
    """What all cores together did not idle; time stolen from us included."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


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
        return busy_seconds() - cpu_seconds(self._all)

    def stop(self) -> CpuUse:
        used = {name: cpu_seconds(pids) - self._before[name] for name, pids in self._groups.items()}
        others = max(0.0, self._others() - self._others_before)
        return CpuUse(used, time.monotonic() - self._began, others)


def cpu_of_tree() -> float:
    """Processor seconds of this process and all below it, with ended ones that their parent waited
    for."""
    total = 0.0
    for process in _tree(psutil.Process()):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class TreeSampler:
    """Samples a process tree while a `with` block runs.

    `peak`: most resident bytes of the tree, `peak_java` of its JVMs. `cpu_s`: processor seconds,
    also of what ended without being waited for.
    """

    def __init__(self, pid: int) -> None:
        self.peak = self.peak_java = 0
        self._spent: dict[int, float] = {}
        self._root = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tree-sampler")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        return sum(self._spent.values())

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            held = {"java": 0, "other": 0}
            for process in _tree(self._root):
                try:
                    kind = "java" if "java" in process.name() else "other"
                    held[kind] += process.memory_info().rss
                    times = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self._spent[process.pid] = times.user + times.system
            self.peak = max(self.peak, sum(held.values()))
            self.peak_java = max(self.peak_java, held["java"])
