"""Every fault of the laboratory, in the order of the table."""

from __future__ import annotations

from typing import Final

from faults.fault import Fault
from faults.kills import (
    HangLeader,
    HangLeaderAndKillMaster,
    HangLeaderThenKillMaster,
    HangMaster,
    KillControllers,
    KillMaster,
    KillMasterAndLeader,
    Pauses,
    TwoKills,
)

FAULTS: Final[tuple[type[Fault], ...]] = (
    KillMaster,
    HangMaster,
    KillMasterAndLeader,
    HangLeader,
    HangLeaderThenKillMaster,
    HangLeaderAndKillMaster,
    KillControllers,
    TwoKills,
    Pauses,
)
BY_NAME: Final = {fault.name: fault for fault in FAULTS}
