"""Users at the ports of a broker and a name server: who is refused, who may, and what follows a
change. Signatures and policies by themselves: tests/auth."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc.aio
import pytest
from click.testing import CliRunner
from heartbeats import heartbeat
from local_log import LocalLog
from lone_broker import end_header, sections_of, send_header, until
from msgspec import structs

from batonmq import (
    ClientOptions,
    Message,
    PopConsumer,
    Producer,
    TransactionProducer,
    TransactionState,
)
from batonmq.auth import guard
from batonmq.auth.audit import AuditLog
from batonmq.auth.config import AuthConfig
from batonmq.auth.policy import (
    AclInfo,
    Need,
    PolicyEntry,
    PolicyInfo,
    User,
    UserInfo,
    UserWrapper,
    merged,
)
from batonmq.auth.rights import RIGHTS, needs_of
from batonmq.auth.signature import Credentials, Signer
from batonmq.broker.config import ReplicasConfig
from batonmq.broker.name_server_registrar import RouteRegistration
from batonmq.broker.replication.controlled import ControllerReplication
from batonmq.broker.role_gate import Refusal
from batonmq.broker.service import BrokerService
from batonmq.broker.tables.users import UserService, UserTable
from batonmq.client.admin.admin import Admin
from batonmq.controller.config import ControllerConfig
from batonmq.controller.main import guard_of
from batonmq.controller.raft.log import Machine
from batonmq.controller.service import ControllerService
from batonmq.history.event import REASON_SIZE_MAX
from batonmq.mqctl.main import cli
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.proto.controller.v1 import controller_pb2
from batonmq.proto.controller.v1.controller_pb2_grpc import ControllerServiceStub
from batonmq.protocol.bodies import (
    DataVersion,
    HeartbeatData,
    ProducerData,
    SubscriptionGroupConfig,
    TopicConfigAndMappingSerializeWrapper,
)
from batonmq.protocol.codes import RELAY_FIELD, LanguageCode, RequestCode, ResponseCode
from batonmq.protocol.errors import ResponseError
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.clock import wall_ms
from batonmq.store.errors import PutUnavailable
from tests.shared.ports import free_ports
from tests.shared.waiting import opened

DENIED = ResponseCode.NO_PERMISSION
GONE = ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
SECRET = "hidden-secret"
AUTH = AuthConfig(
    authentication_enabled=True,
    authorization_enabled=True,
    inner_client_authentication_credentials=f'{{"accessKey":"node","secretKey":"{SECRET}-n"}}',
    init_authentication_user=f'{{"username":"admin","password":"{SECRET}-a"}}',
)
ADMIN = Credentials(access_key="admin", secret_key=f"{SECRET}-a")
NODE = Credentials(access_key="node", secret_key=f"{SECRET}-n")
USER = Credentials(access_key="shop", secret_key=f"{SECRET}-s")
WRITER = Credentials(access_key="writer", secret_key=f"{SECRET}-w")
OTHER = Credentials(access_key="other", secret_key=f"{SECRET}-o")
WRONG = Credentials(access_key="shop", secret_key="wrong")
HALF = {"TRAN_MSG": "true", "PGROUP": "shops", "UNIQ_KEY": "half"}


@dataclass
class Server:
    """A broker, a name server or a controller that checks users."""

    address: str
    service: Any
    guard: Any

    async def ask(
        self,
        who: Credentials | None,
        code: int,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
        **more: object,
    ) -> RemotingCommand:
        client = RemotingClient(sign=Signer(who) if who is not None else None)
        request = RemotingCommand.request(code, ext, body)
        for name, value in more.items():
            setattr(request, name, value)
        try:
            return await client.invoke(self.address, request, 5000)
        finally:
            await client.close()

    async def send(self, who: Credentials | None, topic: str = "T") -> int:
        """The code of a send."""
        return (await self.ask(who, 310, send_header(topic, 0, {}), b"x")).code

    async def create(self, who: Credentials, kind: str = "Normal") -> RemotingCommand:
        body = UserInfo(username=who.access_key, password=who.secret_key, user_type=kind)
        return await self.ask(
            ADMIN, RequestCode.AUTH_CREATE_USER, {"username": who.access_key}, body.encode()
        )

    async def grant(self, who: Credentials, *entries: tuple[str, str]) -> RemotingCommand:
        subject = f"User:{who.access_key}"
        found = [PolicyEntry(resource=name, actions=a.split(",")) for name, a in entries]
        body = AclInfo(subject=subject, policies=[PolicyInfo(entries=found)]).encode()
        return await self.ask(ADMIN, RequestCode.AUTH_CREATE_ACL, {"subject": subject}, body)

    async def admit(self, who: Credentials, *entries: tuple[str, str]) -> None:
        """Creates the user with these rights."""
        assert (await self.create(who)).code == 0
        assert (await self.grant(who, *entries)).code == 0


async def all_servers_know(names: Server) -> None:
    """Waits until the name server has the broker and its users."""
    routes = names.service.routes
    await until(lambda: bool(routes.members("broker-a")) and names.guard.user("admin") is not None)


@contextlib.asynccontextmanager
async def broker_with_users(
    folder: Path, auth: AuthConfig = AUTH, **broker: object
) -> AsyncIterator[Server]:
    fatal: list[BaseException] = []
    sections = replace(sections_of(folder, broker=broker), auth=auth)
    service = BrokerService(sections, fatal.append)
    await service.start()
    try:
        yield Server(service.address, service, service.endpoint.guard)
    finally:
        await service.close()
    assert not fatal, fatal


@contextlib.asynccontextmanager
async def name_server_with_users(auth: AuthConfig = AUTH) -> AsyncIterator[Server]:
    service = NamesrvService(NamesrvConfig(listen_port=0, bind_address="127.0.0.1"), auth=auth)
    await service.start()
    try:
        assert service._guard is not None
        yield Server(f"127.0.0.1:{service.port}", service, service._guard)
    finally:
        await service.close()


@pytest.fixture
def server(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Server]:
    """A broker."""
    return broker_with_users(tmp_path)


@pytest.fixture
def names() -> contextlib.AbstractAsyncContextManager[Server]:
    return name_server_with_users()


@pytest.fixture
@contextlib.asynccontextmanager
async def both(tmp_path: Path) -> AsyncIterator[tuple[Server, Server]]:
    """A name server, and a broker that registers there."""
    async with (
        name_server_with_users() as names,
        broker_with_users(tmp_path / "store", namesrv_addr=names.address) as server,
    ):
        yield names, server


@contextlib.asynccontextmanager
async def controller_with_users(folder: Path) -> AsyncIterator[Server]:
    guard = guard_of(AUTH)
    port = free_ports(10)
    config = ControllerConfig(
        controller_peers=f"n0-127.0.0.1:{port}",
        bind_address="127.0.0.1",
        controller_store_path=str(folder),
    )
    log = LocalLog("n0", Machine())
    service = ControllerService(config, replicated_log=log, guard=guard)
    await service.start()
    try:
        assert guard is not None
        await opened(service.gate)
        yield Server(service.config.self_peer.remoting_address, service, guard)
    finally:
        await service.close()


async def mqctl_at(name_server: str, *arguments: str) -> tuple[int, str]:
    """Exit code and all output of a command that signs as the admin."""
    keys = {"BATONMQ_ACCESS_KEY": "admin", "BATONMQ_SECRET_KEY": ADMIN.secret_key}
    ran = await asyncio.to_thread(
        CliRunner().invoke, cli, [*arguments, "-n", name_server], env=keys
    )
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return ran.exit_code, ran.output


def json_in(out: str) -> Any:
    """The document in a command's output."""
    return json.JSONDecoder().raw_decode(out[out.index("{") :])[0]


