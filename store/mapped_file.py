"""One log segment: a file of fixed length, written by `pwrite` and mapped for reading only.

Invariant: the file has its full length, and its blocks belong to it, before the first byte of
data goes in, so a full disk is an error at creation and never a signal or a half-written record.
Stores through a writable map would make every fdatasync dear and the tail of latency long, and
a killed process slow to lose its sockets; so the map is read-only. Origin: Java's
`DefaultMappedFile`, which maps for writing.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from epoch.durable_file import sync_directory, write_all

NAME_DIGITS: Final = 20
_ZERO_BLOCK: Final = bytes(1 << 20)


def segment_name(start_offset: int) -> str:
    """The file name of the segment that begins at `start_offset`."""
    return f"{start_offset:0{NAME_DIGITS}d}"


class Segment:
    """The bytes [start_offset, start_offset + size) of the log. Positions count from its start."""

    __slots__ = ("_closed", "_fd", "_map", "_sync_lock", "_view", "path", "size", "start_offset")

    def __init__(self, path: Path, size: int) -> None:
        """Open an existing file of exactly `size` bytes."""
        self.path = path
        self.size = size
        self.start_offset = int(path.name)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self._sync_lock = threading.Lock()
        self._closed = False

    @classmethod
    def create(cls, folder: Path, work_folder: Path, start_offset: int, size: int) -> Segment:
        """Allocate a segment of zeros; durable in its folder on return.

        It grows under another name in `work_folder` (same file system), so a crash or a full
        disk leaves no segment of a wrong length. Raises OSError.
        """
        path = folder / segment_name(start_offset)
        growing = work_folder / path.name
        fd = os.open(growing, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
        except OSError:
            os.unlink(growing)
            raise
        finally:
            os.close(fd)
        os.rename(growing, path)
        sync_directory(folder)
        return cls(path, size)

    @property
    def end_offset(self) -> int:
        return self.start_offset + self.size

    @property
    def map(self) -> mmap.mmap:
        """The read-only map, for `find`; never close it."""
        return self._map

    @property
    def buffer(self) -> memoryview:
        """The whole segment, read-only."""
        return self._view

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Write `data` at `position`; it must fit."""
        assert position + len(data) <= self.size, "a write must not leave its segment"
        write_all(self._fd, data, position)

    def datasync(self) -> None:
        """fdatasync; does nothing on a closed segment. Gives up the GIL. Raises OSError."""
        with self._sync_lock:
            if not self._closed:
                os.fdatasync(self._fd)

    def data_extents(self, position: int) -> Iterator[tuple[int, int]]:
        """The parts [start, end) at or behind `position` that may hold other bytes than zeros."""
        while position < self.size:
            try:
                start = os.lseek(self._fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            end = min(os.lseek(self._fd, start, os.SEEK_HOLE), self.size)
            yield start, end
            position = end

    def data_end(self, position: int = 0) -> int:
        """The end of the last byte other than zero at or behind `position`, else `position`."""
        last = position
        for start, end in self.data_extents(position):
            for block in range(start, end, len(_ZERO_BLOCK)):
                piece = self._map[block : min(block + len(_ZERO_BLOCK), end)]
                if stripped := piece.rstrip(b"\0"):
                    last = block + len(stripped)
        return last

    def zero(self, start: int, end: int) -> None:
        """Write zeros over [start, end)."""
        for position in range(start, end, len(_ZERO_BLOCK)):
            length = min(len(_ZERO_BLOCK), end - position)
            self.write(position, memoryview(_ZERO_BLOCK)[:length])

    def close(self) -> None:
        """Close the file. Views handed out stay valid; the map goes when the last one does."""
        with self._sync_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._fd)
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            return  # somebody still sends from it; the last reference closes the map
