"""A master cut off by the network: from all, from some, in one direction.

Packets are dropped without a reply. Clients still reach the master unless `clients` is set. A
master that clients reach may still take writes, which is the most dangerous case.
"""

from __future__ import annotations

import random
import time
from typing import ClassVar

from lab.cluster.checks import BrokenPromise
from lab.cluster.held import PROBE_HOST
from lab.cluster.network_commands import Pair, between, one_way
from lab.faults.kills import late_acks
from lab.faults.trial import Fault, InjectedFault, Lab, Measure


class CutMaster(Fault):
    """Cut off from controllers, replicas and clients as the class says, in both directions."""

    needs_cuts = True
    watch_s = 2.0
    hold_s = (0.5, 1.5)
    controllers: ClassVar[bool] = False
    replicas: ClassVar[bool] = False
    clients: ClassVar[bool] = False

    def pairs(self, master: list[str], others: list[str]) -> set[Pair]:
        return between(master, others)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        group = lab.cluster.wait_whole()
        assert group.master is not None
        master = lab.cluster.brokers[group.master]
        others: list[str] = []
        if self.controllers:
            others += lab.cluster.ips(lab.cluster.controller_processes)
        if self.replicas:
            others += lab.cluster.ips(p for p in lab.cluster.brokers if p is not master)
        if self.clients:
            others.append(lab.network.address[PROBE_HOST])
        at = time.monotonic()
        lab.network.cut(self.pairs([lab.network.address[master.name]], others))
        return InjectedFault(
            at,
            not_from=group.master if self.measure == "first ack" else None,
            declared_dead=group.master,
            old_epoch=group.master_epoch,
            took_s=time.monotonic() - at,
        )

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        if injected.not_from is None:
            return []
        return late_acks(lab, injected)


class OutboundCut(CutMaster):
    """What the master sends is dropped."""

    def pairs(self, master: list[str], others: list[str]) -> set[Pair]:
        return one_way(master, others)


class InboundCut(CutMaster):
    """What is sent to the master is dropped."""

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


class OnewayMasterUnheard(OutboundCut):
    name = "oneway-master-unheard"
    title = "one direction: no process of the cluster receives from the master"
    measure: ClassVar[Measure] = "gap"
    controllers = replicas = True


class OnewayMasterDeaf(InboundCut):
    name = "oneway-master-deaf"
    title = "one direction: the master receives from no process of the cluster"
    measure: ClassVar[Measure] = "gap"
    controllers = replicas = True


class OnewayControllersDeaf(OutboundCut):
    name = "oneway-controllers-deaf"
    title = "one direction: the controllers do not hear the master"
    measure: ClassVar[Measure] = "gap"
    controllers = True


class OnewayControllersUnheard(InboundCut):
    name = "oneway-controllers-unheard"
    title = "one direction: the master does not hear the controllers"
    measure: ClassVar[Measure] = "gap"
    controllers = True


class OnewayReplicasDeaf(OutboundCut):
    name = "oneway-replicas-deaf"
    title = "one direction: the replicas do not hear the master"
    measure: ClassVar[Measure] = "gap"
    replicas = True


class OnewayReplicasUnheard(InboundCut):
    name = "oneway-replicas-unheard"
    title = "one direction: the master does not hear the replicas"
    measure: ClassVar[Measure] = "gap"
    replicas = True
