"""What the controller's state does otherwise than RocketMQ's: its quirks mended, and our rules."""

import json
from pathlib import Path

import msgspec
import pytest

from batonmq.controller.rules.commands import (
    AlterSyncStateSet,
    BecomeController,
    CleanBrokerData,
    ElectMaster,
    HistoryAppended,
    LiveBroker,
    NewMember,
    NoteEvent,
    RegisterBroker,
    ReplicasChanged,
    ReportEvent,
    RoleChanged,
    SetChanged,
)
from batonmq.controller.rules.elect_policy import FIRST_ELECTION_SETTLE_MS
from batonmq.controller.rules.group_rules import LAG_BYTES_MAX
from batonmq.controller.rules.groups import EPOCH_MAX, BrokerGroup, fill_alive, living_replicas
from batonmq.controller.rules.registration import BROKER_ID_MAX, REASON_MASTER_RESTARTED
from batonmq.controller.rules.state import ANSWERS_MAX, ControllerState, SnapshotError
from batonmq.history.event import REPORT_SIZE_MAX
from batonmq.protocol.codes import ResponseCode as Code
from batonmq.protocol.role_view import Replica

REGISTERED_TEXTS = (
    "cluster_name",
    "register_check_code",
    "address",
    "ha_address",
    "incarnation",
    "log_id",
    "owner",
)


def effect_types(script):
    return [type(effect) for effect in script.effects if not isinstance(effect, HistoryAppended)]


def restarted(script, broker_id, **fields):
    """Replica `broker_id` died and registers in its second life."""
    script.die(broker_id)
    fields.setdefault("incarnation", f"life-{broker_id}b")
    result = script.register(broker_id, **fields)
    assert result.ok
    return result


def last_reason(script):
    return script.state.history[-1].reason


def in_sync(script, *log_ids):
    """Replicas with these logs; 1 is master of a set of all."""
    for log_id in log_ids:
        script.register(log_id=log_id)
    script.elect(1)
    script.alter(*range(1, len(log_ids) + 1))


# --- quirks -----------------------------------------------------------------------------------


def test_quirk_a_a_taken_id_is_never_offered_again(script):
    """A broker comes with id 5 from elsewhere; the next newcomer is offered 6, not 1..5."""
    script.register(5)
    assert script.state.next_broker_id("broker-a") == 6
    assert script.register().broker_id == 6
    script.apply_id(9)
    assert script.register().broker_id == 10


def test_quirk_b_partial_clean_leaves_no_half_group(trio):
    """Cleaning the whole set while other replicas remain is refused: it would wedge the group.

    Then with a member left it goes, the deposed master's epoch passes, and the group is whole.
    """
    trio.alter(1, 2)
    trio.die(1, 2)
    refused = trio.clean(1, 2)
    assert refused.code is Code.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    assert trio.group.sync_state_set == (1, 2)
    assert trio.clean(1).ok
    assert trio.group.master_broker_id == 0
    assert trio.group.sync_state_set == (2,)
    assert trio.epochs == (2, 4)
    assert effect_types(trio) == [RoleChanged]
    assert trio.clean(2, 3, clean_living_broker=True).ok
    assert trio.state.groups == {}


def test_quirk_b_forced_clean_takes_only_what_is_named(trio):
    """Java ignores the ids with isCleanLivingBroker and erases the group."""
    assert trio.clean(3, clean_living_broker=True).ok
    assert [record.broker_id for record in trio.group.replicas] == [1, 2]
    assert trio.group.sync_state_set == (1, 2)
    assert trio.group.master_broker_id == 1


def test_a_clean_changes_nothing_else(trio):
    """No replica that is unknown, no set that the replica was not in."""
    unknown = trio.clean(1, broker_name="other")
    assert unknown.code is Code.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    before, kinds = trio.state.groups, trio.kinds
    assert trio.clean(9).ok
    assert (trio.state.groups, trio.kinds, trio.effects) == (before, kinds, ())
    trio.alter(1, 2)
    trio.die(3)
    assert trio.clean(3).ok
    assert trio.epochs == (1, 3)
    assert trio.clean(clean_living_broker=True).ok
    assert trio.state.groups == {} and last_reason(trio) == "the whole group"


def test_a_replica_of_a_group_without_a_master_may_be_cleaned(script):
    for _ in range(2):
        script.register()
    script.die(2)
    assert script.clean(2).ok
    assert [record.broker_id for record in script.group.replicas] == [1]


def test_quirk_c_shrink_needs_no_life_of_the_members_it_keeps(trio):
    """9897: two slaves die; dropping one of them is not refused because of the other."""
    trio.die(2, 3)
    assert trio.alter(1, 2).ok
    assert trio.alter(1).ok
    dead = trio.alter(1, 2)
    assert dead.code is Code.CONTROLLER_BROKER_NOT_ALIVE


def test_r3_quirk_d_fencing_comes_before_equality(trio):
    """A deposed master resubmits the set that is recorded: 2002, 2000 or 2001, never 2013."""
    same = trio.alter(1, 2, 3)
    assert same.code is Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    old = {"master_broker_id": 1, "master_incarnation": "life-1", "master_epoch": 1}
    trio.elect(2, designate=True)
    assert trio.group.sync_state_set == (1, 2, 3)
    fenced = trio.alter(1, 2, 3, **old, sync_state_set_epoch=2)
    assert fenced.code is Code.CONTROLLER_INVALID_MASTER
    trio.elect(1, designate=True)
    fenced = trio.alter(1, 2, 3, **old, sync_state_set_epoch=2)
    assert fenced.code is Code.CONTROLLER_FENCED_MASTER_EPOCH
    fenced = trio.alter(1, 2, 3, sync_state_set_epoch=2)
    assert fenced.code is Code.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
    assert fenced.view.sync_state_set_epoch == 4


def test_quirk_e_the_answer_to_an_election_holds_the_whole_member_group(trio):
    """1002's body needs every replica's address, the master's above all; 2011 carries it too."""
    trio.die(1)
    for result in (trio.elect(), trio.elect(3)):
        addresses = {replica.broker_id: replica.address for replica in result.view.replicas}
        assert addresses == {n: f"10.0.0.{n}:10911" for n in (1, 2, 3)}
        assert result.view.master_address == "10.0.0.2:10911"


def test_quirk_controller_election_does_not_burn_epoch_zero(script):
    """Nobody lives, nobody was ever elected: Java's epoch 1 with an empty set can never be won."""
    script.register()
    script.die(1)
    assert script.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert script.epochs == (0, 0)
    assert script.effects == ()
    script.revive(1)
    assert script.elect().ok
    assert script.epochs == (1, 1)


def test_quirk_offsets_and_priorities_do_not_overflow(trio):
    """Java subtracts in int: an offset 2**31 ahead, and priorities of both signs, lose there."""
    trio.die(1)
    trio.tell(2, epoch=1, max_offset=1)
    trio.tell(3, epoch=1, max_offset=1 + 2**31)
    assert trio.elect().view.master_broker_id == 3
    trio.revive(1, epoch=1, max_offset=2**40, election_priority=2**31 - 1)
    trio.tell(2, epoch=1, max_offset=2**40, election_priority=-(2**31))
    trio.register(1, incarnation="life-1")
    assert trio.alter(1, 2, 3).ok
    trio.revive(1, epoch=1, max_offset=2**40, election_priority=2**31 - 1)
    trio.die(3)
    assert trio.elect().view.master_broker_id == 2


