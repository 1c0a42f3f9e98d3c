"""How far this group has delivered what waits in its log (R30).

A master that delivers a waiting message puts a copy of it into the log, and right behind it, in
the same turn, a record of PROGRESS_TOPIC that says how far it is. So the progress of a replica is
what its log says: it is confirmed with what was delivered, cut with it, and there at a new master,
which delivers nothing twice but what was cut between the two. A Java replica keeps these records as
ordinary messages; it gets the offsets with 45. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from batonmq.protocol.system_record import decode_system_record
from batonmq.store.delay_offset import DelayOffsetManager, TimerProgress

PROGRESS_VERSION: Final = 1


class ProgressRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`delays`: delay level -> offset of the next message of its queue. `timer`: None if it is as
    it was."""

    v: int = PROGRESS_VERSION
    delays: dict[int, int] = {}
    timer: TimerProgress | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_decoder = msgspec.json.Decoder(ProgressRecord)


def decode_progress(body: bytes) -> ProgressRecord:
    """Reads a record's body. Raises RemoteProtocolError for one of an unknown version or shape."""
    return decode_system_record(_decoder, body, "progress", PROGRESS_VERSION)


class DeliveryProgress:
    """What the log says. `confirmed` is the table of what all members have; what a new master finds
    above that in its own log counts for its mastership only."""

    def __init__(self, delays: DelayOffsetManager) -> None:
        self._delays = delays
        self._inherited: dict[int, int] = {}
        self._inherited_timer: TimerProgress | None = None

    def confirmed(self, body: bytes) -> None:
        """A record of the log is on every member. Raises RemoteProtocolError."""
        record = decode_progress(body)
        self._delays.set_all(record.delays)
        if record.timer is not None:
            self._delays.set_timer(record.timer)

    def take_over(self, body: bytes) -> None:
        """A new master finds this record in its log, not confirmed yet. Raises
        RemoteProtocolError."""
        record = decode_progress(body)
        self._inherited.update(record.delays)
        self._inherited_timer = record.timer or self._inherited_timer

    def role_left(self) -> None:
        """What was not confirmed may be cut: the log decides."""
        self._inherited.clear()
        self._inherited_timer = None

    @property
    def delays(self) -> Mapping[int, int]:
        """Delay level -> where a mastership that begins now goes on."""
        return {**self._delays.table, **self._inherited}

    def is_confirmed(self, timer: TimerProgress) -> bool:
        """Whether every member has this, and what was delivered before it."""
        return timer == self._delays.timer

    @property
    def timer(self) -> TimerProgress:
        """The same for timers."""
        return self._inherited_timer or self._delays.timer
