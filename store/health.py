"""What the disk has done to a store: it is full for now (R45), or it has failed for good (R40).

Any thread may note something here. Nothing is decided: who writes asks.
"""

from __future__ import annotations


class StoreHealth:
    """`log_failure` is noted by the log itself; the store's owner gives up for any other reason."""

    def __init__(self) -> None:
        #: The first write or sync of the log that failed. The kernel reports a write-back error
        #: once and shows the lost pages as clean, so nothing is written or counts as flushed after.
        self.log_failure: OSError | None = None
        #: Whether this store may only be abandoned: its disk failed, or its bytes are no records.
        self.has_failed = False

    def log_failed(self, error: OSError) -> None:
        """A write or a sync of the log did not succeed, in whichever thread."""
        if self.log_failure is None:
            self.log_failure = error
        self.has_failed = True

    def check_log(self) -> None:
        """Raises OSError once a write or sync of the log has failed."""
        if self.log_failure is not None:
            raise OSError(self.log_failure.errno, self.log_failure.strerror)

    def give_up(self) -> None:
        """The process must end, for whatever reason: no clean stop any more."""
        self.has_failed = True


__all__ = ["StoreHealth"]
