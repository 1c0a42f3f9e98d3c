"""Messages that a consumer fails come again with a higher count, and end in the dead letters.

What is checked is the log. Each record that a send-back makes has the count of the message that was
sent back, plus one, and there are at most as many of them as send-backs of that message with that
count. So a count falls only where a consumer sends the earlier message back again: it got it again
because its group's offset of the last second was lost in a failover, or with a member that was
killed (R31), or because the answer to its send-back was lost. A client that could not send a
message back counts by itself. A message becomes a dead letter at the last count only, and no
message holds up the offset of its queue.
"""

from collections import Counter

from batonmq.protocol.properties import REAL_TOPIC
from batonmq.protocol.topic_name import SCHEDULE_TOPIC, dlq_topic, retry_topic
from lab.sim.features.log import Checker, FeatureLog, some, text_of
from lab.sim.records import LogRecord

TOPIC = "TopicF"
MAX = 2
"""A message is tried so often after the first time."""
Tried = tuple[str, int]
"""A message and its count."""


class Retries(Checker):
    def __init__(self, log: FeatureLog, group: str) -> None:
        super().__init__(log)
        self._group = group
        self._sent_back: Counter[Tried] = Counter()
        self._answered: Counter[Tried] = Counter()
        self._made: Counter[Tried] = Counter()
        self._dead: set[str] = set()
        self.consumed: set[str] = set()

    def sends_back(self, phy_offset: int) -> Tried | None:
        """A consumer sends it back."""
        self.log.read()
        record = self.log.record_at(phy_offset)
        if record is None:
            self.log.violate(f"G4: {self._group} gives back what is not confirmed, {phy_offset}")
            return None
        name = bytes(record.body).partition(b"|")[0].decode()
        self._sent_back[name, record.reconsumed] += 1
        return name, record.reconsumed

    def sent_back(self, tried: Tried) -> None:
        """The send-back was answered with success: the consumer moves its offset."""
        self.log.read()
        name, count = tried
        self._answered[tried] += 1
        if self._answered[tried] > self._made[name, count + 1]:
            self.log.violate(f"R30: {name} is taken back with count {count}, and not in the log")

    def record(self, record: LogRecord, name: str) -> None:
        is_dead = record.topic == dlq_topic(self._group)
        waits_for = text_of(record, REAL_TOPIC) if record.topic == SCHEDULE_TOPIC else ""
        if not is_dead and waits_for != retry_topic(self._group):
            return
        count = record.reconsumed
        self._made[name, count] += 1
        if self._made[name, count] > self._sent_back[name, count - 1]:
            self.log.violate(
                f"retries: {name} comes with count {count}, and was given back with {count - 1}"
                f" {self._sent_back[name, count - 1]} times only"
            )
        if is_dead != (count > MAX):
            self.log.violate(f"retries: {name} has count {count}, a dead letter: {is_dead}")
        if is_dead:
            self._dead.add(name)

    def pending(self) -> str:
        done = self.consumed | self._dead
        missing = [n for n in self.log.acked if self.log.sent[n] == TOPIC and n not in done]
        if missing:
            return f"{self._group} has neither consumed nor given up {some(missing)}"
        return self.log.not_at_end(
            self._group, lambda topic: topic in (TOPIC, retry_topic(self._group))
        )
