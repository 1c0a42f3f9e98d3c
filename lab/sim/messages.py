"""What clients were promised: every acknowledged message once at its place, and to every group.

A message's body begins with its id; `n` of a key counts the messages of that key, each sent after
the one before was acknowledged.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lab.sim.records import LogRecord

_PADDING = b"." * 2_000


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One message. `key` is empty where no order is promised."""

    name: str
    topic: str
    key: str = ""
    n: int = 0
    life: int = 0  # of its topic: how often that was deleted before

    def body(self, size: int) -> bytes:
        head = f"{self.name}|{self.key}|{self.n}|{self.life}|".encode()
        return head + _PADDING[: max(0, size - len(head))]


def read_body(topic: str, body: bytes) -> SentMessage:
    """Raises ValueError for a body that was never sent."""
    name, key, n, life, _ = body.split(b"|", 4)
    sent = SentMessage(name.decode(), topic, key.decode(), int(n), int(life))
    if sent.body(len(body)) != body:
        raise ValueError(f"G8: {body!r} is delivered")
    return sent


Place = tuple[str, int, int]
"""Topic, queue id, queue offset."""


@dataclass
class DeliveredTo:
    """What one consumer group got. `newest`: per key, the greatest n delivered so far."""

    topics: frozenset[str]
    got: set[str] = field(default_factory=set)
    newest: dict[str, int] = field(default_factory=dict)
    deliveries: int = 0
    passed: set[str] = field(default_factory=set)
    """Those of keys that had expired, and were not delivered, when a later one of their key was."""
    ends: dict[tuple[str, int], int] = field(default_factory=dict)  # behind what it got, by queue
    ahead: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """By queue, [from, to) where it may skip messages: it had got there what an unclean election
    cut, and may continue behind that before it pulls again (docs/ARCHITECTURE.md, Limits)."""

    def got_given_up(self, queue: tuple[str, int], begin: int, end: int) -> None:
        """It has got [`begin`, `end`) of the queue, and that was cut."""
        low, high = self.ahead.get(queue, (begin, end))
        self.ahead[queue] = (min(low, begin), max(high, end))


