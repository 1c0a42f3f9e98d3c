"""One stretch of the log in all replicas: equal bytes at once, what differs record by record.

Replicas are byte-identical up to the smaller confirmOffset, so their bytes are compared as they
are; only where these differ, the records of each replica are located. Each side locates its own
records, so damage in one replica does not hide records of another. Free of Spark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from batonmq.protocol.record import END_FILE_MIN_BLANK
from batonmq.spark.audit.disagreement import MajorityVote, Place
from batonmq.spark.audit.findings import Finding
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.audit.sides import Absent, Items, Side, Stretch
from batonmq.spark.read.log_range import Block
from batonmq.spark.read.record_columns import Bools, Int64s, Records

AnySide = Side | Absent


@dataclass(frozen=True, slots=True)
class Held:
    """Records of one block, and which replicas have each of them: bits by their numbers.

    `lack`: those that confirm it and do not have it. `is_true`: what the replicas agree on, or most
    of them hold; a record that is not is one replica's alone.
    """

    window: bytes
    base: int
    records: Records
    have: Int64s
    lack: Int64s
    is_true: Bools

    @property
    def ends(self) -> Int64s:
        """Log offsets behind the records."""
        return self.records.start + self.records.size + self.base


@dataclass(slots=True)
class Compared:
    """The result of one stretch."""

    held: list[Held] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    compared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """How stretches of a group are compared."""

    group: ReplicaGroup
    check_crc: bool = True
    unconfirmed: bool = False
    record_bytes_max: int = 32 << 20

    def of(self, sides: Sequence[AnySide], stretch: Stretch) -> Compared:
        """Compare one stretch. Raises OSError."""
        sides = [side for side in sides if side.limit > stretch.begin]
        for side in sides:
            side.hold(stretch)
        if not sides:
            return Compared()
        longest = max(sides, key=lambda side: (side.limit, -side.index))
        items = self._items(longest, stretch)
        if not items.damages and _all_equal(longest, items, sides, stretch):
            return _agreed(sides, items, stretch)
        return self._differing(sides, stretch)

    def _items(self, side: AnySide, stretch: Stretch) -> Items:
        return side.items(stretch, check_crc=self.check_crc, record_bytes_max=self.record_bytes_max)

    def _differing(self, sides: Sequence[AnySide], stretch: Stretch) -> Compared:
        every = {side.index: self._strict_items(side, stretch) for side in sides}
        parts = [items.starts for items in every.values()]
        starts, first_at = np.unique(np.concatenate(parts), return_index=True)
        ends = np.concatenate([items.ends for items in every.values()])[first_at]
        agree, have = self._agreement(sides, every, starts, ends)
        result = Compared(compared_bytes=min(stretch.end, max(s.limit for s in sides)))
        result.compared_bytes -= stretch.begin
        vote = MajorityVote(
            self.group,
            sides,
            every,
            stretch,
            unconfirmed=self.unconfirmed,
            record_bytes_max=self.record_bytes_max,
        )
        taken = np.zeros(len(starts), np.bool_)
        for side in sides:
            wanted = agree & ~taken & ((have >> side.index) & 1 == 1)
            taken |= wanted
            for block in every[side.index].blocks:
                at = np.searchsorted(starts, block.records.start + block.base)
                mine_here = wanted[at]
                if mine_here.any():
                    at = at[mine_here]
                    records = block.records.keep(mine_here)
                    result.held.append(_whole(block, records, have[at]))
        places: list[Place] = []
        for index in np.flatnonzero(~agree).tolist():
            place = vote.place(int(starts[index]))
            places.append(place)
            result.findings += place.findings
            for window, base, records, mask, lack, is_true in place.held:
                ones = np.ones(len(records), np.int64)
                result.held.append(
                    Held(window, base, records, ones * mask, ones * lack, ones * is_true > 0)
                )
        result.findings += vote.damages(places)
        return result

    def _agreement(
        self, sides: Sequence[AnySide], every: Mapping[int, Items], starts: Int64s, ends: Int64s
    ) -> tuple[Bools, Int64s]:
        """(agree, have) for each start: whether all that must hold the record hold the same bytes,
        and a bit mask of the sides that hold it.
        """
        agree = np.ones(len(starts), np.bool_)
        have = np.zeros(len(starts), np.int64)
        known = np.zeros(len(starts), np.int64)
        digests = {side.index: _digests(every[side.index], starts, len(starts)) for side in sides}
        for mine in digests.values():
            fresh = (known == 0) & (mine != 0)
            known[fresh] = mine[fresh]
        for side in sides:
            mine = digests[side.index]
            scope = ends <= (side.limit if self.unconfirmed else side.confirm)
            agree &= np.where(scope, mine == known, (mine == known) | (mine == 0))
            have |= np.where(mine == known, np.int64(1) << side.index, 0)
        return agree, have

    def _strict_items(self, side: AnySide, stretch: Stretch) -> Items:
        """Where replicas differ CRCs are checked even if `check_crc` is off."""
        return side.items(stretch, check_crc=True, record_bytes_max=self.record_bytes_max)


def _all_equal(longest: AnySide, items: Items, sides: Sequence[AnySide], stretch: Stretch) -> bool:
    """Whether all sides hold the bytes of these records, as far as they confirm them."""
    end = stretch.end
    if items.blocks:
        end = int(items.ends[-1])
        if end < stretch.end:  # what follows is a blank: only its head has a content
            end += END_FILE_MIN_BLANK
    end = min(end, longest.limit)
    data = longest.read(stretch.begin, end)
    if len(data) < end - stretch.begin:
        return False
    for side in sides:
        if side is longest:
            continue
        theirs = side.read(stretch.begin, end)
        size = min(end, side.limit) - stretch.begin
        if len(theirs) < size or theirs != (data if size == len(data) else data[:size]):
            return False
    return True


def _agreed(sides: Sequence[AnySide], items: Items, stretch: Stretch) -> Compared:
    result = Compared(compared_bytes=min(stretch.end, max(s.limit for s in sides)) - stretch.begin)
    for block in items.blocks:
        ends = block.base + block.records.start + block.records.size
        have = np.zeros(len(ends), np.int64)
        for side in sides:
            have |= np.where(ends <= side.limit, np.int64(1) << side.index, 0)
        result.held.append(_whole(block, block.records, have))
    return result


def _whole(block: Block, records: Records, have: Int64s) -> Held:
    rows = len(records)
    return Held(
        block.window, block.base, records, have, np.zeros(rows, np.int64), np.ones(rows, np.bool_)
    )


def _digests(items: Items, starts: Int64s, count: int) -> Int64s:
    """A 64-bit hash of each record of a side by the index of its start; 0 where it has none."""
    found = np.zeros(count, np.int64)
    for block in items.blocks:
        records, window = block.records, block.window
        begins = records.start.tolist()
        stops = (records.start + records.size).tolist()
        hashes = [hash(window[a:b]) or 1 for a, b in zip(begins, stops, strict=True)]
        at = np.searchsorted(starts, records.start + block.base)
        found[at] = np.array(hashes, np.int64)
    return found
