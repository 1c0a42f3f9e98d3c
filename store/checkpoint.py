"""The `checkpoint` file: up to where the store's parts are known to be good.

4096 bytes, big-endian i64 at:

    0 physicMsgTimestamp | 8 logicsMsgTimestamp | 16 indexMsgTimestamp
    24 masterFlushedOffset | 32 confirmPhyOffset          as Java's `StoreCheckpoint`
    64 magic "BATONCP1" | 72 recovery offset | 80 CRC-32 of 0..40 and 64..80     ours

Java ignores everything from 40 on, so the file serves both. The recovery offset is the end of the
log that is durable together with what is derived from it; where the CRC does not fit (a Java
broker went on with the file, a torn write), it is not there.

Invariant: after `flush` the values set before it survive power loss. What is used of the file lies
within one disk sector, which is overwritten in place.
"""

import os
import struct
import zlib
from pathlib import Path

from epoch.durable_file import sync_directory, write_all

CHECKPOINT_SIZE = 4096
_FIELDS = struct.Struct(">qqqqq")
_OURS_AT = 64
_OURS = struct.Struct(">8sq")
_CRC = struct.Struct(">I")
_MAGIC = b"BATONCP1"
# Java goes this far behind the older of the two timestamps when it looks for a place to start.
_SAFETY_MS = 3000


def _checksum(data: bytes | bytearray) -> int:
    return zlib.crc32(data[_OURS_AT : _OURS_AT + _OURS.size], zlib.crc32(data[: _FIELDS.size]))


class StoreCheckpoint:
    """Values in memory, written by `flush`. Timestamps are store timestamps in ms.

    A file that is missing or of another length reads as all zero: recovery then starts at the
    beginning of the log.
    """

    __slots__ = (
        "_fd",
        "_path",
        "_written",
        "confirm_phy_offset",
        "index_msg_timestamp",
        "logics_msg_timestamp",
        "master_flushed_offset",
        "physic_msg_timestamp",
        "recovery_offset",
    )

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.physic_msg_timestamp = 0
        self.logics_msg_timestamp = 0
        self.index_msg_timestamp = 0
        self.master_flushed_offset = 0
        self.confirm_phy_offset = 0
        #: Offset in the log up to which recovery need not look, or None if not known.
        self.recovery_offset: int | None = None
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        self._written = data if len(data) == CHECKPOINT_SIZE else b""
        if self._written:
            self._decode(self._written)

    def _decode(self, data: bytes) -> None:
        (
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        ) = _FIELDS.unpack_from(data)
        magic, offset = _OURS.unpack_from(data, _OURS_AT)
        end = _OURS_AT + _OURS.size
        (crc,) = _CRC.unpack_from(data, end)
        if magic == _MAGIC and offset >= 0 and crc == _checksum(data):
            self.recovery_offset = offset

    def encode(self) -> bytes:
        """The file's 4096 bytes for the values as they are now."""
        data = bytearray(CHECKPOINT_SIZE)
        _FIELDS.pack_into(
            data,
            0,
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        )
        if self.recovery_offset is not None:
            end = _OURS_AT + _OURS.size
            _OURS.pack_into(data, _OURS_AT, _MAGIC, self.recovery_offset)
            _CRC.pack_into(data, end, _checksum(data))
        return bytes(data)

    @property
    def min_timestamp(self) -> int:
        """Java's place to start from: min(physic, logics) - 3 s, not below 0."""
        oldest = min(self.physic_msg_timestamp, self.logics_msg_timestamp)
        return max(0, oldest - _SAFETY_MS)

    @property
    def min_timestamp_index(self) -> int:
        """The same with the index counted in (`messageIndexSafe`)."""
        return max(0, min(self.min_timestamp, self.index_msg_timestamp))

    def flush(self) -> bool:
        """Write and fdatasync; False, and nothing done, if the file holds these values already.

        Safe to call from a flush thread if no other thread calls it: the values are read once.
        """
        data = self.encode()
        if data == self._written:
            return False
        if self._fd < 0:
            self._open()
        write_all(self._fd, data, 0)
        os.fdatasync(self._fd)
        self._written = data
        return True

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._fd).st_size != CHECKPOINT_SIZE:
            os.ftruncate(self._fd, CHECKPOINT_SIZE)
            os.fsync(self._fd)
            sync_directory(self._path.parent)

    def close(self) -> None:
        """Let go of the file; not flushed (see `flush`)."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
