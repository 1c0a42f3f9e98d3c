"""Whether a cluster is healthy: what each node reports, and what is wrong about it.

Healthy means: every node answers, the controllers have one leader, keep up with its log and hold
equal states, every broker group has a master that the controllers and the name servers agree on,
every known replica is in the SyncStateSet, and no broker tells of a problem of its own: refused
writes, a full disk, a suspect log, transfers that fail. Outside controller mode: every node
answers, every group has a master in the routes, and no broker tells of a problem.
`Findings.problems` decides; `poll` asks all nodes at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batonmq.mqctl.context import reason
from batonmq.protocol.bodies import PROBLEMS_KEY, BrokerReplicasInfo, ClusterInfo, ReplicasInfo
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.errors import BatonError

if TYPE_CHECKING:
    from batonmq.client.admin.admin import Admin
    from batonmq.client.admin.controller_admin import ControllerAdmin
    from batonmq.client.admin.types import ControllerMetadata

BEHIND_ENTRIES = 1_000
"""How many entries a controller may be behind the leader; their replies differ in time anyway."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What the nodes replied, by address. A text: what is wrong with the node; None: it replied.

    `expected`: broker name -> addresses that should be there (from cluster.json), maybe empty.
    """

    name_servers: Mapping[str, str | None]
    controllers: Mapping[str, ControllerMetadata | BatonError]
    brokers: Mapping[str, str | None]
    routes: ClusterInfo
    replicas: BrokerReplicasInfo
    replicas_error: str | None = None
    expected: Mapping[str, frozenset[str]] = field(default_factory=dict)
    reported: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What the brokers that replied tell of themselves, by address."""
    classic: bool = False
    """Outside controller mode: nobody was asked who leads and who is in sync."""
    nowhere: str = ""
    """Why no node could be asked: no cluster runs here."""

    @property
    def leader(self) -> str:
        """The controller that reports itself as leader; empty if there is none."""
        return next(
            (
                address
                for address, answer in self.controllers.items()
                if not isinstance(answer, BatonError) and answer.is_leader
            ),
            "",
        )

    @property
    def groups(self) -> list[str]:
        return sorted(
            set(self.routes.broker_addr_table)
            | set(self.replicas.replicas_info_table)
            | set(self.expected)
        )

    def problems(self) -> list[str]:
        """One line each; none means healthy."""
        if self.nowhere:
            return [self.nowhere]
        found = [f"name server {a}: {why}" for a, why in self.name_servers.items() if why]
        for address, answer in self.controllers.items():
            if isinstance(answer, BatonError):
                found.append(f"controller {address}: {reason(address, answer)}")
        if not self.classic:
            found += self._leader_problems()
            found += self._log_problems()
        found += [f"broker {a}: {why}" for a, why in self.brokers.items() if why]
        found += [f"broker {a}: {what}" for a, lines in self.reported.items() for what in lines]
        if not self.groups:
            found.append("no broker group is registered")
        if self.replicas_error is None:
            for name in self.groups:
                found += self._group_problems(name)
        return found

    def _leader_problems(self) -> list[str]:
        named = {
            answer.leader_address
            for answer in self.controllers.values()
            if not isinstance(answer, BatonError) and answer.leader_address
        }
        if not self.leader:
            answering = sum(not isinstance(a, BatonError) for a in self.controllers.values())
            if answering * 2 <= len(self.controllers):
                return ["the controllers have no leader: a majority of them must run"]
            return [
                f"the controllers have no leader, though {answering} of {len(self.controllers)} "
                "answer: an election is under way, or cannot succeed"
            ]
        if len(named) > 1:
            return [f"the controllers disagree on their leader: {', '.join(sorted(named))}"]
        if self.replicas_error is not None:
            return [f"the leading controller does not report the roles: {self.replicas_error}"]
        return []

    def _log_problems(self) -> list[str]:
        logs = {
            address: answer.log
            for address, answer in self.controllers.items()
            if not isinstance(answer, BatonError) and answer.log is not None
        }
        found = [f"controller {a}: {what}" for a, log in logs.items() for what in log.problems]
        leading = logs.get(self.leader)
        if leading is not None:
            for address, log in logs.items():
                behind = leading.applied_index - log.applied_index
                if behind > BEHIND_ENTRIES:
                    found.append(f"controller {address}: {behind} entries behind the leader's log")
        digests: dict[int, set[str]] = {}
        for log in logs.values():
            if log.state_digest:
                digests.setdefault(log.digest_index, set()).add(log.state_digest)
        for index, different in sorted(digests.items()):
            if len(different) > 1:
                who = ", ".join(
                    f"{address} {log.state_digest[:16]}"
                    for address, log in logs.items()
                    if log.digest_index == index
                )
                found.append(f"the controllers' states differ after entry {index}: {who}")
        return found

    def _group_problems(self, name: str) -> list[str]:
        if self.classic:
            has_master = MASTER_ID in self.routes.broker_addr_table[name].broker_addrs
            return [] if has_master else [f"{name}: no master"]
        info = self.replicas.replicas_info_table.get(name)
        if info is None:
            return [f"{name}: the controllers know no such group"]
        found: list[str] = []
        alive = {r.broker_address for r in info.in_sync_replicas if r.alive}
        if not info.master_address:
            found.append(f"{name}: no master")
        elif info.master_address not in alive:
            found.append(f"{name}: its master {info.master_address} is not alive")
        routed = self.routes.broker_addr_table.get(name)
        to = routed.broker_addrs.get(MASTER_ID) if routed is not None else None
        if info.master_address and to != info.master_address:
            found.append(
                f"{name}: name servers route to {to or 'nobody'}, the master is"
                f" {info.master_address}"
            )
        return found + self._set_problems(name, info)

    def _set_problems(self, name: str, info: ReplicasInfo) -> list[str]:
        inside = {r.broker_address for r in info.in_sync_replicas}
        outside = {r.broker_address for r in info.not_in_sync_replicas}
        every = inside | outside | set(self.expected.get(name, ()))
        if inside >= every:
            return []
        missing = ", ".join(sorted(every - inside))
        return [f"{name}: {len(inside)} of {len(every)} replicas in sync, not {missing}"]

    def document(self) -> dict[str, Any]:
        """For scripts."""
        import json

        problems = self.problems()
        return {
            "healthy": not problems,
            "problems": problems,
            "controllerLeaderAddress": self.leader,
            "nameServers": [_node(a, why) for a, why in self.name_servers.items()],
            "controllers": [_controller(a, answer) for a, answer in self.controllers.items()],
            "brokers": [
                {**_node(a, why), "problems": list(self.reported.get(a, ()))}
                for a, why in self.brokers.items()
            ],
            **json.loads(self.replicas.encode()),
        }


