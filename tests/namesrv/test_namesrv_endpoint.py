"""The name server over a real socket: golden requests of Java peers, and our own."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from local_log import alone

from batonmq.namesrv import endpoint
from batonmq.namesrv import service as namesrv_service
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.endpoint import ORDER_TOPIC_CONFIG, ROUTED_AT_ONCE, NamesrvEndpoint
from batonmq.namesrv.kv_config import KVConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.namesrv.state import (
    FORGOTTEN_AT_ONCE,
    LIVENESS_DEFAULT_MS,
    PERMS_AT_ONCE,
    MinIdChange,
    RegisterOutcome,
    RouteInfoManager,
)
from batonmq.namesrv.topics import LISTED_AT_ONCE
from batonmq.protocol.bodies import (
    ClusterInfo,
    DataVersion,
    KVTable,
    QueueData,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
    TopicList,
    TopicRouteData,
)
from batonmq.protocol.codes import MQ_VERSION_STANDARD_JSON, LanguageCode, RequestCode
from batonmq.protocol.errors import ConnectError
from batonmq.protocol.fastjson import loads
from batonmq.protocol.register_body import RegisterBrokerBody, crc32_of
from batonmq.remoting.command import TYPE_BINARY, TYPE_JSON, RemotingCommand, decode_frame
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.runtime_settings import ChangeRules, RuntimeSettings
from batonmq.runtime.sockets import check_port_free
from batonmq.runtime.turns import in_slices
from tests.protocol.compressed_body import compressed as compressed_form
from tests.protocol.compressed_body import registered
from tests.shared.ports import free_ports
from tests.shared.turns import Turns, counted_turns
from tests.shared.waiting import until

GOLDEN = Path(__file__).parents[1] / "golden"
MASTER = "127.0.0.1:30911"
WIDE = tuple(f"Topic{number}" for number in range(20_000))


def golden(name: str, tree: str = "java-5.3.3") -> list[tuple[RemotingCommand, RemotingCommand]]:
    """(request, response) pairs as the Java peer exchanged them."""
    examples = json.loads((GOLDEN / tree / "remoting" / name).read_text())["examples"]
    return [(_command(item["request"]), _command(item["response"])) for item in examples]


def _command(item: dict[str, str]) -> RemotingCommand:
    header, body = item["header"], bytes.fromhex(item["body_hex"])
    if header.startswith("hex:"):
        return decode_frame(bytes.fromhex(header[4:]), body, 1)
    return decode_frame(header.encode(), body, 0)


class Scene:
    """A name server, and clients that each hold one connection to it."""

    def __init__(self, service: NamesrvService) -> None:
        self.service = service
        self.address = f"127.0.0.1:{service.port}"
        self.client = RemotingClient()
        self.others: list[RemotingClient] = []

    def another(self) -> RemotingClient:
        client = RemotingClient()
        self.others.append(client)
        return client

    async def ask(
        self, request: RemotingCommand, client: RemotingClient | None = None
    ) -> RemotingCommand:
        return await (client or self.client).invoke(self.address, request, 3000)

    async def ext(self, code: RequestCode, body: bytes = b"", **ext: Any) -> RemotingCommand:
        return await self.ask(RemotingCommand.request(code, ext, body))


@contextlib.asynccontextmanager
async def name_server(**settings: Any) -> AsyncIterator[Scene]:
    service = NamesrvService(NamesrvConfig(listen_port=0, bind_address="127.0.0.1", **settings))
    await service.start()
    scene = Scene(service)
    try:
        yield scene
    finally:
        for client in (scene.client, *scene.others):
            await client.close()
        await service.close()


def registration(
    addr: str,
    broker_id: int,
    *,
    epoch: int = 1,
    compressed: bool = False,
    crc: int | None = None,
    topics: tuple[str, ...] = ("TopicA", "TopicB"),
    perm: int = 6,
) -> RemotingCommand:
    wrapper = TopicConfigAndMappingSerializeWrapper(
        data_version=DataVersion(counter=1, state_version=epoch, timestamp=1),
        topic_config_table={
            name: TopicConfig(topic_name=name, perm=perm, read_queue_nums=4, write_queue_nums=4)
            for name in topics
        },
    )
    register = RegisterBrokerBody(topic_config_serialize_wrapper=wrapper)
    body = compressed_form(register) if compressed else register.encode()
    ext = {
        "brokerName": "broker-a",
        "brokerAddr": addr,
        "clusterName": "DefaultCluster",
        "haServerAddr": addr[:-1] + "2",
        "brokerId": broker_id,
        "batonRelays": True,
        "enableActingMaster": False,
        "compressed": False,  # Java says so even when it compressed
        "bodyCrc32": crc32_of(body) if crc is None else crc,
    }
    return RemotingCommand.request(RequestCode.REGISTER_BROKER, ext, body)


def goodbye(addr: str = MASTER) -> RemotingCommand:
    names = {"clusterName": "DefaultCluster", "brokerName": "broker-a", "brokerAddr": addr}
    return RemotingCommand.request(RequestCode.UNREGISTER_BROKER, {**names, "brokerId": 0})


class Desk:
    """The handlers of a name server, called by hand."""

    def __init__(self, **settings: Any) -> None:
        config = NamesrvConfig(**settings)
        self.routes = RouteInfoManager(
            delete_topic_with_broker_registration=config.delete_topic_with_broker_registration
        )
        rules = ChangeRules(frozenset(), frozenset(), "", None)
        self.now_ms = 0
        self.endpoint = NamesrvEndpoint(
            self.routes, KVConfig(None), RuntimeSettings(config, rules), lambda: self.now_ms, print
        )
        self.connection: Any = Mock(peer="10.0.0.1:1", closed=False)

    async def register(self, request: RemotingCommand) -> RemotingCommand:
        reply = self.endpoint.register_broker(request, self.connection)
        return await reply if isinstance(reply, Awaitable) else reply

    def taken(self) -> list[tuple[int, RegisterOutcome, bool]]:
        """Of each part from now on: its topics, its outcome, and whether Topic0 had a route."""
        take, parts = self.routes.register, list[tuple[int, RegisterOutcome, bool]]()

        def noted(registration: Any, body: RegisterBrokerBody, now_ms: int) -> Any:
            count = len(body.topic_config_serialize_wrapper.topic_config_table)
            routed = self.routes.route("Topic0") is not None
            registered = take(registration, body, now_ms)
            parts.append((count, registered.outcome, routed))
            return registered

        self.routes.register = noted  # type: ignore[method-assign]
        return parts

    async def until_parts_of(self, topic: str) -> None:
        async with asyncio.timeout(20):
            while self.routes.route(topic) is None:  # noqa: ASYNC110  a turn each
                await asyncio.sleep(0)

    async def until_forgotten(self) -> list[int]:
        """How many topics are listed after each turn."""
        counts = [len(self.routes.all_topics())]
        async with asyncio.timeout(20):
            while self.endpoint._forgets:
                await asyncio.sleep(0)
                counts.append(len(self.routes.all_topics()))
        return counts


def shape(reply: RemotingCommand) -> tuple[Any, ...]:
    return (reply.code, reply.remark, sorted(reply.ext), reply.has_ext)


@pytest.mark.parametrize("tree", ["java-5.3.3", "java-5.3.3-binary"])
async def test_golden_registrations_and_routes(tree: str) -> None:
    """The Java broker's registrations; then routes and cluster info, byte for byte as Java's name
    server answered them. One tree was recorded with a slave (id 2); the topic was made later."""
    async with name_server() as scene:
        for request, expected in golden("namesrv-103.json", tree):
            assert shape(await scene.ask(request)) == shape(expected)
        if tree == "java-5.3.3":
            request, _ = golden("namesrv-103.json", tree)[-1]
            request.ext |= {"brokerId": "2", "brokerAddr": "127.0.0.1:31011"}
            await scene.ask(request)
        queue = QueueData(broker_name="broker-a", read_queue_nums=4, write_queue_nums=4)
        scene.service.routes.register_topic("GoldTopic", [queue])
        asked = [*golden("namesrv-105.json", tree), *golden("namesrv-106.json", tree)]
        for request, expected in asked:
            reply = await scene.ask(request)
            assert shape(reply) == shape(expected)
            assert reply.body == expected.body


async def test_golden_topic_list_delete_and_unregister() -> None:
    async with name_server() as scene:
        for request, _ in golden("namesrv-103.json"):
            await scene.ask(request)
        (request, expected) = golden("namesrv-206.json")[0]
        reply = await scene.ask(request)
        assert shape(reply) == shape(expected)
        theirs = set(loads(expected.body)["topicList"])
        assert set(loads(reply.body)["topicList"]) <= theirs
        for name in ("namesrv-216.json", "namesrv-104.json"):
            for request, expected in golden(name):
                assert shape(await scene.ask(request)) == shape(expected)
        assert scene.service.routes.all_topics() == []


async def test_r32_a_late_goodbye_of_an_earlier_process_removes_nothing() -> None:
    """The old process's 104 waits in its socket while the new one registers over another. One over
    a connection that never registered counts: the broker dialled again to say so."""
    async with name_server() as scene:
        new = scene.another()
        await scene.ask(registration(MASTER, 0))
        await scene.ask(registration(MASTER, 0), new)
        assert (await scene.ask(goodbye())).code == 0
        assert scene.service.routes.members("broker-a") == {0: MASTER}
        for connection in (new, scene.another()):
            await scene.ask(registration(MASTER, 0), new)
            assert (await scene.ask(goodbye(), connection)).code == 0
            assert scene.service.routes.members("broker-a") == {}


async def test_a_compressed_body_is_recognised_though_the_header_denies_it() -> None:
    async with name_server() as scene:
        reply = await scene.ask(registration(MASTER, 0, compressed=True))
        assert reply.code == 0
        route = TopicRouteData.decode(
            (await scene.ext(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TopicA")).body
        )
        assert route.broker_datas[0].broker_addrs == {0: MASTER}
        assert route.queue_datas[0].write_queue_nums == 4


async def test_a_garbled_body_is_refused_and_the_connection_lives() -> None:
    async with name_server() as scene:
        reply = await scene.ask(registration(MASTER, 0, crc=12345))
        assert (reply.code, reply.remark) == (1, "crc32 not match")
        request = registration(MASTER, 0, crc=0)
        request.body = b"\x78\x9c not zlib"
        assert (await scene.ask(request)).code == 1
        assert (await scene.ask(registration(MASTER, 0, crc=0))).code == 0


async def test_a_slave_is_told_the_master_and_its_ha_address() -> None:
    async with name_server() as scene:
        await scene.ask(registration(MASTER, 0))
        reply = await scene.ask(registration("127.0.0.1:31011", 2))
        assert reply.ext == {"masterAddr": MASTER, "haServerAddr": "127.0.0.1:30912"}


async def test_r32_a_late_close_of_the_dead_masters_socket_keeps_the_new_master() -> None:
    """Over sockets: the new master registers, then the old one's connection ends."""
    async with name_server() as scene:
        old, new = scene.another(), scene.another()
        await scene.ask(registration(MASTER, 0, epoch=1), old)
        await scene.ask(registration("127.0.0.1:31011", 0, epoch=2), new)
        gone = asyncio.Event()
        hook = scene.service._server.on_disconnect
        assert hook is not None

        def watched(connection: Any) -> None:
            hook(connection)
            gone.set()

        scene.service._server.on_disconnect = watched
        await old.close()
        async with asyncio.timeout(5):
            await gone.wait()
        assert scene.service.routes.members("broker-a") == {0: "127.0.0.1:31011"}


