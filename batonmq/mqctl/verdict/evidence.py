"""What a verdict rests on: facts of each process, store and group, and what is absent.

Pure. Times are ms since 1970, 0 unknown; offsets are bytes of the log, ends exclusive.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, Literal

from batonmq.history.story import Story
from batonmq.mqctl.refusals import is_silent, refuses_client
from batonmq.protocol.bodies import ReplicasInfo

BROKER: Final = "broker"
NAME_SERVER: Final = "name server"
"""A name server process, with its controller if it has one."""

NodeKind = Literal["broker", "name server"]


@dataclass(frozen=True, slots=True)
class AbsentSource:
    """Something that would be evidence, and why it is not there."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """A process of this host. `pid` 0: none serves. `stopped`: by SIGSTOP or a debugger."""

    pid: int = 0
    stopped: bool = False
    descriptors: int = 0
    descriptors_max: int = 0


_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}")


def line_ms(line: str) -> int:
    """The time at the begin of a line of a process's log; 0: none."""
    found = _TIME.match(line)
    return round(datetime.fromisoformat(found[0]).timestamp() * 1000) if found else 0


END_MS: Final = 60_000
_SERVES: Final = (" broker_started ", " namesrv_started ", " controller_started ")
"""What a process logs once its start is over."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a process's log. `starts_ms`: of each start in it; `ended_well`: the last process
    stopped on request; `last_words`: the line with which it refused to run, if it did."""

    lines: tuple[str, ...] = ()
    starts_ms: tuple[int, ...] = ()
    ended_well: bool = False
    last_words: str = ""
    last_ms: int = 0

    def age_ms(self, line: str, now_ms: int) -> int:
        """How long ago a line was written; 0 if it has no time."""
        written = line_ms(line)
        # 0, as if it were new: a line without a time, of a trace, is better shown than left out.
        return now_ms - written if written else 0

    @property
    def is_starting(self) -> bool:
        """Whether the last process has begun, and does not serve yet."""
        return bool(self.latest(" server_started ")) and not self.latest(*_SERVES)

    def latest(self, *texts: str) -> str:
        """The newest line of the last process that has one of these texts."""
        return next((line for line in reversed(self.lines) if any(t in line for t in texts)), "")

    def at_its_end(self, *texts: str) -> str:
        """As `latest`, if its process ended within a minute of that line, and not on request: what
        was logged long before is no reason of an end."""
        line = "" if self.ended_well else self.latest(*texts)
        return line if self.age_ms(line, self.last_ms) <= END_MS else ""


