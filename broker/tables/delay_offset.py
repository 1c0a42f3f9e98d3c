"""The progress of delay levels and timers, and their files.

`config/delayOffset.json`: delay level to the offset of the next message to deliver in its queue of
SCHEDULE_TOPIC_XXXX, and the progress of the timers. Progress records of the log change them
(`broker.schedule.delivery_progress`); the file has the result up to the checkpoint, and what a
master sent about the time before this replica's log. `config/timercheck` (7 i64 in 4096 bytes) is
Java's file for timers. Origin: Java `ScheduleMessageService`, whose slaves poll the file.
"""

import functools
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from batonmq.broker.tables.config_file import ConfigManager
from batonmq.protocol.bodies import DelayOffsetSerializeWrapper
from batonmq.runtime import disk
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.durable_file import SnapshotOrder, replace_file

_TIMER_CHECK: Final = struct.Struct(">7q")
_TIMER_CHECK_SIZE: Final = 4096


class TimerProgress(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Which messages of the timers' queue are delivered, in the order of (due time, queue offset):

    - all below `from_offset`;
    - of those below `next_offset` all up to (`done_ms`, `done_offset`), inclusive;
    - of those below `early_to` also all up to (`early_ms`, `early_offset`): they were delivered by
      a clock that was ahead, and the present clock has not reached that time.
    """

    done_ms: int = 0
    done_offset: int = 0
    next_offset: int = 0
    from_offset: int = 0
    early_ms: int = 0
    early_offset: int = 0
    early_to: int = 0


class _DelayFile(DelayOffsetSerializeWrapper):
    baton_timer: TimerProgress | None = None


class DelayOffsetManager(ConfigManager[_DelayFile]):
    """Delay level (from 1) to offset. One thread only; see `ConfigManager.writes_due`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _DelayFile)
        self._check_path = path.with_name("timercheck")
        self._check_order = SnapshotOrder()
        self._table: dict[int, int] = {}
        self._timer: TimerProgress | None = None
        self._dirty = False

    def _take_loaded(self, body: _DelayFile) -> None:
        self._table, self.data_version = dict(body.offset_table), body.data_version
        self._timer = body.baton_timer

    def load(self) -> None:
        super().load()
        # It is written from our own progress, so it counts only in a folder of a Java broker.
        if self._timer is None and self._check_path.exists():
            self._timer = _timer_of_check(disk.read_bytes(self._check_path))

    @property
    def table(self) -> Mapping[int, int]:
        """The whole table; read only."""
        return self._table

    @property
    def timer(self) -> TimerProgress:
        return self._timer or TimerProgress()

    def wrapper(self) -> _DelayFile:
        return _DelayFile(
            data_version=self.data_version, offset_table=dict(self._table), baton_timer=self._timer
        )

    def timer_check(self, delivered_until_ms: int = 0) -> bytes:
        """The reply to GET_TIMER_CHECK_POINT (60) and the head of `timercheck`: the time and queue
        offset from which a Java broker reads. `delivered_until_ms`: on a master, the time up to
        which all that was due is delivered."""
        timer, version = self.timer, self.data_version
        # From time 0 a Java broker would walk through three days of slots, for minutes. Not above
        # now: a Java broker skips all that is due before this time.
        read_ms = min(max(timer.done_ms, delivered_until_ms), wall_ms())
        return _TIMER_CHECK.pack(
            read_ms,
            0,
            timer.from_offset,
            timer.from_offset,
            version.state_version,
            version.timestamp,
            version.counter,
        )

    def writes_due(self) -> list[Callable[[], None]]:
        writes = super().writes_due()
        # For a Java broker that starts in this folder.
        if writes and self._timer is not None:
            data = self.timer_check().ljust(_TIMER_CHECK_SIZE, b"\0")
            write = functools.partial(replace_file, self._check_path, data)
            writes.append(self._check_order.ordered(write))
        return writes

    def set_timer(self, timer: TimerProgress) -> None:
        """Sets the progress of timers, as `set_all` does that of delays."""
        if timer != self._timer:
            self._timer = timer
            self._new_version()

    def set_all(self, offsets: Mapping[int, int]) -> None:
        """Takes what a confirmed record says; a later record replaces an earlier one."""
        if any(self._table.get(level) != offset for level, offset in offsets.items()):
            self._table.update(offsets)
            self._new_version()

    def apply_from_master(self, data: bytes) -> None:
        """Takes from a reply to GET_ALL_DELAY_OFFSET (45) what is above the own progress, which the
        log has shown. Raises RemoteProtocolError for another body."""
        body = _DelayFile.decode(data)
        fetched = body.offset_table
        if body.baton_timer is not None and body.baton_timer.next_offset > self.timer.next_offset:
            self.set_timer(body.baton_timer)
        self.set_all(
            {
                level: offset
                for level, offset in fetched.items()
                if offset > self._table.get(level, 0)
            }
        )

    def apply_timer_check(self, data: bytes) -> None:
        """The same from a Java master's reply to GET_TIMER_CHECK_POINT (60)."""
        found, own = _timer_of_check(data), self.timer
        if found is not None and (
            (found.next_offset, found.done_ms) > (own.next_offset, own.done_ms)
        ):
            self.set_timer(found)

    def clamp(self, end_of: Callable[[int], int], timer_end: int) -> None:
        """Lowers what is above `end_of(level)`, or above the end of the timers' queue: these
        messages were cut, and others will take their offsets (R44)."""
        if self.timer.next_offset > timer_end:
            start = min(self.timer.from_offset, timer_end)
            self.set_timer(
                msgspec.structs.replace(
                    self.timer,
                    next_offset=timer_end,
                    from_offset=start,
                    early_to=min(self.timer.early_to, timer_end),
                )
            )
        self.set_all(
            {level: end for level, offset in self._table.items() if offset > (end := end_of(level))}
        )

    def clear_for_new_log(self) -> None:
        """This replica begins an empty log: only what the master sends counts. Durable on return;
        raises OSError."""
        self._table.clear()
        self._timer = TimerProgress()  # which replaces what `timercheck` says, too
        self._new_version()
        self.write()


def _timer_of_check(data: bytes) -> TimerProgress | None:
    """The progress in a Java broker's `timercheck` or GET_TIMER_CHECK_POINT (60) reply; None if
    that is no check point."""
    if len(data) < _TIMER_CHECK.size:
        return None
    read_ms, _, queue_offset, *_ = _TIMER_CHECK.unpack_from(data)
    if read_ms <= 0 or queue_offset < 0:
        return None
    return TimerProgress(done_ms=read_ms, next_offset=queue_offset)
