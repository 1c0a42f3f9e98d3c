"""Floods of connections at every port of a cluster whose processes have few descriptors (R58)."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lab.cluster.connection import BlockingConnection
from lab.cluster.up import ClusterProcess

pytestmark = pytest.mark.process

TOPIC = "Flooded"
DESCRIPTORS = 1024
FLOOD = 1100
HEART_BEAT = 34
CLIENT = b'{"clientID":"c","producerDataSet":[{"groupName":"p"}],"consumerDataSet":[]}'


@pytest.fixture
def few_descriptors(tmp_path: Path) -> Iterator[ClusterProcess]:
    """A cluster whose processes inherit a small limit; this process keeps its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    running = ClusterProcess(tmp_path, replicas=2, controllers=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    try:
        running.spawn()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(running.stop)
        running.wait_whole()
        yield running


def ports_of(cluster: ClusterProcess) -> list[int]:
    """All at which its processes listen."""
    nodes = (*cluster.brokers, *cluster.document["controllers"])
    opened = [psutil.Process(cluster.pid_of(node)).net_connections("tcp") for node in nodes]
    return sorted(
        {each.laddr.port for of in opened for each in of if each.status == psutil.CONN_LISTEN}
    )


def flooded(port: int) -> list[socket.socket]:
    """More connections than a process may have descriptors; those that were accepted at first."""
    opened = []
    for _ in range(FLOOD):
        with contextlib.suppress(OSError):
            opened.append(socket.create_connection(("127.0.0.1", port), 1.0))
    return opened


def test_r58_floods_at_all_ports_cost_no_member_its_place(few_descriptors: ClusterProcess) -> None:
    """1 connections that say nothing take every port of both brokers and of the controller, and
    stay. 2 a client that was there goes on, a new one comes in. 3 the slave is killed and joins
    again, and then the master: the group fails over, and is whole again."""
    cluster = few_descriptors
    master = cluster.master()
    ports = ports_of(cluster)
    assert len(ports) >= 9, "each broker has three, the controller three"
    with BlockingConnection(master["address"]) as before:
        assert before.request(HEART_BEAT, body=CLIENT).code == 0
        assert before.send(TOPIC, b"before").code == 0
        strangers = [each for port in ports for each in flooded(port)]
        assert before.send(TOPIC, b"meanwhile").code == 0
    with BlockingConnection(master["address"]) as late:
        assert late.send(TOPIC, b"late").code == 0
    (slave,) = cluster.slaves()
    for node in (slave, master):
        cluster.kill(node)
        cluster.wait_in_sync(1)
        cluster.restart(node)
        cluster.wait_in_sync(2)
    with BlockingConnection(cluster.master()["address"]) as new:
        assert new.send(TOPIC, b"after").code == 0
    for each in strangers:
        each.close()
