"""Each command against the fake cluster: JSON names, tables, exit codes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import batonmq.client.consumer.pull_consumer
import batonmq.client.producer.producer
from batonmq.client.admin.types import ControllerLogStatus, TopicChanges
from batonmq.client.instance.connections import ClientOptions
from batonmq.protocol.bodies import ReplicaIdentity
from batonmq.protocol.errors import BatonError
from batonmq.protocol.message import MessageQueue
from tests.mqctl.conftest import (
    CONTROLLERS,
    LEADER,
    MASTER,
    OFFSET_ID,
    SLAVE,
    UNIQUE_ID,
    FakeConsumer,
    FakeProducer,
    FakeTopics,
    Run,
)


def test_cluster_list_is_cluster_info(mqctl: Run) -> None:
    ran = mqctl("clusterList", "--json")
    assert ran.code == 0
    assert ran.json["brokerAddrTable"]["broker-a"]["brokerAddrs"] == {"0": MASTER, "2": SLAVE}
    assert ran.json["clusterAddrTable"] == {"C": ["broker-a"]}
    assert mqctl("clusterList", "-m", "--json").json["runtimeInfo"][MASTER]["putTps"]
    table = mqctl("cluster-list", "-c", "C").out.splitlines()
    assert table[0].split()[:4] == ["Cluster", "Broker", "ID", "Address"]
    assert table[1].split() == ["C", "broker-a", "0", MASTER, "MASTER", "V5_3_3", "1.5", "50%"]
    ran = mqctl("clusterList", "-c", "nope")
    assert (ran.code, ran.out) == (1, "")
    assert "the name server knows C" in ran.err


def test_a_broker_that_does_not_answer_is_said_and_the_rest_is_shown(mqctl: Run, fake: Any) -> None:
    fake.dead = {SLAVE}
    ran = mqctl("clusterList")
    assert ran.code == 1
    assert "no answer" in ran.out
    assert "V5_3_3" in ran.out
    assert ran.err == f"mqctl: {SLAVE}: Connection refused\n"
    ran = mqctl("getBrokerEpoch", "--json")
    assert (ran.code, len(ran.json)) == (1, 1)


def test_broker_status_is_a_kv_table(mqctl: Run) -> None:
    assert mqctl("brokerStatus", "-b", MASTER, "--json").json["table"]["putTps"] == "1.5 2 3"
    assert set(mqctl("brokerStatus", "-c", "C", "--json").json) == {MASTER, SLAVE}
    assert "putTps:" in mqctl("broker-status", "--brokerAddr", MASTER).out
    assert mqctl("brokerStatus", "-b", MASTER, "-c", "C").code == 2


def test_settings_of_brokers_are_shown_and_changed(mqctl: Run, fake: Any) -> None:
    ran = mqctl("updateBrokerConfig", "-c", "C", "-k", "fileReservedTime", "-v", "24", "--json")
    assert ran.json == {"key": "fileReservedTime", "value": "24", "addresses": [MASTER, SLAVE]}
    assert mqctl("getBrokerConfig", "--json").json[SLAVE]["fileReservedTime"] == "24"
    ran = mqctl("updateBrokerConfig", "-b", MASTER, "-k", "a", "-v", "b")
    assert ran.out == f"{MASTER}: a=b\n"
    assert "brokerName:" in mqctl("getBrokerConfig", "-b", MASTER).out
    fake.dead = {SLAVE}
    ran = mqctl("updateBrokerConfig", "-c", "C", "-k", "a", "-v", "c")
    assert (ran.code, ran.out) == (1, f"{MASTER}: a=c\n") and SLAVE in ran.err
    ran = mqctl("updateBrokerConfig", "-b", MASTER, "-k", "brokerName", "-v", "x")
    assert ran.code == 1 and "not that one" in ran.err
    assert mqctl("updateBrokerConfig", "-k", "a", "-v", "b").code == 2
    assert mqctl("getBrokerConfig", "-b", MASTER, "-c", "C").code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("updateBrokerConfig", "-k", "a", "-v", "b", "-b"),
        ("updateBrokerConfig", "-k", "a", "-v", "b", "-c"),
        ("updateTopic", "-t", "T", "--brokerAddr"),
        ("updateTopic", "-t", "T", "--cluster-name"),
        ("updateControllerConfig", "-k", "a", "-v", "b", "-a"),
        ("getBrokerConfig", "-b"),
        ("brokerStatus", "-b"),
        ("haStatus", "-b"),
        ("getSyncStateSet", "-b"),
        ("getBrokerEpoch", "-b"),
    ],
)
def test_an_empty_place_is_wrong_usage_and_not_every_place(
    mqctl: Run, fake: Any, arguments: tuple[str, ...]
) -> None:
    ran = mqctl(*arguments, "")
    assert ran.code == 2 and "it is empty" in ran.err
    assert fake.calls == []


def test_topic_list_and_its_groups(mqctl: Run) -> None:
    assert mqctl("topicList", "--json").json == {"topicList": ["T", "U"]}
    rows = mqctl("topicList", "-c", "--json").json["topicList"]
    assert rows == [
        {"clusterName": "C", "topic": "T", "consumerGroup": "G"},
        {"clusterName": "C", "topic": "U", "consumerGroup": ""},
    ]


def test_topic_route_is_topic_route_data(mqctl: Run) -> None:
    route = mqctl("topicRoute", "-t", "T", "--json").json
    assert route["brokerDatas"][0]["brokerName"] == "broker-a"
    assert route["queueDatas"][0]["writeQueueNums"] == 4
    assert "RW-" in mqctl("topicRoute", "-t", "T").out
    assert mqctl("topicRoute", "-t", "nope").code == 1
    assert mqctl("topicRoute").code == 2


def test_topic_status_has_the_queues_with_their_offsets(mqctl: Run) -> None:
    (entry,) = mqctl("topicStatus", "-t", "T", "--json").json["offsetTable"]
    assert entry == {
        "topic": "T",
        "brokerName": "broker-a",
        "queueId": 0,
        "minOffset": 3,
        "maxOffset": 9,
        "lastUpdateTimestamp": 1_700_000_000_000,
    }


def test_stats_tell_what_comes_in_what_goes_out_and_who_is_behind(mqctl: Run, fake: Any) -> None:
    came_in = {"topic": "T", "group": None, "tps": 2.5, "day": 100, "diff": None}
    got = {"topic": "T", "group": "G", "tps": 1.25, "day": 96, "diff": 4}
    assert mqctl("statsAll", "-t", "T", "--json").json == {"topics": [came_in, got]}
    idle = {"topic": "U", "group": None, "tps": 0.0, "day": 0, "diff": None}
    assert mqctl("statsAll", "--json").json == {"topics": [came_in, got, idle]}
    assert mqctl("statsAll", "-a", "--json").json == {"topics": [came_in, got]}
    fake.calm = True
    was_active = [{**each, "tps": 0.0} for each in (came_in, got)]
    assert mqctl("statsAll", "-a", "--json").json == {"topics": was_active}, "today, as in Java"
    fake.calm = False
    shown = mqctl("statsAll").out.splitlines()
    assert [line.split() for line in shown[1:3]] == [
        ["T", "(in)", "2.50", "100"],
        ["T", "G", "1.25", "96", "4"],
    ]


def test_update_topic_passes_the_settings_on(mqctl: Run, fake: Any) -> None:
    ran = mqctl(
        "updateTopic", "-t", "T", "-c", "C", "-r", "2", "-w", "3", "-p", "4", "-o", "true",
        "-u", "true", "-a", "+message.type=FIFO,-old", "--json",
    )  # fmt: skip
    assert ran.code == 0
    assert ran.json["readQueueNums"] == 2
    assert ran.json["brokerAddrs"] == {"broker-a": MASTER}
    assert ran.json["topicConfigs"]["broker-a"]["writeQueueNums"] == 3
    assert fake.calls[-1] == (
        "change_topic",
        "T",
        TopicChanges(
            read_queue_nums=2,
            write_queue_nums=3,
            perm=4,
            order=True,
            unit=True,
            attributes={"+message.type": "FIFO", "-old": ""},
        ),
        {"cluster": "C", "broker": None, "force": False},
    )


def test_update_topic_changes_only_what_is_given(mqctl: Run, fake: Any) -> None:
    """Made of defaults, `-p 6` took a topic of 16 queues to 8."""
    ran = mqctl("updateTopic", "-t", "T", "-b", MASTER, "-p", "6", "--force")
    assert ran.code == 0 and "2 read queues, 3 write queues, RW-" in ran.out
    where = {"cluster": None, "broker": MASTER, "force": True}
    assert fake.calls[-1] == ("change_topic", "T", TopicChanges(perm=6), where)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-t", "T"),
        ("-t", "T", "-c", "C", "-b", MASTER),
        ("-c", "C"),
        ("-t", "T", "-c", "C", "-p", "7"),
        ("-t", "T", "-c", "C", "-r", "many"),
        ("-t", "T", "-c", "C", "-a", "message.type=FIFO"),
        ("-t", "T", "-c", "C", "-a", "-x,-x"),
        ("-t", "T", "-c", "C", "-o", "perhaps"),
    ],
)
def test_update_topic_with_wrong_options_is_wrong_usage(
    mqctl: Run, fake: Any, arguments: tuple[str, ...]
) -> None:
    ran = mqctl("updateTopic", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert fake.calls == []


def test_delete_topic(mqctl: Run, fake: Any) -> None:
    ran = mqctl("deleteTopic", "-t", "T", "-c", "C", "--yes", "--json")
    assert ran.json == {"topicName": "T", "clusterName": "C", "brokerAddrs": {"broker-a": MASTER}}
    assert fake.calls[-1] == ("delete_topic", "T", "C")
    assert mqctl("deleteTopic", "-t", "T").code == 2


def test_consumer_connection(mqctl: Run) -> None:
    document = mqctl("consumerConnection", "-g", "G", "--json").json
    assert document["connectionSet"][0]["clientId"] == "10.0.0.9@1"
    shown = mqctl("consumerConnection", "-g", "G").out
    assert "10.0.0.9:5" in shown and "a || b" in shown
    ran = mqctl("consumerConnection", "-g", "nobody")
    assert ran.code == 1 and "no member of group nobody" in ran.err


def test_reset_offset_and_skip(mqctl: Run, fake: Any) -> None:
    document = mqctl("resetOffset", "-g", "G", "-t", "T", "-s", "0", "-y", "--json").json
    assert document == {
        "offsetTable": [{"topic": "T", "brokerName": "broker-a", "queueId": 0, "offset": 7}]
    }
    one = ("-b", "broker-a", "-q", "3", "-o", "7")
    assert "broker-a" in mqctl("resetOffset", "-g", "G", "-t", "T", *one, "-y").out
    assert mqctl("skip", "-g", "G", "-t", "T", "-y").code == 0
    assert [call for call in fake.calls if call[0] == "reset_offsets"] == [
        ("reset_offsets", "G", "T", 0, None),
        ("reset_offsets", "G", "T", 0, ("broker-a", 3, 7)),
        ("reset_offsets", "G", "T", -1, None),
    ]
    for wrong in ((), ("-s", "0", *one), ("-b", "broker-a")):
        assert mqctl("resetOffset", "-g", "G", "-t", "T", *wrong).code == 2


def test_consumer_progress_of_one_group_and_of_all(mqctl: Run) -> None:
    one = mqctl("consumerProgress", "-g", "G", "--json").json
    assert (one["consumerGroup"], one["diffTotal"]) == ("G", 4)
    assert one["consumerIdList"] == ["10.0.0.9@1"]
    assert one["offsetTable"][0]["brokerOffset"] == 9
    assert one["offsetTable"][0]["consumerOffset"] == 5
    assert (one["offsetTable"][0]["pullOffset"], one["offsetTable"][0]["inflight"]) == (8, 3)
    assert one["inflightTotal"] == 3
    everyone = mqctl("consumerProgress", "--json").json["groupList"]
    assert [group["consumerGroup"] for group in everyone] == ["G", "H"]
    shown = mqctl("consumerProgress", "-g", "G").out
    assert "Diff total: 4" in shown and "In flight:  3" in shown and "Inflight" in shown
    assert mqctl("consumerProgress", "-g", "H").code == 0
    ran = mqctl("consumerProgress", "-g", "nobody")
    assert (ran.code, ran.out) == (1, "")
    assert "the brokers know G, H" in ran.err


def test_ha_status_is_ha_runtime_info(mqctl: Run) -> None:
    status = mqctl("haStatus", "-b", MASTER, "--json").json
    assert (status["master"], status["inSyncSlaveNums"]) == (True, 1)
    assert status["haConnectionInfo"][0]["slaveAckOffset"] == 300
    assert list(mqctl("haStatus", "-c", "C", "--json").json) == [MASTER]
    assert "1 slave in sync" in mqctl("ha-status").out
    assert mqctl("haStatus", "-b", SLAVE).out.startswith(f"{SLAVE}: slave")


def test_sync_state_set_is_broker_replicas_info(mqctl: Run) -> None:
    for where in (("-b", "broker-a"), ("-c", "C"), ()):
        info = mqctl("getSyncStateSet", *where, "--json").json["replicasInfoTable"]["broker-a"]
        assert (info["masterBrokerId"], info["masterEpoch"]) == (1, 3)
        assert [r["brokerId"] for r in info["inSyncReplicas"]] == [1, 2]
        assert info["notInSyncReplicas"] == []
    assert "masterEpoch 3" in mqctl("getSyncStateSet").out
    ran = mqctl("getSyncStateSet", "-b", "nope", "--json")
    assert (ran.code, ran.json["exitCode"]) == (1, 1)
    assert "knows no broker group nope" in ran.err


def test_a_controller_address_is_enough_where_the_group_is_named(
    mqctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR")
    monkeypatch.delenv("CONTROLLER_ADDR")
    assert mqctl("getSyncStateSet", "-a", LEADER, "-b", "broker-a").code == 0
    assert mqctl("electMaster", "-a", LEADER, "-bn", "broker-a", "-b", "1", "-c", "C").code == 0
    ran = mqctl("getSyncStateSet", "-a", LEADER)
    assert ran.code == 2
    assert "give -b NAME" in ran.err


def test_broker_epoch_is_a_list_of_epoch_entry_cache(mqctl: Run) -> None:
    caches = mqctl("getBrokerEpoch", "-b", "broker-a", "--json").json
    assert len(caches) == 2
    assert caches[0]["epochList"][0] == {"epoch": 1, "startOffset": 0, "endOffset": (1 << 63) - 1}
    assert mqctl("getBrokerEpoch").out.splitlines()[1].split()[3:] == ["1", "0", "300"]
    assert mqctl("getBrokerEpoch", "-b", "nope").code == 1


def test_controller_metadata_has_the_header_of_the_leader(mqctl: Run, fake: Any) -> None:
    told = mqctl("getControllerMetaData", "--json").json
    assert told["controllerLeaderAddress"] == LEADER
    assert told["controllerLeaderId"] == "n0"
    assert told["isLeader"] is True
    assert [c["alive"] for c in told["controllers"]] == [True, True]
    assert LEADER in mqctl("getControllerMetaData").out
    del fake.metadata[LEADER]
    told = mqctl("getControllerMetaData", "--json").json
    assert (told["isLeader"], told["controllers"][0]["alive"]) == (False, False)
    fake.metadata.clear()
    ran = mqctl("getControllerMetaData", "--json")
    assert (ran.code, ran.json["exitCode"]) == (1, 1)
    assert "no controller answers" in ran.err


def test_controller_metadata_shows_each_nodes_log(mqctl: Run, fake: Any) -> None:
    log = ControllerLogStatus("n0", 3, 7, 120, 121, 5000, 90, 2049, 30, 100, "ab" * 32, ())
    follower = list(fake.metadata)[1]
    fake.metadata[LEADER] = replace(fake.metadata[LEADER], log=log)
    sick = msgspec.structs.replace(
        log, self_id="n1", applied_index=118, problems=("one thing", "another")
    )
    fake.metadata[follower] = replace(fake.metadata[follower], log=sick)
    first, second = mqctl("getControllerMetaData", "--json").json["controllers"]
    assert (first["raftTerm"], first["appliedIndex"], first["committedIndex"]) == (7, 120, 121)
    assert (first["journalBytes"], first["snapshotBytes"], first["snapshotIndex"]) == (
        5000,
        2049,
        30,
    )
    assert (first["digestIndex"], first["stateDigest"]) == (100, "ab" * 32)
    assert (second["selfId"], second["problems"]) == ("n1", ["one thing", "another"])
    rows = [line.split() for line in mqctl("getControllerMetaData").out.splitlines()[-2:]]
    assert rows[0] == [LEADER, "yes", LEADER, "7", "120", "121", "5", "3"]
    assert rows[1][3:] == ["7", "118", "121", "5", "3", *["one", "thing;", "another"]]
    del fake.metadata[follower]
    assert "no answer: refused" in mqctl("getControllerMetaData").out


def test_controller_config_is_read_and_changed_on_each(mqctl: Run, fake: Any) -> None:
    read = mqctl("getControllerConfig", "--json").json
    assert list(read) == [LEADER, "10.0.0.2:9878"]
    ran = mqctl("updateControllerConfig", "-k", "a", "-v", "b", "--json")
    assert ran.json == {"key": "a", "value": "b", "addresses": [LEADER, "10.0.0.2:9878"]}
    assert ("update_config", {"a": "b"}, LEADER) in fake.calls
    ran = mqctl("updateControllerConfig", "-k", "configStorePath", "-v", "x")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.count("NO_PERMISSION (16): not that one") == 2
    ran = mqctl("updateControllerConfig", "-k", "unknown", "-v", "x")
    assert (ran.code, ran.out) == (1, "")
    assert f"{LEADER} has no setting unknown" in ran.err
    assert mqctl("updateControllerConfig", "-k", "a").code == 2


def test_elect_master_waits_for_the_new_master_and_shows_the_header(mqctl: Run, fake: Any) -> None:
    assert (
        "is master of masterEpoch 3, before it was broker 2"
        in mqctl("electMaster", "-bn", "broker-a", "-b", "1").out
    )
    fake.drained = [
        {"kind": "drained", "broker_name": "broker-a", "master_epoch": 2, "broker_id": 2,
         "time_ms": 1001, "json": '{"heldMs": 4, "drainedOffset": 77}'}
    ]  # fmt: skip
    ran = mqctl("electMaster", "-bn", "broker-a", "-b", "1", "-c", "C", "--json")
    assert ran.code == 0
    assert ran.json == {
        "brokerName": "broker-a",
        "masterBrokerId": 1,
        "masterAddress": MASTER,
        "masterEpoch": 3,
        "syncStateSetEpoch": 5,
        "syncStateSet": [1],
        "alreadyMaster": False,
        "masterBefore": 2,
        "heldMs": 4,
        "gapMs": 36,
    }
    assert ("elect_master", "C", "broker-a", 1) in fake.calls
    assert (
        f"broker 2 handed over to broker 1 at {MASTER} in masterEpoch 3: sends were held for 4 ms;"
        " 36 ms from then to the new master's first acknowledgement"
    ) in mqctl("electMaster", "-bn", "broker-a", "-b", "1", "-c", "C").out
    assert "this broker is the master already" in mqctl("electMaster", "-bn", "broker-a").out


def test_r7_an_unclean_election_is_confirmed_and_says_what_may_be_lost(
    mqctl: Run, fake: Any
) -> None:
    """1 answers with the shorter log, 2 does not answer at all; without a terminal only --yes."""
    fake.log_ends = {MASTER: (300, 200)}
    fake.dead = {SLAVE}
    ask = ("electMaster", "-bn", "broker-a", "-b", "1", "--unclean")
    ran = mqctl(*ask)
    assert ran.code == 1
    assert not [call for call in fake.calls if call[0] == "elect_master"]
    assert "give --yes" in ran.err
    assert "log end 300, confirmOffset 200" in ran.err
    assert "in sync, but silent: broker 2" in ran.err
    ran = mqctl(*ask, "--yes", "--json")
    assert ran.json["masterBrokerId"] == 1
    assert fake.calls[-1] == ("elect_master", "", "broker-a", 1, "unclean")
    fake.dead = set()
    fake.log_ends[SLAVE] = (900, 800)
    assert "500 bytes of acknowledged messages lost" in mqctl(*ask, "-y").err
    fake.replicas.replicas_info_table["broker-a"].in_sync_replicas.append(
        ReplicaIdentity(alive=False, broker_address="10.0.0.3:10911", broker_id=3)
    )
    fake.dead = {"10.0.0.3:10911"}
    told = mqctl(*ask, "-y").err
    assert "500 bytes of acknowledged messages lost; in sync, but silent: broker 3" in told
    assert mqctl("electMaster", "-bn", "broker-a", "--unclean", "-y").code == 2
    assert mqctl("electMaster", "-bn", "nope", "-b", "1", "--unclean", "-y").code == 1


def test_r44_a_master_out_of_sight_is_passed_over_by_a_flag_of_its_own(
    mqctl: Run, fake: Any
) -> None:
    """`--yes` alone is no acceptance of what the controllers tell; scripts used it before."""
    fake.log_ends = {MASTER: (300, 200)}
    fake.dead = {SLAVE}
    fake.out_of_sight = "broker 2: last heard 4200 ms ago, log end 900: give --cut-later-acks"
    fake.opened = {"maxOffset": 300, "confirmOffset": 200, "offsetsClamped": 7}
    ask = ("electMaster", "-bn", "broker-a", "-b", "1", "--unclean", "--yes")
    for form in ((), ("--json",)):
        ran = mqctl(*ask, *form)
        assert ran.code == 1 and (not ran.out or ran.json["code"] == 2012)
        assert fake.out_of_sight in ran.err
    ran = mqctl(*ask, "--cut-later-acks", "--json")
    assert fake.calls[-1] == ("elect_master", "", "broker-a", 1, "unclean", "cut later acks")
    told = ("unclean", "cutLaterAcks", "logEnd", "confirmed", "offsetsClamped")
    assert ran.code == 0 and [ran.json[name] for name in told] == [True, True, 300, 200, 7]
    assert (
        "7 offsets of groups lay above the end of their queue"
        in mqctl(*ask, "--cut-later-acks").out
    )
    ran = mqctl("electMaster", "-bn", "broker-a", "-b", "1", "--cut-later-acks")
    assert ran.code == 2 and "--cut-later-acks belongs to --unclean" in ran.err


def test_an_unclean_election_of_an_unknown_broker_is_refused_by_name_before_anything(
    mqctl: Run, fake: Any
) -> None:
    ran = mqctl("electMaster", "-bn", "broker-a", "-b", "9", "--unclean", "--yes")
    assert ran.code == 1
    assert ran.err.endswith("mqctl: broker-a has no broker 9; known are 1, 2\n")
    assert not [call for call in fake.calls if call[0] == "elect_master"]


def test_r17_a_replica_is_repaired_only_when_it_is_suspect_and_somebody_says_yes(
    mqctl: Run, fake: Any
) -> None:
    ask = ("repairReplica", "-b", MASTER)
    ran = mqctl(*ask, "--yes")
    assert ran.code == 1 and "not suspect" in ran.err
    fake.suspect = "a file at offset 100: CRC"
    ran = mqctl(*ask)
    assert ran.code == 1 and "give --yes" in ran.err and fake.suspect in ran.err
    assert not [call for call in fake.calls if call[0] == "repair_replica"]
    assert mqctl(*ask, "--yes", "--json").json == {
        "brokerAddr": MASTER,
        "suspect": fake.suspect,
        "done": "cut at 100",
    }
    assert fake.calls[-1] == ("repair_replica", MASTER, fake.suspect)


def test_elect_master_that_is_refused_or_does_not_come_up_ends_with_1(
    mqctl: Run, fake: Any
) -> None:
    ran = mqctl("electMaster", "-bn", "nope", "-b", "1")
    assert (ran.code, ran.out) == (1, "")
    assert "(2010): unknown set" in ran.err
    assert mqctl("electMaster", "-bn", "broker-a", "-b", "2").code == 1
    fake.dead = {MASTER}
    ran = mqctl("electMaster", "-bn", "broker-a", "-b", "1", "--timeout", "0.02")
    assert ran.code == 1
    assert "elected, but after 0.02 s" in ran.err
    fake.dead.clear()
    fake.masters = {SLAVE}
    ran = mqctl("electMaster", "-bn", "broker-a", "-b", "1", "--timeout", "0.02")
    assert ran.code == 1
    assert f"{MASTER} does not yet serve as master" in ran.err
    assert mqctl("electMaster", "-b", "1").code == 2
    assert mqctl("electMaster", "-bn", "broker-a", "-b", "x").code == 2


def test_clean_broker_metadata(mqctl: Run, fake: Any) -> None:
    ran = mqctl("cleanBrokerMetadata", "-bn", "broker-a", "-b", "2;3", "-c", "C", "-y", "--json")
    assert ran.json["brokerControllerIdsToClean"] == [2, 3]
    assert fake.calls[-1] == ("clean", "C", "broker-a", (2, 3), False)
    assert mqctl("cleanBrokerMetadata", "-bn", "broker-a", "-b", "1", "-y").code == 1
    assert mqctl("cleanBrokerMetadata", "-bn", "broker-a", "-b", "1", "-l", "-y").code == 0
    assert mqctl("cleanBrokerMetadata", "-bn", "broker-a", "-b", "one").code == 2


def test_timeline_tells_each_step_with_its_duration(mqctl: Run) -> None:
    (story,) = mqctl("timeline", "--json").json
    told = {step: after for step, after in story["durationsMs"].items() if after is not None}
    assert told == {"detected": 0, "proposed": 2, "opened": 20, "firstAck": 33}
    assert (story["kind"], story["masterBefore"], story["masterBrokerId"]) == ("failover", 2, 1)
    assert (story["detectedTimestamp"], story["unavailableMs"]) == (1000, 33)
    text = mqctl("timeline", "-bn", "broker-a", "--last", "1").out
    assert "(00:00:01.000 UTC)" in text
    for step in ("detected     +0 ms", "proposed     +2 ms", "opened       +20 ms", "+33 ms"):
        assert step in text
    assert mqctl("timeline", "-bn", "other", "--json").json == []


def test_timeline_needs_one_controller_and_says_which_did_not_answer(mqctl: Run, fake: Any) -> None:
    fake.dead = {CONTROLLERS[0]}
    ran = mqctl("timeline", "--json")
    assert (ran.code, len(ran.json)) == (0, 1)
    assert f"mqctl: note: no answer: {CONTROLLERS[0]}" in ran.err
    fake.dead = set(CONTROLLERS)
    assert mqctl("timeline").code == 1


def test_timeline_shows_what_was_asked_for(mqctl: Run) -> None:
    assert mqctl("timeline", "--since", "1h", "--json").json == []
    assert len(mqctl("timeline", "--since", "1033", "--json").json) == 1
    assert mqctl("timeline", "--since", "soon").code == 2
    assert mqctl("timeline", "--follow", "--events").code == 2
    events = [json.loads(line) for line in mqctl("timeline", "--events").out.splitlines()]
    assert [event["kind"] for event in events] == ["elected", "opened", "first_ack"]


def test_ctrl_c_is_the_usual_end_only_of_what_prints_again_and_again(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ctrl_c(*_: Any) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncio.sleep", ctrl_c)
    monkeypatch.setattr(FakeTopics, "names", ctrl_c)
    assert mqctl("clusterList", "-i", "1").code == 0
    assert mqctl("topicList").code == 1
    fake.dead = {SLAVE}
    assert mqctl("health", "--watch").code == 3


def test_timeline_follows_and_tells_each_step_once(
    mqctl: Run, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks at the same history, one at no controller at all, then ctrl-C."""
    looks: list[float] = []

    async def look(seconds: float) -> None:
        looks.append(seconds)
        fake.dead = {None} if len(looks) == 2 else set()
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("asyncio.sleep", look)
    ran = mqctl("timeline", "--follow", "--last", "5")
    assert (ran.code, len(looks)) == (0, 4)
    assert ran.out.count("failover") == ran.out.count("first ack") == 1
    assert ran.err.count("no controller answers") == 1
    looks.clear()
    assert mqctl("timeline", "--follow").out == ""


