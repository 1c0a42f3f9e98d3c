"""One log segment: a file of fixed length, written by `pwrite` and mapped for reading only.

Invariant: the file has its full length, and its blocks belong to it, before the first byte of
data goes in, so a full disk is an error at creation and never a signal or a half-written record.
Stores through a writable map would make every fdatasync dear and the tail of latency long, and
a killed process slow to lose its sockets; so the map is read-only. Origin: Java's
`DefaultMappedFile`, which maps for writing.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from batonmq.process import disk
from batonmq.process.durable_file import sync_directory, write_all
from batonmq.store.health import StoreHealth

log = logging.getLogger(__name__)

NAME_DIGITS: Final = 20
_BLOCK_SIZE: Final = 1 << 20
_ZERO_BLOCK: Final = bytes(_BLOCK_SIZE + 16)
_ZERO_BLOCK_VIEW: Final = memoryview(_ZERO_BLOCK)


def segment_name(start_offset: int) -> str:
    """The file name of the segment that begins at `start_offset`."""
    return f"{start_offset:0{NAME_DIGITS}d}"


def _remove_if_possible(path: Path) -> None:
    """The next attempt, or the next start, removes what stays."""
    try:
        disk.remove(path)
    except OSError as error:
        log.warning("segment_part_stays file=%s error=%s", path, error)


class Segment:
    """The bytes [start_offset, start_offset + size) of the log. Positions count from its start."""

    __slots__ = (
        "_closed", "_fd", "_health", "_map", "_sync_lock", "_view", "path", "size", "start_offset",
    )  # fmt: skip

    def __init__(self, path: Path, size: int, health: StoreHealth) -> None:
        """Open an existing file of exactly `size` bytes."""
        self._health = health
        self.path = path
        self.size = size
        self.start_offset = int(path.name)
        self._fd = disk.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = disk.map_read(self._fd, size)
        self._view = memoryview(self._map)
        self._sync_lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(
        cls, folder: Path, work_folder: Path, start_offset: int, size: int, health: StoreHealth
    ) -> Segment:
        """Allocate a segment of zeros; durable in its folder on return.

        It grows under another name in `work_folder` (same file system), so a crash or a full
        disk leaves no segment of a wrong length. Raises OSError, FileExistsError if it is there;
        then it is not there and can be tried again.
        """
        path = folder / segment_name(start_offset)
        growing = work_folder / path.name
        if disk.free_bytes(folder) < size:  # to find out by allocating may take long
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        try:
            fd = disk.open(growing, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                disk.posix_fallocate(fd, 0, size)
                disk.fsync(fd)
            finally:
                disk.close(fd)
            disk.link(growing, path)  # unlike a rename it never replaces a segment
        except OSError:
            _remove_if_possible(growing)
            raise
        try:
            disk.unlink(growing)
            sync_directory(folder)
            return cls(path, size, health)
        except OSError:
            _remove_if_possible(path)
            raise

    @property
    def end_offset(self) -> int:
        return self.start_offset + self.size

    @property
    def buffer(self) -> memoryview:
        """The whole segment, read-only."""
        return self._view

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Write `data` at `position`; it must fit."""
        assert position + len(data) <= self.size, "a write must not leave its segment"
        write_all(self._fd, data, position)

    def datasync(self) -> None:
        """fdatasync; does nothing on a closed segment. Gives up the GIL. Raises OSError.

        Once a sync of the log has failed, in any thread, none is tried (R40): the kernel reports a
        write-back error once per descriptor, and the next call returns 0 over pages that are lost.
        """
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
        """(position, bytes) of the blocks at or behind `position` that are not all zero.

        At most 1 MiB each, and `overlap` (at most 16) bytes of what follows.
        """
        for start, end in self._data_extents(position):
            for block in range(start, end, _BLOCK_SIZE):
                length = min(_BLOCK_SIZE, end - block)
                piece = self._map[block : min(block + length + overlap, self.size)]
                if piece != _ZERO_BLOCK[: len(piece)]:
                    yield block, piece

    def _data_extents(self, position: int) -> list[tuple[int, int]]:
        """The parts [start, end) at or behind `position` that are no holes.

        Found before any is read: reading at an edge makes the kernel read ahead, and pages of
        zeros in its cache count as data.
        """
        extents: list[tuple[int, int]] = []
        while position < self.size:
            try:
                start = os.lseek(self._fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            position = min(os.lseek(self._fd, start, os.SEEK_HOLE), self.size)
            extents.append((start, position))
        return extents

    def data_end(self, position: int = 0) -> int:
        """The end of the last byte other than zero at or behind `position`, else `position`."""
        last = position
        for block, piece in self.data_blocks(position):
            last = block + len(piece.rstrip(b"\0"))
        return last

    def zero(self, start: int, end: int) -> None:
        """Write zeros over [start, end)."""
        for position in range(start, end, _BLOCK_SIZE):
            length = min(_BLOCK_SIZE, end - position)
            self.write(position, _ZERO_BLOCK_VIEW[:length])

    def close(self) -> None:
        """Close the file. Views handed out stay valid; the map goes when the last one does."""
        with self._sync_lock:
            if self._closed:
                return
            self._closed = True
            disk.close(self._fd)
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            return  # somebody still sends from it; the last reference closes the map
