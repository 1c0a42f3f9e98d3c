"""Store folders made by hand, and what a plain loop over the bytes finds in them."""

import struct
from datetime import UTC, datetime
from pathlib import Path

from batonmq.protocol.layout import UNIT
from batonmq.protocol.records.codec import (
    END_FILE_MIN_BLANK,
    decode_record,
    encode_blank,
    scan_record,
)
from batonmq.protocol.records.faults import CorruptRecord
from tests.records import record_of as encode_record

HOST_V4 = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
HOST_V6 = bytes(range(16)) + b"\x00\x00\x2a\x9f"
START_MS = 1_700_000_000_000
YEAR_2_MS, YEAR_9999_MS = (
    round(datetime(year, 1, 1, tzinfo=UTC).timestamp() * 1000) for year in (2, 9999)
)


def message(physical_offset, **fields):
    """The bytes of one record; what is not said is plain."""
    number = fields.pop("number", 0)
    plain = {
        "topic": b"T",
        "queue_id": 0,
        "queue_offset": number,
        "flag": 0,
        "sys_flag": 0,
        "born_timestamp": START_MS + number,
        "born_host": HOST_V4,
        "store_timestamp": START_MS + 1 + number,
        "store_host": HOST_V4,
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        "body": b"body %d" % number,
        "properties": b"",
        "append_prop_crc": True,
    }
    return encode_record(physical_offset=physical_offset, **{**plain, **fields})


def write_checkpoint(root, confirmed):
    """A store's checkpoint: its log is confirmed up to an offset."""
    text = struct.pack(">qqqqq", 0, 0, 0, confirmed, confirmed).ljust(4096, b"\0")
    (Path(root) / "checkpoint").write_bytes(text)


def write_queue(root, *units, topic="T", queue_id=0, start=0):
    """A file of a consume queue; units as bytes, or as (log offset, size, tags code). Its path."""
    folder = Path(root) / "consumequeue" / topic / str(queue_id)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{start:020d}"
    path.write_bytes(b"".join(u if isinstance(u, bytes) else UNIT.struct.pack(*u) for u in units))
    return path


def write_index(root, name, count):
    """An index file of ten slots and forty entries whose head counts so many; its path."""
    path = Path(root) / "index" / name
    path.parent.mkdir(exist_ok=True)
    head = struct.pack(">qqqqii", START_MS, START_MS, 0, 0, 1, count)
    entries = b"".join(struct.pack(">iqii", n, n * 10, 0, 0) for n in range(40))
    path.write_bytes(head + bytes(40) + entries)
    return path


class LogFiles:
    """Writes records into files of `file_size` bytes, with blanks, and the files beside them."""

    def __init__(self, root, *, file_size=8192):
        self.root = Path(root)
        self.file_size = file_size
        self.end = 0
        self.data = bytearray()
        (self.root / "commitlog").mkdir(parents=True)

    def add(self, **fields):
        """Append one message; its log offset."""
        record = message(self.end, **fields)
        room = self.file_size - self.end % self.file_size
        if len(record) + END_FILE_MIN_BLANK > room:
            self.data += encode_blank(room) + bytes(room - END_FILE_MIN_BLANK)
            self.end += room
            record = message(self.end, **fields)
        self.data += record
        at, self.end = self.end, self.end + len(record)
        return at

    def save(self, *, confirm=None, identity="C#broker-a#1", epochs="1\n0\n1-0\n"):
        """Write all files; the root as text."""
        for start in range(0, max(len(self.data), 1), self.file_size):
            part = bytes(self.data[start : start + self.file_size])
            path = self.root / "commitlog" / f"{start:020d}"
            path.write_bytes(part.ljust(self.file_size, b"\0"))
        write_checkpoint(self.root, self.end if confirm is None else confirm)
        if identity:
            (self.root / "brokerIdentity").write_text(identity)
        if epochs:
            (self.root / "epochFileCheckpoint").write_text(epochs)
        return str(self.root)


_AS_DECODED = (
    "topic", "queue_id", "queue_offset", "physical_offset", "sys_flag", "flag", "body_crc",
    "born_host", "store_host", "reconsume_times", "prepared_transaction_offset", "properties",
    "body",
)  # fmt: skip


def plain_row(data, at):
    """A message as the table has it, by the broker's own decoder; no epoch, no store."""
    got = decode_record(data, at)
    keys = {"keys": "KEYS", "tags": "TAGS", "unique_key": "UNIQ_KEY"}
    return {
        **{name: getattr(got, name) for name in _AS_DECODED},
        **{column: got.properties.get(name) for column, name in keys.items()},
        "size": got.store_size,
        "born_at": _time_or_none(got.born_timestamp),
        "store_at": _time_or_none(got.store_timestamp),
    }


def _time_or_none(ms):
    """A time outside the years 2 to 9998 is null in tables."""
    return ms if YEAR_2_MS <= ms < YEAR_9999_MS else None


def row_of(row):
    """A row of a batch in the form of `plain_row`."""
    made = {name: row[name] for name in row if name in PLAIN_NAMES}
    for name in ("born_at", "store_at"):
        made[name] = None if row[name] is None else round(row[name].timestamp() * 1000)
    made["properties"] = dict(row["properties"])
    return made


PLAIN_NAMES = frozenset(plain_row(message(0), 0))


def good_at(data, at, base, file_end):
    """Whether a whole record lies there, by the broker's rules."""
    try:
        head = scan_record(data, at, check_crc=True)
    except CorruptRecord:
        return None
    if head is None or head.kind == "blank" or head.physical_offset != base + at:
        return None
    if file_end - base - at - head.size < END_FILE_MIN_BLANK or head.properties.endswith(b"\0"):
        return None
    return head


def plain_scan(data, base, file_end):
    """(starts, [(offset, size)] damaged) of one file's bytes up to its limit, byte by byte."""
    starts, damaged, at = [], [], 0
    while at < len(data):
        head = good_at(data, at, base, file_end)
        if head is not None:
            starts.append(base + at)
            at += head.size
            continue
        is_blank = data[at + 4 : at + 8] == encode_blank(0)[4:]
        if is_blank and base + at + int.from_bytes(data[at : at + 4], "big") == file_end:
            break
        behind = at + 1
        while behind < len(data) and not is_record_at(data, behind, base):
            behind += 1
        damaged.append((base + at, behind - at))
        at = behind
    return starts, damaged


def is_record_at(data, at, base):
    try:
        head = scan_record(data, at, check_crc=True)
    except CorruptRecord:
        return False
    return head is not None and head.kind == "message" and head.physical_offset == base + at
