"""A folder belongs to one quorum: no node leads alone because it was told of fewer members."""

import asyncio

import pytest

from batonmq.controller.config import Peer
from batonmq.controller.raft.membership import (
    MembersChangedError,
    Membership,
    check_members,
    keep_log,
)
from batonmq.protocol.errors import BatonError
from tests.shared.failing_disk import failing


def membership(*ids: str, cluster: str = "c") -> Membership:
    return Membership(cluster, tuple(f"{each}@host-{each}:1" for each in ids))


def test_another_list_on_a_kept_folder_is_refused_by_name(tmp_path):
    check_members(tmp_path, membership("n0", "n1", "n2"))
    check_members(tmp_path, membership("n0", "n1", "n2"))
    for other in (
        membership("n1"),
        membership("n0", "n1"),
        membership("n0", "n1", "n2", "n3", "n4"),
        membership("n0", "n1", "n2", cluster="d"),
    ):
        with pytest.raises(MembersChangedError, match=r"quorum of n0, n1, n2 \(cluster 'c'\)"):
            check_members(tmp_path, other)


def test_r53_an_operator_changes_one_member_at_a_time(tmp_path):
    """As the error says. Of three, {n0, n1} may have the newest entry: {n2, n3} of a list with
    two new members would be a majority without it."""
    three, four = membership("n0", "n1", "n2"), membership("n0", "n1", "n2", "n3")
    check_members(tmp_path, three)
    with pytest.raises(MembersChangedError, match=r"one at a time.*rename this file to (\S+) on"):
        check_members(tmp_path, four)
    (tmp_path / "members").rename(tmp_path / "members.change")
    for other in (
        membership("n0", "n2", "n3"),
        membership("n0", "n1", "n2", "n3", "n4"),
        membership("n0"),
        membership("n0", "n1", "n2", "n3", cluster="d"),
    ):
        with pytest.raises(MembersChangedError, match=r"members\.change: this node's log"):
            check_members(tmp_path, other)
    with failing("replace * EIO"), pytest.raises(OSError):
        check_members(tmp_path, four)
    with pytest.raises(MembersChangedError):
        check_members(tmp_path, membership("n0"))
    check_members(tmp_path, four)
    assert not (tmp_path / "members.change").exists(), "it allows one change"
    check_members(tmp_path, four)
    with pytest.raises(MembersChangedError):
        check_members(tmp_path, three)


def test_the_name_of_the_log_outlives_restarts_and_a_change_of_members(tmp_path):
    two, three = membership("n0", "n1"), membership("n0", "n1", "n2")
    check_members(tmp_path, two)
    with failing("replace members ENOSPC once"):
        for name in ("log-1", "log-1", "another"):
            keep_log(tmp_path, two, name)
    assert two.log == "log-1"
    (tmp_path / "members").rename(tmp_path / "members.change")
    for _ in range(2):
        three.log = ""
        check_members(tmp_path, three)
        assert three.log == "log-1"


def test_a_member_may_move_to_another_address(tmp_path):
    check_members(tmp_path, membership("n0", "n1", "n2"))
    check_members(tmp_path, Membership("c", ("n0@new:7", "n1@host-n1:1", "n2@host-n2:1")))


def test_a_file_that_is_no_list_is_named(tmp_path):
    (tmp_path / "members").write_bytes(b"{")
    with pytest.raises(BatonError, match="members: no list of members"):
        check_members(tmp_path, membership("n0"))


async def test_g2_a_node_told_only_of_itself_does_not_lead_beside_the_others(cluster):
    """1 a quorum of three has a log. 2 one of them is started with a list of one: it would be a
    majority by itself. 3 It is refused; with the old list it is a member again."""
    await cluster.agree()
    first, _ = await cluster.leader()
    await cluster.stop(first)
    alone: tuple[Peer, ...] = tuple(p for p in cluster.peers if p.node_id == first)
    with pytest.raises(MembersChangedError):
        await cluster.start(first, peers=alone)
    del cluster.nodes[first], cluster.machines[first]
    await cluster.start(first)
    await asyncio.wait_for(cluster.agree(), 20)
