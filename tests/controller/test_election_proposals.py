"""What the leader proposes by what only it has seen: each condition, and each limit."""

from typing import Any

import pytest
from msgspec.structs import replace

from batonmq.controller.rules.commands import ElectMaster, LiveBroker
from batonmq.controller.rules.election import (
    STILL_ANSWERS,
    SUSPECT_WAITS,
    ElectionFacts,
    LastHeard,
    LastSeen,
    lacks_reported,
    last_seen,
    may_propose,
    own_election,
    passes_over,
    with_new_epochs,
)
from batonmq.controller.rules.groups import EPOCH_MAX, BrokerGroup, ReplicaRecord


def made(master_epoch: int = 1, *, log_epoch: int = 1, **fields: Any) -> BrokerGroup:
    """Replicas 1 to 3 with logs of that epoch; 1 leads, unless no election is recorded (0)."""
    end = 100 if log_epoch >= 0 else 0
    group = BrokerGroup(
        "c",
        "broker-a",
        next_broker_id=4,
        replicas=tuple(
            ReplicaRecord(n, "", f"h{n}", "", f"life-{n}", "", False, log_epoch, end, end)
            for n in (1, 2, 3)
        ),
        joined_ms=5,
    )
    if master_epoch:
        fields = {"master_broker_id": 1, "master_incarnation": "life-1"} | fields
        fields = {"sync_state_set": (1, 2, 3), "sync_state_set_epoch": 1} | fields
    return replace(group, master_epoch=master_epoch, **fields)


def alive(*ids: int, **seen: int) -> tuple[LiveBroker, ...]:
    facts = {"epoch": 1, "max_offset": 100, "confirm_offset": 100, "master_epoch": 1} | seen
    return tuple(LiveBroker(n, f"life-{n}", **facts) for n in ids)


def elect(live: tuple[LiveBroker, ...], broker_id: int = 0, **fields: Any) -> ElectMaster:
    fields = {"designate": bool(broker_id)} | fields
    return ElectMaster(broker_name="broker-a", broker_id=broker_id, live=live, **fields)


RECORDED, FORGOTTEN, FRESH = made(), made(0), made(0, log_epoch=-1)
DEPOSED = replace(RECORDED, master_broker_id=0)
SUSPECT = replace(DEPOSED, replicas=tuple(replace(one, suspect=True) for one in DEPOSED.replicas))
SET_OF_TWO = made(sync_state_set=(1, 2))
RESTARTED = replace(RECORDED, master_incarnation="life-1 before")
UNREPORTED = LiveBroker(3, "life-3")
AWAY = tuple(LastSeen(n, f"h{n}", confirm_offset=100) for n in (1, 2))


@pytest.mark.parametrize(
    ("group", "command", "facts", "refusal"),
    [
        (RECORDED, elect(alive(2, 3)), {}, ""),
        # R19: a session that has reported nothing yet, unless an operator accepts a loss.
        (RECORDED, elect((*alive(2), UNREPORTED)), {}, "replicas [3] have a session, and have not"),
        (RECORDED, elect((*alive(2), UNREPORTED), 2, unclean=True), {"members": ()}, ""),
        (FRESH, elect((*alive(2), UNREPORTED), 2, unclean=True), {}, ""),
        (RECORDED, elect((*alive(2), replace(UNREPORTED, incarnation=""))), {}, ""),  # remoting
        (RECORDED, elect((*alive(2), replace(UNREPORTED, max_offset=0))), {}, ""),
        (RECORDED, elect((*alive(2), replace(UNREPORTED, master_epoch=0))), {}, ""),
        # R49
        (FORGOTTEN, elect(alive(2, max_offset=99), 2), {}, "only an unclean election takes it"),
        # R17: only a suspect waits.
        (SUSPECT, elect(alive(1, 2, 3)), {"suspect_wait_ms": 1}, SUSPECT_WAITS),
        (SUSPECT, elect(alive(1, 2, 3)), {"suspect_wait_ms": 0}, ""),
        (RECORDED, elect(alive(2, 3)), {"suspect_wait_ms": 1}, ""),
        (made(0, log_epoch=0), elect(alive(1), 1, unclean=True), {"suspect_wait_ms": 1}, ""),
        # R7: without members there is no master whose lease has to end.
        (SET_OF_TWO, elect(alive(3), 3, unclean=True), {"unclean_wait_ms": 1}, STILL_ANSWERS),
        (FRESH, elect(alive(3), 3, unclean=True), {"unclean_wait_ms": 1}, ""),
        # R44: what is cut above the log of the named replica.
        (SET_OF_TWO, elect(alive(4, 3), 3, unclean=True), {}, "3 ends at 100: whatever"),
        (
            SET_OF_TWO,
            elect((*alive(4, max_offset=7), *alive(3)), 3, unclean=True),
            {"confirmed": 101},
            "3 ends at 100: 1 confirmed bytes above that are cut",
        ),
        # A first election without a possible winner: the rules refuse it.
        (FRESH, elect(()), {}, ""),
    ],
)
def test_what_the_leader_admits(group, command, facts, refusal):
    defaults = {"suspect_wait_ms": 0, "unclean_wait_ms": 0, "members": AWAY, "confirmed": -1}
    admitted = may_propose(group, command, ElectionFacts(joined_for_ms=9, **(defaults | facts)))
    if refusal:
        assert isinstance(admitted, str) and refusal in admitted
    elif group.master_epoch:
        assert admitted is command
    else:
        assert admitted == replace(command, now_ms=5 + 9)


