"""A real cluster for tests: `batonmq up` in its own folder and port range, ended with the test.

Everything waits for an event (cluster.json, an acknowledged write), nothing sleeps for luck. The
range of ports is found free and differs between test processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from raw_probe import SYNC_STATE, ask

ROOT = Path(__file__).resolve().parents[2]
SMALL_STORE = {"store": {"mappedFileSizeCommitLog": 64 << 20}}
READY_S = 60.0
FIRST_PORT, LAST_PORT = 12_000, 32_000


def free_base_port(brokers: int) -> int:
    """A base port whose whole range (see `batonmq.launcher.layout`) is free right now.

    Below the range from which the kernel takes the source ports of connections: a port that is
    free at the start of a cluster must still be free when a broker of it is restarted.
    """
    candidates = range(FIRST_PORT, LAST_PORT - 1035 - 100 * brokers, 10)
    start = os.getpid() * 37 % len(candidates)
    for base in (*candidates[start:], *candidates[:start]):
        ports = [base + 100 * i + step for i in range(3) for step in (0, 2, 3, 4)]
        ports += [base + 1035 + 100 * j + step for j in range(brokers) for step in (-2, 0, 1)]
        if all(map(_is_free, ports)):
            return base
    raise AssertionError("no free range of ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_for(what: str, found: Callable[[], Any], seconds: float = READY_S) -> Any:
    """Polls until `found()` gives something true, and returns it. Fails naming `what`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = found()
        if result:
            return result
        time.sleep(0.01)
    raise AssertionError(f"waited {seconds:.0f} s in vain for {what}")


def rounds(usual: int, soak: int) -> int:
    """How often a scenario is repeated: `soak` times under `make soak`."""
    return soak if os.environ.get("BATONMQ_SOAK") == "1" else usual


def _ended(child: subprocess.Popen[bytes]) -> bool:
    """SIGTERM, and SIGKILL if that is not enough; whether SIGTERM was."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False
    return True


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class ClusterProcess:
    """`batonmq up` as a child. Use as a context manager; `document` is the newest cluster.json."""

    COMMAND = (sys.executable, "-m", "batonmq.launcher.main", "up")

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 3,
        groups: int = 1,
        controllers: int = 3,
        overrides: dict[str, dict[str, object]] | None = None,
        respawn: bool = False,
    ) -> None:
        self.folder = folder
        self.base_port = free_base_port(replicas * groups)
        self.log_path = folder / "up.log"
        config = folder / "overrides.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        sections = {name: dict(values) for name, values in SMALL_STORE.items()}
        for name, values in (overrides or {}).items():
            sections.setdefault(name, {}).update(values)
        config.write_text(yaml.safe_dump(sections))
        self.argv = [
            *self.COMMAND, "--json",
            "--controllers", str(controllers),
            "--replicas", str(replicas),
            "--groups", str(groups),
            "--data", str(folder / "data"),
            "--base-port", str(self.base_port),
            "--config", str(config),
        ]  # fmt: skip
        if respawn:
            self.argv.append("--respawn")
        self.process: subprocess.Popen[bytes] | None = None
        self._by_hand: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> ClusterProcess:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it and waits until it is whole."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log, cwd=ROOT)
        self.wait_whole()

    def stop(self) -> int | None:
        """SIGTERM; the exit code. Processes started by hand end as well."""
        code = None
        stuck = [child.pid for child in self._by_hand if not _ended(child)]
        self._by_hand.clear()
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
            self.process = None
        assert not stuck, f"processes {stuck} did not end on SIGTERM\n{self.story()}"
        return code

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def document(self) -> dict[str, Any]:
        return json.loads((self.data_dir / "cluster.json").read_text())

    @property
    def name_servers(self) -> str:
        return ";".join(node["address"] for node in self.document["nameServers"])

    @property
    def controllers(self) -> list[str]:
        return [node["address"] for node in self.document["controllers"]]

    @property
    def brokers(self) -> list[dict[str, Any]]:
        return self.document["brokers"]

    @property
    def events(self) -> list[dict[str, Any]]:
        """What `batonmq up --json` told so far."""
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_whole(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"batonmq up ended:\n{self.log_path.read_text()[-3000:]}")
            file = self.data_dir / "cluster.json"
            # A resumed folder holds the file of the cluster before until this one removes it.
            return file.exists() and self.document["supervisorPid"] == self.process.pid

        try:
            wait_for("cluster.json", ready)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.story()}") from exc

    def master(self, group: str = "broker-a") -> dict[str, Any]:
        """The broker that cluster.json calls master and that has a process; waits for one."""
        return wait_for(
            f"a master of {group}",
            lambda: next(
                (
                    broker
                    for broker in self.brokers
                    if broker["name"] == group and broker["role"] == "MASTER" and broker["pid"]
                ),
                None,
            ),
        )

    def slaves(self, group: str = "broker-a") -> list[dict[str, Any]]:
        """The living brokers that cluster.json calls slaves."""
        return [
            broker
            for broker in self.brokers
            if broker["name"] == group and broker["role"] == "SLAVE" and broker["pid"]
        ]

    def addresses(self, group: str = "broker-a") -> list[str]:
        return [broker["address"] for broker in self.brokers if broker["name"] == group]

    def group_state(self, group: str = "broker-a") -> dict[str, Any] | None:
        """What the leading controller records (1006), None while no controller leads."""
        for address in self.controllers:
            try:
                reply = ask(address, SYNC_STATE, body=json.dumps([group]).encode())
            except (OSError, EOFError):
                continue
            if reply.code == 0:
                return reply.json["replicasInfoTable"].get(group)
        return None

    def wait_in_sync(self, count: int, group: str = "broker-a") -> dict[str, Any]:
        """Waits until the SyncStateSet has `count` members and a master; the group's state."""

        def state() -> dict[str, Any] | None:
            found = self.group_state(group)
            if not found or not found.get("masterAddress"):
                return None
            return found if len(found["inSyncReplicas"]) == count else None

        try:
            return wait_for(f"{count} replicas in sync", state)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.story()}") from exc

    def wait_new_master(self, old_address: str, group: str = "broker-a") -> dict[str, Any]:
        """Waits until cluster.json names another living master."""

        def elected() -> dict[str, Any] | None:
            master = self.master(group)
            return master if master["address"] != old_address else None

        return wait_for(f"another master than {old_address}", elected)

    def broker_log(self, broker: dict[str, Any]) -> str:
        """What one broker logged, also after a restart by hand."""
        logs = (
            Path(broker["dataDir"]) / "process.log",
            Path(broker["config"]).with_suffix(".by-hand.log"),
        )
        return "".join(log.read_text() for log in logs if log.exists())

    def kill(self, node: dict[str, Any], number: signal.Signals = signal.SIGKILL) -> None:
        """Signals one process of cluster.json."""
        os.kill(node["pid"], number)

    def restart(self, node: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Starts a dead process again by its `argv`, as an operator would."""
        log = Path(node["config"]).with_suffix(".by-hand.log")
        with log.open("ab") as output:
            child = subprocess.Popen(node["argv"], stdout=output, stderr=output, cwd=ROOT)
        self._by_hand.append(child)
        return child

    def story(self, lines: int = 12) -> str:
        """The last lines of every log, for the report of a failure."""
        logs = [self.log_path, *sorted(self.data_dir.glob("*/process.log"))]
        return "\n".join(
            f"--- {log}\n" + "\n".join(log.read_text().splitlines()[-lines:])
            for log in logs
            if log.exists()
        )
