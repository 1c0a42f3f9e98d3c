"""Whether a cluster is healthy: what each node reports, and what is wrong about it.

Healthy means: every node answers, the controllers have one leader, keep up with its log and hold
equal states, every broker group has a master that the controllers and the name servers agree on,
every known replica is in the SyncStateSet, and no broker tells of a problem of its own: refused
writes, a full disk, a suspect log, transfers that fail. Outside controller mode: every node
answers, every group has a master in the routes, and no broker tells of a problem.
`Findings.problems` decides; `poll` asks all nodes at once. The state is `ok` without problems,
`down` if a group takes no writes or its state is unknown, else `degraded`.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import msgspec

from batonmq.client.admin.admin import Admin
from batonmq.client.admin.controller_admin import ControllerAdmin
from batonmq.client.admin.types import ControllerMetadata
from batonmq.mqctl.context import answered, reason
from batonmq.mqctl.refusals import lacks_descriptors, lacks_disk_space, next_step, refuses_client
from batonmq.mqctl.routes import broker_addresses, groups_of_others
from batonmq.protocol.bodies import (
    PROBLEMS_KEY,
    BrokerReplicasInfo,
    ClusterInfo,
    ReplicaIdentity,
    ReplicasInfo,
)
from batonmq.protocol.codes import MASTER_ID
from batonmq.protocol.errors import DISK_FULL, BatonError
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.words import counted

_LOOK: Final = "mqctl getControllerMetaData"
BEHIND_ENTRIES = 1_000
"""How many entries a controller may be behind the leader; their replies differ in time anyway."""
OK, DEGRADED, DOWN = "ok", "degraded", "down"
# 2 is wrong usage, in every command.
EXIT_CODES: Final = {OK: 0, DEGRADED: 3, DOWN: 1}

_FREE_SPACE = (
    "free disk space, or keep less: mqctl updateBrokerConfig -b {0} -k fileReservedTime -v 24"
)
_DESCRIPTORS = "raise its limit of open files (LimitNOFILE, ulimit -n), and restart it"
_ADVICE: Final = {
    "refuses writes": "mqctl brokerStatus -b {0}",
    "its disk is full": _FREE_SPACE,
    "has no index": "restart it: it builds the index again",
    "cannot read a queue": "restart it: it builds the queue again",
    "has set messages aside": "mqctl brokerStatus -b {0}",
    "its start waits for disk space": "free disk space; it continues by itself",
    "is not registered": "mqctl getSyncStateSet",
    "its log is suspect": "nothing while its group has a master: it is filled again",
    "its log holds records for queues that cannot be": "find the producer",
    "does not join yet": "wait: its master writes what it needs",
    "its group is not well": "mqctl clusterList",
    "acts for its master, which is away": "start the master",
    "cannot follow its master": "mqctl haStatus",
    "gets no tables and consumer offsets from its master": "mqctl haStatus",
    "its audit log is not written": "remove the cause, or correct auditLogPath and restart it",
}
"""What a broker says of itself, up to the colon -> what to do or to look at; {0}: its address."""


class Problem(str):
    """One line about what is wrong. `is_down`: a group takes no writes, or its state is unknown.
    `next_step`: one command, or what to do. `group`: which group is down; "" not known."""

    __slots__ = ("group", "is_down", "next_step")
    group: str
    is_down: bool
    next_step: str

    @classmethod
    def of(
        cls, text: str, next_step: str = "", *, is_down: bool = False, group: str | None = ""
    ) -> Self:
        problem = cls(text)
        problem.next_step, problem.is_down, problem.group = next_step, is_down, group or ""
        return problem


@dataclass(frozen=True, slots=True)
class BrokerAnswer:
    """`why`: why there is none. `problems`: what it reports of itself, nothing if it is Java's.
    `figures`: RocketMQ's runtime figures. `at_ms`: when it came, in ms since 1970."""

    why: str | None = None
    problems: tuple[str, ...] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """What the nodes replied, by address. A text: what is wrong with the node; None: it replied.

    `expected`: broker name -> addresses that should be there (from cluster.json), maybe empty."""

    name_servers: Mapping[str, str | None]
    controllers: Mapping[str, ControllerMetadata | BatonError]
    brokers: Mapping[str, BrokerAnswer]
    routes: ClusterInfo
    replicas: BrokerReplicasInfo
    replicas_error: str | None = None
    expected: Mapping[str, frozenset[str]] = field(default_factory=dict)
    removed_groups: Sequence[str] = ()
    """Groups that the controllers remember, and that are no part of cluster.json any more."""
    classic: bool = False
    """Outside controller mode there is no leader to ask who leads and who is in sync."""
    nowhere: Problem | None = None
    """Why no node could be asked: no cluster runs here."""
    cluster: str = ""
    """Which cluster this is, for people."""

    @property
    def metadata(self) -> dict[str, ControllerMetadata]:
        """What the controllers that answer say."""
        return answered(self.controllers)

    @property
    def leader(self) -> str:
        """The controller that reports itself as leader; empty if there is none."""
        return next((a for a, answer in self.metadata.items() if answer.is_leader), "")

    @property
    def groups(self) -> list[str]:
        return sorted(
            set(self.routes.broker_addr_table)
            | set(self.replicas.replicas_info_table)
            | set(self.expected)
        )

    @property
    def state(self) -> str:
        """`ok`, `degraded` or `down`."""
        problems = self.problems()
        if any(problem.is_down for problem in problems):
            return DOWN
        return DEGRADED if problems else OK

    @property
    def groups_down(self) -> list[str]:
        """Those that are known to take no writes, or whose master does not answer."""
        return sorted({p.group for p in self.problems() if p.is_down} - {""})

    def problems(self) -> list[Problem]:
        """None means healthy."""
        if self.nowhere:
            return [self.nowhere]
        # One name server is enough for clients.
        unreachable = bool(self.name_servers) and all(self.name_servers.values())
        masters = self.masters
        found = [
            Problem.of(f"name server {a}: {why}", next_step(why), is_down=unreachable)
            for a, why in self.name_servers.items()
            if why
        ]
        for address, error in self.controllers.items():
            if isinstance(error, BatonError):
                why = reason(address, error)
                found.append(Problem.of(f"controller {address}: {why}", next_step(why)))
        if not self.classic:
            found += self._leader_problems()
            found += self._log_problems()
        left = self.left
        for address, broker in self.brokers.items():
            if broker.why and address not in left:
                text, step = f"broker {address}: {broker.why}", next_step(broker.why)
                group = masters.get(address)
                found.append(Problem.of(text, step, is_down=address in masters, group=group))
        for address, broker in self.brokers.items():
            found += [self._reported(address, what) for what in broker.problems]
        if not self.groups and not unreachable:
            found.append(
                Problem.of("no broker group is registered", "start a broker", is_down=True)
            )
        # Without a leader nothing is known of the groups: one problem, not one of each.
        if self.replicas_error is None:
            for name in self.groups:
                found += self._group_problems(name)
        return found

    def _reported(self, address: str, text: str) -> Problem:
        what, _, why = text.partition(": ")
        # No other reason that names a disk: it may be the path of one that failed.
        is_full = what == "refuses writes" and DISK_FULL in why
        advice = _FREE_SPACE if is_full else _ADVICE.get(what, "")
        if lacks_descriptors(why):
            advice = _DESCRIPTORS
        elif "quota exceeded" in why:
            advice = f"raise the quota of its user, {advice}"
        # A new master whose disk is full has not refused anything yet: its first write will be.
        group = self.masters.get(address)
        is_down = what == "refuses writes" or (what == "its disk is full" and group is not None)
        line, step = f"broker {address}: {text}", advice.format(address)
        return Problem.of(line, step, is_down=is_down, group=group)

    @property
    def up(self) -> frozenset[str]:
        """Addresses of the brokers that answer."""
        return frozenset(a for a, answer in self.brokers.items() if answer.why is None)

    @property
    def masters(self) -> dict[str, str]:
        """Address of each master -> its group, as the routes and the controllers name them."""
        routed = self.routes.broker_addr_table.items()
        masters = {data.broker_addrs.get(MASTER_ID): name for name, data in routed}
        known = self.replicas.replicas_info_table.items()
        masters |= {info.master_address: name for name, info in known}
        return {address: name for address, name in masters.items() if address}

    def removed(self, name: str) -> list[ReplicaIdentity]:
        """Dead replicas of a group that are no part of it any more: cluster.json lacks them, or
        their address has a newer one. The controllers remember them until an operator says
        otherwise."""
        if (info := self.replicas.replicas_info_table.get(name)) is None:
            return []
        # A store that was replaced is a new replica: the former one cannot come back there.
        newest = dict(sorted((r.broker_address, r.broker_id) for r in info.replicas))
        planned = self.expected.get(name) or newest.keys()
        return [
            r
            for r in info.not_in_sync_replicas
            if not r.alive
            and (r.broker_id < newest[r.broker_address] or r.broker_address not in planned)
        ]

    @property
    def left(self) -> frozenset[str]:
        """Addresses where nothing but removed replicas was."""
        removed = [replica for name in self.groups for replica in self.removed(name)]
        used = {
            replica.broker_address
            for info in self.replicas.replicas_info_table.values()
            for replica in info.replicas
            if replica not in removed
        }
        return frozenset(replica.broker_address for replica in removed) - used

    def notes(self) -> list[str]:
        """What is worth knowing and no problem."""
        found = []
        for name in self.groups:
            if removed := self.removed(name):
                found.append(
                    f"{name}: the controllers still know replicas that were removed or replaced;"
                    f" forget them: {self._forget(name, removed)}"
                )
        found += [
            f"{name}: the controllers still know this group, which was removed; forget it: "
            f"{self._forget(name)}"
            for name in self.removed_groups
        ]
        return found

    def _forget(self, name: str, replicas: Iterable[ReplicaIdentity] | None = None) -> str:
        """The command that makes the controllers forget these replicas; None: the whole group."""
        which = "--wholeGroup"
        if replicas is not None:
            which = f"-b '{';'.join(str(replica.broker_id) for replica in replicas)}'"
        routed = self.routes.broker_addr_table.get(name)
        cluster = (routed.cluster if routed is not None else "") or "CLUSTER"
        return f"mqctl cleanBrokerMetadata -bn {name} {which} -c {cluster}"

    def _leader_problems(self) -> list[Problem]:
        answers = self.metadata.values()
        named = {answer.leader_address for answer in answers if answer.leader_address}
        if _refuse(self.controllers):
            text = "the controllers tell this client nothing: which groups are missing is not known"
            step = next_step(reason(*next(iter(self.controllers.items()))))
            # Masters that a route names say themselves whether they take writes.
            return [Problem.of(text, step, is_down=not any(self.masters))]
        if not self.leader:
            why, advice = "a majority of them must run", "start the controllers that are away"
            though = ""
            if len(answers) * 2 > len(self.controllers):
                why, though = "an election is under way, or cannot succeed", "though "
                advice = "wait a moment; if that lasts, see what each controller says of itself"
            count = f"{though}{len(answers)} of {len(self.controllers)}"
            what = "masters continue to take writes while their whole set follows, and none that"
            if self.brokers and not self.up:  # no broker answers: none takes writes
                what = "no master that"
            return [
                Problem.of(
                    f"the controllers have no leader, {count} answer: {why}; {what}"
                    " fails is replaced",
                    f"{advice}: mqctl getControllerMetaData",
                    # A master that a route names may still take writes, with its whole set.
                    is_down=not any(self.masters),
                )
            ]
        if len(named) > 1:
            who = ", ".join(sorted(named))
            return [Problem.of(f"the controllers disagree on their leader: {who}", _LOOK)]
        if self.replicas_error is not None:
            text = f"the leading controller does not report the roles: {self.replicas_error}"
            return [Problem.of(text, _LOOK)]
        return []

    def _log_problems(self) -> list[Problem]:
        logs = {a: answer.log for a, answer in self.metadata.items() if answer.log is not None}
        found = [
            Problem.of(
                f"controller {a}: {what}", "free disk space" if lacks_disk_space(what) else _LOOK
            )
            for a, log in logs.items()
            for what in log.problems
        ]
        leading = logs.get(self.leader)
        if leading is not None:
            for address, log in logs.items():
                behind = leading.applied_index - log.applied_index
                if behind > BEHIND_ENTRIES:
                    what = f"{counted(behind, 'entry')} behind the leader's log"
                    found.append(Problem.of(f"controller {address}: {what}", _LOOK))
        # By rules as well: versions in a rolling upgrade make different states of one log.
        digests: dict[tuple[int, str], dict[str, str]] = {}
        for address, log in logs.items():
            if log.state_digest:
                rules = log.state_digest.rpartition(":")[0]
                digests.setdefault((log.digest_index, rules), {})[address] = log.state_digest
        for (index, _), by_address in sorted(digests.items()):
            if len(set(by_address.values())) > 1:
                who = ", ".join(f"{address} {d[-16:]}" for address, d in by_address.items())
                text = f"the controllers' states differ after entry {index}: {who}"
                ((most, count), *_) = Counter(by_address.values()).most_common()
                step = _LOOK
                if count * 2 > len(self.controllers):
                    odd = ", ".join(a for a, digest in by_address.items() if digest != most)
                    step = f"stop {odd}, move its folder (controllerStorePath) aside, and start it"
                found.append(Problem.of(text, step))
        return found

    def _group_problems(self, name: str) -> list[Problem]:
        start = f"start every member of the last set: mqctl getSyncStateSet -b {name}"
        text = f"{name}: no master"
        # Forgetting is offered only for a group that neither runs nor is planned.
        if name not in self.routes.broker_addr_table and name not in self.expected:
            start += f"; only if the group is gone for good: {self._forget(name)}"
            text += ", and only the controllers know this group: it is dead or was removed"
        no_master = Problem.of(text, start, is_down=True, group=name)
        if self.classic:
            has_master = MASTER_ID in self.routes.broker_addr_table[name].broker_addrs
            return [] if has_master else [no_master]
        info = self.replicas.replicas_info_table.get(name)
        if info is None:
            text = f"{name}: the controllers know no such group"
            return [Problem.of(text, "start its brokers", is_down=True, group=name)]
        found: list[Problem] = []
        alive = {r.broker_address for r in info.in_sync_replicas if r.alive}
        if not info.master_address:
            found.append(no_master)
        elif info.master_address not in alive:
            text = f"{name}: its master {info.master_address} is not alive"
            found.append(Problem.of(text, no_master.next_step, is_down=True, group=name))
        routed = self.routes.broker_addr_table.get(name)
        to = routed.broker_addrs.get(MASTER_ID) if routed is not None else None
        if info.master_address and to != info.master_address:
            at = info.master_address
            text = f"{name}: name servers route to {to or 'none'}, the master is {at}"
            found.append(Problem.of(text, f"mqctl brokerStatus -b {at}"))
        return found + self._set_problems(name, info)

    def _set_problems(self, name: str, info: ReplicasInfo) -> list[Problem]:
        inside = {r.broker_address for r in info.in_sync_replicas}
        removed = self.removed(name)
        away = [r for r in info.not_in_sync_replicas if r not in removed]
        every = inside | {r.broker_address for r in away} | set(self.expected.get(name, ()))
        if inside >= every:
            return []
        missing = ", ".join(sorted(every - inside))
        text = f"{name}: {len(inside)} of {counted(len(every), 'replica')} in sync, not {missing}"
        # A living one is on its way into the set: it needs time, and no command.
        gone = [replica for replica in away if not replica.alive]
        if not gone:
            return [Problem.of(text, "mqctl haStatus")]
        step = f"start them; only if they are gone for good: {self._forget(name, gone)}"
        return [Problem.of(text, step)]

    def document(self) -> dict[str, Any]:
        problems = self.problems()
        return {
            "healthy": not problems,
            "state": self.state,
            "groupsDown": self.groups_down,
            "cluster": self.cluster,
            "problems": problems,
            "nextSteps": [problem.next_step for problem in problems],
            "notes": self.notes(),
            "controllerLeaderAddress": self.leader,
            "nameServers": [_node(a, why) for a, why in self.name_servers.items()],
            "controllers": [
                controller_document(a, answer) for a, answer in self.controllers.items()
            ],
            "brokers": [
                {**_node(a, answer.why), "problems": list(answer.problems)}
                for a, answer in self.brokers.items()
            ],
            **json.loads(self.replicas.encode()),
        }


