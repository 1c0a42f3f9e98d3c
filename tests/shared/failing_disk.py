"""A disk that fails in this process, at one call after the other, as `kill_walk` kills a child."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.cluster.fault_points import SpoiledDiskCalls, parse_disk_faults


class Struck:
    """Whether the rule has spoiled a call."""

    def __init__(self, faults: SpoiledDiskCalls) -> None:
        self._faults = faults

    def __bool__(self) -> bool:
        return self._faults.is_over


@contextmanager
def failing(rules: str) -> Iterator[Struck]:
    """`rules`: those of `lab.cluster.fault_points`, such as "pwrite * EIO once after 3"."""
    faults = SpoiledDiskCalls(parse_disk_faults(rules))
    try:
        yield Struck(faults)
    finally:
        faults.remove()


def open_below(folder: Path) -> list[str]:
    """The files of `folder` that this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return [name for name in map(os.path.realpath, links) if name.startswith(str(folder))]


def walk_errors(rule: str, attempt: Callable[[str, int], bool], stride: int = 1) -> int:
    """For n = 0, `stride`, …: `attempt(f"{rule} once after {n}", n)` does an operation under that
    rule, looks at what came of it, and returns whether a call failed. The first n at which none
    did."""
    for number in itertools.count(0, stride):
        text = f"{rule} once after {number}"
        try:
            if not attempt(text, number):
                return number
        except BaseException as error:
            error.add_note(f"the disk: {text}")
            raise
    raise AssertionError("endless")
