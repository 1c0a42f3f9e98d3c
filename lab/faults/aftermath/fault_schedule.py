"""Which faults are done, in which order: a dozen failovers of all kinds, or a few for a test."""

from __future__ import annotations

import random
import signal
import time
from typing import ClassVar, Final

from lab.faults import harmless, kills, slaves
from lab.faults.trial import Fault, InjectedFault, Lab, Measure

NEXT_MASTER_S: Final = 30.0


class KillLeader(Fault):
    """Writes do not wait for a controller; another one leads."""

    name = "kill-leader"
    title = "kill -9 controller leader"
    measure: ClassVar[Measure] = "gap"
    watch_s = 1.0
    elections = (0, 0)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        leader = lab.cluster.wait_leader()
        at = time.monotonic()
        lab.cluster.controller_processes[leader].kill()
        return InjectedFault(at)


class KillTwoMasters(Fault):
    """The next master dies as soon as it has acknowledged a write; the third one takes over."""

    name = "kill-two-masters"
    title = "kill -9 master, and the next one at its first ack"
    elections = (2, 2)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        first = lab.master()
        at = time.monotonic()
        lab.cluster.brokers[first].signal(signal.SIGKILL)
        ack = lab.load.first_ack(sent_after=at, limit_s=NEXT_MASTER_S, not_from=first)
        if ack is None:
            raise RuntimeError(f"no write acked by another master\n{lab.cluster.diagnostics()}")
        at = time.monotonic()
        lab.cluster.brokers[ack.broker].kill()
        lab.cluster.brokers[first].kill()
        return InjectedFault(at, not_from=ack.broker)


DOZEN: Final[tuple[type[Fault], ...]] = (
    kills.KillMaster,
    harmless.SwitchFault,
    kills.HangMaster,
    KillLeader,
    kills.KillMasterAndLeader,
    slaves.KillSlave,
    KillTwoMasters,
    harmless.SwitchFault,
    kills.TwoKills,
    kills.HangLeaderAndKillMaster,
    kills.KillMaster,
    kills.HangMaster,
    KillLeader,
    harmless.SwitchFault,
    kills.KillMaster,
)
"""At least a dozen changes of master, and what must not be one between them."""

FEW: Final[tuple[type[Fault], ...]] = (
    kills.KillMaster,
    harmless.SwitchFault,
    slaves.KillSlave,
    kills.HangMaster,
)

PLANNED: Final = "planned_switch"
FAILOVER: Final = "failover"


def kind_of(fault: Fault) -> str:
    """What the history must call the elections that follow; empty if none may follow."""
    if fault.elections == (0, 0):
        return ""
    return PLANNED if isinstance(fault, harmless.SwitchFault) else FAILOVER
