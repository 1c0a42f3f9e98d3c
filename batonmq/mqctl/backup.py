"""A backup of a broker's store: its commit log up to a confirmed offset, its epochs and its tables.

A backup is a folder, or a tar stream of the same files: `commitlog/` with the segments, the last
one ending at the cut, and `backup.json`, written last. That file is the manifest: the size and
CRC-32 of each segment, the epochs, and the tables `config/*.json`. Without it a folder is no
backup. Bytes behind a size belong to a later backup that was not finished, and do not count: if one
is interrupted, the backup before it stays whole. A later backup of the same history adds only new
bytes, and removes what has expired in the store.

Consumer offsets are read before the cut is asked for, so they never lie above it. Queues and index
are not copied: a start makes them from the log. Neither are the names by which controllers know a
replica (identity, log id, lineage, incarnations): a restored store is a new log (R17, R47), and is
never taken for the replica that it was copied from.
"""

import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Final, Self
from zlib import crc32

import msgspec

from batonmq.epoch.entry import EpochEntry
from batonmq.epoch.file_cache import REDO_SUFFIX, encode_entries, every_entry
from batonmq.mqctl.store_check import SEGMENT_NAME, Verdict, segments_of, size_of, verify
from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk
from batonmq.runtime.durable_file import BACKUP_SUFFIX, replace_file, sync_directory, write_all
from batonmq.runtime.lock_file import FolderLock
from batonmq.runtime.words import counted

VERSION: Final = 1
MANIFEST: Final = "backup.json"
LOG: Final = "commitlog"
EPOCHS: Final = "epochFileCheckpoint"
PART_BYTES: Final = 1 << 20
COMPARED_BYTES: Final = 1 << 16
"""At the end of a segment that both have: another history differs there."""
RESTORING_SUFFIX: Final = ".restoring"
_TABLE: Final = re.compile(r"[A-Za-z]{1,64}\.json")
_OFFSETS: Final = ("consumerOffset.json", "delayOffset.json", "consumerOrderInfo.json")
_NOT_COPIED: Final = ("queueLocks.json",)  # who consumes now; its clients lock again

Done = Callable[[int], None]
"""Is given the number of bytes that are done, again and again."""


class BackupError(BatonError):
    """What keeps a backup or a restore from being whole."""


class BackupSegment(msgspec.Struct, frozen=True):
    """The first `size` bytes of the file that begins at log offset `start`, with their CRC-32."""

    start: int
    size: int
    crc: int

    @property
    def path(self) -> str:
        return f"{LOG}/{self.start:020d}"

    @property
    def end(self) -> int:
        return self.start + self.size


class _Users(msgspec.Struct):
    users: dict[str, msgspec.Raw] = {}


def _read(path: Path) -> bytes:
    """b"" if there is none."""
    try:
        return disk.read_bytes(path)
    except FileNotFoundError:
        return b""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a backup holds. `end`: the cut (exclusive), the end of a record. `lineage`: of the
    history that was copied, "" if it has none (R47). `epochs`: (epoch, start)."""

    version: int
    lineage: str
    segment_size: int
    end: int
    epochs: list[tuple[int, int]]
    segments: list[BackupSegment]
    tables: dict[str, bytes]
    made_at_ms: int

    @property
    def begin(self) -> int:
        """The log's first byte."""
        return self.segments[0].start if self.segments else self.end

    def segment(self, start: int) -> BackupSegment | None:
        return next((segment for segment in self.segments if segment.start == start), None)

    def encode(self) -> bytes:
        body = msgspec.json.format(msgspec.json.encode(self), indent=1)
        return b"%08x\n%b" % (crc32(body), body)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """Raises BackupError."""
        crc, _, body = data.partition(b"\n")
        if crc != b"%08x" % crc32(body):
            raise BackupError(f"{where}: damaged, its CRC does not fit")
        try:
            manifest = msgspec.json.decode(body, type=cls)
        except msgspec.DecodeError as error:
            raise BackupError(f"{where}: {error}") from error
        if manifest.version != VERSION:
            raise BackupError(f"{where}: version {manifest.version}, this mqctl reads {VERSION}")
        at = manifest.begin
        for segment in manifest.segments:
            if segment.start != at or not 0 < segment.size <= manifest.segment_size:
                raise BackupError(f"{where}: its segments are no log")
            at = segment.end
        names = (name for name in manifest.tables if not _TABLE.fullmatch(name))
        if at != manifest.end or any(names):
            raise BackupError(f"{where}: its parts do not fit together")
        return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """None if there is none. Raises BackupError for one that cannot be used, OSError."""
    path = folder / MANIFEST
    return Manifest.decode(disk.read_bytes(path), str(path)) if path.exists() else None


