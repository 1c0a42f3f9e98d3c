"""What only a replica does to its log: take a master's bytes, cut, begin anew.

Queues, index and all other derived data follow each cut. The facade hands these methods out as its
own (`MessageStore`), so that they cost no further call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from protocol.errors import CorruptLogError
from store.errors import StoreStateError, TruncationRefused
from store.log_scan import whole_records_end
from store.parts import StoreParts
from store.undispatched import is_record_boundary

# How much a slave may hold confirmed and not yet dispatched: an elected one opens so much later.
_DISPATCH_LAG_MAX: Final = 1024 * 1024


class SlaveLog:
    """`stop_writes` ends the turn and takes no more puts; `fail` ends the process."""

    def __init__(
        self,
        parts: StoreParts,
        *,
        segment_size: int,
        stop_writes: Callable[[], int],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._parts = parts
        self._log = parts.log
        self._appender = parts.appender
        self._dispatcher = parts.dispatcher
        self._intake = parts.intake
        self._suspect_mark = parts.suspect_mark
        self._segment_size = segment_size
        self._stop_writes = stop_writes
        self._fail = fail

    def append_replicated(self, offset: int, data: memoryview | bytes) -> int:
        """Write the master's bytes at `offset`, which must be `max_phy_offset`; the new end.

        Records may be cut anywhere; segments end where the master's do. Each record is checked as
        soon as its last byte is here. Raises CorruptLogError for one that is not what was written,
        call `drop_unverified` then; StoreStateError for another offset or a damaged log, OSError if
        the disk is full.
        """
        commit_log = self._log
        if self._appender.refusal is None or self._appender.has_buffered:
            self._stop_writes()
        if offset != commit_log.max_offset:
            raise StoreStateError(
                f"bytes for {offset}, but the log ends at {commit_log.max_offset}"
            )
        damage = self._suspect_mark.report
        if damage is not None and damage.blocks_writes:
            raise StoreStateError(f"discard the damaged tail first: {damage}")
        end = commit_log.append(data)
        self._intake.verify()
        self._keep_up(len(data))
        if commit_log.wants_preallocation:
            commit_log.preallocate_in_thread()
        return end

    def _keep_up(self, received: int) -> None:
        """Back-pressure: far behind with dispatching, as much is dispatched as is received."""
        dispatcher = self._dispatcher
        if dispatcher.target - dispatcher.offset <= _DISPATCH_LAG_MAX:
            return
        try:
            dispatcher.advance(0, received)
        except (CorruptLogError, OSError) as error:
            self._fail(error)

    def drop_unverified(self) -> int:
        """Take back what came behind the last whole, good record; the log's new end."""
        offset = self._intake.offset
        if offset < self._log.max_offset:
            self.cut(offset, keep_aside=False)
        return self._log.max_offset

    def truncate_to(
        self, offset: int, *, keep_aside: bool = True, unclean_epoch: bool = False
    ) -> None:
        """Cut the log at `offset`, a record boundary, with all that points behind it (R22).

        Crash-safe: an interrupted cut is finished by the next `open`. Raises TruncationRefused for
        a cut below the own confirmed offset, unless towards an `unclean_epoch` (R23), and for an
        offset within a record; OSError.
        """
        self._stop_writes()
        if offset >= self._log.max_offset:
            return
        confirmed = self._confirmed_end()
        if offset < self._log.min_offset:
            raise TruncationRefused(offset, confirmed, "the log begins above it")
        if offset < confirmed and not unclean_epoch:
            raise TruncationRefused(offset, confirmed, "it would take back confirmed bytes")
        if not is_record_boundary(self._log, offset, self._dispatcher.offset):
            raise TruncationRefused(offset, confirmed, "no record ends there")
        self.cut(offset, keep_aside=keep_aside)

    def _confirmed_end(self) -> int:
        """The end of all whole records that are confirmed, shown already or not."""
        dispatcher = self._dispatcher
        target = min(dispatcher.target, self._log.max_offset)
        if target <= dispatcher.offset:
            return dispatcher.offset
        return whole_records_end(self._log, dispatcher.offset, target)[0]

    def cut(self, offset: int, *, keep_aside: bool, end_offset: int | None = None) -> None:
        """Cut at `offset` without asking whether that may be. `end_offset`: up to where bytes may
        lie, if that is not the log's end."""
        parts = self._parts
        parts.checkpoints.void_running()
        end = self._log.max_offset if end_offset is None else end_offset
        parts.truncation.cut(offset, end, keep_aside=keep_aside)
        self._dispatcher.restart_at(min(offset, self._dispatcher.offset))
        self._intake.restart(min(offset, self._intake.offset))
        parts.verified.restart(min(offset, parts.verified.trusted_from))
        parts.queues.reset_next_offsets()

    def reset_for_empty_start(self, offset: int) -> None:
        """Begin anew at `offset`, a segment start of the master, with the old log kept aside (R27).

        Raises ValueError if `offset` is no multiple of the segment size.
        """
        if offset % self._segment_size:
            raise ValueError(f"a log cannot begin at {offset}, no segment begins there")
        self._stop_writes()
        if self._log.max_offset > self._log.min_offset:
            self.cut(self._log.min_offset, keep_aside=True)
        self._log.begin_at(offset)
        self._parts.queues.destroy_all()
        self._dispatcher.restart_at(offset)
        self._intake.restart(offset)
        self._parts.verified.restart(offset)


__all__ = ["SlaveLog"]
