"""Disks of simulated hosts: real files, from which a power failure removes what was not synced.

`SimDisks.calls()` replaces the calls of `runtime.disk`. Files are real ones below `root/host` (in
memory, if `root` is in /dev/shm), so maps and `stat` work as usual. For each file it is kept what
its sectors held at the last sync, and for each folder the changes of names since then. `lose_power`
reverts a random part of that: whole sectors, and the names from some point on. After a failed fsync
its sectors are lost: reads still show them, the next power failure takes them, and later fsyncs
succeed. That is what Linux does.

`plan` says what fails; see `DiskPlan`.
"""

import errno
import mmap
import os
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.sim.loop import Crash, SimProcess, process_here
from lab.sim.threads import current_thread

SECTOR = 512
MOST_WRITTEN = 1 << 26
"""Bytes that one host may write in its life, 200 times what lives need: a planted defect that
never stops writing would fill the memory of the machine."""
_GRAVES = ".graves"


@dataclass
class File:
    """`dirty`: what the sectors held when they were synced; `lost`: the same of those whose
    write-back failed. `size`: the length that a crash leaves at least."""

    path: str
    dirty: dict[int, bytes] = field(default_factory=dict)
    lost: dict[int, bytes] = field(default_factory=dict)
    size: int = 0

    @property
    def is_clean(self) -> bool:
        return not self.dirty and not self.lost


@dataclass
class DiskPlan:
    """What goes wrong on one host's disk. Failed calls, a crash and a short write happen once."""

    full: bool = False
    log_is_full: bool = False
    """The log has no disk space in its allocated segments, as on a copy-on-write file system."""
    on_log: Callable[[bytes], None] | None = None
    """Called with each write to the log."""
    fail_call: tuple[str, int] | None = None  # EIO at the n-th call of that name from now
    fail_within: tuple[str, int, int] | None = None
    """(path, n, errno): while that path exists, the n-th changing call fails."""
    crash_at: tuple[int, bool] | None = None  # at the n-th changing call, before or after it
    short_write: int | None = None  # the n-th pwrite writes half
    slow_s: float = 0.0  # of an fsync
    used: float = 0.1  # of the whole disk; more if it is full

    @property
    def is_idle(self) -> bool:
        fails = self.fail_call or self.fail_within
        full = self.full or self.log_is_full
        return not (full or fails or self.crash_at or self.short_write or self.slow_s)


