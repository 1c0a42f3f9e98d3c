"""R33 at the controllers: when an election is a planned switch, and what ends one."""

from typing import Any

import pytest

from batonmq.controller.rules.commands import ElectMaster
from batonmq.controller.switch import (
    OUTCOME_MS,
    AskMaster,
    OrdinaryElection,
    PendingSwitches,
    SwitchOutcome,
    is_switch_id,
    plan,
    with_drained,
)
from batonmq.protocol.codes import ResponseCode as Code

NAME = "broker-a"
NATIVE = ((1, "life-1"), (2, "life-2"), (3, "life-3"))


def asking(broker_id: int, **fields: Any) -> ElectMaster:
    fields.setdefault("designate", True)
    return ElectMaster(broker_name=NAME, broker_id=broker_id, **fields)


def planned(script: Any, command: ElectMaster, native: Any = NATIVE) -> object:
    return plan(script.state.group(NAME), command, script.live(), native)


def test_r33_a_living_master_hands_over_to_a_living_member(trio):
    assert planned(trio, asking(2)) == AskMaster(1, "life-1", 1, 2)
    assert planned(trio, asking(2, expected_master_epoch=1)) == AskMaster(1, "life-1", 1, 2)


@pytest.mark.parametrize(
    ("why", "change", "command", "native"),
    [
        ("the group is not known", None, asking(2), NATIVE),
        ("nobody is named", "", asking(0, designate=False), NATIVE),
        ("it is the master already", "", asking(1), NATIVE),
        ("no such replica", "", asking(9), NATIVE),
        ("the group is of another cluster", "", asking(2, cluster_name="Other"), NATIVE),
        ("the master is dead", "die 1", asking(2), NATIVE),
        ("the chosen one is dead", "die 2", asking(2), NATIVE),
        ("not in the set", "shrink 1 3", asking(2), NATIVE),
        ("a Java broker is master", "", asking(2), NATIVE[1:]),
        ("another life of the master has the session", "", asking(2), ((1, "old"), *NATIVE[1:])),
        ("an operator lifts the rules", "", asking(2, unclean=True), NATIVE),
        ("the epoch named has passed", "", asking(2, expected_master_epoch=0), NATIVE),
    ],
)
def test_r33_everything_else_is_an_election_with_its_own_rules(
    script, why, change, command, native
):
    if change is not None:
        script.three_in_sync()
        what, *ids = change.split() or [""]
        if what == "die":
            script.die(*map(int, ids))
        elif what == "shrink":
            assert script.alter(*map(int, ids)).ok
    assert planned(script, command, native) == OrdinaryElection(), why


def test_r33_a_master_that_was_started_again_is_not_asked(trio):
    """It is not master any more (R3), though the session of the process before it is not over."""
    native = (*NATIVE, (1, "life-1b"))
    assert isinstance(planned(trio, asking(2), native), AskMaster)
    trio.die(1)
    assert trio.register(1, incarnation="life-1b").ok
    assert planned(trio, asking(2), native) == OrdinaryElection()


def test_r33_the_chosen_one_wins_though_the_old_master_lives_and_keeps_it_in_the_set(trio):
    """Its own last heartbeat is older than the drained offset: the fenced master vouches (R16)."""
    trio.tell(2, max_offset=900)
    fields = {"designate": True, "expected_master_epoch": 1, "confirm_floor": 1_000}
    refused = trio.elect(2, **fields)
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    elected = trio.elect(2, **fields, live=with_drained(trio.live(), 2, 1_000))
    assert elected.ok
    assert (trio.group.master_broker_id, trio.epochs) == (2, (2, 3))
    assert trio.group.sync_state_set == (1, 2, 3)
    assert trio.group.confirm_floor == 1_000
    # The same request once more, or one of the old epoch, elects nobody.
    again = trio.elect(3, designate=True, expected_master_epoch=1)
    assert again.code is Code.CONTROLLER_FENCED_MASTER_EPOCH


def test_r33_the_old_master_vouches_for_the_chosen_one_only(trio):
    trio.tell(2, max_offset=900)
    trio.tell(3, max_offset=2_000)
    offsets = [seen.max_offset for seen in with_drained(trio.live(), 3, 1_000)]
    assert offsets == [-1, 900, 2_000]


def test_r19_where_replicas_know_of_newer_epochs_an_operator_decides(trio):
    """The master acts in an epoch that the controllers forgot: it would refuse every switch."""
    trio.tell(1, master_epoch=7, sync_state_set_epoch=1)
    assert planned(trio, asking(2)) == OrdinaryElection()


def begun(book: PendingSwitches, script: Any, target: int = 2, now_ms: int = 0) -> str:
    asked = planned(script, asking(target))
    assert isinstance(asked, AskMaster)
    switch_id = book.begin(NAME, asked, f"nonce-{target}", now_ms)
    assert isinstance(switch_id, str) and is_switch_id(switch_id)
    return switch_id


def test_r33_the_next_epoch_answers_a_switch_once(trio):
    book = PendingSwitches()
    switch_id = begun(book, trio)
    assert trio.alter(1, 2).ok  # the set's epoch alone ends nothing
    assert book.applied(trio.group) == []
    assert trio.elect(2, designate=True).ok
    assert book.applied(trio.group) == [SwitchOutcome(switch_id, Code.SUCCESS)]
    assert book.applied(trio.group) == book.expired(NAME, 10**9) == []


def test_r33_somebody_else_elected_meanwhile_is_told(trio):
    book = PendingSwitches()
    begun(book, trio)
    trio.die(1)
    assert trio.elect(3, designate=True).ok
    (ended,) = book.applied(trio.group)
    assert ended.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert ended.reason == "broker 3 was elected meanwhile, in masterEpoch 2"


def test_r33_one_switch_of_a_group_at_a_time(trio):
    book = PendingSwitches()
    first = begun(book, trio)
    asked = planned(trio, asking(3))
    assert isinstance(asked, AskMaster)
    refused = book.begin(NAME, asked, "nonce", 1)
    assert isinstance(refused, SwitchOutcome)
    assert refused.reason == "a switch of broker-a to broker 2 is under way"
    assert book.failed(NAME, "switch:nonce/77", "late words of an older one") == []
    (ended,) = book.failed(NAME, first, "broker 2 does not follow")
    assert (ended.code, ended.reason) == (
        Code.CONTROLLER_ELECT_MASTER_FAILED,
        "broker 2 does not follow",
    )
    assert begun(book, trio, 3) != first


def test_r33_a_master_that_says_nothing_is_not_waited_for_long(trio):
    book = PendingSwitches()
    begun(book, trio)
    assert book.expired(NAME, OUTCOME_MS - 1) == []
    (ended,) = book.expired(NAME, OUTCOME_MS)
    assert "broker 1, the master, did not hand over to broker 2 in 1500 ms" in ended.reason
    assert book.names() == []


def test_r33_a_controller_that_leads_no_more_lets_go(trio):
    book = PendingSwitches()
    begun(book, trio)
    (ended,) = book.gate_closed()
    assert ended.code is Code.CONTROLLER_NOT_LEADER
    assert book.names() == []
