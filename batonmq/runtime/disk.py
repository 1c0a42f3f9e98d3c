"""All disk calls of the servers, with the names, arguments and errors of `os`. Any call may raise
OSError, which names the file. Always write `disk.pwrite(...)`, never `from … import pwrite`:
`replace_calls` replaces these names by a simulated or failing disk. Reading a folder (`exists`,
`stat`, `iterdir`) is not included, since it changes nothing."""

import errno
import functools
import mmap
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from batonmq.protocol.errors import BatonError

#: Of a file that is read as a whole. None of ours comes near; a foreign one may fill the memory.
FILE_BYTES_MAX = 1 << 30
P = ParamSpec("P")
R = TypeVar("R")


def _path_of(file: object) -> str:
    if not isinstance(file, int):
        return str(file)
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    except OSError:  # no /proc
        return f"descriptor {file}"


def named(error: OSError, file: object) -> OSError:
    """The same error, which names `file`, a path or an open descriptor, if it named none."""
    if error.filename is None:
        error.filename = _path_of(file)
    return error


def _naming(call: Callable[P, R]) -> Callable[P, R]:
    """Python names no file if a call with a descriptor fails, or a `read`. The first argument is
    the file."""

    @functools.wraps(call)
    def naming(*arguments: P.args, **keywords: P.kwargs) -> R:
        try:
            return call(*arguments, **keywords)
        except OSError as error:
            named(error, arguments[0])
            raise

    return naming


open = os.open
pread = _naming(os.pread)
pwrite = _naming(os.pwrite)
write = _naming(os.write)
ftruncate = _naming(os.ftruncate)
posix_fallocate = _naming(os.posix_fallocate)
lseek = _naming(os.lseek)
fsync = _naming(os.fsync)
fdatasync = _naming(os.fdatasync)
link = os.link
rename = os.rename
replace = os.replace
unlink = os.unlink
mkdir = os.mkdir
listdir = os.listdir


def close(fd: int) -> None:
    path = _path_of(fd)  # a close that fails frees the descriptor, too
    try:
        os.close(fd)
    except OSError as error:
        named(error, path)
        raise


@_naming
def syncfs(fd: int) -> None:
    """Makes everything written to the file system of `fd` durable. Since Linux 5.8 it also raises
    write-back errors of other processes."""
    # Python has no syncfs; loaded here, since only stores with many files call it.
    import ctypes

    if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def check_readable(path: str | Path) -> None:
    """Raises OSError for a file that must not be read as a whole."""
    status = os.stat(path)
    # To open a named pipe would wait for a writer. A folder is refused by the call that reads.
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    if status.st_size > FILE_BYTES_MAX:
        what = f"it has {status.st_size} bytes, allowed are {FILE_BYTES_MAX}"
        raise OSError(errno.EFBIG, what, str(path))


@_naming
def read_bytes(path: Path) -> bytes:
    check_readable(path)
    return path.read_bytes()


def makedirs(folder: str | Path) -> None:
    """Creates the folder and its parents; fine if they exist."""
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        # Also if it could not look whether that is a folder: then this raises the reason.
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise


def remove(path: Path) -> None:
    """Removes a file; fine if there is none."""
    path.unlink(missing_ok=True)


def rmtree(folder: str | Path) -> None:
    """Removes a folder with its content; fine if there is none. Raises OSError if
    something stays."""
    try:
        # Not ignore_errors: a folder of which a part stays must not count as removed.
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass


@_naming
def map_read(fd: int, size: int) -> mmap.mmap:
    """The first `size` bytes of a file, read-only; later writes show in it."""
    return mmap.mmap(fd, size, prot=mmap.PROT_READ)


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of `folder`; a huge number if unknown."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return sys.maxsize
    # Not f_bfree: the rest is for root alone.
    return space.f_bavail * space.f_frsize


def is_short(error: BaseException | None) -> bool:
    """Whether the error is a lack of disk space, quota or file descriptors, so that the call may
    succeed later."""
    short = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
    return isinstance(error, OSError) and error.errno in short


class FileError(BatonError):
    """A file that cannot be used: which one, and why. No text shows what is in it."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(path, why)
        self.path = path
        self.why = why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


#: What a disk or a file system says of a place that it cannot read; XFS and Btrfs say the last two
#: if a checksum of their own is wrong. EILSEQ is ours: what a file should not have.
_UNREADABLE = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ)
_BAD_DISK = "the disk fails: look into the kernel's log, and replace it"
_ADVICE = {
    **dict.fromkeys(_UNREADABLE, _BAD_DISK),
    errno.EILSEQ: "move this file aside",
    errno.EISDIR: "a file belongs there: move the folder aside",
    errno.ESTALE: "the network file system has lost this file: mount it again",
    errno.EROFS: "the file system is read-only, often since its disk failed: check and remount it",
    errno.ENOSPC: "make space on that disk",
    errno.EDQUOT: "make space, or raise the quota of this user",
    errno.EMFILE: "raise this process's limit of open files (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
}


def reason(error: OSError) -> str:
    """Its text for people, and what an operator does about it; without number and file."""
    text = error.strerror or str(error) or type(error).__name__  # not each has a number
    return "; ".join(filter(None, (text, _ADVICE.get(error.errno or 0))))


def described(error: BaseException) -> str:
    """Its text for people: for a failed disk call the file, and its `reason`."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {reason(error)}" if error.filename else reason(error)


def check_unreadable(error: Exception) -> None:
    """Raises an OSError again, unless the disk could not read a place: what has a second copy, or
    is derived from the log, is then made again."""
    if isinstance(error, OSError) and error.errno not in _UNREADABLE:
        raise error


CALLS = (
    "open",
    "close",
    "pread",
    "pwrite",
    "write",
    "ftruncate",
    "posix_fallocate",
    "lseek",
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
    """Replaces the named calls; returns the former ones. Raises KeyError for a name that is not in
    CALLS."""
    if strange := calls.keys() - set(CALLS):
        raise KeyError(f"{sorted(strange)}: not among {CALLS}")
    before = {name: globals()[name] for name in calls}
    globals().update(calls)
    return before
