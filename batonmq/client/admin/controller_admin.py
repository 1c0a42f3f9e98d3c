"""Admin calls to the controllers: the remoting endpoint (RocketMQ's codes) and the gRPC endpoint.

The leader reads and changes state; any controller names the leader. grpc is imported only when the
gRPC endpoint is used. Origin: DefaultMQAdminExtImpl's controller calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from batonmq.auth.signature import Signer
from batonmq.client.admin.requests import AdminRequests
from batonmq.client.admin.types import ControllerLogStatus, ControllerMetadata, ElectedMaster
from batonmq.client.errors import ClientError, NoControllerLeaderError
from batonmq.client.instance.name_servers import parse_addresses
from batonmq.protocol.bodies import BrokerReplicasInfo, ElectMasterResponseBody, encode_names
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, ConnectError, RequestTimeoutError, ResponseError
from batonmq.protocol.message_id import split_address
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.clock import boot_ms, wall_ms
from batonmq.runtime.properties_text import parse_properties
from batonmq.runtime.tls import pem_of

if TYPE_CHECKING:
    from batonmq.history.event import EventKey, HistoryEvent
    from batonmq.history.reader import Page

T = TypeVar("T")
GRPC_PORT_OFFSET = 1
GROUPS_A_PAGE = 200
_LEADER_PAUSE_S = 0.05


class ControllerAdmin:
    """`addresses`: remoting addresses (`host:port`) of one or more controllers of the group."""

    def __init__(self, requests: AdminRequests, addresses: str | Sequence[str]) -> None:
        self.addresses = parse_addresses(addresses)
        if not self.addresses:
            raise ClientError("no controller address given: pass host:port;host:port")
        self._requests = requests

    async def metadata(self, address: str | None = None) -> ControllerMetadata:
        """The leader as one controller reports it (default: the first that replies)."""
        failures: list[tuple[str, str]] = []
        for one in (address,) if address is not None else self.addresses:
            code = RequestCode.CONTROLLER_GET_METADATA_INFO
            try:
                reply = await self._requests.ask(one, code, {}, "controller metadata")
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
        """For every controller given: address -> its metadata, or why there is none."""
        return await self._ask_each(self.metadata)

    async def _ask_each(self, ask: Callable[[str], Awaitable[T]]) -> dict[str, T | BatonError]:
        async def one(address: str) -> T | BatonError:
            try:
                return await ask(address)
            except BatonError as error:
                return error

        answers = await asyncio.gather(*map(one, self.addresses))
        return dict(zip(self.addresses, answers, strict=True))

    async def sync_state_data(
        self, broker_names: Sequence[str], *, every: bool = False
    ) -> BrokerReplicasInfo:
        """Master, SyncStateSet and the other replicas of each group. Unknown groups are absent.
        `every`: also all other groups that the controllers know; Java's controllers leave them out.
        """
        found = BrokerReplicasInfo()
        names = list(broker_names)
        ext = {"allGroups": "true"} if every else {}
        while names or ext:
            page, names = names[:GROUPS_A_PAGE], names[GROUPS_A_PAGE:]
            reply = await self._ask_leader(
                RequestCode.CONTROLLER_GET_SYNC_STATE_DATA,
                ext,
                encode_names(page or [""]),  # Java's refuse an empty list
                "sync state set",
            )
            found.replicas_info_table |= BrokerReplicasInfo.decode(reply.body).replicas_info_table
            if ext:
                # A controller that does not know the field answers for the named groups only.
                names, ext = [n for n in names if n not in found.replicas_info_table], {}
        return found

    async def elect_master(
        self,
        cluster_name: str,
        broker_name: str,
        broker_id: int | None = None,
        *,
        unclean: bool = False,
        cut_later_acks: bool = False,
    ) -> ElectedMaster:
        """Elects the broker, or lets the controller choose. Raises ResponseError if refused.

        `unclean` elects the named broker even if it lacks acknowledged messages, which are then
        lost (G5). It is refused while the old master still answers (R7). If the old master may
        still run, it is also refused, unless `cut_later_acks`: what the old master acknowledges
        later is then cut, and the remark says what is known of it (R44). `already_master`: nothing
        changed."""
        ext = {
            "clusterName": cluster_name,
            "brokerName": broker_name,
            "brokerId": str(-1 if broker_id is None else broker_id),
            "designateElect": "false" if broker_id is None else "true",
            "invokeTime": str(wall_ms()),
        }
        if unclean:
            ext["uncleanElect"] = "true"
        if cut_later_acks:
            ext["cutLaterAcks"] = "true"
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
            master_broker_id=reply.get_int("masterBrokerId", 0),
            master_address=reply.ext.get("masterAddress", ""),
            master_epoch=reply.get_int("masterEpoch", 0),
            sync_state_set_epoch=reply.get_int("syncStateSetEpoch", 0),
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
        """Removes the named replicas from the controllers' state, or the whole group if none is
        named. Raises ResponseError for a living replica unless `clean_living_broker`."""
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
        reply = await self._requests.ask(
            address or self.addresses[0],
            RequestCode.GET_CONTROLLER_CONFIG,
            {},
            "controller settings",
        )
        return parse_properties(reply.body.decode())

    async def update_config(
        self, settings: Mapping[str, str], address: str | None = None
    ) -> tuple[str, ...]:
        """Changes settings of that controller, or of all given; returns the changed ones. Raises
        ClientError for a line break."""
        # One after the other: an error stops at the first controller that refuses.
        done: list[str] = []
        for one in (address,) if address is not None else self.addresses:
            code = RequestCode.UPDATE_CONTROLLER_CONFIG
            what = "changing controller settings"
            await self._requests.change_settings(one, code, settings, what)
            done.append(one)
        return tuple(done)

    async def history(
        self,
        broker_name: str = "",
        *,
        after_raft_index: int = 0,
        limit: int = 0,
        address: str | None = None,
    ) -> tuple[HistoryEvent, ...]:
        """The failover history, oldest first, from the first controller that replies. `limit` 0:
        all that is kept. `address`: the remoting address of the controller to ask. Raises
        ConnectError if no gRPC endpoint replies."""
        from batonmq.proto.controller.v1 import controller_pb2 as pb

        request = pb.GetHistoryRequest(
            broker_name=broker_name, after_raft_index=after_raft_index, limit=limit
        )
        _, events = await self._get_history(request, address)
        return tuple(events)

    async def histories(
        self, broker_name: str = "", *, limit: int = 0
    ) -> dict[str, tuple[HistoryEvent, ...] | BatonError]:
        """`history` of every controller given, or why there is none."""
        return await self._ask_each(lambda at: self.history(broker_name, limit=limit, address=at))

    async def history_page(
        self, after: EventKey | None, *, limit: int = 0, address: str | None = None
    ) -> Page:
        """The next events after `after` (None: from the oldest kept), of all groups: at most
        `limit`, or fewer if the controller sends fewer at once; empty at the end. `address` as in
        `history`. Raises ConnectError, ResponseError, and ClientError if the controller does not
        support this request."""
        from batonmq.history.reader import Page
        from batonmq.proto.controller.v1 import controller_pb2 as pb

        log, raft_index, part = after or ("", 0, 0)
        place = pb.HistoryPlace(log=log, raft_index=raft_index, part=part)
        request = pb.GetHistoryRequest(after=place, limit=limit)
        reply, events = await self._get_history(request, address)
        if reply.continuation == pb.GetHistoryReply.UNSPECIFIED:
            raise ClientError(
                f"controller {address or self.addresses[0]} cannot give the history in pages: it "
                "runs an older version"
            )
        return Page(events, reply.continuation == pb.GetHistoryReply.FOLLOWS)

    async def _get_history(
        self, request: object, address: str | None
    ) -> tuple[Any, list[HistoryEvent]]:
        """The first success of a controller (a generated class, hence Any), and its events."""
        import grpc

        from batonmq.history.event import lenient_event
        from batonmq.proto.controller.v1 import controller_pb2_grpc

        stub_class: Any = controller_pb2_grpc.ControllerServiceStub
        endpoints = [grpc_address(one) for one in ((address,) if address else self.addresses)]
        options, why = self._requests.client.options, ""
        tls, user = options.tls, options.credentials
        signed = Signer(user).call_metadata(wall_ms()) if user is not None else None
        for endpoint in endpoints:
            channel = grpc.aio.insecure_channel(endpoint)
            if tls is not None:
                parts = (part or None for part in pem_of(tls))
                credentials = grpc.ssl_channel_credentials(*parts)
                channel = grpc.aio.secure_channel(endpoint, credentials)
            async with channel:
                try:
                    reply = await stub_class(channel).GetHistory(
                        request, timeout=self._requests.timeout_ms / 1000, metadata=signed
                    )
                except grpc.aio.AioRpcError as error:
                    # gRPC names the address twice before the reason.
                    details = (error.details() or "").rpartition("remote host: ")[2]
                    why = f"{error.code().name} {details}"
                    continue
            if reply.status.code == ResponseCode.CONTROLLER_NOT_LEADER:
                why = reply.status.remark
                continue
            if reply.status.code != ResponseCode.SUCCESS:
                raise ResponseError(reply.status.code, reply.status.remark, endpoint)
            events = (lenient_event(event.json) for event in reply.events)
            return reply, [event for event in events if event is not None]
        raise ConnectError(endpoints[-1], why)

    async def _ask_leader(
        self,
        code: RequestCode,
        ext: dict[str, str],
        body: bytes,
        what: str,
        *,
        also: frozenset[int] = frozenset(),
    ) -> RemotingCommand:
        """The leader's reply. Retries during an election, until the timeout."""
        deadline_ms = self._requests.deadline_ms()
        # Only half of the time for one controller, so that another can be asked.
        share_ms = max(self._requests.timeout_ms // 2, 1)
        while True:
            asked: list[tuple[str, str]] = []
            for address in await self._likely_leaders(asked):
                try:
                    return await self._requests.ask(
                        address, code, ext, what, body=body, also=also, timeout_ms=share_ms
                    )
                except ResponseError as error:
                    # It stopped leading since it was asked who leads.
                    if error.code != ResponseCode.CONTROLLER_NOT_LEADER:
                        raise
                    asked.append((address, error.remark or "not the leader"))
                except (ConnectError, RequestTimeoutError) as error:
                    asked.append((address, str(error)))
            if boot_ms() >= deadline_ms:
                raise NoControllerLeaderError(asked)
            await asyncio.sleep(_LEADER_PAUSE_S)

    async def _likely_leaders(self, asked: list[tuple[str, str]]) -> list[str]:
        """The controllers that are named as leader, without repetition; failures are added to
        `asked`. Raises ResponseError if no leader is known and a controller refuses this user."""
        named: list[str] = []
        refusal: ResponseError | None = None
        for address, answer in (await self.all_metadata()).items():
            if isinstance(answer, BatonError):
                asked.append((address, str(answer)))
                if isinstance(answer, ResponseError) and answer.code == ResponseCode.NO_PERMISSION:
                    refusal = answer
            elif answer.leader_address:
                named.append(answer.leader_address)
            elif answer.is_leader:
                named.append(address)
            else:
                asked.append((address, "replies, but has no leader"))
        # Else the caller would try until its timeout, and hear of a missing leader instead.
        if refusal is not None and not named:
            raise refusal
        return list(dict.fromkeys(named))


def _log_status(ext: Mapping[str, str]) -> ControllerLogStatus | None:
    if "appliedIndex" not in ext:
        return None  # a RocketMQ controller
    problems = [*filter(None, ext.get("problems", "").split("\n"))]
    return msgspec.convert({**ext, "problems": problems}, ControllerLogStatus, strict=False)


def grpc_address(remoting_address: str) -> str:
    """The gRPC address of a controller: one port above its remoting address."""
    host, port = split_address(remoting_address)
    grpc_port = port + GRPC_PORT_OFFSET
    return f"[{host}]:{grpc_port}" if ":" in host else f"{host}:{grpc_port}"
