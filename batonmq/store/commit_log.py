"""The log: one endless byte string in segments of equal length. It knows offsets, segments and
durability, nothing of records.

Invariants: segments are contiguous and begin at multiples of the segment size. Bytes from
`max_offset` on are zero, since a torn tail and a cut are zeroed before the next write: what is
found there later is damage or a crash. A segment exists in full before its first byte.

A `Segment` is a file of fixed length with all blocks allocated, so a full disk is an error at
creation, never a signal or a half-written record. It is written by `pwrite` and mapped only for
reading: with a writable map every fdatasync and the latency tail would cost more. Origin: Java's
`MappedFileQueue`, `AllocateMappedFileService`, `DefaultMappedFile`.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.numbers import natural_number
from batonmq.runtime import disk
from batonmq.runtime.durable_file import data_extents, replace_file, sync_directory, write_all
from batonmq.store.disk_health import StoreHealth
from batonmq.store.errors import StoreFormatError

log = logging.getLogger(__name__)

NAME_DIGITS: Final = 20
_BLOCK_SIZE: Final = 1 << 20
_ZERO_BLOCK: Final = bytes(_BLOCK_SIZE + 16)
_ZERO_BLOCK_VIEW: Final = memoryview(_ZERO_BLOCK)

# Java skips folders in the log folder, and stops at a file whose name is no number.
_PRIVATE_FOLDER: Final = ".baton"
_LOG_ID_FILE: Final = "log_id"
_LINEAGE_FILE: Final = "lineage"


def segment_name(start_offset: int) -> str:
    return f"{start_offset:0{NAME_DIGITS}d}"


def _check_format(path: Path, segment_size: int) -> None:
    """Raises StoreFormatError."""
    if natural_number(path.name) is None or len(path.name) != NAME_DIGITS:
        raise StoreFormatError(path, "is no log segment, and none of its neighbours can be")
    size = path.stat().st_size
    if size != segment_size:
        raise StoreFormatError(
            path, f"has {size} bytes, but mappedFileSizeCommitLog is {segment_size}"
        )
    if int(path.name) % segment_size:
        raise StoreFormatError(path, f"does not begin at a multiple of {segment_size}")


def _take_back(path: Path, growing: Path) -> None:
    """Removes what a failed attempt left: `growing`, and `path` if it is the same file. May be
    repeated. Raises OSError."""
    if growing.exists():
        if path.exists() and path.samefile(growing):
            disk.remove(path)
        disk.remove(growing)


class Segment:
    """The bytes [start_offset, start_offset + size) of the log. Positions count from its start."""

    def __init__(self, path: Path, size: int, health: StoreHealth) -> None:
        """Opens a file of exactly `size` bytes."""
        self._health = health
        self.path = path
        self.size = size
        self.start_offset = int(path.name)
        self._fd = disk.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = disk.map_read(self._fd, size)
        except OSError:
            # Without memory for the map each retry would keep a descriptor, and the blocks of a
            # file that is removed again.
            disk.close(self._fd)
            raise
        self._view = memoryview(self._map)
        self._sync_lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(
        cls, folder: Path, work_folder: Path, start_offset: int, size: int, health: StoreHealth
    ) -> Segment:
        """Allocates a segment of zeros, durable on return. It grows under another name in
        `work_folder` (same file system), so a crash or a full disk leaves no segment of a wrong
        length. A file with both names belongs to a failed attempt. Raises OSError, FileExistsError
        if there is a segment; it can be repeated."""
        path = folder / segment_name(start_offset)
        growing = work_folder / path.name
        if disk.free_bytes(folder) < size:  # allocating would find out much later
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        _take_back(path, growing)
        try:
            fd = disk.open(growing, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                disk.posix_fallocate(fd, 0, size)
                disk.fsync(fd)
            finally:
                disk.close(fd)
            disk.link(growing, path)  # unlike a rename, it replaces nothing
            sync_directory(folder)
            segment = cls(path, size, health)
            try:
                disk.unlink(growing)
            except OSError:
                segment.close()
                raise
        except OSError:
            try:
                _take_back(path, growing)
            except OSError as error:
                log.warning("segment_part_stays file=%s reason=%s", path, error)
            raise
        return segment

    @property
    def end_offset(self) -> int:
        return self.start_offset + self.size

    @property
    def buffer(self) -> memoryview:
        """The whole segment, read-only."""
        return self._view

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Writes `data` at `position`; it must fit."""
        assert position + len(data) <= self.size, "a write must not leave its segment"
        write_all(self._fd, data, position)

    def datasync(self) -> None:
        """fdatasync without the GIL; no effect on a closed segment. Raises OSError. After one
        failed sync of the log, in any thread, none is tried (R40): the kernel reports a write-back
        error once, the next call returns 0 although pages are lost."""
        with self._sync_lock:
            self._health.check_log()
            if self._closed:
                return
            try:
                disk.fdatasync(self._fd)
            except OSError as error:
                self._health.log_failed(error)
                raise

    def data_blocks(self, position: int, overlap: int = 0) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of the blocks from `position` on that are not all zero: at most 1 MiB
        each, and `overlap` (at most 16) bytes of what follows."""
        for start, end in data_extents(self._fd, self.size, position):
            for block in range(start, end, _BLOCK_SIZE):
                length = min(_BLOCK_SIZE, end - block)
                piece = self._map[block : min(block + length + overlap, self.size)]
                if piece != _ZERO_BLOCK[: len(piece)]:
                    yield block, piece

    def data_end(self, position: int = 0) -> int:
        """The end of the last non-zero byte from `position` on; else `position`."""
        last = position
        for block, piece in self.data_blocks(position):
            last = block + len(piece.rstrip(b"\0"))
        return last

    def zero(self, start: int, end: int) -> None:
        for position in range(start, end, _BLOCK_SIZE):
            length = min(_BLOCK_SIZE, end - position)
            self.write(position, _ZERO_BLOCK_VIEW[:length])

    def read_ahead(self, *, enabled: bool) -> None:
        self._map.madvise(mmap.MADV_NORMAL if enabled else mmap.MADV_RANDOM)

    def close(self) -> None:
        """Views handed out stay valid; the map is freed with the last one."""
        with self._sync_lock:
            if self._closed:
                return
            self._closed = True
            # First: an error of the file's close must not keep the map.
            with suppress(BufferError):  # still being sent; the last reference closes the map
                self._view.release()
                self._map.close()
            disk.close(self._fd)


class HistoryName:
    """The name of the history that a log belongs to (R47), in the file `path`. The group's first
    master creates it at random, a replica takes its master's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name: str | None = None

    @property
    def name(self) -> str:
        """ "" for a log that has neither led nor followed since histories have names."""
        if self._name is None:
            is_there = self._path.exists()
            self._name = (
                disk.read_bytes(self._path).decode("ascii", "backslashreplace") if is_there else ""
            )
        return self._name

    def enter(self, name: str) -> None:
        """The log belongs to that history. Durable on return. Raises OSError."""
        replace_file(self._path, name.encode("ascii"))
        self._name = name


