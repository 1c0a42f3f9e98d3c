"""Processes that die (kill -9) or hang (SIGSTOP): masters, controllers, several at once."""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from faults import checks
from faults.fault import Fault, Measure, Wound
from faults.records import Finding

if TYPE_CHECKING:
    from faults.lab import Lab

WAIT_FOR_ELECTIONS_S = 1.0
TWO_KILLS_S = 0.05
PAUSE_S = 0.3


class KillMaster(Fault):
    name = "kill-master"
    title = "kill -9 master"
    peer = "0.12-0.31 s"
    median_limit_s = 0.06
    limit_s = 0.15
    elections = (1, 1)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        master = lab.master()
        at = time.monotonic()
        lab.cluster.brokers[master].kill()
        return Wound(at, not_from=master)


class HangMaster(Fault):
    """The woken one finds in its sockets what was sent meanwhile, and must refuse all of it."""

    name = "hang-master"
    title = "SIGSTOP master, later SIGCONT"
    peer = "10-12 s; once not within 60 s"
    limit_s = 1.0
    elections = (1, 1)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        group = lab.cluster.wait_whole()
        assert group.master is not None
        at = time.monotonic()
        lab.cluster.brokers[group.master].signal(signal.SIGSTOP)
        return Wound(at, group.master, judged=group.master, notes={"epoch": group.master_epoch})

    def heal(self, lab: Lab, wound: Wound) -> None:
        assert wound.not_from is not None
        wound.notes["woken"] = time.monotonic()
        lab.cluster.brokers[wound.not_from].signal(signal.SIGCONT)

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        return late_acks(lab, wound, "woken")


def late_acks(lab: Lab, wound: Wound, since: str) -> list[Finding]:
    """What the old master acknowledged of its old epoch after `wound.notes[since]`.

    A write sent after the fault is a broken promise. One that had reached every member before is
    true, if late (a process may be stopped between deciding and telling): it is counted in
    the notes (`lateButTrue`).
    """
    moment, epoch = wound.notes[since], wound.notes["epoch"]
    assert isinstance(moment, float) and isinstance(epoch, int) and wound.not_from is not None
    late = partial(
        checks.check_late,
        lab.load.since(moment),
        lab.stored,
        lab.epochs(lab.cluster.wait_whole()),
        broker=wound.not_from,
        acked_after_s=moment,
        epoch=epoch,
    )
    found = late(sent_after_s=wound.at_s)
    wound.notes["lateButTrue"] = len(late(sent_after_s=0.0)) - len(found)
    return found


class KillMasterAndLeader(Fault):
    name = "kill-master-and-leader"
    title = "kill -9 master and controller leader at once"
    peer = "12-13.5 s"
    limit_s = 1.0
    elections = (1, 1)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        master, leader = lab.master(), lab.cluster.wait_leader()
        at = time.monotonic()
        lab.cluster.controllers[leader].signal(signal.SIGKILL)
        lab.cluster.brokers[master].signal(signal.SIGKILL)
        return Wound(at, not_from=master)


class HangLeader(Fault):
    """No write waits for a controller (R36); the woken one's epoch is over."""

    name = "hang-leader"
    title = "SIGSTOP controller leader: longest gap between acks"
    measure: ClassVar[Measure] = "gap"
    watch_s = 2.0
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        leader = lab.cluster.wait_leader()
        epoch = max(int(e.get("controller_epoch", 0)) for e in lab.cluster.history().values())
        at = time.monotonic()
        lab.cluster.controllers[leader].signal(signal.SIGSTOP)
        return Wound(at, notes={"controller": leader, "controllerEpoch": epoch})

    def heal(self, lab: Lab, wound: Wound) -> None:
        wound.notes["woken_ms"] = time.time_ns() // 1_000_000
        lab.cluster.wake_all()

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        return woken_controller(lab, wound)


