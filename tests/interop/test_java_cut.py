"""A Java master that is cut off from all but its clients: each process has a network of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from left_out import namespaces

from lab.cluster import frames
from lab.cluster.connection import BlockingConnection
from lab.cluster.mixed import MixedGroup, logs_equal, nothing_lost, steady_load, wait_master
from lab.cluster.network import Namespaces
from lab.cluster.network_commands import between

pytestmark = pytest.mark.java

OURS, JAVA = 0, 1
CLIENTS = "clients"
HOSTS = ("namesrv-0", "broker-a-0", "broker-a-1", CLIENTS)


@pytest.fixture
def network() -> Iterator[Namespaces]:
    """The test runs where the clients are."""
    with namespaces(HOSTS) as made, made.inside(CLIENTS):
        yield made


def test_a_java_master_that_is_cut_off_acknowledges_nothing(
    java_classpath: str, tmp_path: Path, network: Namespaces
) -> None:
    """Its clients reach it: with all-ack it answers no write with 0, and goes on to serve reads.
    Ours is elected; once the cut has healed Java follows it, without what nobody was promised."""
    with MixedGroup(tmp_path, 2, network=network) as group:
        group.start_java(JAVA, haSendHeartbeatInterval=1000)
        group.wait_for("the Java master", lambda: group.master() == JAVA and group.is_open(JAVA))
        group.start_ours(OURS)
        with steady_load(group, "Cut", OURS, JAVA) as load:
            assert group.master() == JAVA
            at = {name: network.address[name] for name in HOSTS}
            network.cut(between([at["broker-a-1"]], [at["namesrv-0"], at["broker-a-0"]]))
            wait_master(group, load, OURS)
            with BlockingConnection(group.address(JAVA)) as connection:
                assert connection.send("Cut", b"to nobody", queue_id=1).code != frames.OK
                assert connection.pull("Cut", 0).code == frames.OK
            network.heal()
            group.wait_in_sync(OURS, JAVA, limit_s=240.0)
            nothing_lost(group, load)
            load.stop()
            group.wait_in_sync(OURS, JAVA)
            assert logs_equal(group, OURS, JAVA) > 0
