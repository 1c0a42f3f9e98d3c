"""Commands of every day: settings of topics and groups, dead letters, load, metadata, `top`."""

import asyncio
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from batonmq.client.errors import NoMasterError, SendAttempt, SendFailedError
from batonmq.mqctl.commands import bench, dlq
from batonmq.mqctl.main import cli
from batonmq.protocol.bodies import (
    BrokerData,
    ReplicaIdentity,
    SubscriptionGroupConfig,
    TopicConfig,
)
from tests.mqctl.conftest import MASTER, SLAVE, FakeGroups, Run, stored_message, write_cluster

DESTRUCTIVE = (
    ("deleteTopic", "-t", "T", "-c", "C"),
    ("deleteSubGroup", "-g", "G", "-c", "C"),
    ("resetOffset", "-g", "G", "-t", "T", "-s", "0"),
    ("skip", "-g", "G", "-t", "T"),
    ("cleanBrokerMetadata", "-bn", "broker-a", "-b", "2"),
)


@pytest.mark.parametrize("words", DESTRUCTIVE, ids=lambda words: words[0])
def test_what_destroys_asks_and_does_nothing_without_an_answer(
    mqctl: Run, fake: Any, words: tuple[str, ...]
) -> None:
    asked = mqctl(*words)
    assert asked.code == 1 and "give --yes" in asked.err and "mqctl: cluster" in asked.err
    changes = [call for call in fake.calls if call[0] != "Admin"]
    assert changes == []
    assert mqctl(*words, "--yes").code == 0
    assert len([call for call in fake.calls if call[0] != "Admin"]) == 1


def test_a_deletion_says_what_is_lost(mqctl: Run) -> None:
    assert "6 messages in 1 queue, read by G" in mqctl("deleteTopic", "-t", "T", "-c", "C").err
    gone = mqctl("deleteSubGroup", "-g", "G", "-c", "C")
    assert "connected: 1 member, waiting: 4 messages" in gone.err
    assert mqctl("deleteSubGroup", "-g", "Nope", "-c", "C", "-y").code == 1


def test_settings_of_topics_and_groups(mqctl: Run, fake: Any) -> None:
    assert mqctl("getTopicConfig", "-t", "T", "--json").json["broker-a"]["writeQueueNums"] == 4
    assert mqctl("getTopicConfig", "-t", "Nope").code == 1
    changed = mqctl("updateSubGroup", "-g", "G", "-c", "C", "-r", "3", "-s", "false", "--json")
    assert changed.json["broker-a"]["retryMaxTimes"] == 3
    config = fake.group_table["G"]
    assert (config.retry_max_times, config.consume_enable) == (3, False)
    assert mqctl("updateSubGroup", "-g", "G", "-c", "C", "-q", "2").code == 0
    assert fake.group_table["G"].retry_max_times == 3  # what is not given stays
    assert "retryMaxTimes" in mqctl("getConsumerConfig", "-g", "G").out
    assert mqctl("getConsumerConfig", "-g", "Nope").code == 1
    assert mqctl("producerConnection", "-g", "P").out.split()[4] == "p@1"
    assert mqctl("producerConnection", "-g", "Nope").code == 1
    (queue,) = mqctl("brokerConsumeStats", "--json").json["queues"]
    assert (queue["consumerGroup"], queue["diff"]) == ("G", 4)
    assert mqctl("brokerConsumeStats", "-l", "5", "--json").json == {"queues": []}


