"""Every call to a disk that the servers make, by these names and no others.

The names are those of `os`, and so are shapes and errors: each call may raise OSError at any
moment. They are looked up at each call (`disk.pwrite(...)`, never `from … import pwrite`), so a
simulated or failing disk takes their place with `replace_calls`. Looking at a folder (`exists`,
`stat`, `iterdir`) is not among them: it changes nothing and what it finds is checked when read.
"""

import errno
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

open = os.open
close = os.close
pread = os.pread
pwrite = os.pwrite
write = os.write
ftruncate = os.ftruncate
posix_fallocate = os.posix_fallocate
fsync = os.fsync
fdatasync = os.fdatasync
link = os.link
rename = os.rename
replace = os.replace
unlink = os.unlink
mkdir = os.mkdir
listdir = os.listdir


def syncfs(fd: int) -> None:
    """All that was written to the file system of `fd` so far is durable on return. Since Linux 5.8
    it raises what a write-back there has met, be it of another process."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def read_bytes(path: Path) -> bytes:
    """A whole file."""
    return path.read_bytes()


def makedirs(folder: str | Path) -> None:
    """The folder and those above it; fine if they are there."""
    os.makedirs(folder, exist_ok=True)


def remove(path: Path) -> None:
    """A file; fine if there is none."""
    path.unlink(missing_ok=True)


def rmtree(folder: str | Path) -> None:
    """A folder with all that is in it; fine if there is none. Raises OSError if something stays."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass


def map_read(fd: int, size: int) -> mmap.mmap:
    """The first `size` bytes of a file, read-only; later writes to the file show in it."""
    return mmap.mmap(fd, size, prot=mmap.PROT_READ)


def free_bytes(folder: Path) -> int:
    """How much a process may still write to the file system of `folder`, or a bound above it."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return sys.maxsize
    return space.f_bavail * space.f_frsize


def is_short(error: BaseException | None) -> bool:
    """Whether a call failed only because disk space, quota or file descriptors ran out, so that
    it may succeed later."""
    short = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
    return isinstance(error, OSError) and error.errno in short


CALLS = (
    "open",
    "close",
    "pread",
    "pwrite",
    "write",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
    "syncfs",
    "link",
    "rename",
    "replace",
    "unlink",
    "mkdir",
    "listdir",
    "read_bytes",
    "makedirs",
    "remove",
    "rmtree",
    "map_read",
)


def replace_calls(calls: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Puts `calls` in the place of those of the same names; returns what was there, to go back.

    Raises KeyError for a name that is not in CALLS.
    """
    if strange := calls.keys() - set(CALLS):
        raise KeyError(f"{sorted(strange)}: not among {CALLS}")
    before = {name: globals()[name] for name in calls}
    globals().update(calls)
    return before
