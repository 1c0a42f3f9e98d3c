"""The link with RocketMQ's controllers: heartbeats, polls and requests over remoting.

They push only the hint NOTIFY_BROKER_ROLE_CHANGED (1008). So the group is read from the leader at
every heartbeat, and after each request that may have changed it. A broker that must not be elected
sends no heartbeats: a learner, a replica with a suspect log (R17), and a process that they take for
an earlier master (R3) or that has refused (R17). They may still elect it until they declare it
dead; until then `state` refuses the mastership. A master always sends heartbeats.

Origin: ReplicasManager, BrokerOuterAPI in Java.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Final

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, ResponseError
from batonmq.protocol.role_view import Role
from batonmq.remoting.connection import Connection
from batonmq.remoting.endpoint import RemotingClient
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.link import (
    HAND_OVER_S,
    DurableFacts,
    ElectAnswer,
    LinkEvents,
    LogFacts,
)
from batonmq.replicas_manager.remoting_calls import RemotingCalls
from batonmq.replicas_manager.role import CurrentView
from batonmq.replicas_manager.switch import SwitchTask
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.tasks import Tasks, report_failure

log = logging.getLogger(__name__)

CONNECT_MS: Final = 1000
POLL_MS: Final = 1000
ELECT_MS: Final = 400
REDIAL_S: Final = 0.2
AWAY_MS: Final = 2000
"""How long a broker that drops its sessions stays silent: the end of its connection makes the
controllers elect, unless they hear from it again before they check."""
ANY_LEADERSHIP: Final = 1
"""RocketMQ's controllers report no controller epoch: the last one that claims the lead counts."""


