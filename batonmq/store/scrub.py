"""Reads this broker's commit log in the background, so that damage is found before a reader meets
it (R24, G8).

One pass reads every record below confirmOffset once, both its CRCs, as `protocol.records` defines
them. `check_slice` runs in the disk's thread and reads by `pread`: an unreadable page is an error
there, in the map it is SIGBUS. What it finds is checked again in the loop, because the log may have
been cut or have expired meanwhile. The file `scrub` keeps the place for a restart. Bytes in the
kernel's cache are read from there, so the disk itself is read for old segments. Java has no
counterpart.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.records.codec import scan_in_file
from batonmq.protocol.records.common import quick_size
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.runtime import disk
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.durable_file import replace_file
from batonmq.store.background import Background
from batonmq.store.commit_log import CommitLog
from batonmq.store.config import StoreConfig
from batonmq.store.dispatch import LogDispatcher
from batonmq.store.log_scan import bulk_pays, fault_of_record, is_record_boundary
from batonmq.store.slave_log import LogTrust

log = logging.getLogger(__name__)

SLICE_BYTES: Final = 256 << 10
_BULK_BYTES: Final = 32 << 10
_RECORD_BYTES_MAX: Final = 64 << 20  # no record is as long: a frame is shorter
_FIRST_MS: Final = 10_000  # a start has other work first
_PAUSE_MS: Final = 60_000  # between two passes, or a short log would be read all the time
_KEEP_MS: Final = 10_000
_AGAIN_MS: Final = 1_000
_SHORTEST_S: Final = 0.005


class Checked(NamedTuple):
    """The records of [begin, end) are good. `what`: what is wrong with the record at `end`, "" for
    nothing. `unreadable`: the disk could not read it."""

    begin: int
    end: int
    what: str = ""
    unreadable: bool = False


def check_records(view: bytes, start: int, segment_end: int) -> Checked:
    """Checks the records of `view`, which begins at log offset `start` with one, up to the first
    that `view` cuts off or that is bad."""
    data, offset = memoryview(view), start
    while (position := offset - start) < len(data):
        if bulk_pays(len(data) - position, _BULK_BYTES):
            from batonmq.protocol.records.columns import checked_end

            offset = checked_end(data, start, offset, segment_end)
            position = offset - start
        if size := quick_size(data, position, segment_end - offset, offset):
            offset += size
            continue
        try:
            head = scan_in_file(data, position, offset, segment_end, check_crc=True)
        except CorruptRecord as error:
            return Checked(start, offset, error.what)
        if head is None:
            break
        offset += head.size
    return Checked(start, offset)


def check_slice(path: Path, segment_start: int, segment_end: int, begin: int, end: int) -> Checked:
    """Reads [begin, end) of the log, which lies in the segment file `path`, and at least one whole
    record. Raises FileNotFoundError if the segment has expired."""
    fd = disk.open(path, os.O_RDONLY)
    try:
        size = min(SLICE_BYTES, end - begin)
        while True:
            try:
                data = disk.pread(fd, size, begin - segment_start)
            except OSError as error:
                what = f"the disk cannot read {size} bytes at {begin}: {error}"
                return Checked(begin, begin, what, unreadable=True)
            checked = check_records(data, begin, segment_end)
            if checked.what or checked.end > begin:
                return checked
            # A record longer than a slice, or a size that is wrong.
            if size == end - begin or size >= _RECORD_BYTES_MAX:
                return Checked(begin, begin, RecordFault.NOT_WHOLE.text())
            size = min(4 * size, end - begin)
    finally:
        disk.close(fd)


class Scrub:
    """`on_found` is called in the loop with damage below confirmOffset. It makes the log suspect,
    now or a little later; nothing more is read until the log is trusted again."""

    def __init__(
        self,
        config: StoreConfig,
        commit_log: CommitLog,
        dispatcher: LogDispatcher,
        background: Background,
        trust: LogTrust,
        on_found: Callable[[CorruptLogError], None],
    ) -> None:
        self._config = config
        self._log = commit_log
        self._dispatcher = dispatcher
        self._background = background
        self._trust = trust
        self._path = config.root / "scrub"
        self._is_reading = False
        self._is_placed = False  # whether `offset` is known to be a record boundary
        self._not_before_ms = 0
        self._keep_at_ms = 0
        self._pass_end = 0  # what is confirmed when a pass begins; 0: none has begun
        self._notes = 0  # `trust.notes` when damage was found: it grows when the log is suspect
        self._cuts = commit_log.cuts
        #: The next offset to read.
        self.offset = 0
        self.bytes_total = 0
        self.passes = 0
        self.found_total = 0
        #: What was found last, until the log is trusted again.
        self.found: CorruptLogError | None = None
        #: When the last whole pass ended, wall clock; 0: not yet.
        self.passed_at_ms = 0
        self._on_found = on_found

    def start(self) -> None:
        """Begins, unless `scrubBytesPerSecond` is 0."""
        rate = self._config.scrub_bytes_per_second
        if not rate:
            return
        self._load()
        self._not_before_ms = boot_ms() + _FIRST_MS
        self._background.repeat("scrub", max(_SHORTEST_S, SLICE_BYTES / rate), self.step)

    def step(self) -> None:
        """Begins to read the next slice if it is due, in the disk's thread."""
        now_ms = boot_ms()
        if self._is_reading or now_ms < self._not_before_ms or self._waits():
            return
        self._find_place(self._dispatcher.offset)
        begin, segment = self.offset, self._log.segment_at(self.offset)
        if segment is None or begin >= self._pass_end:
            self._pass_ended(now_ms)
            return
        end = min(self._pass_end, segment.end_offset)
        keeps = now_ms >= self._keep_at_ms
        if keeps:
            self._keep_at_ms = now_ms + _KEEP_MS
        path, start, segment_end = segment.path, segment.start_offset, segment.end_offset
        self._is_reading = True

        def work() -> None:
            checked: Checked | None = None
            try:
                if keeps:
                    self._keep(begin)
                checked = check_slice(path, start, segment_end, begin, end)
            except OSError as error:  # it has expired, or descriptors are short
                log.info("scrub_slice_skipped offset=%d reason=%s", begin, error)
            self._background.in_loop(lambda: self._read(checked))

        self._background.run_job(work)

    def _waits(self) -> bool:
        """Whether damage is known: nothing more is read before the log is trusted again."""
        if self._trust.damage is not None:
            return True
        if self.found is not None and self._trust.notes == self._notes:
            return True  # a master hands over first
        self.found = None
        return False

    def _find_place(self, confirmed: int) -> None:
        commit_log = self._log
        if self._cuts != commit_log.cuts:
            self._cuts, self._is_placed = commit_log.cuts, False
        if not commit_log.min_offset <= self.offset <= confirmed:
            self._begin_pass()
        elif not self._is_placed:
            # The place is of an earlier process, or the log was cut: every segment begins with a
            # record.
            if not is_record_boundary(commit_log, self.offset, confirmed):
                self.offset -= self.offset % commit_log.segment_size
            self._is_placed = True
        self._pass_end = min(self._pass_end or confirmed, confirmed)

    def _begin_pass(self) -> None:
        self.offset, self._is_placed = self._log.min_offset, True
        self._pass_end = 0

    def _pass_ended(self, now_ms: int) -> None:
        self.passes += 1
        self.passed_at_ms = wall_ms()
        log.info("scrub_passed end_offset=%d found=%d", self.offset, self.found_total)
        self._not_before_ms = now_ms + _PAUSE_MS
        self._keep_at_ms = 0
        self._begin_pass()

    def _read(self, checked: Checked | None) -> None:
        """In the loop: a slice was read."""
        self._is_reading = False
        if checked is None:
            self._not_before_ms = boot_ms() + _AGAIN_MS
            return
        if self._cuts != self._log.cuts or checked.begin < self._log.min_offset:
            return  # these bytes have gone meanwhile
        self.bytes_total += checked.end - checked.begin
        self.offset = checked.end
        if not checked.what:
            return
        error = self._log.damage(checked.end, checked.what)
        if not checked.unreadable:  # a second look would end the process by SIGBUS
            seen = fault_of_record(self._log, checked.end)
            if seen is None:
                return
            error = seen
        self._report(error)

    def note_read(self, error: CorruptLogError) -> None:
        """A reader met a bad record: it counts as found here."""
        if not self._waits():
            self._report(error)

    def _report(self, error: CorruptLogError) -> None:
        self.found_total += 1
        self.found, self._notes = error, self._trust.notes
        log.error("damage_found reason=%s", error)
        self._on_found(error)

    # The place, durable.

    def _load(self) -> None:
        try:
            place = json.loads(disk.read_bytes(self._path))
            if place["logId"] == self._log.log_id:
                self.offset = int(place["offset"])
                self.passed_at_ms = int(place["passedAtMs"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("scrub_begins_again path=%s reason=%s", self._path, error)

    def _keep(self, offset: int) -> None:
        """In the disk's thread. If it fails, a restart reads a little more again."""
        place = {"logId": self._log.log_id, "offset": offset, "passedAtMs": self.passed_at_ms}
        with suppress(OSError):
            replace_file(self._path, json.dumps(place).encode())
