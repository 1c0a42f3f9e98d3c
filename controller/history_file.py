"""The failover history on disk: one event per line of JSON, appended, never rewritten.

Invariants: an event stands in the file once, though the replicated log is applied again from its
start after each restart; a line that was torn by a crash is cut off before the next one is written.
Lines go to the operating system at once and are not fsynced: the history explains, it decides
nothing.
"""

import logging
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from controller.history import HISTORY_EVENTS_MAX, HistoryEvent

__all__ = ["HistoryFile"]

log = logging.getLogger(__name__)


class HistoryFile:
    """Opens `path`, making it if need be, and reads what it holds. Raises OSError.

    `recent` holds the newest events, oldest first, those of earlier logs too; `unreadable_lines`
    counts lines that are no events.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recent: deque[HistoryEvent] = deque(maxlen=HISTORY_EVENTS_MAX)
        self.unreadable_lines = 0
        # log name -> (raft_index, part) of its newest event here
        self._newest: dict[str, tuple[int, int]] = {}
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._load()
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, events: Iterable[HistoryEvent]) -> int:
        """Writes those events that the file lacks. Returns how many these were.

        Events of one log must come in its order. Raises OSError; what could not be written is then
        taken off again, so that the next line begins on a line of its own.
        """
        newest = dict(self._newest)
        fresh = [event for event in events if _is_next(event, newest)]
        if not fresh:
            return 0
        raw = "".join(event.to_json() + "\n" for event in fresh).encode()
        size_bytes = os.fstat(self._descriptor).st_size
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

    def close(self) -> None:
        """Makes the file durable and closes it. Harmless when repeated."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _load(self) -> None:
        decoder = msgspec.json.Decoder(HistoryEvent)
        whole_bytes = 0
        with open(self._path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole_bytes += len(line)
                try:
                    event = decoder.decode(line)
                except msgspec.MsgspecError:
                    self.unreadable_lines += 1
                    continue
                if _is_next(event, self._newest):
                    self.recent.append(event)
        torn_bytes = os.fstat(self._descriptor).st_size - whole_bytes
        if torn_bytes:
            log.warning("history_tail_cut path=%s torn_bytes=%d", self._path, torn_bytes)
            os.ftruncate(self._descriptor, whole_bytes)
        if self.unreadable_lines:
            log.warning("history_unreadable path=%s lines=%d", self._path, self.unreadable_lines)


def _is_next(event: HistoryEvent, newest: dict[str, tuple[int, int]]) -> bool:
    """Whether `event` is newer than what its log left in `newest`; enters it there if so."""
    position = (event.raft_index, event.part)
    if position <= newest.get(event.log, (-1, -1)):
        return False
    newest[event.log] = position
    return True