def _node(address: str, why: str | None) -> dict[str, Any]:
    if why is None:
        return {"address": address, "alive": True}
    return {"address": address, "alive": False, "error": why}


def controller_document(address: str, answer: ControllerMetadata | BatonError) -> dict[str, Any]:
    if isinstance(answer, BatonError):
        return _node(address, reason(address, answer))
    # Named as on the wire. A RocketMQ controller tells nothing of its log.
    log = {} if answer.log is None else msgspec.to_builtins(answer.log)
    return {**_node(address, None), "isLeader": answer.is_leader, **log}


def no_cluster(why: Problem) -> Findings:
    return Findings({}, {}, {}, ClusterInfo(), BrokerReplicasInfo(), nowhere=why)


async def poll_classic(admin: Admin) -> Findings:
    """Asks every node of a cluster without controllers once."""
    name_servers, routes = await asyncio.gather(admin.cluster.name_server_states(), _routes(admin))
    answers = await _ask(admin, set(broker_addresses(routes)))
    return Findings(
        {a: why and reason(a, why) for a, why in name_servers.items()},
        {},
        answers,
        routes,
        BrokerReplicasInfo(),
        classic=True,
    )


async def poll(
    admin: Admin, controller: ControllerAdmin, expected: Iterable[tuple[str, str]] = ()
) -> Findings:
    """Asks every node once. `expected`: (broker name, address) of brokers that should be there."""
    wanted: dict[str, set[str]] = {}
    for name, address in expected:
        wanted.setdefault(name, set()).add(address)
    planned = {a for group in wanted.values() for a in group}
    # As few rounds as possible: a node that hangs costs each round its whole time.
    name_servers, controllers, routes, answers = await asyncio.gather(
        admin.cluster.name_server_states(),
        controller.all_metadata(),
        _routes(admin),
        _ask(admin, planned),
    )
    groups = sorted(set(routes.broker_addr_table) | set(wanted))
    routed = set(broker_addresses(routes)) - planned
    (replicas, replicas_error), more = await asyncio.gather(
        _roles(controller, controllers, groups), _ask(admin, routed)
    )
    known = replicas.replicas_info_table
    others = groups_of_others(known, routes, wanted)
    removed = _removed_groups(replicas, routes, wanted)
    # What was removed on purpose is a note, and must not be asked either.
    for name in {*others, *removed}:
        del known[name]
    answers |= more
    members = {replica.broker_address for info in known.values() for replica in info.replicas}
    answers |= await _ask(admin, members - answers.keys())
    return Findings(
        {a: why and reason(a, why) for a, why in name_servers.items()},
        controllers,
        dict(sorted(answers.items())),
        routes,
        replicas,
        replicas_error,
        expected={name: frozenset(members) for name, members in wanted.items()},
        removed_groups=removed,
    )


