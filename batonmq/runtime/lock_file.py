"""The lock of a folder, compatible with Java's `MessageStore` lock: a POSIX record lock on bytes
0-1 of `lock`. POSIX locks do not exclude the same process, so a set does.
"""

import errno
import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk

_FLOCK: Final = struct.Struct("hhlli4x")  # l_type, l_whence, l_start, l_len, l_pid (Linux x86-64)
_held_here: set[Path] = set()


class FolderLockedError(BatonError):
    """Another process uses this folder. `pid` is 0 if unknown."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(path, pid)
        self.path = path
        self.pid = pid

    def __str__(self) -> str:
        owner = f"process {self.pid}" if self.pid else "another process"
        return f"the folder {self.path.parent} is in use by {owner} (lock file {self.path})"


class FolderLock:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = path.resolve()  # one folder may have several names
        self._fd = -1

    def acquire(self) -> None:
        """Raises FolderLockedError, which names the process that has the lock, OSError."""
        # The kernel would grant it, and drop it with the first descriptor that is closed.
        if self._key in _held_here:
            raise FolderLockedError(self._path, os.getpid())
        fd = disk.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            pid = _owner(fd)  # before the close: it is asked by this descriptor
            disk.close(fd)
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # as of a mount without locks
                raise OSError(error.errno, f"no lock: {error.strerror}", str(self._path)) from error
            raise FolderLockedError(self._path, pid) from error
        try:
            disk.pwrite(fd, b"lock", 0)
        except OSError:
            disk.close(fd)
            raise
        self._fd = fd
        _held_here.add(self._key)

    def release(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        _held_here.discard(self._key)
        with suppress(OSError):  # the lock is gone, too, and there is nothing else to do
            disk.close(fd)


def _owner(fd: int) -> int:
    """The pid of the process that holds the lock; 0 if unknown (another machine or namespace)."""
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, query)
    except OSError:
        return 0
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return max(pid, 0) if kind != fcntl.F_UNLCK else 0