def test_quirk_a_tie_goes_to_the_smallest_id_whatever_the_order(new_script):
    for order in ((2, 3), (3, 2)):
        script = new_script()
        script.three_in_sync()
        live = tuple(LiveBroker(n, f"life-{n}", epoch=1, max_offset=9) for n in order)
        assert script.elect(live=live).view.master_broker_id == 2
        fresh = new_script()
        assert fresh.register().ok and fresh.register().ok and fresh.register().ok
        live = tuple(LiveBroker(n, f"life-{n}", max_offset=0) for n in order)
        assert fresh.elect(live=live).view.master_broker_id == 2


def test_quirk_the_first_master_is_registered_and_no_learner(script):
    """Java's first election takes any id."""
    script.register(learner=True)
    assert script.elect(1).code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert script.elect(7).code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert script.epochs == (0, 0)
    script.register()
    assert script.elect().view.master_broker_id == 2


def test_learners_are_never_added_nor_elected(trio):
    learner = trio.register(learner=True).broker_id
    assert trio.alter(1, 2, 3, learner).code is Code.CONTROLLER_INVALID_REPLICAS
    trio.die(1, 2, 3)
    trio.elect()
    assert trio.elect(learner, designate=True).code is Code.CONTROLLER_ELECT_MASTER_FAILED
    unclean = trio.elect(learner, designate=True, unclean=True)
    assert unclean.code is Code.CONTROLLER_ELECT_MASTER_FAILED


def test_a_member_that_registers_as_learner_leaves_the_set(trio):
    assert trio.register(3, learner=True).ok
    assert trio.group.sync_state_set == (1, 2)
    assert effect_types(trio) == [SetChanged]
    trio.alter(1)
    refused = trio.register(1, learner=True)
    assert refused.code is Code.CONTROLLER_BROKER_ID_INVALID


# --- rules ------------------------------------------------------------------------------------


def test_r3_a_new_life_of_the_master_opens_an_election_which_it_may_win(trio):
    """1. Master 1 is killed and comes back at once, registering another incarnation.

    2. It is not "the master that lives": 2011 would let it go on in its old epoch.
    3. With the longest log it wins, one epoch on.
    """
    trio.die(1)
    trio.register(1, incarnation="life-1b", max_offset=50, epoch=1)
    assert trio.group.needs_election == REASON_MASTER_RESTARTED
    assert effect_types(trio) == [ReplicasChanged]
    assert not trio.register(2).master_alive
    result = trio.elect(expected_master_epoch=1)
    assert result.ok
    assert (result.view.master_broker_id, result.view.master_epoch) == (1, 2)
    assert result.view.master_incarnation == "life-1b"
    assert trio.group.needs_election == ""


def test_r3_who_registers_again_as_the_same_process_causes_no_election(trio):
    """Nor does another process of a slave."""
    assert trio.register(1).ok and trio.register(2).ok
    restarted(trio, 3)
    assert trio.group.needs_election == ""


def test_r3_a_deposed_master_needs_no_election_of_its_own(trio):
    trio.alter(1, confirm_offset=500)
    restarted(trio, 1, max_offset=400)
    assert trio.group.needs_election == REASON_MASTER_RESTARTED
    assert trio.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert (trio.group.master_broker_id, trio.group.needs_election) == (0, "")


def test_r3_an_alter_of_another_life_of_the_master_is_refused(trio):
    trio.die(1)
    trio.register(1, incarnation="life-1b")
    refused = trio.alter(1, master_incarnation="life-1b")
    assert refused.code is Code.CONTROLLER_INVALID_MASTER
    refused = trio.alter(1, master_incarnation="")
    assert refused.code is Code.CONTROLLER_INVALID_MASTER
    assert trio.alter(1, master_broker_id=2).code is Code.CONTROLLER_INVALID_MASTER


@pytest.mark.parametrize(("rules", "reason"), [(3, "broker 3"), (4, "broker 3, mqctl")])
def test_a_clean_names_its_caller_from_rules_4_on(trio, rules, reason):
    command = CleanBrokerData(
        broker_name="broker-a", broker_ids=(3,), clean_living_broker=True, reason="mqctl"
    )
    assert trio.state.apply(command, 99, rules).state.history[-1].reason == reason


def test_r9_an_election_keeps_the_live_old_members(trio):
    """{winner} alone would make the first acks a single copy."""
    trio.die(1)
    assert trio.elect().view.sync_state_set == {2, 3}
    trio.die(3)
    trio.revive(1)
    trio.alter(1, 2, 3)
    assert trio.elect(1, designate=True).view.sync_state_set == {1, 2}


def test_r9_without_a_candidate_the_set_stays_and_the_epoch_moves_once(trio):
    trio.die(1, 2, 3)
    trio.elect(confirm_floor=7)
    assert trio.state.history[-1].confirm_offset == 7
    assert trio.group.master_broker_id == 0
    assert trio.group.sync_state_set == (1, 2, 3)
    assert trio.epochs == (2, 2)
    assert effect_types(trio) == [RoleChanged]


def test_r10_duplicate_triggers_elect_once(trio):
    """Two scans saw the same death; the second names an epoch that has passed."""
    trio.die(1)
    assert trio.elect(expected_master_epoch=1).ok
    master = trio.group.master_broker_id
    trio.die(master)
    stale = trio.elect(expected_master_epoch=1)
    assert stale.code is Code.CONTROLLER_FENCED_MASTER_EPOCH
    assert stale.view.key == (2, 3)
    assert trio.group.master_broker_id == master


def test_r10_an_election_in_place_of_nobody_names_its_epoch_too(trio):
    """1. No candidate: the group has no master, and epoch 2. 2. A late duplicate of the trigger of
    epoch 1 elects nobody, though somebody could be elected by now."""
    trio.die(1, 2, 3)
    trio.elect(expected_master_epoch=1)
    assert (trio.group.master_broker_id, trio.group.master_epoch) == (0, 2)
    trio.revive(2)
    stale = trio.elect(expected_master_epoch=1)
    assert stale.code is Code.CONTROLLER_FENCED_MASTER_EPOCH
    assert (trio.group.master_broker_id, trio.group.master_epoch) == (0, 2)
    assert trio.elect(expected_master_epoch=2).ok
    assert (trio.group.master_broker_id, trio.group.master_epoch) == (2, 3)


def test_r10_alter_names_the_set_that_it_replaces(trio):
    assert trio.alter(1, 2).ok
    stale = trio.alter(1, 3, sync_state_set_epoch=2)
    assert stale.code is Code.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
    assert trio.group.sync_state_set == (1, 2)


def test_r11_a_repeated_request_hears_the_same_answer(trio):
    """The reply to an expand is lost, a shrink follows, the expand is asked again.

    It is not carried out again, and the answer is the one of then.
    """
    trio.alter(1)
    first = trio.alter(1, 2, request_id="expand-7")
    assert first.ok
    again = {"request_id": "expand-7", "sync_state_set_epoch": 3}
    assert trio.alter(1, 2, **again) == first
    assert trio.effects == ()
    trio.alter(1)
    assert trio.alter(1, 2, **again) == first
    assert trio.group.sync_state_set == (1,)


