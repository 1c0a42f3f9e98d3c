"""A master whose network is cut in part, and switches in turn: who notices, and what is decided.

`python -m lab.sim cuts` shows that the group is served beside faults of single links; here a whole
side of the master is cut. All checkers of the simulation look on. Times are virtual, in seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from batonmq.controller.rules.groups import BrokerGroup
from batonmq.runtime.clock import boot_ms
from lab.sim.clients import Operator
from lab.sim.cluster import SimCluster, cluster_of
from lab.sim.cuts import WholeGroup
from lab.sim.settings import Settings

LEASE_S = 0.6
SHRINK_S = 0.6
SESSION_S = 0.8
BEAT_S = 0.1
LOOK_S = 0.01
HEALED_S = 15.0


@dataclass
class Seen:
    """When what happened after the cut; None for never. `confirmed`: bytes that the old master
    confirmed in the meantime, until another was elected."""

    elected_s: float | None = None
    lease_lost_s: float | None = None
    refused_s: float | None = None
    shrunk_s: float | None = None
    confirmed: int = 0


class Scene:
    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.traffic = WholeGroup(cluster)
        assert cluster.master is not None
        self.master = cluster.master
        self.slaves = [host for host in cluster.brokers.values() if host is not self.master]

    @property
    def group(self) -> BrokerGroup:
        group = self.cluster.promises.group
        assert group is not None
        return group

    def has_lease(self) -> bool:
        manager, process = self.master.manager, self.master.process
        assert manager is not None and process is not None
        return manager.lease_valid(process.run(boot_ms))

    def confirmed(self) -> int:
        assert self.master.service is not None
        return self.master.service.store.confirm_offset

    def cut(self, name: str) -> None:
        here, network = self.master.address, self.cluster.network
        for host in self.cluster.controllers.values() if "controllers" in name else self.slaves:
            if not name.startswith("master to"):
                network.one_way.add((host.address, here))
            if not name.endswith("to master"):
                network.one_way.add((here, host.address))

    def watch(self, seconds: float) -> Seen:
        seen, epoch = Seen(), self.group.master_epoch
        began_s, had = self.cluster.now_s, self.confirmed()
        while (since_s := self.cluster.now_s - began_s) < seconds:
            self.cluster.run(LOOK_S)
            if seen.elected_s is None:
                seen.confirmed = self.confirmed() - had
                if self.group.master_epoch > epoch:
                    seen.elected_s = since_s
            if seen.shrunk_s is None and len(self.group.sync_state_set) == 1:
                seen.shrunk_s = since_s
            if seen.lease_lost_s is None and not self.has_lease():
                seen.lease_lost_s = since_s
            if seen.refused_s is None and not self.master.is_open:
                seen.refused_s = since_s
        return seen

    def play(self, name: str) -> Seen:
        self.cut(name)
        seen = self.watch(3.5)
        self.cluster.network.heal()
        self.traffic.until(lambda: self.traffic.is_whole, HEALED_S)
        return seen


@pytest.fixture
def scene() -> Iterator[Scene]:
    with cluster_of(1, Settings()) as cluster:
        yield Scene(cluster)


def test_r5_r36_a_master_cut_off_from_the_controllers(scene: Scene) -> None:
    """After 800 ms of silence another is elected; it continues until its slaves leave it (R36)."""
    seen = scene.play("master and controllers")
    assert seen.elected_s is not None and seen.elected_s >= SESSION_S - BEAT_S
    assert seen.lease_lost_s is not None and seen.lease_lost_s <= seen.elected_s
    assert seen.refused_s is not None and seen.refused_s >= seen.elected_s
    assert seen.confirmed > 0


def test_r5_a_master_whose_heartbeats_do_not_arrive_learns_of_its_end(scene: Scene) -> None:
    """As above, but the view of its successor reaches it at once."""
    seen = scene.play("master to controllers")
    assert seen.elected_s is not None and seen.elected_s >= SESSION_S - BEAT_S
    assert seen.refused_s is not None and seen.refused_s - seen.elected_s < 0.2


def test_r5_r36_a_master_that_receives_from_no_controller(scene: Scene) -> None:
    """Its heartbeats arrive but confirm no answer any more, and it continues without a lease (R36).
    So another is elected little later than if it were silent: once the followers, too, miss what it
    would answer (R50)."""
    seen = scene.play("controllers to master")
    assert seen.lease_lost_s is not None and seen.lease_lost_s <= LEASE_S + 0.05
    assert seen.elected_s is not None
    assert SESSION_S - BEAT_S <= seen.elected_s <= SESSION_S + 4 * BEAT_S
    assert seen.refused_s is None or seen.refused_s >= seen.elected_s
    assert seen.confirmed > 0


@pytest.mark.parametrize(
    "name", ["master and replicas", "master to replicas", "replicas to master"]
)
def test_r14_a_master_cut_off_from_its_replicas(scene: Scene, name: str) -> None:
    """The controllers reach all brokers: none is elected. After 600 ms without acks the replicas
    leave the set; the master continues alone, and takes them back when the network is whole."""
    seen = scene.play(name)
    assert seen.elected_s is None and seen.refused_s is None and seen.lease_lost_s is None
    assert seen.shrunk_s is not None and seen.shrunk_s >= SHRINK_S - BEAT_S
    assert seen.confirmed > 0


def test_r44_an_unclean_election_beside_a_master_that_goes_on_alone(scene: Scene) -> None:
    """1. The master's replicas are cut off: the set is {1}. 2. So are the controllers: it continues
    (R36), however long its lease is over. 3. An operator asks for another: none is elected, one
    master acknowledges. 4. The operator accepts what that costs: then it is elected."""
    cluster, named = scene.cluster, scene.slaves[0].broker_id
    scene.cut("master and replicas")
    scene.traffic.until(lambda: len(scene.group.sync_state_set) == 1, HEALED_S)
    scene.cut("master and controllers")
    cluster.run(3.0)
    assert not scene.has_lease()

    operator = Operator(cluster)
    operator.elect(named, unclean=True)
    seen = scene.watch(2.0)
    assert seen.elected_s is None and seen.confirmed > 0
    assert scene.group.unclean_epoch == 0
    assert [host for host in cluster.brokers.values() if host.is_open] == [scene.master]

    operator.elect(named, unclean=True, cut=True)
    scene.traffic.until(lambda: scene.group.master_broker_id == named, 2.0)
    assert scene.group.unclean_epoch == scene.group.master_epoch


@pytest.mark.parametrize("is_slow", [False, True])
def test_r33_planned_switches_in_turn_keep_the_set(scene: Scene, is_slow: bool) -> None:
    """An operator names one master after the other. With `is_slow` the third member receives
    nothing of the old master meanwhile."""
    cluster, network = scene.cluster, scene.cluster.network
    hosts = {host.broker_id: host for host in cluster.brokers.values()}
    for turn in range(6):
        before = scene.group
        others = sorted(set(before.sync_state_set) - {before.master_broker_id})
        target, third = others[turn % 2], others[1 - turn % 2]
        acked = len(scene.traffic.messages.acked)
        if is_slow:
            master = hosts[before.master_broker_id]
            network.block(master.address, hosts[third].address)
        Operator(cluster).elect(target)
        cluster.run(0.3)
        network.heal()
        cluster.run(0.4)
        now = scene.group
        assert (now.master_broker_id, now.master_epoch) == (target, before.master_epoch + 1)
        assert now.sync_state_set == (1, 2, 3)
        assert len(scene.traffic.messages.acked) > acked
