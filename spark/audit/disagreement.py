"""Replicas do not hold the same at one place of the log: who deviates, and how.

The majority of replicas is right. In a tie, the side with the latest epoch (then with the highest
confirmOffset) is right. A replica whose bytes are no record has no vote; one that holds another
record across the place, or a blank, votes that no record begins there. Free of Spark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from batonmq.protocol.record import MAGIC_BLANK, CorruptRecord, scan_record
from batonmq.spark.audit.findings import CRITICAL, INFO, Finding
from batonmq.spark.audit.layout import Message, differences, message_at
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.audit.sides import Absent, Items, Side, Stretch
from batonmq.spark.read.log_range import Damage
from batonmq.spark.read.record_columns import Records, is_record

AnySide = Side | Absent
# (window, base, one row, replicas that have it, replicas that lack it, whether it is the truth)
OneHeld = tuple[bytes, int, Records, int, int, bool]


@dataclass(slots=True)
class Place:
    """The findings about one place. `truth_end`: end of the majority's record; 0: there is none.

    `deviating`: numbers of the replicas about which something was found.
    """

    offset: int
    truth_end: int = 0
    findings: list[Finding] = field(default_factory=list)
    held: list[OneHeld] = field(default_factory=list)
    deviating: set[int] = field(default_factory=set)


class MajorityVote:
    """Decides places of one stretch. `every`: what each side holds, by its replica's number."""

    def __init__(
        self,
        group: ReplicaGroup,
        sides: Sequence[AnySide],
        every: Mapping[int, Items],
        stretch: Stretch,
        *,
        unconfirmed: bool,
        record_bytes_max: int,
    ) -> None:
        self._group = group
        self._stretch = stretch
        self._record_bytes_max = record_bytes_max
        self._sides = sides
        self._every = every
        self._unconfirmed = unconfirmed

    def place(self, offset: int) -> Place:
        """What the replicas hold at a log offset at which a record begins in one of them."""
        holders: dict[bytes, list[AnySide]] = {}
        messages: dict[bytes, tuple[bytes, int, Message]] = {}
        refusing: list[AnySide] = []
        rest: list[AnySide] = []
        for side in self._sides:
            found = self._message(side, offset)
            if found is not None:
                raw = found[2].raw
                holders.setdefault(raw, []).append(side)
                messages.setdefault(raw, found)
            elif self._refuses(side, offset):
                refusing.append(side)
            else:
                rest.append(side)
        for side in [*rest]:
            # Its own chain of records broke before; the bytes are there all the same.
            same = [raw for raw in holders if side.read(offset, offset + len(raw)) == raw]
            if same:
                holders[same[0]].append(side)
                rest.remove(side)
        place = Place(offset)
        truth = self._vote(holders, refusing, messages)
        told = messages[truth][2] if truth is not None else None
        if told is not None:
            place.truth_end = told.end
            for side in [*refusing, *rest]:
                self._add(place, side, told, self._missing(side, told), holders[truth or b""])
        for raw, its in holders.items():
            window, base, message = messages[raw]
            have = sum(1 << side.index for side in its)
            lack = sum(
                1 << side.index
                for side in self._sides
                if side not in its and side.confirm >= message.end
            )
            place.held.append((window, base, message.records, have, lack, raw == truth))
            if raw == truth:
                continue
            for side in its:
                if told is not None and told.identity == message.identity:
                    said = self._divergent(told, message.raw)
                    self._add(place, side, told, said, holders[truth or b""])
                    continue
                if told is not None:
                    what = f"another message lies there: {_key(message)}"
                    self._add(place, side, told, ("missing", what, None), holders[truth or b""])
                self._add(place, side, message, ("extra", self._against(its), None), its)
        return place

    def damages(self, places: Sequence[Place]) -> list[Finding]:
        """Damaged stretches without a finding about a message in them."""
        told: dict[tuple[int, int], list[AnySide]] = {}
        for side in self._sides:
            known = [p for p in places if side.index in p.deviating and p.truth_end]
            begins = np.array([place.offset for place in known], np.int64)
            ends = np.array([place.truth_end for place in known], np.int64)
            for damage in self._every[side.index].damages:
                end = damage.offset + damage.size
                if ((begins < end) & (damage.offset < ends)).any():
                    continue
                if damage.offset >= side.confirm and not self._unconfirmed:
                    continue
                if damage.offset >= self._stretch.end and self._is_good_elsewhere(damage):
                    continue  # it is a finding of the next stretch
                told.setdefault((damage.offset, damage.size), []).append(side)
        findings = []
        for (offset, size), sides in told.items():
            bad = self._every[sides[0].index].damage_at(offset)
            assert bad is not None, "the stretch that was just listed"
            epoch, doubt = self._group.epoch_at(offset, [side.index for side in sides])
            confirmed = any(offset < side.confirm for side in sides)
            findings.append(
                Finding(
                    self._group.name,
                    CRITICAL if confirmed else INFO,
                    "damaged",
                    f"{bad.reason}; {size} bytes are no message, and no replica confirms a "
                    f"good one in their place{doubt}",
                    self._group.names(side.index for side in sides),
                    physical_offset=offset,
                    size=size,
                    epoch=epoch,
                    file=bad.file,
                )
            )
        return findings

    def _is_good_elsewhere(self, damage: Damage) -> bool:
        """Whether a side holds a whole record where this one is damaged."""
        for side in self._sides:
            size = int.from_bytes(side.read(damage.offset, damage.offset + 4), "big")
            data = side.read(damage.offset, damage.offset + min(size, self._record_bytes_max))
            if is_record(data, 0, damage.offset):
                return True
        return False

    def _message(self, side: AnySide, offset: int) -> tuple[bytes, int, Message] | None:
        for block in self._every[side.index].blocks:
            at = int(np.searchsorted(block.records.start, offset - block.base))
            if at < len(block.records) and int(block.records.start[at]) + block.base == offset:
                one = block.records.keep(slice(at, at + 1))
                return block.window, block.base, message_at(block.window, one)
        return None

    def _refuses(self, side: AnySide, offset: int) -> bool:
        """Whether a side holds something else where a record would begin at an offset."""
        items = self._every[side.index]
        starts = items.starts
        before = int(np.searchsorted(starts, offset)) - 1
        if before >= 0 and int(items.ends[before]) > offset:
            return True
        head = side.read(offset, offset + 8)
        return head[4:] == MAGIC_BLANK.to_bytes(4, "big") and items.damage_at(offset) is None

    def _vote(
        self,
        holders: Mapping[bytes, Sequence[AnySide]],
        refusing: Sequence[AnySide],
        messages: Mapping[bytes, tuple[bytes, int, Message]],
    ) -> bytes | None:
        """The bytes of the majority, None if no record begins here."""

        def weight(sides: Sequence[AnySide], end: int) -> tuple[int, tuple[int, int], int]:
            voting = [side for side in sides if side.confirm >= end]
            ranks = [self._group.replicas[side.index].rank for side in sides]
            return len(voting), max(ranks), -min(side.index for side in sides)

        best = {raw: weight(sides, messages[raw][2].end) for raw, sides in holders.items()}
        chosen = max(best, key=lambda raw: best[raw])
        if refusing:
            end = messages[chosen][2].offset + 1
            if weight(refusing, end) > best[chosen]:
                return None
        return chosen

    def _missing(self, side: AnySide, told: Message) -> tuple[str, str, str | None]:
        """(kind, detail, field) for a replica without a whole record where others have one."""
        if isinstance(side, Absent):
            return "missing", side.what, None
        damage = self._every[side.index].damage_at(told.offset)
        theirs = side.read(told.offset, told.end)
        differs = differences(told, theirs)
        if _mostly(differs.count, told):
            begins_here = damage is not None and damage.offset == told.offset
            reason = damage.reason if damage and begins_here else _problem(theirs)
            found = f"{differs.text(told.offset)}; {reason}"
            return "divergent", found, ", ".join(differs.parts)
        if not theirs:
            return "missing", "its file ends before", None
        if not any(theirs):
            return "missing", "zeros where it should be", None
        if theirs[4:8] == MAGIC_BLANK.to_bytes(4, "big"):
            return "missing", "a blank where it should be", None
        reason = "other bytes where it should be"
        if damage is not None:
            reason = damage.reason
            if damage.offset != told.offset:
                reason = f"within {damage.size} damaged bytes from {damage.offset} on: {reason}"
        return "missing", reason, None

    def _divergent(self, told: Message, theirs: bytes) -> tuple[str, str, str | None]:
        differs = differences(told, theirs)
        text = f"{differs.text(told.offset)}; both are whole records"
        return "divergent", text, ", ".join(differs.parts)

    def _against(self, sides: Sequence[AnySide]) -> str:
        others = len(self._sides) - len(sides)
        hold, do = "hold" + "s" * (len(sides) == 1), "does" if others == 1 else "do"
        return f"{len(sides)} of {len(self._sides)} replicas {hold} it, {others} {do} not"

    def _add(
        self,
        place: Place,
        side: AnySide,
        message: Message,
        said: tuple[str, str, str | None],
        holders: Sequence[AnySide],
    ) -> None:
        """A finding about one side; `holders` have the message."""
        kind, detail, part = said
        offset, end = message.offset, message.end
        confirmed = end <= side.confirm
        if not confirmed and (not self._unconfirmed or end > side.limit):
            return
        if not confirmed:
            detail = f"above its confirmOffset {side.confirm}: {detail}"
        epoch, doubt = self._group.epoch_at(offset, [each.index for each in holders])
        place.deviating.add(side.index)
        place.findings.append(
            Finding(
                self._group.name,
                CRITICAL if confirmed else INFO,
                kind,
                detail + doubt,
                self._group.names([side.index]),
                message.ext.topic,
                message.ext.queue_id,
                message.ext.queue_offset,
                offset,
                len(message.raw),
                epoch,
                message.unique_key,
                part,
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
    return "a record that is cut off" if head is None else "a record of another place or size"


def _mostly(differing: int, message: Message) -> bool:
    """Whether most of a message's bytes are still there."""
    return 2 * differing <= len(message.raw)


def _key(message: Message) -> str:
    return message.unique_key or f"queue offset {message.ext.queue_offset} of {message.ext.topic}"
