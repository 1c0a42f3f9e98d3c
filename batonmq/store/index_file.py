"""One file of the hash index: which records of the log have a key. Byte-compatible with Java.

Header, slots, entries (`protocol.layout`) in a sparse file of full size. Entries are numbered from
1 in log order; a slot has the number of its newest entry, 0 if none; the header's count is the next
number. A chain ends, since previous < own number; all entries of a record are in one file.

Entries are written first, then slots, then the header: what lies at or above the count does not
exist, and slots that point there are repaired. After the first batch the slots live in memory until
`write_slots`; after an unclean exit `verify` rebuilds them from the entries. Origin: Java
`IndexFile`.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batonmq.protocol.layout import INDEX_ENTRY, INDEX_HEADER, INDEX_SLOT
from batonmq.protocol.tags import java_string_hash
from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_directory, sync_file, write_all, zero_range
from batonmq.store.file_handles import FileHandles

if TYPE_CHECKING:
    from batonmq.protocol.records.columns import Int64s
    from batonmq.store.index_batch import SlotTable

HEADER = INDEX_HEADER.struct
ENTRY = INDEX_ENTRY.struct
_SLOT = INDEX_SLOT.struct
SLOT_SIZE = _SLOT.size

_DIFF_MAX = 2**31 - 1
# From this many entries on, numpy is faster than a loop.
_LARGE = 4096
_VERIFY_ENTRIES = 1 << 16


def key_hash(topic: str, key: str) -> int:
    """The index's hash of a key: 0 ... 2**31 - 1."""
    value = abs(java_string_hash(f"{topic}#{key}"))
    return 0 if value == 1 << 31 else value


def file_size(slot_num: int, index_num: int) -> int:
    """Bytes of a file with so many slots and entries; entry 0 is never used."""
    return HEADER.size + slot_num * SLOT_SIZE + index_num * ENTRY.size


