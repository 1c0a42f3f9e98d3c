"""The gRPC port of a controller over TLS: both sides show a certificate, a renewed one counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest

from batonmq.controller.endpoints import grpc_endpoint
from batonmq.controller.endpoints.grpc_endpoint import GrpcEndpoint
from batonmq.proto.controller.v1 import controller_pb2 as pb
from batonmq.proto.controller.v1 import controller_pb2_grpc as pb_grpc
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.incarnation import incarnation_of
from batonmq.replicas_manager.session import ControllerChannels, channel_credentials
from batonmq.runtime.authority import Authority
from batonmq.runtime.tls import Tls, pem_of
from tests.shared.certificates import HOSTS, authority, client_tls, node_tls


@pytest.fixture
def made(tmp_path: Path) -> Authority:
    return authority(tmp_path / "tls")


@asynccontextmanager
async def serving(tls: Tls | None, switches: Mock | None = None) -> AsyncIterator[str]:
    endpoint = GrpcEndpoint(Mock(), Mock(), Mock(), switches or Mock(), Mock(), tls)
    try:
        yield f"127.0.0.1:{await endpoint.listen('127.0.0.1:0')}"
    finally:
        await endpoint.close()


async def answered(channel: grpc.aio.Channel, seconds: float = 10) -> bool:
    """Whether a call reaches the endpoint. It refuses a registration without a name."""
    stub = pb_grpc.ControllerServiceStub(channel)
    try:
        reply = await stub.RegisterBroker(pb.RegisterBrokerRequest(), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return False
    return bool(reply.status.code == ResponseCode.CONTROLLER_INVALID_REQUEST)


async def send(address: str, data: bytes) -> None:
    """Sends bytes that are no handshake, and waits until the endpoint closes the connection."""
    reader, writer = await asyncio.open_connection(*address.rsplit(":", 1))
    writer.write(data)
    await asyncio.wait_for(reader.read(), 20)
    writer.close()


async def test_only_who_shows_a_certificate_of_the_authority_is_served(made, tmp_path):
    other = authority(tmp_path / "other")
    late = str(made.issue("late.pem", ["broker/a/9"], HOSTS, days=-1).path)
    strange = str(other.issue("x.pem", ["broker/a/1"], HOSTS).path)
    async with serving(node_tls(made, "controller/n0")) as address:
        broker = ControllerChannels(node_tls(made, "broker/a/1"))
        assert await answered(broker.channel(address))
        for client in (
            client_tls(made),
            client_tls(made, cert_path=late, key_path=late),
            client_tls(made, cert_path=strange, key_path=strange),
            client_tls(other),
        ):
            credentials = channel_credentials(pem_of(client))
            async with grpc.aio.secure_channel(address, credentials) as channel:
                assert not await answered(channel)
        async with grpc.aio.insecure_channel(address) as channel:
            assert not await answered(channel)
        await send(address, b"\x16\x03\x01\x00\x04" + b"xxxx")
        assert await answered(broker.channel(address))
        await broker.close()


async def test_a_handshake_that_never_ends_is_cut_off(made, monkeypatch):
    """The record begins a message of 66,051 bytes. The limit is 5 s; here it is shorter."""
    options = dict(grpc_endpoint._SERVER_OPTIONS) | {"grpc.server_handshake_timeout_ms": 200}
    monkeypatch.setattr(grpc_endpoint, "_SERVER_OPTIONS", tuple(options.items()))
    async with serving(node_tls(made, "controller/n0")) as address:
        await send(address, b"\x16\x03\x01\x40\x00" + bytes(range(256)) * 64)


async def test_sessions_outlive_a_renewed_certificate_and_new_ones_use_it(made):
    controller, broker = node_tls(made, "controller/n0"), node_tls(made, "broker/a/1")
    async with serving(controller) as address:
        first = ControllerChannels(broker)
        assert await answered(first.channel(address))
        made.renew()
        assert controller.reload() and broker.reload()
        assert await answered(first.channel(address))
        await first.drop(address)
        assert await answered(first.channel(address))
        await first.close()


@pytest.mark.parametrize("dials", [False, True])
@pytest.mark.parametrize("mode", ["enforcing", "permissive"])
async def test_a_permissive_broker_finds_the_way_that_a_controller_takes(made, mode, dials):
    """Controllers are changed one by one: a broker dials each the other way if one way fails."""
    tls = node_tls(made, "broker/a/1", server_mode="permissive", tls_enable=dials)
    broker = ControllerChannels(tls)
    async with serving(node_tls(made, "controller/n0", server_mode=mode)) as address:
        async with asyncio.timeout(20):
            while not await broker.connected(address):
                pass
        assert await answered(broker.channel(address))
        await broker.close()


async def test_a_certificate_speaks_for_its_own_group_and_an_admins_elects(made):
    """Who holds the key of one replica can neither register as another group's, nor elect its
    master, nor change its set. A certificate that names no node is not bound. Who asked for an
    election is its reason in the history."""
    proof = "x" * 32
    who = {"broker_name": "b", "incarnation": incarnation_of(proof), "secret": proof}
    master = {"broker_name": "b", "master_incarnation": incarnation_of(proof), "secret": proof}
    calls = {
        "RegisterBroker": pb.RegisterBrokerRequest(**who),
        "AlterSyncStateSet": pb.AlterSyncStateSetRequest(**master),
        "ElectMaster": pb.ElectMasterRequest(broker_name="b", broker_id=1, designate=True),
        "ReportEvent": pb.ReportEventRequest(broker_name="b"),
    }
    allowed = {
        "broker/a/1": set(),
        "broker/b/2": set(calls),
        "controller/n1": set(),
        "namesrv/n1": set(),
        "admin": {"ElectMaster"},
    }

    async def hello(stub: Any) -> bool:
        async def messages() -> AsyncIterator[pb.BrokerMessage]:
            yield pb.BrokerMessage(hello=pb.Hello(broker_id=1, **who))

        async for message in stub.BrokerSession(messages(), timeout=20):
            return bool(message.refused.status.code != ResponseCode.NO_PERMISSION)
        return True

    switches = Mock()
    async with serving(node_tls(made, "controller/n0"), switches) as address:
        for name, codes in allowed.items():
            channels = ControllerChannels(node_tls(made, name))
            stub: Any = channels.stub(address)
            passed = set()
            for method, request in calls.items():
                try:
                    reply = await getattr(stub, method)(request, timeout=20)
                except grpc.aio.AioRpcError:
                    passed.add(method)  # the mock behind the endpoint cannot answer
                    continue
                assert reply.status.code == ResponseCode.NO_PERMISSION, (name, method)
                assert name in reply.status.remark
            assert passed == codes, name
            if not name.startswith("broker/b"):
                assert not await hello(stub)
            await channels.close()
    asked = [call.args[0].reason for call in switches.elect.call_args_list]
    who = "asked by gRPC from 127.0.0.1 with the certificate of"
    assert asked == [f"{who} broker/b/2", f"{who} admin"]
