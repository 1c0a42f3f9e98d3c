"""Stock mqadmin 5.3.3 against our controllers, name servers and brokers: what only a group of
several shows, and what its clients do. What each command prints: test_mqadmin_daily.

All commands go through `MQAdminStartup` itself, in one JVM for the module.
"""

import asyncio
import re
from collections.abc import Callable, Iterator

import pytest

from batonmq.protocol import fastjson
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient
from lab.cluster.java import WAIT_S, JavaProgram
from lab.cluster.processes import ROOT, wait_for
from lab.cluster.queues import read_topic
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.java

MqAdmin = Callable[..., str]
ASKED, GROUP = "AskedByMqadmin", "asked-by-mqadmin"


@pytest.fixture(scope="module")
def mqadmin(java_classpath: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MqAdmin]:
    """`mqadmin(word, …)` runs one command and gives what it printed."""
    with JavaProgram(java_classpath, tmp_path_factory.mktemp("mqadmin"), "MqAdmin") as program:

        def run(*words: str) -> str:
            line = program.ask("\t".join(words), WAIT_S)
            output: str = line["output"]
            if "Exception" in output + line["error"]:
                # Not an assert: pytest would cut the cause, which is last.
                raise AssertionError(f"{words}:\n{output}\n{line['error']}")
            return output

        yield run


