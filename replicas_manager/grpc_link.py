"""The link with our controllers: a gRPC session with each, unary calls, and events for their
history.

`EventReporter` sends this broker's events to the controllers' history, in order. Nothing waits for
a report: it is queued with its time and sent a little later, so that it comes after the commands of
a failover in the Raft log. Without an answer it is sent again with the same request id, to the
leader at that time. At most `KEPT_MAX` events wait; beyond that the oldest are dropped, with one
log line. At most `OFTEN_MAX` of a kind are sent in `OFTEN_MS`; the next one counts the omitted ones
in `notTold`.
"""

import asyncio
import json
import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final

from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1.role_view import role_view_from_pb
from batonmq.protocol.codes import ResponseCode
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.link import (
    HAND_OVER_S,
    DurableFacts,
    ElectAnswer,
    LinkEvents,
    LogFacts,
)
from batonmq.replicas_manager.session import (
    ControllerCalls,
    ControllerChannels,
    ControllerSession,
    answer_of,
)
from batonmq.replicas_manager.switch import SwitchTask
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.sockets import LowDescriptors

log = logging.getLogger(__name__)

KEPT_MAX = 256
# A lease that is lost and back again each second must not fill the history of the whole cluster.
OFTEN_MAX = 20
OFTEN_MS = 10_000
CALL_TIMEOUT_S = 1.0
RETRY_S = 0.25
SETTLE_S = 0.05
"""The first of several events is sent this long after it happened."""

GOODBYE_TIMEOUT_S: Final = 0.3
ELECT_TIMEOUT_S: Final = 0.2
LOW_HELD_S: Final = 5.0
"""How long clients get high descriptors at most, if a controller is down."""
UNANSWERED_LOGGED_MS: Final = 3_000
"""If a registration is not answered for so long, that is logged, with possible causes."""


class EventReporter:
    """`leader` returns the leading controller; None while none is known."""

    def __init__(
        self,
        broker_name: str,
        channels: ControllerChannels,
        leader: Callable[[], str | None],
        clock_ms: Callable[[], int] = boot_ms,
    ) -> None:
        self._broker_name = broker_name
        self._requests = secrets.token_hex(16)
        self._channels = channels
        self._leader = leader
        self._waiting: deque[pb.ReportEventRequest] = deque()
        self._count = 0
        self._clock_ms = clock_ms
        self._recent: dict[tuple[int, str], deque[int]] = {}
        self._left_out: Counter[tuple[int, str]] = Counter()
        self._task: asyncio.Task[None] | None = None

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        """Queues one event with the present time."""
        if self._is_too_often(broker_id, kind):
            return
        left_out = self._left_out.pop((broker_id, kind), 0)
        if left_out:
            fields = {**fields, "notTold": left_out}
        self._count += 1
        if len(self._waiting) >= KEPT_MAX:
            dropped = self._waiting.popleft()
            log.warning("event_not_reported kind=%s time_ms=%d", dropped.kind, dropped.time_ms)
        self._waiting.append(
            pb.ReportEventRequest(
                broker_name=self._broker_name,
                broker_id=broker_id,
                master_epoch=master_epoch,
                kind=kind,
                time_ms=wall_ms(),
                json=json.dumps(dict(fields)),
                request_id=f"{self._requests}/event/{self._count}",
            )
        )
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._send_all())

    def _is_too_often(self, broker_id: int, kind: str) -> bool:
        now_ms = self._clock_ms()
        recent = self._recent.setdefault((broker_id, kind), deque(maxlen=OFTEN_MAX))
        if len(recent) == OFTEN_MAX and now_ms - recent[0] < OFTEN_MS:
            self._left_out[broker_id, kind] += 1
            log.warning("event_not_reported kind=%s reason=too often", kind)
            return True
        recent.append(now_ms)
        return False

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _send_all(self) -> None:
        try:
            # In the Raft log it must come after the commands of the failover that it reports.
            await asyncio.sleep(SETTLE_S)
            while self._waiting:
                request = self._waiting[0]
                if not await self._send(request):
                    await asyncio.sleep(RETRY_S)
                # A full queue may have dropped it while it was sent.
                elif self._waiting and self._waiting[0] is request:
                    self._waiting.popleft()
        finally:
            self._task = None

    async def _send(self, request: pb.ReportEventRequest) -> bool:
        """Sends one event; returns whether it needs no further attempt."""
        leader = self._leader()
        if leader is None:
            return False
        call = self._channels.stub(leader).ReportEvent(request, timeout=CALL_TIMEOUT_S)
        reply = await answer_of(call, "ReportEvent")
        # It may be recorded already: the repetition has the same request id.
        if reply is None:
            return False
        # A refusal is final: the next attempt would be refused too, and hold back what waits.
        code = reply.status.code
        if code not in (ResponseCode.SUCCESS, ResponseCode.CONTROLLER_NOT_LEADER):
            log.warning(
                "event_refused kind=%s code=%d remark=%r", request.kind, code, reply.status.remark
            )
        return bool(code != ResponseCode.CONTROLLER_NOT_LEADER)


