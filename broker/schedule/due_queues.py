"""Delayed and timed messages: when they are due, and how far they are delivered. Pure.

Delayed messages (`DelayQueues`): all messages of a level wait equally long, so each queue of
SCHEDULE_TOPIC_XXXX is in order of due times, and only its first message needs a timer. (Java polls
every 100 ms.)

Timed messages (`TimerQueue`): a heap of (due time, queue offset), one integer per message. A new
master fills it from the units of rmq_sys_wheel_timer. `TimerCounts` is for GET_TIMER_METRICS (61).
(Java keeps a wheel with a slot for each second, and a separate log.)

Progress (R30): a master that delivers messages puts copies into the log, and after them, in the
same turn, a record of PROGRESS_TOPIC with its progress. So progress is confirmed, cut and inherited
together with the messages. A new master delivers a message twice only if its log was cut between
the two. A Java replica stores these records as ordinary messages, and gets the offsets by
GET_ALL_DELAY_OFFSET (45).

Times are wall clock ms. Origin: Java `ScheduleMessageService`, `TimerMessageStore`, `TimerMetrics`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from batonmq.broker.tables.delay_offset import DelayOffsetManager, TimerProgress
from batonmq.protocol.bodies import DataVersion, TimerMetricsSerializeWrapper
from batonmq.protocol.properties import REAL_TOPIC, TIMER_DEL_UNIQKEY, find_property
from batonmq.protocol.system_record import decode_system_record

NEVER: Final = 1 << 62
NOW: Final = 0
_BITS: Final = 44
"""An entry is due time << _BITS | queue offset: one integer, in the order of delivery."""
_OFFSET: Final = (1 << _BITS) - 1
_BLOCK_BITS: Final = 12
"""Open messages are counted in blocks of 4096 offsets."""
_REAL_TOPIC: Final = REAL_TOPIC.encode()
_RECALLS: Final = TIMER_DEL_UNIQKEY.encode()

PROGRESS_VERSION: Final = 1
_NO_DELAYS: Final[Mapping[int, int]] = {}


@dataclass(slots=True)
class _Level:
    queue_id: int
    offset: int
    next_read_ms: int = NOW
    """When to read the queue: when its first message is due; NEVER while it is empty."""
    there_to: int = 0
    there_ms: int = 0
    """Messages below `there_to` were in the queue at `there_ms` of the monotonic clock."""

    def left_ms(self, offset: int, end_offset: int, delay_ms: int, steady_ms: int) -> int:
        """ms until the message at `offset` has waited for its whole delay, by the monotonic
        clock."""
        # First read of these messages: their waiting time starts now.
        if offset >= self.there_to:
            self.there_to, self.there_ms = end_offset, steady_ms
        return self.there_ms + delay_ms - steady_ms


class Now(NamedTuple):
    """`wall_ms` may leap; `steady_ms` is monotonic."""

    wall_ms: int
    steady_ms: int


class QueueRead(NamedTuple):
    """Read units of this queue from `offset` on."""

    queue_id: int
    offset: int


class DelayQueues:
    """The queues of the delay levels; empty unless this broker is master. `delay_ms(queue id)` is
    the delay of a level."""

    def __init__(self, delay_ms: Callable[[int], int]) -> None:
        self._delay_ms = delay_ms
        self._levels: dict[int, _Level] = {}
        self._turn = 0

    def begin(self, offsets: Mapping[int, int]) -> None:
        """A mastership begins. `offsets`: queue id -> offset of the next message to deliver."""
        self._levels = {queue_id: _Level(queue_id, at) for queue_id, at in offsets.items()}

    def end(self) -> None:
        self._levels = {}

    def arrived(self, queue_id: int) -> bool:
        """A queue has a new message. Returns whether it was empty before and must be read now."""
        level = self._levels.get(queue_id)
        if level is None or level.next_read_ms != NEVER:
            return False
        level.next_read_ms = NOW
        return True

    @property
    def wake_ms(self) -> int:
        """When to read next, NEVER if nothing waits."""
        return min((level.next_read_ms for level in self._levels.values()), default=NEVER)

    def next_read(self, now_ms: int) -> QueueRead | None:
        """A queue to read now, round robin; None if nothing is due."""
        ids = sorted(self._levels)
        for queue_id in (*ids[self._turn :], *ids[: self._turn]):
            level = self._levels[queue_id]
            latest = now_ms + self._delay_ms(queue_id)
            # Second condition: a message never waits longer than its delay, so the clock was set
            # back.
            if level.next_read_ms <= now_ms or latest < level.next_read_ms < NEVER:
                self._turn = ids.index(queue_id) + 1  # the next call begins after it
                return QueueRead(queue_id, level.offset)
        return None

    def due_of(self, queue_id: int, due: Sequence[int], end_offset: int, now: Now) -> int:
        """How many messages from the level's offset on are due now. `due`: their due times; the
        queue ends at `end_offset`. If the first one is not due, or `due` is empty, the level waits.
        """
        level, delay_ms = self._levels[queue_id], self._delay_ms(queue_id)
        for index, due_ms in enumerate(due):
            wait_ms = due_ms - now.wall_ms
            # Stored by a clock ahead of this one: another broker's, or this one before it was set
            # back. It is due when it has waited here for its whole delay, if that is before its
            # time: never early (R56), and not a year late.
            if wait_ms > delay_ms:
                offset = level.offset + index
                wait_ms = level.left_ms(offset, end_offset, delay_ms, now.steady_ms)
            if wait_ms > 0:
                if index == 0:
                    level.next_read_ms = now.wall_ms + wait_ms
                return index
        if not due:
            level.next_read_ms = NEVER
        return len(due)

    def delivered(self, queue_id: int, count: int) -> None:
        """The first `count` messages are delivered or dropped."""
        level = self._levels[queue_id]
        level.offset += count
        level.next_read_ms = NOW

    def skip_to(self, queue_id: int, offset: int) -> None:
        """Earlier messages of the queue have expired."""
        self._levels[queue_id].offset = offset
        self._levels[queue_id].next_read_ms = NOW

    def offset_of(self, queue_id: int) -> int:
        """The offset of the next message to deliver."""
        return self._levels[queue_id].offset


class TimerQueue:
    """The timers' queue in the order of (due time, queue offset). `next_offset`: the offset to read
    next.

    A `TimerProgress` is a place in that order: everything before it is delivered. A message that
    becomes visible only after its due time may belong before that place. Such late messages are
    delivered first; until then the progress ends before the lowest of their offsets.

    If the clock is behind that place, it was set back, or belongs to another broker. New messages
    are due by the present clock, so the place moves back to it. The former place is kept as `early`
    until the clock reaches it, so that nothing is delivered twice.
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
        """A mastership begins: the queue, which holds [`least_offset`, `end_offset`), is read
        again."""
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
        """Earlier units have expired."""
        self.next_offset = max(self.next_offset, least_offset)

    def clock_shows(self, now_ms: int) -> None:
        """Call with the current time before reading units and delivering."""
        if self._done >= self._early:  # the clock has reached the former place
            self._early = self._early_to = 0
        is_ahead = self._done >> _BITS > now_ms
        if is_ahead and not self._late and self._done >= self._early:
            # What is delivered must not be delivered again when the clock gets there.
            self._early, self._early_to = self._done, max(self.next_offset, self._known_to)
            self._done = now_ms << _BITS

    def _is_delivered(self, offset: int, entry: int) -> bool:
        """Whether it was delivered before this mastership, according to the progress."""
        if offset < self._early_to and entry <= self._early:
            return True
        return offset < self._known_to and entry <= self._done

    def seen(self, due_ms: int) -> bool:
        """Takes the next unit of the queue, due at `due_ms`; returns whether its message waits."""
        offset = self.next_offset
        self.next_offset = offset + 1
        entry = due_ms << _BITS | offset
        if self._is_delivered(offset, entry):
            return False
        # Late entries are kept apart: delivering one must not move `_done` back.
        heapq.heappush(self._heap if entry > self._done else self._late, entry)
        # Count by block, not by offset: progress needs only a lower bound of what is open.
        block = offset >> _BLOCK_BITS
        self._blocks[block] = self._blocks.get(block, 0) + 1
        return True

    def recalled(self, key: bytes) -> None:
        """A recall waits: until it is due, no message of this key is delivered."""
        self._recalls[key] += 1

    def is_recalled(self, key: bytes) -> bool:
        """Whether a recall of this key waits."""
        return key in self._recalls

    def recall_over(self, key: bytes) -> None:
        """A recall of this key is due, and the message that it names was due before it."""
        self._recalls[key] -= 1
        # There may be another recall of this key: a client may have repeated its request.
        if self._recalls[key] <= 0:
            del self._recalls[key]

    @property
    def wake_ms(self) -> int:
        """When the next message is due, NEVER if none waits."""
        if self._late:
            return self._late[0] >> _BITS
        return self._heap[0] >> _BITS if self._heap else NEVER

    def next_due(self, now_ms: int) -> int | None:
        """The offset of the first due message, if any; it stays until `done`."""
        if not len(self) or self.wake_ms > now_ms:
            return None
        return (self._late or self._heap)[0] & _OFFSET

    def waits(self, offset: int, due_ms: int) -> bool:
        """Whether a message that was read is still to be delivered, and not late."""
        entry = due_ms << _BITS | offset
        return entry > self._done and not (offset < self._early_to and entry <= self._early)

    def done(self) -> bool:
        """The message from `next_due` is delivered or dropped. Returns False if it was a late
        one."""
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
        """The progress to record; valid only while `is_caught_up`."""
        block = next(iter(self._blocks), None)
        # Late entries are out of order, so the progress must end before the first of them.
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
        """Whether everything was read that the log had when the mastership began."""
        # Also what is not confirmed here yet: the last record may be a recall that the former
        # master has answered (R30).
        return self.next_offset >= self._seen_all_at


