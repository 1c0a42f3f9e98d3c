"""`batonmq up` on a folder that holds a cluster: it goes on from there (G1, G7, R3).

Stopped cleanly or killed to the last process, the controllers included: what was acknowledged is
there, and masterEpochs go on.
"""

import os
import shlex
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from batonmq.launcher.current import UNFINISHED
from lab.cluster.processes import is_running, wait_for
from lab.cluster.queues import check_writers
from lab.cluster.up import ClusterProcess
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.process

ACKS = 50


def write_some(cluster: ClusterProcess, topic: str, queues: int = 2) -> list[Writer]:
    """Writes until each of `queues` writers has `ACKS` more acknowledgements; the writers."""
    addresses = cluster.addresses()
    with ExitStack() as stack:
        writers = [
            stack.enter_context(Writer(addresses, topic, queue_id)) for queue_id in range(queues)
        ]
        wait_acks(writers, ACKS)
    return writers


def processes(cluster: ClusterProcess) -> list[int]:
    """The supervisor first, then every serving process."""
    return [cluster.document["supervisorPid"], *(node["pid"] for node in cluster.servers)]


def kill_all(cluster: ClusterProcess) -> None:
    """kill -9 of the supervisor and of all its children, as fast as signals go."""
    pids = processes(cluster)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert cluster.process is not None
    cluster.process.wait(10)
    cluster.process = None
    wait_for("the end of all processes", lambda: not any(map(is_running, pids)), 10)


def check_history(cluster: ClusterProcess) -> None:
    """No event stands twice in a controller's history file, though the log was applied again."""
    for path in cluster.data_dir.glob("namesrv-*/controller/history-*.jsonl"):
        lines = path.read_text().splitlines()
        assert lines and len(set(lines)) == len(lines), path


def test_r3_a_folder_is_resumed_after_a_clean_stop_and_after_the_death_of_everything(
    tmp_path: Path,
) -> None:
    """1. Messages are acknowledged. 2. SIGTERM ends all with 0; `up` again: all there, the ids
    of before, a higher masterEpoch.
    3. More messages; while they are written, every process is killed with kill -9. 4. `up` again:
    nothing acknowledged is missing, the cluster is whole, epochs went on."""
    with ClusterProcess(tmp_path, replicas=2) as cluster:
        first_epoch = cluster.wait_in_sync(2)["masterEpoch"]
        before, pids = write_some(cluster, "BeforeStop"), processes(cluster)
        ids = {broker["address"]: broker["id"] for broker in cluster.brokers}
        assert (cluster.data_dir / "run" / UNFINISHED).exists()
        assert cluster.stop() == 0 and not (cluster.data_dir / "run" / UNFINISHED).exists()
        assert not any(map(is_running, pids)) and cluster.events[-1]["event"] == "stopped"

        cluster.start()
        second_epoch = cluster.wait_in_sync(2)["masterEpoch"]
        assert second_epoch > first_epoch
        assert {broker["address"]: broker["id"] for broker in cluster.brokers} == ids
        check_writers(cluster.name_servers, "BeforeStop", before)

        with Writer(cluster.addresses(), "BeforeKill", 0) as writer:
            wait_acks(writer, ACKS)
            kill_all(cluster)
            writer.stop()

        cluster.start()
        third_epoch = cluster.wait_in_sync(2)["masterEpoch"]
        assert third_epoch > second_epoch
        check_writers(cluster.name_servers, "BeforeStop", before)
        check_writers(cluster.name_servers, "BeforeKill", [writer])
        check_writers(cluster.name_servers, "AfterKill", write_some(cluster, "AfterKill"))
        check_history(cluster)


def test_r47_a_cluster_shrinks_gets_a_group_and_grows_with_everything_acknowledged(
    tmp_path: Path,
) -> None:
    """1. Three replicas shrink to two, and a group is added, which gets folders of its own: health
    is ok, with a note. 2. The command of that note makes the controllers forget the third. 3. Grown
    again, the third catches up from its old folder. Everything acknowledged is there."""
    cluster = ClusterProcess(tmp_path, controllers=1, replicas=3, groups=2)

    def resize(replicas: int, groups: int) -> None:
        cluster.stop()
        for option, number in (("--replicas", replicas), ("--groups", groups)):
            cluster.argv[cluster.argv.index(option) + 1] = str(number)
        cluster.start()

    ask = cluster.mqctl

    with ExitStack() as stack:
        stack.callback(cluster.stop)
        resize(3, 1)
        written = write_some(cluster, "Resized")
        resize(2, 2)
        folders = {Path(broker["dataDir"]).name: broker["name"] for broker in cluster.brokers}
        assert sorted(folders.items())[2:] == [(f"broker-{n}", "broker-b") for n in (3, 4)]
        notes = wait_for("the note", lambda: ask("health", "--json").json["notes"], 20)
        assert ask("health", "--json").json["state"] == "ok"
        assert ask(*shlex.split(notes[0].partition("mqctl ")[2]), "--yes").code == 0
        assert ask("health", "--json").json["notes"] == []
        resize(3, 2)
        assert "broker-2" in [Path(each["dataDir"]).name for each in cluster.brokers[:3]]
        assert ask("health", "--watch", "--within", "20").code == 0
        check_writers(cluster.name_servers, "Resized", written)
