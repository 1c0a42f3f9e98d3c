"""The gate: this node decides only while it is open.

To be Raft's leader is not enough: pysyncobj calls a node leader before that node knows what the
last leader committed, and for a while after it was deposed. So a new leader proposes
`BecomeController`, and the gate opens when that command is applied here: everything older is
applied by then. The answer has the controller epoch. Commands carry it, and the state refuses older
ones, so commands of a deposed leader that are still under way have no effect.

The gate closes when this node loses the lead, and when another node's `BecomeController` is applied
here.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Final

from batonmq.controller.raft.log import Applied, Commit, ReplicatedLog
from batonmq.controller.rules.commands import BecomeController
from batonmq.runtime.tasks import Tasks

log = logging.getLogger(__name__)

RETRY_S: Final = 0.05


class LeaderGate:
    """`on_change(is_open)` is called at each change, on the loop's thread.

    `controller_epoch` is that of this node's leadership while the gate is open, else 0.
    """

    def __init__(
        self,
        replicated_log: ReplicatedLog,
        node_id: str,
        *,
        wall_ms: Callable[[], int],
        timeout_ms: int,
        on_change: Callable[[bool], None],
    ) -> None:
        self._log = replicated_log
        self._node_id = node_id
        self._wall_ms = wall_ms
        self._timeout_ms = timeout_ms
        self._on_change = on_change
        self._leading = self._closed = False
        self._tasks = Tasks()
        self._opening: asyncio.Task[None] | None = None
        self._started_ms = wall_ms()
        self._leader_seen_ms = 0
        self.controller_epoch = 0
        replicated_log.on_role(self._role_changed)
        replicated_log.on_applied(self._applied)

    @property
    def open(self) -> bool:
        """Whether this node may decide now."""
        # R8: a process that was stopped learns only later that it was deposed. So a majority must
        # have answered a moment ago, by the clock as it is now.
        return self._is_open and self._log.in_touch()

    @property
    def _is_open(self) -> bool:
        return self.controller_epoch > 0

    @property
    def had_followed(self) -> bool:
        """Whether this process knew of another leader before it led itself."""
        return self._leader_seen_ms > 0

    def note_leader_seen(self) -> None:
        """Notes for the history that some node leads now. Must be called regularly."""
        if self.open or self._log.leader_hint() not in (None, self._node_id):
            self._leader_seen_ms = self._wall_ms()

    def close(self) -> None:
        """Closes the gate for good: the node is stopping."""
        self._closed = True
        self._role_changed(False)

    def _role_changed(self, leading: bool) -> None:
        # While a node stops it closes all sessions. If it was elected again meanwhile, an open gate
        # would take that for the death of all brokers.
        self._leading = leading and not self._closed
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self._shut("role lost")
        self._open_if_leading()

    def _open_if_leading(self) -> None:
        if self._leading and self._opening is None:
            self._opening = self._tasks.spawn(self._become_controller(), "gate")

    async def _become_controller(self) -> None:
        """Proposes until the newest controller that is applied here is this one."""
        while True:
            controller_epoch = await self._next_controller_epoch()
            if self._log.state.controller_epoch == controller_epoch:
                break
            # Another node's command was applied after it. This one is still Raft's leader, so its
            # command must be the newest: it proposes again.
            await asyncio.sleep(RETRY_S)
        self._opening = None
        self._open(controller_epoch)

    async def _next_controller_epoch(self) -> int:
        # One nonce for all attempts: an attempt that seemed to fail may still be applied, and must
        # not count as a second leadership.
        nonce = uuid.uuid4().hex
        while True:
            command = BecomeController(
                node=self._node_id,
                nonce=nonce,
                request_id=nonce,
                now_ms=self._wall_ms(),
                started_ms=self._started_ms,
                leader_seen_ms=self._leader_seen_ms,
            )
            outcome = await self._log.propose(command, self._timeout_ms)
            if isinstance(outcome, Applied) and outcome.result.ok:
                return outcome.result.controller_epoch
            log.warning("gate_not_open node=%s outcome=%r", self._node_id, outcome)
            await asyncio.sleep(RETRY_S)

    def _open(self, controller_epoch: int) -> None:
        self.controller_epoch = controller_epoch
        log.info("gate_opened node=%s controller_epoch=%d", self._node_id, controller_epoch)
        self._on_change(True)

    def _applied(self, commit: Commit) -> None:
        if self._is_open and commit.state.controller_epoch > self.controller_epoch:
            self._shut(f"{commit.state.controller_node} leads now")
            self._open_if_leading()

    def _shut(self, why: str) -> None:
        if not self._is_open:
            return
        log.info(
            "gate_closed node=%s controller_epoch=%d reason=%r",
            self._node_id,
            self.controller_epoch,
            why,
        )
        self.controller_epoch = 0
        self._on_change(False)
