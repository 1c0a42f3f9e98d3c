"""Requests to RocketMQ's controllers, and the role views made from their answers. Makes no
decisions.

RocketMQ's controllers know only ids and addresses. Incarnation, log id and HA address, which our
controllers record, are asked of the brokers each time the group is read (GET_BROKER_EPOCH_CACHE,
1007), so that BatonMQ brokers know each other as with our controllers (R41). Java brokers do not
report them. Origin: Java's ReplicasManager and ControllerRequestProcessor (5.3.3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, assert_never

from batonmq.protocol.bodies import (
    BrokerReplicasInfo,
    EpochEntryCache,
    SyncStateSet,
    encode_names,
)
from batonmq.protocol.codes import (
    HA_ADDRESS_FIELD,
    INCARNATION_FIELD,
    LOG_ID_FIELD,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import BatonError, RemoteProtocolError, ResponseError
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.config import ReplicasManagerConfig
from batonmq.replicas_manager.link import DurableFacts, LinkEvents, LogFacts
from batonmq.runtime.clock import wall_ms

log = logging.getLogger(__name__)

TIMEOUT_MS: Final = 1000
CALL_MS: Final = 3000

Fields = dict[str, str | int | bool | None]


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """The answer to CONTROLLER_GET_METADATA_INFO (1005). `leader`: "" while none is known."""

    is_leader: bool
    leader: str

    @classmethod
    def of(cls, reply: RemotingCommand) -> LeaderInfo:
        leader = reply.ext.get("controllerLeaderAddress", "")
        return cls(reply.get_bool("isLeader"), leader)


@dataclass(frozen=True, slots=True)
class PeerName:
    """The process at a replica's address, as it names itself; all empty for a Java broker."""

    incarnation: str = ""
    log_id: str = ""
    ha_address: str = ""

    @classmethod
    def of(cls, reply: RemotingCommand, replica: Replica, group: tuple[str, str]) -> PeerName:
        """The name in an answer to GET_BROKER_EPOCH_CACHE; empty if that is another replica. Raises
        RemoteProtocolError."""
        said = EpochEntryCache.decode(reply.body)
        # Another broker may have this address now, and its acks must not count (R41).
        if (said.cluster_name, said.broker_name) != group or said.broker_id != replica.broker_id:
            return cls()
        ext = reply.ext
        return cls(
            ext.get(INCARNATION_FIELD, ""), ext.get(LOG_ID_FIELD, ""), ext.get(HA_ADDRESS_FIELD, "")
        )


class Requests:
    """Builds the requests of one broker. `invokeTime`, by which jRaft judges who is alive, is wall
    clock ms."""

    def __init__(self, config: ReplicasManagerConfig, check_code: str) -> None:
        self._config = config
        # Java takes the part before the semicolon as the address.
        self._check_code = f"{config.address};{check_code}"
        self._names = {"clusterName": config.cluster_name, "brokerName": config.broker_name}

    def metadata(self) -> RemotingCommand:
        return RemotingCommand.request(RequestCode.CONTROLLER_GET_METADATA_INFO)

    def replicas(self) -> RemotingCommand:
        """Asks for the group: master, set, addresses, who is alive."""
        body = encode_names([self._config.broker_name])
        return RemotingCommand.request(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body=body)

    def next_id(self) -> RemotingCommand:
        return RemotingCommand.request(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, self._names)

    def apply_id(self, broker_id: int) -> RemotingCommand:
        """Applies for an id; with the same check code it is the same application."""
        fields: Fields = {
            **self._names,
            "appliedBrokerId": broker_id,
            "registerCheckCode": self._check_code,
        }
        return RemotingCommand.request(RequestCode.CONTROLLER_APPLY_BROKER_ID, fields)

    def register(self, broker_id: int, now_ms: int) -> RemotingCommand:
        fields: Fields = {
            **self._names,
            "brokerId": broker_id,
            "brokerAddress": self._config.address,
            "invokeTime": now_ms,
        }
        return RemotingCommand.request(RequestCode.CONTROLLER_REGISTER_BROKER, fields)

    def heartbeat(self, broker_id: int, facts: LogFacts) -> RemotingCommand:
        """A heartbeat, to be sent oneway."""
        fields: Fields = {
            **self._names,
            "brokerAddr": self._config.address,
            "brokerId": broker_id,
            "epoch": facts.epoch,
            "maxOffset": facts.max_offset,
            "confirmOffset": facts.confirm_offset,
            "heartbeatTimeoutMills": self._config.timings.session_timeout_ms,
            "electionPriority": self._config.election_priority,
        }
        return RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, fields)

    def elect(self, broker_id: int, *, designate: bool, now_ms: int) -> RemotingCommand:
        fields: Fields = {
            **self._names,
            "brokerId": broker_id,
            "designateElect": designate,
            "invokeTime": now_ms,
        }
        return RemotingCommand.request(RequestCode.CONTROLLER_ELECT_MASTER, fields)

    def alter(
        self, broker_id: int, key: tuple[int, int], members: list[int], now_ms: int
    ) -> RemotingCommand:
        """`key`: the (masterEpoch, setEpoch) that it replaces; `members` ascending."""
        master_epoch, set_epoch = key
        fields: Fields = {
            "brokerName": self._config.broker_name,
            "masterBrokerId": broker_id,
            "masterEpoch": master_epoch,
            "invokeTime": now_ms,
        }
        body = SyncStateSet(sync_state_set=members, sync_state_set_epoch=set_epoch).encode()
        return RemotingCommand.request(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, fields, body)


