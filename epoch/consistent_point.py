"""Up to where two logs are the same, told from their epoch lists alone. Pure.

Why it works: an epoch has one master, which writes each offset once, and a replica takes over an
epoch's bytes only behind the very bytes that preceded them at the master. So if both logs know an
epoch with the same start, they agree on all before it, and within it as far as both hold it.
Origin: Java `EpochFileCache.findConsistentPoint`, whose result could lie above the own log's end.
"""

from collections.abc import Sequence

from epoch.entry import EpochEntry, within_log

NO_CONSISTENT_POINT = -1


def consistent_point(
    own: Sequence[EpochEntry], own_max: int, other: Sequence[EpochEntry], other_max: int
) -> int:
    """End (exclusive) of the common part, or -1 if no epoch with the same start is known to both.

    `own_max` and `other_max` are the ends of the two logs; entries above them count for nothing,
    and the entries' own `end_offset` is not looked at. The result is at most min(own_max,
    other_max). -1 also for an empty list: bytes without epochs are vouched for by nobody (R21).
    """
    own_entries = within_log(own, own_max)
    other_by_epoch = {entry.epoch: entry for entry in within_log(other, other_max)}
    for entry in reversed(own_entries):
        match = other_by_epoch.get(entry.epoch)
        if match is not None and match.start_offset == entry.start_offset:
            return min(entry.end_offset, match.end_offset)
    return NO_CONSISTENT_POINT