# Reading a store.


class StoreSource:
    """A broker's store, also of one that runs; nothing in it is written."""

    def __init__(self, root: Path) -> None:
        """Raises BackupError if there is no commit log."""
        self.root = root
        self._log = root / LOG
        files = self._files()
        if not files:
            raise BackupError(f"{root}: no commit log is there (commitlog/ with its files)")
        self.segment_size = files[0].stat().st_size
        # Before the cut is asked for: an offset that is read later may lie above it.
        self._offsets = {name: _read(root / "config" / name) for name in _OFFSETS}

    def _files(self) -> list[Path]:
        # The newest one may have been made by name only.
        return [file for file in segments_of(self._log) if size_of(file)]

    def segments(self, end: int) -> list[Path]:
        """The files with bytes below `end`. Raises BackupError for a missing one."""
        found = [file for file in self._files() if int(file.name) < end]
        at = int(found[0].name) if found else end
        for path in found:
            if int(path.name) != at:
                raise BackupError(f"{self._log}: no file holds the log from {at} on")
            at += self.segment_size
        if at < end:
            raise BackupError(f"{self._log} ends at {at}, before the cut {end}")
        return found

    @property
    def lineage(self) -> str:
        return _read(self._log / ".baton" / "lineage").decode("ascii", "replace")

    def epochs(self, end: int) -> list[tuple[int, int]]:
        """Those that begin below `end`. Raises BackupError for a list that cannot be read."""
        path = self.root / EPOCHS
        if not path.exists():
            return []
        try:
            every = every_entry(_read(path), _read(path.with_name(path.name + REDO_SUFFIX)))
        except ValueError as error:
            raise BackupError(f"{path}: {error}") from error
        return [(e.epoch, e.start_offset) for e in every if e.start_offset < end]

    def tables(self) -> dict[str, bytes]:
        """Name -> content. Offsets are those from when this object was made."""
        found = dict(self._offsets)
        for path in sorted((self.root / "config").glob("*.json")):
            if path.name not in found and path.name not in _NOT_COPIED:
                found[path.name] = _read(path)
        return {name: data for name, data in found.items() if data and _TABLE.fullmatch(name)}

    def checked_end(self, done: Done) -> int:
        """Of a stopped store: the end of its last whole record. Raises BackupError for damage."""
        verdict = Verdict()
        for position in verify(self._files(), verdict, is_open=True):
            done(position)
        _raise_damage(verdict)
        return verdict.end


def _raise_damage(verdict: Verdict) -> None:
    if verdict.damages:
        first = verdict.damages[0]
        raise BackupError(
            f"{first.file} at offset {first.offset}, {counted(first.size, 'byte')}: {first.what};"
            " back up another replica, and see `mqctl verifyStore`"
        )


# Making a backup.


def back_up(
    source: StoreSource, folder: Path, end: int, now_ms: int, done: Done
) -> tuple[Manifest, int]:
    """Copies the store up to log offset `end` into `folder`; (manifest, new bytes of the log). The
    folder holds the backup before, or this one, whatever happens. Raises BackupError, OSError,
    FolderLockedError (another backup writes there)."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(folder / "lock")
    lock.acquire()
    try:
        return _back_up(source, folder, end, now_ms, done)
    finally:
        lock.release()


def _back_up(
    source: StoreSource, folder: Path, end: int, now_ms: int, done: Done
) -> tuple[Manifest, int]:
    before = read_manifest(folder)
    paths = source.segments(end)
    epochs = source.epochs(end)
    if before is not None:
        _check_continues(before, source, folder, end, epochs)
    (folder / LOG).mkdir(exist_ok=True)
    segments: list[BackupSegment] = []
    added = 0
    for path in paths:
        start = int(path.name)
        size = min(source.segment_size, end - start)
        had = (before.segment(start) if before is not None else None) or BackupSegment(start, 0, 0)
        if had.size < size:
            crc = _extend(
                path, folder / had.path, had, size, source.segment_size, _from(added, done)
            )
            added += size - had.size
            segment = BackupSegment(start, size, crc)
            # The copy, not the source: a bad sector of either disk shows.
            check_log([folder / segment.path], segment.end)
        else:
            segment = had
        segments.append(segment)
    manifest = _manifest(source, end, epochs, segments, now_ms)
    # In this order: a manifest that outlives a power loss must not name segments that do not.
    sync_directory(folder / LOG)
    replace_file(folder / MANIFEST, manifest.encode())
    for path in segments_of(folder / LOG):  # expired in the store, or of an unfinished backup
        if manifest.segment(int(path.name)) is None:
            disk.unlink(path)
    return manifest, added


def back_up_to_stream(
    source: StoreSource, out: IO[bytes], end: int, now_ms: int, done: Done
) -> Manifest:
    """Writes the store up to `end` as a tar stream, the manifest last: a stream that was cut short
    has none. The segments are checked before. Raises BackupError, OSError."""
    paths = source.segments(end)
    epochs = source.epochs(end)
    segments: list[BackupSegment] = []
    sent = 0
    with tarfile.open(fileobj=out, mode="w|") as archive:
        for path in paths:
            start = int(path.name)
            size = min(source.segment_size, end - start)
            with path.open("rb") as file:
                parts = _Counted(file, size)
                archive.addfile(_member(f"{LOG}/{path.name}", size), parts)  # type: ignore[arg-type]
            if parts.left:
                raise BackupError(f"{path}: it lacks {counted(parts.left, 'byte')}")
            sent += size
            done(sent)
            segments.append(BackupSegment(start, size, parts.crc))
        manifest = _manifest(source, end, epochs, segments, now_ms)
        data = manifest.encode()
        archive.addfile(_member(MANIFEST, len(data)), BytesIO(data))
    return manifest


def _from(base: int, done: Done) -> Done:
    return lambda count: done(base + count)


def _manifest(
    source: StoreSource,
    end: int,
    epochs: list[tuple[int, int]],
    segments: list[BackupSegment],
    now_ms: int,
) -> Manifest:
    return Manifest(
        version=VERSION,
        lineage=source.lineage,
        segment_size=source.segment_size,
        end=end,
        epochs=epochs,
        segments=segments,
        tables=source.tables(),
        made_at_ms=now_ms,
    )


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


class _Counted:
    """The first `left` bytes of a file, with their CRC-32."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self.left = size
        self.crc = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self.left))
        self.left -= len(data)
        self.crc = crc32(data, self.crc)
        return data


