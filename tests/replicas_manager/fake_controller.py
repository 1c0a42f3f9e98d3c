"""A scripted gRPC endpoint of a controller, and what the fake brokers beside it share."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import grpc

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc
from batonmq.protocol.role_view import RoleView
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.switch import SwitchProgress


def manager_config(**fields: Any) -> ReplicasManagerConfig:
    """The settings of a broker's manager; its files are beside each other, and none is made."""
    defaults: dict[str, Any] = {
        "cluster_name": "C",
        "broker_name": "broker-a",
        "address": "127.0.0.1:10911",
        "ha_address": "127.0.0.1:10912",
        "controllers": ("c1",),
        "identity_path": Path("unused/brokerIdentity"),
        "role_path": Path("unused/masterEpoch"),
    }
    return ReplicasManagerConfig(**(defaults | fields))


def replica_message(broker_id: int, incarnation: str, *, alive: bool = True) -> pb.Replica:
    return pb.Replica(
        broker_id=broker_id,
        address=f"127.0.0.1:{10000 + broker_id}",
        ha_address=f"127.0.0.1:{11000 + broker_id}",
        alive=alive,
        incarnation=incarnation,
    )


def view_message(
    master: int, epoch: int, set_epoch: int, members: list[int], incarnations: dict[int, str]
) -> pb.RoleView:
    return pb.RoleView(
        cluster_name="C",
        broker_name="broker-a",
        master_broker_id=master,
        master_address=f"127.0.0.1:{10000 + master}",
        master_ha_address=f"127.0.0.1:{11000 + master}",
        master_incarnation=incarnations.get(master, ""),
        master_epoch=epoch,
        sync_state_set_epoch=set_epoch,
        sync_state_set=members,
        replicas=[
            replica_message(i, incarnation) for i, incarnation in sorted(incarnations.items())
        ],
        raft_index=100 * epoch + set_epoch,
    )


class NoSwitch:
    """The part of BrokerActions that only planned switches use."""

    def role_will_change(self, view: RoleView, *, master: bool) -> None:
        pass

    def hold_sends(self) -> int:
        raise AssertionError("no switch was requested")

    def release_sends(self) -> None:
        raise AssertionError("no switch was requested")

    def switch_progress(self, broker_id: int) -> SwitchProgress:
        raise AssertionError("no switch was requested")


class RecordingBroker(NoSwitch):
    """Writes down what it is told, each with its name first."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._changed = asyncio.Event()

    async def stand_down(self, view: RoleView) -> None:
        self._note("stand_down", view.master_epoch)

    def set_dead(self, broker_ids: frozenset[int]) -> None:
        self._note("dead", broker_ids)

    def proposal_refused(self, code: int, remark: str) -> None:
        self._note("refused", code)

    def proposal_unknown(self) -> None:
        self._note("unknown")

    def master_moved(self, view: RoleView) -> None:
        pass

    def lease_changed(self, valid: bool) -> None:
        self._note("lease", valid)

    def _note(self, *what: Any) -> None:
        self.calls.append(what)
        self._changed.set()

    async def until(self, *what: Any) -> None:
        async with asyncio.timeout(10):
            while what not in self.calls:
                self._changed.clear()
                await self._changed.wait()


class FakeSession:
    """One broker's stream as the controller sees it."""

    def __init__(self, hello: pb.Hello, context: grpc.aio.ServicerContext) -> None:
        self.hello = hello
        self.heartbeats: list[pb.Heartbeat] = []
        self.goodbye: str | None = None
        self.ended = asyncio.Event()
        self._context = context
        self._writing = asyncio.Lock()

    async def write(self, message: pb.ControllerMessage) -> None:
        """One at a time: two writes at once end a gRPC stream."""
        async with self._writing:
            await self._context.write(message)

    async def push(self, view: pb.RoleView) -> None:
        await self.write(pb.ControllerMessage(view=view))

    async def abort(self) -> None:
        await self._context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


class FakeController(controller_pb2_grpc.ControllerServiceServicer):
    """`handlers[method]` makes the reply; unset methods abort with UNIMPLEMENTED."""

    def __init__(self) -> None:
        self.leader = True
        self.controller_epoch = 1
        self.answering = True
        self.key = (0, 0)
        self.leader_address = ""
        self.refuse: pb.Status | None = None
        self.refusals = 0
        self.asked: dict[str, list[Any]] = {}
        self.handlers: dict[str, Callable[[Any], Any | Awaitable[Any]]] = {}
        self.sessions: list[FakeSession] = []
        self.address = ""
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server()
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that this endpoint sees."""
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def session(self, count: int = 1) -> FakeSession:
        await self.until(lambda: len(self.sessions) >= count)
        return self.sessions[-1]

    async def _reply(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self.asked.setdefault(method, []).append(request)
        self._changed.set()
        handler = self.handlers.get(method)
        if handler is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, method)
            raise AssertionError("abort raises")
        reply = handler(request)
        return await reply if asyncio.iscoroutine(reply) else reply

    RegisterBroker: Any = partialmethod(_reply, "RegisterBroker")
    AlterSyncStateSet: Any = partialmethod(_reply, "AlterSyncStateSet")
    ElectMaster: Any = partialmethod(_reply, "ElectMaster")
    GetReplicaInfo: Any = partialmethod(_reply, "GetReplicaInfo")
    ReportEvent: Any = partialmethod(_reply, "ReportEvent")

    async def BrokerSession(
        self, request_iterator: AsyncIterator[pb.BrokerMessage], context: Any
    ) -> None:
        session: FakeSession | None = None
        try:
            async for message in request_iterator:
                kind = message.WhichOneof("kind")
                if kind == "hello":
                    if self.refuse is not None:
                        refused = pb.Refused(status=self.refuse)
                        await context.write(pb.ControllerMessage(refused=refused))
                        self.refusals += 1
                        return
                    session = FakeSession(message.hello, context)
                    self.sessions.append(session)
                elif kind == "heartbeat" and session is not None:
                    session.heartbeats.append(message.heartbeat)
                    if self.answering:
                        await session.write(
                            pb.ControllerMessage(answer=self._answer(message.heartbeat))
                        )
                elif kind == "goodbye" and session is not None:
                    session.goodbye = message.goodbye.reason
                    return
                self._changed.set()
        finally:
            if session is not None:
                session.ended.set()
            self._changed.set()

    def _answer(self, heartbeat: pb.Heartbeat) -> pb.HeartbeatAnswer:
        return pb.HeartbeatAnswer(
            sequence=heartbeat.sequence,
            sent_ms=heartbeat.sent_ms,
            leader=self.leader,
            controller_epoch=self.controller_epoch,
            leader_grpc_address=self.leader_address,
            master_epoch=self.key[0],
            sync_state_set_epoch=self.key[1],
        )
