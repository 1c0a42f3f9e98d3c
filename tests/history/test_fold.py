"""Stories from history events: what real clusters told, tables of the rest, and disorder.

`testdata/history_real.jsonl` is a controller's file of a cluster of three: kill -9 of the master,
SIGSTOP of the next one, SIGSTOP of a slave, an operator's election, kill -9 of all brokers, and two
kills 50 ms apart; each was mended before the next.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.history.event import HistoryEvent, full_disk_reason, lenient_event, refused_ms_of
from batonmq.history.fold import Fold, failovers, stories
from batonmq.history.members import ELECTIONS_KEPT
from batonmq.history.merge import in_order, merged
from batonmq.history.story import Story
from batonmq.history.story_text import cost, document, lines

LINES = (Path(__file__).parent / "testdata/history_real.jsonl").read_bytes().splitlines()
RAW = [json.loads(line) for line in LINES]
GROUP = "broker-a"


def event(index: int, kind: str, time_ms: int = 0, **fields: Any) -> dict[str, Any]:
    """One event of GROUP; `json` may be given as an object."""
    made = {"log": "l", "raft_index": index, "kind": kind, "time_ms": time_ms or 1_000 + index}
    made |= {"broker_name": GROUP} | fields
    if isinstance(made.get("json"), dict):
        made["json"] = json.dumps(made["json"])
    return made


def elected(index: int, epoch: int, winner: int, **fields: Any) -> dict[str, Any]:
    given = {
        "broker_id": winner,
        "address": f"10.0.0.{winner}:10911",
        "node": "n0",
        "master_epoch": epoch,
        "set_before": [1, 2, 3],
        "sync_state_set": [1, 2, 3],
        "reason": "session_closed",
        "detected_ms": 1_000 + index - 2,
        "proposed_ms": 1_000 + index - 1,
    }
    return event(index, "elected", **(given | fields))


def reported(index: int, kind: str, epoch: int, broker_id: int, time_ms: int = 0, **detail: Any):
    return event(index, kind, time_ms, broker_id=broker_id, master_epoch=epoch, json=detail or "")


def read(events: Iterable[dict[str, Any]]) -> list[HistoryEvent]:
    made = [lenient_event(json.dumps(each)) for each in events]
    return [each for each in made if each is not None]


REAL = read(RAW)


def stories_of(*events: dict[str, Any]) -> list[Story]:
    return stories(read(events))


def only(*events: dict[str, Any]) -> Story:
    (story,) = stories_of(*events)
    return story


def steps(story: Story) -> list[str]:
    return [step.name for step in story.in_order()]


# --- what a real cluster told ------------------------------------------------------------------


def real(kind: str, epoch: int) -> Story:
    (story,) = [each for each in stories(REAL) if (each.kind, each.master_epoch) == (kind, epoch)]
    return story


CHAIN_TOLD = [
    "detected", "proposed", "committed", "pushed", "role changed", "opened", "first ack",
]  # fmt: skip


def test_every_fault_of_the_real_cluster_is_one_story():
    kinds = [story.kind for story in stories(REAL) if story.kind != "slave_lost"]
    assert kinds == [
        "controller_change",
        "first_election",
        "failover",
        "failover",
        "lease_lost",
        "operator_election",
        "failover",
        "failover",
        "failover",
    ]
    assert all(story.complete for story in stories(REAL))
    assert not any(document(story)["clockProblems"] for story in stories(REAL))


def test_a_killed_master_is_told_from_its_closed_session_to_its_return():
    story = real("failover", 2)
    assert [name for name in steps(story) if name in CHAIN_TOLD] == CHAIN_TOLD
    assert steps(story)[-2:] == ["restarted", "joined"]
    assert (story.master_before, story.winner, story.detected_by) == (1, 2, "n1")
    assert story.how.startswith("the session of broker 1 closed without a goodbye")
    assert story.unavailable_ms == story.first_ack_ms - story.detected_ms
    assert story.brokers == {1, 2}


def test_a_hung_master_is_told_with_its_silence():
    story = real("failover", 3)
    assert (story.reason, story.master_before) == ("session_silent", 2)
    assert story.silent_ms > 800
    assert "850 ms of silence" in cost(story)
    (lease,) = [each for each in stories(REAL) if each.kind == "lease_lost"]
    assert lease.brokers == {2}


def test_a_hung_slave_is_told_with_why_it_left_and_when_it_came_back():
    lost = [each for each in stories(REAL) if each.kind == "slave_lost"]
    assert lost
    for story in lost:
        assert steps(story) == ["left", "joined"]
        assert (story.brokers, story.missing) == ({3}, set())
        assert [reason for _, _, reason in story.set_changes] == ["3 is silent", "3 caught up"]


def test_all_brokers_killed_is_one_story_with_the_master_that_nobody_could_follow():
    story = real("failover", 6)
    assert story.master_before == 2
    assert story.winner == 2
    names = steps(story)
    assert names.index("failed") < names.index("restarted") < names.index("proposed")
    assert names.index("possible") < names.index("proposed")
    assert story.unavailable_ms == story.first_ack_ms - story.detected_ms
    assert names.count("restarted") == 3


def test_the_second_of_two_kills_counts_from_the_first():
    first, second = real("failover", 7), real("failover", 8)
    assert first.overtaken
    assert cost(first) == "this master acknowledged nothing: the next election came first"
    assert second.unavailable_ms == second.first_ack_ms - first.detected_ms
    assert "counted from the loss before" in cost(second)


# --- the rest of the table, as the controllers' rules make it ----------------------------------


def test_a_planned_switch_is_told_though_its_request_is_heard_of_late():
    """Notes and reports leave a little later than what they tell of."""
    story = only(
        elected(10, 4, 2, master_before=1, reason="named broker 2", detected_ms=1_030,
                proposed_ms=1_031, time_ms=1_031),
        reported(11, "drained", 4, 1, 1_028, drainedOffset=640, heldMs=9),
        event(12, "switch_requested", 1_010, broker_id=2, master_epoch=3, node="n0",
              reason="upgrade", json={"master": 1}),
        reported(13, "opened", 4, 2, 1_036),
        reported(14, "first_ack", 4, 2, 1_040, confirmOffset=700),
    )  # fmt: skip
    assert story.kind == "planned_switch"
    assert steps(story) == ["requested", "drained", "detected", "proposed", "opened", "first ack"]
    assert (story.held_ms, story.drained_offset, story.unavailable_ms) == (9, 640, 21)
    assert story.confirmed_offset == 700
    assert "hand over to broker 2: upgrade" in lines(story)[0]
    assert "writes were held for 9 ms" in cost(story)
    assert document(story)["beganTimestamp"] == 1_010


def handed_over(*later: dict[str, Any]) -> Story:
    """The election of broker 2 in epoch 8, for which broker 1 held its sends."""
    detail = {"target": 2, "heldMs": 5, "drainedOffset": 900}
    return next(
        story
        for story in stories_of(
            elected(1, 7, 1, master_before=2, time_ms=10, detected_ms=9, proposed_ms=10),
            elected(2, 8, 2, master_before=1, time_ms=1_008, detected_ms=0, proposed_ms=0),
            reported(3, "drained", 7, 1, 1_000, **detail),
            *later,
        )
        if story.master_epoch == 8
    )


def test_a_handover_lasts_from_the_hold_to_the_first_acknowledgement():
    story = handed_over(reported(4, "first_ack", 8, 2, 1_020))
    assert (story.kind, story.master_before, story.winner) == ("planned_switch", 1, 2)
    assert (story.held_ms, story.drained_offset, story.handover_ms) == (5, 900, 25)
    assert handed_over().handover_ms is None


def test_a_handover_that_no_send_waited_for_ends_with_the_opening():
    opened = reported(4, "opened", 8, 2, 1_012)
    for waited_ms, handover_ms, idle in ((2, 17, True), (970, 995, False)):
        first = reported(5, "first_ack", 8, 2, 1_990, waitedMs=waited_ms)
        story = handed_over(opened, first)
        assert (story.handover_ms, story.is_idle) == (handover_ms, idle)


def test_a_handover_needs_only_the_clocks_of_the_two_brokers():
    """The controllers' clock is an hour ahead."""
    story = only(
        reported(1, "drained", 7, 1, 1_000, target=2, heldMs=5),
        elected(2, 8, 2, master_before=1, time_ms=3_601_000, detected_ms=3_601_000, proposed_ms=0),
        reported(3, "first_ack", 8, 2, 1_020),
    )
    assert (story.handover_ms, story.unavailable_ms) == (25, None)