FIELDS = {
    "topic": "T", "a": "pg", "b": "T", "consumerGroup": "g", "group": "g", "groupName": "g",
    "srcGroup": "g", "destGroup": "h", "producerGroup": "pg", "brokerName": "x",
    "clusterName": "c",
}  # fmt: skip
BODIES: dict[int, bytes] = {
    RequestCode.HEART_BEAT: heartbeat("c", "T").encode(),
    RequestCode.LOCK_BATCH_MQ: b'{"consumerGroup":"g","clientId":"c","mqSet":'
    b'[{"topic":"T","brokerName":"b","queueId":0}]}',
    RequestCode.BATCH_ACK_MESSAGE: b'{"acks":[{"c":"g","t":"T"}]}',
    RequestCode.QUERY_ASSIGNMENT: b'{"consumerGroup":"g","topic":"T"}',
    RequestCode.SET_MESSAGE_REQUEST_MODE: b'{"consumerGroup":"g","topic":"T"}',
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: b'{"topicConfigList":[{"topicName":"T"}]}',
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: b'{"groupName":"g"}',
    225: b'{"groupConfigList":[{"groupName":"g"}]}',
}
BODIES[RequestCode.UNLOCK_BATCH_MQ] = BODIES[RequestCode.LOCK_BATCH_MQ]
OPEN_TO_USERS = {
    RequestCode.CHECK_CLIENT_CONFIG,
    RequestCode.BATON_WHO_AM_I,
    RequestCode.END_TRANSACTION,  # decided when the half message is read
}


async def walk(server: Server, codes: set[int]) -> None:
    """Every code: a stranger, a wrong secret, a user without any right, then with exactly the
    rights that the table asks for, with all of them but one, and a super user."""
    guard = server.guard
    book = next(book for name, book in guard._books.items() if name)
    known = book.get("shop")
    assert known is not None
    shop = known.user

    async def passes(code: int, given: list[Need], kind: str = "Normal") -> bool:
        actions: dict[str, list[str]] = {}
        for (resource, name), action in ((need.resources[0], need.actions[0]) for need in given):
            actions.setdefault(f"{resource}:{name or book.cluster or '*'}", []).append(action)
        entries = [PolicyEntry(resource=name, actions=each) for name, each in actions.items()]
        user = structs.replace(shop, user_type=kind, policies={})
        book.replace({"shop": merged(user, AclInfo(policies=[PolicyInfo(entries=entries)]))})
        # The handler answers, mostly that the request lacks a field.
        reply = await server.ask(USER, code, FIELDS, BODIES.get(code, b""))
        return reply.code != DENIED and "shop lacks" not in str(reply)

    for code in sorted(codes | {4711}):
        body = BODIES.get(code, b"")
        for who in (None, WRONG, USER):
            reply = await server.ask(who, code, FIELDS, body)
            if who is USER and code in OPEN_TO_USERS:
                continue
            assert reply.code == DENIED, (code, who, reply)
            assert SECRET not in str(reply)
        request = RemotingCommand.request(code, FIELDS, body)
        Signer(USER)(request)
        needs = needs_of(code, request)
        if not any(resource == "Node" for need in needs for resource, _ in need.resources):
            assert await passes(code, needs), code
            for need in needs:
                rest = [each for each in needs if each != need]
                assert code in OPEN_TO_USERS or not await passes(code, rest), (code, need)
        else:
            every = [Need(((kind, "*"),), ("All",)) for kind in ("Topic", "Group", "Cluster")]
            assert not await passes(code, every), code
        assert await passes(code, [], "Super"), code
        await passes(code, [])


async def test_every_code_of_a_broker_by_strangers_and_users(tmp_path):
    async with broker_with_users(tmp_path, recall_message_enable=True) as server:
        assert (await server.create(USER)).code == 0
        processors = server.service.endpoint.processors
        codes = set(processors.handlers) | set(processors.raw_handlers)
        assert codes >= {10, 11, 310, 320, 361, 3001, 200050} and codes <= set(RIGHTS)
        await walk(server, codes)


async def test_every_code_of_a_name_server_by_strangers_and_users(names):
    users = UserTable(Path("unused"))
    table = {"shop": {"username": "shop", "password": USER.secret_key}}
    body = json.dumps({"users": table}).encode()
    group = {"brokerName": "broker-a", "clusterName": "DefaultCluster"}
    unknown = ResponseCode.SERVICE_NOT_AVAILABLE
    for who, code in ((None, DENIED), (USER, unknown), (NODE, 0), (USER, DENIED)):
        reply = await names.ask(who, RequestCode.BATON_PUT_USERS, group, body)
        assert reply.code == code
    assert users.rulebook is None
    codes = set(names.service._server._processors.handlers)
    assert codes >= {103, 105, 318} and codes <= set(RIGHTS)
    await walk(names, codes)


async def test_every_code_of_a_controller_by_strangers_and_users(tmp_path):
    async with controller_with_users(tmp_path) as server:
        key = User(username="shop", password=USER.secret_key)
        server.guard.book("file", "").replace({"shop": key})
        codes = set(server.service._remoting_endpoint._server._processors.handlers)
        assert codes >= {1001, 1002, 1003, 1009, 1011, 1013} and codes <= set(RIGHTS)
        await walk(server, codes)
        # the first user of its own file, and the nodes
        for who in (ADMIN, NODE):
            assert (await server.ask(who, RequestCode.GET_CONTROLLER_CONFIG)).code == 0


