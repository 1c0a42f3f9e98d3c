"""Whether the tables of the history agree with the record of the faults. Pure.

The record holds the faults, and what the leading controller and the load showed; the tables are
what a Spark job computed from the history files. All clocks are those of one machine.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from lab.faults.aftermath.fault_records import FAILOVER, PLANNED, FaultRecord
from lab.faults.aftermath.tables import FailoverRow, MastershipRow, Name, SetChangeRow, Tables

TOLERANCE_MS: Final = 100
"""One clock, but each process reads it when it gets its turn on a busy machine: the load receives
an ack later than it was sent."""


@dataclass(frozen=True, slots=True)
class FaultComparison:
    """A fault, its failovers in the history, and where the two disagree (one sentence each)."""

    record: FaultRecord
    failovers: tuple[FailoverRow, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HistoryComparison:
    """`unplanned`: elections between two faults, on a busy machine."""

    faults: list[FaultComparison]
    unplanned: list[FailoverRow]
    wrong: list[str]
    """Of the tables as a whole."""

    @property
    def agrees(self) -> bool:
        return not self.wrong and not any(one.wrong for one in self.faults)


def compare(records: Sequence[FaultRecord], tables: Tables) -> HistoryComparison:
    """Every record against every table. Records are of one group, in the order of the faults."""
    faults = [_of_record(record, tables) for record in records]
    mine = {row.epoch for one in faults for row in one.failovers}
    group = {record.group for record in records}
    rows = [row for row in tables.failovers if row.group in group]
    others = [row for row in rows if row.epoch not in mine and row.epoch > records[0].epoch_before]
    between = [
        row
        for row in others
        if any(one.epoch_after < row.epoch <= two.epoch_before for one, two in pairwise(records))
    ]
    wrong = [
        f"epoch {row.epoch} is in failovers, and was not when the last fault was over"
        for row in others
        if row not in between
    ]
    wrong += contiguous([row for row in tables.masterships if row.group in group])
    wrong += _same_masters(rows, [row for row in tables.masterships if row.group in group])
    return HistoryComparison(faults, between, wrong)


def stream_wrong(streamed: Sequence[Name], kept: Collection[Name]) -> list[str]:
    """What is wrong with a stream of the history, against the events that the controllers kept when
    it was stopped."""
    wrong = [
        f"the stream holds {name} {count} times"
        for name, count in Counter(streamed).items()
        if count > 1
    ]
    wrong += [f"the stream holds {name}, no history does" for name in set(streamed) - set(kept)]
    lacking = set(kept) - set(streamed)
    wrong += [f"the stream lacks {name}" for name in sorted(lacking)]
    return wrong


def _of_record(record: FaultRecord, tables: Tables) -> FaultComparison:
    rows = tuple(
        row
        for row in tables.failovers
        if row.group == record.group and record.epoch_before < row.epoch <= record.epoch_after
    )
    wrong = [*_elections(record, rows), *_times(record, rows), *_costs(record, rows)]
    changes = [row for row in tables.set_changes if row.group == record.group]
    wrong += _set_changes(record, changes, sum(not row.changed_set for row in rows))
    return FaultComparison(record, rows, tuple(wrong))


def _elections(record: FaultRecord, rows: Sequence[FailoverRow]) -> Iterable[str]:
    """Epoch, kind, old and new master; each master follows the one before it."""
    if record.elections and not rows:
        yield f"epochs {record.epoch_before + 1} to {record.epoch_after} are not in failovers"
    if not rows:
        return
    if rows[-1].epoch != record.epoch_after:
        yield f"the last epoch is {rows[-1].epoch}, the controllers recorded {record.epoch_after}"
    if rows[-1].master != record.master_after:
        yield f"broker {rows[-1].master} is master, the controllers recorded {record.master_after}"
    if rows[0].master_before != record.master_before:
        yield f"the old master is broker {rows[0].master_before}, it was {record.master_before}"
    for one, two in pairwise(rows):
        if two.master_before != one.master:
            yield f"epoch {two.epoch} follows broker {two.master_before}, not {one.master}"
    # A slow broker on a busy machine may be replaced once more; nothing else may happen.
    kinds = {row.kind for row in rows}
    if record.kind and record.kind not in kinds:
        yield f"no {record.kind} among {', '.join(sorted(kinds))}"
    if not kinds <= {record.kind or FAILOVER, FAILOVER}:
        yield f"recorded as {', '.join(sorted(kinds))}, it was {record.kind or 'none'}"
    if record.kind != PLANNED and PLANNED in kinds:
        yield "recorded as a planned switch, none was requested"


def _times(record: FaultRecord, rows: Sequence[FailoverRow]) -> Iterable[str]:
    first, last = record.began_ms - TOLERANCE_MS, record.ended_ms + TOLERANCE_MS
    for row in rows:
        for name, moment in row.times_ms.items():
            if not first <= moment <= last:
                beyond = first - moment if moment < first else moment - last
                yield f"epoch {row.epoch}: {name} is {beyond} ms outside of the fault's time"
        if "elected_at" not in row.times_ms:
            yield f"epoch {row.epoch}: when it was elected is not recorded"


def _costs(record: FaultRecord, rows: Sequence[FailoverRow]) -> Iterable[str]:
    """A cost counted from a loss before (a master that was overtaken) may hold two gaps."""
    gaps = 0
    for row in rows:
        gaps += 1
        limit_ms = record.gap_ms * gaps + TOLERANCE_MS
        if row.unavailable_ms is None:
            continue
        if row.unavailable_ms > limit_ms:
            yield (
                f"epoch {row.epoch}: unavailable for {row.unavailable_ms} ms, the load saw no gap"
                f" above {record.gap_ms:.0f} ms"
            )
        gaps = 0


def _set_changes(
    record: FaultRecord, changes: Sequence[SetChangeRow], unchanged: int
) -> Iterable[str]:
    """Each step of syncStateSetEpoch is recorded once, except the `unchanged` ones (elections that
    kept the set). An affected broker left the set and joined it again."""
    inside = [
        row for row in changes if record.set_epoch_before < row.epoch <= record.set_epoch_after
    ]
    recorded = sorted(row.epoch for row in inside)
    steps = record.set_epoch_after - record.set_epoch_before
    if len(set(recorded)) != len(recorded) or len(recorded) + unchanged != steps:
        yield (
            f"set changes {recorded} are recorded, the controllers made {steps} after"
            f" {record.set_epoch_before}, {unchanged} of them without a change"
        )
    left = frozenset[int]().union(*(row.left for row in inside))
    joined = frozenset[int]().union(*(row.joined for row in inside))
    if record.kind != PLANNED:
        for broker in record.brokers:
            if broker not in left or broker not in joined:
                yield f"broker {broker} was affected, but did not leave the set and join it again"


def contiguous(rows: Sequence[MastershipRow]) -> list[str]:
    """Masterships of one group follow each other: none overlaps, none but the last is open."""
    wrong = []
    for one, two in pairwise(rows):
        if one.ended_ms is None:
            wrong.append(f"the mastership of epoch {one.epoch} has no end, epoch {two.epoch} began")
        elif one.ended_ms > two.began_ms:
            wrong.append(
                f"epochs {one.epoch} and {two.epoch} overlap by {one.ended_ms - two.began_ms} ms"
            )
    return wrong


def _same_masters(
    failovers: Sequence[FailoverRow], masterships: Sequence[MastershipRow]
) -> Iterable[str]:
    """Both tables name the same master for each epoch."""
    one = {row.epoch: row.master for row in failovers}
    other = {row.epoch: row.broker_id for row in masterships}
    for epoch in sorted(one.keys() | other.keys()):
        if one.get(epoch) != other.get(epoch):
            yield (
                f"epoch {epoch}: master is {one.get(epoch)} in failovers,"
                f" {other.get(epoch)} in masterships"
            )