def test_r11_refusals_are_remembered_too_but_not_those_of_a_deposed_leader(trio):
    trio.die(3)
    trio.alter(1)
    refused = trio.alter(1, 3, request_id="x")
    assert refused.code is Code.CONTROLLER_BROKER_NOT_ALIVE
    trio.revive(3)
    assert trio.alter(1, 3, request_id="x") == refused
    trio.lead()
    trio.lead()
    trio.controller_epoch = 1
    assert trio.alter(1, 3, request_id="y").code is Code.CONTROLLER_NOT_LEADER
    trio.controller_epoch = 2
    assert trio.alter(1, 3, request_id="y").ok


def test_r11_the_table_of_answers_is_bounded(trio):
    for number in range(ANSWERS_MAX + 5):
        trio.elect(request_id=f"request-{number}")
    assert len(trio.state.answered) == ANSWERS_MAX
    assert trio.state.answer_to("request-4") is None
    assert trio.state.answer_to("request-5") is not None


def test_r12_alter_refuses_an_added_member_that_restarted(trio):
    """2 acked, was killed (page cache kept or not), registered anew: the ack was another life's."""
    trio.alter(1, 3)
    trio.die(2)
    trio.register(2, incarnation="life-2b")
    acked_by = (NewMember(1, "life-1"), NewMember(2, "life-2"), NewMember(3, "life-3"))
    refused = trio.alter(new_set=acked_by)
    assert refused.code is Code.CONTROLLER_INVALID_REPLICAS
    assert trio.alter(1, 2, 3).ok


def test_r12_a_master_that_can_name_processes_names_that_of_each_added_member(trio):
    """A member that stays needs no name: it was compared when it was added."""
    trio.alter(1, 3)
    refused = trio.alter(new_set=(NewMember(1), NewMember(2), NewMember(3)))
    assert refused.code is Code.CONTROLLER_INVALID_REPLICAS
    assert trio.alter(new_set=(NewMember(1), NewMember(2, "life-2"), NewMember(3))).ok


def test_r12_a_member_that_lives_in_an_unregistered_life_is_not_alive(trio):
    trio.alter(1, 3)
    trio.revive(2, "life-2b")
    assert trio.alter(1, 2, 3).code is Code.CONTROLLER_BROKER_NOT_ALIVE


def test_r12_java_brokers_have_no_lives_and_may_alter(script):
    """1001 over remoting names no incarnation: allowed where the master registered without one."""
    for broker_id in (1, 2):
        script.apply_id(broker_id)
        assert script.register(broker_id, incarnation="", register_check_code="").ok
    assert script.elect(1).ok
    assert script.alter(new_set=(NewMember(1), NewMember(2))).ok
    native = script.register()
    script.revive(native.broker_id, "life-3")
    other = script.alter(new_set=(NewMember(1), NewMember(2), NewMember(3, "life-3b")))
    assert other.code is Code.CONTROLLER_INVALID_REPLICAS
    assert script.alter(new_set=(NewMember(1), NewMember(2), NewMember(3))).ok
    script.elect(3, designate=True)
    assert script.alter(new_set=(NewMember(1), NewMember(3))).ok
    refused = script.alter(new_set=(NewMember(1), NewMember(3)), master_incarnation="")
    assert refused.code is Code.CONTROLLER_INVALID_MASTER


def test_r13_a_log_that_begins_later_than_the_masters_does_not_join(trio):
    """Begun at the master's last file, it lacks the old messages that the master still has."""
    trio.alter(1, 2)
    trio.tell(1, min_offset=0)
    trio.tell(3, min_offset=4096)
    assert trio.alter(1, 2, 3).code is Code.CONTROLLER_INVALID_REPLICAS
    trio.tell(1, min_offset=4096)
    assert trio.alter(1, 2, 3).ok
    trio.alter(1, 2)
    trio.die(1)
    assert trio.alter(1, 2, 3).ok, "where the master's log begins is not known"


def test_r16_a_candidate_behind_the_confirm_offset_is_passed_over(trio):
    """Both what the leader heard and what an Alter said count; an unclean election resets it."""
    trio.alter(1, 2, confirm_offset=500)
    trio.die(1)
    trio.tell(2, epoch=1, max_offset=400)
    assert trio.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    trio.tell(2, max_offset=500)
    refused = trio.elect(confirm_floor=501)
    assert refused.code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert trio.epochs[0] == 2
    assert trio.elect(confirm_floor=500).ok
    trio.die(2)
    trio.tell(3, epoch=1, max_offset=10)
    assert trio.elect(3, designate=True, unclean=True).ok
    assert trio.group.confirm_floor == -1


def test_r17_a_replaced_log_leaves_the_set_while_a_healthy_member_lives(script):
    """Slave 3 comes back under its id with an empty disk: counting it would count nothing."""
    in_sync(script, "log-1", "log-2", "log-3")
    restarted(script, 3, log_id="log-3b", max_offset=0)
    assert script.group.sync_state_set == (1, 2)
    assert last_reason(script) == "broker 3: suspect: its log was replaced"
    assert script.state.history[-2].reason == "suspect: its log was replaced"
    assert script.alter(1, 2, 3).ok


def test_r17_a_master_with_a_replaced_log_is_deposed(script):
    in_sync(script, "log-1", "log-2")
    script.die(1)
    script.register(1, incarnation="life-1b", log_id="log-1b")
    assert script.group.master_broker_id == 0
    assert script.group.sync_state_set == (2,)
    assert script.epochs == (2, 3)
    assert script.elect().view.master_broker_id == 2


def test_r17_suspects_alone_wait_until_every_member_came_and_the_longest_wins(script):
    """1. The building lost power; both logs were replaced by backups.

    2. 1 registers: 2 is not seen, so 1 stays a member, but is not elected.
    3. 2 registers, a suspect too: now the longer log wins, and the epoch is marked unclean.
    """
    in_sync(script, "log-1", "log-2")
    script.die(1, 2)
    script.register(1, incarnation="life-1b", log_id="log-1b", epoch=1, max_offset=10)
    assert script.group.sync_state_set == (1, 2)
    assert script.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    script.register(2, incarnation="life-2b", log_id="log-2b", epoch=1, max_offset=20)
    result = script.elect()
    assert result.view.master_broker_id == 2
    assert result.view.sync_state_set == {2}
    assert script.group.unclean_epoch == result.view.master_epoch
    assert not any(record.suspect for record in script.group.replicas)


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize(("end", "stays"), [(0, False), (799, False), (800, True)])
def test_r17_a_restored_backup_leaves_the_set(trio, heard, end, stays):
    """The same identity and the same log id, but a shorter log than what it had acknowledged.

    The leader heard the confirmOffset, or only an Alter told it before the leader changed.
    """
    trio.alter(1, 2, confirm_offset=-1 if heard else 800)
    fields = {"max_offset": end, "epoch": 1, "confirm_floor": 800 if heard else -1}
    restarted(trio, 2, **fields)
    assert trio.group.sync_state_set == ((1, 2) if stays else (1,))
    if not stays:
        assert last_reason(trio) == f"broker 2: suspect: its log ends at {end}, confirmed was 800"


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [("l1", "l1", True), ("l1", "l2", False), ("", "l2", True), ("l1", "", True)],
)
def test_r17_a_log_is_replaced_where_both_have_names_that_differ(script, before, after, stays):
    in_sync(script, before, before)
    restarted(script, 2, log_id=after)
    assert (2 in script.group.sync_state_set) == stays


