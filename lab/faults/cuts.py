"""A master cut off by the network: from all, from some, in one direction.

Packets are dropped without a reply. Clients still reach the master unless `clients` is set. A
master that clients reach may still take writes, which is the most dangerous case.
"""

import random
import time
from typing import ClassVar

from lab.cluster.checks import BrokenPromise
from lab.cluster.held import PROBE_HOST
from lab.cluster.network_commands import between
from lab.faults.kills import late_acks
from lab.faults.trial import Fault, InjectedFault, Lab, Measure


class CutMaster(Fault):
    """Cut off from controllers, replicas and clients as the class says. `outward`: what it sends is
    lost; `inward`: what is sent to it."""

    needs_cuts = True
    measure: ClassVar[Measure] = "gap"
    watch_s = 2.0
    hold_s = (0.5, 1.5)
    controllers: ClassVar[bool] = False
    replicas: ClassVar[bool] = False
    clients: ClassVar[bool] = False
    outward: ClassVar[bool] = True
    inward: ClassVar[bool] = True

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
        near = [lab.network.address[master.name]]
        lab.network.cut(between(near, others, outward=self.outward, inward=self.inward))
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


class CutFromEveryone(CutMaster):
    name = "cut-master"
    title = "master cut off from everyone"
    measure = "first ack"
    peer = "10 s and more"
    limit_s = 1.0
    elections = (1, 1)
    controllers = replicas = clients = True


class CutFromCluster(CutMaster):
    name = "cut-master-clients-stay"
    title = "master cut off from everyone but its clients"
    measure = "first ack"
    limit_s = 1.0
    elections = (1, 1)
    controllers = replicas = True


class CutFromControllers(CutMaster):
    name = "cut-master-controllers"
    title = "master cut off from the controllers only: longest gap"
    controllers = True


class CutFromReplicas(CutMaster):
    name = "cut-master-replicas"
    title = "master cut off from the replicas only: longest gap"
    replicas = True


class OnewayMasterUnheard(CutMaster):
    name = "oneway-master-unheard"
    title = "one direction: no process of the cluster receives from the master"
    controllers = replicas = True
    inward = False


class OnewayMasterDeaf(CutMaster):
    name = "oneway-master-deaf"
    title = "one direction: the master receives from no process of the cluster"
    controllers = replicas = True
    outward = False


class OnewayControllersDeaf(CutMaster):
    name = "oneway-controllers-deaf"
    title = "one direction: the controllers do not hear the master"
    controllers = True
    inward = False


class OnewayControllersUnheard(CutMaster):
    name = "oneway-controllers-unheard"
    title = "one direction: the master does not hear the controllers"
    controllers = True
    outward = False


class OnewayReplicasDeaf(CutMaster):
    name = "oneway-replicas-deaf"
    title = "one direction: the replicas do not hear the master"
    replicas = True
    inward = False


class OnewayReplicasUnheard(CutMaster):
    name = "oneway-replicas-unheard"
    title = "one direction: the master does not hear the replicas"
    replicas = True
    outward = False