def _removed_groups(
    replicas: BrokerReplicasInfo, routes: ClusterInfo, planned: Collection[str]
) -> tuple[str, ...]:
    """Groups that the controllers remember, of which nothing runs or is planned. Without a plan
    it cannot be known whether a group is dead or was removed: it counts as dead."""
    if not planned:
        return ()
    known = replicas.replicas_info_table
    return tuple(
        name
        for name in sorted(known.keys() - set(planned) - routes.broker_addr_table.keys())
        if not any(each.alive for each in known[name].replicas)
    )


async def _roles(
    controller: ControllerAdmin,
    answers: Mapping[str, ControllerMetadata | BatonError],
    groups: Sequence[str],
) -> tuple[BrokerReplicasInfo, str | None]:
    """What the leading controller records, and why that is not known."""
    if not any(not isinstance(a, BatonError) and a.is_leader for a in answers.values()):
        why = "this client may not ask" if _refuse(answers) else "no controller leads"
        return BrokerReplicasInfo(), why
    try:
        return await controller.sync_state_data(groups, every=True), None
    except BatonError as error:
        return BrokerReplicasInfo(), str(error)


def _refuse(answers: Mapping[str, ControllerMetadata | BatonError]) -> bool:
    """Whether all controllers run, and none of them answers this client."""
    whys = [reason(a, why) if isinstance(why, BatonError) else "" for a, why in answers.items()]
    return bool(whys) and all(map(refuses_client, whys))


