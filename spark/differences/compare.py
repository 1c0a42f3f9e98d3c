"""One stretch of the log in all replicas: equal bytes at once, what differs record by record.

Replicas are byte-identical up to the smaller confirmOffset, so their bytes are compared as they
are; only where these differ, the records of each replica are located. Each side locates its own
records, so damage in one replica does not hide records of another. They are joined by log offset;
where they do not agree, see `vote`. Free of Spark.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from batonmq.protocol.records.codec import END_FILE_MIN_BLANK
from batonmq.protocol.records.columns import Bools, Int64s
from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.replica_groups import ReplicaGroup
from batonmq.spark.differences.sides import Items, Side
from batonmq.spark.differences.vote import Vote
from batonmq.spark.read.log_range import Block


@dataclass(frozen=True, slots=True)
class Held:
    """Records of one block, and which replicas have each of them: bits by their numbers.

    `lack`: those that confirm it and do not have it. `is_true`: what the replicas agree on, or most
    of them hold; a record that is not is one replica's alone.
    """

    block: Block
    have: Int64s
    lack: Int64s
    is_true: Bools


def compare(
    group: ReplicaGroup, sides: Sequence[Side], begin: int, end: int, *, unconfirmed: bool
) -> Iterator[Held | LogFinding | int]:
    """Records that begin in [begin, end), what is found, and how many bytes were compared.

    Raises OSError.
    """
    sides = [side for side in sides if side.limit > begin]
    if not sides:
        return
    for side in sides:
        side.hold(begin, end)
    yield min(end, max(side.limit for side in sides)) - begin
    # Where all bytes are equal, the one that may be read furthest has what any of them has.
    longest = max(sides, key=lambda side: (side.limit, -side.index))
    items = longest.items(begin, end)
    if not items.damages and _all_equal(longest, items, sides, begin, end):
        for block in items.blocks:
            have = sum(np.where(block.ends <= side.limit, 1 << side.index, 0) for side in sides)
            yield _whole(block, np.asarray(have, np.int64))
        return
    every = {side.index: side.items(begin, end) for side in sides}
    starts, first_at = np.unique(
        np.concatenate([items.starts for items in every.values()]), return_index=True
    )
    ends = np.concatenate([items.ends for items in every.values()])[first_at]
    agree, have = _agreement(sides, every, starts, ends, unconfirmed=unconfirmed)
    taken = np.zeros(len(starts), np.bool_)
    for side in sides:
        wanted = agree & ~taken & ((have >> side.index) & 1 == 1)
        taken |= wanted
        for block in every[side.index].blocks:
            at = np.searchsorted(starts, block.starts)
            mine = wanted[at]
            if mine.any():
                yield _whole(block.keep(mine), have[at[mine]])
    vote = Vote(group, sides, every, end, unconfirmed)
    for offset in starts[~agree].tolist():
        for message, its, lack, is_true in vote.place(offset):
            one = np.ones(1, np.int64)
            yield Held(message.block, one * its, one * lack, one * is_true > 0)
    yield from vote.findings
    yield from vote.damages()


def _agreement(
    sides: Sequence[Side],
    every: Mapping[int, Items],
    starts: Int64s,
    ends: Int64s,
    *,
    unconfirmed: bool,
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
        scope = ends <= (side.limit if unconfirmed else side.confirm)
        agree &= np.where(scope, mine == known, (mine == known) | (mine == 0))
        have |= np.where(mine == known, np.int64(1) << side.index, 0)
    return agree, have


def _all_equal(longest: Side, items: Items, sides: Sequence[Side], begin: int, end: int) -> bool:
    """Whether all sides hold the bytes of these records, as far as they confirm them."""
    if len(items.ends):
        last = int(items.ends[-1])
        # Where the stretch does not end, a blank follows: only its head has a content.
        end = last + END_FILE_MIN_BLANK if last < end else last
    end = min(end, longest.limit)
    data = longest.read(begin, end)
    if len(data) < end - begin:
        return False
    for side in sides:
        size = min(end, side.limit) - begin
        theirs = data if side is longest else side.read(begin, end)
        if len(theirs) < size or theirs != (data if size == len(data) else data[:size]):
            return False
    return True


def _whole(block: Block, have: Int64s) -> Held:
    rows = len(block.records)
    return Held(block, have, np.zeros(rows, np.int64), np.ones(rows, np.bool_))


def _digests(items: Items, starts: Int64s) -> Int64s:
    """A 64-bit hash of each record of a side by the index of its start; 0 where it has none."""
    found = np.zeros(len(starts), np.int64)
    for block in items.blocks:
        begins, sizes = block.records.start.tolist(), block.records.size.tolist()
        hashes = [
            hash(block.window[a : a + size]) or 1 for a, size in zip(begins, sizes, strict=True)
        ]
        found[np.searchsorted(starts, block.starts)] = hashes
    return found
