"""Bad days of one broker process: what it finds on its disk or in its configuration at a start.

The tests share one cluster with segments of 1 MiB. Each takes the slave it spoils from
`any_slave`, and leaves the set whole.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.cluster.connection import BlockingConnection
from lab.cluster.processes import ROOT, wait_for
from lab.cluster.stores import read_log, record_ends
from lab.cluster.up import ClusterProcess
from tests.process.lone import SEGMENT, lone_broker

pytestmark = pytest.mark.process

TOPIC = "BadDays"
BODY = b"m" * 4_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """Three replicas, each with a log of more than three segments."""
    # No scrub: on a busy machine it would find a flipped byte before the reader of the test.
    overrides: dict[str, dict[str, object]] = {
        "store": {"mappedFileSizeCommitLog": SEGMENT, "scrubBytesPerSecond": 0}
    }
    folder = tmp_path_factory.mktemp("bad")
    with ClusterProcess(folder, controllers=1, overrides=overrides) as running:
        with BlockingConnection(running.master()["address"]) as probe:
            for number in range(3 * SEGMENT // len(BODY) + 50):
                assert probe.send(TOPIC, BODY + b"%d" % number).code == 0
        yield running


def write_some(cluster: ClusterProcess, count: int = 20) -> None:
    with BlockingConnection(cluster.master()["address"]) as probe:
        for number in range(count):
            assert probe.send(TOPIC, BODY + b"%d" % number).code == 0


def any_slave(cluster: ClusterProcess) -> dict[str, Any]:
    cluster.wait_in_sync(3)
    slaves = wait_for("two slaves", lambda: s if len(s := cluster.slaves()) == 2 else None)
    return slaves[0]


def killed(cluster: ClusterProcess, slave: dict[str, Any]) -> Path:
    """kill -9, waits until the set is without it; its data folder."""
    cluster.kill(slave)
    cluster.wait_in_sync(2)
    return Path(slave["dataDir"])


def equal_logs(cluster: ClusterProcess, slave: dict[str, Any], upto: int) -> None:
    """The slave's bytes on disk are those of the master below `upto`."""
    ours = read_log(Path(slave["dataDir"])).data[:upto]
    masters = read_log(Path(cluster.master()["dataDir"])).data[:upto]
    assert ours == masters


# --- configuration and identity ---


def test_a_second_broker_on_one_data_folder_is_refused(
    cluster: ClusterProcess, tmp_path: Path
) -> None:
    """Another process is started on a running broker's folder: exit 1, the pid of the owner in
    one line; the owner is not disturbed."""
    slave = any_slave(cluster)
    command = lone_broker(tmp_path, storePathRootDir=slave["dataDir"])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert str(slave["pid"]) in line and slave["dataDir"] in line
    write_some(cluster)
    cluster.wait_in_sync(3)


# --- the epoch file ---


def test_without_a_good_epoch_file_a_broker_does_not_start(cluster: ClusterProcess) -> None:
    """Both copies are bad: exit 1, both named with their reasons; nothing was cut. With a good
    copy put back the broker starts."""
    slave = any_slave(cluster)
    folder = killed(cluster, slave)
    file, backup = folder / "epochFileCheckpoint", folder / "epochFileCheckpoint.bak"
    good, log = file.read_bytes(), read_log(folder).data
    file.write_bytes(b"")
    backup.write_bytes(b"garbage")
    child = cluster.restart(slave)
    assert child.wait(60) == 1
    last = cluster.broker_log(slave).splitlines()[-1]
    assert file.name in last and "empty" in last and backup.name in last
    assert read_log(folder).data == log
    file.write_bytes(good)
    cluster.restart(slave)
    cluster.wait_in_sync(3)


def test_r21_a_log_without_its_epochs_is_never_cut(cluster: ClusterProcess) -> None:
    """A slave's epoch file and its backup are gone: nothing proves a common history. It says so
    with what an operator can do, stays out of the set, and keeps every byte. With the file put
    back it follows again."""
    slave = any_slave(cluster)
    folder = killed(cluster, slave)
    file, backup = folder / "epochFileCheckpoint", folder / "epochFileCheckpoint.bak"
    good, log = file.read_bytes(), read_log(folder).data
    file.unlink()
    backup.unlink()
    child = cluster.restart(slave)
    wait_for("its log line", lambda: "log_diverged" in cluster.broker_log(slave))
    reason = cluster.broker_log(slave).rpartition("log_diverged")[2].splitlines()[0]
    assert "epoch file" in reason and "move the store aside" in reason, reason
    write_some(cluster)
    child.terminate()
    assert child.wait(30) == 0
    assert read_log(folder).data == log
    cluster.wait_in_sync(2)
    file.write_bytes(good)
    cluster.restart(slave)
    cluster.wait_in_sync(3)


# --- the commit log ---


def test_g8_a_reader_that_meets_a_bad_record_gets_it_from_another_replica(
    cluster: ClusterProcess,
) -> None:
    """1. A byte of an old message flips on a slave's disk, below what its recovery reads. 2. It is
    elected, and a reader comes there: it is refused, the master is suspect by its own word, and
    another member leads. 3. There the reader gets the message; the other fetches it again."""
    spoiled = any_slave(cluster)
    folder = killed(cluster, spoiled)
    end = log_end(folder)
    flip(folder, list(record_ends(read_log(folder).data))[9] + len(BODY) // 2)
    cluster.restart(spoiled)
    cluster.wait_in_sync(3)
    assert cluster.elect(spoiled["address"]).code == 0
    wait_for("the switch", lambda: cluster.master()["address"] == spoiled["address"])
    with BlockingConnection(spoiled["address"]) as probe:
        replies = [probe.pull(TOPIC, offset, count=1) for offset in range(20)]
    refused = [reply for reply in replies if reply.code == 1]
    assert refused and all(str(folder / "commitlog") in reply.remark for reply in refused)
    wait_for("another master", lambda: cluster.master()["address"] != spoiled["address"])
    cluster.wait_in_sync(3)
    wait_for("the end of suspicion", lambda: not (folder / "suspect").exists())
    equal_logs(cluster, spoiled, end)


# --- helpers of the log ---


def log_end(folder: Path) -> int:
    """Where the records in a killed replica's segments end."""
    return max(record_ends(read_log(folder).data))


def segment_file(folder: Path, at: int) -> tuple[Path, int]:
    size = next((folder / "commitlog").glob("[0-9]*")).stat().st_size
    return folder / "commitlog" / f"{at // size * size:020d}", at % size


def flip(folder: Path, at: int) -> None:
    path, position = segment_file(folder, at)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x40]))
