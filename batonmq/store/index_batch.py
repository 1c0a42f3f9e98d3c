"""The index's arithmetic on many entries at once, with numpy, same bytes as `index_file`. Java's
hash of `chars[b:e]` is the sum of `chars[k] * 31 ** (e - 1 - k)` modulo 2 ** 32, where 31 has an
inverse. So one running sum of `chars[k] * 31 ** -k` gives every piece by a difference. Imported
only when a batch pays for it, so an idle broker loads no numpy."""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from batonmq.protocol.layout import INDEX_ENTRY
from batonmq.protocol.records.columns import Bools, Bytes, Int64s
from batonmq.protocol.tags import java_string_hash
from batonmq.runtime import disk
from batonmq.runtime.durable_file import next_data

U32 = npt.NDArray[np.uint32]
Int32s = npt.NDArray[np.int32]
ENTRY = np.dtype(INDEX_ENTRY.dtype)

# Slots per block whose change is noted: 4 KiB of the file.
_BLOCK_SLOTS = 1024
_BYTES_MAX = 1 << 20
_MODULUS: Final = 1 << 32


class _Powers:
    """`base ** 0`, `base ** 1`, ... modulo 2 ** 32, as many as were ever needed."""

    def __init__(self, base: int) -> None:
        self._base = np.uint32(base)
        self._known: U32 = np.ones(1, dtype=np.uint32)

    def up_to(self, count: int) -> U32:
        if count > len(self._known):
            steps = np.full(2 * count, self._base, dtype=np.uint32)
            steps[0] = 1
            self._known = np.cumprod(steps, dtype=np.uint32)
        return self._known[:count]


_powers: Final = _Powers(31)
_inverse_powers: Final = _Powers(pow(31, -1, _MODULUS))


def powers_of_31(exponents: Int64s) -> U32:
    """`31 ** n` modulo 2 ** 32 for each."""
    count = int(exponents.max(initial=0)) + 1
    return _powers.up_to(count)[exponents]


class PieceHashes:
    """The hashes of pieces of `chars`, UTF-8 bytes."""

    def __init__(self, chars: Bytes) -> None:
        self._chars = chars
        self._sums: U32 = np.zeros(len(chars) + 1, dtype=np.uint32)
        np.cumsum(chars * _inverse_powers.up_to(len(chars)), dtype=np.uint32, out=self._sums[1:])
        self._not_ascii = np.flatnonzero(chars > 127)

    def of(self, begins: Int64s, ends: Int64s) -> U32:
        """Modulo 2 ** 32, in order; 0 for an empty piece. Wrong for pieces that `are_odd`."""
        sums = self._sums
        return (sums[ends] - sums[begins]) * powers_of_31(np.maximum(ends - 1, 0))

    def are_odd(self, begins: Int64s, ends: Int64s) -> Bools:
        """Which pieces are not ASCII: Java hashes UTF-16 units."""
        high = self._not_ascii
        if not len(high):
            return np.zeros(len(begins), dtype=np.bool_)
        odd: Bools = np.searchsorted(high, begins) != np.searchsorted(high, ends)
        return odd

    def behind(self, prefixes: U32, begins: Int64s, ends: Int64s) -> U32:
        """The hashes of texts that are a text of hash `prefixes` and a piece of any characters."""
        result = prefixes * powers_of_31(ends - begins) + self.of(begins, ends)
        for row in np.flatnonzero(self.are_odd(begins, ends)).tolist():
            piece = self._chars[int(begins[row]) : int(ends[row])].tobytes()
            result[row] = _hash_behind(int(prefixes[row]), piece)
        return result


def _hash_behind(prefix: int, piece: bytes) -> int:
    text = piece.decode("utf-8", "replace")
    units = len(text.encode("utf-16-be", "surrogatepass")) // 2
    return (prefix * pow(31, units, _MODULUS) + java_string_hash(text)) % _MODULUS


def key_hashes(topic_hashes: U32, keys: Sequence[bytes]) -> Int64s:
    """Index hashes (0 ... 2**31 - 1) of `topic#key`, in order. `topic_hashes`: Java hashes of
    `topic#` modulo 2**32, one per key."""
    lengths = np.fromiter(map(len, keys), dtype=np.int64, count=len(keys))
    ends = np.cumsum(lengths)
    if len(keys) > 1 and ends[-1] > _BYTES_MAX:  # keys may be long, and tables grow with them
        half = len(keys) // 2
        parts = (topic_hashes[:half], keys[:half]), (topic_hashes[half:], keys[half:])
        return np.concatenate([key_hashes(*part) for part in parts])
    pieces = PieceHashes(np.frombuffer(b"".join(keys), dtype=np.uint8))
    return index_hashes(pieces.behind(topic_hashes, ends - lengths, ends))


def index_hashes(hashes: U32) -> Int64s:
    """What the index keeps of Java's hashes: `abs`, and 0 where that is negative in Java."""
    signed = np.abs(hashes.view(np.int32).astype(np.int64))
    signed[signed == 1 << 31] = 0
    return signed


def entry_columns(
    topic_hashes: Sequence[int],
    counts: Sequence[int],
    phy_offsets: Sequence[int],
    timestamps: Sequence[int],
    keys: Sequence[bytes],
) -> tuple[Int64s, Int64s, Int64s]:
    """(key hashes, offsets, timestamps) per key, from one value per record and all its keys.
    `counts`: how many of `keys` each record has, in order."""
    per_record = np.array(counts, dtype=np.int64)
    prefixes = np.repeat(np.array(topic_hashes, dtype=np.uint32), per_record)
    return (
        key_hashes(prefixes, keys),
        np.repeat(np.array(phy_offsets, dtype=np.int64), per_record),
        np.repeat(np.array(timestamps, dtype=np.int64), per_record),
    )


