"""A cluster whose nodes advertise host names, and get another address at each start, as pods do.

The names are in a hosts file of the test's own, in a mount namespace. So the test runs in a thread:
a namespace belongs to a thread and what it starts.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.cluster.cluster_view import NodeProcess
from lab.cluster.held import HOSTS, HeldCluster
from lab.cluster.mqctl import mqctl
from lab.cluster.network import Network
from lab.cluster.queues import read_topic
from lab.cluster.stores import check_logs_equal
from tests.process.test_roll import Load

pytestmark = pytest.mark.process

CLONE_NEWNS = 0x00020000


class Pods(Network):
    """Hosts with names, each at an address of the loopback that `move` changes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(HOSTS)
        self._ips = dict(self.address)
        self._file = folder / "hosts"
        self._moves = 0
        self.address = {host: f"{host}.pods.test" for host in HOSTS}

    def open(self) -> None:
        """Only for the calling thread, and what it starts from now on."""
        self._write()
        # ctypes: os.unshare is younger than Python 3.11.
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(self._file), "/etc/hosts"], check=True)

    def move(self, host: str) -> None:
        """Its name leads to an address that it never had."""
        self._moves += 1
        self._ips[host] = f"{self._ips[host].rpartition('.')[0]}.{100 + self._moves}"
        self._write()

    def _write(self) -> None:
        lines = [f"{self._ips[host]} {name}" for host, name in self.address.items()]
        # In place: the file is mounted.
        self._file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def in_thread_of_its_own(work: Callable[[], None]) -> None:
    """Runs `work`; raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="a mount namespace needs root"
)
def test_nodes_with_names_get_other_addresses_under_load(tmp_path: Path) -> None:
    """The master is drained and comes back elsewhere, then a name server with its controller, then
    the next master is killed: no send fails, nothing is lost."""
    pods = Pods(tmp_path)

    def work() -> None:
        pods.open()
        cluster = HeldCluster(tmp_path, pods)
        try:
            cluster.start()
            asyncio.run(scenario(cluster))
        finally:
            cluster.stop()
        check_logs_equal([cluster.data_dir(index) for index in range(len(cluster.brokers))])

    async def scenario(cluster: HeldCluster) -> None:
        async with Load(cluster.name_servers) as load:
            await asyncio.to_thread(drain_and_move, cluster, master(cluster))
            await asyncio.to_thread(end_and_move, cluster, cluster.controller_processes[0])
            await asyncio.to_thread(kill_and_move, cluster, master(cluster))
        print(f"{len(load.acked)} acknowledged, longest gap {load.longest_gap_ms()} ms")
        assert not load.failed, load.failed[:3]
        stored = await asyncio.to_thread(read_topic, cluster.name_servers, "Rolled")
        assert set(load.acked) <= {m.body for queue in stored.values() for m in queue}

    def master(cluster: HeldCluster) -> NodeProcess:
        group = cluster.wait_whole()
        assert group.master is not None
        return cluster.brokers[group.master]

    def drain_and_move(cluster: HeldCluster, node: NodeProcess) -> None:
        ran = mqctl("drain", node.node.address, home=tmp_path, env=addresses(cluster))
        assert ran.code == 0, ran
        end_and_move(cluster, node)

    def end_and_move(cluster: HeldCluster, node: NodeProcess) -> None:
        assert node.child is not None
        node.child.terminate()
        assert node.child.wait(30) == 0
        move(cluster, node)

    def kill_and_move(cluster: HeldCluster, node: NodeProcess) -> None:
        node.kill()
        move(cluster, node)

    def move(cluster: HeldCluster, node: NodeProcess) -> None:
        began = time.monotonic()
        pods.move(node.name)
        cluster.launch(node)
        cluster.wait_whole()
        print(f"{node.name}: whole after {time.monotonic() - began:.1f} s")

    def addresses(cluster: HeldCluster) -> dict[str, str]:
        controllers = ";".join(n.controller_address for n in cluster.layout.controllers)
        return {"NAMESRV_ADDR": cluster.name_servers, "CONTROLLER_ADDR": controllers}

    in_thread_of_its_own(work)
