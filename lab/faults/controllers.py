"""Partial faults of controllers, which last for some seconds: links, processes and disks.

None of them is a fault of the group: it must acknowledge while they last (R50, R51, R53),
within `SERVICE_GAP_S`.
"""

import random
import signal
import time
from typing import ClassVar, Final

from lab.cluster.checks import BrokenPromise
from lab.cluster.load import longest_gap
from lab.cluster.network_commands import between
from lab.cluster.node_process import NodeProcess
from lab.faults.failing import FullDiskMaster
from lab.faults.trial import Fault, InjectedFault, Lab

SERVICE_GAP_S: Final = 4.0
"""The bound of the simulation's lives, 3 s, on a machine that has other work."""


def gap_finding(lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
    """If no write was acknowledged for too long while the fault lasted."""
    gap_s = longest_gap(lab.load.since(injected.at_s), injected.at_s, injected.healed_s)
    if gap_s <= SERVICE_GAP_S:
        return []
    return [
        BrokenPromise("no service", f"nothing acknowledged for {gap_s:.1f} s: {injected.notes}")
    ]


class ControllerFault(Fault):
    """Of the leading controller, or of another one where the class says so."""

    measure = "gap"
    watch_s = 5.0
    follows: ClassVar[bool] = False

    def subject(self, lab: Lab) -> tuple[int, NodeProcess]:
        leader = lab.cluster.wait_leader()
        index = (leader + 1) % len(lab.cluster.controller_processes) if self.follows else leader
        return index, lab.cluster.controller_processes[index]

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        return gap_finding(lab, injected)


class CutController(ControllerFault):
    """Its links to the brokers, or to its `peers`: what it sends, and what they send."""

    needs_cuts = True
    peers: ClassVar[bool] = False
    outward: ClassVar[bool] = True
    inward: ClassVar[bool] = True

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        _, process = self.subject(lab)
        brokers, peers = lab.cluster.brokers, lab.cluster.controller_processes
        others = [one for one in (peers if self.peers else brokers) if one is not process]
        chosen = [rng.choice(others)] if self.peers else others
        at = time.monotonic()
        near, far = [lab.network.address[process.name]], lab.cluster.ips(chosen)
        lab.network.cut(between(near, far, outward=self.outward, inward=self.inward))
        return InjectedFault(at, notes={"from": process.name, "to": [one.name for one in chosen]})


class LeaderWithoutBrokers(CutController):
    name = "cut-leader-brokers"
    title = "controller leader cut off from the brokers, not from its peers: longest gap"


class LeaderUnheardByBrokers(CutController):
    name = "oneway-leader-brokers"
    title = "one direction: the brokers do not hear the controller leader"
    inward = False


class LeaderDeafToBrokers(CutController):
    name = "oneway-brokers-leader"
    title = "one direction: the controller leader does not hear the brokers"
    outward = False


class LeaderWithoutPeer(CutController):
    name = "cut-leader-peer"
    title = "controller leader cut off from one of its peers"
    peers = True


class LeaderUnheardByPeer(LeaderWithoutPeer):
    name = "oneway-leader-peer"
    title = "one direction: a peer does not hear the controller leader"
    inward = False


class HangFollower(ControllerFault):
    name = "hang-follower"
    title = "SIGSTOP a controller that does not lead: longest gap between acks"
    follows = True

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        index, process = self.subject(lab)
        at = time.monotonic()
        process.signal(signal.SIGSTOP)
        return InjectedFault(at, notes={"controller": index})


class FullDiskLeader(FullDiskMaster):
    name = "full-disk-leader"
    title = "the disk of the controller leader is full: longest gap"

    def subject(self, lab: Lab, rng: random.Random) -> NodeProcess:
        return lab.cluster.controller_processes[lab.cluster.wait_leader()]

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        return [*super().check(lab, injected), *gap_finding(lab, injected)]
