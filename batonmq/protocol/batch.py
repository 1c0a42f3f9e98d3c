"""The body of a batch send (SEND_BATCH_MESSAGE, 320). Each message: i32 total, i32 0 (magic), i32 0
(body CRC), i32 flag, i32 bodyLen, body, i16 propsLen, props. The broker stores each as a record,
with consecutive queue offsets. Origin: Java `MessageDecoder.encodeMessages`,
`CommitLog.asyncPutMessages`."""

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.properties import PROPERTIES_SIZE_MAX

MESSAGES_MAX: Final = 20_000
"""The limit, because a batch is put into the log in one turn of the loop, at less than 1 µs a
message (R58)."""
_HEAD: Final = struct.Struct(">iiiii")
_I16: Final = struct.Struct(">h")


class BatchItem(NamedTuple):
    """Body, raw property string and user flag of one message."""

    body: bytes
    properties: bytes
    flag: int = 0


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """Raises ValueError for properties longer than 32767 bytes."""
    parts: list[bytes] = []
    for item in items:
        if len(item.properties) > PROPERTIES_SIZE_MAX:
            raise ValueError(f"properties of {len(item.properties)} bytes are too long")
        total = _HEAD.size + len(item.body) + _I16.size + len(item.properties)
        parts.append(_HEAD.pack(total, 0, 0, item.flag, len(item.body)))
        parts.append(item.body)
        parts.append(_I16.pack(len(item.properties)))
        parts.append(item.properties)
    return b"".join(parts)


def split_batch(body: bytes) -> Iterator[BatchItem]:
    """Yields the messages in order. Raises BrokerRefusal(MESSAGE_ILLEGAL) for contradicting
    lengths, and for none or too many messages."""
    count = pos = 0
    while pos < len(body):
        if len(body) - pos < _HEAD.size + _I16.size:
            raise _illegal(pos, "cut off in its head")
        total, _, _, flag, body_len = _HEAD.unpack_from(body, pos)
        body_at = pos + _HEAD.size
        properties_at = body_at + body_len + _I16.size
        end = pos + total
        if body_len < 0 or end > len(body) or properties_at > end:
            raise _illegal(pos, f"lengths {total} and {body_len} do not fit")
        properties_len = _I16.unpack_from(body, properties_at - _I16.size)[0]
        if properties_len < 0 or properties_at + properties_len != end:
            raise _illegal(pos, f"properties length {properties_len} does not fit")
        count += 1
        if count > MESSAGES_MAX:
            raise BrokerRefusal(
                ResponseCode.MESSAGE_ILLEGAL, f"a batch has at most {MESSAGES_MAX} messages"
            )
        yield BatchItem(body[body_at : body_at + body_len], body[properties_at:end], flag)
        pos = end
    if not count:
        raise BrokerRefusal(ResponseCode.MESSAGE_ILLEGAL, "the batch is empty")


def _illegal(pos: int, what: str) -> BrokerRefusal:
    return BrokerRefusal(
        ResponseCode.MESSAGE_ILLEGAL, f"the batch is malformed at byte {pos}: {what}"
    )
