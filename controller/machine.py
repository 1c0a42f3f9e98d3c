"""The state machine of one node: decodes a committed command, applies it, keeps the state.

Invariant: nodes that committed the same entries hold equal states, or have ended. So a command
either applies the same everywhere or ends the process: bytes that cannot be read, and errors that
may strike one node alone (memory, recursion, disk), are raised to the caller, who must stop. A bug
in `apply`, which strikes every node alike, keeps the old state, is logged and counted, and is
answered with code 1.
"""

import logging
from dataclasses import dataclass
from typing import Any

from controller import commands
from controller.commands import AnyCommand
from controller.results import CommandResult, Effect
from controller.state import ControllerState
from protocol.codes import ResponseCode

__all__ = ["Commit", "Machine"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed command with what it answered, or a snapshot that took the state's place.

    `command` is None for a snapshot; `state` is the state after it.
    """

    raft_index: int
    command: AnyCommand | None
    result: CommandResult
    effects: tuple[Effect, ...]
    state: ControllerState


class Machine:
    """Holds the newest state. States are values: one that was handed out never changes."""

    def __init__(self, state: ControllerState | None = None) -> None:
        self.state = state if state is not None else ControllerState()
        self.internal_errors = 0

    def encode(self, command: AnyCommand) -> bytes:
        """The bytes to propose. Raises ValueError for a command that is too large."""
        return commands.encode(command)

    def commit(self, raw: bytes, raft_index: int) -> Commit:
        """Applies the entry. What it raises means that this node may not go on."""
        command = commands.decode(raw)
        try:
            applied = self.state.apply(command, raft_index)
        except (MemoryError, RecursionError, OSError):
            raise
        except Exception:
            self.internal_errors += 1
            log.exception("command_failed raft_index=%d command=%r", raft_index, command)
            result = CommandResult(ResponseCode.SYSTEM_ERROR, "internal error of the controller")
            return Commit(raft_index, command, result, (), self.state)
        self.state = applied.state
        return Commit(raft_index, command, applied.result, tuple(applied.effects), applied.state)

    def to_snapshot(self) -> dict[str, Any]:
        return self.state.to_snapshot()

    def restore(self, snapshot: dict[str, Any], raft_index: int) -> Commit:
        """Puts the state of a snapshot, taken after `raft_index`, in place of this one."""
        self.state = ControllerState.from_snapshot(snapshot)
        result = CommandResult(ResponseCode.SUCCESS, "snapshot")
        return Commit(raft_index, None, result, (), self.state)
