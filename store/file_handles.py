"""A bounded set of open file descriptors, shared by the many files of consume queues and indexes.

Invariant: at most `limit` descriptors are open. A descriptor is borrowed for one system call and
must not be kept: the next `fd` call may close it. One thread only.
"""

import os
from collections import OrderedDict

from batonmq.process import disk
from batonmq.store.new_files import NewFiles


class FileHandles:
    """Least recently used descriptors, opened on demand."""

    def __init__(self, limit: int = 256) -> None:
        assert limit >= 1
        self._limit = limit
        self._fds: OrderedDict[str, int] = OrderedDict()
        #: Of the same files: those that a thread makes.
        self.new_files = NewFiles()

    def fd(self, path: str) -> int:
        """A read-write descriptor of an existing file; FileNotFoundError if there is none."""
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
        """Close the descriptor of a file that is about to be removed."""
        fd = self._fds.pop(path, None)
        if fd is not None:
            disk.close(fd)

    def close(self) -> None:
        """Close all; the object can be used again afterwards."""
        while self._fds:
            _, fd = self._fds.popitem()
            disk.close(fd)

    def __len__(self) -> int:
        return len(self._fds)
