"""A cluster whose disks are really full: small file systems in memory, one for each broker."""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from left_out import leave_out

from lab.cluster.processes import is_running, wait_for
from lab.cluster.queues import check_writers
from lab.cluster.up import ClusterProcess
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.process

DISK_MIB = 24
BALLAST_BYTES = 8 << 20
SMALL = {
    "store": {
        "mappedFileSizeCommitLog": 1 << 20,
        "mappedFileSizeConsumeQueue": 20 * 1000,
        # Above 85 % the oldest segments go every 10 s: the disk would not stay full on a slow
        # machine, and the test asks for all that was acknowledged.
        "cleanFileForciblyEnable": False,
    }
}


class BigWriter(Writer):
    def body(self, number: int) -> bytes:
        return super().body(number) + b"x" * 8_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    """A cluster that is not started, with a file system of its own and a ballast per broker."""
    cluster = ClusterProcess(tmp_path, overrides=SMALL)
    with contextlib.ExitStack() as mounts:
        for index in range(3):
            folder = cluster.data_dir / f"broker-{index}"
            folder.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                leave_out(done.stderr)
            mounts.callback(subprocess.run, ["umount", str(folder)], check=True)
            (folder / "ballast").write_bytes(bytes(BALLAST_BYTES))
        with cluster:
            yield cluster


def test_r45_full_disks_refuse_writes_and_lose_none(cluster: ClusterProcess) -> None:
    """1 a writer fills all three disks. 2 Writes are refused, `mqctl health` says so, and no
    process ends. 3 There is room again: writes go on, and everything acknowledged is there."""
    pids = [cluster.pid_of(broker) for broker in cluster.brokers]
    topic = "TopicFull"
    with BigWriter(cluster.addresses(), topic, 0) as writer:
        wait_acks(writer, 200)
        wait_for("a full disk", lambda: _stands_still(writer), 120)
        remarks = {remark for _, _, _, remark in writer.refusals[-10:]}
        # A master that hands over, and one that was asked for no write yet, are not down.
        wait_for("down, by mqctl health", lambda: cluster.mqctl("health").code == 1)
        for folder in cluster.data_folders:
            (folder / "ballast").unlink()
        wait_acks(writer, 200)
    assert any("disk" in remark for remark in remarks), remarks
    assert all(map(is_running, pids)), cluster.diagnostics()
    assert check_writers(cluster.name_servers, topic, [writer]) >= len(writer.acks)


def _stands_still(writer: Writer) -> bool:
    """Whether the last ack is old and refusals came after it."""
    last = writer.acks[-1].at
    return time.monotonic() - last > 2.0 and bool(writer.refusals) and writer.refusals[-1][0] > last
