"""Incidents of processes, stores and disks: how each is recognised, and what may be done. Pure.

A recogniser looks at the evidence and yields findings; `judge` puts them in order.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from batonmq.mqctl.refusals import (
    CLOSES,
    closes,
    distrusts,
    lacks_descriptors,
    lacks_disk_space,
    of_others,
)
from batonmq.mqctl.verdict.evidence import BROKER, Evidence, NodeEvidence
from batonmq.mqctl.verdict.safety import distrust, safety
from batonmq.runtime.words import counted

# Estimates that are shown with a repair.
START_S: Final = 3
REFILL_BYTES_S: Final = 50 << 20
SKEW_MS: Final = 2_000
LOOP_MS: Final = 600_000
"""An older line of a log does not explain what is wrong now."""
# So many starts within that time are no accident: `batonmq up` starts a process that fails again
# within 5 s.
LOOP_STARTS: Final = 4
LOOP_SPAN_MS: Final = 60_000
LEAVING_MS: Final = 3_000
"""A master that hands over in order to stop has left the set by then."""
CROWDED_OUT: Final = " connections_crowded_out "
SPACE_AGAIN: Final = " disk_has_space "
"""Lines of a process's log."""
ROTATE: Final = "mqctl secure status; mqctl secure rotate"


@dataclass(frozen=True, slots=True)
class Repair:
    """`lost`: what of the acknowledged messages it gives up, "" nothing; `copies`: complete copies
    of the group while it runs, -1 where that does not change."""

    what: str
    command: str = ""
    seconds: int = 0
    lost: str = ""
    copies: int = -1


@dataclass(frozen=True, slots=True)
class Finding:
    """One incident. `subject`: the node or group that it happened to; `repairs`: best first."""

    incident: str
    subject: str
    cause: str
    since_ms: int = 0
    groups: tuple[str, ...] = ()
    repairs: tuple[Repair, ...] = ()
    symptom_of: str = ""


Recogniser = Callable[[Evidence], Iterable[Finding]]


def of_node(
    node: NodeEvidence, incident: str, cause: str, *repairs: Repair, since_ms: int = 0
) -> Finding:
    """An incident of a process or its store; that of a broker touches its group."""
    return Finding(incident, node.name, cause, since_ms, node.groups, repairs)


# Repairs.

WAIT: Final = Repair("wait: it starts, or it stops", "mqctl health --watch --within 60")


def start_of(evidence: Evidence, node: NodeEvidence) -> Repair:
    whole = evidence.start
    what = "start the cluster again" if whole else f"start {node.name} again"
    return Repair(what, whole or node.start, START_S)


def refill(evidence: Evidence, node: NodeEvidence) -> Repair:
    """The step that lets it copy its master; offered only if another store has everything."""
    store = node.store
    size = max((each.end - each.begin for each in evidence.stores(node.group)), default=0)
    seconds = START_S + max(size, store.end if store else 0) // REFILL_BYTES_S
    state = safety(evidence, node.group)
    others = [name for name in state.holders if name != node.name]
    # Its own store does not count: it is what would be moved aside.
    if state.state != "safe" or not others:
        what = "keep this folder: nothing proves that another store has everything"
        return Repair(what, f"cp -a {node.folder} {node.folder}.kept")
    what = f"move the store aside and start: it copies its master ({', '.join(others)} has all)"
    command = f"batonmq moveAside {node.folder} && {evidence.start or node.start}"
    return Repair(what, command, seconds, copies=len(others))


# What happened to a process.


