"""Delayed messages: which of them are due. Pure.

All messages of a level wait equally long, so each queue of SCHEDULE_TOPIC_XXXX is in order of due
times, and only its first message needs a timer. (Java polls every 100 ms.) Times are wall clock ms.
Origin: Java `ScheduleMessageService`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

NEVER: Final = 1 << 62
NOW: Final = 0


@dataclass(slots=True)
class _Level:
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
    """The queues of the delay levels, for one mastership. `delay_ms(queue id)` is the delay of a
    level; `offsets`: queue id -> offset of the next message to deliver."""

    def __init__(self, delay_ms: Callable[[int], int], offsets: Mapping[int, int]) -> None:
        self._delay_ms = delay_ms
        self._levels = {queue_id: _Level(at) for queue_id, at in offsets.items()}
        self._turn = 0

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
        """Earlier messages of the queue have expired. `next_read` names it again at once."""
        self._levels[queue_id].offset = offset

    def offset_of(self, queue_id: int) -> int:
        return self._levels[queue_id].offset
