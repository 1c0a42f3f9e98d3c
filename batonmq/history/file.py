"""The failover history on disk: one event per line of JSON, appended, never rewritten.

`history-n0.jsonl` grows. At its size limit it is renamed to `history-n0.000001.jsonl`, the next one
to `...000002...`; the oldest are removed. A crash leaves the old or the new names. Each event is in
the files once, although the replicated log is applied again after each restart; a torn line is cut
off before the next. Nothing is fsynced: the history explains and decides nothing. So a start passes
over what the disk cannot read: the other controllers have it, too.
"""

import errno
import logging
import os
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from batonmq.history.event import HISTORY_EVENTS_MAX, EventKey, HistoryEvent
from batonmq.runtime import disk

log = logging.getLogger(__name__)

FILE_SIZE_DEFAULT: Final = 64 << 20
FILES_DEFAULT: Final = 4
LINE_BYTES_MAX: Final = 16 << 20
_BLOCK_SIZE: Final = 128 << 10
_SUFFIX: Final = ".jsonl"
_NAME: Final = re.compile(r"history-(.+?)(?:\.(\d{6,}))?\.jsonl")


def numbered(name: str, number: int) -> str:
    """The name of the full file of that number (from 1) of the history `name`."""
    return f"{name.removesuffix(_SUFFIX)}.{number:06d}{_SUFFIX}"


def controller_of(path: str) -> str | None:
    """The controller whose history the file of that name holds; None for other names."""
    found = _NAME.fullmatch(path.rpartition("/")[2])
    return found[1] if found else None


def full_files(name: str, names: Iterable[str]) -> list[tuple[int, str]]:
    """(number, name) of those `names` that are full files of the history `name`, oldest first."""
    pattern = re.compile(re.escape(name.removesuffix(_SUFFIX)) + r"\.(\d{6,})" + re.escape(_SUFFIX))
    found = ((pattern.fullmatch(each), each) for each in names)
    return sorted((int(match[1]), each) for match, each in found if match)


def files_of(path: Path) -> list[Path]:
    """The files of a history, oldest first; the last is `path`, which grows."""
    full = full_files(path.name, disk.listdir(path.parent))
    return [*(path.parent / name for _, name in full), path]


