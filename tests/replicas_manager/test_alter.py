"""What a master asks of the controllers about its set (R11, R12); `role_alter.txt` has more."""

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.role_view import Replica, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager.alter import OpenAlter, alter_for

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
    ),
)


def asked(counted: dict[int, str] | None = None) -> OpenAlter:
    """For the set {1, 2, 3}; `counted`: the processes whose acks counted."""
    proposal = ev.ProposalRequested(frozenset({1, 2, 3}), "why", 700, (3, 5), counted)
    made = alter_for(proposal, VIEW, 1, "request-1")
    assert isinstance(made, OpenAlter)
    return made


def test_r12_a_process_that_was_registered_since_the_proposal_is_not_named():
    """The acks that counted were the earlier one's: the controllers refuse to add it."""
    request = asked({1: "one", 2: "two", 3: "three before"}).send("n0:1")
    assert request.members == ((1, "one"), (2, "two"), (3, "three before"))


def test_r11_a_late_failure_at_an_earlier_controller_repeats_nothing():
    made = asked()
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