class SlotTable:
    """The slots of one index file in memory: the newest entry number of each; 0 if none."""

    def __init__(self, slot_num: int) -> None:
        pages = mmap.mmap(-1, 4 * slot_num)
        with suppress(OSError):  # a kernel without them
            # The first keys touch nearly all of 20 MB: the loop would wait for every page at once.
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        self._slots: Int32s = np.frombuffer(pages, dtype=np.int32)
        self._changed = np.zeros(-(-slot_num // _BLOCK_SLOTS), dtype=np.bool_)

    @classmethod
    def read(cls, fd: int, position: int, slot_num: int) -> "SlotTable":
        """Takes over the slots at `position` of a file; holes cost neither time nor memory."""
        table = cls(slot_num)
        end = position + 4 * slot_num
        at = position
        while at < end:
            data = next_data(fd, at)
            if data is None:
                break
            at = max(at, data)
            at -= (at - position) % 4
            hole = min(disk.lseek(fd, at, os.SEEK_HOLE), end)
            hole += -(hole - position) % 4
            raw = disk.pread(fd, min(hole - at, 1 << 20), at)
            values = np.frombuffer(raw[: len(raw) // 4 * 4], dtype=">i4")
            first = (at - position) // 4
            table._slots[first : first + len(values)] = values
            if not len(values):
                break
            at += 4 * len(values)
        return table

    @classmethod
    def of_entries(cls, hashes: Int32s, slot_num: int) -> "SlotTable":
        """Rebuilds the slots from the hashes of entries 1, 2, ...; the last entry of a slot wins.
        Every block counts as changed."""
        table = cls(slot_num)
        table._changed[:] = True
        slots = hashes % np.int32(slot_num)
        np.maximum.at(table._slots, slots, np.arange(1, len(hashes) + 1, dtype=np.int32))
        return table

    def used(self) -> int:
        return int(np.count_nonzero(self._slots))

    def get(self, slot: int) -> int:
        return int(self._slots[slot])

    def set(self, slot: int, entry: int) -> None:
        self._slots[slot] = entry
        self._changed[slot // _BLOCK_SLOTS] = True

    def chain(self, hashes: Int64s, first_entry: int) -> tuple[Int32s, Int64s, Int64s]:
        """Chains entries `first_entry`, ... to what their slots hold, and to each other: (previous
        entry of each, slots whose head changes, their new heads). Nothing changes until `apply`, so
        that the entries can be written first."""
        slots = hashes % len(self._slots)
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order]
        numbers = order + first_entry
        previous_sorted = self._slots[sorted_slots]
        previous_sorted[previous_sorted >= first_entry] = 0
        same = sorted_slots[1:] == sorted_slots[:-1]
        previous_sorted[1:][same] = numbers[:-1][same]
        previous = np.empty(len(hashes), dtype=np.int32)
        previous[order] = previous_sorted
        is_last = np.append(~same, True)
        return previous, sorted_slots[is_last], numbers[is_last]

    def apply(self, slots: Int64s, heads: Int64s) -> int:
        """Sets new heads; how many of these slots were empty."""
        were_empty = int(np.count_nonzero(self._slots[slots] == 0))
        self._slots[slots] = heads
        self._changed[slots // _BLOCK_SLOTS] = True
        return were_empty

    def changed_runs(self) -> Iterator[tuple[int, bytes]]:
        """(first slot, bytes in file order) of each run of changed blocks; then none is changed."""
        blocks = np.flatnonzero(self._changed)
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
            if len(run):
                first = int(run[0]) * _BLOCK_SLOTS
                last = (int(run[-1]) + 1) * _BLOCK_SLOTS
                yield first, self._slots[first:last].astype(">i4").tobytes()
        self._changed[:] = False


def pack_entries(hashes: Int64s, phy_offsets: Int64s, diffs: Int64s, previous: Int32s) -> bytes:
    """The 20-byte entries in file order."""
    entries = np.empty(len(hashes), dtype=ENTRY)
    entries["hash"] = hashes
    entries["offset"] = phy_offsets
    entries["seconds"] = diffs
    entries["previous"] = previous
    return entries.tobytes()


def seconds_since(begin_ms: int, timestamps: Int64s) -> Int64s:
    """Whole seconds from `begin_ms`, 0 ... 2**31 - 1."""
    seconds: Int64s = np.clip((timestamps - begin_ms) // 1000, 0, 2**31 - 1)
    return seconds


def good_entries(raw: bytes, phy_min: int, phy_max: int) -> int:
    """How many leading entries could have been written: offsets in bounds and never falling."""
    phy = np.frombuffer(raw, dtype=ENTRY)["offset"].astype(np.int64)
    if not len(phy):
        return 0
    good = (phy >= phy_min) & (phy <= phy_max)
    good[1:] &= phy[1:] >= phy[:-1]
    return len(phy) if good.all() else int(np.argmin(good))


def entry_hashes(raw: bytes) -> Int32s:
    """The key hashes of packed entries."""
    return np.frombuffer(raw, dtype=ENTRY)["hash"].astype(np.int32)
