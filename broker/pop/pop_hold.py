"""POP requests that found nothing and wait for a message of their topic. Pure.

An arrival wakes one request of each group, since a message goes to one consumer of a group only;
who leaves messages over wakes the next. Which are awake is kept here: the shell takes them out in
slices (`next_ready`). Bounded as in Java, by key and in all. Origin: Java `PopLongPollingService`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from batonmq.broker.consume.held_requests import HeldRequest, HeldRequests
from batonmq.protocol.pop import ANY_QUEUE
from batonmq.protocol.topic_name import pop_retry_topics

KEY_MAX: Final = 1024
ALL_MAX: Final = 100_000
_Place = tuple[str, str, int]
"""Topic, group, queue id."""


@dataclass(slots=True, eq=False)
class Waiting(HeldRequest):
    """A POP, or a notification, of a group."""

    group: str


class PopHold(HeldRequests[Waiting]):
    """By place; ANY_QUEUE is a queue id like the others. Of 10,000 groups, or queues, none is
    looked at for another one."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[_Place, OrderedDict[Waiting, None]] = {}
        # Topic -> queue id -> groups that wait there, and (topic, group) -> queue ids.
        self._groups: dict[str, dict[int, dict[str, None]]] = {}
        self._queues: dict[tuple[str, str], dict[int, None]] = {}
        self._of_retry: dict[str, tuple[str, str]] = {}
        self._arrived: dict[tuple[str, int], None] = {}
        self._ready: deque[Iterator[_Place]] = deque()

    def count_of(self, topic: str, group: str, queue_id: int) -> int:
        """How many wait in one place."""
        return len(self._waiting.get((topic, group, queue_id), ()))

    def has_room(self, one: Waiting) -> bool:
        """Whether one more may wait in its place."""
        in_place = self.count_of(one.topic, one.group, one.queue_id)
        return in_place < KEY_MAX and len(self) < ALL_MAX

    def hold_again(self, one: Waiting) -> None:
        """Lets one wait that did before: before the others of its place."""
        self.hold(one)
        self._waiting[one.topic, one.group, one.queue_id].move_to_end(one, last=False)

    def _link(self, one: Waiting) -> None:
        place = one.topic, one.group, one.queue_id
        (self._waiting.get(place) or self._new_place(*place))[one] = None

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

    def _unlink(self, one: Waiting) -> None:
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
