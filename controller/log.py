"""The replicated log as the rest of the controller sees it, and one that lives in this process.

A command that is proposed has one of three ends, and they are never mixed up: `Applied` carries
what the state machine answered, `NotApplied` says that it will never take effect, `Unknown` says
that it may have, or still may. After `Unknown` the same command (same request_id) may be proposed
again; the state keeps a table of request ids.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from controller.commands import AnyCommand
from controller.machine import Commit, Machine
from controller.results import CommandResult
from controller.state import ControllerState

__all__ = [
    "Applied",
    "LocalLog",
    "LogStatus",
    "NotApplied",
    "Outcome",
    "ReplicatedLog",
    "Unknown",
]


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


Outcome = Applied | NotApplied | Unknown


@dataclass(frozen=True, slots=True)
class LogStatus:
    """Where this node stands in the log, and how much of it is on its disk.

    `state_digest` is of the state after entry `digest_index`; both are empty before the first.
    `problems`: what is unwell between this node and the others, for people.
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
    problems: tuple[str, ...] = ()


class ReplicatedLog(Protocol):
    """A log of commands, applied in one order on every node.

    All methods and callbacks belong to the event loop's thread. Callbacks run in log order, and a
    proposer hears its `Applied` after `on_applied` was called for its command.
    """

    @property
    def state(self) -> ControllerState:
        """The state after the newest command that `on_applied` was told of."""

    async def start(self) -> None: ...

    async def propose(self, command: AnyCommand, timeout_ms: int) -> Outcome: ...

    async def read_barrier(self, timeout_ms: int) -> bool:
        """True once everything committed before the call is applied here; false if unknown."""

    def leader_hint(self) -> str | None:
        """The node that leads as far as this one knows. A hint, never a permission."""

    def in_touch(self) -> bool:
        """Whether a majority answered this leader a moment ago, by the clock as it is now.

        A process that was stopped is out of touch when it wakes, before anything told it so.
        """

    async def hand_over(self, timeout_ms: int) -> bool:
        """Offers the lead to another node, and waits until it is gone; false if it is not."""

    def status(self) -> LogStatus: ...

    def on_role(self, callback: Callable[[bool], None]) -> None:
        """`callback(leading)` at every change. True is no permission either: see `LeaderGate`."""

    def on_applied(self, callback: Callable[[Commit], None]) -> None: ...

    async def close(self) -> None: ...


class LocalLog:
    """A log of one node: what is proposed is applied in place. For tests."""

    def __init__(self, node_id: str, machine: Machine) -> None:
        self._node_id = node_id
        self._machine = machine
        self._index = 0
        self._leading = False
        self._role_callbacks: list[Callable[[bool], None]] = []
        self._applied_callbacks: list[Callable[[Commit], None]] = []

    @property
    def state(self) -> ControllerState:
        return self._machine.state

    async def start(self) -> None:
        self.set_leading(True)

    def set_leading(self, leading: bool) -> None:
        """Takes or gives up the lead, as a Raft election would."""
        self._leading = leading
        for callback in self._role_callbacks:
            callback(leading)

    async def propose(self, command: AnyCommand, timeout_ms: int) -> Outcome:
        await asyncio.sleep(0)
        if not self._leading:
            return NotApplied("not the leader")
        self._index += 1
        commit = self._machine.commit(self._machine.encode(command), self._index)
        for callback in self._applied_callbacks:
            callback(commit)
        return Applied(commit.result)

    async def read_barrier(self, timeout_ms: int) -> bool:
        await asyncio.sleep(0)
        return self._leading

    def leader_hint(self) -> str | None:
        return self._node_id if self._leading else None

    def in_touch(self) -> bool:
        return self._leading

    async def hand_over(self, timeout_ms: int) -> bool:
        return not self._leading

    def status(self) -> LogStatus:
        return LogStatus(term=1, applied_index=self._index, committed_index=self._index)

    def on_role(self, callback: Callable[[bool], None]) -> None:
        self._role_callbacks.append(callback)

    def on_applied(self, callback: Callable[[Commit], None]) -> None:
        self._applied_callbacks.append(callback)

    async def close(self) -> None:
        self._leading = False