class CommitLog:
    """Segments of `segment_size` bytes in `folder`. Offsets are of the whole log. One thread
    writes; `datasync_to` and `preallocate_next` may run in others."""

    def __init__(self, folder: Path, segment_size: int, health: StoreHealth | None = None) -> None:
        self.health = health or StoreHealth()
        self.folder = folder
        self.segment_size = segment_size
        self.min_offset = 0  # start of the first segment
        self.max_offset = 0  # end of what was written
        self.flushed_offset = 0  # end of what fdatasync has covered
        self.gap: tuple[Path, int] | None = None  # a missing file: its path and start offset
        self.segments: list[Segment] = []
        self._detached: list[Segment] = []  # behind the gap
        self._allocation_lock = threading.Lock()
        #: Start of the segment that a full disk did not allow, until it exists.
        self.missing_segment: int | None = None
        self._is_closed = False
        self._flush_lock = threading.Lock()
        self.cuts = 0  # how often the log was shortened
        self._torn_end = 0  # how far a write may have come that a full disk cut short
        self._private = folder / _PRIVATE_FOLDER
        self._log_id = ""
        self.lineage = HistoryName(self._private / _LINEAGE_FILE)

    # Opening.

    def load(self) -> None:
        """Opens every segment; `max_offset` is then the end of the last one until recovery sets it.
        An empty last file is deleted. Behind a missing file nothing is opened (`gap`). Raises
        StoreFormatError for a file of another length or name."""
        disk.makedirs(self._private)
        for leftover in self._private.iterdir():
            if natural_number(leftover.name) is not None:
                disk.unlink(leftover)  # an allocation that a crash interrupted
        paths = sorted(path for path in self.folder.iterdir() if path.is_file())
        if paths and paths[-1].stat().st_size == 0:
            log.warning("empty_last_segment_deleted file=%s", paths[-1])
            disk.unlink(paths.pop())
        for path in paths:
            _check_format(path, self.segment_size)
        self.min_offset = int(paths[0].name) if paths else 0
        for path in paths:
            expected = self.min_offset + len(self.segments) * self.segment_size
            segment = Segment(path, self.segment_size, self.health)
            if self.gap is None and segment.start_offset != expected:
                self.gap = (self.folder / segment_name(expected), expected)
            (self._detached if self.gap else self.segments).append(segment)
        self.set_end(self.end_of_segments)

    @property
    def log_id(self) -> str:
        """The random id of this log, made when it was empty; it goes with its folder. Each
        heartbeat contains it, so it is read once."""
        if not self.found_log_id:
            fresh = uuid.uuid4().hex
            replace_file(self._private / _LOG_ID_FILE, fresh.encode("ascii"))
            self._log_id = fresh
        return self._log_id

    @property
    def found_log_id(self) -> str:
        """The log id; "" if none was made yet."""
        path = self._private / _LOG_ID_FILE
        if not self._log_id and path.exists():
            text = disk.read_bytes(path).decode("ascii", "replace").strip()
            if not text.isprintable() or not text.isascii() or not text:
                raise CorruptLogError(
                    str(path), 0, "no log id; move the whole store aside to copy the master"
                )
            self._log_id = text
        return self._log_id

    @property
    def end_of_segments(self) -> int:
        # Not by `min_offset`: for the thread that allocates it may be older than the list.
        return self.segments[-1].end_offset if self.segments else self.min_offset

    @property
    def detached_files(self) -> tuple[Path, ...]:
        """Segments behind a missing one: not readable, not part of the log."""
        return tuple(segment.path for segment in self._detached)

    def set_end(self, offset: int, durable_offset: int | None = None) -> None:
        """Declares [min_offset, offset) written, and durable up to `durable_offset` (None: all)."""
        assert self.min_offset <= offset <= self.end_of_segments
        self.max_offset = offset
        self.flushed_offset = offset if durable_offset is None else min(durable_offset, offset)

    # Reading.

    def segment_at(self, offset: int) -> Segment | None:
        """The segment of the byte at `offset`, written or not."""
        index = (offset - self.min_offset) // self.segment_size
        if 0 <= index < len(self.segments):
            return self.segments[index]
        return None

    def view(self, offset: int, size: int) -> memoryview:
        """Written bytes from `offset`: at most `size`, at most to the end of the segment."""
        segment = self.segment_at(offset)
        if segment is None or offset >= self.max_offset:
            return memoryview(b"")
        position = offset - segment.start_offset
        end = min(position + size, segment.size, self.max_offset - segment.start_offset)
        return segment.buffer[position:end]

    def file_of(self, offset: int) -> str:
        """The path of the file that holds, or would hold, `offset`."""
        start = offset - offset % self.segment_size
        return str(self.folder / segment_name(start))

    def damage(self, offset: int, what: str) -> CorruptLogError:
        """The error that names the file of `offset`."""
        return CorruptLogError(self.file_of(offset), offset, what)

    # Writing.

    @property
    def space(self) -> int:
        """Bytes from `max_offset` to the end of its segment; a whole segment at a border."""
        return self.segment_size - self.max_offset % self.segment_size

    def append(self, data: bytes | memoryview) -> int:
        """Writes at `max_offset`, into new segments if needed; the new `max_offset`. Raises OSError
        if a segment cannot be allocated; what was written before it stays."""
        space = self.space
        if len(data) <= space:
            self._write(data)
            return self.max_offset
        rest = memoryview(data)
        while rest:
            space = self.space
            self._write(rest[:space])
            rest = rest[space:]
        return self.max_offset

    def append_blank(self, blank: bytes) -> int:
        """Writes the mark that ends a segment and goes to its end; the new `max_offset`."""
        end = self.max_offset + self.space
        self._write(blank)
        self.max_offset = end
        return end

    def _write(self, data: bytes | memoryview) -> None:
        self.health.check_usable()
        offset = self.max_offset
        segment = self.ensure_segment(offset)
        end = offset + len(data)
        try:
            if self._torn_end > end:
                # Another master's bytes come: behind them a start must find no older record.
                self.clear_torn()
            segment.write(offset - segment.start_offset, data)
        except OSError as error:
            if disk.is_short(error):
                self._torn_end = max(self._torn_end, end)
                self.health.note_full(error)
            else:
                self.health.log_failed(error)
            raise
        self.max_offset = end

    def clear_torn(self) -> None:
        """Zeroes, durably, what a write left that a full disk cut short. Raises OSError; then it
        can be repeated."""
        segment = self.segment_at(self.max_offset)
        # A torn end beyond this segment was in a later one, which a cut has removed.
        if segment is not None and self.max_offset < self._torn_end <= segment.end_offset:
            self.zero_from(self.max_offset, self._torn_end)
        self._torn_end = 0

    def ensure_segment(self, offset: int) -> Segment:
        """The segment for `offset`, allocated if missing. Raises OSError (disk full)."""
        index = (offset - self.min_offset) // self.segment_size
        if index >= len(self.segments):
            with self._allocation_lock:
                while index >= len(self.segments):
                    self._allocate_next(is_needed=True)
        return self.segments[index]

    def allocate_missing(self) -> None:
        """Tries again to allocate `missing_segment`, unless it exists, was cut or expired. Raises
        OSError while the disk is full. What else fails ends no broker: puts still fit."""
        with self._allocation_lock:
            if not self._is_closed and self.missing_segment == self.end_of_segments:
                try:
                    self._allocate_next(is_needed=False)
                except OSError as error:
                    if self.health.passes(error):
                        raise
                    log.warning("segment_preallocation_failed reason=%r", disk.described(error))

    def preallocate_when_due(self) -> None:
        """Allocates the next segment in a thread once the last one is more than half full."""
        if (
            self.end_of_segments - self.max_offset < self.segment_size // 2
            # Upkeep asks a full disk again, not every turn.
            and self.missing_segment != self.end_of_segments
            and not self._allocation_lock.locked()
        ):
            thread = threading.Thread(target=self.preallocate_next, name="log-alloc", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started: the roll would wait in this one, too
                self.preallocate_next()

    def preallocate_next(self) -> None:
        """Allocates the next segment, so that the roll does not wait; from any thread. A failure is
        noted: upkeep and the roll try again."""
        with self._allocation_lock:
            if self._is_closed or (
                self.segments and self.end_of_segments - self.max_offset >= self.segment_size
            ):
                return
            try:
                self._allocate_next(is_needed=False)
            except OSError as error:
                log.warning("segment_preallocation_failed reason=%r", disk.described(error))

    def _allocate_next(self, *, is_needed: bool) -> None:
        start = self.end_of_segments
        try:
            segment = Segment.create(
                self.folder, self._private, start, self.segment_size, self.health
            )
        except OSError as error:
            # Upkeep tries again, even if no put needs the segment yet (R45).
            self.missing_segment = start
            # While it is only allocated ahead, puts still fit into the present segment. What a
            # failing disk refused is tried again when a put needs it, and then ends this broker.
            if self.health.passes(error):
                self.health.note_full(error, pauses=is_needed)
            raise
        self.segments.append(segment)
        self.missing_segment = None

    def begin_at(self, offset: int) -> None:
        """Gives an empty log its first offset, a multiple of the segment size."""
        assert self.max_offset == self.min_offset and offset % self.segment_size == 0
        with self._allocation_lock:
            while self.segments:
                _take_away(self.segments.pop(), None)
            self.min_offset = self.max_offset = self.flushed_offset = offset
            self._allocate_next(is_needed=True)

    # Durability.

    def datasync_to(self, target: int) -> None:
        """fdatasync of everything below `target` that is not durable, from any thread, also while
        the writer works. Raises OSError, StoreFailedError. After any failure it raises, and
        `flushed_offset` stays (R40)."""
        with self._flush_lock:
            self.health.check_log()
            self.health.check_usable()
            # Segments are synced without the lock; after a cut in between nothing counts as
            # flushed.
            cuts = self.cuts
            flushed = self.flushed_offset
            target = min(target, self.max_offset)  # the log may have been cut since
        for segment in tuple(self.segments):
            if segment.end_offset > flushed and segment.start_offset < target:
                segment.datasync()
        with self._flush_lock:
            self.health.check_log()
            self.health.check_usable()
            if self.cuts == cuts:  # else `target` may lie behind the new end
                self.flushed_offset = max(self.flushed_offset, target)

    def _lower_end(self, offset: int) -> None:
        with self._flush_lock:
            self.cuts += 1
            self.max_offset = min(self.max_offset, offset)
            self.flushed_offset = min(self.flushed_offset, offset)

    # Shortening, for truncation and expiry.

    def drop_last_segment(self, aside: Path | None) -> None:
        """Takes the last segment off the log: moved into `aside`, or unlinked."""
        with self._allocation_lock:
            segment = self.segments.pop()
        # Before the file goes: no flush may count bytes that leave.
        self._lower_end(segment.start_offset)
        _take_away(segment, aside)
        sync_directory(self.folder)

    def drop_detached(self, aside: Path | None) -> None:
        """Removes the files behind a gap, the last one first."""
        # From the end, so that a crash leaves no further gap.
        while self._detached:
            _take_away(self._detached.pop(), aside)
            sync_directory(self.folder)
        self.gap = None

    def zero_from(self, offset: int, end: int) -> None:
        """Makes [offset, end) of one segment zero and durable; the log then ends at `offset`."""
        segment = self.segment_at(offset)
        if segment is not None and end > offset:
            segment.zero(offset - segment.start_offset, end - segment.start_offset)
            segment.datasync()
        self._lower_end(offset)

    def take_first_segment(self) -> Segment:
        """Takes the oldest segment off the log; the caller closes and unlinks it."""
        assert len(self.segments) > 1
        segment = self.segments.pop(0)
        self.min_offset = segment.end_offset
        return segment

    def close(self) -> None:
        with self._allocation_lock:
            self._is_closed = True
            for segment in (*self.segments, *self._detached):
                segment.close()
            self.segments.clear()
            self._detached.clear()


def _take_away(segment: Segment, aside: Path | None) -> None:
    segment.close()
    if aside is None:
        disk.unlink(segment.path)
    else:
        disk.rename(segment.path, aside / segment.path.name)
