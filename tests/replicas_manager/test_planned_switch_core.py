"""R33 at the master, step by step on a moved clock: what is held, how long, and what ends it."""

import dataclasses
from dataclasses import replace

import pytest

from batonmq.protocol.codes import ResponseCode
from batonmq.replicas_manager.switch import (
    ACK_LOST_MOST_MS,
    CATCH_UP_MOST_MS,
    HOLD_MOST_MS,
    NEAR_BYTES,
    OTHERS_MOST_MS,
    POLL_WHILE_CATCHING_UP_MS,
    POLL_WHILE_HELD_MS,
    REPEAT_MS,
    Drained,
    ElectTarget,
    HoldSends,
    PlannedSwitch,
    ReleaseSends,
    SwitchFailed,
    SwitchProgress,
    SwitchStage,
    SwitchTask,
)

T0 = 10_000
TASK = SwitchTask("c1:9879", "switch:n/1", broker_id=2, master_epoch=7)


def progress(
    ack: int, *, end: int = 1_000, confirm: int | None = None, ms: int = T0 + 5, member: bool = True
) -> SwitchProgress:
    return SwitchProgress(end, ack if confirm is None else confirm, ack, ms, member)


def asked() -> PlannedSwitch:
    switch = PlannedSwitch()
    assert switch.requested(TASK, master_epoch=7, lease=True, now_ms=T0) == []
    return switch


def draining(at_ms: int = T0 + 5) -> PlannedSwitch:
    switch = asked()
    assert switch.poll(progress(900, ms=at_ms), at_ms) == [HoldSends()]
    switch.held(1_000, at_ms)
    return switch


def electing() -> PlannedSwitch:
    switch = draining()
    effects = switch.poll(progress(1_000), T0 + 7)
    assert effects == [ElectTarget(TASK, 1_000), Drained(TASK, 1_000, 2)]
    return switch


def reason_of(effects: object) -> str:
    assert isinstance(effects, list)
    failed = effects[-1]
    assert isinstance(failed, SwitchFailed)
    assert failed.task.switch_id == TASK.switch_id
    return failed.reason


def test_r33_the_whole_way_ends_with_the_role_change():
    switch = electing()
    assert switch.holding
    assert switch.elect_answered(TASK.switch_id, ResponseCode.SUCCESS, "", T0 + 9) == []
    switch.role_changes()
    assert (switch.stage, switch.next_ms) == (SwitchStage.IDLE, None)
    # Neither a late answer nor a late timer does anything any more.
    assert switch.elect_answered(TASK.switch_id, ResponseCode.SYSTEM_ERROR, "", T0 + 10) == []
    assert switch.poll(progress(1_000), T0 + 2_000) == []


@pytest.mark.parametrize(
    ("master_epoch", "lease", "why"),
    [(None, True, "not master"), (8, True, "masterEpoch is 8 here"), (7, False, "no lease")],
)
def test_r33_a_broker_that_may_not_hand_over_gives_the_reason(master_epoch, lease, why):
    switch = PlannedSwitch()
    effects = switch.requested(TASK, master_epoch=master_epoch, lease=lease, now_ms=T0)
    assert why in reason_of(effects)
    assert switch.task is None


def test_r33_a_second_switch_is_refused_by_name_and_a_repeated_one_is_the_same():
    switch = asked()
    other = SwitchTask("c1:9879", "switch:n/2", 3, 7)
    effects = switch.requested(other, master_epoch=7, lease=True, now_ms=T0 + 1)
    assert effects == [SwitchFailed(other, "a switch to broker 2 is under way")]
    assert switch.requested(TASK, master_epoch=7, lease=True, now_ms=T0 + 1) == []
    assert switch.task == TASK


def test_r33_a_hung_replica_costs_no_write_a_pause():
    """It acked all there is, but before it was asked for: that proves nothing now."""
    switch = asked()
    for now_ms in range(T0, T0 + CATCH_UP_MOST_MS, 5):
        assert switch.poll(progress(1_000, ms=T0 - 30), now_ms) == []
        assert not switch.holding
    effects = switch.poll(progress(1_000, ms=T0 - 30), T0 + CATCH_UP_MOST_MS)
    assert len(effects) == 1  # nothing was held, so nothing is released
    assert "acked nothing for 430 ms; the old master stays" in reason_of(effects)