def group_view(reply: RemotingCommand, cluster_name: str, broker_name: str) -> RoleView | None:
    """The view in an answer to CONTROLLER_GET_SYNC_STATE_DATA, without names; None if the
    controllers do not know the group. Raises RemoteProtocolError."""
    info = BrokerReplicasInfo.decode(reply.body).replicas_info_table.get(broker_name)
    if info is None:
        return None
    # Java lists members first, then the others; a view has them by id.
    known = sorted(info.replicas, key=lambda one: one.broker_id)
    return RoleView(
        cluster_name=cluster_name,
        broker_name=broker_name,
        master_broker_id=info.master_broker_id or None,
        master_address=info.master_address or "",
        master_epoch=info.master_epoch,
        sync_state_set_epoch=info.sync_state_set_epoch,
        sync_state_set=frozenset(one.broker_id for one in info.in_sync_replicas),
        replicas=tuple(
            Replica(one.broker_id, one.broker_address, alive=one.alive) for one in known
        ),
    )


class PeerNames:
    """The names that other brokers report. `changed` is called when a broker reports another
    process than before. `spawn` starts a task that its owner ends."""

    def __init__(
        self,
        client: RemotingClient,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        changed: Callable[[], None],
    ) -> None:
        self._client = client
        self._spawn = spawn
        self._changed = changed
        self._known: dict[tuple[int, str], PeerName] = {}
        self._asking: set[tuple[int, str]] = set()

    def ask(self, view: RoleView, own_id: int) -> None:
        """Asks every other replica, dead or alive. A replica that was created again has another id
        at the same address: then it is asked for both ids."""
        for replica in view.replicas:
            key = (replica.broker_id, replica.address)
            if replica.broker_id != own_id and replica.address and key not in self._asking:
                self._asking.add(key)
                self._spawn(self._ask(replica, (view.cluster_name, view.broker_name)))

    def filled_in(self, view: RoleView, own: Replica, raft_index: int) -> RoleView:
        """`view` with the names known so far, and `own` for this process."""
        replicas = tuple(self._named(one, own) for one in view.replicas)
        named = replace(view, replicas=replicas, raft_index=raft_index)
        master = named.replica(view.master_broker_id or 0)
        if master is None:
            return named
        return replace(
            named, master_incarnation=master.incarnation, master_ha_address=master.ha_address
        )

    def _named(self, replica: Replica, own: Replica) -> Replica:
        if replica.broker_id == own.broker_id:
            return replace(own, address=replica.address, alive=replica.alive)
        name = self._known.get((replica.broker_id, replica.address), PeerName())
        return replace(replica, **asdict(name))

    async def _ask(self, replica: Replica, group: tuple[str, str]) -> None:
        key = (replica.broker_id, replica.address)
        try:
            request = RemotingCommand.request(RequestCode.GET_BROKER_EPOCH_CACHE)
            reply = await self._client.call(replica.address, request, TIMEOUT_MS)
            name = PeerName.of(reply, replica, group)
        except BatonError as error:
            log.debug("replica_not_named address=%s reason=%s", replica.address, error)
            return
        # Also after a failure: the next read of the group asks again.
        finally:
            self._asking.discard(key)
        if name != self._known.get(key, PeerName()):
            self._known[key] = name
            log.info("replica_named broker_id=%d address=%s name=%s", *key, name)
            self._changed()


