"""Reads the failover history from its files behind a given event, while they grow and are divided.

Lines are given as they stand in the files, oldest first. A line without its end is being written:
it is not there yet. The reader keeps its place, so reading on costs only what is read; it looks for
a place from the newest line backwards, since what is asked for is mostly near the end.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from controller.history_topic import Line, Mark
from protocol.history_names import older_first

__all__ = ["HistoryReader"]

log = logging.getLogger(__name__)

_BLOCK_SIZE: Final = 256 << 10


class _Name(msgspec.Struct):
    """What a line must have to be an event; see `controller.history.HistoryEvent`."""

    log: str
    raft_index: int
    kind: str
    part: int = 0
    broker_name: str = ""

    @property
    def mark(self) -> Mark:
        return (self.log, self.raft_index, self.part)


_decode = msgspec.json.Decoder(_Name).decode


class HistoryReader:
    """`path` is the file that grows. One caller at a time, in any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._behind: Mark | None = None

    def behind(self, mark: Mark | None, events_max: int, bytes_max: int) -> list[Line]:
        """The next events behind `mark`, at least one if there is one.

        Behind an event that the files lack: behind those of its log that are older. None, or of a
        log that the files lack: from the oldest event on. Raises OSError.
        """
        if self._file is None or mark is None or mark != self._behind:
            self._seek(mark)
        lines: list[Line] = []
        size = 0
        for line in self._read_on():
            if lines and (len(lines) >= events_max or size + len(line.text) > bytes_max):
                assert self._file is not None
                self._file.seek(-len(line.text) - 1, os.SEEK_CUR)
                break
            lines.append(line)
            size += len(line.text)
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

    def _seek(self, mark: Mark | None) -> None:
        self.close()
        files = self._files()
        if mark is not None:
            for path in reversed(files):
                file = open(path, "rb")  # noqa: SIM115 - kept, unless the place is not in it
                try:
                    end = _end_of(file, mark)
                except BaseException:
                    file.close()
                    raise
                if end is not None:
                    file.seek(end)
                    self._file = file
                    return
                file.close()
        self._file = open(files[0], "rb")  # noqa: SIM115 - kept

    def _read_on(self) -> Iterator[Line]:
        """Events from the present place on; the place is behind each that was given."""
        while True:
            assert self._file is not None
            text = self._file.readline()
            if text.endswith(b"\n"):
                try:
                    name = _decode(text)
                except msgspec.MsgspecError:
                    continue
                yield Line(name.mark, name.kind, name.broker_name, text[:-1])
                continue
            self._file.seek(-len(text), os.SEEK_CUR)
            if not self._next_file():
                return

    def _next_file(self) -> bool:
        """Goes on with the file that followed this one, if it was divided since."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        if _is(self._path, own):
            return False
        files = self._files()
        at = next((at for at, path in enumerate(files) if _is(path, own)), -1)
        # What was written between the look at its end and the division; nothing comes there now.
        left = self._file.readline()
        if left.endswith(b"\n"):
            self._file.seek(-len(left), os.SEEK_CUR)
            return True
        if at < 0:
            log.warning("history_read_gap path=%s why='a file was dropped unread'", self._path)
        following = open(files[at + 1], "rb")  # noqa: SIM115 - kept
        self._file.close()
        self._file = following
        return True


def _is(path: Path, known: os.stat_result) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)


def _end_of(file: BinaryIO, mark: Mark) -> int | None:
    """Behind the newest line of the mark's log that is not newer than the mark."""
    needle = msgspec.json.encode(mark[0])
    for end, line in _lines_newest_first(file):
        if needle not in line:
            continue
        try:
            name = _decode(line)
        except msgspec.MsgspecError:
            continue
        if name.log == mark[0] and name.mark <= mark:
            return end
    return None


def _lines_newest_first(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(offset behind its line end, line without it) of the whole lines, newest first."""
    begin = file.seek(0, os.SEEK_END)
    rest = b""
    while begin > 0:
        size = min(_BLOCK_SIZE, begin)
        begin -= size
        file.seek(begin)
        block = file.read(size) + rest
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
