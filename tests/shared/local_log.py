"""A controller that is alone: its settings, and a log that applies in place what is proposed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batonmq.controller.config import ControllerConfig
from batonmq.controller.raft.log import (
    Applied,
    Commit,
    LogStatus,
    Machine,
    NotApplied,
    Outcome,
    Reports,
)
from batonmq.controller.rules.commands import AnyCommand, encode
from batonmq.controller.rules.state import ControllerState


def alone(folder: Path, port: int = 9878, **more: Any) -> ControllerConfig:
    """`port` is the first of three."""
    return ControllerConfig(
        controller_peers=f"n0-127.0.0.1:{port}",
        controller_self_id="n0",
        bind_address="127.0.0.1",
        controller_store_path=str(folder),
        **more,
    )


class LocalLog:
    def __init__(self, node_id: str, machine: Machine) -> None:
        self._node_id = node_id
        self._machine = machine
        self._index = 0
        self._leading = False
        self.reports = Reports()
        self.rules_most = 0
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
        # A single controller knows all members, so it uses its newest rules.
        commit = self._machine.commit(encode(command, self._machine.rules), self._index)
        for callback in self._applied_callbacks:
            callback(commit)
        return Applied(commit.result)

    async def read_barrier(self, timeout_ms: int) -> bool:
        await asyncio.sleep(0)
        return self._leading

    def leader_hint(self) -> str | None:
        return self._node_id if self._leading else None

    def rules_due(self) -> bool:
        return False

    def in_touch(self) -> bool:
        return self._leading

    async def hand_over(self, timeout_ms: int, node_id: str = "") -> bool:
        return not self._leading

    def status(self) -> LogStatus:
        return LogStatus(term=1, applied_index=self._index, committed_index=self._index)

    def on_role(self, callback: Callable[[bool], None]) -> None:
        self._role_callbacks.append(callback)

    def on_applied(self, callback: Callable[[Commit], None]) -> None:
        self._applied_callbacks.append(callback)

    async def close(self) -> None:
        self._leading = False
