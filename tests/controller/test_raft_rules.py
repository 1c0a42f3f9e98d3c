"""Controllers of two versions side by side: each command is applied by rules that all of them know.

"The next version" has rules of a number more, by which it counts the commands that it carried out.
"""

import asyncio
from typing import Any, Self

import msgspec
import pytest
from raft_cluster import BECOME, Cluster, apply_id

from batonmq.controller.raft.log import Applied, Machine, UnknownRulesError
from batonmq.controller.raft.membership import common_rules
from batonmq.controller.raft.node import RaftLog
from batonmq.controller.rules.commands import (
    RULES_VERSION,
    AnyCommand,
    BecomeController,
    NoteEvent,
    encode,
)
from batonmq.controller.rules.state import ControllerState, Transition

NOW, NEXT = RULES_VERSION, RULES_VERSION + 1


class NextState(ControllerState, frozen=True):
    counted: int = 0

    def apply(self, command: AnyCommand, index: int, rules: int = 0) -> Transition:
        done = super().apply(command, index, rules)
        if rules < NEXT:
            return done
        assert isinstance(done.state, NextState)
        counted = msgspec.structs.replace(done.state, counted=done.state.counted + 1)
        return msgspec.structs.replace(done, state=counted)

    def _under(self, rules: int) -> Self:
        state = super()._under(rules)
        return state if rules >= NEXT else msgspec.structs.replace(state, counted=0)


def next_version() -> Machine:
    return Machine(NextState(), NEXT)


@pytest.mark.parametrize(
    ("others", "in_force", "expected"),
    [
        ((4, 4), 3, 4),
        ((4, 3), 3, 3),
        ((4, 3), 4, 3),
        ((4, 0), 4, 0),
        ((4,), 3, 3),
        ((4,), 4, 4),
        ((3,), 4, 3),
        ((), 3, 3),
        ((), 5, 4),
    ],
)
def test_rules_are_those_of_the_earliest_and_do_not_rise_while_a_member_is_away(
    others, in_force, expected
):
    assert common_rules(4, others, 3, in_force) == expected


def test_a_single_controller_knows_all_members():
    assert common_rules(4, (), 1, 0) == 4


def test_a_command_of_unknown_rules_or_a_snapshot_with_them_is_not_applied():
    ahead = next_version()
    ahead.commit(encode(BECOME), 1)
    entry = encode(apply_id(1), NEXT)
    ahead.commit(entry, 2)
    machine = Machine()
    machine.commit(encode(BECOME), 1)
    before = machine.state
    with pytest.raises(UnknownRulesError, match=f"controllerRulesMax={NOW}"):
        machine.commit(entry, 2)
    with pytest.raises(UnknownRulesError, match=f"rules are {NEXT}"):
        machine.restore(ahead.state.to_snapshot(), 2)
    assert machine.state is before


def test_a_deposed_leader_and_a_new_one_change_no_rules():
    """The former may not know what all members know by now, the latter which rules are in force."""
    state = ControllerState().apply(BECOME, 1).state
    state = state.apply(apply_id(1), 2, NOW).state
    state = state.apply(BecomeController(node="m", nonce="nonce-2"), 3).state
    state = state.apply(apply_id(2), 4, 0).state
    assert (state.controller_epoch, state.rules) == (2, NOW)


def test_a_note_of_no_group_changes_the_rules_and_nothing_else():
    before = ControllerState().apply(BECOME, 1).state
    note = NoteEvent(broker_name="", kind="", node="n0", controller_epoch=1)
    done = before.apply(note, 2, NOW)
    assert not done.result.ok and done.effects == ()
    assert done.state == msgspec.structs.replace(before, applied_index=2, rules=NOW)


class Group:
    """A cluster whose nodes may be of either version."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._count = 0

    @property
    def states(self) -> list[dict[str, Any]]:
        """Of the nodes that are up."""
        return [msgspec.to_builtins(node.state) for node in self.cluster.nodes.values()]

    @property
    def counted(self) -> list[int]:
        """By the nodes of the next version."""
        return [state["counted"] for state in self.states if "counted" in state]

    async def propose(self) -> None:
        """Begins a leadership and carries one command out; all nodes that are up apply both."""
        cluster = self.cluster
        self._count += 1
        become = BecomeController(node="n", nonce=f"become-{self._count}")
        _, leader = await cluster.leader()
        while not isinstance(outcome := await leader.propose(become, 2000), Applied):
            _, leader = await cluster.leader()
        command = msgspec.structs.replace(
            apply_id(self._count), controller_epoch=outcome.result.controller_epoch
        )
        outcome = await leader.propose(command, 5000)
        assert isinstance(outcome, Applied) and outcome.result.ok, outcome
        index = leader.state.applied_index
        nodes = cluster.nodes.values()
        await cluster.until(lambda: all(node.state.applied_index >= index for node in nodes))

    async def settle(self, rules: int) -> None:
        """Proposes until every node has applied a command by `rules`: then all are connected."""
        async with asyncio.timeout(15):
            while {state["rules"] for state in self.states} != {rules}:
                await self.propose()

    async def restart(self, node_id: str, machine: Machine) -> None:
        if node_id in self.cluster.nodes:
            await self.cluster.stop(node_id)
        await self.cluster.start(node_id, machine=machine)

    async def snapshots(self, *node_ids: str, above: int) -> None:
        """Proposes until each of the nodes has a snapshot of a later entry than `above`."""
        async with asyncio.timeout(15):
            nodes = [self.cluster.nodes[node_id] for node_id in node_ids]
            while any(node.status().snapshot_index <= above for node in nodes):
                await self.propose()

    def check_equal(self) -> None:
        """In what both versions record."""
        known = [{k: v for k, v in state.items() if k != "counted"} for state in self.states]
        assert all(state == known[0] for state in known)


def shorten(node: RaftLog) -> None:
    assert node._node is not None
    node._node.transport.snapshot_due = True


async def test_new_rules_begin_when_every_controller_knows_them_and_end_before_the_way_back(
    cluster,
):
    group = Group(cluster)
    await group.settle(NOW)
    for node_id in ("n0", "n1"):
        await group.restart(node_id, next_version())
        await group.settle(NOW)
        await group.propose()
    assert group.counted == [0, 0]
    group.check_equal()

    # The last of the version before is upgraded on a snapshot that it wrote itself.
    shorten(cluster.nodes["n2"])
    await group.snapshots("n2", above=0)
    await group.restart("n2", next_version())
    await group.settle(NEXT)
    group.check_equal()
    assert len(set(group.counted)) == 1 and group.counted[0] > 0

    # A member that is away ends nothing, and one that is of the version before ends itself.
    await cluster.stop("n2")
    await group.propose()
    assert {state["rules"] for state in group.states} == {NEXT}
    await cluster.start("n2")
    await cluster.until(lambda: bool(cluster.fatal))
    assert f"controllerRulesMax={NOW}" in cluster.fatal[0]
    await group.restart("n2", next_version())
    cluster.fatal.clear()

    # The way back: first the rules, then the nodes.
    for node in cluster.nodes.values():
        node.rules_most = NOW
    before = max(state["applied_index"] for state in group.states)
    await group.settle(NOW)
    assert group.counted == [0, 0, 0]
    await group.snapshots("n0", "n1", "n2", above=before)
    for node_id in ("n0", "n1", "n2"):
        await group.restart(node_id, Machine())
        await group.settle(NOW)
        await group.propose()
    group.check_equal()
