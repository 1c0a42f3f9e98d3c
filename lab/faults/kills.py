"""Processes that die (kill -9) or hang (SIGSTOP): masters, controllers, several at once."""

import random
import signal
import time
from functools import partial
from typing import ClassVar

from lab.cluster import checks
from lab.cluster.checks import BrokenPromise
from lab.cluster.node_process import kill_all
from lab.faults.trial import Fault, InjectedFault, Lab, Measure

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

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        master = lab.master()
        at = time.monotonic()
        lab.cluster.brokers[master].kill()
        return InjectedFault(at, not_from=master)


class HangMaster(Fault):
    """Resumed, it finds in its sockets what was sent meanwhile, and must refuse all of it."""

    name = "hang-master"
    title = "SIGSTOP master, later SIGCONT"
    peer = "10-12 s; once not within 60 s"
    limit_s = 1.0
    elections = (1, 1)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        group = lab.cluster.wait_whole()
        assert group.master is not None
        at = time.monotonic()
        lab.cluster.brokers[group.master].signal(signal.SIGSTOP)
        return InjectedFault(
            at, group.master, declared_dead=group.master, old_epoch=group.master_epoch
        )

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        return late_acks(lab, injected)


def late_acks(lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
    """What the old master acknowledged of its old epoch once the fault was over."""
    assert injected.not_from is not None
    late = partial(
        checks.check_late,
        lab.load.since(injected.healed_s),
        lab.stored,
        lab.epochs(lab.cluster.wait_whole()),
        broker=injected.not_from,
        acked_after_s=injected.healed_s,
        epoch=injected.old_epoch,
    )
    # What was sent while a fault began may have reached every member before it was whole.
    found = late(sent_after_s=injected.at_s + injected.took_s)
    # An ack of a write that every member held before the fault is true: a process may be stopped
    # between the decision and the reply.
    injected.notes["lateButTrue"] = len(late(sent_after_s=0.0)) - len(found)
    return found


class KillMasterAndLeader(Fault):
    name = "kill-master-and-leader"
    title = "kill -9 master and controller leader at once"
    peer = "12-13.5 s"
    limit_s = 1.0
    elections = (1, 1)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        master, leader = lab.master(), lab.cluster.wait_leader()
        at = time.monotonic()
        lab.cluster.controller_processes[leader].signal(signal.SIGKILL)
        lab.cluster.brokers[master].signal(signal.SIGKILL)
        return InjectedFault(at, not_from=master)


class HangLeader(Fault):
    """No write waits for a controller (R36); the epoch of the resumed one is over."""

    name = "hang-leader"
    title = "SIGSTOP controller leader: longest gap between acks"
    measure: ClassVar[Measure] = "gap"
    watch_s = 2.0
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        leader = lab.cluster.wait_leader()
        epoch = max(int(e.get("controller_epoch", 0)) for e in lab.cluster.history().values())
        at = time.monotonic()
        lab.cluster.controller_processes[leader].signal(signal.SIGSTOP)
        return InjectedFault(at, notes={"controller": leader, "controllerEpoch": epoch})

    def heal(self, lab: Lab, injected: InjectedFault) -> None:
        injected.notes["resumedIndex"] = max(index for _, index, _ in lab.cluster.history())
        lab.cluster.resume_stopped()

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        return resumed_controller(lab, injected)


def resumed_controller(lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
    """The history has nothing that it proposed under its old epoch after it was resumed, and no
    older epoch after a newer one. Raft indexes tell before from after: clocks may have jumped."""
    index, resumed_at = injected.notes["controller"], injected.notes["resumedIndex"]
    old_epoch = injected.notes["controllerEpoch"]
    node_id = lab.cluster.layout.name_servers[index].controller_id
    newest: dict[str, int] = {}
    found: list[BrokenPromise] = []
    for (log, raft_index, _), event in sorted(lab.cluster.history().items()):
        epoch = int(event.get("controller_epoch", 0))
        late = event.get("node") == node_id and raft_index > resumed_at
        if epoch and (epoch < newest.get(log, 0) or (late and epoch <= old_epoch)):
            found.append(BrokenPromise("old controller", f"epoch {epoch} was over: {event}"))
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

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        master = lab.master()
        injected = super().inject(lab, rng)
        time.sleep(self.wait_s)
        injected.not_from = master
        injected.at_s = time.monotonic()
        lab.cluster.brokers[master].kill()
        return injected


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

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        master = lab.master()
        pair = [master, lab.slaves(rng)[0]]
        rng.shuffle(pair)
        lab.cluster.brokers[pair[0]].kill()
        time.sleep(TWO_KILLS_S)
        at = time.monotonic()
        lab.cluster.brokers[pair[1]].kill()
        return InjectedFault(at, not_from=master, notes={"masterFirst": pair[0] == master})


class KillControllers(Fault):
    """Writes continue without them; restarted, they lost nothing and depose no master."""

    name = "kill-controllers"
    title = "all controllers killed, restarted: longest gap between acks"
    measure = "gap"
    hold_s = (0.8, 2.0)
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        group = lab.cluster.wait_whole()
        at = time.monotonic()
        kill_all(lab.cluster.controller_processes)
        return InjectedFault(at, notes={"group": str(group.broker_ids)})

    def heal(self, lab: Lab, injected: InjectedFault) -> None:
        began = time.monotonic()
        lab.cluster.launch_dead()
        lab.cluster.wait_leader()
        injected.notes["leaderAgainS"] = time.monotonic() - began

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        group = lab.cluster.wait_whole()
        if str(group.broker_ids) != injected.notes["group"]:
            was = injected.notes["group"]
            return [BrokenPromise("forgotten", f"the group was {was}, is {group.broker_ids}")]
        return []


class Pauses(Fault):
    """300 ms are within every time-out (R34): no broker is declared dead for them."""

    name = "pause-300ms"
    title = "each process in turn paused for 300 ms: longest gap between acks"
    measure = "gap"
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        processes = lab.cluster.processes
        rng.shuffle(processes)
        at = time.monotonic()
        for process in processes:
            process.signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            process.signal(signal.SIGCONT)
            time.sleep(rng.uniform(0.1, 0.3))
        return InjectedFault(at)
