"""Which acknowledged messages are safe, and which process may be restarted now. Pure.

An acknowledged message is on every member of the SyncStateSet (R1), and always on its master. So
the whole log of one trusted member, or of the last master, holds all of them. A replica is not
trusted where R12, R17, R24 and R47 would not elect it: other processes wrote to its folder, its log
is of another lineage, is suspect, or ends before a place that it had reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from batonmq.mqctl.verdict.evidence import (
    BROKER,
    Evidence,
    FaultEvidence,
    GroupEvidence,
    NodeEvidence,
    StoreEvidence,
)
from batonmq.runtime.words import counted

State = Literal["safe", "lost", "unknown"]


@dataclass(frozen=True, slots=True)
class Safety:
    """Of one group. `holders`: names of nodes whose stores prove it; `end`: all that was
    acknowledged lies below; `lost`: [begin, end) of the log that no trusted store has."""

    group: str
    state: State
    how: str
    holders: tuple[str, ...] = ()
    end: int = -1
    lost: tuple[tuple[int, int], ...] = ()


def safety(evidence: Evidence, name: str) -> Safety:
    """What is known about the acknowledged messages of a group."""
    group = evidence.group(name)
    unclean = [story for story in evidence.stories_of(name) if story.unclean]
    if unclean:
        story = unclean[-1]
        cut = max((before for _, before, _, _ in story.truncations), default=-1)
        how = (
            f"an operator elected broker {story.winner} in masterEpoch {story.master_epoch}, which"
            " may have lacked acknowledged messages; what others had beyond it is in their"
            " truncated/"
        )
        lost = ((story.opened_offset, cut),) if cut > story.opened_offset >= 0 else ()
        return Safety(name, "lost" if lost else "unknown", how, lost=lost)
    if evidence.is_live and (live := _live(evidence, group) or _member(evidence, group)):
        return live
    return _stored(evidence, group)


def _live(evidence: Evidence, group: GroupEvidence) -> Safety | None:
    """What is safe by the master's report; None if no master serves."""
    node = evidence.node_of(group.name, group.master)
    if not group.master or node is None or not node.runs or not node.report:
        return None
    if any(problem.startswith("its log is suspect") for problem in node.problems):
        return Safety(group.name, "unknown", f"the log of its master {node.address} is suspect")
    confirmed = int(node.report.get("confirmOffset") or -1)
    how = (
        f"broker {group.master} is master of masterEpoch {group.master_epoch}; every member of the"
        f" SyncStateSet {_set(group)} has the log up to the confirmed offset {confirmed}"
    )
    return Safety(group.name, "safe", how, (node.name,), confirmed)


def _member(evidence: Evidence, group: GroupEvidence) -> Safety | None:
    """From what a running member of the set reports while no master serves; None if none does, or
    if the set may be an older one."""
    if not evidence.leader or not group.is_current:
        return None
    for broker_id in group.members:
        node = evidence.node_of(group.name, broker_id)
        if node is None or not node.runs or any("suspect" in problem for problem in node.problems):
            continue
        end = int(node.report.get("commitLogMaxOffset") or -1)
        if end >= max(0, group.confirmed):
            how = (
                f"{node.name} runs and is a member of the SyncStateSet {_set(group)} of"
                f" masterEpoch {group.master_epoch}; its log ends at {end}"
            )
            return Safety(group.name, "safe", how, (node.name,), end)
    return None


def _stored(evidence: Evidence, group: GroupEvidence) -> Safety:
    """What is safe by the stores' files."""
    name = group.name
    nodes = {id_: n for n in evidence.brokers(name) if n.store and (id_ := evidence.id_of(n))}
    stores = {id_: node.store for id_, node in nodes.items() if node.store is not None}
    if not _names_who_has_all(group, stores.values()):
        why = "no record of its SyncStateSet is here, or a newer one may be elsewhere"
        return Safety(name, "unknown", why)
    # The set of an older record may have shrunk since; its last master still has everything.
    wanted = {*group.members, group.last_master} if group.is_current else {group.last_master}
    doubts = {id_: distrust(group, id_, each, stores.values()) for id_, each in stores.items()}
    trusted = [id_ for id_ in wanted & stores.keys() if not doubts[id_]]
    # The log of a process that runs was not read.
    read = [id_ for id_ in trusted if not nodes[id_].has_process]
    holders = [id_ for id_ in read if all(f.kind != "log-tail" for f in stores[id_].damages)]
    if not holders:
        return _without_holder(group, wanted, nodes, doubts)

    def completeness(id_: int) -> tuple[int, bool, bool]:
        store = stores[id_]
        return store.end, store.read_from <= store.begin, not store.damages

    # The longest: what a shorter one lacks may be acknowledged, too.
    best = max(holders, key=completeness)
    store, node = stores[best], nodes[best]
    others = {id_: each for id_, each in stores.items() if id_ != best and not doubts[id_]}
    missing = [
        (fault.offset, fault.offset + fault.size)
        for fault in store.damages
        if not any(_has(each, fault, is_member=id_ in trusted) for id_, each in others.items())
    ]
    if missing:
        return _without_bytes(name, missing, store.end, stores.values())
    if store.read_from > store.begin:
        part = f" below offset {store.read_from}" if store.end else ""
        why = f"the log of {node.name}{part} was not read: --full reads it"
        return Safety(name, "unknown", why, (node.name,), store.end or -1)
    role = "was the last master" if best == group.last_master else "is a member"
    log = f"its log is whole up to {store.end}"
    if store.damages:
        log = f"other trusted logs have what is damaged in its log, which ends at {store.end}"
    how = (
        f"{node.name} {role} of the SyncStateSet {_set(group)} of masterEpoch {group.master_epoch};"
        f" {log}"
    )
    full = [i for i in holders if stores[i].end == store.end and not stores[i].damages]
    return Safety(name, "safe", how, tuple(nodes[i].name for i in full or [best]), store.end)


