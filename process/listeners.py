"""Who listens on the TCP ports of this machine, as /proc tells: for people, and for tools that must
not talk to a process that only happens to have the port.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LISTEN: Final = "0A"
_COMMAND_CHARS_MAX: Final = 120


def holder_of(port: int) -> str:
    """Which process listens on a port, in words; "" if nobody is seen to."""
    inodes = _listening("thread-self", port)
    if not inodes:
        return ""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and inodes & _sockets(folder.name):
            return f"process {folder.name} ({_command(folder)})"
    return "a process of another user, container or namespace"


def listens(pid: int, port: int) -> bool:
    """Whether that process itself listens on that port, on any address of its network."""
    return bool(_listening(str(pid), port) & _sockets(str(pid)))


def _listening(process: str, port: int) -> set[str]:
    """The inodes of the sockets that listen on a port, in the network of a process."""
    return {inode for number, inode in _listeners(process) if number == port}


def _listeners(process: str) -> Iterator[tuple[int, str]]:
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN:
                yield int(fields[1].rpartition(":")[2], 16), fields[9]


def _sockets(process: str) -> set[str]:
    """The inodes of its open sockets; none of a process that is gone or not ours to see."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                kind, _, inode = os.readlink(entry.path).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    return found


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "unknown"
    text = b" ".join(words).decode(errors="replace")
    return text if len(text) <= _COMMAND_CHARS_MAX else f"{text[:_COMMAND_CHARS_MAX]}…"