def test_timeline_reads_files_where_no_controller_lives(
    mqctl: Run, fake: Any, tmp_path: Path
) -> None:
    """Two controllers' files: one lacks the end, is torn and tells another winner."""
    fake.dead = set(CONTROLLERS)
    elected = {"kind": "elected", "log": "a", "raft_index": 3, "time_ms": 7, "broker_name": "g",
               "broker_id": 1, "master_epoch": 2}  # fmt: skip
    acked = {"kind": "first_ack", "log": "a", "raft_index": 4, "time_ms": 9, "broker_name": "g",
             "broker_id": 1, "master_epoch": 2}  # fmt: skip
    lines = [json.dumps(each) + "\n" for each in (elected, acked)]
    (tmp_path / "history-n0.000001.jsonl").write_text(lines[0])
    (tmp_path / "history-n0.jsonl").write_text(lines[1])
    other = json.dumps(elected | {"broker_id": 2}) + "\n"
    (tmp_path / "history-n1.jsonl").write_text(other + lines[1][:20])
    ran = mqctl("timeline", "--file", str(tmp_path), "--json")
    (story,) = ran.json
    assert (ran.code, story["masterBrokerId"], story["firstAckTimestamp"]) == (0, 1, 9)
    assert "the last line is torn (20 bytes left out)" in ran.err
    assert "disagree about 1 event, the first at index 3" in ran.err
    assert mqctl("timeline", "--file", str(tmp_path / "none")).code == 2


