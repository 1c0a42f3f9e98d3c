"""Seeded runs of a whole cluster; the promises are checked while it is killed, cut and hung.

What must hold is in `sim_cluster.World`: G1 (whoever opens as master holds every acknowledged
byte; nobody acknowledges what a newer master lacks), G2 (one process acknowledges in an epoch),
G3 and G4 (no two replicas show different bytes), R1 (a master waits for the recorded set, checked
at every commit), R15, R23, the cores' own invariants, and that no callback raises. In the end all
faults are removed, and the group must become whole and level by itself.

`BATONMQ_SIM_SEEDS=first-last` runs other seeds than these.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batonmq.protocol.codes import ResponseCode
from tests.lab.sim.fault_run import FaultRun, run_with_faults
from tests.lab.sim.sim_cluster import GROUP, Broker, Violation


def seeds(first: int, last: int) -> range:
    chosen = os.environ.get("BATONMQ_SIM_SEEDS", f"{first}-{last}")
    low, _, high = chosen.partition("-")
    return range(int(low), int(high or low) + 1)


@pytest.mark.parametrize("seed", seeds(1, 45))
def test_g1_g3_nothing_acknowledged_is_lost(seed: int, tmp_path: Path) -> None:
    world = run_with_faults(seed, tmp_path, seconds=2.0)
    assert world.counts.acked and world.counts.elections


@pytest.mark.parametrize("seed", seeds(9078, 9079))
def test_g1_in_storms_longer_than_a_dial_may_take(seed: int, tmp_path: Path) -> None:
    """Channels that did not connect for 3 s are replaced."""
    run_with_faults(seed, tmp_path, seconds=5.0)


@pytest.mark.parametrize("seed", seeds(101, 106))
def test_g1_with_ha_sync_flush_loss_of_power_loses_nothing(seed: int, tmp_path: Path) -> None:
    """`flushDiskType: SYNC_FLUSH` and `haSyncFlush`: some of the kills take the page cache."""
    run_with_faults(seed, tmp_path, seconds=2.0, ha_sync=True)


@pytest.mark.parametrize("seed", seeds(201, 204))
def test_g1_with_two_copies_at_least(seed: int, tmp_path: Path) -> None:
    """`minInSyncReplicas: 2`."""
    run_with_faults(seed, tmp_path, seconds=2.0, min_in_sync=2)


@pytest.mark.parametrize("seed", seeds(301, 305))
def test_g1_r22_with_the_real_store_and_crashes_in_the_middle_of_a_cut(
    seed: int, tmp_path: Path
) -> None:
    run_with_faults(seed, tmp_path, seconds=2.0, on_files=True)


@pytest.mark.parametrize("on_files", [False, True])
def test_a_seed_gives_the_same_run_again(on_files: bool, tmp_path: Path) -> None:
    """Nothing in a run reads a real clock, and the machine's load does not change it."""
    one, other = (
        run_with_faults(503, tmp_path / name, seconds=1.0, on_files=on_files)
        for name in ("one", "other")
    )
    assert one.counts == other.counts
    assert one.loop.time() == other.loop.time()
    assert one.truth == other.truth


def test_the_simulation_sees_a_master_that_forgets_its_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the union of R1 a member is recorded that the master does not wait for."""
    from batonmq.ha.sync_state import SyncState

    def without_proposal(self: SyncState) -> None:
        required = self.recorded | self.joining.keys()
        self._required_others = tuple(sorted(required - {self.broker_id}))

    monkeypatch.setattr(SyncState, "_renew_required", without_proposal)
    with pytest.raises((Violation, AssertionError), match=r"R1|R11"):
        run_with_faults(1, tmp_path)


def test_the_simulation_sees_an_election_outside_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batonmq.controller.rules import elect_policy

    monkeypatch.setattr(elect_policy, "_clean_pool", lambda group, living, floor: dict(living))
    with pytest.raises(Violation, match=r"G1|G3|cannot follow"):
        for seed in range(1, 20):
            run_with_faults(seed, tmp_path / str(seed), seconds=4.0)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("seed", seeds(401, 402))
def test_r33_planned_switches_drain_and_lose_nothing(seed: int, slow: bool, tmp_path: Path) -> None:
    """A healthy group; every 0.5 s an operator designates the next master: the old one drains.

    It waits 60 ms for the others' acks. What the slowest of them still lacks then it answers with
    14, nothing else; the new master has all of it, and its clients may send it again. With `slow`
    the third member hears nothing of the old master meanwhile.
    """
    run = FaultRun(seed, tmp_path)
    world = run.world
    unacked: list[bytes] = []
    target = 0
    answered = world.answered

    def host_of(broker_id: int) -> str:
        return next(b.host for b in world.living() if b.manager.broker_id == broker_id)

    def watched(broker: Broker, epoch: int, end: int, record: bytes, code: int) -> None:
        if code:
            sync = broker.ha.sync_state
            assert sync is not None
            third = sync.follower(({1, 2, 3} - {sync.broker_id, target}).pop())
            if code != ResponseCode.SERVICE_NOT_AVAILABLE or third is None or third.ack >= end:
                world.violate(f"R33: code {code} for a write up to {end}, acked is {third}")
            unacked.append(record)
        answered(broker, epoch, end, record, code)

    world.answered = watched  # type: ignore[method-assign]
    try:
        world.run(3.0)
        for turn in range(6):
            group = world.raft.truth.state.group(GROUP)
            assert group is not None
            before = (group.master_broker_id, group.master_epoch)
            target = sorted(set(group.sync_state_set) - {group.master_broker_id})[turn % 2]
            drains = world.counts.drains
            if slow:
                third = {1, 2, 3} - {group.master_broker_id, target}
                world.network.block(host_of(group.master_broker_id), host_of(third.pop()))
            run._designate(target)
            world.run(0.3)
            world.network.heal()
            world.run(0.2)
            now = world.raft.truth.state.group(GROUP)
            assert now is not None
            assert (now.master_broker_id, now.master_epoch) == (target, before[1] + 1)
            assert world.counts.drains == drains + 1
            assert now.sync_state_set == (1, 2, 3)
        run.recover()
        assert all(record in world.truth for record in unacked)
        assert unacked or not slow
    finally:
        world.close()
