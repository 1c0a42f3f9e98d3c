"""Both sides of the bench: the same shape of cluster, of ours and of RocketMQ 5.3.3.

Three name servers with an embedded controller each, two brokers of one group, a write acknowledged
only when the whole set has it. Ports as `batonmq up` lays them out, for both.
"""

from __future__ import annotations

import os
import signal
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from lab.cluster import frames, java
from lab.cluster.cluster import Cluster
from lab.cluster.connection import HaStatus, ask, ha_status
from lab.cluster.processes import HOST, free_base_port, is_running, stop_all, wait_for
from lab.cluster.stores import wipe
from lab.cluster.up import ClusterProcess

NAME_SERVERS: Final = 3
BROKERS: Final = 2
WHOLE_LIMIT_S: Final = 120.0
READ_WRITE: Final = "6"


class SideError(RuntimeError):
    """A cluster under test did not do what the measurement needs; the text says what."""


class ClusterSide(Cluster):
    """One cluster, named by the addresses of its brokers, which are known before it starts. Who
    makes it ends it by `stop`."""

    name: str
    folder: Path
    base_port: int
    limit_s = WHOLE_LIMIT_S

    @property
    def name_servers(self) -> str:
        return ";".join(f"{HOST}:{self.base_port + 100 * i}" for i in range(NAME_SERVERS))

    @property
    def controllers(self) -> list[str]:
        return [f"{HOST}:{self.base_port + 100 * i + 2}" for i in range(NAME_SERVERS)]

    @property
    def broker_addresses(self) -> list[str]:
        return [f"{HOST}:{self.base_port + 1035 + 100 * j}" for j in range(BROKERS)]

    @abstractmethod
    def spawn(self) -> None:
        """Starts all processes, waits for none."""

    @abstractmethod
    def stop(self) -> object:
        """Ends all processes; returns when they have ended."""

    @abstractmethod
    def broker_pid(self, address: str) -> int:
        """The serving process of a broker."""

    @abstractmethod
    def name_server_pids(self) -> list[int]: ...

    @abstractmethod
    def supervisor_pids(self) -> list[int]:
        """Processes that serve no client."""

    @abstractmethod
    def kill_broker(self, address: str) -> None:
        """kill -9."""

    @abstractmethod
    def stop_broker(self, address: str) -> None:
        """SIGTERM, and waits for its end."""

    @abstractmethod
    def start_broker(self, address: str) -> None:
        """Starts a dead broker again."""

    @abstractmethod
    def empty_store(self, address: str) -> None:
        """Removes everything that a stopped broker stored except its identity."""

    def wait_whole(self) -> None:
        """Returns when the cluster is whole, and all pids are known."""
        self.wait_level()

    def serving_pids(self) -> list[int]:
        return [*self.name_server_pids(), *map(self.broker_pid, self.broker_addresses)]

    def master_address(self) -> str:
        """The broker that reports to be master; waits for one."""
        return self.wait_for("a master", self._master)

    def _master(self) -> str | None:
        for address in self.broker_addresses:
            status = ha_status(address)
            if status is not None and status.master:
                return address
        return None

    def wait_level(self) -> HaStatus:
        """Returns when the slave is in the set and holds the whole log."""
        return self.wait_for("a full and level set", self.level)

    def level(self) -> HaStatus | None:
        for address in self.broker_addresses:
            status = ha_status(address)
            if status is not None and status.is_level(BROKERS - 1):
                return status
        return None

    def full(self) -> HaStatus | None:
        """As `level`, also under load: the slave may be behind what is just written."""
        for address in self.broker_addresses:
            status = ha_status(address)
            if status is not None and status.master and status.in_sync_slaves == BROKERS - 1:
                return status
        return None

    def switch_master(self) -> None:
        """A planned switch to the slave."""
        master = self.master_address()
        (heir,) = (address for address in self.broker_addresses if address != master)
        reply = self.elect(heir)
        if reply.code != frames.OK:
            raise SideError(f"{self.name}: no switch: code {reply.code} {reply.remark}")

    def create_topic(self, topic: str, queues: int) -> None:
        """Creates a topic on the master, and waits for its route."""
        create_topic(self.master_address(), self.name_servers.split(";"), topic, queues)


