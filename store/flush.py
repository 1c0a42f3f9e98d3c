"""The thread that makes bytes durable: the one place where the broker waits for the disk.

Every interval, and at once for SYNC_FLUSH requests, one fdatasync covers all bytes written so far
(group commit). It also runs the jobs that bring derived data and checkpoint to disk. Nothing here
holds the GIL while the disk works. After a failed fdatasync the page cache cannot be trusted: the
thread ends, and `on_fatal` stops the broker. Origin: Java `FlushRealTimeService`,
`GroupCommitService`, `FlushConsumeQueueService`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
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
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="store-flush", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request(self) -> None:
        """Make what is written so far durable now; `on_flushed` tells when it is."""
        self._wake.set()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` in the thread, after the log was made durable. It may raise OSError."""
        self._jobs.append(job)
        self._wake.set()

    def stop(self) -> None:
        """End the thread; what was submitted before is done first."""
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
            failure = error  # `error` is gone when the callback runs
            log.critical("flush_failed error=%r", error)
            self._post(lambda: self._on_fatal(failure))

    def _flush_once(self) -> None:
        target = self._log.max_offset
        if target > self._log.flushed_offset:
            self._log.datasync_to(target)
            flushed = self._log.flushed_offset
            self._post(lambda: self._on_flushed(flushed))
        while self._jobs:
            self._jobs.popleft()()