def test_r33_a_lagging_replica_is_waited_for_without_a_hold():
    switch = asked()
    far = NEAR_BYTES + 1
    assert switch.poll(progress(0, end=far), T0 + 5) == []
    assert switch.next_ms == T0 + 5 + POLL_WHILE_CATCHING_UP_MS
    assert switch.poll(progress(1, end=far), T0 + 10) == [HoldSends()]
    switch = asked()
    effects = switch.poll(progress(0, end=far), T0 + CATCH_UP_MOST_MS)
    assert f"broker 2 is {far:,} bytes behind" in reason_of(effects)
    switch = asked()
    assert "does not follow" in reason_of(switch.poll(progress(-1), T0 + CATCH_UP_MOST_MS))


def test_r33_r42_a_replica_without_this_epochs_tables_is_waited_for_and_then_refused():
    switch = asked()
    lacks = dataclasses.replace(progress(1_000), tables=False)
    assert switch.poll(lacks, T0 + 5) == []
    assert switch.poll(progress(1_000), T0 + 10) == [HoldSends()]
    switch = asked()
    late = dataclasses.replace(lacks, ack_ms=T0 + CATCH_UP_MOST_MS)
    assert "tables of this epoch" in reason_of(switch.poll(late, T0 + CATCH_UP_MOST_MS))


def test_r33_a_replica_that_left_the_set_is_not_waited_for():
    switch = asked()
    why = reason_of(switch.poll(progress(1_000, member=False), T0 + 5))
    assert "not in the SyncStateSet" in why


def test_r33_the_election_waits_for_the_last_byte_and_for_what_the_others_ack():
    switch = draining()
    assert switch.poll(progress(999), T0 + 8) == []
    assert switch.next_ms == T0 + 8 + POLL_WHILE_HELD_MS
    assert switch.poll(progress(1_000, confirm=950), T0 + 10) == []
    assert switch.poll(progress(1_000, confirm=999), T0 + 9 + OTHERS_MOST_MS) == []
    effects = switch.poll(progress(1_000, confirm=999), T0 + 10 + OTHERS_MOST_MS)
    assert isinstance(effects[0], ElectTarget)


def test_r33_bytes_behind_the_drained_end_do_not_move_it():
    """A change of a topic may still be written: it is confirmed or not like anything else (R1)."""
    switch = draining()
    effects = switch.poll(progress(1_000, end=1_200, confirm=1_000), T0 + 8)
    assert effects[0] == ElectTarget(TASK, 1_000)


def test_r33_the_target_dies_while_sends_are_held_and_the_old_master_reopens():
    """Its connection is gone: that is seen at once, and 50 ms are left for it to come back."""
    switch = draining()
    assert switch.poll(progress(-1), T0 + 20) == []
    assert switch.poll(progress(990), T0 + 60) == []
    assert switch.poll(progress(-1), T0 + 100) == []
    assert switch.poll(progress(-1), T0 + 99 + ACK_LOST_MOST_MS) == []
    effects = switch.poll(progress(-1), T0 + 100 + ACK_LOST_MOST_MS)
    assert effects[0] == ReleaseSends()
    assert "does not follow any more" in reason_of(effects)
    assert switch.task is None


def test_r33_a_target_that_is_shrunk_away_while_sends_are_held_ends_it_at_once():
    switch = draining()
    effects = switch.poll(progress(990, member=False), T0 + 7)
    assert effects[0] == ReleaseSends()
    assert "not in the SyncStateSet any more" in reason_of(effects)


