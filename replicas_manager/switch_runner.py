"""The shell around `PlannedSwitch`: timers, the call to the controllers, the broker's send hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, assert_never

import grpc

from baton.controller.v1 import controller_pb2 as pb
from protocol.codes import ResponseCode
from protocol.role_view import RoleView
from replicas_manager.session import ControllerChannels, is_only_the_call_cancelled
from replicas_manager.switch import (
    Drained,
    ElectTarget,
    HoldSends,
    PlannedSwitch,
    ReleaseSends,
    SwitchEffect,
    SwitchFailed,
    SwitchProgress,
    SwitchTask,
)
from replicas_manager.wire import role_view_of

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 0.2


class SwitchActions(Protocol):
    """What a planned switch needs of the broker. On its loop, none of it waits."""

    def hold_sends(self) -> int:
        """Queue new sends, write what was taken; returns the end of the log."""

    def release_sends(self) -> None:
        """Handle what was queued, in its order."""

    def switch_progress(self, broker_id: int) -> SwitchProgress:
        """The log, and how far that replica is."""

    def role_comes(self, view: RoleView, *, master: bool) -> None:
        """`view` was taken and will change the role, or the epoch of the same role: as a master
        to be, hold what clients send already; else send away at once who waits."""


class SwitchRunner:
    """`elected(controller, view)` takes a view; `tell(controller, message)` sends on a session;
    `targets()` names the controllers to ask, the likely leader first."""

    def __init__(
        self,
        broker_name: str,
        cluster_name: str,
        actions: SwitchActions,
        channels: Callable[[], ControllerChannels],
        *,
        clock_ms: Callable[[], int],
        targets: Callable[[str], str],
        elected: Callable[[str, RoleView], None],
        tell: Callable[[str, pb.BrokerMessage], None],
        report: Callable[..., None],
    ) -> None:
        self.core = PlannedSwitch()
        self._broker_name = broker_name
        self._cluster_name = cluster_name
        self._actions = actions
        self._channels = channels
        self._clock_ms = clock_ms
        self._targets = targets
        self._elected = elected
        self._tell = tell
        self._report = report
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._looking = False

    def asked(self, task: SwitchTask, *, master_epoch: int | None, lease: bool) -> None:
        log.info("switch_asked switch_id=%s broker_id=%d", task.switch_id, task.broker_id)
        now_ms = self._clock_ms()
        self._perform(self.core.asked(task, master_epoch=master_epoch, lease=lease, now_ms=now_ms))
        self.look()

    def look(self) -> None:
        """Acks came, or the timer did."""
        task = self.core.task
        if task is None or self._looking:
            return  # holding the sends confirms what was written, and that comes by here again
        self._looking = True
        try:
            progress = self._actions.switch_progress(task.broker_id)
            self._perform(self.core.look(progress, self._clock_ms()))
        finally:
            self._looking = False
        self._arm()

    def role_changes(self, view: RoleView, *, master: bool) -> None:
        """A newer masterEpoch: what is held is for the new role to answer."""
        self.core.role_changes()
        self._arm()
        self._actions.role_comes(view, master=master)

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
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.look)

    def _perform(self, effects: list[SwitchEffect]) -> None:
        for effect in effects:
            match effect:
                case HoldSends():
                    self.core.held(self._actions.hold_sends(), self._clock_ms())
                case ReleaseSends():
                    self._actions.release_sends()
                case ElectTarget(task, drained_offset):
                    call = asyncio.get_running_loop().create_task(self._ask(task, drained_offset))
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
                    failed = pb.SwitchFailed(switch_id=task.switch_id, reason=reason)
                    self._tell(task.controller, pb.BrokerMessage(switch_failed=failed))
                case _:
                    assert_never(effect)

    async def _ask(self, task: SwitchTask, drained_offset: int) -> None:
        request = pb.ElectMasterRequest(
            cluster_name=self._cluster_name,
            broker_name=self._broker_name,
            broker_id=task.broker_id,
            designate=True,
            expected_master_epoch=task.master_epoch,
            request_id=task.switch_id,
            reason="planned switch",
            drained_offset=drained_offset,
        )
        target = self._targets(task.controller)
        stub = self._channels().stub(target)
        try:
            reply = await stub.ElectMaster(request, timeout=CALL_TIMEOUT_S)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not is_only_the_call_cancelled():
                raise
            log.info("switch_election_unanswered target=%s why=%s", target, error)
            self.core.elect_unanswered(task.switch_id, self._clock_ms())
        else:
            if reply.HasField("view"):
                self._elected(target, role_view_of(reply.view))
            code, remark = reply.status.code, reply.status.remark
            if code != ResponseCode.SUCCESS:
                log.info("switch_election_answered target=%s code=%d %s", target, code, remark)
            now_ms = self._clock_ms()
            self._perform(self.core.elect_answered(task.switch_id, code, remark, now_ms))
        self._arm()
