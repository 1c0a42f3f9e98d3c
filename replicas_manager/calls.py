"""The unary calls to the controllers: each effect asks one of them, what comes of it is an event.

Holds no policy: whom to ask, and when again, is the state machine's. Each call ends in exactly one
event, also if its channel is closed under it, for the state machine waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import assert_never

import grpc

from baton.controller.v1 import controller_pb2 as pb
from protocol.codes import ResponseCode
from protocol.role_view import RoleView
from replicas_manager.actions import LogFacts
from replicas_manager.config import ReplicasManagerConfig
from replicas_manager.events import (
    AlterFailed,
    AlterReplied,
    ElectFailed,
    ElectReplied,
    Event,
    FetchFailed,
    FetchView,
    LeaderHinted,
    RegisterFailed,
    RegisterReplied,
    SendAlter,
    SendElect,
    SendRegister,
    ViewReceived,
)
from replicas_manager.session import ControllerChannels, is_only_the_call_cancelled
from replicas_manager.state import ReplicasState
from replicas_manager.wire import role_view_of

__all__ = ["Call", "ControllerCalls"]

CALL_TIMEOUT_S = 1.0

Call = SendRegister | SendElect | SendAlter | FetchView


class ControllerCalls:
    """Asks in tasks of its own. `emit` takes what comes of it; `state` tells who is asking."""

    def __init__(
        self,
        config: ReplicasManagerConfig,
        incarnation: str,
        check_code: str,
        earlier_lives: tuple[str, ...],
        channels: ControllerChannels,
        log_facts: Callable[[], LogFacts],
        state: ReplicasState,
        emit: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._check_code = check_code
        self._earlier_lives = earlier_lives
        self._channels = channels
        self._log_facts = log_facts
        self._state = state
        self._emit = emit
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, call: Call) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up what is under way; nothing more is emitted."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _ask(self, call: Call) -> None:
        try:
            event = await self._answer(call)
        except grpc.aio.AioRpcError as error:
            event = _failed(call, f"{error.code().name}: {error.details()}")
        except asyncio.CancelledError:
            if not is_only_the_call_cancelled():
                raise
            event = _failed(call, "its connection was given up")
        self._emit(event)

    async def _answer(self, call: Call) -> Event:
        match call:
            case SendRegister():
                return await self._register(call)
            case SendElect():
                return await self._elect(call)
            case SendAlter():
                return await self._alter(call)
            case FetchView():
                return await self._fetch(call)
            case _:
                assert_never(call)

    async def _note_leader(
        self, target: str, status: pb.Status, call: grpc.aio.UnaryUnaryCall
    ) -> None:
        """A node that does not lead says in the trailing metadata who does."""
        if status.code == ResponseCode.CONTROLLER_NOT_LEADER:
            trailing = dict(await call.trailing_metadata())
            self._emit(LeaderHinted(target, str(trailing.get("leader-grpc-address", ""))))

    async def _register(self, effect: SendRegister) -> Event:
        facts = self._log_facts()
        request = pb.RegisterBrokerRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=effect.broker_id,
            register_check_code=self._check_code,
            address=self._config.address,
            ha_address=self._config.ha_address,
            incarnation=self._incarnation,
            log_id=facts.log_id,
            learner=self._config.learner,
            epoch=facts.epoch,
            max_offset=facts.max_offset,
            confirm_offset=facts.confirm_offset,
            election_priority=self._config.election_priority,
            request_id=effect.request_id,
            suspect=effect.suspect,
            accepted_epoch=self._state.highest_master_epoch,
            earlier_lives=self._earlier_lives,
        )
        call = self._channels.stub(effect.target).RegisterBroker(request, timeout=CALL_TIMEOUT_S)
        reply = await call
        await self._note_leader(effect.target, reply.status, call)
        return RegisterReplied(
            effect.target, reply.status.code, reply.status.remark, reply.broker_id, _view(reply)
        )

    async def _elect(self, effect: SendElect) -> Event:
        request = pb.ElectMasterRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=self._state.broker_id,
            designate=False,
            expected_master_epoch=effect.expected_master_epoch,
            request_id=effect.request_id,
            reason=effect.reason,
        )
        call = self._channels.stub(effect.target).ElectMaster(request, timeout=CALL_TIMEOUT_S)
        reply = await call
        await self._note_leader(effect.target, reply.status, call)
        return ElectReplied(effect.target, reply.status.code, reply.status.remark, _view(reply))

    async def _alter(self, effect: SendAlter) -> Event:
        request = pb.AlterSyncStateSetRequest(
            broker_name=self._config.broker_name,
            master_broker_id=self._state.broker_id,
            master_incarnation=self._incarnation,
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
        stub = self._channels.stub(effect.target)
        call = stub.AlterSyncStateSet(request, timeout=CALL_TIMEOUT_S)
        reply = await call
        await self._note_leader(effect.target, reply.status, call)
        return AlterReplied(
            effect.request_id, effect.target, reply.status.code, reply.status.remark, _view(reply)
        )

    async def _fetch(self, effect: FetchView) -> Event:
        request = pb.GetReplicaInfoRequest(broker_name=self._config.broker_name)
        call = self._channels.stub(effect.target).GetReplicaInfo(request, timeout=CALL_TIMEOUT_S)
        reply = await call
        await self._note_leader(effect.target, reply.status, call)
        view = _view(reply)
        if view is None:
            return FetchFailed(effect.target, reply.status.remark)
        return ViewReceived(effect.target, view, pushed=False)


def _failed(call: Call, why: str) -> Event:
    match call:
        case SendRegister():
            return RegisterFailed(call.target, why)
        case SendElect():
            return ElectFailed(call.target, why)
        case SendAlter():
            return AlterFailed(call.request_id, call.target, why)
        case FetchView():
            return FetchFailed(call.target, why)
        case _:
            assert_never(call)


def _view(
    reply: pb.RegisterBrokerReply
    | pb.ElectMasterReply
    | pb.AlterSyncStateSetReply
    | pb.GetReplicaInfoReply,
) -> RoleView | None:
    return role_view_of(reply.view) if reply.HasField("view") else None
