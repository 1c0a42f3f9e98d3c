"""A classic group, without controllers: a name server and brokers, each of either kind."""

import sys
from collections.abc import Mapping
from pathlib import Path

from lab.cluster import java
from lab.cluster.cluster import OwnProcesses
from lab.cluster.connection import ha_status
from lab.cluster.processes import HOST, spawn


class ClassicGroup(OwnProcesses[str]):
    """See the module; `java_namesrv`: RocketMQ's name server; `namesrv`: more keys of the name
    server."""

    limit_s = java.LIMIT_S

    def __init__(
        self,
        folder: Path,
        base: int,
        *,
        namesrv: Mapping[str, object] | None = None,
        java_namesrv: bool = False,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.name_server = f"{HOST}:{base}"
        self._base = base
        settings = {"listenPort": base, "bindAddress": HOST, **(namesrv or {})}
        if java_namesrv:
            process = java.start_server(
                java.NAMESRV_MAIN, settings, folder / "namesrv", java.SMALL_HEAP
            )
        else:
            config = folder / "namesrv.properties"
            config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
            argv = [sys.executable, "-m", "batonmq.namesrv.main", "-c", str(config)]
            process = spawn(argv, folder / "namesrv.log", cwd=folder)
        self._processes["namesrv"] = process

    def address(self, broker_id: int) -> str:
        return f"{HOST}:{self._port(broker_id)}"

    def _port(self, broker_id: int) -> int:
        return self._base + 1035 + 100 * broker_id

    def settings(self, broker_id: int, role: str, store: Path) -> dict[str, object]:
        """RocketMQ's keys; both kinds of broker take them."""
        return {
            **java.broker_settings(HOST, self._port(broker_id), self.name_server, store),
            **java.SMALL_FILES,
            "brokerId": broker_id,
            "brokerRole": role,
            "inSyncReplicas": 2,
            "deleteWhen": "04",
            "fileReservedTime": 48,
            "flushDiskType": "ASYNC_FLUSH",
        }

    def start_ours(self, name: str, settings: Mapping[str, object]) -> None:
        config = self.folder / f"{name}.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        argv = [sys.executable, "-m", "batonmq.broker.main", "-c", str(config)]
        self._processes[name] = spawn(argv, self.folder / f"{name}.log", cwd=self.folder)

    def start_java(self, name: str, settings: Mapping[str, object]) -> None:
        process = java.start_server(
            java.BROKER_MAIN, {**settings, **java.NO_WARMING}, self.folder / name, java.SMALL_HEAP
        )
        self._processes[name] = process

    @property
    def controllers(self) -> list[str]:
        return []

    def logs(self) -> list[Path]:
        return sorted([*self.folder.glob("*.log"), *self.folder.glob("*/process.log")])


def in_sync(address: str) -> int:
    """How many slaves that master counts as in sync; 0 while it does not answer."""
    status = ha_status(address, timeout_s=1.0)
    return 0 if status is None else status.in_sync_slaves