class RemotingLink:
    """Implements `ControllerLink`."""

    def __init__(self, config: ReplicasManagerConfig, incarnation: str, events: LinkEvents) -> None:
        self._config = config
        self._events = events
        self._client = RemotingClient(
            connect_timeout_ms=CONNECT_MS, name="controllers", tls=config.tls, sign=config.sign
        )
        self._tasks = Tasks()
        self._sessions: set[str] = set()
        self._polling: set[str] = set()
        self._away_until_ms = 0
        self._handing_over: asyncio.Future[bool] | None = None
        self.begin(DurableFacts("", (), CurrentView(0, incarnation, 0)))

    def begin(self, facts: DurableFacts) -> None:
        self._current = facts.current
        self._calls = RemotingCalls(
            self._config, self._client, facts, self._events, self._tasks.spawn
        )

    # -- sessions: a connection with each controller

    def open_sessions(self, broker_id: int) -> None:
        for address in self._config.controllers:
            if address not in self._sessions:
                self._sessions.add(address)
                self._tasks.spawn(self._keep_session(address))

    async def _keep_session(self, address: str) -> None:
        while address in self._sessions:
            try:
                connection = await self._client.connection(address, timeout_ms=CONNECT_MS)
            except ConnectError as error:
                log.debug("controller_not_connected address=%s reason=%s", address, error)
                await asyncio.sleep(REDIAL_S)
                continue
            self._events.step(ev.SessionOpened(address))
            await _end_of(connection)
            self._events.step(ev.SessionClosed(address))
            await asyncio.sleep(REDIAL_S)

    def heartbeat(self, effect: ev.SendHeartbeat, facts: LogFacts) -> None:
        connection = self._client.live_connection(effect.controller)
        if connection is None:
            return
        self._beat(connection, facts)
        if effect.controller not in self._polling:
            self._polling.add(effect.controller)
            self._tasks.spawn(self._poll(connection, effect))

    def _beat(self, connection: Connection, facts: LogFacts) -> None:
        if self._may_be_elected(facts):
            connection.oneway(self._calls.requests.heartbeat(self._current.broker_id, facts))

    def _may_be_elected(self, facts: LogFacts) -> bool:
        current = self._current
        if current.view is None or self._config.learner:
            return False
        # These controllers may elect any broker that sends heartbeats, and a suspect log must not
        # lead (R17).
        if facts.suspect and current.role is not Role.MASTER:
            return False
        named = current.view.master_broker_id == current.broker_id
        is_not_that_master = named and current.role is Role.FENCED
        return not is_not_that_master and boot_ms() >= self._away_until_ms

    async def _poll(self, connection: Connection, effect: ev.SendHeartbeat) -> None:
        address = effect.controller
        is_first = self._current.view is None
        try:
            metadata = await self._calls.metadata(address, POLL_MS)
            view = await self._calls.view(address, POLL_MS) if metadata.is_leader else None
        except BatonError as error:
            log.debug("controller_not_answering address=%s reason=%s", address, error)
            return
        finally:
            self._polling.discard(address)
        if view is not None:
            self._events.step(ev.ViewReceived(address, view))
        # Before the first view it was unknown whether this broker may be elected.
        if is_first and not connection.closed:
            self._beat(connection, self._events.log_facts())
        self._events.step(
            ev.AnswerReceived(
                controller=address,
                sent_ms=effect.sent_ms,
                leader=metadata.is_leader,
                controller_epoch=ANY_LEADERSHIP,
                leader_grpc_address=metadata.leader,
                master_epoch=view.master_epoch if view is not None else 0,
                sync_state_set_epoch=view.sync_state_set_epoch if view is not None else 0,
                # They grant no lease; that they name this broker as master counts as one.
                no_lease=view is None or view.master_broker_id != self._current.broker_id,
            )
        )

    def drop(self, controller: str, reason: str) -> None:
        self._client.close_connection(controller, reason)

    def drop_all(self, reason: str) -> None:
        # First: the connection is made again soon, and a heartbeat would undo the effect.
        self._away_until_ms = boot_ms() + AWAY_MS
        for address in self._sessions:
            self.drop(address, reason)

    # -- requests

    def send(self, call: ev.Call) -> None:
        self._tasks.spawn(self._run(call))

    async def _run(self, call: ev.Call) -> None:
        try:
            if isinstance(call, ev.SendElect):  # they elect among brokers that sent heartbeats
                connection = await self._client.connection(call.target)
                self._beat(connection, self._events.log_facts())
            event: ev.Replied | ev.Unanswered = await self._calls.answer(call)
        except ResponseError as error:
            event = ev.Replied(call, error.code, error.remark or "")
        except BatonError as error:
            event = ev.Unanswered(call, str(error))
        except Exception as error:
            report_failure("a call to a controller failed", error)
            event = ev.Unanswered(call, repr(error))
        self._events.step(event)

    # -- history and planned switches

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        """These controllers keep no history, so the event is logged."""
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        log.info("event kind=%s master_epoch=%d %s", kind, master_epoch, text)

    async def elect(self, task: SwitchTask, drained_offset: int) -> ElectAnswer | None:
        """`drained_offset` is not sent: a member of the set has all below it."""
        target = self._events.leader() or task.controller
        request = self._calls.requests.elect(task.broker_id, designate=True, now_ms=wall_ms())
        try:
            reply = await self._calls.ask(target, request, ELECT_MS)
        except BatonError as error:
            log.info("election_unanswered target=%s reason=%s", target, error)
            return None
        view = await self._calls.view_if_any(target)
        if view is not None:
            self._events.step(ev.ViewReceived(target, view, pushed=False))
        if reply.code == ResponseCode.SUCCESS:
            self._handed_over(True)
        return ElectAnswer(reply.code, reply.remark or "")

    def switch_failed(self, task: SwitchTask, reason: str) -> None:
        self._handed_over(False)

    async def hand_over(self, leader: str, broker_id: int, master_epoch: int, reason: str) -> bool:
        """These controllers cannot ask a master to switch, so it begins by itself (R33)."""
        log.info("handing_over broker_id=%d reason=%s", broker_id, reason)
        self._handing_over = asyncio.get_running_loop().create_future()
        name = f"hand-over:{secrets.token_hex(8)}"
        self._events.switch_requested(SwitchTask(leader, name, broker_id, master_epoch))
        try:
            async with asyncio.timeout(HAND_OVER_S):
                return await self._handing_over
        except TimeoutError:
            return False

    def _handed_over(self, done: bool) -> None:
        if self._handing_over is not None and not self._handing_over.done():
            self._handing_over.set_result(done)

    # -- the end

    async def goodbye(self, reason: str) -> None:
        """Only closes the connections: these controllers know no Goodbye."""
        sessions, self._sessions = self._sessions, set()
        for address in sessions:
            self.drop(address, reason)

    async def close(self) -> None:
        await self._tasks.close()
        await self._client.close()


async def _end_of(connection: Connection) -> None:
    ended = asyncio.Event()
    connection.on_close.append(lambda _: ended.set())
    if not connection.closed:
        await ended.wait()
