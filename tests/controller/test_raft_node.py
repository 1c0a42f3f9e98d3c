"""RaftLog over real sockets: one order on all nodes, honest outcomes, catching up by snapshot.

The hooks under it stand on pysyncobj's private names, so the version and those names are pinned.
"""

import asyncio
import math
import shutil
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pysyncobj
import pytest
from pysyncobj.syncobj import _RAFT_STATE, SyncObj
from pysyncobj.tcp_connection import TcpConnection
from pysyncobj.transport import TCPTransport
from pysyncobj.version import VERSION
from raft_cluster import BECOME, Cluster, apply_id

from batonmq.controller.config import ControllerConfig
from batonmq.controller.raft.log import Applied, NotApplied, Unknown
from batonmq.controller.raft.node import _Node, make_conf
from batonmq.runtime.clock import boot_s


def test_the_pinned_version_still_has_the_names_the_hooks_stand_on():
    assert VERSION == "0.3.17"
    assert pysyncobj.__name__
    for name in ("__onMessageReceived", "__doApplyCommand", "__tryLogCompaction"):
        assert hasattr(SyncObj, f"_SyncObj{name}")
    used = {
        "createJournal",
        "getEncryptor",
        "monotonicTime",
        "Serializer",
        "_SyncObj__raftLog",
        "_SyncObj__raftElectionDeadline",
        "_SyncObj__newAppendEntriesTime",
        "_SyncObj__lastResponseTime",
        "_SyncObj__otherNodes",
        "_SyncObj__transport",
        "_SyncObj__pipeNotifier",
        "_SyncObj__raftState",
    }
    assert _RAFT_STATE.FOLLOWER == 0 and _RAFT_STATE.LEADER == 2
    assert "timeToWait" in SyncObj._onTick.__code__.co_varnames
    assert used <= {*SyncObj.__init__.__code__.co_names}
    assert {"disconnect", "send", "setSockoptKeepalive", "state"} <= vars(TcpConnection).keys()
    for name in ("processRead", "processParseMessage", "trySendBuffer"):
        assert hasattr(TcpConnection, f"_TcpConnection__{name}")
    held = {"_TcpConnection__readBuffer", "_TcpConnection__writeBuffer", "_TcpConnection__socket"}
    assert held <= {*TcpConnection.__init__.__code__.co_names}
    for name in (
        "_connectIfNecessarySingle",
        "_onDisconnected",
        "_onIncomingMessageReceived",
        "_onNewIncomingConnection",
        "_onOutgoingConnected",
        "_onTick",
        "_shouldConnect",
    ):
        assert hasattr(TCPTransport, name)
    assert "_unknownConnections" in TCPTransport.__init__.__code__.co_names


def test_a_connected_node_waits_for_its_deadline_and_not_for_ticks():
    """A deadline is met sooner than by ticks; between heartbeats only messages wake a node."""

    def wait_s(state: int, left_s: float, *, is_apart: bool = False) -> float:
        conf = SimpleNamespace(appendEntriesPeriod=0.1)
        node = SimpleNamespace(
            raft_state=state, transport=SimpleNamespace(is_apart=is_apart), _SyncObj__conf=conf
        )
        of = "newAppendEntriesTime" if state == leader else "raftElectionDeadline"
        setattr(node, f"_SyncObj__{of}", boot_s() + left_s)
        return _Node._wait_s(node, 0.05)

    follower, leader = _RAFT_STATE.FOLLOWER, _RAFT_STATE.LEADER
    assert wait_s(follower, 100) == wait_s(follower, math.inf) == 0.2
    assert 0 < wait_s(follower, -100) < 0.002
    assert 0.1 < wait_s(leader, -100) < 0.102, "what is due leaves in the turn that then waits"
    for state in (follower, leader):
        assert wait_s(state, 0.09) < 0.092
        assert wait_s(state, 100, is_apart=True) == 0.05, "it dials at every tick"
    assert wait_s(_RAFT_STATE.CANDIDATE, 100) == 0.05


@pytest.mark.parametrize(
    ("state", "urgent", "wakes"),
    [
        (_RAFT_STATE.FOLLOWER, True, 1),
        (_RAFT_STATE.FOLLOWER, False, 0),
        (_RAFT_STATE.LEADER, True, 0),
    ],
)
def test_r50_an_urgent_report_of_a_follower_wakes_its_thread(state, urgent, wakes):
    notifier = Mock()
    node = SimpleNamespace(
        transport=SimpleNamespace(), raft_state=state, _SyncObj__pipeNotifier=notifier
    )
    _Node.report(node, 7, frozenset(), urgent)
    assert node.transport.hearing == (7, ()) and notifier.notify.call_count == wakes


