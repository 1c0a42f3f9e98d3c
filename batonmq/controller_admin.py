"""Admin calls to the controllers: the remoting door (RocketMQ's codes) and the native gRPC door.

State is asked from and changed through the leader; any controller tells who that is. grpc is
imported only when the native door is used. Origin: DefaultMQAdminExtImpl's controller calls.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from batonmq.admin_call import AdminCall
from batonmq.admin_types import (
    ControllerLogStatus,
    ControllerMetadata,
    ElectedMaster,
    HistoryEvent,
    NativeMetadata,
    NativePeer,
)
from batonmq.clock import boot_ms, wall_ms
from batonmq.errors import ClientError
from batonmq.name_servers import parse_addresses
from protocol.bodies import BrokerReplicasInfo, ElectMasterResponseBody, encode_names
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import BatonError, ConnectError, RequestTimeoutError, ResponseError
from protocol.message_id import split_address
from remoting.command import RemotingCommand

GRPC_PORT_OFFSET = 1
_LEADER_PAUSE_S = 0.05

# Replies after which another controller is asked, or the same one a little later.
_ASK_THE_LEADER = frozenset({ResponseCode.CONTROLLER_NOT_LEADER})


class NoControllerLeaderError(ClientError):
    """No controller answered as leader before the deadline."""

    response_code = ResponseCode.CONTROLLER_NOT_LEADER
    retriable = True

    def __init__(self, asked: Sequence[tuple[str, str]]) -> None:
        self.asked = tuple(asked)
        tried = "; ".join(f"{a}: {why.removeprefix(f'{a}: ')}" for a, why in asked)
        super().__init__(
            f"no controller answers as leader ({tried}): a majority of the controllers must run; "
            "see `mqctl getControllerMetaData`"
        )


class ControllerAdmin:
    """`addresses`: remoting doors (`host:port`) of one or more controllers of the group."""

    def __init__(self, call: AdminCall, addresses: str | Sequence[str]) -> None:
        self.addresses = parse_addresses(addresses)
        if not self.addresses:
            raise ClientError("no controller address given: pass host:port;host:port")
        self._call = call

    async def metadata(self, address: str | None = None) -> ControllerMetadata:
        """What one controller (default: the first that answers) knows of the group's leader."""
        failures: list[tuple[str, str]] = []
        for one in (address,) if address is not None else self.addresses:
            request = RemotingCommand.request(RequestCode.CONTROLLER_GET_METADATA_INFO)
            try:
                reply = await self._call.ask(one, request, "controller metadata")
            except (ConnectError, RequestTimeoutError) as error:
                if address is not None:
                    raise
                failures.append((one, str(error)))
                continue
            ext = reply.ext
            return ControllerMetadata(
                address=one,
                group=ext.get("group", ""),
                leader_id=ext.get("controllerLeaderId", ""),
                leader_address=ext.get("controllerLeaderAddress", ""),
                is_leader=ext.get("isLeader", "false").lower() == "true",
                peers=ext.get("peers", ""),
                log=_log_status(ext),
            )
        raise NoControllerLeaderError(failures)

    async def all_metadata(self) -> dict[str, ControllerMetadata | BatonError]:
        """Address -> what it says, or why it does not answer, of every controller given."""

        async def one(address: str) -> ControllerMetadata | BatonError:
            try:
                return await self.metadata(address)
            except BatonError as error:
                return error

        answers = await asyncio.gather(*(one(address) for address in self.addresses))
        return dict(zip(self.addresses, answers, strict=True))

    async def sync_state_data(self, broker_names: Sequence[str]) -> BrokerReplicasInfo:
        """Master, SyncStateSet and the other replicas of each group. Unknown groups are absent."""
        body = encode_names(list(broker_names))
        reply = await self._ask_leader(
            RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, {}, body, "sync state set"
        )
        return BrokerReplicasInfo.decode(reply.body)

    async def elect_master(
        self,
        cluster_name: str,
        broker_name: str,
        broker_id: int | None = None,
        *,
        unclean: bool = False,
    ) -> ElectedMaster:
        """Elects that broker, or lets the controller choose. Raises ResponseError if refused.

        `unclean` takes the broker named though it may lack acknowledged messages (G5): they are
        lost then. It is refused while the old master still answers (R7). If the old
        master stands (nothing to do), `already_master` is set.
        """
        ext = {
            "clusterName": cluster_name,
            "brokerName": broker_name,
            "brokerId": str(-1 if broker_id is None else broker_id),
            "designateElect": "false" if broker_id is None else "true",
            "invokeTime": str(wall_ms()),
        }
        if unclean:
            ext["uncleanElect"] = "true"
        reply = await self._ask_leader(
            RequestCode.CONTROLLER_ELECT_MASTER,
            ext,
            b"",
            "election",
            also=frozenset({ResponseCode.CONTROLLER_MASTER_STILL_EXIST}),
        )
        members: tuple[int, ...] = ()
        if reply.body:
            body = ElectMasterResponseBody.decode(reply.body)
            members = tuple(sorted(body.sync_state_set))
        return ElectedMaster(
            broker_name=broker_name,
            master_broker_id=int(reply.ext.get("masterBrokerId", 0)),
            master_address=reply.ext.get("masterAddress", ""),
            master_epoch=int(reply.ext.get("masterEpoch", 0)),
            sync_state_set_epoch=int(reply.ext.get("syncStateSetEpoch", 0)),
            sync_state_set=members,
            already_master=reply.code == ResponseCode.CONTROLLER_MASTER_STILL_EXIST,
        )

    async def clean_broker_data(
        self,
        cluster_name: str,
        broker_name: str,
        broker_ids: Sequence[int] = (),
        *,
        clean_living_broker: bool = False,
    ) -> None:
        """Makes the controller forget those replicas, or the whole group if none is named.

        A living one is refused (2009) unless `clean_living_broker`.
        """
        ext = {
            "clusterName": cluster_name,
            "brokerName": broker_name,
            "isCleanLivingBroker": "true" if clean_living_broker else "false",
            "invokeTime": str(wall_ms()),
        }
        if broker_ids:
            ext["brokerControllerIdsToClean"] = ";".join(str(i) for i in broker_ids)
        await self._ask_leader(RequestCode.CLEAN_BROKER_DATA, ext, b"", "cleaning")

    async def config(self, address: str | None = None) -> dict[str, str]:
        """The settings of one controller (default: the first given)."""
        request = RemotingCommand.request(RequestCode.GET_CONTROLLER_CONFIG)
        reply = await self._call.ask(address or self.addresses[0], request, "controller settings")
        return properties_from_text(reply.body.decode())

    async def update_config(
        self, settings: Mapping[str, str], address: str | None = None
    ) -> tuple[str, ...]:
        """Changes settings at that controller, or at all given; returns where it was done."""
        body = "".join(f"{key}={value}\n" for key, value in settings.items()).encode()
        done: list[str] = []
        for one in (address,) if address is not None else self.addresses:
            request = RemotingCommand.request(RequestCode.UPDATE_CONTROLLER_CONFIG, {}, body)
            await self._call.ask(one, request, "changing controller settings")
            done.append(one)
        return tuple(done)

    # -- the native door ----------------------------------------------------------------------

    async def history(
        self,
        broker_name: str = "",
        *,
        after_raft_index: int = 0,
        limit: int = 0,
        address: str | None = None,
    ) -> tuple[HistoryEvent, ...]:
        """The failover history, oldest first, as the first controller that answers holds it.

        `limit` 0: all that is kept. `address` is the remoting door of the one to ask. Raises
        ConnectError if none answers on its gRPC door.
        """
        from baton.controller.v1 import controller_pb2 as pb

        request = pb.GetHistoryRequest(
            broker_name=broker_name, after_raft_index=after_raft_index, limit=limit
        )
        addresses = None if address is None else (address,)
        reply = await self._native("GetHistory", request, addresses)
        return tuple(
            HistoryEvent(
                raft_index=event.raft_index,
                time_ms=event.time_ms,
                kind=event.kind,
                broker_name=event.broker_name,
                broker_id=event.broker_id,
                master_epoch=event.master_epoch,
                sync_state_set_epoch=event.sync_state_set_epoch,
                fields=json.loads(event.json) if event.json else {},
            )
            for event in reply.events
        )

    async def native_metadata(self, address: str | None = None) -> NativeMetadata:
        """Raft term, indices and peers of one controller (default: the first that answers).

        `address` is its remoting door; the gRPC door is one port above.
        """
        from baton.controller.v1 import controller_pb2 as pb

        addresses = None if address is None else (address,)
        reply = await self._native("GetMetadata", pb.GetMetadataRequest(), addresses)
        return NativeMetadata(
            group=reply.group,
            self_id=reply.self_id,
            leader_id=reply.leader_id,
            leader_remoting_address=reply.leader_remoting_address,
            leader_grpc_address=reply.leader_grpc_address,
            is_leader=reply.is_leader,
            controller_epoch=reply.controller_epoch,
            raft_term=reply.raft_term,
            applied_index=reply.applied_index,
            committed_index=reply.committed_index,
            peers=tuple(
                NativePeer(p.id, p.remoting_address, p.grpc_address, p.raft_address)
                for p in reply.peers
            ),
            journal_bytes=reply.journal_bytes,
            journal_entries=reply.journal_entries,
            snapshot_bytes=reply.snapshot_bytes,
            snapshot_index=reply.snapshot_index,
            digest_index=reply.digest_index,
            state_digest=reply.state_digest,
            problems=tuple(reply.problems),
        )

    async def _native(
        self, method: str, request: object, addresses: Sequence[str] | None = None
    ) -> Any:
        """The reply (a generated class, hence Any) of the first controller that answers for it."""
        import grpc

        from baton.controller.v1 import controller_pb2_grpc

        stub_class: Any = controller_pb2_grpc.ControllerServiceStub
        doors = [grpc_address(address) for address in addresses or self.addresses]
        why = ""
        for door in doors:
            async with grpc.aio.insecure_channel(door) as channel:
                call = getattr(stub_class(channel), method)
                try:
                    reply = await call(request, timeout=self._call.timeout_ms / 1000)
                except grpc.aio.AioRpcError as error:
                    why = f"{error.code().name} {error.details() or ''}"
                    continue
            if reply.status.code == ResponseCode.CONTROLLER_NOT_LEADER:
                why = reply.status.remark
                continue
            if reply.status.code != ResponseCode.SUCCESS:
                raise ResponseError(reply.status.code, reply.status.remark, door)
            return reply
        raise ConnectError(doors[-1], why)

    # -- finding the leader -------------------------------------------------------------------

    async def _ask_leader(
        self,
        code: RequestCode,
        ext: Mapping[str, str],
        body: bytes,
        what: str,
        *,
        also: frozenset[int] = frozenset(),
    ) -> RemotingCommand:
        """The leader's reply; an election under way is waited for until the timeout."""
        deadline_ms = boot_ms() + self._call.timeout_ms
        while True:
            asked: list[tuple[str, str]] = []
            for address in await self._likely_leaders(asked):
                request = RemotingCommand.request(code, ext, body)
                try:
                    return await self._call.ask(address, request, what, also=also, final=False)
                except ResponseError as error:
                    if error.code not in _ASK_THE_LEADER:
                        raise
                    asked.append((address, error.remark or "not the leader"))
                except (ConnectError, RequestTimeoutError) as error:
                    asked.append((address, str(error)))
            if boot_ms() >= deadline_ms:
                raise NoControllerLeaderError(asked)
            await asyncio.sleep(_LEADER_PAUSE_S)

    async def _likely_leaders(self, asked: list[tuple[str, str]]) -> list[str]:
        """The leader that a controller names, first; then all given."""
        named: list[str] = []
        for address, answer in (await self.all_metadata()).items():
            if isinstance(answer, BatonError):
                asked.append((address, str(answer)))
            elif answer.leader_address:
                named.append(answer.leader_address)
            elif answer.is_leader:
                named.append(address)
            else:
                asked.append((address, "answers, but knows of no leader"))
        return list(dict.fromkeys(named))