@pytest.mark.parametrize(
    ("group", "live", "facts", "expected"),
    [
        (RECORDED, alive(2, 3), {}, (True, False)),
        (RECORDED, alive(2, 3), {"confirm_floor": 101}, (False, False)),
        (RECORDED, alive(2, 3), {"confirm_floor": 101, "master_died": True}, (True, False)),
        (RECORDED, alive(2, 3), {"confirm_floor": 101, "heard_elsewhere": True}, None),
        (RECORDED, alive(2, 3, master_epoch=2), {}, (False, True)),
        (SUSPECT, alive(1, 2, 3), {"suspect_wait_ms": 1}, None),
        (SUSPECT, alive(1, 2, 3), {}, (True, False)),
        (DEPOSED, alive(2), {"suspect_wait_ms": 1}, (True, False)),
        (FRESH, (), {}, None),
    ],
)
def test_what_the_leader_does_by_itself(group, live, facts, expected):
    defaults = {"confirm_floor": -1, "suspect_wait_ms": 0, "heard_elsewhere": False}
    own = own_election(group, live, **({"master_died": False} | defaults | facts))
    assert (own and (own.propose, own.needs_operator)) == expected


@pytest.mark.parametrize(
    ("reported", "given"),
    [(EPOCH_MAX - 10, EPOCH_MAX - 1), (EPOCH_MAX - 1, EPOCH_MAX - 1), (EPOCH_MAX, EPOCH_MAX)],
)
def test_r47_epochs_above_those_of_restored_controllers_stay_epochs(reported, given):
    """The rules add one to what the named replica reports, and to what no other one may exceed."""
    command = elect(alive(1, 2, master_epoch=reported), 2)
    live = with_new_epochs(RECORDED, command, 4_711).live
    assert live == (*alive(1, master_epoch=reported), *alive(2, master_epoch=given))


def test_r47_an_election_of_the_leader_itself_skips_no_epochs():
    command = elect(alive(1, 2, master_epoch=9))
    assert with_new_epochs(RECORDED, command, 4_711) is command
    first = elect(alive(1, epoch=-1, master_epoch=-1), 1)
    assert with_new_epochs(FRESH, first, 4_711) is first, "a new group begins with epoch 1"


def test_r49_only_a_replica_named_by_an_operator_where_the_record_is_stale_is_compared():
    stale = alive(2, 3, epoch=2, master_epoch=2, confirm_offset=200)
    behind = (*stale[1:], *alive(2))
    assert lacks_reported(RECORDED, elect(behind, 2))
    assert not lacks_reported(RECORDED, elect(behind, 2, designate=False))
    assert not lacks_reported(RECORDED, elect((*alive(2), *alive(3, confirm_offset=200)), 2))


@pytest.mark.parametrize(
    ("group", "broker_id", "heard", "lives", "ended"),
    [
        (RECORDED, 1, LastHeard(*alive(1), 50), True, ""),
        (RECORDED, 1, LastHeard(*alive(1), 50), False, ""),
        (RECORDED, 1, LastHeard(*alive(1), 50, goodbye=True), False, "it was stopped"),
        (RESTARTED, 1, LastHeard(), False, "it was started again"),
        (RECORDED, 2, LastHeard(*alive(2), 600_000), False, ""),
        (RECORDED, 2, LastHeard(*alive(2), 50), True, "it lives, and hears of the election"),
        (DEPOSED, 2, LastHeard(*alive(2)), False, "it accepted masterEpoch 1"),
        (FORGOTTEN, 2, LastHeard(*alive(2)), False, ""),
    ],
)
def test_r44_what_proves_that_a_member_acks_nothing_to_the_old_master(
    group, broker_id, heard, lives, ended
):
    """The old master itself proves nothing by living; its slaves do, and any process by ending."""
    assert last_seen(group, group.replica(broker_id), heard, lives=lives).ended == ended


@pytest.mark.parametrize(
    ("seen", "end"), [(None, 100), (UNREPORTED, 100), (LiveBroker(3, "life-3", max_offset=0), 0)]
)
def test_r44_the_registration_says_where_a_log_ends_until_a_heartbeat_does(seen, end):
    found = last_seen(RECORDED, RECORDED.replica(3), LastHeard(seen), lives=False)
    assert (found.max_offset, found.silent_ms) == (end, -1)


def test_r44_who_may_continue_without_controllers():
    assert passes_over(SET_OF_TWO, elect(alive(3), 3, unclean=True), AWAY) == AWAY
    assert not passes_over(SET_OF_TWO, elect(alive(2), 2, unclean=True), AWAY), "it is clean"
    # Where no election is recorded the named replica may be one of them, which ends by winning.
    ended = (LastSeen(1, "h1", ended="it lives"), AWAY[1])
    assert passes_over(FORGOTTEN, elect(alive(1), 1, unclean=True), ended) == AWAY[1:]
