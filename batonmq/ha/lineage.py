"""Whether two logs with equal epochs have equal bytes (SAFETY R47). Pure.

An epoch number may have been given twice: by the controllers of an earlier cluster of the same
names, or by controllers that lost their memory. So a slave of ours asks its master, with its
handshake, for samples of the log: a checksum of the last bytes of each epoch, and of those at the
slave's own ends. Each record carries its own offset and time, so two histories do not end in the
same bytes. The samples travel with the handshakes: no round trip more, and no log is read whole.

Where bytes have expired, nothing is left to compare. So a history has a name, its lineage: the
first master makes one, and a replica takes its master's as soon as its own log is known to be a
prefix. A log of another name is foreign, unless its bytes are found to be equal (two first masters
may each have made a name). A log without a name, from an older version, is set aside and copied
again from the master.

Epochs that cannot be compared count as equal: those of a Java broker or an older version, and those
older than the newest EPOCHS_COMPARED.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from batonmq.epoch.entry import NO_CONSISTENT_POINT, EpochEntry, entry_at, within_log

SAMPLE_BYTES: Final = 4096
"""The most that one sample covers; it never leaves its segment."""
EPOCHS_COMPARED: Final = 40
"""So many samples, and names of any length, fit into one identity frame."""


class LogSample(NamedTuple):
    """CRC-32 of the log bytes [end - size, end)."""

    end: int
    size: int
    crc: int


class LogSamples(Protocol):
    """Reads samples of this replica's log."""

    @property
    def lost_epochs(self) -> bool:
        """Whether a life without controllers took this log's epochs (R48)."""

    @property
    def lineage(self) -> str:
        """The name of this log's history; "" if it has none."""

    def take(self, end: int) -> LogSample | None:
        """The sample that ends at `end`; None if the log does not hold the bytes before it."""

    def crc(self, end: int, size: int) -> int | None:
        """CRC-32 of [end - size, end); None if the log does not hold all of it."""

    def fault_before(self, end: int) -> str:
        """What is wrong with the records that end at `end`; "" if nothing is known to be."""


def points_of(entries: Sequence[EpochEntry], log_end: int) -> tuple[int, ...]:
    """Where the newest epochs with bytes end in a log that ends at `log_end`, ascending."""
    ends = {e.end_offset for e in within_log(entries, log_end) if e.start_offset < e.end_offset}
    return tuple(sorted({*ends, log_end} - {0}))[-EPOCHS_COMPARED:]


def take_samples(
    own: LogSamples,
    own_points: Sequence[int],
    points: Sequence[int],
    disputed: Collection[int],
) -> Iterator[LogSample]:
    """What a master answers to a slave's `points`, ascending: samples at the newest ends below both
    logs' ends. The slave disputed some: they differ from its own bytes, which are sound. Bytes of
    ours that turn out to be damaged prove nothing."""
    if not points or not own_points:
        return
    below = min(points[-1], own_points[-1])
    ends = sorted({end for end in (*own_points, *points) if 0 < end <= below})
    for end in ends[-EPOCHS_COMPARED:]:
        if end in disputed and own.fault_before(end):
            continue
        sample = own.take(end)
        if sample is not None:
            yield sample


def first_difference(own: LogSamples, samples: Sequence[LogSample], below: int) -> int | None:
    """The lowest end, at most `below`, at which the two logs differ; None if none is known."""
    for end, size, crc in sorted(samples):
        if end > below:
            return None
        mine = own.crc(end, size)
        if mine is not None and mine != crc and not own.fault_before(end):
            return end
    return None


def are_equal_at(own: LogSamples, samples: Sequence[LogSample], end: int) -> bool:
    """Whether a sample proves that the two logs have the same bytes before `end`."""
    return any(s.end == end and own.crc(end, s.size) == s.crc for s in samples)


def is_compared(own: LogSamples, samples: Sequence[LogSample], below: int) -> bool:
    """Whether a sample at an end of at most `below` can be compared with the own log's bytes."""
    return any(end <= below and own.crc(end, size) is not None for end, size, _ in samples)


def common_point(
    entries: Sequence[EpochEntry], own: LogSamples, samples: Sequence[LogSample], difference: int
) -> int:
    """End (exclusive) of the common part of two logs that differ before `difference`: where the
    epoch of the differing bytes begins, if they are equal there, else NO_CONSISTENT_POINT."""
    epoch = entry_at(entries, difference - 1)
    if epoch is not None and are_equal_at(own, samples, epoch.start_offset):
        return epoch.start_offset
    return NO_CONSISTENT_POINT
