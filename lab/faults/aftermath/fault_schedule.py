"""Which faults are done, in which order: a dozen failovers of all kinds, or a few for a test."""

from __future__ import annotations

from typing import Final

from lab.faults import harmless, kills, slaves
from lab.faults.trial import Fault

DOZEN: Final[tuple[type[Fault], ...]] = (
    kills.KillMaster,
    harmless.SwitchFault,
    kills.HangMaster,
    kills.HangLeader,
    kills.KillMasterAndLeader,
    slaves.KillSlave,
    kills.HangLeaderThenKillMaster,
    harmless.SwitchFault,
    kills.TwoKills,
    kills.HangLeaderAndKillMaster,
    kills.KillMaster,
    kills.HangMaster,
    kills.HangLeader,
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
