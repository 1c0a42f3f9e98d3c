"""Pulls that found nothing and wait for the next message of their queue.

Pure: which pull waits for which queue, which an arrival ends, which have expired. The dispatch
itself ends a held pull. The 5 s scan of Java's PullRequestHoldService remains as a second way
(`PullProcessor.tick`): it finds a message that arrived between the look-up and the hold.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


@dataclass(slots=True, eq=False)
class Held(Generic[P]):
    """One waiting pull. `offset` is the first queue offset that would answer it."""

    topic: str
    queue_id: int
    offset: int
    deadline_ms: int
    owner: object
    pull: P
    done: bool = False


class PullHold(Generic[P]):
    """Held pulls by (topic, queue id) and by owner, with one heap of deadlines."""

    def __init__(self) -> None:
        # Dicts without values: each pull leaves at the same cost, however many there are.
        self._by_queue: dict[tuple[str, int], dict[Held[P], None]] = {}
        self._by_owner: dict[object, dict[Held[P], None]] = {}
        self._deadlines: list[tuple[int, int, Held[P]]] = []
        self._counter = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def waiting(self, topic: str, queue_id: int) -> int:
        """How many pulls wait for a queue."""
        return len(self._by_queue.get((topic, queue_id), ()))

    def hold(self, held: Held[P]) -> None:
        """Lets a pull wait until an arrival, its deadline, or the end of its owner."""
        held.done = False
        self._by_queue.setdefault((held.topic, held.queue_id), {})[held] = None
        self._by_owner.setdefault(held.owner, {})[held] = None
        heapq.heappush(self._deadlines, (held.deadline_ms, next(self._counter), held))
        self._size += 1

    def arrived(
        self, topic: str, queue_id: int, max_offset: int, limit: int | None = None
    ) -> list[Held[P]]:
        """Takes out up to `limit` pulls of a queue that `max_offset` (exclusive) reaches."""
        waiting = self._by_queue.get((topic, queue_id))
        if not waiting:
            return []
        reached = (held for held in waiting if held.offset < max_offset)
        woken = list(itertools.islice(reached, limit))
        for held in woken:
            self._remove(held)
        return woken

    def expired(self, now_ms: int, limit: int) -> list[Held[P]]:
        """Takes out up to `limit` pulls whose time is over, oldest deadline first. Of those that
        wait no longer it passes over eight times as many: `is_late` says whether there is more."""
        late: list[Held[P]] = []
        for _ in range(8 * limit):
            if len(late) == limit or not self.is_late(now_ms):
                break
            held = heapq.heappop(self._deadlines)[2]
            if not held.done:
                self._remove(held)
                late.append(held)
        return late

    def is_late(self, now_ms: int) -> bool:
        """Whether there is one for `expired`, or one to pass over."""
        if not self._deadlines:
            return False
        deadline_ms, _, held = self._deadlines[0]
        return deadline_ms <= now_ms or held.done

    def drop_owner(self, owner: object) -> int:
        """Forgets the pulls of a closed connection; returns how many."""
        gone = list(self._by_owner.get(owner, ()))
        for held in gone:
            self._remove(held)
        return len(gone)

    def take(self, limit: int) -> list[Held[P]]:
        """Takes out up to `limit`: the broker's role changes."""
        taken = list(itertools.islice(self.all(), limit))
        for held in taken:
            self._remove(held)
        return taken

    def all(self) -> Iterator[Held[P]]:
        return (held for waiting in self._by_queue.values() for held in waiting)

    def queues(self) -> list[tuple[str, int]]:
        """The queues that a pull waits for."""
        return list(self._by_queue)

    def _remove(self, held: Held[P]) -> None:
        held.done = True
        self._size -= 1
        key = (held.topic, held.queue_id)
        del self._by_queue[key][held]
        if not self._by_queue[key]:
            del self._by_queue[key]
        del self._by_owner[held.owner][held]
        if not self._by_owner[held.owner]:
            del self._by_owner[held.owner]