class HostDisk:
    """One host's files. `undo`: folder -> functions that revert the changes of its names."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.rng = rng
        self.plan = DiskPlan()
        self.files: dict[int, File] = {}
        self.undo: dict[str, list[Callable[[], None]]] = {}
        self.crash: Callable[[], None] = lambda: None
        self.on_fault: Callable[[str], None] = lambda what: None
        self.calls = 0
        self.written = 0
        self._graves = root / _GRAVES
        self._graves.mkdir(parents=True)
        self._buried = 0

    # Faults.

    def before(self, name: str, path: str) -> None:
        self.calls += 1
        plan = self.plan
        if plan.fail_call is not None and plan.fail_call[0] == name:
            left = plan.fail_call[1] - 1
            plan.fail_call = (name, left) if left > 0 else None
            if left <= 0:
                self.on_fault(f"EIO at {name} of {self.short(path)}")
                raise OSError(errno.EIO, os.strerror(errno.EIO), self.short(path))
        if plan.fail_within is not None and name in _CHANGING:
            self._fail_within(*plan.fail_within, name, path)
        if plan.crash_at is not None and name in _CHANGING:
            left = plan.crash_at[0] - 1
            if left > 0:
                plan.crash_at = (left, plan.crash_at[1])
            elif not plan.crash_at[1]:
                self._crash(name, path)

    def _fail_within(self, during: str, left: int, number: int, name: str, path: str) -> None:
        if not (self.root / during).exists():
            return
        self.plan.fail_within = (during, left - 1, number) if left > 1 else None
        if left <= 1:
            self.on_fault(f"{errno.errorcode[number]} at {name} of {self.short(path)}")
            raise OSError(number, os.strerror(number), self.short(path))

    def after(self, name: str, path: str) -> None:
        plan = self.plan
        if plan.crash_at is not None and plan.crash_at[0] <= 1 and name in _CHANGING:
            self._crash(name, path)

    def _crash(self, name: str, path: str) -> None:
        self.plan.crash_at = None
        self.on_fault(f"crash at {name} of {self.short(path)}")
        self.crash()
        raise Crash(f"{name} {path}")

    def before_log(self, path: str, data: Any) -> None:
        """Called before a write to the log. Zeros fit into a full one."""
        if self.plan.on_log is not None:
            self.plan.on_log(bytes(data))
        if self.plan.log_is_full and any(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.short(path))

    def refuse_if_full(self, path: str) -> None:
        if self.plan.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.short(path))

    def used(self) -> float:
        """The share that is used, 0.0 to 1.0."""
        return max(self.plan.used, 0.97 if self.plan.full else 0.0)

    def short(self, path: str) -> str:
        """Without `root`, which differs between runs: controllers store the texts of errors."""
        return str(path).removeprefix(str(self.root) + "/")

    # What is not durable.

    def file_of(self, fd: int, path: str) -> File:
        stat = os.fstat(fd)
        file = self.files.get(stat.st_ino)
        if file is None:
            file = self.files[stat.st_ino] = File(path, size=stat.st_size)
        return file

    def remember(self, fd: int, file: File, begin: int, end: int) -> None:
        """Keeps what the sectors of [begin, end) hold, before they change."""
        dirty, lost = file.dirty, file.lost
        for sector in range(begin // SECTOR, (end + SECTOR - 1) // SECTOR):
            if sector not in dirty:
                before = lost.pop(sector, None)
                if before is None:
                    before = os.pread(fd, SECTOR, sector * SECTOR)
                dirty[sector] = before

    def synced(self, fd: int, file: File) -> None:
        file.dirty.clear()
        file.size = os.fstat(fd).st_size

    def sync_everything(self) -> None:
        for file in self.files.values():
            file.dirty.clear()
            if os.path.exists(file.path):
                file.size = os.stat(file.path).st_size
        self.undo.clear()

    def lose_unsynced(self) -> None:
        """A write-back of all files failed."""
        for file in self.files.values():
            file.lost.update(file.dirty)
            file.dirty.clear()

    def changed(self, folder: str, undo: Callable[[], None]) -> None:
        self.undo.setdefault(folder, []).append(undo)

    def is_durable(self, path: Path) -> bool:
        """Whether a loss of power would leave that file as it is, under its name."""
        if self.undo.get(os.path.dirname(path)):
            return False
        file = self.files.get(os.stat(path).st_ino)
        return file is None or file.is_clean

    def bury(self, path: str) -> str:
        """A second name for a file, so that its removal can be taken back."""
        self._buried += 1
        grave = str(self._graves / str(self._buried))
        os.link(path, grave)
        file = self.files.get(os.stat(grave).st_ino)
        if file is not None and file.path == path:
            file.path = grave  # another file may come under its name
        return grave

    def lose_power(self) -> None:
        """The host stopped: what was not synced survives, or not, or in part."""
        rng = self.rng
        everything = rng.random() < 0.3
        for file in self.files.values():
            if file.dirty or file.lost:
                self._tear(file, everything=everything)
        self.files.clear()
        for folder in sorted(self.undo):
            steps = self.undo[folder]
            kept = rng.choice((0, len(steps), rng.randint(0, len(steps))))
            for step in reversed(steps[kept:]):
                try:
                    step()
                except OSError:
                    pass  # what it would undo is gone with its folder
        self.undo.clear()
        for grave in self._graves.iterdir():
            grave.unlink()

    def _tear(self, file: File, *, everything: bool) -> None:
        rng = self.rng
        share = 1.0 if everything else rng.choice((0.0, 0.5, 1.0))
        try:
            fd = os.open(file.path, os.O_RDWR)
        except OSError:
            return
        try:
            size = os.fstat(fd).st_size
            for sector in sorted(file.dirty.keys() | file.lost.keys()):
                before = file.dirty.get(sector, file.lost.get(sector, b""))
                if sector in file.lost or rng.random() < share:
                    os.pwrite(fd, before.ljust(SECTOR, b"\0"), sector * SECTOR)
            if size > file.size and rng.random() < share:
                size = file.size
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def wipe(self) -> None:
        """All files are gone, as on a new disk."""
        self.files.clear()
        self.undo.clear()
        for entry in self.root.iterdir():
            if entry.name == _GRAVES:
                for grave in entry.iterdir():
                    grave.unlink()
            elif entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def copy_to(self, folder: Path) -> Path:
        """All files as they are, synced or not, at one instant."""
        ignored = shutil.ignore_patterns(_GRAVES)
        return Path(shutil.copytree(self.root, folder, ignore=ignored))

    def become(self, folder: Path) -> None:
        """Another disk is put in, with the files of `folder`, all durable."""
        self.wipe()
        shutil.copytree(folder, self.root, dirs_exist_ok=True)


_CHANGING = frozenset(
    {"open", "pwrite", "write", "ftruncate", "posix_fallocate", "fsync", "fdatasync", "syncfs",
     "link", "rename", "replace", "unlink", "mkdir", "makedirs", "remove", "rmtree"}
)  # fmt: skip


class NameCalls:
    """The calls that change names."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root = root
        self.hosts: dict[str, HostDisk] = {}
        self._rng = rng

    def host(self, name: str) -> HostDisk:
        disk = self.hosts.get(name)
        if disk is None:
            disk = self.hosts[name] = HostDisk(self.root / name, self._rng)
        return disk

    def _here(self) -> HostDisk:
        process = process_here()
        assert process is not None, "a disk call outside of every process"
        if process.dead:
            raise Crash("dead")
        return self.host(process.host)

    def link(self, source: Any, target: Any) -> None:
        disk, name = self._here(), str(target)
        disk.before("link", name)
        disk.refuse_if_full(name)
        os.link(source, target)
        disk.changed(os.path.dirname(name), lambda: os.unlink(name))
        self._moved(disk, name)
        disk.after("link", name)

    def replace(self, source: Any, target: Any) -> None:
        disk, old, new = self._here(), str(source), str(target)
        disk.before("replace", new)
        grave = disk.bury(new) if os.path.exists(new) else None
        os.replace(old, new)

        def undo() -> None:
            os.rename(new, old)
            if grave is not None:
                os.rename(grave, new)

        disk.changed(os.path.dirname(new), undo)
        self._moved(disk, new)
        disk.after("replace", new)

    def rename(self, source: Any, target: Any) -> None:
        if not os.path.isdir(source):
            self.replace(source, target)
            return
        disk, old, new = self._here(), str(source), str(target)
        disk.before("rename", new)
        os.rename(old, new)
        disk.changed(os.path.dirname(new), lambda: os.rename(new, old))
        for file in disk.files.values():
            if file.path.startswith(old + "/"):
                file.path = new + file.path[len(old) :]
        disk.after("rename", new)

    @staticmethod
    def _moved(disk: HostDisk, path: str) -> None:
        file = disk.files.get(os.stat(path).st_ino)
        if file is not None:
            file.path = path

    def unlink(self, path: Any) -> None:
        disk, name = self._here(), str(path)
        disk.before("unlink", name)
        grave = disk.bury(name)
        os.unlink(name)
        disk.changed(os.path.dirname(name), lambda: os.rename(grave, name))
        disk.after("unlink", name)

    def remove(self, path: Any) -> None:
        try:
            self.unlink(path)
        except FileNotFoundError:
            pass

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        disk, name = self._here(), str(path)
        disk.before("mkdir", name)
        disk.refuse_if_full(name)
        os.mkdir(name, mode)
        disk.changed(os.path.dirname(name), lambda: os.rmdir(name))
        disk.after("mkdir", name)

    def makedirs(self, folder: Any) -> None:
        name = str(folder)
        disk = self._here()
        disk.before("makedirs", name)
        if not os.path.isdir(name):
            disk.refuse_if_full(name)
            os.makedirs(name, exist_ok=True)
        disk.after("makedirs", name)

    def rmtree(self, folder: Any) -> None:
        disk, name = self._here(), str(folder)
        disk.before("rmtree", name)
        try:
            shutil.rmtree(name)
        except FileNotFoundError:
            pass
        disk.after("rmtree", name)