async def _routes(admin: Admin) -> ClusterInfo:
    try:
        return await admin.cluster.info()
    except BatonError:
        return ClusterInfo()


async def _ask(admin: Admin, addresses: Collection[str]) -> dict[str, BrokerAnswer]:
    in_order = sorted(addresses)
    answers = await asyncio.gather(*(_ask_one(admin, address) for address in in_order))
    return dict(zip(in_order, answers, strict=True))


async def _ask_one(admin: Admin, address: str) -> BrokerAnswer:
    try:
        figures = await admin.brokers.runtime_info(address)
    except BatonError as error:
        return BrokerAnswer(reason(address, error))
    at_ms = wall_ms()
    problems = tuple(map(str, json.loads(figures.get(PROBLEMS_KEY, "[]"))))
    if any("disk" in each for each in problems):
        details = await _of_its_disk(admin, address, figures)
        problems = tuple(f"{each}{details}" if "disk" in each else each for each in problems)
    return BrokerAnswer(None, problems, figures, at_ms)


async def _of_its_disk(admin: Admin, address: str, figures: Mapping[str, str]) -> str:
    """Where it is and what is free, in brackets; "" if the broker does not say."""
    try:
        config = await admin.brokers.config(address)
    except BatonError:  # it has answered: that its disk is full must not be lost over the details
        return ""
    space = figures.get("commitLogDirCapacity", "").rstrip(".")
    # With free space below that, a "full" disk is no contradiction.
    gib = int(config.get("mappedFileSizeCommitLog", "0")) / (1 << 30)
    segment = f"; a segment of the log takes {gib:.1f} GiB" if gib >= 0.1 else ""
    return f" ({config.get('storePathRootDir', '')}: {space}{segment})"