def lines_newest_first(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """(offset behind its line end, line without it) of the whole lines, newest first. Raises
    OSError."""
    begin = os.fstat(descriptor).st_size
    rest = b""
    while begin > 0:
        size = min(_BLOCK_SIZE, begin)
        begin -= size
        block = disk.pread(descriptor, size, begin) + rest
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
        check_line(len(rest), descriptor)


def check_line(size: int, descriptor: int) -> None:
    """Raises OSError for what is no line of a history: zeros that a power loss left, say."""
    if size > LINE_BYTES_MAX:
        raise disk.named(OSError(errno.EILSEQ, f"{size} bytes without a line end"), descriptor)


class HistoryFile:
    """Opens or creates `path`, and finds the newest event of each log. Keeps at most `files` files
    of at most `size_max` bytes (more for a larger batch). Raises OSError. `unreadable_lines`: lines
    that are no events."""

    def __init__(
        self, path: Path, *, size_max: int = FILE_SIZE_DEFAULT, files: int = FILES_DEFAULT
    ) -> None:
        self._path = path
        self._size_max = size_max
        self._files = files
        self.unreadable_lines = 0
        # log name -> (raft_index, part) of its newest event here
        self._newest: dict[str, tuple[int, int]] = {}
        self._descriptor = _open(path)
        self._end = os.fstat(self._descriptor).st_size
        """Behind the last whole line."""
        try:
            self._load()
        except BaseException:
            disk.close(self._descriptor)
            raise

    @property
    def logs(self) -> Collection[str]:
        """The logs of its events."""
        return self._newest.keys()

    def append(self, events: Iterable[HistoryEvent], *, cut: bool = False) -> int:
        """Writes those events that the files lack; how many. Events of one log come in order.
        `cut`: older ones may have been lost; then the first line behind the file's end says so
        (`gap`). Raises OSError; then the next call takes off what was written."""
        # A copy: a failed write must leave what counts as written.
        newest = dict(self._newest)
        if cut:
            events = self._with_gap(list(events))
        fresh = [event for event in events if _is_next(event, newest)]
        if not fresh:
            return 0
        raw = "".join(event.to_json() + "\n" for event in fresh).encode()
        if os.fstat(self._descriptor).st_size > self._end:
            disk.ftruncate(self._descriptor, self._end)
        # Not an empty one: a batch that is larger than the limit would make empty files.
        if self._end and self._end + len(raw) > self._size_max:
            self._begin_next_file()
        written_bytes = disk.write(self._descriptor, raw)
        while written_bytes < len(raw):
            written_bytes += disk.write(self._descriptor, raw[written_bytes:])
        self._end += len(raw)
        self._newest = newest
        return len(fresh)

    def _with_gap(self, events: list[HistoryEvent]) -> list[HistoryEvent]:
        first = events[0] if events else None
        held = self._newest.get(first.log) if first is not None else None
        if first is None or held is None or (first.raft_index, first.part) <= held:
            return events
        log.warning("history_gap path=%s behind=%s before=%s", self._path, held, first.key)
        return [msgspec.structs.replace(first, gap=True), *events[1:]]

    def newest(self, limit: int, bytes_max: int) -> list[HistoryEvent]:
        """The newest events of all files, oldest first: at most `limit`, of `bytes_max` in all. May
        be called in another thread. Raises OSError."""
        decoder = msgspec.json.Decoder(HistoryEvent)
        found: deque[HistoryEvent] = deque()
        keys: set[EventKey] = set()
        for path in reversed(files_of(self._path)):
            for line in _whole_lines(path):
                bytes_max -= len(line)
                if len(found) >= limit or bytes_max < 0:
                    return list(found)
                try:
                    event = decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
                if event.key not in keys:  # the file was numbered meanwhile
                    keys.add(event.key)
                    found.appendleft(event)
        return list(found)

    def close(self) -> None:
        """Makes the file durable and closes it. May be repeated."""
        if self._descriptor >= 0:
            # First: a failed sync is not tried again at the next call.
            descriptor, self._descriptor = self._descriptor, -1
            try:
                disk.fsync(descriptor)
            finally:
                disk.close(descriptor)

    def _begin_next_file(self) -> None:
        """Numbers the full file and begins an empty one. If that fails the full one grows on:
        better too large than lost."""
        folder, name = self._path.parent, self._path.name
        try:
            full_ones = full_files(name, disk.listdir(folder))
            # Behind the highest, not into a gap: readers take the numbers as the order.
            number = full_ones[-1][0] + 1 if full_ones else 1
            full = folder / numbered(name, number)
            with suppress(FileNotFoundError):  # an earlier call could not take its rename back
                disk.rename(self._path, full)
                full_ones.append((number, full.name))
            try:
                descriptor = _open(self._path)
            except OSError:
                disk.rename(full, self._path)
                raise
        except OSError as error:
            log.warning("history_not_divided reason=%r", disk.described(error))
            return
        former, self._descriptor, self._end = self._descriptor, descriptor, 0
        self._drop_oldest(full_ones)
        disk.close(former)

    def _drop_oldest(self, full_ones: list[tuple[int, str]]) -> None:
        for _, name in full_ones[: max(0, len(full_ones) - (self._files - 1))]:
            try:
                disk.unlink(self._path.parent / name)
            except OSError as error:
                log.warning("history_not_dropped name=%s reason=%s", name, error)

    def _load(self) -> None:
        # First: a torn line would become one with the next that is written.
        self._cut_torn_tail()
        count = 0
        for path in reversed(files_of(self._path)):
            try:
                count += self._note_newest(path)
            except OSError as error:
                disk.check_unreadable(error)
                log.error("history_file_unreadable reason=%r", disk.described(error))
            if count >= HISTORY_EVENTS_MAX:  # the replicated state has no older ones
                break
        if self.unreadable_lines:
            log.warning("history_unreadable path=%s lines=%d", self._path, self.unreadable_lines)

    def _note_newest(self, path: Path) -> int:
        """Notes the newest position of each log in a file, up to where the disk cannot read; of how
        many events. Raises OSError there."""
        decoder = msgspec.json.Decoder(HistoryEvent)
        count = 0
        # From the end: an unreadable place then hides only older events.
        for line in _whole_lines(path):
            try:
                _is_next(decoder.decode(line), self._newest)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.unreadable_lines += 1
            else:
                count += 1
        return count

    def _cut_torn_tail(self) -> None:
        try:
            whole_bytes = next((at for at, _ in lines_newest_first(self._descriptor)), 0)
        except OSError as error:
            disk.check_unreadable(error)
            log.error("history_file_unreadable reason=%r", disk.described(error))
            self._begin_next_file()  # whether this one ends with a whole line is unknown
            return
        if whole_bytes < self._end:
            torn_bytes = self._end - whole_bytes
            log.warning("history_tail_cut path=%s torn_bytes=%d", self._path, torn_bytes)
            disk.ftruncate(self._descriptor, whole_bytes)
            self._end = whole_bytes


def _open(path: Path) -> int:
    # O_NONBLOCK: a named pipe in this place must not make the controller wait.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    return disk.open(path, flags, 0o644)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, newest first; none if the file is gone."""
    try:
        descriptor = disk.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        for _, line in lines_newest_first(descriptor):
            yield line
    finally:
        disk.close(descriptor)


def _is_next(event: HistoryEvent, newest: dict[str, tuple[int, int]]) -> bool:
    """Whether `event` is newer than its log's position in `newest`; if so, enters it there."""
    position = (event.raft_index, event.part)
    if position <= newest.get(event.log, (-1, -1)):
        return False
    newest[event.log] = position
    return True
