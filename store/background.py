"""What a running store does beside its caller: threads that sync and unlink, and timers of upkeep.

Before `start` and after `stop_threads`, jobs run at once in the caller, and nothing is synced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from store.commit_log import CommitLog
from store.flush import DiskJobs, FlushService

log = logging.getLogger(__name__)


class Background:
    """`fail` is called in the loop when the disk failed."""

    def __init__(self, commit_log: CommitLog, fail: Callable[[BaseException], None]) -> None:
        self._log = commit_log
        self._fail = fail
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush: FlushService | None = None
        self._jobs: DiskJobs | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        flush_interval_ms: int,
        on_flushed: Callable[[int], None],
    ) -> None:
        """Start the threads. `on_flushed(offset)` is called in the loop after each fdatasync."""
        self._loop = loop
        self._flush = FlushService(
            self._log,
            flush_interval_ms,
            post=self._post,
            on_flushed=on_flushed,
            on_fatal=self._fail,
        )
        self._flush.start()
        self._jobs = DiskJobs(post=self._post, on_fatal=self._fail)
        self._jobs.start()

    def repeat(self, name: str, period_s: float, work: Callable[[], object]) -> None:
        """Do `work` in the loop every `period_s`, until `stop_timers`."""
        assert self._loop is not None

        def run() -> None:
            try:
                work()
            except OSError as error:
                self._fail(error)
                return
            self.repeat(name, period_s, work)

        self._timers[name] = self._loop.call_later(period_s, run)

    def run_job(self, job: Callable[[], None]) -> None:
        """Something that waits for the disk: in the thread for that, in the order of the calls, and
        done before `stop_threads` returns. If it raises there, `fail` is called."""
        if self._jobs is not None:
            self._jobs.submit(job)
        else:
            job()

    def request_flush(self) -> None:
        """Group commit: make what is written durable now; `on_flushed` tells the new offset."""
        if self._flush is not None:
            self._flush.request()

    def stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def stop_threads(self) -> None:
        """Returns when they have ended."""
        if self._flush is not None and self._jobs is not None:
            self._flush.stop()
            self._jobs.stop()
        self._flush = self._jobs = self._loop = None

    def _post(self, callback: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.info("loop_closed_before_flush_report")


__all__ = ["Background"]
