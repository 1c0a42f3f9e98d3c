"""The threads that wait for the disk, so that the loop never does.

`FlushService`: every interval, and at once for SYNC_FLUSH requests, one fdatasync covers all bytes
of the log written so far (group commit). `DiskJobs`: derived data and checkpoint, whose many small
syncs must not stand in the way of a group commit. Nothing here holds the GIL while the disk works.
After a failed sync the page cache cannot be trusted: the thread ends, and `on_fatal` stops the
broker. Origin: Java `FlushRealTimeService`, `GroupCommitService`, `FlushConsumeQueueService`.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from store.commit_log import CommitLog

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


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
        self._thread = threading.Thread(target=self._run, name="store-flush", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self) -> None:
        """Make what is written so far durable now; `on_flushed` tells when it is."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, after a last flush."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait(self._interval_s)
                self._wake.clear()
                self._flush_once()
            self._flush_once()
        except Exception as error:
            _report(error, self._post, self._on_fatal)

    def _flush_once(self) -> None:
        target = self._log.max_offset
        if target > self._log.flushed_offset:
            self._log.datasync_to(target)
            flushed = self._log.flushed_offset
            self._post(lambda: self._on_flushed(flushed))


class DiskJobs:
    """Runs jobs one after another in a thread of its own; one that raises is fatal."""

    def __init__(self, *, post: Post, on_fatal: Callable[[BaseException], None]) -> None:
        self._post = post
        self._on_fatal = on_fatal
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-jobs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread; what was submitted before is done first."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except Exception as error:
            _report(error, self._post, self._on_fatal)


def _report(error: Exception, post: Post, on_fatal: Callable[[BaseException], None]) -> None:
    log.critical("flush_failed error=%r", error)
    post(lambda: on_fatal(error))
