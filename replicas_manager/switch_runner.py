"""The shell around `PlannedSwitch`: timer, the election at the controllers, held sends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import assert_never

from batonmq.protocol.codes import ResponseCode
from batonmq.replicas_manager.actions import BrokerActions
from batonmq.replicas_manager.link import ControllerLink
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

log = logging.getLogger(__name__)


class SwitchRunner:
    """At most one planned switch of this broker. `report` adds an event to the history."""

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
        self._calls: set[asyncio.Task[None]] = set()
        self._polling = False

    def requested(self, task: SwitchTask, *, master_epoch: int | None, lease: bool) -> None:
        """`master_epoch`: of this mastership, None if this broker is no master."""
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
            return  # holding the sends confirms what was written, which calls this again
        self._polling = True
        try:
            progress = self._actions.switch_progress(task.broker_id)
            self._perform(self.core.poll(progress, self._clock_ms()))
        finally:
            self._polling = False
        self._arm()

    def role_will_change(self) -> None:
        """A newer masterEpoch was taken: the new role answers what is held."""
        self.core.role_changes()
        self._arm()

    async def close(self) -> None:
        self.core.role_changes()
        self._arm()
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

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
                    call = asyncio.get_running_loop().create_task(self._elect(task, drained_offset))
                    self._calls.add(call)
                    call.add_done_callback(self._calls.discard)
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
