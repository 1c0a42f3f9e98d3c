"""The replicated log as the rest of the controller sees it, and the state machine behind it.

A proposed command has one of three outcomes: `Applied` with the state machine's answer;
`NotApplied` if it will never take effect; `Unknown` if it may have taken effect or still may. After
`Unknown` the same command (same request_id) may be proposed again: the state has a table of the
answered request ids.

Invariant of `Machine`: nodes that committed the same entries have equal states, or have ended.
`DigestWatch` checks it, and `RaftProblems` keeps what is wrong between this node and the others.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from batonmq.controller.rules import commands
from batonmq.controller.rules.commands import RULES_VERSION, AnyCommand, CommandResult, Effect
from batonmq.controller.rules.state import ControllerState, Transition
from batonmq.protocol.codes import ResponseCode
from batonmq.runtime.recent_events import RecentEvents, records_event

log = logging.getLogger(__name__)

_STRANGER_PAUSE_S: Final = 10.0
_DIGEST_INTERVAL_S: Final = 5.0
_KEPT_STATES: Final = 16
"""A peer's digest may be of an entry that this node applied a moment ago."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The command was committed; `result` is what the state machine answered (maybe a refusal)."""

    result: CommandResult


@dataclass(frozen=True, slots=True)
class NotApplied:
    """The command did not enter the log and never will."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer in time, or the leader changed: the command may be committed or may still be."""

    reason: str


Heard = tuple[str, int, str]
"""In a report: (brokerName, id, incarnation) of one registered process."""

Outcome = Applied | NotApplied | Unknown


@dataclass(frozen=True, slots=True)
class LogStatus:
    """This node's position in the log, and how much of the log is on its disk.

    `state_digest` is of the state after entry `digest_index`; 0 and "" before the first digest.
    `rules` is the version of the rules of the newest entry. `problems` are texts for operators.
    """

    term: int
    applied_index: int
    committed_index: int
    journal_bytes: int = 0
    snapshot_bytes: int = 0
    journal_entries: int = 0
    snapshot_index: int = 0
    digest_index: int = 0
    state_digest: str = ""
    rules: int = 0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed command with its answer, or a snapshot that replaced the state.

    `command` is None for a snapshot; `state` is the state after it.
    """

    raft_index: int
    command: AnyCommand | None
    result: CommandResult
    effects: tuple[Effect, ...]
    state: ControllerState


class UnknownRulesError(ValueError):
    """An entry or a snapshot by rules that this version does not know: the process must stop."""

    def __init__(self, rules: int, known: int) -> None:
        super().__init__(
            f"its rules are {rules}, this version knows those up to {known}: start the newer"
            f" version here again, set controllerRulesMax={known} on all controllers (mqctl"
            " updateControllerConfig), and go back when all of them report these rules"
        )


class Machine:
    """Has the newest state. States are values: one that was handed out never changes.

    `rules`: the newest version of the rules that this node knows.
    """

    def __init__(self, state: ControllerState | None = None, rules: int = RULES_VERSION) -> None:
        self.state = state if state is not None else ControllerState()
        self.rules = rules
        self.recent_events = RecentEvents()

    def commit(self, raw: bytes, raft_index: int) -> Commit:
        """Applies the entry. After any error that this raises the node must stop."""
        command, rules = commands.decode(raw)
        # By rules that it does not know this node would come to another state than its peers.
        if rules > self.rules:
            raise UnknownRulesError(rules, self.rules)
        try:
            applied = self._apply(command, raft_index, rules)
        except (MemoryError, RecursionError, OSError):
            raise  # these may occur on this node alone, and its state would differ from then on
        except Exception:
            # A bug, which every node meets at this entry: all keep the old state and stay equal. If
            # it ended them, each start would end at this entry again.
            log.exception("command_failed raft_index=%d command=%r", raft_index, command)
            result = CommandResult(ResponseCode.SYSTEM_ERROR, "internal error of the controller")
            return Commit(raft_index, command, result, (), self.state)
        self.state = applied.state
        return Commit(raft_index, command, applied.result, tuple(applied.effects), applied.state)

    @records_event
    def _apply(self, command: AnyCommand, raft_index: int, rules: int) -> Transition:
        return self.state.apply(command, raft_index, rules)

    def restore(self, snapshot: dict[str, Any], raft_index: int) -> Commit:
        """Replaces the state by that of a snapshot, taken after `raft_index`. Raises
        UnknownRulesError, SnapshotError."""
        state = type(self.state).from_snapshot(snapshot)
        if state.rules > self.rules:
            raise UnknownRulesError(state.rules, self.rules)
        self.state = state
        result = CommandResult(ResponseCode.SUCCESS, "snapshot")
        return Commit(raft_index, None, result, (), self.state)


class Reports:
    """Carries followers' reports of what they hear to their leader. On the event loop's thread."""

    def __init__(self) -> None:
        self.send: Callable[[int, frozenset[Heard], bool], None] = lambda *report: None
        """Takes (index, unheard, urgent) of this node; with the next message if not `urgent`. Set
        by its log."""
        self.on_report: Callable[[str, int, frozenset[Heard]], None] = lambda *report: None
        """On the leader: gets node id, index and unheard of each report of another node."""


class ReplicatedLog(Protocol):
    """A log of commands, applied in one order on every node.

    All methods and callbacks run on the event loop's thread. Callbacks run in log order. A proposer
    gets its `Applied` only after the `on_applied` callbacks were called for its command.
    """

    reports: Reports
    rules_most: int
    """The newest rules to propose commands by; 0: those that all members know."""

    @property
    def state(self) -> ControllerState:
        """The state after the newest command that `on_applied` was called with."""

    async def start(self) -> None: ...

    async def propose(self, command: AnyCommand, timeout_ms: int) -> Outcome: ...

    async def read_barrier(self, timeout_ms: int) -> bool:
        """True once everything that was committed before the call is applied here; false if that is
        not known in time."""

    def leader_hint(self) -> str | None:
        """The id of the node that leads as far as this one knows. A hint, never a permission."""

    def rules_due(self) -> bool:
        """Whether the next command would have another version of the rules than the newest one."""

    def in_touch(self) -> bool:
        """Whether a majority answered this leader a moment ago, by the clock as it is now (R8)."""

    async def hand_over(self, timeout_ms: int, node_id: str = "") -> bool:
        """Offers the lead to that node, or to any other one, and waits until it has moved; false if
        it has not."""

    def status(self) -> LogStatus: ...

    def on_role(self, callback: Callable[[bool], None]) -> None:
        """`callback(leading)` at every change. True does not mean that this node may decide: see
        `LeaderGate`."""

    def on_applied(self, callback: Callable[[Commit], None]) -> None: ...

    async def close(self) -> None: ...


class RaftProblems:
    """What is wrong between this node and the others: one text for each subject.

    Written by the tick thread; any thread may read `texts`.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._stranger_logged_s = -_STRANGER_PAUSE_S
        self._strangers_not_logged = 0

    def note(self, subject: str, text: str, level: int = logging.ERROR) -> None:
        """Keeps the text, and logs it if it is new."""
        if self._texts.get(subject) != text:
            self._texts[subject] = text
            log.log(level, "raft_problem subject=%s reason=%r", subject, text)

    def note_missing(self, subject: str, text: str) -> None:
        """`note`, unless a problem of the subject is known already."""
        if subject not in self._texts:
            self.note(subject, text, logging.WARNING)

    def clear(self, subject: str) -> None:
        if self._texts.pop(subject, None) is not None:
            log.info("raft_problem_over subject=%s", subject)

    def stranger(self, address: str, why: str, now_s: float) -> None:
        """Logs a refused connection of an unknown peer, at most once in 10 s. That is no problem of
        this node: anyone may dial its port."""
        if now_s - self._stranger_logged_s < _STRANGER_PAUSE_S:
            self._strangers_not_logged += 1
            return
        log.warning(
            "raft_stranger address=%s reason=%r not_logged=%d",
            address,
            why,
            self._strangers_not_logged,
        )
        self._stranger_logged_s, self._strangers_not_logged = now_s, 0

    def texts(self) -> dict[str, str]:
        """Subject to text, ordered by subject."""
        return dict(sorted(self._texts.copy().items()))


