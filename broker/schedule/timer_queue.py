"""Which timed message is due when: a heap of (due time, offset in the timer's queue).

The log and the queue of rmq_sys_wheel_timer hold everything else, so this is derived: a new master
fills it from the queue's units, which say when each message is due. A waiting message costs one
integer here, whatever its size. Java keeps a wheel of a slot for each second and a log of its own
beside it, and is as precise as a slot. Pure. Times are wall clock ms.

How far the group is, is a `TimerProgress`: one place in the heap's order. A message that becomes
visible when its time has passed may stand before that place. Such late ones come first, in the
order of their offsets, and while there are any the progress reaches to the first of them only. A
late one waits for its time as well: a clock that was set back has not reached it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from typing import Final

from batonmq.store.delay_offset import TimerProgress

NEVER: Final = 1 << 62
_BITS: Final = 44
_OFFSET: Final = (1 << _BITS) - 1
_BLOCK_BITS: Final = 12


class TimerQueue:
    """`next_offset` is the offset in the timer's queue to read next."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._blocks: dict[int, int] = {}
        self._recalls: Counter[bytes] = Counter()
        self._late: deque[int] = deque()
        self._done = self._known_to = self._level_at = 0
        self.next_offset = 0

    def begin(self, progress: TimerProgress, least_offset: int, end_offset: int) -> None:
        """A mastership begins: nothing is known but where to read from. The queue holds
        [`least_offset`, `end_offset`)."""
        self._heap.clear()
        self._late.clear()
        self._blocks.clear()
        self._recalls.clear()
        self._done = progress.done_ms << _BITS | progress.done_offset
        self._known_to = min(progress.next_offset, end_offset)
        self._level_at = end_offset
        self.next_offset = min(max(progress.from_offset, least_offset), end_offset)

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._heap) + len(self._late)

    def skip_to(self, least_offset: int) -> None:
        """The queue begins there now: what was to be read before has expired."""
        self.next_offset = max(self.next_offset, least_offset)

    def seen(self, due_ms: int) -> bool:
        """The next message of the queue is due at `due_ms`; whether it waits."""
        offset = self.next_offset
        self.next_offset = offset + 1
        entry = due_ms << _BITS | offset
        if entry > self._done:
            heapq.heappush(self._heap, entry)
        elif offset < self._known_to:
            return False
        else:
            self._late.append(entry)
        block = offset >> _BLOCK_BITS
        self._blocks[block] = self._blocks.get(block, 0) + 1
        return True

    def recalled(self, key: bytes) -> None:
        """A recall waits: no message of this key is to be delivered until that is due, for a send
        that was tried again may have stored the message twice."""
        self._recalls[key] += 1

    def is_recalled(self, key: bytes) -> bool:
        """Whether a recall of this key waits."""
        return key in self._recalls

    def recall_over(self, key: bytes) -> None:
        """A recall of this key is due: what it names was due before it."""
        self._recalls[key] -= 1
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
        return due_ms << _BITS | offset > self._done

    def done(self) -> bool:
        """The message that `next_due` gave is in the log again, or is not to be delivered. False if
        it was a late one."""
        is_late = bool(self._late)
        if is_late:
            entry = self._late.popleft()
        else:
            entry = self._done = heapq.heappop(self._heap)
        block = (entry & _OFFSET) >> _BLOCK_BITS
        self._blocks[block] -= 1
        if not self._blocks[block]:
            del self._blocks[block]
        return not is_late

    def progress(self) -> TimerProgress:
        """What is delivered of all that was seen. Not before all was seen that the last progress
        knew of."""
        block = next(iter(self._blocks), None)
        end = self._late[0] & _OFFSET if self._late else self.next_offset
        start = end if block is None else block << _BLOCK_BITS
        return TimerProgress(
            done_ms=self._done >> _BITS,
            done_offset=self._done & _OFFSET,
            next_offset=end,
            from_offset=min(start, end),
        )

    @property
    def is_level(self) -> bool:
        """Whether all was seen that the log had when the mastership began: a recall that the master
        before has answered may be its last record, and becomes visible only when it is confirmed
        again (R30)."""
        return self.next_offset >= self._level_at
