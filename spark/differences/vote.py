"""Replicas do not hold the same at one place of the log: who deviates, and how.

The majority of replicas is right. In a tie, the side with the latest epoch (then with the highest
confirmOffset) is right. A replica whose bytes are no record has no vote; one that holds another
record across the place, or a blank, votes that no record begins there. Free of Spark.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from batonmq.protocol.layout import record_layout
from batonmq.protocol.message import MessageExt
from batonmq.protocol.properties import UNIQ_KEY
from batonmq.protocol.records.codec import MAGIC_BLANK, decode_record, scan_record
from batonmq.protocol.records.faults import CorruptRecord, RecordFault
from batonmq.protocol.records.search import is_record
from batonmq.spark.differences.log_findings import LogFinding
from batonmq.spark.differences.replica_groups import ReplicaGroup
from batonmq.spark.differences.sides import Items, Side
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.log_range import RECORD_BYTES_MAX, Block
from batonmq.spark.severity import CRITICAL, INFO

_BLANK: Final = MAGIC_BLANK.to_bytes(4, "big")
_Said = tuple[str, str, str | None]
"""(kind, detail, field): what is found about one side."""


_HEADER: Final = "header"
#: What people read for a field; others have their own name with spaces.
_NAMES: Final = {
    "body_crc": "body CRC", "born_ms": "born time", "store_ms": "store time",
    "prepared": "prepared transaction offset",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordMessage:
    """A record: a block of it alone, its bytes, the message of it."""

    block: Block
    raw: bytes
    ext: MessageExt

    @property
    def offset(self) -> int:
        return self.ext.physical_offset

    @property
    def end(self) -> int:
        return self.offset + len(self.raw)

    def _at(self, place: str) -> int:
        return int(getattr(self.block.records, place)[0] - self.block.records.start[0])

    @property
    def unique_key(self) -> str | None:
        """Its own: a message of a batch has that of the batch behind it."""
        for pair in self.raw[self._at("properties_at") :].split(b"\x02"):
            name, _, value = pair.partition(b"\x01")
            if value and name == UNIQ_KEY.encode():
                return value.decode("utf-8", "replace")
        return None

    @property
    def identity(self) -> int:
        """The same number for copies of one message, wherever they lie: by its unique key, or,
        without one, by what the producer gave it.
        """
        sign = hashlib.blake2b(self.ext.topic.encode(), digest_size=8)
        if self.unique_key is not None:
            sign.update(b"\0" + self.unique_key.encode())
        else:
            body_at = self._at("body_at")
            body = self.raw[body_at : body_at + int(self.block.records.body_length[0])]
            sign.update(b"\1%d\0" % self.ext.born_timestamp + body)
        return int.from_bytes(sign.digest(), "big", signed=True)

    def differences(self, other: bytes) -> tuple[int, str, str]:
        """(count, text, parts): what differs between its bytes and as many others, of which
        missing ones differ, too; parts are of header, body, properties.
        """
        mine = np.frombuffer(self.raw, np.uint8)
        theirs = np.frombuffer(other[: len(mine)], np.uint8)
        marks = np.ones(len(mine), np.bool_)
        marks[: len(theirs)] = mine[: len(theirs)] != theirs
        at = np.flatnonzero(marks)
        names = [(n, part) for n, part, begin, end in self._spans() if marks[begin:end].any()]
        what = "1 byte differs" if len(at) == 1 else f"{len(at)} bytes differ"
        first = self.offset + (int(at[0]) if len(at) else 0)
        text = f"{what} in {', '.join(name for name, _ in names)}, the first at {first}"
        return len(at), text, ", ".join(dict.fromkeys(part for _, part in names))

    def _spans(self) -> list[tuple[str, str, int, int]]:
        """(name, part, begin, end) of each field."""
        records = self.block.records
        hosts = int(records.born_host_length[0]), int(records.store_host_length[0])
        body_at, properties_at = self._at("body_at"), self._at("properties_at")
        fields = [
            *((n, _HEADER, at) for n, at in record_layout(*hosts).at.items()),
            ("body", "body", body_at), ("topic", _HEADER, body_at + int(records.body_length[0])),
            ("properties length", _HEADER, properties_at - 2),
            ("properties", "properties", properties_at), ("", "", len(self.raw)),
        ]  # fmt: skip
        return [
            (_NAMES.get(name, name.replace("_", " ")), part, begin, end)
            for (name, part, begin), (_, _, end) in pairwise(fields)
        ]


def message_of(block: Block) -> RecordMessage:
    """The message of a block of one record."""
    start, size = int(block.records.start[0]), int(block.records.size[0])
    raw = block.window[start : start + size]
    return RecordMessage(block, raw, decode_record(raw, read_body=False))


class Vote:
    """Decides places of one stretch, which ends at `end`. `every`: what each side holds, by its
    replica's number."""

    def __init__(
        self,
        group: ReplicaGroup,
        sides: Sequence[Side],
        every: Mapping[int, Items],
        end: int,
        unconfirmed: bool,
    ) -> None:
        self.findings: list[LogFinding] = []
        self._group, self._sides, self._every = group, sides, every
        self._end, self._unconfirmed = end, unconfirmed
        # (begin, end) of what is reported, by the number of the replica that deviates
        self._reported: dict[int, list[tuple[int, int]]] = {side.index: [] for side in sides}

    def place(self, offset: int) -> Iterator[tuple[RecordMessage, int, int, bool]]:
        """(message, replicas that have it, replicas that lack it, whether it is the truth) of all
        records that begin at a log offset; replicas are bits. What is found goes to `findings`.
        """
        held: dict[bytes, tuple[RecordMessage, list[Side]]] = {}
        refusing: list[Side] = []
        rest: list[Side] = []
        for side in self._sides:
            record = self._every[side.index].record_at(offset)
            if record is not None:
                found = message_of(record)
                held.setdefault(found.raw, (found, []))[1].append(side)
            else:
                (refusing if self._refuses(side, offset) else rest).append(side)
        for side in [*rest]:
            # Its own chain of records broke before; the bytes are still there.
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
            lacking = (s for s in self._sides if s not in its and s.confirm >= message.end)
            yield message, _bits(its), _bits(lacking), message is truth
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
                said = "divergent", f"{text}; both are whole records", parts
                self._add(side, truth, truth, said, holders)
                continue
            if truth is not None:
                key = message.unique_key
                key = key or f"queue offset {message.ext.queue_offset} of {message.ext.topic}"
                what = f"another message lies there: {key}"
                self._add(side, truth, truth, ("missing", what, None), holders)
            self._add(side, message, truth, ("extra", against, None), its)

    def damages(self) -> Iterator[LogFinding]:
        """Damaged stretches without a finding about a message in them; after all places."""
        unexplained: dict[tuple[int, int], list[Side]] = {}
        for side in self._sides:
            known = np.array(self._reported[side.index], np.int64).reshape(-1, 2)
            for damage in self._every[side.index].damages:
                end = damage.offset + damage.size
                if ((known[:, 0] < end) & (damage.offset < known[:, 1])).any():
                    continue
                if damage.offset >= side.confirm and not self._unconfirmed:
                    continue
                if damage.offset >= self._end and self._is_good_elsewhere(damage):
                    continue  # it is a finding of the next stretch
                unexplained.setdefault((damage.offset, damage.size), []).append(side)
        for (offset, size), sides in unexplained.items():
            bad = self._every[sides[0].index].damage_at(offset)
            assert bad is not None, "the stretch that was just listed"
            numbers = [side.index for side in sides]
            epoch, doubt = self._group.epoch_at(offset, numbers)
            detail = f"{bad.reason}; {size} bytes are no message, and no replica confirms a "
            detail += f"good one in their place{doubt}"
            severity = CRITICAL if any(offset < side.confirm for side in sides) else INFO
            yield LogFinding(
                self._group.name, severity, "damaged", detail, self._group.names(numbers),
                physical_offset=offset, size=size, epoch=epoch, file=bad.file,
            )  # fmt: skip

    def _is_good_elsewhere(self, damage: Damage) -> bool:
        """Whether a side holds a whole record where this one is damaged."""
        for side in self._sides:
            size = int.from_bytes(side.read(damage.offset, damage.offset + 4), "big")
            data = side.read(damage.offset, damage.offset + min(size, RECORD_BYTES_MAX))
            if is_record(data, 0, damage.offset):
                return True
        return False

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
            return "missing", side.gone, None
        damage = self._every[side.index].damage_at(truth.offset)
        theirs = side.read(truth.offset, truth.end)
        count, text, parts = truth.differences(theirs)
        if 2 * count <= len(truth.raw):  # most of its bytes are still there
            begins_here = damage is not None and damage.offset == truth.offset
            reason = damage.reason if damage and begins_here else _problem(theirs)
            return "divergent", f"{text}; {reason}", parts
        if not theirs:
            what = "its file ends before"
        elif not any(theirs):
            what = "zeros where it should be"
        elif theirs[4:8] == _BLANK:
            what = "a blank where it should be"
        elif damage is None:
            what = "other bytes where it should be"
        elif damage.offset == truth.offset:
            what = damage.reason
        else:
            what = f"within {damage.size} damaged bytes from {damage.offset} on: {damage.reason}"
        return "missing", what, None

    def _add(
        self,
        side: Side,
        message: RecordMessage,
        truth: RecordMessage | None,
        said: _Said,
        holders: Sequence[Side],
    ) -> None:
        """A finding about one side; `holders` have the message."""
        offset, end = message.offset, message.end
        kind, detail, field = said
        confirmed = end <= side.confirm
        if not confirmed and (not self._unconfirmed or end > side.limit):
            return
        if not confirmed:
            detail = f"above its confirmOffset {side.confirm}: {detail}"
        epoch, doubt = self._group.epoch_at(offset, [each.index for each in holders])
        if truth is not None:
            self._reported[side.index].append((offset, truth.end))
        ext, severity = message.ext, CRITICAL if confirmed else INFO
        self.findings.append(LogFinding(
            self._group.name, severity, kind, detail + doubt, self._group.names([side.index]),
            ext.topic, ext.queue_id, ext.queue_offset, offset, len(message.raw), epoch,
            message.unique_key, field, side.path, message.identity,
        ))  # fmt: skip


def _bits(sides: Iterable[Side]) -> int:
    return sum(1 << side.index for side in sides)


def _problem(data: bytes) -> str:
    """What keeps bytes from being the whole record that others hold in their place."""
    try:
        head = scan_record(data, check_crc=True)
    except CorruptRecord as error:
        return error.what
    return RecordFault.CUT_OFF.text() if head is None else "a record of another place or size"
