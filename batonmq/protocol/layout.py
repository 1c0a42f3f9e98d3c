"""The fixed parts of the store's files, each layout once. A `RecordLayout` gives the same fields as
a `struct.Struct` and for `numpy.dtype`, so store, client and Spark share one table; numpy itself is
not imported. Big-endian. Origin, release 5.3.3: Java `MessageExtEncoder` and `CommitLog` (record),
`ConsumeQueue` (unit), `IndexHeader` and `IndexFile` (index), `StoreCheckpoint`."""

import struct
from typing import Final

_CODES: Final = {">u4": "I", ">i4": "i", ">i8": "q"}


class RecordLayout:
    """Fields without padding, (name, numpy type) each. `at`: name -> offset in bytes; `size`: of
    all."""

    __slots__ = ("at", "dtype", "size", "struct")

    def __init__(self, *fields: tuple[str, str]) -> None:
        self.dtype: list[tuple[str, str]] = list(fields)
        self.struct = struct.Struct(">" + "".join(_code(kind) for _, kind in fields))
        self.size: int = self.struct.size
        self.at: dict[str, int] = {}
        offset = 0
        for name, kind in fields:
            self.at[name] = offset
            offset += struct.calcsize(">" + _code(kind))

    def only(self, *names: str) -> struct.Struct:
        """A struct that reads these fields, in the order of the layout, and ends with the last of
        them."""
        assert list(names) == sorted(names, key=self.at.__getitem__), "in the order of the layout"
        codes, end = [">"], 0
        for name, kind in self.dtype:
            if name in names:
                skipped = self.at[name] - end
                codes.append(f"{skipped}x{_code(kind)}" if skipped else _code(kind))
                end = self.at[name] + struct.calcsize(">" + _code(kind))
        return struct.Struct("".join(codes))


def _code(kind: str) -> str:
    """The struct code of a numpy type; `V8` is 8 plain bytes."""
    return f"{kind[1:]}s" if kind[0] == "V" else _CODES[kind]


# The record of the commit log.

# Offsets are for two IPv4 hosts; an IPv6 host has 20 bytes and moves the rest by 12.
HOST_V4_SIZE: Final = 8
HOST_V6_SIZE: Final = 20

RECORD_HEAD: Final = RecordLayout(
    ("size", ">u4"),  # 0: bytes of the whole record
    ("magic", ">u4"),  # 4
    ("body_crc", ">u4"),  # 8
    ("queue_id", ">i4"),  # 12
    ("flag", ">i4"),  # 16
    ("queue_offset", ">i8"),  # 20
    ("physical_offset", ">i8"),  # 28
    ("sys_flag", ">i4"),  # 36
    ("born_ms", ">i8"),  # 40
)
# 48: the born host, 8 or 20 bytes
RECORD_STORE_TIME: Final = RecordLayout(("store_ms", ">i8"))  # 56
# 64: the store host, 8 or 20 bytes
RECORD_TAIL: Final = RecordLayout(
    ("reconsume_times", ">i4"),  # 72
    ("prepared", ">i8"),  # 76: offset of the prepared transaction
    ("body_length", ">i4"),  # 84
)
# 88: body, topic length (u8; u16 under magic V2), topic, properties length (i16), properties


def record_layout(born_host_size: int, store_host_size: int) -> RecordLayout:
    """Everything before the body, for hosts of 8 or 20 bytes."""
    return RecordLayout(
        *RECORD_HEAD.dtype,
        ("born_host", f"V{born_host_size}"),
        *RECORD_STORE_TIME.dtype,
        ("store_host", f"V{store_host_size}"),
        *RECORD_TAIL.dtype,
    )


RECORD_V4: Final = record_layout(HOST_V4_SIZE, HOST_V4_SIZE)
assert RECORD_V4.size == 88

# The end of a segment that no record fits into; after these 8 bytes nothing is read.
BLANK: Final = RecordLayout(
    ("size", ">u4"),  # 0: bytes to the end of the segment, these 8 included
    ("magic", ">u4"),  # 4
)