class RemotingCalls:
    """The requests of one broker. `spawn` starts a task that its owner ends. Coroutines raise
    BatonError if a controller does not answer, or not with what was asked."""

    def __init__(
        self,
        config: ReplicasManagerConfig,
        client: RemotingClient,
        facts: DurableFacts,
        events: LinkEvents,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.requests = Requests(config, facts.check_code)
        self._config = config
        self._client = client
        self._current = facts.current
        self._events = events
        self._names = PeerNames(client, spawn, self._renamed)
        self._newest: tuple[str, RoleView] | None = None
        self._views = 0

    async def answer(self, call: ev.Call) -> ev.Replied:
        """Sends a call; returns its event. Raises ResponseError for a refusal or an unusable
        answer."""
        match call:
            case ev.SendRegister():
                return await self._register(call)
            case ev.SendElect(target):
                return await self._elect_any(call, target)
            case ev.SendAlter(target):
                members = [broker_id for broker_id, _ in call.members]
                key = (call.master_epoch, call.sync_state_set_epoch)
                own_id = self._current.broker_id
                await self._call(target, self.requests.alter(own_id, key, members, wall_ms()))
                return ev.Replied(call, ResponseCode.SUCCESS, "", await self.view_if_any(target))
            case ev.FetchView(target):
                return ev.Replied(call, ResponseCode.SUCCESS, "", await self.view(target, CALL_MS))
            case _:
                assert_never(call)

    async def _register(self, call: ev.SendRegister) -> ev.Replied:
        target = call.target
        broker_id = call.broker_id or await self._applied_id(target)
        await self._call(target, self.requests.register(broker_id, wall_ms()))
        view = await self.view_if_any(target)
        return ev.Replied(call, ResponseCode.SUCCESS, "", view, broker_id)

    async def _applied_id(self, target: str) -> int:
        """Gets an id for this replica. An id from before a crash is recorded with its address and
        check code: applying again returns it, so no id is lost."""
        group = await self._group(target, CALL_MS)
        for replica in group.replicas if group is not None else ():
            if replica.address == self._config.address:
                request = self.requests.apply_id(replica.broker_id)
                if (await self.ask(target, request)).code == ResponseCode.SUCCESS:
                    return _checked_id(replica.broker_id, target)
        offered = await self._call(target, self.requests.next_id())
        # Only an offer: another replica may get the same one, and the first to apply wins.
        broker_id = _checked_id(offered.require_int("nextBrokerId"), target)
        await self._call(target, self.requests.apply_id(broker_id))
        return broker_id

    async def _elect_any(self, call: ev.SendElect, target: str) -> ev.Replied:
        own_id = self._current.broker_id
        request = self.requests.elect(own_id, designate=False, now_ms=wall_ms())
        reply = await self.ask(target, request)
        is_leader = reply.code != ResponseCode.CONTROLLER_NOT_LEADER
        # After a refusal, too: another replica may have won, and its view ends this request.
        view = await self.view_if_any(target) if is_leader else None
        return ev.Replied(call, reply.code, reply.remark or "", view)

    async def ask(
        self, target: str, request: RemotingCommand, timeout_ms: int = CALL_MS
    ) -> RemotingCommand:
        """Sends a request; returns the reply, whatever its code. If the controller does not lead,
        asks it for the leader."""
        reply = await self._client.invoke(target, request, timeout_ms)
        if reply.code == ResponseCode.CONTROLLER_NOT_LEADER:
            known = await self.metadata(target, timeout_ms)
            # Java's refusal does not name the leader.
            self._events.step(ev.LeaderHinted(target, known.leader))
        return reply

    async def metadata(self, target: str, timeout_ms: int) -> LeaderInfo:
        """Asks that controller for the leader (CONTROLLER_GET_METADATA_INFO, 1005)."""
        reply = await self._client.call(target, self.requests.metadata(), timeout_ms)
        return LeaderInfo.of(reply)

    async def _call(
        self, target: str, request: RemotingCommand, timeout_ms: int = CALL_MS
    ) -> RemotingCommand:
        """Raises ResponseError for any code but 0."""
        reply = await self.ask(target, request, timeout_ms)
        if reply.code != ResponseCode.SUCCESS:
            raise ResponseError(reply.code, reply.remark, target)
        return reply

    # -- views

    async def _group(self, target: str, timeout_ms: int) -> RoleView | None:
        """The group by the leader, without names; None if it does not know the group."""
        reply = await self._call(target, self.requests.replicas(), timeout_ms)
        return group_view(reply, self._config.cluster_name, self._config.broker_name)

    async def view(self, target: str, timeout_ms: int) -> RoleView | None:
        group = await self._group(target, timeout_ms)
        if group is None:
            return None
        # Names arrive later: then this view is reported again, with them.
        self._newest = (target, group)
        # These controllers know only addresses, so nothing else shows that a process restarted
        # (R12).
        self._names.ask(group, self._current.broker_id)
        return self._named(group)

    async def view_if_any(self, target: str) -> RoleView | None:
        """The view after a granted request; None if this fails, and a later poll shows it."""
        try:
            return await self.view(target, CALL_MS)
        except BatonError as error:
            log.info("group_not_read controller=%s reason=%s", target, error)
            return None

    def _named(self, group: RoleView) -> RoleView:
        # Their views have no Raft index; this counter orders them.
        self._views += 1
        facts = self._events.log_facts()
        own = Replica(
            self._current.broker_id,
            ha_address=self._config.ha_address,
            learner=self._config.learner,
            incarnation=self._current.incarnation,
            log_id=facts.log_id,
        )
        return self._names.filled_in(group, own, self._views)

    def _renamed(self) -> None:
        if self._newest is not None:
            controller, group = self._newest
            self._events.step(ev.ViewReceived(controller, self._named(group), pushed=False))


def _checked_id(broker_id: int, controller: str) -> int:
    """Raises RemoteProtocolError for an invalid replica id: ids begin at 1."""
    if broker_id < 1:
        raise RemoteProtocolError(f"{controller} names broker id {broker_id}: must be at least 1")
    return broker_id