def _log_status(ext: Mapping[str, str]) -> ControllerLogStatus | None:
    if "appliedIndex" not in ext:
        return None

    def number(name: str) -> int:
        return int(ext.get(name, 0))

    return ControllerLogStatus(
        self_id=ext.get("selfId", ""),
        controller_epoch=number("controllerEpoch"),
        term=number("raftTerm"),
        applied_index=number("appliedIndex"),
        committed_index=number("committedIndex"),
        journal_bytes=number("journalBytes"),
        journal_entries=number("journalEntries"),
        snapshot_bytes=number("snapshotBytes"),
        snapshot_index=number("snapshotIndex"),
        digest_index=number("digestIndex"),
        state_digest=ext.get("stateDigest", ""),
        problems=tuple(filter(None, ext.get("problems", "").split("\n"))),
    )


def grpc_address(remoting_address: str) -> str:
    """The native door of a controller whose remoting door is given: one port above."""
    host, port = split_address(remoting_address)
    grpc_port = port + GRPC_PORT_OFFSET
    return f"[{host}]:{grpc_port}" if ":" in host else f"{host}:{grpc_port}"


def properties_from_text(text: str) -> dict[str, str]:
    """Java properties as servers send their settings: `key=value` lines."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and not key.startswith("#"):
            settings[key.strip()] = value.strip()
    return settings
