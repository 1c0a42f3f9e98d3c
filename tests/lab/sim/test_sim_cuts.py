"""A master whose network is cut in part: who notices, what is decided, and that it is safe.

The simulation's checkers are on, the one for two masters above all (G1, G2). Times are virtual.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from batonmq.controller.rules.groups import BrokerGroup
from batonmq.proto.controller.v1 import controller_pb2 as pb
from tests.lab.sim.fault_run import FaultRun, elect
from tests.lab.sim.sim_cluster import GROUP, NODES, Broker

LEASE_MS = 600
SHRINK_MS = 600
SESSION_MS = 800
BEAT_MS = 100


@dataclass
class Seen:
    """What happened to the old master within some seconds after the cut; ms, None for never."""

    elected_ms: int | None = None
    lease_lost_ms: int | None = None
    refused_ms: int | None = None
    shrunk_ms: int | None = None
    acks_of_old: int = 0
    longest_gap_ms: int = 0
    """The longest time without any acknowledged message."""


class Cut:
    """A whole group under traffic, whose master then loses the links that `cut` names."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.run = FaultRun(seed, folder)
        self.world = self.run.world
        self.world.run(0.2)
        for _ in range(100):
            self.world.run(0.1)
            group = self.world.raft.truth.state.group(GROUP)
            if group is not None and len(group.sync_state_set) == 3:
                break
        (self.master,) = [broker for broker in self.world.living() if broker.is_open]
        self.others = [b.host for b in self.world.living() if b is not self.master]

    def cut(self, name: str) -> None:
        here, network = self.master.host, self.world.network
        towards = NODES if "controllers" in name else tuple(self.others)
        for there in towards:
            if name.startswith("master to"):
                network.one_way.add((here, there))
            elif name.endswith("to master"):
                network.one_way.add((there, here))
            else:
                network.block(here, there)

    def watch(self, seconds: float) -> Seen:
        world, old = self.world, self.master
        seen = Seen()
        epoch = old.gate.master_epoch
        began_ms = last_ack_ms = world.loop.now_ms()
        acked = world.counts.acked
        answered = world.answered

        def counted(broker: Broker, of: int, end: int, record: bytes, code: int) -> None:
            seen.acks_of_old += code == 0 and broker is old
            answered(broker, of, end, record, code)

        world.answered = counted  # type: ignore[method-assign]
        while world.loop.now_ms() < began_ms + 1000 * seconds:
            world.run(0.01)
            now_ms = world.loop.now_ms() - began_ms
            group = world.raft.truth.state.group(GROUP)
            assert group is not None
            if group.master_epoch > epoch and seen.elected_ms is None:
                seen.elected_ms = now_ms
            if len(group.sync_state_set) == 1 and seen.shrunk_ms is None:
                seen.shrunk_ms = now_ms
            lease = old.manager.lease_valid(world.loop.now_ms())
            if not lease and seen.lease_lost_ms is None:
                seen.lease_lost_ms = now_ms
            if not old.is_open and seen.refused_ms is None:
                seen.refused_ms = now_ms
            if world.counts.acked > acked:
                acked = world.counts.acked
                last_ack_ms = world.loop.now_ms()
            gap_ms = world.loop.now_ms() - last_ack_ms
            seen.longest_gap_ms = max(seen.longest_gap_ms, gap_ms)
        return seen

    def heal(self) -> None:
        self.run.recover()
        self.world.close()


def play(seed: int, folder: Path, name: str) -> Seen:
    scene = Cut(seed, folder)
    scene.cut(name)
    seen = scene.watch(3.5)
    scene.heal()
    return seen


@pytest.mark.parametrize("seed", [1, 2])
def test_r5_r36_a_master_cut_off_from_the_controllers(seed: int, tmp_path: Path) -> None:
    """After 800 ms of silence another is elected; it goes on until its slaves leave it (R36)."""
    seen = play(seed, tmp_path, "master and controllers")
    assert seen.elected_ms is not None and seen.elected_ms >= SESSION_MS - BEAT_MS
    assert seen.lease_lost_ms is not None and seen.lease_lost_ms <= seen.elected_ms
    assert seen.refused_ms is not None and seen.refused_ms >= seen.elected_ms
    assert seen.acks_of_old > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_r5_a_master_whose_heartbeats_do_not_arrive_learns_of_its_end(
    seed: int, tmp_path: Path
) -> None:
    """master -> controllers cut: as above, but the view of its successor reaches it at once."""
    seen = play(seed, tmp_path, "master to controllers")
    assert seen.elected_ms is not None and seen.elected_ms >= SESSION_MS - BEAT_MS
    assert seen.refused_ms is not None and seen.refused_ms - seen.elected_ms < 200