def test_a_hold_that_led_to_nothing_is_not_of_a_later_election():
    _, later = stories_of(
        reported(1, "drained", 7, 1, 1_000, target=2, heldMs=5, drainedOffset=900),
        elected(2, 8, 2, master_before=1),
        elected(3, 9, 3, master_before=2, detected_ms=5_000, proposed_ms=5_000),
    )
    assert (later.kind, later.held_ms, later.handover_ms) == ("failover", -1, None)


def test_a_switch_that_fails_is_no_election():
    story = only(
        event(1, "switch_requested", broker_id=2, master_epoch=3, json={"master": 1}),
        event(2, "switch_failed", broker_id=2, master_epoch=3, reason="broker 2 is 4096 behind"),
    )
    assert (story.kind, steps(story)) == ("switch_failed", ["requested", "failed"])
    assert story.complete and not story.is_election
    assert "broker 2 is 4096 behind; the master stays" in lines(story)[-1]


def test_an_unclean_election_is_marked_everywhere():
    story = only(elected(5, 9, 3, unclean=True, set_before=[1], sync_state_set=[3]))
    assert story.kind == "unclean_election"
    assert document(story)["unclean"]
    assert any("UNCLEAN" in line for line in lines(story))


def test_an_election_that_waits_says_for_whom_and_until_it_came():
    events = [
        event(1, "election_failed", node="n1", master_before=1, broker_id=1, master_epoch=3,
              set_before=[1, 2], sync_state_set=[1, 2], detected_ms=990, proposed_ms=992,
              reason="session_closed: no member of the SyncStateSet [1, 2] lives"),
        event(2, "election_blocked", node="n1", master_epoch=3,
              reason="broker 2 may lack confirmed messages", json={"operator": False}),
    ]  # fmt: skip
    waiting = only(*events)
    assert (waiting.kind, waiting.complete) == ("master_lost", False)
    assert "waiting for members: broker 2 may lack confirmed messages" in lines(waiting)[-1]
    done = only(*events, elected(9, 4, 1, set_before=[1, 2], reason="no_master"))
    assert (done.kind, done.detected_ms, done.winner) == ("failover", 990, 1)
    assert steps(done)[:3] == ["detected", "failed", "blocked"]


