"""Controller calls against scripted controllers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from fake_cluster import CLUSTER, Scripted, refuse

from batonmq import Admin
from batonmq.client.admin.controller_admin import GROUPS_A_PAGE, grpc_address
from batonmq.client.errors import ClientError, NoControllerLeaderError
from batonmq.protocol.bodies import (
    BrokerReplicasInfo,
    ElectMasterResponseBody,
    ReplicaIdentity,
    ReplicasInfo,
)
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ConnectError, ResponseError
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection
from tests.shared.waiting import until


class FakeController(Scripted):
    """Answers 1005 with the given leader; state calls only if it is the leader."""

    leader: "FakeController | None" = None

    async def serve(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        leader = self.leader
        if request.code == RequestCode.CONTROLLER_GET_METADATA_INFO:
            ext = {"group": "g1", "isLeader": "true" if leader is self else "false", "peers": ""}
            if leader is not None:
                ext |= {"controllerLeaderId": "n1", "controllerLeaderAddress": leader.address}
            return RemotingCommand.response_to(request, ext=ext)
        if request.code in (
            RequestCode.GET_CONTROLLER_CONFIG,
            RequestCode.UPDATE_CONTROLLER_CONFIG,
        ):
            return RemotingCommand.response_to(request, body=b"a=1\n# c\nb = x=y\n")
        if leader is not self:
            return refuse(request, ResponseCode.CONTROLLER_NOT_LEADER, "not leader")
        if request.code == RequestCode.CONTROLLER_GET_SYNC_STATE_DATA:
            info = ReplicasInfo(
                in_sync_replicas=[ReplicaIdentity(broker_id=1, broker_address="h:1", alive=True)],
                master_broker_id=1,
                master_epoch=4,
            )
            names = [name for name in json.loads(request.body) if name]
            if json.loads(request.body) == []:  # as Java's ControllerRequestProcessor
                return refuse(request, ResponseCode.SYSTEM_ERROR, "not set any response code")
            table = dict.fromkeys(names, info)
            body = BrokerReplicasInfo(replicas_info_table=table).encode()
            return RemotingCommand.response_to(request, body=body)
        if request.code == RequestCode.CONTROLLER_ELECT_MASTER:
            designated = request.ext["brokerId"] != "-1"
            ext = {
                "masterBrokerId": request.ext["brokerId"] if designated else "1",
                "masterAddress": "h:2",
                "masterEpoch": "5",
                "syncStateSetEpoch": "9",
            }
            code = 0 if designated else ResponseCode.CONTROLLER_MASTER_STILL_EXIST
            body = ElectMasterResponseBody(sync_state_set=[2, 1]).encode()
            return RemotingCommand.response_to(request, code, ext=ext, body=body)
        if request.code == RequestCode.CLEAN_BROKER_DATA:
            code = ResponseCode.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
            return refuse(request, code, "broker 1 is alive")
        return refuse(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "?")


@contextlib.asynccontextmanager
async def controlled(timeout_ms: int = 5000) -> AsyncIterator[tuple[list[FakeController], Admin]]:
    async with contextlib.AsyncExitStack() as servers, asyncio.timeout(20):
        controllers = [FakeController() for _ in range(3)]
        for controller in controllers:
            await controller.start()
            servers.push_async_callback(controller.stop)
        async with Admin(["127.0.0.1:1"], timeout_ms=timeout_ms) as admin:
            yield controllers, admin


async def test_state_calls_find_the_leader() -> None:
    async with controlled() as (controllers, admin):
        for controller in controllers:
            controller.leader = controllers[1]
        calls = admin.controller([controllers[0].address])
        info = await calls.sync_state_data(["broker-a"])
        assert info.replicas_info_table["broker-a"].master_epoch == 4
        elected = await calls.elect_master(CLUSTER, "broker-a", 2)
        assert (elected.master_broker_id, elected.master_epoch) == (2, 5)
        assert elected.sync_state_set == (1, 2)
        assert not elected.already_master
        assert (await calls.elect_master(CLUSTER, "broker-a")).already_master
        with pytest.raises(ResponseError, match="alive"):
            await calls.clean_broker_data(CLUSTER, "broker-a", [1])
        request = controllers[1].requests[-1]
        assert request.ext["brokerControllerIdsToClean"] == "1"
        assert {r.code for r in controllers[0].requests} == {1005}


async def test_controllers_that_name_no_groups_themselves_are_asked_for_the_known_ones() -> None:
    """Java's, and those of earlier versions."""
    async with controlled() as (controllers, admin):
        for controller in controllers:
            controller.leader = controllers[0]
        names = [f"b{number}" for number in range(GROUPS_A_PAGE + 1)]
        calls = admin.controller([controllers[0].address])
        info = await calls.sync_state_data(names, every=True)
        assert info.replicas_info_table.keys() == set(names)
        assert (await calls.sync_state_data([], every=True)).replicas_info_table == {}


