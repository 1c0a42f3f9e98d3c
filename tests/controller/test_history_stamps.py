"""What an election, a change of the leading controller and a note leave in the history."""

import pytest

from batonmq.controller.rules.commands import BecomeController, NoteEvent
from batonmq.protocol.codes import ResponseCode as Code


def note(**fields):
    given = {"broker_name": "broker-a", "kind": "pushed", "node": "n1", "master_epoch": 1}
    return NoteEvent(**{**given, **fields})


def test_an_election_names_the_controller_its_silence_and_the_time_of_its_proposal(script):
    script.three_in_sync()
    script.die(1)
    script.elect(reason="session_silent", detected_ms=999_000, silent_ms=812, node="n2")
    event = script.state.history[-1]
    assert (event.kind, event.node, event.silent_ms) == ("elected", "n2", 812)
    assert (event.detected_ms, event.proposed_ms) == (999_000, 1_000_000)


def test_an_election_without_a_winner_carries_the_same_stamps(script):
    script.three_in_sync()
    script.die(1, 2, 3)
    script.elect(reason="session_closed", detected_ms=999_999, silent_ms=40, node="n0")
    event = script.state.history[-1]
    assert (event.kind, event.node, event.silent_ms) == ("election_failed", "n0", 40)
    assert (event.detected_ms, event.proposed_ms) == (999_999, 1_000_000)
    assert event.reason.startswith("session_closed: ")


def test_a_new_leading_controller_names_the_one_before(script):
    script.apply(BecomeController(node="n0", nonce="a", started_ms=5))
    script.apply(BecomeController(node="n1", nonce="b", started_ms=6, leader_seen_ms=7))
    first, second = script.state.history
    assert (first.node, first.node_before, first.started_ms) == ("n0", "", 5)
    assert (second.node, second.node_before, second.leader_seen_ms) == ("n1", "n0", 7)


def test_a_note_of_a_controller_enters_the_history_and_nothing_else(script):
    script.three_in_sync()
    before = script.state.groups
    assert script.apply(note(time_ms=123, reason="why", json='{"sessions":3}')).ok
    event = script.state.history[-1]
    assert (event.kind, event.node, event.time_ms) == ("pushed", "n1", 123)
    assert (event.reason, event.json) == ("why", '{"sessions":3}')
    assert script.state.groups == before


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"kind": "elected"}, Code.CONTROLLER_INVALID_REQUEST),
        ({"kind": "opened"}, Code.CONTROLLER_INVALID_REQUEST),
        ({"json": "[1]"}, Code.CONTROLLER_INVALID_REQUEST),
        ({"broker_name": "nobody"}, Code.CONTROLLER_BROKER_METADATA_NOT_EXIST),
    ],
)
def test_a_note_that_says_what_only_others_may_say_is_refused(script, wrong, code):
    script.register()
    assert script.apply(note(**wrong)).code is code
    assert script.kinds == ["broker_registered"]
