"""The audit log: one line of JSON for each change by an admin, and for each refusal.

A thread writes it; the file is rotated. Refusals of one user, code and host are written once a
second at most, all refusals FULL_RATE times; `suppressed` says how many were left out before.
"""

import json
import logging
import os
import queue
import sys
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Final

from batonmq.protocol.codes import request_name
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.durable_file import shift_files
from batonmq.runtime.log_lines import UNLIMITED

log = logging.getLogger(__name__)

FILE_BYTES: Final = 16 << 20
FILES: Final = 5
WAITING_MAX: Final = 10_000
RETRY_S: Final = 1.0
FULL_RATE: Final = 100
"""Refusals a second."""
TEXT_MAX: Final = 256


class AuditLog:
    """`path` None: the lines go to the log of the process."""

    def __init__(self, path: Path | None) -> None:
        self._lines = logging.Logger("audit", logging.INFO)
        self._listener: QueueListener | None = None
        self._second = 0
        self._seen: set[tuple[str, int | str, str]] = set()
        self._suppressed = 0
        self._file: _PrivateFile | None = None
        if path is None:
            self._lines = log
            return
        file = _PrivateFile(path, maxBytes=FILE_BYTES, backupCount=FILES, delay=True)
        self._file = file
        file.open_now()
        file.setFormatter(logging.Formatter("%(message)s"))
        waiting: queue.Queue[logging.LogRecord] = queue.Queue(WAITING_MAX)
        self._lines.addHandler(_WaitingLines(waiting))
        self._listener = _Writer(waiting, file)
        self._listener.start()

    @property
    def failure(self) -> str:
        """Why the newest line is not in the file; "" if it is."""
        return self._file.failure if self._file is not None else ""

    def refused(
        self,
        user: str,
        peer: str,
        code: int | str,
        resource: str,
        why: str,
        *,
        passes: bool = False,
    ) -> None:
        """`code`: a request code, or the name of what is no request. `passes`: it is logged and
        served (`audit_only`)."""
        second, key = boot_ms() // 1000, (user[:TEXT_MAX], code, peer.rpartition(":")[0])
        if second != self._second:
            self._second = second
            self._seen.clear()
        if key in self._seen or len(self._seen) >= FULL_RATE:
            self._suppressed += 1
            return
        self._seen.add(key)
        suppressed, self._suppressed = self._suppressed, 0
        self._write(user, peer, code, resource, f"{'would be ' * passes}refused: {why}", suppressed)

    def changed(self, user: str, peer: str, code: int, resource: str, result: str) -> None:
        self._write(user, peer, code, resource, result, 0)

    def _write(
        self, user: str, peer: str, code: int | str, resource: str, result: str, suppressed: int
    ) -> None:
        line = {
            "time": wall_ms(),
            "user": user[:TEXT_MAX],
            "peer": peer,
            "request": code if isinstance(code, str) else request_name(code),
            "resource": resource[:TEXT_MAX],
            "result": result[: 2 * TEXT_MAX],
        }
        if suppressed:
            line["suppressed"] = suppressed
        # ASCII: what a stranger sends cannot end the line, nor hide in it.
        self._lines.info("%s", json.dumps(line), extra=UNLIMITED)

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
        if self._listener is not None:
            self._listener.stop()
            for file in self._listener.handlers:
                try:
                    file.close()
                except OSError as error:  # a full disk must not disturb the end of the process
                    log.error("audit_not_closed reason=%r", disk.described(error))
            self._listener = None


class _PrivateFile(RotatingFileHandler):
    """Of mode 0600, also after a rotation. `failure`: why the newest line is not in it."""

    failure = ""

    def open_now(self) -> None:
        """Reports at the start, not at the first line, that it cannot be opened."""
        try:
            self.stream = self._open()
        except OSError as error:
            self.failure = disk.described(error)
            log.error("audit_log_not_open reason=%r", self.failure)

    def try_again(self) -> None:
        try:
            if self.stream is None:
                self.stream = self._open()
            self.flush()  # lines that the disk refused are still in its buffer
        except OSError as error:
            self.failure = disk.described(error)

    def flush(self) -> None:
        super().flush()
        self.failure = ""

    def doRollover(self) -> None:
        stream, self.stream = self.stream, None
        try:
            if stream is not None:
                stream.close()
            # First the one that grows: refused for it alone, each line would drop an older one.
            if not os.path.exists(f"{self.baseFilename}.0"):
                os.rename(self.baseFilename, f"{self.baseFilename}.0")
            shift_files(self.baseFilename, self.backupCount)
        except OSError as error:  # better too large than lost
            log.error("audit_log_not_rotated reason=%r", disk.described(error))

    def _open(self) -> TextIOWrapper:
        disk.makedirs(os.path.dirname(self.baseFilename))
        return open(self.baseFilename, self.mode, encoding="ascii", opener=_private)  # type: ignore[return-value]

    def handleError(self, record: logging.LogRecord) -> None:
        # Instead of a trace on standard error for each line while the disk is full.
        why = self.failure = disk.described(sys.exception() or OSError())
        log.error("audit_line_lost reason=%r line=%s", why, record.getMessage(), extra=UNLIMITED)


class _Writer(QueueListener):
    """The thread. A file that failed is tried again every second, without a new line, too."""

    def __init__(self, waiting: queue.Queue[logging.LogRecord], file: _PrivateFile) -> None:
        super().__init__(waiting, file)
        self._waiting, self._file = waiting, file

    def dequeue(self, block: bool) -> logging.LogRecord:
        while True:
            try:
                return self._waiting.get(block, RETRY_S if self._file.failure else None)
            except queue.Empty:
                self._file.try_again()


def _private(path: str, flags: int) -> int:
    # The open of a named pipe without a reader would wait, and no process would start.
    fd = os.open(path, flags | os.O_NONBLOCK, 0o600)
    os.set_blocking(fd, True)
    return fd


class _WaitingLines(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:  # the disk does not keep up: a request must not wait for it
            log.error("audit_line_lost line=%s", record.getMessage(), extra=UNLIMITED)
