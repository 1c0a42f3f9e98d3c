"""Requests that are held until a message, their deadline, or the end of their connection. Pure.

`HeldRequests` is the common part of `PullHold` and `PopHold`, which find the requests that a
message reaches. The cost of one request does not depend on the number of others. Times are ms of a
monotonic clock. Origin: Java `PullRequestHoldService`, `PopLongPollingService`.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, TypeVar

from batonmq.protocol.pop import ANY_QUEUE
from batonmq.protocol.topic_name import pop_retry_topics

KEY_MAX: Final = 1024
"""The most POPs of a group that wait for one queue; this and ALL_MAX are Java's."""
ALL_MAX: Final = 100_000
"""The most pulls, and the most POPs, that wait."""
TAGS_MAX: Final = 1_000_000
"""The most tags of all held pulls together, and of all POPs; a tag takes about 70 bytes."""
_Place = tuple[str, str, int]
"""Topic, group, queue id."""
P = TypeVar("P", bound=Hashable)


@dataclass(slots=True, eq=False)
class HeldRequest:
    """`owner` is its connection; `tags`: the number of its tags."""

    topic: str
    queue_id: int
    deadline_ms: int
    owner: object
    tags: int = field(default=0, kw_only=True)


H = TypeVar("H", bound=HeldRequest)


class HeldRequests(Generic[H]):
    """Held requests by owner and by deadline. A subclass implements `_link` and `_unlink` to index
    a request by what it waits for."""

    def __init__(self) -> None:
        # Dicts serve as ordered sets, so that a request is removed in constant time.
        self._by_owner: dict[object, dict[H, None]] = {}
        self._until: dict[int, dict[H, None]] = {}
        self._deadlines: list[int] = []
        """A heap of the keys of `_until`."""
        self._size = self._tags = 0

    def __len__(self) -> int:
        return self._size

    def _link(self, one: H) -> None:
        raise NotImplementedError

    def _unlink(self, one: H) -> None:
        raise NotImplementedError

    def has_place(self, tags: int) -> bool:
        """Whether one more with so many tags may wait (R58)."""
        return self._size < ALL_MAX and self._tags + tags <= TAGS_MAX

    def hold(self, one: H) -> None:
        self._link(one)
        self._tags += one.tags
        self._by_owner.setdefault(one.owner, {})[one] = None
        until = self._until.get(one.deadline_ms)
        if until is None:
            until = self._until[one.deadline_ms] = {}
            heapq.heappush(self._deadlines, one.deadline_ms)
        until[one] = None
        self._size += 1

    def expired(self, now_ms: int, limit: int) -> Iterator[H]:
        """Takes out up to `limit` expired requests, oldest deadline first, each when it is asked
        for. `is_late` says whether there are more."""
        for _ in range(4 * limit):  # some deadlines have no request any more
            if not limit or not self.is_late(now_ms):
                break
            if until := self._until[self._deadlines[0]]:
                for one in self._removed(islice(until, limit)):
                    limit -= 1
                    yield one
            else:
                del self._until[heapq.heappop(self._deadlines)]

    def is_late(self, now_ms: int) -> bool:
        """Whether `expired` has something to do."""
        if not self._deadlines:
            return False
        first_ms = self._deadlines[0]
        return first_ms <= now_ms or not self._until[first_ms]

    def drop_owner(self, owner: object) -> None:
        for one in list(self._by_owner.get(owner, ())):
            self._remove(one)

    def take(self, limit: int) -> list[H]:
        """Takes out up to `limit` requests, when the broker's role changes."""
        every = (one for waiting in self._by_owner.values() for one in waiting)
        return list(self._removed(islice(every, limit)))

    def _removed(self, ones: Iterator[H]) -> Iterator[H]:
        for one in list(ones):
            self._remove(one)
            yield one

    def _remove(self, one: H) -> None:
        self._size -= 1
        self._tags -= one.tags
        self._unlink(one)
        # The deadline stays in the heap, where removing it would cost a search. The request does
        # not: it would keep a closed connection in memory until then.
        del self._until[one.deadline_ms][one]
        del self._by_owner[one.owner][one]
        if not self._by_owner[one.owner]:
            del self._by_owner[one.owner]


@dataclass(slots=True, eq=False)
class HeldPull(HeldRequest, Generic[P]):
    """`offset`: the queue offset that the pull waits for."""

    offset: int
    pull: P


