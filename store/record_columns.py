"""The fields of many common records at once, as numpy columns, for dispatch in bulk.

What is common is as in `log_scan.quick_record`; besides, UNIQ_KEY, KEYS and TAGS stand at most once
and are not empty, and the topic is ASCII. Other records are left out, and whoever dispatches takes
them one by one. Nothing is checked by CRC here.

The topics and properties of all records are copied behind one another into one buffer, `chars`;
places of values are positions in it, and all arithmetic is on whole columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from batonmq.protocol.layout import RECORD_HEAD, UNIT
from batonmq.protocol.record import (
    CRC_PROPERTY,
    CRC_TAIL_SIZE,
    END_FILE_MIN_BLANK,
    FIXED_SIZE_V1,
    MAGIC_V1,
    SIZE_MIN_WITH_CRC,
    TOPIC_LENGTH_MAX_V1,
)
from batonmq.protocol.tags import tags_code
from batonmq.store.index_batch import index_hashes
from batonmq.store.log_scan import UNUSUAL_FLAGS
from batonmq.store.record_batch import BYTES_MAX, HEAD, I64, U32, Chars, Mask, PieceHashes, gather

ROWS_MAX: Final = 1024

_UNIT: Final = np.dtype(UNIT.dtype)
_unpack_size: Final = RECORD_HEAD.only("size").unpack_from
_SPACE: Final = ord(" ")
_HASH_SIGN: Final = np.uint32(ord("#"))
# Room behind `chars`, so that eight bytes and one more can be read at each position.
_PAD: Final = bytes(9)
_EIGHT: Final = np.dtype(">u8")


class _Values(NamedTuple):
    """Values of one property: `chars[begins:ends]` belongs to the record `rows`."""

    rows: I64
    begins: I64
    ends: I64

    def of(self, rows: Mask) -> _Values:
        chosen = rows[self.rows]
        return _Values(self.rows[chosen], self.begins[chosen], self.ends[chosen])


class RecordColumns:
    """Common records of one segment, in the order of the log; a row each.

    `end` is where the records end that were looked at. Of each row: `begins` and `ends` in the log,
    `queue_ids`, `queue_offsets`, `stored_at` (ms), `topic_numbers` (a place in `topics`), `units`
    (packed for the consume queue). Of each index entry, in order: `entry_rows`, `entry_hashes`.
    """

    begins: I64
    ends: I64
    queue_ids: I64
    queue_offsets: I64
    stored_at: I64
    topic_numbers: I64
    topics: list[bytes]
    units: npt.NDArray[np.void]
    entry_rows: I64
    entry_hashes: I64

    def __init__(
        self,
        view: memoryview,
        start: int,
        offset: int,
        limit: int,
        segment_end: int,
        excluded: Collection[bytes],
    ) -> None:
        """Reads records that begin in [`offset`, `limit`), at most ROWS_MAX or BYTES_MAX.

        `view` is the log from `start` on, as far as it may be read. Records of the `excluded`
        topics are left out.
        """
        positions, end = _walk(view, offset - start, min(limit, offset + BYTES_MAX) - start)
        self.end = start + end
        heads = gather(view, np.array(positions, dtype=np.int64), HEAD)
        common = _are_common(heads, start + np.array(positions, dtype=np.int64), segment_end)
        heads = heads[common]
        self.begins = heads["physical_offset"].astype(np.int64)
        self.ends = self.begins + heads["size"]
        self.queue_ids = heads["queue_id"].astype(np.int64)
        self.queue_offsets = heads["queue_offset"].astype(np.int64)
        self.stored_at = heads["store_ms"].astype(np.int64)
        bodies = self.begins - start + HEAD.itemsize + heads["body_length"]
        self._read_tails(view, bodies.tolist(), (self.ends - start).tolist(), excluded)

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

    def _read_tails(
        self, view: memoryview, begins: list[int], ends: list[int], excluded: Collection[bytes]
    ) -> None:
        joined = bytearray()
        for begin, end in zip(begins, ends, strict=True):
            joined += view[begin:end]
        tail_ends = np.cumsum(np.array(ends, dtype=np.int64) - np.array(begins, dtype=np.int64))
        joined += _PAD
        tails = _Tails(joined, tail_ends)
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
        """Equal hash and length are not yet equal topics: all but the first one are left out."""
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
            texts = gather(tails.joined, begins[rows], text)
            first_texts = gather(tails.joined, begins[same_as[rows]], text)
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

    def _keep(self, good: Mask, entry_rows: I64) -> None:
        """Leave the other rows out. Entries belong to good rows only."""
        if good.all():
            self.entry_rows = entry_rows
            return
        self.entry_rows = (np.cumsum(good) - 1)[entry_rows]
        for name in (
            "begins", "ends", "queue_ids", "queue_offsets", "stored_at", "topic_numbers", "units",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name)[good])


class _Tails:
    """What follows the body of each record: topic and properties with their lengths, joined.

    `good` says of which rows all was found as it belongs.
    """

    def __init__(self, joined: bytearray, ends: I64) -> None:
        self.joined = joined
        self.chars: Chars = np.frombuffer(joined, dtype=np.uint8)[: len(joined) - len(_PAD)]
        self._begins = np.concatenate(([0], ends[:-1])) if len(ends) else ends
        chars, begins = self.chars, self._begins
        self.topic_begins = begins + 1
        topic_lengths = chars[begins].astype(np.int64)
        self._crc_at = ends - CRC_TAIL_SIZE
        properties = self.topic_begins + topic_lengths + 2
        good = (topic_lengths <= TOPIC_LENGTH_MAX_V1) & (properties <= self._crc_at)
        # Where the lengths cannot be right, any place within the record will do.
        self._properties = np.where(good, properties, begins + 3)
        self.topic_ends = self._properties - 2
        length = chars[self._properties - 2].astype(np.int64) << 8 | chars[self._properties - 1]
        good &= length == ends - self._properties
        good &= gather(joined, self._crc_at, np.dtype(f"S{len(CRC_PROPERTY)}")) == CRC_PROPERTY
        self.good: Mask = good
        # From here on each property, the first one too, has a separator in front.
        chars[begins] = 0
        chars[self._properties - 2] = 0
        chars[self._properties - 1] = 2
        self._separators = np.flatnonzero(chars == 2)
        self._words = gather(joined, self._separators + 1, _EIGHT).astype(np.uint64)

    def values(self, needle: bytes) -> _Values:
        """The values of the property that begins with `needle`, a name of at most 8 letters and
        \\x01.

        A record where it stands twice, or is empty, or has no end, is no longer good.
        """
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


def _walk(view: memoryview, position: int, limit: int) -> tuple[list[int], int]:
    """Where records begin in `view`, by their sizes, and where the last one ends."""
    positions: list[int] = []
    note, available = positions.append, len(view)
    limit = min(limit, available - SIZE_MIN_WITH_CRC + 1)
    while position < limit:
        (size,) = _unpack_size(view, position)
        if size < FIXED_SIZE_V1 or position + size > available or len(positions) >= ROWS_MAX:
            break
        note(position)
        position += size
    return positions, position


def _are_common(heads: npt.NDArray[np.void], offsets: I64, segment_end: int) -> Mask:
    sizes, bodies = heads["size"].astype(np.int64), heads["body_length"]
    common: Mask = (
        (heads["magic"] == MAGIC_V1)
        & (heads["sys_flag"] & UNUSUAL_FLAGS == 0)
        & (heads["physical_offset"] == offsets)
        & (offsets + sizes + END_FILE_MIN_BLANK <= segment_end)
        & (bodies >= 0)
        & (bodies <= sizes - SIZE_MIN_WITH_CRC)
    )
    return common


def _split(values: _Values, chars: Chars) -> _Values:
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