def test_a_java_broker_that_becomes_one_of_ours_keeps_its_id_and_its_place(script):
    """Also while its Java process is heard: that one has no name that could differ."""
    for broker_id in (1, 2):
        script.apply_id(broker_id)
        assert script.apply_id(broker_id).broker_id == broker_id
        assert script.effects == ()
        assert script.register(broker_id, incarnation="", register_check_code="").ok
    script.elect(1)
    script.alter(new_set=(NewMember(1), NewMember(2)))
    assert script.register(2, register_check_code="", earlier_lives=("life-1",)).ok
    assert script.group.sync_state_set == (1, 2)


def test_r17_a_folder_that_was_put_back_does_not_know_its_last_life(trio):
    """A backup of life 1; life 2 acknowledged more, which no controller heard of before it died."""
    restarted(trio, 2, earlier_lives=("life-2",), max_offset=900)
    assert trio.group.sync_state_set == (1, 2, 3)
    restarted(trio, 2, incarnation="life-2c", earlier_lives=("life-2",), max_offset=800)
    assert trio.group.sync_state_set == (1, 3)
    assert last_reason(trio).endswith("does not know its last life life-2b: it was put back")


def test_r17_lives_that_ended_before_they_registered_do_no_harm(trio):
    restarted(trio, 2, incarnation="life-2d", earlier_lives=("life-2", "life-2b", "life-2c"))
    restarted(trio, 3, incarnation="life-3b", earlier_lives=())
    assert trio.group.sync_state_set == (1, 2, 3)


def test_r17_a_life_that_goes_on_may_tell_of_an_older_log_end(trio):
    """Its registration was under way while it acked more."""
    assert trio.register(2, max_offset=700, confirm_floor=800).ok
    assert trio.group.sync_state_set == (1, 2, 3)


def test_r17_a_rebooted_machine_leaves_the_set_and_returns_when_it_is_whole_again(trio):
    """1. Power loss on 2; it says that its log may miss what it acked. 2. It leaves the set.

    3. Refilled in part it is not taken in (R12). 4. It announces itself whole, and joins.
    """
    restarted(trio, 2, suspect="stopped uncleanly before a reboot", max_offset=900)
    assert trio.group.sync_state_set == (1, 3)
    assert "reboot" in last_reason(trio)
    assert trio.kinds[-2:] == ["broker_registered", "set_altered"]
    refused = trio.alter(1, 2, 3)
    assert refused.code is Code.CONTROLLER_INVALID_REPLICAS
    assert "reboot" in refused.remark
    assert trio.register(2, incarnation="life-2b", max_offset=900).ok
    assert trio.kinds[-1] == "broker_registered"
    assert trio.alter(1, 2, 3).ok


def test_r17_an_operators_repair_lifts_what_the_replica_itself_said(trio):
    """Set {1,2}: 2 burnt, the machine of 1 rebooted. mqctl repairReplica makes the same life of 1
    say that its log is whole: it is elected, and by a clean election."""
    trio.alter(1, 2)
    trio.die(2, 3)
    restarted(trio, 1, suspect="reboot", epoch=1, max_offset=100)
    assert not trio.elect().ok
    assert trio.register(1, incarnation="life-1b", epoch=1, max_offset=100).ok
    assert trio.elect().view.master_broker_id == 1
    assert trio.group.unclean_epoch == 0


def test_r17_another_life_does_not_lift_what_its_predecessor_said(trio):
    trio.alter(1, 2)
    trio.die(2, 3)
    restarted(trio, 1, suspect="reboot", epoch=1, max_offset=100)
    assert trio.register(1, incarnation="life-1b", suspect="reboot", epoch=1, max_offset=100).ok
    assert not trio.elect().ok, "it has said the same again"
    restarted(trio, 1, incarnation="life-1c", epoch=1, max_offset=100)
    assert not trio.elect().ok
    assert trio.register(1, incarnation="life-1c", epoch=1, max_offset=100).ok
    assert not trio.elect().ok


@pytest.mark.parametrize(
    "found",
    [{"log_id": "log-1b"}, {"earlier_lives": ("life-0",)}, {"confirm_floor": 800}],
    ids=["replaced", "put back", "short"],
)
@pytest.mark.parametrize("said", ["", "reboot"])
def test_r17_what_the_controllers_found_out_no_replica_takes_back(script, found, said):
    """Also if the replica gave a reason of its own as well."""
    in_sync(script, "log-1", "log-2")
    script.die(1, 2)
    fields = {"log_id": "log-1", "max_offset": 100} | found
    restarted(script, 1, suspect=said, **fields)
    assert script.register(1, incarnation="life-1b", log_id=fields["log_id"], max_offset=100).ok
    assert script.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert not script.elect(1, designate=True).ok


@pytest.mark.parametrize(
    ("outside", "blocked"),
    [
        ({"epoch": 1, "max_offset": 1000}, "broker 3 outside of it has more"),
        ({"epoch": 2, "max_offset": 100}, "broker 3 outside of it has more"),
        ({"epoch": 0, "max_offset": 2000, "confirm_offset": 901}, "confirmed up to 901"),
        ({"epoch": 1, "max_offset": 900, "confirm_offset": 900}, ""),
        ({"epoch": 0, "max_offset": 2000, "confirm_offset": 900}, ""),
        ({"epoch": 1, "max_offset": 1000, "learner": True}, ""),
    ],
)
def test_r17_a_suspect_is_not_elected_by_itself_over_more_outside_the_set(trio, outside, blocked):
    """1. A blip shrank the set to {1}; the others stream again. 2. The building loses power.

    3. 1 lost its page cache; 3, no member, holds what 1 had acknowledged. An operator decides.
    """
    trio.alter(1)
    trio.tell(1, master_epoch=1)
    trio.die(1, 2, 3)
    if outside["epoch"] == 2:
        trio.elect()
    restarted(trio, 2, suspect="reboot", epoch=0, max_offset=100)
    restarted(trio, 3, **outside)
    trio.die(3)
    restarted(trio, 1, suspect="reboot", epoch=1, max_offset=900)
    result = trio.elect()
    if not blocked:
        assert result.view.master_broker_id == 1
        assert trio.group.unclean_epoch == trio.group.master_epoch
        return
    assert result.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert blocked in result.remark and "name the master" in result.remark
    assert trio.elect(1, designate=True, unclean=True).ok


def test_r17_what_was_confirmed_before_an_unclean_epoch_stops_no_later_election(trio):
    """3 has been away since; an operator knew of what it had when he named 1."""
    trio.alter(1, 2)
    trio.die(1, 2, 3)
    restarted(trio, 3, epoch=1, max_offset=1000, confirm_offset=1000)
    trio.die(3)
    restarted(trio, 1, suspect="reboot", epoch=1, max_offset=900)
    assert not trio.elect(1, designate=True).ok
    view = trio.elect(1, designate=True, unclean=True).view
    assert view.master_broker_id == 1 and view.unclean_epoch == view.master_epoch
    restarted(trio, 1, incarnation="life-1c", suspect="reboot", epoch=2, max_offset=950)
    result = trio.elect()
    assert result.ok and result.view.master_broker_id == 1


def test_r17_a_living_master_that_finds_damage_makes_room(trio):
    assert trio.register(1, suspect="damage at 4711").ok
    assert trio.group.sync_state_set == (2, 3)
    assert trio.elect().view.master_broker_id == 2


def test_r17_a_suspect_stays_one_while_the_set_changes_around_it(trio):
    trio.die(1, 2, 3)
    restarted(trio, 2, suspect="reboot")
    assert trio.clean(3).ok
    assert trio.group.sync_state_set == (1, 2) and trio.group.replica(2).suspect
    assert not trio.group.is_suspect, "1 may be whole"
    restarted(trio, 1, suspect="reboot")
    assert trio.group.is_suspect
    assert not BrokerGroup("c", "g").is_suspect


