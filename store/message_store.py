"""The store of one broker: the log, what is derived from it, and the rules for both roles.

A facade over its parts: `Appender` (write path), `Dispatcher` (confirmed becomes visible),
`StoreQueries` (reads), `SlaveLog` (a master's bytes, cuts), `LogTrust` (R17, R24), `recovery`,
`Background`, `CheckpointWriter`, `Expirer`. One thread, the loop's, calls everything here; other
threads only sync, allocate and unlink files.

Invariants: `min_phy_offset <= confirm_offset <= max_phy_offset`; confirm_offset is a record
boundary, never falls but by a truncation, and everything below it, and nothing above, can be read
through queues, index and offsets. Origin: Java `DefaultMessageStore`, `CommitLog`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from epoch.durable_file import remove_file
from protocol.errors import CorruptLogError
from store.background import Background
from store.config import StoreConfig
from store.dispatch import ArrivalListener
from store.lock_file import StoreLock
from store.parts import StoreParts, abort_path, load_parts, recover_parts
from store.queue_table import SystemRecordHandler
from store.slave_log import SlaveLog
from store.suspicion import RunMark, Suspicion, kernel_boot_id
from store.trust import LogTrust
from store.undispatched import queue_undispatched
from store.upkeep import DiskUseOf, disk_use, unlink_segments

log = logging.getLogger(__name__)

# How much of the log a slave dispatches before it lets the loop look at its sockets again.
_DISPATCH_SLICE_BYTES: Final = 256 * 1024
_NOT_MASTER: Final = "this replica is not the master"
_DISK_FULL: Final = "the disk is full"


def wall_clock_ms() -> int:
    """Milliseconds since the epoch, for timestamps that are stored in messages."""
    return time.time_ns() // 1_000_000


def _raise(error: BaseException) -> None:
    raise error


class MessageStore:
    """See the module. Set the hooks (`on_system_record`, `on_unknown_topic`) before `open`."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        store_host: bytes,
        controller_mode: bool,
        clock_ms: Callable[[], int] = wall_clock_ms,
        disk_use_of: DiskUseOf = disk_use,
        boot_id: Callable[[], str] = kernel_boot_id,
    ) -> None:
        """`store_host` is ip and port, 8 or 20 bytes. Touches no file; `open` does.

        Outside controller mode everything written counts as confirmed after a restart, and the
        store takes puts at once.
        """
        self.config = config
        self.controller_mode = controller_mode
        #: topic -> called with each confirmed record of it, in log order; such topics have no
        #: consume queue. After an unclean stop records may come again: their effect is repeatable.
        self.on_system_record: dict[str, SystemRecordHandler] = {}
        #: True while those handlers are shown what a new master takes over, not confirmed yet; each
        #: such record is shown again when it is confirmed.
        self.shows_unconfirmed = False
        #: Called with (topic, queue id) when the log shows a queue for the first time since `open`.
        self.on_unknown_topic: Callable[[str, int], None] | None = None
        #: Called before each checkpoint: the jobs that make durable what the two hooks above have
        #: changed, for after it their records are not shown again. Run before it, in order.
        self.before_checkpoint: Callable[[], Iterable[Callable[[], None]]] | None = None
        self._store_host = store_host
        self._clock_ms = clock_ms
        self._disk_use_of = disk_use_of
        self._boot_id = boot_id
        self._arrival_listeners: list[ArrivalListener] = []
        self._flushed_listeners: list[Callable[[int], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_slice: asyncio.Handle | None = None
        self._on_fatal: Callable[[BaseException], None] = _raise
        self._opened_at_ms = 0
        self._disk_full = False
        self._is_open = False

    # --- life ---

    def open(self) -> None:
        """Lock, load and recover the store; finishes an interrupted truncation first.

        Raises StoreLockedError (names the process), StoreFormatError, CorruptLogError (an epoch
        file without a good copy) and OSError. Damage in the log does not raise: see `suspect`.
        """
        root = self.config.root
        root.mkdir(parents=True, exist_ok=True)
        self._lock = StoreLock(root / "lock")
        self._lock.acquire()
        try:
            boot_id = self._boot_id()
            self._load(boot_id)
            self._mark_run(boot_id)
        except BaseException:
            self._lock.release()
            raise
        self._opened_at_ms = self._clock_ms()
        self._is_open = True

    def _mark_run(self, boot_id: str) -> None:
        """From here on a stop is unclean. What a run before acknowledged unflushed is flushed
        before this one may say of itself that all it acknowledged is (R17)."""
        acks_flushed = self.config.sync_flush and self.config.ha_sync_flush
        if acks_flushed and not self._parts.was_clean:
            self.flush()
        RunMark(boot_id, acks_flushed).write(abort_path(self.config.root))

    def _load(self, boot_id: str) -> None:
        parts = self._parts = load_parts(
            self.config,
            store_host=self._store_host,
            clock_ms=self._clock_ms,
            disk_use_of=self._disk_use_of,
        )
        parts.queues.on_system_record = self.on_system_record
        parts.queues.on_unknown_topic = self._announce_topic
        parts.dispatcher.arrival_listeners = self._arrival_listeners
        self.log = parts.log
        self.epochs = parts.epochs
        self.truncation = parts.truncation
        self._dispatcher = parts.dispatcher
        self._appender = parts.appender
        self._slave_log = SlaveLog(
            parts,
            segment_size=self.config.mapped_file_size_commit_log,
            stop_writes=self.stop_writes,
            fail=self._fail,
        )
        self._background = Background(parts.log, self._fail)
        self._trust = LogTrust(parts, self._slave_log, self.stop_writes)
        self._bind_paths(parts)
        parts.appender.on_disk_failure = self._fail
        recover_parts(parts, controller_mode=self.controller_mode, boot_id=boot_id)
        if self.damage is not None and self.damage.blocks_writes:
            self._appender.refuse(f"the log is damaged: {self.suspect}")
        elif not self.controller_mode:
            self._open_for_writes()

    def _bind_paths(self, parts: StoreParts) -> None:
        """Hand out the parts' own methods: the facade adds nothing to them but a call."""
        self.put_message = parts.appender.put_message
        self.put_batch = parts.appender.put_batch
        slave_log, trust = self._slave_log, self._trust
        self.append_replicated = slave_log.append_replicated
        self.drop_unverified = slave_log.drop_unverified
        self.truncate_to = slave_log.truncate_to
        self.reset_for_empty_start = slave_log.reset_for_empty_start
        self.fault_at = trust.fault_at
        self.discard_damaged_tail = trust.discard_damaged_tail
        self.clear_suspect = trust.clear_suspect
        self.request_flush = self._background.request_flush
        self.run_job = self._background.run_job
        queries = parts.queries
        self.get_message = queries.get_message
        self.queue_ids = queries.queue_ids
        self.max_offset_in_queue = queries.max_offset_in_queue
        self.min_offset_in_queue = queries.min_offset_in_queue
        self.next_offset_in_queue = queries.next_offset_in_queue
        self.offset_in_queue_by_time = queries.offset_in_queue_by_time
        self.message_store_timestamp = queries.message_store_timestamp
        self.earliest_message_time = queries.earliest_message_time
        self.look_message_by_offset = queries.look_message_by_offset
        self.query_message = queries.query_message

    def _announce_topic(self, topic: str, queue_id: int) -> None:
        if self.on_unknown_topic is not None:
            self.on_unknown_topic(topic, queue_id)

    def start(
        self, loop: asyncio.AbstractEventLoop, on_fatal: Callable[[BaseException], None]
    ) -> None:
        """Start the threads that sync and the timers of upkeep on `loop`.

        `on_fatal` is called in the loop when the disk failed or the log proved to be none: the
        process must end.
        """
        self._loop = loop
        self._on_fatal = on_fatal
        background = self._background
        background.start(loop, self.config.flush_interval_commit_log, self._report_flushed)
        if not self.log.segments:
            self.log.preallocate_in_thread()
        background.repeat(
            "flush", self.config.flush_interval_consume_queue / 1000, self.flush_derived
        )
        background.repeat("clean", self.config.clean_resource_interval / 1000, self.clean_expired)
        self._schedule_slice()

    def close(self) -> None:
        """Write and sync everything, remove the abort mark, unlock. Idempotent."""
        if not self._is_open:
            return
        self._stop_timers()
        self._appender.refuse("the store is closed")
        try:
            self._appender.end_turn()
            self._stop_threads()
            self.flush()
            self.flush_derived()
            self._parts.index.flush()
            remove_file(abort_path(self.config.root))
        finally:
            self._release()

    def abandon(self) -> None:
        """Let go of files and lock without syncing anything; the abort mark stays.

        For a broker whose disk failed: what is there is recovered at the next start.
        """
        if not self._is_open:
            return
        self._stop_timers()
        self._appender.refuse("the store is abandoned")
        self._stop_threads()
        self._release()

    def _stop_timers(self) -> None:
        self._is_open = False
        self._background.stop_timers()
        if self._next_slice is not None:
            self._next_slice.cancel()

    def _stop_threads(self) -> None:
        self._background.stop_threads()
        self._loop = None

    def _release(self) -> None:
        self._parts.close_files()
        self._lock.release()

    # --- positions ---

    @property
    def max_phy_offset(self) -> int:
        """End (exclusive) of the written log; records of an unfinished turn are not in it."""
        return self.log.max_offset

    @property
    def trusted_end(self) -> int:
        """End (exclusive) of what this log could lead with: before damage at its end, if there is
        any. What elections compare (R17)."""
        return self._trust.end

    @property
    def min_phy_offset(self) -> int:
        return self.log.min_offset

    @property
    def flushed_offset(self) -> int:
        """End (exclusive) of what fdatasync has covered."""
        return self.log.flushed_offset

    @property
    def confirm_offset(self) -> int:
        """End (exclusive) of what is confirmed and visible; a record boundary."""
        return self._dispatcher.offset

    @property
    def log_id(self) -> str:
        """The random id made with this log; another log under the same broker id differs (R17)."""
        return self.log.log_id

    @property
    def suspect(self) -> str:
        """Why this log may miss what it acknowledged (R17); empty in good times. Survives
        restarts, until `clear_suspect`."""
        return self._trust.reason

    @property
    def damage(self) -> Suspicion | None:
        """What `suspect` tells in words: which bytes, and whether they were discarded."""
        return self._trust.damage

    @property
    def is_writable(self) -> bool:
        """Whether puts are taken."""
        return self._appender.refusal is None

    @property
    def disk_full(self) -> bool:
        return self._disk_full

    # --- master ---

    def prepare_master(self, *, discard_damage: bool = False) -> int:
        """Get ready to take puts: the log's end, behind its last whole record.

        `discard_damage`: whoever elected this replica knows that it is suspect, so what cannot be
        trusted is cut off first (kept aside) instead of keeping the group without a master.

        Cuts an incomplete tail (kept aside), counts queue offsets to the end of the log, and under
        SYNC_FLUSH makes the inherited bytes durable (R26). Raises CorruptLogError for damage, of
        now or of before, and OSError. A suspect log without damage is taken: the controllers know
        of it and chose it all the same (R17), so it is the group's log now.
        """
        if discard_damage and self.damage is not None and self.damage.blocks_writes:
            self.discard_damaged_tail()
        damage = self.damage
        if damage is not None and damage.blocks_writes:
            raise CorruptLogError(damage.file, damage.offset, damage.what)
        self.stop_writes()
        try:
            self._dispatcher.advance(self._dispatcher.target)
            end = self._queue_undispatched()
        except CorruptLogError as error:
            self._trust.note_damage(error)
            raise
        if end < self.log.max_offset:
            log.warning("incomplete_tail_cut offset=%d max_offset=%d", end, self.log.max_offset)
            self._slave_log.cut(end, keep_aside=True)
            self._queue_undispatched()
        if self.config.sync_flush:
            self.flush()
        if damage is None or damage.kind != "rot":
            self.clear_suspect()
        self._open_for_writes()
        return end

    def _queue_undispatched(self) -> int:
        self.shows_unconfirmed = True
        try:
            return queue_undispatched(self.log, self._parts.queues, self._dispatcher)
        finally:
            self.shows_unconfirmed = False

    def _open_for_writes(self) -> None:
        self._appender.open_for_writes()
        if self._disk_full:
            self._appender.refuse(_DISK_FULL)

    def stop_writes(self, why: str = _NOT_MASTER) -> int:
        """Take no more puts (role change); what was put is written. The end of the log."""
        was_writable = self.is_writable
        self._appender.refuse(why)
        end = self.end_turn()
        if was_writable:
            self._parts.intake.restart(end)  # all of it is our own
        return end

    def end_turn(self) -> int:
        """Write all records put since the last call in one `pwrite`; the written end.

        Calls `on_fatal` and raises OSError if the disk fails.
        """
        return self._appender.end_turn()

    def advance_confirm_offset(self, offset: int) -> int:
        """Everything that ends at or below `offset` is confirmed: make it visible.

        The new confirm_offset, a record boundary; it never falls. Arrival listeners are called
        once per queue. A slave far behind is led on in slices by the loop. Raises CorruptLogError
        if the bytes of a slave are no log.
        """
        dispatcher = self._dispatcher
        offset = min(offset, self.log.max_offset)
        if offset <= dispatcher.offset:
            return dispatcher.offset
        try:
            confirmed = dispatcher.advance(
                offset, _DISPATCH_SLICE_BYTES if self._loop is not None else None
            )
        except OSError as error:
            self._fail(error)
            raise
        except CorruptLogError as error:
            self._trust.note_damage(error)
            raise
        if dispatcher.has_more:
            self._schedule_slice()
        if self.damage is not None:
            self._trust.confirmed(confirmed)
        return confirmed

    def _schedule_slice(self) -> None:
        if self._loop is not None and self._next_slice is None and self._dispatcher.has_more:
            self._next_slice = self._loop.call_soon(self._dispatch_slice)

    def _dispatch_slice(self) -> None:
        self._next_slice = None
        try:
            self._dispatcher.advance(0, _DISPATCH_SLICE_BYTES)
        except (CorruptLogError, OSError) as error:
            self._fail(error)
            return
        self._schedule_slice()

    # --- trust ---

    def repair(self, seen: str) -> str:
        """An operator's word that this log is to be trusted; what was done about it.

        `seen` is `suspect` as the operator saw it. Where damage keeps the log from going on, it is
        cut there, and the cut bytes are kept aside. Raises StoreStateError if nothing is wrong, or
        something else than was seen.
        """
        was_cut = self._trust.repair(seen)
        if not self.controller_mode:
            self._open_for_writes()
        end = self.log.max_offset
        if was_cut:
            return f"cut at {end}, what was behind is kept in {self.config.root / 'truncated'}"
        return f"trusted as it is, up to {end}"

    def _fail(self, error: BaseException) -> None:
        """The process must end, and the next one shall know why (R17, R24)."""
        self._trust.note_failure(error)
        self._on_fatal(error)

    # --- reading ---

    def log_view(self, offset: int, size: int) -> memoryview:
        """Written bytes from `offset`, read-only, without a copy: at most `size`, may be fewer.

        Never over two segments; empty at the end of the log. Send it, do not keep it.
        """
        return self.log.view(offset, size)

    def on_arrival(self, listener: ArrivalListener) -> None:
        """Call `listener(topic, queue_id, max_queue_offset)` once per queue and advance."""
        self._arrival_listeners.append(listener)

    # --- durability and upkeep ---

    def on_flushed(self, listener: Callable[[int], None]) -> None:
        """Call `listener(flushed_offset)` in the loop after each fdatasync that covered bytes."""
        self._flushed_listeners.append(listener)

    def _report_flushed(self, flushed_offset: int) -> None:
        # The log may have been cut since the flush thread said so.
        flushed_offset = min(flushed_offset, self.log.flushed_offset)
        for listener in self._flushed_listeners:
            listener(flushed_offset)

    def flush(self) -> int:
        """fdatasync the log here and now (blocks); the flushed offset. Raises OSError."""
        try:
            self.log.datasync_to(self.log.max_offset)
        except OSError as error:
            self._fail(error)
            raise
        return self.log.flushed_offset

    def flush_derived(self) -> None:
        """Bring consume queues, index and checkpoint to disk; in a thread after `start`."""
        if self.before_checkpoint is not None:
            for job in self.before_checkpoint():
                self.run_job(job)
        if not self.epochs.is_settled:
            self.run_job(self.epochs.settle)
        work = self._parts.checkpoints.begin()
        if work is None:
            return
        self.run_job(work)

    def clean_expired(self, *, manual: bool = False) -> int:
        """Take expired segments off (`manual`: at any hour), refuse puts on a full disk.

        How many went. Files are unlinked in a thread while the loop runs.
        """
        decision, removed = self._parts.expirer.run(self._clock_ms(), manual=manual)
        if decision.disk_full != self._disk_full:
            self._set_disk_full(decision.disk_full)
        if removed:
            self.run_job(lambda: unlink_segments(removed))
        return len(removed)

    def _set_disk_full(self, is_full: bool) -> None:
        log.log(logging.WARNING if is_full else logging.INFO, "disk_full=%s", is_full)
        self._disk_full = is_full
        if is_full and self._appender.refusal is None:
            self._appender.refuse(_DISK_FULL)
        elif not is_full and self._appender.refusal == _DISK_FULL:
            self.end_turn()
            self._appender.open_for_writes()

    def delete_topic(self, topic: str) -> int:
        """Forget the queues of a topic; its messages stay in the log until they expire."""
        self.end_turn()
        count = self._parts.queues.delete_topic(topic)
        self._dispatcher.forget_topic(topic)
        return count

    def runtime_info(self) -> dict[str, str]:
        """What `brokerStatus` shows of the store, under Java's names where it has them."""
        commit_log, appender = self.log, self._appender
        use = self._disk_use_of((commit_log.folder,)).ratio
        return {
            "bootTimestamp": str(self._opened_at_ms),
            "commitLogDiskRatio": f"{use:.4f}",
            "consumeQueueDiskRatio": f"{self._disk_use_of((self.config.root,)).ratio:.4f}",
            "commitLogMinOffset": str(commit_log.min_offset),
            "commitLogMaxOffset": str(commit_log.max_offset),
            "confirmOffset": str(self.confirm_offset),
            "flushedOffset": str(commit_log.flushed_offset),
            "dispatchBehindBytes": str(commit_log.max_offset - self.confirm_offset),
            "putMessageTimesTotal": str(appender.messages_total),
            "putMessageSizeTotal": str(appender.bytes_total),
            "remainHowManyDataToFlush": f"{commit_log.max_offset - commit_log.flushed_offset} B",
            "suspect": self.suspect,
        }
