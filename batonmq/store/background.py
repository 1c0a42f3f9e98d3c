"""What a running store does beside the loop: threads that wait for the disk, timers of upkeep.

`FlushService`: one fdatasync covers all log bytes written so far (group commit), every interval and
at once for SYNC_FLUSH. `DiskJobs`: derived data and checkpoint, whose syncs must not delay a group
commit. After a failed sync the page cache cannot be trusted: `fail` stops the broker, and no thread
syncs the log again (`StoreHealth.log_failure`, R40). Before `start` and after `stop_threads` jobs
run at once in the caller. Origin: Java `FlushRealTimeService`, `GroupCommitService`,
`FlushConsumeQueueService`.

A full disk only pauses a store (R45): what cannot be written stays in memory, puts are refused, and
each round of upkeep tries all of it again (`DiskSpaceWatch`).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

from batonmq.protocol.errors import DISK_FULL
from batonmq.store.appender import Appender
from batonmq.store.commit_log import CommitLog
from batonmq.store.disk_health import StoreHealth

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]
_RETRY_S = 1.0
_SLICE_PAUSE_S = 0.01


class FlushService:
    """Owns the flush thread. `post` runs a callback in the thread that owns the store."""

    def __init__(
        self,
        commit_log: CommitLog,
        interval_ms: int,
        *,
        post: Post,
        on_flushed: Callable[[int], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._log = commit_log
        self._interval_s = interval_ms / 1000
        self._post = post
        self._on_flushed = on_flushed
        self._on_fatal = on_fatal
        self._wake = threading.Event()
        self._stopping = False
        self._last_flush = True
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="store-flush", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self) -> None:
        """Make what is written so far durable now, then call `on_flushed`."""
        self._wake.set()

    def stop(self, *, flush: bool) -> None:
        """End the thread, after a last flush or without one."""
        self._last_flush = flush
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._interval_s)
                # Before the flush: what is requested during it may be written behind its target.
                self._wake.clear()
                if self._last_flush:
                    self._flush_once()
            if self._last_flush:
                self._flush_once()
        except Exception as error:
            self.failure = error
            _report(error, self._post, self._on_fatal)

    def _flush_once(self) -> None:
        target = self._log.max_offset
        if target > self._log.flushed_offset:
            self._log.datasync_to(target)
            flushed = self._log.flushed_offset
            self._post(lambda: self._on_flushed(flushed))


class DiskJobs:
    """Runs jobs one after another in its own thread. An error is fatal, but on a full disk the job
    is repeated each second, and later ones wait (R45)."""

    def __init__(
        self,
        name: str,
        health: StoreHealth,
        *,
        post: Post,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._health = health
        self._stopping = threading.Event()
        self._post = post
        self._on_fatal = on_fatal
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_dropping = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self, *, finish: bool) -> None:
        """End the thread, after the submitted jobs (`finish`) or without them. A full disk then
        counts as a failure."""
        self._is_dropping = not finish
        self._stopping.set()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                while not self._is_dropping and not self._is_done(job):
                    self._stopping.wait(_RETRY_S)
        except Exception as error:
            self.failure = error
            _report(error, self._post, self._on_fatal)

    def _is_done(self, job: Callable[[], None]) -> bool:
        """False if the disk is too full for what it writes."""
        try:
            job()
        except OSError as error:
            if self._stopping.is_set():
                raise  # the process ends: it cannot wait for space
            self._health.pause_or_raise(error)
            return False
        return True


def _report(error: Exception, post: Post, on_fatal: Callable[[BaseException], None]) -> None:
    log.critical("flush_failed reason=%r", error)
    post(lambda: on_fatal(error))


class Background:
    """`fail` is called in the loop when the disk failed."""

    def __init__(self, commit_log: CommitLog, fail: Callable[[BaseException], None]) -> None:
        self._log = commit_log
        self._health = commit_log.health
        self._fail = fail
        self._held: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush: FlushService | None = None
        self._jobs: DiskJobs | None = None
        self._freeing: DiskJobs | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        #: Why a thread ended before `stop_threads`; known once that returned.
        self.failure: Exception | None = None

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        flush_interval_ms: int,
        on_flushed: Callable[[int], None],
    ) -> None:
        """Starts the threads. `on_flushed(offset)` is called in the loop after each fdatasync."""
        self._loop = loop
        self._flush = FlushService(
            self._log,
            flush_interval_ms,
            post=self._post,
            on_flushed=on_flushed,
            on_fatal=self._fail,
        )
        self._flush.start()
        self._jobs = DiskJobs("store-jobs", self._health, post=self._post, on_fatal=self._fail)
        self._jobs.start()
        self._freeing = DiskJobs(
            "store-freeing", self._health, post=self._post, on_fatal=self._fail
        )
        self._freeing.start()

    def repeat(self, name: str, period_s: float, work: Callable[[], object]) -> None:
        """Does `work` in the loop every `period_s`, until `stop_timers` or a lasting disk error."""
        assert self._loop is not None

        def run() -> None:
            goes_on = True
            try:
                work()
            except OSError as error:
                goes_on = self._failed(error)
            finally:  # R54: also after an unexpected error
                if goes_on:
                    self.repeat(name, period_s, work)

        self._timers[name] = self._loop.call_later(period_s, run)

    def _failed(self, error: OSError) -> bool:
        """Whether the error may pass; else the broker is stopped."""
        if not self._health.passes(error):
            self._fail(error)
            return False
        self._health.note_full(error)
        return True

    def is_slicing(self, name: str) -> bool:
        """Whether the last `in_slices` of that name still runs."""
        return name in self._timers

    def in_slices(self, name: str, work: Iterator[None]) -> None:
        """Runs `work` to its first step now, then a step every 10 ms; all of it at once before
        `start` and after `stop_threads`. `stop_timers` ends it. Errors count as in `repeat`."""
        loop = self._loop
        if loop is None:
            for _ in work:
                pass
            return

        def step() -> None:
            # Before the step: it may be the last, and may begin a new one of that name.
            self._timers.pop(name, None)
            try:
                next(work)
            except StopIteration:
                return
            except OSError as error:
                self._failed(error)
                return
            self._timers[name] = loop.call_later(_SLICE_PAUSE_S, step)

        step()

    @property
    def has_threads(self) -> bool:
        """Whether jobs run in a thread."""
        return self._jobs is not None

    def run_job(self, job: Callable[[], None]) -> None:
        """Runs `job` in the disk's thread, in the order of calls, before `stop_threads` returns. If
        it raises, `fail` is called; on a full disk it is repeated, and later jobs wait."""
        if self._jobs is not None:
            self._jobs.submit(job)
            return
        self._held.append(job)
        self.retry_jobs()

    def job_in_slices(self, job: Callable[[], None]) -> Iterator[None]:
        """`run_job` as a part of `in_slices`: steps until it is done. Without threads it is done at
        once, and raises OSError."""
        if self._jobs is None:
            job()
            return
        done: list[bool] = []

        def run() -> None:
            job()
            done.append(True)

        self._jobs.submit(run)
        while not done:
            yield

    def free_space(self, job: Callable[[], None]) -> None:
        """As `run_job`, for what frees disk space and depends on no other job: it must not wait
        behind one that needs space (R45)."""
        if self._freeing is not None:
            self._freeing.submit(job)
        else:
            job()

    def retry_jobs(self) -> None:
        """Repeats what a full disk stopped; a thread does so by itself."""
        while self._held:
            job = self._held.popleft()
            try:
                job()
            except OSError as error:
                if not self._health.passes(error):
                    raise
                self._held.appendleft(job)
                self._health.note_full(error)
                return

    def in_loop(self, callback: Callable[[], None]) -> None:
        """Calls it in the loop; at once before `start` and after `stop_threads`."""
        if self._loop is None:
            callback()
        else:
            self._post(callback)

    def request_flush(self) -> None:
        """Group commit: make what is written durable now; `on_flushed` gets the new offset."""
        if self._flush is not None:
            self._flush.request()

    def stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def stop_threads(self, *, finish: bool = True) -> None:
        """Ends the threads, after a last flush and all jobs, or (`finish` False) without."""
        if self._flush is not None and self._jobs is not None and self._freeing is not None:
            self._flush.stop(flush=finish)
            # Before the jobs, which may need the space. What they still hand over stays for the
            # next start.
            self._freeing.stop(finish=finish)
            self._jobs.stop(finish=finish)
            self.failure = self._flush.failure or self._jobs.failure or self._freeing.failure
        self._flush = self._jobs = self._freeing = self._loop = None

    def _post(self, callback: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: no caller waits for this
            log.info("loop_closed_before_flush_report")


class DiskSpaceWatch:
    """Refuses puts while a write found no disk space, or above diskSpaceWarningLevelRatio."""

    def __init__(self, commit_log: CommitLog, appender: Appender, background: Background) -> None:
        self._log = commit_log
        self._health = commit_log.health
        self._appender = appender
        self._background = background
        self._watermark = ""
        self._is_probing = False
        #: Called in the loop when the disk has space again.
        self.on_space: Callable[[], None] = lambda: None
        self._health.on_full = lambda: background.in_loop(self._judge)

    @property
    def reason(self) -> str:
        """Why the disk counts as full; "" if it does not."""
        return self._health.full or self._watermark

    def set_watermark(self, reason: str) -> None:
        """The file system is (`reason`) or is not ("") too full for puts."""
        self._watermark = reason
        self._judge()

    def _judge(self) -> None:
        # Not while only a segment ahead found no space: puts fit into the present one.
        reason = self._watermark or (self._health.full if self._health.pauses else "")
        self._appender.pause(f"{DISK_FULL}: {reason}" if reason else "")

    def begin_probe(self) -> int | None:
        """Tries again what waits for disk space; returns the argument for `end_probe`, or None."""
        if not self._health.full or self._is_probing:
            return None
        self._is_probing = True
        # Before the first attempt: `end_probe` sees by it whether one of them failed.
        count = self._health.full_count
        self._appender.end_turn()
        if self._log.missing_segment is not None:
            self._background.run_job(self._log.allocate_missing)
        return count

    @property
    def is_waiting(self) -> bool:
        """Whether the last round still waits for disk space."""
        return self._is_probing

    def end_probe(self, count: int) -> None:
        """A whole round is done, in any thread: if nothing failed in it, the disk has
        space again."""
        self._background.in_loop(lambda: self._probed(count))

    def _probed(self, count: int) -> None:
        self._is_probing = False
        if self._health.full_count == count and not self._appender.has_buffered:
            self._health.space_again()
            self.on_space()
