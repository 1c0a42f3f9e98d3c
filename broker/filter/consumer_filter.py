"""The SQL92 filters of consumer groups, and their file `config/consumerFilter.json`.

Heartbeats register (topic, group, expression). A newer version of a subscription replaces the
filter; if its expression does not compile, the filter is removed. A filter without a subscription
is marked as dead, and removed after a day, or if there are DEAD_KEPT_MAX newer ones. Filters are
not replicated, because heartbeats reach every replica.

The Bloom bits are for Java: a Java broker that starts on this folder drops all filters if the bits
have another size. This broker evaluates filters on the records themselves.
Origin: Java `ConsumerFilterManager`, `BloomFilter`, Guava's `murmur3_128`.
"""

import struct
from collections.abc import Callable, Collection
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from batonmq.broker.filter.sql_values import SqlError
from batonmq.broker.filter.subscription_filter import NotCompiledError, compiled
from batonmq.broker.tables.config_file import ConfigFile
from batonmq.protocol.bodies import SQL92, TAG, SubscriptionData
from batonmq.protocol.json_body import Body
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.turns import AT_ONCE

DEAD_MAX_MS: Final = 24 * 3600 * 1000
DEAD_KEPT_MAX: Final = 4096
DEAD_SINCE_MS: Final = 30_000
"""A filter from the file counts as dead since so long before the start, as in Java."""
BLOOM_BITS: Final = 112
BLOOM_HASHES: Final = 3
"""Java's numbers for 32 consumers and 20 % of errors."""


class BloomFilterData(Body):
    bit_num: int = BLOOM_BITS
    bit_pos: list[int] = msgspec.field(default_factory=list)


_KIND: Final = attrgetter("expression_type")


class ConsumerFilterData(Body):
    """Times are ms of the wall clock; `client_version` is the subVersion of the subscription."""

    bloom_filter_data: BloomFilterData = msgspec.field(default_factory=BloomFilterData)
    born_time: int = 0
    client_version: int = 0
    consumer_group: str = ""
    dead: bool = False
    dead_time: int = 0
    expression: str = ""
    expression_type: str = SQL92
    topic: str = ""


class FilterDataMapByTopic(Body):
    group_filter_data: dict[str, ConsumerFilterData] = msgspec.field(default_factory=dict)
    topic: str = ""


class ConsumerFilterTable(Body):
    filter_data_by_topic: dict[str, FilterDataMapByTopic] = msgspec.field(default_factory=dict)


