"""The shell around `PlannedSwitch`: timer, call to the controllers, the broker's held sends."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import grpc

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1.role_view import role_view_from_pb
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager.actions import BrokerActions
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.session import ControllerChannels, is_only_the_call_cancelled
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

CALL_TIMEOUT_S = 0.2
HAND_OVER_S = 1.0
"""A switch lasts some 0.05 s, and 0.9 s at most (R33)."""


@dataclass(frozen=True, slots=True)
class SwitchPorts:
    """What a planned switch uses of the ReplicasManager."""

    channels: ControllerChannels
    target: Callable[[str], str]
    """The leading controller; the argument, which requested the switch, if none is known."""
    take_view: Callable[[str, RoleView], None]
    """Takes a view that came from that controller."""
    send: Callable[[str, pb.BrokerMessage], None]
    """Sends a message on the session with that controller."""
    report: Callable[..., None]
    """Adds an event to the history."""


class SwitchRunner:
    """At most one planned switch of this broker."""

    def __init__(
        self,
        config: ReplicasManagerConfig,
        actions: BrokerActions,
        ports: SwitchPorts,
        clock_ms: Callable[[], int],
    ) -> None:
        self.core = PlannedSwitch()
        self._config = config
        self._actions = actions
        self._ports = ports
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

    async def hand_over(self, leader: str, broker_id: int, master_epoch: int, reason: str) -> bool:
        """Asks for a switch of this mastership to that replica, as an operator would. Returns when
        its outcome is known, or HAND_OVER_S later: whether it was carried out."""
        request = pb.ElectMasterRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=broker_id,
            designate=True,
            expected_master_epoch=master_epoch,
            request_id=f"hand-over:{secrets.token_hex(8)}",
            reason=reason,
        )
        try:
            reply = await self._ports.channels.stub(leader).ElectMaster(
                request, timeout=HAND_OVER_S
            )
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not is_only_the_call_cancelled():
                raise
            log.info("not_handed_over broker_id=%d why=%s", broker_id, error)
            return False
        if reply.status.code != ResponseCode.SUCCESS:
            log.info("not_handed_over broker_id=%d why=%s", broker_id, reply.status.remark)
            return False
        if reply.HasField("view"):
            self._ports.take_view(leader, role_view_from_pb(reply.view))
        return True

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
                    self._ports.report(
                        "drained",
                        target=task.broker_id,
                        drainedOffset=drained_offset,
                        heldMs=held_ms,
                    )
                case SwitchFailed(task, reason):
                    log.warning("switch_failed switch_id=%s reason=%r", task.switch_id, reason)
                    failed = pb.SwitchFailed(switch_id=task.switch_id, reason=reason)
                    self._ports.send(task.controller, pb.BrokerMessage(switch_failed=failed))
                case _:
                    assert_never(effect)

    async def _elect(self, task: SwitchTask, drained_offset: int) -> None:
        request = pb.ElectMasterRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=task.broker_id,
            designate=True,
            expected_master_epoch=task.master_epoch,
            request_id=task.switch_id,
            reason="planned switch",
            drained_offset=drained_offset,
        )
        target = self._ports.target(task.controller)
        stub = self._ports.channels.stub(target)
        try:
            reply = await stub.ElectMaster(request, timeout=CALL_TIMEOUT_S)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not is_only_the_call_cancelled():
                raise
            log.info("switch_election_unanswered target=%s why=%s", target, error)
            self.core.elect_unanswered(task.switch_id, self._clock_ms())
        else:
            if reply.HasField("view"):
                self._ports.take_view(target, role_view_from_pb(reply.view))
            code, remark = reply.status.code, reply.status.remark
            if code != ResponseCode.SUCCESS:
                log.info("switch_election_answered target=%s code=%d %s", target, code, remark)
            now_ms = self._clock_ms()
            self._perform(self.core.elect_answered(task.switch_id, code, remark, now_ms))
        self._arm()
