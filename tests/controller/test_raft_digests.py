"""States are compared between nodes: a difference is an alarm, and so is a log that grows too long.

The lead is handed over at a clean stop.
"""

import asyncio

from raft_cluster import BECOME, apply_id, started

from batonmq.controller.raft import log as raft_log
from batonmq.controller.raft import node
from batonmq.controller.raft.log import _DIGEST_INTERVAL_S, Applied, DigestWatch, RaftProblems
from batonmq.controller.rules.commands import encode
from batonmq.controller.rules.state import RULES


class State:
    def __init__(self, digest: str) -> None:
        self._digest = digest

    def digest(self) -> str:
        return self._digest


def watch_at(index: int, digest: str) -> tuple[DigestWatch, RaftProblems]:
    problems = RaftProblems()
    watch = DigestWatch(problems)
    watch.applied(index, State(digest))
    return watch, problems


def test_a_difference_is_an_alarm_until_a_later_comparison_agrees():
    watch, problems = watch_at(7, "a" * 64)
    assert watch.compare("n1", 7, "b" * 64) == "a" * 64
    ((subject, text),) = problems.texts().items()
    assert subject == "state of n1" and "differs from this node's after entry 7" in text
    watch.applied(8, State("c" * 64))
    assert watch.compare("n1", 8, "c" * 64) == "c" * 64
    assert problems.texts() == {}


def test_a_node_that_is_behind_compares_when_it_is_there_and_one_that_is_past_does_not():
    watch, problems = watch_at(7, "a")
    assert watch.compare("n1", 9, "x") is None
    watch.applied(8, State("b"))
    assert problems.texts() == {}
    watch.applied(9, State("c"))
    assert list(problems.texts()) == ["state of n1"]
    assert watch.compare("n2", 5, "never kept") is None
    assert list(problems.texts()) == ["state of n1"]


def test_states_of_other_rules_are_not_compared():
    """In a rolling upgrade the versions record different fields: that is no alarm, and what was
    one before is over."""
    for theirs in ("b" * 64, f"1:{'b' * 64}"):
        watch, problems = watch_at(7, f"2:{'a' * 64}")
        watch.compare("n1", 7, f"2:{'b' * 64}")
        assert problems.texts()
        watch.compare("n1", 7, theirs)
        assert problems.texts() == {}


def test_it_is_sent_when_something_changed_and_not_more_often():
    watch, _ = watch_at(7, "a")
    assert watch.due(100.0) == (7, "a")
    assert watch.due(200.0) is None, "nothing changed"
    watch.applied(8, State("b"))
    assert watch.due(200.0) == (8, "b")
    watch.applied(9, State("c"))
    assert watch.due(200.0 + _DIGEST_INTERVAL_S / 2) is None
    assert watch.due(200.0 + _DIGEST_INTERVAL_S) == (9, "c")
    assert watch.report.index == 9


async def test_nodes_that_hold_other_states_say_so(tmp_path, monkeypatch):
    """One node's state is changed behind its log's back; both it and the leader tell of it."""
    monkeypatch.setattr(raft_log, "_DIGEST_INTERVAL_S", 0.02)
    async with started(tmp_path) as cluster:
        leader_id, leader = await cluster.leader()
        assert isinstance(await leader.propose(BECOME, 2000), Applied)
        await cluster.agree()
        wrong = next(each for each in cluster.nodes if each != leader_id)
        machine = cluster.machines[wrong]
        commit = machine.commit(encode(apply_id(1, "only-here")), 99)
        assert commit.result.ok
        number = 0
        async with asyncio.timeout(10):
            while not all(
                any("state of" in problem for problem in cluster.nodes[each].status().problems)
                for each in (leader_id, wrong)
            ):
                number += 1
                await leader.propose(apply_id(number), 2000)
                await asyncio.sleep(0.03)
        status = leader.status()
        assert status.digest_index > 0 and status.state_digest.startswith(f"{RULES}:")


async def test_a_log_above_its_limit_is_an_alarm(tmp_path, monkeypatch):
    async with started(tmp_path, count=1) as cluster:
        leader_id, leader = await cluster.leader()
        assert isinstance(await leader.propose(BECOME, 2000), Applied)
        assert cluster.nodes[leader_id].status().problems == ()
        monkeypatch.setattr(node, "LOG_ALARM_BYTES", 50)
        (problem,) = cluster.nodes[leader_id].status().problems
        assert problem.startswith("the Raft log has")


async def test_a_lead_that_comes_back_is_not_handed_over_again(tmp_path):
    """Two nodes that both offered theirs would pass it to and fro until the offers run out."""
    async with started(tmp_path, count=2) as cluster:
        _, first = await cluster.leader()
        assert first.in_touch()
        assert await first.hand_over(60_000)
        assert not first.in_touch()
        await cluster.until(lambda: any(cluster.leading.values()))
        _, second = await cluster.leader()
        assert await second.hand_over(60_000)
        await cluster.until(lambda: any(cluster.leading.values()))
        _, again = await cluster.leader()
        assert again is first
        for _ in range(50):
            assert await first.read_barrier(2000)