def _role(evidence: Evidence, node: NodeEvidence) -> str:
    """`master` if it is or was the master of its group until this happened."""
    if node.kind != BROKER:
        return "name-server"
    me, group = evidence.id_of(node), evidence.group(node.group)
    if me and me == group.last_master:
        return "master"
    last = next((s for s in reversed(evidence.stories_of(node.group)) if s.is_election), None)
    if not me or last is None or last.master_before != me or last.kind not in HANDED_OVER:
        return "slave"
    since = last.elected_ms
    later = [is_in for at, is_in in _memberships(evidence, node.group, me) if at >= since]
    restarted = any(
        step.name == "restarted" and step.broker_id == me and step.time_ms > since
        for story in evidence.stories_of(node.group)
        for step in story.steps
    )
    came_back = restarted or (False, True) in pairwise(later)
    # Who hands over in order to stop is still in the new set, and leaves it at once.
    ended_ms = _left_ms(evidence, node.group, me)
    ended_ms = ended_ms or (evidence.now_ms if node.is_hung else node.log.last_ms)
    return "slave" if came_back or ended_ms > since + LEAVING_MS else "master"


HANDED_OVER: Final = ("failover", "planned_switch")


def _memberships(evidence: Evidence, group: str, me: int) -> list[tuple[int, bool]]:
    """From when on a broker was in the SyncStateSet, or was not; oldest first."""
    sets = [
        entry
        for story in evidence.stories_of(group)
        for entry in (
            *([(story.elected_ms, story.sync_state_set)] if story.is_election else []),
            *((at, members) for at, members, _ in story.set_changes),
        )
    ]
    return [(at, me in members) for at, members in sorted(sets)]


def _left_ms(evidence: Evidence, group: str, me: int) -> int:
    """When a broker left the set that it is not in now; 0: it is, or was never."""
    left, was_in = 0, False
    for at, is_in in _memberships(evidence, group, me):
        left = 0 if is_in else at if was_in else left
        was_in = is_in
    return left


