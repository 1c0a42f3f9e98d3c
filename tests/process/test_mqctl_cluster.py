"""`mqctl` as a program against one real cluster: every command, a killed master, exit codes.

The tests share the cluster, which has a topic, and run in the order of the file; the last ones hurt
it. None needs what another one did: two workers may share the file.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.cluster.mqctl import Ran, mqctl_program
from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

TOPIC = "MqctlTopic"


Mqctl = Callable[..., Ran]


def program(cluster: ClusterProcess, *arguments: str) -> Ran:
    """The real thing: to find the cluster it has only what that leaves behind in the home."""
    return mqctl_program(*arguments, home=cluster.folder, env={})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """A whole cluster with TOPIC, and a home of its own, so that no other cluster's hint is
    touched."""
    folder = tmp_path_factory.mktemp("mqctl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.chdir(folder)
        with ClusterProcess(folder) as running:
            topic = ("-t", TOPIC, "-c", "DefaultCluster", "-r", "2", "-w", "2")
            assert running.mqctl("updateTopic", *topic).code == 0
            yield running


@pytest.fixture
def mqctl(cluster: ClusterProcess) -> Mqctl:
    """In this process, by the cluster's folder."""
    return cluster.mqctl


def the_group(mqctl: Mqctl) -> dict[str, Any]:
    table = mqctl("getSyncStateSet", "-b", "broker-a", "--json").json["replicasInfoTable"]
    return table["broker-a"]


def test_the_running_cluster_is_found_from_anywhere_and_is_healthy(
    cluster: ClusterProcess, mqctl: Mqctl
) -> None:
    data, addresses = cluster.data_dir, cluster.name_servers
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["problems"]) == (0, [])
    assert ran.json["controllerLeaderAddress"]
    ran = program(cluster, "health")
    assert (ran.code, ran.out.splitlines()[-1], ran.err) == (
        0,
        "healthy",
        f"mqctl: cluster {data} ({addresses})\n",
    )


def test_name_servers_and_controllers_may_be_given_by_hand(
    cluster: ClusterProcess, mqctl: Mqctl
) -> None:
    name_servers, controllers = cluster.name_servers, ";".join(cluster.controllers)
    ran = mqctl("health", "-n", name_servers, "-a", controllers)
    assert ran.code == 0
    one = cluster.controllers[1]
    ran = mqctl("get-controller-meta-data", "--controller-address", one, "--json")
    assert ran.json["controllerLeaderAddress"] in cluster.controllers


def test_cluster_and_brokers(cluster: ClusterProcess, mqctl: Mqctl) -> None:
    master = cluster.master()["address"]
    info = mqctl("clusterList", "--json").json
    assert info["brokerAddrTable"]["broker-a"]["brokerAddrs"]["0"] == master
    assert info["clusterAddrTable"] == {"DefaultCluster": ["broker-a"]}
    for arguments in (("clusterList",), ("clusterList", "-m"), ("brokerStatus", "-b", master)):
        assert mqctl(*arguments).code == 0
    table = mqctl("brokerStatus", "-b", master, "--json").json["table"]
    assert table["brokerVersionDesc"]


