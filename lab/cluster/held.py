"""Three name servers with controllers and three replicas as processes that the lab holds itself.

Configuration files and command lines are those of `batonmq up`; each process has its own address on
the lab's network, and is started, signalled and slowed from here.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batonmq.launcher.cluster_file import cluster_document, write_document
from batonmq.launcher.layout import DEFAULT_BASE_PORT, Layout, plan
from batonmq.launcher.preparation import taken_ports, write_configs
from lab.cluster import frames
from lab.cluster.checks import Epoch
from lab.cluster.cluster import GROUP, SMALL_STORE, Cluster, Sections, merged
from lab.cluster.connection import HaStatus, ask, parse_ha_status, sync_state
from lab.cluster.fault_points import CLOCK_VARIABLE, DISK_VARIABLE, fault_environment
from lab.cluster.mqctl import Ran, mqctl
from lab.cluster.network import Network, placed
from lab.cluster.node_process import NodeProcess
from lab.cluster.processes import READY_S, NotInTime, free_base_port, spawn

CONTROLLERS: Final = 3
REPLICAS: Final = 3
PROBE_HOST: Final = "probe"
REPLY_S: Final = 0.4
HOSTS: Final = (
    *(f"namesrv-{i}" for i in range(CONTROLLERS)),
    *(f"broker-a-{j}" for j in range(REPLICAS)),
    PROBE_HOST,
)
USERS: Final[Sections] = {
    "auth": {
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "initAuthenticationUser": f'{{"username":"{frames.USER}","password":"{frames.SECRET}"}}',
        "innerClientAuthenticationCredentials": '{"accessKey":"node","secretKey":"of the nodes"}',
    }
}

NO_METRICS: Final[Sections] = {"metrics": {"metricsExporterType": "DISABLE"}}
"""A process may run an earlier version, which refuses that section."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """What the leading controller records. Brokers by their index."""

    master: int | None
    master_epoch: int
    set_epoch: int
    in_sync: frozenset[int]
    broker_ids: dict[int, int]


class HeldCluster(Cluster):
    """See the module. Brokers and controllers are named by their index, 0 to 2.

    Questions go to the processes that run and are not stopped. `contradictions`: events that two
    controllers recorded differently.
    """

    def __init__(
        self,
        folder: Path,
        network: Network,
        overrides: Sections | None = None,
        *,
        secure: bool = False,
    ) -> None:
        """`secure`: TLS and users on, at every port."""
        self.folder = folder
        self.network = network
        layout = plan(
            folder / "data",
            controllers=CONTROLLERS,
            replicas=REPLICAS,
            # On the loopback others may have the usual ports.
            base_port=DEFAULT_BASE_PORT if network.can_cut else free_base_port(REPLICAS),
            overrides=merged(SMALL_STORE, USERS if secure else None, overrides, NO_METRICS),
            secure="enforcing" if secure else "disabled",
        )
        self.layout: Layout = placed(layout, network)
        self.controller_processes = [NodeProcess(node) for node in self.layout.name_servers]
        self.brokers = [NodeProcess(node) for node in self.layout.brokers]
        self.contradictions: list[str] = []

    def start(self) -> None:
        """Writes the configurations, starts everything, waits until it is whole.

        Raises RuntimeError that names every port that somebody else has, before anything starts.
        """
        self._check_ports()
        write_configs(self.layout)
        # Tools find the folder's cluster by this file, as they find that of `batonmq up`.
        no_pids = dict.fromkeys(process.name for process in self.processes)
        document = cluster_document(self.layout, frames.now_ms(), no_pids, {})
        write_document(self.layout.planned_cluster_file, document)
        self.launch_dead()
        self.wait_whole()

    def _check_ports(self) -> None:
        taken = []
        for process in self.processes:
            with self.network.inside(process.name):
                taken += taken_ports(process.node)
        if taken:
            raise RuntimeError(f"ports of this cluster are not free: {'; '.join(taken)}")

    def launch(self, process: NodeProcess) -> None:
        """Starts a node that does not run. Its output goes to `process.log` in its data folder."""
        process.node.pid_file.unlink(missing_ok=True)
        faults = fault_environment(
            disk=f"@{process.fault_files[DISK_VARIABLE]}",
            clock=f"@{process.fault_files[CLOCK_VARIABLE]}",
            source=process.source,
        )
        with self.network.inside(process.name):
            process.child = spawn(
                process.node.argv,
                process.node.data_dir / "process.log",
                cwd=process.source,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | faults,
                end_signal=signal.SIGKILL,
            )
        process.stopped = process.may_end = False

    def launch_dead(self) -> None:
        """Starts whatever does not run."""
        for process in self.processes:
            if not process.runs:
                self.launch(process)

    def resume_stopped(self) -> None:
        """SIGCONT to whatever is stopped."""
        for process in self.processes:
            if process.stopped:
                process.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends everything cleanly; SIGKILL after 20 s."""
        self.resume_stopped()
        # Controllers first, as `batonmq up` does: the end of a broker causes no election then.
        for group in (self.controller_processes, self.brokers):
            for process in group:
                process.signal(signal.SIGTERM)
            for process in group:
                if process.child is None:
                    continue
                try:
                    process.child.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()

    @property
    def processes(self) -> list[NodeProcess]:
        return [*self.controller_processes, *self.brokers]

    @property
    def addresses(self) -> list[str]:
        """Where the brokers serve clients, by index."""
        return [process.node.address for process in self.brokers]

    @property
    def name_servers(self) -> str:
        return self.layout.name_server_addresses

    def ips(self, processes: Iterable[NodeProcess]) -> list[str]:
        return [self.network.address[process.name] for process in processes]

    @property
    def data_folders(self) -> list[Path]:
        """The brokers' folders."""
        return [node.data_dir for node in self.layout.brokers]

    def master(self) -> NodeProcess:
        """That of the whole cluster; waits until it is whole."""
        index = self.wait_whole().master
        assert index is not None
        return self.brokers[index]

    def mqctl(self, *arguments: str) -> Ran:
        """A command that is given the addresses, and nothing else to find this cluster by."""
        where = {"NAMESRV_ADDR": self.name_servers, "CONTROLLER_ADDR": ";".join(self.controllers)}
        return mqctl(*arguments, home=self.folder, env=where)

    def wait_leader(self) -> int:
        """The leading controller."""

        def leader() -> tuple[int] | None:
            found = self.leader()
            return None if found is None else (found,)

        return self.wait_for("a leading controller", leader)[0]

    def whole(self) -> GroupState | None:
        """The group, if every process runs and listens, a controller leads, and the set is full and
        level."""
        if any(process.stopped or not process.listens for process in self.processes):
            return None
        group = self.group()
        if group is None or group.master is None or len(group.in_sync) != REPLICAS:
            return None
        status = self.ha_status(group.master)
        if status is None or not status.master or status.in_sync_slaves != REPLICAS - 1:
            return None
        return group

    def wait_whole(self, limit_s: float = READY_S) -> GroupState:
        """Raises NotInTime, at once if a process has ended. One that may end is started again."""

        def whole() -> GroupState | None:
            ended = [process for process in self.processes if not process.runs]
            if any(not process.may_end for process in ended):
                names = ", ".join(process.name for process in ended)
                raise NotInTime(f"{names} ended\n{self.diagnostics()}")
            for process in ended:
                self.launch(process)
            return self.whole()

        return self.wait_for("a whole cluster", whole, limit_s)

    def wait_listening(self, index: int) -> float:
        """When (CLOCK_MONOTONIC) a started broker was seen to accept connections."""

        def listens() -> float | None:
            return time.monotonic() if self.brokers[index].listens else None

        return self.wait_for(f"{self.brokers[index].name} to listen", listens)

    @property
    def controllers(self) -> list[str]:
        return [node.controller_address for node in self.layout.name_servers]

    def logs(self) -> list[Path]:
        return [process.node.data_dir / "process.log" for process in self.processes]

    def diagnostics(self) -> str:
        lines = [f"state: {self.group()}"]
        for process in self.processes:
            how = "stopped" if process.stopped else "runs" if process.runs else "ended"
            lines.append(f"{process.name} ({how})")
        return "\n".join([*lines, super().diagnostics()])

    # What its processes report.

    def leader(self) -> int | None:
        """The controller that calls itself leader."""
        for index in range(CONTROLLERS):
            reply = self._ask_controller(index, frames.METADATA)
            if reply is not None and reply.ext.get("isLeader") == "true":
                return index
        return None

    def agrees_on_leader(self) -> bool:
        """Whether every controller replies and all name the same leader: a restarted one counts
        for the majority again."""
        leaders = set()
        for index in range(CONTROLLERS):
            reply = self._ask_controller(index, frames.METADATA)
            leaders.add(None if reply is None else reply.ext.get("controllerLeaderAddress") or None)
        return len(leaders) == 1 and None not in leaders

    def group(self) -> GroupState | None:
        """What the leading controller records; None while none replies."""
        running = [
            address
            for address, process in zip(self.controllers, self.controller_processes, strict=True)
            if process.listens and not process.stopped
        ]
        found = sync_state(running, GROUP, timeout_s=REPLY_S)
        if found is None:
            return None
        index = {process.node.address: j for j, process in enumerate(self.brokers)}
        replicas = [*found["inSyncReplicas"], *found["notInSyncReplicas"]]
        return GroupState(
            index.get(found.get("masterAddress") or ""),
            int(found["masterEpoch"]),
            int(found["syncStateSetEpoch"]),
            frozenset(index[one["brokerAddress"]] for one in found["inSyncReplicas"]),
            {index[one["brokerAddress"]]: int(one["brokerId"]) for one in replicas},
        )

    def ha_status(self, index: int) -> HaStatus | None:
        reply = self._ask(self.brokers[index], self.brokers[index].node.address, frames.HA_STATUS)
        return parse_ha_status(reply.body) if reply is not None and reply.body else None

    def epochs(self, index: int) -> list[Epoch]:
        """The epoch list of a broker, oldest first. Raises NotInTime without a reply."""
        reply = self._ask(self.brokers[index], self.brokers[index].node.address, frames.EPOCHS)
        if reply is None or reply.code != frames.OK:
            raise NotInTime(f"{self.brokers[index].name} does not report its epochs")
        return [
            Epoch(int(one["epoch"]), int(one["startOffset"]), int(one["endOffset"]))
            for one in reply.json["epochList"]
        ]

    def history(self) -> dict[tuple[str, int, int], dict[str, Any]]:
        """All events in the controllers' history files, by (log, raft index, part).

        Events that two controllers record differently are added to `contradictions`."""
        events: dict[tuple[str, int, int], dict[str, Any]] = {}
        for process in self.controller_processes:
            for path in (process.node.data_dir / "controller").glob("history-*.jsonl"):
                for line in path.read_text().splitlines():
                    with contextlib.suppress(json.JSONDecodeError):  # the last line, being written
                        event = json.loads(line)
                        key = (event["log"], event["raft_index"], event.get("part", 0))
                        if events.setdefault(key, event) != event:
                            self.contradictions.append(f"{events[key]} against {event}")
        return events

    def _ask_controller(self, index: int, code: int) -> frames.Reply | None:
        return self._ask(self.controller_processes[index], self.controllers[index], code)

    def _ask(self, process: NodeProcess, address: str, code: int) -> frames.Reply | None:
        if process.stopped or not process.listens:
            return None
        try:
            return ask(address, code, timeout_s=REPLY_S)
        except OSError:
            return None