def _names_who_has_all(group: GroupEvidence, stores: Iterable[StoreEvidence]) -> bool:
    """Whether the record of a group says who has all: its whole set, or at least its master."""
    # A store that has seen a higher masterEpoch knows of an election that this record lacks.
    names_master = group.last_master and all(
        group.master_epoch >= store.role_epoch and not store.unread for store in stores
    )
    return bool(group.members and (group.is_current or names_master))


def _without_bytes(
    name: str, missing: list[tuple[int, int]], end: int, stores: Iterable[StoreEvidence]
) -> Safety:
    where = ", ".join(f"{begin} to {end}" for begin, end in missing)
    why = f"no trusted store has the log at {where}"
    if unread := next((store for store in stores if store.unread), None):
        return Safety(name, "unknown", f"{why}; {unread.folder}: {unread.unread}")
    return Safety(name, "lost", why, (), end, tuple(missing))


def _set(group: GroupEvidence) -> str:
    return "{" + ", ".join(map(str, group.members)) + "}"


def _without_holder(
    group: GroupEvidence,
    wanted: set[int],
    nodes: dict[int, NodeEvidence],
    doubts: dict[int, Distrust | None],
) -> Safety:
    here = wanted & nodes.keys()
    # The log of a process that runs was not read: nothing follows from its files.
    if unread := [nodes[i].name for i in sorted(here) if not doubts[i] and nodes[i].has_process]:
        why = f"no master serves, and the logs of {', '.join(unread)} are not read while they run"
        return Safety(group.name, "unknown", why)
    damaged = Distrust("its last bytes are damaged")
    why = "; ".join(f"broker {i}: {(doubts[i] or damaged).why}" for i in sorted(here))
    ends = [n.store.end for i, n in nodes.items() if n.store and doubts[i] != EMPTY]
    end = max(ends, default=0)
    if here != wanted:
        gone = ", ".join(str(each) for each in sorted(wanted - here))
        text = f"the stores of the members {gone} of {_set(group)} are not here"
        return Safety(group.name, "unknown", f"{text}; {why}" if why else text, end=end)
    # A log of another lineage proves nothing: the right one may be on another disk.
    is_gone = all(doubts[each] == EMPTY for each in here)
    lost = ((end, group.confirmed),) if is_gone and group.confirmed > end else ()
    return Safety(group.name, "lost" if is_gone else "unknown", why, end=end, lost=lost)


class Distrust(NamedTuple):
    """Why a store may lack what its broker acknowledged, and the incident that this is, or ""."""

    why: str
    incident: str = ""


EMPTY: Final = Distrust("its store is empty")


def distrust(
    group: GroupEvidence, broker_id: int, store: StoreEvidence, others: Iterable[StoreEvidence]
) -> Distrust | None:
    """None if the store is trusted."""
    if store.is_empty:
        return EMPTY
    if store.group and store.group != group.name:
        return Distrust(f"it is a store of {store.group}", "foreign-group")
    if doubt := lineage_doubt(store, others):
        return doubt
    registered = group.lives.get(broker_id, "")
    if registered and store.lives and store.lives[0] != "?" and registered not in store.lives:
        why = "its folder is older than the process that registered last: a backup, or another disk"
        return Distrust(why, "store-old")
    if store.unread:
        has_failed = "Input/output error" in store.unread
        return Distrust(f"its {store.unread}", "disk-failing" if has_failed else "")
    if store.suspect:
        incident = "disk-failing" if "the disk failed" in store.suspect else "log-suspect"
        return Distrust(f"its broker noted that the log is suspect: {store.suspect}", incident)
    if store.lost_cache:
        why = "its host was started again before the disk had all that was acknowledged"
        return Distrust(why, "power-lost")
    if store.end and store.end < store.known_end:
        why = f"its log ends at {store.end}, and had reached {store.known_end}"
        return Distrust(why, "log-tail-missing")
    return None


