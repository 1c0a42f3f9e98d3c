"""`RaftLog`: the replicated log over pysyncobj, one TCP port per node.

Invariant: commands have one order on all nodes. A proposer gets `Applied` only after this node
applied its command, `NotApplied` only if it can never be applied, else `Unknown`.

pysyncobj ticks and applies commands in its own thread. That thread uses no data of the event loop:
`_commit` and every callback only post to the loop (`call_soon_threadsafe`). It ends with the thread
that started it, so call `start()` in the main thread.

After a start the state is that of the snapshot. Later entries of the journal are applied again once
a leader is elected and reports how far they are committed.
"""

import asyncio
import errno
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from cryptography.fernet import MultiFernet
from pysyncobj.config import FAIL_REASON, SyncObjConf
from pysyncobj.syncobj import SyncObj, SyncObjException, replicated

from batonmq.controller.config import Peer, RaftTimings
from batonmq.controller.raft import transport
from batonmq.controller.raft.cipher import read_cipher
from batonmq.controller.raft.election_messages import election_window_ms, majority_since
from batonmq.controller.raft.journal import DurableJournal, JournalDamage, check_log, has_commands
from batonmq.controller.raft.log import (
    Applied,
    Commit,
    DigestWatch,
    Heard,
    LogStatus,
    Machine,
    NotApplied,
    Outcome,
    RaftProblems,
    Reports,
    Unknown,
    UnknownRulesError,
)
from batonmq.controller.raft.membership import Membership, check_members, common_rules, keep_log
from batonmq.controller.raft.snapshot import BadSnapshot, FileSnapshots
from batonmq.controller.rules.commands import AnyCommand, BecomeController, encode
from batonmq.controller.rules.state import ControllerState
from batonmq.runtime.clock import boot_s
from batonmq.runtime.followed_files import FollowedFiles
from batonmq.runtime.sockets import CannotListenError, check_port_free, listening_as, look_up
from batonmq.runtime.tls import PortTls

log = logging.getLogger(__name__)

_FOLLOWER: Final = 0
_LEADER: Final = 2
"""pysyncobj's _RAFT_STATE.LEADER."""

_BARRIER: Final = b""
"""The command of a read barrier: it changes nothing. When it is applied, so is all that came
before.
"""

_NEVER_APPLIED: Final = {
    FAIL_REASON.QUEUE_FULL: "queue full",
    FAIL_REASON.MISSING_LEADER: "no leader",
    FAIL_REASON.REQUEST_DENIED: "denied",
    FAIL_REASON.NOT_LEADER: "not the leader",
}
_UNKNOWN: Final = {
    FAIL_REASON.LEADER_CHANGED: "leader changed",
    FAIL_REASON.DISCARDED: "discarded",
    FAIL_REASON.UNKNOWN_OUTCOME: "outcome unknown",
}

_EXIT_FATAL: Final = 70
_DEADLINES: Final = {
    _FOLLOWER: "_SyncObj__raftElectionDeadline",
    _LEADER: "_SyncObj__newAppendEntriesTime",
}
_TICKS_MOST: Final = 4
"""A turn waits for so many ticks at most, so that what needs a turn and has no deadline, such as a
report for the leader, is not late."""
_JUST_AFTER_S: Final = 0.001
"""A turn that begins just before a deadline would have to wait once more."""

SNAPSHOT_NAME: Final = "snapshot"
COMPACT_AFTER_ENTRIES: Final = 2_000
LOG_ALARM_BYTES: Final = 32 << 20
"""Half of the size of a batch, in which a follower must be able to receive a whole log."""