class IndexFile:
    """The newest file may grow; all may be queried and cut. One thread only."""

    def __init__(self, path: Path, slot_num: int, index_num: int, handles: FileHandles) -> None:
        """Opens an existing file. Raises ValueError if it is not an index file."""
        self.path = path
        self._slot_num = slot_num
        self._index_num = index_num
        self._handles = handles
        self._entries_at = HEADER.size + slot_num * SLOT_SIZE
        self._table: SlotTable | None = None
        # What a full disk kept out of the file although the entries are in it (`write_late`).
        self._late_heads: dict[int, int] = {}
        self._is_header_late = False
        self.begin_timestamp: int
        self.end_timestamp: int
        self.begin_phy_offset: int
        self.end_phy_offset: int
        self.used_slots: int
        self.count: int
        size = path.stat().st_size
        if size != file_size(slot_num, index_num):
            raise ValueError(f"{size} bytes where {file_size(slot_num, index_num)} belong")
        (
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_phy_offset,
            self.end_phy_offset,
            self.used_slots,
            self.count,
        ) = HEADER.unpack(disk.pread(self._fd, HEADER.size, 0))
        if self.count == 0:
            self.count = 1
        if not 1 <= self.count <= index_num:
            raise ValueError(f"entry count {self.count} where at most {index_num} fit")
        if not 0 <= self.begin_phy_offset <= self.end_phy_offset:
            raise ValueError(
                f"begin offset {self.begin_phy_offset}, end offset {self.end_phy_offset}"
            )

    @classmethod
    def create(
        cls,
        path: Path,
        slot_num: int,
        index_num: int,
        handles: FileHandles,
        *,
        inherits: "IndexFile | None" = None,
    ) -> "IndexFile":
        """Makes an empty file; until its first entry it shows the end of the file before it."""
        disk.makedirs(path.parent)
        timestamp = inherits.end_timestamp if inherits else 0
        phy_offset = inherits.end_phy_offset if inherits else 0
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            disk.ftruncate(fd, file_size(slot_num, index_num))
            header = HEADER.pack(timestamp, timestamp, phy_offset, phy_offset, 0, 1)
            write_all(fd, header, 0)
            sync_directory(path.parent)
        except OSError:
            disk.remove(path)  # else it would pass for a damaged one
            raise
        finally:
            disk.close(fd)
        return cls(path, slot_num, index_num, handles)

    @property
    def _fd(self) -> int:
        return self._handles.fd(str(self.path))

    @property
    def space(self) -> int:
        return self._index_num - self.count

    @property
    def is_empty(self) -> bool:
        return self.count <= 1

    # Writing.

    def put(
        self, hashes: Sequence[int], phy_offsets: Sequence[int], timestamps: Sequence[int]
    ) -> None:
        """Adds entries, at most `space`, with offsets that never fall; one per position of the
        sequences. After an OSError (disk full) nothing was added. Entries in the file count, even
        if slots and header come late."""
        self._before_put(len(hashes), phy_offsets[0], timestamps[0])
        heads: dict[int, int] = {}
        used = 0
        packed = bytearray()
        for number, (hash_, phy_offset, timestamp) in enumerate(
            zip(hashes, phy_offsets, timestamps, strict=True), self.count
        ):
            slot = hash_ % self._slot_num
            previous = heads.get(slot)
            if previous is None:
                previous = self._head(slot)
                used += previous == 0
                # A slot may point to an entry that a cut dropped.
                previous = previous if previous < self.count else 0
            diff = min(max((timestamp - self.begin_timestamp) // 1000, 0), _DIFF_MAX)
            packed += ENTRY.pack(hash_, phy_offset, diff, previous)
            heads[slot] = number
        write_all(self._fd, packed, self._entry_at(self.count))
        self._late_heads.update(heads)
        self.used_slots += used
        self._after_put(len(hashes), phy_offsets[-1], timestamps[-1])

    def put_batch(self, hashes: "Int64s", phy_offsets: "Int64s", timestamps: "Int64s") -> None:
        """`put` for many: the same bytes, but slots stay in memory until `write_slots`."""
        from batonmq.store.index_batch import SlotTable, pack_entries, seconds_since

        self._before_put(len(hashes), int(phy_offsets[0]), int(timestamps[0]))
        table = self._table
        if table is None:
            self.write_late()
            table = self._table = SlotTable.read(self._fd, HEADER.size, self._slot_num)
        previous, slots, heads = table.chain(hashes, self.count)
        diffs = seconds_since(self.begin_timestamp, timestamps)
        packed = pack_entries(hashes, phy_offsets, diffs, previous)
        write_all(self._fd, packed, self._entry_at(self.count))
        self.used_slots += table.apply(slots, heads)
        self._after_put(len(hashes), int(phy_offsets[-1]), int(timestamps[-1]))

    def _before_put(self, count: int, phy_offset: int, timestamp: int) -> None:
        assert count <= self.space
        if self.is_empty:
            self.begin_timestamp = timestamp
            self.begin_phy_offset = phy_offset

    def _after_put(self, count: int, phy_offset: int, timestamp: int) -> None:
        self.count += count
        self.end_timestamp = timestamp
        self.end_phy_offset = phy_offset
        self._is_header_late = True
        # The entries are in the file: they must count now, or they would be put again.
        try:
            self.write_late()
        except OSError as error:
            if not disk.is_short(error):
                raise

    def write_late(self) -> None:
        """Writes slots and header that a full disk kept out of the file. Raises OSError."""
        while self._late_heads:
            slot, number = next(iter(self._late_heads.items()))
            self._set_head(slot, number)
        if self._is_header_late:
            self._write_header()

    def _entry_at(self, number: int) -> int:
        return self._entries_at + number * ENTRY.size

    def _write_header(self) -> None:
        header = HEADER.pack(
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_phy_offset,
            self.end_phy_offset,
            self.used_slots,
            self.count,
        )
        write_all(self._fd, header, 0)
        self._is_header_late = False

    def _head(self, slot: int) -> int:
        late = self._late_heads.get(slot)
        if late is not None:
            return late
        if self._table is not None:
            return self._table.get(slot)
        raw = disk.pread(self._fd, SLOT_SIZE, HEADER.size + slot * SLOT_SIZE)
        value: int = _SLOT.unpack(raw)[0]
        return value

    def _set_head(self, slot: int, number: int) -> None:
        if self._table is not None:
            self._table.set(slot, number)
        else:
            write_all(self._fd, _SLOT.pack(number), HEADER.size + slot * SLOT_SIZE)
        self._late_heads.pop(slot, None)

    def write_slots(self, *, release: bool = False) -> None:
        """Writes the slots from memory to the file; `release` then drops them from memory."""
        self.write_late()
        if self._table is None:
            return
        end = HEADER.size + self._slot_num * SLOT_SIZE
        for first, raw in self._table.changed_runs():
            position = HEADER.size + first * SLOT_SIZE
            write_all(self._fd, raw[: end - position], position)
        if release:
            self._table = None

    # Reading.

    def entry(self, number: int) -> tuple[int, int, int, int]:
        """(key hash, commit-log offset, seconds since begin, previous entry)."""
        hash_, phy_offset, diff, previous = ENTRY.unpack(
            disk.pread(self._fd, ENTRY.size, self._entry_at(number))
        )
        return hash_, phy_offset, diff, previous

    def is_time_matched(self, begin_ms: int, end_ms: int) -> bool:
        """Whether the file may hold entries stored in [begin_ms, end_ms]."""
        return begin_ms <= self.end_timestamp and end_ms >= self.begin_timestamp

    def select_phy_offsets(
        self, hash_: int, max_num: int, begin_ms: int, end_ms: int, found: list[int]
    ) -> None:
        """Appends to `found`, newest first, each once, until it holds `max_num`. Times are whole
        seconds: an entry matches if its second overlaps the window. Stops at the first older entry,
        as Java does."""
        number = self._head(hash_ % self._slot_num)
        # Numbers fall along a chain: one that does not is damage, and could be a circle.
        above = self.count
        while 0 < number < above and len(found) < max_num:
            above = number
            entry_hash, phy_offset, diff, number = self.entry(number)
            stored_ms = self.begin_timestamp + diff * 1000
            if stored_ms + 999 < begin_ms:
                break
            if entry_hash == hash_ and stored_ms <= end_ms and phy_offset not in found:
                found.append(phy_offset)

    # Cutting and repair.

    def first_entry_at_or_above(self, phy_offset: int) -> int:
        """Number of the first entry of a record at or above `phy_offset`; `count` if none."""
        low, high = 1, self.count
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle)[1] >= phy_offset:
                high = middle
            else:
                low = middle + 1
        return low

    def truncate_to(self, phy_offset: int) -> bool:
        """Drops entries of records at or above `phy_offset`, durably; True if there were any. Slots
        first step back along their chains and are synced, then the count falls. A crash in between
        only makes dropped entries unreachable; repeating is harmless."""
        keep = self.first_entry_at_or_above(phy_offset)
        if keep == self.count:
            return False
        # From the newest down, as each of them points to the one before.
        for number in range(self.count - 1, keep - 1, -1):
            hash_, _, _, previous = self.entry(number)
            slot = hash_ % self._slot_num
            if self._head(slot) >= previous:
                self._set_head(slot, previous)
                self.used_slots -= previous == 0
        self.write_slots()
        sync_file(self.path)
        self._lower_count(keep)
        return True

    def _lower_count(self, keep: int) -> None:
        dropped, self.count = self.count - keep, keep
        if keep > 1:
            _, self.end_phy_offset, diff, _ = self.entry(keep - 1)
            self.end_timestamp = self.begin_timestamp + diff * 1000
        else:
            self.end_phy_offset, self.end_timestamp = self.begin_phy_offset, self.begin_timestamp
        self._write_header()
        sync_file(self.path)
        # Old entries behind the count could pass for new ones that a power loss kept off the disk.
        if zero_range(self._fd, self._entry_at(keep), self._entry_at(keep + dropped)):
            sync_file(self.path)

    def verify(self) -> bool:
        """After an unclean exit: keeps what the entries prove and rebuilds the slots. False if
        something was dropped; then the caller also cuts off the last record, which may have lost
        entries."""
        good = self._count_good()
        whole = good == self.count
        if not whole:
            self._lower_count(good)
        self._rebuild_slots()
        return whole

    def _count_good(self) -> int:
        """The number behind the last entry that could have been written."""
        number, floor = 1, self.begin_phy_offset
        while number < self.count:
            step = min(_VERIFY_ENTRIES, self.count - number)
            raw = disk.pread(self._fd, step * ENTRY.size, self._entry_at(number))
            good = _good_in(raw, floor, self.end_phy_offset)
            number += good
            if good < step:
                break
            floor = self.entry(number - 1)[1]
        return number

    def _rebuild_slots(self) -> None:
        raw = disk.pread(self._fd, (self.count - 1) * ENTRY.size, self._entry_at(1))
        if self.count > _LARGE:
            from batonmq.store.index_batch import SlotTable, entry_hashes

            self._table = SlotTable.of_entries(entry_hashes(raw), self._slot_num)
            self.used_slots = self._table.used()
        else:
            zero_range(self._fd, HEADER.size, self._entries_at)
            heads = {
                hash_ % self._slot_num: number
                for number, (hash_, _, _, _) in enumerate(ENTRY.iter_unpack(raw), 1)
            }
            for slot, number in heads.items():
                self._set_head(slot, number)
            self.used_slots = len(heads)
        self.write_slots(release=True)
        self._write_header()

    def close(self) -> None:
        """Writes the slots and closes the file; not synced."""
        self.write_slots(release=True)
        self._handles.forget(str(self.path))

    def destroy(self) -> None:
        """Removes the file; the caller syncs the folder."""
        self._table = None
        self._handles.forget(str(self.path))
        disk.remove(self.path)


def _good_in(raw: bytes, floor: int, ceiling: int) -> int:
    """How many leading entries could have been written: offsets in bounds and never falling."""
    if len(raw) >= _LARGE * ENTRY.size:
        from batonmq.store.index_batch import good_entries

        return good_entries(raw, floor, ceiling)
    for position, (_, phy_offset, _, _) in enumerate(ENTRY.iter_unpack(raw)):
        if not floor <= phy_offset <= ceiling:
            return position
        floor = phy_offset
    return len(raw) // ENTRY.size
