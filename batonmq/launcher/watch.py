"""Roles, sets and routes of a cluster, polled a few times a second.

Each poll is one request to the leading controller (1006) and one to a name server (106).
`ClusterSnapshot` decides what the cluster lacks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.cluster import masters_of
from batonmq.launcher.cluster_file import BrokerState
from batonmq.launcher.layout import Layout
from batonmq.protocol.bodies import ReplicasInfo
from batonmq.protocol.errors import BatonError
from batonmq.runtime.words import counted


@dataclass(frozen=True, slots=True)
class GroupView:
    """One broker group as the leading controller records it."""

    master_address: str
    master_epoch: int
    replicas: Mapping[str, BrokerState]

    @property
    def in_sync(self) -> int:
        return sum(state.in_sync for state in self.replicas.values())


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All groups, and which master each name server routes to."""

    groups: Mapping[str, GroupView] = field(default_factory=dict)
    routes: Mapping[str, str] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, BrokerState]:
        return {
            address: state
            for group in self.groups.values()
            for address, state in group.replicas.items()
        }

    def is_whole(self, layout: Layout) -> bool:
        """Every group has a master that clients are routed to, and a full set."""
        return not self.missing(layout)

    def missing(self, layout: Layout) -> str:
        """What the cluster still lacks to be whole, in one line; empty if nothing."""
        for name in layout.groups:
            group = self.groups.get(name)
            if group is None or not group.replicas:
                return f"{name}: no broker has registered"
            if not group.master_address:
                return f"{name}: no master yet"
            wanted = sum(broker.group == name for broker in layout.brokers)
            if group.in_sync < wanted:
                return f"{name}: {group.in_sync} of {counted(wanted, 'replica')} in sync"
            if self.routes.get(name) != group.master_address:
                return f"{name}: its route is not registered yet"
        return ""


async def poll(
    admin: Admin, names: Sequence[str], controllers: Sequence[str], before: ClusterSnapshot
) -> ClusterSnapshot:
    """Asks once for the groups of these names. What gets no reply (an election runs) stays as it
    was `before`."""
    groups = dict(before.groups)
    routes = dict(before.routes)
    # Two tries: while no controller leads, routes still change, and the other way round.
    try:
        data = await admin.controller(controllers).sync_state_data(names)
        for name, info in data.replicas_info_table.items():
            groups[name] = _group(info)
    except BatonError:
        pass
    try:
        routes, _ = masters_of(await admin.cluster.info())
    except BatonError:
        pass
    return ClusterSnapshot(groups, routes)


def _group(info: ReplicasInfo) -> GroupView:
    # An earlier replica of an address stays on record until it is forgotten: the living one counts.
    members = sorted(info.replicas, key=lambda each: (each.alive, each in info.in_sync_replicas))
    replicas = {
        replica.broker_address: BrokerState(
            replica.broker_id,
            "MASTER" if replica.broker_id == info.master_broker_id else "SLAVE",
            replica in info.in_sync_replicas,
        )
        for replica in members
    }
    return GroupView(info.master_address or "", info.master_epoch or 0, replicas)