def make_conf(timings: RaftTimings, bind_address: str, **own: Any) -> SyncObjConf:
    """The settings under which pysyncobj is safe for a controller. Raises TypeError for a name that
    pysyncobj does not know, which it would silently accept."""
    settings: dict[str, Any] = {
        "raftMinTimeout": timings.election_min_ms / 1000,
        "raftMaxTimeout": timings.election_max_ms / 1000,
        "appendEntriesPeriod": timings.heartbeat_ms / 1000,
        "autoTickPeriod": timings.tick_ms / 1000,
        "leaderFallbackTimeout": timings.election_min_ms / 1000,
        # One batch of 64 MiB. Where pysyncobj splits batches it loses acknowledged entries, a
        # diverged follower never catches up, and a command near a multiple of the size fails.
        "appendEntriesUseBatch": False,
        "appendEntriesBatchSizeBytes": 2**26,
        # No idle time-out: followers do not talk to each other, and their first request for a vote
        # would be dropped with the idle connection.
        "connectionTimeout": 1e6,
        # Sooner than a node that just started and is not connected would stand for election.
        "connectionRetryTime": min(0.2, timings.election_min_ms / 4000),
        "tcp_keepalive": (1, 1, 3),
        "commandsWaitLeader": False,
        "commandsQueueSize": 1000,
        "maxBindRetries": 10,
        "bindRetryTime": 0.1,
        "logCompactionMinEntries": COMPACT_AFTER_ENTRIES,
        "useFork": False,
        "bindAddress": bind_address,
        **own,
    }
    unknown = settings.keys() - vars(SyncObjConf()).keys()
    if unknown:
        raise TypeError(f"pysyncobj has no setting named {', '.join(sorted(unknown))}")
    return SyncObjConf(**settings)


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """One node of a group. `folder` has its log, belongs to this node alone, and is created if
    missing. An empty `bind_host` means the host of `self_peer`; without `password_file` the port is
    open to all.
    """

    self_peer: Peer
    peers: tuple[Peer, ...]
    timings: RaftTimings
    folder: Path
    bind_host: str = ""
    cluster: str = ""
    password_file: Path | None = None
    compact_after_entries: int = COMPACT_AFTER_ENTRIES
    tls: PortTls | None = None


class _Node(SyncObj):  # type: ignore[misc]
    """The replicated object. It has one method: pysyncobj writes the number of the method into the
    log, and that must never change."""

    def __init__(
        self,
        self_address: str,
        others: list[str],
        conf: SyncObjConf,
        owner: "RaftLog",
        transport_class: Callable[..., transport.GuardedTransport],
    ) -> None:
        self._owner = owner
        super().__init__(self_address, others, conf=conf, transportClass=transport_class)

    @replicated  # type: ignore[untyped-decorator]
    def _commit(self, raw: bytes) -> Any:
        # Never raises: pysyncobj would retry the entry on every node at every tick.
        return self._owner._apply(raw, self.raftLastApplied + 1)

    @property
    def transport(self) -> transport.GuardedTransport:
        guarded: transport.GuardedTransport = self._SyncObj__transport
        return guarded

    def _onTick(self, timeToWait: float = 0.0) -> None:
        super()._onTick(self._wait_s(timeToWait))
        owner = self._owner
        if owner._first_lead and self.raftCommitIndex >= self._SyncObj__noopIDx:
            owner._first_lead = False
            owner._post(owner._role_changed, True)

    def _wait_s(self, tick_s: float) -> float:
        """How long a turn of the tick thread waits: `tick_s`, or until this node's next deadline if
        it is connected to all others. Messages and commands wake it at once."""
        if self.transport.is_apart or self.raft_state not in _DEADLINES:
            return tick_s
        left_s = float(getattr(self, _DEADLINES[self.raft_state])) - boot_s()
        # A heartbeat that is due goes out in this turn, before the wait.
        if left_s < 0 and self.raft_state == _LEADER:
            left_s = float(self._SyncObj__conf.appendEntriesPeriod)
        return min(max(0.0, left_s) + _JUST_AFTER_S, _TICKS_MOST * tick_s)

    @property
    def raft_state(self) -> int:
        state: int = self._SyncObj__raftState
        return state

    def majority_answered_since(self, since_s: float) -> bool:
        """Whether this leader and those that answered it since then (`boot_s`) are a majority."""
        answered_s = self.transport.answered_s.values()
        return majority_since(answered_s, len(self._SyncObj__otherNodes) + 1, since_s)

    def report(self, index: int, unheard: frozenset[Heard], urgent: bool) -> None:
        """For the leader, see `Reports`. Any thread may call it."""
        self.transport.hearing = (index, tuple(unheard))
        if urgent and self.raft_state != _LEADER:
            self._SyncObj__pipeNotifier.notify()

    def close_pipe(self) -> None:
        """Closes both ends of a pipe that pysyncobj leaves open. Call it after the thread has
        ended.
        """
        notifier = self._SyncObj__pipeNotifier
        os.close(notifier._PipeNotifier__pipeR)
        os.close(notifier._PipeNotifier__pipeW)


def exit_process(what: str) -> NoReturn:
    """Ends the process of a node whose state could become another one than that of its peers."""
    log.critical("raft_fatal reason=%r", what)
    logging.shutdown()
    os._exit(_EXIT_FATAL)