class SimDisks(NameCalls):
    """All hosts' disks; a call goes to that of the running process."""

    def __init__(self, root: Path, rng: random.Random, now_s: Callable[[], float]) -> None:
        super().__init__(root, rng)
        self.digest = 0
        self.mtime_s: Callable[[], float] = now_s
        self._open: dict[int, tuple[HostDisk, File, str, SimProcess | None]] = {}

    def calls(self) -> dict[str, Callable[..., Any]]:
        """For `runtime.disk.replace_calls`."""
        names = (
            "open close pread pwrite write ftruncate posix_fallocate fsync fdatasync syncfs link"
            " rename replace unlink mkdir makedirs remove rmtree listdir read_bytes map_read"
        )
        return {name: getattr(self, name) for name in names.split()}

    def _at(self, fd: int) -> tuple[HostDisk, File, str]:
        disk = self._here()
        entry = self._open.get(fd)
        if entry is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return disk, entry[1], entry[2]

    # Files.

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        disk, name = self._here(), str(path)
        disk.before("open", name)
        may_change = bool(flags & (os.O_CREAT | os.O_TRUNC))
        is_there = may_change and os.path.exists(name)
        creates = bool(flags & os.O_CREAT) and not is_there
        if creates:
            disk.refuse_if_full(name)
        truncates = bool(flags & os.O_TRUNC) and is_there
        if flags & os.O_WRONLY:  # what is overwritten is read first
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        fd = os.open(path, flags & ~os.O_TRUNC, mode)
        if creates:
            disk.files.pop(os.fstat(fd).st_ino, None)
            disk.changed(os.path.dirname(name), lambda: os.unlink(name))
        file = disk.file_of(fd, name)
        file.path = name
        if truncates:
            size = os.fstat(fd).st_size
            disk.remember(fd, file, 0, size)
            os.ftruncate(fd, 0)
        self._open[fd] = (disk, file, name, process_here())
        if may_change:
            disk.after("open", name)
        return fd

    def close(self, fd: int) -> None:
        entry = self._open.pop(fd, None)
        if entry is not None:
            os.close(fd)
        elif not (process := process_here()) or not process.dead:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def close_all_of(self, process: SimProcess) -> None:
        """The process ended."""
        for fd in [fd for fd, entry in self._open.items() if entry[3] is process]:
            del self._open[fd]
            os.close(fd)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        disk, _, path = self._at(fd)
        disk.before("pread", path)
        return os.pread(fd, size, offset)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        disk, file, path = self._at(fd)
        disk.before("pwrite", path)
        disk.written += len(data)
        if disk.written > MOST_WRITTEN:
            raise OSError(errno.ENOSPC, f"this host wrote {MOST_WRITTEN} bytes", path)
        if disk.plan.full and offset + len(data) > os.fstat(fd).st_size:
            disk.refuse_if_full(path)
        if path.rpartition("/")[0].endswith("/commitlog"):
            disk.before_log(path, data)
        if disk.plan.short_write is not None:
            disk.plan.short_write -= 1
            if disk.plan.short_write <= 0:
                disk.plan.short_write = None
                data = memoryview(data)[: max(1, len(data) // 2)]
        disk.remember(fd, file, offset, offset + len(data))
        written = os.pwrite(fd, data, offset)
        self.digest = zlib.crc32(data, self.digest)
        now_s = self.mtime_s()
        os.utime(fd, (now_s, now_s))
        disk.after("pwrite", path)
        return written

    def write(self, fd: int, data: Any) -> int:
        return self.pwrite(fd, data, os.lseek(fd, 0, os.SEEK_CUR))

    def ftruncate(self, fd: int, length: int) -> None:
        disk, file, path = self._at(fd)
        disk.before("ftruncate", path)
        size = os.fstat(fd).st_size
        if length < size:
            disk.remember(fd, file, length, size)
            file.size = min(file.size, length)
        os.ftruncate(fd, length)
        disk.after("ftruncate", path)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        disk, _, path = self._at(fd)
        disk.before("posix_fallocate", path)
        disk.refuse_if_full(path)
        os.ftruncate(fd, max(os.fstat(fd).st_size, offset + length))
        disk.after("posix_fallocate", path)

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd)

    def fdatasync(self, fd: int) -> None:
        self._sync("fdatasync", fd)

    def syncfs(self, fd: int) -> None:
        disk, _, path = self._at(fd)
        self._wait(disk)
        try:
            disk.before("syncfs", path)
        except OSError:
            disk.lose_unsynced()
            raise
        disk.sync_everything()
        disk.after("syncfs", path)

    def _sync(self, name: str, fd: int) -> None:
        disk, file, path = self._at(fd)
        self._wait(disk)
        try:
            disk.before(name, path)
        except OSError:
            file.lost.update(file.dirty)
            file.dirty.clear()
            raise
        if fd not in self._open:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        disk.synced(fd, file)
        disk.undo.pop(path, None)  # if it is a folder
        disk.after(name, path)

    def _wait(self, disk: HostDisk) -> None:
        """A thread waits for the disk; the loop is blocked only by a slow one."""
        thread, slow_s = current_thread(), disk.plan.slow_s
        if thread is not None:
            thread.pause(disk.rng.uniform(0.0003, 0.002) + slow_s * disk.rng.random())
        elif slow_s:
            process = process_here()
            assert process is not None
            process.stall(slow_s * disk.rng.random())
        self._here()

    # Reading.

    def listdir(self, folder: Any = ".") -> list[str]:
        disk = self._here()
        disk.before("listdir", str(folder))
        return sorted(os.listdir(folder))

    def read_bytes(self, path: Path) -> bytes:
        self._here().before("read_bytes", str(path))
        return path.read_bytes()

    def map_read(self, fd: int, size: int) -> mmap.mmap:
        self._at(fd)
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
