"""The unary calls to the controllers: each effect is one call, and its outcome is one event.

Holds no policy: the state machine chooses the controller and the time of the next attempt. Each
call ends in exactly one event, even if its channel is closed meanwhile: the state machine waits
for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import assert_never

import grpc

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc
from batonmq.proto.controller.v1.role_view import role_view_from_pb
from batonmq.protocol.codes import ResponseCode
from batonmq.replicas_manager.actions import LogFacts
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.events import (
    Call,
    Event,
    FetchView,
    LeaderHinted,
    Replied,
    SendAlter,
    SendElect,
    SendRegister,
    Unanswered,
)
from batonmq.replicas_manager.role import ViewInForce
from batonmq.replicas_manager.session import ControllerChannels, is_only_the_call_cancelled

CALL_TIMEOUT_S = 1.0


class ControllerCalls:
    """Each call is a task. `emit` takes the outcome; `current` is who this broker is."""

    def __init__(
        self,
        config: ReplicasManagerConfig,
        check_code: str,
        earlier_incarnations: tuple[str, ...],
        channels: ControllerChannels,
        log_facts: Callable[[], LogFacts],
        current: ViewInForce,
        emit: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._check_code = check_code
        self._earlier_incarnations = earlier_incarnations
        self._channels = channels
        self._log_facts = log_facts
        self._current = current
        self._emit = emit
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self._run(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels what is in flight; nothing more is emitted."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, call: Call) -> None:
        try:
            event: Event = await self._answer(call)
        except grpc.aio.AioRpcError as error:
            event = Unanswered(call, f"{error.code().name}: {error.details()}")
        except asyncio.CancelledError:
            if not is_only_the_call_cancelled():
                raise
            event = Unanswered(call, "its connection was closed")
        self._emit(event)

    async def _answer(self, call: Call) -> Replied:
        rpc = self._begin(call, self._channels.stub(call.target))
        reply = await rpc
        if reply.status.code == ResponseCode.CONTROLLER_NOT_LEADER:
            # A node that does not lead names the leader in the trailing metadata.
            trailing = dict(await rpc.trailing_metadata())
            self._emit(LeaderHinted(call.target, str(trailing.get("leader-grpc-address", ""))))
        return Replied(
            call,
            reply.status.code,
            reply.status.remark,
            role_view_from_pb(reply.view) if reply.HasField("view") else None,
            reply.broker_id if isinstance(call, SendRegister) else 0,
        )

    def _begin(
        self, call: Call, stub: controller_pb2_grpc.ControllerServiceStub
    ) -> grpc.aio.UnaryUnaryCall:
        match call:
            case SendRegister():
                return stub.RegisterBroker(self._register(call), timeout=CALL_TIMEOUT_S)
            case SendElect():
                return stub.ElectMaster(self._elect(call), timeout=CALL_TIMEOUT_S)
            case SendAlter():
                return stub.AlterSyncStateSet(self._alter(call), timeout=CALL_TIMEOUT_S)
            case FetchView():
                request = pb.GetReplicaInfoRequest(broker_name=self._config.broker_name)
                return stub.GetReplicaInfo(request, timeout=CALL_TIMEOUT_S)
            case _:
                assert_never(call)

    def _register(self, effect: SendRegister) -> pb.RegisterBrokerRequest:
        facts = self._log_facts()
        return pb.RegisterBrokerRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=effect.broker_id,
            register_check_code=self._check_code,
            address=self._config.address,
            ha_address=self._config.ha_address,
            incarnation=self._current.incarnation,
            log_id=facts.log_id,
            learner=self._config.learner,
            epoch=facts.epoch,
            max_offset=facts.max_offset,
            confirm_offset=facts.confirm_offset,
            election_priority=self._config.election_priority,
            request_id=effect.request_id,
            suspect=effect.suspect,
            accepted_epoch=self._current.highest_master_epoch,
            earlier_lives=self._earlier_incarnations,
        )

    def _elect(self, effect: SendElect) -> pb.ElectMasterRequest:
        return pb.ElectMasterRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=self._current.broker_id,
            designate=False,
            expected_master_epoch=effect.expected_master_epoch,
            request_id=effect.request_id,
            reason=effect.reason,
        )

    def _alter(self, effect: SendAlter) -> pb.AlterSyncStateSetRequest:
        return pb.AlterSyncStateSetRequest(
            broker_name=self._config.broker_name,
            master_broker_id=self._current.broker_id,
            master_incarnation=self._current.incarnation,
            master_epoch=effect.master_epoch,
            sync_state_set_epoch=effect.sync_state_set_epoch,
            new_set=[
                pb.Member(broker_id=broker_id, incarnation=incarnation)
                for broker_id, incarnation in effect.members
            ],
            request_id=effect.request_id,
            confirm_offset=effect.confirm_offset,
            reason=effect.reason,
        )