def test_query_by_id_finds_by_either_id(mqctl: Run, fake: Any) -> None:
    found = mqctl("queryMsgById", "-i", OFFSET_ID, "--json").json
    assert (found["msgId"], found["offsetMsgId"]) == (UNIQUE_ID, OFFSET_ID)
    assert (found["commitLogOffset"], found["body"]) == (100, "hello")
    assert mqctl("queryMsgById", "-i", UNIQUE_ID, "-t", "T").code == 0
    ran = mqctl("queryMsgById", "-i", UNIQUE_ID)
    assert ran.code == 2
    assert "give the topic with -t" in ran.err
    both = mqctl("queryMsgById", "-i", f"{OFFSET_ID},{OFFSET_ID}", "--json").json
    assert len(both) == 2


def test_query_by_id_asks_the_other_replicas_when_the_named_broker_is_gone(
    mqctl: Run, fake: Any
) -> None:
    """The log is the same bytes on each replica, and the record itself names where it was
    stored: another message at that offset of another group is not taken for it."""
    fake.dead = {MASTER}
    assert mqctl("queryMsgById", "-i", OFFSET_ID, "--json").json["offsetMsgId"] == OFFSET_ID
    fake.messages[0].msg_id = "0A000003" + OFFSET_ID[8:]
    ran = mqctl("queryMsgById", "-i", OFFSET_ID)
    assert ran.code == 1
    assert "Connection refused" in ran.err


