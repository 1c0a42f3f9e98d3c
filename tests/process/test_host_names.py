"""A cluster whose nodes advertise host names, and get another address at each start, as pods do.

A name server (DNS) of the test's own knows the names, by a resolv.conf as in a pod. That lies in a
mount namespace, so the test runs in a thread: a namespace belongs to a thread and what it starts.
"""

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dnslib import QTYPE, RCODE, RR, A, DNSRecord
from dnslib.server import DNSLogger, DNSServer

from lab.cluster.client_writer import ClientWriter
from lab.cluster.held import HOSTS, HeldCluster
from lab.cluster.network import Network
from lab.cluster.node_process import NodeProcess
from lab.cluster.queues import check_writers
from lab.cluster.stores import check_logs_equal
from lab.cluster.writer import wait_acks

pytestmark = pytest.mark.process

CLONE_NEWNS = 0x00020000
DOMAIN = "pods.test"
TOPIC = "Moved"
DNS_ADDRESS = "127.0.0.253"


class Pods(Network):
    """Hosts with names, each at an address of the loopback that `move` changes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(HOSTS)
        self._ips = dict(self.address)
        self._file = folder / "resolv.conf"
        self._moves = 0
        self.address = {host: f"{host}.{DOMAIN}" for host in HOSTS}
        self._known = {name: self._ips[host] for host, name in self.address.items()}

    def open(self) -> None:
        """Only for the calling thread, and what it starts from now on. `close` ends the server."""
        self._server = DNSServer(self, address=DNS_ADDRESS, logger=DNSLogger(log="-request,-reply"))
        self._server.start_thread()
        # As in a pod: with ndots:5 each name is tried with the search domain first.
        self._file.write_text(
            f"nameserver {DNS_ADDRESS}\nsearch {DOMAIN}\noptions ndots:5 timeout:2\n"
        )
        # ctypes: os.unshare is younger than Python 3.11.
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(self._file), "/etc/resolv.conf"], check=True)

    def close(self) -> None:
        self._server.stop()
        self._server.server.server_close()

    def resolve(self, request: DNSRecord, _: object) -> DNSRecord:
        """The server's answer; the name of a pod that has ended does not exist."""
        reply = request.reply()
        question = request.q
        ip = self._known.get(str(question.qname).rstrip("."))
        if ip is None:
            reply.header.rcode = RCODE.NXDOMAIN
        elif question.qtype == QTYPE.A:
            reply.add_answer(RR(question.qname, QTYPE.A, rdata=A(ip), ttl=5))
        return reply

    def end(self, host: str) -> None:
        """Its name leads nowhere until it is moved."""
        self._known.pop(self.address[host], None)

    def move(self, host: str) -> None:
        """Its name leads to an address that it never had."""
        self._moves += 1
        self._ips[host] = f"{self._ips[host].rpartition('.')[0]}.{100 + self._moves}"
        self._known[self.address[host]] = self._ips[host]


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
    """A machine with the master and a name server with its controller is drained, and both come
    back elsewhere; then the next master is killed: no send fails, nothing is lost."""
    pods = Pods(tmp_path)

    def work() -> None:
        pods.open()
        cluster = HeldCluster(tmp_path, pods)
        try:
            cluster.start()
            scenario(cluster)
        finally:
            cluster.stop()
            pods.close()
        check_logs_equal(cluster.data_folders)

    def scenario(cluster: HeldCluster) -> None:
        with ClientWriter(cluster.name_servers, TOPIC) as load:
            wait_acks(load, 1)
            evict(cluster, cluster.master(), cluster.controller_processes[0])
            kill(cluster, cluster.master())
        print(f"{len(load.acks)} acknowledged, longest gap {load.longest_gap_s:.3f} s")
        assert not load.failures, load.failures[:3]
        check_writers(cluster.name_servers, TOPIC, [load])

    def evict(cluster: HeldCluster, broker: NodeProcess, *others: NodeProcess) -> None:
        """The broker's preStop hook runs, then all get SIGTERM at once."""
        ran = cluster.mqctl("drain", broker.node.address)
        assert ran.code == 0, ran
        nodes = [broker, *others]
        for node in nodes:
            assert node.child is not None
            node.child.terminate()
            pods.end(node.name)
        for node in nodes:
            assert node.child is not None and node.child.wait(30) == 0
        move(cluster, nodes)

    def kill(cluster: HeldCluster, node: NodeProcess) -> None:
        node.kill()
        pods.end(node.name)
        move(cluster, [node])

    def move(cluster: HeldCluster, nodes: list[NodeProcess]) -> None:
        began = time.monotonic()
        for node in nodes:
            pods.move(node.name)
            cluster.launch(node)
        cluster.wait_whole()
        names = ", ".join(node.name for node in nodes)
        print(f"{names}: whole after {time.monotonic() - began:.1f} s")

    in_thread_of_its_own(work)
