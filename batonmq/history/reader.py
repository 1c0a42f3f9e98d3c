"""Reads the failover history from its files: whole, or in pages while they grow."""

import logging
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from batonmq.history.event import EventKey, HistoryEvent, lenient_event
from batonmq.history.file import check_line, controller_of, files_of, lines_newest_first
from batonmq.runtime.words import counted

log = logging.getLogger(__name__)

_BLOCK_SIZE: Final = 128 << 10


def read_histories(paths: Iterable[Path]) -> tuple[dict[str, list[HistoryEvent]], list[str]]:
    """The events of each history, oldest first, by its path; and what was wrong, as sentences. A
    file is read with its numbered ones; a folder stands for all its histories. A torn last line and
    a line that is no JSON object are reported and left out. Raises OSError."""
    sources: dict[str, list[HistoryEvent]] = {}
    problems: list[str] = []
    for path in paths:
        histories = _histories_in(path) if path.is_dir() else [path]
        for history in histories:
            events = sources.setdefault(str(history), [])
            for file in files_of(history):
                events += _events_in(file, problems)
        if not histories:
            problems.append(f"{path}: no history-*.jsonl in this folder")
    return sources, problems


def _histories_in(folder: Path) -> list[Path]:
    """Those that grow; numbered ones belong to them."""
    files = sorted(path for path in folder.iterdir() if controller_of(path.name))
    full = {file for path in files for file in files_of(path)[:-1]}
    return [path for path in files if path not in full]


def _events_in(file: Path, problems: list[str]) -> Iterator[HistoryEvent]:
    unreadable = 0
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                left = counted(len(line), "byte")
                problems.append(f"{file}: the last line is torn ({left} left out)")
            elif (event := lenient_event(line)) is not None:
                yield event
            else:
                unreadable += 1
    if unreadable:
        problems.append(f"{file}: {counted(unreadable, 'line')} without a readable event")


class Page(NamedTuple):
    """Events of one log, oldest first. `follows`: no event of the log lies between the requested
    place and the first of them; else this controller may lack some."""

    events: list[HistoryEvent]
    follows: bool


class HistoryReader:
    """`path` is the file that grows. One caller at a time, in any thread. A line without its end is
    still being written and does not count. The reader keeps its place, so reading on costs only
    what is read; a place is searched from the newest line backwards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._place = 0  # Behind `_last`, which ends there in the file.
        self._last = b""
        self._before: EventKey | None = None  # The event before the place; None if unknown.
        self._behind: EventKey | None = None

    def page(self, after: EventKey | None, events_max: int, bytes_max: int) -> Page:
        """The next events behind `after`, at least one if there is one; None, or a log that the
        files lack: from the oldest on. A page ends where another log begins, and before events that
        the files lack (`follows` is then False). Raises OSError; the call may be repeated."""
        events: list[HistoryEvent] = []
        follows = True
        size = 0
        try:
            if after is None or after != self._behind or not self._is_in_place():
                self._seek(after)
            for event, length, before in self._read_on():
                if not events:
                    follows = after is None or _follows(event.key, before, after)
                elif (
                    before is None
                    or event.log != events[0].log
                    or len(events) >= events_max
                    or size + length > bytes_max
                ):
                    break
                events.append(event)
                size += length
        except BaseException:
            self.close()  # what was read is lost: forget the place behind it
            raise
        self._behind = events[-1].key if events else after
        return Page(events, follows)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_in_place(self) -> bool:
        """Whether what was read last is still there: a torn batch is cut off again."""
        if self._file is None:
            return False
        length = len(self._last)
        return os.pread(self._file.fileno(), length, self._place - length) == self._last

    def _seek(self, after: EventKey | None) -> None:
        self.close()
        files = files_of(self._path)
        for path in reversed(files):
            if after is None:
                break
            file = _open(path)
            try:
                found = _end_of(file, after)
            except BaseException:
                file.close()
                raise
            if found is not None:
                self._begin(file, *found)
                return
            file.close()
        self._begin(_open(files[0]), 0, b"")

    def _begin(self, file: FileIO, place: int, last: bytes) -> None:
        self._file, self._place, self._last = file, place, last
        event = _event(last) if last else None
        self._before = event.key if event is not None else None

    def _read_on(self) -> Iterator[tuple[HistoryEvent, int, EventKey | None]]:
        """(event, bytes of its line, the event before it) from the present place on; moves the
        place."""
        while True:
            lines = self._whole_lines()
            if not lines and not self._next_file():
                return
            for text in lines:
                event = _event(text)
                if event is not None:
                    yield event, len(text) - 1, None if event.gap else self._before
                # An unreadable line was an event, too.
                self._before = event.key if event is not None else None
                self._place += len(text)
                self._last = text

    def _whole_lines(self) -> list[bytes]:
        """Some whole lines behind the place, with their ends; none yet: empty."""
        assert self._file is not None
        size = _BLOCK_SIZE
        while True:
            block = os.pread(self._file.fileno(), size, self._place)
            if b"\n" in block:
                return [text + b"\n" for text in block.split(b"\n")[:-1]]
            if len(block) < size:
                return []
            size *= 2
            check_line(size, self._file.fileno())

    def _next_file(self) -> bool:
        """Continues with the file that followed this one, if it was numbered since."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        if _is(self._path, own):
            return False
        files = files_of(self._path)
        at = next((at for at, path in enumerate(files) if _is(path, own)), -1)
        # What was written between the look at its end and the rename; nothing more comes there.
        if self._whole_lines():
            return True
        if at == len(files) - 1:
            return False  # the rename was undone: the file grows on
        try:
            following = _open(files[at + 1])
        except FileNotFoundError:
            if files[at + 1] == self._path:
                return False  # it is about to be made
            raise
        if files_of(self._path) != files:
            following.close()  # renamed or dropped: it may not be the next one
            return True
        if at < 0:
            log.warning("history_read_gap path=%s reason='a file was dropped unread'", self._path)
            self._before = None
        self._file.close()
        self._file, self._place, self._last = following, 0, b""
        return True


def _open(path: Path) -> FileIO:
    return open(path, "rb", buffering=0)


def _event(text: bytes) -> HistoryEvent | None:
    event = lenient_event(text)
    return event if event is not None and event.log and event.raft_index >= 0 else None


def _follows(key: EventKey, before: EventKey | None, after: EventKey) -> bool:
    """Whether nothing lies between `after` and the event `key`, which follows `before`."""
    if before is None:
        return key == (after[0], after[1], after[2] + 1)
    return before[0] == after[0] and before <= after


def _is(path: Path, known: os.stat_result) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)


def _end_of(file: FileIO, after: EventKey) -> tuple[int, bytes] | None:
    """The newest line of that log that is not newer than `after`, and where it ends."""
    needle = msgspec.json.encode(after[0])
    for end, line in lines_newest_first(file.fileno()):
        event = _event(line) if needle in line else None
        if event is not None and event.log == after[0] and event.key <= after:
            return end, line + b"\n"
    return None
