"""Dispatch of many common records at once, with numpy.

`RecordColumns` holds what dispatch needs of common records (`protocol.records.common`) with ASCII
topics, in which UNIQ_KEY, KEYS and TAGS occur at most once and are not empty. The caller dispatches
other records one by one. No CRC is checked. `dispatch_run` puts a run of them into queues and
index. Topics and properties of all records are copied into one buffer, `chars`; values are
positions in it. Imported only when there is enough to dispatch, so an idle broker loads no numpy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batonmq.protocol.layout import UNIT
from batonmq.protocol.records.codec import CRC_TAIL_SIZE
from batonmq.protocol.records.columns import (
    BYTES_MAX,
    Bools,
    Bytes,
    Int64s,
    Records,
    are_common,
    chain,
    locate,
    take_fields,
)
from batonmq.protocol.tags import tags_code
from batonmq.store.index_batch import U32, PieceHashes, index_hashes
from batonmq.store.index_service import IndexService
from batonmq.store.queue_table import QueueTable, StoredQueue

ROWS_MAX: Final = 1024

_UNIT: Final = np.dtype(UNIT.dtype)
_SPACE: Final = ord(" ")
_HASH_SIGN: Final = np.uint32(ord("#"))
# Behind `chars`: then nine bytes can be read at each position.
_PAD: Final = bytes(9)
_EIGHT: Final = np.dtype(">u8")


class _Values(NamedTuple):
    """Values of one property: `chars[begins:ends]` belongs to the record `rows`."""

    rows: Int64s
    begins: Int64s
    ends: Int64s

    def of(self, rows: Bools) -> _Values:
        chosen = rows[self.rows]
        return _Values(self.rows[chosen], self.begins[chosen], self.ends[chosen])


class RecordColumns:
    """Common records of one segment in log order, a row each. `end`: where the records end that
    were read. By row: `begins` and `ends` in the log, `queue_ids`, `queue_offsets`, `stored_at`
    (ms), `topic_numbers` (positions in `topics`), `units` (packed consume queue units). By index
    entry, in order: `entry_rows`, `entry_hashes`."""

    begins: Int64s
    ends: Int64s
    queue_ids: Int64s
    queue_offsets: Int64s
    stored_at: Int64s
    topic_numbers: Int64s
    topics: list[bytes]
    units: npt.NDArray[np.void]
    entry_rows: Int64s
    entry_hashes: Int64s

    def __init__(
        self,
        view: memoryview,
        start: int,
        offset: int,
        limit: int,
        segment_end: int,
        excluded: Collection[bytes],
    ) -> None:
        """Reads records that begin in [`offset`, `limit`), at most ROWS_MAX or BYTES_MAX. `view` is
        the log from `start` on. Records of the `excluded` topics are left out."""
        starts, end = chain(view, offset - start, min(limit, offset + BYTES_MAX) - start, ROWS_MAX)
        records, good = locate(view, starts)
        self.end = start + (end if good == len(starts) else int(starts[good]))
        common = are_common(view, records, start, segment_end)
        if not common.all():
            records = records.keep(common)
        self.begins = records.physical_offset
        self.ends = self.begins + records.size
        self.queue_ids = records.queue_id
        self.queue_offsets = records.queue_offset
        self.stored_at = records.store_ms
        self._read_tails(view, records, excluded)

    def __len__(self) -> int:
        return len(self.begins)

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first row, row behind the last) of records that follow directly on each other."""
        breaks = np.flatnonzero(self.begins[1:] != self.ends[:-1]) + 1
        first = 0
        for behind in (*breaks.tolist(), len(self)):
            if behind > first:
                yield first, behind
            first = behind

    def _read_tails(self, view: memoryview, records: Records, excluded: Collection[bytes]) -> None:
        begins, ends = records.topic_at - 1, records.start + records.size
        joined = bytearray()
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            joined += view[begin:end]
        joined += _PAD
        tails = _Tails(joined, np.cumsum(ends - begins), records.topic_length)
        uniq = tails.values(b"UNIQ_KEY\x01")
        keys = tails.values(b"KEYS\x01")
        tags = tails.values(b"TAGS\x01")
        hashes = PieceHashes(tails.chars)
        topic_hashes = hashes.of(tails.topic_begins, tails.topic_ends)
        self._number_topics(tails, hashes, topic_hashes, excluded)
        good = tails.good
        self._pack_units(tags.of(good), tails, hashes)
        pieces = _in_order(uniq.of(good), _split(keys.of(good), tails.chars))
        prefixes = topic_hashes * np.uint32(31) + _HASH_SIGN  # of "topic#"
        entries = hashes.behind(prefixes[pieces.rows], pieces.begins, pieces.ends)
        self.entry_hashes = index_hashes(entries)
        self._keep(good, pieces.rows)

    def _number_topics(
        self, tails: _Tails, hashes: PieceHashes, topic_hashes: U32, excluded: Collection[bytes]
    ) -> None:
        """Equal hash and length do not prove equal topics: only rows of the first topic stay."""
        begins, lengths = tails.topic_begins, tails.topic_ends - tails.topic_begins
        tails.good &= ~hashes.are_odd(begins, tails.topic_ends)
        _, firsts, numbers = np.unique(
            topic_hashes.astype(np.int64) << 8 | lengths, return_index=True, return_inverse=True
        )
        self.topic_numbers = numbers.reshape(-1)
        same_as = firsts[self.topic_numbers]
        for length in np.flatnonzero(np.bincount(lengths)).tolist():
            rows = np.flatnonzero(lengths == length)
            text = np.dtype(f"V{max(length, 1)}")
            texts = take_fields(tails.joined, begins[rows], text)
            first_texts = take_fields(tails.joined, begins[same_as[rows]], text)
            if texts.tobytes() != first_texts.tobytes():
                tails.good[rows[texts != first_texts]] = False
        self.topics = []
        for number, first in enumerate(firsts.tolist()):
            topic = bytes(tails.joined[int(begins[first]) : int(tails.topic_ends[first])])
            self.topics.append(topic)
            if topic in excluded:
                tails.good &= self.topic_numbers != number

    def _pack_units(self, tags: _Values, tails: _Tails, hashes: PieceHashes) -> None:
        codes = np.zeros(len(self), dtype=np.int64)
        codes[tags.rows] = hashes.of(tags.begins, tags.ends).view(np.int32)
        for at in np.flatnonzero(hashes.are_odd(tags.begins, tags.ends)).tolist():
            tag = bytes(tails.joined[int(tags.begins[at]) : int(tags.ends[at])])
            codes[tags.rows[at]] = tags_code(tag)
        units = np.empty(len(self), dtype=_UNIT)
        units["offset"], units["size"] = self.begins, self.ends - self.begins
        units["tags_code"] = codes
        self.units = units

    def _keep(self, good: Bools, entry_rows: Int64s) -> None:
        """Leaves the other rows out. Entries belong to good rows only."""
        if good.all():
            self.entry_rows = entry_rows
            return
        self.entry_rows = (np.cumsum(good) - 1)[entry_rows]
        for name in (
            "begins", "ends", "queue_ids", "queue_offsets", "stored_at", "topic_numbers", "units",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name)[good])


