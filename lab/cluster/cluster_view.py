"""What a cluster's processes report: asked over the wire, or read in the history files."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from batonmq.launcher.layout import BrokerNode, NameServerNode
from batonmq.runtime.sockets import listens
from lab.cluster import frames
from lab.cluster.checks import Epoch
from lab.cluster.cluster import GROUP
from lab.cluster.connection import HaStatus, ask, parse_ha_status, sync_state
from lab.cluster.fault_points import (
    CLOCK_VARIABLE,
    DISK_VARIABLE,
    RELOAD_SIGNAL,
)
from lab.cluster.processes import ROOT, NotInTime

REPLY_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class GroupState:
    """What the leading controller records (1006). Brokers by their index."""

    master: int | None
    master_epoch: int
    set_epoch: int
    in_sync: frozenset[int]
    broker_ids: dict[int, int]


class NodeProcess:
    """A node and the process that runs it now, if any."""

    def __init__(self, node: NameServerNode | BrokerNode) -> None:
        self.node = node
        self.child: subprocess.Popen[bytes] | None = None
        self.source = ROOT
        """The checkout whose code its next start runs."""
        self.stopped = False
        self.may_end = False
        """A fault was set since its start: it may end of it, even after the fault is over."""
        self._listening_pid = 0
        self._faulty = False

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def runs(self) -> bool:
        return self.child is not None and self.child.poll() is None

    @property
    def listens(self) -> bool:
        """Whether it was seen to listen on its ports itself: what answers there is no other."""
        if not self.runs or self.child is None:
            return False
        pid = self.child.pid
        if pid != self._listening_pid and all(listens(pid, port) for port in self.node.ports):
            self._listening_pid = pid
        return pid == self._listening_pid

    @property
    def fault_files(self) -> dict[str, Path]:
        """By the variable of the environment that names them, see `lab.cluster.fault_points`.
        They stand beside the configuration: no trial wipes them."""
        config = self.node.config
        return {
            DISK_VARIABLE: config.with_suffix(".disk-faults"),
            CLOCK_VARIABLE: config.with_suffix(".clock-faults"),
        }

    def fail_disk(self, rules: str) -> None:
        """Its disk fails by these rules from now on, or from its next start on."""
        self._set_fault(DISK_VARIABLE, rules)

    def jump_clock(self, jump: str) -> None:
        """Its wall clock is that far off from now on."""
        self._set_fault(CLOCK_VARIABLE, jump)

    def _set_fault(self, variable: str, text: str) -> None:
        self._faulty = self.may_end = True
        self.fault_files[variable].write_text(text)
        if self.listens:
            self.signal(RELOAD_SIGNAL)

    def make_sound(self) -> None:
        """No fault on purpose any more. A start under one is ended: it may be begun again."""
        if not self._faulty:
            return
        for path in self.fault_files.values():
            path.unlink(missing_ok=True)
        if self.listens:
            self.signal(RELOAD_SIGNAL)
        else:
            self.kill()
        self._faulty = False

    def signal(self, number: signal.Signals) -> None:
        """Does nothing to a dead process."""
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


class ClusterView:
    """Questions to the processes that run and are not stopped. All of them are named by index."""

    def __init__(self, controllers: Sequence[NodeProcess], brokers: Sequence[NodeProcess]) -> None:
        self.controllers = controllers
        self.brokers = brokers
        self.contradictions: list[str] = []

    def controller_address(self, index: int) -> str:
        node = self.controllers[index].node
        assert isinstance(node, NameServerNode)
        return node.controller_address

    def leader(self) -> int | None:
        """The controller that calls itself leader."""
        for index in range(len(self.controllers)):
            reply = self._ask_controller(index, frames.METADATA)
            if reply is not None and reply.ext.get("isLeader") == "true":
                return index
        return None

    def agrees_on_leader(self) -> bool:
        """Whether every controller replies and all name the same leader: a restarted one counts
        for the majority again."""
        leaders = set()
        for index in range(len(self.controllers)):
            reply = self._ask_controller(index, frames.METADATA)
            leaders.add(None if reply is None else reply.ext.get("controllerLeaderAddress") or None)
        return len(leaders) == 1 and None not in leaders

    def group(self) -> GroupState | None:
        """What the leading controller records; None while none replies."""
        running = [
            self.controller_address(index)
            for index, process in enumerate(self.controllers)
            if process.listens and not process.stopped
        ]
        found = sync_state(running, GROUP, timeout_s=REPLY_S)
        if found is None:
            return None
        index = {process.node.address: j for j, process in enumerate(self.brokers)}
        everybody = [*found["inSyncReplicas"], *found["notInSyncReplicas"]]
        return GroupState(
            index.get(found.get("masterAddress") or ""),
            int(found["masterEpoch"]),
            int(found["syncStateSetEpoch"]),
            frozenset(index[one["brokerAddress"]] for one in found["inSyncReplicas"]),
            {index[one["brokerAddress"]]: int(one["brokerId"]) for one in everybody},
        )

    def ha_status(self, index: int) -> HaStatus | None:
        reply = self._ask(self.brokers[index], self.brokers[index].node.address, frames.HA_STATUS)
        return parse_ha_status(reply.body) if reply is not None and reply.body else None

    def epochs(self, index: int) -> list[Epoch]:
        """The epoch list of a broker (1007), oldest first. Raises NotInTime without a reply."""
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
        for process in self.controllers:
            for path in (process.node.data_dir / "controller").glob("history-*.jsonl"):
                for line in path.read_text().splitlines():
                    with contextlib.suppress(json.JSONDecodeError):  # the last line, being written
                        event = json.loads(line)
                        key = (event["log"], event["raft_index"], event.get("part", 0))
                        if events.setdefault(key, event) != event:
                            self.contradictions.append(f"{events[key]} against {event}")
        return events

    def _ask_controller(self, index: int, code: int) -> frames.Reply | None:
        return self._ask(self.controllers[index], self.controller_address(index), code)

    def _ask(self, process: NodeProcess, address: str, code: int) -> frames.Reply | None:
        if process.stopped or not process.listens:
            return None
        try:
            return ask(address, code, timeout_s=REPLY_S)
        except OSError:
            return None
