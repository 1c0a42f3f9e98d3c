"""One stretch of the log in all replicas: equal bytes at once, what differs record by record.

Replicas are byte-identical up to the smaller confirmOffset, so their bytes are compared as they
are; only where these differ, the records of each replica are located. Each side locates its own
records, so damage in one replica does not hide records of another. They are joined by log offset;
where they do not agree, see `vote`. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from batonmq.protocol.records.codec import END_FILE_MIN_BLANK
from batonmq.protocol.records.columns import Bools, Int64s, Records
from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.replica_groups import ReplicaGroup
from batonmq.spark.differences.sides import Items, Side, Stretch
from batonmq.spark.differences.vote import Vote
from batonmq.spark.read.log_range import Block


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

    compared_bytes: int = 0
    held: list[Held] = field(default_factory=list)
    findings: list[LogFinding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How stretches of a group are compared."""

    group: ReplicaGroup
    unconfirmed: bool = False

    def of(self, sides: Sequence[Side], stretch: Stretch) -> Compared:
        """Compare one stretch. Raises OSError."""
        sides = [side for side in sides if side.limit > stretch.begin]
        for side in sides:
            side.hold(stretch)
        if not sides:
            return Compared()
        result = Compared(min(stretch.end, max(s.limit for s in sides)) - stretch.begin)
        longest = max(sides, key=lambda side: (side.limit, -side.index))
        items = longest.items(stretch)
        if not items.damages and _all_equal(longest, items, sides, stretch):
            for block in items.blocks:
                ends = block.base + block.records.start + block.records.size
                have = sum(np.where(ends <= side.limit, 1 << side.index, 0) for side in sides)
                result.held.append(_whole(block, block.records, np.asarray(have, np.int64)))
        else:
            every = {side.index: side.items(stretch) for side in sides}
            self._differing(result, sides, every, stretch)
        return result

    def _differing(
        self, result: Compared, sides: Sequence[Side], every: Mapping[int, Items], stretch: Stretch
    ) -> None:
        starts, first_at = np.unique(
            np.concatenate([items.starts for items in every.values()]), return_index=True
        )
        ends = np.concatenate([items.ends for items in every.values()])[first_at]
        agree, have = self._agreement(sides, every, starts, ends)
        taken = np.zeros(len(starts), np.bool_)
        for side in sides:
            wanted = agree & ~taken & ((have >> side.index) & 1 == 1)
            taken |= wanted
            for block in every[side.index].blocks:
                at = np.searchsorted(starts, block.records.start + block.base)
                mine = wanted[at]
                if mine.any():
                    result.held.append(_whole(block, block.records.keep(mine), have[at[mine]]))
        vote = Vote(self.group, sides, every, stretch, self.unconfirmed)
        for offset in starts[~agree].tolist():
            for message, its, lack, is_true in vote.place(offset):
                one = np.ones(1, np.int64)
                result.held.append(Held(
                    message.window, message.base, message.records, one * its, one * lack,
                    one * is_true > 0,
                ))  # fmt: skip
        result.findings += [*vote.findings, *vote.damages()]

    def _agreement(
        self, sides: Sequence[Side], every: Mapping[int, Items], starts: Int64s, ends: Int64s
    ) -> tuple[Bools, Int64s]:
        """(agree, have) for each start: whether all that must hold the record hold the same bytes,
        and a bit mask of the sides that hold it.
        """
        agree = np.ones(len(starts), np.bool_)
        have = np.zeros(len(starts), np.int64)
        known = np.zeros(len(starts), np.int64)
        digests = {side.index: _digests(every[side.index], starts) for side in sides}
        for mine in digests.values():
            known = np.where(known == 0, mine, known)
        for side in sides:
            mine = digests[side.index]
            scope = ends <= (side.limit if self.unconfirmed else side.confirm)
            agree &= np.where(scope, mine == known, (mine == known) | (mine == 0))
            have |= np.where(mine == known, np.int64(1) << side.index, 0)
        return agree, have


def _all_equal(longest: Side, items: Items, sides: Sequence[Side], stretch: Stretch) -> bool:
    """Whether all sides hold the bytes of these records, as far as they confirm them."""
    end = stretch.end
    if len(items.ends):
        end = int(items.ends[-1])
        if end < stretch.end:  # what follows is a blank: only its head has a content
            end += END_FILE_MIN_BLANK
    end = min(end, longest.limit)
    data = longest.read(stretch.begin, end)
    if len(data) < end - stretch.begin:
        return False
    for side in sides:
        size = min(end, side.limit) - stretch.begin
        theirs = data if side is longest else side.read(stretch.begin, end)
        if len(theirs) < size or theirs != (data if size == len(data) else data[:size]):
            return False
    return True


def _whole(block: Block, records: Records, have: Int64s) -> Held:
    rows = len(records)
    lack, is_true = np.zeros(rows, np.int64), np.ones(rows, np.bool_)
    return Held(block.window, block.base, records, have, lack, is_true)


def _digests(items: Items, starts: Int64s) -> Int64s:
    """A 64-bit hash of each record of a side by the index of its start; 0 where it has none."""
    found = np.zeros(len(starts), np.int64)
    for block in items.blocks:
        begins, sizes = block.records.start.tolist(), block.records.size.tolist()
        hashes = [
            hash(block.window[a : a + size]) or 1 for a, size in zip(begins, sizes, strict=True)
        ]
        found[np.searchsorted(starts, block.records.start + block.base)] = hashes
    return found
