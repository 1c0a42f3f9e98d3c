"""No request ends a name server or a controller, or spoils what they keep (R46, R53, R58)."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from local_log import alone
from odd_requests import NAMES, SEEDS, OddRequests

from batonmq.controller.raft.log import Machine
from batonmq.controller.raft.node import RaftLog
from batonmq.controller.service import ControllerService, _raft_settings
from batonmq.namesrv.config import NamesrvConfig
from batonmq.namesrv.service import NamesrvService
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.protocol.bodies import (
    DataVersion,
    TopicConfig,
    TopicConfigAndMappingSerializeWrapper,
    TopicRouteData,
)
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.register_body import RegisterBrokerBody
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from tests.shared.ports import free_ports
from tests.shared.waiting import opened

KNOWN = {
    "brokerName": ("broker-a",),
    "clusterName": ("C", "C", "x"),
    "brokerAddr": ("127.0.0.1:1",),
    "brokerAddress": ("127.0.0.1:1",),
    "haServerAddr": ("127.0.0.1:2",),
    "registerCheckCode": ("127.0.0.1:1;1",),
    "brokerId": ("0", "1", "2"),
    "appliedBrokerId": ("1", "2"),
    "namespace": ("n", "ORDER_TOPIC_CONFIG"),
}
BIG = 60_000
INTS = (0, 1, -1, 2**31 - 1, -(2**31))
LONGS = (*INTS, 2**63 - 1, -(2**63))
LONG = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64}
RENAMED = {RequestCode.UPDATE_NAMESRV_CONFIG, RequestCode.UPDATE_CONTROLLER_CONFIG}
"""Settings may rightly change how it answers."""


class Scene:
    """A name server, its controller, or both."""

    def __init__(self, names: NamesrvService | None, controller: ControllerService | None) -> None:
        self.names, self.controller = names, controller
        self.client = RemotingClient()

    def servers(self) -> list[tuple[RemotingServer, str]]:
        found = []
        if self.names is not None:
            found.append((self.names._server, f"127.0.0.1:{self.names.port}"))
        if self.controller is not None:
            peer = self.controller.config.self_peer
            found.append((self.controller._remoting_endpoint._server, peer.remoting_address))
        return found

    async def ask(self, address: str, code: int, body: bytes = b"", **ext: str) -> RemotingCommand:
        return await self.client.invoke(address, RemotingCommand.request(code, ext, body), 10_000)


def controller_of(folder: Path, base: int) -> ControllerService:
    def fatal(what: str) -> None:
        raise AssertionError(what)

    config = alone(folder / "controller", base)
    log = RaftLog(_raft_settings(config), Machine(), on_fatal=fatal)
    return ControllerService(config, replicated_log=log)


@asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[Scene]:
    names = controller = None
    if kind != "controller":
        names = NamesrvService(
            NamesrvConfig(
                listen_port=0,
                bind_address="127.0.0.1",
                kv_config_path=str(folder / "kv.json"),
                config_store_path=str(folder / "namesrv.properties"),
            )
        )
    if kind != "name server":
        controller = controller_of(folder, free_ports(10))
    if names is not None and controller is not None:
        names.controller = controller
    scene = Scene(names, controller)
    await (names or controller).start()
    try:
        if controller is not None:
            await opened(controller.gate)
        yield scene
    finally:
        await scene.client.close()
        await (names or controller).close()


async def check_names(scene: Scene, address: str) -> None:
    topics = {name: TopicConfig(topic_name=name) for name in ("T1", "T2")}
    wrapper = TopicConfigAndMappingSerializeWrapper(
        data_version=DataVersion(state_version=2**60), topic_config_table=topics
    )
    body = RegisterBrokerBody(topic_config_serialize_wrapper=wrapper).encode()
    ids = {"clusterName": "Behind", "brokerName": "behind", "brokerAddr": "127.0.0.1:77"}
    register = RequestCode.REGISTER_BROKER
    reply = await scene.ask(address, register, body, **ids, brokerId="0", haServerAddr="h:1")
    assert reply.code == 0, reply
    route = await scene.ask(address, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T1")
    assert "behind" in [each.broker_name for each in TopicRouteData.decode(route.body).broker_datas]
    pair = {"namespace": "behind", "key": "k"}
    assert (await scene.ask(address, RequestCode.PUT_KV_CONFIG, **pair, value="v")).code == 0
    assert (await scene.ask(address, RequestCode.GET_KV_CONFIG, **pair)).ext["value"] == "v"
    assert (await scene.ask(address, RequestCode.GET_BROKER_CLUSTER_INFO)).code == 0
    assert scene.names is not None
    scene.names.routes.check_invariants()


async def check_controller(scene: Scene, address: str) -> None:
    ids = {"clusterName": "Behind", "brokerName": "behind", "brokerAddress": "127.0.0.1:77"}
    offered = await scene.ask(address, RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, **ids)
    number = offered.ext["nextBrokerId"]
    code = f"127.0.0.1:77;{number}"
    for request, more in (
        (RequestCode.CONTROLLER_APPLY_BROKER_ID, {"registerCheckCode": code}),
        (RequestCode.CONTROLLER_REGISTER_BROKER, {}),
    ):
        ext = {**ids, "appliedBrokerId": number, "brokerId": number, **more}
        reply = await scene.ask(address, request, **ext)
        assert reply.code == 0, reply
    assert (await scene.ask(address, RequestCode.CONTROLLER_GET_METADATA_INFO)).code == 0
    body = b'["behind"]'
    reply = await scene.ask(address, RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body)
    assert b"127.0.0.1:77" in reply.body
    assert scene.controller is not None
    scene.controller.state.check_invariants()
    assert len(scene.controller.state.groups) <= len(NAMES) + 2


def odd_message(kind: Any, rng: random.Random) -> Any:
    """A message whose fields are at and beyond limits."""
    message = kind()
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE or rng.random() < 0.2:
            continue
        value: Any = rng.choice(LONGS if field.type in LONG else INTS)
        if field.type == FieldDescriptor.TYPE_STRING:
            known = ("broker-a", "life", "", '{"a":1}', "x" * BIG)
            value = rng.choice((*NAMES, *known))
        elif field.type == FieldDescriptor.TYPE_BOOL:
            value = rng.random() < 0.5
        elif field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64):
            value = abs(value)
        if field.is_repeated:
            getattr(message, field.name).extend([value] * rng.choice((1, 300)))
        else:
            setattr(message, field.name, value)
    return message


async def odd_calls(scene: Scene, seed: int) -> None:
    """Each gRPC method with odd fields; the answer is a message or the status of a call."""
    assert scene.controller is not None
    rng = random.Random(seed)
    address = scene.controller.config.self_peer.grpc_address
    service = pb.DESCRIPTOR.services_by_name["ControllerService"]
    streams: list[Any] = []
    async with grpc.aio.insecure_channel(address) as channel:

        async def ask(method: Any) -> None:
            kind = getattr(pb, method.input_type.name)
            reply_of = getattr(pb, method.output_type.name).FromString
            path = f"/{service.full_name}/{method.name}"
            send = kind.SerializeToString
            if method.client_streaming:
                messages = [odd_message(pb.Hello, rng), odd_message(pb.Heartbeat, rng)]
                first = pb.BrokerMessage(hello=messages[0])
                wire = [first, pb.BrokerMessage(heartbeat=messages[1])]
                # Some end at once, some live until then: the next round comes meanwhile.
                streams.append(channel.stream_stream(path, send, reply_of)(iter(wire), timeout=0.5))
                return
            call: Any = channel.unary_unary(path, send, reply_of)(odd_message(kind, rng), timeout=5)
            code = await call.code()
            assert code is not grpc.StatusCode.UNKNOWN, f"{method.name}: {await call.details()}"

        for _ in range(20):
            await asyncio.gather(*map(ask, service.methods))
        await asyncio.gather(*(stream.code() for stream in streams))


async def attack(scene: Scene, seed: int) -> None:
    for server, address in scene.servers():
        processors = server._processors
        codes = {*processors.handlers, *processors.raw_handlers} - RENAMED
        odd = await OddRequests(codes, seed, KNOWN).send(scene.client, address, rounds=12)
        assert not odd, "\n".join(odd)
        assert cast(Any, server)._dispatcher.memory.held_bytes < 64 << 20
    if scene.controller is not None:
        await odd_calls(scene, seed)


async def check(scene: Scene) -> None:
    if scene.names is not None:
        await check_names(scene, scene.servers()[0][1])
    if scene.controller is not None:
        await check_controller(scene, scene.servers()[-1][1])


def kept_of(scene: Scene) -> tuple[Any, Any]:
    """What a start finds again: key-values and registrations. Elections go on meanwhile."""
    table = scene.names._kv._table if scene.names is not None else None
    groups = scene.controller.state.groups if scene.controller is not None else {}
    facts = {
        name: [(one.broker_id, one.register_check_code, one.address) for one in group.replicas]
        for name, group in groups.items()
    }
    return table, facts


@pytest.mark.request_fuzz
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["name server", "controller", "both"])
def test_r46_r53_r58_after_odd_requests_of_every_code_all_works(tmp_path, kind, seed):
    async def play(*steps: Callable[[Scene], Awaitable[None]]) -> Any:
        async with running(kind, tmp_path) as scene:
            for step in steps:
                await step(scene)
            return kept_of(scene)

    kept = asyncio.run(play(lambda scene: attack(scene, seed), check))

    async def same(scene: Scene) -> None:
        assert kept_of(scene) == kept

    asyncio.run(play(same, check))