def _processes(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.nodes:
        process, why, who = node.process, node.refused or "", _title(evidence, node)
        # First: who shows or refuses a certificate runs, and must not be killed for its silence.
        if node.refuses_us and distrusts(why):
            renew = Repair("renew it, if its dates are wrong and no clock is", ROTATE)
            if of_others(why):
                renew = Repair("take the ca.pem of its cluster: it is not what is trusted here")
            yield of_node(node, "certificate-refused", f"{node.name}: {why}", renew)
        elif node.refuses_us and closes(why):
            yield of_node(node, "connections-closed", f"{who}: {why}", Repair(CLOSES))
        elif node.is_hung:
            pid = f" {process.pid}" if node.has_process and process is not None else ""
            is_stopped = process is not None and process.stopped
            how = "is stopped (SIGSTOP, a debugger)" if is_stopped else "answers no request"
            yield _not_serving(evidence, node, "hung", f"{who}: its process{pid} {how}")
        elif process is not None and not process.pid and node.folder:
            yield _ended(evidence, node)
        elif node.has_process and node.asked and not node.runs:
            how = "starts" if node.log.is_starting else "runs and does not serve"
            yield _not_serving(evidence, node, "away", f"{who}: its process {how}: {why}")
        elif process is None and node.asked and not node.runs:
            began = since(evidence, node)
            why_ended = Repair("read why in its events, and in its log", "mqctl timeline --last 3")
            name = f"{_role(evidence, node)}-away"
            yield of_node(node, name, f"{who}: {why}", why_ended, since_ms=began)


def _not_serving(evidence: Evidence, node: NodeEvidence, what: str, cause: str) -> Finding:
    name, repairs = f"{_role(evidence, node)}-{what}", serving_again(evidence, node)
    return of_node(node, name, cause, *repairs, since_ms=since(evidence, node))


def serving_again(evidence: Evidence, node: NodeEvidence) -> tuple[Repair, ...]:
    """What makes a process serve that does not. One that runs holds the lock of its folder."""
    if node.refuses_us:
        return (Repair("it runs, and takes no question from here: see why", "mqctl health"),)
    if not node.has_process or node.process is None:
        return (start_of(evidence, node),)
    # A kill would make a start begin again, and cut short what a stop still writes.
    if not node.is_hung:
        return (WAIT,)
    pid = node.process.pid
    kill = Repair("end it: it is started again, or start it", f"kill -9 {pid}", START_S)
    on = (Repair("let it continue", f"kill -CONT {pid}"),) if node.process.stopped else ()
    return (*on, kill)


def _ended(evidence: Evidence, node: NodeEvidence) -> Finding:
    who, log, start = _title(evidence, node), node.log, start_of(evidence, node)
    began = since(evidence, node)
    recent = [ms for ms in log.starts_ms if ms > log.last_ms - LOOP_SPAN_MS]
    if words := log.last_words:
        name = next((n for text, n in LAST_WORDS.items() if text in words.lower()), "")
        names_settings = re.search(r"\.(yaml|yml|conf|properties)(:\d+)?: ", words)
        name = name or ("config-wrong" if names_settings else "start-refused")
        cure = REFUSED.get(name, Repair("cure what it says, then start it"))
        cause = f"{node.name} ended: {words.partition(': ')[2]}"
        return of_node(node, name, cause, cure, start, since_ms=began)
    if len(recent) >= LOOP_STARTS and not log.ended_well:
        cause = f"{who} ended {len(recent)} times within a minute, by a signal or out of memory"
        look = Repair("look for the killer", f"dmesg | tail; tail -50 {node.folder}/process.log")
        return of_node(node, "crash-loop", cause, look, start, since_ms=recent[0])
    stopped = log.ended_well or (node.store is not None and node.store.clean and log.lines)
    how = "was stopped on request" if stopped else "was killed: its log ends without a word"
    name = f"{_role(evidence, node)}-{'stopped' if stopped else 'killed'}"
    return of_node(node, name, f"{who} {how}", start, since_ms=began)


def _title(evidence: Evidence, node: NodeEvidence) -> str:
    if node.kind != BROKER:
        part = f" with controller {node.controller.node_id}" if node.controller else ""
        return f"name server {node.address or node.name}{part}"
    return f"{node.name} ({_role(evidence, node)} of {node.group}, {node.address})"


def since(evidence: Evidence, node: NodeEvidence) -> int:
    """When the cluster noticed that this node was gone, else its last line."""
    left = _left_ms(evidence, node.group, evidence.id_of(node)) if node.kind == BROKER else 0
    # The loss of a master is seen before its successor is elected.
    elections = (s for s in evidence.stories_of(node.group) if left and s.elected_ms == left)
    return next((s.began_ms for s in elections), left) or node.log.last_ms


LAST_WORDS: Final = {
    "no space left": "disk-full",
    "quota exceeded": "disk-full",
    "read-only file system": "disk-read-only",
    "input/output error": "disk-failing",
    "structure needs cleaning": "disk-failing",
    "is no regular file": "foreign-file",
    "is a directory": "foreign-file",
    "of this folder's log": "foreign-file",
    "too many open files": "descriptors-exhausted",
    "permission denied": "permission-denied",
    "address already in use": "port-taken",
    "it is taken": "port-taken",
    "holds brokerclustername": "foreign-group",
    "another process": "folder-locked",
    "locked": "folder-locked",
    "written in a quorum of": "members-changed",
}
"""What a process said when it ended (lower case) -> the incident."""

REFUSED: Final = {
    "port-taken": Repair("end what listens there, or change the port", "ss -ltnp"),
    "permission-denied": Repair("give it to the user that runs the process (chown), then start it"),
    "config-wrong": Repair("correct the setting that it names"),
    "disk-full": Repair("free disk space; nothing is lost"),
    "foreign-file": Repair("put back what belongs there; it names the path"),
    "members-changed": Repair("give every controller the same controllerDLegerPeers"),
}


# What files show.

FILES: Final[Mapping[str, tuple[str, bool]]] = {
    "log-middle": ("bytes within the log are damaged", True),
    "log-part": ("a part of the log is missing", True),
    "log-tail": ("the log's last bytes are damaged", True),
    "epoch-file": ("the epoch list and its copy are damaged", True),
    "epoch-file-copy": ("one of two copies of the epoch list is damaged", False),
    "role-file": ("the file of the highest masterEpoch is damaged", True),
    "identity-file": ("the file that names this broker is damaged", True),
    "tables": ("a table of topics, groups or offsets is damaged", False),
    "checkpoint": ("the checkpoint is damaged", False),
    "queue-positions": ("the file of queue positions is damaged", False),
    "consume-queue": ("a consume queue is damaged", False),
    "index": ("an index file is damaged", False),
    "raft-journal": ("a controller's Raft journal is damaged", True),
    "raft-vote": ("a controller's file of term and vote is damaged", True),
    "raft-snapshot": ("a controller's snapshot is damaged", True),
}
"""Kind of a damaged file -> what it means, and whether its process needs help with it: the others
are made again from the log, or from a copy, at the next start."""


def _damaged(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.nodes:
        faults = node.store.faults if node.store else ()
        faults += node.controller.faults if node.controller else ()
        for kind, (meaning, needs_help) in FILES.items():
            own = [fault for fault in faults if fault.kind == kind]
            if not own:
                continue
            first, others = own[0], len(own) - 1
            size = counted(first.size, "byte")
            place = f" at offset {first.offset}, {size}" if first.size else ""
            more = f" (and {others} more)" if others else ""
            cause = f"{node.name}: {meaning}: {first.file}{place}: {first.what}{more}"
            repair = start_of(evidence, node)
            if needs_help:
                mend = refill if node.kind == BROKER else _empty_controller
                repair = mend(evidence, node)
            began = since(evidence, node)
            yield of_node(node, f"{kind}-damaged", cause, repair, since_ms=began)


def _empty_controller(evidence: Evidence, node: NodeEvidence) -> Repair:
    controller = node.controller
    assert controller is not None
    bad = [
        each.name
        for each in evidence.name_servers()
        if each.controller and (each.controller.faults or each.controller.is_empty)
    ]
    known = sum(each.controller is not None for each in evidence.name_servers())
    # What a majority had applied is lost with it: the others could agree on less.
    if 2 * len(bad) >= known:
        return Repair("restore the folder of one controller from a backup: a majority is damaged")
    raft = f"{controller.folder}/raft"
    command = f"mv {raft} {raft}.aside && {evidence.start or node.start}"
    return Repair("move its log aside and start: it fetches it from the others", command, START_S)


def _lost_stores(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.brokers():
        store, group = node.store, evidence.group(node.group)
        me = evidence.id_of(node)
        if store is None or not store.is_empty or not (me in group.replicas or store.broker_id):
            continue
        others = evidence.stores(node.group)
        # All are empty, and nothing was ever confirmed: a group that has just been made.
        if not any(other.has_log for other in others) and group.confirmed <= 0:
            continue
        cause = f"{node.name}: its store is empty, {store.folder} was lost, wiped or not mounted"
        repair = Repair("mount the volume again, or restore it: no other store is proven complete")
        if safety(evidence, node.group).state == "safe":
            repair = replace(start_of(evidence, node), what="start it: it copies its master")
        yield of_node(node, "store-lost", cause, repair)


def _wrong_stores(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.brokers():
        store = node.store
        if store is None or store.is_empty:
            continue
        group = evidence.group(node.group)
        doubt = distrust(group, evidence.id_of(node), store, evidence.stores(node.group))
        if doubt is not None and doubt.incident:
            cause = f"{node.name}: {doubt.why}"
            yield of_node(node, doubt.incident, cause, refill(evidence, node))


def _controllers_lost(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.name_servers():
        facts = node.controller
        if facts is None:
            continue
        if facts.is_empty and evidence.stories:
            cause = f"{node.name}: the folder of controller {facts.node_id} is empty"
            repair = _empty_controller(evidence, node)
            if repair.command.startswith("mv"):  # there is nothing to move
                repair = start_of(evidence, node)
            yield of_node(node, "controller-lost", cause, repair)
        elif facts.members and facts.configured and set(facts.members) != set(facts.configured):
            cause = (
                f"{node.name}: its log was written by {', '.join(facts.members)}, configured are"
                f" {', '.join(facts.configured)}"
            )
            yield of_node(node, "members-changed", cause, REFUSED["members-changed"])


# Disks and limits.


def _disks(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.nodes:
        reported = next(filter(lacks_disk_space, node.problems), "")
        has_none = 0 <= node.free_bytes < max(1 << 20, node.disk_bytes // 1000)
        ended = "" if node.runs else node.log.at_its_end("No space left", "quota exceeded")
        if reported or has_none or (ended and SPACE_AGAIN not in ended):
            free = f"{node.free_bytes >> 20} MiB are free in {node.folder}" if node.folder else ""
            when = "is full" if reported or has_none else "was full when it ended"
            cause = f"{node.name}: {f'its disk {when}; {free}' if free else reported}"
            if reported and free and not has_none:  # its own state decides
                what, again = reported, ""
                if "% of it is used" not in reported:
                    needs = "".join(reported.partition("; a segment")[1:]).rstrip(")")
                    what = f"a write found no space on its disk{needs}"
                    again = "; what waits is tried again every second"
                cause = f"{node.name}: {what}; {free.replace(' are free', ' are free now')}{again}"
            keep = f"mqctl updateBrokerConfig -b {node.address} -k fileReservedTime -v 24"
            repairs = [
                Repair("free disk space; it continues by itself", f"df -h {node.folder}".rstrip())
            ]
            if node.kind == BROKER and node.runs:
                repairs.append(Repair("keep messages for a shorter time", keep, 60))
            name = "disk-full" if node.kind == BROKER else "controller-disk-full"
            yield of_node(node, name, cause, *repairs, since_ms=since(evidence, node))
        if node.read_only or (not node.runs and node.log.at_its_end("Read-only file system")):
            cause = f"{node.name}: the file system of {node.folder} is read-only"
            look = Repair("look why", "dmesg | tail -30")
            yield of_node(node, "disk-read-only", cause, look, Repair("then make it writable"))
        elif not node.runs and node.log.at_its_end("Input/output error"):
            words = node.log.latest("Input/output error")[-120:]
            cause = f"{node.name}: its disk reports errors: {words}"
            repairs = [refill(evidence, node)] if node.kind == BROKER else []
            yield of_node(node, "disk-failing", cause, *repairs, since_ms=node.log.last_ms)


def _descriptors(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.nodes:
        process = node.process
        count, most = (process.descriptors, process.descriptors_max) if process else (0, 0)
        log, text = node.log, "Too many open files"
        line = log.latest(text) if node.runs else log.at_its_end(text)
        was_refused = bool(line) and log.age_ms(line, evidence.now_ms) < LOOP_MS
        # It keeps a part of them for its files, and closes connections long before all are used.
        line = log.latest(CROWDED_OUT) if node.runs or node.refuses_us else ""
        was_crowded = bool(line) and log.age_ms(line, evidence.now_ms) < LOOP_MS
        was_refused = was_refused or any(map(lacks_descriptors, node.problems))
        if (most and count * 20 >= most * 19) or was_refused or (was_crowded and count * 2 >= most):
            used = f"{count} of its {most} file descriptors are in use"
            cause = f"{node.name}: {used if most else 'it has too few file descriptors'}"
            if was_crowded:
                cause += "; it closes connections to keep some for its files"
            elif was_refused:
                cause += "; it asked for one more and got none"
            what = "raise its limit (LimitNOFILE of systemd, ulimit -n) and restart it"
            limit = Repair(what, "ulimit -n 65536", START_S)
            yield of_node(node, "descriptors-exhausted", cause, limit)


OF_NODES: Final[tuple[Recogniser, ...]] = (
    _damaged,
    _lost_stores,
    _wrong_stores,
    _controllers_lost,
    _disks,
    _descriptors,
    _processes,
)
