"""Small files that are replaced as a whole. Once `replace_file` returns, the new content survives a
power loss; a crash before leaves the old or the new content, never a mixture. (Java's
`MixAll.string2File` overwrites in place.) Only `show_file` and `write_named` do not sync."""

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk

T = TypeVar("T")

BACKUP_SUFFIX = ".bak"
#: The block size of file systems: holes begin and end at multiples of it.
BLOCK_SIZE = 4096
_TEMP_SUFFIX = ".tmp"
#: O_NONBLOCK: in the place of a named pipe the open would wait for a reader.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
_ZERO_BYTES = 1 << 16
_ZEROS = bytes(1 << 20)
_SYNCED_ONE_BY_ONE = 32
"""From here one sync of the whole file system is cheaper than one of each file."""


def backup_path(path: Path) -> Path:
    """The second copy of `path`, named as in RocketMQ."""
    return path.with_name(path.name + BACKUP_SUFFIX)


def write_all(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """`pwrite` that continues after a short write. Raises OSError (ENOSPC on a full disk)."""
    written = disk.pwrite(fd, data, position)
    if written == len(data):
        return
    view = memoryview(data)
    while written < len(view):
        count = disk.pwrite(fd, view[written:], position + written)
        if count == 0:
            raise OSError(f"pwrite of {len(view) - written} bytes wrote nothing")
        written += count


def zero_range(fd: int, begin: int, end: int) -> bool:
    """Zeroes bytes [begin, end) of a file; holes stay holes. True if anything was written. The
    caller syncs."""
    changed = False
    space = BLOCK_SIZE - begin % BLOCK_SIZE  # usually a hole begins there
    while begin < end:
        chunk = disk.pread(fd, min(space, end - begin), begin)
        space = _ZERO_BYTES
        if not chunk:
            break
        if not is_zero(chunk):
            write_all(fd, bytes(len(chunk)), begin)
            changed = True
        next_begin = next_data(fd, begin + len(chunk))
        if next_begin is None:
            break
        begin = next_begin
    return changed


def is_zero(data: bytes) -> bool:
    """Whether all bytes are 0. Fast up to about 1 MiB."""
    return data == _ZEROS[: len(data)] if len(data) <= len(_ZEROS) else not any(data)


def next_data(fd: int, position: int) -> int | None:
    """The first byte at or after `position` that is in no hole; None if there is none."""
    try:
        return disk.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def data_extents(fd: int, size: int, position: int = 0) -> list[tuple[int, int]]:
    """The parts [start, end) of a file, from `position` on, that are no holes. They are found
    before any is read: read-ahead puts pages of zeros in the cache, which then count as data."""
    extents: list[tuple[int, int]] = []
    while position < size and (start := next_data(fd, position)) is not None:
        position = min(disk.lseek(fd, start, os.SEEK_HOLE), size)
        extents.append((start, position))
    return extents


def sync_directory(directory: Path) -> None:
    """Makes creations, renames and removals in `directory` durable."""
    fd = disk.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.fsync(fd)
    finally:
        disk.close(fd)


def sync_file(path: Path) -> None:
    """fdatasync of a file or folder by name, from any thread. Skips a missing file: the code that
    removed it syncs its folder."""
    try:
        fd = disk.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        disk.fdatasync(fd)
    finally:
        disk.close(fd)


def sync_below(folder: Path, paths: Sequence[Path]) -> None:
    """`sync_file` of each of `paths`, which are in `folder`, from any thread. For many paths it
    syncs the whole file system once, since each small sync takes as long."""
    if len(paths) <= _SYNCED_ONE_BY_ONE:
        for path in paths:
            sync_file(path)
        return
    fd = disk.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.syncfs(fd)
    finally:
        disk.close(fd)


def replace_file(
    path: Path,
    data: bytes | memoryview,
    *,
    keep_previous: bool = False,
    shared: bool = False,
    mode: int = 0o644,
    durable: bool = True,
) -> None:
    """Writes `data` to `path`, durable on return; creates the parent folder. `keep_previous`: the
    former content becomes `<path>.bak`. `shared`: other processes may replace the file at the same
    time. Raises OSError; then the file has the old content or, if the folder could not be synced,
    the new one."""
    disk.makedirs(path.parent)
    owner = f".{os.getpid()}" if shared else ""
    temp = path.with_name(f"{path.name}{owner}{_TEMP_SUFFIX}")
    try:
        _write_new(temp, data, mode, durable=durable)
        # A link, not a rename: `path` must exist at each moment.
        if keep_previous and path.exists():
            _link_over(path, backup_path(path), mode)
        disk.replace(temp, path)
    except OSError:
        if shared:  # no other process would overwrite this temporary file
            with contextlib.suppress(OSError):
                disk.remove(temp)
        raise
    if durable:
        sync_directory(path.parent)


class SnapshotOrder:
    """Keeps the writes of one file in order: an older snapshot in another thread is dropped once a
    newer one is written."""

    def __init__(self) -> None:
        self._taken = self._written = 0
        self._lock = threading.Lock()

    def ordered(self, write: Callable[[], None]) -> Callable[[], None]:
        """Wraps `write`, which writes the newest snapshot, for use in any thread. It may be
        repeated after an error."""
        self._taken += 1
        return partial(self._run, self._taken, write)

    def _run(self, number: int, write: Callable[[], None]) -> None:
        with self._lock:
            if number > self._written:
                write()
                self._written = number


def replace_with_twin(path: Path, data: bytes) -> None:
    """Writes `data` to `path` and `<path>.bak`, both durable on return; for files whose former
    content would be wrong, not only old. After a crash each copy is whole. Both are written before
    the first sync, and the folder is synced once: two journal commits per role change instead of
    four."""
    disk.makedirs(path.parent)
    targets = (path, backup_path(path))
    temps = [target.with_name(target.name + _TEMP_SUFFIX) for target in targets]
    with contextlib.ExitStack() as opened:  # closes each, whatever another's close raises
        fds: list[int] = []
        for temp in temps:
            fds.append(disk.open(temp, _NEW, 0o644))
            opened.callback(disk.close, fds[-1])
            write_all(fds[-1], data, 0)
        for fd in fds:
            disk.fsync(fd)
    for temp, target in zip(temps, targets, strict=True):
        disk.replace(temp, target)
    sync_directory(path.parent)


def show_file(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """As `replace_file` for what readers may see at any moment, but does not sync. Raises OSError
    that names `path`; then the old content stays."""
    data = content.encode() if isinstance(content, str) else content
    try:
        replace_file(path, data, shared=True, mode=mode, durable=False)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_named(path: Path, content: str | bytes) -> None:
    """Writes a file that a user names: as `show_file`, with the mode that it has; where a link
    points. A pipe or a device (`/dev/stdout`) stays what it is. Raises OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | 0o644
    target = path.resolve()
    if not target.parent.is_dir():  # a mistyped path creates no folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if stat.S_ISREG(mode):
        show_file(target, content, stat.S_IMODE(mode))
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def shift_files(path: str | Path, kept: int) -> None:
    """Renames `<path>.0` to `.1`, `.1` to `.2` and so on up to the first number that is free; the
    one at `kept` is dropped if none is. Raises OSError; a repetition then drops nothing more."""
    # From a free number: a try that fails half way leaves one, and the next try begins there.
    free = next((n for n in range(1, kept) if not os.path.exists(f"{path}.{n}")), kept)
    for number in range(free, 0, -1):
        disk.replace(f"{path}.{number - 1}", f"{path}.{number}")


def remove_file(path: Path) -> None:
    """Removes `path` durably; a missing file is no error."""
    disk.remove(path)
    if path.parent.exists():
        sync_directory(path.parent)


def load_with_backup(
    path: Path, parse: Callable[[bytes], T], *, is_twin: bool = False
) -> tuple[T, str] | None:
    """The value in `path`, or in `<path>.bak` if that is missing, empty, or refused by `parse`
    (ValueError), and why it is from `.bak`, "" if it is not; None if neither exists. `is_twin`:
    `.bak` has the same content, so it also serves where the disk cannot read `path`. Raises
    CorruptLogError, with the reasons, if none can be used, OSError."""
    reasons: list[str] = []
    found = False
    for candidate in (path, backup_path(path)):
        try:
            data = disk.read_bytes(candidate)
        except FileNotFoundError:
            reasons.append(f"{candidate.name}: missing")
            continue
        except OSError as error:
            # An older `.bak` would silently take back what was changed since.
            if not is_twin:
                raise
            disk.check_unreadable(error)
            found = True
            reasons.append(f"{candidate.name}: {disk.reason(error)}")
            continue
        found = True
        if not data:
            reasons.append(f"{candidate.name}: empty")
            continue
        try:
            value = parse(data)
        except ValueError as error:
            reasons.append(f"{candidate.name}: {error}")
            continue
        return value, reasons[0] if reasons else ""
    if not found:
        return None
    # To start without the file would silently forget what is in it.
    raise CorruptLogError(str(path), 0, "; ".join(reasons))


def _write_new(path: Path, data: bytes | memoryview, mode: int, *, durable: bool = True) -> None:
    fd = disk.open(path, _NEW, mode)
    try:
        write_all(fd, data, 0)
        if durable:
            disk.fsync(fd)
    finally:
        disk.close(fd)


def _link_over(source: Path, target: Path, mode: int) -> None:
    """Makes `target` a second name of `source`'s content; `target` exists all the time. `mode`:
    where it must be a file of its own."""
    temp = target.with_name(target.name + _TEMP_SUFFIX)
    disk.remove(temp)
    try:
        disk.link(source, temp)
    except OSError:  # file systems without hard links
        _write_new(temp, disk.read_bytes(source), mode)
    disk.replace(temp, target)
