"""The endpoint for our brokers and tools: a gRPC server for `baton.controller.v1`.

The leader answers unary requests; another node answers CONTROLLER_NOT_LEADER (2007) and names the
leader in the trailing metadata `leader-id` and `leader-grpc-address`. A request whose outcome is
unknown ends with the status UNAVAILABLE, so that no caller takes it for a refusal. GetMetadata,
GetHistory and BrokerSession are served by every node.

A session that ends without a Goodbye counts as a death: a gRPC server cannot tell a killed peer
from one that closed its connection.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    MutableSequence,
)
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from batonmq.auth.guard import Guard
from batonmq.controller import watch
from batonmq.controller.endpoints.grpc_guard import SignedCalls, peer_of
from batonmq.controller.endpoints.grpc_places import GrpcPlaces, connections_max
from batonmq.controller.history_log import HistoryLog
from batonmq.controller.planned_switches import PlannedSwitches
from batonmq.controller.requests import (
    CommandTooLargeError,
    ControllerRequests,
    OutcomeUnknownError,
)
from batonmq.controller.rules.commands import (
    AlterSyncStateSet,
    Command,
    CommandResult,
    ElectMaster,
    NewMember,
    RegisterBroker,
    ReportEvent,
)
from batonmq.controller.watch import BrokerWatch, SessionTable
from batonmq.history.event import REASON_SIZE_MAX, HistoryEvent
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc as pb_grpc
from batonmq.proto.controller.v1.role_view import role_view_to_pb
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import NotLeaderError
from batonmq.protocol.incarnation import is_proven, owns
from batonmq.runtime.sockets import check_port_free, listening_as
from batonmq.runtime.tasks import Tasks
from batonmq.runtime.tls import Tls, acts_as, acts_as_broker, names_in
from batonmq.runtime.turns import in_turns

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Command)
R = TypeVar("R")

_MESSAGE_SIZE_MAX: Final = 256 << 10
"""Bytes of a request. More than the 64 KiB of a command: its refusal says what is too large."""
_STREAMS_MAX: Final = 32
"""Streams of one connection; a broker has one session and a few calls."""
_IDLE_MS: Final = 10_000
"""A connection without a call is closed after this time: it occupies a descriptor."""
_HANDSHAKE_MS: Final = 5_000
_HELLO_S: Final = 5.0
"""A broker sends its Hello in the moment in which it opens the stream."""
_HELLOS_AWAITED_MAX: Final = 256
_HISTORIES_MAX: Final = 8  # of one host
_ANSWER_SIZE_MAX: Final = 16 << 20

_SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not a second server on it
    ("grpc.max_receive_message_length", _MESSAGE_SIZE_MAX),
    ("grpc.max_concurrent_streams", _STREAMS_MAX),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_send_message_length", _ANSWER_SIZE_MAX),
    # Only to free the sockets of peers that are gone; whether a broker is dead, liveness decides.
    # keepalive_timeout alone does not notice a stopped peer, ping_timeout does.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 50),
    ("grpc.http2.max_ping_strikes", 0),
)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Asked at each handshake, in a thread of gRPC, so a renewed certificate counts at once. Both
    sides show one."""

    def configuration() -> Any:
        trust, key, cert = tls.pem
        return grpc.ssl_server_certificate_configuration([(key, cert)], trust)

    return grpc.dynamic_ssl_server_credentials(
        configuration(), configuration, require_client_authentication=True
    )


class AwaitedHellos:
    """The streams that have not sent their Hello. If there are too many the oldest is ended, so
    that a broker, which sends its Hello at once, finds a place (R58)."""

    def __init__(self) -> None:
        self.awaited: dict[asyncio.Future[pb.BrokerMessage | None], None] = {}
        """Oldest first."""

    async def first_of(self, messages: Any) -> pb.BrokerMessage | None:
        """The first message, None if the stream ended. Raises TimeoutError."""
        first = asyncio.ensure_future(anext(messages, None))
        self.awaited[first] = None
        if len(self.awaited) > _HELLOS_AWAITED_MAX:
            next(iter(self.awaited)).cancel()
        try:
            await asyncio.wait((first,), timeout=_HELLO_S)
        finally:
            del self.awaited[first]
            is_late = not first.done()
            first.cancel()
        if is_late or first.cancelled():
            raise TimeoutError
        message: pb.BrokerMessage | None = first.result()
        return message


