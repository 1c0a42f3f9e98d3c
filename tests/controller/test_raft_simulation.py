"""The real pysyncobj library in simulation: partitions, crashes, and its faults A to D.

Each fault is shown twice: with its cure switched off the harm is there, with it there is none.
"""

import os
from collections.abc import Iterable

import pytest
from raft_sim import ALL_CURES, Sim

SOAK = os.environ.get("BATONMQ_SOAK") == "1"
SEEDS = {"A": 4, "B": 80, "C": 2, "D": 4}
MORE = 10 if SOAK else 1
CURED = 4
"""The life that showed the harm, and some more, show none with the cures."""


def without(*cures: str) -> frozenset[str]:
    return ALL_CURES - set(cures)


def fault_a(seed: int, patch: pytest.MonkeyPatch, cures: Iterable[str]) -> bool:
    """A cut-off leader keeps a tail of its own; the others go on and shorten their logs; it comes
    back and is fed a snapshot. True: it applied what nobody else has."""
    sim = Sim(seed, patch, cures=cures, compact_after=20)
    old = sim.lead()
    for _ in range(3):
        sim.propose(old)
    sim.run(0.3)
    sim.isolate(old)
    tail = [sim.propose(old) for _ in range(5)]
    sim.run(1.0)
    new = sim.lead()
    assert new != old
    for _ in range(60):
        sim.propose(new)
        sim.run(0.01)
    sim.run(0.5)
    sim.heal()
    harm = False
    for _ in range(400):
        sim.run(0.01)
        harm |= sim.forked() or bool(set(tail) & set(sim.acked))
    if not harm:
        assert sim.converged() and sim.lost() == []
    return harm


def fault_b(seed: int, patch: pytest.MonkeyPatch, cures: Iterable[str]) -> bool:
    """Replies take longer than a heartbeat; a node that was away makes the leader go back, and
    between two of the batches it sends again the leader dies. True: acknowledged entries are gone
    from those that are left."""
    sim = Sim(seed, patch, cures=cures, delay_s=(0.03, 0.09), padding=300, batch_bytes=1_000)
    sim.lead()
    sim.run(1)  # all have joined: a node without the log elects nobody
    leader = sim.lead()
    near, far = (n for n in range(3) if n != leader)
    sim.isolate(far)
    sim.run(0.3)
    for _ in range(60):
        sim.propose(leader)
    sim.run(0.02)
    sim.cut(leader, near)  # what was on the way is lost, and the leader must go back
    sim.join(leader, near)
    sim.run(sim.rng.uniform(0.2, 0.5))
    sim.kill(leader)
    sim.join(near, far)
    sim.run(5)
    return bool(sim.lost())


def fault_c(seed: int, patch: pytest.MonkeyPatch, cures: Iterable[str]) -> bool:
    """A node with one entry of its own is several batches behind a later leader. True: it never
    catches up."""
    sim = Sim(seed, patch, cures=cures, padding=20_000)
    old = sim.lead()
    sim.propose(old)
    sim.run(0.3)
    sim.isolate(old)
    sim.propose(old)
    sim.run(1.0)
    new = sim.lead()
    for _ in range(12):
        sim.propose(new)
        sim.run(0.02)
    third = 3 - old - new
    sim.cut(new, third)
    sim.run(1.0)
    sim.join(new, third)
    sim.lead()
    sim.heal()
    caught_up = sim.run(10, sim.converged)
    assert sim.lost() == [] or not caught_up
    return not caught_up


def fault_d(seed: int, patch: pytest.MonkeyPatch, cures: Iterable[str]) -> bool:
    """A command a little below twice the stock batch. True: its pieces are put together too soon,
    and the Raft thread of the followers raises."""
    sim = Sim(seed, patch, cures=cures)
    leader = sim.lead()
    sim.propose(leader, padding=130_980 + seed % 4 * 8)
    sim.run(1)
    return sim.broken_pieces > 0


FAULTS = {
    "A": (fault_a, ("snapshot pieces",)),
    "B": (fault_b, ("one batch", "agreeing entries")),
    "C": (fault_c, ("one batch", "agreeing entries")),
    "D": (fault_d, ("one batch", "agreeing entries")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_library_are_there_without_and_gone_with_their_cures(fault, monkeypatch):
    scenario, cures = FAULTS[fault]
    seeds = range(SEEDS[fault] * MORE)
    harmed = next((s for s in seeds if scenario(s, monkeypatch, without(*cures))), None)
    assert harmed is not None, "the scenario does not show the fault"
    seeds = seeds if SOAK else range(harmed, min(harmed + CURED, len(seeds)))
    assert [seed for seed in seeds if scenario(seed, monkeypatch, ALL_CURES)] == []


@pytest.mark.parametrize("seed", range(200 if SOAK else 6))
def test_partitions_and_crashes_lose_nothing_and_end_in_one_state(seed, monkeypatch):
    """Cuts, kills of one and of all, restarts from what was synced; under load, with snapshots."""
    sim = Sim(seed, monkeypatch, compact_after=30, delay_s=(0.0005, 0.02))
    for _ in range(40):
        for number in sim.leaders():
            for _ in range(sim.rng.randrange(4)):
                sim.propose(number)
        what, one, other = sim.rng.randrange(12), *sim.rng.sample(range(3), 2)
        if what < 3:
            sim.cut(one, other)
        elif what == 3:
            sim.isolate(one)
        elif what == 4:
            sim.kill(one)
        elif what == 5 and sim.rng.random() < 0.3:
            for number in range(3):
                sim.kill(number)
        elif what < 9:
            sim.heal()
        sim.run(sim.rng.uniform(0.02, 0.5))
        assert not sim.forked()
    sim.heal()
    assert sim.run(30, lambda: bool(sim.leaders()) and sim.converged() and not sim.lost())
    sim.propose(sim.lead())
    assert sim.run(10, sim.converged)
    assert sim.lost() == [] and sim.acked
