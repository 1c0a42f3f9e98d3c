"""How far this log is to be trusted, and how it becomes trusted again (R17, R24).

`suspicion` stores what is wrong; here is what is done about it: how much of a damaged log counts,
what is cut off to be fetched again, and what ends a suspicion.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from batonmq.process import disk
from batonmq.protocol.errors import CorruptLogError
from batonmq.store.dispatch import Dispatcher
from batonmq.store.errors import CutUnfinishedError, StoreFailedError, StoreStateError
from batonmq.store.log_scan import fault_at
from batonmq.store.slave_log import SlaveLog
from batonmq.store.store_files import StoreFiles
from batonmq.store.suspicion import Suspicion

log = logging.getLogger(__name__)


class LogTrust:
    """`stop_writes` ends the turn and takes no more puts; `fail` ends the process."""

    def __init__(
        self,
        files: StoreFiles,
        dispatcher: Dispatcher,
        slave_log: SlaveLog,
        stop_writes: Callable[[], int],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._log = files.log
        self._dispatcher = dispatcher
        self._checkpoint = files.checkpoint
        self._mark = files.suspect_mark
        self._slave_log = slave_log
        self._stop_writes = stop_writes
        self._fail = fail

    @property
    def damage(self) -> Suspicion | None:
        """What is wrong, and whether it was discarded; None if nothing is."""
        return self._mark.report

    @property
    def reason(self) -> str:
        """`damage` in words; empty if there is none."""
        return self._mark.reason

    @property
    def end(self) -> int:
        """End (exclusive) of what this log could lead with: before damage at its end."""
        damage = self._mark.report
        if damage is None or not damage.blocks_writes:
            return self._log.max_offset
        return max(self._log.min_offset, min(damage.offset, self._log.max_offset))

    def note_damage(self, error: CorruptLogError) -> None:
        """Damage was found; remembered for the next start."""
        self._mark.note_damage(error, self._log.max_offset)

    def note_failure(self, error: BaseException) -> None:
        """The process will end for `error`: note what of the log the next one may trust.

        A full disk takes nothing away, but a failed write-back does, whatever its number (R40).
        """
        if isinstance(error, CorruptLogError):
            self.note_damage(error)
            return
        if isinstance(error, CutUnfinishedError):
            error = error.cause
        log_failure = self._log.health.log_failure
        if log_failure is not None or (isinstance(error, OSError) and not disk.is_full(error)):
            failure = log_failure or error
            assert isinstance(failure, OSError)
            self._mark.note_disk_failure(failure, self._log, self._synced_boundary())

    def _synced_boundary(self) -> int:
        """The highest known record boundary below which all was durable before the failure."""
        flushed, dispatcher = self._log.flushed_offset, self._dispatcher
        known = (self._checkpoint.recovery_offset or 0, dispatcher.offset, dispatcher.verified.end)
        return max((at for at in known if at <= flushed), default=0) or self._log.min_offset

    def keep_noted(self) -> None:
        """The last chance to store a suspicion that the disk refused."""
        self._mark.show()

    def fault_at(self, offset: int) -> str:
        """What is wrong with the record at `offset`, a place where a slave's log ends; "" if it is
        good, or if no record begins there. A fault is remembered: this log is suspect then."""
        error = fault_at(self._log, offset)
        if error is None:
            return ""
        if self._mark.report is None:
            self._mark.note_damage(error, self._log.max_offset, kind="rot")
        return str(error)

    def discard_damaged_tail(self) -> int:
        """Cut a suspect log where it can no longer be trusted (cut bytes kept aside), to fetch the
        rest again: at its damage, or where it was last synced before an fdatasync failed.

        The new end of the log. The suspicion stays, with `damage.discarded`, until the log has been
        confirmed beyond everything it may have held (or `clear_suspect`). Raises as
        `SlaveLog.truncate_to` does.
        """
        self._log.health.check_usable()
        damage, commit_log = self._mark.report, self._log
        if damage is None or damage.discarded or damage.kind == "reboot":
            return commit_log.max_offset
        self._stop_writes()
        offset = min(max(damage.offset, commit_log.min_offset), commit_log.max_offset)
        end_offset = max(damage.end_offset, commit_log.max_offset)
        self._slave_log.cut(offset, keep_aside=True, end_offset=end_offset)
        try:
            self._mark.set_discarded()
        except OSError as error:
            # Else the next start would cut there again, when good bytes have come in their place.
            failed = StoreFailedError(f"the damaged tail is cut, but that is not stored: {error}")
            self._fail(failed)
            raise failed from error
        log.warning("damaged_tail_discarded offset=%d", commit_log.max_offset)
        return commit_log.max_offset

    def clear_suspect(self) -> None:
        """Trust the log again: it is level with its master, or an operator repaired it."""
        if self._mark.report is not None:
            log.info(
                "suspicion_ended confirm_offset=%d reason=%s", self._dispatcher.offset, self.reason
            )
            self._mark.clear()

    def confirmed(self, offset: int) -> None:
        """All below `offset` is confirmed: enough to end the suspicion of a discarded tail?"""
        damage = self._mark.report
        if damage is None or not damage.discarded or damage.until_level:
            return
        if offset >= damage.end_offset:
            self.clear_suspect()

    def repair(self, seen: str) -> bool:
        """An operator declares this log good. Whether it had to be cut for that.

        `seen` is `reason` as the operator saw it. Where damage keeps the log from going on, it is
        cut there, and the cut bytes are kept aside. Raises StoreStateError if nothing is wrong, or
        something else than was seen.
        """
        damage = self._mark.report
        if damage is None:
            raise StoreStateError("this log is not suspect: there is nothing to repair")
        if seen != self.reason:
            raise StoreStateError(f"something else than that is wrong with it: {self.reason}")
        if damage.blocks_writes:
            self.discard_damaged_tail()
        self.clear_suspect()
        return damage.blocks_writes
