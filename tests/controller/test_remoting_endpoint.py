"""The RocketMQ endpoint: what a Java 5.3.3 cluster asked is answered in the same shape.

Golden requests go over a real connection to a node on a local log; code, header keys and body keys
of each answer are those of the Java controller.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from local_log import LocalLog, alone

from batonmq.client.admin.admin import Admin
from batonmq.controller.raft.log import Machine
from batonmq.controller.requests import ControllerRequests
from batonmq.controller.rules.commands import ElectMaster
from batonmq.controller.service import ControllerService
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.remoting.endpoint import RemotingClient, RemotingServer
from tests.shared.ports import free_ports
from tests.shared.waiting import opened

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "remoting"
FIRST, SECOND = "127.0.0.1:30911", "127.0.0.1:31011"


def example(code: int, number: int) -> tuple[RemotingCommand, dict[str, Any], bytes]:
    """The golden request, and the header and body of its answer."""
    recorded = json.loads((GOLDEN / f"controller-{code}.json").read_text())["examples"][number]
    header = json.loads(recorded["request"]["header"])
    request = RemotingCommand(
        header["code"],
        ext=header.get("extFields"),
        flag=header["flag"],
        body=bytes.fromhex(recorded["request"]["body_hex"]),
    )
    response = recorded.get("response", {"header": "{}", "body_hex": ""})
    return request, json.loads(response["header"]), bytes.fromhex(response["body_hex"])


def keys_of(value: Any) -> Any:
    """The shape of a JSON value: keys of objects, and the shape of the first item of lists."""
    if isinstance(value, dict):
        return {key: keys_of(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [keys_of(value[0])] if value else []
    return type(value).__name__


class Endpoint:
    def __init__(self, service: ControllerService, log: LocalLog) -> None:
        self.service = service
        self.log = log
        self.address = service.config.self_peer.remoting_address
        self.client = RemotingClient()

    async def ask(
        self, code: int, ext: dict[str, Any] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        return await self.client.invoke(self.address, RemotingCommand.request(code, ext, body))

    async def heartbeat(self, broker_id: int, address: str, **fields: Any) -> RemotingCommand:
        ext = {"clusterName": "DefaultCluster", "brokerName": "broker-a", "brokerAddr": address}
        facts = {"brokerId": broker_id, "epoch": -1, "maxOffset": 0, "confirmOffset": 0}
        return await self.ask(RequestCode.BROKER_HEARTBEAT, {**ext, **facts, **fields})

    async def join(self, broker_id: int, address: str) -> None:
        names = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
        code = f"{address};1"
        applied = {**names, "appliedBrokerId": broker_id, "registerCheckCode": code}
        assert (await self.ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, applied)).code == 0
        register = {**names, "brokerId": broker_id, "brokerAddress": address}
        assert (await self.ask(RequestCode.CONTROLLER_REGISTER_BROKER, register)).code == 0
        assert (await self.heartbeat(broker_id, address)).code == 0


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Endpoint]:
    log = LocalLog("n0", Machine())
    service = ControllerService(alone(folder, free_ports(10)), replicated_log=log)
    await service.start()
    endpoint = Endpoint(service, log)
    try:
        await opened(service.gate)
        yield endpoint
    finally:
        await endpoint.client.close()
        await service.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Endpoint]:
    return serving(tmp_path)


OUR_METADATA = {
    *("selfId", "controllerEpoch", "raftTerm", "appliedIndex", "committedIndex"),
    *("journalBytes", "journalEntries", "snapshotBytes", "snapshotIndex"),
    *("digestIndex", "stateDigest", "rules", "problems"),
}
"""What 1005 tells beyond RocketMQ's fields, which Java's decoder passes over."""


async def test_golden_registration_election_and_set(endpoint):
    """The start of the golden scenario, request by request, as two Java brokers made it."""

    async def same(
        endpoint: Endpoint, code: int, number: int, *, more_body: frozenset[str] = frozenset()
    ) -> RemotingCommand:
        request, header, body = example(code, number)
        response = await endpoint.client.invoke(endpoint.address, request)
        assert response.code == header["code"], (code, number, response.remark)
        more_ext = OUR_METADATA if code == RequestCode.CONTROLLER_GET_METADATA_INFO else set()
        assert set(response.ext) - more_ext == set(header.get("extFields", {})), (code, number)
        if not body:
            assert response.body == b""
            return response
        text = body.decode().replace("{1:", '{"1":').replace(",2:", ',"2":')
        theirs, ours = keys_of(json.loads(text)), keys_of(json.loads(response.body))
        for group in ours.get("replicasInfoTable", {}).values():
            assert group.pop("clusterName") == "str"
        assert {key: ours[key] for key in theirs} == theirs, (code, number)
        assert set(ours) - set(theirs) == more_body
        return response

    await same(endpoint, 1005, 0)
    await same(endpoint, 1012, 0)
    await same(endpoint, 1013, 0)
    await same(endpoint, 1003, 0)
    heartbeat, _, _ = example(904, 0)
    await endpoint.client.oneway(endpoint.address, heartbeat)
    member_group = frozenset({"cluster", "brokerName", "brokerAddrs"})
    elected = await same(endpoint, 1002, 0, more_body=member_group)
    assert (elected.ext["masterAddress"], elected.ext["masterEpoch"]) == (FIRST, "1")
    second = await same(endpoint, 1012, 1)
    assert second.ext["nextBrokerId"] == "2"
    await same(endpoint, 1013, 1)
    await same(endpoint, 1003, 1)
    await endpoint.heartbeat(2, SECOND)
    await same(endpoint, 1004, 0)
    altered = await same(endpoint, 1001, 0)
    assert json.loads(altered.body) == {"syncStateSet": [1, 2], "syncStateSetEpoch": 2}
    await same(endpoint, 1006, 0)
    elected = await same(endpoint, 1002, 1, more_body=member_group)
    assert (elected.ext["masterAddress"], elected.ext["masterEpoch"]) == (SECOND, "2")
    await same(endpoint, 1001, 1)
    await same(endpoint, 1009, 0)


async def test_golden_config_keys_that_matter_are_shown(endpoint):
    _, _, golden = example(1010, 0)
    theirs = dict(line.split("=", 1) for line in golden.decode().splitlines())
    response = await endpoint.ask(RequestCode.GET_CONTROLLER_CONFIG)
    ours = dict(line.split("=", 1) for line in response.body.decode().splitlines())
    shared = theirs.keys() & ours.keys()
    assert {"controllerDLegerGroup", "controllerDLegerPeers", "listenPort"} <= shared
    assert ours["enableElectUncleanMaster"] == theirs["enableElectUncleanMaster"] == "false"
    assert list(ours) == sorted(ours)


async def test_reply_of_1002_satisfies_java_brokers_and_mqadmin(endpoint):
    """Quirk (e): mqadmin decodes the whole body as a member group, brokers look inside it."""
    await endpoint.join(1, FIRST)
    ask = {"clusterName": "DefaultCluster", "brokerName": "broker-a", "brokerId": 1}
    body = json.loads((await endpoint.ask(RequestCode.CONTROLLER_ELECT_MASTER, ask)).body)
    group = {"cluster": "DefaultCluster", "brokerName": "broker-a", "brokerAddrs": {"1": FIRST}}
    assert body == {**group, "brokerMemberGroup": group, "syncStateSet": [1]}
    again = await endpoint.ask(RequestCode.CONTROLLER_ELECT_MASTER, ask)
    assert again.code == ResponseCode.CONTROLLER_MASTER_STILL_EXIST
    assert again.ext["masterAddress"] == FIRST


@pytest.mark.parametrize("accepted", [False, True])
async def test_r44_what_an_operator_accepts_arrives(endpoint, accepted, monkeypatch):
    """From the admin client's call to the command that the leader judges."""
    judged: list[ElectMaster] = []
    admitted = ControllerRequests._admitted

    def seen(self: ControllerRequests, command: ElectMaster) -> ElectMaster | str:
        judged.append(command)
        return admitted(self, command)

    monkeypatch.setattr(ControllerRequests, "_admitted", seen)
    await endpoint.join(1, FIRST)
    async with Admin(["127.0.0.1:1"]) as admin:
        calls = admin.controller([endpoint.address])
        await calls.elect_master("", "broker-a", 1, unclean=True, cut_later_acks=accepted)
    assert [(each.unclean, each.cut_later_acks) for each in judged] == [(True, accepted)]