async def test_every_grpc_call_of_a_controller_by_strangers_and_users(tmp_path):
    """Each method of its service needs the right of the remoting request that does the same."""
    rights = {OTHER: ("Get", {"GetReplicaInfo", "GetHistory"}), WRITER: ("Update", {"ElectMaster"})}

    def user_of(who: Credentials) -> User:
        actions = [rights[who][0]] if who in rights else []
        entries = [PolicyEntry(resource="Cluster:*", actions=actions)] if actions else []
        user = User(username=who.access_key, password=who.secret_key)
        return merged(user, AclInfo(policies=[PolicyInfo(entries=entries)]))

    def replace_secret(who: Credentials) -> Credentials:
        return Credentials(access_key=who.access_key, secret_key="wrong")

    async with controller_with_users(tmp_path) as server:
        users = {who.access_key: user_of(who) for who in (USER, *rights)}
        server.guard.book("file", "").replace(users)
        channel = grpc.aio.insecure_channel(server.service.config.self_peer.grpc_address)
        stub: Any = ControllerServiceStub(channel)
        service = controller_pb2.DESCRIPTOR.services_by_name["ControllerService"]

        async def code_of(method: Any, who: Credentials | None) -> int:
            signed = Signer(who).call_metadata(wall_ms()) if who is not None else None
            request = getattr(controller_pb2, method.input_type.name)()
            call = getattr(stub, method.name)
            if method.client_streaming:
                async for message in call(iter([request]), metadata=signed):
                    return int(message.refused.status.code)
                return 0
            return int((await call(request, metadata=signed, timeout=5)).status.code)

        for method in service.methods:
            for stranger in (None, USER, *map(replace_secret, rights)):
                assert await code_of(method, stranger) == DENIED, method.name
            name = method.name
            if name == "BrokerSession":  # it gets further: an empty Hello is no Hello
                with pytest.raises(grpc.aio.AioRpcError, match="begins with Hello"):
                    await code_of(method, NODE)
                continue
            assert await code_of(method, NODE) != DENIED, name
            for who, (_, calls) in rights.items():
                may = await code_of(method, who) != DENIED
                assert may is (name in calls), (name, who)
        unknown = channel.unary_unary(f"/{service.full_name}/Unknown")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"", metadata=Signer(NODE).call_metadata(wall_ms()))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        await channel.close()


@pytest.mark.parametrize("way", ["remoting", "gRPC"])
async def test_a_controller_notes_who_asked_for_an_election_and_a_clean(way, tmp_path, monkeypatch):
    """In the history, and each in a line of the audit log."""
    caller = f"asked by {way} from 127.0.0.1 as admin"
    why, reason = "", caller
    if way == "gRPC":  # whatever reason it gives, the caller stays visible
        why, reason = "r" * 300, "r" * (REASON_SIZE_MAX - len(caller) - 2) + f": {caller}"
    lines: list[tuple[str, str, str]] = []

    def note(_: AuditLog, user: str, peer: str, code: int, resource: str, result: str) -> None:
        assert peer.startswith("127.0.0.1:")
        lines.append((user, RequestCode(code).name, result))

    monkeypatch.setattr(AuditLog, "changed", note)
    async with controller_with_users(tmp_path) as server:
        names = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
        address = {"brokerAddress": "127.0.0.1:1"}
        ways = (
            (RequestCode.CONTROLLER_APPLY_BROKER_ID, {"registerCheckCode": "127.0.0.1:1;1"}),
            (RequestCode.CONTROLLER_REGISTER_BROKER, address),
        )
        for code, more in ways:
            fields = names | {"appliedBrokerId": "1", "brokerId": "1"} | more
            assert (await server.ask(None, code, fields)).code == DENIED
            assert (await server.ask(ADMIN, code, fields)).code == 0
        beat = names | {"brokerAddr": "127.0.0.1:1", "brokerId": "1", "epoch": "-1"}
        beat |= {"maxOffset": "0", "confirmOffset": "0"}
        broker = RemotingClient(sign=Signer(NODE))  # its connection stays
        heartbeat = RemotingCommand.request(RequestCode.BROKER_HEARTBEAT, beat)
        assert (await broker.invoke(server.address, heartbeat, 5000)).code == 0
        elect = names | {"brokerId": "1", "designateElect": "true"}
        clean = names | {"brokerControllerIdsToClean": "", "isCleanLivingBroker": "true"}
        channel = grpc.aio.insecure_channel(server.service.config.self_peer.grpc_address)
        stub: Any = ControllerServiceStub(channel)

        async def code_of(who: Credentials | None, code: RequestCode) -> int:
            elects = code == RequestCode.CONTROLLER_ELECT_MASTER
            if way == "remoting" or not elects:
                return (await server.ask(who, code, elect if elects else clean)).code
            signed = Signer(who).call_metadata(wall_ms()) if who is not None else None
            request = controller_pb2.ElectMasterRequest(
                broker_name="broker-a",
                broker_id=1,
                designate=True,
                expected_master_epoch=-1,
                reason=why,
            )
            reply = await stub.ElectMaster(request, metadata=signed, timeout=5)
            return int(reply.status.code)

        for code in (RequestCode.CONTROLLER_ELECT_MASTER, RequestCode.CLEAN_BROKER_DATA):
            assert await code_of(None, code) == DENIED
            assert await code_of(ADMIN, code) == 0
        assert await code_of(ADMIN, RequestCode.CLEAN_BROKER_DATA) == GONE
        reasons = {event.kind: event.reason for event in server.service.state.history}
        assert reasons["elected"] == reason
        cleaned = "the whole group, asked by remoting from 127.0.0.1 as admin"
        assert reasons["broker_cleaned"] == cleaned
        await channel.close()
        await broker.close()
        # a command whose user is refused ends at once, with the reason
        async with Admin("127.0.0.1:1") as admin:
            with pytest.raises(ResponseError, match="not signed"):
                await admin.controller(server.address).elect_master("", "broker-a", 1)
    assert lines == [
        ("admin", "CONTROLLER_ELECT_MASTER", "done"),
        ("admin", "CLEAN_BROKER_DATA", "done"),
        ("admin", "CLEAN_BROKER_DATA", f"code {GONE}"),
    ]


async def test_a_user_sends_and_reads_with_its_rights_and_no_further(server):
    await server.create(USER)
    assert await server.send(USER, "Orders") == DENIED
    await server.grant(USER, ("Topic:Orders", "Pub"))
    assert await server.send(USER, "Orders") == 0
    assert await server.send(USER, "Other") == DENIED
    send = send_header("Orders", 0, {})
    # the field of another code does not count
    refused = await server.ask(USER, 310, send | {"topic": "Orders", "b": "Other"}, b"x")
    assert refused.code == DENIED
    # a replayed signature does not carry over to other fields
    signed = RemotingCommand.request(310, send, b"x")
    Signer(USER)(signed)
    assert (await server.ask(None, 310, signed.ext, b"x")).code == 0
    assert (await server.ask(None, 310, signed.ext, b"y")).code == DENIED


async def test_an_allowed_send_is_decided_once_for_a_connection_and_topic(server):
    """Its signature is checked each time; another topic, body or user is decided by itself."""
    await server.create(OTHER)
    await server.admit(USER, ("Topic:A", "Pub"), ("Topic:B", "Pub"))
    client = RemotingClient()
    decided: list[int] = []
    check = server.guard.check

    def counted(code: int, *more: Any) -> str:
        decided.append(code)
        return check(code, *more)

    server.guard.check = counted

    async def send(who: Credentials, topic: str, body: bytes = b"x") -> int:
        request = RemotingCommand.request(310, send_header(topic, 0, {}), b"x")
        Signer(who)(request)
        request.body = body
        return (await client.invoke(server.address, request, 5000)).code

    assert [await send(USER, "A") for _ in range(3)] == [0, 0, 0] and len(decided) == 1
    assert await send(USER, "B") == 0 and len(decided) == 2
    assert await send(USER, "B") == 0 and len(decided) == 2
    assert await send(USER, "A", b"y") == DENIED and await send(USER, "C") == DENIED
    assert await send(OTHER, "A") == DENIED and len(decided) == 5
    relayed = RemotingCommand.request(310, send_header("A", 0, {}), b"x")
    Signer(USER)(relayed)
    relayed.ext["batonRelay"] = "1@10.0.0.1:1"  # not covered by the signature
    assert (await client.invoke(server.address, relayed, 5000)).code == DENIED
    assert (await server.grant(OTHER, ("Topic:C", "Pub"))).code == 0
    decided.clear()
    assert await send(USER, "A") == 0 and decided == [310], "rights have changed"
    await client.close()