class _Tails:
    """What follows the body of each record, joined: topic and properties with their lengths.
    `good`: rows of which all properties were found as expected."""

    def __init__(self, joined: bytearray, ends: Int64s, topic_lengths: Int64s) -> None:
        self.joined = joined
        self.chars: Bytes = np.frombuffer(joined, dtype=np.uint8)[: len(joined) - len(_PAD)]
        self.good: Bools = np.ones(len(ends), dtype=np.bool_)
        self._begins = np.concatenate(([0], ends[:-1])) if len(ends) else ends
        self.topic_begins = self._begins + 1
        self.topic_ends = self.topic_begins + topic_lengths
        self._properties = self.topic_ends + 2
        self._crc_at = ends - CRC_TAIL_SIZE
        chars, begins = self.chars, self._begins
        # Each property, also the first one, has a separator before it from here on.
        chars[begins] = 0
        chars[self._properties - 2] = 0
        chars[self._properties - 1] = 2
        self._separators = np.flatnonzero(chars == 2)
        self._words = take_fields(joined, self._separators + 1, _EIGHT).astype(np.uint64)

    def values(self, needle: bytes) -> _Values:
        """The values of the property that begins with `needle`: a name of at most 8 letters and
        \\x01. A record with the property twice, empty or unterminated is no longer good."""
        head = needle[: _EIGHT.itemsize]
        shift = np.uint64(8 * (_EIGHT.itemsize - len(head)))
        found = np.flatnonzero(self._words >> shift == int.from_bytes(head, "big"))
        if len(needle) > len(head):
            behind = self._separators[found] + 1 + len(head)
            found = found[self.chars[np.minimum(behind, len(self.chars) - 1)] == needle[-1]]
        at = self._separators[found]
        rows = np.searchsorted(self._begins, at, "right") - 1
        begins = at + 1 + len(needle)
        ends = np.append(self._separators, len(self.chars))[found + 1]
        bad = (at < self._properties[rows] - 1) | (ends >= self._crc_at[rows]) | (ends <= begins)
        bad[1:] |= rows[1:] == rows[:-1]
        self.good[rows[bad]] = False
        return _Values(rows, begins, ends)


