"""What the disk has done to a store: full for now (R45), or failed for good (R40). A failed store
takes, syncs, acks and confirms nothing: its disk differs from its memory, and only the next start
finds out how (R37). Any thread may note; nothing is decided here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NoReturn

from batonmq.runtime import disk
from batonmq.store.errors import StoreFailedError

log = logging.getLogger(__name__)

BAD_NAMES_MAX: Final = 100


class StoreHealth:
    """`log_failure` is noted by the log, `failure` by the store's owner. `on_full` is called, in
    any thread, when the disk was too full for something."""

    def __init__(self) -> None:
        #: The first failed write or sync of the log. The kernel reports a write-back error once and
        #: then shows the lost pages as clean, so nothing more is written or counts as flushed.
        self.log_failure: OSError | None = None
        #: Why this store can only be abandoned; the first reason stays.
        self.failure: BaseException | None = None
        #: What the disk was too full for; "" while it has space.
        self.full = ""
        self._full_error: tuple[int | None, str | None, object] = (None, None, None)
        #: Whether earlier writes wait for disk space, so that nothing else may be written.
        self.pauses = False
        #: Why there is no index until the next start builds it again; "" if there is one.
        self.index_failure = ""
        #: The newest page of a consume queue that could not be read; "" if none.
        self.queue_failure = ""
        #: How often the disk was too full.
        self.full_count = 0
        self.on_full: Callable[[], None] = lambda: None

        #: Records that cannot be shown, by topic (as stored) and queue, with the offset of the
        #: first (R46); a limited number.
        self.bad_names: dict[tuple[bytes, int], int] = {}

    def skipped(self, topic: bytes, queue_id: int, offset: int) -> None:
        """The record at `offset` names a queue that cannot exist."""
        if (topic, queue_id) in self.bad_names or len(self.bad_names) >= BAD_NAMES_MAX:
            return
        self.bad_names[topic, queue_id] = offset
        log.error("record_skipped offset=%d queue_id=%d topic=%r", offset, queue_id, topic)

    # For good (R37, R40).

    @property
    def has_failed(self) -> bool:
        return self.failure is not None

    def log_failed(self, error: OSError) -> None:
        """A write or sync of the log failed, in any thread."""
        if self.log_failure is None:
            self.log_failure = error
        self.give_up(error)

    def check_log(self) -> None:
        """Raises OSError once a write or sync of the log has failed."""
        if self.log_failure is not None:
            raise OSError(self.log_failure.errno, self.log_failure.strerror)

    def give_up(self, error: BaseException) -> None:
        """The process must end: no clean stop any more."""
        if self.failure is None:
            self.failure = error

    def check_usable(self) -> None:
        """Raises StoreFailedError once this store has failed."""
        if self.failure is not None:
            raise StoreFailedError(f"this store has failed: {self.failure}") from self.failure

    # For now (R45).

    def passes(self, error: BaseException) -> bool:
        """Whether what raised `error` may succeed later. Not a sync of the log on a full disk: its
        pages are lost."""
        return disk.is_short(error) and self.log_failure is None

    def note_full(self, error: OSError, *, pauses: bool = True) -> None:
        """Notes what could not be written; it stays and is tried again. `pauses`: the next write
        must wait too."""
        if not self.full:
            log.warning("disk_full reason=%s", error)
        # Not the error itself, which would keep the frames that it passed.
        self._full_error = error.errno, error.strerror, error.filename
        what = error.strerror or str(error)
        self.full = f"{error.filename}: {what}" if error.filename else what
        self.pauses = self.pauses or pauses
        self.full_count += 1
        self.on_full()

    def pause_or_raise(self, error: OSError) -> None:
        """Notes a full disk; raises any other error."""
        if not self.passes(error):
            raise error
        self.note_full(error)

    def check_space(self) -> None:
        """Raises OSError while earlier writes wait for disk space."""
        if self.pauses:
            self.raise_full()

    def raise_full(self) -> NoReturn:
        """Raises what the disk answered last when it was too full."""
        raise OSError(*self._full_error)

    def space_again(self) -> None:
        """All that waited is written."""
        log.info("disk_has_space reason=%s", self.full)
        self.full, self.pauses = "", False
        self.on_full()
