"""Carries out role changes and other calls of the broker, one after the other.

Invariants: the masterEpoch of a role change is durable before it has any effect outside (R2), and
no action begins while another is awaited. Storing the epoch begins as soon as the role change
arrives. A newer role change replaces what waits: older role changes, sets to adopt, outcomes of
earlier proposals.

`SwitchRunner` is the shell around `PlannedSwitch`: timer, election, held sends. Its calls do not
wait for their turn (R33).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import assert_never

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.link import BrokerActions, ControllerLink, SyncStateSetActions
from batonmq.replicas_manager.switch import (
    Drained,
    ElectTarget,
    HoldSends,
    PlannedSwitch,
    ReleaseSends,
    SwitchEffect,
    SwitchFailed,
    SwitchTask,
)
from batonmq.runtime import disk
from batonmq.runtime.tasks import Tasks, report_failure

log = logging.getLogger(__name__)

MASTER_ATTEMPTS_MAX = 5
"""After so many failures to become master of one epoch another replica should be elected: the
process ends; if the disk is full, it drops its sessions and retries (R45)."""
_Outcome = ev.ProposalRefused | ev.ProposalUnknown
RunnerEffect = ev.RoleAction | ev.AdoptView | ev.SetDead | ev.LeaseChanged | _Outcome


class EpochStore:
    """Stores the highest masterEpoch (R2), one write at a time. `persist` may block, so it runs in
    a thread. `on_stored` is called with each durable epoch."""

    def __init__(
        self, persist: Callable[[int], None], durable: int, on_stored: Callable[[int], None]
    ) -> None:
        self._persist = persist
        self._durable = durable
        self._wanted = durable
        self._on_stored = on_stored
        self._storing: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        """The error of the last write, until a waiter has got it."""

    def begin(self, master_epoch: int) -> None:
        """Begins to store an epoch, at once or when the running write has ended."""
        self._wanted = max(self._wanted, master_epoch)
        if self._storing is None and self._wanted > self._durable:
            loop, epoch, self._error = asyncio.get_running_loop(), self._wanted, None
            try:
                written = loop.run_in_executor(None, self._persist, epoch)
            except RuntimeError as error:  # no thread can be started: the write has failed
                written = loop.create_future()
                written.set_exception(error)
            self._storing = loop.create_task(self._end(epoch, written))

    async def stored(self, master_epoch: int) -> None:
        """Waits until the epoch is durable. Raises the error of the write, at most once per
        write."""
        while self._durable < master_epoch:
            error, self._error = self._error, None
            if error is not None:
                raise error
            self.begin(master_epoch)
            assert self._storing is not None
            await self._storing

    async def close(self) -> None:
        """Waits for a running write."""
        if self._storing is not None:
            await self._storing

    async def _end(self, master_epoch: int, written: asyncio.Future[None]) -> None:
        try:
            await written
        except Exception as error:
            self._error = error  # the role change is repeated and begins another write
            return
        finally:
            self._storing = None
        self._durable = master_epoch
        # A higher epoch may have come during this write: write that next.
        self._on_stored(master_epoch)
        self.begin(master_epoch)


class RoleRunner:
    """`on_failed` is called for a role change that raised. After MASTER_ATTEMPTS_MAX failures to
    become master of one epoch, `on_disk_full` or (if given) `on_fatal` is called."""

    def __init__(
        self,
        actions: BrokerActions,
        sets: SyncStateSetActions,
        epochs: EpochStore,
        on_failed: Callable[[RoleView], None],
        on_disk_full: Callable[[], None],
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.delivered_key = (0, 0)
        """(masterEpoch, setEpoch) of the last view given to the broker."""
        self.delivered_processes: dict[int, str] = {}
        """Broker id -> incarnation in that view."""
        self._actions = actions
        self._sets = sets
        self._epochs = epochs
        self._on_failed = on_failed
        self._on_disk_full = on_disk_full
        self._on_fatal = on_fatal
        self._failed_epoch = 0
        self._failures = 0
        self._queue: deque[RunnerEffect] = deque()
        self._task: asyncio.Task[None] | None = None

    def perform(self, effect: RunnerEffect) -> None:
        """Performs an effect at once if nothing runs and it does not block, else in its turn."""
        if isinstance(effect, ev.BecomeMaster | ev.BecomeSlave | ev.StandDown):
            # These are valid in any role; the others belong to the older role.
            kept = [item for item in self._queue if isinstance(item, ev.SetDead | ev.LeaseChanged)]
            self._queue = deque([*kept, effect])
            # Now, so that the disk works while an older role change ends.
            self._epochs.begin(effect.view.master_epoch)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._drain())
        elif self._task is None:
            self._call(effect)
        else:
            self._queue.append(effect)

    async def close(self) -> None:
        """Begins nothing more and waits for a running action."""
        self._queue.clear()
        if self._task is not None:
            await self._task
        await self._epochs.close()

    async def _drain(self) -> None:
        try:
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, ev.BecomeMaster | ev.BecomeSlave | ev.StandDown):
                    await self._change_role(item)
                else:
                    # R54: what waits behind it must be delivered, a lease that ended for example.
                    try:
                        self._call(item)
                    except Exception as error:
                        report_failure(f"{type(item).__name__} could not be delivered", error)
        finally:
            self._task = None

    async def _change_role(self, action: ev.RoleAction) -> None:
        view = action.view
        try:
            if isinstance(action, ev.BecomeMaster):
                # Before the broker acts, because HA may propose at once, and a proposal names its
                # view.
                self._deliver(view)
                # The broker writes its epoch file at the same time and opens only when both are
                # durable: one wait for the disk less in each failover. That file alone is not
                # enough: its last entry is dropped if the log is shorter after a restart (R25).
                durable = asyncio.ensure_future(self._epochs.stored(view.master_epoch))
                try:
                    await self._actions.become_master(view, durable)
                finally:
                    await durable
                return
            await self._epochs.stored(view.master_epoch)
            self._deliver(view)
            if isinstance(action, ev.BecomeSlave):
                await self._actions.become_slave(view)
            else:
                await self._actions.stand_down(view)
        except Exception as error:
            # Whatever failed in the broker, the group needs this replica in its role: repeat it.
            log.warning(
                "role_change_failed action=%s master_epoch=%d reason=%s",
                type(action).__name__,
                view.master_epoch,
                error,
                exc_info=not disk.is_short(error),
            )
            self._on_failed(view)
            if isinstance(action, ev.BecomeMaster):
                self._count_failure(view, error)

    def _deliver(self, view: RoleView) -> None:
        self.delivered_key = view.key
        self.delivered_processes = {each.broker_id: each.incarnation for each in view.replicas}

    def _count_failure(self, view: RoleView, error: Exception) -> None:
        if view.master_epoch != self._failed_epoch:
            self._failed_epoch, self._failures = view.master_epoch, 0
        self._failures += 1
        if disk.is_short(error):
            # Each time: the controllers may have elected it again, as the only one left (R45).
            if self._failures % MASTER_ATTEMPTS_MAX == 0:
                self._on_disk_full()
            return
        is_damaged = isinstance(error, CorruptLogError)  # repeating does not repair it (R24)
        hopeless = is_damaged or self._failures == MASTER_ATTEMPTS_MAX
        if hopeless and self._on_fatal is not None:
            self._on_fatal(error)

    def _call(self, effect: RunnerEffect) -> None:
        match effect:
            case ev.AdoptView(view):
                self._deliver(view)
                self._sets.adopt_view(view)
                self._actions.master_moved(view)
            case ev.SetDead(broker_ids):
                self._sets.set_dead(broker_ids)
            case ev.LeaseChanged(valid):
                self._actions.lease_changed(valid)
            case ev.ProposalRefused(code, remark):
                self._sets.proposal_refused(code, remark)
            case ev.ProposalUnknown():
                self._sets.proposal_unknown()
            case _:
                raise AssertionError(f"not for the runner: {effect}")


class SwitchRunner:
    """Runs at most one planned switch. `report` adds an event to the history."""

    def __init__(
        self,
        actions: BrokerActions,
        link: ControllerLink,
        report: Callable[..., None],
        clock_ms: Callable[[], int],
    ) -> None:
        self.core = PlannedSwitch()
        self._actions = actions
        self._link = link
        self._report = report
        self._clock_ms = clock_ms
        self._timer: asyncio.TimerHandle | None = None
        self._calls = Tasks()
        self._polling = False

    def requested(self, task: SwitchTask, *, master_epoch: int | None, lease: bool) -> None:
        """A controller requested a switch. `master_epoch`: of this mastership; None if this broker
        is not master."""
        log.info("switch_requested switch_id=%s broker_id=%d", task.switch_id, task.broker_id)
        now_ms = self._clock_ms()
        self._perform(
            self.core.requested(task, master_epoch=master_epoch, lease=lease, now_ms=now_ms)
        )
        self.poll()

    def poll(self) -> None:
        """Acks came, or the timer expired."""
        task = self.core.task
        if task is None or self._polling:
            return  # holding sends confirms written ones, which calls this method again
        self._polling = True
        try:
            progress = self._actions.switch_progress(task.broker_id)
            self._perform(self.core.poll(progress, self._clock_ms()))
        finally:
            self._polling = False
        self._arm()

    def role_will_change(self) -> None:
        """A newer masterEpoch was taken: the new role answers the held sends."""
        self.core.role_changes()
        self._arm()

    async def close(self) -> None:
        self.core.role_changes()
        self._arm()
        await self._calls.close()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.core.next_ms is not None:
            delay_s = max(self.core.next_ms - self._clock_ms(), 0) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.poll)

    def _perform(self, effects: list[SwitchEffect]) -> None:
        for effect in effects:
            match effect:
                case HoldSends():
                    self.core.held(self._actions.hold_sends(), self._clock_ms())
                case ReleaseSends():
                    self._actions.release_sends()
                case ElectTarget(task, drained_offset):
                    self._calls.spawn(self._elect(task, drained_offset))
                case Drained(task, drained_offset, held_ms):
                    self._report(
                        "drained",
                        target=task.broker_id,
                        drainedOffset=drained_offset,
                        heldMs=held_ms,
                    )
                case SwitchFailed(task, reason):
                    log.warning("switch_failed switch_id=%s reason=%r", task.switch_id, reason)
                    self._link.switch_failed(task, reason)
                case _:
                    assert_never(effect)

    async def _elect(self, task: SwitchTask, drained_offset: int) -> None:
        answer = await self._link.elect(task, drained_offset)
        if answer is None:
            self.core.elect_unanswered(task.switch_id, self._clock_ms())
        else:
            code, remark = answer.code, answer.remark
            if code != ResponseCode.SUCCESS:
                log.info("switch_election_answered code=%d %s", code, remark)
            now_ms = self._clock_ms()
            self._perform(self.core.elect_answered(task.switch_id, code, remark, now_ms))
        self._arm()
