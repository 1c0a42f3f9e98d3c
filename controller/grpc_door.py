"""The native door: a gRPC server for `baton.controller.v1`.

Unary requests are answered by the leader only; another node answers status 2007 and names the
leader in the trailing metadata `leader-id` and `leader-grpc-address`. A request whose outcome is
unknown ends with the gRPC status UNAVAILABLE instead of a reply, so that nobody takes it for a
refusal. GetMetadata, GetHistory and BrokerSession are served by every node.

A session's end without a Goodbye is a death first-hand: to a gRPC server a killed peer and a closed
one look alike, both simply end the stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from baton.controller.v1 import controller_pb2 as pb
from baton.controller.v1 import controller_pb2_grpc as pb_grpc
from controller.commands import (
    AlterSyncStateSet,
    AnyCommand,
    CleanBrokerData,
    ElectMaster,
    Member,
    RegisterBroker,
    ReportEvent,
)
from controller.config import Peer
from controller.errors import CommandTooLargeError, OutcomeUnknownError
from controller.grpc_codec import role_view_to_pb
from controller.history import HistoryEvent
from controller.requests import ControllerRequests
from controller.results import CommandResult
from controller.sessions import Session, SessionBook
from controller.switch_desk import SwitchDesk
from protocol.codes import ResponseCode
from protocol.errors import NotLeaderError
from protocol.role_view import RoleView

__all__ = ["GrpcDoor", "SessionListener"]

log = logging.getLogger(__name__)

_MESSAGE_SIZE_MAX: Final = 4 << 20
_HISTORY_SIZE_MAX: Final = 16 << 20

_SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not a second server on it
    ("grpc.max_receive_message_length", _MESSAGE_SIZE_MAX),
    ("grpc.max_send_message_length", _HISTORY_SIZE_MAX),
    # Brokers that fell silent are judged by liveness; this frees the sockets of peers that are
    # gone. keepalive_timeout alone does not notice a stopped peer, ping_timeout does.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
    ("grpc.http2.max_ping_strikes", 0),
)


class SessionListener(Protocol):
    """What the door tells of sessions, as it happens, on the loop's thread."""

    def session_opened(self, session: Session, hello: pb.Hello) -> str:
        """Empty if welcome, else the reason why the session is refused (R18)."""

    def session_heartbeat(self, session: Session, heartbeat: pb.Heartbeat) -> None:
        """The listener answers it through `session.send`."""

    def session_closed(self, session: Session, goodbye: str | None) -> None:
        """`goodbye` is the reason of a planned end, None for a death."""


