"""What POP writes into the log: records of one queue of rmq_sys_BATON_POP.

A record says what was popped, acknowledged or put off. What is in flight is what the records say in
their order, so it is confirmed, cut and inherited like the messages themselves (R30). Java keeps
check points and acks as timed messages of rmq_sys_REVIVE_LOG, joins them when they are due, and
answers before they are safe. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.system_record import decode_system_record

POP_VERSION: Final = 1
NO_POSITION: Final = -1

Key = tuple[str, str, int]
"""Group, topic, queue id: a topic in which POP keeps failed messages is one of its own."""


class Popped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages that a consumer has until `due` (ms, wall clock).

    `next`: where the group goes on in this queue; NO_POSITION where only the time is another.
    `last_phy`: the physical offset of the last of them: a queue that was cut, or deleted and made
    again, has another message there. `order`: the queue is blocked until they are acknowledged.
    """

    key: Key
    pop_time: int
    due: int
    offsets: list[int]
    last_phy: int
    next: int = NO_POSITION
    order: bool = False
    attempt: str = ""


class Acked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages that are done with: acknowledged, or given to the group again elsewhere."""

    key: Key
    pop_time: int
    offsets: list[int]


class PutOff(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of an orderly pop comes again at `visible`."""

    key: Key
    pop_time: int
    offset: int
    visible: int


class PopRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`reset`: queues whose position was set by an operator: what was popped before says nothing
    about it any more."""

    v: int = POP_VERSION
    popped: list[Popped] = []
    acked: list[Acked] = []
    put_off: list[PutOff] = []
    reset: list[Key] = []

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_decoder = msgspec.json.Decoder(PopRecord)


def decode_pop_record(body: bytes) -> PopRecord:
    """Reads a record's body. Raises RemoteProtocolError for one of an unknown version or shape."""
    record = decode_system_record(_decoder, body, "POP", POP_VERSION)
    if not all(one.offsets for one in record.popped):
        raise RemoteProtocolError("POP record: popped without offsets")
    return record
