"""Requests to RocketMQ's controllers, and views from their answers, beside golden ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_controller import manager_config

from batonmq.protocol.bodies import EpochEntryCache
from batonmq.protocol.codes import HA_ADDRESS_FIELD, INCARNATION_FIELD, LOG_ID_FIELD, RequestCode
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.role_view import Replica
from batonmq.remoting.command import RemotingCommand
from batonmq.replicas_manager.config import remoting_timings
from batonmq.replicas_manager.link import LogFacts
from batonmq.replicas_manager.remoting_calls import LeaderInfo, PeerName, Requests, group_view

GOLDEN = Path(__file__).parent.parent / "golden" / "java-5.3.3" / "remoting"
GROUP = ("DefaultCluster", "broker-a")


def requests() -> Requests:
    """Of the golden run's first broker, which has Java's times."""
    config = manager_config(
        cluster_name=GROUP[0],
        address="127.0.0.1:30911",
        controllers=("127.0.0.1:9878",),
        timings=remoting_timings(1000, 10_000),
        protocol="remoting",
    )
    return Requests(config, "1795221018994")


def example(code: int, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"controller-{code}.json").read_text())
    chosen: dict[str, Any] = found["examples"][number]
    return chosen


def reply_to(code: int, number: int = 0) -> RemotingCommand:
    golden = example(code, number)["response"]
    header = json.loads(golden["header"])
    return RemotingCommand(
        header["code"], ext=header.get("extFields", {}), body=bytes.fromhex(golden["body_hex"])
    )


MADE = [
    (1001, 0, requests().alter(1, (1, 1), [1, 2], 1795221033143)),
    (1002, 0, requests().elect(1, designate=False, now_ms=1795221019045)),
    (1002, 1, requests().elect(2, designate=True, now_ms=1795221161422)),
    (1003, 0, requests().register(1, 1795221019023)),
    (1005, 0, requests().metadata()),
    (1006, 0, requests().replicas()),
    (1012, 0, requests().next_id()),
    (1013, 0, requests().apply_id(1)),
    (904, 1, requests().heartbeat(1, LogFacts(1, 0, 0, 0, "log"))),
]


@pytest.mark.parametrize(("code", "number", "made"), MADE)
def test_requests_are_those_of_a_java_broker(code, number, made):
    golden = example(code, number)["request"]
    header = json.loads(golden["header"])
    assert made.code == header["code"] == code
    assert made.ext == header.get("extFields", {})
    assert made.body.hex() == golden["body_hex"]


def test_the_group_in_a_golden_answer():
    view = group_view(reply_to(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, 1), *GROUP)
    assert view is not None
    assert view.key == (2, 3)
    assert (view.master_broker_id, view.master_address) == (2, "127.0.0.1:31011")
    assert view.sync_state_set == {2}
    assert view.replicas == (
        Replica(1, "127.0.0.1:30911", alive=True),
        Replica(2, "127.0.0.1:31011", alive=True),
    )


def test_a_group_that_the_controllers_do_not_know():
    reply = RemotingCommand(0, body=b'{"replicasInfoTable":{}}')
    assert group_view(reply, *GROUP) is None


def test_a_group_without_a_master():
    """As Java writes it: what is null is left out."""
    info = '{"masterEpoch":3,"syncStateSetEpoch":4,"inSyncReplicas":[],"notInSyncReplicas":[]}'
    body = f'{{"replicasInfoTable":{{"broker-a":{info}}}}}'.encode()
    view = group_view(RemotingCommand(0, body=body), *GROUP)
    assert view is not None
    assert (view.master_broker_id, view.master_address, view.key) == (None, "", (3, 4))


def test_an_answer_of_nonsense_is_an_error():
    with pytest.raises(RemoteProtocolError, match="BrokerReplicasInfo"):
        group_view(RemotingCommand(0, body=b'{"replicasInfoTable":7}'), *GROUP)


def test_who_leads_in_a_golden_answer():
    reply = reply_to(RequestCode.CONTROLLER_GET_METADATA_INFO)
    assert LeaderInfo.of(reply) == LeaderInfo(is_leader=True, leader="127.0.0.1:9878")
    assert LeaderInfo.of(RemotingCommand(0)) == LeaderInfo(is_leader=False, leader="")


def test_r41_a_process_has_a_name_only_as_the_replica_that_was_asked():
    said = EpochEntryCache(broker_id=2, broker_name="broker-a", cluster_name="DefaultCluster")
    ext = {INCARNATION_FIELD: "life", LOG_ID_FIELD: "log", HA_ADDRESS_FIELD: "h:2"}
    reply = RemotingCommand(0, ext=ext, body=said.encode())
    assert PeerName.of(reply, Replica(2), GROUP) == PeerName("life", "log", "h:2")
    assert PeerName.of(reply, Replica(1), GROUP) == PeerName()
    assert PeerName.of(reply, Replica(2), ("DefaultCluster", "other")) == PeerName()


def test_a_java_broker_has_no_name():
    golden = json.loads((GOLDEN / "broker-1007.json").read_text())["examples"][0]["response"]
    reply = RemotingCommand(0, body=bytes.fromhex(golden["body_hex"]))
    assert PeerName.of(reply, Replica(1), GROUP) == PeerName()