def test_metadata_go_round(mqctl: Run, fake: Any, tmp_path: Path) -> None:
    fake.topics["Fifo"] = TopicConfig(
        topic_name="Fifo", attributes={"message.type": "FIFO"}, perm=4
    )
    fake.topics["rmq_sys_X"] = TopicConfig(topic_name="rmq_sys_X")
    fake.group_table["H"] = SubscriptionGroupConfig(group_name="H", retry_max_times=2)
    fake.offsets["T@H"] = {0: 7, 1: 101}
    file = tmp_path / "metadata.json"
    assert mqctl("exportMetadata", "-f", str(file)).code == 0
    exported = mqctl("exportMetadata").json
    assert exported == json.loads(file.read_text())
    before = dict(fake.topics), dict(fake.group_table), dict(fake.offsets)
    fake.topics, fake.group_table, fake.offsets = {}, {}, {}
    dry = mqctl("importMetadata", str(file), "--dry-run")
    assert dry.code == 0 and fake.topics == {} and "nothing was changed" in dry.out
    assert mqctl("importMetadata", str(file)).code == 1 and fake.topics == {}
    ran = mqctl("importMetadata", str(file), "--yes")
    assert ran.code == 1 and "offset 101 of H in T:1" in ran.err  # behind the end of its queue
    before[0].pop("rmq_sys_X")
    before[2]["T@H"].pop(1)
    assert (fake.topics, fake.group_table, fake.offsets) == before
    document = json.loads(file.read_text())
    document["brokers"]["broker-a"]["groups"] = {}
    file.write_text(json.dumps(document))
    fake.group_table, fake.offsets = {}, {}
    ran = mqctl("importMetadata", str(file), "--yes")
    assert "imported 2 topics, 2 groups, 2 offsets" in ran.out and ran.err.count("offset ") == 1
    assert fake.offsets == before[2], "brokers refuse offsets of groups that are not there"
    assert fake.group_table["H"].retry_max_times == 16
    file.write_text("{}")
    assert "no file of `mqctl exportMetadata`" in mqctl("importMetadata", str(file), "-y").err


def test_a_dead_letter_goes_back_as_it_was_sent() -> None:
    letter = stored_message(
        topic="%DLQ%g",
        properties={
            "RETRY_TOPIC": "Orders", "KEYS": "k1", "TAGS": "t", "UNIQ_KEY": "u", "colour": "red",
            "RECONSUME_TIME": "16", "ORIGIN_MESSAGE_ID": "x", "DELAY": "0",
        },
    )  # fmt: skip
    again = dlq._again(letter)
    assert again is not None and (again.topic, again.body, again.tags) == ("Orders", b"hello", "t")
    assert again.properties["colour"] == "red" and again.properties["KEYS"] == "k1"
    assert not {"UNIQ_KEY", "RETRY_TOPIC", "DELAY", "RECONSUME_TIME"} & set(again.properties)
    assert dlq._again(stored_message(properties={})) is None


def test_bench_counts_what_was_acknowledged_and_what_was_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr("batonmq.mqctl.output.WaitLine.say", lambda _, text: told.append(text))
    looks = itertools.count()
    monkeypatch.setattr(bench, "boot_s", lambda: next(looks) / 1000)

    class Sender:
        sends = 0

        async def send(self, message: Any) -> Any:
            self.sends += 1
            if self.sends % 4 == 0:
                tries = [SendAttempt("b", "h:1", 1, 14, "full")] * self.sends
                raise SendFailedError("T", tries, self.sends)
            await asyncio.sleep(0)
            return SimpleNamespace(acknowledged=self.sends % 4 != 1, status="FLUSH_SLAVE_TIMEOUT")

    sender, load = Sender(), bench.BenchLoad("T", bytes(10))
    asyncio.run(load.run(sender, 4, 0.02))  # type: ignore[arg-type]
    found = load.document()
    assert found["sends"] == sender.sends and len(found["failed"]) == 2
    failed = sum(found["failed"].values())
    assert found["acknowledged"] + failed == found["sends"]
    assert f"{found['acknowledged']} acknowledged, {failed} failed" in told[-2]


@pytest.mark.parametrize(("count", "wanted"), [(1, 0.0), (100, 98.0), (1000, 989.0)])
def test_percentiles_are_of_the_slowest_that_counts(count: int, wanted: float) -> None:
    waits = [n / 1000 for n in range(count)]
    assert bench._ms(waits, 99) == wanted
    assert bench._ms(waits, 100) == count - 1
    assert bench._ms([], 50) is None