async def test_r58_what_a_connection_is_allowed_is_kept_of_a_few_topics(server, monkeypatch):
    monkeypatch.setattr(guard, "DECIDED_MAX", 2)
    await server.admit(USER, ("*", "Pub"))
    seen: list[Connection] = []
    check = server.guard.check
    server.guard.check = lambda code, request, connection: (
        seen.append(connection) or check(code, request, connection)
    )
    client = RemotingClient(sign=Signer(USER))
    for number in range(5):
        request = RemotingCommand.request(310, send_header(f"T{number}", 0, {}), b"x")
        assert (await client.invoke(server.address, request, 5000)).code == 0
    await client.close()
    kept = [each[1] for each in seen[0].attachments.values() if isinstance(each, tuple)]
    assert len(seen) == 5 and [len(each) for each in kept] == [1, 1]


async def test_a_change_of_rights_counts_at_once_on_open_connections(server):
    await server.admit(USER, ("Topic:Orders", "Pub"))
    client = RemotingClient(sign=Signer(USER))

    async def code() -> int:
        request = RemotingCommand.request(310, send_header("Orders", 0, {}), b"x")
        return (await client.invoke(server.address, request, 5000)).code

    assert [await code(), await code()] == [0, 0]
    subject = {"subject": "User:shop", "resource": "Topic:Orders"}
    assert (await server.ask(ADMIN, RequestCode.AUTH_DELETE_ACL, subject)).code == 0
    assert await code() == DENIED
    await server.grant(USER, ("*", "All"))
    assert await code() == 0
    named = {"username": "shop"}
    for code_of_admin, change, wanted in (
        (3002, b'{"userStatus":"disable"}', DENIED),
        (3002, b'{"userStatus":"enable"}', 0),
        (3003, b"", DENIED),
    ):
        assert (await server.ask(ADMIN, code_of_admin, named, change)).code == 0
        assert await code() == wanted
    await client.close()


async def test_the_codes_of_mqadmin(server):
    assert (await server.create(USER)).code == 0
    assert (await server.create(USER)).code == 0  # the same again, as for each replica
    other = Credentials(access_key="shop", secret_key="another")
    assert (await server.create(other)).code == DENIED
    reply = await server.ask(ADMIN, 3004, {"username": "shop"})
    assert json.loads(reply.body) == {
        "username": "shop", "userType": "Normal", "userStatus": "enable"
    }  # fmt: skip
    assert (await server.ask(ADMIN, 3004, {"username": "none"})).body == b""
    reply = await server.ask(ADMIN, 3005, {"filter": ""})
    assert [each["username"] for each in json.loads(reply.body)] == ["admin", "shop"]
    await server.grant(USER, ("Topic:a", "Pub,Sub"), ("Group:g*", "Sub"))
    reply = await server.ask(ADMIN, 3009, {"subject": "User:shop"})
    (policy,) = json.loads(reply.body)["policies"]
    assert [each["resource"] for each in policy["entries"]] == ["Topic:a", "Group:g*"]
    reply = await server.ask(ADMIN, 3010, {"resourceFilter": "Group"})
    (acl,) = json.loads(reply.body)
    assert acl["subject"] == "User:shop" and len(acl["policies"][0]["entries"]) == 1
    # who may manage users may not make, change or delete a super user, nor itself one
    await server.grant(USER, ("Cluster:*", "Get,Update"))
    root = UserInfo(username="root", password="x", user_type="Super").encode()
    assert (await server.ask(USER, 3001, {"username": "root"}, root)).code == DENIED
    up = b'{"userType":"Super"}'
    assert (await server.ask(USER, 3002, {"username": "shop"}, up)).code == DENIED
    assert (await server.ask(USER, 3003, {"username": "admin"})).code == DENIED
    reply = await server.ask(USER, 3005, {})
    assert reply.code == 0
    for code in (RequestCode.BATON_GET_USERS, RequestCode.VIEW_MESSAGE_BY_ID):
        assert (await server.ask(USER, code, {"offset": "0"})).code == DENIED
    reply = await server.ask(USER, RequestCode.BATON_WHO_AM_I)
    assert json.loads(reply.body)["username"] == "shop"
    for bad in ("a b", "x/y"):
        body = UserInfo(password="p").encode()
        refused = await server.ask(ADMIN, 3001, {"username": bad}, body)
        assert refused.code == ResponseCode.INVALID_PARAMETER


async def test_the_last_super_user_stays(server):
    """Nor does it make itself a normal one; a second one may delete the first, or itself."""
    root = Credentials(access_key="root", secret_key="r")
    named = {"username": "admin"}
    down, off = b'{"userType":"Normal"}', b'{"userStatus":"disable"}'
    for code, body in ((3003, b""), (3002, down), (3002, off)):
        reply = await server.ask(ADMIN, code, named, body)
        assert reply.code == DENIED and "last super user" in (reply.remark or "")
    assert (await server.ask(ADMIN, 3005)).code == 0
    assert (await server.create(root, "Super")).code == 0
    assert (await server.ask(root, 3002, {"username": "root"}, off)).code == 0
    assert (await server.ask(ADMIN, 3003, named)).code == DENIED, "the other is disabled"
    on = b'{"userStatus":"enable"}'
    assert (await server.ask(ADMIN, 3002, {"username": "root"}, on)).code == 0
    assert (await server.ask(ADMIN, 3003, named)).code == 0
    assert (await server.ask(ADMIN, 3005)).code == DENIED
    assert (await server.ask(root, 3005)).code == 0


async def test_a_user_with_the_name_of_the_nodes_is_no_node(tmp_path):
    """The name with which nodes sign was changed to that of a user: its secret counts for nothing,
    neither in the message that a request reaches nor for a super user's changes."""
    entry = {"resource": "Cluster:*", "actions": ["All"], "decision": "Allow"}
    mine = {"username": "node", "password": "other", "policies": {"Custom": {"Cluster:*": entry}}}
    table = {"node": mine, "shop": mine | {"username": "shop"}}
    file = tmp_path / "config" / "users.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"users": table}))
    impostor = Credentials(access_key="node", secret_key="other")
    async with broker_with_users(tmp_path) as server:
        shop = Credentials(access_key="shop", secret_key="other")
        assert (await server.ask(shop, 3005)).code == 0
        root = UserInfo(username="root", password="x", user_type="Super").encode()
        assert (await server.ask(impostor, 3001, {"username": "root"}, root)).code == DENIED
        assert (await server.ask(NODE, 3005)).code == 0


