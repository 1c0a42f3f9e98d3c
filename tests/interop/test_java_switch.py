"""Stock Java clients, every setting at its default, through a switch, a kill -9 and a hang.

They learn of a new master by their next poll, up to 30 s later. Until then the old master, a slave
now, passes their sends on and serves their pulls (`broker/relay`). A killed one is started again;
meanwhile `replicaRoutes` lead the producer's retries to the slaves.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from lab.cluster.stock_load import CONSUMERS, SENDERS, StockLoad
from lab.cluster.up import ClusterProcess, rounds
from tests.interop.conftest import RunJava

pytestmark = pytest.mark.java

FAST_LOCKS = ("rocketmq.client.rebalance.lockInterval=2000",)


@pytest.fixture(scope="module")
def cluster(
    java_classpath: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcess]:
    settings: dict[str, dict[str, object]] = {
        "namesrv": {"replicaRoutes": True},
        "broker": {"transactionTimeOut": 2000, "transactionCheckInterval": 2000},
    }
    folder = tmp_path_factory.mktemp("cluster")
    with ClusterProcess(folder, overrides=settings, respawn=True) as running:
        yield running


def switch(cluster: ClusterProcess) -> None:
    master, other = cluster.master(), cluster.slaves()[0]
    switched = cluster.elect(other["address"])
    assert switched.code == 0, switched
    cluster.wait_new_master(master["address"])


@contextmanager
def nothing_fails(cluster: ClusterProcess, run_java: RunJava, topic: str) -> Iterator[StockLoad]:
    """No send does, and the consumers get every acknowledged message."""
    with ExitStack() as stack:
        # The routes that it starts with show all members, and the master of now.
        cluster.wait_in_sync(3)
        load = StockLoad(run_java, stack, cluster.name_servers, topic)
        load.go_on(100)
        yield load
        print(load.finish(), load.since(0))
        assert load.failed() == []


def test_no_send_fails_when_the_master_is_killed_or_hangs_nor_in_planned_switches(
    cluster: ClusterProcess, run_java: RunJava
) -> None:
    """The watchdog of `batonmq up` makes a kill of a hang before a send's own time-out."""
    with nothing_fails(cluster, run_java, "JavaKills") as load:
        for _ in range(rounds(1, soak=10)):
            cluster.kill(cluster.master())
            load.go_on(200)
            cluster.wait_in_sync(3)
        cluster.kill(cluster.master(), signal.SIGSTOP)
        load.go_on(200)
        cluster.wait_in_sync(3)
        for _ in range(2):
            switch(cluster)
            load.go_on(100)


def test_every_kind_of_sender_and_consumer_keeps_its_promises(
    cluster: ClusterProcess, run_java: RunJava
) -> None:
    """1. A planned switch. 2. SIGTERM of each broker in turn. 3. kill -9 of the master.

    What was acknowledged comes, in the order of its key where that was asked for, and no
    transaction that was rolled back. The orderly consumer asks for its locks more often than by
    default, where the test would wait for them (20 s). Where a broker says good-bye, no send is
    refused but those of a selector, which the stock client tries at no other broker.
    """
    with ExitStack() as stack:
        cluster.wait_in_sync(3)
        load = StockLoad(
            partial(run_java, properties=FAST_LOCKS[rounds(0, soak=1) :]),
            stack,
            cluster.name_servers,
            "JavaKinds",
            senders=dict.fromkeys(SENDERS, 1),
            consumers=CONSUMERS,
        )
        load.go_on(50)
        switch(cluster)
        load.go_on(50)
        for broker in list(cluster.brokers):
            cluster.wait_in_sync(3)
            cluster.kill(broker, signal.SIGTERM)
            load.go_on(50)
        # The stock client may forget what is in flight on a connection that ends (docs/clients.md),
        # and gives a send up after 3 s: nobody refused it.
        failed = [why for why in load.reasons(0) if "timeout" not in why]
        assert {why.partition(":")[0] for why in failed} <= {"ordered"}, failed
        cluster.wait_in_sync(3)
        cluster.kill(cluster.master())
        load.go_on(50)
        given = load.finish()
        print(given, load.since(0), load.reasons(0))
        assert [one.rolled_back for one in given.values()] == [0] * len(CONSUMERS)
        assert given["orderly"].out_of_order == 0
