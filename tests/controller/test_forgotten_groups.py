"""Controllers that know less than the replicas: the epoch they begin with, and whom they elect."""

import pytest
from msgspec.structs import replace

from batonmq.controller.rules.commands import (
    BecomeController,
    CommandResult,
    ElectMaster,
    LiveBroker,
    RegisterBroker,
)
from batonmq.controller.rules.election import (
    LastHeard,
    lacks_reported,
    last_seen,
    members_of,
    passes_over,
    with_new_epochs,
)
from batonmq.controller.rules.groups import BrokerGroup
from batonmq.controller.rules.state import ControllerState
from batonmq.protocol.codes import ResponseCode

STEP = 4_711


class Forgetful:
    """Controllers without memory; replicas register with (epoch, log end = confirmed)."""

    def __init__(self, facts: dict[int, tuple[int, int]]) -> None:
        self.state, self.index = ControllerState(), 0
        self.apply(BecomeController(node="n0", nonce="x"))
        for broker_id, (epoch, end) in facts.items():
            command = RegisterBroker(
                request_id=f"r{broker_id}",
                controller_epoch=1,
                broker_name="g",
                cluster_name="c",
                broker_id=broker_id,
                address=f"h{broker_id}:1",
                incarnation=f"i{broker_id}",
                log_id=f"l{broker_id}",
                epoch=epoch,
                max_offset=end,
                confirm_offset=end,
                accepted_epoch=epoch,
            )
            assert self.apply(command).ok
        self.live = tuple(
            LiveBroker(n, f"i{n}", epoch=e, max_offset=end, confirm_offset=end, master_epoch=e)
            for n, (e, end) in facts.items()
        )

    def apply(self, command: BecomeController | RegisterBroker | ElectMaster) -> CommandResult:
        self.index += 1
        done = self.state.apply(command, self.index)
        self.state = done.state
        return done.result

    @property
    def group(self) -> BrokerGroup:
        group = self.state.group("g")
        assert group is not None
        return group

    def command(self, broker_id: int, *, unclean: bool = False, live: str = "123") -> ElectMaster:
        return ElectMaster(
            request_id=f"e{self.index}",
            controller_epoch=1,
            broker_name="g",
            broker_id=broker_id,
            designate=True,
            unclean=unclean,
            live=tuple(each for each in self.live if str(each.broker_id) in live),
        )


BEHIND = {1: (5, 2000), 2: (5, 2000), 3: (3, 500)}


@pytest.mark.parametrize(
    ("facts", "elected", "is_behind"),
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
    facts, elected, is_behind
):
    controllers = Forgetful(facts)
    result = controllers.apply(controllers.command(elected))
    assert result.ok is not is_behind
    if is_behind:
        assert result.code is ResponseCode.CONTROLLER_ELECT_MASTER_FAILED
        assert "only an unclean election takes it" in result.remark
        result = controllers.apply(controllers.command(elected, unclean=True))
        assert result.ok and result.view is not None
        assert result.view.unclean_epoch == result.view.master_epoch
    else:
        assert result.view is not None and result.view.unclean_epoch == 0


def test_r49_a_learner_counts_for_nothing_and_is_refused_by_the_rules():
    made = Forgetful({1: (4, 100), 2: (4, 100)})
    learner = RegisterBroker(
        controller_epoch=1, broker_name="g", broker_id=2, incarnation="i2", learner=True
    )
    assert made.apply(learner).ok
    named = ElectMaster(
        controller_epoch=1, broker_name="g", broker_id=2, designate=True, live=made.live
    )
    assert lacks_reported(made.state.groups["g"], named) == ""
    assert "is a learner" in made.apply(named).remark
    made.live = (*made.live[:1], replace(made.live[1], epoch=9, confirm_offset=900))
    assert made.apply(made.command(1)).ok


@pytest.mark.parametrize(("elected", "lacks"), [(1, False), (2, False), (3, True)])
def test_r49_a_member_of_an_older_recorded_set_is_behind_what_others_report(elected, lacks):
    """The controllers came back with an older memory: their set is not the one of now."""
    controllers = Forgetful(dict.fromkeys((1, 2, 3), (0, 0)))
    assert controllers.apply(controllers.command(1)).ok
    assert not lacks_reported(controllers.group, controllers.command(elected))
    controllers.live = tuple(
        LiveBroker(n, f"i{n}", epoch=e, max_offset=end, confirm_offset=end, master_epoch=4)
        for n, (e, end) in {1: (4, 2000), 2: (4, 2000), 3: (1, 1500)}.items()
    )
    why = lacks_reported(controllers.group, controllers.command(elected))
    assert ("only an unclean election takes it" in why) is lacks
    assert not lacks_reported(controllers.group, controllers.command(7))


def test_r19_the_living_master_may_be_named_where_the_record_is_older():
    """Its set is a newer one than these controllers know: it goes on in an epoch above all."""
    controllers = Forgetful({1: (0, 0), 2: (0, 0)})
    assert controllers.apply(controllers.command(1)).ok
    assert not controllers.apply(controllers.command(1)).ok, "it leads already"
    controllers.live = tuple(
        LiveBroker(n, f"i{n}", 1, 2000, 2000, master_epoch=1, sync_state_set_epoch=9)
        for n in (1, 2)
    )
    command = with_new_epochs(controllers.group, controllers.command(1), STEP)
    result = controllers.apply(command)
    assert result.ok and result.view is not None
    assert (result.view.master_broker_id, result.view.master_epoch) == (1, 1 + STEP + 1)


def test_r49_whoever_may_follow_a_master_of_the_highest_epoch_is_out_of_sight():
    controllers = Forgetful(BEHIND)
    group = controllers.group
    assert members_of(group) == (1, 2)

    def passed(live: str, broker_id: int = 3) -> list[int]:
        command = controllers.command(broker_id, unclean=True, live=live)
        members = [
            last_seen(group, record, LastHeard(), lives=str(record.broker_id) in live)
            for record in group.replicas
            if record.broker_id in members_of(group)
        ]
        return [each.broker_id for each in passes_over(group, command, members)]

    assert passed("3") == [1, 2]
    assert passed("23") == [], "2 hears of the election, and acknowledges nothing from then on"


def test_r47_controllers_that_forgot_begin_far_above_all_epochs_that_are_reported():
    """An absent replica may know the next number already."""
    controllers = Forgetful({1: (5, 2000), 2: (5, 2000)})
    command = with_new_epochs(controllers.group, controllers.command(1), STEP)
    result = controllers.apply(command)
    assert result.ok and result.view is not None and result.view.master_epoch == 5 + STEP + 1
    # From here on they know the group: epochs grow by one.
    live = tuple(
        LiveBroker(n, f"i{n}", epoch=5, max_offset=2000, master_epoch=result.view.master_epoch)
        for n in (1, 2)
    )
    known = ElectMaster(broker_name="g", broker_id=2, designate=True, live=live)
    assert with_new_epochs(controllers.group, known, STEP) is known


def test_r47_restored_controllers_that_know_an_older_epoch_begin_above_it_as_well():
    controllers = Forgetful({1: (0, 0), 2: (0, 0)})
    assert controllers.apply(controllers.command(1)).ok
    controllers.live = tuple(
        LiveBroker(n, f"i{n}", epoch=4, max_offset=2000, master_epoch=4) for n in (1, 2)
    )
    command = controllers.command(2, unclean=True)
    result = controllers.apply(with_new_epochs(controllers.group, command, STEP))
    assert result.view is not None and result.view.master_epoch == 4 + STEP + 1