def test_an_election_that_only_an_operator_may_decide_says_so():
    story = only(
        event(1, "election_blocked", node="n1", reason="the controllers forgot",
              json={"operator": True})
    )  # fmt: skip
    assert (story.kind, story.complete) == ("election_blocked", False)
    assert "an operator has to decide: the controllers forgot" in lines(story)[0]


def test_bytes_that_a_returning_master_cut_belong_to_the_story_that_lost_it():
    story = only(
        elected(1, 2, 2, master_before=1, sync_state_set=[2, 3]),
        reported(2, "first_ack", 2, 2),
        reported(3, "truncated", 2, 1, 1_500, fromOffset=900, toOffset=640),
        event(4, "set_altered", 1_600, broker_id=2, master_epoch=2, set_before=[2, 3],
              sync_state_set=[1, 2, 3], reason="1 caught up"),
    )  # fmt: skip
    assert story.truncated_bytes == 260
    (cut,) = document(story)["truncations"]
    assert cut == {
        "brokerId": 1, "timestamp": 1_500, "fromOffset": 900, "toOffset": 640, "bytes": 260,
    }  # fmt: skip
    assert steps(story)[-2:] == ["truncated", "joined"]
    assert story.complete


def test_a_member_lost_before_the_first_acknowledgement_is_part_of_the_failover():
    story = only(
        elected(1, 2, 2, master_before=1, sync_state_set=[2, 3]),
        reported(2, "opened", 2, 2),
        event(3, "set_altered", 1_100, broker_id=2, master_epoch=2, set_before=[2, 3],
              sync_state_set=[2], reason="3 is silent"),
        reported(4, "first_ack", 2, 2, 1_101),
    )  # fmt: skip
    assert steps(story) == ["detected", "proposed", "opened", "left", "first ack"]
    assert (story.missing, story.complete) == ({1, 3}, False)