async def test_old_clients_get_bare_keys_and_new_ones_standard_json() -> None:
    async with name_server() as scene:
        await scene.ask(registration(MASTER, 0))
        request = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TopicA"})
        request.version = MQ_VERSION_STANDARD_JSON
        assert b'"brokerAddrs":{"0":"127' in (await scene.ask(request)).body
        request.version -= 1
        assert b'"brokerAddrs":{0:"127' in (await scene.ask(request)).body
        request.ext["acceptStandardJsonOnly"] = "true"
        assert b'"brokerAddrs":{"0":"127' in (await scene.ask(request)).body
        request = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TopicA"})
        assert b'"brokerAddrs":{"0":"127' in (await scene.ask(request)).body


async def test_cluster_info_members_and_versions() -> None:
    async with name_server() as scene:
        await scene.ask(registration(MASTER, 0))
        info = ClusterInfo.decode((await scene.ext(RequestCode.GET_BROKER_CLUSTER_INFO)).body)
        assert info.cluster_addr_table == {"DefaultCluster": ["broker-a"]}
        assert info.broker_addr_table["broker-a"].broker_addrs == {0: MASTER}
        names = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
        group = await scene.ext(RequestCode.GET_BROKER_MEMBER_GROUP, **names)
        assert loads(group.body)["brokerMemberGroup"]["brokerAddrs"] == {"0": MASTER}
        version = DataVersion(counter=1, state_version=1, timestamp=1)
        ids = {**names, "brokerAddr": MASTER, "brokerId": 0}
        reply = await scene.ext(RequestCode.QUERY_DATA_VERSION, version.encode(), **ids)
        assert reply.ext == {"changed": "false"}
        assert DataVersion.decode(reply.body) == version
        ids["brokerAddr"] = "127.0.0.1:1"
        reply = await scene.ext(RequestCode.QUERY_DATA_VERSION, version.encode(), **ids)
        assert (reply.ext, reply.body) == ({"changed": "true"}, b"")
        assert (await scene.ext(RequestCode.BROKER_HEARTBEAT, **ids)).code == 0


