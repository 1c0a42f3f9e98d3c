"""The figures of a controller node for `/metrics`.

Elections and changes of sets are counted where they are applied, as in Java: on every node, leader
or not, so take `max` over the nodes. Origin: ControllerMetricsManager in Java.
"""

from __future__ import annotations

from collections import Counter

from batonmq.controller.raft.log import Commit
from batonmq.controller.requests import ControllerRequests
from batonmq.controller.rules.commands import NO_BROKER, RoleChanged, SetChanged
from batonmq.controller.watch import SessionTable
from batonmq.runtime.metrics import MetricsPage


class ControllerMetrics:
    def __init__(self, requests: ControllerRequests, sessions: SessionTable) -> None:
        self._requests = requests
        self._sessions = sessions
        self._elections: Counter[tuple[str, str, str]] = Counter()
        self._set_changes: Counter[tuple[str, str]] = Counter()
        self._set_sizes: dict[str, int] = {}

    @property
    def labels(self) -> dict[str, str]:
        config = self._requests.config
        return {"controller_group": config.controller_group, "node": config.controller_self_id}

    def applied(self, commit: Commit) -> None:
        """Counts the effects of a command. A snapshot does not show which elections it contains."""
        for effect in commit.effects if commit.command is not None else ():
            # A RoleChanged also has the new set, so no SetChanged comes beside it.
            match effect:
                case RoleChanged(view):
                    has_master = view.master_broker_id is not None
                    result = "new_master_elected" if has_master else "no_master"
                    unclean = has_master and view.unclean_epoch == view.master_epoch
                    kind = "unclean" if unclean else "clean"
                    self._elections[view.broker_name, result, kind] += 1
                    self._set_sizes[view.broker_name] = len(view.sync_state_set)
                case SetChanged(view):
                    size = len(view.sync_state_set)
                    # The first change after a start has nothing to compare: it counts as growth.
                    before = self._set_sizes.get(view.broker_name, size)
                    kind = "shrink" if size < before else "expand"
                    self._set_changes[view.broker_name, kind] += 1
                    self._set_sizes[view.broker_name] = size

    async def collect(self, page: MetricsPage) -> None:
        requests = self._requests
        metadata = requests.metadata()
        log = metadata.log
        is_leader = int(metadata.is_leader)
        page.gauge("batonmq_raft_is_leader", "1 if it leads and its gate is open", is_leader)
        has_leader = int(metadata.leader is not None)
        page.gauge("batonmq_raft_knows_leader", "1 if it knows who leads", has_leader)
        page.gauge("batonmq_raft_peers", "configured controllers", len(metadata.peers))
        page.gauge("batonmq_raft_term", "of Raft", log.term)
        page.gauge("batonmq_raft_commit_index", "last committed entry", log.committed_index)
        page.gauge("batonmq_raft_applied_index", "last applied entry", log.applied_index)
        page.gauge("batonmq_raft_log_bytes", "journal on the disk", log.journal_bytes)
        page.gauge("batonmq_raft_snapshot_bytes", "snapshot on the disk", log.snapshot_bytes)
        epoch = metadata.controller_epoch
        page.gauge("batonmq_controller_epoch", "of the leading controller", epoch)
        problems = page.family("batonmq_problem", "gauge", "1 for each, as in mqctl health")
        # Without what follows the colon: numbers in a label would make a new series each time.
        for problem in dict.fromkeys(text.partition(":")[0] for text in metadata.problems):
            problems.add(1, problem=problem)
        await self._of_groups(page)
        elections = page.family("batonmq_elections_total", "counter", "applied on this node")
        for (group, result, kind), count in self._elections.items():
            elections.add(count, node_id=group, election_result=result, kind=kind)
        changes = page.family("batonmq_sync_state_set_changes_total", "counter", "applied here")
        for (group, kind), count in self._set_changes.items():
            changes.add(count, node_id=group, kind=kind)

    async def _of_groups(self, page: MetricsPage) -> None:
        """As this node applied them. `active_broker_num` as in Java: with a session here."""
        groups = self._requests.state.groups
        sizes = {
            "batonmq_group_has_master": "1 if the group has a master",
            "batonmq_group_master_epoch": "of the group",
            "batonmq_group_sync_state_set_size": "members, the master among them",
            "batonmq_group_replicas": "registered replicas",
            "batonmq_group_active_brokers": "members with a session at this node",
        }
        for at, (name, what) in enumerate(sizes.items()):
            family = page.family(name, "gauge", what)
            async for broker_name in page.pace.through(list(groups)):
                group = groups[broker_name]
                value = (
                    int(group.master_broker_id != NO_BROKER),
                    group.master_epoch,
                    len(group.sync_state_set),
                    len(group.replicas),
                    len(set(self._sessions.of_group(broker_name))),
                )[at]
                family.add(value, node_id=broker_name)

    def why_not_ready(self) -> list[str]:
        """It serves once it knows a leader: a node that does not lead names the leader to
        callers."""
        if self._requests.metadata().leader is not None:
            return []
        return ["no leader of the controllers is known: is a majority of them running?"]
