"""A full disk pauses a store and ends nothing (R45).

What finds no room is kept in memory and noted (`StoreHealth.no_room`); puts are refused, so it
stays little. Each round of upkeep then tries all of it again: the records of the last turn, the
next segment, tables, queues, index, checkpoint. When nothing of it fails any more, puts are taken.
"""

from __future__ import annotations

from collections.abc import Callable

from batonmq.protocol.errors import DISK_FULL
from batonmq.store.appender import Appender
from batonmq.store.background import Background
from batonmq.store.commit_log import CommitLog


class RoomWatch:
    """Two reasons to refuse puts: something found no room, or `diskSpaceWarningLevelRatio`."""

    def __init__(self, commit_log: CommitLog, appender: Appender, background: Background) -> None:
        self._log = commit_log
        self._health = commit_log.health
        self._appender = appender
        self._background = background
        self._watermark = ""
        self._is_probing = False
        #: Called in the loop when there is room again.
        self.on_room: Callable[[], None] = lambda: None
        self._health.on_full = lambda: background.in_loop(self._judge)

    @property
    def reason(self) -> str:
        """Why the disk counts as full; empty if it does not."""
        return self._health.full or self._watermark

    def set_watermark(self, reason: str) -> None:
        """The file system is (`reason`) or is not ("") too full to take puts."""
        self._watermark = reason
        self._judge()

    def _judge(self) -> None:
        reason = self._watermark or (self._health.full if self._health.pauses else "")
        self._appender.pause(f"{DISK_FULL}: {reason}" if reason else "")

    def begin_probe(self) -> int | None:
        """Try again what waits, if something does; the argument for `end_probe`, or None."""
        if not self._health.full or self._is_probing:
            return None
        self._is_probing = True
        count = self._health.full_count
        self._appender.end_turn()
        missing = self._log.missing_segment
        if missing is not None and missing == self._log.end_of_segments:
            self._background.run_job(lambda: self._allocate(missing))
        return count

    def _allocate(self, offset: int) -> None:
        self._log.ensure_segment(offset)

    @property
    def is_waiting(self) -> bool:
        """Whether the last round still waits for room."""
        return self._is_probing

    def end_probe(self, count: int) -> None:
        """A whole round is done, in any thread: if nothing failed in it, there is room again."""
        self._background.in_loop(lambda: self._probed(count))

    def _probed(self, count: int) -> None:
        self._is_probing = False
        if self._health.full_count == count and not self._appender.has_buffered:
            self._health.room_again()
            self.on_room()
