"""A broker that comes back under its identity with a log that lacks what it acknowledged (R17). Its
four replicas let one round show all three ways in which a log comes to lack something.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.cluster.connection import BlockingConnection, ask
from lab.cluster.frames import ELECT_MASTER
from lab.cluster.processes import is_running, wait_for
from lab.cluster.stores import check_logs_equal, put_back, wipe
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

TOPIC = "WrongDisk"
ELECT_MASTER_FAILED = 2012


REPLICAS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    folder = tmp_path_factory.mktemp("wrong-disk") / "cluster"
    with ClusterProcess(folder, controllers=1, replicas=REPLICAS) as running:
        running.wait_in_sync(REPLICAS)
        yield running


def write_some(cluster: ClusterProcess, count: int = 50) -> None:
    """Each until it is acknowledged: a busy machine may cost a master its lead meanwhile."""
    done = 0
    while done < count:
        with contextlib.suppress(OSError), BlockingConnection(cluster.master()["address"]) as probe:
            while done < count and probe.send(TOPIC, b"m" * 500 + b"%d" % done).code == 0:
                done += 1


def end(*brokers: dict[str, Any]) -> None:
    for broker in brokers:
        wait_for(f"the end of {broker['address']}", lambda pid=broker["pid"]: not is_running(pid))


def replica(cluster: ClusterProcess, address: str) -> dict[str, Any]:
    state = cluster.group_state() or {}
    every = [*state.get("inSyncReplicas", []), *state.get("notInSyncReplicas", [])]
    return next((each for each in every if each["brokerAddress"] == address), {})


def alive(cluster: ClusterProcess, broker: dict[str, Any]) -> dict[str, Any]:
    """The replica's record, once its new process has a session."""
    return wait_for(
        f"{broker['address']} to be alive",
        lambda: r if (r := replica(cluster, broker["address"])).get("alive") else None,
    )


def unled(cluster: ClusterProcess) -> bool:
    state = cluster.group_state()
    return state is not None and not state.get("masterAddress")


def elect(cluster: ClusterProcess, broker_id: int, **more: str) -> int:
    ext = {"brokerName": "broker-a", "brokerId": str(broker_id), "designateElect": "true", **more}
    return ask(cluster.controllers[0], ELECT_MASTER, ext).code


def all_running(cluster: ClusterProcess) -> list[dict[str, Any]] | None:
    """The brokers, once cluster.json has the process of each, which takes a moment."""
    brokers = cluster.brokers
    return brokers if all(b["pid"] and is_running(b["pid"]) for b in brokers) else None


def slaves_of(cluster: ClusterProcess) -> list[dict[str, Any]]:
    return wait_for("the slaves", lambda: s if len(s := cluster.slaves()) == REPLICAS - 1 else None)


def reboot(folder: Path) -> None:
    """As if the page cache had gone with another boot of the kernel."""
    mark = folder / "abort"
    pid, _boot_id, acks, *rest = mark.read_text().split("\n")
    mark.write_text("\n".join([pid, "00000000-another-boot", acks, *rest]))


REASONS = (
    "suspect: its log was replaced",
    "suspect: its folder does not know its last life",
    "suspect: stopped",
)


def history(cluster: ClusterProcess) -> str:
    return "".join(path.read_text() for path in cluster.data_dir.rglob("history-*.jsonl"))


def winner_after_the_last_failure(cluster: ClusterProcess) -> int:
    """Once they have joined, any of them may be elected."""
    events = [json.loads(line) for line in history(cluster).splitlines()]
    told = [event for event in events if event["kind"] in ("elected", "election_failed")]
    last = max(at for at, event in enumerate(told) if event["kind"] == "election_failed")
    return int(told[last + 1]["broker_id"])


def test_r17_logs_that_lack_what_they_acknowledged_are_not_elected(
    cluster: ClusterProcess, tmp_path: Path
) -> None:
    """1. A slave's folder is copied while it is down; it comes back, and acknowledges more.

    2. Everybody is killed, the controller first. 3. It comes back, and the slaves: one's log wiped,
    that copy put back at the second, the machine of the third rebooted. The old master is deposed
    in vain, none of them is elected, not even by name. 4. The old master comes back: it is elected,
    the slaves are filled again, and join.
    """
    for_wiping, for_backup, for_reboot = slaves = slaves_of(cluster)
    cluster.kill(for_backup)
    end(for_backup)
    cluster.wait_in_sync(REPLICAS - 1)  # what is seen lags: the next wait is for its return
    backup = tmp_path / "backup"
    shutil.copytree(for_backup["dataDir"], backup)
    cluster.restart(for_backup)
    cluster.wait_in_sync(REPLICAS)
    write_some(cluster)
    brokers = wait_for("every broker's process", lambda: all_running(cluster))
    (master,) = [b for b in brokers if b["address"] not in {s["address"] for s in slaves}]
    (controller,) = cluster.document["nameServers"]
    for node in (controller, *brokers):  # all at once, so that the set stays as it is
        cluster.kill(node)
    end(controller, *brokers)

    wipe(Path(for_wiping["dataDir"]))
    put_back(Path(for_backup["dataDir"]), backup)
    reboot(Path(for_reboot["dataDir"]))
    for node in (controller, *slaves):
        cluster.restart(node)
    wait_for("their registrations", lambda: all(reason in history(cluster) for reason in REASONS))
    wait_for("nobody to be master", lambda: unled(cluster))
    suspects = {alive(cluster, slave)["brokerId"] for slave in slaves}
    for broker_id in suspects:
        assert elect(cluster, broker_id) == ELECT_MASTER_FAILED
    assert unled(cluster)
    cluster.restart(master)
    cluster.wait_in_sync(REPLICAS)
    assert winner_after_the_last_failure(cluster) not in suspects
    write_some(cluster)
    check_logs_equal(cluster.data_folders)