@pytest.fixture(scope="module")
def clients(
    java_cluster: ClusterProcess,
    mqadmin: MqAdmin,
    java_classpath: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[JavaProgram]:
    """A producer and a consumer of ASKED, running."""
    servers, folder = java_cluster.name_servers, tmp_path_factory.mktemp("clients")
    queues = ("-r", "4", "-w", "4")
    mqadmin("updateTopic", "-n", servers, "-c", "DefaultCluster", "-t", ASKED, *queues)
    with JavaProgram(java_classpath, folder, "Consumers", servers) as program:
        program.send(f"load {ASKED} 4")
        program.send(f"push one {GROUP} {ASKED} CLUSTERING TAG *")
        program.wait_for("messages", lambda: len(program.of("by")) >= 20)
        yield program


def test_each_command_of_mqadmin_has_a_row(mqadmin: MqAdmin) -> None:
    known = re.findall(r"^   (\w+) ", mqadmin(""), re.MULTILINE)
    assert len(known) > 80
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "mqadmin.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(known)


def test_every_member_and_every_controller_is_shown(
    java_cluster: ClusterProcess, mqadmin: MqAdmin
) -> None:
    """The master has id 0 in lists and routes, the set has both replicas, any controller names the
    leader, and each replica has its epochs."""
    servers, master = ("-n", java_cluster.name_servers), java_cluster.master()["address"]
    addresses = {broker["address"] for broker in java_cluster.brokers}
    listed = mqadmin("clusterList", *servers)
    rows = [line.split() for line in listed.splitlines() if line.startswith("DefaultCluster")]
    assert {row[3] for row in rows} == addresses
    assert [row[3] for row in rows if row[2] == "0"] == [master]
    assert all(row[1] == "broker-a" and row[4].startswith("V5_3_3") for row in rows), listed

    topic = ("-t", "MadeByMqadmin")
    made = mqadmin("updateTopic", *servers, "-c", "DefaultCluster", *topic, "-r", "5", "-w", "5")
    assert f"create topic to {master} success" in made
    shown = mqadmin("topicRoute", *servers, *topic)
    (broker,) = fastjson.loads(shown[shown.index("{") :].encode())["brokerDatas"]
    routed = {str(id): address for id, address in broker["brokerAddrs"].items()}
    assert (routed["0"], set(routed.values())) == (master, addresses)

    for controller in java_cluster.controllers:
        output = mqadmin("getControllerMetaData", "-a", controller)
        leader = re.search(r"#ControllerLeaderAddress\s+(\S+)", output)
        assert leader is not None and leader[1] in java_cluster.controllers, output
        assert len(re.findall(r"^#Peer", output, re.MULTILINE)) == 3, output
        output = mqadmin("getSyncStateSet", "-a", controller, "-b", "broker-a")
        assert f"#MasterAddr\t{master}" in output
        assert len(re.findall(r"^InSyncReplica", output, re.MULTILINE)) == 2, output
    epochs = mqadmin("getBrokerEpoch", *servers, "-b", "broker-a")
    first = r"#Epoch: EpochEntry\{epoch=1, startOffset=0, endOffset=\d+"
    assert len(re.findall(first, epochs)) == 2, epochs


def test_clients_are_shown_and_messages_found_and_one_is_consumed_once_more(
    java_cluster: ClusterProcess, mqadmin: MqAdmin, clients: JavaProgram
) -> None:
    servers, master = ("-n", java_cluster.name_servers), java_cluster.master()["address"]
    producers = mqadmin("producerConnection", *servers, "-g", "loading", "-t", ASKED)
    assert "@load" in producers and "loading" in mqadmin("producer", "-b", master)
    assert re.search(rf"{GROUP} +1 +V5_3_3 +PUSH", mqadmin("consumerProgress", *servers))
    (member,) = re.findall(r"\S+@one", mqadmin("consumerConnection", *servers, "-g", GROUP))
    message = read_topic(java_cluster.name_servers, ASKED)[0][0]
    asked = (*servers, "-t", ASKED)
    assert message.uniq_key in mqadmin("queryMsgByKey", *asked, "-k", message.keys)
    for command, name in (
        ("queryMsgById", message.msg_id),
        ("queryMsgByUniqueKey", message.uniq_key),
    ):
        found = mqadmin(command, *asked, "-i", name)
        assert f"[{message.keys}]" in found and f"consumerGroup={GROUP}" in found, found
    again = mqadmin("queryMsgById", *asked, "-i", message.msg_id, "-g", GROUP, "-d", member)
    assert "consumeResult=CR_SUCCESS" in again


def test_what_is_changed_while_brokers_run(java_cluster: ClusterProcess, mqadmin: MqAdmin) -> None:
    """updateBrokerConfig (25), updateTopic -a (17), setConsumeMode (401), which slaves have, too
    (402); cleanUnusedTopic (316)."""
    servers, master = ("-n", java_cluster.name_servers), java_cluster.master()["address"]
    everywhere = (*servers, "-c", "DefaultCluster")
    kept = ("-k", "fileReservedTime", "-v", "71")
    changed = mqadmin("updateBrokerConfig", *everywhere, "-a", "true", *kept)
    assert changed.count("update broker config success") == len(java_cluster.brokers), changed
    for broker in java_cluster.brokers:
        shown = mqadmin("getBrokerConfig", "-b", broker["address"])
        assert re.search(r"fileReservedTime += +71", shown)
    queues = ("-r", "2", "-w", "2", "-a", "+message.type=FIFO")
    mqadmin("updateTopic", *everywhere, "-t", "Typed", *queues)
    mode = ("-t", "Typed", "-g", "popping", "-m", "POP", "-q", "0")
    assert f"set consume mode to {master} success" in mqadmin("setConsumeMode", *everywhere, *mode)
    assert "success" in mqadmin("cleanUnusedTopic", *everywhere)

    def table(address: str, code: int) -> str:
        async def ask() -> str:
            client = RemotingClient()
            try:
                return str((await client.invoke(address, RemotingCommand.request(code), 5000)).body)
            finally:
                await client.close()

        return asyncio.run(ask())

    for broker in java_cluster.brokers:
        address = broker["address"]
        wait_for("the mode", lambda at=address: '"popping"' in table(at, 402))
        wait_for("the type", lambda at=address: '"message.type":"FIFO"' in table(at, 21))


def test_an_online_consumer_goes_back_and_its_offsets_are_cloned(
    java_cluster: ClusterProcess, mqadmin: MqAdmin, clients: JavaProgram
) -> None:
    servers = ("-n", java_cluster.name_servers)
    seen = len(clients.of("by"))
    reset = mqadmin("resetOffsetByTime", *servers, "-g", GROUP, "-t", ASKED, "-s", "0")
    assert len(re.findall(r"broker-a +\d +0", reset)) == 4, reset
    clients.wait_for(
        "the first again", lambda: any(x["queueOffset"] == 0 for x in clients.of("by")[seen:])
    )
    # As in Java, a broker takes offsets of groups that it knows only.
    mqadmin("updateSubGroup", *servers, "-c", "DefaultCluster", "-g", "cloned")
    cloned = mqadmin("cloneGroupOffset", *servers, "-s", GROUP, "-d", "cloned", "-t", ASKED)
    assert "success" in cloned


def test_elect_master(java_cluster: ClusterProcess, mqadmin: MqAdmin) -> None:
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

    def masters() -> list[str]:
        listed = mqadmin("clusterList", "-n", java_cluster.name_servers)
        rows = [line.split() for line in listed.splitlines() if line.startswith("DefaultCluster")]
        return [row[3] for row in rows if row[2] == "0"]

    # The new master registers at each name server by itself, a moment after its election.
    wait_for("clusterList to name it alone", lambda: masters() == [chosen["address"]])
