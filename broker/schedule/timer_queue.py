"""Timed messages: which of them are due. Pure.

`TimerQueue` is a heap of (due time, queue offset), one integer per message. A new master fills it
from the units of rmq_sys_wheel_timer. `TimerCounts` is for GET_TIMER_METRICS (61). (Java keeps a
wheel with a slot for each second, and a separate log.) Times are wall clock ms.
Origin: Java `TimerMessageStore`, `TimerMetrics`.
"""

import heapq
from collections import Counter
from typing import Final

from batonmq.broker.tables.delay_offset import TimerProgress
from batonmq.protocol.bodies import DataVersion, TimerMetricsSerializeWrapper
from batonmq.protocol.properties import REAL_TOPIC, TIMER_DEL_UNIQKEY, find_property

NEVER: Final = 1 << 62
_BITS: Final = 44
"""An entry is due time << _BITS | queue offset: one integer, in the order of delivery."""
_OFFSET: Final = (1 << _BITS) - 1
_BLOCK_BITS: Final = 12
"""Open messages are counted in blocks of 4096 offsets."""
_REAL_TOPIC: Final = REAL_TOPIC.encode()
_RECALLS: Final = TIMER_DEL_UNIQKEY.encode()


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

    def __init__(self, progress: TimerProgress, least_offset: int, end_offset: int) -> None:
        """A mastership begins: the queue, which holds [`least_offset`, `end_offset`), is read."""
        self._heap: list[int] = []
        self._blocks: dict[int, int] = {}
        self._recalls: Counter[bytes] = Counter()
        self._late: list[int] = []
        self._done = progress.done_ms << _BITS | progress.done_offset
        self._known_to = min(progress.next_offset, end_offset)
        self._seen_all_at = end_offset
        self.next_offset = min(max(progress.from_offset, least_offset), end_offset)
        self._early = progress.early_ms << _BITS | progress.early_offset
        self._early_to = min(progress.early_to, end_offset)

    def __len__(self) -> int:
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
        # Unconfirmed records count, too: the last one may be a recall that the previous master has
        # acknowledged (R30).
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
