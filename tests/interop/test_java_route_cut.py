"""Stock Java clients, every setting at its default, that know one name server only, while what this
one answers is lost on the way to the master (R32): a slave registers the master there.
"""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from left_out import namespaces

from lab.cluster import frames
from lab.cluster.connection import ask
from lab.cluster.held import HOSTS, PROBE_HOST, HeldCluster
from lab.cluster.network_commands import one_way
from lab.cluster.queues import stored_keys
from lab.cluster.stock_load import StockLoad
from tests.interop.conftest import RunJava

pytestmark = pytest.mark.java

BEFORE, DURING = "JavaBeforeTheCut", "JavaDuringTheCut"
CUT_S = 15.0
"""A registration that is not answered ends after 3 s, and the name server forgets one that is not
repeated after 10 s at the latest."""


@pytest.mark.skipif(os.environ.get("BATONMQ_SOAK") != "1", reason="a minute long: `make soak`")
def test_r32_stock_clients_of_a_name_server_whose_answers_do_not_reach_the_master(
    tmp_path: Path, run_java: RunJava
) -> None:
    with namespaces(HOSTS) as network, network.inside(PROBE_HOST), ExitStack() as whole:
        cluster = HeldCluster(tmp_path, network)
        whole.callback(cluster.stop)
        cluster.start()
        group, leader = cluster.wait_whole(), cluster.wait_leader()
        master = group.master
        assert master is not None
        with ExitStack() as stack:
            cut_off = next(p for n, p in enumerate(cluster.controller_processes) if n != leader)
            server = cut_off.node.address
            # Consumers of one group must subscribe to the same: only one load has them.
            before = StockLoad(run_java, stack, server, BEFORE, consumers=())
            before.go_on()
            network.cut(one_way(cluster.ips([cut_off]), cluster.ips([cluster.brokers[master]])))
            at_ms, unshown_s = frames.now_ms(), _longest_without(cluster, server, master)
            during = StockLoad(run_java, stack, server, DURING)
            for load in (before, during):
                load.go_on()
            print(f"no master shown for {unshown_s:.2f} s; {before.since(at_ms)}")
            assert cluster.wait_whole().master_epoch == group.master_epoch, "no election"
            network.heal()
            for load, topic in ((before, BEFORE), (during, DURING)):
                load.finish()
                assert load.failed() == []
                acked = {line["acked"] for line in load.acked("sync")}
                print(f"{topic}: {len(acked)} acknowledged")
                assert acked <= stored_keys(cluster.name_servers, topic).keys()


def _longest_without(cluster: HeldCluster, server: str, master: int) -> float:
    """For how long at most that name server shows no master, in CUT_S."""
    address, seen_s = cluster.brokers[master].node.address, time.monotonic()
    end_s, longest_s = seen_s + CUT_S, 0.0
    while (now_s := time.monotonic()) < end_s:
        route = ask(server, frames.ROUTE, {"topic": BEFORE})
        shown = route.code == frames.OK and address in route.body.decode()
        longest_s = max(longest_s, now_s - seen_s)
        if shown:
            seen_s = now_s
        time.sleep(0.05)
    return longest_s
