"""kill -9 in the middle of a truncation, the append of an epoch, a vote, or a first start.

A fault point kills the process at a random disk call of that step. Then it is started again,
without faults.
"""

import random
import signal
import time
from contextlib import suppress

from lab.cluster.node_process import NodeProcess
from lab.cluster.processes import NotInTime, wait_for
from lab.cluster.stores import wipe
from lab.faults.trial import Fault, InjectedFault, Lab

DIES_S = 3.0
CALLS_OF_A_FILE = 4
CALLS_PER_WRITE = 4
TAIL_S = 0.15
CALLS_OF_A_FIRST_START = 90
CALLS_OF_A_CUT = 12
CUT_STEPS = ("truncat", "consumequeue", "commitlog/0", "epochFileCheckpoint", "checkpoint", "")


class Midway(Fault):
    """Measured is the longest gap after the fault, with the step and its kill."""

    measure = "gap"
    watch_s = 1.0

    def rule(self, rng: random.Random, paths: tuple[str, ...], calls: int) -> str:
        moment = rng.choice(("before", "after", "during"))
        path = rng.choice(paths) or "*"
        call = "pwrite" if moment == "during" else "changes"
        before = rng.randrange(calls if path == "*" else min(calls, CALLS_OF_A_FILE))
        if moment == "during":
            before //= CALLS_PER_WRITE
        return f"kill {moment} {call} {path} after {before}"

    def injected(self, at_s: float, armed: NodeProcess, rule: str) -> InjectedFault:
        """Once the armed process died, or survived: its step may make fewer disk calls."""
        with suppress(NotInTime):
            wait_for("the armed process to die", lambda: not armed.runs, DIES_S)
        return InjectedFault(
            at_s, notes={"rule": rule, "armed": armed.name, "died": not armed.runs}
        )


class KillInEpochAppend(Midway):
    """A slave is killed while it becomes master, or begins to follow the other one."""

    name = "kill-in-epoch-append"
    title = "kill -9 master, and a slave in its epoch append: longest gap between acks"

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        master = lab.cluster.brokers[lab.master()]
        armed = lab.cluster.brokers[lab.slaves(rng)[0]]
        rule = self.rule(rng, ("epochFileCheckpoint", "masterEpoch"), 2)
        armed.fail_disk(rule)
        at = time.monotonic()
        master.kill()
        return self.injected(at, armed, rule)


class KillInCut(Midway):
    """A deposed master whose log has bytes that no slave has is killed in its truncation.

    Both slaves are stopped while it writes these bytes, so they are never acknowledged.
    """

    name = "kill-in-cut"
    title = "kill -9 of a deposed master inside its truncation: longest gap between acks"

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        armed = lab.cluster.brokers[lab.master()]
        slaves = [lab.cluster.brokers[index] for index in lab.slaves(rng)]
        at = time.monotonic()
        for slave in slaves:
            slave.signal(signal.SIGSTOP)
        time.sleep(TAIL_S)
        armed.kill()
        for slave in slaves:
            slave.signal(signal.SIGCONT)
        lab.load.wait_ack(sent_after=time.monotonic())
        rule = self.rule(rng, CUT_STEPS, CALLS_OF_A_CUT)
        armed.fail_disk(rule)
        lab.cluster.launch(armed)
        return self.injected(at, armed, rule)


class KillInVote(Midway):
    """A controller is killed at one of its disk calls during an election. Unless it is the leader,
    the leader and the master are killed first, so the election depends on its journal."""

    name = "kill-in-vote"
    title = "kill -9 of a controller inside a write to its log or vote: longest gap between acks"

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        leader = lab.cluster.controller_processes[lab.cluster.wait_leader()]
        master = lab.cluster.brokers[lab.master()]
        armed = rng.choice(lab.cluster.controller_processes)
        rule = self.rule(rng, ("journal", "meta", "history", "raft/"), 3)
        armed.fail_disk(rule)
        at = time.monotonic()
        if leader is not armed:
            leader.signal(signal.SIGKILL)
        master.kill()
        return self.injected(at, armed, rule)


class KillInFirstStart(Midway):
    """A slave gets an empty disk. Its first start on it is killed, the next one copies the log."""

    name = "kill-in-first-start"
    title = "kill -9 of a slave in its first start on a new disk: longest gap between acks"

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        slave = lab.slaves(rng)[0]
        armed = lab.cluster.brokers[slave]
        at = time.monotonic()
        armed.kill()
        wipe(lab.cluster.data_folders[slave])
        rule = self.rule(rng, ("",), CALLS_OF_A_FIRST_START)
        armed.fail_disk(rule)
        lab.cluster.launch(armed)
        return self.injected(at, armed, rule)