def test_query_by_key_is_a_list_of_messages(mqctl: Run, fake: Any) -> None:
    found = mqctl("queryMsgByKey", "-t", "T", "-k", "k2", "-m", "5", "-b", "3", "--json").json
    assert [m["keys"] for m in found] == ["k1 k2"]
    limits = {"max_messages": 5, "begin_ms": 3, "end_ms": (1 << 63) - 1}
    assert ("by_key", "T", "k2", limits) in fake.calls
    assert mqctl("queryMsgByKey", "-t", "T", "-k", UNIQUE_ID).code == 0
    ran = mqctl("queryMsgByKey", "-t", "T", "-k", "none", "--json")
    assert (ran.code, ran.json) == (1, [])


def test_a_body_that_is_no_text_is_given_in_base64(mqctl: Run, fake: Any) -> None:
    fake.messages[0].body = b"\xff\x00"
    found = mqctl("queryMsgById", "-i", OFFSET_ID, "--json").json
    assert (found["body"], found["bodyBase64"]) == (None, "/wA=")
    assert "2 bytes, hex ff00" in mqctl("queryMsgById", "-i", OFFSET_ID).out


@pytest.mark.parametrize(
    "line",
    [
        "sendMessage -t T -p x",
        "consumeMessage -t T",
        "tail T",
        "queryMsgByOffset -t T -b broker-a -i 0 -o 0",
        "bench T --seconds 1",
        "dlq show g",
        "dlq resend g --yes",
    ],
)
def test_every_client_that_a_command_opens_signs(
    mqctl: Run, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    opened = []

    def open_client(*_: Any, client_options: ClientOptions, **__: Any) -> None:
        opened.append(client_options)
        raise BatonError("that is enough")

    monkeypatch.setattr(batonmq.client.producer.producer, "Producer", open_client)
    monkeypatch.setattr(batonmq.client.consumer.pull_consumer, "PullConsumer", open_client)
    monkeypatch.setenv("BATONMQ_ACCESS_KEY", "shop")
    monkeypatch.setenv("BATONMQ_SECRET_KEY", "a long secret")
    ran = mqctl(*line.split())
    assert ran.code == 1 and "that is enough" in ran.err, ran.err
    assert [each.credentials.access_key for each in opened if each.credentials] == ["shop"]


def test_send_message_is_a_send_result(mqctl: Run, producer: type[FakeProducer]) -> None:
    ran = mqctl(
        "sendMessage", "-t", "T", "-p", "hällo", "-k", "k1 k2", "-c", "tag",
        "-b", "broker-a", "-i", "1", "--property", "a=b", "--json",
    )  # fmt: skip
    assert ran.json == {
        "sendStatus": "SEND_OK",
        "msgId": UNIQUE_ID,
        "offsetMsgId": OFFSET_ID,
        "messageQueue": {"topic": "T", "brokerName": "broker-a", "queueId": 1},
        "queueOffset": 7,
    }
    (message,) = producer.sent
    assert message.body == "hällo".encode()
    assert message.properties == {"TAGS": "tag", "KEYS": "k1 k2", "a": "b"}


def test_send_message_that_is_not_acknowledged_ends_with_1(
    mqctl: Run, producer: type[FakeProducer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "status", "FLUSH_SLAVE_TIMEOUT")
    ran = mqctl("sendMessage", "-t", "T", "-p", "x", "--json")
    assert (ran.code, ran.json["sendStatus"]) == (1, "FLUSH_SLAVE_TIMEOUT")
    assert "not acknowledged" in ran.err


def test_send_message_to_a_queue_that_is_not_there(
    mqctl: Run, producer: type[FakeProducer]
) -> None:
    ran = mqctl("sendMessage", "-t", "T", "-p", "x", "-b", "broker-a", "-i", "9")
    assert ran.code == 1
    assert "the topic has broker-a:0, broker-a:1" in ran.err
    assert mqctl("sendMessage", "-t", "T", "-p", "x", "-i", "1").code == 2
    assert mqctl("sendMessage", "-t", "T").code == 2
    assert mqctl("sendMessage", "-t", "T", "-p", "x", "--property", "nothing").code == 2


def test_consume_message_with_options_that_do_not_go_together(mqctl: Run) -> None:
    for arguments in (
        ("-i", "1"),
        ("-b", "broker-a", "-o", "3"),
        ("-s", "2000", "-e", "1000"),
        ("-c", "0"),
        ("-s", "soon"),
    ):
        assert mqctl("consumeMessage", "-t", "T", *arguments).code == 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        (("-c", "4"), [(0, 0), (0, 1), (0, 2), (1, 0)]),
        (("-b", "broker-a", "-i", "1"), [(1, 0), (1, 1), (1, 2)]),
        (("-b", "broker-a", "-i", "1", "-o", "2"), [(1, 2)]),
        (("-s", "101", "-e", "101"), [(0, 1), (1, 1)]),
        (("-b", "broker-a", "-i", "0", "-o", "3"), []),
    ],
)
def test_consume_message_reads_what_is_there_now(
    mqctl: Run, consumer: None, arguments: tuple[str, ...], wanted: list[tuple[int, int]]
) -> None:
    ran = mqctl("consumeMessage", "-t", "T", *arguments, "--json")
    assert ran.code == 0
    assert [(m["queueId"], m["queueOffset"]) for m in ran.json] == wanted


