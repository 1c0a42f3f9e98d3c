"""The lab starts nothing on ports that others have, and takes nobody else for its processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lab.cluster import HOSTS, Cluster
from lab.cluster_view import Process
from lab.network import Network


def test_on_the_loopback_it_avoids_ports_that_others_have(tmp_path: Path) -> None:
    """`make demo-spark` beside a RocketMQ cluster that listens on all addresses."""
    first = Cluster(tmp_path, Network(HOSTS))
    port = first.layout.name_servers[0].port
    with socket.create_server(("", port)):
        second = Cluster(tmp_path, Network(HOSTS))
        assert all(port not in node.ports for node in second.layout.nodes)


def test_taken_ports_are_named_before_anything_starts(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Network(HOSTS))
    broker, server = cluster.layout.brokers[2], cluster.layout.name_servers[0]
    with (
        socket.create_server(("", broker.port + 1)),
        socket.create_server((server.host, server.port)),
        pytest.raises(RuntimeError, match="not free") as raised,
    ):
        cluster.start()
    for one in (f"{server.port} of namesrv-0", f"{broker.port + 1} of broker-a-2"):
        assert f"{one}: process {os.getpid()} (" in str(raised.value)
    assert not any(process.runs for process in cluster.processes)
    assert not cluster.layout.planned_cluster_file.exists()


class Running:
    """A child that runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> None:
        return None


def test_a_port_of_somebody_else_is_never_asked(tmp_path: Path) -> None:
    """Our process runs, but another one has its port: what it would answer is not our cluster's."""
    cluster = Cluster(tmp_path, Network(HOSTS))
    process: Process = cluster.controllers[0]
    process.child = Running(os.getppid())  # type: ignore[assignment]
    host, port = cluster.view.controller_address(0).split(":")
    with socket.create_server((host, int(port))) as other:
        assert not process.listens
        assert cluster.view.leader() is None
        assert cluster.view.group() is None
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
