"""The topics of each broker group, and the groups of each topic. Pure."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress, islice, repeat
from operator import attrgetter, itemgetter

from msgspec.structs import replace

from batonmq.protocol.bodies import QueueData, TopicConfig

SMALL = 256
"""A group with at most this many topics is forgotten, or gets other permissions, in one turn."""
LISTED_AT_ONCE = 2048
"""Topics that one step of a list looks at, in less than 1 ms."""
_UNKNOWN = TopicConfig()


@dataclass(eq=False, slots=True)
class Parts:
    """How far a registration is that is applied in parts, because it has many topics (R58)."""

    is_new: bool
    """The topics or the id of the broker differ from its last registration."""
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    """What the parts have added to the group so far."""
    under_way: bool = False
    """The newest part was applied."""
    ends: bool = False
    """The next part is the last one."""


class TopicQueueTable:
    """Which group has which topics, as it registered them, and the groups of each topic.

    A removed group has no topics from that moment on, but `groups_of` may name it until its topics
    are forgotten: of many topics that takes several turns. It always names the groups that have the
    topic."""

    def __init__(self) -> None:
        self.groups_of: dict[str, tuple[str, ...]] = {}
        self._of_group: dict[str, dict[str, TopicConfig]] = {}
        self._gone: deque[tuple[str, dict[str, TopicConfig]]] = deque()
        self._coming: dict[str, Parts] = {}
        self._perms: deque[_PermChange] = deque()

    def check_invariants(self) -> None:
        named = {(topic, name) for topic, names in self.groups_of.items() for name in names}
        had = {(topic, name) for name, topics in self._of_group.items() for topic in topics}
        gone = {(topic, name) for name, topics in self._gone for topic in topics}
        assert had <= named, "a group has a topic that does not name it"
        assert named <= had | gone, "a topic of an unknown group"
        assert all(self.groups_of.values()), "a topic without groups"

    def groups(self) -> Set[str]:
        return self._of_group.keys()

    def put(self, broker_name: str, topics: Mapping[str, TopicConfig]) -> None:
        # R58: a registration of 10,000 known topics costs a few calls into C, no Python loop. Most
        # topics have the same groups, so the new tuple of each combination is made once.
        names_of = list(map(self.groups_of.get, topics, repeat(())))
        more = {
            names: names if broker_name in names else (*names, broker_name)
            for names in set(names_of)
        }
        self.groups_of.update(zip(topics, map(more.__getitem__, names_of), strict=True))
        self._of_group.setdefault(broker_name, {}).update(topics)
        if broker_name in self._coming:
            self._coming[broker_name].topics.update(topics)

    def count(self, broker_name: str) -> int:
        return len(self._of_group.get(broker_name, ()))

    def missing(
        self, broker_name: str, topics: Mapping[str, TopicConfig]
    ) -> dict[str, TopicConfig]:
        known = self._of_group.get(broker_name, {})
        if topics.keys() <= known.keys():
            return {}
        return {topic: config for topic, config in topics.items() if topic not in known}

    def queues(self, topic: str, names: Iterable[str]) -> list[QueueData]:
        """The queues of each of these groups that has the topic."""
        return [
            _queue_data(name, config)
            for name in names
            if (config := self._of_group.get(name, {}).get(topic)) is not None
        ]

    def with_flags(self, topics: Sequence[str], mask: int, flags: int) -> list[str]:
        """Those of `topics` that have these flags at their first group, which counts in Java."""
        # R58: of most topics the flag is 0, and they cost no Python code.
        names = map(itemgetter(0), map(self.groups_of.get, topics, repeat(("",))))
        of_first = map(self._of_group.get, names, repeat({}))
        configs = list(map(dict.get, of_first, topics, repeat(_UNKNOWN)))
        flagged = compress(configs, map(attrgetter("topic_sys_flag"), configs))
        return [each.topic_name for each in flagged if each.topic_sys_flag & mask == flags]

    def remove(self, topic: str, broker_names: Collection[str]) -> None:
        names = self.groups_of.pop(topic, ())
        kept = tuple(name for name in names if name not in broker_names)
        if kept:
            self.groups_of[topic] = kept
        for name in set(names).difference(kept):
            self._of_group.get(name, {}).pop(topic, None)
            if name in self._coming:
                self._coming[name].topics.pop(topic, None)

    def remove_group(self, broker_name: str) -> None:
        self._coming.pop(broker_name, None)
        self._leave(broker_name, self._of_group.pop(broker_name, {}))

    def collect(self, broker_name: str, parts: Parts | None) -> None:
        """From now on `put` also adds to `parts`; None: what is put belongs to no parts."""
        if parts is None:
            self._coming.pop(broker_name, None)
        else:
            self._coming[broker_name] = parts

    def keep_collected(self, broker_name: str, parts: Parts) -> None:
        """Removes a group's queues of all topics but those in `parts`, unless another registration
        began since."""
        if self._coming.get(broker_name) is parts:
            del self._coming[broker_name]
            self.keep_only(broker_name, parts.topics)

    def keep_only(self, broker_name: str, topics: dict[str, TopicConfig]) -> None:
        """Removes a group's queues of all topics but these, which `put` has added."""
        before = self._of_group.get(broker_name, {})
        self._of_group[broker_name] = topics
        self._leave(broker_name, before)

    def _leave(self, broker_name: str, topics: dict[str, TopicConfig]) -> None:
        if topics:
            self._gone.append((broker_name, topics))
        if len(topics) <= SMALL:
            self.forget(len(topics))

    def forget(self, count: int) -> bool:
        """Forgets `count` topics of removed groups; returns whether more are left."""
        while self._gone and count > 0:
            broker_name, topics = self._gone[0]
            # One by one: to free the memory of a whole table would also take too long for one turn.
            some = [topics.popitem()[0] for _ in range(min(count, len(topics)))]
            if not topics:
                self._gone.popleft()
            count -= len(some)
            has = self._of_group.get(broker_name, {})  # the group may have registered again
            self._forget([topic for topic in some if topic not in has], broker_name)
        return bool(self._gone)

    def _forget(self, topics: Collection[str], broker_name: str) -> None:
        names_of = list(map(self.groups_of.get, topics, repeat(())))
        less = {
            names: tuple(name for name in names if name != broker_name) for names in set(names_of)
        }
        self.groups_of.update(zip(topics, map(less.__getitem__, names_of), strict=True))
        if () in less.values():
            for topic in [topic for topic in topics if not self.groups_of[topic]]:
                del self.groups_of[topic]

    def set_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        """Changes the permissions of a group's topics; if they are many, `set_perms` does so in
        later turns. Returns how many topics the group has. A topic that is registered again before
        its turn keeps the permissions of that registration."""
        topics = self._of_group.get(broker_name, {})
        self._perms.append(_PermChange(topics, iter(list(topics.values())), change))
        # Alone: changes must be carried out in the order of their requests.
        if len(topics) <= SMALL and len(self._perms) == 1:
            self.set_perms(len(topics) + 1)
        return len(topics)

    def set_perms(self, count: int) -> bool:
        """Changes the permissions of at most `count` topics, in the order of the requests; returns
        whether more are left."""
        while self._perms and count > 0:
            wanted = self._perms[0]
            some = list(islice(wanted.left, count))
            if len(some) < count:
                self._perms.popleft()
            count -= len(some)
            topics, change = wanted.topics, wanted.change
            for config in some:
                topic = config.topic_name
                # Not if the topic was registered again since: the newer permissions stay.
                if topics.get(topic) is config:
                    topics[topic] = replace(config, perm=change(config.perm))
        return bool(self._perms)


@dataclass(frozen=True, slots=True)
class _PermChange:
    """`left`: what `topics` had at the request and is not changed yet."""

    topics: dict[str, TopicConfig]
    left: Iterator[TopicConfig]
    change: Callable[[int], int]


def listed(topics: list[str]) -> Iterator[list[str]]:
    """The list in parts of LISTED_AT_ONCE topics."""
    return (topics[at : at + LISTED_AT_ONCE] for at in range(0, len(topics), LISTED_AT_ONCE))


def _queue_data(broker_name: str, config: TopicConfig) -> QueueData:
    return QueueData(
        broker_name=broker_name,
        perm=config.perm,
        read_queue_nums=config.read_queue_nums,
        topic_sys_flag=config.topic_sys_flag,
        write_queue_nums=config.write_queue_nums,
    )
