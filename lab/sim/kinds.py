"""The faults of a life: drawn before it begins, so that any of them can be left out.

Each is over by itself after `for_s`. `pick` and `pick2` in [0, 1) choose its targets among those
that are possible at that time.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lab.sim.cluster import SimCluster
from lab.sim.disk import DiskPlan
from lab.sim.hosts import BrokerHost, ControllerHost, Host

T = TypeVar("T")

#: Kinds and how often each is drawn.
WEIGHTS = {
    "kill broker": 5,
    "kill master": 6,
    "stop broker": 2,
    "kill controller": 2,
    "kill lead": 3,
    "lose power": 3,
    "lose power of controller": 2,
    "lose power of all controllers": 1,
    "pause": 4,
    "cut": 4,
    "cut one way": 3,
    "isolate": 4,
    "slow network": 1,
    "slow link": 2,
    "reset": 4,
    "switch": 4,
    "crash at disk call": 5,
    "crash at callback": 4,
    "slow disk": 2,
    "clock jump": 2,
    "replace disk": 2,
    "fail disk call": 3,
    "short write": 2,
    "full disk": 3,
    "kill client": 3,
    "leave": 3,
}

#: The same, beside those, where segments expire.
EXPIRY = {
    "disk fills up": 5,
    "hours pass": 2,
    "left behind": 3,
}

#: And where all members are stopped and started again.
ROLLING = {"rolling restart": 1}

#: And where an operator elects uncleanly.
UNCLEAN = {"unclean election": 1}

#: And where the disk of one broker wears out.
WEARING = {"rot": 5, "rot while up": 2, "failing disk": 3, "failing cut": 3, "isolate": 2}

#: And where faults come together.
STRAINING = {"strained switch": 3, "half open": 3, "stranger": 3}

#: And what tears the end of a transaction, before the others begin.
TEARING = {"no room for a commit": 1, "end before the op": 1}

#: And where a slave learns late what is confirmed, while a topic is deleted and made again.
LAGGING = {"late confirm": 1}

#: And what ends a master that has just answered a recall, before the others begin.
RECALLING = {"end after a recall": 1}

#: And where clocks of brokers leap while segments expire.
LEAPING = {"clock leap": 1}

#: And where operators and strangers disturb servers.
DISTURBING = {
    "clean": 2,
    "reset session": 3,
    "announced frames": 2,
    "foreign switch": 2,
    "bad names": 2,
    "stranger master": 1,
}

#: And which partial faults last, before the others begin.
LASTING = {
    "lasting one way": 4,
    "lasting link": 3,
    "lasting zone": 2,
    "lasting slow link": 1,
    "lasting slow disk": 1,
    "lasting full disk": 2,
    "lasting pause": 1,
}

#: And which disks of another time come back, before the others begin.
RETURNING = {
    "foreign volume": 2,
    "lost controllers": 1,
    "restored controllers": 1,
    "change of mode": 1,
}

#: And where segments expire: once the group has none of the bytes that the disk has.
RETURNING_LATE = {"foreign volume": 1}

#: And where a name server's answers do not reach the master.
UNANSWERED = {"unanswered master": 1}

#: What plain lives never meet.
NEVER_PLAIN = {
    *WEARING,
    *STRAINING,
    *TEARING,
    *RECALLING,
    *LAGGING,
    *LEAPING,
    *LASTING,
    *UNANSWERED,
    *RETURNING,
    *DISTURBING,
} - {*WEIGHTS}

NEARLY_FULL = 0.87
"""So much of a disk is used that any segment may expire, and writes are taken."""
_LOOK_S = 0.2

FAILING = ("pwrite", "fdatasync", "open", "pread", "read_bytes", "fsync", "link", "replace")
"""Calls to a disk that fail."""


@dataclass(frozen=True)
class PlannedFault:
    at_s: float
    kind: str
    pick: float
    pick2: float
    for_s: float

    def __str__(self) -> str:
        return (
            f"{self.at_s:.3f} s {self.kind} ({self.pick:.2f}, {self.pick2:.2f}, {self.for_s:.2f} s)"
        )


def draw_faults(
    rng: random.Random, seconds: float, kinds_of: Mapping[str, int]
) -> tuple[PlannedFault, ...]:
    """In the order of their times."""
    kinds, weights = tuple(kinds_of), tuple(kinds_of.values())
    # Few kinds in some lives: then the same two meet more often.
    allowed = rng.sample(kinds, rng.randint(min(5, len(kinds)), len(kinds)))
    weights = tuple(w if k in allowed else 0 for k, w in zip(kinds, weights, strict=True))
    # What comes beside the usual faults comes more rarely.
    pace_s = rng.choice((0.1, 0.25, 0.6) if kinds_of is WEIGHTS else (0.6, 1.5))
    faults: list[PlannedFault] = []
    at_s = 0.0
    while True:
        at_s += rng.expovariate(1 / pace_s)
        if at_s >= seconds:
            return tuple(faults)
        for_s = rng.choice((0.02, 0.1, 0.3, 0.7, 1.0, 2.0)) * rng.uniform(0.5, 1.5)
        (kind,) = rng.choices(kinds, weights)
        faults.append(PlannedFault(at_s, kind, rng.random(), rng.random(), for_s))


def draw_first(rng: random.Random, at_s: float, kinds_of: Mapping[str, int]) -> PlannedFault:
    """One that comes alone, before the others."""
    (kind,) = rng.choices(tuple(kinds_of), tuple(kinds_of.values()))
    return PlannedFault(at_s, kind, rng.random(), rng.random(), rng.uniform(4.0, 7.0))


class Kinds:
    """A method for each kind: what it did, None if it could not meet anybody."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.over = False
        self._rolling = False

    @staticmethod
    def _of(hosts: Sequence[T], pick: float) -> T | None:
        return hosts[int(pick * len(hosts))] if hosts else None

    def _broker(self, fault: PlannedFault) -> BrokerHost:
        """The one that it meets, whether it runs or not."""
        brokers = list(self.cluster.brokers.values())
        return brokers[int(fault.pick * len(brokers))]

    def _controller(self, fault: PlannedFault) -> ControllerHost:
        """As `_broker`."""
        controllers = list(self.cluster.controllers.values())
        return controllers[int(fault.pick * len(controllers))]

    def _later(self, fault: PlannedFault, undo: Callable[..., object], *args: object) -> None:
        self.cluster.later(fault.for_s, undo, *args)

    def _block(self, one: Host, other: Host, for_s: float) -> None:
        self.cluster.network.block(one.address, other.address)
        pair = frozenset((one.address, other.address))
        self.cluster.later(for_s, self.cluster.network.heal_link, pair)

    def _isolate(self, host: Host, for_s: float) -> None:
        """From all servers. Clients still reach it."""
        for other in self.cluster.hosts:
            if other is not host:
                self._block(host, other, for_s)

    def _slow(self, one: Host, other: Host, slow_s: float, for_s: float) -> None:
        pair, links = frozenset((one.address, other.address)), self.cluster.network.slow_links
        links[pair] = slow_s
        self.cluster.later(for_s, links.pop, pair, None)

    def _is_member(self, host: BrokerHost) -> bool:
        """Whether this very process is recorded in the set."""
        group, manager = self.cluster.promises.group, host.manager
        if group is None or manager is None or manager.broker_id not in group.sync_state_set:
            return False
        record = group.replica(manager.broker_id)
        return record is not None and record.incarnation == manager.incarnation

    def is_held_elsewhere(self, host: BrokerHost) -> bool:
        """Whether others have all that `host` may lose: one of them is in the set, and each holds
        what it acked."""
        others = [other for other in self.cluster.brokers.values() if other is not host]
        return any(map(self._is_member, others)) and all(map(self._is_whole, others))

    def _is_whole(self, host: BrokerHost) -> bool:
        """Whether it holds what it acked: its disk lost nothing, or it is a member since."""
        if self.cluster.promises.rot.of(host):
            return False
        return host.boot == 1 or self._is_member(host)

    def _once_expired(
        self, host: BrokerHost, end: int, until_s: float, then: Callable[[], None]
    ) -> None:
        """Once the log of the group begins behind `end`, unless `host` is up before. Disks are
        nearly full until then."""
        if host.is_up:
            return
        if self.cluster.promises.expiry.begin > end or self.cluster.now_s > until_s:
            then()
            return
        for other in self.cluster.brokers.values():
            other.disk.plan.used = NEARLY_FULL
            self.cluster.later(_LOOK_S, setattr, other.disk.plan, "used", DiskPlan().used)
        self.cluster.later(_LOOK_S, self._once_expired, host, end, until_s, then)

    def _up(self) -> list[Host]:
        return [host for host in self.cluster.hosts if host.is_up]

    def _slaves(self) -> list[BrokerHost]:
        return [h for h in self.cluster.brokers.values() if h.service and not h.is_open]

    def _fail_call(self, fault: PlannedFault, host: Host | None) -> str | None:
        """EIO, once, at one of the next calls of a kind to its disk."""
        if host is None or host.disk.plan.fail_call is not None:
            return None
        name = FAILING[int(fault.pick2 * len(FAILING))]
        call = 1 + int(fault.pick2 * 997) % 7
        host.disk.plan.fail_call = (name, call)
        self._later(fault, setattr, host.disk.plan, "fail_call", None)
        return f"{host.name} at the {call}th {name} from now"

    def _down(self, fault: PlannedFault, host: Host | None, how: Callable[[], None]) -> str | None:
        if host is None:
            return None
        how()
        self._later(fault, host.start)
        return f"{host.name} for {fault.for_s:.2f} s"
