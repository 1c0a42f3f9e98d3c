"""The steps of an audit, each a function of one task; an engine runs them one after the other.

What a later step needs goes through exchanges, divided by queue, by place, by key or by log offset;
what is told is written by the task that finds it. Only sums come back. Free of Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.audit.acked import (
    AckedCounts,
    QueueBegins,
    Told,
    at_places,
    by_links,
    id_offset,
    link_of,
    links_of,
    not_acked,
    out_of_order,
    place_of,
)
from batonmq.spark.audit.acked_list import (
    ENTRY_SCHEMA,
    BadEntry,
    Entry,
    Piece,
    entries_of,
    is_numbered,
    is_placed,
)
from batonmq.spark.audit.findings import COUNT, MESSAGE, SCAN_SCHEMA, Finding
from batonmq.spark.audit.messages import (
    LINKED_SCHEMA,
    MESSAGE_SCHEMA,
    NAMED_SCHEMA,
    SOUGHT_SCHEMA,
    Message,
    Sought,
)
from batonmq.spark.audit.relations import (
    across_ranges,
    duplicates,
    may_repeat,
    queue_begins,
    scan_key,
)
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.audit.results import FINDING_SCHEMA, FindingFiles, FindingSums
from batonmq.spark.audit.scan import RangeTask, ScanOptions, run_task
from batonmq.spark.exchange import Exchange, bucket_of, rows_of, table_of

#: So many messages of a queue that follow one another come to one task.
_BLOCK_BITS: Final = 16
_ENTRIES_MAX: Final = 200_000
_SCHEMAS: Final = {
    "scanned": SCAN_SCHEMA,
    "placed": ENTRY_SCHEMA,
    "numbered": ENTRY_SCHEMA,
    "messages": MESSAGE_SCHEMA,
    "sought": SOUGHT_SCHEMA,
    "linked": LINKED_SCHEMA,
    "unlisted": MESSAGE_SCHEMA,
    "named": NAMED_SCHEMA,
    "lacking": FINDING_SCHEMA,
}


@dataclass(frozen=True, slots=True)
class Shared:
    """What all tasks know: the groups by name, where exchanges lie, and where findings go."""

    groups: Mapping[str, ReplicaGroup]
    folder: str
    buckets: int
    files: FindingFiles

    def exchange(self, name: str) -> Exchange:
        return Exchange(f"{self.folder}/{name}", _SCHEMAS[name], self.buckets)

    def bucket(self, *key: object) -> int:
        return bucket_of(key, self.buckets)

    def send(
        self, name: str, task: str, rows: Sequence[Sequence[Any]], keys: Iterable[Sequence[object]]
    ) -> None:
        if rows:
            table = table_of(rows, _SCHEMAS[name])
            self.exchange(name).send(task, table, (self.bucket(*key) for key in keys))


@dataclass(slots=True)
class Listed:
    """What a task saw of a list. `others`: entries by broker that is not audited; `named`: brokers
    of which there are several groups; `bad`: a file, and what is wrong with it if that is known.
    """

    count: int = 0
    others: Counter[str] = field(default_factory=Counter)
    named: set[str] = field(default_factory=set)
    topics: set[tuple[str, str]] = field(default_factory=set)
    has_ids: bool = False
    bad: BadEntry | None = None


@dataclass(frozen=True, slots=True)
class ReadList:
    """Reads pieces of lists. `brokers`: group by the names of its brokers; `several`: names that
    may be any of some groups; `only`: the group of entries without a broker."""

    shared: Shared
    brokers: Mapping[str, str]
    several: frozenset[str]
    only: str | None

    def __call__(self, task: tuple[int, Piece]) -> Listed:
        number, piece = task
        listed, mine = Listed(), list[Entry]()
        part = 0
        try:
            for entry in entries_of(piece):
                listed.count += 1
                if entry.broker in self.several:
                    listed.named.add(str(entry.broker))
                elif entry.broker is not None and entry.broker not in self.brokers:
                    listed.others[entry.broker] += 1
                    continue
                group = self.only if entry.broker is None else self.brokers.get(entry.broker)
                mine.append(entry._replace(group=group))
                if len(mine) == _ENTRIES_MAX:
                    self._send(f"{number:06}-{part:06}", mine, listed)
                    mine, part = [], part + 1
        except BadEntry as error:
            listed.bad = error
        self._send(f"{number:06}-{part:06}", mine, listed)
        return listed

    def _send(self, task: str, mine: list[Entry], listed: Listed) -> None:
        send = self.shared.send
        placed = [each for each in mine if is_placed(each) and each.group is not None]
        send("placed", task, placed, map(_block, placed))
        sought = []
        for each in mine:
            is_rest = not is_placed(each) or each.group is None
            if is_rest or each.unique_key is not None:
                sought.append(Sought(link_of(each), is_rest, None, None, each))
            listed.has_ids |= id_offset(each) is not None
            if each.group is not None and each.topic is not None:
                listed.topics.add((each.group, each.topic))
        _send_sought(self.shared, task, sought)
        numbered = [each for each in mine if is_numbered(each)]
        keys = ((each.group, each.producer, each.topic, each.queue_id) for each in numbered)
        send("numbered", task, numbered, keys)


def _send_sought(shared: Shared, task: str, sought: Sequence[Sought]) -> None:
    rows = [(*each[:4], *each.entry) for each in sought]
    shared.send("sought", task, rows, ((each.link,) for each in sought))


def _block(row: Entry | Message, ahead: int = 0) -> tuple[object, ...]:
    group, topic, queue_id, offset = place_of(row)
    return group, topic, queue_id, ((offset or 0) + ahead) >> _BLOCK_BITS


@dataclass(slots=True)
class Counts:
    """One group: messages in its confirmed log, those that two or more replicas hold alike, and the
    bytes of the log that were compared.
    """

    messages: int = 0
    agreed: int = 0
    log_bytes: int = 0

    def add(self, other: Counts) -> None:
        self.messages += other.messages
        self.agreed += other.agreed
        self.log_bytes += other.log_bytes


@dataclass(frozen=True, slots=True)
class Scan:
    """Compares ranges of logs. `topics`: those of the list (group, topic), None without one;
    `with_ids`: entries may name a log offset only."""

    shared: Shared
    groups: Sequence[ReplicaGroup]
    options: ScanOptions
    topics: frozenset[tuple[str, str]] | None
    with_ids: bool

    def __call__(self, task: tuple[int, Sequence[RangeTask]]) -> dict[str, Counts]:
        number, ranges = task
        counts: dict[str, Counts] = {}
        rows: list[dict[str, Any]] = []
        messages: list[pa.RecordBatch] = []
        for each in ranges:
            group = self.groups[each.group]
            for batch in run_task(each, group, self.options):
                if batch.num_rows and batch.column("part")[0].as_py() == MESSAGE:
                    messages.append(batch.select(MESSAGE_SCHEMA.names))
                    continue
                for row in batch.to_pylist():
                    if row["part"] == COUNT:
                        more = Counts(row["amount"], row["agreed"], row["size"])
                        counts.setdefault(group.name, Counts()).add(more)
                    else:
                        rows.append(row)
        name = f"scan-{number:06}"
        table = pa.Table.from_pylist(rows, SCAN_SCHEMA)
        to = (self.shared.bucket(*scan_key(row)) for row in rows)
        self.shared.exchange("scanned").send(name, table, to)
        self._send(name, messages)
        return counts

    def _send(self, task: str, batches: list[pa.RecordBatch]) -> None:
        """Rows of messages, for those who look for them by place and by link."""
        placed: list[Message] = []
        linked: list[tuple[object, ...]] = []
        for message in rows_of(batches, Message):
            if self.topics is None:
                if may_repeat(message):
                    linked.append((f"k{message.unique_key}", *message))
                continue
            if message.amount and (message.group, message.topic) in self.topics:
                placed.append(message)
            links = links_of(message, with_ids=self.with_ids)
            linked += [(link, *message) for link in links]
        self.shared.send("linked", task, linked, ((row[0],) for row in linked))
        # The last message of a block tells where the first one of the next block would lie.
        last = [m for m in placed if m.queue_offset + 1 & (1 << _BLOCK_BITS) - 1 == 0]
        last = [m for m in last if self.shared.bucket(*_block(m, 1)) != self._bucket(m)]
        keys = [*map(_block, placed), *(_block(each, 1) for each in last)]
        self.shared.send("messages", task, [*placed, *last], keys)

    def _bucket(self, message: Message) -> int:
        return self.shared.bucket(*_block(message))


@dataclass(slots=True)
class Step:
    """What a step found. `begins`: first queue offsets of queues."""

    sums: FindingSums
    counts: AckedCounts = field(default_factory=AckedCounts)
    begins: QueueBegins = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AcrossRanges:
    """The findings of all ranges, and gaps between them; by queue."""

    shared: Shared

    def __call__(self, bucket: int) -> Step:
        shared = self.shared
        rows = [
            row for batch in shared.exchange("scanned").receive(bucket) for row in batch.to_pylist()
        ]
        sums = shared.files.write(f"ranges-{bucket:06}", across_ranges(rows, shared.groups))
        return Step(sums, begins=queue_begins(rows))


@dataclass(frozen=True, slots=True)
class AtPlaces:
    """Entries against the messages at their places; by place."""

    shared: Shared

    def __call__(self, bucket: int) -> Step:
        shared = self.shared
        entries = rows_of(shared.exchange("placed").receive(bucket), Entry)
        messages = rows_of(shared.exchange("messages").receive(bucket), Message)
        told = at_places(entries, messages, shared.groups)
        told.unlisted = [m for m in told.unlisted if shared.bucket(*_block(m)) == bucket]
        return _tell(shared, f"places-{bucket:06}", told)


@dataclass(frozen=True, slots=True)
class ByLinks:
    """Entries that are still looked for, and repeated keys; by link."""

    shared: Shared
    begins: QueueBegins
    duplicates: bool

    def __call__(self, bucket: int) -> Step:
        shared = self.shared
        sought = [
            Sought(row[0], row[1], row[2], row[3], Entry(*row[4:]))
            for row in rows_of(shared.exchange("sought").receive(bucket), _Row)
        ]
        linked = [
            (row[0], Message(*row[1:]))
            for row in rows_of(shared.exchange("linked").receive(bucket), _Row)
        ]
        told = by_links(sought, linked, shared.groups, self.begins)
        if self.duplicates:
            own = (m for link, m in linked if may_repeat(m) and link == f"k{m.unique_key}")
            told.findings += duplicates(own)
        return _tell(shared, f"links-{bucket:06}", told)


class _Row(tuple[Any, ...]):
    def __new__(cls, *values: Any) -> _Row:
        return super().__new__(cls, values)


def _tell(shared: Shared, task: str, told: Told) -> Step:
    _send_sought(shared, task, told.unseen)
    at = ((each.group, each.physical_offset >> _BLOCK_BITS) for each in told.unlisted)
    shared.send("unlisted", task, told.unlisted, at)
    shared.send("named", task, told.named, ((who, at >> _BLOCK_BITS) for who, at in told.named))
    lacking = [tuple(finding.row().values()) for finding in told.lacking]
    places = [(each.group, each.physical_offset or 0) for each in told.lacking]
    shared.send("lacking", task, lacking, ((who, at >> _BLOCK_BITS) for who, at in places))
    return Step(shared.files.write(task, told.findings), told.counts)


@dataclass(frozen=True, slots=True)
class ByOffsets:
    """Messages that no entry names, and each that a replica lacks once; by log offset."""

    shared: Shared

    def __call__(self, bucket: int) -> Step:
        shared = self.shared
        unlisted = rows_of(shared.exchange("unlisted").receive(bucket), Message)
        named = rows_of(shared.exchange("named").receive(bucket), _Row)
        found = list(not_acked(unlisted, ((row[0], row[1]) for row in named)))
        lacking: dict[object, Finding] = {}
        for row in rows_of(shared.exchange("lacking").receive(bucket), _Row):
            told = Finding(**dict(zip(FINDING_SCHEMA.names, row, strict=True)))
            lacking.setdefault((told.group, told.physical_offset), told)
        found += lacking.values()
        return Step(shared.files.write(f"offsets-{bucket:06}", found))


@dataclass(frozen=True, slots=True)
class InOrder:
    """Entries in the order of their producers; by producer and queue."""

    shared: Shared

    def __call__(self, bucket: int) -> Step:
        entries = rows_of(self.shared.exchange("numbered").receive(bucket), Entry)
        found = out_of_order(entries)
        return Step(self.shared.files.write(f"order-{bucket:06}", found))
