"""A process of a cluster that the lab holds itself, and the faults that are set in it."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from batonmq.launcher.layout import BrokerNode, NameServerNode
from batonmq.runtime.sockets import listens
from lab.cluster.fault_points import CLOCK_VARIABLE, DISK_VARIABLE, RELOAD_SIGNAL
from lab.cluster.processes import ROOT


class NodeProcess:
    """A node and the process that runs it now, if any."""

    def __init__(self, node: NameServerNode | BrokerNode) -> None:
        self.node = node
        self.child: subprocess.Popen[bytes] | None = None
        self.source = ROOT
        """The checkout whose code its next start runs."""
        self.stopped = False
        self.may_end = False
        """A fault was set since its start, and may end the process even later."""
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
        """Removes its faults. A start that has not finished is killed: a fault may have hit it."""
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


def kill_all(processes: Sequence[NodeProcess]) -> None:
    """kill -9 of all at once, and waits for their ends."""
    for process in processes:  # `kill` waits: the signals first
        process.signal(signal.SIGKILL)
    for process in processes:
        process.kill()
