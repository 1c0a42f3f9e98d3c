"""Traffic by minute, hour and day: the counters of VIEW_BROKER_STATS_DATA (315).

A counter costs the send path one look-up and three additions. All counters of a table are sampled
as one copy of its arrays (80 KB for 10,000 keys), every 10 s, 10 min and 1 h. A key without traffic
for a day is dropped; each tick checks some keys.
Origin: org.apache.rocketmq.store.stats.BrokerStatsManager, common.stats.StatsItem in Java.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from batonmq.protocol.bodies import BrokerStatsData, BrokerStatsItem

SPANS: Final = ((10_000, 6), (600_000, 6), (3_600_000, 24))
"""Minute, hour and day: ms between samples, and how many samples are kept."""
SWEEP: Final = 200
"""Keys that one tick checks for traffic."""
KEYS_MAX: Final = 1 << 17
"""Keys of one table (R58): clients choose topics and groups, and one takes a kilobyte for a day.
What is beyond counts only for the whole broker."""


class CounterSample(NamedTuple):
    """The counters of a table at a time (ms). A key that is newer is not in it, and counts as 0."""

    at_ms: int
    messages: array[int]
    bytes: array[int]
    calls: array[int]


class StatsTable:
    """Counters of messages, bytes and calls by key."""

    def __init__(self, now_ms: int) -> None:
        # Arrays instead of an object for each key: a sample of all keys is then one copy.
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        # The first slot is of keys beyond KEYS_MAX.
        self._messages, self._bytes, self._calls = array("q", [0]), array("q", [0]), array("q", [0])
        # Six intervals lie between seven samples.
        self._rings = [deque((self._sample(now_ms),), maxlen=count + 1) for _, count in SPANS]
        self._to_sweep: list[str] = []

    def add(self, key: str, messages: int, size: int) -> None:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._new_slot(key)
        self._messages[slot] += messages
        self._bytes[slot] += size
        self._calls[slot] += 1

    def _new_slot(self, key: str) -> int:
        if len(self._slots) >= KEYS_MAX:
            return 0
        if self._free:
            slot = self._free.pop()
            for ring in self._rings:
                for sample in ring:  # an earlier key of this slot counted there
                    if slot < len(sample.calls):
                        sample.messages[slot] = self._messages[slot]
                        sample.bytes[slot] = self._bytes[slot]
                        sample.calls[slot] = self._calls[slot]
        else:
            slot = len(self._calls)
            for column in (self._messages, self._bytes, self._calls):
                column.append(0)
        self._slots[key] = slot
        return slot

    def totals(self) -> Iterator[tuple[str, int, int]]:
        """(key, messages, bytes) of each key. The table may change between two steps."""
        keys = list(reversed(self._slots))  # so that the oldest come first
        while keys:  # taken out one by one: to free 10,000 at once takes a millisecond
            key = keys.pop()
            if (slot := self._slots.get(key)) is not None:
                yield key, self._messages[slot], self._bytes[slot]

    def tick(self, now_ms: int) -> None:
        """About once a second."""
        for (apart_ms, _), ring in zip(SPANS, self._rings, strict=True):
            if now_ms - ring[-1].at_ms >= apart_ms:
                ring.append(self._sample(now_ms))
                # Only a full ring covers a whole day.
                if ring is self._rings[-1] and len(ring) == ring.maxlen:
                    self._to_sweep = list(self._slots)
        day = self._rings[-1][0]
        for key in self._to_sweep[-SWEEP:]:
            slot = self._slots[key]
            # A key that the oldest sample lacks is younger than a day.
            if slot < len(day.calls) and day.calls[slot] == self._calls[slot]:
                self._free.append(self._slots.pop(key))
        del self._to_sweep[-SWEEP:]

    def _sample(self, now_ms: int) -> CounterSample:
        return CounterSample(now_ms, self._messages[:], self._bytes[:], self._calls[:])

    def shown(self, key: str | None, now_ms: int, *, sizes: bool) -> BrokerStatsData | None:
        """The last minute, hour and day of a key, or of all (None): messages, or bytes (`sizes`).
        None for a key that has no counter."""
        slot = None if key is None else self._slots.get(key)
        if key is not None and slot is None:
            return None
        values = self._bytes if sizes else self._messages
        items = []
        for ring in self._rings:
            first = ring[0]
            before = first.bytes if sizes else first.messages
            total = _difference(values, before, slot)
            calls = _difference(self._calls, first.calls, slot)
            past_ms = max(1, now_ms - first.at_ms)
            items.append(
                BrokerStatsItem(
                    sum=total, tps=total * 1000 / past_ms, avgpt=total / calls if calls else 0.0
                )
            )
        minute, hour, day = items
        return BrokerStatsData(stats_minute=minute, stats_hour=hour, stats_day=day)


def _difference(now: array[int], before: array[int], slot: int | None) -> int:
    if slot is None:
        return sum(now) - sum(before)
    return now[slot] - (before[slot] if slot < len(before) else 0)


class BrokerStats:
    """The tables of a broker, under Java's names. Times are ms of `clock_ms`."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        now_ms = clock_ms()
        self._puts = StatsTable(now_ms)
        self._gets = StatsTable(now_ms)
        self._send_backs = StatsTable(now_ms)
        self._shown = {
            "TOPIC_PUT_NUMS": (self._puts, False),
            "TOPIC_PUT_SIZE": (self._puts, True),
            "GROUP_GET_NUMS": (self._gets, False),
            "GROUP_GET_SIZE": (self._gets, True),
            "SNDBCK_PUT_NUMS": (self._send_backs, False),
        }
        self.names = (*self._shown, "BROKER_PUT_NUMS", "BROKER_GET_NUMS")

    def put(self, topic: str, messages: int, size: int) -> None:
        """`messages` of a topic were stored, with `size` bytes in the log."""
        self._puts.add(topic, messages, size)

    def got(self, topic: str, group: str, messages: int, size: int) -> None:
        """A group got `messages` in one reply."""
        self._gets.add(f"{topic}@{group}", messages, size)

    def sent_back(self, topic: str, group: str) -> None:
        self._send_backs.add(f"{topic}@{group}", 1, 0)

    def tick(self, now_ms: int) -> None:
        """About once a second."""
        for table in (self._puts, self._gets, self._send_backs):
            table.tick(now_ms)

    def put_tps(self, topic: str) -> float:
        return self._tps(self._puts, topic)

    def got_tps(self, topic: str, group: str) -> float:
        return self._tps(self._gets, f"{topic}@{group}")

    def _tps(self, table: StatsTable, key: str) -> float:
        shown = table.shown(key, self._clock_ms(), sizes=False)
        return 0.0 if shown is None else shown.stats_minute.tps

    def totals(self, name: str) -> Iterator[tuple[str, int, int]]:
        """(key, messages, bytes) of each counter of the table `name`."""
        return self._shown[name][0].totals()

    def shown(self, name: str, key: str) -> BrokerStatsData | None:
        """`key`: the topic, or `topic@group`; ignored for the numbers of the whole broker. None if
        there is no such counter."""
        now_ms = self._clock_ms()
        if name in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS"):
            table = self._puts if name == "BROKER_PUT_NUMS" else self._gets
            return table.shown(None, now_ms, sizes=False)
        if name not in self._shown:
            return None
        table, sizes = self._shown[name]
        return table.shown(key, now_ms, sizes=sizes)