class HistoryReads:
    """The histories that are being made or sent. Each takes up to 8 MiB until the caller has read
    it, and a caller need not read (R58)."""

    def __init__(self) -> None:
        self._of_host: Counter[str] = Counter()

    def refusal(self, context: Any) -> pb.Status | None:
        """Why the call gets no history now; None: it counts until it ends."""
        host = peer_of(context).rpartition(":")[0]
        if self._of_host[host] >= _HISTORIES_MAX:
            why = f"{_HISTORIES_MAX} histories are on their way to {host}: read them first"
            return _status(ResponseCode.SYSTEM_BUSY, why)
        self._of_host[host] += 1
        context.add_done_callback(lambda _: self._ended(host))
        return None

    def _ended(self, host: str) -> None:
        self._of_host[host] -= 1
        if not self._of_host[host]:
            del self._of_host[host]


class GrpcEndpoint(pb_grpc.ControllerServiceServicer):
    """Handlers raise only to end a call; every reply carries a status."""

    def __init__(
        self,
        requests: ControllerRequests,
        sessions: SessionTable,
        watch: BrokerWatch,
        switches: PlannedSwitches,
        history: HistoryLog,
        tls: Tls | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._tls = tls
        self._guard = guard
        self._requests = requests
        self._history = history
        self._switches = switches
        self._sessions = sessions
        self._watch = watch
        self._hellos = AwaitedHellos()
        self._histories = HistoryReads()
        self._places = GrpcPlaces(lambda: sessions.registered_peers(requests.state))
        self._tasks = Tasks()
        self._server: Any = None

    async def listen(self, address: str) -> int:
        """Serves on `host:port` (port 0: any). Returns the port. Raises CannotListenError."""
        host, _, wanted = address.rpartition(":")
        limit = ("grpc.max_allowed_incoming_connections", connections_max())
        users = {} if self._guard is None else {"interceptors": (SignedCalls(self._guard),)}
        server = grpc.aio.server(options=(*_SERVER_OPTIONS, limit), **users)
        pb_grpc.add_ControllerServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self, server
        )
        with listening_as("gRPC", int(wanted)):
            # gRPC does not say why it could not bind.
            check_port_free(host.strip("[]"), int(wanted))
            try:
                if self._tls is not None and self._tls.config.nodes == "enforcing":
                    port = server.add_secure_port(address, _credentials(self._tls))
                else:
                    port = server.add_insecure_port(address)
            except RuntimeError as error:
                raise OSError(str(error)) from error
            # Depending on the cause it reports a failed bind in this way.
            if port == 0:
                raise OSError("it cannot be bound")
        await server.start()
        self._server = server
        self._tasks.keep(partial(self._places.watch, int(port)), "grpc-places")
        return int(port)

    async def close(self) -> None:
        """Ends all calls at once. Sessions end without a message; brokers turn to the other
        nodes."""
        await self._tasks.close()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace=None)

    # Unary requests.

    async def RegisterBroker(
        self, request: pb.RegisterBrokerRequest, context: Any
    ) -> pb.RegisterBrokerReply:
        refusal: pb.Status | None
        if not request.incarnation or not request.broker_name:
            why = "a registration needs broker_name and incarnation"
            refusal = _status(ResponseCode.CONTROLLER_INVALID_REQUEST, why)
        elif not is_proven(request.incarnation, request.secret):
            refusal = _not_proven(request.incarnation)
        elif request.owner and not owns(request.owner, request.owner_secret):
            refusal = _not_proven(request.owner)
        else:
            refusal = self._not_named(context, request.broker_name)
        if refusal is not None:
            return pb.RegisterBrokerReply(status=refusal)
        done = self._requests.submit(command_of(RegisterBroker, request))
        return await self._answer(pb.RegisterBrokerReply, done, context)

    async def AlterSyncStateSet(
        self, request: pb.AlterSyncStateSetRequest, context: Any
    ) -> pb.AlterSyncStateSetReply:
        if not is_proven(request.master_incarnation, request.secret):
            return pb.AlterSyncStateSetReply(status=_not_proven(request.master_incarnation))
        if refusal := self._not_named(context, request.broker_name):
            return pb.AlterSyncStateSetReply(status=refusal)
        members = tuple(NewMember(each.broker_id, each.incarnation) for each in request.new_set)
        done = self._requests.submit(command_of(AlterSyncStateSet, request, new_set=members))
        return await self._answer(pb.AlterSyncStateSetReply, done, context)

    async def ElectMaster(
        self, request: pb.ElectMasterRequest, context: Any
    ) -> pb.ElectMasterReply:
        if refusal := self._not_named(context, request.broker_name, or_admin=True):
            return pb.ElectMasterReply(status=refusal)
        reason = self._caller(context)
        if request.reason:  # of a broker
            # Who asked stays visible, however long its reason is.
            room = REASON_SIZE_MAX - len(reason) - 2
            reason = f"{request.reason[: max(room, 0)]}: {reason}"
        done = self._switches.elect(command_of(ElectMaster, request, reason=reason))
        return await self._answer(pb.ElectMasterReply, done, context)

    async def ReportEvent(
        self, request: pb.ReportEventRequest, context: Any
    ) -> pb.ReportEventReply:
        if refusal := self._not_named(context, request.broker_name):
            return pb.ReportEventReply(status=refusal)
        done = self._requests.submit(command_of(ReportEvent, request))
        return await self._answer(pb.ReportEventReply, done, context)

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
                status=_status(
                    ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST,
                    f"no broker group named {request.broker_name}",
                )
            )
        return pb.GetReplicaInfoReply(status=_OK, view=role_view_to_pb(view))

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Any) -> pb.GetHistoryReply:
        """Answered by every node, from what it applied: most useful while no node leads."""
        if refusal := self._histories.refusal(context):
            return pb.GetHistoryReply(status=refusal)
        if request.HasField("after"):
            return await self._history_page(request)
        events = await self._history.events(
            self._requests.state, request.broker_name, request.after_raft_index, request.limit
        )
        return await _history_reply(events)

    async def _history_page(self, request: pb.GetHistoryRequest) -> pb.GetHistoryReply:
        place = request.after
        after = (place.log, place.raft_index, place.part) if place.log else None
        try:
            page = await self._history.page(self._requests.state, after, request.limit)
        except OSError as error:
            log.warning("history_not_read reason=%s", error)
            remark = f"the history cannot be read: {error}"
            return pb.GetHistoryReply(status=_status(ResponseCode.SYSTEM_ERROR, remark))
        reply = await _history_reply(page.events)
        reply.continuation = pb.GetHistoryReply.FOLLOWS if page.follows else pb.GetHistoryReply.GAP
        return reply

    async def _answer(
        self, reply: Callable[..., R], done: Awaitable[CommandResult], context: Any
    ) -> R:
        """The reply to a command, with as much of its result as this kind of reply has."""
        try:
            result = await done
        except CommandTooLargeError as error:
            return reply(status=_status(error.response_code, str(error)))
        except (NotLeaderError, OutcomeUnknownError) as error:
            return reply(status=await self._failed(error, context))
        answer = {"status": _status(result.code, result.remark), "broker_id": result.broker_id}
        if result.view is not None:
            answer["view"] = role_view_to_pb(self._requests.with_alive(result.view))
        has: Any = reply
        return reply(**{k: v for k, v in answer.items() if k in has.DESCRIPTOR.fields_by_name})

    async def _failed(self, error: NotLeaderError | OutcomeUnknownError, context: Any) -> pb.Status:
        # A reply with a code would be taken for a refusal (R11). `abort` raises.
        if isinstance(error, OutcomeUnknownError):
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        leader = self._requests.leader()
        if leader is not None:
            context.set_trailing_metadata(
                (("leader-id", leader.node_id), ("leader-grpc-address", leader.grpc_address))
            )
        return _status(ResponseCode.CONTROLLER_NOT_LEADER, str(error))

    def _not_named(
        self, context: Any, broker_name: str, *, or_admin: bool = False
    ) -> pb.Status | None:
        """The refusal, if the caller's certificate is of no replica of this broker group (""; of
        none), nor of an admin where that does as well."""
        if self._tls is None or self._tls.config.nodes != "enforcing":
            return None
        names = _names_of(context)
        if acts_as_broker(names, broker_name) or (or_admin and acts_as(names, "admin")):
            return None
        who = ", ".join(names)
        log.warning(
            "caller_refused peer=%s certificate=%s group=%s", context.peer(), who, broker_name
        )
        return _status(
            ResponseCode.NO_PERMISSION,
            f"the certificate of {who} may not act for broker group {broker_name!r}",
        )

    def _caller(self, context: Any) -> str:
        """The caller, as the history shows it: the user whose signature the call has, and what its
        certificate names."""
        metadata, peer = context.invocation_metadata(), peer_of(context)
        name = self._guard.user_of_call(metadata, peer) if self._guard is not None else ""
        user = f" as {name}" if name else ""
        names = ", ".join(_names_of(context)) if self._tls is not None else ""
        certificate = f" with the certificate of {names}" if names else ""
        return f"asked by gRPC from {peer.rpartition(':')[0]}{user}{certificate}"

    # Sessions.

    async def BrokerSession(
        self, request_iterator: AsyncIterator[pb.BrokerMessage], context: Any
    ) -> None:
        """One broker process: Hello, then heartbeats, then Goodbye or the end of the stream."""
        try:
            first = await self._hellos.first_of(request_iterator)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a session begins with Hello")
        if first is None:
            return
        if first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a session begins with Hello")
        hello = first.hello
        if not (hello.broker_name and hello.broker_id > 0 and hello.incarnation):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "Hello needs broker_name, broker_id, incarnation"
            )
        if not is_proven(hello.incarnation, hello.secret):
            await self._refuse_session(context, _not_proven(hello.incarnation))
            return
        if status := self._not_named(context, hello.broker_name):
            await self._refuse_session(context, status)
            return
        if why := self._sessions.make_place(
            self._requests.state, hello.broker_name, hello.broker_id
        ):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        session = self._sessions.add(hello.broker_name, hello.broker_id, hello.incarnation)
        session.peer = context.peer()
        refusal = self._watch.session_opened(session)
        if refusal is not None:
            self._sessions.remove(session)
            await self._refuse_session(context, _status(refusal.code, refusal.remark))
            return
        goodbye: str | None = None
        writer = asyncio.create_task(session.write_all(context.write))
        reader = asyncio.create_task(self._read(session, request_iterator))
        cut = asyncio.create_task(session.cut.wait())
        try:
            await asyncio.wait((writer, reader, cut), return_when=asyncio.FIRST_COMPLETED)
            # A reader that failed, or is cut off, has not read a Goodbye.
            if reader.done() and not reader.cancelled() and reader.exception() is None:
                goodbye = reader.result()
        finally:
            # Before anything is awaited: the election of a new master waits for this.
            self._sessions.remove(session)
            self._watch.session_closed(session, goodbye)
            for task in (writer, reader, cut):
                task.cancel()
            await asyncio.gather(writer, reader, cut, return_exceptions=True)

    async def _refuse_session(self, context: Any, status: pb.Status) -> None:
        await context.write(pb.ControllerMessage(refused=pb.Refused(status=status)))

    async def _read(
        self, session: watch.BrokerSession, messages: AsyncIterator[pb.BrokerMessage]
    ) -> str | None:
        """The reason of the Goodbye, or None when the stream ended without one."""
        async for message in messages:
            match message.WhichOneof("kind"):
                case "heartbeat":
                    self._watch.session_heartbeat(session, message.heartbeat)
                case "switch_failed":
                    self._switches.failed(session, message.switch_failed)
                case "goodbye":
                    return message.goodbye.reason or "goodbye"
        return None