def test_a_slave_that_is_restarted_fills_the_story_of_its_leaving():
    lives = [event(n, "broker_registered", broker_id=n, incarnation="first") for n in (1, 2, 3)]
    alter = {"broker_id": 1, "master_epoch": 1}
    story = only(
        *lives,
        event(10, "set_altered", set_before=[1, 2, 3], sync_state_set=[1, 2],
              reason="3 is dead to the controllers", **alter),
        event(11, "broker_registered", broker_id=3, incarnation="second"),
        event(12, "set_altered", set_before=[1, 2], sync_state_set=[1, 2, 3], **alter),
    )  # fmt: skip
    assert (story.kind, steps(story)) == ("slave_lost", ["left", "restarted", "joined"])


def test_a_master_that_restarts_at_once_is_told_with_its_election():
    story = only(
        event(1, "broker_registered", broker_id=1, incarnation="first"),
        event(2, "broker_registered", 1_007, broker_id=1, incarnation="second"),
        elected(9, 2, 2, master_before=1, reason="master_restarted", detected_ms=1_008),
    )
    assert (story.kind, steps(story)) == ("failover", ["restarted", "detected", "proposed"])
    assert "before" in lines(story)[0]
    assert "came back as another process" in story.how


def test_another_leading_controller_is_told_with_the_time_that_it_knew_of_none():
    changed = {"kind": "controller_leader_changed", "log": "l", "controller_epoch": 2}
    story = only(
        changed | {"raft_index": 1, "time_ms": 2_000, "node": "n1", "node_before": "n0",
                   "started_ms": 5, "leader_seen_ms": 1_400, "proposed_ms": 2_000},
    )  # fmt: skip
    assert steps(story) == ["leader known", "leads"]
    assert "+600 ms" in lines(story)[1]
    restarted = only(
        changed | {"raft_index": 1, "time_ms": 2_000, "node": "n1", "node_before": "n0",
                   "started_ms": 1_500, "proposed_ms": 2_000},
    )  # fmt: skip
    assert steps(restarted) == ["started", "leads"]
    assert "knew of no leader since" in lines(restarted)[0]


@pytest.mark.parametrize(
    ("reason", "is_missed"),
    [
        ("broker 2, asked by gRPC", False),
        ("the whole group, asked by remoting from 127.0.0.1 as admin", False),
        ("broker 3, asked by gRPC from 127.0.0.1 as 2", True),  # a user's name
    ],
)
def test_what_an_operator_made_forgotten_is_missed_no_more(reason: str, is_missed: bool):
    lost, cleaned = stories_of(
        event(1, "set_altered", broker_id=1, master_epoch=1, set_before=[1, 2],
              sync_state_set=[1], reason="2 is silent"),
        event(2, "broker_cleaned", set_before=[1], sync_state_set=[1], reason=reason),
    )  # fmt: skip
    assert (lost.kind, lost.complete) == ("slave_lost", not is_missed)
    assert (cleaned.kind, steps(cleaned)) == ("cleaned", ["cleaned"])


def test_a_log_that_diverged_is_told_with_its_reason():
    story = only(reported(1, "diverged", 3, 2, reason="cut below confirmOffset"))
    assert (story.kind, story.brokers) == ("diverged", {2})
    assert "cut below confirmOffset" in lines(story)[0]


# --- clocks ------------------------------------------------------------------------------------


def test_a_clock_that_is_behind_is_named_instead_of_a_negative_time():
    story = only(
        elected(10, 2, 2, master_before=1),
        reported(11, "opened", 2, 2, 400),
        reported(12, "first_ack", 2, 2, 420),
    )
    made = document(story)
    assert made["durationsMs"]["opened"] is None
    assert made["durationsMs"]["firstAck"] is None
    assert made["unavailableMs"] is None
    assert made["openedTimestamp"] == 400
    assert made["clockProblems"][0] == (
        "the clock of broker 2 is at least 609 ms behind that of controller n0"
    )
    assert "does not follow from these clocks" in cost(story)
    assert not any("-" in line.split("(")[0].replace("->", "") for line in lines(story))


def test_a_broker_may_hear_of_it_before_the_leader_has_applied_it():
    """Every controller pushes what it applied; only the leader tells when it did."""
    story = only(
        elected(10, 2, 2, master_before=1),
        reported(11, "role_changed", 2, 2, 1_012, role="MASTER"),
        event(12, "pushed", 1_018, node="n0", master_epoch=2, json={"appliedMs": 1_017}),
        reported(13, "opened", 2, 2, 1_018),
    )
    assert document(story)["clockProblems"] == []
    assert steps(story) == ["detected", "proposed", "role changed", "committed", "pushed", "opened"]
    assert story.duration_ms("pushed", {}) == 10


