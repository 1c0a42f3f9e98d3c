"""Every fault of the laboratory, in the order of the table."""

from __future__ import annotations

from typing import Final

from lab.faults import controllers, cuts, disks, failing, harmless, kills, midway, slaves
from lab.faults.trial import Fault, secured

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
    cuts.OnewayMasterUnheard,
    cuts.OnewayMasterDeaf,
    cuts.OnewayControllersDeaf,
    cuts.OnewayControllersUnheard,
    cuts.OnewayReplicasDeaf,
    cuts.OnewayReplicasUnheard,
    controllers.LeaderWithoutBrokers,
    controllers.LeaderUnheardByBrokers,
    controllers.LeaderDeafToBrokers,
    controllers.LeaderWithoutPeer,
    controllers.LeaderUnheardByPeer,
    controllers.HangFollower,
    controllers.FullDiskLeader,
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
    disks.WipedSlaveAlone,
    failing.FullDiskMaster,
    failing.FullDiskSlave,
    failing.ErrorAtSyncMaster,
    failing.ErrorAtSyncSlave,
    failing.ClockJump,
    failing.Starved,
    midway.KillInEpochAppend,
    midway.KillInCut,
    midway.KillInVote,
    midway.KillInFirstStart,
    harmless.SwitchFault,
    kills.Pauses,
    harmless.FullLoad,
    *map(secured, (kills.KillMaster, kills.HangMaster, harmless.SwitchFault)),
)
BY_NAME: Final = {fault.name: fault for fault in FAULTS}
