"""The base class of all clusters in the lab: how tests wait for, read and steer one from outside.

Backends: `up.ClusterProcess` (`batonmq up` as a child), `held.HeldCluster` (processes of the lab,
each in a network of its own), `compose.ComposeCluster` (containers), `mixed.MixedGroup` (with
Java's brokers or controllers), `classic.ClassicGroup` (without controllers). The bench uses two
of them (`lab.bench.side`).
"""

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from lab.cluster import frames, processes
from lab.cluster.connection import ask, sync_state
from lab.cluster.processes import READY_S, STOP_GRACE_S, tail

CLUSTER: Final = "DefaultCluster"
GROUP: Final = frames.BROKER_NAME
Sections = Mapping[str, Mapping[str, object]]
SMALL_STORE: Final[Sections] = {"store": {"mappedFileSizeCommitLog": 64 << 20}}
LEADER_REPLY_S: Final = 1.0
T = TypeVar("T")
K = TypeVar("K", int, str)


def merged(*overrides: Sections | None) -> dict[str, dict[str, object]]:
    """Sections of settings, the later ones on top."""
    sections: dict[str, dict[str, object]] = {}
    for one in overrides:
        for name, values in (one or {}).items():
            sections.setdefault(name, {}).update(values)
    return sections


class Cluster(ABC):
    """`limit_s`: how long a wait lasts unless it says otherwise. `reply_s`: how long a controller
    may take to report a group."""

    limit_s: ClassVar[float] = READY_S
    reply_s: ClassVar[float] = 5.0

    @property
    @abstractmethod
    def controllers(self) -> list[str]:
        """Where the controllers answer tools."""

    @abstractmethod
    def logs(self) -> list[Path]:
        """What its processes printed."""

    def diagnostics(self) -> str:
        """The end of every log, for the report of a failure."""
        return "\n".join(f"-- {log}\n{text}" for log in self.logs() if (text := tail(log)))

    def wait_for(self, what: str, found: Callable[[], T | None], limit_s: float | None = None) -> T:
        """As `lab.cluster.processes.wait_for`; the error has `diagnostics`."""
        return processes.wait_for(what, found, limit_s or self.limit_s, self.diagnostics)

    def group_state(self, group: str = GROUP) -> dict[str, Any] | None:
        """What the leading controller records; None while no controller leads."""
        return sync_state(self.controllers, group, timeout_s=self.reply_s)

    @property
    def controller(self) -> str:
        """The leading one, as far as one of them leads and says so."""
        for address in self.controllers:
            try:
                reply = ask(address, frames.METADATA, timeout_s=LEADER_REPLY_S)
            except OSError:
                continue
            if reply.code == frames.OK and (leader := reply.ext.get("controllerLeaderAddress")):
                return leader
        return self.controllers[0]

    def id_of(self, address: str) -> int:
        """The id that the controllers know a broker by. Raises LookupError."""
        state = self.wait_for("a leading controller", self.group_state)
        for replica in [*state.get("inSyncReplicas", []), *state.get("notInSyncReplicas", [])]:
            if replica["brokerAddress"] == address:
                return int(replica["brokerId"])
        raise LookupError(f"no broker at {address} in {state}")

    def elect(self, address: str) -> frames.Reply:
        """What `mqadmin electMaster` sends: ELECT_MASTER (1002)."""
        fields = {
            "clusterName": CLUSTER,
            "brokerName": GROUP,
            "brokerId": self.id_of(address),
            "designateElect": "true",
        }
        return ask(self.controller, frames.ELECT_MASTER, fields)


class OwnProcesses(Cluster, Generic[K]):
    """One whose brokers are started one by one, by a name or place of each. A context manager that
    ends everything."""

    def __init__(self) -> None:
        self._processes: dict[K, subprocess.Popen[bytes]] = {}

    def pid(self, name: K) -> int:
        return self._processes[name].pid

    def kill(self, name: K, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it by that signal, and waits for the end; by SIGKILL if it does not come."""
        process = self._processes.pop(name)
        # Not by its pid: if it has ended meanwhile, that may be another process's by now.
        process.send_signal(number)
        try:
            process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # Not by SIGTERM: a Java broker takes many seconds for that.
        for name in list(self._processes):
            self.kill(name)

    def signal(self, name: K, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)