def test_a_write_that_nobody_sent_is_no_gap():
    assert cost(only(elected(1, 2, 2))) == "no write is acknowledged yet, or none was sent"


# --- idleness is no outage ---------------------------------------------------------------------


def test_a_first_write_that_came_long_after_the_opening_is_no_outage():
    story = only(
        elected(10, 2, 2, master_before=1),
        reported(11, "opened", 2, 2, 1_020),
        reported(12, "first_ack", 2, 2, 62_925, waitedMs=5),
    )
    assert (story.unavailable_ms, story.first_write_after_ms) == (12, 61_900)
    assert document(story)["firstWriteAfterMs"] == 61_900
    assert cost(story) == (
        "12 ms until it was open for writes; the first write came 61900 ms later"
    )


def test_a_write_that_waited_for_the_new_master_counts_to_its_acknowledgement():
    """It came before the opening, or soon after as a client's next try, and waited for its ack."""
    for waited_ms, after_ms in ((900, 0), (1_500, 0), (810, 70)):
        story = only(
            elected(10, 2, 2, master_before=1),
            reported(11, "opened", 2, 2, 1_020),
            reported(12, "first_ack", 2, 2, 1_900, waitedMs=waited_ms),
        )
        assert (story.unavailable_ms, story.first_write_after_ms) == (892, after_ms)
        assert cost(story) == "892 ms until a write was acknowledged"


def test_an_idle_cluster_is_told_up_to_the_opening():
    story = only(elected(10, 2, 2, master_before=1), reported(11, "opened", 2, 2, 1_020))
    assert (story.complete, story.unavailable_ms, story.first_write_after_ms) == (True, 12, None)
    assert cost(story) == "12 ms until it was open for writes; no write is acknowledged since"


def test_a_switch_of_an_idle_cluster_costs_its_hold_and_no_idleness():
    story = only(
        event(9, "switch_requested", 1_000, broker_id=2, master_epoch=3, json={"master": 1}),
        reported(10, "drained", 3, 1, 1_010, drainedOffset=640, heldMs=4),
        elected(11, 4, 2, master_before=1, reason="planned switch", detected_ms=1_011,
                proposed_ms=1_011),
        reported(12, "opened", 4, 2, 1_020),
        reported(13, "first_ack", 4, 2, 2_052, waitedMs=2),
    )  # fmt: skip
    assert (story.kind, story.unavailable_ms) == ("planned_switch", 14)
    assert "the first write came 1030 ms later" in cost(story)


def test_r45_a_switch_for_a_full_disk_costs_what_was_refused_before_it():
    """A producer was refused for 2 s before the switch; that the switch itself took 14 ms, and that
    the producer was in a pause by then, is not the cost."""
    reason = full_disk_reason(2_004, "No space left on device")
    story = only(
        event(9, "switch_requested", 5_000, broker_id=2, master_epoch=3, reason=reason,
              json={"master": 1}),
        reported(10, "drained", 3, 1, 5_010, drainedOffset=640, heldMs=4),
        elected(11, 4, 2, master_before=1, reason="planned switch", detected_ms=5_011,
                proposed_ms=5_011),
        reported(12, "opened", 4, 2, 5_020),
        reported(13, "first_ack", 4, 2, 6_052, waitedMs=2),
    )  # fmt: skip
    assert story.unavailable_ms == 2_024
    assert cost(story) == (
        "2024 ms until it was open for writes, 2004 ms of them before the switch: the disk of"
        " broker 1 was full and it refused writes; the first write came 1030 ms later"
    )
    assert refused_ms_of("planned switch") == -1


def test_a_master_that_nobody_wrote_to_was_no_outage_for_the_next_one():
    first, second = stories_of(
        elected(10, 2, 2, master_before=1),
        reported(11, "opened", 2, 2, 1_020),
        elected(12, 3, 3, master_before=2, detected_ms=60_000, proposed_ms=60_001),
        reported(13, "opened", 3, 3, 60_020),
        reported(14, "first_ack", 3, 3, 60_030, waitedMs=20),
    )
    assert not first.overtaken and first.unavailable_ms == 12
    assert (second.unavailable_ms, second.lost_since_ms) == (30, 0)


