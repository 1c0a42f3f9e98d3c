"""A cluster of the last version becomes one of this version process by process, under load.

Brokers first, then controllers, as deploy/README.md has it; the other way round it works,
too. `BATONMQ_EARLIER` chooses the version (`lab/cluster/earlier_version.py`).
"""

import signal
from pathlib import Path

import pytest

from lab.cluster.earlier_version import NoEarlierVersionError, earlier_checkout
from lab.cluster.held import HOSTS, HeldCluster
from lab.cluster.network import Network
from lab.cluster.node_process import NodeProcess
from lab.cluster.processes import ROOT, wait_for
from lab.cluster.queues import check_writers
from lab.cluster.stores import check_logs_equal
from lab.cluster.up import rounds
from lab.cluster.writer import Writer, wait_acks

pytestmark = pytest.mark.process

TOPIC = "Upgraded"
IS_SOAK = bool(rounds(0, soak=1))
"""Else only what `test_roll` does not show: controllers first. Brokers first, as `mqctl roll` has
it, is also the way back from there."""


@pytest.fixture
def earlier() -> Path:
    try:
        return earlier_checkout()
    except NoEarlierVersionError as error:
        pytest.skip(str(error))


def renew(cluster: HeldCluster, process: NodeProcess, source: Path, load: Writer) -> None:
    """Ends it by SIGTERM and starts it from that checkout."""
    child = process.child
    assert child is not None
    process.signal(signal.SIGTERM)
    wait_for(f"the end of {process.name}", lambda: child.poll() is not None)
    process.source = source
    cluster.launch(process)
    assert process.child is not None
    environ = Path(f"/proc/{process.child.pid}/environ").read_bytes()
    assert f"PYTHONPATH={source}".encode() in environ, "it runs the other version"
    cluster.wait_whole()
    wait_acks(load, 20)


@pytest.mark.parametrize("first", ["controllers", "brokers"] if IS_SOAK else ["controllers"])
def test_process_by_process_from_the_last_version_nothing_acknowledged_is_lost(
    tmp_path: Path, earlier: Path, first: str
) -> None:
    cluster = HeldCluster(tmp_path, Network(HOSTS))
    for process in cluster.processes:
        process.source = earlier
    order = [*cluster.brokers, *cluster.controller_processes]
    if first == "controllers":
        order = [*cluster.controller_processes, *cluster.brokers]
    try:
        cluster.start()
        with Writer(cluster.addresses, TOPIC, 0, pause_s=0.002) as load:
            wait_acks(load, 20)
            for process in order:
                renew(cluster, process, ROOT, load)
            for process in reversed(order) if IS_SOAK else ():
                renew(cluster, process, earlier, load)
        check_writers(cluster.name_servers, TOPIC, [load])
    finally:
        cluster.stop()
    check_logs_equal(cluster.data_folders)
