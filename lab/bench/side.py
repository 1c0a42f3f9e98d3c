"""What both sides have in common: the shape of the cluster, and requests that both reply to.

Three name servers with an embedded controller each, two brokers of one group, a write acknowledged
only when the whole set has it. Ports as `batonmq up` lays them out, for both.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

from lab.cluster import frames
from lab.cluster.connection import HaStatus, ask, ha_status, sync_state
from lab.cluster.processes import HOST, free_base_port, wait_for

NAME_SERVERS: Final = 3
BROKERS: Final = 2
WHOLE_LIMIT_S: Final = 120.0
READ_WRITE: Final = "6"


class SideError(RuntimeError):
    """A cluster under test did not do what the measurement needs; the text says what."""


class ClusterSide(ABC):
    """One cluster. A context manager: nothing of it is left after the `with` block."""

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base_port = free_base_port(BROKERS)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def name_servers(self) -> list[str]:
        return [f"{HOST}:{self.base_port + 100 * i}" for i in range(NAME_SERVERS)]

    @property
    def brokers(self) -> list[str]:
        return [f"{HOST}:{self.base_port + 1035 + 100 * j}" for j in range(BROKERS)]

    @abstractmethod
    def spawn(self) -> None:
        """Starts all processes, waits for none."""

    @abstractmethod
    def stop(self) -> None:
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

    @abstractmethod
    def diagnostics(self) -> str:
        """The end of the logs, for the report of a failure."""

    def wait_whole(self) -> None:
        """Returns when the cluster is whole, and all pids are known."""
        self.wait_level()

    def serving_pids(self) -> list[int]:
        return [*self.name_server_pids(), *map(self.broker_pid, self.brokers)]

    def master(self) -> str:
        """The broker that reports to be master; waits for one."""
        return wait_for("a master", self._master, WHOLE_LIMIT_S)

    def _master(self) -> str | None:
        for address in self.brokers:
            status = ha_status(address)
            if status is not None and status.master:
                return address
        return None

    def wait_level(self, limit_s: float = WHOLE_LIMIT_S) -> HaStatus:
        """Returns when the slave is in the set and holds the whole log."""
        return wait_for("a full and level set", self.level, limit_s)

    def level(self) -> HaStatus | None:
        for address in self.brokers:
            status = ha_status(address)
            if status is not None and status.is_level(BROKERS - 1):
                return status
        return None

    @property
    def controllers(self) -> list[str]:
        return [f"{HOST}:{self.base_port + 100 * i + 2}" for i in range(NAME_SERVERS)]

    def full(self) -> HaStatus | None:
        """As `level`, also under load: the slave may be behind what is just written."""
        for address in self.brokers:
            status = ha_status(address)
            if status is not None and status.master and status.in_sync_slaves == BROKERS - 1:
                return status
        return None

    def switch_master(self) -> None:
        """A planned switch to the slave, as `mqadmin electMaster` asks for it."""
        state = sync_state(self.controllers, frames.BROKER_NAME)
        if state is None:
            raise SideError(f"{self.name}: no controller replies")
        master = state["masterBrokerId"]
        heirs = [one["brokerId"] for one in state["inSyncReplicas"] if one["brokerId"] != master]
        ext = {
            "clusterName": "DefaultCluster",
            "brokerName": frames.BROKER_NAME,
            "brokerId": heirs[0],
            "designateElect": "true",
        }
        refusals = []
        for address in self.controllers:  # only the leading one does it
            reply = ask(address, frames.ELECT_MASTER, ext)
            if reply.code == frames.OK:
                return
            refusals.append(f"{address}: {reply.code} {reply.remark}")
        raise SideError(f"{self.name}: no switch: {'; '.join(refusals)}")

    def create_topic(self, topic: str, queues: int) -> None:
        """Creates a topic on the master, and waits for its route."""
        create_topic(self.master(), self.name_servers, topic, queues)


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
