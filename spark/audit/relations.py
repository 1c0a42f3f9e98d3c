"""What can only be seen across ranges of the log: tables that have one key, joined. Free of Spark.

Each function makes findings of the rows of one bucket; `bring` gives it the tables, see `steps`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batonmq.protocol.topic_name import (
    DLQ_PREFIX,
    OFFSET_MOVED_TOPIC,
    OLD_SYSTEM_TOPIC_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_TOPIC_PREFIX,
)
from batonmq.spark.audit.findings import Finding, findings_of
from batonmq.spark.audit.queues import step_finding
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.steps.severity import INFO
from batonmq.spark.steps.tables import runs_of, sorted_by

#: Topics in which keys repeat by design: retries, delays, halves of transactions.
_REPEATING: Final = (
    RETRY_PREFIX, DLQ_PREFIX, SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX,
    OFFSET_MOVED_TOPIC,
)  # fmt: skip
QUEUE: Final = ["group", "topic", "queue_id"]
Groups = Mapping[str, ReplicaGroup]
Bring = Callable[[str], pa.Table]
QueueBegins = Mapping[tuple[str, str, int], int]


class AckedCounts(msgspec.Struct):
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

    def add(self, other: AckedCounts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Told:
    """What a step tells, and the rows that later ones are to look at, by the names of tables.

    `begins`: where queues begin in the log.
    """

    findings: list[Finding] = field(default_factory=list)
    sends: dict[str, pa.Table] = field(default_factory=dict)
    counts: AckedCounts = field(default_factory=AckedCounts)
    begins: QueueBegins = field(default_factory=dict)


def of_message(row: Mapping[str, Any], severity: str, kind: str, detail: str) -> Finding:
    """A finding about a message, in no replica's name."""
    return Finding(
        row["group"], severity, kind, detail, (), row["topic"], row["queue_id"],
        row["queue_offset"], row["physical_offset"], row["size"], row["epoch"], row["unique_key"],
    )  # fmt: skip


def across_ranges(groups: Groups, bring: Bring) -> Told:
    """The findings that ranges have in common, and what their queues show together."""
    told = Told([*_paired(findings_of(bring("paired"))), *_once(findings_of(bring("units")))])
    queues = sorted_by(bring("queues"), *QUEUE, "physical_offset")
    rows = queues.to_pylist()
    firsts = set(runs_of(queues, QUEUE).tolist())
    for at, row in enumerate(rows):
        group, first = groups[row["group"]], row["queue_offset"]
        # Of a log that begins at 0 nothing has expired, so its queues do, too.
        before = rows[at - 1]["last_offset"] if at not in firsts else None if group.first else -1
        if before is not None and first != before + 1:
            told.findings.append(step_finding(
                group, row["topic"], row["queue_id"], before, first, row["physical_offset"]
            ))  # fmt: skip
    begins = queues.group_by(QUEUE).aggregate([("queue_offset", "min")]).to_pylist()
    told.begins = {tuple(row[n] for n in QUEUE): row["queue_offset_min"] for row in begins}
    sums = [("reach", "max"), ("amount", "sum"), ("queue_offset", "min")]
    for row in bring("behind").group_by([*QUEUE, "replica"]).aggregate(sums).to_pylist():
        detail = (
            f"the consume queue ends at {row['reach_max']}; {row['amount_sum']} confirmed "
            "messages have no unit yet"
        )
        told.findings.append(Finding(
            row["group"], INFO, "queue_behind", detail, (row["replica"],), row["topic"],
            row["queue_id"], row["queue_offset_min"],
        ))  # fmt: skip
    return told


def _once(found: Iterator[Finding]) -> Iterator[Finding]:
    """A unit that leads into another range is seen from both."""
    seen = set()
    for each in found:
        place = each.group, each.replicas, each.topic, each.queue_id, each.queue_offset
        if place not in seen:
            seen.add(place)
            yield each


def _paired(found: Iterator[Finding]) -> Iterator[Finding]:
    """What is missing at one place of a replica and extra at another is one, `reordered`."""
    pairs: dict[object, dict[str, list[Finding]]] = defaultdict(
        lambda: {"missing": [], "extra": []}
    )
    for each in sorted(found, key=lambda each: each.physical_offset or 0):
        pairs[each.group, each.replicas, each.identity, each.severity][each.kind].append(each)
    for pair in pairs.values():
        missing, extra = pair["missing"], pair["extra"]
        both = min(len(missing), len(extra))
        for here, there in zip(missing[:both], extra[:both], strict=True):
            detail = (
                f"in this replica it lies at {there.physical_offset}, queue {there.queue_id} "
                f"offset {there.queue_offset}"
            )
            yield msgspec.structs.replace(here, kind="reordered", detail=detail)
        yield from (*missing[both:], *extra[both:])


def own_keys(messages: pa.Table) -> pa.Table:
    """Messages whose key must not be in their topic a second time, with it as their link."""
    may = pc.and_(pc.equal(messages["amount"], 1), pc.is_valid(messages["unique_key"]))
    for prefix in _REPEATING:
        may = pc.and_not(may, pc.starts_with(messages["topic"], prefix))
    mine = messages.filter(may)
    link = pc.binary_join_element_wise("k", mine["unique_key"], "")
    return mine.add_column(0, "link", link)


def duplicates(linked: pa.Table) -> Iterator[Finding]:
    """Every place but the first of a unique key that is in a topic more than once.

    `linked` holds each of these messages by its own key, and others.
    """
    own = own_keys(linked.drop_columns("link").append_column("by", linked["link"]))
    own = own.filter(pc.equal(own["by"], own["link"]))
    own = sorted_by(own, "group", "topic", "unique_key", "physical_offset")
    begins = runs_of(own, ("group", "topic", "unique_key"))
    first = np.repeat(begins, np.diff(np.append(begins, own.num_rows)))
    again = np.flatnonzero(first != np.arange(own.num_rows))
    firsts = own.take(first[again]).to_pylist()
    for before, row in zip(firsts, own.take(again).to_pylist(), strict=True):
        detail = (
            f"first at {before['physical_offset']}, queue {before['queue_id']} offset "
            f"{before['queue_offset']}"
        )
        yield of_message(row, INFO, "duplicated", detail)
