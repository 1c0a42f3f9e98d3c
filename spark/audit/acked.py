"""Acknowledged sends, compared with what the replicas hold: functions of rows that have one key.

An entry is looked for at its place, then by its key, or by its message id; what is not found, and
cannot have expired, is lost. So is what only replicas hold that the others have gone on without.
Free of Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Final, NamedTuple

from batonmq.protocol.topic_name import OLD_SYSTEM_TOPIC_PREFIX, SCHEDULE_TOPIC, SYSTEM_TOPIC_PREFIX
from batonmq.spark.audit.acked_list import Entry, is_placed
from batonmq.spark.audit.findings import CRITICAL, INFO, WARNING, Finding
from batonmq.spark.audit.messages import Message, Sought
from batonmq.spark.audit.replicas import ReplicaGroup

#: Here messages wait for their time or their commit; the answer names their own topic all the same.
_WAITING: Final = (SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX)
_LONG_END: Final = 1 << 63
_Place = tuple[str | None, str | None, int | None, int | None]
QueueBegins = Mapping[tuple[str, str, int], int]


@dataclass(slots=True)
class AckedCounts:
    """How many entries of the list turned out how.

    `elsewhere`: not where they were acknowledged. `not_everywhere`: whole in some replicas, but not
    in all that confirm their place. `unconfirmed`: found, above what any replica confirms.
    `expired`: older than the log. `unchecked`: they name no place, and part of the log has
    expired. `other_brokers`: their broker is not audited.
    """

    entries: int = 0
    found: int = 0
    lost: int = 0
    elsewhere: int = 0
    not_everywhere: int = 0
    unconfirmed: int = 0
    expired: int = 0
    unchecked: int = 0
    other_brokers: int = 0

    def as_dict(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def add(self, other: AckedCounts) -> None:
        for name, value in other.as_dict().items():
            setattr(self, name, getattr(self, name) + value)


def place_of(row: Entry | Message) -> _Place:
    return row.group, row.topic, row.queue_id, row.queue_offset


def link_of(entry: Entry) -> str | None:
    """By what an entry is looked up: its key, else its place, else the offset in its message id."""
    if entry.unique_key is not None:
        return f"k{entry.unique_key}"
    if entry.group is None:
        return None
    if is_placed(entry):
        return "p" + "\0".join(map(str, place_of(entry)))
    at = id_offset(entry)
    return None if at is None else f"i{entry.group}\0{at}"


def links_of(message: Message, *, with_ids: bool) -> Iterator[str]:
    """By what entries are looked up that this message may be; one that others deny has a place."""
    if message.unique_key is not None:
        yield f"k{message.unique_key}"
    if message.batch_key is not None:
        yield f"k{message.batch_key}"
    if message.amount == 0:
        yield "p" + "\0".join(map(str, place_of(message)))
    if with_ids:
        yield f"i{message.group}\0{message.physical_offset}"


def id_offset(entry: Entry) -> int | None:
    """The log offset that the message id names, of an entry that has nothing else."""
    if entry.unique_key is not None or entry.msg_id is None:
        return None
    if is_placed(entry) and entry.group is not None:
        return None
    try:
        at = int(entry.msg_id[-16:], 16)
    except ValueError:
        return None
    return at if 0 <= at < _LONG_END else None


@dataclass(slots=True)
class Told:
    """What a step of the comparison tells, and what the next ones are to look at.

    `lacking`: findings about messages that a replica lacks, one for each entry that names one.
    """

    counts: AckedCounts = field(default_factory=AckedCounts)
    findings: list[Finding] = field(default_factory=list)
    lacking: list[Finding] = field(default_factory=list)
    unseen: list[Sought] = field(default_factory=list)
    unlisted: list[Message] = field(default_factory=list)
    named: list[tuple[str, int]] = field(default_factory=list)

    def found(self, entry: Entry, message: Message, group: ReplicaGroup) -> None:
        """The entry is this message."""
        self.counts.found += 1
        if message.lack:
            self.counts.not_everywhere += 1
            detail = "acknowledged, and whole in other replicas only"
            who = _names(group, message.lack)
            self.lacking.append(_at(entry, message, "acked_missing", detail, who))
        if entry.body_crc is not None and entry.body_crc & 0x7FFFFFFF != message.body_crc:
            detail = (
                f"its body has CRC {message.body_crc}, "
                f"the acknowledged one {entry.body_crc & 0x7FFFFFFF}"
            )
            self.findings.append(_at(entry, message, "divergent", detail, of="body"))
        self.counts.unconfirmed += message.physical_offset + message.size > group.confirm


def at_places(
    entries: Iterable[Entry], messages: Iterable[Message], groups: Mapping[str, ReplicaGroup]
) -> Told:
    """Entries with a place and a group, against messages that the replicas agree on."""
    told = Told()
    wanted: dict[_Place, list[Entry]] = defaultdict(list)
    for entry in entries:
        wanted[place_of(entry)].append(entry)
    seen: set[int] = set()
    before: dict[_Place, Message] = {}
    for message in messages:
        place = place_of(message)
        next_place = (*place[:3], message.queue_offset + 1)
        if next_place in wanted:
            before[next_place] = message
        keys = (None, message.unique_key, message.batch_key)
        mine = [entry for entry in wanted.get(place, ()) if entry.unique_key in keys]
        if not mine:
            told.unlisted.append(message)
        for entry in mine:
            if id(entry) not in seen:
                told.found(entry, message, groups[message.group])
            seen.add(id(entry))
    for place, listed in wanted.items():
        last = before.get(place)
        for entry in listed:
            if id(entry) not in seen:
                behind, epoch = (last.physical_offset, last.epoch) if last else (None, None)
                told.unseen.append(Sought(link_of(entry), True, behind, epoch, entry))
    return told


class _Copies(NamedTuple):
    """All messages of a group that one link leads to: the first of them with the bits of all, and
    the log offsets of those that the replicas agree on."""

    first: Message
    agreed: list[int]


def by_links(
    sought: Sequence[Sought],
    linked: Iterable[tuple[str, Message]],
    groups: Mapping[str, ReplicaGroup],
    begins: QueueBegins,
) -> Told:
    """Entries against the messages of their key, their id or, where replicas deny one, their
    place; those that agree come first. `begins`: where queues begin in the log.
    """
    told = Told()
    wanted: dict[str | None, list[Sought]] = defaultdict(list)
    for each in sought:
        wanted[each.link].append(each)
    found: dict[str, dict[str, _Copies]] = defaultdict(dict)
    for link, message in linked:
        if link in wanted:
            _add(found[link], message)
    for wanted_link, theirs in wanted.items():
        by_group = found.get(wanted_link, {}) if wanted_link is not None else {}
        for name, copies in by_group.items():
            mine = [each for each in theirs if each.entry.group in (None, name)]
            if any(each.is_rest for each in mine) or (mine and len(copies.agreed) > 1):
                told.named += [(name, at) for at in copies.agreed]
        for each in theirs:
            if each.is_rest:
                fits = [c.first for g, c in by_group.items() if each.entry.group in (None, g)]
                _judge(told, each, min(fits, key=_order, default=None), groups, begins)
    return told


def _order(message: Message) -> tuple[int, int]:
    return 1 - message.amount, message.physical_offset


def _add(copies: dict[str, _Copies], message: Message) -> None:
    agreed = [message.physical_offset] if message.amount else []
    known = copies.get(message.group)
    if known is None:
        copies[message.group] = _Copies(message, agreed)
        return
    first, other = sorted((known.first, message), key=_order)
    both = first._replace(have=first.have | other.have, lack=first.lack & other.lack)
    copies[message.group] = _Copies(both, known.agreed + agreed)


def _judge(
    told: Told,
    sought: Sought,
    message: Message | None,
    groups: Mapping[str, ReplicaGroup],
    begins: QueueBegins,
) -> None:
    entry = sought.entry
    if entry.group is None and message is not None:
        entry = entry._replace(group=message.group)
    if message is not None and message.amount:
        told.found(entry, message, groups[message.group])
        if _has_moved(entry, message, groups, begins):
            told.counts.elsewhere += 1
            detail = (
                f"acknowledged here, lies at queue {message.queue_id} offset "
                f"{message.queue_offset} of {message.topic}"
            )
            told.findings.append(_at(entry, message, "reordered", detail))
        return
    outcome = "lost" if message is not None else _outcome(entry, groups, begins)
    if outcome == "expired":
        told.counts.expired += 1
    elif outcome == "unchecked":
        told.counts.unchecked += 1
        detail = (
            "it names no broker, and several groups are audited"
            if entry.group is None and entry.unique_key is None
            else "not found, and it may have expired: the log no longer begins at 0"
        )
        told.findings.append(of_entry(entry, WARNING, "unchecked", detail))
    else:
        told.counts.lost += 1
        told.findings.append(_lost(sought, entry, message, groups))


def _log_first(entry: Entry, groups: Mapping[str, ReplicaGroup]) -> int:
    if entry.group is not None:
        return groups[entry.group].first
    return max(group.first for group in groups.values())


def _may_have_expired(entry: Entry, begins: QueueBegins) -> bool:
    if entry.group is None or not is_placed(entry):
        return True
    assert entry.topic is not None and entry.queue_id is not None
    assert entry.queue_offset is not None
    begin = begins.get((entry.group, entry.topic, entry.queue_id))
    return begin is None or entry.queue_offset < begin


def _has_moved(
    entry: Entry, message: Message, groups: Mapping[str, ReplicaGroup], begins: QueueBegins
) -> bool:
    """A copy for a retry does not prove a move of the message itself, unless that cannot have
    expired."""
    if entry.queue_offset is None or message.topic.startswith(_WAITING):
        return False
    named = zip(place_of(entry)[1:], place_of(message)[1:], strict=True)
    if all(theirs is None or theirs == mine for theirs, mine in named):
        return False
    return _log_first(entry, groups) == 0 or not _may_have_expired(entry, begins)


def _outcome(entry: Entry, groups: Mapping[str, ReplicaGroup], begins: QueueBegins) -> str:
    """Of an entry that is nowhere: lost, expired or unchecked."""
    first, at = _log_first(entry, groups), id_offset(entry)
    if entry.group is None and entry.unique_key is None:
        return "unchecked"
    if first == 0:
        return "lost"
    if at is not None:
        return "expired" if at < first else "lost"
    if not is_placed(entry) or entry.group is None:
        return "unchecked"
    if (entry.group, entry.topic, entry.queue_id) not in begins:
        return "unchecked"
    return "expired" if _may_have_expired(entry, begins) else "lost"


def _lost(
    sought: Sought, entry: Entry, message: Message | None, groups: Mapping[str, ReplicaGroup]
) -> Finding:
    if message is not None:
        who = _names(groups[message.group], message.have)
        detail = (
            f"acknowledged, and only in {', '.join(who)}: the others, or a later epoch, went on "
            "without it"
        )
        return of_entry(
            entry, CRITICAL, "lost", detail, replicas=who, physical_offset=message.physical_offset,
            epoch=sought.epoch_before if message.epoch is None else message.epoch,
        )  # fmt: skip
    detail = "acknowledged, and in no replica"
    if sought.behind is not None:
        detail += f"; the one before it in its queue lies at {sought.behind}"
    return of_entry(
        entry, CRITICAL, "lost", detail,
        physical_offset=id_offset(entry), epoch=sought.epoch_before,
    )  # fmt: skip


def not_acked(unlisted: Iterable[Message], named: Iterable[tuple[str, int]]) -> Iterator[Finding]:
    """Messages of the topics of the list that it does not name: unanswered sends are stored."""
    listed = set(named)
    for each in unlisted:
        if (each.group, each.physical_offset) not in listed:
            yield each.finding(INFO, "not_acked", "in the log, and not in the list")


def out_of_order(entries: Iterable[Entry]) -> Iterator[Finding]:
    """Where a producer was given descending offsets in a queue; all entries have a number."""
    queues: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
    for entry in entries:
        queues[entry.group, entry.producer, entry.topic, entry.queue_id].append(entry)
    for told in queues.values():
        told.sort(key=lambda entry: entry.number or 0)
        for before, after in pairwise(told):
            assert before.queue_offset is not None and after.queue_offset is not None
            if after.queue_offset <= before.queue_offset:
                detail = (
                    f"number {after.number} of producer {after.producer} was acknowledged here, "
                    f"number {before.number} before it at queue offset {before.queue_offset}"
                )
                yield of_entry(after, WARNING, "reordered", detail)


def of_entry(
    entry: Entry,
    severity: str,
    kind: str,
    detail: str,
    *,
    replicas: tuple[str, ...] = (),
    physical_offset: int | None = None,
    size: int | None = None,
    epoch: int | None = None,
    of: str | None = None,
) -> Finding:
    """A finding about an entry."""
    return Finding(
        entry.group, severity, kind, detail, replicas, entry.topic, entry.queue_id,
        entry.queue_offset, physical_offset, size, epoch, entry.unique_key, of,
    )  # fmt: skip


def _at(
    entry: Entry,
    message: Message,
    kind: str,
    detail: str,
    replicas: tuple[str, ...] = (),
    of: str | None = None,
) -> Finding:
    return of_entry(
        entry, CRITICAL, kind, detail, replicas=replicas, of=of, size=message.size,
        physical_offset=message.physical_offset, epoch=message.epoch,
    )  # fmt: skip


def _names(group: ReplicaGroup, bits: int) -> tuple[str, ...]:
    return group.names(at for at in range(len(group.replicas)) if bits >> at & 1)
