"""`mqctl migrate`: what stands in the way of each step, and what is left to do."""

import dataclasses

import pytest

from batonmq.mqctl.migration import (
    BATONMQ,
    JAVA,
    Member,
    MigratedGroup,
    lacking_offsets,
    lacking_tables,
    lasting_problems,
    next_steps,
    passing_problems,
    problems,
    problems_of_leave,
    problems_of_switch,
    too_few_without,
)

ALL_ACK = {"allAckInSyncStateSet": "true", "mappedFileSizeCommitLog": "1073741824"}


def member(broker_id: int, kind: str, **changes: object) -> Member:
    settings = ALL_ACK if kind == JAVA else {"mappedFileSizeCommitLog": "1073741824"}
    made = Member(broker_id, f"h{broker_id}:1", True, True, broker_id == 1, kind, "V", settings)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def group(*members: Member, own_controllers: bool = True) -> MigratedGroup:
    return MigratedGroup("broker-a", members, own_controllers)


def test_each_thing_in_the_way_is_named_with_what_to_do() -> None:
    assert problems(group(member(1, JAVA), member(2, JAVA))) == []
    bad = group(
        member(1, JAVA, settings={"mappedFileSizeCommitLog": "1048576"}, is_master=False),
        member(2, "", alive=False, settings={}),
        member(3, BATONMQ),
        own_controllers=False,
    )
    controllers, sizes, acks, master, dead = problems(bad)
    assert "controllers are RocketMQ's" in controllers
    assert [*lasting_problems(bad), *passing_problems(bad)] == problems(bad)
    assert master.startswith("it has no master")
    assert dead == "broker 2 at h2:1 is in the SyncStateSet, but does not live"
    assert "1048576 at broker 1" in sizes and "1073741824 at broker 3" in sizes
    assert acks.endswith("`mqadmin updateBrokerConfig -b h1:1 -k allAckInSyncStateSet -v true`")
    silent = group(member(1, "", settings={}))
    assert problems(silent) == ["its master, broker 1 at h1:1, does not answer"]


def test_a_switch_needs_a_living_member_of_the_set() -> None:
    java, ours = member(1, JAVA), member(2, BATONMQ, in_sync=False)
    (why,) = problems_of_switch(group(java, ours), ours)
    assert "not in the SyncStateSet: mqctl migrate join -bn broker-a -b 2 waits" in why
    ours = member(2, BATONMQ)
    assert problems_of_switch(group(java, ours), ours) == []


def test_nobody_leaves_who_leads_or_leaves_too_few() -> None:
    java, ours, other = member(1, JAVA), member(2, BATONMQ), member(3, BATONMQ)
    assert "is the master" in problems_of_leave(group(java, ours, other), java)[0]
    few = too_few_without(group(java, ours), ours)
    assert few == "without broker 2 at h2:1 only broker 1 at h1:1 would be in sync"
    assert too_few_without(group(java, ours, other), ours) == ""
    silent = dataclasses.replace(ours, kind="", settings={})
    assert too_few_without(group(java, ours), silent) == few, "it does not replace itself"
    dead = dataclasses.replace(other, alive=False)
    assert too_few_without(group(java, ours, dead), ours) == few, "a dead one replaces nobody"
    # A dead one that still stands in the set is who leaves.
    dead = member(3, BATONMQ, alive=False)
    assert problems_of_leave(group(java, ours, dead), dead) == []


@pytest.mark.parametrize("replicas", [2, 3])
def test_the_steps_lead_there_with_two_in_sync_at_all_times(replicas: int) -> None:
    """Each plan is followed step by step, and made anew after each: they agree."""
    now = group(*(member(i, JAVA) for i in range(1, replicas + 1)))
    done: list[str] = []
    plan = next_steps(now, BATONMQ)
    wanted: int | None = None
    while steps := next_steps(now, BATONMQ, wanted):
        step = steps[0]
        words = step.split()
        if step.startswith("start"):
            new_id = max(m.broker_id for m in now.members) + 1
            now = group(*now.members, member(new_id, BATONMQ))
        elif "switch" in step:
            to = now.member(words[words.index("-b") + 1])
            assert to is not None and problems_of_switch(now, to) == []
            now = group(*(dataclasses.replace(m, is_master=m == to) for m in now.members))
        else:
            assert "leave" in step
            who = now.member(words[words.index("-b") + 1].rstrip(","))
            assert who is not None and problems_of_leave(now, who) == []
            assert too_few_without(now, who) == ""
            now = group(*(m for m in now.members if m != who))
            if "--replicas" in words:
                wanted = int(words[words.index("--replicas") + 1].rstrip(","))
        assert len(now.in_sync()) >= 2
        done.append(words[3] if step.startswith("start") else words[2])
    assert {m.kind for m in now.members} == {BATONMQ}
    assert len(now.members) == replicas
    assert len(plan) == len(done)
    assert next_steps(now, BATONMQ) == [], "and nothing more, whatever number is given"
    address = dataclasses.replace(member(9, BATONMQ), address=now.members[0].address)
    twice = group(dataclasses.replace(now.members[0], alive=False), address)
    assert twice.member(address.address) == address, "the living one of two with one address"
    # And the way back begins likewise.
    assert next_steps(now, JAVA)[0].startswith("start a Java broker")


def test_tables_and_offsets_that_a_member_does_not_have_yet() -> None:
    assert lacking_tables("topic", {"a": (8, 8)}, {"a": (8, 8), "more": (1, 1)}) == ""
    assert (
        lacking_tables("topic", {"a": (8, 8), "b": (4, 4)}, {"a": (4, 4)}) == "topic a and 1 more"
    )
    begun = {"T@g": {0: 10, 1: 5}}
    assert lacking_offsets(begun, begun, {"T@g": {0: 10, 1: 4}}) == "the offsets of T@g"
    assert lacking_offsets(begun, begun, {"T@g": {0: 12, 1: 5}}) == ""
    set_back = {"T@g": {0: 10, 1: 2}}
    assert lacking_offsets(begun, set_back, {"T@g": {0: 10, 1: 2}}) == ""
