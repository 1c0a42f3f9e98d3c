"""The `checkpoint` file: up to where the parts of the store are good. Java's fields are followed by
ours (`protocol.layout`), which Java ignores. The recovery offset is the end of the log that is
durable with all that is derived from it; it is None if the CRC does not match (a Java broker used
the file, a torn write). The totals of the queues, and which log this is about, belong to it and
have CRCs of their own: earlier versions do not know them. After `flush` the values survive power
loss: they lie in one disk sector.
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
    CHECKPOINT_LOG,
    CHECKPOINT_LOG_AT,
    CHECKPOINT_MAGIC,
    CHECKPOINT_OURS,
    CHECKPOINT_OURS_AT,
    CHECKPOINT_SIZE,
    RecordLayout,
)
from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_directory, write_all

log = logging.getLogger(__name__)

_CRC_AT = CHECKPOINT_OURS.at["crc"]
# Java starts this long before the older of the two timestamps.
_SAFETY_MS = 3000
_OURS_END = CHECKPOINT_OURS_AT + CHECKPOINT_OURS.size
_ENDS_END = CHECKPOINT_ENDS_AT + CHECKPOINT_ENDS.size
_LOG_END = CHECKPOINT_LOG_AT + CHECKPOINT_LOG.size
_TIME_END_MS = 1 << 42  # in the year 2109
_SUM_END = 1 << 63


def _checksum(data: bytes | bytearray) -> int:
    ours = data[CHECKPOINT_OURS_AT : CHECKPOINT_OURS_AT + _CRC_AT]
    return zlib.crc32(ours, zlib.crc32(data[: CHECKPOINT.size]))


def _may_be_javas(data: bytes) -> bool:
    """Whether a broker may have written what has no CRC of ours, or one that does not fit."""
    fields = CHECKPOINT.struct.unpack_from(data)
    filler = data[CHECKPOINT.size : CHECKPOINT_OURS_AT]
    filler += data[_OURS_END:CHECKPOINT_ENDS_AT] + data[_ENDS_END:CHECKPOINT_LOG_AT]
    filler += data[_LOG_END:]
    return min(fields) >= -1 and max(fields[:3]) < _TIME_END_MS and not any(filler)


class QueueTotals(NamedTuple):
    """Of all queues with units, of records below `recovery_offset`: the sum of their next offsets,
    and of the first units in their files (`UNKNOWN` while files expire)."""

    recovery_offset: int
    ends: int
    begins: int


UNKNOWN = -1


def _sealed(layout: RecordLayout, *fields: int) -> bytes:
    """With the CRC-32 of the fields as the last one."""
    return layout.struct.pack(*fields, zlib.crc32(layout.struct.pack(*fields, 0)[:-4]))


def _unsealed(layout: RecordLayout, data: bytes, at: int) -> tuple[int, ...] | None:
    """The fields without the CRC; None if that does not fit."""
    fields: tuple[int, ...] = layout.struct.unpack_from(data, at)[:-1]
    # All zeros fit no CRC of zeros: CRC-32 of them is not 0.
    return fields if _sealed(layout, *fields) == data[at : at + layout.size] else None


class StoreCheckpoint:
    """Values in memory, written by `flush`; timestamps in ms. A file that is missing or of another
    length, or with what no broker writes, reads as zeros: recovery then reads the whole log."""

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
        self.queue_totals: QueueTotals | None = None
        # CRC-32 of the log id; None if the file does not say it.
        self._log: int | None = None
        try:
            data = disk.read_bytes(path)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            disk.check_unreadable(error)
            log.error("checkpoint_damaged file=%s reason=%s", path, error)
            data = b""
        self._written = data if len(data) == CHECKPOINT_SIZE else b""
        if self._written:
            self._decode(self._written)

    def _decode(self, data: bytes) -> None:
        magic, offset, crc = CHECKPOINT_OURS.struct.unpack_from(data, CHECKPOINT_OURS_AT)
        if magic == CHECKPOINT_MAGIC and offset >= 0 and crc == _checksum(data):
            self.recovery_offset = offset
            self._decode_totals(data, offset)
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

    def _decode_totals(self, data: bytes, recovery_offset: int) -> None:
        begins = UNKNOWN
        fields = _unsealed(CHECKPOINT_LOG, data, CHECKPOINT_LOG_AT)
        if fields is not None:
            self._log = fields[2]
            begins = fields[1] if fields[0] == recovery_offset else UNKNOWN
        fields = _unsealed(CHECKPOINT_ENDS, data, CHECKPOINT_ENDS_AT)
        if fields is not None and fields[0] == recovery_offset:
            self.queue_totals = QueueTotals(fields[0], fields[1], begins)

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
        offset, ends, begins = self.queue_totals or (UNKNOWN, 0, UNKNOWN)
        # Positions come from the log, so from strangers: their sum may not fit.
        is_known = offset >= 0 and offset == self.recovery_offset and ends < _SUM_END
        if is_known:
            data[CHECKPOINT_ENDS_AT:_ENDS_END] = _sealed(CHECKPOINT_ENDS, offset, ends)
        if self.recovery_offset is not None and self._log is not None:
            fields = (self.recovery_offset, begins if is_known else UNKNOWN, self._log)
            data[CHECKPOINT_LOG_AT:_LOG_END] = _sealed(CHECKPOINT_LOG, *fields)
        return bytes(data)

    def is_of_other_log(self, log_id: str) -> bool:
        """Whether the file says that it is about another log; without effect on what it says."""
        return self._log is not None and self._log != zlib.crc32(log_id.encode())

    def belongs_to(self, log_id: str) -> None:
        """Written with the next `flush`."""
        self._log = zlib.crc32(log_id.encode())

    def lower_recovery(self, offset: int) -> None:
        """A start must read the log from `offset` on at the latest. In memory until `flush`."""
        if self.recovery_offset is not None:
            self.recovery_offset = min(self.recovery_offset, offset)

    def forget_start(self) -> None:
        """What the log contradicts says nothing of where a start may begin."""
        self.recovery_offset = None
        self.physic_msg_timestamp = self.logics_msg_timestamp = self.index_msg_timestamp = 0

    def forget_all(self) -> None:
        """Another log's. Even its confirmed offset would show what is not confirmed here."""
        self.forget_start()
        self.queue_totals = self._log = None
        self.master_flushed_offset = self.confirm_phy_offset = 0

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
            # Forgotten first: Linux frees a descriptor also when its close reports an error.
            fd, self._fd = self._fd, -1
            disk.close(fd)
