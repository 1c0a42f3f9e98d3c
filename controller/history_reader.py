"""Reads the failover history from its files behind a given event, while they grow and are divided.

Lines are given as they stand in the files, oldest first. A line without its end is being written:
it is not there yet. The reader keeps its place, so reading on costs only what is read; it looks for
a place from the newest line backwards, since what is asked for is mostly near the end.
"""

import logging
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from controller.history_topic import Line, Mark
from protocol.history_names import older_first

__all__ = ["HistoryReader"]

log = logging.getLogger(__name__)

_BLOCK_SIZE: Final = 128 << 10


class _Name(msgspec.Struct):
    """What a line must have to be an event; see `controller.history.HistoryEvent`."""

    log: str
    raft_index: int
    kind: str
    part: int = 0
    time_ms: int = 0
    broker_name: str = ""
    gap: bool = False

    @property
    def mark(self) -> Mark:
        return (self.log, self.raft_index, self.part)


_decode = msgspec.json.Decoder(_Name).decode


class HistoryReader:
    """`path` is the file that grows. One caller at a time, in any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._place = 0
        """Behind `_last`, which stands there in the file, its end included."""
        self._last = b""
        self._before: Mark | None = None
        """The event in front of the place, None if it is not known."""
        self._behind: Mark | None = None

    def behind(
        self, mark: Mark | None, events_max: int, bytes_max: int, *, since_ms: int = 0
    ) -> list[Line]:
        """The next events behind `mark`, at least one if there is one.

        Behind an event that the files lack: behind those of its log that are older. None, or of a
        log that the files lack: from the oldest event on that is not older than `since_ms` (wall
        clock). Raises OSError; the same call may then be repeated.
        """
        lines: list[Line] = []
        size = 0
        try:
            if mark is None or mark != self._behind or not self._is_in_place():
                self._seek(mark, since_ms)
            for line in self._read_on():
                if lines and (len(lines) >= events_max or size + len(line.text) > bytes_max):
                    break
                lines.append(line)
                size += len(line.text)
        except BaseException:
            self.close()  # nobody gets what was read: the place must not stay behind it
            raise
        self._behind = lines[-1].mark if lines else mark
        return lines

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _files(self) -> list[Path]:
        """Oldest first, the one that grows last."""
        folder = self._path.parent
        elders = older_first(self._path.name, os.listdir(folder))
        return [*(folder / name for _, name in elders), self._path]

    def _is_in_place(self) -> bool:
        """Whether what was read last still stands there: a torn batch is cut off again."""
        if self._file is None:
            return False
        length = len(self._last)
        return os.pread(self._file.fileno(), length, self._place - length) == self._last

    def _seek(self, mark: Mark | None, since_ms: int) -> None:
        self.close()
        files = self._files()
        if mark is not None:
            for path in reversed(files):
                file = _open(path)
                try:
                    found = _end_of(file, mark)
                except BaseException:
                    file.close()
                    raise
                if found is not None:
                    self._begin(file, *found)
                    if self._before != mark:
                        self._before = None  # between the two there may be more
                    return
                file.close()
        young = next((path for path in files if _is_young(path, since_ms)), self._path)
        self._begin(_open(young), 0, b"")
        if since_ms:
            self._pass_over_older(since_ms)

    def _begin(self, file: FileIO, place: int, last: bytes) -> None:
        self._file, self._place, self._last = file, place, last
        self._before = _decode(last).mark if last else None

    def _pass_over_older(self, since_ms: int) -> None:
        while (lines := self._whole_lines()) or self._next_file():
            for text in lines:
                name = _event(text)
                if name is not None and name.time_ms >= since_ms:
                    return
                self._before = name.mark if name is not None else None
                self._place += len(text)
                self._last = text

    def _read_on(self) -> Iterator[Line]:
        """Events from the present place on; the place is behind each that was not the last."""
        while True:
            lines = self._whole_lines()
            if not lines and not self._next_file():
                return
            for text in lines:
                name = _event(text)
                if name is not None:
                    before = None if name.gap else self._before
                    after = before[1:] if before is not None and before[0] == name.log else None
                    yield Line(name.mark, name.kind, name.broker_name, text[:-1], after)
                # A line that cannot be read was an event, too.
                self._before = name.mark if name is not None else None
                self._place += len(text)
                self._last = text

    def _whole_lines(self) -> list[bytes]:
        """Some of those behind the place, with their ends; none: there is none yet."""
        assert self._file is not None
        size = _BLOCK_SIZE
        while True:
            block = os.pread(self._file.fileno(), size, self._place)
            if b"\n" in block:
                return [text + b"\n" for text in block.split(b"\n")[:-1]]
            if len(block) < size:
                return []
            size *= 2

    def _next_file(self) -> bool:
        """Goes on with the file that followed this one, if it was divided since."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        if _is(self._path, own):
            return False
        files = self._files()
        at = next((at for at, path in enumerate(files) if _is(path, own)), -1)
        # What was written between the look at its end and the division; nothing comes there now.
        if self._whole_lines():
            return True
        if at == len(files) - 1:
            return False  # the division was taken back: it grows on
        try:
            following = _open(files[at + 1])
        except FileNotFoundError:
            if files[at + 1] == self._path:
                return False  # it is about to be made, and its first line will be news
            raise
        if self._files() != files:
            following.close()  # divided or dropped meanwhile: it may not be the next one
            return True
        if at < 0:
            log.warning("history_read_gap path=%s why='a file was dropped unread'", self._path)
            self._before = None
        self._file.close()
        self._file, self._place, self._last = following, 0, b""
        return True


def _open(path: Path) -> FileIO:
    return open(path, "rb", buffering=0)


def _event(text: bytes) -> _Name | None:
    try:
        return _decode(text)
    except msgspec.MsgspecError:
        return None


def _is_young(path: Path, since_ms: int) -> bool:
    """Whether lines may have been written there since then. Raises OSError."""
    return not since_ms or path.stat().st_mtime * 1000 >= since_ms


def _is(path: Path, known: os.stat_result) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)


def _end_of(file: FileIO, mark: Mark) -> tuple[int, bytes] | None:
    """The newest line of the mark's log that is not newer than the mark, and where it ends."""
    needle = msgspec.json.encode(mark[0])
    for end, line in _lines_newest_first(file):
        name = _event(line) if needle in line else None
        if name is not None and name.log == mark[0] and name.mark <= mark:
            return end, line + b"\n"
    return None


def _lines_newest_first(file: FileIO) -> Iterator[tuple[int, bytes]]:
    """(offset behind its line end, line without it) of the whole lines, newest first."""
    begin = file.seek(0, os.SEEK_END)
    rest = b""
    while begin > 0:
        size = min(_BLOCK_SIZE, begin)
        begin -= size
        block = os.pread(file.fileno(), size, begin) + rest
        head, newline, tail = block.partition(b"\n")
        if begin == 0:
            head, newline, tail = b"", b"", block
        at = begin + len(head) + len(newline) + len(tail)
        pieces = tail.split(b"\n")
        at -= len(pieces.pop())  # behind the last line end
        for line in reversed(pieces):
            yield at, line
            at -= len(line) + 1
        rest = head + newline if begin else b""
