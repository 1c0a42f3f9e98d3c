"""Our cluster, as `batonmq up` runs it: the command that a user would type, and cluster.json."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from bench.proc import spawn, stop_all, tail
from bench.side import BROKERS, NAME_SERVERS, Side, SideError, wait_for

ROOT: Final = Path(__file__).resolve().parents[1]
KEPT: Final = "brokerIdentity"


class OurCluster(Side):
    """`batonmq up` as a child. A broker that was killed is started again by its `argv`."""

    name = "ours"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.data_dir = folder / "data"
        self._up: subprocess.Popen[bytes] | None = None
        self._by_hand: dict[str, subprocess.Popen[bytes]] = {}
        self._document: dict[str, Any] = {}

    def spawn(self) -> None:
        argv = [
            sys.executable, "-m", "batonmq.launcher.main", "up", "--json",
            "--controllers", str(NAME_SERVERS),
            "--replicas", str(BROKERS),
            "--data", str(self.data_dir),
            "--base-port", str(self.base_port),
        ]  # fmt: skip
        self._up = spawn(argv, self.folder / "up.log", cwd=ROOT)

    def stop(self) -> None:
        if self._up is not None:
            stop_all([self._up])  # ends what was started by hand as well, once it has seen it
        stop_all(self._by_hand.values())

    def settle_down(self) -> None:
        self._document = wait_for("cluster.json", self._read_document)
        super().settle_down()

    def _read_document(self) -> dict[str, Any] | None:
        assert self._up is not None
        if self._up.poll() is not None:
            raise SideError(f"batonmq up has ended:\n{tail(self.folder / 'up.log')}")
        try:
            document: dict[str, Any] = json.loads((self.data_dir / "cluster.json").read_text())
        except FileNotFoundError:
            return None
        return document

    def _broker(self, address: str) -> dict[str, Any]:
        for broker in self._document["brokers"]:
            if broker["address"] == address:
                found: dict[str, Any] = broker
                return found
        raise SideError(f"cluster.json knows no broker {address}")

    def broker_pid(self, address: str) -> int:
        by_hand = self._by_hand.get(address)
        return by_hand.pid if by_hand is not None else int(self._broker(address)["pid"])

    def name_server_pids(self) -> list[int]:
        return [int(node["pid"]) for node in self._document["nameServers"]]

    def supervisor_pids(self) -> list[int]:
        return [int(self._document["supervisorPid"])]

    def kill_broker(self, address: str) -> None:
        os.kill(self.broker_pid(address), signal.SIGKILL)

    def stop_broker(self, address: str) -> None:
        pid = self.broker_pid(address)
        os.kill(pid, signal.SIGTERM)
        self._wait_end(address, pid)

    def start_broker(self, address: str) -> None:
        self._wait_end(address, self.broker_pid(address))
        broker = self._broker(address)
        log = Path(broker["dataDir"]) / "process.log"
        self._by_hand[address] = spawn(broker["argv"], log, cwd=ROOT)

    def _wait_end(self, address: str, pid: int) -> None:
        by_hand = self._by_hand.get(address)
        if by_hand is not None:
            by_hand.wait(60)
        else:
            wait_for(f"the end of process {pid}", lambda: not Path(f"/proc/{pid}").exists())

    def empty_store(self, address: str) -> None:
        for entry in Path(self._broker(address)["dataDir"]).iterdir():
            if entry.name.startswith(KEPT) or entry.suffix == ".log":
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def complaint(self) -> str:
        logs = [self.folder / "up.log", *sorted(self.data_dir.glob("*/process.log"))]
        return "\n".join(f"-- {log.parent.name}: {text}" for log in logs if (text := tail(log)))
