"""POP requests that found nothing and wait for a message of their topic. Pure.

An arrival wakes one request of each group, since a message goes to one consumer of a group only;
who leaves messages over wakes the next. Which are awake is kept here: the shell takes them out in
slices (`next_ready`). Bounded as in Java, by key and in all. Origin: Java `PopLongPollingService`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from batonmq.protocol.pop import ANY_QUEUE
from batonmq.protocol.topic_name import pop_retry_topics

KEY_MAX: Final = 1024
ALL_MAX: Final = 100_000
_Key = tuple[str, int]


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
    """By topic, and there by (group, queue id); ANY_QUEUE is a key like the others."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[_Key, OrderedDict[Waiting, None]]] = {}
        self._owners: dict[object, dict[Waiting, None]] = {}
        self._of_retry: dict[str, tuple[str, str]] = {}
        self._deadlines: list[tuple[int, int, Waiting]] = []
        self._counter = itertools.count()
        self._size = 0
        self._arrived: dict[tuple[str, int], None] = {}
        self._ready: deque[tuple[str, _Key]] = deque()

    def __len__(self) -> int:
        return self._size

    def count_of(self, topic: str, group: str, queue_id: int) -> int:
        """How many wait under one key."""
        return len(self._topics.get(topic, {}).get((group, queue_id), ()))

    def hold(self, one: Waiting, *, first: bool = False) -> bool:
        """Lets it wait, before the others of its key if it did before. False if there is no
        room."""
        keys = self._topics.setdefault(one.topic, {})
        waiting = keys.setdefault((one.group, one.queue_id), OrderedDict())
        if not first and (len(waiting) >= KEY_MAX or self._size >= ALL_MAX):
            return False
        waiting[one] = None
        if first:
            waiting.move_to_end(one, last=False)
        self._owners.setdefault(one.owner, {})[one] = None
        for retry in pop_retry_topics(one.group, one.topic):
            self._of_retry[retry] = one.topic, one.group
        heapq.heappush(self._deadlines, (one.deadline_ms, next(self._counter), one))
        one.is_held = True
        self._size += 1
        return True

    def arrived(self, topic: str, queue_id: int) -> bool:
        """A queue has more to give; whether anybody waits for it."""
        if topic in self._topics:
            self._arrived[topic, queue_id] = None
        elif topic in self._of_retry:
            self.more(*self._of_retry[topic])
        return bool(self._arrived or self._ready)

    def more(self, topic: str, group: str) -> None:
        """There is something for the next of this group."""
        keys = self._topics.get(topic, ())
        self._ready.extend((topic, key) for key in keys if key[0] == group)

    def all_ready(self) -> None:
        """Whoever waits is to look again."""
        self._arrived.update(((topic, ANY_QUEUE), None) for topic in self._topics)

    def next_ready(self) -> Waiting | None:
        """Takes out the next one that is awake."""
        while self._ready or self._arrived:
            if not self._ready:
                topic, queue_id = next(iter(self._arrived))
                del self._arrived[topic, queue_id]
                self._ready.extend(
                    (topic, key)
                    for key in self._topics.get(topic, ())
                    if ANY_QUEUE in (queue_id, key[1]) or key[1] == queue_id
                )
                continue
            topic, key = self._ready.popleft()
            waiting = self._topics.get(topic, {}).get(key)
            if waiting:
                one = next(iter(waiting))
                self._remove(one)
                return one
        return None

    def expired(self, now_ms: int, limit: int) -> list[Waiting]:
        """Takes out up to `limit` whose time is over, oldest deadline first."""
        late: list[Waiting] = []
        while self._deadlines and len(late) < limit:
            deadline_ms, _, one = self._deadlines[0]
            if one.is_held and deadline_ms > now_ms:
                break
            heapq.heappop(self._deadlines)
            if one.is_held:
                self._remove(one)
                late.append(one)
        return late

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
        keys = self._topics[one.topic]
        key = one.group, one.queue_id
        del keys[key][one]
        if not keys[key]:
            del keys[key]
            if not keys:
                del self._topics[one.topic]
            if not any(group == one.group for group, _ in keys):
                for retry in pop_retry_topics(one.group, one.topic):
                    self._of_retry.pop(retry, None)
        del self._owners[one.owner][one]
        if not self._owners[one.owner]:
            del self._owners[one.owner]
