"""What of a folder is left when the power goes: only what was synced, under names that were synced.

`PowerCut` stands between `process.disk` and the real files below one folder. The files themselves
have everything, as after kill -9; `leave(folder)` puts there what a power cut at this moment would
leave at worst: of a file its content at its last sync, of a folder the files that it held at its
last sync. Names of folders count as durable at once, and a move between folders as one step, as
journaling file systems do it: the sync of either makes both durable. A sync that fails loses what
it should have written for good, unless it is written again: a later sync returns and does nothing.

`die_at(n)` ends the process before its n-th change of the disk from now on.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batonmq.runtime import disk

CHANGES = (
    "write", "pwrite", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "syncfs", "link",
    "rename", "replace", "unlink", "mkdir", "remove", "rmtree",
)  # fmt: skip

Inode = int


class Died(BaseException):
    """The process ended here; no `except Exception` may live on."""


class PowerCut:
    """Use `watching`. What lies in `root` when it begins is durable."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changes = 0
        """How many calls changed the disk so far, each file that a call syncs counted once."""
        self._die_at = -1
        self._is_dead = False
        self._content: dict[Inode, bytes] = {}
        self._names: dict[Path, dict[str, Inode]] = {}
        self._moves: list[tuple[Path, Path]] = []
        """(from, to) of moves between folders of which neither is synced yet."""
        self._lost: dict[Inode, set[int]] = {}
        """The bytes of each file whose write-back failed."""
        self._kept: dict[Inode, int] = {}
        """A descriptor of each file ever seen: its inode is not given to another one."""
        self._sync_everything()

    def _sync_everything(self) -> None:
        for folder, _, files in os.walk(self.root):
            self._sync_folder(Path(folder))
            for name in files:
                self._sync_file(Path(folder, name))

    def die_at(self, number: int) -> None:
        """0: at the next change."""
        self._die_at = self.changes + number

    def leave(self, folder: Path, *, names: bool = False) -> Path:
        """Writes what a power cut would leave. `names`: the disk had got to all names, though not
        to their content, as a file system may that writes its own journal first."""
        for parent, _, _ in os.walk(self.root):
            if names:
                self._sync_folder(Path(parent))
            left = folder / Path(parent).relative_to(self.root)
            left.mkdir(parents=True, exist_ok=True)
            for name, inode in self._names.get(Path(parent), {}).items():
                (left / name).write_bytes(self._content.get(inode, b""))
        return folder

    def close(self) -> None:
        for fd in self._kept.values():
            os.close(fd)

    def guard(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **more: Any) -> Any:
            if self._is_dead or self.changes == self._die_at:
                self._is_dead = True
                raise Died(name)
            self.changes += 1
            try:
                result = real(*args, **more)
            except OSError:
                if name in ("fsync", "fdatasync"):
                    self._sync_failed(args[0])
                raise
            if name in ("fsync", "fdatasync"):
                self._synced(args[0])
            if name == "pwrite" and self._lost:
                written = range(args[2], args[2] + result)
                self._lost.get(os.fstat(args[0]).st_ino, set()).difference_update(written)
            if name == "syncfs":
                self._sync_everything()
            if name in ("rename", "replace"):
                self._moved(Path(args[0]), Path(args[1]))
            return result

        return guarded

    def _moved(self, source: Path, target: Path) -> None:
        if target.is_dir():
            inside = [path for path in self._names if path.is_relative_to(source)]
            for path in inside:
                self._names[target / path.relative_to(source)] = self._names.pop(path)
        elif source.parent != target.parent:
            self._moves.append((source, target))

    def _synced(self, fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            self._sync_folder(path)
        else:
            self._sync_file(Path(f"/proc/self/fd/{fd}"))

    def _sync_file(self, path: Path) -> None:
        inode, content = self._keep(path), bytearray(path.read_bytes())
        before = self._content.get(inode, b"")
        for position in self._lost.get(inode, ()):
            if position < len(content):
                content[position] = before[position] if position < len(before) else 0
        self._content[inode] = bytes(content)

    def _sync_failed(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}")
        if path.is_dir():
            return
        inode, content = self._keep(path), path.read_bytes()
        before = self._content.get(inode, b"").ljust(len(content), b"\0")
        changed = {at for at, byte in enumerate(content) if byte != before[at]}
        self._lost.setdefault(inode, set()).update(changed)

    def _sync_folder(self, folder: Path) -> None:
        files = [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
        self._names[folder] = {entry.name: self._keep(Path(entry.path)) for entry in files}
        for move in [each for each in self._moves if folder in (each[0].parent, each[1].parent)]:
            self._moves.remove(move)
            source, target = move
            if folder == target.parent:
                self._names[source.parent].pop(source.name, None)
            elif target.exists():
                self._names.setdefault(target.parent, {})[target.name] = self._keep(target)

    def _keep(self, path: Path) -> Inode:
        fd = os.open(path, os.O_RDONLY)
        inode = os.fstat(fd).st_ino
        if self._kept.setdefault(inode, fd) != fd:
            os.close(fd)
        return inode


@contextmanager
def watching(root: Path) -> Iterator[PowerCut]:
    root.mkdir(parents=True, exist_ok=True)
    cut = PowerCut(root)
    before = disk.replace_calls({name: cut.guard(name, getattr(disk, name)) for name in CHANGES})
    try:
        yield cut
    finally:
        disk.replace_calls(before)
        cut.close()


def every_power_cut(
    root: Path, act: Callable[[Path], None], left_in: Path
) -> Iterator[tuple[str, Path, bool]]:
    """Calls `act` with a copy of `root`: the power goes at its first change of the disk, with the
    next copy at its second, and so on, until it returns: (which cut, the folder left, whether it
    returned)."""
    number, returned = 0, False
    while not returned:
        copy = left_in / f"{number}-used"
        shutil.copytree(root, copy)
        with watching(copy) as cut:
            cut.die_at(number)
            try:
                act(copy)
                returned = True
            except Died:
                pass
            lefts = [
                (f"{number}, names {kept}", cut.leave(left_in / f"{number}-{kept}", names=keeps))
                for kept, keeps in (("lost", False), ("kept", True))
            ]
        for what, left in lefts:
            yield what, left, returned
        number += 1
