"""A rolling restart: which process is next, whether it may be restarted now, and what is done.

Pure but for `RollFile`. Brokers come first, in each group the slaves before the master, then name
servers with their controllers, the leading controller last. A process is restarted only while the
whole cluster is well, so one restart never meets another fault, and the next waits for a full set.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from batonmq.mqctl.health import Findings
from batonmq.mqctl.verdict import evidence as verdict
from batonmq.mqctl.verdict.evidence import Evidence
from batonmq.mqctl.verdict.safety import may_restart
from batonmq.protocol.errors import BatonError
from batonmq.runtime import disk
from batonmq.runtime.durable_file import remove_file, replace_file

Kind = Literal["broker", "namesrv", "controller"]
_ADDRESS: Final = re.compile(r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]*):(?P<port>\d{1,5})")
"""Hosts that may be a word of a command: none looks like an option or holds a character of a
shell. Addresses of brokers come from the cluster."""


class Doubt(Exception):
    """Why the roll stops here. `next_step`: one command, or what to do."""

    def __init__(self, text: str, next_step: str = "mqctl health") -> None:
        super().__init__(text)
        self.next_step = next_step


@dataclass(frozen=True, slots=True)
class RollNode:
    """One process. `address`: where clients dial it. `controller`: the address of the controller
    in it, "" without one."""

    kind: Kind
    address: str
    controller: str = ""
    group: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.address}"

    @property
    def words(self) -> dict[str, str]:
        """What replaces the placeholders of a restart command. Raises Doubt for a bad address."""
        found = _ADDRESS.fullmatch(self.address)
        if found is None:
            raise Doubt(f"{self.address!r} is no address that a command can name")
        return {
            "kind": self.kind,
            "address": self.address,
            "group": self.group,
            **found.groupdict(),
        }


def nodes_of(
    findings: Findings, name_servers: Sequence[str], controllers: Sequence[str], *, embedded: bool
) -> list[RollNode]:
    """All processes. `embedded`: the controllers run in the name servers, in the same order.
    Raises Doubt if they cannot be paired."""
    brokers = [
        RollNode("broker", replica.broker_address, group=name)
        for name, info in sorted(findings.replicas.replicas_info_table.items())
        for replica in info.replicas
    ]
    if not embedded:
        servers = [RollNode("namesrv", address) for address in name_servers]
        return [*brokers, *servers, *(RollNode("controller", a, a) for a in controllers)]
    hosts = [[address.rpartition(":")[0] for address in a] for a in (name_servers, controllers)]
    # By a wrong pair another process than the leader's would come last.
    if hosts[0] != hosts[1]:
        raise Doubt(
            f"name servers {';'.join(name_servers)} and controllers {';'.join(controllers)} are"
            " not the same hosts in the same order",
            "give -n and -a in one order, or --controllersApart if they are separate processes",
        )
    pairs = zip(name_servers, controllers, strict=True)
    return [*brokers, *(RollNode("namesrv", address, controller) for address, controller in pairs)]


def next_node(
    findings: Findings, nodes: Iterable[RollNode], done: Collection[str]
) -> RollNode | None:
    """The process to restart next; None if all are done."""
    left = [node for node in nodes if node.name not in done]
    return min(left, key=lambda node: _place(findings, node), default=None)


def _place(findings: Findings, node: RollNode) -> tuple[object, ...]:
    if node.kind == "broker":
        return (0, node.group, is_master(findings, node), node.address)
    # Last: its successor would else be restarted, too, and lead for a moment only.
    leads = bool(node.controller) and node.controller == findings.leader
    return (1, leads, node.kind, node.address)


def is_master(findings: Findings, node: RollNode) -> bool:
    info = findings.replicas.replicas_info_table.get(node.group)
    return info is not None and info.master_address == node.address


def check_whole(findings: Findings, floor: int = 0) -> None:
    """Raises Doubt unless every node answers, every set is full, and every controller has applied
    the log up to index `floor`."""
    for problem in findings.problems():  # the first one is enough to stop
        raise Doubt(problem, problem.next_step or "mqctl health")
    for address, answer in findings.controllers.items():
        log = None if isinstance(answer, BatonError) else answer.log
        if log is not None and log.applied_index < floor:
            raise Doubt(
                f"controller {address} has applied entry {log.applied_index} of {floor}",
                "mqctl getControllerMetaData",
            )


def committed_index(findings: Findings) -> int:
    """Up to where the leading controller's log is committed; 0 if it does not say."""
    answer = findings.controllers.get(findings.leader)
    log = None if answer is None or isinstance(answer, BatonError) else answer.log
    return 0 if log is None else log.committed_index


def check_may_restart(findings: Findings, nodes: Sequence[RollNode], node: RollNode) -> None:
    """Raises Doubt if the cluster is not whole, or `node` must not be restarted now: a group would
    lose its last copy in sync, the controllers their majority, clients their last name server."""
    check_whole(findings)
    # Of its kind only: separate controllers are no name servers.
    peers = [_as_evidence(each) for each in nodes if each.kind == node.kind]
    evidence = Evidence(
        0,
        nodes=tuple(peers),
        groups=tuple(
            verdict.recorded(verdict.GroupEvidence(name), info)
            for name, info in findings.replicas.replicas_info_table.items()
        ),
        leader=findings.leader,
        is_live=True,
    )
    judged = may_restart(evidence, _as_evidence(node))
    if not judged.allowed:
        raise Doubt(f"{node.name}: {judged.why}", "restart it by hand, or add another one first")


def _as_evidence(node: RollNode) -> verdict.NodeEvidence:
    """A process that answers, as evidence for `judge`."""
    kind: verdict.NodeKind = verdict.BROKER if node.kind == "broker" else verdict.NAME_SERVER
    facts = verdict.ControllerFacts("", node.controller) if node.controller else None
    return verdict.NodeEvidence(
        node.name, kind, node.address, node.group, asked=True, controller=facts
    )


class Roll(msgspec.Struct, kw_only=True, rename="camel"):
    """A roll that was begun. `how`: the way of restarting, with the target version if there is
    one. `started_ms`: wall clock. `done`: names of nodes."""

    how: str
    started_ms: int
    done: list[str] = []


class RollFile:
    """The roll that is under way, at `path`; it outlives the command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, how: str, now_ms: int) -> Roll:
        """The roll that was begun before, or a new one. Raises Doubt if the one before restarts in
        another way, or cannot be read; OSError."""
        over = f"finish it with the same options, or begin again: rm {self.path}"
        try:
            before = msgspec.json.decode(disk.read_bytes(self.path), type=Roll)
        except FileNotFoundError:
            roll = Roll(how=how, started_ms=now_ms)
            self.store(roll)
            return roll
        except msgspec.DecodeError as error:
            raise Doubt(f"{self.path} is no roll: {error}", over) from error
        # With another target version the processes that are done would not be done.
        if before.how != how:
            raise Doubt(f"a roll by {before.how!r} is not finished", over)
        return before

    def store(self, roll: Roll) -> None:
        """Durable on return. Raises OSError."""
        replace_file(self.path, msgspec.json.encode(roll))

    def end(self) -> None:
        remove_file(self.path)


def is_newer(facts: Mapping[str, str], started_ms: int) -> bool:
    """Whether a broker that reports `facts` was started after a roll began. By the clocks of two
    hosts: a broker whose clock is behind is only restarted once more."""
    booted = facts.get("bootTimestamp", "")
    return booted.isdecimal() and int(booted) > started_ms
