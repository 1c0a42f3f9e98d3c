"""One life of a cluster: it starts, works while faults come, and must be whole in the end.

`run(seed)` is a pure function of its arguments.
"""

import contextlib
import gc
import random
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from batonmq.protocol.layout import FILLER_SIZE
from batonmq.store.message_store import MessageStore
from lab.sim.ambient import processor_seconds
from lab.sim.clients import Client, Recreator, Sender, SimConsumer, Topics
from lab.sim.cluster import SimCluster, cluster_of
from lab.sim.deletions import Unaware
from lab.sim.disk import DiskPlan
from lab.sim.earlier_cluster import old_volumes
from lab.sim.faults import Faults
from lab.sim.features.features import Features
from lab.sim.hosts import BrokerHost
from lab.sim.kinds import (
    DISTURBING,
    EXPIRY,
    LAGGING,
    LASTING,
    LEAPING,
    NEARLY_FULL,
    RECALLING,
    RETURNING,
    RETURNING_LATE,
    ROLLING,
    STRAINING,
    TEARING,
    UNANSWERED,
    UNCLEAN,
    WEARING,
    WEIGHTS,
    PlannedFault,
    draw_faults,
    draw_first,
)
from lab.sim.messages import Messages, Place
from lab.sim.records import LogRecord, records
from lab.sim.service import AMONG_OTHERS_S, Service, ShownMasters
from lab.sim.settings import (
    Settings,
    draw_settings,
    with_features,
    with_strains,
    with_variants,
    without_features,
)
from lab.sim.world import Tell, Violation

Table = dict[tuple[str, int], tuple[int, list[tuple[int, int, int, int]]]]
"""Per topic and queue its next offset, and the units of what has not expired: queue offset, offset
in the log, size, tags code."""

TOPICS = {"TopicA": 3, "TopicB": 1}
RARE = {"TopicR": 2}
"""Where segments expire: all that its queues ever had may be gone before the next message comes."""
_START_S = 10.0
_WHOLE_S = 25.0
_DELIVERED_S = 95.0
"""A consumer whose end no living member saw keeps its queues for 40 s (ConsumerSightings), its
locks for 60 s, counted again in each election."""
_WHOLE_SET_S = 1.5
"""After the first ack. Until then all replicas have joined, and what lasts finds a whole group."""
_TORN_S = 2.5
_UNANSWERED_S = 12.0
"""A registration is not answered for 3 s, and then the name server has lost the master for longer
than it may."""
_OPERATOR_S = 8.0
"""A group may wait for a member that lost bytes with its power. Then an operator elects."""


@dataclass
class Statistics:
    """`seconds` simulated in `took_s` of a processor. `expired`: segments, at all replicas.
    `digest`: the same in all runs of a life."""

    seconds: float = 0.0
    took_s: float = 0.0
    callbacks: int = 0
    acked: int = 0
    delivered: int = 0
    sends_failed: int = 0
    elections: int = 0
    commits: int = 0
    expired: int = 0
    digest: str = ""
    faults: dict[str, int] = field(default_factory=dict)


@dataclass
class LifeOutcome:
    violation: str | None
    statistics: Statistics
    error: str = ""  # the trace of what was raised


@dataclass(frozen=True)
class LifePlan:
    """What a seed means: the set-up and the faults."""

    seed: int
    settings: Settings
    faults: tuple[PlannedFault, ...]
    seconds: float


class First(NamedTuple):
    """Faults that come alone, before the others. `numbers` names their random numbers; a life has
    one if `is_drawn(settings, number in [0, 1))`, and then the `setting` is true."""

    numbers: str
    setting: str
    is_drawn: Callable[[Settings, float], bool]
    kinds: Callable[[Settings], Mapping[str, int]]
    for_s: float | None = None


def _loses_bytes(s: Settings) -> bool:
    """Whether bytes of a log are lost otherwise than by its expiry."""
    return s.unclean or s.wears