class OurCluster(ClusterProcess, ClusterSide):
    """`batonmq up` with default settings. A killed broker is started again by `batonmq up` itself
    if it is `supervised`, else by its `argv`."""

    name = "ours"

    def __init__(self, folder: Path, *, supervised: bool = False) -> None:
        super().__init__(
            folder, controllers=NAME_SERVERS, replicas=BROKERS, settings={}, respawn=supervised
        )
        self._supervised = supervised
        self._signalled: dict[str, int] = {}

    def wait_whole(self) -> None:
        super().wait_whole()
        self.wait_level()

    def _broker(self, address: str) -> dict[str, Any]:
        return next(broker for broker in self.brokers if broker["address"] == address)

    def broker_pid(self, address: str) -> int:
        return self.pid_of(self._broker(address))

    def name_server_pids(self) -> list[int]:
        return [int(node["pid"]) for node in self.document["nameServers"]]

    def supervisor_pids(self) -> list[int]:
        up = psutil.Process(int(self.document["supervisorPid"]))
        servers = self.serving_pids()
        return [up.pid, *(child.pid for child in up.children() if child.pid not in servers)]

    def kill_broker(self, address: str) -> None:
        self._signal(address, signal.SIGKILL)

    def stop_broker(self, address: str) -> None:
        self._signal(address, signal.SIGTERM)
        self._wait_end(address)

    def _signal(self, address: str, number: signal.Signals) -> None:
        self._signalled[address] = self.broker_pid(address)
        self.kill(self._broker(address), number)

    def start_broker(self, address: str) -> None:
        self._wait_end(address)
        if self._supervised:
            gone = (None, self._signalled[address])
            self.wait_for(f"{address} to be back", lambda: self._broker(address)["pid"] not in gone)
        else:
            self.restart(self._broker(address))

    def _wait_end(self, address: str) -> None:
        pid = self._signalled[address]
        self.wait_for(f"the end of process {pid}", lambda: not is_running(pid))

    def empty_store(self, address: str) -> None:
        wipe(Path(self._broker(address)["dataDir"]))


class JavaPeer(ClusterSide):
    """Five JVMs, controller mode, all-ack, small heaps; every process has a home folder of its own
    for logs and stores."""

    name = "java"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base_port = free_base_port(BROKERS)
        folder.mkdir(parents=True, exist_ok=True)
        self._name_servers: list[subprocess.Popen[bytes]] = []
        self._brokers: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self) -> None:
        ports = [self.base_port + 100 * i for i in range(NAME_SERVERS)]
        for i in range(NAME_SERVERS):
            home = self.folder / f"namesrv-{i}"
            settings = java.name_server_settings(ports, i, home)
            self._name_servers.append(
                java.start_server(java.NAMESRV_MAIN, settings, home, java.BENCH_HEAP)
            )
        for address in self.broker_addresses:
            self.start_broker(address)

    def stop(self) -> None:
        stop_all(self._brokers.values())
        stop_all(self._name_servers)

    def broker_pid(self, address: str) -> int:
        return self._brokers[address].pid

    def name_server_pids(self) -> list[int]:
        return [process.pid for process in self._name_servers]

    def supervisor_pids(self) -> list[int]:
        return []

    def kill_broker(self, address: str) -> None:
        os.kill(self._brokers[address].pid, signal.SIGKILL)

    def stop_broker(self, address: str) -> None:
        stop_all([self._brokers[address]])

    def start_broker(self, address: str) -> None:
        before = self._brokers.get(address)
        if before is not None:
            before.wait()
        home, (host, _, port) = self._home(address), address.rpartition(":")
        controllers = ";".join(self.controllers)
        settings = {
            **java.broker_settings(host, int(port), self.name_servers, home / "store", controllers),
            "flushDiskType": "ASYNC_FLUSH",
            "enablePropertyFilter": "true",
        }
        self._brokers[address] = java.start_server(
            java.BROKER_MAIN, settings, home, java.BENCH_HEAP
        )

    def empty_store(self, address: str) -> None:
        wipe(self._home(address) / "store")

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("*/process.log"))

    def _home(self, address: str) -> Path:
        return self.folder / f"broker-{self.broker_addresses.index(address)}"


def create_topic(master: str, name_servers: Sequence[str], topic: str, queues: int) -> None:
    """Creates a topic on that master, and waits for its route."""
    ext = {
        "topic": topic,
        "defaultTopic": frames.TEMPLATE_TOPIC,
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": READ_WRITE,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    reply = ask(master, frames.UPDATE_TOPIC, ext)
    if reply.code != frames.OK:
        raise SideError(f"{master}: topic {topic}: code {reply.code} {reply.remark}")
    for address in name_servers:
        wait_for(f"the route of {topic}", partial(_has_route, address, topic), WHOLE_LIMIT_S)


def _has_route(address: str, topic: str) -> bool:
    try:
        return ask(address, frames.ROUTE, {"topic": topic}).code == frames.OK
    except OSError:
        return False