def _node(address: str, why: str | None) -> dict[str, Any]:
    if why is None:
        return {"address": address, "alive": True}
    return {"address": address, "alive": False, "error": why}


def _controller(address: str, answer: ControllerMetadata | BatonError) -> dict[str, Any]:
    if isinstance(answer, BatonError):
        return _node(address, reason(address, answer))
    return {**_node(address, None), "isLeader": answer.is_leader, **log_fields(answer)}


def log_fields(answer: ControllerMetadata) -> dict[str, Any]:
    """The log's position and sizes, named as on the wire; empty for a RocketMQ controller."""
    log = answer.log
    if log is None:
        return {}
    return {
        "selfId": log.self_id,
        "controllerEpoch": log.controller_epoch,
        "raftTerm": log.term,
        "appliedIndex": log.applied_index,
        "committedIndex": log.committed_index,
        "journalBytes": log.journal_bytes,
        "journalEntries": log.journal_entries,
        "snapshotBytes": log.snapshot_bytes,
        "snapshotIndex": log.snapshot_index,
        "digestIndex": log.digest_index,
        "stateDigest": log.state_digest,
        "problems": list(log.problems),
    }


def no_cluster(why: str) -> Findings:
    """The findings where no cluster runs."""
    return Findings({}, {}, {}, ClusterInfo(), BrokerReplicasInfo(), nowhere=why)


async def poll_classic(admin: Admin) -> Findings:
    """Asks every node of a cluster without controllers once."""
    name_servers, routes = await asyncio.gather(admin.cluster.name_server_states(), _routes(admin))
    answers = await _states(admin, _addresses(routes, BrokerReplicasInfo()))
    return Findings(
        {a: why and reason(a, why) for a, why in name_servers.items()},
        {},
        {a: answer if isinstance(answer, str) else None for a, answer in answers.items()},
        routes,
        BrokerReplicasInfo(),
        reported={a: lines for a, lines in answers.items() if not isinstance(lines, str)},
        classic=True,
    )


async def poll(
    admin: Admin, controller: ControllerAdmin, expected: Iterable[tuple[str, str]] = ()
) -> Findings:
    """Asks every node once. `expected`: (broker name, address) of brokers that should be there."""
    wanted: dict[str, set[str]] = {}
    for name, address in expected:
        wanted.setdefault(name, set()).add(address)
    name_servers, controllers, routes = await asyncio.gather(
        admin.cluster.name_server_states(), controller.all_metadata(), _routes(admin)
    )
    groups = sorted(set(routes.broker_addr_table) | set(wanted))
    replicas, replicas_error = BrokerReplicasInfo(), None
    if not any(map(_leads, controllers.values())):
        replicas_error = "no controller leads"
    elif groups:
        try:
            replicas = await controller.sync_state_data(groups)
        except BatonError as error:
            replicas_error = str(error)
    addresses = _addresses(routes, replicas) | {a for group in wanted.values() for a in group}
    answers = await _states(admin, addresses)
    return Findings(
        {a: why and reason(a, why) for a, why in name_servers.items()},
        controllers,
        {a: answer if isinstance(answer, str) else None for a, answer in answers.items()},
        routes,
        replicas,
        replicas_error,
        {name: frozenset(members) for name, members in wanted.items()},
        {a: lines for a, lines in answers.items() if not isinstance(lines, str)},
    )


def _leads(answer: ControllerMetadata | BatonError) -> bool:
    return not isinstance(answer, BatonError) and answer.is_leader


async def _routes(admin: Admin) -> ClusterInfo:
    try:
        return await admin.cluster.info()
    except BatonError:
        return ClusterInfo()


async def _states(admin: Admin, addresses: Collection[str]) -> dict[str, str | tuple[str, ...]]:
    states = await asyncio.gather(*(_state(admin, address) for address in sorted(addresses)))
    return dict(zip(sorted(addresses), states, strict=True))


async def _state(admin: Admin, address: str) -> str | tuple[str, ...]:
    """Why the broker does not reply, or the problems that it tells (a Java broker tells none)."""
    import json

    try:
        table = await admin.brokers.runtime_info(address)
        return tuple(map(str, json.loads(table.get(PROBLEMS_KEY, "[]"))))
    except BatonError as error:
        return reason(address, error)


def _addresses(routes: ClusterInfo, replicas: BrokerReplicasInfo) -> set[str]:
    registered = {a for d in routes.broker_addr_table.values() for a in d.broker_addrs.values()}
    known = {
        replica.broker_address
        for info in replicas.replicas_info_table.values()
        for replica in (*info.in_sync_replicas, *info.not_in_sync_replicas)
    }
    return registered | known