def test_r17_a_suspect_that_leaves_the_set_by_a_set_change_is_none_any_more(trio):
    """It stayed because its master was out of sight, and must catch up before it is added again."""
    trio.alter(1, 2)
    trio.die(1)
    restarted(trio, 2, suspect="reboot")
    assert trio.group.replica(2).suspect
    trio.revive(1)
    assert trio.alter(1).ok
    assert not trio.group.replica(2).suspect


@pytest.mark.parametrize(
    ("living", "suspects", "command", "text"),
    [
        ((), (), {}, "no member of the SyncStateSet [1, 2] lives"),
        ((), (), {"broker_id": 3, "designate": True}, "broker 3 does not live"),
        ((2,), (2,), {}, "broker 2 may lack confirmed messages, broker 1 does not live"),
        ((2,), (), {"confirm_floor": 101}, "broker 2 ends at 100, below 101"),
        ((2,), (), {"broker_id": 2, "designate": True, "confirm_floor": 101}, "100, below 101"),
        ((2, 3), (), {"broker_id": 3, "designate": True, "confirm_floor": 101}, "no living, comp"),
        ((2,), (2,), {"broker_id": 2, "designate": True}, "no living, complete member"),
        ((3,), (), {"broker_id": 3, "unclean": True}, "needs the replica named"),
    ],
)
def test_the_refusal_of_an_election_says_what_is_missing(trio, living, suspects, command, text):
    trio.alter(1, 2)
    trio.die(1, 2, 3)
    for broker_id in suspects:
        restarted(trio, broker_id, suspect="reboot")
    for broker_id in living:
        trio.revive(broker_id, epoch=1, max_offset=100)
    refused = trio.elect(**command)
    assert not refused.ok and text in refused.remark


def test_r17_saying_the_same_again_changes_nothing(script):
    """2 was elected though suspect, for want of others; its next registration repeats it."""
    script.register(1)
    script.elect(1)
    restarted(script, 1, suspect="reboot", max_offset=10)
    assert script.elect().ok
    assert script.group.unclean_epoch == script.group.master_epoch
    script.register(2)
    script.alter(1, 2)
    assert script.register(1, incarnation="life-1b", suspect="reboot", max_offset=10).ok
    assert script.group.sync_state_set == (1, 2)
    restarted(script, 1, incarnation="life-1c", suspect="reboot", max_offset=10)
    assert script.group.sync_state_set == (2,), "another process says it for the first time"


def test_r17_nobody_is_elected_while_a_healthy_member_may_come(trio):
    """1. Everyone loses power; 2 comes back from a backup, first. 2. It is not elected.

    3. 3 comes back whole, and wins over the suspect, whose log looks longer.
    """
    trio.die(1, 2, 3)
    restarted(trio, 2, suspect="reboot", epoch=1, max_offset=900)
    assert trio.elect(2).code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert trio.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    restarted(trio, 3, epoch=1, max_offset=800)
    result = trio.elect()
    assert (result.view.master_broker_id, result.view.sync_state_set) == (3, {3})
    assert trio.group.unclean_epoch == 0


def test_r16_r17_a_wiped_last_member_is_only_for_an_operator(trio):
    """Set {1}: its disk is gone, and with it what only it had. 2 has most of it."""
    trio.alter(1, confirm_offset=800)
    restarted(trio, 1, log_id="log-1b", max_offset=0)
    trio.tell(2, epoch=1, max_offset=700)
    refused = trio.elect()
    assert refused.code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert "only an unclean election" in refused.remark
    assert not trio.elect(2, designate=True).ok
    result = trio.elect(2, designate=True, unclean=True)
    assert result.view.master_broker_id == 2
    assert result.view.unclean_epoch == result.view.master_epoch


def test_r7_after_an_unclean_election_the_winner_is_alone_in_the_set(trio):
    """G5: it takes a living replica that was named. What the old members hold beyond its log is of
    another history."""
    assert trio.alter(1, 2).ok
    trio.die(1)
    assert trio.elect(3, unclean=True).code is Code.CONTROLLER_ELECT_MASTER_FAILED, "not named"
    assert trio.elect(3, designate=True).code is Code.CONTROLLER_ELECT_MASTER_FAILED
    trio.die(3)
    assert not trio.elect(3, designate=True, unclean=True).ok
    trio.revive(3)
    assert trio.elect(3, designate=True, unclean=True).ok
    assert (trio.group.master_broker_id, trio.group.sync_state_set) == (3, (3,))
    assert trio.group.unclean_epoch == trio.group.master_epoch
    assert trio.state.history[-1].unclean


def test_r7_the_leader_itself_elects_nobody_uncleanly(trio):
    trio.alter(1)
    trio.die(1)
    assert trio.elect(unclean=True).code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert trio.group.unclean_epoch == 0


def test_r7_a_complete_member_asked_for_uncleanly_is_elected_cleanly(trio):
    trio.die(1)
    assert trio.elect(2, designate=True, unclean=True).ok
    assert trio.group.unclean_epoch == 0
    assert trio.group.sync_state_set == (2, 3)


def test_r7_r16_a_member_behind_what_was_confirmed_marks_the_epoch(trio):
    trio.die(1, 3)
    trio.tell(2, epoch=1, max_offset=700)
    assert not trio.elect(2, designate=True, confirm_floor=800).ok
    assert trio.elect(2, designate=True, unclean=True, confirm_floor=800).ok
    assert trio.group.unclean_epoch == trio.group.master_epoch


def test_r18_a_second_life_is_refused_while_the_first_lives(trio):
    refused = trio.register(2, incarnation="clone")
    assert refused.code is Code.CONTROLLER_BROKER_ID_INVALID
    assert trio.group.replica(2).incarnation == "life-2"
    assert trio.register(2).ok
    trio.die(2)
    assert trio.register(2, incarnation="life-2b").ok


def test_r19_an_empty_log_is_not_elected_while_another_has_data(script):
    """A log that was never replicated came along, and the empty replica asks first. The wait counts
    from the newest replica's coming: a cluster that starts slowly may bring more data."""
    script.register(1)
    script.now_ms += FIRST_ELECTION_SETTLE_MS - 1
    script.register(2, max_offset=900)
    script.now_ms += FIRST_ELECTION_SETTLE_MS - 1
    for asker in (1, 2):
        assert script.elect(asker).code is Code.CONTROLLER_ELECT_MASTER_FAILED
    script.now_ms += 1
    result = script.elect(1)
    assert (result.view.master_broker_id, result.view.master_epoch) == (2, 1)


@pytest.mark.parametrize(("named", "unclean_epoch"), [(1, 1), (2, 0)])
def test_r19_r44_an_operator_who_names_an_empty_log_first_has_to_say_so(
    script, named, unclean_epoch
):
    """An unclean election of the only log loses nothing, and is none."""
    script.register(1)
    script.register(2, max_offset=900)
    refused = script.elect(1, designate=True)
    assert not refused.ok and "empty log" in refused.remark
    view = script.elect(named, designate=True, unclean=True).view
    assert (view.master_broker_id, view.unclean_epoch) == (named, unclean_epoch)


