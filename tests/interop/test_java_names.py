"""A stock Java producer, every setting at its default, while masters of a cluster whose nodes have
names are drained, as pods are: each comes back at another address. No send fails, nothing is lost.

Consumers are left out for their time: a JVM keeps the address of a name for 30 s, and so long they
do not read from the node that moved.
"""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.cluster.held import HeldCluster
from lab.cluster.queues import stored_keys
from lab.cluster.stock_load import StockLoad
from lab.cluster.stores import check_logs_equal
from tests.interop.conftest import RunJava
from tests.process.test_host_names import Pods, in_thread_of_its_own

pytestmark = pytest.mark.java

TOPIC = "JavaNames"


@pytest.mark.skipif(os.environ.get("BATONMQ_SOAK") != "1", reason="a minute long: `make soak`")
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="a mount namespace needs root"
)
def test_no_send_of_a_stock_client_fails_while_nodes_are_drained(
    tmp_path: Path, run_java: RunJava
) -> None:
    pods = Pods(tmp_path)

    def work() -> None:
        pods.open()
        cluster = HeldCluster(tmp_path, pods, {"namesrv": {"replicaRoutes": True}})
        try:
            cluster.start()
            with ExitStack() as stack:
                load = StockLoad(run_java, stack, cluster.name_servers, TOPIC, consumers=())
                load.go_on()
                for _ in range(2):
                    drain_and_move(cluster)
                    load.go_on()
                    print(load.since(0))
                load.finish()
                assert load.failed() == []
            acked = {line["acked"] for line in load.acked("sync")}
            assert acked <= stored_keys(cluster.name_servers, TOPIC).keys()
        finally:
            cluster.stop()
            pods.close()
        check_logs_equal(cluster.data_folders)

    def drain_and_move(cluster: HeldCluster) -> None:
        """Of the master: its pod ends, and a new one with its name and volume has another
        address."""
        node = cluster.master()
        ran = cluster.mqctl("drain", node.node.address)
        assert ran.code == 0, ran
        assert node.child is not None
        node.child.terminate()
        pods.end(node.name)
        assert node.child.wait(30) == 0
        pods.move(node.name)
        cluster.launch(node)
        cluster.wait_whole()

    in_thread_of_its_own(work)
