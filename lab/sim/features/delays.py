"""Messages that wait: never early, never passed over, and twice only where a failover cut between.

"Early" is by the clock of the broker that delivers, in the moment in which it does: the store
timestamp of the copy. A timer is due at its TIMER_OUT_MS. A level is due its delay after the store
timestamp of the message that waits; where that was taken by a clock that is ahead, it is due when
the whole delay has passed, by a clock that is never set (R56).

What waits is due when its sender wished it, by the clock of the broker that stored it. Nothing that
was to wait comes without, but a time that was over when it was stored.

R30: a progress record stands behind what it counts as delivered. So what it covers has a copy
before it and none behind it, and in one epoch there is one copy at most.

A recall that was answered is confirmed: no copy comes behind the end that the log had then. One
that was asked for may hold or not. It holds until the copy that it names is due: an earlier copy
of that send, which waits longer by the clock of another master, comes (docs/features.md).
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from batonmq.protocol import properties as names
from batonmq.protocol.topic_name import PROGRESS_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, retry_topic
from lab.sim.features.log import Checker, FeatureLog, number_of, some, text_of
from lab.sim.hosts import DELAY_LEVELS_S
from lab.sim.records import LogRecord

TOPIC = "TopicD"


class Wish(NamedTuple):
    """To be delivered `ms` after it is stored; `is_time`: at `ms`."""

    ms: int
    is_time: bool = False

    def due_ms(self, stored_ms: int) -> int:
        return self.ms if self.is_time else stored_ms + self.ms


@dataclass
class Wishes:
    """What senders wished of each message of the topic, by its name, noted before it is sent.
    `recalls`: of those that were asked to be recalled, where logs ended at the answer; None before
    one."""

    of: dict[str, Wish] = field(default_factory=dict)
    recalls: dict[str, int | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Waits:
    """`epochs`: in which it was delivered. `is_done`: the log says so."""

    name: str
    topic: str
    queue_id: int
    offset: int
    stored_ms: int
    due_ms: int
    since_s: float
    epochs: list[int] = field(default_factory=list)
    is_done: bool = False


def _turn(one: _Waits) -> int:
    """A level is delivered in the order of its queue, whatever clocks its messages are of."""
    return one.offset if one.topic == SCHEDULE_TOPIC else one.due_ms


class Delays(Checker):
    def __init__(self, log: FeatureLog, group: str, wishes: Wishes) -> None:
        super().__init__(log)
        self._wishes = wishes
        self._group = group
        self._read_s = self._before_s = 0.0
        self._known: dict[tuple[str, str, int], list[_Waits]] = defaultdict(list)
        self._open: dict[str, list[_Waits]] = {SCHEDULE_TOPIC: [], TIMER_TOPIC: []}

    def record(self, record: LogRecord, name: str) -> None:
        now_s = self.log.now_s()
        if now_s != self._read_s:
            self._before_s, self._read_s = self._read_s, now_s
        topic, real_topic = record.topic, text_of(record, names.REAL_TOPIC)
        if topic == SCHEDULE_TOPIC:
            delay_ms = 1000 * DELAY_LEVELS_S[number_of(record, names.DELAY) - 1]
            self._waits(record, name, record.stored_ms + delay_ms)
        elif topic == TIMER_TOPIC and text_of(record, names.TIMER_DEL_UNIQKEY):
            return  # a recall
        elif topic == TIMER_TOPIC:
            self._waits(record, name, number_of(record, names.TIMER_OUT_MS))
        elif topic == PROGRESS_TOPIC:
            self._progress(json.loads(record.body))
        elif topic == real_topic and not record.prepared:
            self._delivered(record, name)
        elif topic in (TOPIC, retry_topic(self._group)) and not real_topic:
            self._not_delayed(record, name)

    def _not_delayed(self, record: LogRecord, name: str) -> None:
        wish = self._wishes.of[name] if record.topic == TOPIC else None
        if wish is None or wish.due_ms(record.stored_ms) > record.stored_ms:
            self.log.violate(f"delay: {name} is in {record.topic}, and has not waited: {wish}")

    def _waits(self, record: LogRecord, name: str, due_ms: int) -> None:
        topic = text_of(record, names.REAL_TOPIC)
        if topic == TOPIC:
            wished_ms = self._wishes.of[name].due_ms(record.stored_ms)
            if due_ms != wished_ms:
                self.log.violate(f"delay: {name} is due at {due_ms}, and wished at {wished_ms}")
        one = _Waits(
            name,
            record.topic,
            record.queue_id,
            record.queue_offset,
            record.stored_ms,
            due_ms,
            self._before_s,
        )
        self._known[name, topic, record.reconsumed].append(one)
        self._open[record.topic].append(one)

    def _delivered(self, record: LogRecord, name: str) -> None:
        known = self._known[name, record.topic, record.reconsumed]
        left = [one for one in known if not one.epochs] or [o for o in known if not o.is_done]
        if not left:
            self.log.violate(f"R30: {name} is delivered at {record.offset} after it was done")
            return
        # All puts of a turn are stamped with its begin, and a slow disk may make it long.
        now_ms = max(record.stored_ms, number_of(record, "TIMER_DEQUEUE_MS"))
        one = min(left, key=_turn)
        has_waited_ms = 1000 * (self._read_s - one.since_s)
        has_waited = one.topic == SCHEDULE_TOPIC and has_waited_ms >= one.due_ms - one.stored_ms
        if now_ms < one.due_ms and not has_waited:
            self.log.violate(f"delay: {name} comes {one.due_ms - now_ms} ms early")
        recalled_at = self._wishes.recalls.get(name)
        is_longer = number_of(record, names.TIMER_OUT_MS) > known[-1].due_ms
        if recalled_at is not None and record.offset >= recalled_at and not is_longer:
            self.log.violate(f"delay: {name} comes at {record.offset}, recalled at {recalled_at}")
        epoch = self.log.epoch_at(record.offset)
        if epoch in one.epochs:
            self.log.violate(f"delay: {name} is delivered twice in epoch {epoch}")
        one.epochs.append(epoch)

    def _progress(self, progress: dict[str, object]) -> None:
        delays, timer = progress["delays"], progress.get("timer")
        assert isinstance(delays, dict)
        for level, end in delays.items():
            queue_id = int(level) - 1
            self._done(
                SCHEDULE_TOPIC, lambda one, q=queue_id, e=end: one.queue_id == q and one.offset < e
            )
        if isinstance(timer, dict):
            done = timer["doneMs"], timer["doneOffset"]
            self._done(
                TIMER_TOPIC,
                lambda one: (
                    one.offset < timer["fromOffset"]
                    or (one.offset < timer["nextOffset"] and (one.due_ms, one.offset) <= done)
                ),
            )

    def _done(self, topic: str, is_done: object) -> None:
        for one in self._open[topic]:
            one.is_done = is_done(one)  # type: ignore[operator]
            if one.is_done and not one.epochs and one.name not in self._wishes.recalls:
                self.log.violate(f"R30: {one.name} counts as delivered, and the log has it not yet")
        self._open[topic] = [one for one in self._open[topic] if not one.is_done]

    def pending(self) -> str:
        waiting = [one.name for of_topic in self._open.values() for one in of_topic]
        if waiting:
            return f"{some(waiting)} wait"
        missing = [
            name
            for name in self.log.missing(self._group, TOPIC)
            if name not in self._wishes.recalls
        ]
        return f"{self._group} lacks delayed {some(missing)}" if missing else ""
