"""All brokers down and up again, and disks that lost or forgot what they held."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from faults.fault import Fault, Wound
from faults.records import Finding

if TYPE_CHECKING:
    from faults.lab import Lab

SHRUNK_AFTER_S = 1.5
NOBODY_ACKS_S = 1.5


class AllBrokers(Fault):
    """kill -9 of all in any order, at once or one after the other was shrunk away; then a start in
    any order. Measured from when the door of the last needed one listens: the first member of the
    last set that comes up (each of them holds everything that was acknowledged)."""

    name = "all-brokers"
    title = "all brokers killed, restarted in any order (from the needed one's door)"
    limit_s = 2.0
    hold_s = (0.1, 0.2)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        order = list(range(len(lab.cluster.brokers)))
        rng.shuffle(order)
        one_by_one = rng.random() < 0.5
        for index in order:
            lab.cluster.brokers[index].signal(signal.SIGKILL)
            if one_by_one and index != order[-1]:
                time.sleep(SHRUNK_AFTER_S)
        for process in lab.cluster.brokers:
            process.kill()
        group = lab.cluster.wait_for("what the controllers know", lab.cluster.group)
        rng.shuffle(order)
        needed = next(index for index in order if index in group.in_sync)
        started = time.monotonic()
        for index in order:
            lab.cluster.launch(lab.cluster.brokers[index])
            if index == needed:
                started = time.monotonic()
        at = lab.cluster.wait_door(needed)
        return Wound(
            at,
            notes={
                "oneByOne": one_by_one,
                "lastSet": sorted(group.in_sync),
                "order": order,
                "startToDoorS": at - started,
            },
        )


class SpoiledSlave(Fault):
    """A slave comes back under its identity with less than it had acked, the master dies at once.

    The complete one is elected (R16, R17); the spoiled one is refilled.
    """

    elections = (1, 1)

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        master = lab.master()
        spoiled, complete = lab.slaves(rng)
        lab.cluster.brokers[spoiled].kill()
        self.spoil(lab, spoiled)
        lab.cluster.launch(lab.cluster.brokers[spoiled])
        lab.cluster.wait_door(spoiled)
        at = time.monotonic()
        lab.cluster.brokers[master].kill()
        return Wound(at, not_from=master, notes={"spoiled": spoiled, "complete": complete})

    def spoil(self, lab: Lab, index: int) -> None:
        raise NotImplementedError

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        group = lab.cluster.wait_whole()
        won = lab.winners(group)[group.master_epoch]
        if won != {wound.notes["complete"]}:
            return [Finding("spoiled elected", f"{won} won, {wound.notes}")]
        return []


class WipedSlave(SpoiledSlave):
    name = "wiped-slave"
    title = "a replica's disk wiped under the same identity, then the master killed"

    def spoil(self, lab: Lab, index: int) -> None:
        lab.cluster.wipe(index)


class OldBackup(SpoiledSlave):
    name = "old-backup"
    title = "an old backup put back under the same identity, then the master killed"

    def __init__(self) -> None:
        self._backups: dict[int, Path] = {}

    def prepare(self, lab: Lab, rng: random.Random) -> None:
        """Makes a backup of every slave, once; what is written since is what it lacks."""
        for index in lab.slaves(rng):
            if index not in self._backups:
                lab.cluster.brokers[index].kill()
                self._backups[index] = lab.cluster.back_up(index)
                lab.cluster.launch(lab.cluster.brokers[index])
                lab.cluster.wait_whole()
                lab.must_ack()

    def spoil(self, lab: Lab, index: int) -> None:
        lab.cluster.put_back(index, self._backups[index])


class OnlyTheSpoiledLives(Fault):
    """Both complete ones die: nobody is elected and nothing acked until one of them is back."""

    name = "wiped-slave-alone"
    title = "a replica's disk wiped, the two others killed: nobody acks until one is back"

    def inject(self, lab: Lab, rng: random.Random) -> Wound:
        master = lab.master()
        spoiled, complete = lab.slaves(rng)
        brokers = lab.cluster.brokers
        brokers[spoiled].kill()
        lab.cluster.wipe(spoiled)
        brokers[master].signal(signal.SIGKILL)
        brokers[complete].signal(signal.SIGKILL)
        brokers[master].kill()
        brokers[complete].kill()
        died = time.monotonic()
        lab.cluster.launch(brokers[spoiled])
        lab.cluster.wait_door(spoiled)
        time.sleep(NOBODY_ACKS_S)
        acked = len(lab.load.since(died + 0.05))
        group = lab.cluster.wait_for("what the controllers know", lab.cluster.group)
        whole = sorted(group.in_sync - {spoiled})
        back = rng.choice(whole or [master, complete])
        lab.cluster.launch(brokers[back])
        at = lab.cluster.wait_door(back)
        return Wound(
            at, notes={"ackedAlone": acked, "spoiled": spoiled, "back": back, "set": whole}
        )

    def judge(self, lab: Lab, wound: Wound) -> list[Finding]:
        if wound.notes["ackedAlone"] or not wound.notes["set"]:
            return [Finding("spoiled acked", f"{wound.notes}")]
        return []