@pytest.mark.parametrize(
    ("logs", "why"),
    [
        ({1: (-1, -1), 2: (7, 900)}, "broker 2 knows of masterEpoch 7"),
        ({1: (6, 5_000), 2: (7, 4_000)}, "broker 1, 2 have data"),
    ],
    ids=["one log of an earlier epoch", "two logs"],
)
def test_r19_logs_with_data_and_no_election_need_the_operator(script, logs, why):
    """Wiped controllers: the first to come may be long out of the set, and others may be late. The
    longest log may still lack what was acknowledged."""
    for broker_id, (epoch, end) in logs.items():
        script.register(broker_id, epoch=epoch, max_offset=end)
    for asker in (0, 1, 2):
        script.now_ms += 10 * FIRST_ELECTION_SETTLE_MS
        refused = script.elect(asker)
        assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
        assert why in refused.remark
    assert script.epochs == (0, 0)
    result = script.elect(2, designate=True)
    assert (result.view.master_broker_id, result.view.master_epoch) == (2, 8)
    assert script.group.unclean_epoch == 0


def test_r19_a_fresh_group_elects_whoever_asks_first(script):
    """Also before its session, unless an operator names it, who should know that it lives."""
    for _ in range(2):
        script.register(epoch=-1, max_offset=0)
    script.die(2)
    assert "does not live" in script.elect(2, designate=True).remark
    assert "does not live" in script.elect(2, designate=True, unclean=True).remark
    result = script.elect(2)
    assert (result.broker_id, result.view.master_broker_id, result.view.master_epoch) == (2, 2, 1)


def test_r19_a_heartbeat_counts_more_than_the_registration(script):
    """One byte is data: the empty log does not win by asking first."""
    script.register(max_offset=0)
    script.register(max_offset=0)
    script.tell(2, max_offset=1)
    script.now_ms += FIRST_ELECTION_SETTLE_MS
    assert script.elect(1).view.master_broker_id == 2


def test_who_asks_without_being_named_gains_nothing(trio):
    living = trio.elect()
    assert (living.code, living.view.key) == (Code.CONTROLLER_MASTER_STILL_EXIST, (1, 2))
    assert living.remark == "master 1 of masterEpoch 1 lives"
    trio.die(1)
    trio.tell(2, epoch=1, max_offset=100)
    trio.tell(3, epoch=1, max_offset=101)
    assert trio.elect(2).view.master_broker_id == 3
    assert last_reason(trio) == "asked by broker 2"
    assert trio.elect(2, designate=True).view.master_broker_id == 2
    assert last_reason(trio) == "named broker 2"
    trio.die(2)
    assert trio.elect(designate=True).view.master_broker_id == 3, "no replica is named"
    assert last_reason(trio) == "asked by the controller"


def test_r19_the_first_epoch_is_above_what_a_replica_accepted(script):
    """No byte and no epoch entry is left of it, but the replica would not take an older view."""
    script.register(epoch=-1, max_offset=0, accepted_epoch=6)
    assert script.elect(1).view.master_epoch == 7


def test_r19_a_newer_set_of_the_same_epoch_stops_elections_too(trio):
    """Set {1} was recorded by an Alter that these controllers lost: 2 lacks what 1 acked since."""
    trio.die(1)
    trio.tell(2, master_epoch=1, sync_state_set_epoch=2)
    trio.tell(3, master_epoch=1, sync_state_set_epoch=3)
    refused = trio.elect()
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "broker 3 knows of masterEpoch 1 with syncStateSetEpoch 3" in refused.remark
    assert trio.epochs == (1, 2)


def test_r19_a_controller_that_forgot_stops_electing(trio):
    """A replica knows a higher epoch than is recorded: only an operator may go on from there."""
    trio.die(1)
    trio.tell(3, master_epoch=9)
    refused = trio.elect()
    assert refused.code is Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "9" in refused.remark
    assert trio.epochs == (1, 2)
    result = trio.elect(2, designate=True)
    assert (result.view.master_broker_id, result.view.master_epoch) == (2, 10)


@pytest.mark.parametrize(("reported", "elected"), [(EPOCH_MAX, False), (EPOCH_MAX + 1, True)])
def test_r47_an_absurd_epoch_uses_up_no_epochs_and_stops_no_election(trio, reported, elected):
    trio.die(1)
    trio.tell(3, master_epoch=reported, epoch=reported)
    assert trio.elect().ok == elected
    assert trio.group.master_epoch == 1 + elected


def test_a_session_counts_with_the_log_that_it_registered_until_it_reports(trio):
    restarted(trio, 2, epoch=1, max_offset=90, confirm_offset=80, election_priority=7)
    silent, empty = LiveBroker(2, "life-2b"), LiveBroker(2, "life-2b", max_offset=0)
    assert living_replicas(trio.group, [empty]) == {2: empty}
    assert living_replicas(trio.group, [silent]) == {2: LiveBroker(2, "life-2b", 1, 90, 80, 7)}


def test_a_view_shows_all_that_is_recorded(trio):
    trio.register(3, learner=True, log_id="log-3")
    replicas = tuple(
        Replica(n, f"10.0.0.{n}:10911", f"10.0.0.{n}:10912", n != 2, n == 3, f"life-{n}", log_id)
        for n, log_id in ((1, ""), (2, ""), (3, "log-3"))
    )
    view = trio.group.role_view({1, 3}, 77)
    assert (view.raft_index, view.replicas) == (77, replicas)
    assert (view.master_address, view.master_ha_address) == ("10.0.0.1:10911", "10.0.0.1:10912")
    assert [each.alive for each in fill_alive(view, {2}).replicas] == [False, True, False]


# --- registration, fences, reports ------------------------------------------------------------


def test_asking_for_an_id_again_with_the_same_check_code_gives_the_same(script):
    mine = {"register_check_code": "mine", "incarnation": "a", "address": "h:1"}
    mine["ha_address"] = "h:2"
    first = script.register(**mine)
    second = script.register(**mine)
    assert first.broker_id == second.broker_id == 1
    assert script.effects == ()
    assert script.kinds == ["broker_registered"]
    other = script.register(register_check_code="other", incarnation="b")
    assert other.broker_id == 2
    script.die(1)
    taken = script.register(1, register_check_code="other", incarnation="b")
    assert taken.code is Code.CONTROLLER_BROKER_ID_INVALID
    assert script.group.replica(1).incarnation == "a"


def test_an_id_is_given_only_against_a_check_code(script):
    for fields in ({}, {"incarnation": "", "register_check_code": "code"}):
        refused = script.register(**({"register_check_code": ""} | fields))
        assert refused.code is Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
    assert script.apply_id(1).ok
    for refused in (script.apply_id(0), script.apply_id(2, cluster_name="other")):
        assert refused.code is Code.CONTROLLER_BROKER_ID_INVALID
    assert len(script.group.replicas) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({}, ""), ({"learner": True}, "learner"), ({"suspect": "reboot"}, "suspect: reboot")],
)
def test_the_history_says_what_registers(script, fields, reason):
    script.register(**fields)
    assert last_reason(script) == reason


def test_a_changed_address_is_told_and_recorded(trio):
    trio.register(2, address="10.9.9.9:10911")
    assert effect_types(trio) == [ReplicasChanged]
    assert trio.effects[0].view.replica(2).address == "10.9.9.9:10911"
    assert trio.state.history[-1].address == "10.9.9.9:10911"
    trio.register(2, address="10.9.9.9:10911", max_offset=77)
    assert trio.effects == ()
    assert trio.group.replica(2).max_offset == 77


