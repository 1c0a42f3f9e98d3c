"""Three name servers with controllers and three replicas, as real processes under our hand.

Configuration files and command lines are those of `batonmq up`; each process has an address of its
own on the laboratory's network. Started, signalled, starved and damaged from here; what it says of
itself is asked over the wire.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from batonmq.launcher.cluster_file import cluster_document, write_document
from batonmq.launcher.layout import BrokerNode, Layout, NameServerNode, plan, write_configs
from bench import wire
from bench.probe import HaStatus, parse_ha_status
from bench.proc import spawn, tail
from faults.net import Network
from faults.records import Epoch

CONTROLLERS: Final = 3
REPLICAS: Final = 3
GROUP: Final = "broker-a"
CLUSTER: Final = "DefaultCluster"
PROBE_HOST: Final = "probe"
HOSTS: Final = (
    *(f"namesrv-{i}" for i in range(CONTROLLERS)),
    *(f"broker-a-{j}" for j in range(REPLICAS)),
    PROBE_HOST,
)
SMALL_STORE: Final = {"store": {"mappedFileSizeCommitLog": 64 << 20}}
WHOLE_S: Final = 60.0
ASK_S: Final = 0.4
POLL_S: Final = 0.01
KEPT_BY_A_WIPE: Final = "brokerIdentity"
METADATA: Final = 1005
SYNC_STATE: Final = 1006
EPOCHS: Final = 1007
ELECT_MASTER: Final = 1002

ROOT: Final = Path(__file__).resolve().parents[1]
T = TypeVar("T")


class NotWhole(RuntimeError):
    """The cluster did not become what a trial needs in time; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """What the leading controller records (1006). `alive`: its verdicts, by broker index."""

    master: int | None
    master_epoch: int
    set_epoch: int
    in_sync: frozenset[int]
    broker_ids: dict[int, int]


class Process:
    """A node and the process that runs it now, if any."""

    def __init__(self, node: NameServerNode | BrokerNode) -> None:
        self.node = node
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped = False

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def runs(self) -> bool:
        return self.child is not None and self.child.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Sends it. A dead process does not mind."""
        if self.child is None or self.child.poll() is not None:
            return
        self.child.send_signal(number)
        self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and waits for the end."""
        self.signal(signal.SIGKILL)
        if self.child is not None:
            self.child.wait()
        self.stopped = False


