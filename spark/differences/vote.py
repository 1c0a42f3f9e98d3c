"""Replicas do not hold the same at one place of the log: who deviates, and how.

The majority of replicas is right. In a tie, the side with the latest epoch (then with the highest
confirmOffset) is right. A replica whose bytes are no record has no vote; one that holds another
record across the place, or a blank, votes that no record begins there. Free of Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from batonmq.protocol.records.codec import MAGIC_BLANK, scan_record
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import is_record
from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.message import RecordMessage, message_at
from batonmq.spark.differences.replica_groups import ReplicaGroup
from batonmq.spark.differences.sides import Items, Side, Stretch
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.log_range import RECORD_BYTES_MAX
from batonmq.spark.severity import CRITICAL, INFO

_BLANK = MAGIC_BLANK.to_bytes(4, "big")


class _Said(NamedTuple):
    """What is found about one side."""

    kind: str
    detail: str
    field: str | None = None


class Vote:
    """Decides places of one stretch. `every`: what each side holds, by its replica's number."""

    def __init__(
        self,
        group: ReplicaGroup,
        sides: Sequence[Side],
        every: Mapping[int, Items],
        stretch: Stretch,
        unconfirmed: bool,
    ) -> None:
        self.findings: list[LogFinding] = []
        self._group = group
        self._stretch = stretch
        self._sides = sides
        self._every = every
        self._unconfirmed = unconfirmed
        # (begin, end) of what is reported, by the number of the replica that deviates
        self._told: dict[int, list[tuple[int, int]]] = {side.index: [] for side in sides}

    def place(self, offset: int) -> Iterator[tuple[RecordMessage, int, int, bool]]:
        """(message, replicas that have it, replicas that lack it, whether it is the truth) of all
        records that begin at a log offset; replicas are bits. What is found goes to `findings`.
        """
        held: dict[bytes, tuple[RecordMessage, list[Side]]] = {}
        refusing: list[Side] = []
        rest: list[Side] = []
        for side in self._sides:
            found = self._message(side, offset)
            if found is not None:
                held.setdefault(found.raw, (found, []))[1].append(side)
            else:
                (refusing if self._refuses(side, offset) else rest).append(side)
        for side in [*rest]:
            # Its own chain of records broke before; the bytes are there all the same.
            for raw, (_, its) in held.items():
                if side.read(offset, offset + len(raw)) == raw:
                    its.append(side)
                    rest.remove(side)
                    break
        truth, holders = self._truth([*held.values()], refusing) or (None, [])
        if truth is not None:
            for side in [*refusing, *rest]:
                self._add(side, truth, truth, self._missing(side, truth), holders)
        for message, its in held.values():
            have = sum(1 << side.index for side in its)
            lack = sum(
                1 << side.index
                for side in self._sides
                if side not in its and side.confirm >= message.end
            )
            yield message, have, lack, message is truth
            if message is not truth:
                self._extra(message, its, truth, holders)

    def _extra(
        self,
        message: RecordMessage,
        its: list[Side],
        truth: RecordMessage | None,
        holders: list[Side],
    ) -> None:
        """A whole record that the majority does not hold."""
        others = len(self._sides) - len(its)
        hold, do = "hold" + "s" * (len(its) == 1), "does" if others == 1 else "do"
        against = f"{len(its)} of {len(self._sides)} replicas {hold} it, {others} {do} not"
        for side in its:
            if truth is not None and truth.identity == message.identity:
                _, text, parts = truth.differences(message.raw)
                said = _Said("divergent", f"{text}; both are whole records", parts)
                self._add(side, truth, truth, said, holders)
                continue
            if truth is not None:
                key = message.unique_key
                key = key or f"queue offset {message.ext.queue_offset} of {message.ext.topic}"
                what = f"another message lies there: {key}"
                self._add(side, truth, truth, _Said("missing", what), holders)
            self._add(side, message, truth, _Said("extra", against), its)

    def damages(self) -> Iterator[LogFinding]:
        """Damaged stretches without a finding about a message in them; after all places."""
        untold: dict[tuple[int, int], list[Side]] = {}
        for side in self._sides:
            known = np.array(self._told[side.index], np.int64).reshape(-1, 2)
            for damage in self._every[side.index].damages:
                end = damage.offset + damage.size
                if ((known[:, 0] < end) & (damage.offset < known[:, 1])).any():
                    continue
                if damage.offset >= side.confirm and not self._unconfirmed:
                    continue
                if damage.offset >= self._stretch.end and self._is_good_elsewhere(damage):
                    continue  # it is a finding of the next stretch
                untold.setdefault((damage.offset, damage.size), []).append(side)
        for (offset, size), sides in untold.items():
            bad = self._every[sides[0].index].damage_at(offset)
            assert bad is not None, "the stretch that was just listed"
            numbers = [side.index for side in sides]
            epoch, doubt = self._group.epoch_at(offset, numbers)
            yield LogFinding(
                self._group.name,
                CRITICAL if any(offset < side.confirm for side in sides) else INFO,
                "damaged",
                f"{bad.reason}; {size} bytes are no message, and no replica confirms a "
                f"good one in their place{doubt}",
                self._group.names(numbers),
                physical_offset=offset,
                size=size,
                epoch=epoch,
                file=bad.file,
            )

    def _is_good_elsewhere(self, damage: Damage) -> bool:
        """Whether a side holds a whole record where this one is damaged."""
        for side in self._sides:
            size = int.from_bytes(side.read(damage.offset, damage.offset + 4), "big")
            data = side.read(damage.offset, damage.offset + min(size, RECORD_BYTES_MAX))
            if is_record(data, 0, damage.offset):
                return True
        return False

    def _message(self, side: Side, offset: int) -> RecordMessage | None:
        for block in self._every[side.index].blocks:
            at = int(np.searchsorted(block.records.start, offset - block.base))
            if at < len(block.records) and int(block.records.start[at]) + block.base == offset:
                return message_at(block.window, block.base, block.records.keep(slice(at, at + 1)))
        return None

    def _refuses(self, side: Side, offset: int) -> bool:
        """Whether a side holds something else where a record would begin at an offset."""
        items = self._every[side.index]
        before = int(np.searchsorted(items.starts, offset)) - 1
        if before >= 0 and int(items.ends[before]) > offset:
            return True
        return side.read(offset, offset + 8)[4:] == _BLANK and items.damage_at(offset) is None

    def _truth(
        self, held: Sequence[tuple[RecordMessage, list[Side]]], refusing: Sequence[Side]
    ) -> tuple[RecordMessage, list[Side]] | None:
        """What the majority holds, and who; None if no record begins here."""

        def weight(sides: Sequence[Side], end: int) -> tuple[int, tuple[int, int], int]:
            ranks = [self._group.replicas[side.index].rank for side in sides]
            voting = sum(side.confirm >= end for side in sides)
            return voting, max(ranks), -min(side.index for side in sides)

        chosen = max(held, key=lambda each: weight(each[1], each[0].end))
        message, sides = chosen
        if refusing and weight(refusing, message.offset + 1) > weight(sides, message.end):
            return None
        return chosen

    def _missing(self, side: Side, truth: RecordMessage) -> _Said:
        """Of a replica without a whole record where others have one."""
        if side.gone:
            return _Said("missing", side.gone)
        damage = self._every[side.index].damage_at(truth.offset)
        theirs = side.read(truth.offset, truth.end)
        count, text, parts = truth.differences(theirs)
        if 2 * count <= len(truth.raw):  # most of its bytes are still there
            begins_here = damage is not None and damage.offset == truth.offset
            reason = damage.reason if damage and begins_here else _problem(theirs)
            return _Said("divergent", f"{text}; {reason}", parts)
        if not theirs:
            return _Said("missing", "its file ends before")
        if not any(theirs):
            return _Said("missing", "zeros where it should be")
        if theirs[4:8] == _BLANK:
            return _Said("missing", "a blank where it should be")
        if damage is None:
            return _Said("missing", "other bytes where it should be")
        reason = damage.reason
        if damage.offset != truth.offset:
            reason = f"within {damage.size} damaged bytes from {damage.offset} on: {reason}"
        return _Said("missing", reason)

    def _add(
        self,
        side: Side,
        message: RecordMessage,
        truth: RecordMessage | None,
        said: _Said,
        holders: Sequence[Side],
    ) -> None:
        """A finding about one side; `holders` have the message."""
        offset, end, detail = message.offset, message.end, said.detail
        confirmed = end <= side.confirm
        if not confirmed and (not self._unconfirmed or end > side.limit):
            return
        if not confirmed:
            detail = f"above its confirmOffset {side.confirm}: {detail}"
        epoch, doubt = self._group.epoch_at(offset, [each.index for each in holders])
        if truth is not None:
            self._told[side.index].append((offset, truth.end))
        self.findings.append(
            LogFinding(
                self._group.name,
                CRITICAL if confirmed else INFO,
                said.kind,
                detail + doubt,
                self._group.names([side.index]),
                message.ext.topic,
                message.ext.queue_id,
                message.ext.queue_offset,
                offset,
                len(message.raw),
                epoch,
                message.unique_key,
                said.field,
                side.path,
                message.identity,
            )
        )


def _problem(data: bytes) -> str:
    """What keeps bytes from being the whole record that others hold in their place."""
    try:
        head = scan_record(data, check_crc=True)
    except CorruptRecord as error:
        return error.what
    return RecordFault.CUT_OFF.text() if head is None else "a record of another place or size"