@dataclass(frozen=True, slots=True)
class FaultEvidence:
    """A file that is not what was written. `kind`: see `incidents.FILES`."""

    kind: str
    file: str
    what: str
    offset: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class StoreEvidence:
    """A broker's data folder. The log was read in [`read_from`, `end`); `damages` are in it. If
    nothing was read, `end` is 0 and `read_from` where its files end."""

    folder: str
    cluster: str = ""
    group: str = ""
    broker_id: int = 0
    log_id: str = ""
    lineage: str = ""
    epochs: tuple[tuple[int, int], ...] = ()
    """(masterEpoch, first offset), ascending."""
    role_epoch: int = 0
    begin: int = 0
    end: int = 0
    """Behind the last whole record."""
    read_from: int = 0
    newest_ms: int = 0
    faults: tuple[FaultEvidence, ...] = ()
    suspect: str = ""
    """What the broker noted itself; "" nothing."""
    unread: str = ""
    """A small file that cannot be read, and why: it might say why the log is not to be trusted."""
    lives: tuple[str, ...] = ()
    """Incarnations that wrote here, as far as the file lists them."""
    clean: bool = True
    """Stopped on request, or never started."""
    lost_cache: bool = False
    """It ran under another boot of this host, and acknowledged before its disk had the bytes."""
    known_end: int = 0
    """The log reached at least this offset, by checkpoint and consume queues."""
    confirmed: int = 0
    topics: Mapping[str, int] = field(default_factory=dict)
    """Topic -> messages in its consume queues."""
    queues: Mapping[str, int] = field(default_factory=dict)
    """Topic -> its number of consume queues."""
    listed: frozenset[str] | None = None
    """Topics in its table; None: it has none that can be read."""
    lags: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(group, topic) -> messages that the group has not consumed."""

    @property
    def is_empty(self) -> bool:
        """Whether it lacks a log of its own: lost, wiped, or never used."""
        return not self.log_id and not self.has_log and not self.unread

    @property
    def has_log(self) -> bool:
        """Whether there are records, or files of a log that was not read."""
        return self.end > 0 or self.read_from > 0

    @property
    def damages(self) -> tuple[FaultEvidence, ...]:
        return tuple(fault for fault in self.faults if fault.size and fault.kind.startswith("log-"))


@dataclass(frozen=True, slots=True)
class ControllerFacts:
    folder: str
    node_id: str
    is_empty: bool = False
    faults: tuple[FaultEvidence, ...] = ()
    members: tuple[str, ...] = ()
    configured: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeEvidence:
    """A process of the cluster. None: not known (another host, not asked)."""

    name: str
    kind: NodeKind
    address: str
    group: str = ""
    folder: str = ""
    start: str = ""
    """The command that starts it."""
    process: ProcessFacts | None = None
    log: LogTail = LogTail()
    free_bytes: int = -1
    disk_bytes: int = 0
    read_only: bool = False
    refused: str | None = None
    """Why it did not answer; None: it did, or was not asked."""
    asked: bool = False
    report: Mapping[str, str] = field(default_factory=dict)
    """What a broker answered of itself (request 28)."""
    answered_ms: int = 0
    """When that answer came; 0: none did."""
    problems: tuple[str, ...] = ()
    """What it reports of itself, as in `mqctl health`."""
    due_ms: int = 0
    """When the oldest delayed message that it has not delivered was due; 0: none is known."""
    store: StoreEvidence | None = None
    controller: ControllerFacts | None = None

    @property
    def has_process(self) -> bool:
        return self.process is not None and self.process.pid > 0

    @property
    def groups(self) -> tuple[str, ...]:
        """The broker groups that it serves: none or one."""
        return (self.group,) if self.kind == BROKER else ()

    @property
    def runs(self) -> bool:
        """Whether it is known to serve now."""
        return self.refused is None if self.asked else self.has_process

    @property
    def refuses_us(self) -> bool:
        """Whether it runs, and takes no question from here: it may serve all others."""
        # A process that is known to have ended refuses nothing: a proxy before it does.
        return (self.process is None or self.has_process) and refuses_client(self.refused or "")

    @property
    def is_hung(self) -> bool:
        """Whether its process runs and answers no request."""
        why = (self.refused or "") if self.asked else ""
        # Of another host: only silence says that it hangs. A refused connection says that it ended.
        if self.process is None or not self.process.pid:
            return is_silent(why)
        no_reply = is_silent(why) or "no connection within" in why
        # A broker that recovers its log holds questions for longer than a verdict waits.
        return self.process.stopped or (no_reply and not self.log.is_starting)


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """A broker group as the controllers record it, or their history. `is_current`: nothing newer
    can have been recorded. `replicas`: id -> address; `lives`: id -> its registered process."""

    name: str
    cluster: str = ""
    master: int = 0
    """0: none."""
    last_master: int = 0
    master_epoch: int = 0
    members: tuple[int, ...] = ()
    replicas: Mapping[int, str] = field(default_factory=dict)
    alive: frozenset[int] = frozenset()
    lives: Mapping[int, str] = field(default_factory=dict)
    is_current: bool = False
    where: str = ""
    """Where this is recorded, for people."""
    confirmed: int = -1
    """The highest confirmed offset that was reported."""


def recorded(before: GroupEvidence, info: ReplicasInfo) -> GroupEvidence:
    """The group as the leading controller records it now."""
    # Without an address there is no master, even if an id is recorded.
    master = (info.master_broker_id or 0) if info.master_address else 0
    return replace(
        before,
        master=master,
        last_master=master or before.last_master,
        master_epoch=info.master_epoch or 0,
        members=tuple(sorted(r.broker_id for r in info.in_sync_replicas)),
        replicas={r.broker_id: r.broker_address for r in info.replicas},
        alive=frozenset(r.broker_id for r in info.replicas if r.alive),
        is_current=True,
        where="the leading controller",
    )


@dataclass(frozen=True, slots=True)
class ConsumersEvidence:
    """A consumer group at one topic. `members` -1: not known. `idle_ms`: since the newest consumed
    message was stored, -1 unknown."""

    group: str
    topic: str
    lag: int
    members: int = -1
    in_flight: int = 0
    idle_ms: int = -1


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known at `now_ms`. `start`: the command that starts the whole cluster, "" if it
    runs or is not of `batonmq up`. `is_orphaned`: its `batonmq up` did not end by itself."""

    now_ms: int
    cluster: str = ""
    start: str = ""
    is_orphaned: bool = False
    classic: bool = False
    nodes: tuple[NodeEvidence, ...] = ()
    groups: tuple[GroupEvidence, ...] = ()
    stories: Sequence[Story] = ()
    routes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Name server -> group -> address of the master that it names."""
    leader: str = ""
    controllers: Mapping[str, str | None] = field(default_factory=dict)
    """Controller -> why it does not answer."""
    controller_problems: tuple[str, ...] = ()
    consumers: tuple[ConsumersEvidence, ...] = ()
    absent: tuple[AbsentSource, ...] = ()
    is_live: bool = False
    """Some process answered."""
    health: str = ""
    """The state that `mqctl health` would report, "" if it was not asked."""

    def brokers(self, group: str = "") -> Iterator[NodeEvidence]:
        return (n for n in self.nodes if n.kind == BROKER and group in ("", n.group))

    def name_servers(self) -> Iterator[NodeEvidence]:
        return (node for node in self.nodes if node.kind == NAME_SERVER)

    def stores(self, group: str) -> list[StoreEvidence]:
        found = (node.store for node in self.brokers(group))
        return [store for store in found if store is not None]

    def group(self, name: str) -> GroupEvidence:
        return next((group for group in self.groups if group.name == name), GroupEvidence(name))

    def stories_of(self, group: str) -> list[Story]:
        """The stories of a group, oldest first."""
        return [story for story in self.stories if story.broker_name == group]

    def id_of(self, node: NodeEvidence) -> int:
        """The broker id of a node; 0 unknown."""
        # The record first: an emptied store has no id of its own. The newest: what was here before
        # it was emptied had another one.
        for broker_id, address in sorted(self.group(node.group).replicas.items(), reverse=True):
            if address and address == node.address:
                return broker_id
        return node.store.broker_id if node.store is not None else 0

    def node_of(self, group: str, broker_id: int) -> NodeEvidence | None:
        return next((n for n in self.brokers(group) if self.id_of(n) == broker_id), None)

    @property
    def group_names(self) -> list[str]:
        return sorted({g.name for g in self.groups} | {n.group for n in self.brokers()} - {""})
