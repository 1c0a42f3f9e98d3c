"""What the disk has done to a store: it is full for now (R45), or it has failed for good (R40).

A store that failed takes, syncs, acks, confirms and leads nothing: what is on its disk is not what
memory says, and only the next start finds out (R37). Any thread may note something here. Nothing is
decided: who writes asks.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Final

from batonmq.runtime import disk
from batonmq.store.errors import StoreFailedError

log = logging.getLogger(__name__)

BAD_NAMES_MAX: Final = 100


class StoreHealth:
    """`log_failure` is noted by the log itself; the store's owner gives up for any other reason.

    `on_full` is called, in any thread, when something found no room.
    """

    def __init__(self) -> None:
        #: The first write or sync of the log that failed. The kernel reports a write-back error
        #: once and shows the lost pages as clean, so nothing is written or counts as flushed after.
        self.log_failure: OSError | None = None
        #: Why this store may only be abandoned: its disk failed, a cut was not finished, or its
        #: bytes are no records. The first reason stays.
        self.failure: BaseException | None = None
        #: What found no room on the disk, in words; empty while there is room.
        self.full = ""
        #: Whether nothing may be written before there is room: what was written already waits.
        self.pauses = False
        #: How often something found no room.
        self.full_count = 0
        self.on_full: Callable[[], None] = lambda: None

        #: Records that cannot be shown, by the topic (as stored) and queue that they name, with the
        #: offset of the first (R46); as many as are worth reading.
        self.bad_names: dict[tuple[bytes, int], int] = {}

    def skipped(self, topic: bytes, queue_id: int, offset: int) -> None:
        """The record at `offset` of the log is for a queue that cannot be."""
        if (topic, queue_id) in self.bad_names or len(self.bad_names) >= BAD_NAMES_MAX:
            return
        self.bad_names[topic, queue_id] = offset
        log.error("record_skipped offset=%d queue_id=%d topic=%r", offset, queue_id, topic)

    # For good (R37, R40).

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    def log_failed(self, error: OSError) -> None:
        """A write or a sync of the log did not succeed, in whichever thread."""
        if self.log_failure is None:
            self.log_failure = error
        self.give_up(error)

    def check_log(self) -> None:
        """Raises OSError once a write or sync of the log has failed."""
        if self.log_failure is not None:
            raise OSError(self.log_failure.errno, self.log_failure.strerror)

    def give_up(self, error: BaseException) -> None:
        """The process must end, for whatever reason: no clean stop any more."""
        if self.failure is None:
            self.failure = error

    def check_usable(self) -> None:
        """Raises StoreFailedError once this store has failed."""
        if self.failure is not None:
            raise StoreFailedError(f"this store has failed: {self.failure}") from self.failure

    # For now (R45).

    def passes(self, error: BaseException) -> bool:
        """Whether what raised `error` may just be done again later. A sync of the log that found
        no room may not: its pages are lost."""
        return disk.is_short(error) and self.log_failure is None

    def no_room(self, error: OSError, *, pauses: bool = True) -> None:
        """Notes what could not be written. It is kept, and tried again; `pauses` unless what comes
        next may find room where this did not."""
        if not self.full:
            log.warning("disk_full reason=%s", error)
        self.full = str(error)
        self.pauses = self.pauses or pauses
        self.full_count += 1
        self.on_full()

    def pause_or_raise(self, error: OSError) -> None:
        """`no_room` if it passes, else raises it."""
        if not self.passes(error):
            raise error
        self.no_room(error)

    def check_room(self) -> None:
        """Raises OSError while what was written already waits for room."""
        if self.pauses:
            raise OSError(errno.ENOSPC, self.full)

    def room_again(self) -> None:
        """All that waited is written."""
        log.info("disk_has_room reason=%s", self.full)
        self.full, self.pauses = "", False
        self.on_full()
