"""The network between the processes: a namespace for each where that is possible, else loopback.

Only addresses in the lab's own namespaces are used; the router has no route to the outside.
Namespaces of a killed lab are removed by the next one.
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from batonmq.launcher.layout import Layout
from lab.cluster import network_commands
from lab.cluster.network_commands import ROUTER, Pair

CLONE_NEWNET: Final = 0x40000000
NETNS: Final = Path("/run/netns")
TOOLS: Final = {"ip": "iproute2", "tc": "iproute2", "iptables-restore": "iptables"}
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


class NetworkError(RuntimeError):
    """The network could not be made or changed; the text holds the command and its error."""


def why_not() -> str:
    """Why namespaces cannot be used here, "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if absent:
        return f"missing: {' and '.join(absent)}"
    trial = network_commands.namespace(str(os.getpid()), "trial")
    try:
        _run(["ip", "netns", "add", trial])
        _run(["ip", "netns", "exec", trial, "iptables-restore"], network_commands.first_rules())
    except NetworkError as exc:
        return str(exc)
    finally:
        _try_all(network_commands.removal([trial]))
    return ""


class Network:
    """Hosts with an address each. This base is the loopback: nothing of it can be cut."""

    can_cut = False

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self.address = {host: self._address(index) for index, host in enumerate(hosts)}
        self._cut: set[Pair] = set()

    def _address(self, index: int) -> str:
        pid = os.getpid()
        return f"127.{64 + pid // 250 % 128}.{1 + pid % 250}.{index + 1}"

    def open(self) -> None:
        """Makes it."""

    def close(self) -> None:
        """Removes it."""

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """The calling thread, and what it starts meanwhile, is in that host's network."""
        yield

    @property
    def is_cut(self) -> bool:
        return bool(self._cut)

    def cut(self, pairs: Iterable[Pair]) -> None:
        """From now on packets of these pairs vanish, in addition to those cut before."""
        raise NetworkError("the loopback cannot be cut")

    def heal(self) -> None:
        """Every packet arrives again, at full speed."""

    def slow(self, host: str, kbit: int, latency_ms: int) -> None:
        """The host's link carries no more than that, both ways."""
        raise NetworkError("the loopback cannot be slowed")


class Namespaces(Network):
    """A namespace per host and a router between them."""

    can_cut = True

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__(hosts)
        # A process may have several: each test module one, say.
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._slowed: list[str] = []

    def _address(self, index: int) -> str:
        return network_commands.host_address(index)

    def open(self) -> None:
        remove_stale()
        try:
            for command in network_commands.build(self._name, self.hosts):
                _run(command)
            self._restore(network_commands.first_rules())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        mine = [network_commands.namespace(self._name, name) for name in (*self.hosts, ROUTER)]
        _try_all(network_commands.removal(name for name in mine if (NETNS / name).exists()))

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._enter(NETNS / network_commands.namespace(self._name, host))
            try:
                yield
            finally:
                _setns(before)
        finally:
            os.close(before)

    def _enter(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(descriptor)
        finally:
            os.close(descriptor)

    def cut(self, pairs: Iterable[Pair]) -> None:
        self._cut |= set(pairs)
        self._restore(network_commands.rules(self._cut))

    def heal(self) -> None:
        if self._cut:
            self._cut.clear()
            self._restore(network_commands.rules(()))
        while self._slowed:
            self._in_router(network_commands.unslowed(self._slowed.pop()))

    def slow(self, host: str, kbit: int, latency_ms: int) -> None:
        """Towards the host. What comes from it are acks, which are few."""
        port = network_commands.router_port(self.hosts.index(host))
        self._in_router(network_commands.slowed(port, kbit, latency_ms))
        self._slowed.append(port)

    def _restore(self, rules: str) -> None:
        self._in_router(["iptables-restore", "--noflush"], rules)

    def _in_router(self, command: list[str], text: str = "") -> None:
        with self.inside(ROUTER):
            _run(command, text)


def remove_stale() -> list[str]:
    """Removes namespaces whose laboratory has ended, and what still runs in them; their names."""
    stale = []
    for path in NETNS.glob(f"{network_commands.PREFIX}-*") if NETNS.exists() else ():
        owner = network_commands.owner_of(path.name)
        if owner is None or Path(f"/proc/{owner}").exists():
            continue
        for pid in _run(["ip", "netns", "pids", path.name]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        stale.append(path.name)
    _try_all(network_commands.removal(stale))
    return stale


def _setns(descriptor: int) -> None:
    if _LIBC.setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise NetworkError(f"setns: {os.strerror(number)}")


def _run(command: list[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _try_all(wanted: Iterable[list[str]]) -> None:
    """Runs them all; a command that fails has nothing left to remove."""
    for command in wanted:
        with contextlib.suppress(NetworkError):
            _run(command)


def placed(layout: Layout, network: Network) -> Layout:
    """`layout` with the address that each process has in the network."""
    at = network.address
    return replace(
        layout,
        name_servers=tuple(replace(node, host=at[node.name]) for node in layout.name_servers),
        brokers=tuple(replace(node, host=at[node.name]) for node in layout.brokers),
    )
