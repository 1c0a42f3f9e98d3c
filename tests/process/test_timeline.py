"""`mqctl timeline` against what the test did: who, why, in which order, from every source."""

import signal
from pathlib import Path
from typing import Any

import pytest

from batonmq.runtime.clock import wall_ms
from lab.cluster.processes import wait_for
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

OF_BROKERS = ("detected", "proposed", "roleChanged", "opened", "firstAck")
OF_THE_LEADER = ("detected", "proposed", "committed", "pushed")
SLACK_MS = 50
"""One machine, one clock; what is left is the rounding of several processes."""


class Timeline:
    """`mqctl timeline` of the cluster."""

    def __init__(self, cluster: ClusterProcess) -> None:
        self.cluster = cluster

    def stories(self, *more: str) -> list[dict[str, Any]]:
        ran = self.cluster.mqctl("timeline", "--json", *more)
        assert ran.code == 0 and "disagree" not in ran.err, ran.err
        return ran.json

    def story(self, since_ms: int, *kinds: str) -> dict[str, Any]:
        """The first story of one of `kinds` that began after `since_ms` and is over."""

        def complete() -> dict[str, Any] | None:
            for story in self.stories():
                if story["kind"] in kinds and story["beganTimestamp"] >= since_ms - SLACK_MS:
                    acked = story["firstAckTimestamp"] or not story["openedTimestamp"]
                    return story if story["complete"] and acked else None
            return None

        return wait_for(
            f"the story of {kinds} since {since_ms}: {self.stories()[-2:]}", complete, 30
        )

    def send(self) -> None:
        ran = self.cluster.mqctl("sendMessage", "-t", "Timeline", "-p", "x", "--timeout", "20")
        assert ran.code == 0, ran.err


def in_order(story: dict[str, Any], since_ms: int) -> None:
    """Every step is recorded, none before its cause, none after now."""
    assert story["clockProblems"] == []
    for chain in (OF_BROKERS, OF_THE_LEADER):
        times = [story[f"{step}Timestamp"] for step in chain]
        assert all(times), story
        assert times == sorted(times)
        assert since_ms - SLACK_MS <= times[0]
        assert times[-1] <= wall_ms() + SLACK_MS
        after = [when - story["beganTimestamp"] for when in times]
        assert [story["durationsMs"][step] for step in chain] == after


def ids(cluster: ClusterProcess) -> dict[str, int]:
    state = cluster.group_state()
    assert state is not None
    return {each["brokerAddress"]: each["brokerId"] for each in state["inSyncReplicas"]}


def test_what_was_done_to_a_cluster_is_told(tmp_path: Path) -> None:
    with ClusterProcess(tmp_path) as cluster:
        timeline = Timeline(cluster)
        cluster.wait_in_sync(3)
        timeline.send()
        broker_id = ids(cluster)
        # Else the next story counts from the loss before: this master is not known to have served.
        wait_for("the first ack", lambda: any(s["firstAckTimestamp"] for s in timeline.stories()))

        # kill -9 of the master, and its return
        old, since_ms = cluster.master(), wall_ms()
        cluster.kill(old)
        new = cluster.wait_new_master(old["address"])
        timeline.send()
        cluster.restart(old)
        cluster.wait_in_sync(3)
        killed = timeline.story(since_ms, "failover")
        in_order(killed, since_ms)
        assert killed["reason"] == "session_closed"
        assert killed["masterBefore"] == broker_id[old["address"]]
        assert killed["masterBrokerId"] == broker_id[new["address"]]
        assert killed["masterAddress"] == new["address"]
        assert killed["detectedBy"] in {"n0", "n1", "n2"}
        # Nobody wrote in between: what was sent after the election came when it came.
        idle = killed["firstWriteAfterMs"] > 100
        assert killed["unavailableMs"] == killed["durationsMs"]["opened" if idle else "firstAck"]
        back = [step for step in killed["steps"] if step["step"] == "joined"]
        assert [step["brokerId"] for step in back] == [killed["masterBefore"]]

        # a slave that hangs, and goes on
        slave, since_ms = cluster.slaves()[0], wall_ms()
        cluster.kill(slave, signal.SIGSTOP)
        cluster.wait_in_sync(2)
        cluster.kill(slave, signal.SIGCONT)
        cluster.wait_in_sync(3)
        hung = timeline.story(since_ms, "slave_lost")
        assert hung["brokerIds"] == [broker_id[slave["address"]]]
        assert hung["masterEpoch"] == killed["masterEpoch"]
        assert hung["steps"][0]["step"] == "left"
        assert hung["steps"][-1]["step"] == "joined"

        # a planned switch
        target, since_ms = broker_id[slave["address"]], wall_ms()
        elect = ("electMaster", "-bn", "broker-a", "-c", "DefaultCluster", "-b", str(target))
        ran = cluster.mqctl(*elect)
        assert ran.code == 0, ran.err
        timeline.send()
        switched = timeline.story(since_ms, "planned_switch")
        in_order(switched, since_ms)
        assert switched["masterBefore"] == killed["masterBrokerId"]
        assert switched["masterBrokerId"] == target
        assert switched["requestedTimestamp"] <= switched["detectedTimestamp"]
        assert switched["heldMs"] is not None

        # kill -9 of the leading controller and of the master at once
        controllers = {each["id"]: each for each in cluster.document["controllers"]}
        leader = controllers.pop(switched["detectedBy"])
        cluster.wait_in_sync(3)
        old, since_ms = cluster.master(), wall_ms()
        cluster.kill(leader)
        cluster.kill(old)
        cluster.wait_new_master(old["address"])
        timeline.send()
        cluster.restart(old)
        cluster.wait_in_sync(3)
        both = timeline.story(since_ms, "failover")
        in_order(both, since_ms)
        assert both["reason"] == "session_closed"
        assert both["masterBefore"] == broker_id[old["address"]]
        assert both["detectedBy"] in controllers
        changed = timeline.story(since_ms - 2_000, "controller_change")
        assert changed["detectedBy"] == both["detectedBy"]

        # every source gives the same, and one controller is enough
        expected = timeline.stories("-bn", "broker-a")
        one = controllers[both["detectedBy"]]["address"]
        assert timeline.stories("-a", one, "-bn", "broker-a") == expected
        folders = sorted(cluster.data_dir.glob("namesrv-*/controller"))
        files = [word for folder in folders for word in ("--file", str(folder))]
        assert timeline.stories(*files, "-bn", "broker-a") == expected
        brokers = cluster.brokers
    for broker in brokers:
        assert "asynchronous generator" not in cluster.broker_log(broker)
