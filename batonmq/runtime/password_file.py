"""The password file of the Raft port, readable only by the node's user. A process that has the
password may vote and write the log; all nodes of a group have the same. It is used without
stretching, so it must be long. Frames are authenticated with it and random numbers of both sides,
so recorded frames cannot be replayed."""

import base64
import os
import stat
from pathlib import Path
from typing import Final

from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_directory, write_all

PASSWORD_CHARS_MIN: Final = 32
_RANDOM_BYTES: Final = 32
_MODE: Final = 0o600


class PasswordFileError(BatonError):
    """The password file is missing, readable by others, or too short."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(path, what)
        self.path = path
        self.what = what

    def __str__(self) -> str:
        return (
            f"raftPasswordFile {self.path}: {self.what}; `batonmq raftPassword FILE` makes one, and"
            " every controller of the group needs a copy of the same"
        )


def read_password(path: Path) -> bytes:
    """The password, without surrounding white space. Raises PasswordFileError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PasswordFileError(path, error.strerror or str(error)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise PasswordFileError(path, "is no regular file")
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            what = f"its mode is {mode:04o}, so others may read it: chmod 0600 {path}"
            raise PasswordFileError(path, what)
        password = os.read(fd, 1 << 16).strip()
    finally:
        os.close(fd)
    if len(password) < PASSWORD_CHARS_MIN:
        what = f"holds {len(password)} characters, {PASSWORD_CHARS_MIN} are needed"
        raise PasswordFileError(path, what)
    return password


def make_password(path: Path) -> None:
    """Writes 32 random bytes as text, mode 0600. Raises FileExistsError, never overwrites."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    disk.remove(temp)  # left by a killed process with this pid
    fd = disk.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        os.fchmod(fd, _MODE)
        write_all(fd, base64.urlsafe_b64encode(os.urandom(_RANDOM_BYTES)) + b"\n", 0)
        disk.fsync(fd)
        disk.link(temp, path)
    finally:
        disk.close(fd)
        disk.remove(temp)
    sync_directory(path.absolute().parent)
