"""The `checkpoint` file: up to where the parts of the store are good. Java's fields are followed by
ours (`protocol.layout`), which Java ignores. The recovery offset is the end of the log that is
durable with all that is derived from it; it is None if the CRC does not match (a Java broker used
the file, a torn write). The sum of the queues' ends belongs to it, and has a CRC of its own. After
`flush` the values survive power loss: they lie in one disk sector.
"""

import logging
import os
import zlib
from pathlib import Path
from typing import NamedTuple

from batonmq.protocol.layout import (
    CHECKPOINT,
    CHECKPOINT_ENDS,
    CHECKPOINT_ENDS_AT,
    CHECKPOINT_MAGIC,
    CHECKPOINT_OURS,
    CHECKPOINT_OURS_AT,
    CHECKPOINT_SIZE,
)
from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_directory, write_all

log = logging.getLogger(__name__)

_CRC_AT = CHECKPOINT_OURS.at["crc"]
# Java starts this long before the older of the two timestamps.
_SAFETY_MS = 3000
_OURS_END = CHECKPOINT_OURS_AT + CHECKPOINT_OURS.size
_ENDS_END = CHECKPOINT_ENDS_AT + CHECKPOINT_ENDS.size
_TIME_END_MS = 1 << 42  # in the year 2109
_SUM_END = 1 << 63


def _checksum(data: bytes | bytearray) -> int:
    ours = data[CHECKPOINT_OURS_AT : CHECKPOINT_OURS_AT + _CRC_AT]
    return zlib.crc32(ours, zlib.crc32(data[: CHECKPOINT.size]))


def _may_be_javas(data: bytes) -> bool:
    """Whether a broker may have written what has no CRC of ours, or one that does not fit."""
    fields = CHECKPOINT.struct.unpack_from(data)
    filler = data[CHECKPOINT.size : CHECKPOINT_OURS_AT]
    filler += data[_OURS_END:CHECKPOINT_ENDS_AT] + data[_ENDS_END:]
    return min(fields) >= -1 and max(fields[:3]) < _TIME_END_MS and not any(filler)


class QueueEnds(NamedTuple):
    """`total`: the sum of the next offsets of all queues with units, of records below
    `recovery_offset`."""

    recovery_offset: int
    total: int

    def encode(self) -> bytes:
        fields = CHECKPOINT_ENDS.struct.pack(*self, 0)[: CHECKPOINT_ENDS.at["crc"]]
        return CHECKPOINT_ENDS.struct.pack(*self, zlib.crc32(fields))


def _decode_ends(data: bytes) -> QueueEnds | None:
    offset, total, _ = CHECKPOINT_ENDS.struct.unpack_from(data, CHECKPOINT_ENDS_AT)
    ends = QueueEnds(offset, total)
    return ends if ends.encode() == data[CHECKPOINT_ENDS_AT:_ENDS_END] else None


class StoreCheckpoint:
    """Values in memory, written by `flush`; timestamps in ms. A file that is missing or of another
    length, or with what no broker writes, reads as zeros: recovery then reads the whole log."""

    __slots__ = (
        "_fd",
        "_path",
        "_written",
        "confirm_phy_offset",
        "index_msg_timestamp",
        "logics_msg_timestamp",
        "master_flushed_offset",
        "physic_msg_timestamp",
        "queue_ends",
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
        #: The log offset up to which recovery need not read; None if unknown.
        self.recovery_offset: int | None = None
        #: Not written, and not believed, if it belongs to another recovery offset; None if unknown.
        self.queue_ends: QueueEnds | None = None
        try:
            data = disk.read_bytes(path)
        except FileNotFoundError:
            data = b""
        self._written = data if len(data) == CHECKPOINT_SIZE else b""
        if self._written:
            self._decode(self._written)

    def _decode(self, data: bytes) -> None:
        magic, offset, crc = CHECKPOINT_OURS.struct.unpack_from(data, CHECKPOINT_OURS_AT)
        if magic == CHECKPOINT_MAGIC and offset >= 0 and crc == _checksum(data):
            self.recovery_offset = offset
            ends = _decode_ends(data)
            self.queue_ends = ends if ends is not None and ends.recovery_offset == offset else None
        elif not _may_be_javas(data):
            log.error("checkpoint_damaged file=%s", self._path)
            return
        (
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        ) = CHECKPOINT.struct.unpack_from(data)

    def encode(self) -> bytes:
        """The file's 4096 bytes for the current values."""
        data = bytearray(CHECKPOINT_SIZE)
        CHECKPOINT.struct.pack_into(
            data,
            0,
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        )
        if self.recovery_offset is not None:
            pack_ours = CHECKPOINT_OURS.struct.pack_into
            pack_ours(data, CHECKPOINT_OURS_AT, CHECKPOINT_MAGIC, self.recovery_offset, 0)
            crc = _checksum(data)
            pack_ours(data, CHECKPOINT_OURS_AT, CHECKPOINT_MAGIC, self.recovery_offset, crc)
        ends = self.queue_ends
        # Positions come from the log, so from strangers: their sum may not fit.
        if ends and ends.recovery_offset == self.recovery_offset and ends.total < _SUM_END:
            data[CHECKPOINT_ENDS_AT:_ENDS_END] = ends.encode()
        return bytes(data)

    def lower_recovery(self, offset: int) -> None:
        """A start must read the log from `offset` on at the latest. In memory until `flush`."""
        if self.recovery_offset is not None:
            self.recovery_offset = min(self.recovery_offset, offset)

    def forget_start(self) -> None:
        """What the log contradicts says nothing of where a start may begin."""
        self.recovery_offset = None
        self.physic_msg_timestamp = self.logics_msg_timestamp = self.index_msg_timestamp = 0

    @property
    def min_timestamp(self) -> int:
        """Where Java would start: min(physic, logics) - 3 s, not below 0."""
        oldest = min(self.physic_msg_timestamp, self.logics_msg_timestamp)
        return max(0, oldest - _SAFETY_MS)

    def flush(self) -> bool:
        """Writes and syncs; False if the file has these values already. Only one thread at a time
        may call it, but any: the values are read once."""
        data = self.encode()
        if data == self._written:
            return False
        if self._fd < 0:
            self._open()
        write_all(self._fd, data, 0)
        disk.fdatasync(self._fd)
        self._written = data
        return True

    def _open(self) -> None:
        disk.makedirs(self._path.parent)
        fd = disk.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(fd).st_size != CHECKPOINT_SIZE:
                disk.ftruncate(fd, CHECKPOINT_SIZE)
                disk.fsync(fd)
                sync_directory(self._path.parent)
        except OSError:
            disk.close(fd)
            raise
        self._fd = fd

    def close(self) -> None:
        """Closes the file without a flush."""
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1
