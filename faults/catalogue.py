"""Every fault of the laboratory, in the order of the table."""

from __future__ import annotations

from typing import Final

from faults import calm, cuts, disks, kills, slaves
from faults.fault import Fault

FAULTS: Final[tuple[type[Fault], ...]] = (
    kills.KillMaster,
    kills.HangMaster,
    kills.KillMasterAndLeader,
    kills.HangLeader,
    kills.HangLeaderThenKillMaster,
    kills.HangLeaderAndKillMaster,
    cuts.CutFromEveryone,
    cuts.CutFromCluster,
    cuts.CutFromControllers,
    cuts.CutFromReplicas,
    cuts.HeardByNobody,
    cuts.HearsNobody,
    cuts.ControllersDoNotHear,
    cuts.DoesNotHearControllers,
    cuts.ReplicasDoNotHear,
    cuts.DoesNotHearReplicas,
    slaves.KillSlave,
    slaves.HangSlave,
    slaves.CutSlave,
    slaves.SlowSlave,
    slaves.StutteringSlave,
    disks.AllBrokers,
    kills.KillControllers,
    kills.TwoKills,
    disks.WipedSlave,
    disks.OldBackup,
    disks.OnlyTheSpoiledLives,
    calm.PlannedSwitch,
    kills.Pauses,
    calm.FullLoad,
)
BY_NAME: Final = {fault.name: fault for fault in FAULTS}