async def test_a_stranger_learns_little_and_costs_little(server):
    """Long names come back cut, and are not kept for a connection."""
    long = "x" * 20_000
    stranger = Credentials(access_key=long, secret_key="x")
    reply = await server.ask(stranger, 105, {"topic": "T"})
    assert reply.code == DENIED and len(reply.remark or "") < 1000
    await server.create(USER)
    for code, name in ((310, "b"), (11, "topic"), (105, "topic"), (17, "topic")):
        reply = await server.ask(USER, code, FIELDS | {name: long})
        assert reply.code == DENIED and len(reply.remark or "") < 1000
    await server.grant(USER, ("*", "All"))
    connection = Mock(peer="127.0.0.1:1", attachments={})
    for topic in ("T", long):
        request = RemotingCommand.request(310, FIELDS | {"b": topic})
        Signer(USER)(request)
        assert server.guard.check(310, request, connection) == "shop"
    assert len(str(connection.attachments)) < 1000


async def test_users_are_there_after_a_restart_and_secrets_in_no_answer_or_log(tmp_path, caplog):
    caplog.set_level("DEBUG")
    async with broker_with_users(tmp_path) as server:
        await server.admit(USER, ("Topic:Orders", "Pub"))
        for code in (26, 28, 21, 201, 3004, 3005, 3010):
            reply = await server.ask(ADMIN, code, {"username": "shop"})
            assert reply.code == 0 and SECRET.encode() not in reply.body
    async with broker_with_users(tmp_path) as server:
        assert await server.send(USER, "Orders") == 0
    assert SECRET not in caplog.text
    file = tmp_path / "config" / "users.json"
    assert file.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert SECRET not in str(lines)
    made = [line for line in lines if line["request"] == "AUTH_CREATE_USER (3001)"]
    assert made[0]["user"] == "admin" and made[0]["result"] == "done"
    assert made[0]["resource"] == "username=shop" and made[0]["peer"].startswith("127.0.0.1:")


async def test_the_audit_log_has_refusals_escaped_and_not_without_end(tmp_path):
    async with broker_with_users(tmp_path) as server:
        odd = Credentials(access_key='a"\n{\u2028', secret_key="x")
        for _ in range(20):
            await server.ask(odd, 105, {"topic": "T\n"})
    lines = (tmp_path / "audit.log").read_bytes().split(b"\n")[:-1]
    found = [json.loads(line) for line in lines]
    refused = [line for line in found if line["result"].startswith("refused")]
    assert 1 <= len(refused) < 20 and refused[0]["user"] == 'a"\n{\u2028'
    assert all(line.isascii() for line in lines)


async def test_audit_only_lets_pass_what_it_writes_down(tmp_path):
    """Unsigned sends, of a user without the right, and with a wrong secret, while users are made;
    then the same files with the checks on."""

    async def codes(auth: AuthConfig) -> list[int]:
        async with broker_with_users(tmp_path, auth) as server:
            made = await server.create(USER)
            # a stranger still cannot create a user
            body = UserInfo(username="x", password="y").encode()
            assert (await server.ask(None, 3001, {"username": "x"}, body)).code == DENIED
            assert (await server.ask(WRONG, 3005)).code == DENIED
            sent = [await server.send(who) for who in (None, USER, WRONG)]
            sent.append((await server.ask(None, RequestCode.GET_ROUTEINFO_BY_TOPIC)).code)
            pull = {"consumerGroup": "g", "topic": "T"}
            sent.append((await server.ask(USER, RequestCode.GET_CONSUMER_LIST_BY_GROUP, pull)).code)
            return [made.code, *sent]

    made, *sends, route, consumers = await codes(structs.replace(AUTH, audit_only=True))
    assert [made, *sends] == [0, 0, 0, 0] and DENIED not in (route, consumers)
    made, *rest = await codes(AUTH)
    assert made == 0 and set(rest) == {DENIED}
    lines = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    results = [line["result"].partition(":")[0] for line in lines]
    assert results.count("would be refused") >= 3 and "refused" in results
    # What is checked nevertheless was refused, and the log must not say that it passed.
    of_users = (line for line in lines if line["request"].startswith("AUTH_"))
    assert {line["result"].partition(":")[0] for line in of_users} == {"done", "refused"}


async def test_without_authorization_a_user_may_all_but_read_and_change_users(tmp_path):
    """It must not make itself a super user."""
    auth = structs.replace(AUTH, authorization_enabled=False)
    async with broker_with_users(tmp_path, auth) as server:
        await server.create(USER)
        assert await server.send(USER) == 0
        back = {"offset": "0", "group": "g", "delayLevel": "0", "originTopic": "T"}
        assert (await server.ask(USER, 36, back)).code == 0
        assert await server.send(None) == DENIED
        body = UserInfo(username="shop", user_type="Super").encode()
        for code in (RequestCode.AUTH_UPDATE_USER, RequestCode.AUTH_GET_USER):
            assert (await server.ask(USER, code, {"username": "shop"}, body)).code == DENIED


async def test_the_audit_log_names_what_a_body_is_about_and_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("batonmq.auth.audit.FILE_BYTES", 300)
    async with broker_with_users(tmp_path) as server:
        body = b'{"groupName":"bar","retryMaxTimes":3}'
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        for _ in range(3):
            assert (await server.ask(ADMIN, code, body=body)).code == 0
    files = [tmp_path / "audit.log", tmp_path / "audit.log.1"]
    assert len(files) > 1, "rotated"
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert "Create/Update on Group:bar" in {line["resource"] for line in lines}


async def test_r31_r45_the_first_user_waits_for_disk_space_and_until_writes_are_taken(
    tmp_path, monkeypatch
):
    """1. Its record is refused: the mastership begins nevertheless. 2. There is space, but writes
    are refused: it would get no record, so no slave would ever have it."""
    with monkeypatch.context() as full:
        full.setattr(UserService, "put", Mock(side_effect=PutUnavailable("no disk space")))
        async with broker_with_users(tmp_path) as server:
            service, gate = server.service, server.service.path.gate
            assert gate.is_master and "admin" not in service.tables.users
            gate.refusal = Refusal(ResponseCode.SERVICE_NOT_AVAILABLE, "cut off")
            full.undo()
            end = service.store.appender.end
            service._put_first_user()
            assert "admin" not in service.tables.users
            gate.refusal = None
            await until(lambda: "admin" in service.tables.users)
            assert service.store.appender.end > end


async def test_a_new_secret_of_the_nodes_signs_towards_controllers_too(tmp_path):
    """Else controllers would refuse this broker once the former one counts no more."""
    file = tmp_path / "node.json"
    file.write_text('{"accessKey":"node","secretKey":"former"}')
    file.chmod(0o600)
    auth = structs.replace(
        AUTH,
        inner_client_authentication_credentials="",
        inner_client_authentication_credentials_file=str(file),
    )
    outside = sections_of(tmp_path / "store")
    sections = replace(
        outside,
        broker=structs.replace(outside.broker, enable_controller_mode=True),
        auth=auth,
        replicas=ReplicasConfig(controller_grpc_addr="127.0.0.1:1"),
    )
    service = BrokerService(sections, lambda error: None)
    guard, replication = service.endpoint.guard, service.replication
    assert guard is not None and guard._node_file is not None
    file.write_text('{"accessKey":"node","secretKey":"new"}')
    assert guard._node_file.reload()
    assert isinstance(replication, ControllerReplication)
    sign = replication.manager._config.sign
    new = Signer(Credentials(access_key="node", secret_key="new"))
    assert sign is not None and sign.call_metadata(0) == new.call_metadata(0)
    guard.close()