_FIRSTS = (
    First(
        "torn",
        "tears",
        lambda s, number: number < 0.2 and s.transactions and not _loses_bytes(s),
        lambda _: TEARING,
        _TORN_S,
    ),
    First("lasting", "lasts", lambda _, number: number < 0.2, lambda _: LASTING),
    First(
        "recalled",
        "recalls",
        lambda s, number: (
            number < 0.15 and s.delays and not (_loses_bytes(s) or s.tears or s.lasts)
        ),
        lambda _: RECALLING,
    ),
    First(
        "disks",
        "returns",
        lambda s, number: (
            number < (0.12 if s.expires else 0.25) and not (_loses_bytes(s) or s.lasts or s.recalls)
        ),
        lambda s: RETURNING_LATE if s.expires else RETURNING,
    ),
    First(
        "unanswered",
        "unanswered",
        lambda s, number: number < 0.05 and not (s.tears or s.lasts or s.recalls or s.returns),
        lambda _: UNANSWERED,
        _UNANSWERED_S,
    ),
)
_DISTURBS, _PROVES, _LAGS = 0.15, 0.5, 0.3


def plan_of(seed: int, *, plain: bool = False) -> LifePlan:
    """`plain`: without the broker's features that it may have, and with disks that do not wear."""
    rng = random.Random(f"life {seed}")
    settings = draw_settings(rng)
    seconds = rng.choice((2.0, 4.0, 6.0))
    faults = draw_faults(rng, seconds, WEIGHTS)
    # Each aspect draws from numbers of its own: a new one leaves the others as they were.
    of_variants = random.Random(f"variants {seed}")
    settings = with_variants(settings, of_variants)
    if settings.expires:
        faults += draw_faults(of_variants, seconds, EXPIRY)
    if settings.rolls:
        faults += draw_faults(of_variants, seconds, ROLLING)
    if settings.unclean:
        seconds = max(seconds, 4.0)
        faults += draw_faults(of_variants, seconds - 2.0, UNCLEAN)
    if not plain:
        settings = with_features(settings, random.Random(f"features {seed}"))
        of_strains = random.Random(f"strains {seed}")
        settings = with_strains(settings, of_strains)
        faults += _strains(settings, of_strains, seconds)
        of_disturbance = random.Random(f"disturbance {seed}")
        if of_disturbance.random() < _DISTURBS and not _loses_bytes(settings):
            faults += draw_faults(of_disturbance, seconds, DISTURBING)
            # Drawn last: the faults of a seed are the same with and without it.
            proves = of_disturbance.random() < _PROVES
            settings = replace(settings, disturbs=True, proves=proves)
        of_lags = random.Random(f"lags {seed}")
        if of_lags.random() < _LAGS and settings.recreates:
            settings = replace(settings, lags=True)
            faults += draw_faults(of_lags, seconds, LAGGING)
        for one in _FIRSTS:
            of_first = random.Random(f"{one.numbers} {seed}")
            if one.is_drawn(settings, of_first.random()):
                settings = replace(settings, **{one.setting: True})
                first = draw_first(of_first, _WHOLE_SET_S, one.kinds(settings))
                first = replace(first, for_s=one.for_s or first.for_s)
                if first.kind == "change of mode":  # features are watched under controllers only
                    settings = without_features(settings)
                faults, seconds = _after(first, faults, seconds)
    return LifePlan(seed, settings, tuple(sorted(faults, key=lambda fault: fault.at_s)), seconds)


def _after(
    first: PlannedFault, faults: Iterable[PlannedFault], seconds: float
) -> tuple[tuple[PlannedFault, ...], float]:
    """`faults`, within `seconds`, once `first` is over."""
    over_s = first.at_s + first.for_s
    later = (replace(fault, at_s=fault.at_s + over_s) for fault in faults)
    return (first, *later), seconds + over_s


