"""A slave that dies, hangs, is cut off or slow. Writes stop until it is shrunk away (R14)."""

import random
import signal
import threading
import time

from lab.cluster.network_commands import between
from lab.cluster.node_process import NodeProcess
from lab.faults.trial import Fault, InjectedFault, Lab

SLOW_KBIT = 200
SLOW_LATENCY_MS = 400
STUTTER_STOPPED_S = 0.25
STUTTER_RUNS_S = 0.05


class SlaveFault(Fault):
    measure = "gap"
    watch_s = 2.0
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        slave = lab.slaves(rng)[0]
        at = time.monotonic()
        self.affected(lab, lab.cluster.brokers[slave])
        return InjectedFault(at, notes={"slave": slave})

    def affected(self, lab: Lab, slave: NodeProcess) -> None:
        raise NotImplementedError


class KillSlave(SlaveFault):
    name = "kill-slave"
    title = "a slave killed: longest gap between acks"

    def affected(self, lab: Lab, slave: NodeProcess) -> None:
        slave.kill()


class HangSlave(SlaveFault):
    name = "hang-slave"
    title = "a slave hung: longest gap between acks"
    limit_s = 1.0

    def affected(self, lab: Lab, slave: NodeProcess) -> None:
        slave.signal(signal.SIGSTOP)


class CutSlave(SlaveFault):
    name = "cut-slave"
    title = "a slave cut off from everyone: longest gap between acks"
    limit_s = 1.0
    needs_cuts = True

    def affected(self, lab: Lab, slave: NodeProcess) -> None:
        others = [lab.network.address[host] for host in lab.network.hosts if host != slave.name]
        lab.network.cut(between([lab.network.address[slave.name]], others))


class SlowSlave(SlaveFault):
    """Its link carries a fraction of what is written, so that it falls behind without end."""

    name = "slow-slave"
    title = "a slave on a slow link: longest gap between acks"
    needs_cuts = True
    watch_s = 4.0

    def affected(self, lab: Lab, slave: NodeProcess) -> None:
        lab.network.slow(slave.name, SLOW_KBIT, SLOW_LATENCY_MS)


class StutteringSlave(SlaveFault):
    """It runs for 50 ms of every 300: a machine that swaps, or is starved of its processor."""

    name = "stuttering-slave"
    title = "a slave that runs 50 ms of every 300: longest gap between acks"
    watch_s = 3.0

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def affected(self, lab: Lab, slave: NodeProcess) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._stutter, args=(slave,), name="stutter")
        self._thread.start()

    def _stutter(self, slave: NodeProcess) -> None:
        while not self._over.is_set():
            slave.signal(signal.SIGSTOP)
            self._over.wait(STUTTER_STOPPED_S)
            slave.signal(signal.SIGCONT)
            self._over.wait(STUTTER_RUNS_S)

    def heal(self, lab: Lab, injected: InjectedFault) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
