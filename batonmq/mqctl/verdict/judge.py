"""The table of incidents, and the verdict: causes before symptoms. Pure."""

from dataclasses import dataclass, replace
from typing import Final

from batonmq.mqctl.verdict.evidence import Evidence
from batonmq.mqctl.verdict.group_incidents import OF_GROUPS
from batonmq.mqctl.verdict.incidents import OF_NODES, Finding
from batonmq.mqctl.verdict.safety import Restart, Safety, may_restart, safety

OK, DEGRADED, DOWN, NOTE = "ok", "degraded", "down", "note"

_SERVER_ENDED: Final = ("name-server-killed", "name-server-stopped", "name-server-away")
_ENDED: Final = (
    "master-killed", "master-stopped", "master-away", "slave-killed", "slave-stopped",
    "slave-away", *_SERVER_ENDED,
)  # fmt: skip
_HUNG: Final = ("master-hung", "slave-hung", "name-server-hung")
_REFUSED: Final = (
    *_ENDED, "start-refused", "crash-loop", "slave-behind", "controllers-unreached",
    "not-registered",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Incident:
    """One kind. `hides`: incidents of the same node or group that follow from it. `level`: what
    the cluster is for it alone; only a group without a master, or without processes, is down."""

    meaning: str
    hides: tuple[str, ...] = ()
    level: str = DEGRADED


INCIDENTS: Final[dict[str, Incident]] = {
    # Files: what is wrong on a disk stays wrong at the next start.
    "foreign-group": Incident("a store of another broker group is in this folder", _REFUSED),
    "foreign-lineage": Incident("a log that is no part of this group's history", _REFUSED),
    "store-lost": Incident("a broker's store is gone", ("log-tail-missing", *_REFUSED)),
    "store-old": Incident("a backup or another disk in place of the store", _REFUSED),
    "disk-failing": Incident("a disk reports errors", ("log-suspect", "refuses-writes", *_REFUSED)),
    "disk-read-only": Incident("a file system that cannot be written", ("disk-failing", *_REFUSED)),
    "disk-full": Incident("a broker's disk is full", ("refuses-writes", *_REFUSED)),
    "controller-disk-full": Incident("a controller's disk is full", _REFUSED),
    "log-part-damaged": Incident("a part of the log is missing", ("log-tail-missing", *_REFUSED)),
    "log-middle-damaged": Incident("bytes in the log are not what was written", _REFUSED),
    "log-tail-damaged": Incident("the log's last record is bad", ("log-tail-missing", *_REFUSED)),
    "log-tail-missing": Incident("the log ends before a place it had reached", _REFUSED),
    "epoch-file-damaged": Incident("the list of epochs cannot be read", _REFUSED),
    "role-file-damaged": Incident("the highest masterEpoch cannot be read", _REFUSED),
    "identity-file-damaged": Incident("the broker's name cannot be read", _REFUSED),
    "tables-damaged": Incident("a table of topics, groups or offsets is bad", _REFUSED),
    "topic-missing": Incident("a topic has messages, and no table lists it", _ENDED),
    "raft-journal-damaged": Incident("a controller's journal is bad", _REFUSED),
    "raft-vote-damaged": Incident("a controller's term and vote are bad", _REFUSED),
    "raft-snapshot-damaged": Incident("a controller's snapshot is bad", _REFUSED),
    "controller-lost": Incident("a controller's folder is empty", _REFUSED),
    "members-changed": Incident("a controller has other members than its log", _REFUSED),
    "consume-queue-damaged": Incident("a consume queue is bad; made again from the log", _ENDED),
    "index-damaged": Incident("an index file is bad; made again from the log", _ENDED),
    "checkpoint-damaged": Incident("the checkpoint is bad; the log is read instead", _ENDED),
    "queue-positions-damaged": Incident("made again from the log", _ENDED),
    "epoch-file-copy-damaged": Incident("one copy of the epoch list is bad", _ENDED),
    "power-lost": Incident("the host lost power before its disk had all", ("log-suspect", *_ENDED)),
    # Processes that refuse to run, or end again and again.
    "config-wrong": Incident("a setting stops the start", _REFUSED),
    "port-taken": Incident("another process has the port", _REFUSED),
    "permission-denied": Incident("a process may not use a file", _REFUSED),
    "folder-locked": Incident("another process has the folder", _REFUSED),
    "foreign-file": Incident("in the place of a file is something else", _REFUSED),
    "descriptors-exhausted": Incident(
        "too few file descriptors are left", ("connections-closed", *_HUNG, *_REFUSED)
    ),
    "certificate-refused": Incident("a certificate has ended, or is of others", ("slave-behind",)),
    "connections-closed": Incident("a port that may take only TLS", ("slave-behind",)),
    "crash-loop": Incident("a process ends again and again", _ENDED),
    "start-refused": Incident("a process refused to start", _ENDED),
    # The whole, and groups.
    "cluster-killed": Incident("no process runs; they were killed", _ENDED, DOWN),
    "cluster-stopped": Incident("no process runs; they were stopped", _ENDED, DOWN),
    "group-down": Incident("no broker of a group runs", (*_ENDED, "no-master"), DOWN),
    "members-away": Incident("every member of the set is away", (*_ENDED, "slave-behind"), DOWN),
    "only-suspects": Incident("all logs of a group are suspect", ("log-suspect",), DOWN),
    "quorum-lost": Incident(
        "the controllers lost their majority",
        (*_SERVER_ENDED, "name-server-hung", "no-master", "lease-lost", "refuses-writes"),
    ),
    "controllers-differ": Incident("controllers hold different states"),
    "controllers-cut": Incident("controllers do not reach each other"),
    # Single processes.
    "master-hung": Incident("the master answers no request", ("slave-hung", "no-master")),
    "slave-hung": Incident("a slave answers no request"),
    "name-server-hung": Incident("a name server answers no request"),
    "master-killed": Incident("the master was killed", ("no-master",)),
    "master-stopped": Incident("the master was stopped", ("no-master",)),
    "master-away": Incident("the master does not answer", ("no-master",)),
    "slave-killed": Incident("a slave was killed"),
    "slave-stopped": Incident("a slave was stopped"),
    "slave-away": Incident("a slave does not answer"),
    "name-server-killed": Incident("a name server was killed"),
    "name-server-stopped": Incident("a name server was stopped"),
    "name-server-away": Incident("a name server does not answer"),
    # Networks and replication.
    "controllers-unreached": Incident(
        "a broker that the controllers do not hear", ("slave-behind", "peers-cut", "slave-stuck")
    ),
    "peers-cut": Incident("a broker that cannot reach its master", ("slave-behind",)),
    "no-leader": Incident("no controller leads", ("no-master",)),
    "no-master": Incident("a group has no master", ("slave-behind",), DOWN),
    "lease-lost": Incident("a master whose lease ended", ("refuses-writes",)),
    "too-few-in-sync": Incident("fewer members than minInSyncReplicas", ("refuses-writes",)),
    "refuses-writes": Incident("a master takes no writes"),
    "not-registered": Incident("the controllers refuse a broker", ("controllers-unreached",)),
    "log-suspect": Incident("a log may lack what was acknowledged"),
    "slave-stuck": Incident("a slave cannot follow", ("slave-behind",)),
    "slave-behind": Incident("a slave copies its master"),
    "index-failed": Incident("messages are not found by key"),
    "audit-failed": Incident("an audit log is not written"),
    "queue-unreadable": Incident("a consume queue cannot be read"),
    "messages-aside": Incident("messages cannot be delivered"),
    "classic-group": Incident("without controllers: two masters, or none"),
    "classic-master-away": Incident("without controllers: the master is away"),
    "routes-differ": Incident("name servers name different masters"),
    "unclean-election": Incident("a replica without all messages was elected"),
    "switch-failed": Incident("a planned switch did not happen", (), NOTE),
    "clock-skew": Incident("a clock is wrong"),
    # Clients.
    "consumers-gone": Incident("a consumer group has no member", (), NOTE),
    "consumers-stuck": Incident("consumers finish nothing", (), NOTE),
    "consumers-behind": Incident("consumers are far behind", (), NOTE),
    "dead-letters": Incident("messages were given up", (), NOTE),
    "timers-behind": Incident("timed messages wait unread"),
    "delays-stopped": Incident("delayed messages are not delivered", ("timers-behind",)),
    "transactions-unchecked": Incident(
        "no producer is there to say how transactions end", (), NOTE
    ),
    "transactions-given-up": Incident("transactions never got an outcome", (), NOTE),
}
"""In the order in which causes are named."""

_RANK: Final = {name: rank for rank, name in enumerate(INCIDENTS)}
EVERYWHERE: Final = ("cluster-killed", "cluster-stopped", "quorum-lost")


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict. `findings`: causes first."""

    state: str
    findings: tuple[Finding, ...]
    safeties: tuple[Safety, ...]
    restarts: tuple[Restart, ...]

    @property
    def causes(self) -> list[Finding]:
        return [each for each in self.findings if not each.symptom_of]


def judge(evidence: Evidence) -> Judgement:
    found: dict[tuple[str, str], Finding] = {}
    for recognise in (*OF_NODES, *OF_GROUPS):
        for finding in recognise(evidence):
            # Two recognisers may find the same: the words of the first one count.
            found.setdefault((finding.incident, finding.subject), finding)
    # Of one kind the newest first: it is most likely what somebody is asking about.
    ordered = sorted(found.values(), key=lambda f: (_RANK[f.incident], -f.since_ms, f.subject))
    marked = [_marked(finding, ordered) for finding in ordered]
    marked.sort(key=lambda finding: bool(finding.symptom_of))
    safeties = tuple(safety(evidence, name) for name in evidence.group_names)
    restarts = tuple(may_restart(evidence, node) for node in evidence.nodes)
    return Judgement(_state(evidence, marked, safeties), tuple(marked), safeties, restarts)


def _marked(finding: Finding, others: list[Finding]) -> Finding:
    for other in others:
        if other is finding or finding.incident not in INCIDENTS[other.incident].hides:
            continue
        # What happened to a group explains what its brokers show.
        near = other.subject == finding.subject or other.subject in finding.groups
        if near or other.incident in EVERYWHERE:
            return replace(finding, symptom_of=other.incident)
    return finding


def _state(evidence: Evidence, findings: list[Finding], safeties: tuple[Safety, ...]) -> str:
    levels = {INCIDENTS[finding.incident].level for finding in findings}
    if DOWN in levels or evidence.health == DOWN or any(s.state == "lost" for s in safeties):
        return DOWN
    if DEGRADED in levels or evidence.health == DEGRADED:
        return DEGRADED
    return OK
