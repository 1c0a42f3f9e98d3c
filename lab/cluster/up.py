"""A cluster as a user starts it: `batonmq up` as a child, and its cluster.json."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self

import yaml

from lab.cluster.cluster import GROUP, SMALL_STORE, Cluster, Sections, merged
from lab.cluster.mqctl import Ran, mqctl, mqctl_program
from lab.cluster.processes import ROOT, NotInTime, free_base_port, spawn, tail

STOP_S: Final = 30.0


def rounds(usual: int, soak: int) -> int:
    """How often a scenario is repeated: `soak` times under `make soak`."""
    return soak if os.environ.get("BATONMQ_SOAK") == "1" else usual


class ClusterProcess(Cluster):
    """A context manager. `document` is the newest cluster.json, `node` means one of its entries."""

    COMMAND = (sys.executable, "-m", "batonmq.launcher.main", "up")

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 3,
        groups: int = 1,
        controllers: int = 3,
        settings: Sections = SMALL_STORE,
        overrides: Sections | None = None,
        respawn: bool = False,
    ) -> None:
        """`overrides` are settings on top of `settings`."""
        self.folder = folder
        self.data_dir = folder / "data"
        self.base_port = free_base_port(replicas * groups)
        self.log_path = folder / "up.log"
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "overrides.yaml"
        config.write_text(yaml.safe_dump(merged(settings, overrides)))
        self.argv = [
            *self.COMMAND, "--json",
            "--controllers", str(controllers),
            "--replicas", str(replicas),
            "--groups", str(groups),
            "--data", str(self.data_dir),
            "--base-port", str(self.base_port),
            "--config", str(config),
            "--respawn" if respawn else "--no-respawn",
        ]  # fmt: skip
        self.checkout = ROOT
        self.process: subprocess.Popen[bytes] | None = None
        self._by_hand: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
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
        self.spawn()
        self.wait_whole()

    def spawn(self) -> None:
        self.process = spawn(self.argv, self.log_path, cwd=self.checkout)

    def stop(self) -> int | None:
        """SIGTERM to all; the exit code. Raises RuntimeError for a process that did not end."""
        children, self._by_hand = self._by_hand, {}
        stuck = [child.pid for child in children.values() if not _ended(child, 20)]
        up, self.process = self.process, None
        if up is not None and not _ended(up, STOP_S):
            stuck.append(up.pid)
        if stuck:
            raise RuntimeError(f"processes {stuck} did not end on SIGTERM\n{self.diagnostics()}")
        return None if up is None else up.returncode

    @property
    def data_folders(self) -> list[Path]:
        """The brokers' folders, also after the end."""
        return sorted(self.data_dir.glob("broker-*"))

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.data_dir / "cluster.json").read_text())
        return document

    @property
    def name_servers(self) -> str:
        return ";".join(node["address"] for node in self.document["nameServers"])

    @property
    def controllers(self) -> list[str]:
        return [node["address"] for node in self.document["controllers"]]

    @property
    def brokers(self) -> list[dict[str, Any]]:
        brokers: list[dict[str, Any]] = self.document["brokers"]
        return brokers

    @property
    def servers(self) -> list[dict[str, Any]]:
        """An entry for each process: name servers, which have the controllers, then brokers."""
        document = self.document
        return [*document["nameServers"], *document["brokers"]]

    def pids(self) -> dict[str, int | None]:
        """By address, as cluster.json has them: None for a process that has ended."""
        return {node["address"]: node["pid"] for node in self.servers}

    def node_at(self, address: str) -> dict[str, Any]:
        """The newest entry of a process. Raises StopIteration."""
        return next(node for node in self.servers if node["address"] == address)

    def mqctl(self, *arguments: str) -> Ran:
        """A command that finds this cluster by its folder alone."""
        return mqctl(*arguments, home=self.folder, env=self._where)

    def mqctl_program(self, *arguments: str) -> Ran:
        """The same as a program of its own."""
        return mqctl_program(*arguments, home=self.folder, env=self._where)

    @property
    def _where(self) -> dict[str, str]:
        return {"BATONMQ_DATA": str(self.data_dir)}

    @property
    def events(self) -> list[dict[str, Any]]:
        """What `batonmq up --json` reported so far."""
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_whole(self) -> None:
        """Waits for cluster.json. Raises NotInTime, at once if `batonmq up` has ended."""

        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise NotInTime(f"batonmq up ended:\n{tail(self.log_path, 3000)}")
            try:
                document = self.document
            except FileNotFoundError:
                return False
            # A resumed folder holds the file of the cluster before until this one removes it.
            return bool(document["supervisorPid"] == self.process.pid)

        self.wait_for("cluster.json", ready)

    def master(self, group: str = GROUP) -> dict[str, Any]:
        """The broker that cluster.json calls master and that has a process; waits for one."""
        found = self.wait_for(f"a master of {group}", lambda: self._of_role("MASTER", group))
        return found[0]

    def slaves(self, group: str = GROUP) -> list[dict[str, Any]]:
        """The running brokers that cluster.json calls slaves."""
        return self._of_role("SLAVE", group)

    def _of_role(self, role: str, group: str) -> list[dict[str, Any]]:
        return [
            broker
            for broker in self.brokers
            if broker["name"] == group and broker["role"] == role and broker["pid"]
        ]

    def addresses(self, group: str = GROUP) -> list[str]:
        return [broker["address"] for broker in self.brokers if broker["name"] == group]

    def wait_in_sync(self, count: int, group: str = GROUP) -> dict[str, Any]:
        """Waits until the SyncStateSet has `count` members and a master; the group's state."""

        def state() -> dict[str, Any] | None:
            found = self.group_state(group)
            if not found or not found.get("masterAddress"):
                return None
            return found if len(found["inSyncReplicas"]) == count else None

        return self.wait_for(f"{count} replicas in sync", state)

    def wait_new_master(self, old_address: str, group: str = GROUP) -> dict[str, Any]:
        """Waits until cluster.json names another running master."""

        def elected() -> dict[str, Any] | None:
            master = self.master(group)
            return master if master["address"] != old_address else None

        return self.wait_for(f"another master than {old_address}", elected)

    def broker_log(self, broker: dict[str, Any]) -> str:
        """What one broker logged, also after a restart by hand."""
        logs = (Path(broker["dataDir"]) / "process.log", _log_by_hand(broker))
        return "".join(log.read_text() for log in logs if log.exists())

    def pid_of(self, node: dict[str, Any]) -> int:
        """Of its process; cluster.json learns that of a node restarted by hand a little later."""
        child = self._by_hand.get(node["address"])
        return child.pid if child is not None and child.poll() is None else int(node["pid"])

    def kill(self, node: dict[str, Any], number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid_of(node), number)

    def restart(self, node: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Starts a killed process again by its `argv`, as an operator would."""
        before = self._by_hand.get(node["address"])
        if before is not None:
            before.wait(STOP_S)
        child = spawn(node["argv"], _log_by_hand(node), cwd=self.checkout)
        self._by_hand[node["address"]] = child
        return child

    def logs(self) -> list[Path]:
        return [self.log_path, *sorted(self.data_dir.glob("*/process.log"))]


def _log_by_hand(node: dict[str, Any]) -> Path:
    return Path(node["config"]).with_suffix(".by-hand.log")


def _ended(child: subprocess.Popen[bytes], limit_s: float) -> bool:
    """SIGTERM, and SIGKILL if that is not enough; whether SIGTERM was."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False
    return True