async def test_without_authentication_no_user_is_made(tmp_path):
    async with broker_with_users(tmp_path) as server:
        await server.create(USER)
    async with broker_with_users(tmp_path, AuthConfig()) as server:
        for code in (3001, 3004, 3005, 3010, RequestCode.BATON_GET_USERS):
            reply = await server.ask(None, code, {"username": "x"}, b"{}")
            assert reply.code == DENIED and "authenticationEnabled" in (reply.remark or "")
        assert await server.send(None) == 0


async def test_a_member_relays_and_only_nodes_name_the_client(tmp_path):
    async with (
        broker_with_users(tmp_path / "a") as member,
        broker_with_users(tmp_path / "b") as master,
    ):
        for server in (member, master):
            await server.admit(USER, ("Topic:T", "Pub"))
        path = master.service.path
        path.acks.begin_epoch(7)
        path.gate.opening(7)
        path.gate.open()
        member.service.relay.enabled = True
        member.service.path.gate.fence()
        member.service.path.gate.follow(7, master.address)
        java = {"language": LanguageCode.JAVA}
        send = send_header("T", 0, {})
        assert (await member.ask(USER, 310, send, b"x", **java)).code == 0
        assert (await member.ask(None, 310, send, b"x", **java)).code == DENIED
        made = {"username": "late"}
        body = UserInfo(username="late", password="p").encode()
        assert (await member.ask(ADMIN, 3001, made, body, **java)).code == 0
        assert "late" in master.service.tables.users
        # a client that names another one's address is refused, with any rights
        relayed = send | {RELAY_FIELD: "7@10.0.0.1:1"}
        assert (await master.ask(ADMIN, 310, relayed, b"x")).code == DENIED


async def test_name_servers_learn_users_from_the_master_of_each_group(both):
    names, server = both
    await until(lambda: bool(names.service.routes.members("broker-a")))
    await server.admit(USER, ("Topic:T", "Pub"))
    assert await server.send(USER) == 0

    async def route(who: Credentials | None, topic: str = "T") -> int:
        return (await names.ask(who, 105, {"topic": topic})).code

    guard = names.guard
    await until(lambda: (user := guard.user("shop")) and user.user.policies)
    assert await route(USER) == 0
    assert await route(None) == DENIED and await route(USER, "Other") == DENIED
    assert await route(ADMIN, "Other") == ResponseCode.TOPIC_NOT_EXIST
    await server.ask(ADMIN, 3003, {"username": "shop"})
    await until(lambda: guard.user("shop") is None)
    assert await route(USER) == DENIED


async def test_a_master_that_was_replaced_does_not_bring_back_a_user(names):
    """It was stopped, and gives name servers its table when it runs again."""

    async def put(epoch: int, *users: Credentials) -> int:
        table = UserWrapper(
            data_version=DataVersion(state_version=epoch),
            users={
                each.access_key: User(username=each.access_key, password=each.secret_key)
                for each in users
            },
        )
        name = {"brokerName": "broker-a", "clusterName": "C"}
        return (await names.ask(NODE, 60007, name, table.encode())).code

    topics = TopicConfigAndMappingSerializeWrapper(data_version=DataVersion(state_version=2))
    body = RegisterBrokerBody(topic_config_serialize_wrapper=topics).encode()
    newer = RouteRegistration("C", "broker-a", 0, "127.0.0.1:2", "127.0.0.1:3", body)
    client = RemotingClient(sign=Signer(NODE))
    try:
        assert await put(1, USER, OTHER) == 0
        assert (await client.invoke(names.address, newer.request(), 5000)).code == 0
        assert await put(2, OTHER) == 0
        assert await put(1, USER, OTHER) == ResponseCode.SYSTEM_ERROR
        assert names.guard.user("shop") is None and names.guard.user("other") is not None
    finally:
        await client.close()


async def test_half_messages_are_shown_to_producers_that_may_write_their_topic(server):
    """Any user can name any producer group: in a heartbeat, and in a half message of its own."""
    producers = server.service.features.producers
    for who, topic in ((USER, "Orders"), (OTHER, "Other")):
        await server.admit(who, (f"Topic:{topic}", "Pub"))

    def beat(client_id: str) -> RemotingCommand:
        shops = [ProducerData(group_name="shops")]
        body = HeartbeatData(client_id=client_id, producer_data_set=shops).encode()
        return RemotingCommand.request(RequestCode.HEART_BEAT, body=body)

    clients = {who.access_key: RemotingClient(sign=Signer(who)) for who in (OTHER, USER)}
    thief, shop = clients.values()
    assert (await thief.invoke(server.address, beat("thief"), 5000)).code == 0
    assert producers.channel("shops", "Orders") is None
    half = RemotingCommand.request(310, send_header("Other", 0, HALF) | {"a": "shops"}, b"h")
    assert (await thief.invoke(server.address, half, 5000)).code == 0
    assert producers.channel("shops", "Other") is not None
    assert producers.channel("shops", "Orders") is None
    assert (await shop.invoke(server.address, beat("shop"), 5000)).code == 0
    found = [producers.channel("shops", "Orders") for _ in range(4)]
    assert any(found)
    ports = {each.peer for each in found if each is not None}
    connection = shop.live_connection(server.address)
    assert connection is not None and ports == {connection.local}
    await server.ask(ADMIN, 3002, {"username": "shop"}, b'{"userStatus":"disable"}')
    assert producers.channel("shops", "Orders") is None
    for client in clients.values():
        await client.close()


@pytest.mark.parametrize(
    ("topic", "other_group", "other_topic"), [("vip", "bar_vip", ""), ("a_vip", "bar_a", "vip")]
)
async def test_pop_gives_no_retries_of_a_group_whose_name_begins_alike(
    both, topic, other_group, other_topic
):
    """`%RETRY%bar_vip` is the retry topic of group bar_vip, and POP's of group bar in topic vip.
    `%RETRY%bar_a_vip` is POP's of group bar in topic a_vip, and of group bar_a in topic vip."""
    names, server = both
    await server.admit(USER, (f"Topic:{topic}", "Sub"), ("Group:bar", "Sub"))
    groups = server.service.topics
    for name in ("bar", other_group):
        groups.put_group(SubscriptionGroupConfig(group_name=name))
    groups.of_group(f"%RETRY%bar_{topic}", 1)
    for name in filter(None, (f"%RETRY%bar_{topic}", other_topic, topic)):
        sent = await server.ask(ADMIN, 310, send_header(name, 0, {}), name.encode())
        assert sent.code == 0, sent
    # The send has made it.
    if other_group != f"bar_{topic}":
        assert groups.groups.delete(f"bar_{topic}")
    await until(lambda: names.guard.user("shop") is not None)
    user = ClientOptions(credentials=USER)
    async with PopConsumer("bar", name_servers=names.address, client_options=user) as consumer:
        await consumer.subscribe(topic)
        found = await consumer.receive(topic)
        assert [each.body for each in found] == [topic.encode()]


