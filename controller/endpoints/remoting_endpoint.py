"""The endpoint for Java brokers and mqadmin: RocketMQ's requests to a controller.

Codes, header fields and bodies are Java's (`ControllerRequestProcessor`, RocketMQ 5.3.3), with one
correction: the reply to CONTROLLER_ELECT_MASTER holds the member group both inside
`brokerMemberGroup`, where Java brokers expect it, and at top level, where mqadmin does.

Every node answers CONTROLLER_GET_METADATA_INFO, heartbeats and the configuration of a node. Only
the leader answers the others; other nodes say CONTROLLER_NOT_LEADER (2007).
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from batonmq.auth.guard import Guard
from batonmq.controller.config import RuntimeConfig
from batonmq.controller.liveness.events import RemotingChannelClosed, RemotingHeartbeat
from batonmq.controller.planned_switches import PlannedSwitches
from batonmq.controller.requests import ControllerRequests
from batonmq.controller.rules.commands import (
    ELECTION_PRIORITY_DEFAULT,
    NO_BROKER,
    AlterSyncStateSet,
    AnyCommand,
    ApplyBrokerId,
    CleanBrokerData,
    CommandResult,
    ElectMaster,
    LiveBroker,
    NewMember,
    RegisterBroker,
)
from batonmq.controller.watch import BrokerWatch
from batonmq.protocol.bodies import SyncStateSet
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal, ConnectError
from batonmq.protocol.fastjson import NOT_JSON, FastjsonError
from batonmq.protocol.json_body import check_size
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.remoting.command import FRAME_SIZE_MAX, RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer, answer_tls
from batonmq.runtime.tasks import Tasks
from batonmq.runtime.tls import Tls
from batonmq.runtime.turns import in_turns

log = logging.getLogger(__name__)

T = TypeVar("T")

_encode_sorted: Final = msgspec.json.Encoder(order="sorted").encode
_ANSWER_SIZE_MAX: Final = FRAME_SIZE_MAX // 2
_GROUPS_AT_ONCE: Final = 32
"""Views that are made in one turn of the loop; each takes 20 µs or more."""
_MEMBERS_MAX: Final = 1_024
"""More than a group has. Each id is decoded and compared before the rules refuse it (R58)."""

HEARTBEAT_TIMEOUT_DEFAULT_MS: Final = 10_000
NOTICE_TIMEOUT_MS: Final = 3_000
FIRST_HEARTBEAT_MS: Final = 1_000
"""How long a first election waits for the heartbeat of a Java broker (`_wait_for_heartbeat`)."""


class _SetBody(msgspec.Struct, rename="camel"):
    """`SyncStateSet`, the standard body of this protocol."""

    sync_state_set: list[int] = []
    sync_state_set_epoch: int = 0


class RemotingEndpoint:
    def __init__(
        self,
        requests: ControllerRequests,
        config: RuntimeConfig,
        switches: PlannedSwitches,
        watch: BrokerWatch,
        tls: Tls | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._requests = requests
        self._switches = switches
        self._config = config
        self._watch = watch
        self._channel_ids = itertools.count(1)
        self._unheard: dict[tuple[str, int], asyncio.Event] = {}
        processors = Processors()
        for code, handler in (
            (RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, self._alter_sync_state_set),
            (RequestCode.CONTROLLER_ELECT_MASTER, self._elect_master),
            (RequestCode.CONTROLLER_REGISTER_BROKER, self._register_broker),
            (RequestCode.CONTROLLER_GET_REPLICA_INFO, self._get_replica_info),
            (RequestCode.CONTROLLER_GET_METADATA_INFO, self._get_metadata),
            (RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, self._get_sync_state_data),
            (RequestCode.BROKER_HEARTBEAT, self._broker_heartbeat),
            (RequestCode.UPDATE_CONTROLLER_CONFIG, self._update_config),
            (RequestCode.GET_CONTROLLER_CONFIG, self._get_config),
            (RequestCode.CLEAN_BROKER_DATA, self._clean_broker_data),
            (RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, self._get_next_broker_id),
            (RequestCode.CONTROLLER_APPLY_BROKER_ID, self._apply_broker_id),
        ):
            processors.register(code, handler)
        processors.large.add(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA)
        processors.register(RequestCode.BATON_GET_TLS, answer_tls(tls))
        self._guard = guard
        if guard is not None:
            processors.register(RequestCode.BATON_WHO_AM_I, guard.who_am_i)
            guard.stand_before(processors)
        self._server = RemotingServer(
            processors,
            name="controller",
            idle_timeout_s=config.current.server_channel_max_idle_time_seconds,
            tls=tls.for_clients if tls is not None else None,
        )
        self._server.on_disconnect = self._disconnected

    async def listen(self, host: str, port: int) -> int:
        """Returns the port bound. Raises OSError if it is taken."""
        return await self._server.listen(host, port)

    async def close(self) -> None:
        await self._server.close()

    # Commands.

    async def _alter_sync_state_set(
        self, request: RemotingCommand, _: Connection
    ) -> RemotingCommand:
        # A list with one id many times is one member.
        body = _decode(request.body, _SetBody)
        members = set(body.sync_state_set)
        if len(members) > _MEMBERS_MAX:
            raise BrokerRefusal(
                ResponseCode.CONTROLLER_INVALID_REQUEST,
                f"{len(members)} members of a SyncStateSet, at most {_MEMBERS_MAX} are allowed",
            )
        result = await self._requests.submit(
            AlterSyncStateSet(
                broker_name=request.require("brokerName"),
                master_broker_id=request.require_int("masterBrokerId"),
                master_epoch=request.require_int("masterEpoch"),
                sync_state_set_epoch=body.sync_state_set_epoch,
                # Without incarnations: Java's protocol has none, so R12 cannot be checked.
                new_set=tuple(NewMember(broker_id) for broker_id in sorted(members)),
                reason="alter by remoting",
            )
        )
        if not result.ok or result.view is None:
            return _answer(request, result, {"newSyncStateSetEpoch": 0})
        ext = {"newSyncStateSetEpoch": result.view.sync_state_set_epoch}
        return _answer(request, result, ext, _set_body(result.view))

    async def _elect_master(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        # An operator who names a replica need not wait: the rules compare what is reported (R49).
        if not request.get_bool("designateElect"):
            broker_id = request.get_int("brokerId", -1)
            await self._wait_for_heartbeat(request.require("brokerName"), broker_id)
        result = await self._switches.elect(
            ElectMaster(
                cluster_name=request.ext.get("clusterName", ""),
                broker_name=request.require("brokerName"),
                broker_id=max(request.get_int("brokerId", -1), NO_BROKER),
                designate=request.get_bool("designateElect"),
                unclean=request.get_bool("uncleanElect"),
                cut_later_acks=request.get_bool("cutLaterAcks"),
                reason=self._caller(request, connection),
            )
        )
        # Java brokers take the master from the reply, also if it stays.
        view = result.view
        if view is None or result.code not in (
            ResponseCode.SUCCESS,
            ResponseCode.CONTROLLER_MASTER_STILL_EXIST,
        ):
            return _answer(request, result)
        group = {
            "cluster": view.cluster_name,
            "brokerName": view.broker_name,
            "brokerAddrs": {str(replica.broker_id): replica.address for replica in view.replicas},
        }
        body = {**group, "brokerMemberGroup": group, "syncStateSet": sorted(view.sync_state_set)}
        return _answer(request, result, _master(view), msgspec.json.encode(body, order="sorted"))

    def _caller(self, request: RemotingCommand, connection: Connection) -> str:
        """The caller, as the history shows it; its user only if the signature proves it."""
        user = self._guard.user_of(request, connection) if self._guard is not None else ""
        asked = f"asked by remoting from {connection.peer.rpartition(':')[0]}"
        return f"{asked} as {user}" if user else asked

    async def _wait_for_heartbeat(self, broker_name: str, broker_id: int) -> None:
        """Waits until a Java broker that wants to be the first master of its group has reported its
        log (R19)."""
        # Java reports it in a heartbeat from another thread, which may come after the request.
        group = self._requests.state.group(broker_name)
        record = group.replica(broker_id) if group is not None else None
        if group is None or group.master_epoch or record is None or record.incarnation:
            return
        if any(seen.broker_id == broker_id for seen in self._requests.live(broker_name)):
            return
        heard = self._unheard.setdefault((broker_name, broker_id), asyncio.Event())
        try:
            async with asyncio.timeout(FIRST_HEARTBEAT_MS / 1000):
                await heard.wait()
        except TimeoutError:
            log.warning("first_election_unheard broker_name=%s id=%d", broker_name, broker_id)

    async def _register_broker(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        result = await self._requests.submit(
            RegisterBroker(
                cluster_name=request.ext.get("clusterName", ""),
                broker_name=request.require("brokerName"),
                broker_id=request.require_int("brokerId"),
                address=request.require("brokerAddress"),
            )
        )
        ext = _names(request)
        view = result.view
        if not result.ok or view is None:
            return _answer(request, result, ext)
        # A broker would follow a dead master instead of asking for an election.
        if result.master_alive:
            ext |= _master(view)
        return _answer(request, result, ext, _set_body(view))

    async def _apply_broker_id(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        result = await self._requests.submit(
            ApplyBrokerId(
                cluster_name=request.ext.get("clusterName", ""),
                broker_name=request.require("brokerName"),
                broker_id=request.require_int("appliedBrokerId"),
                register_check_code=request.require("registerCheckCode"),
            )
        )
        return _answer(request, result, _names(request))

    async def _clean_broker_data(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        text = request.ext.get("brokerControllerIdsToClean") or ""
        try:
            broker_ids = tuple(int(part) for part in text.split(";") if part.strip())
        except ValueError:
            raise BrokerRefusal(
                ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA,
                f"broker ids to clean are no numbers: {text}",
            ) from None
        command: AnyCommand = CleanBrokerData(
            cluster_name=request.ext.get("clusterName", ""),
            broker_name=request.require("brokerName"),
            broker_ids=broker_ids,
            clean_living_broker=request.get_bool("isCleanLivingBroker"),
            reason=self._caller(request, connection),
        )
        return _answer(request, await self._requests.submit(command))

    # Reads.

    async def _get_next_broker_id(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        state = await self._requests.reading()
        offered = state.next_broker_id(request.require("brokerName"))
        ext = {**_names(request), "nextBrokerId": offered}
        return RemotingCommand.response_to(request, ext=ext)

    async def _get_replica_info(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        await self._requests.reading()
        name = request.require("brokerName")
        view = self._requests.view(name)
        if view is None:
            raise BrokerRefusal(
                ResponseCode.CONTROLLER_BROKER_METADATA_NOT_EXIST, f"no broker group named {name}"
            )
        ext: dict[str, str | int | bool | None] = {"masterEpoch": view.master_epoch}
        if view.master_broker_id is not None:
            ext |= {"masterBrokerId": view.master_broker_id, "masterAddress": view.master_address}
        return RemotingCommand.response_to(request, ext=ext, body=_set_body(view))

    async def _get_sync_state_data(
        self, request: RemotingCommand, _: Connection
    ) -> RemotingCommand:
        """Of the groups that the body names, or with our field `allGroups` of every one: only the
        controllers know a group whose brokers are all dead."""
        state = await self._requests.reading()
        wanted = set(_decode(request.body, list[str]))
        names = state.groups.keys() & (state.groups if request.get_bool("allGroups") else wanted)
        table: dict[str, msgspec.Raw] = {}
        size = 0
        async for name in in_turns(sorted(names), _GROUPS_AT_ONCE):
            view = self._requests.view(name)
            if view is not None:
                table[name] = msgspec.Raw(_encode_sorted(_replicas_info(view)))
                size += len(table[name]) + len(name)
            if size > _ANSWER_SIZE_MAX:
                raise BrokerRefusal(
                    ResponseCode.SYSTEM_ERROR,
                    f"the answer for {len(names)} broker groups would have more than"
                    f" {_ANSWER_SIZE_MAX} bytes: ask for fewer groups at a time",
                )
        body = _encode_sorted({"replicasInfoTable": table})
        return RemotingCommand.response_to(request, body=body)

    # Answered by every node.

    def _get_metadata(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        metadata = self._requests.metadata()
        leader = metadata.leader
        ext = {
            "group": metadata.group,
            "controllerLeaderId": leader.node_id if leader else None,
            "controllerLeaderAddress": leader.remoting_address if leader else None,
            "isLeader": metadata.is_leader,
            "peers": "".join(f"{peer.node_id}:{peer.remoting_address};" for peer in metadata.peers),
            # The fields from here on are ours; Java ignores fields that it does not know.
            "selfId": metadata.self_peer.node_id,
            "controllerEpoch": metadata.controller_epoch,
            "raftTerm": metadata.log.term,
            "appliedIndex": metadata.log.applied_index,
            "committedIndex": metadata.log.committed_index,
            "journalBytes": metadata.log.journal_bytes,
            "journalEntries": metadata.log.journal_entries,
            "snapshotBytes": metadata.log.snapshot_bytes,
            "snapshotIndex": metadata.log.snapshot_index,
            "digestIndex": metadata.log.digest_index,
            "stateDigest": metadata.log.state_digest,
            "rules": metadata.log.rules,
            "problems": "\n".join(metadata.problems),
        }
        return RemotingCommand.response_to(request, ext=ext)

    def _broker_heartbeat(
        self, request: RemotingCommand, connection: Connection
    ) -> RemotingCommand:
        broker_id = request.get_int("brokerId", -1)
        if broker_id < 1:
            raise BrokerRefusal(
                ResponseCode.CONTROLLER_INVALID_REQUEST, "Heart beat with empty brokerId"
            )
        channel_id = connection.attachments.setdefault("channel_id", next(self._channel_ids))
        assert isinstance(channel_id, int)
        # R58: the connection of a registered broker makes no place for strangers.
        if self._requests.state.is_registered(request.require("brokerName"), broker_id):
            connection.keep()
        self._watch.handle(
            RemotingHeartbeat(
                request.require("brokerName"),
                channel_id,
                request.get_int("heartbeatTimeoutMills", HEARTBEAT_TIMEOUT_DEFAULT_MS),
                LiveBroker(
                    broker_id=broker_id,
                    epoch=request.get_int("epoch", -1),
                    max_offset=request.get_int("maxOffset", -1),
                    confirm_offset=request.get_int("confirmOffset", -1),
                    election_priority=request.get_int(
                        "electionPriority", ELECTION_PRIORITY_DEFAULT
                    ),
                ),
            )
        )
        heard = self._unheard.pop((request.require("brokerName"), broker_id), None)
        if heard is not None:
            heard.set()
        return RemotingCommand.response_to(request, remark="Heart beat success")

    def _disconnected(self, connection: Connection) -> None:
        channel_id = connection.attachments.get("channel_id")
        if isinstance(channel_id, int):
            self._watch.handle(RemotingChannelClosed(channel_id))

    async def _update_config(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        await self._config.update(request.body)
        return RemotingCommand.response_to(request)

    def _get_config(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        return RemotingCommand.response_to(request, body=self._config.as_properties().encode())


class RoleNotices:
    """Sends NOTIFY_BROKER_ROLE_CHANGED (1008) to brokers that speak only remoting. A lost notice
    does no harm: these brokers also poll."""

    def __init__(
        self, tls: Tls | None = None, sign: Callable[[RemotingCommand], None] | None = None
    ) -> None:
        self._client = RemotingClient(name="controller-notices", tls=tls, sign=sign)
        self._tasks = Tasks()
        self._newest: dict[str, asyncio.Task[None]] = {}
        """By address."""

    def send(self, view: RoleView) -> None:
        """Sends it to each such replica that is alive; a newer notice replaces one under way."""
        # Java brokers act only if it names a master.
        if view.master_broker_id is None:
            return
        for replica in view.replicas:
            # A broker with an incarnation is ours, and gets the view over its session.
            if replica.alive and not replica.incarnation and replica.address:
                self._send_to(replica.address, view)

    def _send_to(self, address: str, view: RoleView) -> None:
        # The older one would be ignored behind it, and it may still wait for the connection.
        if (older := self._newest.get(address)) is not None:
            older.cancel()
        task = self._newest[address] = self._tasks.spawn(self._deliver(address, view))
        task.add_done_callback(partial(self._forget, address))

    def _forget(self, address: str, task: asyncio.Task[None]) -> None:
        if self._newest.get(address) is task:
            del self._newest[address]

    async def _deliver(self, address: str, view: RoleView) -> None:
        try:
            async with asyncio.timeout(NOTICE_TIMEOUT_MS / 1000):
                await self._client.oneway(address, _role_notice(view))
        except (ConnectError, TimeoutError) as error:
            log.info("role_notice_lost address=%s reason=%s", address, error)

    async def close(self) -> None:
        await self._tasks.close()
        await self._client.close()


def _role_notice(view: RoleView) -> RemotingCommand:
    """The notice for the brokers of `view`, which must have a master. They ignore an older
    epoch."""
    return RemotingCommand.request(
        RequestCode.NOTIFY_BROKER_ROLE_CHANGED, _master(view), _set_body(view)
    )


def _answer(
    request: RemotingCommand,
    result: CommandResult,
    ext: dict[str, Any] | None = None,
    body: bytes = b"",
) -> RemotingCommand:
    return RemotingCommand.response_to(request, result.code, result.remark or None, ext, body)


def _names(request: RemotingCommand) -> dict[str, str | int | bool | None]:
    return {
        "clusterName": request.ext.get("clusterName"),
        "brokerName": request.ext.get("brokerName"),
    }


def _master(view: RoleView) -> dict[str, Any]:
    return {
        "masterBrokerId": view.master_broker_id,
        "masterAddress": view.master_address,
        "masterEpoch": view.master_epoch,
        "syncStateSetEpoch": view.sync_state_set_epoch,
    }


def _set_body(view: RoleView) -> bytes:
    return SyncStateSet(
        sync_state_set=sorted(view.sync_state_set), sync_state_set_epoch=view.sync_state_set_epoch
    ).encode()


def _replicas_info(view: RoleView) -> dict[str, Any]:
    def described(replica: Replica) -> dict[str, Any]:
        return {
            "alive": replica.alive,
            "brokerAddress": replica.address,
            "brokerId": replica.broker_id,
            "brokerName": view.broker_name,
        }

    inside = [described(r) for r in view.replicas if r.broker_id in view.sync_state_set]
    outside = [described(r) for r in view.replicas if r.broker_id not in view.sync_state_set]
    info: dict[str, Any] = {
        "clusterName": view.cluster_name,
        "inSyncReplicas": inside,
        "masterEpoch": view.master_epoch,
        "notInSyncReplicas": outside,
        "syncStateSetEpoch": view.sync_state_set_epoch,
    }
    if view.master_broker_id is not None:
        info |= {"masterAddress": view.master_address, "masterBrokerId": view.master_broker_id}
    return info


def _decode(body: bytes, kind: type[T]) -> T:
    """Reads a body. Raises BrokerRefusal SYSTEM_ERROR, as an exception in Java's handler does."""
    try:
        check_size(body)
        return msgspec.json.decode(body, type=kind)
    except (FastjsonError, *NOT_JSON) as error:
        raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, f"unreadable body: {error}") from error