@pytest.mark.parametrize(("timeout_ms", "held_ms"), [(10 * HOLD_MOST_MS, HOLD_MOST_MS), (200, 200)])
def test_r33_a_target_that_hangs_while_sends_are_held_costs_half_a_second(timeout_ms, held_ms):
    """Or less, if the controller says so."""
    switch = PlannedSwitch()
    task = replace(TASK, timeout_ms=timeout_ms)
    assert switch.requested(task, master_epoch=7, lease=True, now_ms=T0) == []
    assert switch.poll(progress(900), T0 + 5) == [HoldSends()]
    switch.held(1_000, T0 + 5)
    assert switch.poll(progress(990), T0 + 5 + held_ms - 1) == []
    assert switch.next_ms == T0 + 5 + held_ms
    effects = switch.poll(progress(990), T0 + 5 + held_ms)
    assert effects[0] == ReleaseSends()
    assert "10 bytes behind and did not reach" in reason_of(effects)


def test_r33_a_lost_controller_does_not_leave_it_drained():
    """Killed after the question, or its answer lost: asked again, then reopened after 500 ms."""
    switch = electing()
    switch.elect_unanswered(TASK.switch_id, T0 + 200)
    assert switch.next_ms == T0 + 200 + REPEAT_MS
    again = switch.poll(progress(1_000), T0 + 200 + REPEAT_MS)
    assert again == [ElectTarget(TASK, 1_000)]
    ends_ms = T0 + 5 + HOLD_MOST_MS
    assert switch.next_ms == ends_ms
    effects = switch.poll(progress(1_000), ends_ms)
    assert effects[0] == ReleaseSends()
    assert "no controller answered the election in 500 ms" in reason_of(effects)
    # Its late success is nothing to this switch; the view that comes with it is taken as any.
    assert switch.elect_answered(TASK.switch_id, ResponseCode.SUCCESS, "", ends_ms + 1) == []


def test_r33_a_new_leader_gets_the_request_and_a_refusal_reopens_at_once():
    switch = electing()
    not_leader = ResponseCode.CONTROLLER_NOT_LEADER
    assert switch.elect_answered(TASK.switch_id, not_leader, "", T0 + 20) == []
    assert switch.poll(progress(1_000), T0 + 20) == []
    assert switch.poll(progress(1_000), T0 + 20 + REPEAT_MS) == [ElectTarget(TASK, 1_000)]
    fenced = ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH
    effects = switch.elect_answered(TASK.switch_id, fenced, "masterEpoch is 8", T0 + 90)
    assert effects[0] == ReleaseSends()
    assert "masterEpoch is 8" in reason_of(effects)


def test_r33_success_without_a_view_still_ends_in_time():
    switch = electing()
    assert switch.elect_answered(TASK.switch_id, ResponseCode.SUCCESS, "", T0 + 9) == []
    assert switch.poll(progress(1_000), T0 + 400) == []
    assert switch.poll(progress(1_000), T0 + 5 + HOLD_MOST_MS)[0] == ReleaseSends()


def test_r33_two_switches_in_a_row_each_hold_anew():
    switch = draining()
    switch.poll(progress(-1), T0 + 5 + HOLD_MOST_MS)
    second = SwitchTask("c1:9879", "switch:n/2", 2, 7)
    t1 = T0 + 1_000
    assert switch.requested(second, master_epoch=7, lease=True, now_ms=t1) == []
    assert switch.poll(progress(1_900, end=2_000, ms=t1 + 1), t1 + 1) == [HoldSends()]
    switch.held(2_000, t1 + 1)
    assert switch.poll(progress(1_999, end=2_000), t1 + 2) == []
    effects = switch.poll(progress(2_000, end=2_000), t1 + 3)
    assert effects[0] == ElectTarget(second, 2_000)


def test_r33_an_ack_of_the_very_moment_of_the_request_proves_nothing():
    """It may have come before the request in the same millisecond."""
    switch = asked()
    assert switch.poll(progress(900, ms=T0), T0 + 1) == []
    assert switch.poll(progress(900, ms=T0 + 1), T0 + 2) == [HoldSends()]


def test_r33_what_comes_of_an_earlier_switch_is_nothing_to_this_one():
    switch = electing()
    due_ms = switch.next_ms
    fenced = ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH
    assert switch.elect_answered("switch:n/0", fenced, "late", T0 + 10) == []
    switch.elect_unanswered("switch:n/0", T0 + 20)
    assert switch.stage is SwitchStage.ELECTING and switch.next_ms == due_ms
    assert switch.poll(progress(1_000), T0 + 20 + REPEAT_MS) == []