def _split(values: _Values, chars: Bytes) -> _Values:
    """The pieces between spaces, without empty ones."""
    spaces = np.flatnonzero(chars == _SPACE)
    if not len(spaces) or not len(values.rows):
        return values
    places = np.searchsorted(values.begins, spaces, "right") - 1
    within = (places >= 0) & (spaces < values.ends[places])
    spaces, places = spaces[within], places[within]
    begins = np.sort(np.concatenate((values.begins, spaces + 1)))
    ends = np.sort(np.concatenate((values.ends, spaces)))
    rows = np.sort(np.concatenate((values.rows, values.rows[places])))
    full = ends > begins
    return _Values(rows[full], begins[full], ends[full])


def _in_order(uniq: _Values, keys: _Values) -> _Values:
    """All of them by record, UNIQ_KEY first."""
    rows = np.concatenate((uniq.rows, keys.rows))
    order = np.argsort(rows, kind="stable")
    begins = np.concatenate((uniq.begins, keys.begins))
    ends = np.concatenate((uniq.ends, keys.ends))
    return _Values(rows[order], begins[order], ends[order])


class _Share(NamedTuple):
    """What one queue gets of a run."""

    queue: StoredQueue
    units: bytes
    next_offset: int


def dispatch_run(
    columns: RecordColumns,
    first: int,
    behind: int,
    queues: QueueTable,
    index: IndexService | None,
    touched: set[StoredQueue],
) -> bool:
    """Makes the rows [first, behind) visible. False if they must be dispatched one by one; then
    nothing changed. Raises OSError if the disk fails."""
    shares = _shares(columns, slice(first, behind), queues)
    if shares is None or not (index is None or _put_entries(columns, first, behind, index)):
        return False
    for queue, units, next_offset in shares:
        queue.consume_queue.append_units(units)
        queue.next_offset = max(queue.next_offset, next_offset)
        touched.add(queue)
    return True


def _shares(columns: RecordColumns, run: slice, queues: QueueTable) -> list[_Share] | None:
    """By the first record of each queue; None if a queue does not simply continue."""
    keys = columns.topic_numbers[run] << 32 | (columns.queue_ids[run] & 0xFFFFFFFF)
    order = np.argsort(keys, kind="stable")
    sorted_keys, offsets = keys[order], columns.queue_offsets[run][order]
    changes = sorted_keys[1:] != sorted_keys[:-1]
    if (~changes & (offsets[1:] != offsets[:-1] + 1)).any():
        return None
    begins = np.concatenate(([0], np.flatnonzero(changes) + 1))
    stops = np.append(begins[1:], len(keys))
    units = columns.units[run][order].tobytes()
    ends = columns.ends[run][order]
    unit_size = columns.units.itemsize
    shares: list[_Share] = []
    by_first = np.argsort(order[begins])
    for key, begin, stop, offset, first_end in _rows_of(
        by_first, sorted_keys[begins], begins, stops, offsets[begins], ends[begins]
    ):
        queue = queues.of_bytes(columns.topics[key >> 32], _signed(key & 0xFFFFFFFF))
        consume_queue = queue.consume_queue
        if not queue.is_plain:  # for example a name that no queue can have
            return None
        if offset != consume_queue.max_offset or first_end <= consume_queue.last_physical_end:
            return None
        packed = units[begin * unit_size : stop * unit_size]
        shares.append(_Share(queue, packed, offset + stop - begin))
    return shares


def _rows_of(order: Int64s, *columns: Int64s) -> list[tuple[int, ...]]:
    """The columns as tuples of plain numbers, in `order`."""
    return list(zip(*(column[order].tolist() for column in columns), strict=True))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _put_entries(columns: RecordColumns, first: int, behind: int, index: IndexService) -> bool:
    from_entry, to_entry = np.searchsorted(columns.entry_rows, (first, behind)).tolist()
    if from_entry == to_entry:
        return True
    rows = columns.entry_rows[from_entry:to_entry]
    return index.put_entries(
        columns.entry_hashes[from_entry:to_entry], columns.begins[rows], columns.stored_at[rows]
    )