def test_the_silence_before_an_election_that_had_to_wait_is_told_too():
    story = only(
        event(1, "election_failed", node="n1", master_before=2, broker_id=2, master_epoch=3,
              set_before=[1, 2, 3], sync_state_set=[1, 2, 3], detected_ms=990, proposed_ms=992,
              silent_ms=805, reason="session_silent: no member of the SyncStateSet lives"),
        elected(9, 4, 1, reason="no_master", silent_ms=-1),
        reported(10, "opened", 4, 1, 3_700),
        reported(11, "first_ack", 4, 1, 3_774, waitedMs=900),
    )  # fmt: skip
    assert cost(story) == (
        "2784 ms until a write was acknowledged, and 805 ms of silence before that"
    )


def test_an_election_right_after_the_controllers_started_says_that_nobody_looked_before():
    controller = {"kind": "controller_leader_changed", "log": "l", "broker_name": ""}
    opened = [reported(3, "opened", 9, 2, 1_050), reported(4, "first_ack", 9, 2, 1_060, waitedMs=9)]
    started = controller | {"raft_index": 1, "time_ms": 900, "node": "n1", "node_before": "n0",
                            "started_ms": 300, "proposed_ms": 900}  # fmt: skip
    _, story = stories_of(started, elected(2, 9, 2, master_before=1, detected_ms=1_000), *opened)
    assert (
        "60 ms until a write was acknowledged; the controllers themselves had started 700 ms"
        in (cost(story))
    )
    # Another controller that lived throughout looked all the time.
    _, story = stories_of(
        started | {"leader_seen_ms": 880},
        elected(2, 9, 2, master_before=1, detected_ms=1_000),
        *opened,
    )
    assert cost(story) == "60 ms until a write was acknowledged"


def test_a_broker_that_had_to_stop_is_told_with_its_reason():
    why = "goodbye: it cannot trust its disk: [Errno 28] No space left on device"
    assert only(elected(10, 2, 2, master_before=1, reason=why)).how == (
        "broker 1 said goodbye, as it cannot trust its disk: [Errno 28] No space left on device"
    )
    planned = only(elected(10, 2, 2, master_before=1, reason="goodbye"))
    assert planned.how == "broker 1 said goodbye: a planned stop"


# --- leases and controllers --------------------------------------------------------------------


def test_a_lost_lease_is_told_until_it_comes_back_and_what_became_of_writes():
    lost = reported(1, "lease_lost", 3, 2, 2_000)
    waiting = only(lost)
    assert not waiting.complete
    for refused, words in ((False, "took writes throughout"), (True, "refused writes in between")):
        back = reported(2, "lease_back", 3, 2, 2_750, awayMs=750, writesRefused=refused)
        story = only(lost, back)
        assert (story.kind, story.complete) == ("lease_lost", True)
        assert steps(story) == ["lease lost", "lease back"]
        assert "+750 ms" in lines(story)[1]
        assert "answered again after 750 ms" in lines(story)[1] and words in lines(story)[1]


def test_a_lost_lease_ends_with_the_election_of_another_master():
    lost, _ = stories_of(reported(1, "lease_lost", 3, 2, 900), elected(10, 4, 1, master_before=2))
    assert (steps(lost), lost.complete) == (["lease lost", "replaced"], True)
    events = elected(10, 4, 1, master_before=2), reported(11, "lease_lost", 3, 2, 3_000)
    _, late = stories_of(*events)
    assert late.complete


def controllers_changed(index: int, time_ms: int, node: str, before: str, seen_ms: int = 0):
    return event(
        index, "controller_leader_changed", time_ms, broker_name="", node=node, node_before=before,
        proposed_ms=time_ms, started_ms=5, leader_seen_ms=seen_ms, controller_epoch=index,
    )  # fmt: skip


