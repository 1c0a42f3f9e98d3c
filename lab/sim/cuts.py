"""`python -m lab.sim cuts`: named lives with one lasting fault each, and the table of what they
cost.

Six servers, each with a role when the fault begins: the leading controller L, its followers F1 and
F2, the master M, its slaves S1 and S2. In a life one thing breaks for good: a link between two of
them, both ways or one; the links between two of three zones, each with a controller and a broker;
or one disk, link or process is slow, full or hangs. A while later the master is killed, or no
server hears it any more. All the time the group must keep acknowledging (`lab.sim.service`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.sim.clients import Sender, Topics
from lab.sim.cluster import SimCluster, cluster_of
from lab.sim.hosts import Host
from lab.sim.messages import Messages
from lab.sim.service import BOUNDS_S, Service, ShownMasters
from lab.sim.settings import Settings
from lab.sim.world import Tell, Violation

ROLES = ("L", "F1", "F2", "M", "S1", "S2")
_ZONES = ((("L", "M"), ("F1", "S1"), ("F2", "S2")), (("L", "S1"), ("F1", "M"), ("F2", "S2")))
_TOPICS = {"TopicA": 3}
_START_S = 10.0
_SETTLED_S = 10.0
_RUNS_S = 0.5
_LASTS_S = 3.0
_STRAGGLES_S = 1.0
_SLOW_DISK_S = 1.0
_SLOW_LINK_S = 0.25


@dataclass(frozen=True)
class Cut:
    """It ends earlier if a group that is not served breaks its bound."""

    name: str
    kind: str
    """A key of BOUNDS_S."""
    then: str
    """What becomes of the master, a key of BOUNDS_S too."""
    ways: tuple[tuple[str, str], ...] = ()
    """Pairs of roles: bytes from the first to the second are lost, or slow."""
    at: str = ""
    """The role that is hit, where it is one host."""
    lasts_s: float = _LASTS_S


@dataclass(frozen=True)
class Gaps:
    """The longest gaps between acknowledgements in seconds: of the fault alone, and from the
    master's end on. `violation`: which promise broke, empty if none."""

    alone_s: float
    after_s: float
    violation: str = ""


def all_cuts() -> Iterator[Cut]:
    """45 faults of one link, 18 of the links between two zones; then of one zone, or one host."""
    for one, other in itertools.combinations(ROLES, 2):
        yield Cut(f"link {one}-{other}, kill", "link", "kill", ((one, other), (other, one)))
    for one, other in itertools.permutations(ROLES, 2):
        yield Cut(f"one way {one}>{other}, silence", "one way", "silence", ((one, other),))
    for zones in _ZONES:
        for here, there in itertools.permutations(zones, 2):
            lost = tuple(itertools.product(here, there))
            yield Cut(f"zone {'+'.join(here)}>{'+'.join(there)}, kill", "zone", "kill", lost)
        for here, there in itertools.combinations(zones, 2):
            both = (*itertools.product(here, there), *itertools.product(there, here))
            yield Cut(f"zone {'+'.join(here)}-{'+'.join(there)}, kill", "zone", "kill", both)
    for inside in (("L", "M"), ("L", "S1"), ("F1", "M"), ("F1", "S1")):
        out = tuple(itertools.product(inside, [role for role in ROLES if role not in inside]))
        off = (*out, *((there, here) for here, there in out))
        yield Cut(f"zone {'+'.join(inside)} off, kill", "zone", "kill", off)
    for role in ("L", "F1"):
        heard = tuple((role, broker) for broker in ("M", "S1", "S2"))
        unheard = tuple((broker, role) for broker in ("M", "S1", "S2"))
        yield Cut(f"zone {role}>brokers, kill", "zone", "kill", heard)
        yield Cut(f"zone brokers>{role}, kill", "zone", "kill", unheard)
        yield Cut(f"zone {role}-brokers, kill", "zone", "kill", heard + unheard)
    for kind, roles in (
        ("slow disk", ("L", "F1", "S1")),
        ("full disk", ("L", "F1")),
        ("pause", ("L", "F1", "S1")),
    ):
        for role in roles:
            yield Cut(f"{kind} {role}, kill", kind, "kill", at=role)
    for one, other in (("L", "F1"), ("L", "M"), ("L", "S1"), ("M", "S1")):
        yield Cut(f"slow link {one}-{other}, kill", "slow link", "kill", ((one, other),))


def live(cut: Cut, seed: int = 1, tell: Tell | None = None) -> Gaps:
    """A life of that fault, with the gaps that it had."""
    settings = Settings()
    with cluster_of(seed, settings, tell=tell) as cluster:
        return _CutLife(cluster, cut).live()


