"""Epochs of a log, the rules for a list of them, and up to where two logs are the same. Pure.

An entry says: from `start_offset` on, the bytes of the log were written by the master of `epoch`.
Only epoch and start are stored; an entry ends where the next one starts, and the last is open.

Invariant of a list: epochs grow strictly, starts never fall. Equal starts mean that nothing was
written in the earlier epoch. Such entries stay (R25), where Java drops the newer one: the last
entry must name the acting master's epoch even if it has not written yet.

Why epochs tell where two logs are the same: an epoch has one master, which writes each offset once,
and a replica takes an epoch's bytes only behind the same bytes as at the master. So two logs that
have an epoch with the same start agree on all before it, and within it as far as both hold it.

Origin: Java `EpochEntry`, `EpochFileCache`; its `findConsistentPoint` may lie above the own log's
end, ours may not.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_OFFSET = 2**63 - 1
NO_CONSISTENT_POINT = -1


@dataclass(frozen=True, slots=True)
class EpochEntry:
    """Log bytes [start_offset, end_offset) belong to `epoch`; MAX_OFFSET is an open end."""

    epoch: int
    start_offset: int
    end_offset: int = MAX_OFFSET


def with_ends(entries: Iterable[EpochEntry], last_end: int = MAX_OFFSET) -> tuple[EpochEntry, ...]:
    """The same epochs and starts, each ending where the next starts and the last at `last_end`."""
    listed = tuple(entries)
    ends = [entry.start_offset for entry in listed[1:]] + [last_end]
    return tuple(
        EpochEntry(entry.epoch, entry.start_offset, end)
        for entry, end in zip(listed, ends, strict=False)
    )


def within_log(entries: Sequence[EpochEntry], log_end: int) -> tuple[EpochEntry, ...]:
    """The epochs of a log that ends at `log_end`: later starts dropped, the last end closed. An
    entry at the end itself is an epoch without bytes yet, and stays."""
    return with_ends((e for e in entries if e.start_offset <= log_end), log_end)


def with_bytes(entries: Sequence[EpochEntry], log_end: int) -> tuple[EpochEntry, ...]:
    """The epochs of which a log that ends at `log_end` has bytes, as Java's lists have them; the
    last one if it has none."""
    closed = within_log(entries, log_end)
    return tuple(e for e in closed if e.start_offset < e.end_offset) or closed[-1:]


def entry_at(entries: Sequence[EpochEntry], offset: int) -> EpochEntry | None:
    """The newest entry that starts at or before `offset`: an epoch without bytes is passed over."""
    index = bisect_right(entries, offset, key=lambda entry: entry.start_offset) - 1
    return entries[index] if index >= 0 else None


def entry_of(entries: Sequence[EpochEntry], epoch: int) -> EpochEntry | None:
    return next((entry for entry in entries if entry.epoch == epoch), None)


def entry_after(entries: Sequence[EpochEntry], epoch: int) -> EpochEntry | None:
    """The entry of the smallest epoch above `epoch`."""
    return next((entry for entry in entries if entry.epoch > epoch), None)


def order_fault(entries: Sequence[EpochEntry]) -> str:
    """What breaks the list's invariant, "" if nothing does."""
    for entry in entries:
        if entry.epoch < 0 or not 0 <= entry.start_offset <= MAX_OFFSET:
            return f"entry {entry.epoch}-{entry.start_offset} is out of range"
    for earlier, later in pairwise(entries):
        if later.epoch <= earlier.epoch or later.start_offset < earlier.start_offset:
            return (
                f"entry {later.epoch}-{later.start_offset} cannot follow "
                f"{earlier.epoch}-{earlier.start_offset}"
            )
    return ""


def consistent_point(
    own: Sequence[EpochEntry], own_max: int, other: Sequence[EpochEntry], other_max: int
) -> int:
    """End (exclusive) of the common part, or -1 if no epoch with the same start is in both.

    `own_max` and `other_max` are the ends of the two logs; the result is not above them, and the
    entries' own `end_offset` is not used. -1 also for an empty list: without an epoch nothing is
    known of the bytes (R21).
    """
    own_entries = within_log(own, own_max)
    other_by_epoch = {entry.epoch: entry for entry in within_log(other, other_max)}
    for entry in reversed(own_entries):
        match = other_by_epoch.get(entry.epoch)
        if match is not None and match.start_offset == entry.start_offset:
            return min(entry.end_offset, match.end_offset)
    return NO_CONSISTENT_POINT
