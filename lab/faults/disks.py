"""All brokers down and up again, and disks that lost some or all of their data."""

import random
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from batonmq.history.event import EventKind
from lab.cluster.checks import BrokenPromise
from lab.cluster.node_process import kill_all
from lab.cluster.stores import copy_sparsely, put_back, wipe
from lab.faults.trial import Fault, InjectedFault, Lab

SHRUNK_AFTER_S = 1.5
NO_ACKS_S = 1.5


class AllBrokers(Fault):
    """kill -9 of all in any order, at once or each after the one before has left the set; then a
    start in any order. Measured from when the first member of the last set listens: each of them
    holds everything that was acknowledged."""

    name = "all-brokers"
    title = "all brokers killed, restarted in any order (from when the needed one listens)"
    limit_s = 2.0
    hold_s = (0.1, 0.2)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        order = list(range(len(lab.cluster.brokers)))
        rng.shuffle(order)
        one_by_one = rng.random() < 0.5
        for index in order:
            lab.cluster.brokers[index].signal(signal.SIGKILL)
            if one_by_one and index != order[-1]:
                time.sleep(SHRUNK_AFTER_S)
        for process in lab.cluster.brokers:
            process.kill()
        group = lab.cluster.wait_for("the group's record", lab.cluster.group)
        rng.shuffle(order)
        needed = next(index for index in order if index in group.in_sync)
        started = time.monotonic()
        for index in order:
            lab.cluster.launch(lab.cluster.brokers[index])
            if index == needed:
                started = time.monotonic()
        at = lab.cluster.wait_listening(needed)
        return InjectedFault(
            at,
            notes={
                "oneByOne": one_by_one,
                "lastSet": sorted(group.in_sync),
                "order": order,
                "startToDoorS": at - started,
            },
        )


class SpoiledSlave(Fault):
    """A slave restarts with less than it had acknowledged; then the master dies at once.

    The complete one is elected (R16, R17); the spoiled one is refilled. On a busy machine that may
    take less time than the kill: then it is in the set again, and may win.
    """

    elections = (1, 1)

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        master = lab.master()
        spoiled, complete = lab.slaves(rng)
        lab.cluster.brokers[spoiled].kill()
        self.spoil(lab, spoiled)
        lab.cluster.launch(lab.cluster.brokers[spoiled])
        lab.cluster.wait_listening(spoiled)  # both slaves are there: one of them must not win
        at = time.monotonic()
        lab.cluster.brokers[master].kill()
        return InjectedFault(at, not_from=master, notes={"spoiled": spoiled, "complete": complete})

    def spoil(self, lab: Lab, index: int) -> None:
        raise NotImplementedError

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        group = lab.cluster.wait_whole()
        won = lab.winners(group)[group.master_epoch]
        if won == {injected.notes["complete"]}:
            return []
        events = [event for _, event in sorted(lab.cluster.history().items())]
        if won == {injected.notes["spoiled"]} and had_rejoined(events, group.broker_ids[min(won)]):
            return []
        return [BrokenPromise("spoiled elected", f"{won} won, {injected.notes}")]


def had_rejoined(events: Iterable[Mapping[str, Any]], broker_id: int) -> bool:
    """Whether this broker's last start had joined the SyncStateSet before the last election.
    `events`: of one group, in the order of the controllers' log, as their files have them: without
    empty fields."""
    is_member = at_election = False
    for event in events:
        kind = event["kind"]
        if kind == EventKind.BROKER_REGISTERED and event.get("broker_id") == broker_id:
            is_member = False
        elif kind == EventKind.SET_ALTERED and broker_id not in event.get("set_before", ()):
            is_member = is_member or broker_id in event.get("sync_state_set", ())
        elif kind == EventKind.ELECTED:
            at_election = is_member
    return at_election


class WipedSlave(SpoiledSlave):
    name = "wiped-slave"
    title = "a replica's disk wiped under the same identity, then the master killed"

    def spoil(self, lab: Lab, index: int) -> None:
        wipe(lab.cluster.data_folders[index])


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
                backup = lab.folder / f"backup-{index}"
                copy_sparsely(lab.cluster.data_folders[index], backup)
                self._backups[index] = backup
                lab.cluster.launch(lab.cluster.brokers[index])
                lab.cluster.wait_whole()
                lab.must_ack()

    def spoil(self, lab: Lab, index: int) -> None:
        put_back(lab.cluster.data_folders[index], self._backups[index])


class WipedSlaveAlone(Fault):
    """Both other replicas die: none is elected, nothing is acked until one of them restarts."""

    name = "wiped-slave-alone"
    title = "a replica's disk wiped, the two others killed: no acks until one is back"

    def inject(self, lab: Lab, rng: random.Random) -> InjectedFault:
        master = lab.master()
        spoiled, complete = lab.slaves(rng)
        brokers = lab.cluster.brokers
        brokers[spoiled].kill()
        wipe(lab.cluster.data_folders[spoiled])
        kill_all((brokers[master], brokers[complete]))
        died = time.monotonic()
        lab.cluster.launch(brokers[spoiled])
        lab.cluster.wait_listening(spoiled)
        time.sleep(NO_ACKS_S)
        acked = len(lab.load.since(died + 0.05))  # an ack may be on its way to the probe
        group = lab.cluster.wait_for("the group's record", lab.cluster.group)
        whole = sorted(group.in_sync - {spoiled})
        back = rng.choice(whole or [master, complete])
        lab.cluster.launch(brokers[back])
        at = lab.cluster.wait_listening(back)
        return InjectedFault(
            at, notes={"ackedAlone": acked, "spoiled": spoiled, "back": back, "set": whole}
        )

    def check(self, lab: Lab, injected: InjectedFault) -> list[BrokenPromise]:
        if injected.notes["ackedAlone"] or not injected.notes["set"]:
            return [BrokenPromise("spoiled acked", f"{injected.notes}")]
        return []
