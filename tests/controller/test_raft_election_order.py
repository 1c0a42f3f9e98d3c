"""The followers of a killed leader elect its heir at once, without splitting their votes."""

import asyncio

from batonmq.controller.raft.election_messages import (
    PAUSE_S,
    STEP_S,
    ElectionOrder,
    election_window_ms,
)

MEMBERS = ["h:1", "h:2", "h:3"]


def test_heirs_stand_one_after_the_other():
    for leader in MEMBERS:
        heirs = [member for member in MEMBERS if member != leader]
        stands = [ElectionOrder().stand_at(5.0, heir, leader, MEMBERS) for heir in heirs]
        assert stands == [5.0, 5.0 + STEP_S]


def test_members_stand_for_election_in_windows_of_their_own():
    windows = [election_window_ms(each, MEMBERS, 300, 600) for each in MEMBERS]
    assert windows == [(300, 350), (400, 450), (500, 550)]
    assert election_window_ms("h:1", ["h:1"], 300, 600) == (300, 450)


def test_r6_a_link_that_breaks_again_and_again_moves_the_lead_once_in_a_while():
    """It breaks every second; who leads at one end loses the lead to the other end."""
    ends = {"h:1": ElectionOrder(), "h:2": ElectionOrder()}
    leader, moves = "h:1", []
    for second in range(1, 30):
        follower = "h:2" if leader == "h:1" else "h:1"
        if ends[follower].stand_at(float(second), follower, leader, MEMBERS) is not None:
            leader = follower
            moves.append(second)
    assert moves == [1, 2, 11, 12, 21, 22]


def test_the_heir_that_is_killed_soon_after_is_succeeded_at_once_too():
    order = ElectionOrder()
    assert order.stand_at(1.0, "h:1", "h:2", MEMBERS) == 1.0
    assert order.stand_at(2.0, "h:1", "h:3", MEMBERS) == 2.0
    assert order.stand_at(3.0, "h:1", "h:3", MEMBERS) is None
    assert order.stand_at(1.0 + PAUSE_S, "h:1", "h:2", MEMBERS) == 1.0 + PAUSE_S


async def test_a_leader_that_is_gone_is_succeeded_long_before_the_election_timeout(cluster):
    """With time-outs of a minute the cluster would stand still for one, were it not for the
    closing of the leader's connections."""
    await cluster.agree()
    first, _ = await cluster.leader()
    followers = {name: log._node for name, log in cluster.nodes.items() if name != first}
    for node in followers.values():
        assert node is not None
        conf = node._SyncObj__conf
        conf.raftMinTimeout, conf.raftMaxTimeout = 60.0, 61.0
        began = node._SyncObj__raftElectionDeadline
        while node._SyncObj__raftElectionDeadline < began + 30:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the next heartbeat puts it there
    await cluster.stop(first)
    heir, _ = await cluster.leader()
    addresses = {peer.node_id: peer.raft_address for peer in cluster.peers}
    assert heir == min(followers, key=lambda name: addresses[name])
