"""POP requests that found nothing and wait for a message of their topic. Pure.

An arrival wakes one request of each group, since a message goes to one consumer of a group only;
who leaves messages over wakes the next. Which are awake is kept here: the shell takes them out in
slices (`next_ready`). Bounded as in Java, by key and in all. Origin: Java `PopLongPollingService`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from batonmq.protocol.pop import ANY_QUEUE
from batonmq.protocol.topic_name import pop_retry_topics

KEY_MAX: Final = 1024
ALL_MAX: Final = 100_000
_Place = tuple[str, str, int]
"""Topic, group, queue id."""


@dataclass(slots=True, eq=False)
class Waiting:
    """What the hold knows of a request; `owner` is its connection."""

    topic: str
    group: str
    queue_id: int
    deadline_ms: int
    owner: object
    is_held: bool = field(default=False, init=False)


class PopHold:
    """By place; ANY_QUEUE is a queue id like the others. Of 10,000 groups, or queues, none is
    looked at for another one."""

    def __init__(self) -> None:
        self._waiting: dict[_Place, OrderedDict[Waiting, None]] = {}
        # Topic -> queue id -> groups that wait there, and (topic, group) -> queue ids.
        self._groups: dict[str, dict[int, dict[str, None]]] = {}
        self._queues: dict[tuple[str, str], dict[int, None]] = {}
        self._owners: dict[object, dict[Waiting, None]] = {}
        self._of_retry: dict[str, tuple[str, str]] = {}
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self._counter = itertools.count()
        self._size = 0
        self._arrived: dict[tuple[str, int], None] = {}
        self._ready: deque[Iterator[_Place]] = deque()

    def __len__(self) -> int:
        return self._size

    def count_of(self, topic: str, group: str, queue_id: int) -> int:
        """How many wait in one place."""
        return len(self._waiting.get((topic, group, queue_id), ()))

    def hold(self, one: Waiting, *, first: bool = False) -> bool:
        """Lets it wait, before the others of its place if it did before. False if there is no
        room."""
        place = one.topic, one.group, one.queue_id
        waiting = self._waiting.get(place)
        if waiting is not None and not first and len(waiting) >= KEY_MAX:
            return False
        if not first and self._size >= ALL_MAX:
            return False
        if waiting is None:
            waiting = self._new_place(*place)
        waiting[one] = None
        if first:
            waiting.move_to_end(one, last=False)
        self._owners.setdefault(one.owner, {})[one] = None
        heapq.heappush(self._deadlines, (one.deadline_ms, next(self._counter), one))
        one.is_held = True
        self._size += 1
        return True

    def _new_place(self, topic: str, group: str, queue_id: int) -> OrderedDict[Waiting, None]:
        waiting = self._waiting[topic, group, queue_id] = OrderedDict()
        self._groups.setdefault(topic, {}).setdefault(queue_id, {})[group] = None
        queues = self._queues.setdefault((topic, group), {})
        if not queues:
            for retry in pop_retry_topics(group, topic):
                self._of_retry[retry] = topic, group
        queues[queue_id] = None
        return waiting

    def arrived(self, topic: str, queue_id: int) -> bool:
        """A queue has more to give; whether anybody waits for it."""
        if topic in self._groups:
            self._arrived[topic, queue_id] = None
        elif topic in self._of_retry:
            self.more(*self._of_retry[topic])
        else:
            return False
        return True

    def more(self, topic: str, group: str) -> None:
        """There is something for the next of this group."""
        queues = list(self._queues.get((topic, group), ()))
        self._ready.append((topic, group, queue) for queue in queues)

    def all_ready(self) -> None:
        """Whoever waits is to look again."""
        self._arrived.update(dict.fromkeys((topic, ANY_QUEUE) for topic in self._groups))

    def next_ready(self) -> Waiting | None:
        """Takes out the next one that is awake."""
        while self._ready or self._arrived:
            if not self._ready:
                arrived = next(iter(self._arrived))
                del self._arrived[arrived]
                self._ready.append(self._reached_by(*arrived))
            for place in self._ready[0]:
                if waiting := self._waiting.get(place):
                    one = next(iter(waiting))
                    self._remove(one)
                    return one
            self._ready.popleft()
        return None

    def _reached_by(self, topic: str, queue_id: int) -> Iterator[_Place]:
        """The places for which a message of a queue, or of any, is something."""
        queues = self._groups.get(topic, {})
        for queue in list(queues) if queue_id == ANY_QUEUE else (queue_id, ANY_QUEUE):
            for group in list(queues.get(queue, ())):
                yield topic, group, queue

    def expired(self, now_ms: int, limit: int) -> list[Waiting]:
        """Takes out up to `limit` whose time is over, oldest deadline first. Of those that wait no
        longer it passes over eight times as many: `is_late` says whether there is more."""
        late: list[Waiting] = []
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
        for one in list(self._owners.get(owner, ())):
            self._remove(one)

    def take(self, limit: int) -> list[Waiting]:
        """Takes out up to `limit`: the role changes."""
        every = (one for waiting in self._owners.values() for one in waiting)
        taken = list(itertools.islice(every, limit))
        for one in taken:
            self._remove(one)
        return taken

    def _remove(self, one: Waiting) -> None:
        one.is_held = False
        self._size -= 1
        place = topic, group, queue_id = one.topic, one.group, one.queue_id
        del self._waiting[place][one]
        if not self._waiting[place]:
            del self._waiting[place]
            groups, queues = self._groups[topic], self._queues[topic, group]
            del groups[queue_id][group]
            if not groups[queue_id]:
                del groups[queue_id]
                if not groups:
                    del self._groups[topic]
            del queues[queue_id]
            if not queues:
                del self._queues[topic, group]
                for retry in pop_retry_topics(group, topic):
                    self._of_retry.pop(retry, None)
        del self._owners[one.owner][one]
        if not self._owners[one.owner]:
            del self._owners[one.owner]
