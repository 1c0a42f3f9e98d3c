"""Which view counts, what this process is in it (R2, R3, R20), and what a newer one makes void."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from batonmq.protocol.role_view import Role, RoleView
from batonmq.replicas_manager import events as ev
from batonmq.replicas_manager import identity
from batonmq.replicas_manager.config import SessionTimings
from batonmq.replicas_manager.role import CurrentView, Lease, RoleChanges, ViewFreshness
from batonmq.replicas_manager.state import ReplicasState


def view(epoch: int, set_epoch: int = 1, master: int = 1, incarnation: str = "b") -> RoleView:
    return RoleView(
        "C",
        "broker-a",
        master_broker_id=master,
        master_incarnation=incarnation,
        master_epoch=epoch,
        sync_state_set_epoch=set_epoch,
        sync_state_set=frozenset({1}),
    )


@pytest.mark.parametrize(
    "seen, role",
    [
        (view(4), Role.MASTER),
        (view(4, incarnation="another life"), Role.FENCED),
        (view(3), Role.FENCED),
        (view(4, master=2, incarnation="c"), Role.SLAVE),
        (view(4, master=0, incarnation=""), Role.FENCED),
    ],
)
def test_r3_master_is_the_process_that_was_elected_in_an_epoch_of_its_own(seen, role):
    """Epoch 3 was accepted by an earlier life of this broker."""
    assert CurrentView(1, "b", 3).role_in(seen) is role


def test_r20_only_epochs_that_grow_are_taken():
    current = CurrentView(1, "b", 0)
    current.take(view(3, 5))
    assert [
        current.freshness_of(view(*key)) for key in ((3, 4), (3, 5), (2, 9), (3, 6), (4, 1))
    ] == [
        ViewFreshness.KNOWN,
        ViewFreshness.KNOWN,
        ViewFreshness.STALE,
        ViewFreshness.NEWER,
        ViewFreshness.NEWER,
    ]
    later = replace(view(3, 5), raft_index=9)
    assert current.freshness_of(later) is ViewFreshness.KNOWN, "no process registered again"


def test_r24_only_a_slave_fetches_its_damaged_part_again():
    current = CurrentView(3, "b", 0)
    current.take(view(4, master=0, incarnation=""))
    assert RoleChanges().refetch(current, "rotten") == []


def test_r14_who_is_dead_is_said_once_in_a_role_and_again_in_the_next():
    changes, dead = RoleChanges(), frozenset({2})
    changes.is_new(view(3), Role.MASTER)
    assert changes.dead_changed(dead) == [ev.SetDead(dead)] and not changes.dead_changed(dead)
    assert ev.SetDead(dead) in changes.act(view(4), Role.MASTER, 1)


def test_the_check_code_stays_until_the_id_is_durable(tmp_path, monkeypatch):
    file = identity.IdentityFile(tmp_path / "brokerIdentity", "C", "broker-a")
    code = file.load().check_code
    fail = Mock(side_effect=OSError("no room"))
    with monkeypatch.context() as broken:
        broken.setattr(identity, "replace_file", fail)
        with pytest.raises(OSError, match="no room"):
            file.save(7)
    again = identity.IdentityFile(tmp_path / "brokerIdentity", "C", "broker-a").load()
    assert (again.broker_id, again.check_code) == (0, code)


def test_r5_an_older_answer_does_not_shorten_the_lease():
    lease = Lease(600)
    for sent_ms in (100, 50):
        lease.extend(ev.AnswerReceived("c1", sent_ms, True, 1, "c1", 3, 1), 3)
    assert lease.valid(699) and not lease.valid(700)


def test_r7_an_answer_to_a_broker_that_is_not_the_master_on_record_gives_no_lease():
    lease = Lease(600)
    lease.extend(ev.AnswerReceived("c1", 100, True, 1, "c1", 3, 1, no_lease=True), 3)
    assert not lease.valid(101)


def test_a_newer_role_change_begins_without_the_failures_of_the_one_before():
    changes = RoleChanges()
    assert changes.is_new(view(3), Role.MASTER)
    for _ in range(4):
        changes.failed(1_000)
    newer = view(4, master=2)
    assert changes.is_new(newer, Role.SLAVE)
    changes.act(newer, Role.SLAVE, 1)
    assert not changes.due(60_000, []), "the change before is not tried again"
    changes.failed(1_000)
    assert not changes.due(1_049, []) and changes.due(1_050, [])


def test_r2_controllers_hear_of_an_epoch_once_a_restart_remembers_it():
    """The view of epoch 3 is in force, but a power cut would forget it."""
    state = ReplicasState(
        broker_name="broker-a",
        current=CurrentView(1, "b", 2),
        controllers=("c1",),
        timings=SessionTimings(),
    )

    def told(event: ev.Event) -> set[tuple[int, int]]:
        beats = [each for each in state.step(event, 1_000) if isinstance(each, ev.SendHeartbeat)]
        return {(beat.master_epoch, beat.sync_state_set_epoch) for beat in beats}

    state.step(ev.SessionOpened("c1"), 1_000)
    assert told(ev.ViewReceived("c1", view(3, 5, master=2))) == {(2, 0)}
    assert state.current.key == (3, 5)
    assert told(ev.EpochStored(3)) == {(3, 5)}