class GrpcLink:
    """Implements `ControllerLink`."""

    def __init__(self, config: ReplicasManagerConfig, incarnation: str, events: LinkEvents) -> None:
        self._config = config
        self._incarnation = incarnation
        self._events = events
        self._channels = ControllerChannels(config.tls, config.sign)
        self._sessions: dict[str, ControllerSession] = {}
        self._calls: ControllerCalls | None = None
        self._silent_since_ms: int | None = None
        """Since when registrations are not answered."""
        self._silence_logged = False
        self._opened: set[str] = set()
        self._secret = ""
        self._low: LowDescriptors | None = None
        self._reporter = EventReporter(config.broker_name, self._channels, events.leader)

    def begin(self, facts: DurableFacts) -> None:
        # Connections to the controllers get high descriptors. When this process is killed, the
        # kernel closes high descriptors first, so the controllers notice before thousands of
        # clients are closed.
        self._low = LowDescriptors()
        asyncio.get_running_loop().call_later(LOW_HELD_S, self._low.free)
        self._secret = facts.secret
        self._calls = ControllerCalls(
            self._config, facts, self._channels, self._events.log_facts, self._outcome
        )

    def _outcome(self, event: ev.Event) -> None:
        match event:
            case ev.Unanswered(call=ev.SendRegister()):
                self._not_registered(boot_ms())
            case ev.Replied(call=ev.SendRegister()):
                self._silent_since_ms = None
        self._events.step(event)

    def _not_registered(self, now_ms: int) -> None:
        if self._silent_since_ms is None:
            self._silent_since_ms = now_ms
        elif now_ms - self._silent_since_ms >= UNANSWERED_LOGGED_MS and not self._silence_logged:
            self._silence_logged = True
            log.warning(
                "no_controller_answers grpc=%s advice=%r",
                ";".join(self._config.controllers),
                "are they up? RocketMQ's controllers need controllerProtocol: remoting",
            )

    def send(self, call: ev.Call) -> None:
        assert self._calls is not None
        self._calls.send(call)

    def open_sessions(self, broker_id: int) -> None:
        hello = pb.Hello(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=broker_id,
            incarnation=self._incarnation,
            log_id=self._events.log_facts().log_id,
            secret=self._secret,
        )
        for address in self._config.controllers:
            if address not in self._sessions:
                self._sessions[address] = ControllerSession(
                    address,
                    hello,
                    self._channels,
                    self._session_event,
                    self._events.switch_requested,
                )

    def _session_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.SessionOpened) and self._low is not None:
            self._opened.add(event.controller)
            # All sessions have their high descriptors: clients may get low ones now.
            if len(self._opened) == len(self._config.controllers):
                self._low.free()
        self._events.step(event)

    def heartbeat(self, effect: ev.SendHeartbeat, facts: LogFacts) -> None:
        session = self._sessions.get(effect.controller)
        if session is None:
            return
        session.heartbeat(
            effect,
            pb.Heartbeat(
                sequence=effect.sequence,
                sent_ms=effect.sent_ms,
                epoch=facts.epoch,
                max_offset=facts.max_offset,
                confirm_offset=facts.confirm_offset,
                election_priority=self._config.election_priority,
                master_epoch=effect.master_epoch,
                sync_state_set_epoch=effect.sync_state_set_epoch,
                min_offset=facts.min_offset,
            ),
        )

    def drop(self, controller: str, reason: str) -> None:
        session = self._sessions.get(controller)
        if session is not None:
            session.drop(reason)

    def drop_all(self, reason: str) -> None:
        for session in self._sessions.values():
            session.drop(reason)

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        self._reporter.report(kind, broker_id, master_epoch, fields)

    async def elect(self, task: SwitchTask, drained_offset: int) -> ElectAnswer | None:
        request = pb.ElectMasterRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=task.broker_id,
            designate=True,
            expected_master_epoch=task.master_epoch,
            # The same in each repetition, so that controllers repeat their answer.
            request_id=task.switch_id,
            reason="planned switch",
            drained_offset=drained_offset,
        )
        # The controller that asked may have lost the lead since.
        target = self._events.leader() or task.controller
        return await self._elect(target, request, ELECT_TIMEOUT_S)

    def switch_failed(self, task: SwitchTask, reason: str) -> None:
        session = self._sessions.get(task.controller)
        if session is not None:
            failed = pb.SwitchFailed(switch_id=task.switch_id, reason=reason)
            session.send(pb.BrokerMessage(switch_failed=failed))

    async def hand_over(self, leader: str, broker_id: int, master_epoch: int, reason: str) -> bool:
        """Requests a switch from the leader, like an operator; the leader then asks this master."""
        request = pb.ElectMasterRequest(
            cluster_name=self._config.cluster_name,
            broker_name=self._config.broker_name,
            broker_id=broker_id,
            designate=True,
            expected_master_epoch=master_epoch,
            request_id=f"hand-over:{secrets.token_hex(8)}",
            reason=reason,
        )
        answer = await self._elect(leader, request, HAND_OVER_S)
        if answer is not None and answer.code != ResponseCode.SUCCESS:
            log.info("not_handed_over broker_id=%d reason=%s", broker_id, answer.remark)
        return answer is not None and answer.code == ResponseCode.SUCCESS

    async def _elect(
        self, target: str, request: pb.ElectMasterRequest, timeout_s: float
    ) -> ElectAnswer | None:
        call = self._channels.stub(target).ElectMaster(request, timeout=timeout_s)
        reply = await answer_of(call, f"ElectMaster at {target}", logging.INFO)
        if reply is None:
            return None
        if reply.HasField("view"):
            view = role_view_from_pb(reply.view)
            self._events.step(ev.ViewReceived(target, view, pushed=False))
        return ElectAnswer(reply.status.code, reply.status.remark)

    async def goodbye(self, reason: str) -> None:
        """Sends Goodbye to every controller, or the end of the session would look like a kill."""
        sessions = list(self._sessions.values())
        # First: nothing may be sent after the Goodbye.
        self._sessions.clear()
        await asyncio.gather(*(session.close(reason, GOODBYE_TIMEOUT_S) for session in sessions))

    async def close(self) -> None:
        if self._low is not None:
            self._low.free()
        await self._reporter.close()
        if self._calls is not None:
            await self._calls.close()
        await self._channels.close()