@pytest.mark.parametrize("seed", [1, 2])
def test_r5_r36_a_master_that_receives_from_no_controller(seed: int, tmp_path: Path) -> None:
    """controllers -> master cut: its heartbeats arrive but confirm no answer any more, and it goes
    on without a lease (R36). So another is elected little later than if it were silent: once the
    followers, too, miss what it would answer (R50)."""
    seen = play(seed, tmp_path, "controllers to master")
    assert seen.lease_lost_ms is not None and seen.lease_lost_ms <= LEASE_MS + 50
    assert seen.elected_ms is not None
    assert SESSION_MS - BEAT_MS <= seen.elected_ms <= SESSION_MS + 3 * BEAT_MS
    assert seen.refused_ms is None or seen.refused_ms >= seen.elected_ms
    assert seen.acks_of_old > 0


def elect_uncleanly(scene: Cut, *, cut_later_acks: bool) -> int:
    """Asks for another broker than the master; its id. Takes two seconds."""
    world = scene.world
    other = next(b for b in world.living() if b is not scene.master).manager.broker_id
    request = pb.ElectMasterRequest(
        cluster_name="C",
        broker_name=GROUP,
        broker_id=other,
        designate=True,
        unclean=True,
        cut_later_acks=cut_later_acks,
        expected_master_epoch=-1,
    )
    for node, service in world.services.items():
        process = world.raft.logs[node].process
        process.spawn(elect(service._grpc_endpoint, request))
    seen = scene.watch(2.0)
    assert seen.acks_of_old > 0
    return other


@pytest.mark.parametrize("seed", [1, 2])
def test_r44_an_unclean_election_beside_a_master_that_goes_on_alone(
    seed: int, tmp_path: Path
) -> None:
    """1. The master's replicas are cut off: the set is {1}. 2. So are the controllers: it goes on
    (R36), however long its lease is over. 3. An operator asks for another: nobody is elected, one
    master acknowledges. 4. The operator accepts what that costs: then it is elected."""
    scene = Cut(seed, tmp_path)
    try:
        scene.cut("master and replicas")
        while len(recorded(scene).sync_state_set) > 1:
            scene.world.run(0.1)
        scene.cut("master and controllers")
        scene.world.run(3.0)
        assert not scene.master.manager.lease_valid(scene.world.loop.now_ms())
        elect_uncleanly(scene, cut_later_acks=False)
        assert recorded(scene).unclean_epoch == 0
        assert [broker for broker in scene.world.living() if broker.is_open] == [scene.master]
        # From here on the operator has given up G1 and G3.
        scene.world.check = lambda: None  # type: ignore[method-assign]
        scene.world.violate = lambda what: None  # type: ignore[method-assign]
        named = elect_uncleanly(scene, cut_later_acks=True)
        assert recorded(scene).master_broker_id == named
        assert recorded(scene).unclean_epoch == recorded(scene).master_epoch
    finally:
        scene.world.close()


def recorded(scene: Cut) -> BrokerGroup:
    group = scene.world.raft.truth.state.group(GROUP)
    assert group is not None
    return group


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "name", ["master and replicas", "master to replicas", "replicas to master"]
)
def test_r14_a_master_cut_off_from_its_replicas(name: str, seed: int, tmp_path: Path) -> None:
    """The controllers reach all brokers: nobody is elected. After 600 ms without acks the replicas
    leave the set; the master goes on alone, and takes them back when the network is whole."""
    seen = play(seed, tmp_path, name)
    assert seen.elected_ms is None and seen.refused_ms is None
    assert seen.lease_lost_ms is None
    assert seen.shrunk_ms is not None and seen.shrunk_ms >= SHRINK_MS - 50
    assert seen.acks_of_old > 0
