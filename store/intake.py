"""What comes from a master is checked before it is acknowledged (G8, R24).

The master sends its log's bytes as they lie on its disk. A record whose CRC does not fit is named
by file and offset at once, so the ack of a slave speaks for whole, good records and at most the
beginning of one more, which no confirmOffset can reach. Dispatching need not check them again.
"""

from __future__ import annotations

import struct
from typing import Final

from protocol.errors import CorruptLogError
from protocol.record import MAGIC_V1, MAGIC_V2
from protocol.sysflag import BORN_HOST_V6, STORE_HOST_V6
from store.commit_log import CommitLog
from store.log_scan import whole_records_end

# size, magic, sys flag
_HEAD: Final = struct.Struct(">II28xI")
_BODY_LENGTH: Final = struct.Struct(">i")
_U16: Final = struct.Struct(">H")
_BODY_LENGTH_AT: Final = 84
_V6_EXTRA: Final = 12


class Intake:
    """`offset` is the end of what this process has written or verified: a record boundary."""

    __slots__ = ("_log", "offset")

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self.offset = 0

    def restart(self, offset: int) -> None:
        """Everything below `offset`, a record boundary, is good."""
        self.offset = offset

    def verify(self) -> None:
        """Check what was appended since. Raises CorruptLogError; `offset` is then where the bad
        record begins."""
        log = self._log
        self.offset, problem = whole_records_end(log, self.offset, log.max_offset)
        if problem is None and self.offset < log.max_offset:
            problem = _wrong_size(log.view(self.offset, log.segment_size))
        if problem is not None:
            raise CorruptLogError(log.file_of(self.offset), self.offset, problem)


def _wrong_size(part: memoryview) -> str | None:
    """What is wrong with the size of a record of which `part` is here; None as far as can be seen.

    A size that is too large would let the records behind it pass for more of the same one. Where
    the lengths within it are here, they say what it must be.
    """
    if len(part) < _BODY_LENGTH_AT + _BODY_LENGTH.size + 2 * _V6_EXTRA:
        return None
    size, magic, flag = _HEAD.unpack_from(part)
    if magic not in (MAGIC_V1, MAGIC_V2):
        return None
    at = _BODY_LENGTH_AT + _V6_EXTRA * (bool(flag & BORN_HOST_V6) + bool(flag & STORE_HOST_V6))
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