def _names_of(context: Any) -> Collection[str]:
    """In the caller's certificate; none without TLS."""
    found = context.auth_context().get("x509_subject_alternative_name", ())
    return names_in([name.decode(errors="replace") for name in found])


def command_of(kind: type[C], request: Any, **converted: Any) -> C:
    """The command with the request's fields of the same names."""
    values = dict(converted)
    for field in request.DESCRIPTOR.fields:
        if field.name not in converted and field.name not in _SECRETS:
            value = getattr(request, field.name)
            values[field.name] = tuple(value) if isinstance(value, MutableSequence) else value
    return kind(**values)


_SECRETS: Final = ("secret", "owner_secret")
_OK: Final = pb.Status(code=int(ResponseCode.SUCCESS))


def _status(code: int, remark: str) -> pb.Status:
    return pb.Status(code=int(code), remark=remark)


def _not_proven(name: str) -> pb.Status:
    return _status(
        ResponseCode.CONTROLLER_INVALID_REQUEST,
        f"the request is in the name of {name}, but lacks the secret that proves it",
    )


async def _history_reply(events: Iterable[HistoryEvent]) -> pb.GetHistoryReply:
    """In several turns of the loop: there may be 20,000 events (R58)."""
    reply = pb.GetHistoryReply(status=_OK)
    async for event in in_turns(events):
        reply.events.append(event_to_pb(event))
    return reply


def event_to_pb(event: HistoryEvent) -> pb.HistoryEvent:
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