def _check_continues(
    before: Manifest, source: StoreSource, folder: Path, end: int, epochs: Sequence[tuple[int, int]]
) -> None:
    """Raises BackupError unless the backup before is the beginning of the same log (R47)."""
    advice = f"the backup in {folder} stays as it is; give an empty folder"
    if before.lineage != source.lineage or before.segment_size != source.segment_size:
        raise BackupError(f"{source.root} has another history than the backup: {advice}")
    if end < before.end:
        raise BackupError(f"{source.root} is confirmed up to {end}, before {before.end}: {advice}")
    known = [epoch for epoch in before.epochs if epoch[0] >= epochs[0][0]] if epochs else []
    if known != list(epochs[: len(known)]):
        raise BackupError(f"{source.root} has other epochs than the backup: {advice}")
    for segment in before.segments[-2:]:
        own = source.root / segment.path
        size = min(COMPARED_BYTES, segment.size)
        if not own.exists():  # expired
            continue
        if _tail(own, segment.size, size) != _tail(folder / segment.path, segment.size, size):
            raise BackupError(f"{own} has other bytes than the backup: {advice}")


def _tail(path: Path, end: int, size: int) -> bytes:
    return b"".join(_parts(path, end - size, end))


def _parts(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes [begin, end) of a file; fewer if it is shorter. Raises OSError."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        while begin < end and (part := disk.pread(fd, min(PART_BYTES, end - begin), begin)):
            yield part
            begin += len(part)
    finally:
        disk.close(fd)


def _extend(
    path: Path, target: Path, had: BackupSegment, size: int, full_size: int, done: Done
) -> int:
    """Appends the bytes [had.size, size) of `path`, durably, and a hole up to the full size of a
    segment, as in a store; the CRC-32 of [0, size). Raises BackupError if bytes that `target`
    should have are gone, OSError."""
    crc = had.crc
    writing = disk.open(target, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.fstat(writing).st_size < had.size:
            raise BackupError(f"{target}: shorter than its backup was; give an empty folder")
        os.ftruncate(writing, had.size)  # what an unfinished backup left
        at = had.size
        for part in _parts(path, at, size):
            write_all(writing, part, at)
            crc = crc32(part, crc)
            at += len(part)
            done(at - had.size)
        if at < size:
            raise BackupError(f"{path}: ends at {at}, before {size}")
        os.ftruncate(writing, full_size)
        disk.fsync(writing)
    finally:
        disk.close(writing)
    return crc


def check_log(paths: Sequence[Path], end: int, *, is_open: bool = False) -> None:
    """Raises BackupError unless these files hold whole records up to `end`. `is_open`: they are a
    store's own, and a broker may write behind that."""
    verdict = Verdict()
    for _ in verify(list(paths), verdict, is_open=is_open):
        pass
    if is_open:
        verdict.damages = [damage for damage in verdict.damages if damage.offset < end]
    _raise_damage(verdict)
    if verdict.end < end or (verdict.end > end and not is_open):
        raise BackupError(f"{paths[-1]}: its last whole record ends at {verdict.end}, not {end}")


# Checking and restoring one.


def check_backup(folder: Path, done: Done) -> Manifest:
    """Reads every byte of a backup. Raises BackupError, OSError."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise BackupError(f"{folder}: no {MANIFEST} is there: no backup, or none that was finished")
    checked = 0
    for segment in manifest.segments:
        crc, left = 0, segment.size
        for part in _parts(folder / segment.path, 0, segment.size):
            crc = crc32(part, crc)
            left -= len(part)
            checked += len(part)
            done(checked)
        if left or crc != segment.crc:
            what = f"it lacks {counted(left, 'byte')}" if left else "its CRC does not fit"
            raise BackupError(f"{folder / segment.path}: damaged, {what}")
    return manifest


def restore(folder: Path, root: Path, done: Done) -> Manifest:
    """Makes a store of a backup at `root`, which is not there yet or empty. Durable on return; it
    appears whole or not at all. Raises BackupError, OSError."""
    # Before anything is written: half a restore over hours would end with the same error.
    manifest = check_backup(folder, lambda _: None)
    with _restoring(root) as new:
        copied = 0
        for segment in manifest.segments:
            _extend(
                folder / segment.path,
                new / segment.path,
                BackupSegment(segment.start, 0, 0),
                segment.size,
                manifest.segment_size,
                _from(copied, done),
            )
            copied += segment.size
        _finish(new, manifest)
    return manifest


def restore_from_stream(stream: IO[bytes], root: Path, done: Done) -> Manifest:
    """As `restore`, of a tar stream. Raises BackupError, OSError."""
    with _restoring(root) as new:
        try:
            manifest = _unpack(stream, new, done)
        except tarfile.TarError as error:
            raise BackupError(f"the stream is no backup, or ends early: {error}") from error
        check_backup(new, lambda _: None)
        _finish(new, manifest)
    return manifest


def _unpack(stream: IO[bytes], new: Path, done: Done) -> Manifest:
    written = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            folder, _, name = member.name.rpartition("/")
            if file is not None and member.name == MANIFEST:
                data = file.read()
                replace_file(new / MANIFEST, data)
                return Manifest.decode(data, MANIFEST)
            if file is None or folder != LOG or not SEGMENT_NAME.fullmatch(name):
                raise BackupError(f"the stream is no backup: it holds {member.name[:80]!r}")
            with (new / LOG / name).open("xb") as out:
                while part := file.read(PART_BYTES):
                    out.write(part)
                    written += len(part)
                    done(written)
    raise BackupError(f"the stream has no {MANIFEST}: it ended early")


@contextmanager
def _restoring(root: Path) -> Iterator[Path]:
    """A folder beside `root` that becomes it; removed if anything fails. Raises BackupError if
    something is there already."""
    root = root.absolute()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise BackupError(
            f"{root} is not empty: move it aside (`batonmq moveAside {root}`), nothing is"
            " overwritten"
        )
    new = root.with_name(root.name + RESTORING_SUFFIX)
    if new.exists():
        shutil.rmtree(new)  # of a restore that was interrupted
    (new / LOG).mkdir(parents=True)
    try:
        yield new
        if root.exists():
            root.rmdir()
        disk.replace(new, root)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_directory(root.parent)


def users_in(manifest: Manifest) -> list[str]:
    """Their names, as the store's table had them. Raises BackupError."""
    table = manifest.tables.get("users.json", b"{}")
    try:
        return sorted(msgspec.json.decode(table, type=_Users).users)
    except msgspec.DecodeError as error:
        raise BackupError(f"users.json of the backup cannot be read: {error}") from error


def _finish(new: Path, manifest: Manifest) -> None:
    """Makes a store of the segments, which are checked: their full size, epochs and tables."""
    for segment in manifest.segments:
        fd = disk.open(new / segment.path, os.O_RDWR)
        try:
            os.ftruncate(fd, manifest.segment_size)  # a hole behind the cut
            disk.fsync(fd)
        finally:
            disk.close(fd)
    if manifest.segments:
        check_log([new / segment.path for segment in manifest.segments], manifest.end)
    entries = encode_entries([EpochEntry(epoch, start) for epoch, start in manifest.epochs])
    for path in (new / EPOCHS, new / f"{EPOCHS}{BACKUP_SUFFIX}"):
        replace_file(path, entries)
    for name, data in manifest.tables.items():
        replace_file(new / "config" / name, data)
    (new / MANIFEST).unlink(missing_ok=True)
    for path in (new / LOG, new):
        sync_directory(path)
