"""A master that the network takes away: from all, from some, in one direction.

The packets vanish in silence. Clients still reach the master unless `clients` is set: then the
danger is greatest, for it may go on taking writes.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, ClassVar

from faults.cluster import PROBE_HOST
from faults.commands import Pair, between, one_way
from faults.fault import Fault, Measure, Wound
from faults.kills import late_acks
from faults.records import Finding

if TYPE_CHECKING:
    from faults.lab import Lab


class CutMaster(Fault):
    """Cut off from controllers and replicas, as the class says, in the direction that `pairs`
    says: both."""

    needs_cuts = True
    watch_s = 2.0
    hold_s = (0.5, 1.5)
    controllers: ClassVar[bool] = False
    replicas: ClassVar[bool] = False
    clients: ClassVar[bool] = False

    def pairs(self, master: list[str], others: list[str]) -> set[Pair]:
        return between(master, others)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        group = lab.cluster.wait_whole()
        assert group.master is not None
        master = lab.cluster.brokers[group.master]
        others: list[str] = []
        if self.controllers:
            others += lab.cluster.ips(lab.cluster.controllers)
        if self.replicas:
            others += lab.cluster.ips(p for p in lab.cluster.brokers if p is not master)
        if self.clients:
            others.append(lab.network.address[PROBE_HOST])
        at = time.monotonic()
        lab.network.cut(self.pairs([lab.cluster.ip(master)], others))
        return Wound(
            at,
            not_from=group.master if self.measure == "first ack" else None,
            judged=group.master,
            notes={"epoch": group.master_epoch, "tookS": time.monotonic() - at},
        )

    def heal(self, lab: Lab, wound: Wound) -> None:
        wound.notes["mended"] = time.monotonic()
        lab.network.mend()

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        if wound.not_from is None:
            return []
        return late_acks(lab, wound, "mended")


class MasterUnheard(CutMaster):
    """What the master sends vanishes."""

    def pairs(self, master: list[str], others: list[str]) -> set[Pair]:
        return one_way(master, others)


class MasterDeaf(CutMaster):
    """What is sent to the master vanishes."""

    def pairs(self, master: list[str], others: list[str]) -> set[Pair]:
        return one_way(others, master)


class CutFromEveryone(CutMaster):
    name = "cut-master"
    title = "master cut off from everyone"
    peer = "10 s and more"
    limit_s = 1.0
    elections = (1, 1)
    controllers = replicas = clients = True


class CutFromCluster(CutMaster):
    name = "cut-master-clients-stay"
    title = "master cut off from everyone but its clients"
    limit_s = 1.0
    elections = (1, 1)
    controllers = replicas = True


class CutFromControllers(CutMaster):
    name = "cut-master-controllers"
    title = "master cut off from the controllers only: longest gap"
    measure: ClassVar[Measure] = "gap"
    controllers = True


class CutFromReplicas(CutMaster):
    name = "cut-master-replicas"
    title = "master cut off from the replicas only: longest gap"
    measure: ClassVar[Measure] = "gap"
    replicas = True


class HeardByNobody(MasterUnheard):
    name = "oneway-master-unheard"
    title = "one direction: nobody in the cluster hears the master"
    measure: ClassVar[Measure] = "gap"
    controllers = replicas = True


class HearsNobody(MasterDeaf):
    name = "oneway-master-deaf"
    title = "one direction: the master hears nobody in the cluster"
    measure: ClassVar[Measure] = "gap"
    controllers = replicas = True


class ControllersDoNotHear(MasterUnheard):
    name = "oneway-controllers-deaf"
    title = "one direction: the controllers do not hear the master"
    measure: ClassVar[Measure] = "gap"
    controllers = True


class DoesNotHearControllers(MasterDeaf):
    name = "oneway-controllers-unheard"
    title = "one direction: the master does not hear the controllers"
    measure: ClassVar[Measure] = "gap"
    controllers = True


class ReplicasDoNotHear(MasterUnheard):
    name = "oneway-replicas-deaf"
    title = "one direction: the replicas do not hear the master"
    measure: ClassVar[Measure] = "gap"
    replicas = True


class DoesNotHearReplicas(MasterDeaf):
    name = "oneway-replicas-unheard"
    title = "one direction: the master does not hear the replicas"
    measure: ClassVar[Measure] = "gap"
    replicas = True