class GrpcDoor(pb_grpc.ControllerServiceServicer):
    """Handlers never raise but to end a call; every reply carries a status."""

    def __init__(
        self,
        requests: ControllerRequests,
        sessions: SessionBook,
        listener: SessionListener,
        desk: SwitchDesk,
    ) -> None:
        self._requests = requests
        self._desk = desk
        self._sessions = sessions
        self._listener = listener
        self._server: Any = None

    async def listen(self, address: str) -> int:
        """Serves on `host:port` (port 0: any). Returns the port. Raises OSError if it is taken."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        pb_grpc.add_ControllerServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self, server
        )
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot bind gRPC port {address}") from error
        if port == 0:
            raise OSError(f"cannot bind gRPC port {address}")
        await server.start()
        self._server = server
        return int(port)

    async def close(self) -> None:
        """Ends all calls at once. Sessions end without a word: brokers ask the other nodes."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=None)

    # Unary requests.

    async def GetNextBrokerId(
        self, request: pb.GetNextBrokerIdRequest, context: Any
    ) -> pb.GetNextBrokerIdReply:
        try:
            state = await self._requests.reading()
        except (NotLeaderError, OutcomeUnknownError) as error:
            return pb.GetNextBrokerIdReply(status=await self._failed(error, context))
        return pb.GetNextBrokerIdReply(
            status=_OK, next_broker_id=state.next_broker_id(request.broker_name)
        )

    async def RegisterBroker(
        self, request: pb.RegisterBrokerRequest, context: Any
    ) -> pb.RegisterBrokerReply:
        command = RegisterBroker(
            request_id=request.request_id,
            cluster_name=request.cluster_name,
            broker_name=request.broker_name,
            broker_id=request.broker_id,
            register_check_code=request.register_check_code,
            address=request.address,
            ha_address=request.ha_address,
            incarnation=request.incarnation,
            log_id=request.log_id,
            learner=request.learner,
            epoch=request.epoch,
            max_offset=request.max_offset,
            confirm_offset=request.confirm_offset,
            election_priority=request.election_priority,
            suspect=request.suspect,
            accepted_epoch=request.accepted_epoch,
            earlier_lives=tuple(request.earlier_lives),
        )
        if not request.incarnation or not request.broker_name:
            return pb.RegisterBrokerReply(
                status=_refused(ResponseCode.CONTROLLER_INVALID_REQUEST, "name and incarnation")
            )
        status, result = await self._submit(command, context)
        if result is None:
            return pb.RegisterBrokerReply(status=status)
        return pb.RegisterBrokerReply(
            status=status, broker_id=result.broker_id, view=self._view(result.view)
        )

    async def AlterSyncStateSet(
        self, request: pb.AlterSyncStateSetRequest, context: Any
    ) -> pb.AlterSyncStateSetReply:
        command = AlterSyncStateSet(
            request_id=request.request_id,
            broker_name=request.broker_name,
            master_broker_id=request.master_broker_id,
            master_incarnation=request.master_incarnation,
            master_epoch=request.master_epoch,
            sync_state_set_epoch=request.sync_state_set_epoch,
            new_set=tuple(
                Member(member.broker_id, member.incarnation) for member in request.new_set
            ),
            confirm_offset=request.confirm_offset,
            reason=request.reason,
        )
        status, result = await self._submit(command, context)
        view = None if result is None else result.view
        return pb.AlterSyncStateSetReply(status=status, view=self._view(view))

    async def ElectMaster(
        self, request: pb.ElectMasterRequest, context: Any
    ) -> pb.ElectMasterReply:
        command = ElectMaster(
            request_id=request.request_id,
            cluster_name=request.cluster_name,
            broker_name=request.broker_name,
            broker_id=request.broker_id,
            designate=request.designate,
            unclean=request.unclean,
            expected_master_epoch=request.expected_master_epoch,
            reason=request.reason,
            drained_offset=request.drained_offset,
        )
        status, result = await self._answered(self._desk.elect(command), context)
        view = None if result is None else result.view
        return pb.ElectMasterReply(status=status, view=self._view(view))

    async def CleanBrokerData(
        self, request: pb.CleanBrokerDataRequest, context: Any
    ) -> pb.CleanBrokerDataReply:
        command = CleanBrokerData(
            cluster_name=request.cluster_name,
            broker_name=request.broker_name,
            broker_ids=tuple(request.broker_ids),
            clean_living_broker=request.clean_living_broker,
        )
        status, _ = await self._submit(command, context)
        return pb.CleanBrokerDataReply(status=status)

    async def ReportEvent(
        self, request: pb.ReportEventRequest, context: Any
    ) -> pb.ReportEventReply:
        command = ReportEvent(
            request_id=request.request_id,
            broker_name=request.broker_name,
            broker_id=request.broker_id,
            master_epoch=request.master_epoch,
            kind=request.kind,
            time_ms=request.time_ms,
            json=request.json,
        )
        status, _ = await self._submit(command, context)
        return pb.ReportEventReply(status=status)

    async def GetReplicaInfo(
        self, request: pb.GetReplicaInfoRequest, context: Any
    ) -> pb.GetReplicaInfoReply:
        try:
            await self._requests.reading()
        except (NotLeaderError, OutcomeUnknownError) as error:
            return pb.GetReplicaInfoReply(status=await self._failed(error, context))
        view = self._requests.view(request.broker_name)
        if view is None:
            return pb.GetReplicaInfoReply(
                status=_refused(
                    ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
                    f"no broker group named {request.broker_name}",
                )
            )
        return pb.GetReplicaInfoReply(status=_OK, view=role_view_to_pb(view))

    async def GetSyncStateData(
        self, request: pb.GetSyncStateDataRequest, context: Any
    ) -> pb.GetSyncStateDataReply:
        try:
            state = await self._requests.reading()
        except (NotLeaderError, OutcomeUnknownError) as error:
            return pb.GetSyncStateDataReply(status=await self._failed(error, context))
        names = list(request.broker_names) or sorted(state.groups)
        views = filter(None, map(self._requests.view, names))
        return pb.GetSyncStateDataReply(status=_OK, views=map(role_view_to_pb, views))

    async def GetMetadata(
        self, request: pb.GetMetadataRequest, context: Any
    ) -> pb.GetMetadataReply:
        metadata = self._requests.metadata()
        leader, log_status = metadata.leader, metadata.log
        return pb.GetMetadataReply(
            status=_OK,
            group=metadata.group,
            self_id=metadata.self_peer.node_id,
            leader_id=leader.node_id if leader else "",
            leader_remoting_address=leader.remoting_address if leader else "",
            leader_grpc_address=leader.grpc_address if leader else "",
            is_leader=metadata.is_leader,
            controller_epoch=metadata.controller_epoch,
            raft_term=log_status.term,
            applied_index=log_status.applied_index,
            committed_index=log_status.committed_index,
            peers=map(_peer_to_pb, metadata.peers),
            journal_bytes=log_status.journal_bytes,
            journal_entries=log_status.journal_entries,
            snapshot_bytes=log_status.snapshot_bytes,
            snapshot_index=log_status.snapshot_index,
            digest_index=log_status.digest_index,
            state_digest=log_status.state_digest,
            problems=metadata.problems,
        )

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Any) -> pb.GetHistoryReply:
        """Served by every node from what it applied: the story is wanted most when none leads."""
        events = await self._requests.history(
            request.broker_name, request.after_raft_index, request.limit
        )
        return pb.GetHistoryReply(status=_OK, events=map(_event_to_pb, events))

    async def _submit(
        self, command: AnyCommand, context: Any
    ) -> tuple[pb.Status, CommandResult | None]:
        return await self._answered(self._requests.submit(command), context)

    async def _answered(
        self, asking: Awaitable[CommandResult], context: Any
    ) -> tuple[pb.Status, CommandResult | None]:
        try:
            result = await asking
        except CommandTooLargeError as error:
            return _refused(error.response_code, str(error)), None
        except (NotLeaderError, OutcomeUnknownError) as error:
            return await self._failed(error, context), None
        return pb.Status(code=int(result.code), remark=result.remark), result

    async def _failed(self, error: NotLeaderError | OutcomeUnknownError, context: Any) -> pb.Status:
        if isinstance(error, OutcomeUnknownError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        leader = self._requests.leader()
        if leader is not None:
            context.set_trailing_metadata(
                (("leader-id", leader.node_id), ("leader-grpc-address", leader.grpc_address))
            )
        return _refused(ResponseCode.CONTROLLER_NOT_LEADER, str(error))

    def _view(self, view: RoleView | None) -> pb.RoleView | None:
        return None if view is None else role_view_to_pb(self._requests.with_alive(view))

    # Sessions.

    async def BrokerSession(
        self, request_iterator: AsyncIterator[pb.BrokerMessage], context: Any
    ) -> None:
        """One broker process: Hello, then heartbeats, then Goodbye or death."""
        first = await anext(request_iterator, None)
        if first is None:
            return
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with Hello")
        hello = first.hello
        if not (hello.broker_name and hello.broker_id > 0 and hello.incarnation):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "Hello needs broker_name, broker_id, incarnation"
            )
        session = self._sessions.add(
            hello.cluster_name, hello.broker_name, hello.broker_id, hello.incarnation
        )
        refusal = self._listener.session_opened(session, hello)
        if refusal:
            self._sessions.remove(session)
            status = _refused(ResponseCode.CONTROLLER_BROKER_ID_INVALID, refusal)
            await context.write(pb.ControllerMessage(refused=pb.Refused(status=status)))
            return
        goodbye: str | None = None
        writer = asyncio.create_task(session.write_all(context.write))
        reader = asyncio.create_task(self._read(session, request_iterator))
        cut = asyncio.create_task(session.cut.wait())
        try:
            await asyncio.wait((writer, reader, cut), return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not reader.cancelled() and reader.exception() is None:
                goodbye = reader.result()
        finally:
            # At once, before anything is awaited: an election hangs on it.
            self._sessions.remove(session)
            self._listener.session_closed(session, goodbye)
            for task in (writer, reader, cut):
                task.cancel()
            await asyncio.gather(writer, reader, cut, return_exceptions=True)

    async def _read(
        self, session: Session, messages: AsyncIterator[pb.BrokerMessage]
    ) -> str | None:
        """The reason of the Goodbye, or None when the stream ended without one."""
        heartbeat: Callable[[Session, pb.Heartbeat], None]
        heartbeat = self._listener.session_heartbeat
        async for message in messages:
            match message.WhichOneof("kind"):
                case "heartbeat":
                    heartbeat(session, message.heartbeat)
                case "switch_failed":
                    self._desk.failed(session, message.switch_failed)
                case "goodbye":
                    return message.goodbye.reason or "goodbye"
        return None


_OK: Final = pb.Status(code=int(ResponseCode.SUCCESS))


def _refused(code: ResponseCode, remark: str) -> pb.Status:
    return pb.Status(code=int(code), remark=remark)


def _peer_to_pb(peer: Peer) -> pb.ControllerPeer:
    return pb.ControllerPeer(
        id=peer.node_id,
        remoting_address=peer.remoting_address,
        grpc_address=peer.grpc_address,
        raft_address=peer.raft_address,
    )


def _event_to_pb(event: HistoryEvent) -> pb.HistoryEvent:
    return pb.HistoryEvent(
        raft_index=event.raft_index,
        time_ms=event.time_ms,
        kind=str(event.kind),
        broker_name=event.broker_name,
        broker_id=event.broker_id,
        master_epoch=event.master_epoch,
        sync_state_set_epoch=event.sync_state_set_epoch,
        json=event.to_json(),
    )
