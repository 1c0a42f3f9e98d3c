"""R51: no needless term. R53: first starts, full disks and applied entries that a leader lacks."""

import copy

import pytest
from raft_sim import Sim

from batonmq.controller.raft.membership import decode_greeting
from batonmq.controller.raft.pre_vote import Leadership, PreVote, is_up_to_date

PAIRS = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]


def terms(sim: Sim) -> int:
    return max(core.raftCurrentTerm for core in sim.cores if core is not None)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("way", ["one", "both"])
def test_r51_a_partial_cut_raises_the_term_once_at_most(pair, way, monkeypatch):
    sim = Sim(1, monkeypatch)
    sim.lead()
    sim.run(1)
    before = terms(sim)
    if way == "one":
        sim.deaf.add(pair)
    else:
        sim.cut(*pair)
    sim.run(1)
    leader = sim.lead()
    sim.run(30)
    assert sim.lead() == leader and terms(sim) <= before + 1
    name = sim.propose(leader)
    assert sim.run(1, lambda: name in sim.acked)


@pytest.mark.parametrize("seed", range(5))
def test_r51_a_leader_that_falls_silent_is_succeeded_within_its_time(seed, monkeypatch):
    sim = Sim(seed, monkeypatch)
    leader = sim.lead()
    sim.run(1)
    sim.deaf |= {(leader, n) for n in range(3)} | {(n, leader) for n in range(3)}
    assert sim.run(1.5, lambda: any(n != leader for n in sim.leaders()))


def test_r51_a_node_with_a_higher_term_comes_back_to_its_leader(monkeypatch):
    """As an earlier version leaves it, which raises its term while it is cut off."""
    sim = Sim(1, monkeypatch)
    leader = sim.lead()
    other = (leader + 1) % 3
    sim.isolate(other)
    core = sim.cores[other]
    assert core is not None
    core._SyncObj__setCurrentTerm(terms(sim) + 7, None)
    name = sim.propose(leader)
    sim.run(1)
    sim.heal()
    assert sim.run(5, sim.converged) and name in core.applied


def test_r51_a_follower_agrees_once_its_leader_is_lost():
    led = Leadership()
    assert not led.forbids("b", 1.0, 0.3)
    led.hear("a", 1.0)
    assert led.forbids("b", 1.2, 0.3) and not led.forbids("a", 1.2, 0.3)
    assert not led.forbids("b", 1.3, 0.3)
    led.disconnected("c")
    assert led.forbids("b", 1.2, 0.3)
    led.disconnected("a")
    assert not led.forbids("b", 1.0, 0.3)


def test_r51_joining_members_count_only_where_all_agree():
    asked = PreVote(3)
    asked.begin()
    assert not asked.won
    asked.add("b", 4, joining=True)
    assert not asked.won
    asked.add("c", 1, joining=True)
    assert asked.won and asked.unanimous and asked.term == 4
    asked.begin()
    asked.add("b", 1, joining=False)
    assert asked.won and not asked.unanimous
    half = PreVote(4)
    half.add("b", 1, joining=False)
    assert not half.won


@pytest.mark.parametrize(
    ("term", "index", "is_newer"),
    [(3, 5, True), (2, 9, True), (2, 10, True), (2, 8, False), (1, 20, False)],
)
def test_a_log_that_ends_in_a_later_term_is_newer_whatever_its_length(term, index, is_newer):
    candidate = {"last_log_term": term, "last_log_index": index}
    assert is_up_to_date(candidate, last_index=9, last_term=2) is is_newer


def test_r51_an_earlier_version_greets_without_pre_vote():
    nonce = "0" * 64
    text = f'{{"address":"a","cluster":"c","members":[],"nonce":"{nonce}","version":1}}'
    assert not decode_greeting(text.encode()).pre_vote


@pytest.mark.parametrize("sent", [True, False], ids=["sent its entry", "only stored it"])
@pytest.mark.parametrize("seed", range(3))
def test_r53_a_kill_in_the_first_start_leaves_a_quorum_that_elects(seed, sent, monkeypatch):
    """The third controller starts late; the first leader ends when it has its first entry."""
    sim = Sim(seed, monkeypatch)
    sim.kill(2)
    sim.disks[2] = type(sim.disks[2])()
    first = sim.lead() if sent else -1
    if not sent:
        sim.deaf |= {(0, 1), (1, 0)}
        assert not sim.leaders()
        sim.disks[0].entries = ((b"\x01", 1, 0), (b"\x01", 2, 1))
        sim.disks[0].term, sim.disks[0].voted_for, sim.disks[0].joined = 1, "10.0.0.1:1", True
        first = 0
    sim.kill(first)
    sim.deaf.clear()
    sim.heal()
    leader = sim.lead()
    sim.run(1)
    name = sim.propose(leader)
    assert sim.run(5, lambda: name in sim.acked and sim.converged())


@pytest.mark.parametrize("seed", range(3))
def test_r53_a_node_whose_applied_entries_the_leader_lacks_ends_and_builds_its_state_again(
    seed, monkeypatch
):
    sim = Sim(seed, monkeypatch)
    first = sim.lead()
    for _ in range(3):
        sim.propose(first)
    sim.run(2)
    lead = sim.lead()
    old, behind = (number for number in range(3) if number != lead)
    backup = copy.deepcopy(sim.disks[old])
    sim.isolate(behind)
    for _ in range(3):
        sim.propose(lead)
    sim.run(1)
    sim.isolate(lead)
    sim.kill(old)
    sim.disks[old] = backup
    sim.start(old)
    sim.isolate(lead)
    sim.join(old, behind)
    assert sim.run(30, lambda: any(number != lead for number in sim.leaders()))
    new = next(number for number in sim.leaders() if number != lead)
    sim.propose(new)
    sim.run(1)
    sim.heal()
    assert sim.run(10, lambda: lead in sim.ended)
    sim.heal()
    assert sim.run(10, sim.converged) and not sim.forked()


def test_r53_a_leader_with_a_full_disk_gives_way_and_votes_for_none(monkeypatch):
    sim = Sim(1, monkeypatch)
    leader = sim.lead()
    sim.run(1)
    sim.disks[leader].full = True
    lost = sim.propose(leader)
    assert sim.run(3, lambda: any(number != leader for number in sim.leaders()))
    assert lost not in sim.acked or sim.lost() == []
    name = sim.propose(sim.lead())
    assert sim.run(3, lambda: name in sim.acked)
    sim.run(20)
    assert leader not in sim.leaders()
    sim.disks[leader].full = False
    assert sim.run(5, sim.converged) and sim.lost() == []
