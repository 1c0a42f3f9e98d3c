"""How far delay levels and timers are delivered: table, version and `config/delayOffset.json`.

The offset of a level is that of the next message in its queue of SCHEDULE_TOPIC_XXXX. What counts
are the progress records of the log (`broker.schedule.due_queues`), in their order; the file holds
what they said up to the checkpoint, and what a master sent of the time before this replica's log.
The timer is a member that Java leaves out; Java has `config/timercheck`, 7 i64 in 4096 bytes. It is
written for a Java broker that starts on the folder, and read where one has been: Java reads the
timer's queue from the first message that waits, and delivers again what is delivered of those
behind it.
Origin: Java `ScheduleMessageService`, whose slaves poll the file.
"""

import functools
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from batonmq.process import disk
from batonmq.process.clock import wall_ms
from batonmq.process.durable_file import SnapshotOrder, replace_file
from batonmq.protocol.bodies import DelayOffsetSerializeWrapper
from batonmq.store.config_file import ConfigManager

_TIMER_CHECK: Final = struct.Struct(">7q")
_TIMER_CHECK_SIZE: Final = 4096


class TimerProgress(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Of the messages below queue offset `next_offset` those are delivered that come up to
    (`done_ms`, `done_offset`), that one included, in the order of (due time, queue offset), and all
    below `from_offset` are."""

    done_ms: int = 0
    done_offset: int = 0
    next_offset: int = 0
    from_offset: int = 0


class _DelayFile(DelayOffsetSerializeWrapper):
    baton_timer: TimerProgress | None = None


class DelayOffsetManager(ConfigManager[_DelayFile]):
    """Delay level (from 1) -> offset. One thread only; see `ConfigManager.writes_due`."""

    def __init__(self, path: Path, *, clock_ms: Callable[[], int] = wall_ms) -> None:
        """`path` is `config/delayOffset.json`; call `load` next."""
        super().__init__(path, _DelayFile, clock_ms)
        self._check_path = path.with_name("timercheck")
        self._check_order = SnapshotOrder()
        self._table: dict[int, int] = {}
        self._timer: TimerProgress | None = None
        self._dirty = False

    def load(self) -> None:
        """Take over what is on disk. Raises CorruptLogError if nothing there can be used."""
        body = self._file.load()
        if body is not None:
            self._table, self.data_version = dict(body.offset_table), body.data_version
            self._timer = body.baton_timer
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
            data_version=self.data_version,
            offset_table=dict(self._table),
            baton_timer=self._timer,
        )

    def timer_check(self, delivered_until_ms: int = 0) -> bytes:
        """The answer of 60 and the begin of `timercheck`: time and queue offset from which on a
        Java broker reads. From 0 on it walks through three days of slots, for minutes: a master
        may know that all that was due up to `delivered_until_ms` is delivered."""
        timer, version = self.timer, self.data_version
        read_ms = min(max(timer.done_ms, delivered_until_ms), self._clock_ms())
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
        if writes and self._timer is not None:
            data = self.timer_check().ljust(_TIMER_CHECK_SIZE, b"\0")
            write = functools.partial(replace_file, self._check_path, data)
            writes.append(self._check_order.ordered(write))
        return writes

    def set_timer(self, timer: TimerProgress) -> None:
        """As `set_all`, for timers."""
        if timer != self._timer:
            self._timer = timer
            self._new_version()

    def set_all(self, offsets: Mapping[int, int]) -> None:
        """What a confirmed record of the log says: later ones replace earlier ones."""
        if any(self._table.get(level) != offset for level, offset in offsets.items()):
            self._table.update(offsets)
            self._new_version()

    def apply_from_master(self, data: bytes) -> None:
        """Take over from a 45 body what is further than the log has shown here. Raises
        RemoteProtocolError for another body."""
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
        """Take over from a 60 body, of a Java master, what is further than the log has shown."""
        found, own = _timer_of_check(data), self.timer
        if found is not None and (
            (found.next_offset, found.done_ms) > (own.next_offset, own.done_ms)
        ):
            self.set_timer(found)

    def clamp(self, end_of: Callable[[int], int], timer_end: int) -> None:
        """Lower what lies above `end_of(level)`, or above the end of the timer's queue: messages
        were cut, and others will take their offsets (R44)."""
        if self.timer.next_offset > timer_end:
            start = min(self.timer.from_offset, timer_end)
            self.set_timer(
                msgspec.structs.replace(self.timer, next_offset=timer_end, from_offset=start)
            )
        self.set_all(
            {level: end for level, offset in self._table.items() if offset > (end := end_of(level))}
        )

    def begin_anew(self) -> None:
        """The log of this replica begins anew: only what the master sends counts. Durable on
        return; raises OSError."""
        self._table.clear()
        self._timer = TimerProgress()  # which replaces what `timercheck` says, too
        self._new_version()
        for write in self.writes_due():
            write()


def _timer_of_check(data: bytes) -> TimerProgress | None:
    """What a Java broker says, in `timercheck` or by 60; None for what is no check point."""
    if len(data) < _TIMER_CHECK.size:
        return None
    read_ms, _, queue_offset, *_ = _TIMER_CHECK.unpack_from(data)
    if read_ms <= 0 or queue_offset < 0:
        return None
    return TimerProgress(done_ms=read_ms, next_offset=queue_offset)
