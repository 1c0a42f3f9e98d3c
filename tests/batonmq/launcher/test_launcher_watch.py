"""What `batonmq up` makes of a group's record at the controllers, and of its own full disk."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from batonmq.launcher import cluster as launcher_cluster
from batonmq.launcher.cluster import LocalCluster
from batonmq.launcher.events import ClusterEvent
from batonmq.launcher.layout import plan
from batonmq.launcher.watch import _group
from batonmq.protocol.bodies import ReplicaIdentity, ReplicasInfo
from batonmq.runtime.tls import TlsError

ADDRESS, OTHER = "127.0.0.1:1", "127.0.0.1:2"


def replica(broker_id: int, address: str = ADDRESS, *, alive: bool) -> ReplicaIdentity:
    return ReplicaIdentity(alive=alive, broker_address=address, broker_id=broker_id)


def test_r17_an_earlier_replica_of_an_address_does_not_hide_the_master_on_it() -> None:
    """A restored store is a new replica; the old id of its address is on record until an operator
    forgets it."""
    info = ReplicasInfo(
        in_sync_replicas=[replica(4, alive=True)],
        not_in_sync_replicas=[replica(1, alive=False), replica(2, OTHER, alive=False)],
        master_address=ADDRESS,
        master_broker_id=4,
    )
    group = _group(info)
    assert group.in_sync == 1
    state = group.replicas[ADDRESS]
    assert (state.broker_id, state.role, state.in_sync) == (4, "MASTER", True)


def test_a_lost_member_does_not_hide_the_living_replica_on_its_address() -> None:
    info = ReplicasInfo(
        in_sync_replicas=[replica(1, alive=False)], not_in_sync_replicas=[replica(4, alive=True)]
    )
    group = _group(info)
    assert group.in_sync == 0 and group.replicas[ADDRESS].broker_id == 4


def test_a_full_disk_does_not_end_the_watch_over_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends a process is handled whether `cluster.json` can be written or not. It is reported
    once, and written with the next change after there is space."""
    reported: list[str] = []

    def report(event: ClusterEvent) -> None:
        reported.append(event.kind)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cluster = LocalCluster(plan(tmp_path), report, Mock(), respawn=True)
    cluster.whole = True
    with monkeypatch.context() as disk:
        disk.setattr(launcher_cluster, "write_document", full)
        for node in cluster.layout.brokers:
            cluster._child_changed(node, None, "SIGKILL")
    assert reported.count("process_ended") == 3 and reported.count("cluster_file_stale") == 1
    cluster._child_changed(cluster.layout.brokers[0], 77, "started")
    assert cluster.layout.cluster_file.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_an_output_that_takes_nothing_does_not_end_the_watch_over_the_processes(
    tmp_path: Path, number: int
) -> None:
    """The watcher of a process ended with the line that says that it ended, and nothing started it
    again."""

    full = Mock(side_effect=OSError(number, os.strerror(number)))
    cluster = LocalCluster(plan(tmp_path), full, Mock())
    cluster._child_changed(cluster.layout.brokers[0], None, "SIGKILL")
    assert cluster._poll_now.is_set()


async def test_a_certificate_that_cannot_be_read_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cluster.json` and the reports of elections would stop. The next poll asks again."""
    started: list[str] = []

    class FakeAdmin:
        def __init__(self, addresses: list[str]) -> None:
            self.addresses = addresses

        async def start(self) -> None:
            started.append(self.addresses[0])
            if len(started) == 2:
                raise TlsError("certPath", "the file ends within the certificate")

        async def close(self) -> None:
            pass

    cluster = LocalCluster(plan(tmp_path), Mock(), Mock())
    monkeypatch.setattr(cluster, "_new_admin", FakeAdmin)
    first, second, _ = cluster.layout.name_servers
    await cluster._ask_only([first])
    kept = cluster.admin
    await cluster._ask_only([second])
    assert cluster.admin is kept
    await cluster._ask_only([second])
    assert cluster.admin is not kept and len(started) == 3
