"""The lab starts nothing on ports that others have, and takes nobody else for its processes."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lab.cluster.held import HOSTS, GroupState, HeldCluster
from lab.cluster.network import Network
from lab.cluster.node_process import NodeProcess
from lab.cluster.processes import CLAIM, PORTS, ROOT, NotInTime, ports_of


def test_on_the_loopback_it_avoids_ports_that_others_have(tmp_path: Path) -> None:
    """`make demo-spark` beside a RocketMQ cluster that listens on all addresses."""
    first = HeldCluster(tmp_path, Network(HOSTS))
    port = first.layout.name_servers[0].port
    with socket.create_server(("", port)):
        second = HeldCluster(tmp_path, Network(HOSTS))
        assert all(port not in node.ports for node in second.layout.nodes)


def test_two_processes_never_have_the_same_base() -> None:
    """Also where no cluster listens yet, or none any more."""
    code = (
        "from lab.cluster.processes import free_base_port; "
        "print(free_base_port(3), flush=True); input()"
    )
    argv = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        bases = []
        for _ in range(3):
            child = stack.enter_context(subprocess.Popen(argv, cwd=ROOT, text=True, **pipes))
            assert child.stdout is not None
            bases.append(int(child.stdout.readline()))
    assert len(set(bases)) == 3


def test_no_port_stands_for_two_things_in_a_cluster_or_in_two_of_them() -> None:
    ranges = [[base + CLAIM, *ports_of(base, 9)] for base in PORTS]
    assert sum(map(len, ranges)) == len(set().union(*ranges))
    assert max(map(max, ranges)) < 32_768


def test_taken_ports_are_named_before_anything_starts(tmp_path: Path) -> None:
    cluster = HeldCluster(tmp_path, Network(HOSTS))
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
    cluster = HeldCluster(tmp_path, Network(HOSTS))
    process: NodeProcess = cluster.controller_processes[0]
    process.child = Running(os.getppid())  # type: ignore[assignment]
    host, port = cluster.controllers[0].split(":")
    with socket.create_server((host, int(port))) as other:
        assert not process.listens
        assert cluster.leader() is None
        assert cluster.group() is None
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


@pytest.mark.parametrize("may_end", [True, False])
def test_one_that_ends_late_of_a_fault_is_started_again_and_another_is_a_finding(
    may_end: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker whose fdatasync failed still ran when the fault was taken back."""
    cluster = HeldCluster(tmp_path, Network(HOSTS))
    state = GroupState(0, 1, 1, frozenset({0, 1, 2}), {})
    with contextlib.ExitStack() as stack:
        for process in cluster.processes:
            process.child = stack.enter_context(subprocess.Popen(["sleep", "60"]))
            stack.callback(process.child.kill)
        late = cluster.brokers[1]
        late.node.config.parent.mkdir(parents=True)
        late.fail_disk("fdatasync commitlog/0 EIO once")
        late.make_sound()
        late.may_end = late.may_end and may_end
        late.kill()
        started: list[NodeProcess] = []
        monkeypatch.setattr(cluster, "launch", started.append)
        monkeypatch.setattr(cluster, "whole", lambda: state)
        if may_end:
            assert cluster.wait_whole() == state and started == [late]
        else:
            with pytest.raises(NotInTime, match=f"{late.name} ended"):
                cluster.wait_whole()
