"""What only a replica does to its log: append a master's bytes, cut, start again, regain trust.
Queues, index and other derived data follow each cut. `suspicion` stores what is wrong with the log;
`LogTrust` acts on it (R17, R24): how much of a damaged log counts, what is cut to be fetched again,
and what ends a suspicion."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.store.appender import Appender
from batonmq.store.dispatch import LogDispatcher
from batonmq.store.errors import (
    CorruptQueueError,
    CutUnfinishedError,
    StoreFailedError,
    StoreStateError,
    TruncationRefused,
)
from batonmq.store.log_scan import fault_at, fault_before, is_record_boundary, whole_records_end
from batonmq.store.store_files import StoreFiles
from batonmq.store.suspicion import Suspicion
from batonmq.store.truncation import LogTruncation
from batonmq.store.upkeep import CheckpointWriter

log = logging.getLogger(__name__)

# Bytes that a slave may have confirmed and not dispatched. Once elected it dispatches them before
# it opens, so they delay the failover.
_DISPATCH_LAG_MAX: Final = 1024 * 1024


class SlaveLog:
    """`stop_writes` ends the turn and takes no more puts; `fail` ends the process."""

    def __init__(
        self,
        files: StoreFiles,
        dispatcher: LogDispatcher,
        appender: Appender,
        truncation: LogTruncation,
        checkpoints: CheckpointWriter,
        stop_writes: Callable[[], int],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._log = files.log
        self._suspect_mark = files.suspect_mark
        self._dispatcher = dispatcher
        self._verified = dispatcher.verified
        self._queues = dispatcher.queues
        self._appender = appender
        self._truncation = truncation
        self._checkpoints = checkpoints
        self._stop_writes = stop_writes
        self._fail = fail

    def append_replicated(self, offset: int, data: memoryview | bytes) -> int:
        """Writes the master's bytes at `offset`, which must be `max_phy_offset`; the new end.
        Records may be cut anywhere; segments end where the master's do. Each record is checked once
        it is whole. Raises CorruptLogError for a bad one (then call `drop_unverified`),
        StoreStateError for another offset or a damaged log, OSError on a full disk,
        StoreFailedError."""
        commit_log = self._log
        commit_log.health.check_usable()
        # This replica was master: its own puts end before a master's bytes come.
        if self._appender.refusal is None or self._appender.has_buffered:
            self._stop_writes()
        if offset != commit_log.max_offset:
            raise StoreStateError(
                f"bytes for {offset}, but the log ends at {commit_log.max_offset}"
            )
        damage = self._suspect_mark.report
        if damage is not None and damage.blocks_writes:
            raise StoreStateError(f"discard the damaged tail first: {damage}")
        commit_log.health.check_space()
        try:
            end = commit_log.append(data)
        finally:
            # G8: no byte is acked before its record's CRC was checked.
            self._verified.verify()  # also what was written before the disk was full
        self._keep_up(len(data))
        commit_log.preallocate_when_due()
        return end

    def _keep_up(self, received: int) -> None:
        """If dispatch is far behind, dispatch as much as was received."""
        dispatcher = self._dispatcher
        if dispatcher.target - dispatcher.offset <= _DISPATCH_LAG_MAX:
            return
        try:
            # 0: the target stays, only the work on it continues.
            dispatcher.advance(0, received)
        except (CorruptLogError, OSError) as error:
            self._fail(error)

    @property
    def whole_end(self) -> int:
        """The end of the last whole record that was checked."""
        return self._verified.end

    def drop_unverified(self) -> int:
        """Cuts what follows the last good record; the log's new end. Raises StoreFailedError."""
        self._log.health.check_usable()
        offset = self._verified.end
        if offset < self._log.max_offset:
            self.cut(offset, keep_aside=False)
        return self._log.max_offset

    def truncate_to(
        self, offset: int, *, keep_aside: bool = True, unclean_epoch: bool = False
    ) -> None:
        """Cuts the log at `offset`, a record boundary, with all that points behind it (R22). An
        interrupted cut is finished by the next `open`. Raises TruncationRefused for a cut below the
        own confirmed offset, except towards an `unclean_epoch` (R23), or inside a record; OSError
        if the cut bytes cannot be kept aside. Then nothing changed. Any other error is a
        StoreFailedError and ends the process (R37)."""
        self._log.health.check_usable()
        self._stop_writes()
        if offset >= self._log.max_offset:
            return
        confirmed = self._confirmed_end()
        if offset < self._log.min_offset:
            raise TruncationRefused(offset, confirmed, "the log begins above it")
        # R23: no acknowledged message is ever cut but for an operator's unclean election.
        if offset < confirmed and not unclean_epoch:
            raise TruncationRefused(offset, confirmed, "it would take back confirmed bytes")
        if not is_record_boundary(self._log, offset, self._dispatcher.offset):
            raise TruncationRefused(offset, confirmed, "no record ends there")
        self.cut(offset, keep_aside=keep_aside)

    def _confirmed_end(self) -> int:
        """The end of all whole confirmed records, visible or not."""
        dispatcher = self._dispatcher
        # Confirmed counts, not what readers have seen: dispatch may lag.
        target = min(dispatcher.target, self._log.max_offset)
        if target <= dispatcher.offset:
            return dispatcher.offset
        return whole_records_end(self._log, dispatcher.offset, target)[0]

    def cut(self, offset: int, *, keep_aside: bool, end_offset: int | None = None) -> None:
        """Cuts at `offset` without a check. `end_offset`: where bytes may end, if not at the log's
        end. Raises as `truncate_to`."""
        self._log.health.check_usable()
        # A round in another thread would write a checkpoint that covers what is cut.
        self._checkpoints.void_running()
        end = self._log.max_offset if end_offset is None else end_offset
        try:
            self._truncation.cut(offset, end, keep_aside=keep_aside)
        except CutUnfinishedError as error:
            self._fail(error)
            raise
        self._dispatcher.restart_at(min(offset, self._dispatcher.offset))
        self._verified.cut(offset)
        try:
            self._queues.log_ends_at(offset, self._log.min_offset)
        except OSError as error:  # the next start repeats it at the log's end
            failed = StoreFailedError(f"queue positions could not be cut at {offset}: {error}")
            self._fail(failed)
            raise failed from error

    def reset_for_empty_start(self, offset: int) -> None:
        """Starts empty at `offset`, a segment start of the master; the old log is kept aside (R27).
        Raises ValueError if no segment begins there, OSError if the old log cannot be kept aside;
        then nothing changed. Else StoreFailedError."""
        self._log.health.check_usable()
        if offset % self._log.segment_size:
            raise ValueError(f"a log cannot begin at {offset}, no segment begins there")
        self._stop_writes()
        # By a cut, which a crash cannot leave half done.
        if self._log.max_offset > self._log.min_offset:
            self.cut(self._log.min_offset, keep_aside=True)
        self._checkpoints.void_running()
        try:
            # The new log may begin below the old one: nothing of it is confirmed.
            self._truncation.lower_checkpoint(offset)
            self._queues.begin_at(offset)
            self._log.begin_at(offset)
        except OSError as error:
            failed = StoreFailedError(f"the log could not start again at {offset}: {error}")
            self._fail(failed)
            raise failed from error
        self._dispatcher.restart_at(offset)
        self._verified.restart(offset, offset)


