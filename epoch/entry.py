"""One reign of a master in the log, and the rules for a list of them. Pure.

An entry says: from `start_offset` on, the bytes of the log were written by the master of `epoch`.
Only epoch and start are stored; an entry ends where the next one starts, and the last is open.

Invariant of a list: epochs grow strictly; starts never fall. Equal starts mean that nothing was
written in the earlier epoch; such entries stay, in order of epoch (R25), where Java drops the newer
one: the last entry must name the epoch of the acting master even if it has not written yet.
Origin: Java `EpochEntry`, `EpochFileCache`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

MAX_OFFSET = 2**63 - 1


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
    return tuple(replace(entry, end_offset=end) for entry, end in zip(listed, ends, strict=False))


def within_log(entries: Sequence[EpochEntry], log_end: int) -> tuple[EpochEntry, ...]:
    """What a log that ends at `log_end` can vouch for: later starts dropped, the last end closed.

    An entry that starts exactly at the log's end is an epoch without bytes yet, and stays.
    """
    return with_ends((e for e in entries if e.start_offset <= log_end), log_end)


def order_fault(entries: Sequence[EpochEntry]) -> str:
    """What breaks the list's invariant, or "" if nothing does."""
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