class RaftLog:
    """See `raft.log.ReplicatedLog`. One object for each start; it cannot be started again."""

    def __init__(
        self,
        settings: RaftSettings,
        machine: Machine,
        *,
        on_fatal: Callable[[str], object] = exit_process,
    ) -> None:
        self._settings = settings
        self._machine = machine
        self._on_fatal = on_fatal
        self._membership = Membership.of(settings.cluster, settings.peers, machine.rules)
        self._problems = RaftProblems()
        self._digests = DigestWatch(self._problems)
        self._state = machine.state
        self._journal: DurableJournal | None = None
        self._snapshots: FileSnapshots | None = None
        self._node: _Node | None = None
        self._password: FollowedFiles[MultiFernet] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leading = False
        self._first_lead = False
        """Whether this node leads in the first start of a quorum, and its first entry is not
        committed yet."""
        self._not_leading = asyncio.Event()
        """Set while this node does not lead."""
        self._waiting: set[asyncio.Future[Outcome]] = set()
        self._role_callbacks: list[Callable[[bool], None]] = []
        self.reports = Reports()
        self._applied_callbacks: list[Callable[[Commit], None]] = []
        self.rules_most = 0

    # On the event loop's thread.

    @property
    def state(self) -> ControllerState:
        return self._state

    async def start(self) -> None:
        """Opens the log, binds the Raft port and joins the others.

        Raises CannotListenError; JournalDamage or OSError for a folder that cannot be used,
        MembersChangedError for one of another quorum; SecretFileError; ValueError under -O.
        """
        if not __debug__:
            raise ValueError("python -O removes checks that pysyncobj and this code rely on")
        self._loop = asyncio.get_running_loop()
        settings = self._settings
        name, port = settings.bind_host or settings.self_peer.host, settings.self_peer.raft_port
        # pysyncobj binds to an address only.
        host = look_up(name)
        # A start on a full disk is repeated, and must not follow the file twice.
        if settings.password_file is not None and self._password is None:
            read = functools.partial(read_cipher, settings.password_file)
            paths = [str(settings.password_file)]
            self._password = FollowedFiles("raftPasswordFile", paths, read)
            self._password.watch()
        # Fails here if the port is taken: pysyncobj would retry the bind in its thread.
        with listening_as("Raft", port):
            check_port_free(host, port)
        check_members(settings.folder, self._membership)
        journal, snapshots = self._open_folder()
        try:
            if not has_commands(journal):
                self._membership.log = ""  # the log begins again, and gets another name
            check_log(journal, self._membership.log)
            conf = self._conf(
                f"{host}:{port}",
                password=self._password,
                journalFile=journal,
                serializer=snapshots,
                deserializer=snapshots.deserialize,
            )
            self._node = self._join(conf)
        except BaseException:  # also without descriptors for its sockets
            journal.close()
            raise
        names = {peer.raft_address: peer.node_id for peer in settings.peers}
        self._node.transport.on_hearing = lambda address, *report: self._post(
            self.reports.on_report, names.get(address, address), *report
        )
        self.reports.send = self._node.report
        # pysyncobj binds in its own thread.
        try:
            await asyncio.to_thread(self._node.waitBinded)
        except SyncObjException as error:
            taken = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            raise CannotListenError("Raft", port, taken) from error

    def _conf(self, bind_address: str, **objects: Any) -> SyncObjConf:
        settings, timings = self._settings, self._settings.timings
        own = settings.self_peer.raft_address
        window_ms = election_window_ms(
            own,
            {peer.raft_address for peer in settings.peers} | {own},
            timings.election_min_ms,
            timings.election_max_ms,
        )
        return make_conf(
            timings,
            bind_address,
            raftMinTimeout=window_ms[0] / 1000,
            raftMaxTimeout=window_ms[1] / 1000,
            fullDumpFile=str(settings.folder / SNAPSHOT_NAME),
            logCompactionMinEntries=settings.compact_after_entries,
            onStateChanged=self._on_state_changed,
            **objects,
        )

    def _join(self, conf: SyncObjConf) -> _Node:
        """Starts the tick thread, which binds the port and dials the others."""
        transport.install()
        own = self._settings.self_peer.raft_address
        others = [peer.raft_address for peer in self._settings.peers if peer.raft_address != own]
        guarded = functools.partial(
            transport.GuardedTransport,
            membership=self._membership,
            problems=self._problems,
            digests=self._digests,
            tls=self._settings.tls,
        )
        return _Node(own, others, conf, self, guarded)

    def _open_folder(self) -> tuple[DurableJournal, FileSnapshots]:
        path = self._settings.folder / SNAPSHOT_NAME
        try:
            snapshots = FileSnapshots(
                path,
                capture=lambda: self._machine.state.to_snapshot(),
                restore=self._restore,
                holds=lambda index, term: journal.holds(index, term),
                on_fatal=self._die,
            )
        except BadSnapshot as error:
            raise JournalDamage(path, f"no whole snapshot: {error}") from error
        # Before the journal is opened, which then begins with the snapshot.
        if not snapshots.has_name(self._membership.log):
            raise JournalDamage(path, f"it is not of this folder's log {self._membership.log}")
        journal = DurableJournal(self._settings.folder, snapshots.head, self._die)
        self._journal, self._snapshots = journal, snapshots
        return journal, snapshots

    async def propose(self, command: AnyCommand, timeout_ms: int) -> Outcome:
        # BecomeController, by the rules in force: a new leader may not have applied all entries yet
        # and not know which rules these are.
        rules = 0 if isinstance(command, BecomeController) else self._rules()
        return await self._propose(encode(command, rules), timeout_ms)

    def rules_due(self) -> bool:
        return self._rules() != self._state.rules

    def _rules(self) -> int:
        """The version of the rules for the next command: every member must know it."""
        node, in_force = self._node, self._state.rules
        if node is None:
            return in_force
        announced = node.transport.announced.values()
        members = len(self._settings.peers)
        rules = common_rules(self._machine.rules, announced, members, in_force)
        return min(rules, self.rules_most) if self.rules_most else rules

    async def read_barrier(self, timeout_ms: int) -> bool:
        return isinstance(await self._propose(_BARRIER, timeout_ms), Applied)

    def leader_hint(self) -> str | None:
        leader = self._node._getLeader() if self._node is not None else None
        if leader is None:
            return None
        return next(
            (peer.node_id for peer in self._settings.peers if peer.raft_address == leader.id), None
        )

    def status(self) -> LogStatus:
        node, journal, snapshots = self._node, self._journal, self._snapshots
        if node is None or journal is None or snapshots is None:
            return LogStatus(0, 0, 0)
        return LogStatus(
            node.raftCurrentTerm,
            node.raftLastApplied,
            node.raftCommitIndex,
            journal.size_bytes,
            snapshots.size_bytes,
            len(journal),
            snapshots.last_index,
            self._digests.report.index,
            self._digests.report.digest,
            self._state.rules,
            self._problem_texts(node, journal, snapshots),
        )

    def _problem_texts(
        self, node: _Node, journal: DurableJournal, snapshots: FileSnapshots
    ) -> tuple[str, ...]:
        names = {peer.raft_address: peer.node_id for peer in self._settings.peers}
        found = []
        for subject, text in self._problems.texts().items():
            for address, name in names.items():
                subject = subject.replace(address, f"controller {name} ({address})")
            found.append(f"{subject}: {text}")
        if journal.size_bytes > LOG_ALARM_BYTES:
            found.append(
                f"the Raft log has {journal.size_bytes >> 20} MiB, above"
                f" {LOG_ALARM_BYTES >> 20} it is not safe to send it whole: nodes that are far"
                " behind, or the disk, keep it from being compacted"
            )
        if node.transport.waits_for_log:
            found.append(
                "it began with an empty folder and gives no vote until a leader has sent it the"
                " log; if most controllers report this, no leader can be elected: restore the old"
                " folder of one of them"
            )
        if node.transport.disk_is_full:
            why = journal.failure
            found.append(f"it neither leads nor votes until it can store its log: {why}")
        if snapshots.failure:
            found.append(f"it cannot shorten its log by a snapshot: {snapshots.failure}")
        if not node.tick_thread_alive():
            found.append("the Raft thread has ended: restart this node")
        return tuple(found)

    def in_touch(self) -> bool:
        node = self._node
        fallback_s = self._settings.timings.election_min_ms / 1000
        return (
            node is not None
            and self._leading
            and node.majority_answered_since(boot_s() - fallback_s)
        )

    async def hand_over(self, timeout_ms: int, node_id: str = "") -> bool:
        node = self._node
        if node is None or not self._leading or len(self._settings.peers) == 1:
            return not self._leading
        to = (peer.raft_address for peer in self._settings.peers if peer.node_id == node_id)
        node.transport.hand_over(timeout_ms / 1000, next(to, None))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._not_leading.wait()
        except TimeoutError:
            return False
        return True

    def on_role(self, callback: Callable[[bool], None]) -> None:
        self._role_callbacks.append(callback)

    def on_applied(self, callback: Callable[[Commit], None]) -> None:
        self._applied_callbacks.append(callback)

    async def close(self) -> None:
        # First: what the ending thread still posts must find no node.
        node, self._node = self._node, None
        self._fail_waiting("closing")
        if self._password is not None:
            self._password.close()
        if node is not None:
            await asyncio.to_thread(node.destroy_synchronous)
            node.close_pipe()
        if self._journal is not None:
            self._journal.close()  # has no effect after the node's own, if there was a node

    async def _propose(self, raw: bytes, timeout_ms: int) -> Outcome:
        node, loop = self._node, self._loop
        if node is None or loop is None or not self._leading:
            # pysyncobj would forward it to the leader, where it would not pass the gate.
            return NotApplied("not the leader")
        future: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.add(future)

        def finished(result: Any, reason: int) -> None:
            self._post(self._resolve, future, result, reason)

        node._commit(raw, callback=finished)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await future
        except TimeoutError:
            return Unknown(f"no answer within {timeout_ms} ms")
        finally:
            self._waiting.discard(future)

    def _resolve(self, future: asyncio.Future[Outcome], result: Any, reason: int) -> None:
        if future.done():
            return
        if reason == FAIL_REASON.SUCCESS:
            future.set_result(Applied(result))
        elif reason in _NEVER_APPLIED:
            future.set_result(NotApplied(_NEVER_APPLIED[reason]))
        else:
            future.set_result(Unknown(_UNKNOWN.get(reason, f"reason {reason}")))

    def _fail_waiting(self, why: str) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(Unknown(why))

    def _role_changed(self, leading: bool) -> None:
        # A role that was posted before the end must not begin a lead.
        if leading == self._leading or self._node is None:
            return
        self._leading = leading
        if leading:
            self._not_leading.clear()
        else:
            self._not_leading.set()
            self._fail_waiting("leadership lost")
        for callback in self._role_callbacks:
            callback(leading)

    def _committed(self, commit: Commit) -> None:
        self._state = commit.state
        for callback in self._applied_callbacks:
            callback(commit)

    # On the tick thread: apply, and post to the loop.

    def _apply(self, raw: bytes, raft_index: int) -> Any:
        if raw == _BARRIER:
            return None
        rules_before = self._machine.state.rules
        try:
            commit = self._machine.commit(raw, raft_index)
        except UnknownRulesError as error:
            self._on_fatal(f"cannot apply entry {raft_index}: {error}")
            return None
        except BaseException as error:
            # The command is in the log of every node: skipping it here would diverge.
            self._on_fatal(f"cannot apply entry {raft_index}: {error!r}")
            return None
        if commit.state.rules < rules_before and self._node is not None:
            # On the way back to an earlier version: that version could not apply the entries before
            # this one, so a snapshot must replace them.
            self._node.transport.snapshot_due = True
        self._digests.applied(raft_index, commit.state)
        self._post(self._committed, commit)
        keep_log(self._settings.folder, self._membership, commit.state.log_name)
        return commit.result

    def _die(self, what: str) -> NoReturn:
        self._on_fatal(what)
        raise RuntimeError(what)

    def _restore(self, state: dict[str, Any], raft_index: int) -> None:
        try:
            commit = self._machine.restore(state, raft_index)
        except BaseException as error:
            self._on_fatal(f"cannot load a snapshot: {error!r}")
            return
        self._digests.restored(raft_index, commit.state)
        self._post(self._committed, commit)
        keep_log(self._settings.folder, self._membership, commit.state.log_name)

    def _on_state_changed(self, old: int, new: int) -> None:
        if new == _LEADER and self._journal is not None:
            # A joining node is elected only by nodes that have no log either: it lacks nothing.
            self._journal.join()
        # In the first start of a quorum no command may enter the log before a majority has the
        # first entry. So nothing in a log without commands was acknowledged, as `pre_vote` assumes.
        self._first_lead = (
            new == _LEADER and self._journal is not None and not has_commands(self._journal)
        )
        if not self._first_lead:
            self._post(self._role_changed, new == _LEADER)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # the loop is closed