def test_topics_and_messages(mqctl: Mqctl) -> None:
    assert TOPIC in mqctl("topicList", "--json").json["topicList"]
    route = mqctl("topicRoute", "-t", TOPIC, "--json").json
    assert route["queueDatas"][0]["writeQueueNums"] == 2
    send = ("sendMessage", "-t", TOPIC, "-b", "broker-a", "-i", "1", "-c", "tag", "--json")
    sent = [mqctl(*send, "-p", f"body {n}", "-k", f"key{n}").json for n in range(2)]
    assert [s["sendStatus"] for s in sent] == ["SEND_OK"] * 2
    (came_in,) = mqctl("statsAll", "-t", TOPIC, "--json").json["topics"]
    assert came_in["group"] is None and came_in["day"] == 2
    status = mqctl("topicStatus", "-t", TOPIC, "--json").json["offsetTable"]
    assert [(e["queueId"], e["maxOffset"]) for e in status] == [(0, 0), (1, 2)]
    read = mqctl("consumeMessage", "-t", TOPIC, "--json").json
    assert [m["body"] for m in read] == ["body 0", "body 1"]
    assert mqctl("consumeMessage", "-t", TOPIC, "-b", "broker-a", "-i", "1", "-o", "1").code == 0
    by_id = mqctl("queryMsgById", "-i", sent[0]["offsetMsgId"], "--json").json
    assert (by_id["msgId"], by_id["body"]) == (sent[0]["msgId"], "body 0")
    by_key = wait_for(
        "the index", lambda: mqctl("queryMsgByKey", "-t", TOPIC, "-k", "key1", "--json").json, 5
    )
    assert [m["msgId"] for m in by_key] == [sent[1]["msgId"]]
    assert mqctl("queryMsgById", "-i", sent[1]["msgId"], "-t", TOPIC).code == 0
    assert mqctl("consumerProgress").code == 0
    assert mqctl("consumerProgress", "-g", "TOOLS_CONSUMER", "--json").json["diffTotal"] == 0
    assert mqctl("topicList", "-c").code == 0
    (last,) = mqctl("tail", TOPIC, "--last", "1", "--json").out.splitlines()
    assert json.loads(last)["body"] == "body 1"
    described = mqctl("describe", "topic", TOPIC, "--json").json
    assert described["brokers"]["broker-a"]["messages"] == 2
    assert mqctl("describe", "group", "TOOLS_CONSUMER").code == 0
    ran = mqctl("skip", "-g", "TOOLS_CONSUMER", "-t", TOPIC, "--dry-run", "--json")
    assert [entry["offset"] for entry in ran.json["offsetTable"]] == [0, 2]


def test_replication_and_controllers(cluster: ClusterProcess, mqctl: Mqctl) -> None:
    group = the_group(mqctl)
    assert [r["alive"] for r in group["inSyncReplicas"]] == [True] * 3
    status = mqctl("haStatus", "-b", group["masterAddress"], "--json").json
    assert (status["master"], status["inSyncSlaveNums"]) == (True, 2)
    caches = mqctl("getBrokerEpoch", "-b", "broker-a", "--json").json
    assert sorted(c["brokerId"] for c in caches) == [1, 2, 3]
    assert all(c["epochList"][-1]["epoch"] == group["masterEpoch"] for c in caches)
    configs = mqctl("getControllerConfig", "--json").json
    assert sorted(configs) == sorted(cluster.controllers)
    ran = mqctl("updateControllerConfig", "-k", "electMasterMaxRetryCount", "-v", "4", "--json")
    assert (ran.code, len(ran.json["addresses"])) == (0, 3)
    changed = mqctl("getControllerConfig", "--json").json
    assert {c["electMasterMaxRetryCount"] for c in changed.values()} == {"4"}
    for arguments in (("haStatus",), ("getSyncStateSet",), ("getBrokerEpoch",), ("timeline",)):
        assert mqctl(*arguments).code == 0


def test_elect_master_moves_the_master_and_shows_it(mqctl: Mqctl) -> None:
    before = the_group(mqctl)
    other = next(
        r["brokerId"] for r in before["inSyncReplicas"] if r["brokerId"] != before["masterBrokerId"]
    )
    elect = ("electMaster", "-bn", "broker-a", "-c", "DefaultCluster", "-b", str(other))
    ran = mqctl(*elect, "--json")
    assert ran.code == 0
    assert ran.json["masterBrokerId"] == other
    assert ran.json["masterEpoch"] > before["masterEpoch"]
    route = mqctl("topicRoute", "-t", TOPIC, "--json").json
    assert route["brokerDatas"][0]["brokerAddrs"]["0"] == ran.json["masterAddress"]
    ran = mqctl(*elect)
    assert ran.code == 0
    assert "this broker is the master already" in ran.out
    assert mqctl("health", "--watch", "--within", "20").code == 0


def test_drain_moves_the_master_away(cluster: ClusterProcess, mqctl: Mqctl) -> None:
    before = the_group(mqctl)
    ran = mqctl("drain", before["masterAddress"], "--json")
    assert (ran.code, ran.json["wasMaster"], len(ran.json["others"])) == (0, True, 2)
    assert the_group(mqctl)["masterBrokerId"] == ran.json["masterBrokerId"] in ran.json["others"]
    assert mqctl("health", "--watch", "--within", "20").code == 0
    store = Path(cluster.brokers[0]["dataDir"])
    ran = mqctl("verifyStore", str(store), "--json")
    assert (ran.code, ran.json["healthy"]) == (0, True)