class Messages:
    """Checks each acknowledgement and each delivery as it comes. `violate` ends the run."""

    def __init__(self, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self.at: dict[Place, str] = {}
        self.acked: dict[str, SentMessage] = {}
        self.groups: dict[str, DeliveredTo] = {}
        self._acked_of_key: dict[str, list[SentMessage]] = {}
        self.lives: dict[str, int] = {}  # topic -> how often its deletion was begun
        self.sends_failed = 0
        self.given_up: set[str] = set()
        self.is_confirmed: Callable[[str], bool] = lambda name: True
        """Whether a master has confirmed the message of that name."""
        self.confirmed_at: Callable[[str], Place | None] = lambda name: None
        """Where the newest of that name stands in what was confirmed."""
        self.is_created: Callable[[str], bool] = lambda topic: True
        self.deleted: Callable[[str], None] = lambda topic: None
        """Called when a deletion of that topic was answered."""
        self.is_unaware: Callable[[str], bool] = lambda topic: False
        """Whether a broker that is cut off may still show what the topic had (R36, R39)."""
        self.is_expired: Callable[[str], bool] = lambda name: False
        self.on_acked: Callable[[], None] = lambda: None

    def note_created(self, topic: str) -> None:
        if not self.is_created(topic):
            self._violate(f"R31: {topic} is made for its clients, and no master has confirmed it")

    def is_gone(self, sent: SentMessage) -> bool:
        """Whether its topic was deleted since: nothing is promised then."""
        return sent.life < self.lives.get(sent.topic, 0)

    def begin_deletion(self, topic: str) -> None:
        """From now on what the topic holds may be gone, and its offsets may begin at 0 again."""
        self.lives[topic] = self.lives.get(topic, 0) + 1
        for place in [place for place in self.at if place[0] == topic]:
            del self.at[place]

    def join(self, group: str, topics: frozenset[str]) -> None:
        self.groups.setdefault(group, DeliveredTo(topics))

    def give_up(self, records: Sequence[LogRecord]) -> None:
        """An unclean election took them out of what is confirmed."""
        for record in records:
            queue, name = (record.topic, record.queue_id), bytes(record.body).partition(b"|")[0]
            for group in self.groups.values():
                end = group.ends.get(queue, 0)
                if end > record.queue_offset:
                    group.got_given_up(queue, record.queue_offset, end)
            self.at.pop((*queue, record.queue_offset), None)
            self.cut_later([name.decode("utf-8", "replace")])  # also of what no group reads yet

    def cut_later(self, names: Iterable[str]) -> None:
        """An answer that these are stored comes from the master of before."""
        self.given_up.update(names)
        for name in names:
            if not self.is_confirmed(name):
                self.acked.pop(name, None)

    def note_acked(self, sent: SentMessage, place: Place) -> None:
        self.on_acked()
        is_confirmed = self.is_confirmed(sent.name)
        if sent.name not in self.given_up:
            if not is_confirmed:
                self._violate(f"G1: {sent.name} is acknowledged, and no master has confirmed it")
            self._stands(sent, place, "acknowledged")
        elif not is_confirmed:
            return  # by the master of before; else it was sent again, and is promised again
        elif (confirmed_at := self.confirmed_at(sent.name)) is not None:
            self._stands(sent, confirmed_at, "confirmed")
        self.acked[sent.name] = sent
        if sent.key:
            self._acked_of_key.setdefault(sent.key, []).append(sent)

    def note_delivered(self, group_name: str, sent: SentMessage, place: Place) -> None:
        group = self.groups[group_name]
        group.deliveries += 1
        queue, end = (place[0], place[1]), place[2] + 1
        group.ends[queue] = max(group.ends.get(queue, 0), end)
        if sent.name in self.given_up:
            group.got.add(sent.name)  # at the old place or, sent again, at a new one
            if not self.is_confirmed(sent.name):  # by the master of before
                group.got_given_up(queue, place[2], end)
            return
        self._stands(sent, place, f"delivered to {group_name}")
        is_old = self.is_gone(sent) and sent.name in self.acked
        if is_old and not self.is_unaware(sent.topic):
            self._violate(f"R39: {group_name} gets {sent.name} of a topic that was deleted")
        if sent.name in group.got:
            return  # at least once is promised: only the first time has an order
        group.got.add(sent.name)
        if sent.key and not self.is_gone(sent):
            self._in_order(group_name, sent, place)

    def _in_order(self, group_name: str, sent: SentMessage, place: Place) -> None:
        """Each of a key first before later ones. What expired may be passed over: a member that
        takes up the queue begins behind it, while one that pulled it before still has it. So may
        what a group's offset was ahead of after an unclean election; another one may take the
        offset back."""
        group = self.groups[group_name]
        newest = group.newest.get(sent.key, 0)
        if sent.n < newest:
            low, high = group.ahead.get(place[:2], (0, 0))
            is_passed = sent.name in group.passed or low <= place[2] < high
            if sent.name in self.acked and not is_passed:
                self._violate(f"order: {group_name} gets {sent.key} {sent.n} first after {newest}")
            return
        group.newest[sent.key] = sent.n
        group.passed.update(
            earlier.name
            for earlier in self._acked_of_key.get(sent.key, ())
            if newest < earlier.n < sent.n and self.is_expired(earlier.name)
        )

    def _stands(self, sent: SentMessage, place: Place, how: str) -> None:
        if self.is_gone(sent):
            return
        known = self.at.setdefault(place, sent.name)
        if known != sent.name:
            self._violate(f"offsets: {sent.name} {how} at {place}, where {known} is")

    def missing(self, group_name: str) -> list[str]:
        """Acknowledged, and not delivered to that group."""
        group = self.groups[group_name]
        skipped = set()
        for (topic, queue_id, offset), name in self.at.items():
            low, high = group.ahead.get((topic, queue_id), (0, 0))
            if low <= offset < high:
                skipped.add(name)
        return [
            name
            for name, sent in self.acked.items()
            if name not in group.got
            and name not in skipped
            and sent.topic in group.topics
            and not self.is_gone(sent)
            and not self.is_expired(name)
        ]