class Cluster:
    """See the module. Brokers and controllers are named by their index, 0 to 2."""

    def __init__(
        self,
        folder: Path,
        network: Network,
        overrides: dict[str, dict[str, object]] | None = None,
    ) -> None:
        self.folder = folder
        self.network = network
        sections: dict[str, dict[str, object]] = {k: dict(v) for k, v in SMALL_STORE.items()}
        for name, values in (overrides or {}).items():
            sections.setdefault(name, {}).update(values)
        layout = plan(
            folder / "data", controllers=CONTROLLERS, replicas=REPLICAS, overrides=sections
        )
        self.layout: Layout = replace(
            layout,
            name_servers=tuple(
                replace(node, host=network.address[node.name]) for node in layout.name_servers
            ),
            brokers=tuple(
                replace(node, host=network.address[node.name]) for node in layout.brokers
            ),
        )
        self.contradictions: list[str] = []
        self.controllers = [Process(node) for node in self.layout.name_servers]
        self.brokers = [Process(node) for node in self.layout.brokers]

    # --- life ---

    def start(self) -> None:
        """Writes the configurations, starts everything, waits until it is whole."""
        write_configs(self.layout)
        # Tools find the folder's cluster by this, as they find that of `batonmq up`.
        nobody = dict.fromkeys(process.name for process in self.processes)
        document = cluster_document(self.layout, time.time_ns() // 1_000_000, nobody, {})
        write_document(self.layout.planned_cluster_file, document)
        for process in self.processes:
            self.launch(process)
        self.wait_whole()

    def launch(self, process: Process) -> None:
        """Starts a node that does not run. Its output goes to `process.log` in its data folder."""
        process.node.pid_file.unlink(missing_ok=True)
        with self.network.inside(process.name):
            process.child = spawn(
                process.node.argv,
                process.node.data_dir / "process.log",
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                end_signal=signal.SIGKILL,
            )
        process.stopped = False

    def launch_dead(self) -> None:
        """Starts whatever does not run."""
        for process in self.processes:
            if not process.runs:
                self.launch(process)

    def wake_all(self) -> None:
        for process in self.processes:
            if process.stopped:
                process.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends everything cleanly: controllers first, as `batonmq up` does; SIGKILL if it must."""
        self.wake_all()
        for group in (self.controllers, self.brokers):
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
    def processes(self) -> list[Process]:
        return [*self.controllers, *self.brokers]

    @property
    def addresses(self) -> list[str]:
        """The brokers' doors, by index."""
        return [process.node.address for process in self.brokers]

    @property
    def name_servers(self) -> str:
        return self.layout.name_server_addresses

    def ip(self, process: Process) -> str:
        return self.network.address[process.name]

    def ips(self, processes: Iterable[Process]) -> list[str]:
        return [self.ip(process) for process in processes]

    # --- what it says of itself ---

    def leader(self) -> int | None:
        """The controller that calls itself leader."""
        for index, process in enumerate(self.controllers):
            reply = self._ask(process, self._door(index), METADATA)
            if reply is not None and reply.ext.get("isLeader") == "true":
                return index
        return None

    def wait_leader(self) -> int:
        return self.wait_for("a leading controller", self._leader_boxed)[0]

    def led_alike(self) -> bool:
        """Whether every controller answers and all of them know the same leader: one that was
        started anew counts for the majority again."""
        leaders = set()
        for index, process in enumerate(self.controllers):
            reply = self._ask(process, self._door(index), METADATA)
            leaders.add(None if reply is None else reply.ext.get("controllerLeaderAddress") or None)
        return len(leaders) == 1 and None not in leaders

    def _leader_boxed(self) -> list[int]:
        leader = self.leader()
        return [] if leader is None else [leader]

    def _door(self, index: int) -> str:
        return self.layout.name_servers[index].controller_address

    def _ask(
        self, process: Process, address: str, code: int, body: bytes = b""
    ) -> wire.Reply | None:
        if not process.runs or process.stopped:
            return None
        try:
            with wire.Caller(address, timeout_s=ASK_S) as caller:
                return caller.call(code, {}, body)
        except OSError:
            return None

    def group(self) -> GroupState | None:
        """What the leading controller records; None while none answers."""
        for index, process in enumerate(self.controllers):
            reply = self._ask(process, self._door(index), SYNC_STATE, json.dumps([GROUP]).encode())
            if reply is None or reply.code != wire.OK:
                continue
            found = json.loads(reply.body)["replicasInfoTable"].get(GROUP)
            if found is not None:
                return self._group_state(found)
        return None

    def _group_state(self, found: dict[str, Any]) -> GroupState:
        index = {address: j for j, address in enumerate(self.addresses)}
        everybody = [*found["inSyncReplicas"], *found["notInSyncReplicas"]]
        return GroupState(
            index.get(found.get("masterAddress") or ""),
            int(found["masterEpoch"]),
            int(found["syncStateSetEpoch"]),
            frozenset(index[one["brokerAddress"]] for one in found["inSyncReplicas"]),
            {index[one["brokerAddress"]]: int(one["brokerId"]) for one in everybody},
        )

    def ha_status(self, index: int) -> HaStatus | None:
        reply = self._ask(self.brokers[index], self.addresses[index], wire.HA_STATUS)
        return parse_ha_status(reply.body) if reply is not None and reply.body else None

    def epochs(self, index: int) -> list[Epoch]:
        """The epoch list of a broker (1007), oldest first. Raises NotWhole if it does not say."""
        reply = self._ask(self.brokers[index], self.addresses[index], EPOCHS)
        if reply is None or reply.code != wire.OK:
            raise NotWhole(f"{self.brokers[index].name} does not tell its epochs")
        return [
            Epoch(int(one["epoch"]), int(one["startOffset"]), int(one["endOffset"]))
            for one in json.loads(reply.body)["epochList"]
        ]

    def history(self) -> dict[tuple[str, int, int], dict[str, Any]]:
        """All events in the controllers' history files, by (log, raft index, part).

        What two controllers tell differently is added to `contradictions`."""
        events: dict[tuple[str, int, int], dict[str, Any]] = {}
        for node in self.layout.name_servers:
            for path in (node.data_dir / "controller").glob("history-*.jsonl"):
                for line in path.read_text().splitlines():
                    with contextlib.suppress(json.JSONDecodeError):  # the last line, being written
                        event = json.loads(line)
                        key = (event["log"], event["raft_index"], event.get("part", 0))
                        if events.setdefault(key, event) != event:
                            self.contradictions.append(f"{events[key]} against {event}")
        return events

    # --- waiting ---

    def wait_for(self, what: str, found: Callable[[], T | None], limit_s: float = WHOLE_S) -> T:
        """Polls until `found` gives something true. Raises NotWhole naming `what`."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            result = found()
            if result:
                return result
            time.sleep(POLL_S)
        raise NotWhole(f"waited {limit_s:.0f} s in vain for {what}\n{self.complaint()}")

    def whole(self) -> GroupState | None:
        """The group, if every process runs, a controller leads, and the set is full and level."""
        if any(not process.runs or process.stopped for process in self.processes):
            return None
        group = self.group()
        if group is None or group.master is None or len(group.in_sync) != REPLICAS:
            return None
        status = self.ha_status(group.master)
        if status is None or not status.master or status.in_sync_slaves != REPLICAS - 1:
            return None
        return group

    def wait_whole(self, limit_s: float = WHOLE_S) -> GroupState:
        """Raises NotWhole also as soon as a process is seen that has ended."""

        def whole() -> GroupState | None:
            ended = [process.name for process in self.processes if not process.runs]
            if ended:
                raise NotWhole(f"{', '.join(ended)} ended\n{self.complaint()}")
            return self.whole()

        return self.wait_for("a whole cluster", whole, limit_s)

    def wait_door(self, index: int, limit_s: float = 30.0) -> float:
        """When (CLOCK_MONOTONIC) a started broker's door was seen to listen."""

        def listens() -> float | None:
            try:
                socket.create_connection(wire.split_address(self.addresses[index]), ASK_S).close()
            except OSError:
                return None
            return time.monotonic()

        return self.wait_for(f"the door of {self.brokers[index].name}", listens, limit_s)

    # --- damage ---

    def data_dir(self, index: int) -> Path:
        return self.layout.brokers[index].data_dir

    def wipe(self, index: int) -> None:
        """A dead broker's disk is empty but for its identity (and the log of its process)."""
        for entry in self._stored(self.data_dir(index)):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def back_up(self, index: int) -> Path:
        """Copies a dead broker's files; the copy's folder."""
        target = self.folder / f"backup-{index}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.data_dir(index), target)
        return target

    def put_back(self, index: int, backup: Path) -> None:
        """A dead broker's files are those of the backup."""
        self.wipe(index)
        for entry in self._stored(backup):
            target = self.data_dir(index) / entry.name
            if entry.is_dir():
                shutil.copytree(entry, target)
            else:
                shutil.copy2(entry, target)

    def _stored(self, folder: Path) -> Iterator[Path]:
        for entry in list(folder.iterdir()):
            if not entry.name.startswith(KEPT_BY_A_WIPE) and entry.suffix != ".log":
                yield entry

    def complaint(self) -> str:
        """What is missing, and the end of every log, for the report of a failure."""
        lines = [f"state: {self.group()}"]
        for process in self.processes:
            how = "stopped" if process.stopped else "runs" if process.runs else "ended"
            lines.append(f"-- {process.name} ({how}): ")
            lines.append(tail(process.node.data_dir / "process.log", 600))
        return "\n".join(lines)
