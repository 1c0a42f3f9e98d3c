"""Epochs of a log, the rules for a list of them, and up to where two logs are the same. Pure.

An entry means: from `start_offset` on, the bytes of the log were written by the master of `epoch`.
Only epoch and start are stored. An entry ends where the next one starts, and the last one is open.

Invariant of a list: epochs grow strictly, starts never fall. Equal starts mean that nothing was
written in the earlier epoch. Such entries stay (R25), because the last entry must name the acting
master's epoch even before its first write; Java drops the newer one.

Why epochs show where two logs are the same: an epoch has one master, which writes each offset once,
and a replica appends bytes of an epoch only after the same bytes as its master. So if two logs have
an epoch with the same start, all bytes before it are equal, and so are the bytes of it that both
have.

Origin: Java `EpochEntry`, `EpochFileCache`. The result of Java's `findConsistentPoint` may be above
the own log's end, ours not.
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
    """The same entries with ends: each ends where the next starts, the last at `last_end`."""
    listed = tuple(entries)
    ends = [entry.start_offset for entry in listed[1:]] + [last_end]
    return tuple(
        EpochEntry(entry.epoch, entry.start_offset, end)
        for entry, end in zip(listed, ends, strict=False)
    )


def within_log(entries: Sequence[EpochEntry], log_end: int) -> tuple[EpochEntry, ...]:
    """The epochs of a log that ends at `log_end`, without later starts. An entry that starts at the
    end stays: an epoch without bytes yet."""
    return with_ends((e for e in entries if e.start_offset <= log_end), log_end)


def with_bytes(entries: Sequence[EpochEntry], log_end: int) -> tuple[EpochEntry, ...]:
    """The epochs that have bytes in a log that ends at `log_end`, as in Java's lists; the last one
    if none has."""
    closed = within_log(entries, log_end)
    return tuple(e for e in closed if e.start_offset < e.end_offset) or closed[-1:]


def entry_at(entries: Sequence[EpochEntry], offset: int) -> EpochEntry | None:
    """The newest entry that starts at or before `offset`, so epochs without bytes are skipped."""
    index = bisect_right(entries, offset, key=lambda entry: entry.start_offset) - 1
    return entries[index] if index >= 0 else None


def entry_of(entries: Sequence[EpochEntry], epoch: int) -> EpochEntry | None:
    return next((entry for entry in entries if entry.epoch == epoch), None)


def entry_after(entries: Sequence[EpochEntry], epoch: int) -> EpochEntry | None:
    """The entry of the smallest epoch above `epoch`."""
    return next((entry for entry in entries if entry.epoch > epoch), None)


def order_fault(entries: Sequence[EpochEntry]) -> str:
    """How the list breaks the invariant; "" if it does not."""
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
    """The end (exclusive) of the common part; -1 if the lists share no epoch with the same start,
    or one is empty. `own_max` and `other_max`: the ends of the logs, which the result never
    exceeds; the entries' `end_offset` is not used.
    """
    own_entries = within_log(own, own_max)
    other_by_epoch = {entry.epoch: entry for entry in within_log(other, other_max)}
    for entry in reversed(own_entries):
        match = other_by_epoch.get(entry.epoch)
        # Another start: the two replicas entered this epoch after different bytes.
        if match is not None and match.start_offset == entry.start_offset:
            # From the newest epoch on: after the end of the shorter one the logs have other epochs.
            return min(entry.end_offset, match.end_offset)
    # R21: without epochs nothing is known about the bytes.
    return NO_CONSISTENT_POINT