# The unit of a consume queue.

UNIT: Final = RecordLayout(
    ("offset", ">i8"),  # 0: of the record, in the commit log
    ("size", ">i4"),  # 8: of the record
    ("tags_code", ">i8"),  # 12: Java's hash of TAGS, or the due time of a delayed message in ms
)
UNIT_SIZE: Final = UNIT.size
# The size in a unit that fills a place without a message: (0, FILLER_SIZE, 0).
FILLER_SIZE: Final = 0x7FFFFFFF
assert UNIT_SIZE == 20

# A file of the hash index: header, slots, entries.

INDEX_HEADER: Final = RecordLayout(
    ("begin_ms", ">i8"),  # 0: store time of the first entry
    ("end_ms", ">i8"),  # 8: store time of the last entry
    ("begin_offset", ">i8"),  # 16: commit-log offset of the first entry
    ("end_offset", ">i8"),  # 24: commit-log offset of the last entry
    ("used_slots", ">i4"),  # 32
    ("count", ">i4"),  # 36: the number that the next entry gets; the first one is 1
)
INDEX_SLOT: Final = RecordLayout(("entry", ">i4"))  # the newest entry of the slot, 0 if none
INDEX_ENTRY: Final = RecordLayout(
    ("hash", ">i4"),  # 0: of `topic#key`
    ("offset", ">i8"),  # 4: of the record, in the commit log
    ("seconds", ">i4"),  # 12: store time, from the header's `begin_ms` on
    ("previous", ">i4"),  # 16: the entry before it in the same slot, 0 if none
)
assert (INDEX_HEADER.size, INDEX_SLOT.size, INDEX_ENTRY.size) == (40, 4, 20)

# The checkpoint.

CHECKPOINT_SIZE: Final = 4096
CHECKPOINT: Final = RecordLayout(
    ("physic_msg_timestamp", ">i8"),  # 0: ms, as the two that follow
    ("logics_msg_timestamp", ">i8"),  # 8
    ("index_msg_timestamp", ">i8"),  # 16
    ("master_flushed_offset", ">i8"),  # 24
    ("confirm_phy_offset", ">i8"),  # 32
)
# At 64, where Java's broker does not read. The CRC-32 covers both parts without itself.
CHECKPOINT_OURS_AT: Final = 64
CHECKPOINT_OURS: Final = RecordLayout(
    ("magic", "V8"),  # 64
    ("recovery_offset", ">i8"),  # 72
    ("crc", ">u4"),  # 80
)
CHECKPOINT_MAGIC: Final = b"BATONCP1"
# Where only this broker reads. Both belong to one recovery offset; a CRC-32 covers what is before.
CHECKPOINT_ENDS_AT: Final = 96
CHECKPOINT_ENDS: Final = RecordLayout(
    ("recovery_offset", ">i8"),  # 96
    ("queue_ends", ">i8"),  # 104: the sum of all queues' next offsets there
    ("crc", ">u4"),  # 112
)
CHECKPOINT_LOG_AT: Final = 120
CHECKPOINT_LOG: Final = RecordLayout(
    ("recovery_offset", ">i8"),  # 120
    ("queue_begins", ">i8"),  # 128: the sum of the first units in all queues' files, -1: unknown
    ("log_id", ">u4"),  # 136: CRC-32 of the log id
    ("crc", ">u4"),  # 140
)

# What a controller keeps (`controller.raft`). The journal: its magic, then groups of u32 length,
# u32 CRC-32, and so many bytes. The snapshot: its magic, the u32 CRC-32 of the rest, the rest.

JOURNAL_MAGIC: Final = b"BATONJ01"
JOURNAL_GROUP: Final = struct.Struct(">II")
SNAPSHOT_MAGIC: Final = b"BATONSS1"
SNAPSHOT_CRC: Final = struct.Struct(">I")
