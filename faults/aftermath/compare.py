"""Whether the tables of the history tell what the record says was done. Pure.

The record is what the laboratory did, and what the leading controller and the load showed it; the
tables are what a job made of files. All clocks are those of one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from faults.aftermath.deeds import FAILOVER, PLANNED
from faults.aftermath.record import Deed
from faults.aftermath.tables import Failover, Mastership, Name, SetChange, Tables

TOLERANCE_MS: Final = 100
"""All look at one clock, each when it gets its turn on a busy machine: the load hears an ack later
than it was decided."""


@dataclass(frozen=True, slots=True)
class Told:
    """A deed, what the history tells of it, and where the two disagree (one sentence each)."""

    deed: Deed
    failovers: tuple[Failover, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """`unasked`: elections between deeds, which nobody caused on purpose: a busy machine."""

    told: list[Told]
    unasked: list[Failover]
    wrong: list[str]
    """Of the tables as a whole."""

    @property
    def agrees(self) -> bool:
        return not self.wrong and not any(one.wrong for one in self.told)


def compare(deeds: Sequence[Deed], tables: Tables) -> Comparison:
    """Every deed against every table. Deeds are of one group, in the order they were done."""
    told = [_of_deed(deed, tables) for deed in deeds]
    mine = {row.epoch for one in told for row in one.failovers}
    group = {deed.group for deed in deeds}
    rows = [row for row in tables.failovers if row.group in group]
    others = [row for row in rows if row.epoch not in mine and row.epoch > deeds[0].epoch_before]
    between = [
        row
        for row in others
        if any(one.epoch_after < row.epoch <= two.epoch_before for one, two in pairwise(deeds))
    ]
    wrong = [
        f"epoch {row.epoch} is in failovers, and was not when the last fault was over"
        for row in others
        if row not in between
    ]
    wrong += contiguous([row for row in tables.masterships if row.group in group])
    wrong += _same_masters(rows, [row for row in tables.masterships if row.group in group])
    return Comparison(told, between, wrong)


def stream_wrong(streamed: Sequence[Name], kept: Collection[Name]) -> list[str]:
    """What is wrong with a stream of the history, against the events that the controllers kept.

    The stream was stopped before the controllers were: it may lack the newest events, none before.
    """
    wrong = [
        f"the stream holds {name} {count} times"
        for name, count in Counter(streamed).items()
        if count > 1
    ]
    wrong += [f"the stream holds {name}, no history does" for name in set(streamed) - set(kept)]
    newest: dict[str, int] = {}
    for log, index, _ in streamed:
        newest[log] = max(index, newest.get(log, 0))
    lacking = {name for name in kept if name[1] <= newest.get(name[0], 0)} - set(streamed)
    wrong += [f"the stream lacks {name}" for name in sorted(lacking)]
    return wrong


def _of_deed(deed: Deed, tables: Tables) -> Told:
    rows = tuple(
        row
        for row in tables.failovers
        if row.group == deed.group and deed.epoch_before < row.epoch <= deed.epoch_after
    )
    wrong = [*_elections(deed, rows), *_times(deed, rows), *_costs(deed, rows)]
    changes = [row for row in tables.set_changes if row.group == deed.group]
    wrong += _set_changes(deed, changes, sum(not row.changed_set for row in rows))
    return Told(deed, rows, tuple(wrong))


def _elections(deed: Deed, rows: Sequence[Failover]) -> Iterable[str]:
    """Epoch, kind, old and new master; each master follows the one before it."""
    if deed.elections and not rows:
        yield f"epochs {deed.epoch_before + 1} to {deed.epoch_after} are not in failovers"
    if not rows:
        return
    if rows[-1].epoch != deed.epoch_after:
        yield f"the last epoch is {rows[-1].epoch}, the controllers said {deed.epoch_after}"
    if rows[-1].master != deed.master_after:
        yield f"broker {rows[-1].master} is master, the controllers said {deed.master_after}"
    if rows[0].master_before != deed.master_before:
        yield f"the old master is broker {rows[0].master_before}, it was {deed.master_before}"
    for one, two in pairwise(rows):
        if two.master_before != one.master:
            yield f"epoch {two.epoch} follows broker {two.master_before}, not {one.master}"
    # A busy machine may be judged for its slowness once more; never for anything else.
    kinds = {row.kind for row in rows}
    if deed.kind and deed.kind not in kinds:
        yield f"no {deed.kind} among {', '.join(sorted(kinds))}"
    if not kinds <= {deed.kind or FAILOVER, FAILOVER}:
        yield f"told as {', '.join(sorted(kinds))}, it was {deed.kind or 'none'}"
    if deed.kind != PLANNED and PLANNED in kinds:
        yield "told as a planned switch, nobody asked for one"


def _times(deed: Deed, rows: Sequence[Failover]) -> Iterable[str]:
    first, last = deed.began_ms - TOLERANCE_MS, deed.ended_ms + TOLERANCE_MS
    for row in rows:
        for name, moment in row.times_ms.items():
            if not first <= moment <= last:
                beyond = first - moment if moment < first else moment - last
                yield f"epoch {row.epoch}: {name} is {beyond} ms outside of what was done"
        if "elected_at" not in row.times_ms:
            yield f"epoch {row.epoch}: when it was elected is not told"


def _costs(deed: Deed, rows: Sequence[Failover]) -> Iterable[str]:
    """A cost counted from a loss before (a master that was overtaken) may hold two gaps."""
    gaps = 0
    for row in rows:
        gaps += 1
        limit_ms = deed.gap_ms * gaps + TOLERANCE_MS
        if row.unavailable_ms is None:
            continue
        if row.unavailable_ms > limit_ms:
            yield (
                f"epoch {row.epoch}: unavailable for {row.unavailable_ms} ms, the load saw no gap"
                f" above {deed.gap_ms:.0f} ms"
            )
        gaps = 0


def _set_changes(deed: Deed, changes: Sequence[SetChange], unchanged: int) -> Iterable[str]:
    """Each step of syncStateSetEpoch is told once, but for the `unchanged` ones of elections that
    kept the set as it was; who was struck down left and came back."""
    inside = [row for row in changes if deed.set_epoch_before < row.epoch <= deed.set_epoch_after]
    told = sorted(row.epoch for row in inside)
    steps = deed.set_epoch_after - deed.set_epoch_before
    if len(set(told)) != len(told) or len(told) + unchanged != steps:
        yield (
            f"set changes {told} are told, the controllers made {steps} after"
            f" {deed.set_epoch_before}, {unchanged} of them without a change"
        )
    left = frozenset[int]().union(*(row.left for row in inside))
    joined = frozenset[int]().union(*(row.joined for row in inside))
    if deed.kind != PLANNED:
        for broker in deed.brokers:
            if broker not in left or broker not in joined:
                yield f"broker {broker} was struck down, and did not leave the set and come back"


def contiguous(rows: Sequence[Mastership]) -> list[str]:
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
    failovers: Sequence[Failover], masterships: Sequence[Mastership]
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
