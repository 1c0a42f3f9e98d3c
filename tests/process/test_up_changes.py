"""`mqctl up`: a running `batonmq up` gets and loses brokers under load; no send fails (R47)."""

from pathlib import Path

import pytest

from lab.cluster.client_writer import ClientWriter
from lab.cluster.mqctl import Ran
from lab.cluster.queues import check_writers
from lab.cluster.up import ClusterProcess
from lab.cluster.writer import wait_acks

pytestmark = pytest.mark.process

TOPIC = "Changes"
SIZE_OPTIONS = ("--replicas", "--groups", "--controllers", "--base-port")


def numbers(cluster: ClusterProcess) -> list[tuple[str, str]]:
    """(folder, group) of each broker."""
    return [(Path(each["dataDir"]).name, each["name"]) for each in cluster.brokers]


def test_r47_replicas_and_groups_come_and_go_under_load(tmp_path: Path) -> None:
    """0. With minInSyncReplicas 2 of two no replica is removed. 1. A third is added. 2. The master
    is restarted, then removed: the others have everything. 3. Added again it has its old folder.
    4. A group comes and goes. 5. Without numbers the next start has the size of now. No send fails,
    and every acknowledged message is there, in its order."""
    overrides = {"store": {"minInSyncReplicas": 2}}
    cluster = ClusterProcess(tmp_path, controllers=1, replicas=2, respawn=True, overrides=overrides)

    ask = cluster.mqctl

    def change(*arguments: str) -> Ran:
        ran = ask("up", *arguments, "--json")
        assert ran.code == 0, (ran.out, ran.err)
        return ran

    def well() -> None:
        assert ask("health", "--watch", "--within", "20").code == 0
        assert ask("health", "--json").json["notes"] == []

    def refusals() -> None:
        for broker in cluster.brokers:
            ran = ask("up", "remove", broker["address"], "--yes")
            assert ran.code == 1 and "would keep 1 replica in sync, and needs 2" in ran.err
        assert "no group 'broker-z'" in ask("up", "add", "broker-z").err
        whole = ask("up", "remove", "broker-a", "--wholeGroup", "--yes")
        assert "only group" in whole.err
        for wrong, code in (
            (("remove", "127.0.0.1:1", "--yes"), 1),
            (("restart", "127.0.0.1:1"), 1),
            (("add",), 2),
            (("remove",), 2),
        ):
            assert ask("up", *wrong).code == code, wrong
        assert len(cluster.brokers) == 2

    def changes(load: ClientWriter) -> None:
        wait_acks(load, 20)
        refusals()
        change("add", "broker-a")
        assert len(cluster.brokers) == 3
        first = cluster.master()["address"]
        assert change("restart", first).json["rolled"] == [f"broker {first}"]
        refused = ask("up", "remove", cluster.master()["address"])
        assert refused.code == 1 and "give --yes" in refused.err
        gone = cluster.master()
        change("remove", gone["address"], "--yes")
        wait_acks(load, 20)
        well()
        left = numbers(cluster)
        assert (Path(gone["dataDir"]).name, "broker-a") not in left and len(left) == 2
        change("add", "broker-a")
        assert gone["address"] in [each["address"] for each in cluster.brokers]
        change("add", "--newGroup", "--count", "2")
        assert numbers(cluster)[3:] == [("broker-3", "broker-b"), ("broker-4", "broker-b")]
        change("remove", "broker-b", "--wholeGroup", "--yes")
        wait_acks(load, 20)
        well()

    with cluster:
        with ClientWriter(cluster.name_servers, TOPIC) as load:
            changes(load)
        assert load.failures == []
        size = numbers(cluster)
        assert size == [(f"broker-{n}", "broker-a") for n in range(3)]
        cluster.stop()
        for name in SIZE_OPTIONS:
            at = cluster.argv.index(name)
            del cluster.argv[at : at + 2]
        cluster.start()
        assert numbers(cluster) == size
        check_writers(cluster.name_servers, TOPIC, [load])
