"""Our cluster: `batonmq up`, the command that a user would type."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil

from lab.bench.side import BROKERS, NAME_SERVERS, ClusterSide
from lab.cluster.processes import is_running, wait_for
from lab.cluster.stores import wipe
from lab.cluster.up import ClusterProcess


class OurCluster(ClusterSide):
    """`batonmq up` with default settings. A killed broker is started again by `batonmq up` itself
    if it is `supervised`, else by its `argv`."""

    name = "ours"

    def __init__(self, folder: Path, *, supervised: bool = False) -> None:
        super().__init__(folder)
        self._supervised = supervised
        self._up = ClusterProcess(
            folder,
            controllers=NAME_SERVERS,
            replicas=BROKERS,
            settings={},
            respawn=supervised,
        )
        self.base_port = self._up.base_port
        self._signalled: dict[str, int] = {}

    def spawn(self) -> None:
        self._up.spawn()

    def stop(self) -> None:
        self._up.stop()

    def wait_whole(self) -> None:
        self._up.wait_whole()
        super().wait_whole()

    def _broker(self, address: str) -> dict[str, Any]:
        return next(broker for broker in self._up.brokers if broker["address"] == address)

    def broker_pid(self, address: str) -> int:
        return self._up.pid_of(self._broker(address))

    def name_server_pids(self) -> list[int]:
        return [int(node["pid"]) for node in self._up.document["nameServers"]]

    def supervisor_pids(self) -> list[int]:
        up = psutil.Process(int(self._up.document["supervisorPid"]))
        servers = self.serving_pids()
        return [up.pid, *(child.pid for child in up.children() if child.pid not in servers)]

    def kill_broker(self, address: str) -> None:
        self._signalled[address] = self.broker_pid(address)
        self._up.kill(self._broker(address))

    def stop_broker(self, address: str) -> None:
        self._signalled[address] = self.broker_pid(address)
        self._up.kill(self._broker(address), signal.SIGTERM)
        self._wait_end(address)

    def start_broker(self, address: str) -> None:
        self._wait_end(address)
        if self._supervised:
            dead = self._signalled[address]
            wait_for(
                f"{address} to be back", lambda: self._broker(address)["pid"] not in (None, dead)
            )
        else:
            self._up.restart(self._broker(address))

    def _wait_end(self, address: str) -> None:
        pid = self._signalled[address]
        wait_for(f"the end of process {pid}", lambda: not is_running(pid))

    def empty_store(self, address: str) -> None:
        wipe(Path(self._broker(address)["dataDir"]))

    def diagnostics(self) -> str:
        return self._up.diagnostics()
