"""The store of one broker. `open` builds the parts, and callers use them directly: `appender`
(puts), `queries` (reads), `slave_log` (a master's bytes, cuts), `trust` and `scrub` (R17, R24),
`log`, `epochs`, `background`, `checkpoints`, `expirer`, `positions` (R38). Here is what needs
several of them. Only the loop's thread calls them; other threads sync, allocate, unlink and check
files.

`min_phy_offset <= confirm_offset <= max_phy_offset`. confirm_offset is a record boundary and falls
only by a truncation; all below it, and nothing above, can be read through queues and index. Origin:
Java `DefaultMessageStore`, `CommitLog`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from batonmq.epoch.file_cache import EpochFileCache
from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import remove_file, show_file
from batonmq.runtime.lock_file import FolderLock
from batonmq.store.appender import Appender
from batonmq.store.background import Background, DiskSpaceWatch
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import StoreConfig
from batonmq.store.disk_health import StoreHealth
from batonmq.store.dispatch import ArrivalListener, LogDispatcher, RecentCommits
from batonmq.store.log_scan import VerifiedLog
from batonmq.store.position_rounds import PositionRounds
from batonmq.store.queries import StoreQueries
from batonmq.store.queue_table import QueueTable, SystemRecordHandler, remove_folders
from batonmq.store.recovery import StartConfirmRule, recover_store
from batonmq.store.scrub import Scrub
from batonmq.store.slave_log import LogTrust, SlaveLog
from batonmq.store.store_files import StoreFiles, abort_path, load_files
from batonmq.store.suspicion import RunMark, kernel_boot_id
from batonmq.store.truncation import LogTruncation
from batonmq.store.upkeep import (
    CheckpointWriter,
    DiskUseOf,
    Expirer,
    byte_count,
    disk_capacity,
    disk_use,
)

log = logging.getLogger(__name__)

# How much of the log a slave dispatches before the loop serves its sockets again.
_DISPATCH_SLICE_BYTES: Final = 512 * 1024
_NOTICE_SPACE_S: Final = 1.0
_NOT_MASTER: Final = "this replica is not the master"


def _raise(error: BaseException) -> None:
    raise error


class MessageStore:
    """Set the hooks (`on_system_record`, `on_unknown_topic`) before `open`."""

    # Set by `open`.
    log: CommitLog
    epochs: EpochFileCache
    appender: Appender
    queries: StoreQueries
    slave_log: SlaveLog
    trust: LogTrust
    truncation: LogTruncation
    background: Background
    disk_space: DiskSpaceWatch
    checkpoints: CheckpointWriter
    expirer: Expirer
    positions: PositionRounds
    scrub: Scrub

    def __init__(
        self,
        config: StoreConfig,
        *,
        store_host: bytes,
        confirm_rule: StartConfirmRule,
        clock_ms: Callable[[], int] = wall_ms,
        disk_use_of: DiskUseOf = disk_use,
    ) -> None:
        """`store_host` is ip and port, 8 or 20 bytes. Touches no file; `open` does."""
        self.config = config
        self._confirm_rule = confirm_rule
        #: topic -> called with each confirmed record of it, in log order; such topics have no
        #: consume queue. After an unclean stop records may come again, so handlers must be
        #: repeatable.
        self.on_system_record: dict[str, SystemRecordHandler] = {}
        #: True while those handlers see what a new master takes over unconfirmed; each such record
        #: comes again when it is confirmed.
        self.shows_unconfirmed = False
        #: Called with (topic, queue id) when the log shows a queue for the first time since `open`.
        self.on_unknown_topic: Callable[[str, int], None] | None = None
        #: Called in the loop with a bad record that `scrub` found, in place of `trust.note_rot`.
        self.on_damage_found: Callable[[CorruptLogError], None] | None = None
        #: Called before the log is replaced by an empty one (R27); raises OSError.
        self.on_new_beginning: Callable[[], None] = lambda: None
        #: Called before each checkpoint: jobs that make durable what records and unknown topics
        #: changed, because afterwards these do not come again. Run in order, before it.
        self.before_checkpoint: Callable[[], Iterable[Callable[[], None]]] | None = None
        #: Called with (topic, queue id, max queue offset) once per queue and advance.
        self.arrival_listeners: list[ArrivalListener] = []
        self.on_dropped: list[Callable[[int], object]] = []  # with the log's end (R55)
        #: Called in the loop with the flushed offset after each fdatasync that covered new bytes.
        self.flushed_listeners: list[Callable[[int], None]] = []
        #: Topic -> deletions that are in the log and not yet carried out, from 1 on.
        self.deleting_topics: Counter[str] = Counter()
        #: Prepared offsets of the last committed half messages: their op may be missing at the
        #: log's end.
        self.recent_commits = RecentCommits()
        self._store_host = store_host
        self._clock_ms = clock_ms
        self._disk_use_of = disk_use_of
        self._boot_id = kernel_boot_id
        self._lock = FolderLock(config.root / "lock")
        self.health = StoreHealth()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_slice: asyncio.Handle | None = None
        self._on_fatal: Callable[[BaseException], None] = _raise
        self._opened_at_ms = 0
        self.is_open = False

    # Opening and closing.

    def open(self) -> None:
        """Locks, loads and recovers the store; first finishes an interrupted truncation. Raises
        FolderLockedError, StoreFormatError, CutUnfinishedError, CorruptLogError (an epoch file
        without a good copy), OSError. Damage of the log does not raise: see `trust`."""
        disk.makedirs(self.config.root)
        self._lock.acquire()
        try:
            boot_id = self._boot_id()
            self._files = load_files(self.config, self._clock_ms, self.health)
            try:
                self._build_parts(self._files)
                self._recover(boot_id)
                self._mark_run(boot_id)
                self._confirm_rule.begin_run(self._files)
                # The log id is durable before anyone sees it.
                self._files.checkpoint.belongs_to(self.log.log_id)
            except BaseException:
                self._files.close(write_back=False)
                raise
        except BaseException:
            self._lock.release()
            raise
        self._opened_at_ms = self._clock_ms()
        self.is_open = True

    def _build_parts(self, files: StoreFiles) -> None:
        config = self.config
        self.log, self.epochs = files.log, files.epochs
        self._verified = VerifiedLog(files.log)
        self._queues = QueueTable(
            files.consume_queues, files.positions, self.on_system_record, self.on_unknown_topic,
            self.on_new_beginning,
        )  # fmt: skip
        self._dispatcher = LogDispatcher(
            files.log,
            self._queues,
            files.index if config.message_index_enable else None,
            config.delay_levels,
            self._verified,
            self.arrival_listeners,
            self.recent_commits,
        )
        self.appender = Appender(
            config,
            files.log,
            self._queues,
            self._dispatcher.pending,
            store_host=self._store_host,
            clock_ms=self._clock_ms,
            on_disk_failure=self._fail,
        )
        self.positions = PositionRounds(
            config, files.log, self._queues, self.appender, self.deleting_topics
        )
        self.background = Background(files.log, self._fail)
        self.disk_space = DiskSpaceWatch(files.log, self.appender, self.background)
        self.queries = StoreQueries(files, self._dispatcher, self.appender, self._met_bad_record)
        self.truncation = LogTruncation(files)
        self.checkpoints = CheckpointWriter(
            files, self._dispatcher, self.before_checkpoint, self.background, self.disk_space
        )
        self.expirer = Expirer(
            files, self._dispatcher, self.checkpoints, self._clock_ms, self._disk_use_of,
            lambda: self.positions.may_expire_below, self.disk_space,
        )  # fmt: skip
        self.slave_log = SlaveLog(
            files, self._dispatcher, self.appender, self.truncation, self.checkpoints,
            self.stop_writes, self._fail,
        )  # fmt: skip
        self.trust = LogTrust(files, self._dispatcher, self.slave_log, self.stop_writes, self._fail)
        self.scrub = Scrub(
            config, files.log, self._dispatcher, self.background, self.trust,
            self.on_damage_found or self.trust.note_rot,
        )  # fmt: skip

    def _recover(self, boot_id: str) -> None:
        recover_store(
            self._files,
            self.truncation,
            self._dispatcher,
            confirm_rule=self._confirm_rule,
            boot_id=boot_id,
        )
        damage = self.trust.damage
        if damage is not None and damage.blocks_writes:
            self.appender.refuse(f"the log is damaged: {self.trust.reason}")
        elif self._confirm_rule.writes_at_once:
            self.appender.open_for_writes()
            self.positions.begin_mastership()

    def _mark_run(self, boot_id: str) -> None:
        """From now on a stop is unclean. Bytes that an earlier run acked unflushed are flushed
        first, so that this run's mark may say that all acked bytes are flushed (R17)."""
        acks_flushed = self.config.sync_flush and self.config.ha_sync_flush
        if acks_flushed and not self._files.was_clean:
            self.flush()
        RunMark(boot_id, acks_flushed).write(abort_path(self.config.root))

    def start(
        self, loop: asyncio.AbstractEventLoop, on_fatal: Callable[[BaseException], None]
    ) -> None:
        """Starts the sync threads and the upkeep timers on `loop`. `on_fatal` is called in the loop
        when the disk failed or the log's bytes are no records: the process must end."""
        self._loop = loop
        self._on_fatal = on_fatal
        config, background = self.config, self.background
        background.start(loop, config.flush_interval_commit_log, self._report_flushed)
        # So that the first put does not wait for its segment.
        if not self.log.segments:
            self.log.preallocate_when_due()
        background.repeat(
            "flush", config.flush_interval_consume_queue / 1000, self.checkpoints.flush_derived
        )
        background.repeat(
            "clean", config.clean_resource_interval / 1000, self.expirer.clean_expired
        )
        background.repeat("space", _NOTICE_SPACE_S, self.expirer.notice_space)
        self.scrub.start()
        self._schedule_slice()

    def close(self) -> None:
        """Writes and syncs everything, removes the abort mark, unlocks. May be repeated. A store
        that failed (R40) or whose full disk kept something out of the files (R45) is abandoned: the
        abort mark stays, and the next start recovers. Raises OSError, and what a job raised, with
        the same outcome."""
        if not self.is_open:
            return
        self._stop_timers()
        self.appender.refuse("the store is closed")
        try:
            if self.health.has_failed:
                return
            self.appender.end_turn()
            self.background.stop_threads()
            if self.background.failure is not None:
                raise self.background.failure
            self.flush()
            self.checkpoints.flush_derived()
            if self.health.full:
                self.health.raise_full()
            self._files.index.flush()
            self._files.close()
            if self._files.index.may_be_passed():
                self._unmark_run()
            else:
                log.warning("store_not_closed_cleanly reason=%s", self.health.index_failure)
        except Exception as error:
            if self.health.passes(error):
                log.warning("store_not_closed_cleanly reason=%s", error)
                return
            self.trust.note_failure(error)
            raise
        finally:
            self._abandon_files()

    def _unmark_run(self) -> None:
        path = abort_path(self.config.root)
        try:
            remove_file(path)
        except OSError:
            # It may be gone, but a disk that fails now makes no clean stop. Which boot this was
            # does not matter: the log is synced.
            try:
                show_file(path, "")
            except OSError as error:
                log.critical("stop_not_noted reason=%r", disk.described(error))
            raise

    def abandon(self) -> None:
        """Closes files and lock without writing or syncing; the abort mark stays, as after a
        kill."""
        if not self.is_open:
            return
        self._stop_timers()
        self.appender.refuse("the store is abandoned")
        self._abandon_files()

    def _abandon_files(self) -> None:
        """Without effect on what is already closed."""
        if self.health.log_failure is not None:
            self.trust.note_failure(self.health.log_failure)
        self.trust.keep_noted()
        self.background.stop_threads(finish=False)
        try:
            self._files.close(write_back=False)
        finally:
            self._lock.release()

    def _stop_timers(self) -> None:
        self.is_open = False
        self._loop = None
        self.background.stop_timers()
        if self._next_slice is not None:
            self._next_slice.cancel()

    def _fail(self, error: BaseException) -> None:
        """The process must end; the reason is kept for the next start (R17, R24, R40). Until then
        nothing more is done with this store (R37)."""
        self.appender.refuse(f"this broker has failed: {error}")
        self.health.give_up(error)
        self.trust.note_failure(error)
        self._on_fatal(error)

    # Positions.

    @property
    def max_phy_offset(self) -> int:
        """End (exclusive) of the written log, without records of an unfinished turn."""
        return self.log.max_offset

    @property
    def min_phy_offset(self) -> int:
        return self.log.min_offset

    @property
    def confirm_offset(self) -> int:
        """End (exclusive) of what is confirmed and visible; a record boundary."""
        return self._dispatcher.offset

    # Master.

    def prepare_master(self, *, discard_damage: bool = False) -> int:
        """Gets ready to take puts; returns the log's end, behind the last whole record.

        Cuts an incomplete tail (kept aside), counts queue offsets to the end, and with SYNC_FLUSH
        makes inherited bytes durable (R26). Raises CorruptLogError for damage, OSError,
        StoreFailedError. `discard_damage`: this suspect replica was elected knowingly, so its
        damaged part is cut first (kept aside). A suspect log without damage is accepted: the
        controllers chose it as the group's log (R17).
        """
        self.health.check_usable()
        trust = self.trust
        if discard_damage and trust.damage is not None and trust.damage.blocks_writes:
            trust.discard_damaged_tail()
        damage = trust.damage
        if damage is not None and damage.blocks_writes:
            raise CorruptLogError(damage.file, damage.offset, damage.what)
        self.stop_writes()
        try:
            self._dispatcher.advance(self._dispatcher.target)
            end = self._queue_undispatched()
        except CorruptLogError as error:
            trust.note_damage(error)
            raise
        if end < self.log.max_offset:
            log.warning("incomplete_tail_cut offset=%d max_offset=%d", end, self.log.max_offset)
            self.slave_log.cut(end, keep_aside=True)
            self._queue_undispatched()
        if self.config.sync_flush:
            self.flush()
        # Rot stays noted: the bad record is still in the log.
        if damage is None or damage.kind != "rot":
            trust.clear_suspect()
        self.appender.open_for_writes()
        self.positions.begin_mastership()
        return end

    def _queue_undispatched(self) -> int:
        self.shows_unconfirmed = self._queues.shows_unconfirmed = True
        try:
            return self._dispatcher.queue_undispatched()
        finally:
            self.shows_unconfirmed = self._queues.shows_unconfirmed = False

    def stop_writes(self, why: str = _NOT_MASTER) -> int:
        """Takes no more puts (role change); earlier ones are written. The end of the log."""
        was_writable = self.appender.is_writable
        self.positions.end_mastership()
        self.appender.refuse(why)
        self.end_turn()
        end = self.log.max_offset
        if self.appender.drop_unwritten():
            self.recent_commits.cut(end)
            for forget in self.on_dropped:
                forget(end)
        if was_writable:
            self._verified.end = end  # this process wrote all of it
        return end

    def end_turn(self, *, whole: bool = True) -> int:
        """Writes all puts since the last call in one `pwrite`; the written end. `whole`: see
        `Appender.end_turn`. A turn with puts also states queue positions if due (R38). Calls
        `on_fatal` and raises OSError if the disk fails."""
        appender = self.appender
        if appender.end >= self.positions.due_at and appender.has_buffered:
            self.positions.put_piece()
        return appender.end_turn(whole=whole)

    def advance_confirm_offset(self, offset: int) -> int:
        """Makes visible all that ends at or below `offset`; the new confirm_offset, a record
        boundary that never falls. Arrival listeners are called once per queue. A slave far behind
        advances in slices. A failed store confirms nothing. Raises CorruptLogError if a slave's
        bytes are no records."""
        dispatcher = self._dispatcher
        offset = min(offset, self.log.max_offset)
        if offset <= dispatcher.offset or self.health.has_failed:
            return dispatcher.offset
        try:
            confirmed = dispatcher.advance(
                offset, _DISPATCH_SLICE_BYTES if self._loop is not None else None
            )
        except OSError as error:
            self._fail(error)
            raise
        except CorruptLogError as error:
            self.trust.note_damage(error)
            raise
        if dispatcher.has_more:
            self._schedule_slice()
        self.trust.confirmed(confirmed)
        return confirmed

    def _schedule_slice(self) -> None:
        if self._loop is not None and self._next_slice is None and self._dispatcher.has_more:
            self._next_slice = self._loop.call_soon(self._dispatch_slice)

    def _met_bad_record(self, error: CorruptLogError) -> None:
        """A reader did. Before `start` no loop runs yet in which a master could hand over."""
        if self._loop is None:
            self.trust.note_rot(error)
        else:
            self.scrub.note_read(error)

    def _dispatch_slice(self) -> None:
        self._next_slice = None
        if self.health.has_failed:
            return
        try:
            self._dispatcher.advance(0, _DISPATCH_SLICE_BYTES)
        except (CorruptLogError, OSError) as error:
            self._fail(error)
            return
        self._schedule_slice()

    # Durability and upkeep.

    def repair(self, seen: str) -> str:
        """An operator declares this log good; what was done. See `LogTrust.repair`."""
        was_cut = self.trust.repair(seen)
        if self._confirm_rule.writes_at_once:
            self.appender.open_for_writes()
            self.positions.begin_mastership()
        end = self.log.max_offset
        if was_cut:
            return f"cut at {end}, what was behind is kept in {self.config.root / 'truncated'}"
        return f"trusted as it is, up to {end}"

    def _report_flushed(self, flushed_offset: int) -> None:
        # The log may have been cut since the flush.
        flushed_offset = min(flushed_offset, self.log.flushed_offset)
        for listener in self.flushed_listeners:
            listener(flushed_offset)

    def flush(self) -> int:
        """fdatasync of the log, here and now; the flushed offset. Raises OSError."""
        try:
            self.log.datasync_to(self.log.max_offset)
        except OSError as error:
            self._fail(error)
            raise
        return self.log.flushed_offset

    def delete_topic(self, topic: str) -> int:
        """Drops the queues of a topic; its messages stay in the log until they expire. Raises
        OSError if the folder cannot be taken away; then the process must end: the next one finds
        the deletion's record again, which no checkpoint covers."""
        self.end_turn()
        self.checkpoints.forget_queue_totals()
        count = self._queues.delete_topic(topic)
        self._dispatcher.forget_topic(topic)
        self.background.free_space(
            partial(remove_folders, self._files.consume_queues.deleted.taken())
        )
        return count

    def runtime_info(self) -> dict[str, str]:
        """What `brokerStatus` shows of the store, under Java's names if it has them."""
        commit_log, appender = self.log, self.appender
        return {
            **self._of_disk(),
            "bootTimestamp": str(self._opened_at_ms),
            "commitLogMinOffset": str(commit_log.min_offset),
            "commitLogMaxOffset": str(commit_log.max_offset),
            "confirmOffset": str(self.confirm_offset),
            "flushedOffset": str(commit_log.flushed_offset),
            "dispatchBehindBytes": str(commit_log.max_offset - self.confirm_offset),
            "putMessageTimesTotal": str(appender.messages_total),
            "putMessageSizeTotal": str(appender.bytes_total),
            "putMessageAverageSize": str(appender.bytes_total / max(1, appender.messages_total)),
            "remainHowManyDataToFlush": byte_count(
                commit_log.max_offset - commit_log.flushed_offset
            ),
            "queuePositionsKnown": str(self._files.positions.are_known).lower(),
            "suspect": self.trust.reason,
            "scrubOffset": str(self.scrub.offset),
            "scrubPassedTimestamp": str(self.scrub.passed_at_ms),
            "scrubFoundTotal": str(self.scrub.found_total),
        }

    def _of_disk(self) -> dict[str, str]:
        """Empty if the file system does not answer: the rest of the status matters more then."""
        folder, root = self.log.folder, self.config.root
        try:
            use = f"{self._disk_use_of((folder,)):.4f}"
            return {
                "commitLogDiskRatio": use,
                f"commitLogDiskRatio_{folder}": use,
                "consumeQueueDiskRatio": f"{self._disk_use_of((root,)):.4f}",
                "commitLogDirCapacity": disk_capacity(root),
            }
        except OSError as error:
            log.warning("disk_space_unknown folder=%s reason=%s", root, error)
            return {}
