"""Apache RocketMQ 5.3.3 as a cluster: five JVMs, controller mode, all-ack, small heaps."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from lab.bench.side import BROKERS, NAME_SERVERS, ClusterSide
from lab.cluster import java
from lab.cluster.processes import stop_all, tail
from lab.cluster.stores import wipe


class JavaPeer(ClusterSide):
    """The Java cluster; every process has a home folder of its own for logs and stores."""

    name = "java"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._name_servers: list[subprocess.Popen[bytes]] = []
        self._brokers: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self) -> None:
        ports = [self.base_port + 100 * i for i in range(NAME_SERVERS)]
        for i in range(NAME_SERVERS):
            home = self._home(f"namesrv-{i}")
            settings = java.name_server_settings(ports, i, home)
            self._name_servers.append(
                java.start_server(java.NAMESRV_MAIN, settings, home, java.BENCH_HEAP)
            )
        for address in self.brokers:
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
        home = self._broker_home(address)
        settings = self._broker_config(address, home)
        self._brokers[address] = java.start_server(
            java.BROKER_MAIN, settings, home, java.BENCH_HEAP
        )

    def empty_store(self, address: str) -> None:
        wipe(self._broker_home(address) / "store")

    def diagnostics(self) -> str:
        logs = sorted(self.folder.glob("*/process.log"))
        return "\n".join(f"-- {log.parent.name}: {text}" for log in logs if (text := tail(log)))

    def _home(self, name: str) -> Path:
        home = self.folder / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _broker_home(self, address: str) -> Path:
        return self._home(f"broker-{self.brokers.index(address)}")

    def _broker_config(self, address: str, home: Path) -> dict[str, object]:
        host, _, port = address.rpartition(":")
        controllers, name_servers = ";".join(self.controllers), ";".join(self.name_servers)
        return {
            **java.broker_settings(host, int(port), name_servers, home / "store", controllers),
            "flushDiskType": "ASYNC_FLUSH",
            "enablePropertyFilter": "true",
        }


assert BROKERS == 2, "the figures of the Java peer are those of two brokers"