async def test_key_values_survive_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "kvConfig.json")

    async with name_server(kv_config_path=path) as scene:
        pair = {"namespace": "ORDER_TOPIC_CONFIG", "key": "TopicA"}
        missing = await scene.ext(RequestCode.GET_KV_CONFIG, **pair)
        assert missing.code == 22
        await scene.ext(RequestCode.PUT_KV_CONFIG, **pair, value="broker-a:4")
        assert (await scene.ext(RequestCode.GET_KV_CONFIG, **pair)).ext == {"value": "broker-a:4"}
    async with name_server(kv_config_path=path, order_message_enable=True) as scene:
        listed = await scene.ext(
            RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="ORDER_TOPIC_CONFIG"
        )
        assert KVTable.decode(listed.body).table == {"TopicA": "broker-a:4"}
        reply = await scene.ask(registration(MASTER, 0))
        assert KVTable.decode(reply.body).table == {"TopicA": "broker-a:4"}
        route = await scene.ext(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TopicA")
        assert TopicRouteData.decode(route.body).order_topic_conf == "broker-a:4"
        pair = {"namespace": "ORDER_TOPIC_CONFIG", "key": "TopicA"}
        assert (await scene.ext(RequestCode.DELETE_KV_CONFIG, **pair)).code == 0
        assert (await scene.ext(RequestCode.GET_KV_CONFIG, **pair)).code == 22
    async with name_server(kv_config_path=path) as scene:
        assert (await scene.ext(RequestCode.GET_KV_CONFIG, **pair)).code == 22
        for namespace, code in ((pair["namespace"], 0), ("nothing", 22)):
            listed = await scene.ext(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace=namespace)
            assert listed.code == code


async def test_config_is_read_changed_and_kept(tmp_path: Path) -> None:
    path = str(tmp_path / "namesrv.properties")

    async with name_server(config_store_path=path) as scene:
        text = (await scene.ext(RequestCode.GET_NAMESRV_CONFIG)).body.decode()
        assert "enableAllTopicList=true" in text
        update = RequestCode.UPDATE_NAMESRV_CONFIG
        off = b"enableAllTopicList=false\nenableTopicList=false\n"
        assert (await scene.ext(update, off)).code == 0
        assert (await scene.ext(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)).code == 1
        asked = await scene.ext(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="DefaultCluster")
        assert (asked.code, asked.remark) == (1, "disable")
        assert (await scene.ext(update, b"kvConfigPath=/etc/passwd\n")).code == 16
        assert (await scene.ext(update, b"listenPort=1\n")).code == 16
        assert (await scene.ext(update, b"enableAllTopicList=perhaps\n")).code == 1
        assert (await scene.ext(update, b"#" * 65_537)).code == 1, "R58"
    async with name_server(config_store_path=path) as scene:
        assert (await scene.ext(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)).code == 1


async def test_a_setting_that_was_changed_counts_from_the_next_registration_on() -> None:
    async with name_server() as scene:

        async def topics() -> set[str]:
            listed = await scene.ext(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
            return set(TopicList.decode(listed.body).topic_list)

        await scene.ask(registration(MASTER, 0))
        await scene.ask(registration(MASTER, 0, epoch=2, topics=("TopicB",)))
        assert await topics() == {"TopicA", "TopicB"}
        change = b"deleteTopicWithBrokerRegistration=true\n"
        assert (await scene.ext(RequestCode.UPDATE_NAMESRV_CONFIG, change)).code == 0
        await scene.ask(registration(MASTER, 0, epoch=3, topics=("TopicB",)))
        assert await topics() == {"TopicB"}


async def test_permissions_and_topics_by_code() -> None:
    async with name_server() as scene:
        await scene.ask(registration(MASTER, 0))
        name = {"brokerName": "broker-a"}
        wiped = await scene.ext(RequestCode.WIPE_WRITE_PERM_OF_BROKER, **name)
        assert wiped.ext == {"wipeTopicCount": "2"}
        added = await scene.ext(RequestCode.ADD_WRITE_PERM_OF_BROKER, **name)
        assert added.ext == {"addTopicCount": "2"}
        route = b'{"queueDatas":[{"brokerName":"broker-a","perm":6,"topicSysFlag":%d}]}'
        await scene.ext(RequestCode.REGISTER_TOPIC_IN_NAMESRV, route % 2, topic="Manual")
        await scene.ext(RequestCode.REGISTER_TOPIC_IN_NAMESRV, route % 3, topic="TopicB")
        for code, topics in ((311, ["TopicB"]), (312, ["TopicB", "Manual"]), (313, ["Manual"])):
            listed = await scene.ext(RequestCode(code))
            assert loads(listed.body)["topicList"] == topics
        listed = await scene.ext(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="DefaultCluster")
        assert set(loads(listed.body)["topicList"]) == {"TopicA", "TopicB", "Manual"}
        listed = await scene.ext(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
        system = {"brokerAddr": MASTER, "topicList": ["DefaultCluster", "broker-a"]}
        assert loads(listed.body) == system
        await scene.ext(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="Manual")
        missing = await scene.ext(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="Manual")
        assert missing.code == 17


async def test_missing_fields_and_unknown_codes() -> None:
    async with name_server() as scene:
        assert (await scene.ext(RequestCode.GET_ROUTEINFO_BY_TOPIC)).code == 1
        assert (await scene.ext(RequestCode.SEND_MESSAGE)).code == 3


async def test_a_taken_port_is_an_os_error() -> None:
    async with name_server() as scene:
        second = NamesrvService(
            NamesrvConfig(listen_port=scene.service.port, bind_address="127.0.0.1")
        )
        with pytest.raises(OSError, match="is taken by process"):
            await second.start()


async def test_a_silent_broker_is_dropped_with_its_connection() -> None:
    async with name_server(scan_not_active_broker_interval=10) as scene:
        request = registration(MASTER, 0)
        request.ext["heartbeatTimeoutMillis"] = "1"
        await scene.ask(request)
        connection = await scene.client.connection(scene.address)
        closed = asyncio.Event()
        connection.on_close.append(lambda _: closed.set())
        async with asyncio.timeout(5):
            await closed.wait()
        assert scene.service.routes.members("broker-a") == {}
        with pytest.raises(ConnectError):
            await connection.invoke(registration(MASTER, 0), 100)


async def test_r58_of_what_a_broker_registers_a_name_server_keeps_what_routes_show() -> None:
    """A topic with attributes of a megabyte costs as much as any other."""
    desk, request = Desk(), registration(MASTER, 0)
    body = registered(request.body)
    for topic in body.topic_config_serialize_wrapper.topic_config_table.values():
        topic.attributes = {"+a": "x" * 10_000}
        topic.topic_filter_type = topic.topic_name = "y" * 10_000
    body.filter_server_list = ["z" * 10_000, *(f"10.0.0.9:{n}" for n in range(1_000))]
    request.body = body.encode()
    request.ext.pop("bodyCrc32", None)
    assert (await desk.register(request)).code == 0
    kept = [topic for table in desk.routes._topics._of_group.values() for topic in table.values()]
    assert kept and max(len(topic.encode()) for topic in kept) < 500
    ((_, servers),) = desk.routes._filter_servers.items()
    assert len(servers) < 20 and max(map(len, servers)) < 20


async def test_any_question_of_a_broker_is_a_sign_of_its_life() -> None:
    desk, request = Desk(), registration(MASTER, 0)
    request.ext["heartbeatTimeoutMillis"] = "1000"
    await desk.register(request)
    ids = {"clusterName": "DefaultCluster", "brokerAddr": MASTER}
    version = DataVersion(counter=1, state_version=1, timestamp=1).encode()
    for code, ask in (
        (RequestCode.QUERY_DATA_VERSION, desk.endpoint.query_data_version),
        (RequestCode.BROKER_HEARTBEAT, desk.endpoint.broker_heartbeat),
    ):
        desk.now_ms += 900
        ask(RemotingCommand.request(code, ids, version), desk.connection)
        desk.now_ms += 900
        assert list(desk.routes.scan(desk.now_ms)) == []
    desk.now_ms += 101
    assert list(desk.routes.scan(desk.now_ms)) == [(MASTER, desk.connection)]


def with_controller(folder: Path, port: int) -> NamesrvService:
    """A name server with the only controller, at that port."""
    config = NamesrvConfig(
        listen_port=0, bind_address="127.0.0.1", enable_controller_in_namesrv=True
    )
    return NamesrvService(config, alone(folder, port))


async def test_a_controller_that_cannot_start_leaves_the_port_free(tmp_path: Path) -> None:
    port = free_ports(3)
    service = with_controller(tmp_path, port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(OSError, match=f"port {port}"):
            await service.start()
    check_port_free("127.0.0.1", service.port)


async def test_an_embedded_controller_answers_at_its_own_door(tmp_path: Path) -> None:
    port = free_ports(3)
    service = with_controller(tmp_path, port)
    await service.start()
    client = RemotingClient()
    try:
        request = RemotingCommand.request(RequestCode.CONTROLLER_GET_METADATA_INFO)
        reply = await client.invoke(f"127.0.0.1:{port}", request, 3000)
        assert reply.ext["peers"] == f"n0:127.0.0.1:{port};"
    finally:
        await client.close()
        await service.close()


async def test_replica_routes_are_shown_to_stock_clients_if_switched_on() -> None:
    async def names(scene: Scene, language: LanguageCode) -> list[str]:
        request = RemotingCommand.request(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TopicA"})
        request.language = language
        route = TopicRouteData.decode((await scene.ask(request)).body)
        return [queue.broker_name for queue in route.queue_datas]

    async with name_server() as scene:
        await scene.ask(registration("10.0.0.1:10911", 0))
        await scene.ask(registration("10.0.0.2:10911", 2))
        assert await names(scene, LanguageCode.JAVA) == ["broker-a"]
        switch = b"replicaRoutes=true"
        assert (await scene.ext(RequestCode.UPDATE_NAMESRV_CONFIG, switch)).code == 0
        assert await names(scene, LanguageCode.JAVA) == ["broker-a", "broker-a%1"]
        assert await names(scene, LanguageCode.PYTHON) == ["broker-a"]


BAD_SERVER_NAMES = ("a/b", "..", "a\nb", "a\0b", "x" * 229, "a#b")


@pytest.mark.parametrize("field", ["brokerName", "clusterName", "brokerAddr", "haServerAddr"])
async def test_r46_a_registration_with_a_bad_name_is_refused(field: str) -> None:
    async with name_server() as scene:
        bad = ("a\nb", "a\x1b[2J", "x" * 256, "\u2028") if "Addr" in field else BAD_SERVER_NAMES
        for name in bad:
            request = registration(MASTER, 0)
            request.ext[field] = name
            reply = await scene.ask(request)
            assert reply.code == 1 and repr(name[:64]) in (reply.remark or "")
        assert not scene.service.routes.clusters()
        assert (await scene.ask(registration(MASTER, 0))).code == 0


async def test_r46_topics_that_no_broker_has_are_left_out_of_the_routes() -> None:
    legal = ("T", "%RETRY%g", "%RETRY%g+t", "DefaultCluster", "брокер", "a.b", "x" * 255)
    odd = ("a/b", "..", "", "a\nb", "a\0b", "x" * 256, "é" * 128)
    async with name_server() as scene:
        assert (await scene.ask(registration(MASTER, 0, topics=legal + odd))).code == 0
        assert set(scene.service.routes.all_topics()) == set(legal)
        queue = QueueData(broker_name="broker-a", perm=6, read_queue_nums=1, write_queue_nums=1)
        body = TopicRouteData(queue_datas=[queue]).encode()
        for topic in odd[:2]:
            reply = await scene.ext(RequestCode.REGISTER_TOPIC_IN_NAMESRV, body, topic=topic)
            assert reply.code == 1
        assert set(scene.service.routes.all_topics()) == set(legal)
        for count, code in ((4096, 0), (4097, 1)):
            body = TopicRouteData(queue_datas=[queue] * count).encode()
            reply = await scene.ext(RequestCode.REGISTER_TOPIC_IN_NAMESRV, body, topic="Many")
            assert reply.code == code and ("Many" in scene.service.routes.all_topics())


async def test_r58_a_topic_with_more_queues_than_brokers_have_is_left_out_of_the_routes() -> None:
    """Clients make an object of each."""
    desk, many = Desk(), registration(MASTER, 0, topics=("A", "B", "C"))
    many.body = many.body.replace(b'"writeQueueNums":4', b'"writeQueueNums":65537', 1)
    many.ext["bodyCrc32"] = "0"
    await desk.register(many)
    assert desk.routes.all_topics() == ["B", "C"]
    queue = QueueData(broker_name="broker-a", read_queue_nums=65_537)
    request = RemotingCommand.request(217, {"topic": "T"})
    request.body = TopicRouteData(queue_datas=[queue]).encode()
    refused = desk.endpoint.register_topic(request, desk.connection)
    assert "at most 65536 queues" in (refused.remark or "")


async def test_r58_a_value_of_megabytes_is_refused_with_an_answer() -> None:
    async with name_server() as scene:
        for size in (100_000, 1_000_000, 15_000_000):
            for kind in (TYPE_JSON, TYPE_BINARY):
                put = RemotingCommand.request(
                    RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v" * size}
                )
                put.serialize_type = kind
                reply = await scene.ask(put)
                assert reply.code == 1 and "allowed are" in (reply.remark or "")
        assert (await scene.ext(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="n")).code == 22


@pytest.mark.parametrize("form", ["plain", "compressed"])
async def test_r58_a_large_registration_is_taken_in_parts(form: str) -> None:
    """Each part counts as changed, whatever came before it."""
    desk = Desk()
    routes, parts = desk.routes, desk.taken()
    for epoch, perm in ((1, 6), (2, 4)):
        request = registration(
            MASTER, 0, epoch=epoch, compressed=form == "compressed", topics=WIDE, perm=perm
        )
        assert (await desk.register(request)).code == 0
        counts = [count for count, *_ in parts]
        assert sum(counts) == 20_000 and max(counts) <= 8_192
        parts.clear()
        for topic in (WIDE[0], WIDE[10_000], WIDE[-1]):
            route = routes.route(topic)
            assert route is not None and route.queue_datas[0].perm == perm
        version = routes.data_version("DefaultCluster", MASTER)
        assert version == DataVersion(counter=1, state_version=epoch, timestamp=1)


@pytest.mark.parametrize("way", ["good-bye", "silence", "closed session"])
async def test_r58_a_group_of_many_topics_is_gone_at_once_and_forgotten_in_turns(way: str) -> None:
    desk = Desk()
    assert (await desk.register(registration(MASTER, 0, topics=WIDE))).code == 0
    turns = Turns()
    if way == "good-bye":
        turns.run(desk.endpoint.unregister_broker, goodbye(), desk.connection)
    elif way == "silence":
        desk.now_ms = LIVENESS_DEFAULT_MS + 1
        turns.run(desk.endpoint.scan)
    else:
        turns.run(desk.endpoint.connection_lost, desk.connection)
    assert desk.routes.members("broker-a") == {} and desk.routes.clusters() == {}
    assert not any(map(desk.routes.route, WIDE))
    counts = await desk.until_forgotten()
    assert turns.lines < len(WIDE) and counts[-1] == 0
    assert max(a - b for a, b in pairwise([len(WIDE), *counts])) <= FORGOTTEN_AT_ONCE


async def test_r58_topics_are_forgotten_also_after_an_error(monkeypatch: Any) -> None:
    desk = Desk()
    await desk.register(registration(MASTER, 0, topics=WIDE))
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="a bug"):
        patch.setattr(desk.routes, "forget", Mock(side_effect=ValueError("a bug")))
        desk.endpoint.unregister_broker(goodbye(), desk.connection)
    desk.endpoint.connection_lost(desk.connection)
    assert (await desk.until_forgotten())[-1] == 0


async def test_r58_a_large_registration_that_deletes_is_taken_in_parts() -> None:
    """What it does not name is there until its last part."""
    other = (*WIDE[:5_000], *(f"Other{number}" for number in range(15_000)))
    desk = Desk(delete_topic_with_broker_registration=True)
    await desk.register(registration(MASTER, 0, topics=WIDE))
    parts = desk.taken()
    assert (await desk.register(registration(MASTER, 0, epoch=2, topics=other))).code == 0
    counts, _, routed = zip(*parts, strict=True)
    assert sum(counts) == 20_000 and max(counts) <= 8_192 and all(routed)
    assert {topic for topic in (*WIDE, *other) if desk.routes.route(topic)} == set(other)
    left = await desk.until_forgotten()
    assert set(desk.routes.all_topics()) == set(other)
    assert max((a - b for a, b in pairwise(left)), default=0) <= FORGOTTEN_AT_ONCE


@pytest.mark.parametrize("later", ["another registration", "a good-bye"])
async def test_r58_what_comes_between_the_parts_of_a_registration_wins(later: str) -> None:
    desk = Desk(delete_topic_with_broker_registration=later == "another registration")
    early = registration(MASTER, 0, topics=WIDE)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(desk.register(early))
        await desk.until_parts_of("Topic0")
        assert not first.done()
        if later == "a good-bye":
            desk.endpoint.unregister_broker(goodbye(), desk.connection)
        else:
            assert (await desk.register(registration(MASTER, 0, epoch=2))).code == 0
    reply = first.result()
    assert reply.code == 1 and "registered again" in (reply.remark or "")
    await desk.until_forgotten()
    if later == "a good-bye":
        assert desk.routes.members("broker-a") == {} and desk.routes.all_topics() == []
    else:
        version = desk.routes.data_version("DefaultCluster", MASTER)
        assert version == DataVersion(counter=1, state_version=2, timestamp=1)
        assert set(desk.routes.all_topics()) == {"TopicA", "TopicB"}


async def test_r58_a_large_registration_that_is_ignored_ends_with_its_part() -> None:
    """A new master came between the parts of the deposed one. If the new one is lost before the
    last part, that part alone must not count as the whole."""
    successor = "127.0.0.1:31011"
    desk = Desk(delete_topic_with_broker_registration=True)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(desk.register(registration(MASTER, 0, topics=WIDE)))
        await desk.until_parts_of("Topic0")
        await desk.register(registration(successor, 0, epoch=2))
        assert not first.done()
        parts = desk.taken()
    reply = first.result()
    assert reply.code == 0 and "masterAddr" not in reply.ext
    assert [outcome for _, outcome, _ in parts] == [RegisterOutcome.IGNORED]
    assert desk.routes.members("broker-a") == {0: successor}
    await desk.until_forgotten()
    assert set(desk.routes.all_topics()) == {"TopicA", "TopicB"}


async def test_a_known_version_in_parts_leaves_permissions_by_hand_as_they_are() -> None:
    desk = Desk()
    for _ in range(2):
        assert (await desk.register(registration(MASTER, 0, topics=WIDE))).code == 0
        desk.routes.wipe_write_perm("broker-a")
        await in_slices(desk.routes.set_perms)
    assert (await desk.register(registration(MASTER, 0, topics=WIDE))).code == 0
    for topic in (WIDE[0], WIDE[10_000], WIDE[-1]):
        route = desk.routes.route(topic)
        assert route is not None and route.queue_datas[0].perm == 4


def perms(desk: Desk) -> list[int]:
    """Of all topics that have a route."""
    routes = filter(None, map(desk.routes.route, WIDE))
    return [queue.perm for route in routes for queue in route.queue_datas]


@pytest.mark.counts_turns
async def test_r58_permissions_of_a_large_group_change_in_turns() -> None:
    """Changes that are asked for at the same time come one after the other; what is registered
    meanwhile keeps its own permissions."""
    desk = Desk()
    ask, named = RemotingCommand.request, {"brokerName": "broker-a"}
    wipe = lambda: desk.endpoint.change_write_perm(ask(205, named), desk.connection)  # noqa: E731
    add = lambda: desk.endpoint.change_write_perm(ask(327, named), desk.connection)  # noqa: E731
    await desk.register(registration(MASTER, 0, topics=WIDE, perm=2))
    with counted_turns() as turns:
        wiped, added, again = await asyncio.gather(wipe(), add(), wipe())
    assert turns.lines < len(WIDE) and turns.count > len(WIDE) / PERMS_AT_ONCE
    assert wiped.ext == again.ext == {"wipeTopicCount": str(len(WIDE))}
    assert added.ext == {"addTopicCount": str(len(WIDE))}
    assert perms(desk) == [4] * len(WIDE)
    task = asyncio.ensure_future(add())
    await asyncio.sleep(0)
    assert not task.done()
    await desk.register(registration(MASTER, 0, epoch=2, topics=WIDE, perm=2))
    await task
    assert perms(desk) == [2] * len(WIDE)


@pytest.mark.counts_turns
async def test_r58_many_topics_are_listed_in_turns() -> None:
    desk = Desk()
    await desk.register(registration(MASTER, 0, topics=WIDE))
    for ask, cluster, topics in (
        (desk.endpoint.all_topics, "", WIDE),
        (desk.endpoint.topics_by_cluster, "DefaultCluster", WIDE),
        (desk.endpoint.topics_by_cluster, "another", ()),
    ):
        with counted_turns() as turns:
            reply = await ask(RemotingCommand.request(0, {"cluster": cluster}), desk.connection)
        assert reply.body == TopicList(topic_list=list(topics)).encode()
        assert turns.lines < 400 and turns.count > len(WIDE) / LISTED_AT_ONCE
    flagged = registration(MASTER, 0, epoch=2, topics=WIDE)
    flagged.body = flagged.body.replace(b'"topicSysFlag":0', b'"topicSysFlag":1')
    flagged.ext["bodyCrc32"] = "0"
    for topics in ((), WIDE):
        with counted_turns() as turns:
            request = RemotingCommand.request(311)
            reply = await desk.endpoint.unit_topics(request, desk.connection)
        assert reply.body == TopicList(topic_list=list(topics)).encode()
        assert turns.lines < 3 * LISTED_AT_ONCE and turns.count > len(WIDE) / LISTED_AT_ONCE
        await desk.register(flagged)


async def test_r58_a_list_ends_once_no_frame_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million topics are 130 MB, and a stranger can register as many."""
    monkeypatch.setattr(endpoint, "FRAME_SIZE_MAX", 10_000)
    desk = Desk()
    await desk.register(registration(MASTER, 0, topics=WIDE))
    reply = await desk.endpoint.all_topics(RemotingCommand.request(206), desk.connection)
    assert 10_000 < len(reply.body) < 20_000


@pytest.mark.counts_turns
@pytest.mark.parametrize("version", [0, MQ_VERSION_STANDARD_JSON])
async def test_r58_a_route_to_many_groups_is_made_in_turns(version: int) -> None:
    desk = Desk(replica_routes=True, order_message_enable=True)
    await desk.endpoint._kv.put(ORDER_TOPIC_CONFIG, "TopicA", "g-1:4")
    for number in range(3 * ROUTED_AT_ONCE):
        request = registration(f"10.0.0.1:{number}", 0)
        request.ext["brokerName"] = f"g-{number}"
        await desk.register(request)
    expected = desk.routes.route("TopicA", replica_routes=True)
    expected.order_topic_conf = "g-1:4"
    request = RemotingCommand.request(0, {"topic": "TopicA"})
    request.version = version
    with counted_turns() as turns:
        reply = await desk.endpoint.route(request, desk.connection)
    assert turns.lines < 40 * ROUTED_AT_ONCE and turns.count >= 3
    assert TopicRouteData.decode(reply.body) == expected
    assert (reply.body == expected.encode()) == (version > 0)


async def test_r58_addresses_that_a_stranger_registered_are_dialled_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise they would take all descriptors of the name server."""
    monkeypatch.setattr(namesrv_service, "NOTICES_MAX", 2)
    async with name_server() as scene:
        service, first = scene.service, free_ports(2)
        listens, *others = (f"127.0.0.1:{port}" for port in (service.port, first, first + 1))
        change = MinIdChange("broker-a", 0, MASTER, (listens, *others))
        service._notify(change)
        assert len(service._notices) == 2
        await until(lambda: not len(service._notices))
        assert service._client.live_connection(listens) is not None
        service._notify(change)
        assert len(service._notices) == 1, (
            "a member with a connection gets its notice above the limit, too"
        )
