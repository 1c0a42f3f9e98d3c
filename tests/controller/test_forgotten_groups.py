"""Controllers that know less than the replicas: the epoch they begin with, and whom they elect."""

from typing import Any

import pytest

from batonmq.controller.rules.commands import CommandResult, ElectMaster
from batonmq.controller.rules.election import (
    LastHeard,
    lacks_reported,
    last_seen,
    members_of,
    passes_over,
    with_new_epochs,
)
from batonmq.protocol.codes import ResponseCode

STEP = 4_711


def reported(script: Any, logs: dict[int, tuple[int, int]], **facts: int) -> None:
    """Heartbeats with the (epoch, log end = confirmed) of each replica."""
    for broker_id, (epoch, end) in logs.items():
        seen = {"epoch": epoch, "master_epoch": epoch, "max_offset": end, "confirm_offset": end}
        script.tell(broker_id, **(seen | facts))


def forgotten(script: Any, logs: dict[int, tuple[int, int]]) -> None:
    """Controllers without memory, at which replicas with these logs have registered."""
    for broker_id, (epoch, end) in logs.items():
        script.register(
            broker_id, epoch=epoch, accepted_epoch=epoch, max_offset=end, confirm_offset=end
        )
    reported(script, logs)


def named(script: Any, broker_id: int, *, unclean: bool = False) -> ElectMaster:
    return ElectMaster(
        broker_name="broker-a",
        broker_id=broker_id,
        designate=True,
        unclean=unclean,
        live=script.live(),
    )


def elected_above(script: Any, broker_id: int, *, unclean: bool = False) -> CommandResult:
    """The election of the named replica, in an epoch STEP above what is reported."""
    command = named(script, broker_id, unclean=unclean)
    result: CommandResult = script.apply(with_new_epochs(script.group, command, STEP))
    return result


BEHIND = {1: (5, 2000), 2: (5, 2000), 3: (3, 500)}


@pytest.mark.parametrize(
    ("logs", "elected", "is_behind"),
    [
        (BEHIND, 3, True),
        (BEHIND, 1, False),
        ({1: (5, 2000), 2: (5, 1900), 3: (3, 9000)}, 2, True),
        ({1: (5, 2000), 2: (5, 1900), 3: (3, 9000)}, 3, True),  # longer, of an older epoch
        ({1: (5, 1900), 2: (5, 2000)}, 1, True),
        ({1: (5, 2000), 2: (6, 1900)}, 2, False),
        ({1: (-1, 2000), 2: (-1, 1900)}, 2, True),
    ],
)
def test_r49_a_replica_below_what_another_reports_needs_an_unclean_election(
    script, logs, elected, is_behind
):
    forgotten(script, logs)
    result = script.apply(named(script, elected))
    assert result.ok is not is_behind
    if is_behind:
        assert result.code is ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
        assert "only an unclean election takes it" in result.remark
        assert script.apply(named(script, elected, unclean=True)).ok
    assert script.group.unclean_epoch == (script.group.master_epoch if is_behind else 0)


def test_r49_a_learner_counts_for_nothing_and_is_refused_by_the_rules(script):
    forgotten(script, {1: (4, 100), 2: (4, 100)})
    assert script.register(2, learner=True).ok
    reported(script, {2: (9, 900)})
    assert lacks_reported(script.group, named(script, 2)) == ""
    assert "is a learner" in script.apply(named(script, 2)).remark
    assert script.apply(named(script, 1)).ok


@pytest.mark.parametrize(("elected", "lacks"), [(1, False), (2, False), (3, True)])
def test_r49_a_member_of_an_older_recorded_set_is_behind_what_others_report(script, elected, lacks):
    """The controllers came back with an older memory: their set is not the one of now."""
    forgotten(script, dict.fromkeys((1, 2, 3), (0, 0)))
    assert script.apply(named(script, 1)).ok
    assert not lacks_reported(script.group, named(script, elected))
    reported(script, {1: (4, 2000), 2: (4, 2000), 3: (1, 1500)}, master_epoch=4)
    why = lacks_reported(script.group, named(script, elected))
    assert ("only an unclean election takes it" in why) is lacks
    assert not lacks_reported(script.group, named(script, 7))


def test_r19_the_living_master_may_be_named_where_the_record_is_older(script):
    """Its set is a newer one than these controllers know: it goes on in an epoch above all."""
    forgotten(script, {1: (0, 0), 2: (0, 0)})
    assert script.apply(named(script, 1)).ok
    assert not script.apply(named(script, 1)).ok, "it leads already"
    reported(script, {1: (1, 2000), 2: (1, 2000)}, sync_state_set_epoch=9)
    result = elected_above(script, 1)
    assert result.ok and (script.group.master_broker_id, script.epochs[0]) == (1, 1 + STEP + 1)


def test_r49_whoever_may_follow_a_master_of_the_highest_epoch_is_out_of_sight(script):
    forgotten(script, BEHIND)
    group = script.group
    assert members_of(group) == (1, 2)

    def passed() -> list[int]:
        members = [
            last_seen(group, record, LastHeard(), lives=record.broker_id in script.living)
            for record in group.replicas
            if record.broker_id in members_of(group)
        ]
        command = named(script, 3, unclean=True)
        return [each.broker_id for each in passes_over(group, command, members)]

    script.die(1)
    assert passed() == [], "2 hears of the election, and acknowledges nothing from then on"
    script.die(2)
    assert passed() == [1, 2]


def test_r47_controllers_that_forgot_begin_far_above_all_epochs_that_are_reported(script):
    """An absent replica may know the next number already."""
    forgotten(script, {1: (5, 2000), 2: (5, 2000)})
    assert elected_above(script, 1).ok and script.epochs[0] == 5 + STEP + 1
    # From here on they know the group: epochs grow by one.
    reported(script, {1: (5, 2000), 2: (5, 2000)}, master_epoch=script.epochs[0])
    known = named(script, 2)
    assert with_new_epochs(script.group, known, STEP) is known


def test_r47_restored_controllers_that_know_an_older_epoch_begin_above_it_as_well(script):
    forgotten(script, {1: (0, 0), 2: (0, 0)})
    assert script.apply(named(script, 1)).ok
    reported(script, {1: (4, 2000), 2: (4, 2000)})
    assert elected_above(script, 2, unclean=True).ok and script.epochs[0] == 4 + STEP + 1