def test_a_deposed_controllers_commands_are_refused(script):
    """pysyncobj rule 3: what a former leader queued or forwarded comes too late."""
    assert script.lead("n0") == 1
    script.three_in_sync()
    assert script.lead("n1") == 2
    script.controller_epoch = 1
    assert script.elect(2, designate=True).code is Code.CONTROLLER_NOT_LEADER
    assert script.group.master_broker_id == 1
    script.controller_epoch = 2
    assert script.elect(2, designate=True).ok


def test_becoming_controller_twice_with_one_nonce_raises_the_epoch_once(script):
    command = BecomeController(node="n0", nonce="abc")
    assert script.apply(command).controller_epoch == 1
    assert script.apply(command).controller_epoch == 1
    assert script.state.controller_epoch == 1
    assert script.state.log_name == "abc"


def test_reported_events_enter_the_history_and_nothing_else(script):
    script.lead()
    script.three_in_sync()
    before = script.state.groups
    report = ReportEvent(
        broker_name="broker-a",
        broker_id=1,
        kind="first_ack",
        master_epoch=1,
        time_ms=123,
        json='{"offset":7}',
    )
    assert script.apply(report).broker_id == 1
    event = script.state.history[-1]
    assert (event.kind, event.time_ms, event.json) == ("first_ack", 123, '{"offset":7}')
    assert event.log == script.state.log_name
    assert script.state.groups == before
    forged = ReportEvent(broker_name="broker-a", broker_id=1, kind="elected")
    assert script.apply(forged).code is Code.CONTROLLER_INVALID_REQUEST
    stranger = ReportEvent(broker_name="broker-a", broker_id=9, kind="opened")
    assert script.apply(stranger).code is Code.CONTROLLER_BROKER_METADATA_NOT_EXIST
    stranger = ReportEvent(broker_name="other", broker_id=1, kind="opened")
    assert script.apply(stranger).code is Code.CONTROLLER_BROKER_METADATA_NOT_EXIST


def test_a_note_of_a_controller_enters_the_history_and_nothing_else(trio):
    before = trio.state.groups
    note = NoteEvent(
        broker_name="broker-a", kind="pushed", node="n1", reason="why", json='{"a":1}', time_ms=7
    )
    assert trio.apply(note).ok
    assert trio.apply(msgspec.structs.replace(note, time_ms=0)).ok
    first, second = trio.state.history[-2:]
    assert (first.kind, first.node, first.reason, first.json) == ("pushed", "n1", "why", '{"a":1}')
    assert (first.time_ms, second.time_ms) == (7, trio.now_ms)
    assert trio.state.groups == before
    kinds = trio.kinds
    for fields, code in (
        ({"broker_name": "other"}, Code.CONTROLLER_BROKER_METADATA_NOT_EXIST),
        ({"kind": "elected"}, Code.CONTROLLER_INVALID_REQUEST),
        ({"kind": "opened"}, Code.CONTROLLER_INVALID_REQUEST),
        ({"json": "[1]"}, Code.CONTROLLER_INVALID_REQUEST),
    ):
        assert trio.apply(msgspec.structs.replace(note, **fields)).code is code
    assert trio.kinds == kinds


def test_a_report_adds_an_object_of_json_or_nothing(script):
    script.register()
    for text in ("[1]", "{", "x" * 3_000, '"' + "y" * 3_000 + '"'):
        report = ReportEvent(broker_name="broker-a", broker_id=1, kind="opened", json=text)
        assert script.apply(report).code is Code.CONTROLLER_INVALID_REQUEST
    assert script.kinds == ["broker_registered"]
    for text in ("", '{"a":"' + "z" * (REPORT_SIZE_MAX - 8) + '"}'):
        report = ReportEvent(broker_name="broker-a", broker_id=1, kind="opened", json=text)
        assert script.apply(report).ok
        assert script.state.history[-1].json == text


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": EPOCH_MAX + 1},
        {"accepted_epoch": EPOCH_MAX + 1},
        {"broker_id": BROKER_ID_MAX + 1},
        {"earlier_lives": ("x", "i" * 256)},
        *({name: "t" * 256} for name in REGISTERED_TEXTS),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_nonsense_is_not_registered(script, fields):
    assert script.register(**fields).code is Code.CONTROLLER_INVALID_REQUEST
    assert script.state.groups == {}
    assert script.apply_id(1, "c" * 256).code is Code.CONTROLLER_INVALID_REQUEST
    assert script.apply(RegisterBroker(broker_name="")).code is Code.CONTROLLER_INVALID_REQUEST


def test_what_is_just_allowed_is_registered_and_replaced_by_the_next_registration(script):
    """But a broker that leaves a text out takes nothing away."""
    told = dict.fromkeys(REGISTERED_TEXTS, "t" * 255)
    numbers = {"epoch": EPOCH_MAX, "accepted_epoch": EPOCH_MAX, "max_offset": 9}
    numbers |= {"confirm_offset": 8, "election_priority": 7, "is_stranger": True}
    script.register(4, earlier_lives=("i" * 255, "t" * 255), suspect="s" * 256, **told, **numbers)
    record = script.group.replica(4)
    assert record.earlier_lives == ("i" * 255,) and record.suspicion == "s" * 255
    told.pop("cluster_name")
    for name, value in (told | numbers).items():
        assert getattr(record, name) == value, name
    again = {"epoch": 1, "max_offset": 90, "confirm_offset": 80, "election_priority": 70}
    again |= {"accepted_epoch": 2, "ha_address": "h", "log_id": "l"}
    empty = dict.fromkeys(("address", "owner", "register_check_code", "cluster_name"), "")
    script.register(4, incarnation="t" * 255, **again, **empty)
    renewed = script.group.replica(4)
    expected = again | {"suspicion": "", "is_stranger": False, "earlier_lives": ()}
    assert renewed == msgspec.structs.replace(record, **expected)


def test_the_history_says_who_saw_the_need_of_an_election_when_and_how(trio):
    """Also if no replica could be elected."""
    stamps = {"detected_ms": 999_990, "silent_ms": 812, "node": "n2"}
    trio.die(1)
    trio.tell(2, epoch=1, max_offset=640)
    trio.elect(reason="session_closed", confirm_floor=600, **stamps)
    elected = trio.state.history[-1]
    assert (elected.kind, elected.reason) == ("elected", "session_closed")
    assert (elected.master_before, elected.broker_id, elected.incarnation) == (1, 2, "life-2")
    assert (elected.set_before, elected.sync_state_set) == ((1, 2, 3), (2, 3))
    assert (elected.max_offset, elected.confirm_offset) == (640, 600)
    trio.die(2, 3)
    trio.elect(reason="session_closed", **stamps)
    failed = trio.state.history[-1]
    assert failed.kind == "election_failed" and failed.reason.startswith("session_closed: ")
    for event in (elected, failed):
        assert {name: getattr(event, name) for name in stamps} == stamps
        assert event.proposed_ms == event.time_ms == 1_000_000


def test_a_new_leading_controller_names_the_one_before(script):
    script.apply(BecomeController(node="n0", nonce="a", started_ms=5))
    script.apply(BecomeController(node="n1", nonce="b", started_ms=6, leader_seen_ms=7))
    first, second = script.state.history
    assert (first.node, first.node_before, first.started_ms) == ("n0", "", 5)
    assert (second.node, second.node_before, second.leader_seen_ms) == ("n1", "n0", 7)


