"""R33: planned switches of a group under load that cannot be carried out as asked: no send fails,
nothing is lost, order holds. Those that can: `planned-switch` in test_fault_trials.

One cluster for both; the last test hurts it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

from batonmq.protocol.codes import ResponseCode
from lab.cluster.client_writer import ClientWriter
from lab.cluster.queues import check_writers
from lab.cluster.up import ClusterProcess
from lab.cluster.writer import wait_acks

pytestmark = pytest.mark.process

QUEUES = 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    with ClusterProcess(tmp_path_factory.mktemp("switch")) as running:
        yield running


@contextmanager
def load(cluster: ClusterProcess, topic: str) -> Iterator[list[ClientWriter]]:
    """A load on a whole cluster; at the end every send was acknowledged, and is in its order."""
    cluster.wait_in_sync(3)
    writers = [ClientWriter(cluster.name_servers, topic, queue) for queue in range(QUEUES)]
    with writers[0], writers[1], writers[2], writers[3]:
        wait_acks(writers, 5)
        yield writers
        wait_acks(writers, 5)
    assert [writer.failures for writer in writers] == [[]] * QUEUES
    check_writers(cluster.name_servers, topic, writers)


def test_r33_a_hung_replica_is_refused_with_the_reason_and_writes_go_on(
    shared: ClusterProcess,
) -> None:
    """SIGSTOP of the chosen one, and at once the order to switch: refused by name, no send lost."""
    with load(shared, "HungTarget") as writers:
        master, chosen = shared.master(), shared.slaves()[0]
        shared.kill(chosen, SIGSTOP)
        try:
            refused = shared.elect(chosen["address"])
            assert refused.code == ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
            assert f"broker {chosen['id']}" in refused.remark
            wait_acks(writers, 5)
            assert shared.wait_in_sync(2)["masterAddress"] == master["address"]
        finally:
            shared.kill(chosen, SIGCONT)
        shared.wait_in_sync(3)


def test_r33_a_killed_controller_leaves_no_master_drained(shared: ClusterProcess) -> None:
    """The leading controller dies in the middle of a switch: it happened, or the old master goes
    on; either way the sends do, and the next switch works."""
    with load(shared, "LostController") as writers:
        chosen, leader = shared.slaves()[0]["address"], shared.controller
        (node,) = (each for each in shared.document["controllers"] if each["address"] == leader)

        def switch() -> None:
            try:
                shared.elect(chosen)
            except OSError as error:
                print(f"the switch: {error!r}")

        switching = threading.Thread(target=switch)
        switching.start()
        wait_acks(writers, 1)
        shared.kill(node, SIGKILL)
        switching.join()
        wait_acks(writers, 5)
        shared.wait_for("another leading controller", lambda: shared.controller != leader)
        state = shared.wait_in_sync(3)
        other = next(
            each["brokerAddress"]
            for each in state["inSyncReplicas"]
            if each["brokerAddress"] != state["masterAddress"]
        )
        assert shared.elect(other).code == ResponseCode.SUCCESS
        shared.wait_new_master(state["masterAddress"])
