"""Files that a thread makes before their queues write to them.

A new name in a folder waits for the journal of the file system, for tenths of a second while a
sync is under way: in a burst of new topics no loop can wait for that. What was made and is not
taken is a file of zeros, in which the next start finds no unit. One thread, but for `Making.run`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from batonmq.process import disk


class Making:
    """Some files, each of `size` bytes."""

    def __init__(self, paths: Sequence[str], size: int) -> None:
        self._left = list(paths)
        self._size = size
        self.made: list[str] = []

    @property
    def is_done(self) -> bool:
        return not self._left

    def run(self) -> None:
        """In any thread. A file that is there already is left alone, and does not count as made.
        Raises OSError; without room it can be called again."""
        while self._left:
            path = self._left[-1]
            disk.makedirs(path.rpartition("/")[0])
            try:
                fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                pass
            else:
                try:
                    disk.ftruncate(fd, self._size)
                finally:
                    disk.close(fd)
                self.made.append(path)
            self._left.pop()


class NewFiles:
    """Which files were made, and wait to be taken."""

    def __init__(self) -> None:
        self._is_made: dict[str, bool] = {}

    def make(self, paths: Sequence[str], size: int) -> Making:
        """What is to run in a thread; then call `note`."""
        self._is_made |= dict.fromkeys(paths, False)
        return Making(paths, size)

    def note(self, making: Making) -> None:
        """It has ended. What was forgotten meanwhile is not there any more, or another's."""
        for path in making.made:
            if path in self._is_made:
                self._is_made[path] = True

    def take(self, path: str) -> bool:
        """Whether the file is there, as it was made; from now on it is the caller's."""
        return self._is_made.pop(path, False)

    def forget(self, folder: str) -> None:
        """What is in it goes away with it."""
        for path in [path for path in self._is_made if path.rpartition("/")[0] == folder]:
            del self._is_made[path]
