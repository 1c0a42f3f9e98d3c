"""The gRPC stream to one controller, and the unary calls to it.

The broker sends Hello, heartbeats and Goodbye; the controller sends answers and role views. The
session emits events (`SessionOpened`, `AnswerReceived`, ...), views in order, and reconnects with
growing pauses until `close`. A planned stop sends a Goodbye, because to a gRPC server a killed peer
and a closed one look alike. Each request is one call with exactly one outcome, even if its channel
is closed: the state machine waits for it, and decides about the next one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, assert_never, cast

import grpc

from batonmq.auth.signature import Signer
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc
from batonmq.proto.controller.v1.role_view import role_view_from_pb
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.incarnation import owner_of
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.link import DurableFacts, LogFacts
from batonmq.replicas_manager.switch import SwitchTask
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.tasks import Tasks, pass_on_assertion
from batonmq.runtime.tls import Tls

log = logging.getLogger(__name__)

T = TypeVar("T")

REDIAL_FIRST_S = 0.05
REDIAL_MOST_S = 1.0
_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE
READY_S = 3.0
"""A channel that does not connect for so long is replaced. gRPC resolves names at most twice a
minute; a new channel resolves at once, and finds a controller at its new address."""
CALL_TIMEOUT_S = 1.0
RETIRE_S = 2.0
"""How long calls over a replaced channel may take to end; above their own timeouts."""
OUTBOX_MAX = 32
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # the timeout of one attempt to connect
    # A restarted controller may lead soon, and knows only brokers that connected.
    ("grpc.max_reconnect_backoff_ms", 200),
    # keepalive_timeout_ms alone never notices a stopped peer; the ping timeout does.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


def is_only_the_call_cancelled() -> bool:
    """Whether a CancelledError means that only the gRPC call was cancelled, because its channel was
    closed (a failure like others), and not this task, which must then end."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


