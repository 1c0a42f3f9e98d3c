"""Which parts of a record differ, and what makes one message the same as another. Free of Spark."""

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from batonmq.protocol.layout import record_layout
from batonmq.protocol.message import MessageExt
from batonmq.protocol.record import decode_record
from batonmq.spark.audit.keys import own_key
from batonmq.spark.read.record_columns import Int64s, Records

HEADER: Final = "header"
BODY: Final = "body"
PROPERTIES: Final = "properties"
_NAMES: Final = {
    "body_crc": "body CRC",
    "born_ms": "born time",
    "store_ms": "store time",
    "prepared": "prepared transaction offset",
}
"""What people read for a field; others have their own name with spaces."""


@dataclass(frozen=True, slots=True)
class Message:
    """One record by itself: its bytes, its columns (one row), and the message made of it."""

    raw: bytes
    records: Records
    ext: MessageExt

    @property
    def offset(self) -> int:
        return self.ext.physical_offset

    @property
    def end(self) -> int:
        return self.offset + len(self.raw)

    @property
    def unique_key(self) -> str | None:
        at = int(self.records.properties_at[0] - self.records.start[0])
        return own_key(self.raw[at:])

    @property
    def identity(self) -> int:
        """The same number for copies of one message, wherever they lie: by its unique key, or,
        without one, by what the producer gave it.
        """
        sign = hashlib.blake2b(self.ext.topic.encode(), digest_size=8)
        if self.unique_key is not None:
            sign.update(b"\0" + self.unique_key.encode())
        else:
            at = int(self.records.body_at[0] - self.records.start[0])
            body = self.raw[at : at + int(self.records.body_length[0])]
            sign.update(b"\1%d\0" % self.ext.born_timestamp + body)
        return int.from_bytes(sign.digest(), "big", signed=True)


def message_at(window: bytes, records: Records) -> Message:
    """The message of a single row of records of a window."""
    start, size = int(records.start[0]), int(records.size[0])
    raw = window[start : start + size]
    return Message(raw, records, decode_record(raw, read_body=False))


@dataclass(frozen=True, slots=True)
class Difference:
    """Where other bytes differ from a message's: `parts` of header, body, properties."""

    count: int
    first: int
    parts: tuple[str, ...]
    names: tuple[str, ...]

    def text(self, offset: int) -> str:
        what = "1 byte differs" if self.count == 1 else f"{self.count} bytes differ"
        return f"{what} in {', '.join(self.names)}, the first at {offset + self.first}"


def differences(message: Message, other: bytes) -> Difference:
    """What differs between a message's bytes and as many others; missing ones differ, too."""
    mine = np.frombuffer(message.raw, np.uint8)
    theirs = np.frombuffer(other[: len(message.raw)], np.uint8)
    marks = np.ones(len(mine), np.bool_)
    marks[: len(theirs)] = mine[: len(theirs)] != theirs
    at = np.flatnonzero(marks)
    parts: list[str] = []
    names: list[str] = []
    for name, part, begin, end in _spans(message.records):
        if _any_in(at, begin, end):
            names.append(name)
            if part not in parts:
                parts.append(part)
    return Difference(len(at), int(at[0]) if len(at) else 0, tuple(parts), tuple(names))


def _spans(records: Records) -> list[tuple[str, str, int, int]]:
    start = int(records.start[0])
    body_at = int(records.body_at[0]) - start
    topic_at = body_at + int(records.body_length[0])
    properties_at = int(records.properties_at[0]) - start
    layout = record_layout(int(records.born_host_length[0]), int(records.store_host_length[0]))
    heads = [(_NAMES.get(name, name.replace("_", " ")), at) for name, at in layout.at.items()]
    heads.append(("", body_at))
    spans = [(name, HEADER, begin, end) for (name, begin), (_, end) in pairwise(heads)]
    topic_end = topic_at + (properties_at - 2 - topic_at)
    return [
        *spans,
        ("body", BODY, body_at, topic_at),
        ("topic", HEADER, topic_at, topic_end),
        ("properties length", HEADER, topic_end, properties_at),
        ("properties", PROPERTIES, properties_at, int(records.size[0])),
    ]


def _any_in(at: Int64s, begin: int, end: int) -> bool:
    return bool(np.searchsorted(at, begin) < np.searchsorted(at, end))
