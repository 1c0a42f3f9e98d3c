"""The laboratory's network: what is cut is silent, one way if wanted, and all of it goes away."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from left_out import namespaces

from lab.cluster import network_commands
from lab.cluster.network import NETNS, Namespaces, remove_stale
from lab.cluster.processes import ROOT

pytestmark = pytest.mark.process

HOSTS = ("left", "right")
PORT = 7_000
SILENT_S = 0.3


@pytest.fixture
def network() -> Iterator[Namespaces]:
    with namespaces(HOSTS) as made:
        yield made


def listener(network: Namespaces, host: str) -> socket.socket:
    with network.inside(host):
        return socket.create_server((network.address[host], PORT))


def dialled(network: Namespaces, host: str, peer: str) -> socket.socket:
    with network.inside(host):
        return socket.create_connection((network.address[peer], PORT), timeout=SILENT_S)


def test_hosts_reach_each_other_until_they_are_cut(network: Namespaces) -> None:
    """1. A connection carries bytes. 2. Cut one way: what is sent that way is neither received
    nor refused, the other way still is. 3. Healed: the bytes arrive, nothing was lost."""
    with listener(network, "left") as server, dialled(network, "right", "left") as ours:
        theirs, _ = server.accept()
        theirs.settimeout(SILENT_S)
        ours.sendall(b"1")
        assert theirs.recv(10) == b"1"

        network.cut(network_commands.one_way([network.address["right"]], [network.address["left"]]))
        ours.sendall(b"2")
        with pytest.raises(TimeoutError):
            theirs.recv(10)
        theirs.sendall(b"3")
        assert ours.recv(10) == b"3"
        with pytest.raises(TimeoutError):
            dialled(network, "right", "left")

        network.heal()
        theirs.settimeout(10.0)
        assert theirs.recv(10) == b"2"
        theirs.close()


def test_the_own_thread_comes_back_to_its_network(network: Namespaces) -> None:
    before = os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(RuntimeError), network.inside("left"):
        assert os.readlink("/proc/thread-self/ns/net") != before
        raise RuntimeError
    assert os.readlink("/proc/thread-self/ns/net") == before


def test_a_process_has_two_of_them_side_by_side(network: Namespaces) -> None:
    with namespaces(HOSTS) as second, second.inside("left"):
        second.cut([(second.address["left"], second.address["right"])])
    with network.inside("left"), network.inside("right"):
        pass  # the end of the second one took nothing of the first


def test_nothing_is_left_of_it(network: Namespaces) -> None:
    network.close()
    assert not [path for path in NETNS.glob("bmqf-*") if f"-{os.getpid()}-" in path.name]


def test_what_a_killed_laboratory_left_is_removed_by_the_next(network: Namespaces) -> None:
    """A laboratory dies by kill -9 right after it made its network."""
    made = (
        "import os, signal; from lab.cluster.network import Namespaces;"
        " Namespaces(('a',)).open(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.Popen([sys.executable, "-c", made], cwd=ROOT)
    child.wait(30)
    assert set(remove_stale()) == {f"bmqf-{child.pid}-0-router", f"bmqf-{child.pid}-0-a"}
    assert not list(NETNS.glob(f"bmqf-{child.pid}-*"))
