"""The steps of an audit, each a function of one task; an engine runs them one after the other.

What a later step needs goes through exchanges, divided by the keys of `_TABLES`; what is told is
written by the task that finds it. Only sums come back. Free of Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from batonmq.spark.audit import acked
from batonmq.spark.audit.acked_list import ENTRY_SCHEMA, BadEntry, Entry, Piece, entries_of
from batonmq.spark.audit.findings import (
    FINDING_SCHEMA,
    IDENTIFIED_SCHEMA,
    Finding,
    FindingFiles,
    Sums,
    finding_table,
)
from batonmq.spark.audit.relations import QUEUE, AckedCounts, QueueBegins, Told, own_keys
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.audit.scan import (
    BEHIND_SCHEMA,
    MESSAGE_SCHEMA,
    RANGE_SCHEMA,
    AuditRequest,
    Counts,
    RangeTask,
    Scanned,
    scan_range,
)
from batonmq.spark.steps.exchange import Exchange

_ENTRIES_MAX: Final = 200_000
_AT: Final = ["group", "physical_offset"]
_TOPIC: Final = pa.schema([("group", pa.string()), ("topic", pa.string())])
#: What goes from step to step: its columns, and those by which it is divided.
_TABLES: Final[Mapping[str, tuple[pa.Schema, list[str]]]] = {
    "paired": (IDENTIFIED_SCHEMA, ["group", "identity"]),
    "units": (FINDING_SCHEMA, QUEUE),
    "queues": (RANGE_SCHEMA, QUEUE),
    "behind": (BEHIND_SCHEMA, QUEUE),
    "placed": (ENTRY_SCHEMA, acked.PLACE),
    "messages": (MESSAGE_SCHEMA, acked.PLACE),
    "numbered": (ENTRY_SCHEMA, ["group", "producer", "topic", "queue_id"]),
    "sought": (acked.SOUGHT_SCHEMA, ["link"]),
    "linked": (acked.LINKED_SCHEMA, ["link"]),
    "unlisted": (MESSAGE_SCHEMA, _AT),
    "named": (pa.schema([MESSAGE_SCHEMA.field(name) for name in _AT]), _AT),
    "lacking": (FINDING_SCHEMA, _AT),
    "lost": (acked.LOST_SCHEMA, [*QUEUE, "before"]),
}


@dataclass(frozen=True, slots=True)
class Shared:
    """What all tasks know: the groups by name, where exchanges lie, and where findings go."""

    groups: Mapping[str, ReplicaGroup]
    folder: str
    buckets: int
    files: FindingFiles

    def _exchange(self, name: str) -> Exchange:
        return Exchange(f"{self.folder}/{name}", *_TABLES[name], self.buckets)

    def send(self, name: str, task: str, table: pa.Table) -> None:
        self._exchange(name).send(task, table.cast(_TABLES[name][0]))

    def receive(self, name: str, bucket: int) -> pa.Table:
        return self._exchange(name).receive(bucket)


@dataclass(slots=True)
class Listed:
    """What a task saw of a list. `others`: entries by broker that is not audited; `named`: brokers
    of which there are several groups; `bad`: the first entry that cannot be used.
    """

    count: int = 0
    others: Counter[str] = field(default_factory=Counter)
    named: set[str] = field(default_factory=set)
    topics: set[tuple[str, str]] = field(default_factory=set)
    has_ids: bool = False
    bad: tuple[str, str, bool] | None = None


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
        listed, mine = Listed(), list[tuple[object, ...]]()
        try:
            for entry in entries_of(piece):
                listed.count += 1
                group = self._group(entry, listed)
                if group is not None or entry.broker is None or entry.broker in self.several:
                    values = (getattr(entry, name) for name in entry.__struct_fields__)
                    mine.append((*values, group, number << 40 | listed.count))
                if len(mine) == _ENTRIES_MAX:
                    self._send(f"{number:06}-{listed.count:012}", mine, listed)
                    mine = []
        except BadEntry as error:
            listed.bad = (error.path, str(error), error.is_torn)
        self._send(f"{number:06}-{listed.count:012}", mine, listed)
        return listed

    def _group(self, entry: Entry, listed: Listed) -> str | None:
        broker = entry.broker
        if broker is None:
            return self.only
        if broker in self.several:
            listed.named.add(broker)
        elif broker not in self.brokers:
            listed.others[broker] += 1
        return self.brokers.get(broker)

    def _send(self, task: str, mine: list[tuple[object, ...]], listed: Listed) -> None:
        columns = zip(*mine, strict=True) if mine else [()] * len(ENTRY_SCHEMA)
        arrays = [pa.array(c, kind) for c, kind in zip(columns, ENTRY_SCHEMA.types, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=ENTRY_SCHEMA)

        def have(*names: str) -> pa.Array:
            found = pc.is_valid(table[names[0]])
            for name in names[1:]:
                found = pc.and_(found, pc.is_valid(table[name]))
            return found

        send = self.shared.send
        is_placed = have(*acked.PLACE)
        send("placed", task, table.filter(is_placed))
        send("numbered", task, table.filter(have("producer", "number", *acked.PLACE[1:])))
        sought = acked.sought_of(table.filter(pc.invert(is_placed)), rest=True)
        keyed = acked.sought_of(
            table.filter(pc.and_(is_placed, pc.is_valid(table["unique_key"]))), rest=False
        )
        send("sought", task, pa.concat_tables([sought, keyed]))
        topics = table.filter(have("group", "topic")).select(_TOPIC.names)
        listed.topics |= {tuple(row.values()) for row in topics.to_pylist()}
        loose = table.filter(pc.and_(pc.invert(is_placed), pc.is_null(table["unique_key"])))
        listed.has_ids |= bool(loose.num_rows - loose["msg_id"].null_count)


@dataclass(frozen=True, slots=True)
class Scan:
    """Compares ranges of logs. `topics`: those of the list (group, topic), None without one;
    `with_ids`: entries may name a log offset only."""

    shared: Shared
    groups: Sequence[ReplicaGroup]
    request: AuditRequest
    topics: frozenset[tuple[str, str]] | None
    with_ids: bool

    def __call__(self, task: tuple[int, Sequence[RangeTask]]) -> tuple[dict[str, Counts], Sums]:
        number, ranges = task
        counts: dict[str, Counts] = {}
        every = Scanned()
        for each in ranges:
            group = self.groups[each.group]
            every.counts = counts.setdefault(group.name, Counts())
            scan_range(each, group, self.request, every)
        name = f"scan-{number:06}"
        send = self.shared.send
        told: dict[str, list[Finding]] = {"paired": [], "units": [], "": []}
        for finding in every.findings:
            by = "paired" if finding.kind in ("missing", "extra") else ""
            told["units" if finding.kind == "queue_wrong" else by].append(finding)
        for kind in ("paired", "units"):
            send(kind, name, finding_table(told[kind], _TABLES[kind][0]))
        send("queues", name, pa.Table.from_pylist(every.queues, RANGE_SCHEMA))
        send("behind", name, pa.Table.from_pylist(every.behind, BEHIND_SCHEMA))
        if every.messages:
            self._send(name, pa.concat_tables(every.messages))
        return counts, self.shared.files.write(name, told[""])

    def _send(self, task: str, messages: pa.Table) -> None:
        """Rows of messages, for those who look for them by place and by link."""
        if self.topics is None:
            self.shared.send("linked", task, own_keys(messages))
            return
        linked = acked.links_of(messages, with_ids=self.with_ids)
        self.shared.send("linked", task, linked)
        topics = [dict(zip(_TOPIC.names, each, strict=True)) for each in self.topics]
        listed = pa.Table.from_pylist(topics, _TOPIC)
        agreed = messages.filter(pc.greater(messages["amount"], 0))
        listed = agreed.join(listed, _TOPIC.names, join_type="left semi")
        self.shared.send("messages", task, listed)


@dataclass(slots=True)
class Result:
    """What a step found."""

    sums: Sums
    counts: AckedCounts
    begins: QueueBegins


@dataclass(frozen=True, slots=True)
class Step:
    """What crosses ranges: a function of one bucket of tables, see `relations` and `acked`."""

    shared: Shared
    function: Callable[..., Told]
    more: tuple[Any, ...] = ()

    def __call__(self, bucket: int) -> Result:
        shared, task = self.shared, f"{self.function.__name__}-{bucket:06}"
        told = self.function(shared.groups, lambda name: shared.receive(name, bucket), *self.more)
        for name, table in told.sends.items():
            shared.send(name, task, table)
        return Result(shared.files.write(task, told.findings), told.counts, told.begins)