class ConsumerFilterManager:
    """group -> topic -> filter. Not thread-safe. Filters are replaced, never changed in place."""

    def __init__(self, path: Path, *, clock_ms: Callable[[], int] = wall_ms) -> None:
        self._file = ConfigFile(path, ConsumerFilterTable)
        self._clock_ms = clock_ms
        self._groups: dict[str, dict[str, ConsumerFilterData]] = {}
        self._dead: dict[tuple[str, str], None] = {}  # (group, topic), the longest dead first
        self._dirty = False

    def load(self) -> None:
        """Loads the file; marks all filters as dead. Raises CorruptLogError."""
        body = self._file.load()
        topics = {} if body is None else body.filter_data_by_topic
        filters = [data for topic in topics.values() for data in topic.group_filter_data.values()]
        # As in Java: filters with other bits are dropped, and heartbeats register them again.
        if any(data.bloom_filter_data.bit_num != BLOOM_BITS for data in filters):
            return
        dead_ms = self._clock_ms() - DEAD_SINCE_MS
        for data in filters:
            if not data.dead_time:
                data.dead, data.dead_time = True, max(dead_ms, data.born_time)
        for data in sorted(filters, key=attrgetter("dead_time")):
            self._put(data)
        self._dirty = False

    def get(self, group: str, topic: str) -> ConsumerFilterData | None:
        """The filter of a group in a topic; None without one that compiles."""
        return self._groups.get(group, {}).get(topic)

    def register(self, group: str, subscriptions: Collection[SubscriptionData]) -> None:
        """Takes the subscriptions from a heartbeat of a member."""
        # A group with tags only costs one pass and stores nothing.
        if group not in self._groups and set(map(_KIND, subscriptions)) <= {TAG, ""}:
            return
        filters = [each for each in subscriptions if each.expression_type not in (TAG, "")]
        for wanted in filters:
            if wanted.sub_string:
                self._register(group, wanted)
        known = self._groups.get(group, {})
        self._kill(group, known.keys() - {each.topic for each in subscriptions})

    def _register(self, group: str, wanted: SubscriptionData) -> None:
        before = self.get(group, wanted.topic)
        if before is not None and wanted.sub_version <= before.client_version:
            # The group came back with the subscription that it had.
            if wanted.sub_version == before.client_version and before.dead:
                self._put(replace(before, dead=False, dead_time=0))
            return
        try:
            compiled(wanted.sub_string)
        except (SqlError, NotCompiledError):
            # Not kept as it was: the group would get what it no longer asks for.
            self._remove(group, wanted.topic)
            return
        if before is not None and before.expression == wanted.sub_string:
            version = wanted.sub_version
            self._put(replace(before, client_version=version, dead=False, dead_time=0))
            return
        data = ConsumerFilterData(
            bloom_filter_data=BloomFilterData(bit_pos=bloom_bits(f"{group}#{wanted.topic}")),
            born_time=self._clock_ms(),
            client_version=wanted.sub_version,
            consumer_group=group,
            expression=wanted.sub_string,
            expression_type=wanted.expression_type,
            topic=wanted.topic,
        )
        self._put(data)

    def unregister(self, group: str) -> None:
        """Marks the filters of a group as dead: its last member left."""
        self._kill(group, self._groups.get(group, {}).keys())

    def _kill(self, group: str, topics: Collection[str]) -> None:
        for topic in sorted(topics):
            if not (data := self._groups[group][topic]).dead:
                self._put(replace(data, dead=True, dead_time=self._clock_ms()))
        while len(self._dead) > DEAD_KEPT_MAX:  # R58: clients choose the groups
            self._remove(*next(iter(self._dead)))

    def _put(self, data: ConsumerFilterData) -> None:
        key = data.consumer_group, data.topic
        self._groups.setdefault(data.consumer_group, {})[data.topic] = data
        self._dead.pop(key, None)
        if data.dead:
            self._dead[key] = None
        self._dirty = True

    def _remove(self, group: str, topic: str) -> None:
        filters = self._groups.get(group, {})
        if topic in filters:
            del filters[topic]
            self._dead.pop((group, topic), None)
            self._dirty = True
            if not filters:
                del self._groups[group]

    def _remove_old(self) -> bool:
        """Removes a slice of the filters that were dead for a day; returns whether there may be
        more."""
        oldest = self._clock_ms() - DEAD_MAX_MS
        for group, topic in list(islice(self._dead, AT_ONCE)):
            if self._groups[group][topic].dead_time >= oldest:
                return False
            self._remove(group, topic)
        return bool(self._dead)

    def writes_due(self) -> list[Callable[[], None]]:
        """A function that writes a snapshot, for another thread; none if nothing changed. It raises
        OSError."""
        if not self._dirty:
            return []
        self._dirty = self._remove_old()
        filters = list(map(dict, self._groups.values()))
        return [self._file.write_of(lambda: _table_of(filters))]


def _table_of(groups: list[dict[str, ConsumerFilterData]]) -> ConsumerFilterTable:
    table = ConsumerFilterTable()
    for filters in groups:
        for topic, data in filters.items():
            by_topic = table.filter_data_by_topic.setdefault(
                topic, FilterDataMapByTopic(topic=topic)
            )
            by_topic.group_filter_data[data.consumer_group] = data
    return table


def bloom_bits(key: str) -> list[int]:
    """The bits of a key in Java's Bloom filter of 112 bits and 3 hashes."""
    value = _murmur3_lower(key.encode("utf-8"))
    low, high = _signed32(value), _signed32(value >> 32)
    bits = []
    for number in range(1, BLOOM_HASHES + 1):
        combined = _signed32(low + number * high)
        bits.append((~combined if combined < 0 else combined) % BLOOM_BITS)
    return bits


_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F
_M64: Final = 2**64 - 1
_BLOCK: Final = struct.Struct("<QQ")


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - 2**32 if value & 0x80000000 else value


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> 64 - bits) & _M64


def _mixed(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _M64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _M64
    return value ^ value >> 33


def _murmur3_lower(data: bytes) -> int:
    """The lower half of murmur3_128 with seed 0 (Guava `HashCode.asLong`)."""
    h1 = h2 = 0
    whole = len(data) // 16 * 16
    for at in range(0, whole, 16):
        k1, k2 = _BLOCK.unpack_from(data, at)
        h1 ^= _rotated(k1 * _C1 & _M64, 31) * _C2 & _M64
        h1 = ((_rotated(h1, 27) + h2) * 5 + 0x52DCE729) & _M64
        h2 ^= _rotated(k2 * _C2 & _M64, 33) * _C1 & _M64
        h2 = ((_rotated(h2, 31) + h1) * 5 + 0x38495AB5) & _M64
    k1, k2 = _BLOCK.unpack(data[whole:].ljust(16, b"\0"))
    h2 ^= _rotated(k2 * _C2 & _M64, 33) * _C1 & _M64
    h1 ^= _rotated(k1 * _C1 & _M64, 31) * _C2 & _M64
    h1, h2 = h1 ^ len(data), h2 ^ len(data)
    h1 = (h1 + h2) & _M64
    h2 = (h2 + h1) & _M64
    return (_mixed(h1) + _mixed(h2)) & _M64
