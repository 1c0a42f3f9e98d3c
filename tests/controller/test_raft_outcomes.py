"""What `RaftLog` tells proposers, the gate and listeners, over a stand-in for pysyncobj's node."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pysyncobj.config import FAIL_REASON
from raft_cluster import BECOME, free_peers

from batonmq.controller.config import RaftTimings
from batonmq.controller.raft.log import Applied, Commit, Machine, NotApplied, Unknown
from batonmq.controller.raft.node import RaftLog, RaftSettings, _Node
from batonmq.controller.rules.commands import encode
from batonmq.controller.rules.state import ControllerState
from batonmq.runtime.clock import boot_s

TIMINGS = RaftTimings(election_min_ms=300, election_max_ms=600, heartbeat_ms=90, tick_ms=20)


class StandIn:
    """Takes proposals, and ends them with `answer`; a majority answered last at `heard_s`."""

    def __init__(self) -> None:
        self.proposed: list[tuple[bytes, Callable[[Any, int], None]]] = []
        self.offers_s: list[float] = []
        self.heard_s = boot_s()
        self.leader: Any = None
        self.transport = SimpleNamespace(
            hand_over=lambda offer_s, to: self.offers_s.append(offer_s)
        )

    def _commit(self, raw: bytes, callback: Callable[[Any, int], None]) -> None:
        self.proposed.append((raw, callback))

    def answer(self, result: Any, reason: int) -> None:
        self.proposed.pop(0)[1](result, reason)

    def majority_answered_since(self, since_s: float) -> bool:
        return self.heard_s > since_s

    def _getLeader(self) -> Any:
        return self.leader

    def destroy_synchronous(self) -> None: ...

    def close_pipe(self) -> None: ...


@contextlib.asynccontextmanager
async def leading() -> AsyncIterator[tuple[RaftLog, StandIn]]:
    peers = free_peers(3)
    log = RaftLog(RaftSettings(peers[0], peers, TIMINGS, Path("unused")), Machine())
    log._loop = asyncio.get_running_loop()
    log._node = node = StandIn()
    log._role_changed(True)
    yield log, node


async def proposing(log: RaftLog, timeout_ms: int = 60_000) -> "asyncio.Task[Any]":
    task = asyncio.create_task(log.propose(BECOME, timeout_ms))
    await asyncio.sleep(0)
    return task


NEVER = ["QUEUE_FULL", "MISSING_LEADER", "REQUEST_DENIED", "NOT_LEADER"]
PERHAPS = ["LEADER_CHANGED", "DISCARDED", "UNKNOWN_OUTCOME"]


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [*((name, NotApplied) for name in NEVER), *((name, Unknown) for name in PERHAPS)],
)
async def test_r11_a_failed_proposal_is_refused_only_where_it_never_enters_a_log(reason, outcome):
    async with leading() as (log, node):
        task = await proposing(log)
        node.answer(None, getattr(FAIL_REASON, reason))
        assert isinstance(await task, outcome)


async def test_r11_a_proposal_that_nobody_answers_may_still_be_applied():
    async with leading() as (log, node):
        assert isinstance(await log.propose(BECOME, 1), Unknown)
        node.answer("late", FAIL_REASON.SUCCESS)  # reaches nobody


async def test_r11_what_waits_when_the_lead_is_lost_may_still_be_applied():
    async with leading() as (log, node):
        task = await proposing(log)
        log._role_changed(False)
        assert isinstance(await task, Unknown)
        assert isinstance(await log.propose(BECOME, 60_000), NotApplied)
        assert len(node.proposed) == 1, "what is proposed without the lead goes nowhere"


async def test_what_waits_when_the_node_is_closed_ends_at_once():
    async with leading() as (log, _):
        task = await proposing(log)
        await log.close()
        assert task.done() and isinstance(await task, Unknown)


class Journal(list[tuple[bytes, int, int]]):
    def join(self) -> None: ...


async def test_g7_a_first_lead_waits_until_its_first_entry_is_committed():
    """Commands may be acknowledged from then on: see `pre_vote`."""
    async with leading() as (log, _):
        log._role_changed(False)
        roles: list[bool] = []
        log.on_role(roles.append)
        journal: Any = Journal([(b"\x01", 1, 0)])
        log._journal = journal
        log._on_state_changed(0, 2)
        await asyncio.sleep(0)
        assert roles == [] and log._first_lead
        journal.append((b"command", 2, 1))
        log._on_state_changed(0, 2)
        await asyncio.sleep(0)
        assert roles == [True]


async def test_a_leader_is_named_by_its_id():
    async with leading() as (log, node):
        for peer in log._settings.peers:
            node.leader = SimpleNamespace(id=peer.raft_address)
            assert log.leader_hint() == peer.node_id


async def test_no_lead_begins_after_the_end():
    async with leading() as (log, _):
        log._role_changed(False)
        await log.close()
        roles: list[bool] = []
        log.on_role(roles.append)
        log._role_changed(True)
        assert roles == []


async def test_a_committed_proposal_is_answered_by_the_state_machine():
    async with leading() as (log, node):
        task = await proposing(log)
        node.answer("result", FAIL_REASON.SUCCESS)
        assert await task == Applied("result")


async def test_r8_a_leader_is_in_touch_for_the_shortest_election_time():
    """After that another node may lead already."""
    async with leading() as (log, node):
        assert log.in_touch()
        node.heard_s = boot_s() - (TIMINGS.election_min_ms + 1) / 1000
        assert not log.in_touch()
        node.heard_s = boot_s()
        log._role_changed(False)
        assert not log.in_touch(), "the followers of another leader"


@pytest.mark.parametrize("nodes, needed", [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_r8_in_touch_means_that_more_than_half_answered(nodes, needed):
    """The leader itself is one of them; an answer of that very moment is too old."""
    others = [f"n{n}" for n in range(1, nodes)]
    for answered in range(nodes):
        node: Any = object.__new__(_Node)
        node._SyncObj__otherNodes = set(others)
        answered_s = {other: 5.1 if n < answered else 5.0 for n, other in enumerate(others)}
        node._SyncObj__transport = SimpleNamespace(answered_s=answered_s)
        assert node.majority_answered_since(5.0) == (answered >= needed)


async def test_a_hand_over_lasts_until_the_lead_has_moved():
    async with leading() as (log, node):
        for _ in range(2):
            task = asyncio.create_task(log.hand_over(60_000))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
            log._role_changed(False)
            assert await task
            log._role_changed(True)
        assert node.offers_s == [60.0, 60.0]
        assert not await log.hand_over(1)


async def test_listeners_see_the_state_after_the_command_that_they_are_told_of():
    async with leading() as (log, _):
        seen = []
        log.on_applied(lambda commit: seen.append((commit.raft_index, log.state is commit.state)))
        commit: Commit = Machine().commit(encode(BECOME), 7)
        log._committed(commit)
        assert seen == [(7, True)]


async def test_states_of_before_a_snapshot_are_compared_with_nobodys():
    """They are of a history that this node may have had alone."""
    async with leading() as (log, _):
        earlier = Machine().commit(encode(BECOME), 5).state
        log._digests.applied(5, earlier)
        assert log._digests.compare("n1", 5, earlier.digest()) == earlier.digest()
        log._restore(ControllerState().to_snapshot(), 7)
        assert log._digests.compare("n1", 5, "another one") is None
        assert log._problems.texts() == {}