async def test_refusals_have_javas_codes(endpoint):
    names = {"clusterName": "DefaultCluster", "brokerName": "broker-x"}
    apply_second = {**names, "appliedBrokerId": 2, "registerCheckCode": "a;1"}
    alter = {**names, "masterBrokerId": 1, "masterEpoch": 1}
    expected: list[tuple[int, dict[str, Any], bytes, ResponseCode]] = [
        (1002, {**names, "brokerId": 1}, b"", ResponseCode(2010)),
        (1003, {**names, "brokerId": 1, "brokerAddress": FIRST}, b"", ResponseCode(2010)),
        (1004, names, b"", ResponseCode(2008)),
        (1006, {}, b"", ResponseCode.SYSTEM_ERROR),
        (1011, {**names, "brokerControllerIdsToClean": "1;x"}, b"", ResponseCode(2009)),
        (1011, names, b"", ResponseCode(2009)),
        (1013, apply_second, b"", ResponseCode(2014)),
        (1001, alter, b"{}", ResponseCode(2013)),
        (1001, alter, b"[", ResponseCode.SYSTEM_ERROR),
        (904, names, b"", ResponseCode(2005)),
        (1007, {}, b"", ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
        (310, {}, b"", ResponseCode.REQUEST_CODE_NOT_SUPPORTED),
    ]
    for code, ext, body, answer in expected:
        response = await endpoint.ask(code, ext, body)
        assert response.code == answer, (code, ext, response.remark)


async def test_a_node_that_does_not_lead_answers_2007_but_to_metadata_heartbeat_and_config(
    endpoint,
):
    await endpoint.join(1, FIRST)
    endpoint.log.set_leading(False)
    names = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
    for code in (1001, 1002, 1003, 1004, 1006, 1011, 1012, 1013):
        fields = {**names, "brokerId": 1, "brokerAddress": FIRST, "masterBrokerId": 1}
        more = {"masterEpoch": 1, "appliedBrokerId": 1, "registerCheckCode": "a;1"}
        body = b'["broker-a"]' if code == 1006 else b"{}"
        response = await endpoint.ask(code, {**fields, **more}, body)
        assert response.code == ResponseCode.CONTROLLER_NOT_LEADER, code
    metadata = await endpoint.ask(RequestCode.CONTROLLER_GET_METADATA_INFO)
    assert (metadata.code, metadata.ext["isLeader"]) == (0, "false")
    assert (await endpoint.heartbeat(1, FIRST)).code == 0
    assert (await endpoint.ask(RequestCode.GET_CONTROLLER_CONFIG)).code == 0


async def test_black_listed_and_restart_only_keys_are_refused(endpoint):
    for text in (
        b"configBlackList=a",
        b"configStorePath=/x\nenableElectUncleanMaster=true",
        b"rocketmqHome=/x",
        b"controllerDLegerPeers=n0-elsewhere:1",
    ):
        response = await endpoint.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, body=text)
        assert response.code == ResponseCode.NO_PERMISSION, text
    assert not endpoint.service.config.enable_elect_unclean_master, "all or nothing"
    for text in (b"\xff", b"scanInactiveMasterInterval=soon", b"scanInactiveMasterInterval=0"):
        response = await endpoint.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, body=text)
        assert response.code == ResponseCode.SYSTEM_ERROR, text


