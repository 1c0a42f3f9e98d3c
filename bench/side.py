"""What both sides have in common: the shape of the cluster, and questions any of them answers.

Three name servers with an embedded controller each, two brokers of one group, a write acknowledged
only when the whole set has it. Ports as `batonmq up` lays them out, for both.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

from bench import wire
from bench.probe import HaStatus, ha_status

HOST: Final = "127.0.0.1"
NAME_SERVERS: Final = 3
BROKERS: Final = 2
GROUP: Final = "broker-a"
TEMPLATE_TOPIC: Final = "TBW102"
WHOLE_LIMIT_S: Final = 120.0
READ_WRITE: Final = "6"

T = TypeVar("T")


class SideError(RuntimeError):
    """A cluster under test did not do what the measurement needs; the text says what."""


class Side(ABC):
    """One running cluster. A context manager: nothing of it is left after the `with` block."""

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base_port = free_base_port()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.spawn()
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
        """Processes that serve nobody."""

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
        """Removes everything that a stopped broker stored, but for its identity."""

    @abstractmethod
    def complaint(self) -> str:
        """The end of the logs, for a report of what failed."""

    def settle_down(self) -> None:
        """Returns when the cluster is whole, and all pids are known."""
        self.wait_level()

    def serving_pids(self) -> list[int]:
        return [*self.name_server_pids(), *map(self.broker_pid, self.brokers)]

    def master(self) -> str:
        """The broker that says it is master; waits for one."""
        return wait_for("a master", self._master)

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

    def create_topic(self, topic: str, queues: int) -> None:
        """Creates a topic on the master, and waits for its route."""
        ext = {
            "topic": topic,
            "defaultTopic": TEMPLATE_TOPIC,
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": READ_WRITE,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        }
        reply = wire.ask(self.master(), wire.UPDATE_TOPIC, ext)
        if reply.code != wire.OK:
            raise SideError(f"{self.name}: topic {topic}: code {reply.code} {reply.remark}")
        for address in self.name_servers:
            wait_for(f"the route of {topic}", partial(_has_route, address, topic))


def _has_route(address: str, topic: str) -> bool:
    try:
        return wire.ask(address, wire.ROUTE, {"topic": topic}).code == wire.OK
    except OSError:
        return False


def wait_for(what: str, found: Callable[[], T | None], limit_s: float = WHOLE_LIMIT_S) -> T:
    """Polls until `found` gives something true. Raises SideError that names `what`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        result = found()
        if result:
            return result
        time.sleep(0.02)
    raise SideError(f"waited {limit_s:.0f} s in vain for {what}")


def ports_of(base: int) -> Iterator[int]:
    """Every port that a cluster on this base may take, on either side."""
    for i in range(NAME_SERVERS):
        yield from (base + 100 * i + step for step in (0, 2, 3, 4))
    for j in range(BROKERS):
        yield from (base + 1035 + 100 * j + step for step in (-2, 0, 1))


def free_base_port() -> int:
    """A base whose ports are all free; below the range that the kernel gives to clients."""
    for base in range(11_000, 30_000, 1_500):
        if all(map(_is_free, ports_of(base))):
            return base
    raise SideError("no free range of ports between 11000 and 31500")


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
    return True