class PullHold(HeldRequests[HeldPull[P]], Generic[P]):
    """Held pulls by (topic, queue id)."""

    def __init__(self) -> None:
        super().__init__()
        self._by_topic: dict[str, dict[int, dict[HeldPull[P], None]]] = {}

    def waiting(self, topic: str, queue_id: int) -> int:
        return len(self._by_topic.get(topic, {}).get(queue_id, ()))

    def queues(self) -> list[tuple[str, int]]:
        return [(topic, queue) for topic, queues in self._by_topic.items() for queue in queues]

    def queues_of(self, topic: str) -> list[int]:
        return list(self._by_topic.get(topic, ()))

    def arrived(
        self, topic: str, queue_id: int, max_offset: int, limit: int | None = None
    ) -> Iterator[HeldPull[P]]:
        """Takes out up to `limit` pulls of a queue whose offset is below `max_offset`, each when it
        is asked for."""
        waiting = self._by_topic.get(topic, {}).get(queue_id, {})
        reached = (held for held in waiting if held.offset < max_offset)
        return self._removed(islice(reached, limit))

    def _link(self, one: HeldPull[P]) -> None:
        self._by_topic.setdefault(one.topic, {}).setdefault(one.queue_id, {})[one] = None

    def _unlink(self, one: HeldPull[P]) -> None:
        queues = self._by_topic[one.topic]
        del queues[one.queue_id][one]
        if not queues[one.queue_id]:
            # Clients choose the names: without this, unused entries would accumulate.
            del queues[one.queue_id]
            if not queues:
                del self._by_topic[one.topic]


@dataclass(slots=True, eq=False)
class HeldPop(HeldRequest):
    """A POP or notification request of a group."""

    group: str


Q = TypeVar("Q", bound=HeldPop)


class PopHold(HeldRequests[Q], Generic[Q]):
    """Held POPs by place; ANY_QUEUE counts as a queue id. An arrival wakes one request of each
    group, since a message goes to one consumer of a group. The shell takes out woken requests in
    slices (`next_ready`)."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[_Place, OrderedDict[Q, None]] = {}
        # Topic -> queue id -> groups that wait there, and (topic, group) -> queue ids.
        self._groups: dict[str, dict[int, dict[str, None]]] = {}
        self._queues: dict[tuple[str, str], dict[int, None]] = {}
        self._of_retry: dict[str, tuple[str, str]] = {}
        self._arrived: dict[tuple[str, int], None] = {}
        self._ready: deque[Iterator[_Place]] = deque()

    def count_of(self, topic: str, group: str, queue_id: int) -> int:
        return len(self._waiting.get((topic, group, queue_id), ()))

    def may_wait(self, one: Q) -> bool:
        """Whether one more may wait in its place."""
        in_place = self.count_of(one.topic, one.group, one.queue_id)
        return in_place < KEY_MAX and self.has_place(one.tags)

    def hold_again(self, one: Q) -> None:
        """Holds a woken request again, ahead of the later ones in its place."""
        self.hold(one)
        self._waiting[one.topic, one.group, one.queue_id].move_to_end(one, last=False)

    def _link(self, one: Q) -> None:
        place = one.topic, one.group, one.queue_id
        (self._waiting.get(place) or self._new_place(*place))[one] = None

    def _new_place(self, topic: str, group: str, queue_id: int) -> OrderedDict[Q, None]:
        waiting = self._waiting[topic, group, queue_id] = OrderedDict()
        self._groups.setdefault(topic, {}).setdefault(queue_id, {})[group] = None
        queues = self._queues.setdefault((topic, group), {})
        if not queues:
            # A retried message arrives in the group's retry topic, and must wake the same requests.
            for retry in pop_retry_topics(group, topic):
                self._of_retry[retry] = topic, group
        queues[queue_id] = None
        return waiting

    def arrived(self, topic: str, queue_id: int) -> bool:
        """Notes new messages in a queue; returns whether a request waits for them."""
        if topic in self._groups:
            self._arrived[topic, queue_id] = None  # a dict as an ordered set: many arrivals are one
        elif topic in self._of_retry:
            self.more(*self._of_retry[topic])
        else:
            return False
        return True

    def more(self, topic: str, group: str) -> None:
        """Messages were left over: wakes the next request of this group."""
        queues = list(self._queues.get((topic, group), ()))
        # Lazily, because a woken request may take the messages of the others.
        self._ready.append((topic, group, queue) for queue in queues)

    def all_ready(self) -> None:
        self._arrived.update(dict.fromkeys((topic, ANY_QUEUE) for topic in self._groups))

    def next_ready(self) -> Q | None:
        """Takes out the next woken request."""
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
        """The places that a message in this queue (ANY_QUEUE: in any queue) can wake."""
        queues = self._groups.get(topic, {})
        # Walk over copies: places change while requests are handled.
        for queue in list(queues) if queue_id == ANY_QUEUE else (queue_id, ANY_QUEUE):
            for group in list(queues.get(queue, ())):
                yield topic, group, queue

    def _unlink(self, one: Q) -> None:
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