class LogTrust:
    """`stop_writes` ends the turn and takes no more puts; `fail` ends the process."""

    def __init__(
        self,
        files: StoreFiles,
        dispatcher: LogDispatcher,
        slave_log: SlaveLog,
        stop_writes: Callable[[], int],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._log = files.log
        self._dispatcher = dispatcher
        self._checkpoint = files.checkpoint
        self._files = files
        self._mark = files.suspect_mark
        self._slave_log = slave_log
        self._stop_writes = stop_writes
        self._fail = fail
        #: How often damage was noted below the end of the log.
        self.notes = 0

    @property
    def damage(self) -> Suspicion | None:
        """What is wrong, and whether it was discarded; None if nothing is."""
        return self._mark.report

    @property
    def reason(self) -> str:
        """`damage` in words; "" if there is none."""
        return self._mark.reason

    @property
    def must_refetch(self) -> bool:
        """Whether the log has bytes that are or may be bad and must be fetched from a master."""
        damage = self._mark.report
        return damage is not None and not damage.discarded and damage.kind != "reboot"

    @property
    def end(self) -> int:
        """End (exclusive) of what this log could lead with: before damage at its end."""
        damage = self._mark.report
        if damage is None or not damage.blocks_writes:
            return self._log.max_offset
        return max(self._log.min_offset, min(damage.offset, self._log.max_offset))

    @property
    def lost_epochs(self) -> bool:
        """Whether the log lost its epochs in classic mode (R48)."""
        return self._files.has_lost_epochs

    def note_damage(self, error: CorruptLogError) -> None:
        """Damage was found; the next start will know."""
        if isinstance(error, CorruptQueueError):
            return  # that start rebuilds the queue, and the log is good
        self._mark.note_damage(error, self._log.max_offset)

    def note_failure(self, error: BaseException) -> None:
        """The process will end for `error`: notes what of the log the next one may trust. A full
        disk takes nothing away; a failed write-back does, whatever its error number (R40)."""
        if isinstance(error, CorruptLogError):
            self.note_damage(error)
            return
        if isinstance(error, CutUnfinishedError):
            error = error.cause
        log_failure = self._log.health.log_failure
        if log_failure is not None or (isinstance(error, OSError) and not disk.is_short(error)):
            failure = log_failure or error
            assert isinstance(failure, OSError)
            self._mark.note_disk_failure(failure, self._log, self._synced_boundary())

    def _synced_boundary(self) -> int:
        """The highest known record boundary below which all was durable before the failure."""
        flushed, dispatcher = self._log.flushed_offset, self._dispatcher
        known = (self._checkpoint.recovery_offset or 0, dispatcher.offset, dispatcher.verified.end)
        return max((at for at in known if at <= flushed), default=0) or self._log.min_offset

    def keep_noted(self) -> None:
        """Stores a suspicion that the disk refused before; the process ends."""
        self._mark.show()

    def fault_at(self, offset: int) -> str:
        """What is wrong with the record at `offset`, where a slave's log ends; "" if it is good or
        none begins there. A fault makes this log suspect."""
        return self._remembered(fault_at(self._log, offset))

    def fault_before(self, end: int) -> str:
        """The same, of the last records that end at `end`."""
        return self._remembered(fault_before(self._log, end))

    def _remembered(self, error: CorruptLogError | None) -> str:
        if error is None:
            return ""
        self.note_rot(error)
        return str(error)

    def note_rot(self, error: CorruptLogError) -> None:
        """A record below the end of the log is bad: the log is suspect from there, unless it was
        suspect before."""
        self.notes += 1
        if self._mark.report is None:
            self._mark.note_damage(error, self._log.max_offset, kind="rot")

    def discard_damaged_tail(self) -> int:
        """Cuts a suspect log at its damage, or where it was last synced before a failed fdatasync
        (cut bytes kept aside), to fetch the rest again; the new end. The suspicion stays, with
        `damage.discarded`, until the log is confirmed beyond all it may have held, or
        `clear_suspect`. Raises as `SlaveLog.truncate_to`."""
        self._log.health.check_usable()
        damage, commit_log = self._mark.report, self._log
        if damage is None or not self.must_refetch:
            return commit_log.max_offset
        self._stop_writes()
        offset = min(max(damage.offset, commit_log.min_offset), commit_log.max_offset)
        end_offset = max(damage.end_offset, commit_log.max_offset)
        self._slave_log.cut(offset, keep_aside=True, end_offset=end_offset)
        try:
            self._mark.set_discarded()
        except OSError as error:
            # The next start would cut again, after good bytes have come.
            failed = StoreFailedError(f"the damaged tail is cut, but that is not stored: {error}")
            self._fail(failed)
            raise failed from error
        log.warning("damaged_tail_discarded offset=%d", commit_log.max_offset)
        return commit_log.max_offset

    def clear_suspect(self) -> None:
        """Trusts the log again: it has caught up with its master, or an operator repaired it.
        Raises OSError; then it can be repeated."""
        if self._mark.report is not None:
            log.info(
                "suspicion_ended confirm_offset=%d reason=%s", self._dispatcher.offset, self.reason
            )
            self._mark.clear()

    def confirmed(self, offset: int) -> None:
        """All below `offset` is confirmed. Ends the suspicion of a discarded tail if that is all
        that the log may have held."""
        damage = self._mark.report
        # Bytes that were not cut are still here, whatever comes behind them.
        if damage is None or not damage.discarded or damage.until_level:
            return
        if offset >= damage.end_offset:
            self.clear_suspect()

    def repair(self, seen: str) -> bool:
        """An operator declares this log good; whether it had to be cut. `seen`: `reason` as the
        operator saw it. Damage that stops the log is cut off, the cut bytes kept aside. Raises
        StoreStateError if nothing is wrong, or something other than `seen`."""
        damage = self._mark.report
        if damage is None:
            raise StoreStateError("this log is not suspect: there is nothing to repair")
        # The operator decided on what was shown: something else may have been found since.
        if seen != self.reason:
            raise StoreStateError(f"something else than that is wrong with it: {self.reason}")
        if damage.blocks_writes:
            self.discard_damaged_tail()
        self.clear_suspect()
        return damage.blocks_writes
