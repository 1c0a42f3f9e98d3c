"""Requests that found nothing and wait: for a message, their deadline, or the end of their owner.

Pure. `HeldRequests` is the same for pulls (`PullHold`) and POPs (`broker.pop.pop_hold`), which add
what a message reaches. None is looked at for another one, however many wait.

The dispatch itself ends a held pull. The 5 s scan of Java's PullRequestHoldService remains as a
second way (`PullProcessor.tick`): it finds a message that arrived between the look-up and the hold.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False)
class HeldRequest:
    """What a hold knows of a request; `owner` is its connection."""

    topic: str
    queue_id: int
    deadline_ms: int
    owner: object
    is_held: bool = field(default=False, init=False)


H = TypeVar("H", bound=HeldRequest)
P = TypeVar("P", bound=Hashable)


class HeldRequests(Generic[H]):
    """By owner, with one heap of deadlines. A subclass says in `_link` and `_unlink` for which
    arrivals a request waits."""

    def __init__(self) -> None:
        # Dicts without values: each request leaves at the same cost.
        self._by_owner: dict[object, dict[H, None]] = {}
        self._deadlines: list[tuple[int, int, H]] = []
        self._counter = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def _link(self, one: H) -> None:
        raise NotImplementedError

    def _unlink(self, one: H) -> None:
        raise NotImplementedError

    def hold(self, one: H) -> None:
        """Lets a request wait."""
        self._link(one)
        self._by_owner.setdefault(one.owner, {})[one] = None
        heapq.heappush(self._deadlines, (one.deadline_ms, next(self._counter), one))
        one.is_held = True
        self._size += 1

    def expired(self, now_ms: int, limit: int) -> list[H]:
        """Takes out up to `limit` whose time is over, oldest deadline first. Of those that wait no
        longer it passes over eight times as many: `is_late` says whether there is more."""
        late: list[H] = []
        for _ in range(8 * limit):
            if len(late) == limit or not self.is_late(now_ms):
                break
            one = heapq.heappop(self._deadlines)[2]
            if one.is_held:
                self._remove(one)
                late.append(one)
        return late

    def is_late(self, now_ms: int) -> bool:
        """Whether there is one for `expired`, or one to pass over."""
        if not self._deadlines:
            return False
        deadline_ms, _, one = self._deadlines[0]
        return deadline_ms <= now_ms or not one.is_held

    def drop_owner(self, owner: object) -> None:
        """Forgets those of a closed connection."""
        for one in list(self._by_owner.get(owner, ())):
            self._remove(one)

    def take(self, limit: int) -> list[H]:
        """Takes out up to `limit`: the broker's role changes."""
        every = (one for waiting in self._by_owner.values() for one in waiting)
        return self._removed(list(itertools.islice(every, limit)))

    def _removed(self, ones: list[H]) -> list[H]:
        for one in ones:
            self._remove(one)
        return ones

    def _remove(self, one: H) -> None:
        one.is_held = False
        self._size -= 1
        self._unlink(one)
        del self._by_owner[one.owner][one]
        if not self._by_owner[one.owner]:
            del self._by_owner[one.owner]


@dataclass(slots=True, eq=False)
class Held(HeldRequest, Generic[P]):
    """One waiting pull. `offset` is the first queue offset that would answer it."""

    offset: int
    pull: P


class PullHold(HeldRequests[Held[P]], Generic[P]):
    """Held pulls by (topic, queue id)."""

    def __init__(self) -> None:
        super().__init__()
        self._by_queue: dict[tuple[str, int], dict[Held[P], None]] = {}

    def waiting(self, topic: str, queue_id: int) -> int:
        """How many pulls wait for a queue."""
        return len(self._by_queue.get((topic, queue_id), ()))

    def queues(self) -> list[tuple[str, int]]:
        """The queues that a pull waits for."""
        return list(self._by_queue)

    def arrived(
        self, topic: str, queue_id: int, max_offset: int, limit: int | None = None
    ) -> list[Held[P]]:
        """Takes out up to `limit` pulls of a queue that `max_offset` (exclusive) reaches."""
        waiting = self._by_queue.get((topic, queue_id))
        if not waiting:
            return []
        reached = (held for held in waiting if held.offset < max_offset)
        return self._removed(list(itertools.islice(reached, limit)))

    def _link(self, one: Held[P]) -> None:
        self._by_queue.setdefault((one.topic, one.queue_id), {})[one] = None

    def _unlink(self, one: Held[P]) -> None:
        key = one.topic, one.queue_id
        del self._by_queue[key][one]
        if not self._by_queue[key]:
            del self._by_queue[key]