@dataclass(frozen=True, slots=True)
class DigestReport:
    """The newest digest taken here; index 0: none yet."""

    index: int = 0
    digest: str = ""


class DigestWatch:
    """Compares states: at most every 5 s the leader sends the digest of its state and its last
    entry, and a node that has or had a state after that entry compares. Both sides report a
    difference; an operator has to empty the folder of the node that is wrong.

    Used by the tick thread, which passes the time in; any thread may read `report`.
    """

    def __init__(self, problems: RaftProblems) -> None:
        self._problems = problems
        self._states: deque[tuple[int, ControllerState]] = deque(maxlen=_KEPT_STATES)
        self._waiting: dict[str, tuple[int, str]] = {}
        self._next_s = 0.0
        self.report = DigestReport()

    def applied(self, index: int, state: ControllerState) -> None:
        self._states.append((index, state))
        # A digest of an entry that this node had not applied yet when it came.
        for peer, (at, digest) in self._waiting.items():
            if at == index:
                self.compare(peer, at, digest)

    def restored(self, index: int, state: ControllerState) -> None:
        """A snapshot replaced the state."""
        # The earlier states led to another one, and must not be compared.
        self._states.clear()
        self.applied(index, state)

    def due(self, now_s: float) -> tuple[int, str] | None:
        """(index, digest) to send to the others; None if it is not time for that."""
        # Nothing was applied since the last one: the others have compared it.
        if now_s < self._next_s or not self._states or self._states[-1][0] == self.report.index:
            return None
        self._next_s = now_s + _DIGEST_INTERVAL_S
        return self._states[-1][0], self._digest(*self._states[-1])

    def compare(self, peer: str, index: int, digest: str) -> str | None:
        """Compares the peer's digest. Returns the own one of that index, None if this node has no
        state of that index (yet)."""
        state = next((kept for at, kept in self._states if at == index), None)
        if state is None:
            # It is compared once this node has applied that entry; an older one is gone here.
            if not self._states or index > self._states[-1][0]:
                self._waiting[peer] = (index, digest)
            return None
        own = self._digest(index, state)
        subject = f"state of {peer}"
        # In a rolling upgrade, states by different RULES may differ and be right.
        if own == digest or own.rpartition(":")[0] != digest.rpartition(":")[0]:
            self._problems.clear(subject)
        else:
            self._problems.note(
                subject,
                f"differs from this node's after entry {index}: {digest[-16:]}, here {own[-16:]};"
                " empty the folder of the node that is wrong while all others are healthy",
            )
        return own

    def _digest(self, index: int, state: ControllerState) -> str:
        # Once for each index: several peers ask about the same one.
        if self.report.index != index:
            self.report = DigestReport(index, state.digest())
        return self.report.digest
