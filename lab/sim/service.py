"""Service during a fault: how long a group is without an acknowledgement while a fault lasts.

Other checkers look at what is promised; this one looks at the clock. While a partial fault lasts,
and the group could be served in spite of it (`could_serve`), the gap between two acknowledgements
must not exceed the bound of that kind of fault. Senders send all the time, so a gap is the group's.
Each name server must show the living master meanwhile (`ShownMasters`).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from batonmq.protocol.codes import MASTER_ID
from lab.sim.cluster import SimCluster
from lab.sim.hosts import GROUP, BrokerHost, ControllerHost, Host
from lab.sim.kinds import Kinds
from lab.sim.world import World

#: Kind of fault -> seconds that a group may be without acknowledgements while it lasts. The reasons
#: stand in docs/simulation.md, "Service during a fault".
BOUNDS_S = {
    "one way": 2.0,
    "link": 2.0,
    "zone": 3.0,
    "slow disk": 2.5,
    "slow link": 2.0,
    "full disk": 2.0,
    "pause": 2.0,
    "kill": 2.5,
    "silence": 3.5,
    "foreign volume": 2.5,
    "lost controllers": 3.0,
    "restored controllers": 3.0,
}


@dataclass(frozen=True)
class Reach:
    """Who could work together: hosts by address. `works`: those that run; `hears(one, other)`:
    whether bytes go both ways between them."""

    works: Callable[[str], bool]
    hears: Callable[[str, str], bool]

    def could_serve(
        self, controllers: Collection[str], members: Collection[str], min_in_sync: int
    ) -> bool:
        """Whether some controller has a majority, and a member of the recorded set that it hears
        has as many members beside it as minInSyncReplicas asks for."""
        for lead in filter(self.works, controllers):
            with_it = [one for one in controllers if one == lead or self._meets(lead, one)]
            if 2 * len(with_it) <= len(controllers):
                continue
            heard = [one for one in members if self._meets(lead, one)]
            for master in heard:
                in_sync = [one for one in heard if one == master or self._meets(master, one)]
                if len(in_sync) >= min_in_sync:
                    return True
        return False

    def _meets(self, one: str, other: str) -> bool:
        return self.works(other) and self.hears(one, other)


class Service:
    """`acked` is to be called at each acknowledgement, `check` all the time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_s = 0.0
        self._fault = ""
        self._bound_s = 0.0
        self.longest_s = 0.0
        """The longest gap since `expect`."""

    def expect(self, fault: str, bound_s: float) -> None:
        """From now on no gap may be longer than `bound_s`."""
        self._fault, self._bound_s = fault, bound_s
        self._last_s, self.longest_s = self._world.now_s, 0.0

    def end(self) -> float:
        """The fault is over, or another one begins: the longest gap of this one, in seconds."""
        self._note()
        self._fault = ""
        return self.longest_s

    def acked(self) -> None:
        self._note()
        self._last_s = self._world.now_s

    def check(self) -> None:
        self._note()
        if self._fault and self.longest_s > self._bound_s:
            fault, self._fault = self._fault, ""
            self._world.violate(
                f"R50, R51: nothing is acknowledged for more than {self._bound_s:g} s"
                f" while {fault} lasts"
            )

    def _note(self) -> None:
        if self._fault:
            self.longest_s = max(self.longest_s, self._world.now_s - self._last_s)


class ServedKinds(Kinds):
    """Faults during which a group must be served, if that could be."""

    def __init__(self, cluster: SimCluster, service: Service) -> None:
        super().__init__(cluster)
        self._service = service

    def _expect(self, kind: str, what: str) -> None:
        self._service.end()
        if self._could_serve():
            self._service.expect(what, BOUNDS_S[kind])

    def _could_serve(self) -> bool:
        cluster, group = self.cluster, self.cluster.promises.group
        if group is None:
            return False
        members = map(cluster.promises.host_of, group.sync_state_set)
        hosts = {host.address: host for host in cluster.hosts}

        def works(address: str) -> bool:
            process = hosts[address].process
            return process is not None and not process.paused

        reach = Reach(works, lambda *two: not cluster.network.is_unreachable(*two))
        return reach.could_serve(
            [host.address for host in cluster.controllers.values()],
            [host.address for host in members if host is not None],
            cluster.settings.min_in_sync,
        )


UNSHOWN_S = 3.0
"""A registration is not answered for 0.5 s, then a member that hangs is asked for 1 s; the winner
of an election begins again."""
AMONG_OTHERS_S = 5.0
"""The same where other faults come as well: replicas start, hang, and lose their links."""


class ShownMasters:
    """A stock client keeps to one name server. So each must show the living master, if it answers
    the master, or a slave that the master answers (R32). `check` is to be called all the time."""

    def __init__(self, cluster: SimCluster, bound_s: float = UNSHOWN_S) -> None:
        self._cluster = cluster
        self._bound_s = bound_s
        self._since_s: dict[str, float] = {}
        self.longest_s = 0.0

    def check(self) -> None:
        now_s = self._cluster.now_s
        masters = [host for host in self._cluster.brokers.values() if host.is_open]
        for server in self._cluster.controllers.values():
            if len(masters) != 1 or not self._must_show(server, masters[0]):
                self._since_s.pop(server.name, None)
                continue
            lacks_s = now_s - self._since_s.setdefault(server.name, now_s)
            self.longest_s = max(self.longest_s, lacks_s)
            if lacks_s > self._bound_s:
                self._cluster.violate(
                    f"R32: {server.name} shows no client the master {masters[0].name}, though it"
                    f" answers a replica, for more than {self._bound_s:g} s"
                )

    def _must_show(self, server: ControllerHost, master: BrokerHost) -> bool:
        routes = self._cluster.promises.sightings.routes.get(server.name)
        if routes is None or not _runs(server) or not _runs(master):
            return False
        shown = routes.members(GROUP).get(MASTER_ID, "")
        if shown.startswith(f"{master.address}:"):
            return False
        is_cut = self._cluster.network.is_unreachable
        return any(
            _runs(host)
            and not is_cut(host.address, server.address)
            and (host is master or not is_cut(host.address, master.address))
            for host in self._cluster.brokers.values()
        )


def _runs(host: Host) -> bool:
    return host.process is not None and not host.process.paused