def test_top_shows_the_brokers_while_a_group_has_no_master(
    mqctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def masterless(*_: object) -> Any:
        raise NoMasterError("broker-a")

    monkeypatch.setattr(FakeGroups, "progress", masterless)
    done = mqctl("top", "--once")
    assert done.code == 0 and "broker-a has no reachable master" in done.out
    assert MASTER in done.out and SLAVE in done.out
    (why,) = mqctl("top", "--once", "--json").json["notKnown"]
    assert "broker-a has no reachable master" in why


def test_top_fits_a_terminal_of_80_by_24(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    many = {2 + n: f"10.20.30.{n}:10911" for n in range(30)}
    fake.info.broker_addr_table["broker-a"].broker_addrs |= many
    fake.groups = [f"a-consumer-group-with-a-very-long-name-{n:03}" for n in range(50)]
    fake.figures = {address: {"brokerRole": "SLAVE", "brokerId": "3"} for address in many.values()}
    lines = mqctl("top", "--once").out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert lines[1].split()[:3] == ["Broker", "ID", "Address"]
    document = mqctl("top", "--once", "--json").json
    assert len(document["brokers"]) == 32, "with the slave that no route has"
    assert document["topics"][0]["topic"] == "T"


def test_top_shows_dead_brokers_also_of_a_group_that_is_wholly_dead(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Name servers forget a dead broker, the controllers know it; cluster.json knows each group."""
    del fake.info.broker_addr_table["broker-a"].broker_addrs[2]
    alone = "10.0.0.9:10911"
    fake.dead = {SLAVE, alone}
    done = mqctl("top", "--once")
    rows = [line.split() for line in done.out.splitlines()]
    assert ["broker-a", "2", SLAVE, "dead"] in rows
    for name in ("NAMESRV_ADDR", "CONTROLLER_ADDR"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("BATONMQ_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    write_cluster(tmp_path / "cluster.json", os.getpid(), {"broker-z": (alone,)})
    many = {2 + n: f"10.20.30.{n}:10911" for n in range(30)}
    fake.info.broker_addr_table["broker-a"].broker_addrs |= many
    done = mqctl("top", "--once")
    lines = done.out.splitlines()
    assert ["broker-z", alone, "dead"] in [line.split() for line in lines]
    assert ["broker-a", "2", SLAVE, "dead"] in [line.split() for line in lines]
    assert len(lines) + len(done.err.splitlines()) <= 24 and max(map(len, lines)) <= 80
    brokers = mqctl("top", "--once", "--json").json["brokers"]
    assert [each["address"] for each in brokers if not each["answers"]] == [SLAVE, alone]
    info = fake.replicas.replicas_info_table["broker-a"]
    info.not_in_sync_replicas.append(
        ReplicaIdentity(alive=False, broker_address="10.0.0.8:1", broker_id=9)
    )
    assert "10.0.0.8:1" not in mqctl("top", "--once").out, "it was removed"
    fake.info.broker_addr_table.clear()
    fake.dead |= {MASTER}
    done = mqctl("top", "--once")
    assert done.out.count(" dead") == 3 and done.code == 1


def test_a_remote_group_that_is_wholly_dead_is_shown_as_the_controllers_know_it(
    mqctl: Run, fake: Any
) -> None:
    fake.lose_group("broker-z", "10.0.0.9:10911")
    done = mqctl("top", "--once")
    rows = [line.split() for line in done.out.splitlines()]
    assert done.code == 1 and ["broker-z", "1", "10.0.0.9:10911", "dead"] in rows
    rows = [line.split() for line in mqctl("clusterList").out.splitlines()]
    assert ["C", "broker-z", "1", "10.0.0.9:10911", "away"] in rows
    found = mqctl("getSyncStateSet", "--json").json["replicasInfoTable"]
    assert found.keys() == {"broker-a", "broker-z"}
    health = mqctl("health", "--json")
    assert (health.code, health.json["groupsDown"]) == (1, ["broker-z"])
    (step,) = {s for s in health.json["nextSteps"] if "broker-z" in s and "start every" in s}
    assert "cleanBrokerMetadata -bn broker-z --wholeGroup" in step


def completed(*words: str) -> list[str]:
    *before, last = words
    found = ShellComplete(cli, {}, "mqctl", "_MQCTL_COMPLETE").get_completions(before, last)
    return [each.value for each in found]


def test_a_shell_completes_names_of_the_cluster(fake: Any) -> None:
    assert completed("topicStatus", "-t", "") == ["T", "U"]
    assert completed("consumerProgress", "-g", "H") == ["H"]
    assert completed("getSyncStateSet", "-b", "br") == ["broker-a"]
    assert completed("brokerStatus", "-b", "10.0.0.2") == ["10.0.0.2:10911"]
    assert completed("deleteTopic", "-c", "") == ["C"]
    assert completed("tail", "") == ["T", "U"]
    assert completed("describe", "group", "") == ["G", "H"]
    lost = BrokerData(broker_addrs={3: "10.0.0.3:10911"}, broker_name="broker-z", cluster="C")
    fake.info.broker_addr_table["broker-z"] = lost
    assert completed("describe", "group", "") == ["G", "H"], "as far as a master answers"


def test_a_shell_completes_nothing_where_there_is_no_cluster(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR")
    monkeypatch.delenv("CONTROLLER_ADDR")
    assert completed("topicStatus", "-t", "") == []
