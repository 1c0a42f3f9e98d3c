"""Disks that are full or report errors, a clock that jumps, a processor that has too much to do."""

import os
import random
import subprocess
import sys
import time
from typing import ClassVar

from lab.cluster.checks import BrokenPromise
from lab.cluster.node_process import NodeProcess
from lab.cluster.processes import stop_all
from lab.faults.trial import Fault, InjectedFault, Lab

JUMPS = ("+3600", "-3600", "+90000", "-90000", "+2592000", "-0.7")
DAY_S = 86_400
DELETE_HOUR = 4
EXPIRED_S = 30 * DAY_S
NICE_MAX = 19
BURN = "while True: pass"


class Failing(Fault):
    """One process fails while it runs: its disk by `rules`, unless `fail` does something else.

    `endures`: the fault that must not end the process; empty if it may.
    """

    measure = "gap"
    watch_s = 2.5
    rules: ClassVar[str]
    endures: ClassVar[str] = ""

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        process = self.subject(lab, rng)
        at = time.monotonic()
        return InjectedFault(at, notes={"subject": process.name, "how": self.fail(process, rng)})

    def subject(self, lab: Lab, rng: random.Random) -> NodeProcess:
        return lab.cluster.brokers[lab.master()]

    def fail(self, process: NodeProcess, rng: random.Random) -> str:
        process.fail_disk(self.rules)
        return self.rules

    @staticmethod
    def failing(lab: Lab, injected: InjectedFault) -> NodeProcess:
        """The process that `inject` chose."""
        (process,) = (p for p in lab.cluster.processes if p.name == injected.notes["subject"])
        return process

    def heal(self, lab: Lab, injected: InjectedFault) -> None:
        process = self.failing(lab, injected)
        injected.notes["ended"] = not process.runs
        process.make_sound()
        process.may_end = not self.endures

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        if self.endures and injected.notes["ended"]:
            return [BrokenPromise("ended", f"{self.endures} ended a process: {injected.notes}")]
        return []


class AtSlave(Failing):
    """The same at a slave."""

    def subject(self, lab: Lab, rng: random.Random) -> NodeProcess:
        return lab.cluster.brokers[lab.slaves(rng)[0]]


class AtAnyProcess(Failing):
    """The same anywhere."""

    def subject(self, lab: Lab, rng: random.Random) -> NodeProcess:
        return rng.choice(lab.cluster.processes)


class FullDiskMaster(Failing):
    """R45: nothing is ended or cut; what was refused was not acknowledged."""

    name = "full-disk-master"
    title = "the master's disk is full: longest gap between acks"
    rules = "room * ENOSPC"
    endures = "a full disk"


class FullDiskSlave(AtSlave, FullDiskMaster):
    name = "full-disk-slave"
    title = "a slave's disk is full: longest gap between acks"


class ErrorAtSyncMaster(Failing):
    """R40: the error comes once; what was not written back is not called flushed later."""

    name = "eio-sync-master"
    title = "EIO at one fdatasync of the master's log: longest gap between acks"
    rules = "fdatasync commitlog/0 EIO once"


class ErrorAtSyncSlave(AtSlave, ErrorAtSyncMaster):
    name = "eio-sync-slave"
    title = "EIO at one fdatasync of a slave's log: longest gap between acks"


class ClockJump(AtAnyProcess):
    """R8: no deadline, no order and no deletion goes by the wall clock of one machine."""

    name = "clock-jump"
    title = "the wall clock of one process jumps, later back: longest gap between acks"
    elections = (0, 0)
    endures = "a clock that jumped"

    def fail(self, process: NodeProcess, rng: random.Random) -> str:
        jump = rng.choice((*JUMPS, past_delete_when()))
        process.jump_clock(jump)
        return jump


def past_delete_when() -> str:
    """To half past four in the morning, some weeks later: the hour in which stores expire."""
    now = time.localtime()
    seconds = (DELETE_HOUR - now.tm_hour) * 3600 + (30 - now.tm_min) * 60
    return f"+{EXPIRED_S + seconds % DAY_S}"


class Starved(AtAnyProcess):
    """One process has the lowest priority, beside as many busy processes as cores."""

    name = "starved"
    title = "one process starved of its processor: longest gap between acks"

    def __init__(self) -> None:
        self._burning: list[subprocess.Popen[bytes]] = []

    def fail(self, process: NodeProcess, rng: random.Random) -> str:
        _set_nice(process, NICE_MAX)
        count = os.cpu_count() or 1
        self._burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
        return f"nice {NICE_MAX} beside {count} busy processes"

    def heal(self, lab: Lab, injected: InjectedFault) -> None:
        burning, self._burning = self._burning, []
        stop_all(burning)
        super().heal(lab, injected)
        process = self.failing(lab, injected)
        try:
            _set_nice(process, 0)
        except PermissionError:  # only root may: it is replaced
            process.kill()


def _set_nice(process: NodeProcess, value: int) -> None:
    """The priority of all its threads; without effect on a dead one."""
    if process.child is None or not process.runs:
        return
    for thread in os.listdir(f"/proc/{process.child.pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), value)