async def test_transactions_and_pop_with_the_least_rights(tmp_path):
    """A producer has Pub on the topic, a consumer Sub on topic and group: a commit, the broker's
    check of an undecided transaction, and a message that comes again from POP's retry topic."""
    baristas = Credentials(access_key="baristas", secret_key="b")
    thief = Credentials(access_key="thief", secret_key="t")
    async with (
        name_server_with_users() as names,
        broker_with_users(
            tmp_path,
            namesrv_addr=names.address,
            transaction_time_out=100,
            transaction_check_interval=100,
        ) as server,
    ):
        await server.admit(USER, ("Topic:Orders", "Pub"))
        await server.admit(baristas, ("Topic:Orders", "Sub"), ("Group:bar", "Sub"))
        await server.admit(thief, ("Topic:Other", "All"), ("Group:bar", "Sub"))
        guard = names.guard
        await until(lambda: (user := guard.user("thief")) and user.user.policies)

        def options(who: Credentials) -> dict[str, Any]:
            client = ClientOptions(credentials=who)
            return {"name_servers": names.address, "client_options": client}

        checked = asyncio.Event()

        def check(_: object) -> TransactionState:
            checked.set()
            return TransactionState.COMMIT

        async with (
            TransactionProducer("shops", check, **options(USER)) as producer,
            PopConsumer("bar", **options(baristas)) as consumer,
        ):
            for state in (TransactionState.COMMIT, TransactionState.UNKNOWN):
                message = Message.of("Orders", state.name.encode())
                done = await producer.send_in_transaction(message, lambda _, s=state: s)
                assert done.ended == (state is TransactionState.COMMIT)
            await checked.wait()
            await consumer.subscribe("Orders")
            found: dict[bytes, object] = {}
            while len(found) < 2:
                for each in await consumer.receive("Orders", invisible_ms=60_000):
                    found[each.body] = each
            # who may read other topics only can do nothing with its handle
            one, other = found.values()
            handle = one.properties["POP_CK"]
            named = {"consumerGroup": "bar", "topic": "Orders", "extraInfo": handle}
            for code in (200050, 200051, 200053, 200054, 11, 361, 36):
                ask = named | {"group": "bar", "offset": "0"}
                if code == 36:
                    place = str(one.physical_offset)
                    ask |= {"offset": place, "delayLevel": "0"}
                assert (await server.ask(thief, code, ask)).code == DENIED, code
            await consumer.ack(one)
            await consumer.change_invisible_time(other, 1)
            (again,) = await consumer.receive("Orders", timeout_ms=20_000)
            assert again.body == other.body
            await consumer.ack(again)
        # a half message is ended by who may write to its topic, wherever it is named
        half = RemotingCommand.request(310, send_header("Orders", 0, HALF), b"half")
        client = RemotingClient(sign=Signer(USER))
        sent = await client.invoke(server.address, half, 5000)
        await client.close()
        end = end_header(sent, "8", producerGroup="shops", msgId="half")
        for more in ({}, {"topic": "Other"}):
            reply = await server.ask(thief, RequestCode.END_TRANSACTION, end | more)
            assert reply.code == DENIED, reply
        assert (await server.ask(USER, RequestCode.END_TRANSACTION, end)).code == 0


async def test_a_producer_without_rights_fails_at_once_and_says_why(both):
    names, server = both
    await server.create(USER)
    await until(lambda: names.guard.user("shop") is not None)
    for who, why in ((USER, "shop lacks Pub/Sub/Get on Topic:T"), (WRONG, "not right")):
        client = ClientOptions(credentials=who)
        async with Producer("p", name_servers=names.address, client_options=client) as producer:
            # far longer than `play` waits: it does not try again
            with pytest.raises(ResponseError, match=why):
                await producer.send(Message.of("T", b"x"), timeout_ms=600_000)


async def test_a_name_server_that_knows_no_users_yet_asks_to_come_back(names):
    assert (await names.ask(USER, 105, {"topic": "T"})).code == (ResponseCode.SERVICE_NOT_AVAILABLE)
    assert (await names.ask(None, 105, {"topic": "T"})).code == DENIED


async def test_a_user_has_two_secrets_while_it_rotates(tmp_path):
    """Old and new one pass, on one connection as well, until the rotation ends; it is in the table
    after a restart, each step may come twice, and no answer has a secret."""
    new = Credentials(access_key="shop", secret_key=f"{SECRET}-new")
    third = Credentials(access_key="shop", secret_key=f"{SECRET}-third")
    send = send_header("T", 0, {})

    async def step(server: Server, name: str, secret: str = "", **more: str) -> int:
        body = UserInfo(password=secret).encode() if secret else b""
        fields = {"username": "shop", "step": name} | more
        return (await server.ask(ADMIN, RequestCode.BATON_ROTATE_USER, fields, body)).code

    async def codes(server: Server) -> list[int]:
        client, found = RemotingClient(), []
        for who in (USER, new, USER, new, third):
            request = RemotingCommand.request(310, send, b"x")
            Signer(who)(request)
            found.append((await client.invoke(server.address, request, 5000)).code)
        await client.close()
        return found

    async with broker_with_users(tmp_path) as server:
        await server.admit(USER, ("Topic:T", "Pub"))
        assert await codes(server) == [0, DENIED, 0, DENIED, DENIED]
        assert await step(server, "begin") != 0
        assert await step(server, "begin", USER.secret_key) == ResponseCode.INVALID_PARAMETER
        assert [await step(server, "begin", new.secret_key) for _ in range(2)] == [0, 0]
        assert await step(server, "begin", third.secret_key) == DENIED, "one at a time"
        assert await codes(server) == [0, 0, 0, 0, DENIED]
        reply = await server.ask(ADMIN, 3004, {"username": "shop"})
        rotation = json.loads(reply.body)["rotation"]
        assert rotation["oldUsed"] > 0 and rotation["oldUsedBy"].startswith("127.0.0.1:")
        assert SECRET.encode() not in reply.body
        assert (await server.create(USER)).code == 0, "the same again changes nothing"
    async with broker_with_users(tmp_path) as server:
        assert await codes(server) == [0, 0, 0, 0, DENIED]
        assert [await step(server, "cancel") for _ in range(2)] == [0, 0]
        assert await codes(server) == [0, DENIED, 0, DENIED, DENIED]
        await step(server, "begin", new.secret_key)
        assert [await step(server, "finish") for _ in range(2)] == [0, 0]
        assert await codes(server) == [DENIED, 0, DENIED, 0, DENIED]
        # the old one ends by itself at a time, also where a send was allowed before
        await step(server, "begin", third.secret_key)
        assert (await codes(server))[1] == 0
        await step(server, "begin", third.secret_key, until="1")
        assert await codes(server) == [DENIED] * 4 + [0]
        # an update of the password ends both
        body = UserInfo(password=USER.secret_key).encode()
        assert (await server.ask(ADMIN, 3002, {"username": "shop"}, body)).code == 0
        assert await codes(server) == [0, DENIED, 0, DENIED, DENIED]
        assert await step(server, "x") == ResponseCode.INVALID_PARAMETER
        # only a super user rotates one
        await server.grant(USER, ("Cluster:*", "Update"))
        fields = {"username": "admin", "step": "begin"}
        body = UserInfo(password="mine").encode()
        reply = await server.ask(USER, RequestCode.BATON_ROTATE_USER, fields, body)
        assert reply.code == DENIED


