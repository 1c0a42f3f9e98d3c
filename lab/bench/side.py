"""What the bench measures: a cluster of ours, or of RocketMQ 5.3.3 in the same shape.

Three name servers with a controller each, two brokers of one group, a write acknowledged only when
the whole set has it. Ports as `batonmq up` lays them out.
"""

import signal
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from lab.cluster import frames, java
from lab.cluster.cluster import Cluster
from lab.cluster.connection import HaStatus, ask, ha_status
from lab.cluster.mixed import MixedGroup
from lab.cluster.processes import HOST, is_running
from lab.cluster.stores import wipe
from lab.cluster.up import ClusterProcess

NAME_SERVERS: Final = 3
BROKERS: Final = 2
WHOLE_LIMIT_S: Final = 120.0
READ_WRITE: Final = "6"
QUEUES: Final = 8
"""Of each topic."""


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
    def broker_addresses(self) -> list[str]:
        return [f"{HOST}:{self.base_port + 1035 + 100 * j}" for j in range(BROKERS)]

    @property
    @abstractmethod
    def name_servers(self) -> str:
        """Joined by `;`."""

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

    def supervisor_pids(self) -> list[int]:
        """Processes that serve no client."""
        return []

    @abstractmethod
    def kill_broker(self, address: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it by that signal. `start_broker` waits for the end."""

    @abstractmethod
    def start_broker(self, address: str) -> None:
        """Starts a broker that was killed again."""

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
        statuses = map(ha_status, self.broker_addresses)
        return next((one for one in statuses if one and one.is_level(BROKERS - 1)), None)

    def full(self) -> HaStatus | None:
        """As `level`, also under load: the slave may be behind what is just written."""
        for status in map(ha_status, self.broker_addresses):
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

    def create_topic(self, topic: str) -> None:
        """Creates a topic of QUEUES queues on the master, and waits for its route."""
        ext = {
            "topic": topic,
            "defaultTopic": frames.TEMPLATE_TOPIC,
            "readQueueNums": QUEUES,
            "writeQueueNums": QUEUES,
            "perm": READ_WRITE,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        }
        reply = ask(self.master_address(), frames.UPDATE_TOPIC, ext)
        if reply.code != frames.OK:
            raise SideError(f"{self.name}: topic {topic}: code {reply.code} {reply.remark}")
        for address in self.name_servers.split(";"):
            self.wait_for(f"the route of {topic}", partial(_has_route, address, topic))


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

    def broker_pid(self, address: str) -> int:
        return self.pid_of(self.node_at(address))

    def name_server_pids(self) -> list[int]:
        return [int(node["pid"]) for node in self.document["nameServers"]]

    def supervisor_pids(self) -> list[int]:
        up = psutil.Process(int(self.document["supervisorPid"]))
        servers = self.serving_pids()
        return [up.pid, *(child.pid for child in up.children() if child.pid not in servers)]

    def kill_broker(self, address: str, number: signal.Signals = signal.SIGKILL) -> None:
        self._signalled[address] = self.broker_pid(address)
        self.kill(self.node_at(address), number)

    def start_broker(self, address: str) -> None:
        self._wait_end(address)
        if self._supervised:
            gone = (None, self._signalled[address])
            self.wait_for(f"{address} to be back", lambda: self.node_at(address)["pid"] not in gone)
        else:
            self.restart(self.node_at(address))

    def _wait_end(self, address: str) -> None:
        pid = self._signalled[address]
        self.wait_for(f"the end of process {pid}", lambda: not is_running(pid))

    def empty_store(self, address: str) -> None:
        self._wait_end(address)
        wipe(Path(self.node_at(address)["dataDir"]))


class JavaPeer(MixedGroup, ClusterSide):
    """Five JVMs, controller mode, all-ack, small heaps."""

    name = "java"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            folder,
            BROKERS,
            java_controllers=NAME_SERVERS,
            java_heap=java.BENCH_HEAP,
            java_keys={"flushDiskType": "ASYNC_FLUSH", "enablePropertyFilter": "true"},
        )

    @property
    def broker_addresses(self) -> list[str]:
        return [self.address(place) for place in range(BROKERS)]

    def spawn(self) -> None:
        self.__enter__()
        for place in range(BROKERS):
            self.start_java(place)

    def stop(self) -> None:
        self.__exit__()

    def _place(self, address: str) -> int:
        return self.broker_addresses.index(address)

    def broker_pid(self, address: str) -> int:
        return self.pid(self._place(address))

    def kill_broker(self, address: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.kill(self._place(address), number)

    def start_broker(self, address: str) -> None:
        self.start_java(self._place(address))

    def empty_store(self, address: str) -> None:
        wipe(self.store(self._place(address)))


def _has_route(address: str, topic: str) -> bool:
    try:
        return ask(address, frames.ROUTE, {"topic": topic}).code == frames.OK
    except OSError:
        return False