class TimerCounts:
    """Waiting messages by topic, of the units below `next_offset`, for one mastership."""

    def __init__(self) -> None:
        self.next_offset = 0
        self._counts: Counter[str] = Counter()
        self._changes = 0
        self._changed_ms: dict[str, int] = {}

    def add(self, properties: bytes, count: int, now_ms: int) -> None:
        """A message with these properties began (1) or stopped (-1) waiting."""
        topic = (find_property(properties, _REAL_TOPIC) or b"").decode("utf-8", "replace")
        is_recall = find_property(properties, _RECALLS) is not None
        # A recall cancels one message, so it counts the other way.
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
    """`delays`: delay level -> next offset in its queue. `timer`: None if unchanged."""

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
    """How far messages are delivered: what is confirmed (in the table of delays), what unconfirmed
    records of this master's log say, and what no record says yet (`owed`). A master that is elected
    again continues after all of these."""

    def __init__(self, delays: DelayOffsetManager) -> None:
        self._delays = delays
        self._unconfirmed: dict[int, tuple[int, int]] = {}  # level -> offset, end of the record
        self._unconfirmed_timer: tuple[TimerProgress, int] | None = None
        self._owed: dict[int, int] = {}
        self._owed_timer: TimerProgress | None = None

    def apply_record(self, body: bytes, end: int) -> None:
        """The record that ends at `end` of the log is confirmed. Raises RemoteProtocolError."""
        record = decode_progress(body)
        self._delays.set_all(record.delays)
        for level in record.delays:
            if level in self._unconfirmed and self._unconfirmed[level][1] <= end:
                del self._unconfirmed[level]  # confirmed now, so the table has it (R55)
        if record.timer is not None:
            self._delays.set_timer(record.timer)
            if self._unconfirmed_timer is not None and self._unconfirmed_timer[1] <= end:
                self._unconfirmed_timer = None

    own_record_confirmed = apply_record

    def take_over_record(self, body: bytes, end: int) -> None:
        """A new master finds this unconfirmed record in its log. Raises RemoteProtocolError."""
        self._stands(decode_progress(body), end)

    def delivered(
        self, delays: Mapping[int, int] = _NO_DELAYS, timer: TimerProgress | None = None
    ) -> None:
        """This master has delivered everything up to there."""
        self._owed.update(delays)
        self._owed_timer = timer or self._owed_timer

    @property
    def owed(self) -> ProgressRecord | None:
        """The record that is still to be put; None if the log has everything."""
        if not self._owed and self._owed_timer is None:
            return None
        return ProgressRecord(delays=dict(self._owed), timer=self._owed_timer)

    def noted(self, record: ProgressRecord, end: int) -> None:
        """The record from `owed` is put and ends at `end` of the log."""
        self._stands(record, end)
        self._owed.clear()
        self._owed_timer = None

    def _stands(self, record: ProgressRecord, end: int) -> None:
        self._unconfirmed.update((level, (at, end)) for level, at in record.delays.items())
        if record.timer is not None:
            self._unconfirmed_timer = record.timer, end

    def role_left(self) -> None:
        """Unconfirmed records may be cut: the log decides."""
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
        """Where a mastership that begins now continues with timers."""
        if self._owed_timer is not None:
            return self._owed_timer
        if self._unconfirmed_timer is not None:
            return self._unconfirmed_timer[0]
        return self._delays.timer

    def is_confirmed(self, timer: TimerProgress) -> bool:
        """Whether this progress is confirmed, and with it everything delivered before."""
        return timer == self._delays.timer