def test_consume_message_for_people(mqctl: Run, consumer: None) -> None:
    assert mqctl("consumeMessage", "-t", "T").out.count("Body:            hello") == 6
    assert "no message" in mqctl("consumeMessage", "-t", "T", "-s", "500").out
    ran = mqctl("consumeMessage", "-t", "T", "-b", "broker-z")
    assert ran.code == 1
    assert "those that can be read are broker-a:0, broker-a:1" in ran.err


def test_a_bug_is_one_line_too(mqctl: Run, consumer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeConsumer, "max_offset", None)
    ran = mqctl("consumeMessage", "-t", "T")
    assert ran.code == 1
    assert ran.err.startswith("mqctl: internal error")
    assert ran.err.count("\n") == 1


def test_a_file_that_cannot_be_used_is_no_bug(
    mqctl: Run, consumer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/etc/key.pem")

    monkeypatch.setattr(FakeConsumer, "max_offset", refuse)
    ran = mqctl("consumeMessage", "-t", "T")
    assert (ran.code, ran.err) == (1, "mqctl: /etc/key.pem: Permission denied\n")


def test_unknown_commands_and_options_are_wrong_usage(mqctl: Run) -> None:
    for arguments in (("nope",), ("clusterList", "--nope"), ("topicRoute", "-t")):
        ran = mqctl(*arguments)
        assert (ran.code, ran.out) == (2, "")


def test_an_error_is_a_document_where_json_is_asked_for(mqctl: Run) -> None:
    ran = mqctl("topicRoute", "-t", "nope", "--json")
    assert (ran.code, ran.json["exitCode"], ran.json["code"]) == (1, 1, 17)
    assert "No topic route info" in ran.json["error"] and "No topic route info" in ran.err
    for wrong in (("topicRoute", "--json"), ("clusterList", "--json", "-x"), ("nope", "--json")):
        ran = mqctl(*wrong)
        assert (ran.code, ran.json["exitCode"]) == (2, 2)
        assert ran.json["error"] and ran.err


def test_a_broker_has_one_id_everywhere_and_a_dead_one_is_listed(mqctl: Run, fake: Any) -> None:
    """In a route a master is 0; the controllers, health and electMaster call it by its own id."""
    fake.figures = {MASTER: {"brokerId": "1", "brokerActive": "true"},
                    SLAVE: {"brokerId": "2", "brokerActive": "false"}}  # fmt: skip
    for words in (("clusterList", "-m"), ("topicRoute", "-t", "T")):
        shown = mqctl(*words).out.split()
        assert [shown[shown.index(at) - 1] for at in (MASTER, SLAVE)] == ["1", "2"], words
    rows = [line.split() for line in mqctl("clusterList").out.splitlines()]
    assert [row[2:5] for row in rows[1:]] == [["1", MASTER, "MASTER"], ["2", SLAVE, "SLAVE"]]
    assert [row[-1] for row in rows] == ["Writes", "yes", "50%"], "a slave takes no writes: no news"
    fake.problems = {MASTER: ["refuses writes: the disk is full"]}
    assert mqctl("clusterList").out.splitlines()[1].split()[-1] == "no"
    del fake.info.broker_addr_table["broker-a"].broker_addrs[2]
    fake.figures[SLAVE]["brokerRole"] = "FENCED"
    rows = [line.split() for line in mqctl("clusterList").out.splitlines()]
    assert rows[2][:6] == ["C", "broker-a", "2", SLAVE, "FENCED", "V5_3_3"], "it lives"
    fake.dead = {SLAVE}
    rows = [line.split() for line in mqctl("clusterList").out.splitlines()]
    assert rows[2] == ["C", "broker-a", "2", SLAVE, "away"]


def test_groups_of_the_brokers_themselves_are_listed_on_request(mqctl: Run, fake: Any) -> None:
    fake.groups.append("CID_RMQ_SYS_TRANS")
    assert "CID_RMQ_SYS_TRANS" not in mqctl("consumerProgress").out
    assert "CID_RMQ_SYS_TRANS" in mqctl("consumerProgress", "--system").out


def test_forgetting_a_whole_group_is_asked_for_by_name(mqctl: Run, fake: Any) -> None:
    ran = mqctl("cleanBrokerMetadata", "-bn", "broker-a")
    assert ran.code == 2 and "--wholeGroup" in ran.err
    assert mqctl("cleanBrokerMetadata", "-bn", "broker-a", "-b", "2", "--wholeGroup").code == 2
    assert not [call for call in fake.calls if call[0] == "clean"]
    assert mqctl("cleanBrokerMetadata", "-bn", "broker-a", "--wholeGroup", "-y").code == 0
    assert fake.calls[-1] == ("clean", "", "broker-a", (), False)


def test_a_dry_run_shows_what_a_reset_would_do_and_does_nothing(mqctl: Run, fake: Any) -> None:
    ran = mqctl("resetOffset", "-g", "G", "-t", "T", "-s", "10m", "--dry-run")
    assert ran.code == 0
    assert [line.split() for line in ran.out.splitlines()[1:3]] == [
        ["T", "broker-a", "0", "5", "9", "4", "skipped"],
        ["T", "broker-a", "1", "7", "2", "5", "again"],
    ]
    table = mqctl("skip", "-g", "G", "-t", "T", "--dry-run", "--json").json["offsetTable"]
    assert [(e["before"], e["offset"]) for e in table] == [(5, 9), (7, 2)]
    assert not [call for call in fake.calls if call[0] == "reset_offsets"]


def test_a_time_line_without_news_names_the_last_event_and_a_lost_quorum(
    mqctl: Run, fake: Any
) -> None:
    """With most controllers dead "nothing is recorded" alone looks as if nothing happened."""
    fake.dead = {LEADER}
    ran = mqctl("timeline", "--since", "10m")
    assert ran.code == 0
    assert "the last event is first ack of broker-a at 1970-01-01" in ran.out
    assert "note: no quorum, 1 of 2 controllers answer" in ran.err


def test_drain_moves_the_master_to_the_fullest_member_and_says_what_may_be_stopped(
    mqctl: Run, fake: Any
) -> None:
    ran = mqctl("drain", SLAVE, "--json")
    assert (ran.code, ran.json["wasMaster"], ran.json["others"]) == (0, False, [1])
    assert not [call for call in fake.calls if call[0] == "elect_master"]
    table = fake.replicas.replicas_info_table["broker-a"]
    table.master_broker_id, table.master_address = 2, SLAVE
    ran = mqctl("drain", SLAVE)
    assert ("elect_master", "C", "broker-a", 1) in fake.calls
    assert "broker 1 is master now" in ran.out and "may be stopped" in ran.out
    table.in_sync_replicas[0].alive = False
    ran = mqctl("drain", SLAVE)
    assert ran.code == 1 and "only this broker of broker-a has everything" in ran.err
    assert mqctl("drain", "10.0.0.9:1").code == 1


def test_describe_shows_all_of_a_topic_and_of_a_group(mqctl: Run, fake: Any) -> None:
    ran = mqctl("describe", "topic", "T", "--json")
    broker = ran.json["brokers"]["broker-a"]
    assert (broker["writeQueueNums"], broker["messages"]) == (4, 6)
    assert ran.json["groups"] == {"G": 4}
    out = mqctl("describe", "topic", "T").out
    assert "writeQueueNums:" in out and "lastUpdateTimestamp: 2023-11-1" in out
    ran = mqctl("describe", "group", "G", "--json")
    assert ran.json["brokers"]["broker-a"]["retryMaxTimes"] == 16
    assert (ran.json["members"], ran.json["topics"]) == (["10.0.0.9@1"], {"T": 4})
    assert "10.0.0.9@1" in mqctl("describe", "group", "G").out
    assert mqctl("describe", "topic", "Nope").code == 1
    assert mqctl("describe", "group", "Nope").code == 1
    assert mqctl("describe", "queue", "T").code == 2


def test_tail_shows_the_last_messages_and_goes_on(
    mqctl: Run, consumer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = mqctl("tail", "T", "--last", "3", "--json")
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [(m["queueOffset"], m["queueId"]) for m in told] == [(1, 1), (2, 0), (2, 1)]
    (*_, line) = mqctl("tail", "T").out.splitlines()
    assert line.endswith("broker-a:1:2  tag k1 k2  hello")
    looks = 0

    async def slept(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise KeyboardInterrupt

    async def grown(self: Any, queue: MessageQueue, **options: Any) -> int:
        return 3 + looks

    monkeypatch.setattr("asyncio.sleep", slept)
    monkeypatch.setattr(FakeConsumer, "max_offset", grown)
    ran = mqctl("tail", "T", "-f", "--last", "1")
    assert ran.code == 0, "ctrl-C is its usual end"
    shown = [line.split()[2] for line in ran.out.splitlines()]
    assert shown == ["broker-a:1:2", "broker-a:0:3", "broker-a:1:3"]
