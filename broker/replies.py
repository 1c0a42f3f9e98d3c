"""Reply frames of the hot path, made from bytes templates.

A frame is `u32 length, u32 (type << 24 | header length), header, body`. The headers here are JSON
whatever the request used, as a Java server answers by default. Nothing that
goes into a template needs JSON escaping: numbers, hex ids, and unique keys, which are checked.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec.json import encode as json_encode

from batonmq.protocol.codes import MQ_VERSION
from batonmq.protocol.errors import BatonError, BrokerRefusal

_LENGTHS: Final = struct.Struct(">II")
_TAIL: Final = (
    b'"language":"PYTHON","opaque":%%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
    % (MQ_VERSION)
)
_OK_PREFIX: Final = b'{"code":0,'
NO_FIELDS: Final[Mapping[str, str]] = {}

_PULL: Final = (
    b'{"code":%d,"extFields":{"maxOffset":"%d","minOffset":"%d","nextBeginOffset":"%d",'
    b'"suggestWhichBrokerId":"%d","groupSysFlag":"%d","topicSysFlag":"%d"},"flag":1,'
    b'"remark":"%s",' + _TAIL
)


def frame(header: bytes, body: bytes = b"") -> bytes:
    """One whole frame of a JSON header and a body."""
    size = len(header)
    return _LENGTHS.pack(4 + size + len(body), size) + header + body


class SendReplies:
    """Templates of a send's reply; the region is fixed per broker."""

    def __init__(self, region_id: str) -> None:
        # A region with a percent sign must not be taken for a place to fill in.
        region = json_encode(region_id).replace(b"%", b"%%")
        self._template = (
            b'{"code":0,"extFields":{"MSG_REGION":' + region + b',"TRACE_ON":"true",'
            b'"msgId":"%s","queueId":"%d","queueOffset":"%d","transactionId":"%s"},"flag":1,'
            + _TAIL
        )

    def ok(
        self,
        opaque: int,
        msg_id: bytes,
        queue_id: int,
        queue_offset: int,
        unique_key: bytes,
        recall_handle: bytes = b"",
    ) -> bytes:
        """The frame with code 0. `unique_key` must be free of quotes, backslashes, controls."""
        if recall_handle:
            unique_key += b'","recallHandle":"' + recall_handle
        header = self._template % (msg_id, queue_id, queue_offset, unique_key, opaque)
        size = len(header)
        return _LENGTHS.pack(4 + size, size) + header


def recode(reply: bytes, code: int, remark: str) -> bytes:
    """The same reply with another code and a remark: what a client needs of the header stays.

    Codes 10 and 12 mean "stored, but not as safely as required"; a Java client reads their
    extFields like those of code 0.
    """
    header = reply[8:]
    assert header.startswith(_OK_PREFIX), "only a reply with code 0 waits for its confirmation"
    return frame(
        b'{"code":%d,"remark":%s,' % (code, json_encode(remark)) + header[len(_OK_PREFIX) :]
    )


def refusal(opaque: int, code: int, remark: str, fields: Mapping[str, str] = NO_FIELDS) -> bytes:
    """A reply without a stored message. extFields are there, since clients dereference them.

    `fields`: what clients and members of this project read in them; Java's do not.
    """
    return frame(
        b'{"code":%d,"extFields":%s,"flag":1,"remark":%s,'
        % (code, json_encode(fields), json_encode(remark))
        + _TAIL % opaque
    )


def refusal_of(opaque: int, error: BatonError, fields: Mapping[str, str] = NO_FIELDS) -> bytes:
    """The refusal that `error` stands for, with the same fields."""
    if isinstance(error, BrokerRefusal):
        return refusal(opaque, error.code, error.remark, fields)
    return refusal(opaque, error.response_code, str(error), fields)


class PullFlags(NamedTuple):
    """What a pull's reply says beside its messages: from which broker id to read next, and the
    sysFlags of group and topic."""

    suggested_id: int = 0
    group_sys_flag: int = 0
    topic_sys_flag: int = 0


class PullOffsets(NamedTuple):
    """Offsets in a pull's reply: where to go on, and the visible range [min, max)."""

    next_begin: int
    minimum: int
    maximum: int


def pull_header(
    opaque: int, code: int, remark: str, offsets: PullOffsets, flags: PullFlags
) -> bytes:
    """The header of a pull's reply; `remark` is a status name of plain letters."""
    begin, minimum, maximum = offsets
    return _PULL % (code, maximum, minimum, begin, *flags, remark.encode("ascii"), opaque)


def pull_frame(header: bytes, size: int, parts: list[memoryview]) -> bytes:
    """One frame of a pull's header and the stored records, copied once."""
    return b"".join((_LENGTHS.pack(4 + len(header) + size, len(header)), header, *parts))