def test_another_leading_controller_is_told_from_the_loss_of_the_last_one():
    """n2 heard last of n0 at 1 000 and leads since; what it says of that later is stale."""
    first, stale, regained = stories_of(
        controllers_changed(4, 1_600, "n2", "n0", 1_000),
        controllers_changed(5, 31_000, "n2", "n2", 1_000),
        controllers_changed(6, 58_300, "n2", "n2", 57_000),
    )
    assert [story.began_ms for story in (first, stale, regained)] == [1_000, 31_000, 57_000]
    assert "controller n2 last heard of n0" in lines(first)[0]
    assert steps(stale) == ["leads"]
    assert "since when none decided is not recorded" in lines(stale)[0]
    assert "controller n2, which led, was last answered by a majority" in lines(regained)[0]
    assert "+1300 ms" in lines(regained)[1] and "decides again" in lines(regained)[1]


def test_stories_come_in_the_order_in_which_they_began():
    """The set changed while the controllers were without a leader, and is told before them."""
    found = stories_of(
        event(3, "set_altered", 1_500, broker_id=1, master_epoch=1, set_before=[1, 2],
              sync_state_set=[1], reason="2 is silent"),
        controllers_changed(4, 1_600, "n2", "n0", 1_000),
    )  # fmt: skip
    assert [story.kind for story in found] == ["controller_change", "slave_lost"]


def test_a_story_is_finished_when_no_event_can_continue_it():
    fold = Fold()
    (lost,) = read([
        event(1, "set_altered", set_before=[1, 2, 3], sync_state_set=[1, 2], reason="3 is silent")
    ])  # fmt: skip
    assert fold.apply(lost) == []
    (back,) = read([event(2, "set_altered", set_before=[1, 2], sync_state_set=[1, 2, 3])])
    (finished,) = fold.apply(back)
    assert (finished.kind, steps(finished)) == ("slave_lost", ["left", "joined"])
    assert fold.finish() == []


def test_the_fold_keeps_a_bounded_number_of_elections():
    fold = Fold()
    count = ELECTIONS_KEPT + 20
    elections = read(elected(9 * epoch, epoch, 1 + epoch % 2) for epoch in range(1, count + 1))
    finished = [story for each in elections for story in fold.apply(each)]
    assert [story.master_epoch for story in finished] == list(range(1, 21))
    assert len(fold.finish()) == ELECTIONS_KEPT


def test_a_restart_belongs_to_the_election_that_follows_it_and_to_no_later_one():
    first = [event(n, "broker_registered", broker_id=n, incarnation="first") for n in (1, 2)]
    again = event(5, "broker_registered", broker_id=2, incarnation="second")
    at_once = only(*first, again, elected(9, 2, 1, master_before=2))
    assert steps(at_once) == ["restarted", "detected", "proposed"]
    restarted, *_, last = stories_of(
        *first, again, elected(10, 2, 2, master_before=1), elected(20, 3, 1, master_before=2)
    )
    assert (restarted.kind, steps(restarted)) == ("broker_restarted", ["restarted"])
    assert steps(last) == ["detected", "proposed"]


def test_a_restart_is_not_why_an_operator_elected_uncleanly():
    first = [event(n, "broker_registered", broker_id=n, incarnation="first") for n in (1, 2)]
    again = event(5, "broker_registered", broker_id=2, incarnation="second")
    restarted, unclean = stories_of(*first, again, elected(9, 2, 3, master_before=2, unclean=True))
    assert (restarted.kind, steps(restarted)) == ("broker_restarted", ["restarted"])
    assert (unclean.kind, steps(unclean)) == ("unclean_election", ["detected", "proposed"])


def test_an_election_of_another_than_the_one_named_is_not_the_switch():
    requested = event(1, "switch_requested", broker_id=2, master_epoch=3, json={"master": 1})
    switch, failover = stories_of(requested, elected(5, 4, 3, master_before=1))
    assert (switch.kind, steps(switch)) == ("planned_switch", ["requested"])
    assert (failover.kind, steps(failover)) == ("failover", ["detected", "proposed"])
    assert failover.winner == 3


def test_what_another_broker_reports_in_the_epoch_opens_nothing():
    story = only(
        elected(1, 2, 2, master_before=1),
        reported(2, "opened", 2, 3),
        reported(3, "first_ack", 2, 3, confirmOffset=900),
    )
    assert (steps(story), story.confirmed_offset) == (["detected", "proposed"], -1)


def test_lines_are_folded_at_the_width_and_not_in_a_pipe():
    story = real("failover", 2)
    assert all(len(line) <= 60 for line in lines(story, 60))
    assert " ".join(" ".join(lines(story, 60)).split()) == " ".join(" ".join(lines(story)).split())