def _strains(settings: Settings, rng: random.Random, seconds: float) -> tuple[PlannedFault, ...]:
    faults: tuple[PlannedFault, ...] = ()
    if settings.wears:
        faults += draw_faults(rng, seconds, WEARING)
    if settings.strains:
        faults += draw_faults(rng, seconds, STRAINING)
    if settings.expires:
        faults += draw_faults(rng, seconds, LEAPING)
    return faults


def run(
    seed: int, *, plain: bool = False, tell: Tell | None = None, logs: int | None = None
) -> LifeOutcome:
    return run_plan(plan_of(seed, plain=plain), tell=tell, logs=logs)


def run_numbered(seed: int, *, plain: bool = False) -> tuple[int, LifeOutcome]:
    """For a pool of processes. This one ends after it: its garbage is not collected."""
    gc.disable()
    return seed, run(seed, plain=plain)


def run_plan(plan: LifePlan, *, tell: Tell | None = None, logs: int | None = None) -> LifeOutcome:
    """Lives it. A violation is whatever promise breaks or code raises."""
    began = processor_seconds()
    statistics = Statistics()
    violation, error = None, ""
    with (
        _old_volumes(plan) as volumes,
        cluster_of(plan.seed, plan.settings, tell=tell, logs=logs) as cluster,
    ):
        cluster.old_volumes = volumes
        life = Life(cluster, plan)
        try:
            life.begin()
            life.suffer()
            life.become_whole()
        except Exception as raised:
            kind = "" if isinstance(raised, Violation) else f"{type(raised).__name__}: "
            violation = kind + (str(raised) or repr(raised))
            error = "".join(traceback.format_exception(raised))
        life.count(statistics)
    statistics.took_s = processor_seconds() - began
    return LifeOutcome(violation, statistics, error)


@contextlib.contextmanager
def _old_volumes(plan: LifePlan) -> Iterator[Sequence[Path]]:
    if any(fault.kind == "foreign volume" for fault in plan.faults):
        with old_volumes(plan.seed, plan.settings, TOPICS) as volumes:
            yield volumes
    else:
        yield ()


