"""What can only be seen across ranges of the log: functions of rows that have one key.

Free of Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from batonmq.protocol.topic_name import (
    DLQ_PREFIX,
    OFFSET_MOVED_TOPIC,
    OLD_SYSTEM_TOPIC_PREFIX,
    RETRY_PREFIX,
    SCHEDULE_TOPIC,
    SYSTEM_TOPIC_PREFIX,
)
from batonmq.spark.audit.findings import BEHIND, FINDING, FINDING_NAMES, INFO, QUEUE, Finding
from batonmq.spark.audit.messages import Message
from batonmq.spark.audit.replicas import ReplicaGroup
from batonmq.spark.audit.sequence import step_finding

#: Topics in which keys repeat by design: retries, delays, halves of transactions.
REPEATING_TOPICS: Final = (
    RETRY_PREFIX, DLQ_PREFIX, SCHEDULE_TOPIC, OLD_SYSTEM_TOPIC_PREFIX, SYSTEM_TOPIC_PREFIX,
    OFFSET_MOVED_TOPIC,
)  # fmt: skip
_PAIRED: Final = ("missing", "extra")
Row = dict[str, Any]


def scan_key(row: Row) -> tuple[object, ...]:
    """What rows of a scan must have in common to be seen together."""
    if row["part"] == FINDING and row["kind"] in _PAIRED and row["identity"] is not None:
        return row["group"], row["identity"]
    return row["group"], row["topic"], row["queue_id"]


def across_ranges(rows: Iterable[Row], groups: Mapping[str, ReplicaGroup]) -> Iterator[Finding]:
    """The findings of all ranges, and what their queues show together."""
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[row["part"]].append(row)
    yield from _settled(parts[FINDING])
    yield from _breaks(parts[QUEUE], groups)
    yield from _behind(parts[BEHIND])


def queue_begins(rows: Iterable[Row]) -> dict[tuple[str, str, int], int]:
    """The first queue offset that the log has of each queue (group, topic, queue)."""
    begins: dict[tuple[str, str, int], int] = {}
    for row in rows:
        if row["part"] == QUEUE:
            key = row["group"], row["topic"], row["queue_id"]
            begins[key] = min(row["queue_offset"], begins.get(key, row["queue_offset"]))
    return begins


def _finding(row: Row) -> Finding:
    told = {name: row[name] for name in FINDING_NAMES}
    return Finding(**told | {"replicas": tuple(row["replicas"] or ())})


def _settled(rows: Iterable[Row]) -> Iterator[Finding]:
    """Each once; what is missing here and extra there is one, `reordered`."""
    pairs: dict[object, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    seen = set()
    for row in rows:
        who = row["group"], tuple(row["replicas"] or ())
        if row["kind"] in _PAIRED and row["identity"] is not None:
            is_extra = row["kind"] == "extra"
            pairs[*who, row["identity"], row["severity"]][is_extra].append(row)
            continue
        if row["kind"] == "queue_wrong":  # a unit that leads into another range is seen from both
            place = (*who, row["topic"], row["queue_id"], row["queue_offset"])
            if place in seen:
                continue
            seen.add(place)
        yield _finding(row)
    for missing, extra in pairs.values():
        for side in (missing, extra):
            side.sort(key=lambda row: row["physical_offset"])
        both = min(len(missing), len(extra))
        for here, there in zip(missing[:both], extra[:both], strict=True):
            detail = (
                f"in this replica it lies at {there['physical_offset']}, queue "
                f"{there['queue_id']} offset {there['queue_offset']}"
            )
            yield replace(_finding(here), kind="reordered", detail=detail)
        yield from map(_finding, (*missing[both:], *extra[both:]))


def _breaks(rows: list[Row], groups: Mapping[str, ReplicaGroup]) -> Iterator[Finding]:
    """Where a range does not continue a queue where the one before ended, or a queue does not
    begin with 0 though the log does, of which nothing can have expired.
    """
    ends: dict[tuple[str, str, int], int] = {}
    for row in sorted(rows, key=lambda row: row["physical_offset"]):
        group = groups[row["group"]]
        key = row["group"], row["topic"], row["queue_id"]
        before = ends.get(key, None if group.first else -1)
        first = row["queue_offset"]
        if before is not None and first != before + 1:
            yield step_finding(
                group, row["topic"], row["queue_id"], before, first, row["physical_offset"]
            )
        ends[key] = row["last_offset"]


def _behind(rows: Iterable[Row]) -> Iterator[Finding]:
    """Queues that do not reach the end of their confirmed messages: they are made from the log."""
    found: dict[tuple[str, tuple[str, ...], str, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["group"], tuple(row["replicas"]), row["topic"], row["queue_id"]].append(row)
    for (group, replicas, topic, queue_id), theirs in found.items():
        reach = max(row["last_offset"] for row in theirs)
        amount = sum(row["amount"] for row in theirs)
        detail = f"the consume queue ends at {reach}; {amount} confirmed messages have no unit yet"
        first = min(row["queue_offset"] for row in theirs)
        yield Finding(group, INFO, "queue_behind", detail, replicas, topic, queue_id, first)


def may_repeat(message: Message) -> bool:
    """Whether another message of its topic and key would be a duplicate."""
    return (
        message.amount == 1
        and message.unique_key is not None
        and not message.topic.startswith(REPEATING_TOPICS)
    )


def duplicates(messages: Iterable[Message]) -> Iterator[Finding]:
    """Every place but the first of a unique key that is in a topic more than once."""
    places: dict[tuple[str, str, str | None], list[Message]] = defaultdict(list)
    for each in messages:
        places[each.group, each.topic, each.unique_key].append(each)
    for copies in places.values():
        if len(copies) == 1:
            continue
        copies.sort(key=lambda each: each.physical_offset)
        first = copies[0]
        detail = (
            f"first at {first.physical_offset}, queue {first.queue_id} offset {first.queue_offset}"
        )
        for each in copies[1:]:
            yield each.finding(INFO, "duplicated", detail)
