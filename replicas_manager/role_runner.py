"""Carries out role changes one after the other, and all other calls of the broker behind them.

Invariants: the masterEpoch of a role change is durable before it has any effect outside (R2), and
no action begins while another is awaited. A slave's epoch is stored before the broker acts; a
master's at the same time: becoming master writes that epoch into the epoch file, too, and opens
only when both are on the disk. That saves one wait for the disk in every failover. The epoch file
alone would not do: its last entry is dropped if the log comes back shorter (R25).
A newer role change replaces what waits: an older role change, sets to adopt and outcomes of
proposals made under the older role.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from batonmq.process import disk
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager.actions import BrokerActions, SyncStateSetActions
from batonmq.replicas_manager.events import (
    AdoptView,
    BecomeMaster,
    BecomeSlave,
    LeaseChanged,
    ProposalRefused,
    ProposalUnknown,
    RoleAction,
    SetDead,
    StandDown,
)

log = logging.getLogger(__name__)

MASTER_ATTEMPTS_MAX = 5
"""After so many failures to become master of one epoch another replica should be elected: the
process ends, but for want of room it gives way and goes on trying (R45)."""

_Outcome = ProposalRefused | ProposalUnknown
RunnerEffect = RoleAction | AdoptView | SetDead | LeaseChanged | _Outcome


class RoleRunner:
    """`persist` stores a masterEpoch durably (it may block: it runs in a thread);
    `on_failed` is called for a role change that raised; for one to master that failed
    MASTER_ATTEMPTS_MAX times `on_fatal`, if given, or each time again `on_no_room` where the disk
    was full."""

    def __init__(
        self,
        actions: BrokerActions,
        sets: SyncStateSetActions,
        persist: Callable[[int], None],
        durable_master_epoch: int,
        on_failed: Callable[[RoleView], None],
        on_no_room: Callable[[], None],
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.delivered_key = (0, 0)
        """(masterEpoch, setEpoch) of the last view that the broker has."""
        self._actions = actions
        self._sets = sets
        self._persist = persist
        self._durable_master_epoch = durable_master_epoch
        self._on_failed = on_failed
        self._on_no_room = on_no_room
        self._on_fatal = on_fatal
        self._failed_epoch = 0
        self._failures = 0
        self._queue: deque[RunnerEffect] = deque()
        self._task: asyncio.Task[None] | None = None

    def perform(self, effect: RunnerEffect) -> None:
        """At once if nothing is under way and it needs no waiting, else in its turn."""
        if isinstance(effect, BecomeMaster | BecomeSlave | StandDown):
            self._drop_superseded()
            self._queue.append(effect)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._drain())
        elif self._task is None:
            self._call(effect)
        else:
            self._queue.append(effect)

    async def close(self) -> None:
        """Nothing more begins; an action under way is awaited."""
        self._queue.clear()
        if self._task is not None:
            await self._task

    def _drop_superseded(self) -> None:
        kept = [item for item in self._queue if isinstance(item, SetDead | LeaseChanged)]
        self._queue = deque(kept)

    async def _drain(self) -> None:
        try:
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, BecomeMaster | BecomeSlave | StandDown):
                    await self._change_role(item)
                else:
                    self._call(item)
        finally:
            self._task = None

    async def _change_role(self, action: RoleAction) -> None:
        view = action.view
        try:
            storing = self._begin_store(view.master_epoch)
            if isinstance(action, BecomeMaster):
                self.delivered_key = view.key
                durable = asyncio.ensure_future(self._stored(view.master_epoch, storing))
                try:
                    await self._actions.become_master(view, durable)
                finally:
                    await durable
                return
            await self._stored(view.master_epoch, storing)
            self.delivered_key = view.key
            if isinstance(action, BecomeSlave):
                await self._actions.become_slave(view)
            else:
                await self._actions.stand_down(view)
        except Exception as error:
            # Whatever failed in the broker, the group needs this replica in its role: try again.
            log.warning(
                "role_change_failed action=%s master_epoch=%d why=%s",
                type(action).__name__,
                view.master_epoch,
                error,
                exc_info=not disk.is_full(error),
            )
            self._on_failed(view)
            if isinstance(action, BecomeMaster):
                self._count_failure(view, error)

    def _begin_store(self, master_epoch: int) -> asyncio.Future[None] | None:
        """The thread has begun when this returns."""
        if master_epoch <= self._durable_master_epoch:
            return None
        return asyncio.get_running_loop().run_in_executor(None, self._persist, master_epoch)

    async def _stored(self, master_epoch: int, storing: asyncio.Future[None] | None) -> None:
        if storing is not None:
            await storing
            self._durable_master_epoch = master_epoch

    def _count_failure(self, view: RoleView, error: Exception) -> None:
        if view.master_epoch != self._failed_epoch:
            self._failed_epoch, self._failures = view.master_epoch, 0
        self._failures += 1
        if disk.is_full(error):
            if self._failures % MASTER_ATTEMPTS_MAX == 0:
                self._on_no_room()
            return
        is_damaged = isinstance(error, CorruptLogError)  # another attempt does not repair it (R24)
        hopeless = is_damaged or self._failures == MASTER_ATTEMPTS_MAX
        if hopeless and self._on_fatal is not None:
            self._on_fatal(error)

    def _call(self, effect: RunnerEffect) -> None:
        match effect:
            case AdoptView(view):
                self.delivered_key = view.key
                self._sets.adopt_view(view)
            case SetDead(broker_ids):
                self._sets.set_dead(broker_ids)
            case LeaseChanged(valid, _):
                self._actions.lease_changed(valid)
            case ProposalRefused(code, remark):
                self._sets.proposal_refused(code, remark)
            case ProposalUnknown():
                self._sets.proposal_unknown()
            case _:
                raise AssertionError(f"not for the runner: {effect}")
