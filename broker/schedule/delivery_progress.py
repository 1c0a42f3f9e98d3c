"""How far delayed and timed messages are delivered (R30). Pure.

A master that delivers messages puts copies into the log, and after them, in the same turn, a record
of PROGRESS_TOPIC with its progress. So progress is confirmed, cut and inherited together with the
messages. A new master delivers a message twice only if its log was cut between the two. A Java
replica stores these records as ordinary messages, and gets the offsets by GET_ALL_DELAY_OFFSET
(45).
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

from batonmq.broker.tables.delay_offset import DelayOffsetManager, TimerProgress
from batonmq.protocol.system_record import SystemRecord

_NO_DELAYS: Final[Mapping[int, int]] = {}


class ProgressRecord(SystemRecord, frozen=True, kw_only=True, rename="camel"):
    """`delays`: delay level -> next offset in its queue. `timer`: None if unchanged."""

    KIND: ClassVar = "progress"
    delays: dict[int, int] = msgspec.field(default_factory=dict)
    timer: TimerProgress | None = None


class DeliveryProgress:
    """How far messages are delivered: what is confirmed (in the table of delays), what unconfirmed
    records of this master's log say, and what no record says yet (`owed`). A master that is elected
    again continues after all of these."""

    def __init__(self, delays: DelayOffsetManager) -> None:
        self._delays = delays
        self._unconfirmed: dict[int, tuple[int, int]] = {}  # level -> offset, end of the record
        self._unconfirmed_timer: tuple[TimerProgress, int] | None = None
        self._owed: dict[int, int] = {}
        self._owed_timer: TimerProgress | None = None

    def apply_record(self, body: bytes, end: int) -> None:
        """The record that ends at `end` of the log is confirmed. Raises RemoteProtocolError."""
        record = ProgressRecord.decode(body)
        self._delays.set_all(record.delays)
        for level in record.delays:
            if level in self._unconfirmed and self._unconfirmed[level][1] <= end:
                del self._unconfirmed[level]  # confirmed now, so the table has it (R55)
        if record.timer is not None:
            self._delays.set_timer(record.timer)
            if self._unconfirmed_timer is not None and self._unconfirmed_timer[1] <= end:
                self._unconfirmed_timer = None

    own_record_confirmed = apply_record

    def take_over_record(self, body: bytes, end: int) -> None:
        """A new master finds this unconfirmed record in its log. Raises RemoteProtocolError."""
        self._note_unconfirmed(ProgressRecord.decode(body), end)

    def delivered(
        self, delays: Mapping[int, int] = _NO_DELAYS, timer: TimerProgress | None = None
    ) -> None:
        """This master has delivered everything up to there."""
        self._owed.update(delays)
        self._owed_timer = timer or self._owed_timer

    @property
    def owed(self) -> ProgressRecord | None:
        """The record that is still to be put; None if the log has everything."""
        if not self._owed and self._owed_timer is None:
            return None
        return ProgressRecord(delays=dict(self._owed), timer=self._owed_timer)

    def noted(self, record: ProgressRecord, end: int) -> None:
        """The record from `owed` is put and ends at `end` of the log."""
        self._note_unconfirmed(record, end)
        self._owed.clear()
        self._owed_timer = None

    def _note_unconfirmed(self, record: ProgressRecord, end: int) -> None:
        self._unconfirmed.update((level, (at, end)) for level, at in record.delays.items())
        if record.timer is not None:
            self._unconfirmed_timer = record.timer, end

    def role_left(self) -> None:
        """Unconfirmed records may be cut: the log decides."""
        self._unconfirmed.clear()
        self._unconfirmed_timer = None
        self._owed.clear()
        self._owed_timer = None

    @property
    def delays(self) -> Mapping[int, int]:
        """Delay level -> where a mastership that begins now continues."""
        unconfirmed = {level: at for level, (at, _) in self._unconfirmed.items()}
        return {**self._delays.table, **unconfirmed, **self._owed}

    @property
    def timer(self) -> TimerProgress:
        """Where a mastership that begins now continues with timers."""
        if self._owed_timer is not None:
            return self._owed_timer
        if self._unconfirmed_timer is not None:
            return self._unconfirmed_timer[0]
        return self._delays.timer

    def is_confirmed(self, timer: TimerProgress) -> bool:
        """Whether this progress is confirmed, and with it everything delivered before."""
        return timer == self._delays.timer