async def test_a_changed_setting_takes_effect_and_outlives_the_node(tmp_path):
    async with serving(tmp_path) as endpoint:
        text = b"isProcessReadEvent=true\nnobodyKnowsThis=1\ncontrollerDLegerGroup=group1\n"
        assert (await endpoint.ask(RequestCode.UPDATE_CONTROLLER_CONFIG, body=text)).code == 0
        assert endpoint.service.config.is_process_read_event
        assert (await endpoint.ask(1012, {"brokerName": "broker-a"})).code == 0
    assert (tmp_path / "controller.properties").read_text() == "isProcessReadEvent=true\n"
    async with serving(tmp_path) as endpoint:
        assert endpoint.service.config.is_process_read_event


async def test_r19_a_first_election_knows_the_log_of_the_java_broker_that_asks(endpoint):
    """It comes from other controllers, with epoch 7. Its request overtakes its heartbeat."""
    names = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
    applied = {**names, "appliedBrokerId": 1, "registerCheckCode": f"{FIRST};1"}
    assert (await endpoint.ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, applied)).code == 0
    ask = {**names, "brokerId": 1}
    asked = asyncio.create_task(endpoint.ask(RequestCode.CONTROLLER_ELECT_MASTER, ask))
    await endpoint.ask(RequestCode.CONTROLLER_GET_METADATA_INFO)  # behind it, answered first
    await endpoint.heartbeat(1, FIRST, epoch=7, maxOffset=900)
    refused = await asked
    assert refused.code == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
    assert "masterEpoch 7" in refused.remark
    named = {**ask, "designateElect": "true"}
    elected = await endpoint.ask(RequestCode.CONTROLLER_ELECT_MASTER, named)
    assert elected.code == 0
    assert int(elected.ext["masterEpoch"]) > 1_000, "8 may be given already (R47)"


async def test_closing_its_connection_is_a_java_masters_death(endpoint):
    """Two Java brokers; the master's connection ends; the other is elected and told by 1008."""
    notices: asyncio.Queue[RemotingCommand] = asyncio.Queue()

    def take(notice: RemotingCommand, connection: Connection) -> None:
        notices.put_nowait(notice)

    processors = Processors()
    processors.register(RequestCode.NOTIFY_BROKER_ROLE_CHANGED, take)
    broker = RemotingServer(processors)
    port = await broker.listen("127.0.0.1", 0)
    second = f"127.0.0.1:{port}"
    other = RemotingClient()
    try:
        await endpoint.join(1, FIRST)
        names = {"clusterName": "DefaultCluster", "brokerName": "broker-a"}
        ask = {**names, "brokerId": 1}
        assert (await endpoint.ask(RequestCode.CONTROLLER_ELECT_MASTER, ask)).code == 0
        client, endpoint.client = endpoint.client, other
        await endpoint.join(2, second)
        alter = {**names, "masterBrokerId": 1, "masterEpoch": 1}
        body = b'{"syncStateSet":[1,2],"syncStateSetEpoch":1}'
        assert (await endpoint.ask(1001, alter, body)).code == 0
        await client.close()
        async with asyncio.timeout(5):
            notice = await notices.get()
        assert notice.is_oneway
        assert notice.ext == {
            "masterAddress": second,
            "masterBrokerId": "2",
            "masterEpoch": "2",
            "syncStateSetEpoch": "3",
        }
        assert json.loads(notice.body) == {"syncStateSet": [2], "syncStateSetEpoch": 3}
    finally:
        await broker.close()
