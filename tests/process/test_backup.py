"""A backup under load, all disks gone, and a cluster made of the backup: everything that was
acknowledged before the cut is there."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.cluster.cluster import GROUP
from lab.cluster.mqctl import begin_mqctl
from lab.cluster.queues import read_topic
from lab.cluster.stores import log_bytes
from lab.cluster.up import ClusterProcess
from lab.cluster.writer import QueueAck, Writer, number_in, wait_acks

pytestmark = pytest.mark.process

TOPIC = "BackedUp"


def check_there(cluster: ClusterProcess, acks: list[QueueAck]) -> None:
    queue = read_topic(cluster.name_servers, TOPIC)[0]
    stored = {message.queue_offset: number_in(message.body)[1] for message in queue}
    lost = [ack for ack in acks if stored.get(ack.queue_offset) != ack.number]
    assert not lost, f"{len(lost)} of {len(acks)} acknowledged messages lost, the first: {lost[0]}"


def back_up(cluster: ClusterProcess, store: str, to: Path) -> Any:
    ran = cluster.mqctl("backup", store, str(to), "--json")
    assert ran.code == 0, ran
    return ran.json


def restoring(cluster: ClusterProcess, backup: Path, stores: list[Path]) -> subprocess.Popen[str]:
    """`mqctl restore --elect` as a program of its own; returns when the stores are there."""
    words = ("restore", str(backup), *map(str, stores), "--elect", "--json")
    where = {"BATONMQ_DATA": str(cluster.data_dir)}
    child = begin_mqctl(*words, home=cluster.folder, env=where)
    assert child.stderr is not None
    for line in child.stderr:
        if "start the controllers" in line:
            return child
    raise AssertionError(child.communicate())


def test_r17_all_disks_gone_and_what_was_acknowledged_before_the_cut_comes_back(
    tmp_path: Path,
) -> None:
    backup = tmp_path / "backup"
    with ClusterProcess(tmp_path / "c", controllers=1, replicas=2) as cluster:
        with Writer(cluster.addresses(), TOPIC, 0, pause_s=0.001) as load:
            wait_acks(load, 300)
            slave, master = cluster.slaves()[0], cluster.master()
            first = back_up(cluster, slave["dataDir"], backup)
            assert first["newBytes"] == first["endOffset"] > 0
            wait_acks(load, 300)
            before = len(load.acks)
            # The history continues, whichever replica is copied.
            second = back_up(cluster, master["dataDir"], backup)
            assert second["newBytes"] == second["endOffset"] - first["endOffset"] > 0
            wait_acks(load, 50)
        acks = load.acks[:before]
        original = log_bytes(Path(master["dataDir"]), second["endOffset"])
    shutil.rmtree(cluster.data_dir)

    # One command; the cluster starts whole, and no broker of it is empty.
    stores = [cluster.data_dir / f"broker-{number}" for number in range(2)]
    child = restoring(cluster, backup, stores)
    assert all(log_bytes(store, second["endOffset"]) == original for store in stores)
    with cluster:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        assert json.loads(out)["brokerName"] == GROUP
        cluster.wait_in_sync(2)
        check_there(cluster, acks)
        with Writer(cluster.addresses(), TOPIC, 1) as later:
            wait_acks(later, 20)
        for folder in cluster.data_folders:
            assert log_bytes(folder, second["endOffset"]) == original


def test_r7_r31_all_stores_gone_and_the_restored_one_leads_by_an_unclean_election(
    tmp_path: Path,
) -> None:
    """The controllers kept their disks, so they record a set that will never answer. The table in
    the backup is older than the log: the log has the topic."""
    backup = tmp_path / "backup"
    with ClusterProcess(tmp_path / "c", controllers=1, replicas=2) as cluster:
        with Writer(cluster.addresses(), TOPIC, 0, pause_s=0.001) as load:
            wait_acks(load, 20)
            before = len(load.acks)
            back_up(cluster, cluster.slaves()[0]["dataDir"], backup)
        acks = load.acks[:before]
        folders = cluster.data_folders
    for folder in folders:
        shutil.rmtree(folder)
    child = restoring(cluster, backup, folders[:1])
    table = folders[0] / "config" / "topics.json"
    topics = json.loads(table.read_text()) if table.exists() else {"topicConfigTable": {}}
    topics["topicConfigTable"].pop(TOPIC, None)
    table.write_text(json.dumps(topics))

    try:
        cluster.spawn()

        _, err = child.communicate(timeout=60)
        assert child.returncode == 1, "what the set may hold is not given up without --unclean"
        said = re.search(r"mqctl (electMaster .*) --unclean --cut-later-acks", err)
        assert said is not None, err
        argv = (*said[1].split(), "--yes")

        def elected(*flags: str) -> bool:
            return cluster.mqctl(*argv, *flags).code == 0

        assert not elected()
        cluster.wait_for("its election", lambda: elected("--unclean", "--cut-later-acks"))
        cluster.wait_whole()
        check_there(cluster, acks)
        cluster.wait_in_sync(2)
    finally:
        cluster.stop()


def test_r17_a_restored_store_never_leads_a_group_that_has_more(tmp_path: Path) -> None:
    """One disk is gone; its replica comes back from a backup that lacks what came since."""
    backup = tmp_path / "backup"
    with ClusterProcess(tmp_path / "c", controllers=1, replicas=2) as cluster:
        with Writer(cluster.addresses(), TOPIC, 0, pause_s=0.001) as load:
            wait_acks(load, 200)
            slave = cluster.slaves()[0]
            back_up(cluster, slave["dataDir"], backup)
            wait_acks(load, 200)
            cluster.kill(slave)
            cluster.wait_in_sync(1)
            shutil.rmtree(slave["dataDir"])
            ran = cluster.mqctl("restore", str(backup), slave["dataDir"])
            assert ran.code == 0, ran
            state = cluster.group_state()
            assert state is not None
            every = (*state["inSyncReplicas"], *state["notInSyncReplicas"])
            known = {replica["brokerId"] for replica in every}
            cluster.restart(slave)

            def joined() -> bool:
                found = cluster.group_state()
                members = found["inSyncReplicas"] if found else []
                return any(
                    r["brokerAddress"] == slave["address"] and r["brokerId"] not in known
                    for r in members
                )

            cluster.wait_for("the restored replica in the set, as a new one", joined)
            wait_acks(load, 50)
        check_there(cluster, load.acks)


def test_r17_a_disk_is_replaced_and_a_replica_moved_by_the_commands_of_the_page(
    tmp_path: Path,
) -> None:
    """docs/operating.md under load: "Replace a disk" of the master, so it hands over first; then
    that replica moves to another address with its folder, and leads there."""
    with ClusterProcess(tmp_path / "c", controllers=1) as cluster:
        done = cluster.mqctl
        elsewhere = [each.replace("127.0.0.1", "127.0.0.5") for each in cluster.addresses()]
        with Writer([*cluster.addresses(), *elsewhere], TOPIC, 0, pause_s=0.001) as load:
            wait_acks(load, 200)
            node = cluster.master()
            ran = done("drain", node["address"], "--json")
            assert ran.code == 0, ran
            old_id = ran.json["brokerId"]
            process = Path("/proc") / str(cluster.pid_of(node))
            cluster.kill(node, signal.SIGTERM)
            cluster.wait_for("the end of the broker", lambda: not process.exists())
            cluster.wait_in_sync(2)
            shutil.rmtree(node["dataDir"])
            child = cluster.restart(node)
            cluster.wait_in_sync(3)
            argv = ("cleanBrokerMetadata", "-bn", GROUP, "-b", str(old_id), "-c", "DefaultCluster")
            ran = done(*argv, "--yes")
            assert ran.code == 0, ran
            cluster.wait_for("a whole cluster", lambda: done("health").code == 0)
            wait_acks(load, 200)
            moved, broker_id = move_folder(cluster, node, child, tmp_path / "elsewhere")
            where = ("-bn", GROUP, "-b", str(broker_id), "-c", "DefaultCluster")
            assert done("electMaster", *where).code == 0
            wait_acks(load, 200)
            shown = done("getSyncStateSet", "-b", GROUP, "--json").json["replicasInfoTable"][GROUP]
            assert shown["masterAddress"] == moved["address"], "the same replica, elsewhere"
            assert len(shown["inSyncReplicas"]) == 3 and not shown["notInSyncReplicas"]
        check_there(cluster, load.acks)
        assert log_bytes(Path(moved["dataDir"]), 1 << 16)


def move_folder(
    cluster: ClusterProcess,
    node: dict[str, Any],
    child: subprocess.Popen[bytes],
    to: Path,
) -> tuple[dict[str, Any], int]:
    """ "Move a replica to another machine", the way that moves its folder: to another address. The
    node, and its id."""
    ran = cluster.mqctl("drain", node["address"], "--json")
    assert ran.code == 0, ran
    child.terminate()
    child.wait(30)
    shutil.copytree(node["dataDir"], to)
    config = to.with_suffix(".yaml")
    text = Path(node["config"]).read_text().replace(node["dataDir"], str(to))
    config.write_text(text.replace("brokerIP1: 127.0.0.1", "brokerIP1: 127.0.0.5"))
    argv = [str(config) if part == node["config"] else part for part in node["argv"]]
    address = node["address"].replace("127.0.0.1", "127.0.0.5")
    moved = {**node, "address": address, "dataDir": str(to), "config": str(config), "argv": argv}
    cluster.restart(moved)
    cluster.wait_in_sync(3)
    return moved, int(ran.json["brokerId"])