def test_the_history_says_how_a_set_changed(trio):
    trio.alter(1)
    trio.alter(1, 2)
    trio.alter(1, 3, reason="2 lags by 700 ms")
    trio.alter(1, 2)
    reasons = [e.reason for e in trio.state.history if e.kind == "set_altered"]
    assert reasons == ["expand", "shrink", "expand", "2 lags by 700 ms", "replace"]


def test_the_clock_of_the_state_does_not_go_back(script):
    script.lead()
    script.now_ms -= 500_000
    script.register()
    assert script.state.clock_ms == 1_000_000
    assert script.state.history[-1].time_ms == 1_000_000


def test_a_master_must_be_in_the_set_it_proposes(trio):
    result = trio.alter(2, 3)
    assert result.code is Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    unknown = trio.alter(1, 9)
    assert unknown.code is Code.CONTROLLER_INVALID_REPLICAS


def test_without_a_master_nobody_alters(trio):
    trio.die(1, 2, 3)
    trio.elect()
    for master in (0, 1):
        refused = trio.alter(1, master_broker_id=master)
        assert refused.code is Code.CONTROLLER_INVALID_MASTER


def test_a_snapshot_of_an_earlier_version_is_read():
    """A suspect of set {1,2}, of when nobody wrote down by whose word: no word takes it back."""
    golden = Path(__file__).with_name("snapshot-v1.json")
    state = ControllerState.from_snapshot(json.loads(golden.read_text()))
    record = state.group("broker-a").replica(1)
    assert (record.suspect, record.suspect_told, record.suspicion) == (True, False, "reboot")
    state.check_invariants()


@pytest.mark.parametrize(
    "snapshot",
    [
        {},
        {"v": 2, "state": "{}"},
        {"v": 1},
        {"v": 1, "state": "{"},
        {"v": 1, "state": {}},
        {"v": 1, "state": '{"groups":{"a":3}}'},
    ],
)
def test_a_snapshot_that_cannot_be_read_is_refused(snapshot):
    with pytest.raises(SnapshotError):
        ControllerState.from_snapshot(snapshot)


def test_groups_do_not_touch_each_other(trio):
    other = RegisterBroker(
        broker_name="broker-b", cluster_name="c", register_check_code="k", incarnation="x"
    )
    assert trio.apply(other).broker_id == 1
    assert trio.state.broker_names() == ("broker-a", "broker-b")
    elect = ElectMaster(broker_name="broker-b", broker_id=1, live=(LiveBroker(1, "x"),))
    assert trio.apply(elect).ok
    alter = AlterSyncStateSet(
        broker_name="broker-b",
        master_broker_id=1,
        master_incarnation="x",
        master_epoch=1,
        sync_state_set_epoch=1,
        new_set=(NewMember(1, "x"), NewMember(2, "life-2")),
    )
    assert trio.apply(alter).code is Code.CONTROLLER_INVALID_REPLICAS
    assert trio.epochs == (1, 2)


def test_r16_what_the_leader_of_an_election_heard_stays_a_floor_for_the_next(trio):
    """1. Its leader heard that 600 is confirmed, and 2 wins. 2. The lead moves to a controller that
    heard nothing, 2 dies: 3, which ends at 500, is not elected."""
    trio.tell(2, epoch=1, max_offset=600)
    trio.tell(3, epoch=1, max_offset=500)
    trio.die(1)
    assert trio.elect(confirm_floor=600).ok
    assert (trio.group.master_broker_id, trio.group.confirm_floor) == (2, 600)
    trio.die(2)
    assert trio.elect().code is Code.CONTROLLER_MASTER_NOT_AVAILABLE


def test_r16_who_heard_less_keeps_the_floor_that_is_recorded(trio):
    """1. An Alter recorded that 500 is confirmed, the next one less. 2. A new leader, which heard
    of 100 only, elects. 3. A later candidate must still reach 500."""
    assert trio.alter(1, 2, confirm_offset=500).ok
    assert trio.alter(1, 2, 3, confirm_offset=400).ok
    assert trio.group.confirm_floor == 500
    trio.tell(2, max_offset=600)
    trio.die(1)
    assert trio.elect(confirm_floor=100).ok
    assert trio.group.master_broker_id == 2
    assert trio.group.confirm_floor == 500


def test_r7_a_later_clean_election_does_not_forget_the_unclean_one(trio):
    """A replica that was away for both must still learn why its bytes may be cut (R23)."""
    assert trio.alter(1, 2).ok
    trio.die(1, 2)
    assert trio.elect(3, designate=True, unclean=True).ok
    unclean = trio.group.master_epoch
    assert trio.group.unclean_epoch == unclean
    trio.revive(2)
    assert trio.alter(2, 3).ok
    trio.die(3)
    assert trio.elect().ok
    assert trio.group.master_epoch > unclean
    assert trio.group.unclean_epoch == unclean


def test_r19_the_first_election_waits_for_the_one_that_has_data(script):
    script.register(1)
    script.register(2, max_offset=900)
    script.die(2)
    script.now_ms += 10 * FIRST_ELECTION_SETTLE_MS
    for asker in (0, 1):
        refused = script.elect(asker)
        assert not refused.ok and "waits for broker 2" in refused.remark
    assert script.epochs == (0, 0)


@pytest.mark.parametrize(
    ("end", "confirmed", "floor"),
    [
        (1_000, 10**15, 1_000),
        (0, 10**15, 0),
        (1_000, 1_001, 1_001),
        (1_000, 1_000 + LAG_BYTES_MAX, 1_000 + LAG_BYTES_MAX),
        (1_000, 1_001 + LAG_BYTES_MAX, 1_000),
        (10**15, 10**15, 10**15),
    ],
)
def test_r59_an_absurd_floor_comes_down_to_the_end_of_the_masters_log(trio, end, confirmed, floor):
    """A slave's log says nothing about it."""
    trio.tell(1, max_offset=end)
    trio.tell(2, max_offset=0)
    live = tuple(reversed(trio.live()))
    assert trio.alter(1, 2, confirm_offset=confirmed, live=live).broker_id == 1
    assert trio.group.confirm_floor == floor


def test_r59_an_operator_lowers_a_floor_that_no_replica_reaches(trio):
    """The refusal has the numbers; an unclean election of a named replica lowers the floor."""
    assert trio.alter(1, 2, confirm_offset=10**15).ok  # before the master's first heartbeat
    trio.tell(2, max_offset=700)
    trio.die(1)
    refused = trio.elect()
    assert refused.code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    for part in ("broker 2 ends at 700", f"{10**15}", "electMaster", "--unclean"):
        assert part in refused.remark, refused.remark
    assert trio.elect(2, designate=True, unclean=True).ok
    assert (trio.group.master_broker_id, trio.group.confirm_floor) == (2, -1)


def test_r52_a_late_registration_of_an_earlier_life_is_refused(trio):
    """1 I1 registers; the request is slow. 2 I1 is killed, I2 registers. 3 I1's request arrives."""
    trio.die(2)
    assert trio.register(2, incarnation="I2", earlier_lives=("life-2", "I1")).ok
    trio.die(2)  # it has no session yet
    before = trio.state.group("broker-a")
    late = trio.register(2, incarnation="I1", earlier_lives=("life-2",))
    assert late.code is Code.CONTROLLER_BROKER_ID_INVALID
    assert trio.group == before and "earlier life" in late.remark
    trio.die(2)
    assert trio.register(2, incarnation="I3", earlier_lives=("life-2", "I1", "I2")).ok
