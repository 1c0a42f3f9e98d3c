"""Faults during which a group must be served, if it could be."""

from __future__ import annotations

from lab.sim.cluster import SimCluster
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