def test_what_is_refused_ends_with_1_and_what_is_wrong_with_2(
    cluster: ClusterProcess, mqctl: Mqctl
) -> None:
    master = str(the_group(mqctl)["masterBrokerId"])
    for arguments in (
        ("electMaster", "-bn", "broker-a", "-b", "99"),
        ("electMaster", "-bn", "nope"),
        ("cleanBrokerMetadata", "-bn", "broker-a", "-y", "-b", master),
        ("updateControllerConfig", "-k", "configStorePath", "-v", "x"),
        ("getSyncStateSet", "-b", "nope"),
        ("topicRoute", "-t", "Nope"),
        ("queryMsgByKey", "-t", TOPIC, "-k", "nothing"),
        ("brokerStatus", "-b", "127.0.0.1:1"),
        ("clusterList", "-n", "127.0.0.1:1"),
        ("clusterList", "-c", "Nope"),
    ):
        ran = mqctl(*arguments)
        assert ran.code == 1, arguments
        assert ran.err.startswith("mqctl: ")
    assert program(cluster, "topicRoute", "-t", "Nope").code == 1
    assert program(cluster, "clusterList", "-x").code == 2


def test_a_killed_master_and_its_health(cluster: ClusterProcess, mqctl: Mqctl) -> None:
    """kill -9 of the master: health says who is missing, the write goes on, the old id of a
    message is still answered, and after the restart all is well. Its story: test_timeline."""
    before = the_group(mqctl)
    send = ("sendMessage", "-t", TOPIC, "-p", "x", "--json")
    old = mqctl(*send).json
    victim = next(b for b in cluster.brokers if b["address"] == before["masterAddress"])
    cluster.kill(victim, signal.SIGKILL)
    assert mqctl(*send, "--timeout", "10").json["sendStatus"] == "SEND_OK"
    ran = mqctl("health", "--json")
    assert (ran.code, ran.json["state"]) == (3, "degraded")
    assert any(victim["address"] in problem for problem in ran.json["problems"])
    assert mqctl("queryMsgById", "-i", old["offsetMsgId"], "--json").json["msgId"] == old["msgId"]

    text = mqctl("timeline").out
    assert all(step in text for step in ("detected", "proposed", "opened"))
    cluster.restart(victim)
    assert mqctl("health", "--watch", "--within", "30").code == 0


def test_forgetting_a_dead_replica_makes_the_rest_whole(
    cluster: ClusterProcess, mqctl: Mqctl
) -> None:
    group = the_group(mqctl)
    slave = next(r for r in group["inSyncReplicas"] if r["brokerId"] != group["masterBrokerId"])
    pid = mqctl("brokerStatus", "-b", slave["brokerAddress"], "--json").json["table"]["pid"]
    os.kill(int(pid), signal.SIGKILL)
    wait_for(
        "the controllers to see it dead",
        lambda: (
            slave["brokerId"]
            not in [r["brokerId"] for r in the_group(mqctl)["inSyncReplicas"] if r["alive"]]
        ),
        20,
    )
    clean = ("cleanBrokerMetadata", "-bn", "broker-a", "-y", "-c", "DefaultCluster", "-b")
    ran = mqctl(*clean, str(slave["brokerId"]), "--json")
    assert (ran.code, ran.json["brokerControllerIdsToClean"]) == (0, [slave["brokerId"]])
    after = the_group(mqctl)
    known = [r["brokerId"] for r in after["inSyncReplicas"] + after["notInSyncReplicas"]]
    assert slave["brokerId"] not in known
    by_hand = ("-n", cluster.name_servers, "-a", ";".join(cluster.controllers))
    assert mqctl("getSyncStateSet", *by_hand).code == 0
    assert mqctl("deleteTopic", "-t", TOPIC, "-c", "DefaultCluster", "-y").code == 0
    assert TOPIC not in mqctl("topicList", "--json").json["topicList"]


def test_health_of_a_group_without_replicas_left_and_after_the_end(
    cluster: ClusterProcess, mqctl: Mqctl
) -> None:
    """With every broker dead there is no master; with the cluster stopped there is no cluster."""
    for broker in cluster.brokers:
        for line in mqctl("brokerStatus", "-b", broker["address"]).out.splitlines():
            if line.startswith("pid:"):
                os.kill(int(line.split()[1]), signal.SIGKILL)
    ran = mqctl("health", "--json")
    assert ran.code == 1
    assert mqctl("sendMessage", "-t", "Other", "-p", "x", "--timeout", "1").code == 1
    cluster.stop()
    ran = mqctl("health")
    assert (ran.code, "has ended" in ran.out) == (1, True)
