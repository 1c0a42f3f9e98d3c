"""Files with the secrets that nodes share: the password of the Raft port (`raftPasswordFile`), and
the user as which nodes sign (`innerClientAuthenticationCredentialsFile`, `auth/config`).

While a secret is being replaced a file has two. A node signs with the first and accepts both:

| step | file |
|---|---|
| 0 | OLD |
| 1 | OLD, `next` NEW |
| 2 | NEW, `former` OLD |
| 3 | NEW |

If all nodes have taken a step before the next one, no request is refused.

Who has the Raft password may vote and write the log. It is used without stretching, so it must be
long. Frames are authenticated with it and random numbers of both sides, so recorded frames cannot
be replayed.
"""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_directory, write_all

PASSWORD_CHARS_MIN: Final = 32
_RANDOM_BYTES: Final = 32
_MODE: Final = 0o600


class SecretFileError(disk.FileError):
    """A file of secrets is missing, readable by others, or has no usable secret."""


class Secrets(NamedTuple):
    """`used` is signed or sealed with; `former` and `next` are believed as well."""

    used: str
    next: str = ""
    former: str = ""

    @property
    def other(self) -> str:
        return self.next or self.former

    def step(self) -> Secrets:
        """The next of the three steps to a new secret."""
        if self.next:
            return Secrets(self.next, former=self.used)
        return Secrets(self.used) if self.former else Secrets(self.used, next=new_secret())


def new_secret() -> str:
    return base64.urlsafe_b64encode(os.urandom(_RANDOM_BYTES)).decode()


def read_private(path: Path) -> bytes:
    """A file that only its owner may read. Raises SecretFileError."""
    try:
        # Without O_NONBLOCK the open of a named pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            data = os.read(fd, 1 << 16) if stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(fd)
    except OSError as error:
        raise SecretFileError(path, disk.reason(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise SecretFileError(path, "is no regular file")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        what = f"its mode is {mode:04o}, so others may read it: chmod 0600 {path}"
        raise SecretFileError(path, what)
    return data


def read_passwords(path: Path) -> Secrets:
    """Of the Raft port: the password, and while it is being replaced a last line with the word
    `next` or `former` and another password. Raises SecretFileError."""
    text = read_private(path).strip().decode("latin-1")
    used, _, last = text.rpartition("\n")
    place, _, other = (part.strip() for part in last.partition(" "))
    if used and place in ("next", "former"):
        found = Secrets(used.strip())._replace(**{place: other})
    else:
        found = Secrets(text)  # of several lines, as `openssl rand -base64 64` prints it
    if any(" " in line.strip() for line in found.used.splitlines()[1:]):
        what = "below the password only a line with next or former and another one is allowed"
        raise SecretFileError(path, what)
    for password in (found.used, found.other) if found.other else (found.used,):
        if len(password) < PASSWORD_CHARS_MIN:
            raise SecretFileError(
                path,
                f"holds {len(password)} characters, {PASSWORD_CHARS_MIN} are needed; `batonmq"
                " raftPassword FILE` makes one, and every controller of the group needs a copy",
            )
    return found


def passwords_text(secrets: Secrets) -> str:
    """What `read_passwords` reads."""
    place = "next" if secrets.next else "former"
    return f"{secrets.used}\n" + (f"{place} {secrets.other}\n" if secrets.other else "")


def make_password(path: Path) -> None:
    """Writes 32 random bytes as text, mode 0600. Raises FileExistsError, never overwrites."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    disk.remove(temp)  # left by a killed process with this pid
    fd = disk.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        os.fchmod(fd, _MODE)
        write_all(fd, passwords_text(Secrets(new_secret())).encode(), 0)
        disk.fsync(fd)
        disk.link(temp, path)
    finally:
        disk.close(fd)
        disk.remove(temp)
    sync_directory(path.absolute().parent)
