"""The confirmed log, for the checkers of features as it grows, and what their clients know."""

import asyncio
from collections.abc import Callable, Sequence

from batonmq.protocol.properties import find_property
from lab.sim.cluster import SimCluster
from lab.sim.hosts import BrokerHost
from lab.sim.records import LogRecord, records


class FeatureLog:
    """`sent`: topic of each message by its name; `acked`: which of them were acknowledged; `got`:
    group and name. Nothing is checked any more after an unclean election that gave something up, or
    once a segment has expired."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.checkers: list[Checker] = []
        self.sent: dict[str, str] = {}
        self.acked: set[str] = set()
        self.got: set[tuple[str, str]] = set()
        self._is_given_up = False
        self.stopping = False  # the faults are over: whatever is begun is ended
        self._at = 0

    def give_up(self, lost: Sequence[LogRecord]) -> None:
        self._is_given_up |= bool(lost)

    @property
    def stands_down(self) -> bool:
        return self._is_given_up or self.cluster.promises.expiry.begin > 0

    def now_s(self) -> float:
        """Of the simulation's own clock."""
        return asyncio.get_running_loop().time()

    def violate(self, what: str) -> None:
        if not self.stands_down:
            self.cluster.violate(what)

    def read(self) -> None:
        """Tells what was confirmed since the last call."""
        promises = self.cluster.promises
        for host in self.cluster.brokers.values():
            promises.confirmed(host)  # some records arrive at no queue
        truth = promises.truth
        if self.stands_down or len(truth) <= self._at:
            return
        for record in records(truth, self._at):
            if record.offset + record.size > len(truth):
                break
            self._at = record.offset + record.size
            name = bytes(record.body).partition(b"|")[0].decode("utf-8", "replace")
            for checker in self.checkers:
                checker.record(record, name)

    def record_at(self, offset: int) -> LogRecord | None:
        """That begins there, if it is confirmed."""
        truth = self.cluster.promises.truth
        return next(records(truth, offset), None) if offset < len(truth) else None

    def epoch_at(self, offset: int) -> int:
        """In which epoch that byte was written."""
        stores = [h.service.store for h in self.cluster.brokers.values() if h.service is not None]
        lists = [store.epochs.entries for store in stores if store.epochs.entries]
        if self.cluster.promises.last_epochs:
            lists.append(self.cluster.promises.last_epochs)
        newest = max(lists, key=lambda entries: entries[-1].epoch, default=())
        return max((e.epoch for e in newest if e.start_offset <= offset), default=0)

    def missing(self, group: str, topic: str) -> list[str]:
        """Acknowledged, and not delivered to that group."""
        return [n for n in self.acked if self.sent[n] == topic and (group, n) not in self.got]

    def not_at_end(self, group: str, is_of: Callable[[str], bool]) -> str:
        """Which queue of such topics the group's offset is not at the end of, at the master."""
        host = self.cluster.master
        if host is None or host.process is None:
            return "no master is open"
        return str(host.process.run(_not_at_end, host, group, is_of))


def _not_at_end(host: BrokerHost, group: str, is_of: Callable[[str], bool]) -> str:
    assert host.service is not None
    offsets = host.service.tables.offsets
    for queue in host.service.store._files.consume_queues.queues():
        if queue.max_offset and is_of(queue.topic):
            at = offsets.query(group, queue.topic, queue.queue_id)
            if at != queue.max_offset:
                return f"{group} is at {at} of {queue.max_offset} in {queue.topic} {queue.queue_id}"
    return ""


class Checker:
    """Of one feature."""

    def __init__(self, log: FeatureLog) -> None:
        self.log = log
        log.checkers.append(self)

    def record(self, record: LogRecord, name: str) -> None:
        """The next record that is confirmed; `name` is what its body begins with."""

    def check(self) -> None:
        """Called all the time."""

    def pending(self) -> str:
        """What is not done yet, empty if everything is."""
        return ""


def text_of(record: LogRecord, name: str) -> str:
    """A property, empty if it is not there."""
    return (find_property(record.properties, name.encode()) or b"").decode()


def number_of(record: LogRecord, name: str) -> int:
    return int(text_of(record, name) or 0)


def some(names: Sequence[str]) -> str:
    return f"{sorted(names)[:5]} ({len(names)})"