async def test_metadata_of_every_controller_the_dead_ones_too() -> None:
    async with controlled() as (controllers, admin):
        for controller in controllers:
            controller.leader = controllers[0]
        await controllers[2].stop()
        answers = await admin.controller([c.address for c in controllers]).all_metadata()
        first, _, last = answers.values()
        assert not isinstance(first, Exception) and first.is_leader
        assert isinstance(last, ConnectError)


async def test_without_a_leader_it_says_so_after_the_timeout() -> None:
    async with controlled(timeout_ms=60) as (controllers, admin):
        with pytest.raises(NoControllerLeaderError, match="majority"):
            await admin.controller(controllers[0].address).sync_state_data(["broker-a"])


async def test_without_a_leader_every_controller_is_named_with_what_it_said() -> None:
    async with controlled(timeout_ms=60) as (controllers, admin):
        await controllers[0].stop()
        addresses = [controller.address for controller in controllers]
        with pytest.raises(NoControllerLeaderError) as raised:
            await admin.controller(addresses).sync_state_data(["broker-a"])
        assert [address for address, _ in raised.value.asked] == addresses
        assert f"{addresses[1]}: replies, but has no leader" in str(raised.value)


async def test_a_leader_elected_meanwhile_is_waited_for() -> None:
    async with controlled() as (controllers, admin):
        asking = asyncio.ensure_future(
            admin.controller([c.address for c in controllers]).sync_state_data(["broker-a"])
        )
        await until(lambda: bool(controllers[2].requests))
        for controller in controllers:
            controller.leader = controllers[2]
        assert (await asking).replicas_info_table.keys() == {"broker-a"}


async def test_settings_are_read_and_changed_at_every_controller() -> None:
    async with controlled() as (controllers, admin):
        calls = admin.controller(";".join(c.address for c in controllers))
        assert await calls.config() == {"a": "1", "b": "x=y"}
        done = await calls.update_config({"k": "v"})
        assert done == tuple(c.address for c in controllers)
        assert {c.requests[-1].body for c in controllers} == {b"k=v\n"}
        await calls.update_config({"path": "C:\\new"})
        assert {c.requests[-1].body for c in controllers} == {b"path=C:\\\\new\n"}
        for change in (calls.update_config, lambda wrong: admin.brokers.update_config("x", wrong)):
            for wrong in ({"k": "1\nmore=2"}, {"k\r": "1"}):
                with pytest.raises(ClientError, match="a setting is one line"):
                    await change(wrong)


async def test_grpc_endpoint_without_a_server_is_a_connect_error() -> None:
    async with controlled(timeout_ms=500) as (_, admin):
        with pytest.raises(ConnectError):
            await admin.controller("127.0.0.1:1").history()


def test_grpc_endpoint_is_one_port_above() -> None:
    assert grpc_address("10.0.0.1:9878") == "10.0.0.1:9879"
    assert grpc_address("[::1]:9878") == "[::1]:9879"
