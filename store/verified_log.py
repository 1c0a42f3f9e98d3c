"""Which part of the log this process has written or checked itself (G8, R24).

Each record's CRC is checked once: what comes from a master before it is acknowledged, what is
found after a start when recovery reads it, everything older when it is first read (`reader`).
A master sends its log's bytes as they lie on its disk, so a record whose CRC does not fit is named
by file and offset at once. The ack of a slave then covers whole, good records and at most the
beginning of one more, which no confirmOffset can reach.
"""

from __future__ import annotations

import struct
from typing import Final

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import (
    HOST_V4_SIZE,
    HOST_V6_SIZE,
    RECORD_HEAD,
    RECORD_TAIL,
    RECORD_V4,
)
from batonmq.protocol.record import MAGIC_V1, MAGIC_V2
from batonmq.protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6
from batonmq.store.commit_log import CommitLog
from batonmq.store.log_scan import whole_records_end

_HEAD: Final = RECORD_HEAD.only("size", "magic", "sys_flag")
_BODY_LENGTH: Final = RECORD_TAIL.only("body_length")
_U16: Final = struct.Struct(">H")
_TAIL_AT: Final = RECORD_V4.size - RECORD_TAIL.size
_V6_EXTRA: Final = HOST_V6_SIZE - HOST_V4_SIZE


class VerifiedLog:
    """The records of [start, end) were written or CRC-checked by this process.

    Both are record boundaries. A record below `start` was written by an earlier process and is
    checked when it is first read; above `end` there is nothing, or what `verify` is to check.
    """

    __slots__ = ("_log", "end", "start")

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self.start = 0
        self.end = 0

    def restart(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def cut(self, offset: int) -> None:
        """The log was cut at `offset`: what comes there next is new."""
        self.restart(min(offset, self.start), min(offset, self.end))

    def verify(self) -> None:
        """Check what was appended since. Raises CorruptLogError; `end` is then where the bad
        record begins."""
        log = self._log
        self.end, problem = whole_records_end(log, self.end, log.max_offset)
        if problem is None and self.end < log.max_offset:
            problem = _wrong_size(log.view(self.end, log.segment_size))
        if problem is not None:
            raise CorruptLogError(log.file_of(self.end), self.end, problem)


def _wrong_size(part: memoryview) -> str | None:
    """What is wrong with the size of a record of which `part` is here; None as far as can be seen.

    A size that is too large would let the records behind it pass for more of the same one. Where
    the lengths within it are here, they say what it must be.
    """
    if len(part) < _TAIL_AT + _BODY_LENGTH.size + 2 * _V6_EXTRA:
        return None
    size, magic, flag = _HEAD.unpack_from(part)
    if magic not in (MAGIC_V1, MAGIC_V2):
        return None
    at = _TAIL_AT + _V6_EXTRA * (bool(flag & BORN_HOST_V6) + bool(flag & STORE_HOST_V6))
    (body_length,) = _BODY_LENGTH.unpack_from(part, at)
    at += _BODY_LENGTH.size + max(body_length, 0)
    if len(part) < at + 2:
        return None
    at += 1 + part[at] if magic == MAGIC_V1 else 2 + _U16.unpack_from(part, at)[0]
    if len(part) < at + _U16.size:
        return None
    (properties_length,) = _U16.unpack_from(part, at)
    expected = at + _U16.size + properties_length
    return None if expected == size else f"size {size} of a record of {expected} bytes"