async def test_mqctl_rotates_a_secret_and_waits_for_the_last_client(both):
    names, server = both
    await all_servers_know(names)
    mqctl = partial(mqctl_at, names.address)
    await server.admit(USER, ("Topic:T", "Pub"))
    code, out = await mqctl("user", "rotate", "shop", "--json")
    secret = json_in(out)["secretKey"]
    assert code == 0 and len(secret) >= 24
    code, out = await mqctl("user", "show", "shop")
    assert code == 0 and "two secrets" in out and "never" in out and secret not in out
    assert await server.send(USER) == 0
    code, out = await mqctl("user", "show", "shop")
    assert "last used: 2" in out and "Topic:T" in out
    code, out = await mqctl("user", "rotate", "shop", "--finish")
    assert code == 1 and "127.0.0.1:" in out and "--force" in out
    assert await server.send(USER) == 0
    code, out = await mqctl("user", "rotate", "shop", "--finish", "--force")
    assert code == 0, out
    assert await server.send(USER) == DENIED
    new = Credentials(access_key="shop", secret_key=secret)
    assert await server.send(new) == 0
    assert "one secret" in (await mqctl("user", "show", "shop"))[1]
    for wrong in (
        ("list", "--finish"),
        ("rotate", "shop", "--finish", "--cancel"),
        ("rotate", "shop", "--oldFor", "soon"),
        ("rotate",),
    ):
        assert (await mqctl("user", *wrong))[0] == 2
    assert (await mqctl("user", "show", "none"))[0] == 1


async def test_mqctl_imports_acl_1_twice_and_leaves_alone_what_differs(both, tmp_path):
    file = tmp_path / "plain_acl.yml"
    account = "{accessKey: %s, secretKey: %s, topicPerms: [T=PUB], whiteRemoteAddress: 10.0.0.1}"
    accounts = [account % (USER.access_key, USER.secret_key), account % ("other", "file-secret")]
    file.write_text("accounts:\n" + "".join(f"  - {each}\n" for each in accounts))
    names, server = both
    await all_servers_know(names)
    await server.create(OTHER)

    async def run(*more: str) -> tuple[int, str, dict[str, Any]]:
        code, out = await mqctl_at(names.address, "acl", "import", str(file), "--json", *more)
        assert SECRET not in out and "file-secret" not in out
        return code, out, json_in(out)

    code, _, first = await run("--dry-run")
    users = {each["username"]: each for each in first["users"]}
    assert code == 0 and first["dryRun"] and users["shop"]["user"] == "new"
    assert users["shop"]["entries"][0]["state"] == "new"
    assert len([text for text in first["lost"] if "10.0.0.1" in text]) == 2
    assert server.guard.user("shop") is None, "nothing was changed"
    code, out, first = await run("--yes")
    assert code == 1 and "other in broker-a differs" in out
    assert await server.send(USER) == 0
    assert await server.send(OTHER) == DENIED
    before = server.service.tables.users.table["shop"]
    code, _, again = await run("--yes")
    users = {each["username"]: each for each in again["users"]}
    assert users["shop"]["user"] == "there"
    assert users["shop"]["entries"][0]["state"] == "same"
    assert server.service.tables.users.table["shop"] == before
    file.write_text("accounts: [{accessKey: late, secretKey: s}, {accessKey: bad}]")
    code, out = await mqctl_at(names.address, "acl", "import", str(file), "--yes")
    assert code == 1 and "account bad" in out and server.guard.user("late") is None


async def test_exported_metadata_have_users_and_rights_and_no_secret(both, tmp_path):
    """Into another cluster: a user that is new there gets a secret of its own, shown once; the
    rights are the same. Without --users nothing of that is imported."""
    file = tmp_path / "metadata.json"
    names, server = both
    await all_servers_know(names)
    await server.create(USER)
    create = ("acl", "create", USER.access_key, "-r", "Topic:T", "-a", "Pub")
    assert (await mqctl_at(names.address, *create))[0] == 0
    code, out = await mqctl_at(names.address, "exportMetadata", "-f", str(file))
    assert code == 0 and " 2 users" in out, out
    text = file.read_text()
    assert SECRET not in text and USER.secret_key not in text and "Topic:T" in text
    before = server.service.tables.users.table[USER.access_key]
    await server.ask(ADMIN, RequestCode.AUTH_DELETE_USER, {"username": USER.access_key})
    assert USER.access_key not in server.service.tables.users.table
    run = ("importMetadata", str(file), "--yes", "--json")
    code, out = await mqctl_at(names.address, *run)
    assert code == 0 and USER.access_key not in server.service.tables.users.table
    code, out = await mqctl_at(names.address, *run, "--users")
    document = json_in(out)
    assert code == 0 and document["users"] == 1, out
    assert set(document["newSecrets"]) == {USER.access_key}, "the admin was there"
    now = server.service.tables.users.table[USER.access_key]
    assert now.policies == before.policies and now.user_type == before.user_type
    secret = document["newSecrets"][USER.access_key]
    new = Credentials(access_key=USER.access_key, secret_key=secret)
    assert await server.send(new) == 0
    code, out = await mqctl_at(names.address, *run, "--users")
    document = json_in(out)
    assert (code, document["users"], document["newSecrets"]) == (0, 0, {})
    # A right that was taken away since does not come back, and is named.
    body = {"subject": f"User:{USER.access_key}", "resource": "Topic:T"}
    assert (await server.ask(ADMIN, RequestCode.AUTH_DELETE_ACL, body)).code == 0
    now = server.service.tables.users.table[USER.access_key]
    code, out = await mqctl_at(names.address, *run, "--users")
    assert f"User:{USER.access_key} has other rights" in out and code == 1
    assert server.service.tables.users.table[USER.access_key] == now


def test_a_slave_takes_the_table_over():
    master, slave = UserTable(Path("unused")), UserTable(Path("unused"))
    wrapper = UserWrapper.decode(
        b'{"users":{"a":{"username":"a","password":"p","policies":'
        b'{"Custom":{"Topic:T":{"resource":"Topic:T","actions":["Pub"],"decision":"Allow"}}}}}}'
    )
    assert master.replace_all(wrapper) and not master.replace_all(wrapper)
    assert slave.replace_all(UserWrapper.decode(master.wrapper().encode()))
    assert slave.table == master.table and slave.table["a"].policies["Custom"]
