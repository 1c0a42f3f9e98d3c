"""R38, R39: queues are numbered alike on every member, whatever of the log each of them has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.cluster.connection import BlockingConnection
from lab.cluster.frames import QUERY_OFFSET, UPDATE_OFFSET
from lab.cluster.mqctl import mqctl
from lab.cluster.processes import is_running, wait_for
from lab.cluster.stores import wipe
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

SEGMENT = 256 << 10
GROUP = {"consumerGroup": "offline", "topic": "Rare", "queueId": 0}
STORE: dict[str, object] = {
    "mappedFileSizeCommitLog": SEGMENT,
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
    "fileReservedTime": 1,
    "cleanResourceInterval": 300,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    folder = tmp_path_factory.mktemp("queue-numbers") / "cluster"
    with ClusterProcess(folder, controllers=1, replicas=2, overrides={"store": STORE}) as running:
        running.wait_in_sync(2)
        yield running


def segments(broker: dict[str, Any]) -> list[Path]:
    return sorted((Path(broker["dataDir"]) / "commitlog").glob("0*"))


def replaced(cluster: ClusterProcess, slave: dict[str, Any]) -> None:
    """The slave comes back with an empty folder and joins."""
    cluster.kill(slave)
    cluster.wait_in_sync(1)
    wait_for("its end", lambda: not is_running(slave["pid"]))
    wipe(Path(slave["dataDir"]))
    cluster.restart(slave)
    cluster.wait_in_sync(2)


def taken_over(cluster: ClusterProcess, master: dict[str, Any]) -> dict[str, Any]:
    """kill -9 of the master; it comes back and joins; the new one."""
    cluster.kill(master)
    new = cluster.wait_new_master(master["address"])
    wait_for("its end", lambda: not is_running(master["pid"]))
    cluster.restart(master)
    cluster.wait_in_sync(2)
    return new


def known_offset(probe: BlockingConnection) -> int | None:
    reply = probe.request(QUERY_OFFSET, {**GROUP, "setZeroIfNotFound": "false"})
    return int(reply.ext["offset"]) if reply.code == 0 else None


def test_r38_a_replaced_replica_that_leads_numbers_on(cluster: ClusterProcess) -> None:
    """1. All messages of Rare expire; a group that has read them is offline. 2. A replica is
    replaced: its log begins behind them. 3. It leads, and the group misses no new message."""
    master = cluster.master()
    with BlockingConnection(master["address"]) as probe:
        for _ in range(5):
            assert probe.send("Rare", b"old").code == 0
        assert probe.request(UPDATE_OFFSET, {**GROUP, "commitOffset": 5}).code == 0
        for _ in range(4 * SEGMENT // 4000):
            assert probe.send("Busy", bytes(4000)).code == 0
    for path in segments(master)[:2]:
        os.utime(path, (0, 0))
    wait_for("expiry", lambda: int(segments(master)[0].name) >= 2 * SEGMENT)
    (slave,) = cluster.slaves()
    replaced(cluster, slave)
    assert int(segments(slave)[0].name) >= 2 * SEGMENT

    new = taken_over(cluster, master)
    with BlockingConnection(new["address"]) as probe:
        reply = probe.send("Rare", b"new")
        assert (reply.code, reply.ext.get("queueOffset")) == (0, "5")
        wait_for("the group's offset", lambda: known_offset(probe) == 5)
        wait_for("the message", lambda: b"new" in probe.pull("Rare", 5).body)


def test_r39_a_topic_made_again_is_read_from_its_start_at_every_member(
    cluster: ClusterProcess, tmp_path: Path
) -> None:
    """1. A group has read a topic. 2. The topic is deleted and made again. 3. The group finds its
    messages, at the master and at its successor."""
    master = cluster.master()
    where = ("-n", cluster.name_servers, "-t", "Rare", "-c", "DefaultCluster")
    assert mqctl("deleteTopic", *where, "-y", home=tmp_path).code == 0
    assert mqctl("updateTopic", *where, "-r", "4", "-w", "4", home=tmp_path).code == 0
    with BlockingConnection(master["address"]) as probe:
        assert known_offset(probe) is None
        reply = probe.send("Rare", b"begun anew")
        assert (reply.code, reply.ext.get("queueOffset")) == (0, "0")
    new = taken_over(cluster, master)
    with BlockingConnection(new["address"]) as probe:
        assert known_offset(probe) is None
        wait_for("the message", lambda: b"begun anew" in probe.pull("Rare", 0).body)