def test_settings_are_those_of_the_audit_and_unknown_names_are_refused():
    conf = make_conf(ControllerConfig().raft_timings, "127.0.0.1:1")
    assert conf.appendEntriesBatchSizeBytes == 2**26
    assert conf.connectionTimeout == 1e6
    assert not conf.appendEntriesUseBatch and not conf.useFork and not conf.commandsWaitLeader
    assert conf.leaderFallbackTimeout == conf.raftMinTimeout == 0.3
    assert conf.bindAddress == "127.0.0.1:1"
    with pytest.raises(TypeError, match="flushJournal"):
        make_conf(ControllerConfig().raft_timings, "127.0.0.1:1", flushJournal=True)


async def test_three_nodes_apply_one_order_and_only_the_leader_takes_proposals(cluster):
    leader_id, leader = await cluster.leader()
    assert isinstance(await leader.propose(BECOME, 2000), Applied)
    outcomes = await asyncio.gather(
        *(leader.propose(apply_id(number), 2000) for number in range(1, 6))
    )
    for number, outcome in enumerate(outcomes, 1):
        assert isinstance(outcome, Applied)
        assert (outcome.result.code, outcome.result.broker_id) == (0, number)
    await cluster.until(lambda: all(len(c) == 6 for c in cluster.commits.values()))
    assert len({machine.state.digest() for machine in cluster.machines.values()}) == 1
    indexes = [[c.raft_index for c in commits] for commits in cluster.commits.values()]
    assert indexes[0] == indexes[1] == indexes[2]
    assert indexes[0] == sorted(set(indexes[0]))
    assert await leader.read_barrier(2000)
    assert leader.status().applied_index >= indexes[0][-1]
    for node_id, node in cluster.nodes.items():
        assert node.leader_hint() == leader_id
        if node_id != leader_id:
            assert isinstance(await node.propose(apply_id(1), 2000), NotApplied)
            assert not await node.read_barrier(2000)


async def test_a_minority_never_answers_applied(cluster):
    """Both followers go; what the old leader still takes ends as Unknown, then it leads no more."""
    leader_id, leader = await cluster.leader()
    assert isinstance(await leader.propose(BECOME, 2000), Applied)
    for node_id in [each for each in cluster.nodes if each != leader_id]:
        await cluster.stop(node_id)
    outcome = await leader.propose(apply_id(1), 2000)
    assert isinstance(outcome, Unknown | NotApplied)
    await cluster.until(lambda: not cluster.leading[leader_id])
    assert isinstance(await leader.propose(apply_id(2), 2000), NotApplied)
    assert cluster.machines[leader_id].state.group("broker-a") is None


async def test_a_shortened_log_loses_no_state(cluster):
    """The log is compacted; a node that comes back empty gets the snapshot, then what follows."""
    leader_id, leader = await cluster.leader()
    assert isinstance(await leader.propose(BECOME, 2000), Applied)
    for number in range(1, 9):
        assert isinstance(await leader.propose(apply_id(number), 2000), Applied)
    other = next(each for each in cluster.nodes if each != leader_id)
    await cluster.stop(other)
    assert leader._node is not None
    leader._node.forceLogCompaction()
    async with asyncio.timeout(60):
        while leader._node._getRaftLogSize() > 3:  # noqa: ASYNC110  pysyncobj's own thread
            await asyncio.sleep(0.01)
    shutil.rmtree(cluster.folder / other)
    await cluster.start(other)
    await cluster.until(lambda: any(c.command is None for c in cluster.commits[other]))
    _, leader = await cluster.leader()  # it may have become another one
    assert isinstance(await leader.propose(apply_id(9), 2000), Applied)
    await cluster.agree()
    snapshot = next(c for c in cluster.commits[other] if c.command is None)
    assert snapshot.state.next_broker_id("broker-a") >= 9


async def test_a_command_that_cannot_be_read_ends_the_node(tmp_path):
    """Skipping it would let this node drift from the others."""
    cluster = Cluster(tmp_path, 1)
    try:
        node = await cluster.start("n0")
        await cluster.leader()
        assert node._node is not None
        node._node._commit(b'{"v":99}', callback=lambda *_: cluster._event.set())
        async with asyncio.timeout(5):
            while not cluster.fatal:
                await node.read_barrier(1000)
        assert "cannot apply entry" in cluster.fatal[0]
    finally:
        await cluster.close()


def test_close_leaves_no_descriptor_behind(tmp_path):
    def run_once() -> None:
        coroutine: Coroutine[Any, Any, None] = one_node()
        asyncio.run(coroutine)

    async def one_node() -> None:
        cluster = Cluster(tmp_path, 1)
        node = await cluster.start("n0")
        await cluster.leader()
        assert isinstance(await node.propose(BECOME, 2000), Applied)
        await cluster.close()

    run_once()
    before = len(list(Path("/proc/self/fd").iterdir()))
    run_once()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
