"""The many files of consume queues and indexes: at most `limit` open descriptors, and new files.

A descriptor is borrowed for one system call: the next `fd` call may close it. `NewFiles` are made
by a thread ahead of time: a new name waits for the file system's journal, for tenths of a second
during a sync, and in a burst of new topics the loop cannot wait that long. What the thread could
not make, the loop makes. A file that is made and not used has only zeros, in which the next start
finds no unit. One thread, except `Making.run`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from batonmq.runtime import disk
from batonmq.store.disk_health import StoreHealth

log = logging.getLogger(__name__)

#: A folder beside the files, which Java passes over: one of them failed, so the next start builds
#: all of them again from the log.
UNREADABLE: Final = "unreadable"


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


class Making:
    """Some files of `size` bytes each. `is_done`: `run` has ended."""

    def __init__(self, paths: Sequence[str], size: int) -> None:
        self.paths = paths
        self._size = size
        self._making = threading.Lock()
        self._folder = ""  # in which a file is being made
        self._skipped: set[str] = set()
        self.made: list[str] = []
        self.is_done = False

    def skip(self, folder: str) -> None:
        """Nothing more is made in `folder` after this returns, so it may be removed. From any
        thread; waits for a file that is being made there."""
        # Added before the look: `run` looks the other way round, so one of them sees the other.
        self._skipped.add(folder)
        if self._folder == folder:
            with self._making:
                pass

    def run(self) -> None:
        """In any thread. An existing file is left alone and does not count as made. Ends at the
        first error: the loop will meet it and handle it (R45)."""
        try:
            for path in self.paths:
                with self._making:
                    self._folder = _folder_of(path)
                    if self._folder not in self._skipped:
                        self._make(path)
        except OSError as error:
            log.info("files_left_to_the_loop count=%d reason=%s", len(self.paths), error)
        finally:
            self._folder = ""
            self.is_done = True

    def _make(self, path: str) -> None:
        disk.makedirs(_folder_of(path))
        try:
            fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return
        try:
            disk.ftruncate(fd, self._size)
        finally:
            disk.close(fd)
        self.made.append(path)


class NewFiles:
    """Files that were made and wait to be taken."""

    def __init__(self) -> None:
        self._running: list[Making] = []
        # Folder -> path -> whether it was made.
        self._files: dict[str, dict[str, bool]] = {}

    def make(self, paths: Sequence[str], size: int) -> Making:
        """What to run in a thread; then call `note`."""
        for path in paths:
            self._files.setdefault(_folder_of(path), {})[path] = False
        making = Making(paths, size)
        self._running.append(making)
        return making

    def note(self, making: Making) -> None:
        """A making has ended. Dropped files are gone or belong to someone else."""
        self._running.remove(making)
        made = set(making.made)
        for path in making.paths:
            if path not in made:
                self.take(path)
            elif path in (files := self._files.get(_folder_of(path), {})):
                files[path] = True

    def take(self, path: str) -> bool:
        """Whether the file exists as it was made; from now on it is the caller's."""
        folder = _folder_of(path)
        files = self._files.get(folder, {})
        is_made = files.pop(path, False)
        if not files:
            self._files.pop(folder, None)
        return is_made

    def forget(self, folder: str) -> list[str]:
        """Nothing in `folder` is taken any more; returns the files made there, for the caller to
        remove."""
        for making in self._running:
            making.skip(folder)
        return [path for path, is_made in self._files.pop(folder, {}).items() if is_made]


class FileHandles:
    """Least recently used descriptors, opened on demand."""

    def __init__(self, limit: int, health: StoreHealth | None = None) -> None:
        assert limit >= 1
        self.health = health or StoreHealth()
        self._limit = limit
        self._fds: OrderedDict[str, int] = OrderedDict()
        #: New files of the same kind, made by a thread.
        self.new_files = NewFiles()

    def fd(self, path: str) -> int:
        """A read-write descriptor of an existing file. Raises FileNotFoundError."""
        fd = self._fds.get(path)
        if fd is not None:
            self._fds.move_to_end(path)
            return fd
        fd = disk.open(path, os.O_RDWR)
        self._fds[path] = fd
        if len(self._fds) > self._limit:
            _, oldest = self._fds.popitem(last=False)
            disk.close(oldest)
        return fd

    def forget(self, path: str) -> None:
        """Closes the descriptor of a file that is about to be removed."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            disk.close(fd)

    def close(self) -> None:
        """Closes all; the object can be used again."""
        while self._fds:
            _, fd = self._fds.popitem()
            disk.close(fd)
