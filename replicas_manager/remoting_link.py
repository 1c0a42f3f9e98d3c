"""The link with RocketMQ's controllers: heartbeats, polls and requests over remoting.

They push nothing but the hint 1008, so the group is read from the leading one at every heartbeat
(1005 says who leads, 1006 how the group is), and after each request that may have changed it. What
they cannot be told, by what they know of a broker, is said with the heartbeat: a broker that must
not be elected sends none. That is a learner, a suspect log (R17), and a process that they still
take for the one before it (R3): they elect anew before it shows itself.
Origin: ReplicasManager, BrokerOuterAPI in Java.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Mapping
from typing import Any, Final, assert_never

from batonmq.process.clock import boot_ms, wall_ms
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, ResponseError
from batonmq.protocol.role_view import Replica, Role, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from batonmq.remoting.endpoint import RemotingClient
from batonmq.replicas_manager.actions import LogFacts
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.events import (
    AnswerReceived,
    Call,
    FetchView,
    LeaderHinted,
    Replied,
    SendAlter,
    SendElect,
    SendHeartbeat,
    SendRegister,
    SessionClosed,
    SessionOpened,
    Unanswered,
    ViewReceived,
)
from batonmq.replicas_manager.link import DurableFacts, ElectAnswer, LinkEvents
from batonmq.replicas_manager.peer_names import PeerNames
from batonmq.replicas_manager.remoting_requests import Metadata, Requests, group_view
from batonmq.replicas_manager.role import ViewInForce
from batonmq.replicas_manager.switch import SwitchTask

log = logging.getLogger(__name__)

CONNECT_MS: Final = 1000
POLL_MS: Final = 1000
CALL_MS: Final = 3000
ELECT_MS: Final = 400
HAND_OVER_S: Final = 1.0
REDIAL_S: Final = 0.2
AWAY_MS: Final = 2000
"""How long a broker that gives way shows no sign of life: the end of its connection makes the
controllers elect, but not if they hear it again before they have looked."""
ANY_LEADERSHIP: Final = 1
"""RocketMQ's controllers tell no epoch of their leadership: whoever claimed it last has it."""