# --- several sources, disorder -----------------------------------------------------------------


def test_what_several_controllers_tell_is_told_once_and_disagreement_is_named():
    other = [dict(each) for each in RAW]
    other[5]["time_ms"] += 1
    other[6]["broker_id"] = 9
    both = merged({"n0": REAL[:60], "n1": read(other)})
    assert list(both.events) == REAL[:60] + read(other)[60:]
    (problem,) = both.problems
    assert problem.startswith("n0 and n1 disagree about 2 events, the first at index ")
    assert merged({"n0": REAL, "n1": REAL}).problems == ()
    behind_a_hole = read([RAW[0] | {"gap": True}, *RAW[1:]])
    assert merged({"n0": REAL, "n1": behind_a_hole}).problems == ()


def test_logs_follow_one_another_by_their_times():
    old = [event(7, "opened", 50, log="b"), event(8, "opened", 60, log="b")]
    new = [event(1, "opened", 70, log="a")]
    assert [each.time_ms for each in in_order(read(new + old))] == [50, 60, 70]
    slow = event(9, "opened", 90, log="b")
    assert [each.log for each in in_order(read([*new, *old, slow]))] == ["b", "b", "b", "a"]


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 3_000), st.text(max_size=3),
    st.lists(st.integers(0, 4), max_size=3), st.just('{"fromOffset":5}'), st.just("{"),
)  # fmt: skip
NAMES = st.sampled_from(sorted({name for each in RAW for name in each}))
KINDS = [
    *sorted({each["kind"] for each in RAW}),
    "truncated", "drained", "lease_back", "switch_requested", "switch_failed", "election_blocked",
    "broker_cleaned", "diverged", "something new",
]  # fmt: skip
INVENTED = st.fixed_dictionaries(
    {"kind": st.sampled_from(KINDS), "broker_name": st.sampled_from(["broker-a", "b", ""])},
    optional={
        "raft_index": st.integers(0, 200),
        "log": st.sampled_from(["l", RAW[0]["log"]]),
        "time_ms": st.integers(0, 3_000),
        "detected_ms": st.integers(0, 3_000),
        "proposed_ms": st.integers(0, 3_000),
        "master_epoch": st.integers(0, 9),
        "broker_id": st.integers(0, 3),
        "master_before": st.integers(0, 3),
        "set_before": st.lists(st.integers(1, 3), unique=True).map(sorted),
        "sync_state_set": st.lists(st.integers(1, 3), unique=True).map(sorted),
    },
)


@st.composite
def disorder(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Real events of which some are missing, doubled, garbled or invented, in any order."""
    events = draw(st.lists(st.sampled_from(RAW), max_size=40))
    events += draw(st.lists(INVENTED, max_size=20))
    garbled = draw(st.lists(st.tuples(st.sampled_from(RAW), NAMES, VALUES), max_size=5))
    events += [one | {name: value} for one, name, value in garbled]
    return draw(st.permutations(events))


@given(disorder())
def test_no_disorder_raises_or_invents_a_time(raw):
    events = read(raw)
    times = {0}
    for one in in_order(events):
        times |= {one.time_ms, one.detected_ms, one.proposed_ms, one.started_ms,
                  one.leader_seen_ms, one.detail.applied_ms}  # fmt: skip
    for story in stories(events):
        made = json.loads(json.dumps(document(story)))
        told_times = [value for name, value in made.items() if name.endswith("Timestamp")]
        told_times += [step["timestamp"] for step in made["steps"]]
        assert set(told_times) <= times
        spans = [*made["durationsMs"].values(), made["unavailableMs"]]
        spans += [step["afterMs"] for step in made["steps"]]
        assert all(span is None or span >= 0 for span in spans)
        assert all(step["timestamp"] > 0 for step in made["steps"])
        assert lines(story, 80) and lines(story)


@settings(max_examples=10, deadline=None)
@given(st.permutations(REAL), st.lists(st.sampled_from(REAL), max_size=20))
def test_order_and_repetition_change_nothing(events, again):
    assert [document(s) for s in stories(events + again)] == [document(s) for s in stories(REAL)]
    assert [s.winner for s in failovers(events)] == [1, 2, 1, 2, 2, 1, 3]
