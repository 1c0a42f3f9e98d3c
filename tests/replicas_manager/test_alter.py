"""What a master asks of the controllers about its set, and what it does not even ask (R11, R12)."""

import pytest

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.alter import AlterOutcome, OpenAlter, alter_for

VIEW = RoleView(
    "c",
    "b",
    master_broker_id=1,
    master_epoch=3,
    sync_state_set_epoch=5,
    sync_state_set=frozenset({1, 2}),
    replicas=(
        Replica(1, incarnation="one"),
        Replica(2, incarnation="two"),
        Replica(3, incarnation="three"),
        Replica(4, incarnation="four", learner=True),
    ),
)


def asked(*members: int) -> OpenAlter | ev.ProposalRefused:
    proposal = ev.ProposalRequested(frozenset(members), "why", 700, (3, 5))
    return alter_for(proposal, VIEW, 1, lambda: "request-1")


def test_r12_a_request_names_epochs_and_the_process_of_each_member():
    made = asked(1, 2, 3)
    assert isinstance(made, OpenAlter)
    request = made.send("n0:1")
    assert request.members == ((1, "one"), (2, "two"), (3, "three"))
    assert (request.request_id, made.key) == ("request-1", (3, 5))
    assert request.confirm_offset == 700
    assert made.send("n1:1").request_id == "request-1", "a repetition is the same request"
    assert made.outcome_of(ResponseCode.SUCCESS) is AlterOutcome.RECORDED


def test_r12_a_process_that_was_registered_since_the_proposal_is_not_named():
    """The acks that counted were the earlier one's: the controllers refuse to add it."""
    counted = {1: "one", 2: "two", 3: "three before"}
    proposal = ev.ProposalRequested(frozenset({1, 2, 3}), "why", 700, (3, 5), counted)
    made = alter_for(proposal, VIEW, 1, lambda: "request-1")
    assert isinstance(made, OpenAlter)
    assert made.send("n0:1").members == ((1, "one"), (2, "two"), (3, "three before"))


@pytest.mark.parametrize(
    "members, code",
    [
        ((1, 2), ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED),
        ((2, 3), ResponseCode.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED),
        ((1, 4), ResponseCode.CONTROLLER_INVALID_REPLICAS),
        ((1, 9), ResponseCode.CONTROLLER_INVALID_REPLICAS),
    ],
)
def test_what_no_controller_could_grant_is_refused_here(members, code):
    refused = asked(*members)
    assert isinstance(refused, ev.ProposalRefused) and refused.code == code


def test_r11_a_late_failure_at_an_earlier_controller_repeats_nothing():
    made = asked(1, 2, 3)
    assert isinstance(made, OpenAlter)
    made.send("n0:1")
    doubt, again = made.leader_changed("n1:1")
    assert doubt == ev.ProposalUnknown()
    assert isinstance(again, ev.SendAlter) and again.target == "n1:1"
    assert made.not_answered("n0:1", 50) == []
    deadlines: list[int] = []
    assert made.due(60_000, deadlines, "n2:1") == [] and not deadlines
    assert made.not_answered("n1:1", 100) == []
    assert made.leader_changed("n1:1") == [again], "it leads again: at once"
    assert made.not_answered("n1:1", 100) == []
    assert made.due(60_000, deadlines, "n2:1") != []
    refused = ResponseCode.CONTROLLER_INVALID_REPLICAS
    assert not made.stands_still(refused, 0) and not made.stands_still(refused, 60_000)