class Life:
    def __init__(self, cluster: SimCluster, plan: LifePlan) -> None:
        self.cluster = cluster
        self.plan = plan
        self.messages = Messages(cluster.violate)
        self.messages.is_confirmed = cluster.promises.is_confirmed
        self.messages.confirmed_at = cluster.promises.confirmed_at
        self.messages.is_created = cluster.promises.is_created
        self.messages.is_expired = cluster.promises.is_expired
        self._unaware = Unaware(cluster, cluster.brokers.values())
        self._deleted: dict[str, tuple[int, float]] = {}
        cluster.checks.append(self._unaware.check)
        self.messages.deleted = self._note_deleted
        self.messages.is_unaware = self._is_unaware
        cluster.promises.on_given_up = self._give_up
        cluster.promises.on_cut_later = self.messages.cut_later
        rare = RARE if plan.settings.expires else {}
        topics = TOPICS | rare
        self._topics = Topics(cluster, self.messages, 9, topics)
        has_features = plan.settings.has_features
        self._senders = [
            Sender(cluster, self.messages, n, topics, tuple(rare))
            for n in ((1,) if has_features else (1, 2))
        ]
        self._readers = [
            SimConsumer(cluster, self.messages, n, "GroupA", tuple(topics)) for n in (3, 4)
        ]
        of_recreated = SimConsumer(cluster, self.messages, 7, Recreator.GROUP, (Recreator.TOPIC,))
        self._recreator = Recreator(cluster, self.messages, 6, of_recreated)
        self._late = SimConsumer(cluster, self.messages, 5, "GroupB", ("TopicA",))
        clients: list[Client] = [*self._senders, *self._readers]
        if plan.settings.recreates:
            clients.append(self._recreator)
        self._features = Features(cluster, self.messages) if has_features else None
        self._clients, killable = clients, list(clients)
        if self._features is not None:
            self._clients += self._features.clients
            killable += self._features.killable
            cluster.checks.append(self._features.check)
        service = Service(cluster)
        self.messages.on_acked = service.acked
        cluster.checks.append(service.check)
        cluster.checks.append(ShownMasters(cluster, AMONG_OTHERS_S).check)
        self.faults = Faults(cluster, killable, service)

    def _note_deleted(self, topic: str) -> None:
        self._deleted[topic] = (len(self.cluster.promises.truth), self.cluster.now_s)

    def _is_unaware(self, topic: str) -> bool:
        return topic in self._deleted and self._unaware.of(*self._deleted[topic])

    def _give_up(self, lost: Sequence[LogRecord]) -> None:
        self.messages.give_up(lost)
        if self._features is not None:
            self._features.log.give_up(lost)

    def begin(self) -> None:
        """Until the topics are there and a message was acknowledged."""
        cluster = self.cluster
        for host in cluster.hosts:
            host.rate = 1 + cluster.rng.uniform(-1, 1) * self.plan.settings.drift
            host.start()
        self._topics.start()
        self.cluster.until(lambda: self._topics.done, _START_S, "the topics are not created")
        if self._features is not None:
            setup = self._features.setup
            setup.start()
            self.cluster.until(lambda: setup.done, _START_S, "the features' topics are not created")
        for client in self._clients:
            client.start()
        self.cluster.until(lambda: bool(self.messages.acked), _START_S, "nothing is acknowledged")

    def suffer(self) -> None:
        self.faults.schedule(self.plan.faults)
        self.cluster.run(self.plan.seconds)

    def become_whole(self) -> None:
        """The faults are over: the group becomes whole and level, consumers get everything."""
        cluster = self.cluster
        cluster.tell("life", "the faults are over")
        self.faults.end()
        lineage = cluster.promises.lineage
        lineage.look()
        for client in (*self._clients, self._late):
            client.start()
        acked = len(self.messages.acked)
        if cluster.promises.rot.met or (
            not cluster.settings.acks_are_flushed
            and any(host.boot > 1 for host in cluster.brokers.values())
        ):
            cluster.later(_OPERATOR_S, self.faults.elect_longest)
        try:
            self.cluster.until(
                lambda: len(self.messages.acked) > acked + 3, _WHOLE_S, "no message is acknowledged"
            )
        except Violation:
            if self.waits_for_positions():
                return
            raise
        self.cluster.until(lambda: not lineage.unnamed(), _WHOLE_S, lineage.unnamed)
        self._recreator.stopping = True
        for sender in self._senders:
            sender.stopping = True
        if self._features is not None:
            self._features.stop()
        self.cluster.until(
            lambda: self._recreator.process is None, _WHOLE_S, "a topic is not recreated"
        )
        self.cluster.until(
            lambda: not self.unlevel() or self.waits_for_expiry(), _WHOLE_S, self.unlevel
        )
        if self.waits_for_expiry():
            self.cluster.until(self._is_delivered, _DELIVERED_S, self.undelivered)
            self.cluster.until(lambda: not self.unlevel(by_set=False), _WHOLE_S, self.unlevel)
            self.check_queues()
            self.let_expire()
            self.cluster.until(lambda: not self.unlevel(), _WHOLE_S, self.unlevel)
        self.cluster.until(self._is_delivered, _DELIVERED_S, self.undelivered)
        self.cluster.until(lambda: not self.unlevel(), _WHOLE_S, self.unlevel)  # members still pop
        self.check_queues()

    def unlevel(self, *, by_set: bool = True) -> str:
        """Why the group is not whole and level, empty if it is. `by_set`: all are in the set."""
        cluster, promises = self.cluster, self.cluster.promises
        group = promises.group
        hosts = list(cluster.brokers.values())
        services = [host.service for host in hosts if host.service is not None]
        for host in cluster.hosts:
            if not host.is_up:
                return f"{host.name} does not run: {host.last_failure}"
        members = len(group.sync_state_set) if group is not None and by_set else len(hosts)
        if group is None or len(services) != len(hosts) or members != len(hosts):
            return f"the set is {group.sync_state_set if group else None}"
        masters = [host for host in hosts if host.is_open]
        if len(masters) != 1:
            return f"masters are {[host.name for host in masters]}"
        stores = [service.store for service in services]
        ends = sorted({store.max_phy_offset for store in stores})
        confirms = sorted({store.confirm_offset for store in stores})
        if len(ends) != 1 or confirms != ends:
            return f"logs end at {ends}, confirmed at {confirms}"
        if len({store.epochs.entries[-1].epoch for store in stores}) != 1:
            return f"epochs are {[store.epochs.entries for store in stores]}"
        return ""

    def waits_for_positions(self) -> bool:
        """Whether nothing is confirmed for lack of members, and so no replica whose log was begun
        behind learns its positions and joins (R38): an operator lowers minInSyncReplicas then."""
        group = self.cluster.promises.group
        if group is None or len(group.sync_state_set) >= self.plan.settings.min_in_sync:
            return False
        services = [host.service for host in self.cluster.brokers.values()]
        outside = [
            service
            for service in services
            if service is not None and service.replication.broker_id() not in group.sync_state_set
        ]
        return len(services) == len(outside) + len(group.sync_state_set) and all(
            service.store.positions.why_not_whole for service in outside
        )

    def waits_for_expiry(self) -> bool:
        """Whether all that the set lacks are replicas that R27 keeps out: their logs were begun
        where another master's began, and the master of now has older segments."""
        group, expiry = self.cluster.promises.group, self.cluster.promises.expiry
        if group is None:
            return False
        begins: dict[int, int] = {}
        outside: list[int] = []
        for host in self.cluster.brokers.values():
            service, manager = host.service, host.manager
            if service is None or manager is None:
                return False
            begins[manager.broker_id] = service.store.min_phy_offset
            if manager.broker_id not in group.sync_state_set:
                if not expiry.is_begun_behind(host):
                    return False
                outside.append(manager.broker_id)
        master = begins.get(group.master_broker_id or 0)
        return master is not None and bool(outside) and all(begins[n] > master for n in outside)

    def let_expire(self) -> None:
        """Everything is delivered and checked: disks fill up until the master's log begins there,
        too. Time alone lets nothing expire where there are no writes (`LogTime`)."""
        cluster = self.cluster
        cluster.tell("life", "disks fill up: a log begins behind the master's")
        for host in cluster.brokers.values():
            host.disk.plan.used = NEARLY_FULL
        self.cluster.until(lambda: not self.waits_for_expiry(), _WHOLE_S, self.unlevel)
        for host in cluster.brokers.values():
            host.disk.plan.used = DiskPlan().used

    def _is_delivered(self) -> bool:
        """A reader that was leaving when the faults ended comes back, too."""
        for client in (*self._clients, self._late):
            if isinstance(client, SimConsumer):
                client.start()
        return not self.undelivered()

    def undelivered(self) -> str:
        missing = {name: self.messages.missing(name) for name in sorted(self.messages.groups)}
        texts = [f"{name} lacks {m[:5]} ({len(m)})" for name, m in missing.items() if m]
        if not texts and self._features is not None:
            return self._features.pending()
        return "; ".join(texts)

    def check_queues(self) -> None:
        """All replicas: equal logs; queues dense, equal, and as clients were answered."""
        promises = self.cluster.promises
        expired = {
            (record.topic, record.queue_id, record.queue_offset)
            for record in records(promises.truth, 0, promises.expiry.begin)
        }
        tables: list[Table] = []
        for host in self.cluster.brokers.values():
            assert host.process is not None
            tables.append(host.process.run(self._check_replica, host, expired))
        if any(table != tables[0] for table in tables[1:]):
            self.cluster.violate(f"offsets: queues differ: {_difference(tables)}")
        self.cluster.check()

    def _check_replica(self, host: BrokerHost, expired: Collection[Place]) -> Table:
        """Runs in its process. The units of its queues."""
        violate, truth = self.cluster.violate, self.cluster.promises.truth
        assert host.service is not None
        store = host.service.store
        begin, gone = store.min_phy_offset, self.cluster.promises.expiry.begin
        self.cluster.promises.expiry.check_begin(host)
        if self.cluster.promises.rot.read(host, begin, len(truth)) != truth[begin:]:
            violate(f"G3: {host.incarnation} holds other bytes than were confirmed")
        table: Table = {}
        for queue in store._files.consume_queues.queues():
            if not queue.max_offset:
                continue
            units = list(queue.iter_units())
            first = units[0][0] if units else 0
            if [unit[0] for unit in units] != list(range(first, first + len(units))):
                violate(f"offsets: {queue.topic} {queue.queue_id} at {host.name} has gaps")
            kept = [unit for unit in units if unit[1] >= gone and unit[2] != FILLER_SIZE]
            behind = [unit[0] for unit in units if kept and unit[0] > kept[0][0]]
            if len(behind) + 1 > len(kept) > 0:
                violate(f"offsets: {queue.topic} {queue.queue_id} at {host.name} has filler within")
            table[queue.topic, queue.queue_id] = (queue.max_offset, kept)
        self._check_places(store, self.cluster.promises.rot.of(host), expired)
        return table

    def _check_places(
        self, store: MessageStore, rotten: Collection[int], expired: Collection[Place]
    ) -> None:
        """What was acknowledged or delivered is where clients were answered. `rotten` are bytes of
        the log that flipped at rest. Of a message that was sent twice one copy may be `expired`."""
        for place, name in self.messages.at.items():
            topic, queue_id, offset = place
            found = store._files.consume_queues.find(topic, queue_id)
            unit = found.unit_at(offset) if found is not None else None
            if unit is None:
                is_there = found is None or offset >= found.min_offset
                if is_there and place not in expired:
                    self.cluster.violate(f"offsets: {name} is not at {topic} {queue_id} {offset}")
                continue
            if unit[1] == FILLER_SIZE and place not in expired:
                self.cluster.violate(f"offsets: filler is at {topic} {queue_id} {offset} of {name}")
            end = unit[0] + unit[1]
            if unit[0] < store.min_phy_offset or any(unit[0] <= at < end for at in rotten):
                continue
            record = store.queries.look_message_by_offset(unit[0])
            if record is None or f"{name}|".encode() not in bytes(record):
                self.cluster.violate(f"offsets: {topic} {queue_id} {offset} is not {name}")

    def count(self, statistics: Statistics) -> None:
        cluster = self.cluster
        statistics.seconds = cluster.now_s
        statistics.callbacks = cluster.loop.callbacks
        statistics.acked = len(self.messages.acked)
        statistics.delivered = sum(group.deliveries for group in self.messages.groups.values())
        statistics.sends_failed = self.messages.sends_failed
        statistics.elections = len(cluster.promises.masters)
        statistics.commits = cluster.promises.commits
        statistics.expired = cluster.promises.expiry.taken
        statistics.digest = f"{cluster.loop.digest:08x}{cluster.disks.digest:08x}"
        statistics.faults = dict(self.faults.counts)


def _difference(tables: Sequence[Table]) -> str:
    for key in sorted({key for table in tables for key in table}):
        ends, units = zip(*(table.get(key, (0, [])) for table in tables), strict=True)
        if any(table.get(key) != tables[0].get(key) for table in tables):
            return f"{key} ends at {ends}, {[(len(each), each[:1]) for each in units]}"
    return ""
