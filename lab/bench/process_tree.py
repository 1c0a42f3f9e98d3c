"""Processor time and memory of a process and all below it."""

from __future__ import annotations

import threading
from typing import Self

import psutil

_SAMPLE_S = 0.2


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

    `peak`: most resident bytes of the tree, `peak_java` of its JVMs, `peak_python` of its other
    processes but the root. `cpu_s`: processor seconds, also of what ended without being waited for.
    """

    def __init__(self, pid: int | None = None) -> None:
        self.peak = self.peak_java = self.peak_python = 0
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
            held = {"root": 0, "java": 0, "python": 0}
            for process in _tree(self._root):
                try:
                    kind = "java" if "java" in process.name() else "python"
                    kind = "root" if process == self._root else kind
                    held[kind] += process.memory_info().rss
                    times = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self._spent[process.pid] = times.user + times.system
            self.peak = max(self.peak, sum(held.values()))
            self.peak_java = max(self.peak_java, held["java"])
            self.peak_python = max(self.peak_python, held["python"])
