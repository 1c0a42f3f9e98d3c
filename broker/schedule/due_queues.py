"""Delayed and timed messages: when they are due, and how far the group has delivered them. Pure.

Delayed messages (`DelayQueues`): all of a level wait equally long, so each queue of
SCHEDULE_TOPIC_XXXX is in order of due times, and only its first message needs a timer. A level with
a million messages costs as much as an empty one. Java looks every 100 ms.

Timed messages (`TimerQueue`): the log and the queue of rmq_sys_wheel_timer hold everything. The
heap of (due time, offset in that queue) is derived from them; a new master fills it from the
queue's units. A message costs one integer. `TimerCounts` is for GET_TIMER_METRICS (61). Java keeps
a wheel with a slot for each second, and a log of its own beside it.

Progress (R30): a master that delivers a waiting message puts a copy of it into the log, and right
behind it, in the same turn, a record of PROGRESS_TOPIC that says how far it is. So the progress of
a replica is what its log says: it is confirmed with what was delivered, cut with it, and there at a
new master, which delivers nothing twice but what was cut between the two. A Java replica keeps
these records as ordinary messages; it gets the offsets with 45.

Times are wall clock ms. Origin: Java `ScheduleMessageService`, `TimerMessageStore`, `TimerMetrics`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from batonmq.broker.tables.consumer_offset import DelayOffsetManager, TimerProgress
from batonmq.protocol.bodies import DataVersion, TimerMetricsSerializeWrapper
from batonmq.protocol.properties import REAL_TOPIC, TIMER_DEL_UNIQKEY, find_property
from batonmq.protocol.system_record import decode_system_record

NEVER: Final = 1 << 62
NOW: Final = 0
_BITS: Final = 44
_OFFSET: Final = (1 << _BITS) - 1
_BLOCK_BITS: Final = 12
_REAL_TOPIC: Final = REAL_TOPIC.encode()
_RECALLS: Final = TIMER_DEL_UNIQKEY.encode()

PROGRESS_VERSION: Final = 1
_NO_DELAYS: Final[Mapping[int, int]] = {}


@dataclass(slots=True)
class _Level:
    queue_id: int
    offset: int
    look_ms: int = NOW
    """When to look at the queue: when its first message is due; NEVER while it has none."""
    there_to: int = 0
    there_ms: int = 0
    """What lies below `there_to` was there at `there_ms` of the steady clock."""

    def left_ms(self, offset: int, end_offset: int, delay_ms: int, steady_ms: int) -> int:
        """ms until a message has been here for its whole delay, by the steady clock."""
        # The first look at these messages starts their steady clock.
        if offset >= self.there_to:
            self.there_to, self.there_ms = end_offset, steady_ms
        return self.there_ms + delay_ms - steady_ms


class Now(NamedTuple):
    """`wall_ms` may leap, `steady_ms` does not."""

    wall_ms: int
    steady_ms: int


class Look(NamedTuple):
    """Units of this queue are wanted from `offset` on."""

    queue_id: int
    offset: int


class DelayQueues:
    """Empty on a broker that is not master. `delay_ms` is that of a queue."""

    def __init__(self, delay_ms: Callable[[int], int]) -> None:
        self._delay_ms = delay_ms
        self._levels: dict[int, _Level] = {}
        self._turn = 0

    def begin(self, offsets: Mapping[int, int]) -> None:
        """A mastership begins: queue id -> offset of the next message to deliver."""
        self._levels = {queue_id: _Level(queue_id, at) for queue_id, at in offsets.items()}

    def end(self) -> None:
        self._levels = {}

    def arrived(self, queue_id: int) -> bool:
        """A message came to a queue; whether it is the first one, so that the queue is read now."""
        level = self._levels.get(queue_id)
        if level is None or level.look_ms != NEVER:
            return False
        level.look_ms = NOW
        return True

    @property
    def wake_ms(self) -> int:
        """When to read next, NEVER if nothing waits."""
        return min((level.look_ms for level in self._levels.values()), default=NEVER)

    def next_look(self, now_ms: int) -> Look | None:
        """A queue to read now, round robin; None if nothing is due."""
        ids = sorted(self._levels)
        for queue_id in (*ids[self._turn :], *ids[: self._turn]):
            level = self._levels[queue_id]
            latest = now_ms + self._delay_ms(queue_id)
            # Second case: no message waits longer than its delay, so the clock was set back.
            if level.look_ms <= now_ms or latest < level.look_ms < NEVER:
                self._turn = ids.index(queue_id) + 1  # the next call begins behind it
                return Look(queue_id, level.offset)
        return None

    def due_of(self, queue_id: int, due: Sequence[int], end_offset: int, now: Now) -> int:
        """How many of the messages from the level's offset on are due now; `due` has their due
        times, and the queue ends at `end_offset`. If none is due, or none is there, the level
        waits.

        A due time further ahead than the level's delay was stored by a clock ahead of this one:
        another broker's, or this one before it was set back. Such a message is due when it has been
        here for its whole delay, if that comes first: never early (R56), and not a year late.
        """
        level, delay_ms = self._levels[queue_id], self._delay_ms(queue_id)
        for index, due_ms in enumerate(due):
            wait_ms = due_ms - now.wall_ms
            # Stored by a clock ahead of this one: its due time says nothing here.
            if wait_ms > delay_ms:
                offset = level.offset + index
                wait_ms = level.left_ms(offset, end_offset, delay_ms, now.steady_ms)
            if wait_ms > 0:
                if index == 0:
                    level.look_ms = now.wall_ms + wait_ms
                return index
        if not due:
            level.look_ms = NEVER
        return len(due)

    def delivered(self, queue_id: int, count: int) -> None:
        """The first `count` messages are in the log again, or are not to be delivered."""
        level = self._levels[queue_id]
        level.offset += count
        level.look_ms = NOW

    def skip_to(self, queue_id: int, offset: int) -> None:
        """The queue begins at `offset` now."""
        self._levels[queue_id].offset = offset
        self._levels[queue_id].look_ms = NOW

    def offset_of(self, queue_id: int) -> int:
        """The offset of the next message to deliver."""
        return self._levels[queue_id].offset


class TimerQueue:
    """The timers' queue in the order of (due time, queue offset). `next_offset`: its offset to read
    next.

    A `TimerProgress` is a place in that order: what comes before it is delivered. A message that
    becomes visible after its due time may come before that place. Such late messages are delivered
    first, and meanwhile the progress ends before the lowest of their offsets.

    If the clock shows a time before that place, this clock or another broker's was ahead. What
    comes now is due by the present clock, so the place goes back to it. What was delivered up to
    the former place is remembered as `early`, until the clock gets there.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._blocks: dict[int, int] = {}
        self._recalls: Counter[bytes] = Counter()
        self._late: list[int] = []
        self._early = self._early_to = 0
        self._done = self._known_to = self._seen_all_at = 0
        self.next_offset = 0

    def begin(self, progress: TimerProgress, least_offset: int, end_offset: int) -> None:
        """A mastership begins: all but the progress is read again. The queue holds [`least_offset`,
        `end_offset`)."""
        self._heap.clear()
        self._late.clear()
        self._blocks.clear()
        self._recalls.clear()
        self._done = progress.done_ms << _BITS | progress.done_offset
        self._known_to = min(progress.next_offset, end_offset)
        self._seen_all_at = end_offset
        self.next_offset = min(max(progress.from_offset, least_offset), end_offset)

        self._early = progress.early_ms << _BITS | progress.early_offset
        self._early_to = min(progress.early_to, end_offset)

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._heap) + len(self._late)

    def skip_to(self, least_offset: int) -> None:
        """The queue begins there now: what was to be read before has expired."""
        self.next_offset = max(self.next_offset, least_offset)

    def clock_shows(self, now_ms: int) -> None:
        """Before units are read, and what is due is delivered."""
        if self._done >= self._early:  # the clock has caught up with what was delivered early
            self._early = self._early_to = 0
        is_ahead = self._done >> _BITS > now_ms
        if is_ahead and not self._late and self._done >= self._early:
            # What was delivered must not be delivered again when the clock gets there.
            self._early, self._early_to = self._done, max(self.next_offset, self._known_to)
            self._done = now_ms << _BITS

    def _is_delivered(self, offset: int, entry: int) -> bool:
        """Whether it was delivered according to the progress from before this mastership."""
        if offset < self._early_to and entry <= self._early:
            return True
        return offset < self._known_to and entry <= self._done

    def seen(self, due_ms: int) -> bool:
        """The next message of the queue is due at `due_ms`; whether it waits."""
        offset = self.next_offset
        self.next_offset = offset + 1
        entry = due_ms << _BITS | offset
        if self._is_delivered(offset, entry):
            return False
        # A late entry may not move `_done` back: progress would name it as delivered.
        heapq.heappush(self._heap if entry > self._done else self._late, entry)
        # Blocks, not offsets: progress needs only a lower bound of what is still open.
        block = offset >> _BLOCK_BITS
        self._blocks[block] = self._blocks.get(block, 0) + 1
        return True

    def recalled(self, key: bytes) -> None:
        """A recall waits: until it is due no message of this key is delivered. There may be two,
        because a client may have repeated its send."""
        self._recalls[key] += 1

    def is_recalled(self, key: bytes) -> bool:
        """Whether a recall of this key waits."""
        return key in self._recalls

    def recall_over(self, key: bytes) -> None:
        """A recall of this key is due: what it names was due before it."""
        self._recalls[key] -= 1
        # Two recalls of one key may wait, if a client repeated its request.
        if self._recalls[key] <= 0:
            del self._recalls[key]

    @property
    def wake_ms(self) -> int:
        """When the next message is due, NEVER if none waits."""
        if self._late:
            return self._late[0] >> _BITS
        return self._heap[0] >> _BITS if self._heap else NEVER

    def next_due(self, now_ms: int) -> int | None:
        """The offset of a message that is due, the first one first; it stays until `done`."""
        if not len(self) or self.wake_ms > now_ms:
            return None
        return (self._late or self._heap)[0] & _OFFSET

    def waits(self, offset: int, due_ms: int) -> bool:
        """Whether a message that was seen is still to come, and not late."""
        entry = due_ms << _BITS | offset
        return entry > self._done and not (offset < self._early_to and entry <= self._early)

    def done(self) -> bool:
        """The message that `next_due` gave is in the log again, or is not to be delivered. False if
        it was a late one."""
        is_late = bool(self._late)
        if is_late:
            entry = heapq.heappop(self._late)
        else:
            entry = self._done = heapq.heappop(self._heap)
        block = (entry & _OFFSET) >> _BLOCK_BITS
        self._blocks[block] -= 1
        if not self._blocks[block]:
            del self._blocks[block]
        return not is_late

    def progress(self) -> TimerProgress:
        """What is delivered of all that was seen. To be recorded only once all was seen that the
        last progress knew of."""
        block = next(iter(self._blocks), None)
        # Late entries are not in the order of `_done`: progress must end before the first.
        end = min([entry & _OFFSET for entry in self._late], default=self.next_offset)
        start = end if block is None else block << _BLOCK_BITS
        return TimerProgress(
            done_ms=self._done >> _BITS,
            done_offset=self._done & _OFFSET,
            next_offset=end,
            from_offset=min(start, end),
            early_ms=self._early >> _BITS,
            early_offset=self._early & _OFFSET,
            early_to=self._early_to,
        )

    @property
    def is_caught_up(self) -> bool:
        """Whether all was seen that the log had when the mastership began. The last record may be a
        recall that the former master has answered; it is visible only once it is confirmed again
        (R30)."""
        return self.next_offset >= self._seen_all_at