class RemotingLink:
    """Implements `ControllerLink`."""

    def __init__(self, config: ReplicasManagerConfig, incarnation: str, events: LinkEvents) -> None:
        self._config = config
        self._incarnation = incarnation
        self._events = events
        self._client = RemotingClient(connect_timeout_ms=CONNECT_MS, name="controllers")
        self._names = PeerNames(self._client, self._spawn, self._renamed)
        self._requests = Requests(config, "")
        self._current = ViewInForce(0, incarnation, 0)
        self._sessions: set[str] = set()
        self._polling: set[str] = set()
        self._newest: tuple[str, RoleView] | None = None
        self._views = 0
        self._away_until_ms = 0
        self._handing_over: asyncio.Future[bool] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, facts: DurableFacts) -> None:
        self._requests = Requests(self._config, facts.check_code)
        self._current = facts.current

    # -- sessions: a connection with each controller

    def open_sessions(self, broker_id: int) -> None:
        for address in self._config.controllers:
            if address not in self._sessions:
                self._sessions.add(address)
                self._spawn(self._keep_session(address))

    async def _keep_session(self, address: str) -> None:
        while address in self._sessions:
            try:
                connection = await self._client.connection(address, timeout_ms=CONNECT_MS)
            except ConnectError as error:
                log.debug("controller_not_connected address=%s why=%s", address, error)
                await asyncio.sleep(REDIAL_S)
                continue
            self._events.step(SessionOpened(address))
            await _end_of(connection)
            self._events.step(SessionClosed(address))
            await asyncio.sleep(REDIAL_S)

    def heartbeat(self, effect: SendHeartbeat, facts: LogFacts) -> None:
        connection = self._client.live_connection(effect.controller)
        if connection is None:
            return
        self._beat(connection, facts)
        if effect.controller not in self._polling:
            self._polling.add(effect.controller)
            self._spawn(self._poll(connection, effect))

    def _beat(self, connection: Connection, facts: LogFacts) -> None:
        if self._may_be_elected(facts):
            connection.oneway(self._requests.heartbeat(self._current.broker_id, facts))

    def _may_be_elected(self, facts: LogFacts) -> bool:
        current = self._current
        if current.view is None or self._config.learner or facts.suspect:
            return False
        named = current.view.master_broker_id == current.broker_id
        taken_for_earlier = named and current.role is Role.FENCED
        return not taken_for_earlier and boot_ms() >= self._away_until_ms

    async def _poll(self, connection: Connection, effect: SendHeartbeat) -> None:
        address = effect.controller
        is_first = self._current.view is None
        try:
            reply = await self._client.call(address, self._requests.metadata(), POLL_MS)
            metadata = Metadata.of(reply)
            view = await self._view(address, POLL_MS) if metadata.is_leader else None
        except BatonError as error:
            log.debug("controller_not_answering address=%s why=%s", address, error)
            return
        finally:
            self._polling.discard(address)
        if view is not None:
            self._events.step(ViewReceived(address, view))
        if is_first and not connection.closed:
            self._beat(connection, self._events.log_facts())
        self._events.step(
            AnswerReceived(
                controller=address,
                sent_ms=effect.sent_ms,
                leader=metadata.is_leader,
                controller_epoch=ANY_LEADERSHIP,
                leader_grpc_address=metadata.leader,
                master_epoch=view.master_epoch if view is not None else 0,
                sync_state_set_epoch=view.sync_state_set_epoch if view is not None else 0,
            )
        )

    def drop(self, controller: str, reason: str) -> None:
        self._client.close_connection(controller, reason)

    def drop_all(self, reason: str) -> None:
        self._away_until_ms = boot_ms() + AWAY_MS
        for address in self._sessions:
            self.drop(address, reason)

    # -- requests

    def send(self, call: Call) -> None:
        self._spawn(self._run(call))

    async def _run(self, call: Call) -> None:
        try:
            event: Replied | Unanswered = await self._answer(call)
        except ResponseError as error:
            event = Replied(call, error.code, error.remark or "")
        except BatonError as error:
            event = Unanswered(call, str(error))
        self._events.step(event)

    async def _answer(self, call: Call) -> Replied:
        match call:
            case SendRegister():
                return await self._register(call)
            case SendElect(target):
                return await self._elect_any(call, target)
            case SendAlter(target):
                members = [broker_id for broker_id, _ in call.members]
                key = (call.master_epoch, call.sync_state_set_epoch)
                own_id = self._current.broker_id
                await self._call(target, self._requests.alter(own_id, key, members, wall_ms()))
                return Replied(call, ResponseCode.SUCCESS, "", await self._view_if_any(target))
            case FetchView(target):
                return Replied(call, ResponseCode.SUCCESS, "", await self._view(target, CALL_MS))
            case _:
                assert_never(call)

    async def _register(self, call: SendRegister) -> Replied:
        target = call.target
        broker_id = call.broker_id or await self._applied_id(target)
        await self._call(target, self._requests.register(broker_id, wall_ms()))
        view = await self._view_if_any(target)
        return Replied(call, ResponseCode.SUCCESS, "", view, broker_id)

    async def _applied_id(self, target: str) -> int:
        """An id of this replica's own. One that it applied for before it died is recorded with its
        address and its check code: applied for again it is the same, and none leaks."""
        group = await self._group(target, CALL_MS)
        for replica in group.replicas if group is not None else ():
            if replica.address == self._config.address:
                request = self._requests.apply_id(replica.broker_id)
                if (await self._ask(target, request)).code == ResponseCode.SUCCESS:
                    return replica.broker_id
        offered = await self._call(target, self._requests.next_id())
        broker_id = offered.require_int("nextBrokerId")
        await self._call(target, self._requests.apply_id(broker_id))
        return broker_id

    async def _elect_any(self, call: SendElect, target: str) -> Replied:
        """The controllers elect among those whom they have heard: this one is heard first."""
        self._beat(await self._client.connection(target), self._events.log_facts())
        own_id = self._current.broker_id
        request = self._requests.elect(own_id, designate=False, now_ms=wall_ms())
        reply = await self._ask(target, request)
        is_leader = reply.code != ResponseCode.CONTROLLER_NOT_LEADER
        view = await self._view_if_any(target) if is_leader else None
        return Replied(call, reply.code, reply.remark or "", view)

    async def _ask(
        self, target: str, request: RemotingCommand, timeout_ms: int = CALL_MS
    ) -> RemotingCommand:
        """Whatever its code; a controller that does not lead is asked who does."""
        reply = await self._client.invoke(target, request, timeout_ms)
        if reply.code == ResponseCode.CONTROLLER_NOT_LEADER:
            known = await self._client.call(target, self._requests.metadata(), timeout_ms)
            self._events.step(LeaderHinted(target, Metadata.of(known).leader))
        return reply

    async def _call(
        self, target: str, request: RemotingCommand, timeout_ms: int = CALL_MS
    ) -> RemotingCommand:
        """Raises ResponseError for any code but 0."""
        reply = await self._ask(target, request, timeout_ms)
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark, target)
        return reply

    # -- views

    async def _group(self, target: str, timeout_ms: int) -> RoleView | None:
        """As the leader has it, without names; None if it does not know the group."""
        reply = await self._call(target, self._requests.replicas(), timeout_ms)
        return group_view(reply, self._config.cluster_name, self._config.broker_name)

    async def _view(self, target: str, timeout_ms: int) -> RoleView | None:
        group = await self._group(target, timeout_ms)
        if group is None:
            return None
        self._newest = (target, group)
        self._names.ask(group, self._current.broker_id)
        return self._named(group)

    async def _view_if_any(self, target: str) -> RoleView | None:
        """After a request that was granted: without this answer a poll shows what came of it."""
        try:
            return await self._view(target, CALL_MS)
        except BatonError as error:
            log.info("group_not_read controller=%s why=%s", target, error)
            return None

    def _named(self, group: RoleView) -> RoleView:
        self._views += 1
        facts = self._events.log_facts()
        own = Replica(
            self._current.broker_id,
            ha_address=self._config.ha_address,
            learner=self._config.learner,
            incarnation=self._incarnation,
            log_id=facts.log_id,
        )
        return self._names.filled_in(group, own, self._views)

    def _renamed(self) -> None:
        if self._newest is not None:
            controller, group = self._newest
            self._events.step(ViewReceived(controller, self._named(group), pushed=False))

    # -- history and planned switches

    def report(
        self, kind: str, broker_id: int, master_epoch: int, fields: Mapping[str, object]
    ) -> None:
        """These controllers keep no history: the log has it."""
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        log.info("event kind=%s master_epoch=%d %s", kind, master_epoch, text)

    async def elect(self, task: SwitchTask, drained_offset: int) -> ElectAnswer | None:
        """`drained_offset` is not told: the replica is in the set, so it has it."""
        target = self._events.leader() or task.controller
        request = self._requests.elect(task.broker_id, designate=True, now_ms=wall_ms())
        try:
            reply = await self._ask(target, request, ELECT_MS)
        except BatonError as error:
            log.info("election_unanswered target=%s why=%s", target, error)
            return None
        view = await self._view_if_any(target)
        if view is not None:
            self._events.step(ViewReceived(target, view, pushed=False))
        if reply.code == ResponseCode.SUCCESS:
            self._handed_over(True)
        return ElectAnswer(reply.code, reply.remark or "")

    def switch_failed(self, task: SwitchTask, reason: str) -> None:
        self._handed_over(False)

    async def hand_over(self, leader: str, broker_id: int, master_epoch: int, reason: str) -> bool:
        """These controllers ask no master back, so it switches by itself (R33)."""
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
        """The end of a connection is all that these controllers understand."""
        sessions, self._sessions = self._sessions, set()
        for address in sessions:
            self.drop(address, reason)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def _spawn(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A failed assertion ends the server (`server_main`); a request that failed otherwise is a
        defect, too, and must be seen."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a task of the controller link failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


async def _end_of(connection: Connection) -> None:
    ended = asyncio.Event()
    connection.on_close.append(lambda _: ended.set())
    if not connection.closed:
        await ended.wait()
