"""The failover history on disk: one event per line of JSON, appended, never rewritten.

Invariants: an event stands in the files once, though the replicated log is applied again from its
start after each restart; a line that was torn by a crash is cut off before the next one is written.
A file that would grow above its size becomes a numbered one (see `protocol.history_names`) by one
rename, so a crash leaves either the old or the new names; of the numbered ones the oldest go.
Lines go to the operating system at once and are not fsynced: the history explains, it decides
nothing.
"""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from controller.history import HISTORY_EVENTS_MAX, HistoryEvent
from protocol.history_names import numbered, older_first

__all__ = ["FILES_DEFAULT", "FILE_SIZE_DEFAULT", "HistoryFile"]

log = logging.getLogger(__name__)

FILE_SIZE_DEFAULT: Final = 64 << 20
FILES_DEFAULT: Final = 4
_BLOCK_SIZE: Final = 1 << 20


class HistoryFile:
    """Opens `path`, making it if need be, and reads the newest that it and its elders hold.

    At most `files` files are kept, each of at most `size_max` bytes unless one batch is larger.
    Raises OSError. `recent` holds the newest events, oldest first, those of earlier logs too;
    `unreadable_lines` counts lines that are no events.
    """

    def __init__(
        self, path: Path, *, size_max: int = FILE_SIZE_DEFAULT, files: int = FILES_DEFAULT
    ) -> None:
        self._path = path
        self._size_max = size_max
        self._files = files
        self.recent: deque[HistoryEvent] = deque(maxlen=HISTORY_EVENTS_MAX)
        self.unreadable_lines = 0
        # log name -> (raft_index, part) of its newest event here
        self._newest: dict[str, tuple[int, int]] = {}
        self._descriptor = _open(path)
        try:
            self._load()
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, events: Iterable[HistoryEvent], *, cut: bool = False) -> int:
        """Writes those events that the files lack. Returns how many these were.

        Events of one log must come in its order. `cut`: older ones than these may have been lost;
        where the file's log ends before the first of them, that one's line says so (`gap`). Raises
        OSError; what could not be written is then taken off again, so that the next line begins on
        a line of its own.
        """
        newest = dict(self._newest)
        if cut:
            events = self._with_gap(list(events))
        fresh = [event for event in events if _is_next(event, newest)]
        if not fresh:
            return 0
        raw = "".join(event.to_json() + "\n" for event in fresh).encode()
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes and size_bytes + len(raw) > self._size_max:
            size_bytes = self._begin_next_file(size_bytes)
        try:
            written_bytes = os.write(self._descriptor, raw)
            while written_bytes < len(raw):
                written_bytes += os.write(self._descriptor, raw[written_bytes:])
        except OSError:
            os.ftruncate(self._descriptor, size_bytes)
            raise
        self._newest = newest
        self.recent.extend(fresh)
        return len(fresh)

    def _with_gap(self, events: list[HistoryEvent]) -> list[HistoryEvent]:
        first = events[0] if events else None
        held = self._newest.get(first.log) if first is not None else None
        if first is None or held is None or (first.raft_index, first.part) <= held:
            return events
        log.warning("history_gap path=%s behind=%s before=%s", self._path, held, first.key)
        return [msgspec.structs.replace(first, gap=True), *events[1:]]

    def newest(self, limit: int, bytes_max: int) -> list[HistoryEvent]:
        """The newest events of all files, oldest first: at most `limit`, of `bytes_max` in all.

        Reads the disk; may be called in another thread. Raises OSError.
        """
        decoder = msgspec.json.Decoder(HistoryEvent)
        found: deque[HistoryEvent] = deque()
        keys: set[tuple[str, int, int]] = set()
        for path in reversed(self._all_files()):
            for line in _lines_newest_first(path):
                bytes_max -= len(line)
                if len(found) >= limit or bytes_max < 0:
                    return list(found)
                try:
                    event = decoder.decode(line)
                except msgspec.MsgspecError:
                    continue
                if event.key not in keys:  # a file became a numbered one meanwhile
                    keys.add(event.key)
                    found.appendleft(event)
        return list(found)

    def close(self) -> None:
        """Makes the file durable and closes it. Harmless when repeated."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _all_files(self) -> list[Path]:
        """Oldest first, the one that grows last."""
        folder = self._path.parent
        elders = older_first(self._path.name, os.listdir(folder))
        return [*(folder / name for _, name in elders), self._path]

    def _begin_next_file(self, size_bytes: int) -> int:
        """The full file gets a number and an empty one its name. Returns the size to go on from.

        If that fails the full one grows on: better too large than lost.
        """
        folder, name = self._path.parent, self._path.name
        try:
            elders = older_first(name, os.listdir(folder))
            number = elders[-1][0] + 1 if elders else 1
            full = folder / numbered(name, number)
            os.rename(self._path, full)
            try:
                descriptor = _open(self._path)
            except OSError:
                os.rename(full, self._path)
                raise
        except OSError as error:
            log.warning("history_not_divided path=%s error=%s", self._path, error)
            return size_bytes
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._drop_oldest([*elders, (number, full.name)])
        return 0

    def _drop_oldest(self, elders: list[tuple[int, str]]) -> None:
        for _, name in elders[: max(0, len(elders) - (self._files - 1))]:
            try:
                os.unlink(self._path.parent / name)
            except OSError as error:
                log.warning("history_not_dropped name=%s error=%s", name, error)

    def _load(self) -> None:
        """The newest file whole, and elders only as long as `recent` has room."""
        self._cut_torn_tail()
        for path in reversed(self._all_files()):
            events = self._events_in(path)
            for event in reversed(events):
                if len(self.recent) < HISTORY_EVENTS_MAX:
                    self.recent.appendleft(event)
            if len(self.recent) == HISTORY_EVENTS_MAX:
                break
        if self.unreadable_lines:
            log.warning("history_unreadable path=%s lines=%d", self._path, self.unreadable_lines)

    def _events_in(self, path: Path) -> deque[HistoryEvent]:
        """The newest events of one file; enters what each log left there."""
        decoder = msgspec.json.Decoder(HistoryEvent)
        events: deque[HistoryEvent] = deque(maxlen=HISTORY_EVENTS_MAX)
        newest: dict[str, tuple[int, int]] = {}
        with open(path, "rb") as file:
            for line in file:
                try:
                    event = decoder.decode(line)
                except msgspec.MsgspecError:
                    self.unreadable_lines += 1
                    continue
                if _is_next(event, newest):
                    events.append(event)
        for name, position in newest.items():
            self._newest[name] = max(position, self._newest.get(name, (-1, -1)))
        return events

    def _cut_torn_tail(self) -> None:
        size_bytes = os.fstat(self._descriptor).st_size
        whole_bytes = 0
        with open(self._path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    whole_bytes += len(line)
        if whole_bytes < size_bytes:
            log.warning(
                "history_tail_cut path=%s torn_bytes=%d", self._path, size_bytes - whole_bytes
            )
            os.ftruncate(self._descriptor, whole_bytes)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _lines_newest_first(path: Path) -> Iterator[bytes]:
    """The whole lines of a file from its end, a block at a time."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - the name may be gone, which is no error
    except FileNotFoundError:
        return
    with file:
        end = file.seek(0, os.SEEK_END)
        rest = b""
        while end > 0:
            begin = max(0, end - _BLOCK_SIZE)
            file.seek(begin)
            head, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from (line for line in reversed(lines) if line)
            rest, end = head, begin
        if rest:
            yield rest


def _is_next(event: HistoryEvent, newest: dict[str, tuple[int, int]]) -> bool:
    """Whether `event` is newer than what its log left in `newest`; enters it there if so."""
    position = (event.raft_index, event.part)
    if position <= newest.get(event.log, (-1, -1)):
        return False
    newest[event.log] = position
    return True