class WholeGroup:
    """A cluster under traffic whose replicas are all members. Raises Violation if it does not
    become so."""

    def __init__(self, cluster: SimCluster) -> None:
        self.messages = Messages(cluster.violate)
        self.messages.is_confirmed = cluster.promises.is_confirmed
        self.messages.is_created = cluster.promises.is_created
        self.messages.confirmed_at = cluster.promises.confirmed_at
        cluster.promises.on_given_up = self.messages.give_up
        cluster.promises.on_cut_later = self.messages.cut_later
        self._cluster, self.until = cluster, cluster.until
        for host in cluster.hosts:
            host.start()
        topics = Topics(cluster, self.messages, 9, _TOPICS)
        topics.start()
        self.until(lambda: topics.done, _START_S)
        Sender(cluster, self.messages, 1, _TOPICS, ()).start()
        self.until(lambda: bool(self.messages.acked) and self.is_whole, _SETTLED_S)
        cluster.run(_RUNS_S)

    @property
    def is_whole(self) -> bool:
        group = self._cluster.promises.group
        return group is not None and len(group.sync_state_set) == len(self._cluster.brokers)


class _CutLife:
    def __init__(self, cluster: SimCluster, cut: Cut) -> None:
        self._cluster, self._cut = cluster, cut
        self._service = Service(cluster)
        self._alone_s = self._after_s = 0.0

    def live(self) -> Gaps:
        cluster, violation = self._cluster, ""
        try:
            WholeGroup(cluster).messages.on_acked = self._service.acked
            cluster.checks.append(self._service.check)
            cluster.checks.append(ShownMasters(cluster).check)
            role = roles_of(cluster)
            _break(cluster, self._cut, role)
            try:
                self._last(self._cut.name.partition(",")[0], BOUNDS_S[self._cut.kind])
            finally:
                self._alone_s = self._service.end()
            self._end_master(role)
            try:
                self._last(self._cut.name, BOUNDS_S[self._cut.then])
            finally:
                self._after_s = self._service.end()
            if self._cut.kind == "full disk" and role[self._cut.at].starts > 1:
                raise Violation(f"R53: {role[self._cut.at].name} ended on a full disk")
        except Violation as raised:
            violation = str(raised)
        return Gaps(self._alone_s, self._after_s, violation)

    def _last(self, fault: str, bound_s: float) -> None:
        self._service.expect(fault, bound_s)
        self._cluster.run(max(self._cut.lasts_s, bound_s + _STRAGGLES_S))

    def _end_master(self, role: dict[str, Host]) -> None:
        """Of whoever is it by now."""
        master = self._cluster.master or role["M"]
        self._cluster.tell("fault", f"{master.name} ends by {self._cut.then}")
        if self._cut.then == "kill":
            master.kill()
            return
        for other in self._cluster.hosts:
            if other is not master:
                self._cluster.network.block(master.address, other.address)


def roles_of(cluster: SimCluster) -> dict[str, Host]:
    """By the role that each plays now."""
    controllers, brokers = list(cluster.controllers.values()), list(cluster.brokers.values())
    lead = next((h for h in controllers if h.service is not None and h.service.gate.open), None)
    master = cluster.master
    if lead is None or master is None:
        raise Violation("there is no master, or no controller leads")
    followers = [host for host in controllers if host is not lead]
    slaves = [host for host in brokers if host is not master]
    return dict(zip(ROLES, (lead, *followers, master, *slaves), strict=True))


def _break(cluster: SimCluster, cut: Cut, role: dict[str, Host]) -> None:
    cluster.tell("fault", f"{cut.name.partition(',')[0]}: {[h.name for h in role.values()]}")
    network = cluster.network
    for one, other in cut.ways:
        if cut.kind == "slow link":
            pair = frozenset((role[one].address, role[other].address))
            network.slow_links[pair] = _SLOW_LINK_S
        else:
            network.one_way.add((role[one].address, role[other].address))
    if cut.at:
        break_host(role[cut.at], cut.kind)


def break_host(host: Host, kind: str) -> None:
    """Its disk is slow or full, or its process hangs, from now on."""
    if kind == "slow disk":
        host.disk.plan.slow_s = _SLOW_DISK_S
    elif kind == "full disk":
        host.disk.plan.full = True
    elif host.process is not None:
        host.process.pause()


def show(cuts: Sequence[Cut], seed: int, tell: Tell | None) -> int:
    """Prints a row for each; how many break a promise."""
    failed = 0
    print(f"{'fault, then what becomes of the master':40} alone (bound)    after (bound)")
    for cut in cuts:
        gaps = live(cut, seed, tell)
        alone, after = f"({BOUNDS_S[cut.kind]:g} s)", f"({BOUNDS_S[cut.then]:g} s)"
        row = f"{cut.name:40} {gaps.alone_s:5.2f} s {alone:8} {gaps.after_s:5.2f} s {after:8}"
        print(f"{row} {gaps.violation}".rstrip(), flush=True)
        failed += bool(gaps.violation)
    print(f"{len(cuts)} lives, {failed} failed")
    return failed
