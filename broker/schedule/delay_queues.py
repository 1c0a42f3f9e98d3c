"""When which delayed message is delivered: the queues of SCHEDULE_TOPIC_XXXX and a clock.

All messages of a level wait equally long, so each queue is in the order of its due times, and only
the first of a queue is ever waited for. Nothing is kept of the others: a level with a million
waiting messages costs as much as one with none. Pure. Times are wall clock ms.
Origin: Java `ScheduleMessageService.DeliverDelayedMessageTimerTask`, which looks every 100 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

NEVER: Final = 1 << 62
NOW: Final = 0


@dataclass(slots=True)
class _Level:
    queue_id: int
    offset: int
    look_ms: int = NOW
    """When to look at the queue: when its first message is due; NEVER while it has none."""


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
        """This broker delivers nothing any more."""
        self._levels = {}

    def arrived(self, queue_id: int) -> bool:
        """A message came to a queue; whether it is the first of it, so that it is looked at."""
        level = self._levels.get(queue_id)
        if level is None or level.look_ms != NEVER:
            return False
        level.look_ms = NOW
        return True

    @property
    def wake_ms(self) -> int:
        """When to look next, NEVER if only an arrival can change something."""
        return min((level.look_ms for level in self._levels.values()), default=NEVER)

    def next_look(self, now_ms: int) -> Look | None:
        """A queue to read now, in turn; None if none has anything due. Also one whose first message
        lies further ahead than its delay by now: the clock was set back."""
        ids = sorted(self._levels)
        for queue_id in (*ids[self._turn :], *ids[: self._turn]):
            level = self._levels[queue_id]
            latest = now_ms + self._delay_ms(queue_id)
            if level.look_ms <= now_ms or latest < level.look_ms < NEVER:
                self._turn = ids.index(queue_id) + 1
                return Look(queue_id, level.offset)
        return None

    def due_of(self, queue_id: int, due: Sequence[int], now_ms: int) -> int:
        """How many of the messages from the level's offset on, due at these times, are due now.

        One that lies further ahead than the level's delay was stored before the clock was set back:
        it is due. If none is due, or none is there, the level waits.
        """
        level = self._levels[queue_id]
        latest = now_ms + self._delay_ms(queue_id)
        for index, due_ms in enumerate(due):
            if now_ms < due_ms <= latest:
                if index == 0:
                    level.look_ms = due_ms
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
        """The queue has nothing below `offset` any more."""
        self._levels[queue_id].offset = offset
        self._levels[queue_id].look_ms = NOW

    def offset_of(self, queue_id: int) -> int:
        """The offset of the next message to deliver."""
        return self._levels[queue_id].offset