def woken_controller(lab: Lab, wound: Wound) -> list[Finding]:
    """Nothing that it proposed after it was woken stands in the history under its old epoch, and
    no epoch stands behind a newer one."""
    index, woken_ms = wound.notes["controller"], wound.notes["woken_ms"]
    old_epoch = wound.notes["controllerEpoch"]
    assert isinstance(index, int) and isinstance(woken_ms, int) and isinstance(old_epoch, int)
    node_id = lab.cluster.layout.name_servers[index].controller_id
    newest: dict[str, int] = {}
    found: list[Finding] = []
    for (log, _, _), event in sorted(lab.cluster.history().items()):
        epoch = int(event.get("controller_epoch", 0))
        late = event.get("node") == node_id and event["time_ms"] >= woken_ms
        if epoch and (epoch < newest.get(log, 0) or (late and epoch <= old_epoch)):
            found.append(Finding("old controller", f"epoch {epoch} was over: {event}"))
        newest[log] = max(epoch, newest.get(log, 0))
    return found


class HangLeaderThenKillMaster(HangLeader):
    """Elections are possible again after that time: measured from the master's death."""

    name = "hang-leader-1s-kill-master"
    title = "SIGSTOP controller leader, 1.0 s later kill -9 master"
    measure = "first ack"
    watch_s = 0.0
    limit_s = 0.15
    elections = (1, 1)
    wait_s = WAIT_FOR_ELECTIONS_S

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        master = lab.master()
        wound = super().inject(lab, rng)
        time.sleep(self.wait_s)
        wound.not_from = master
        wound.at_s = time.monotonic()
        lab.cluster.brokers[master].kill()
        return wound


class HangLeaderAndKillMaster(HangLeaderThenKillMaster):
    name = "hang-leader-kill-master"
    title = "SIGSTOP controller leader and kill -9 master at once"
    limit_s = 1.0
    wait_s = 0.0


class TwoKills(Fault):
    """R9: the third holds everything, whichever dies first."""

    name = "two-kills"
    title = "two kills 50 ms apart, of three replicas (from the second)"
    elections = (1, 2)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        master = lab.master()
        pair = [master, lab.slaves(rng)[0]]
        rng.shuffle(pair)
        lab.cluster.brokers[pair[0]].kill()
        time.sleep(TWO_KILLS_S)
        at = time.monotonic()
        lab.cluster.brokers[pair[1]].kill()
        return Wound(at, not_from=master, notes={"masterFirst": pair[0] == master})


class KillControllers(Fault):
    """Writes go on without them; back, they know everything and elect nobody needlessly."""

    name = "kill-controllers"
    title = "all controllers killed, restarted: longest gap between acks"
    measure = "gap"
    hold_s = (0.8, 2.0)
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        group = lab.cluster.wait_whole()
        at = time.monotonic()
        for process in lab.cluster.controllers:
            process.signal(signal.SIGKILL)
        for process in lab.cluster.controllers:
            process.kill()
        return Wound(at, notes={"group": str(group.broker_ids)})

    def heal(self, lab: Lab, wound: Wound) -> None:
        began = time.monotonic()
        lab.cluster.launch_dead()
        lab.cluster.wait_leader()
        wound.notes["leaderAgainS"] = time.monotonic() - began

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        group = lab.cluster.wait_whole()
        if str(group.broker_ids) != wound.notes["group"]:
            return [
                Finding("forgotten", f"the group was {wound.notes['group']}, is {group.broker_ids}")
            ]
        return []


class Pauses(Fault):
    """300 ms are within every time-out (R34): nobody is judged for them."""

    name = "pause-300ms"
    title = "each process in turn paused for 300 ms: longest gap between acks"
    measure = "gap"
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        processes = lab.cluster.processes
        rng.shuffle(processes)
        at = time.monotonic()
        for process in processes:
            process.signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            process.signal(signal.SIGCONT)
            time.sleep(rng.uniform(0.1, 0.3))
        return Wound(at)