def lineage_doubt(store: StoreEvidence, others: Iterable[StoreEvidence]) -> Distrust | None:
    """Why this log may be no part of the group's history (R47): most other stores are of another
    lineage, or the only other one is."""
    logs = [other for other in others if other.has_log and other.folder != store.folder]
    found = [other.lineage for other in logs if other.lineage]
    if not store.lineage or not store.has_log or store.lineage in found:
        return None
    if unread := next((other for other in logs if other.unread and not other.lineage), None):
        return Distrust(
            f"no other log shows that it is of this group: {unread.folder} cannot be read"
        )
    if not found:
        return None
    why = "it and the only other log differ in lineage"
    if max(map(found.count, found)) > 1:
        why = "its log is of another lineage"
    return Distrust(why, "foreign-lineage")


def _has(store: StoreEvidence, fault: FaultEvidence, *, is_member: bool) -> bool:
    """Whether another log has the bytes of that damage: one that is equal there, a member's, or one
    that had them confirmed (G3)."""
    begin, end = fault.offset, fault.offset + fault.size
    is_damaged = any(f.offset < end and begin < f.offset + f.size for f in store.damages)
    is_equal = is_member or store.confirmed >= end
    return is_equal and not is_damaged and store.read_from <= begin and end <= store.end


@dataclass(frozen=True, slots=True)
class Restart:
    """Whether a process may be restarted now. `first`: a command to give before, "" if none."""

    node: str
    allowed: bool
    why: str
    first: str = ""


def may_restart(evidence: Evidence, node: NodeEvidence) -> Restart:
    """Whether the cluster keeps a copy of every acknowledged message in sync, its controllers their
    majority and clients a name server while this process restarts."""
    if node.refuses_us and not (node.kind == BROKER and evidence.leader):
        text = "it runs and refuses this client: what would be lost is not known"
        return Restart(node.name, False, text)
    if node.kind != BROKER:
        return _name_server_may(evidence, node)
    group = evidence.group(node.group)
    is_stopped = node.process is not None and node.process.stopped
    if node.has_process and not node.runs and node.log.is_starting and not is_stopped:
        return Restart(node.name, False, "it is still starting")
    if evidence.is_live and node.asked and not node.runs and not node.refuses_us:
        return Restart(node.name, True, "it does not serve")
    if not evidence.is_live:
        return Restart(node.name, True, "nothing of its group serves")
    if not group.members:
        return Restart(node.name, False, f"the SyncStateSet of {node.group} is not known")
    me = evidence.id_of(node)
    alive = {i: evidence.node_of(group.name, i) for i in group.members if i in group.alive}
    others = [
        each.name if each is not None else f"broker {i}"
        for i, each in alive.items()
        if i != me and (each is None or not each.asked or each.runs)
    ]
    if not others and me in group.members:
        return Restart(node.name, False, f"{node.group} would lose its last copy in sync")
    # Only a leading controller can shrink the set: without one, writes wait for this member (R1).
    if not evidence.leader and me in group.members:
        text = "no controller leads: first mend that, writes would wait until it is back"
        return Restart(node.name, False, text)
    if any("disk is full" in problem for problem in node.problems):
        return Restart(node.name, False, "its disk is full: its start would wait for disk space")
    what = f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} everything"
    if me == group.master:
        first = f"mqctl drain {node.address}"
        return Restart(node.name, True, f"{what}; move the master first", first)
    if me not in group.members:
        what = "it is not in the set"
    return Restart(node.name, True, what)


def _name_server_may(evidence: Evidence, node: NodeEvidence) -> Restart:
    others = [each for each in evidence.name_servers() if each.name != node.name]
    if not evidence.is_live or not node.runs:
        return Restart(node.name, True, "it does not serve")
    if not any(other.runs for other in others):
        return Restart(node.name, False, "clients would lose the last name server")
    if node.controller is not None:
        known = sum(each.controller is not None for each in evidence.name_servers())
        left = sum(other.runs for other in others if other.controller is not None)
        if not evidence.leader:
            text = "no controller leads: first mend that, its log may be needed for it"
            return Restart(node.name, False, text)
        if left * 2 <= known:
            text = f"the controllers would lose their majority: {left} of {known} would run"
            return Restart(node.name, False, text)
        return Restart(node.name, True, f"{left} of {counted(known, 'controller')} continue")
    return Restart(node.name, True, "another name server answers")
