"""Faults during which a group must be served, and its master be found, if that could be."""

from __future__ import annotations

from batonmq.protocol.codes import MASTER_ID
from lab.sim.cluster import SimCluster
from lab.sim.hosts import GROUP, BrokerHost, ControllerHost, Host
from lab.sim.kinds import Kinds
from lab.sim.service import BOUNDS_S, Reach, Service


class ServedKinds(Kinds):
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