async def answer_of(call: Awaitable[T], what: str, level: int = logging.DEBUG) -> T | None:
    """The reply to a gRPC call; None, and a log line of that level, if there is none."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        why = f"{error.code().name}: {error.details()}"
    except asyncio.CancelledError:
        if not is_only_the_call_cancelled():
            raise
        why = "its connection was closed"
    log.log(level, "call_unanswered call=%s reason=%s", what, why)
    return None


def channel_credentials(pem: tuple[bytes, bytes, bytes]) -> grpc.ChannelCredentials:
    """`pem`: trust, key, certificate."""
    trust, key, cert = (part or None for part in pem)
    return grpc.ssl_channel_credentials(trust, key, cert)


class _SignedStub:
    """Signs each call as this node."""

    def __init__(self, stub: object, sign: Signer) -> None:
        self._stub = stub
        self._sign = sign

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._stub, method), metadata=self._sign.call_metadata(wall_ms()))


class ControllerChannels:
    """One channel per controller address, shared by session and unary calls. While settings change,
    some controllers use TLS and some do not (`permissive`): after a failed attempt the other way is
    tried."""

    def __init__(self, tls: Tls | None = None, sign: Signer | None = None) -> None:
        self._sign = sign
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tls = tls if tls is not None and tls.config.nodes != "disabled" else None
        self._with_tls: dict[str, bool] = {}
        self._made_at: dict[str, int] = {}
        """`Tls.version` of each channel."""
        self._one_try: dict[str, asyncio.Lock] = {}
        config = self._tls.config if self._tls is not None else None
        self._tries_both = config is not None and config.nodes == "permissive"
        # A permissive port of gRPC is plain.
        self._tls_first = config is not None and config.dials and not self._tries_both

    def channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            if self._tls is not None and self._with_tls.setdefault(address, self._tls_first):
                credentials = channel_credentials(self._tls.pem)
                channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            self._channels[address] = channel
            self._made_at[address] = self._tls.version if self._tls is not None else 0
        return channel

    def stub(self, address: str) -> controller_pb2_grpc.ControllerServiceStub:
        stub = controller_pb2_grpc.ControllerServiceStub(  # type: ignore[no-untyped-call]
            self.channel(address)
        )
        return stub if self._sign is None else cast(Any, _SignedStub(stub, self._sign))

    async def drop(self, address: str, retire_s: float | None = None) -> None:
        """The next use connects again. Calls over the old connection may end within `retire_s`."""
        channel = self._channels.pop(address, None)
        if channel is not None:
            await channel.close(retire_s)

    async def renew(self, address: str) -> None:
        """Before a stream: a channel keeps the certificates of its making, and would refuse a
        controller whose certificate is of the next authority."""
        if self._tls is not None and self._made_at.get(address, 0) != self._tls.version:
            await self.drop(address, RETIRE_S)

    async def connected(self, address: str) -> bool:
        """Waits until the connection is there. False: there was none in time, and the next use
        dials again, with `permissive` the other way."""
        if self._tries_both:
            async with self._one_try.setdefault(address, asyncio.Lock()):
                return await self._one_way_connected(address)
        try:
            async with asyncio.timeout(READY_S):
                await self.channel(address).channel_ready()
        except TimeoutError:
            await self.drop(address, RETIRE_S)
            return False
        return True

    async def _one_way_connected(self, address: str) -> bool:
        """The same without waiting after the first failure."""
        channel = self.channel(address)
        try:
            async with asyncio.timeout(READY_S):
                while (state := channel.get_state(try_to_connect=True)) is not _READY:
                    if state is _FAILED:
                        await asyncio.sleep(REDIAL_FIRST_S)  # perhaps nothing listens there
                        break
                    await channel.wait_for_state_change(state)
                else:
                    return True
        except TimeoutError:
            pass
        self._with_tls[address] = not self._with_tls[address]
        await self.drop(address, RETIRE_S)
        return False

    async def dialled(self, address: str) -> None:
        """Call it before a unary call: with `permissive` the present channel may use the wrong way
        (TLS or plain)."""
        while self._tries_both and not await self.connected(address):
            pass

    async def close(self) -> None:
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()


class ControllerSession:
    """Keeps one BrokerSession with the controller at `address` until `close`."""

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        channels: ControllerChannels,
        emit: Callable[[ev.Event], None],
        on_switch: Callable[[SwitchTask], None] = lambda task: None,
    ) -> None:
        self.address = address
        self._hello = hello
        self._channels = channels
        self._emit = emit
        self._on_switch = on_switch
        self._outbox: asyncio.Queue[pb.BrokerMessage | None] | None = None
        self._drop_reason = ""
        self._answered = 0
        self._call: grpc.aio.StreamStreamCall | None = None
        self._closing = False
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def heartbeat(self, effect: ev.SendHeartbeat, heartbeat: pb.Heartbeat) -> None:
        """Queues a heartbeat with the number of the newest answer on this stream, so that a
        controller notices if its answers do not arrive."""
        outbox = self._outbox
        if outbox is None:
            return
        # A newer heartbeat replaces the queued one: a lease counts from its time.
        if outbox.full():
            outbox.get_nowait()
        heartbeat.answered = self._answered
        outbox.put_nowait(pb.BrokerMessage(heartbeat=heartbeat))

    def send(self, message: pb.BrokerMessage) -> None:
        """Queues a message if there is a stream; it is not for later streams."""
        if self._outbox is not None and not self._outbox.full():
            self._outbox.put_nowait(message)

    def drop(self, reason: str) -> None:
        self._drop_reason = reason
        if self._call is not None:
            self._call.cancel()

    async def close(self, reason: str, timeout_s: float) -> None:
        """Sends Goodbye, gives the controller `timeout_s` to end the stream, then ends it."""
        self._closing = True
        if self._outbox is not None:
            # Queued messages are obsolete now, and a full queue would not accept the Goodbye.
            while not self._outbox.empty():
                self._outbox.get_nowait()
            self._outbox.put_nowait(pb.BrokerMessage(goodbye=pb.Goodbye(reason=reason)))
            self._outbox.put_nowait(None)
            await asyncio.wait([self._task], timeout=timeout_s)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep(self) -> None:
        delay_s = REDIAL_FIRST_S
        while not self._closing:
            try:
                # No pause: waiting for the connection is the pause.
                if not await self._connected():
                    continue
                accepted = await self._talk()
            except Exception as error:
                # To dial or to handle an event failed. That must not end the session for good.
                log.exception("session_failed controller=%s", self.address)
                accepted = False
                pass_on_assertion(error, "a session's consumer failed")
            if self._drop_reason:
                log.info("session_dropped controller=%s reason=%s", self.address, self._drop_reason)
                self._drop_reason = ""
                # Another stream over the same connection might fail the same way.
                await self._channels.drop(self.address)
            if self._closing:
                return
            # Else a controller that refuses every Hello would get 20 of them a second.
            delay_s = REDIAL_FIRST_S if accepted else min(2 * delay_s, REDIAL_MOST_S)
            await asyncio.sleep(delay_s)

    async def _connected(self) -> bool:
        await self._channels.renew(self.address)
        return await self._channels.connected(self.address)

    async def _talk(self) -> bool:
        """Runs one stream from Hello to its end. Returns whether the controller accepted the
        session."""
        accepted = False
        outbox: asyncio.Queue[pb.BrokerMessage | None] = asyncio.Queue(OUTBOX_MAX)
        outbox.put_nowait(pb.BrokerMessage(hello=self._hello))
        call = self._channels.stub(self.address).BrokerSession(_Requests(outbox))
        self._call = call
        self._outbox = outbox
        # Answers on an earlier stream must not count on this one (R5).
        self._answered = 0
        try:
            self._emit(ev.SessionOpened(self.address))
            async for message in call:
                event = self._event_of(message)
                if event is not None:
                    # A refusal is also a message, and must not shorten the pause before the next
                    # attempt.
                    accepted = accepted or not isinstance(event, ev.SessionRefused)
                    self._emit(event)
        except grpc.aio.AioRpcError as error:
            log.debug("session_broken controller=%s reason=%s", self.address, error.details())
        except asyncio.CancelledError:
            if not is_only_the_call_cancelled():
                raise
        finally:
            self._outbox = None
            self._call = None
            call.cancel()
            # Always, and last: each `SessionOpened` needs one.
            self._emit(ev.SessionClosed(self.address))
        return accepted

    def _event_of(self, message: pb.ControllerMessage) -> ev.Event | None:
        kind = message.WhichOneof("kind")
        if kind == "answer":
            answer = message.answer
            # Sent with the next heartbeat: a broker that no answer reaches counts as silent (R5).
            self._answered = answer.sequence
            return ev.AnswerReceived(
                controller=self.address,
                sent_ms=answer.sent_ms,
                leader=answer.leader,
                controller_epoch=answer.controller_epoch,
                leader_grpc_address=answer.leader_grpc_address,
                master_epoch=answer.master_epoch,
                sync_state_set_epoch=answer.sync_state_set_epoch,
                no_lease=answer.no_lease,
            )
        if kind == "view":
            return ev.ViewReceived(self.address, role_view_from_pb(message.view))
        if kind == "refused":
            status = message.refused.status
            return ev.SessionRefused(self.address, status.code, status.remark)
        if kind == "switch":
            request = message.switch
            self._on_switch(
                SwitchTask(
                    self.address,
                    request.switch_id,
                    request.broker_id,
                    request.master_epoch,
                    request.timeout_ms,
                )
            )
        return None


class _Requests(AsyncIterator[pb.BrokerMessage]):
    """The messages that a stream sends, until None. Not a generator: when the loop ends, asyncio
    would try to close a generator in which a cancelled call still waits, and log errors."""

    def __init__(self, outbox: asyncio.Queue[pb.BrokerMessage | None]) -> None:
        self._outbox = outbox

    async def __anext__(self) -> pb.BrokerMessage:
        message = await self._outbox.get()
        if message is None:
            raise StopAsyncIteration
        return message


class ControllerCalls:
    """Runs each call as a task. `emit` gets the outcome; `facts`: the identity of this broker."""

    def __init__(
        self,
        config: ReplicasManagerConfig,
        facts: DurableFacts,
        channels: ControllerChannels,
        log_facts: Callable[[], LogFacts],
        emit: Callable[[ev.Event], None],
    ) -> None:
        self._config = config
        self._facts = facts
        self._channels = channels
        self._log_facts = log_facts
        self._current = facts.current
        self._emit = emit
        self._tasks = Tasks()

    def send(self, call: ev.Call) -> None:
        self._tasks.spawn(self._run(call))

    async def close(self) -> None:
        """Cancels all calls; no event follows."""
        await self._tasks.close()

    async def _run(self, call: ev.Call) -> None:
        try:
            event: ev.Event = await self._answer(call)
        except TimeoutError:
            event = ev.Unanswered(call, "it takes no connection")
        except grpc.aio.AioRpcError as error:
            event = ev.Unanswered(call, f"{error.code().name}: {error.details()}")
        except asyncio.CancelledError:
            if not is_only_the_call_cancelled():
                raise
            event = ev.Unanswered(call, "its connection was closed")
        except Exception as error:  # without an outcome the state machine would wait for good
            log.exception("call_failed controller=%s call=%s", call.target, type(call).__name__)
            pass_on_assertion(error, "a consumer of a call's answer failed")
            event = ev.Unanswered(call, repr(error))
        self._emit(event)

    async def _answer(self, call: ev.Call) -> ev.Replied | ev.Unanswered:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await self._channels.dialled(call.target)
        rpc = self._begin(call, self._channels.stub(call.target))
        reply = await rpc
        if reply.status.code == ResponseCode.CONTROLLER_NOT_LEADER:
            # A node that does not lead names the leader in the trailing metadata.
            trailing = dict(await rpc.trailing_metadata())
            self._emit(ev.LeaderHinted(call.target, str(trailing.get("leader-grpc-address", ""))))
        broker_id = reply.broker_id if isinstance(call, ev.SendRegister) else 0
        # Whatever answers there with an empty message is no controller: its code 0 means success.
        if isinstance(call, ev.SendRegister) and not reply.status.code and broker_id < 1:
            return ev.Unanswered(call, f"its reply names broker id {broker_id}")
        view = role_view_from_pb(reply.view) if reply.HasField("view") else None
        return ev.Replied(call, reply.status.code, reply.status.remark, view, broker_id)

    def _begin(
        self, call: ev.Call, stub: controller_pb2_grpc.ControllerServiceStub
    ) -> grpc.aio.UnaryUnaryCall:
        match call:
            case ev.SendRegister():
                return stub.RegisterBroker(self._register(call), timeout=CALL_TIMEOUT_S)
            case ev.SendElect():
                return stub.ElectMaster(self._elect(call), timeout=CALL_TIMEOUT_S)
            case ev.SendAlter():
                return stub.AlterSyncStateSet(self._alter(call), timeout=CALL_TIMEOUT_S)
            case ev.FetchView():
                request = pb.GetReplicaInfoRequest(broker_name=self._config.broker_name)
                return stub.GetReplicaInfo(request, timeout=CALL_TIMEOUT_S)
            case _:
                assert_never(call)

    def _register(self, effect: ev.SendRegister) -> pb.RegisterBrokerRequest:
        facts = self._log_facts()
        return pb.RegisterBrokerRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=effect.broker_id,
            register_check_code=self._facts.check_code,
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
            accepted_epoch=self._current.stored_master_epoch,
            owner=owner_of(self._facts.folder_secret),
            owner_secret=self._facts.folder_secret,
            earlier_lives=self._facts.earlier_incarnations,
            secret=self._facts.secret,
        )

    def _elect(self, effect: ev.SendElect) -> pb.ElectMasterRequest:
        return pb.ElectMasterRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=self._current.broker_id,
            designate=False,
            expected_master_epoch=effect.expected_master_epoch,
            request_id=effect.request_id,
            reason=effect.reason,
        )

    def _alter(self, effect: ev.SendAlter) -> pb.AlterSyncStateSetRequest:
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
            secret=self._facts.secret,
        )
