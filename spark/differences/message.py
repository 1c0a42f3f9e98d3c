"""One record by itself: what makes it the same as another, and what differs. Free of Spark."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from batonmq.protocol.layout import record_layout
from batonmq.protocol.message import MessageExt
from batonmq.protocol.properties import UNIQ_KEY
from batonmq.protocol.records.codec import decode_record
from batonmq.protocol.records.columns import Records

HEADER: Final = "header"
_NAMES: Final = {
    "body_crc": "body CRC",
    "born_ms": "born time",
    "store_ms": "store time",
    "prepared": "prepared transaction offset",
}
"""What people read for a field; others have their own name with spaces."""


@dataclass(frozen=True, slots=True)
class RecordMessage:
    """A record: its window and the log offset of that, its columns (one row), the message of it."""

    window: bytes
    base: int
    records: Records
    raw: bytes
    ext: MessageExt

    @property
    def offset(self) -> int:
        return self.ext.physical_offset

    @property
    def end(self) -> int:
        return self.offset + len(self.raw)

    def _at(self, place: str) -> int:
        return int(getattr(self.records, place)[0] - self.records.start[0])

    @property
    def unique_key(self) -> str | None:
        """Its own: a message of a batch has that of the batch behind it."""
        for pair in self.raw[self._at("properties_at") :].split(b"\x02"):
            name, _, value = pair.partition(b"\x01")
            if value and name == UNIQ_KEY.encode():
                return value.decode("utf-8", "replace")
        return None

    @property
    def identity(self) -> int:
        """The same number for copies of one message, wherever they lie: by its unique key, or,
        without one, by what the producer gave it.
        """
        sign = hashlib.blake2b(self.ext.topic.encode(), digest_size=8)
        if self.unique_key is not None:
            sign.update(b"\0" + self.unique_key.encode())
        else:
            body_at = self._at("body_at")
            body = self.raw[body_at : body_at + int(self.records.body_length[0])]
            sign.update(b"\1%d\0" % self.ext.born_timestamp + body)
        return int.from_bytes(sign.digest(), "big", signed=True)

    def differences(self, other: bytes) -> tuple[int, str, str]:
        """(count, text, parts): what differs between its bytes and as many others, of which
        missing ones differ, too; parts are of header, body, properties.
        """
        mine = np.frombuffer(self.raw, np.uint8)
        theirs = np.frombuffer(other[: len(mine)], np.uint8)
        marks = np.ones(len(mine), np.bool_)
        marks[: len(theirs)] = mine[: len(theirs)] != theirs
        at = np.flatnonzero(marks)
        names = [(n, part) for n, part, begin, end in self._spans() if marks[begin:end].any()]
        what = "1 byte differs" if len(at) == 1 else f"{len(at)} bytes differ"
        first = self.offset + (int(at[0]) if len(at) else 0)
        text = f"{what} in {', '.join(name for name, _ in names)}, the first at {first}"
        return len(at), text, ", ".join(dict.fromkeys(part for _, part in names))

    def _spans(self) -> list[tuple[str, str, int, int]]:
        """(name, part, begin, end) of each field."""
        hosts = int(self.records.born_host_length[0]), int(self.records.store_host_length[0])
        fields = [(n, HEADER, at) for n, at in record_layout(*hosts).at.items()]
        topic_at = self._at("body_at") + int(self.records.body_length[0])
        fields += [
            ("body", "body", self._at("body_at")),
            ("topic", HEADER, topic_at),
            ("properties length", HEADER, self._at("properties_at") - 2),
            ("properties", "properties", self._at("properties_at")),
            ("", "", len(self.raw)),
        ]
        return [
            (_NAMES.get(name, name.replace("_", " ")), part, begin, end)
            for (name, part, begin), (_, _, end) in pairwise(fields)
        ]


def message_at(window: bytes, base: int, records: Records) -> RecordMessage:
    """The message of a single row of records of a window."""
    start, size = int(records.start[0]), int(records.size[0])
    raw = window[start : start + size]
    return RecordMessage(window, base, records, raw, decode_record(raw, read_body=False))
