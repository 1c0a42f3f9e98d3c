"""Stock mqadmin 5.3.3 against our controllers, name servers and brokers.

All commands go through `MQAdminStartup` itself, in one JVM for the module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batonmq.protocol import fastjson
from lab.java import WAIT_S, JavaProgram
from lab.processes import wait_for
from lab.queues import read_topic
from lab.up import ClusterProcess

pytestmark = pytest.mark.java

MqAdmin = Callable[..., str]


@pytest.fixture(scope="module")
def mqadmin(java_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MqAdmin]:
    """`mqadmin(word, …)` runs one command and gives what it printed."""
    with JavaProgram(java_classpath, tmp_path_factory.mktemp("mqadmin"), "MqAdmin") as program:

        def run(*words: str) -> str:
            line = program.ask("\t".join(words), WAIT_S)
            assert "Exception" not in line["output"] + line["error"], line
            output: str = line["output"]
            return output

        yield run


def test_cluster_list(java_cluster: ClusterProcess, mqadmin: MqAdmin) -> None:
    """Every broker has its line: the master under id 0, with our version and numbers."""
    output = mqadmin("clusterList", "-n", java_cluster.name_servers)
    rows = [line.split() for line in output.splitlines() if line.startswith("DefaultCluster")]
    assert {row[3] for row in rows} == {broker["address"] for broker in java_cluster.brokers}
    assert [row[3] for row in rows if row[2] == "0"] == [java_cluster.master()["address"]]
    assert all(row[1] == "broker-a" and row[4].startswith("V5_3_3") for row in rows), output


def test_topic_commands(java_cluster: ClusterProcess, mqadmin: MqAdmin) -> None:
    """updateTopic creates, topicList and topicRoute show it, sendMessage writes into it."""
    servers, topic = java_cluster.name_servers, "MadeByMqadmin"
    made = mqadmin(
        "updateTopic", "-n", servers, "-c", "DefaultCluster", "-t", topic, "-r", "5", "-w", "5"
    )
    assert f"create topic to {java_cluster.master()['address']} success" in made

    def route() -> Any:
        output = mqadmin("topicRoute", "-n", servers, "-t", topic)
        return fastjson.loads(output[output.index("{") :].encode())

    (queues,) = route()["queueDatas"]
    assert (queues["brokerName"], queues["readQueueNums"], queues["writeQueueNums"]) == (
        "broker-a", 5, 5,
    )  # fmt: skip
    (broker,) = route()["brokerDatas"]
    addresses = {str(id): address for id, address in broker["brokerAddrs"].items()}
    assert addresses["0"] == java_cluster.master()["address"]
    assert sorted(addresses.values()) == sorted(b["address"] for b in java_cluster.brokers)
    assert topic in mqadmin("topicList", "-n", servers).split()

    sent = mqadmin("sendMessage", "-n", servers, "-t", topic, "-p", "from mqadmin", "-k", "key1")
    assert "SEND_OK" in sent
    stored = read_topic(servers, topic)
    assert [m.body for queue in stored.values() for m in queue] == [b"from mqadmin"]


def test_controller_metadata(java_cluster: ClusterProcess, mqadmin: MqAdmin) -> None:
    """Any controller names the leader, one of ours, and all peers."""
    for controller in java_cluster.controllers:
        output = mqadmin("getControllerMetaData", "-a", controller)
        leader = re.search(r"#ControllerLeaderAddress\s+(\S+)", output)
        assert leader is not None and leader[1] in java_cluster.controllers, output
        peers = [line for line in output.splitlines() if line.startswith("#Peer")]
        assert len(peers) == 3, output


def test_sync_state_set(java_cluster: ClusterProcess, mqadmin: MqAdmin) -> None:
    """The set has all three replicas; the command finds the leader from any controller."""
    output = mqadmin("getSyncStateSet", "-a", java_cluster.controllers[0], "-b", "broker-a")
    assert f"#MasterAddr\t{java_cluster.master()['address']}" in output
    members = [line for line in output.splitlines() if line.startswith("InSyncReplica")]
    assert len(members) == 3, output


def test_broker_epoch(java_cluster: ClusterProcess, mqadmin: MqAdmin) -> None:
    """Every replica reports its epochs; the last one ends where its log ends."""
    output = mqadmin("getBrokerEpoch", "-n", java_cluster.name_servers, "-b", "broker-a")
    assert output.count("#clusterName\tDefaultCluster") == 3, output
    assert (
        len(re.findall(r"#Epoch: EpochEntry\{epoch=1, startOffset=0, endOffset=\d+", output)) == 3
    )


def test_elect_master(java_cluster: ClusterProcess, mqadmin: MqAdmin, tmp_path: Path) -> None:
    """electMaster moves the mastership to a chosen slave; the name servers route to it."""
    chosen = next(b for b in java_cluster.brokers if b["role"] == "SLAVE")
    output = mqadmin(
        "electMaster",
        "-a", java_cluster.controllers[0],
        "-b", chosen["id"],
        "-bn", "broker-a",
        "-c", "DefaultCluster",
    )  # fmt: skip
    assert f"#BrokerMasterAddr\t{chosen['address']}" in output, output
    wait_for(
        "cluster.json to name it",
        lambda: java_cluster.master()["address"] == chosen["address"],
    )
    listed = mqadmin("clusterList", "-n", java_cluster.name_servers)
    rows = [line.split() for line in listed.splitlines() if line.startswith("DefaultCluster")]
    assert [row[3] for row in rows if row[2] == "0"] == [chosen["address"]]