class TimerCounts:
    """Counts of one mastership, of what lies below `next_offset` of the timer's queue."""

    def __init__(self) -> None:
        self.next_offset = 0
        self._counts: Counter[str] = Counter()
        self._changes = 0
        self._changed_ms: dict[str, int] = {}

    def add(self, properties: bytes, count: int, now_ms: int) -> None:
        """A message with these properties waits (1), or does not any more (-1)."""
        topic = (find_property(properties, _REAL_TOPIC) or b"").decode("utf-8", "replace")
        is_recall = find_property(properties, _RECALLS) is not None
        # A recall takes one message from the count until both are due.
        self._counts[topic] += -count if is_recall else count
        self._changed_ms[topic] = now_ms
        self._changes += 1

    def encode(self, master_epoch: int) -> bytes:
        """The body: {"dataVersion", "timingCount": topic -> {"count", "timeStamp"}}."""
        found = {
            topic: {"count": count, "timeStamp": self._changed_ms[topic]}
            for topic, count in sorted(self._counts.items())
            if count > 0
        }
        version = DataVersion(
            counter=self._changes,
            state_version=master_epoch,
            timestamp=max(self._changed_ms.values(), default=0),
        )
        return TimerMetricsSerializeWrapper(data_version=version, timing_count=found).encode()


class ProgressRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """`delays`: delay level -> next offset in its queue. `timer`: None if it has not changed."""

    v: int = PROGRESS_VERSION
    delays: dict[int, int] = {}
    timer: TimerProgress | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_decoder = msgspec.json.Decoder(ProgressRecord)


def decode_progress(body: bytes) -> ProgressRecord:
    """Reads a record's body. Raises RemoteProtocolError for one of an unknown version or shape."""
    return decode_system_record(_decoder, body, "progress", PROGRESS_VERSION)


class DeliveryProgress:
    """How far the group has delivered. What all members have is in the table of delays. Above it a
    master knows the unconfirmed records of its log, and deliveries that no record names yet
    (`owed`). A mastership that begins again, without an end in between, continues behind all of
    these."""

    def __init__(self, delays: DelayOffsetManager) -> None:
        self._delays = delays
        self._unconfirmed: dict[int, tuple[int, int]] = {}  # level -> offset, end of the record
        self._unconfirmed_timer: tuple[TimerProgress, int] | None = None
        self._owed: dict[int, int] = {}
        self._owed_timer: TimerProgress | None = None

    def apply_record(self, body: bytes, end: int) -> None:
        """The record that ends at `end` of the log is on every member. Raises
        RemoteProtocolError."""
        record = decode_progress(body)
        self._delays.set_all(record.delays)
        for level in record.delays:
            if level in self._unconfirmed and self._unconfirmed[level][1] <= end:
                del self._unconfirmed[level]  # a later mastership continues behind it (R55)
        if record.timer is not None:
            self._delays.set_timer(record.timer)
            if self._unconfirmed_timer is not None and self._unconfirmed_timer[1] <= end:
                self._unconfirmed_timer = None

    own_record_confirmed = apply_record

    def take_over_record(self, body: bytes, end: int) -> None:
        """A new master finds this record in its log, not confirmed yet. Raises
        RemoteProtocolError."""
        self._stands(decode_progress(body), end)

    def delivered(
        self, delays: Mapping[int, int] = _NO_DELAYS, timer: TimerProgress | None = None
    ) -> None:
        """This master has put everything up to there into its log."""
        self._owed.update(delays)
        self._owed_timer = timer or self._owed_timer

    @property
    def owed(self) -> ProgressRecord | None:
        """What the log does not say yet, as the record to put; None if it says everything."""
        if not self._owed and self._owed_timer is None:
            return None
        return ProgressRecord(delays=dict(self._owed), timer=self._owed_timer)

    def noted(self, record: ProgressRecord, end: int) -> None:
        """The record that `owed` gave is put; it ends at `end` of the log."""
        self._stands(record, end)
        self._owed.clear()
        self._owed_timer = None

    def _stands(self, record: ProgressRecord, end: int) -> None:
        self._unconfirmed.update((level, (at, end)) for level, at in record.delays.items())
        if record.timer is not None:
            self._unconfirmed_timer = record.timer, end

    def role_left(self) -> None:
        """What was not confirmed may be cut: the log decides."""
        self._unconfirmed.clear()
        self._unconfirmed_timer = None
        self._owed.clear()
        self._owed_timer = None

    @property
    def delays(self) -> Mapping[int, int]:
        """Delay level -> where a mastership that begins now continues."""
        unconfirmed = {level: at for level, (at, _) in self._unconfirmed.items()}
        return {**self._delays.table, **unconfirmed, **self._owed}

    @property
    def timer(self) -> TimerProgress:
        """The same for timers."""
        if self._owed_timer is not None:
            return self._owed_timer
        if self._unconfirmed_timer is not None:
            return self._unconfirmed_timer[0]
        return self._delays.timer

    def is_confirmed(self, timer: TimerProgress) -> bool:
        """Whether every member has this, and what was delivered before it."""
        return timer == self._delays.timer
