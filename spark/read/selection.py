"""What a query wants of the messages, and which records of a window that is.

A selection may only let through too much, never too little: Spark checks every filter again.
Free of Spark.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from batonmq.protocol.properties import TAGS
from batonmq.protocol.records.columns import Bools, Int64s, Records
from batonmq.spark.read.columns import binaries, is_any_of, texts
from batonmq.spark.read.message_columns import split_properties
from batonmq.spark.read.store_facts import StoreFacts

LOW: Final = -(2**63)
HIGH: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from `low` to `high`, both included."""

    low: int = LOW
    high: int = HIGH

    def cut(self, low: int = LOW, high: int = HIGH) -> "Span":
        return Span(max(self.low, low), min(self.high, high))

    @property
    def is_all(self) -> bool:
        return self.low == LOW and self.high == HIGH

    def holds(self, values: Int64s) -> Bools:
        return np.asarray((values >= self.low) & (values <= self.high))


_ALL: Final = Span()


@dataclass(frozen=True, slots=True)
class Selection:
    """None, or an unbounded span: no condition. Store times are ms."""

    stores: frozenset[str] | None = None
    clusters: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    broker_ids: frozenset[int] | None = None
    topics: frozenset[str] | None = None
    queue_ids: frozenset[int] | None = None
    tags: frozenset[str] | None = None
    store_ms: Span = _ALL
    queue_offset: Span = _ALL
    physical_offset: Span = _ALL
    epoch: Span = _ALL

    def only(self, name: str, wanted: frozenset[str] | frozenset[int]) -> Self:
        """The same, and `name` (one of the sets) must be one of `wanted` as well."""
        before = getattr(self, name)
        changes: dict[str, Any] = {name: wanted if before is None else before & wanted}
        return replace(self, **changes)

    def within(self, name: str, *, low: int = LOW, high: int = HIGH) -> Self:
        """The same, and `name` (one of the spans) must lie in [low, high] as well."""
        return replace(self, **{name: getattr(self, name).cut(low, high)})

    def wants_store(self, facts: StoreFacts) -> bool:
        return (
            (self.stores is None or facts.path in self.stores)
            and (self.clusters is None or facts.cluster in self.clusters)
            and (self.brokers is None or facts.broker in self.brokers)
            and (self.broker_ids is None or facts.broker_id in self.broker_ids)
        )

    def offsets_of(self, facts: StoreFacts) -> Span:
        """Log offsets at which wanted records of a store begin, by offset and by epoch."""
        span = self.physical_offset
        if self.epoch.is_all or not facts.epochs:
            return span
        held = [e for e in facts.epochs if self.epoch.low <= e.epoch <= self.epoch.high]
        if not held:
            return Span(0, -1)
        return span.cut(held[0].start_offset, held[-1].end_offset - 1)

    def rows(self, window: bytes, records: Records) -> Records:
        """The records that are wanted; the cheap conditions are checked first."""
        wanted = np.ones(len(records), np.bool_)
        if self.queue_ids is not None:
            wanted &= np.isin(records.queue_id, np.array(sorted(self.queue_ids), np.int64))
        for span, values in (
            (self.store_ms, records.store_ms),
            (self.queue_offset, records.queue_offset),
            (self.physical_offset, records.physical_offset),
        ):
            if not span.is_all:
                wanted &= span.holds(values)
        if not wanted.all():
            records = records.keep(wanted)
        if self.topics is not None and len(records):
            topics = texts(binaries(window, records.topic_at, records.topic_length))
            records = records.keep(is_any_of(topics, self.topics))
        if self.tags is not None and len(records):
            pairs = split_properties(window, records.properties_at, records.properties_length)
            records = records.keep(is_any_of(pairs.column(TAGS), self.tags))
        return records
