"""A broker that comes back under its identity with a log that lacks what it acknowledged (R17), and
the one election that may drop acknowledged messages, because an operator asks for it (R7, R23)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cluster_process import ClusterProcess, is_running, wait_for
from log_compare import check_logs_equal
from raw_probe import Probe, ask

from mqctl.main import cli

pytestmark = pytest.mark.process

TOPIC = "WrongDisk"
ELECT_MASTER = 1002
ELECT_MASTER_FAILED = 2012
IDENTITY = "brokerIdentity"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    with ClusterProcess(tmp_path / "cluster", controllers=1) as running:
        running.wait_in_sync(3)
        yield running


def write_some(cluster: ClusterProcess, count: int = 50) -> None:
    with Probe(cluster.master()["address"]) as probe:
        for number in range(count):
            assert probe.send(TOPIC, b"m" * 500 + b"%d" % number).code == 0


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


def wiped(folder: Path, _: Path) -> None:
    for path in folder.iterdir():
        if path.name == IDENTITY:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".log":
            path.unlink()


def restored(folder: Path, backup: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)


def rebooted(folder: Path, _: Path) -> None:
    """As if the page cache had gone with another boot of the kernel."""
    mark = folder / "abort"
    pid, _boot_id, acks, *rest = mark.read_text().split("\n")
    mark.write_text("\n".join([pid, "00000000-another-boot", acks, *rest]))


REASONS = {
    wiped: "suspect: its log was replaced",
    restored: "suspect: its folder does not know its last life",
    rebooted: "suspect: stopped",
}


def history(cluster: ClusterProcess) -> str:
    return "".join(path.read_text() for path in cluster.data_dir.rglob("history-*.jsonl"))


@pytest.mark.parametrize("spoil", [wiped, restored, rebooted])
def test_r17_a_log_that_lacks_what_it_acknowledged_is_not_elected(
    cluster: ClusterProcess, tmp_path: Path, spoil: Any
) -> None:
    """1. A slave's folder is copied while it is down; it comes back, and acknowledges more.

    2. Everybody is killed, the controller first. 3. It comes back, and the slave alone, its log
    wiped, or that copy put back, or its machine rebooted: the old master is deposed in vain, the
    slave is not elected, not even by name. 4. The others come back: one of them is elected, the
    slave is filled again, and joins.
    """
    cluster.wait_in_sync(3)
    slave = wait_for("two slaves", lambda: s if len(s := cluster.slaves()) == 2 else None)[0]
    cluster.kill(slave)
    cluster.wait_in_sync(2)
    backup = tmp_path / "backup"
    shutil.copytree(slave["dataDir"], backup)
    cluster.restart(slave)
    cluster.wait_in_sync(3)
    write_some(cluster)
    brokers = [b for b in cluster.brokers if b["pid"]]
    others = [b for b in brokers if b["address"] != slave["address"]]
    (controller,) = cluster.document["nameServers"]
    for node in (controller, *brokers):  # the set stays as it is: nobody sees anybody die
        cluster.kill(node)
    end(controller, *brokers)

    cluster.restart(controller)
    spoil(Path(slave["dataDir"]), backup)
    cluster.restart(slave)
    wait_for("its registration", lambda: REASONS[spoil] in history(cluster))
    wait_for("nobody to be master", lambda: unled(cluster))
    broker_id = alive(cluster, slave)["brokerId"]
    assert elect(cluster, broker_id) == ELECT_MASTER_FAILED
    assert unled(cluster)
    for broker in others:
        cluster.restart(broker)
    state = cluster.wait_in_sync(3)
    assert state["masterBrokerId"] != broker_id
    write_some(cluster)
    check_logs_equal(cluster.brokers)


def test_r7_r23_an_unclean_election_drops_what_only_the_old_master_had(
    cluster: ClusterProcess, tmp_path: Path
) -> None:
    """1. Both slaves die; the master goes on alone, its set is {1}. 2. It dies, the slaves come
    back: nobody is elected. 3. An operator elects one of them uncleanly. 4. The old master comes
    back: it gives up what it alone had acknowledged, keeps that aside, and joins."""
    write_some(cluster)
    master = cluster.master()
    slaves = wait_for("two slaves", lambda: s if len(s := cluster.slaves()) == 2 else None)
    for slave in slaves:
        cluster.kill(slave)
    cluster.wait_in_sync(1)
    end(*slaves)
    write_some(cluster)
    cluster.kill(master)
    end(master)
    for slave in slaves:
        cluster.restart(slave)
    named = alive(cluster, slaves[0])["brokerId"]
    alive(cluster, slaves[1])
    assert elect(cluster, named) == ELECT_MASTER_FAILED
    ran = CliRunner().invoke(
        cli,
        ["electMaster", "-bn", "broker-a", "-b", str(named), "--unclean", "--yes",
         "-a", cluster.controllers[0], "-n", cluster.name_servers],
        env={"HOME": str(tmp_path)},
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert "in sync, but silent: broker" in ran.stderr
    cluster.restart(master)
    state = cluster.wait_in_sync(3)
    assert state["masterBrokerId"] == named
    write_some(cluster)
    check_logs_equal(cluster.brokers)
    assert any((Path(master["dataDir"]) / "truncated").rglob("*")), "cut bytes are kept aside"
    told = CliRunner().invoke(
        cli,
        ["timeline", "-a", cluster.controllers[0]],
        env={"HOME": str(tmp_path)},
    )
    assert "UNCLEAN" in told.stdout.upper(), told.output
