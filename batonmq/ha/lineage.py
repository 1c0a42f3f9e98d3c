"""Whether two logs with equal epochs have equal bytes (R47). Pure.

An epoch number may be used twice: by an earlier cluster of the same names, or by controllers that
lost their state. So a slave asks its master for samples in the handshake: checksums of the last
bytes of each epoch, also at ends that the slave names. Each record contains its own offset and
time, so two histories do not end in equal bytes. This costs no round trip.

Expired bytes cannot be compared. So a history has a name, its lineage: the first master creates it,
and a replica takes its master's once its own log is a proven prefix. A log of another lineage is
foreign unless its bytes are equal. A log without one is from an older version; it is set aside and
fetched again. Epochs that cannot be compared count as equal: those of Java brokers and older
versions, and all but the newest EPOCHS_COMPARED.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from batonmq.epoch.entry import NO_CONSISTENT_POINT, EpochEntry, entry_at, within_log

SAMPLE_BYTES: Final = 4096  # at most: a sample never crosses a segment
EPOCHS_COMPARED: Final = 40
"""So many samples fit into one identity frame, with names of any length."""


class LogSample(NamedTuple):
    """CRC-32 of the log bytes [end - size, end)."""

    end: int
    size: int
    crc: int


class LogSamples(Protocol):
    """Access to samples of this replica's log."""

    @property
    def lost_epochs(self) -> bool:
        """Whether the log lost its epochs in classic mode (R48)."""

    @property
    def lineage(self) -> str:
        """ "" if the log has none."""

    def take(self, end: int) -> LogSample | None:
        """The sample that ends at `end`; None if the log lacks these bytes."""

    def crc(self, end: int, size: int) -> int | None:
        """CRC-32 of [end - size, end); None if the log lacks some of it."""

    def fault_before(self, end: int) -> str:
        """What is wrong with the records that end at `end`; "" if nothing is known."""


def points_of(entries: Sequence[EpochEntry], log_end: int) -> tuple[int, ...]:
    """The ends of the newest epochs that have bytes, ascending."""
    ends = {e.end_offset for e in within_log(entries, log_end) if e.start_offset < e.end_offset}
    return tuple(sorted({*ends, log_end} - {0}))[-EPOCHS_COMPARED:]


def take_samples(
    own: LogSamples, own_points: Sequence[int], points: Sequence[int], disputed: Collection[int]
) -> Iterator[LogSample]:
    """A master's answer to a slave's `points`, ascending: samples at the newest ends that both logs
    reach. At `disputed` ends the slave's undamaged bytes differ: our bytes there are first checked
    for damage, and left out if damaged."""
    if not points or not own_points:
        return
    below = min(points[-1], own_points[-1])
    # All ends of epochs in either log: a difference shows first at one of these.
    ends = sorted({end for end in (*own_points, *points) if 0 < end <= below})
    for end in ends[-EPOCHS_COMPARED:]:
        if end in disputed and own.fault_before(end):  # G8: our copy is damaged
            continue
        sample = own.take(end)
        if sample is not None:
            yield sample


def first_difference(own: LogSamples, samples: Sequence[LogSample], below: int) -> int | None:
    """The lowest end up to `below` at which the logs differ; None if none is known."""
    for end, size, crc in sorted(samples):
        if end > below:  # beyond, the epochs differ anyway
            return None
        mine = own.crc(end, size)
        # Our own damaged bytes are fetched again; they prove no other history.
        if mine is not None and mine != crc and not own.fault_before(end):
            return end
    return None


def are_equal_at(own: LogSamples, samples: Sequence[LogSample], end: int) -> bool:
    """Whether a sample proves that the two logs have the same bytes before `end`."""
    return any(s.end == end and own.crc(end, s.size) == s.crc for s in samples)


def is_compared(own: LogSamples, samples: Sequence[LogSample], below: int) -> bool:
    """Whether some sample up to `below` can be compared with our log."""
    return any(end <= below and own.crc(end, size) is not None for end, size, _ in samples)


def common_point(
    entries: Sequence[EpochEntry], own: LogSamples, samples: Sequence[LogSample], difference: int
) -> int:
    """The end (exclusive) of the common part of two logs that differ before `difference`: the start
    of that epoch if the logs are equal there, else NO_CONSISTENT_POINT."""
    epoch = entry_at(entries, difference - 1)
    # Only ends of epochs were compared, so the whole epoch counts as different.
    if epoch is not None and are_equal_at(own, samples, epoch.start_offset):
        return epoch.start_offset
    return NO_CONSISTENT_POINT
