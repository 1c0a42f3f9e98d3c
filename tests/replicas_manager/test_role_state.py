"""Scripts for the pure role state machine: events in, effects out, the clock moved by hand."""

from __future__ import annotations

from typing import TypeVar

import pytest

from protocol.role_view import Replica, RoleView
from replicas_manager.config import SessionTimings
from replicas_manager.events import (
    ActionFailed,
    AdoptView,
    AlterFailed,
    AlterReplied,
    AnswerReceived,
    BecomeMaster,
    BecomeSlave,
    CloseSession,
    Effect,
    ElectFailed,
    ElectReplied,
    Event,
    FactsChanged,
    FetchView,
    LeaderHinted,
    LeaseChanged,
    Notice,
    NoticeReceived,
    OpenSessions,
    PersistRole,
    ProposalApplied,
    ProposalRefused,
    ProposalRequested,
    ProposalUnknown,
    RegisterFailed,
    RegisterReplied,
    ReportEvent,
    SaveIdentity,
    SendAlter,
    SendElect,
    SendHeartbeat,
    SendRegister,
    SessionClosed,
    SessionOpened,
    SessionRefused,
    SetDead,
    StandDown,
    Started,
    SuspicionChanged,
    Tick,
    ViewReceived,
)
from replicas_manager.state import ReplicasState, Role

E = TypeVar("E", bound=Effect)

C1, C2, C3 = "n1:9879", "n2:9879", "n3:9879"
ME = 1
LIFE = "life-b"


def replica(broker_id: int, *, alive: bool = True, incarnation: str = "", learner: bool = False):
    return Replica(
        broker_id=broker_id,
        address=f"h{broker_id}:1",
        ha_address=f"h{broker_id}:2",
        alive=alive,
        learner=learner,
        incarnation=incarnation or ("life-b" if broker_id == ME else f"life-{broker_id}"),
    )


def view(
    master: int | None,
    epoch: int,
    set_epoch: int,
    members: set[int] | None = None,
    *,
    incarnation: str = LIFE,
    dead: frozenset[int] = frozenset(),
    replicas: tuple[Replica, ...] = (),
    index: int = 0,
) -> RoleView:
    return RoleView(
        cluster_name="C",
        broker_name="broker-a",
        master_broker_id=master,
        master_address=f"h{master}:1",
        master_ha_address=f"h{master}:2",
        master_incarnation=incarnation if master == ME else f"life-{master}",
        master_epoch=epoch,
        sync_state_set_epoch=set_epoch,
        sync_state_set=frozenset(members or {1, 2}),
        replicas=replicas or tuple(replica(i, alive=i not in dead) for i in (1, 2, 3)),
        raft_index=index or epoch * 100 + set_epoch,
    )


class Script:
    """A core, a clock, and what came out of the last event."""

    def __init__(self, *, broker_id: int = ME, highest: int = 0, learner: bool = False) -> None:
        self.now_ms = 10_000
        self.core = ReplicasState(
            broker_name="broker-a",
            broker_id=broker_id,
            incarnation=LIFE,
            controllers=(C1, C2, C3),
            highest_master_epoch=highest,
            timings=SessionTimings(),
            learner=learner,
        )
        self.effects: list[Effect] = []

    def on(self, event: Event, *, after_ms: int = 0) -> list[Effect]:
        self.now_ms += after_ms
        self.effects = self.core.step(event, self.now_ms)
        self.core.check_invariants()
        return self.effects

    def until(self, now_ms: int) -> list[Effect]:
        """Let time pass, ticking exactly at the deadlines that the core names."""
        seen: list[Effect] = []
        while True:
            deadline_ms = self.core.next_deadline_ms()
            if deadline_ms is None or deadline_ms > now_ms:
                break
            self.now_ms = max(self.now_ms, deadline_ms)
            seen += self.on(Tick())
        self.now_ms = now_ms
        self.effects = seen
        return seen

    def only(self, kind: type[E]) -> E:
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        assert len(found) == 1, (kind.__name__, self.effects)
        return found[0]

    def none(self, *kinds: type[Effect]) -> None:
        assert not [effect for effect in self.effects if isinstance(effect, kinds)], self.effects

    def answer(
        self,
        controller: str = C1,
        *,
        sent_ms: int | None = None,
        leader: bool = True,
        controller_epoch: int = 1,
        hint: str = "",
        key: tuple[int, int] | None = None,
    ) -> list[Effect]:
        current = self.core.view.key if self.core.view is not None else (0, 0)
        master_epoch, set_epoch = key or current
        return self.on(
            AnswerReceived(
                controller=controller,
                sent_ms=self.now_ms if sent_ms is None else sent_ms,
                leader=leader,
                controller_epoch=controller_epoch,
                leader_grpc_address=hint,
                master_epoch=master_epoch,
                sync_state_set_epoch=set_epoch,
            )
        )

    def register(self, first_view: RoleView | None = None) -> None:
        """Registered at C1, which leads, with sessions open everywhere."""
        self.on(Started())
        self.on(RegisterReplied(C1, 0, "", ME, first_view))
        for controller in (C1, C2, C3):
            self.on(SessionOpened(controller))
        self.answer(C1)

    def master(self, epoch: int = 1, set_epoch: int = 1, members: set[int] | None = None) -> None:
        self.register()
        self.on(ViewReceived(C1, view(ME, epoch, set_epoch, members)))
        self.only(BecomeMaster)
        self.answer(C1)


@pytest.fixture
def script() -> Script:
    return Script()


# ---------------------------------------------------------------------------------- registration


def test_a_newcomer_saves_its_id_before_it_opens_sessions() -> None:
    script = Script(broker_id=0)
    script.on(Started())
    assert script.only(SendRegister).broker_id == 0
    script.on(RegisterReplied(C1, 0, "", 4, None))
    kinds = [type(effect) for effect in script.effects]
    assert kinds.index(SaveIdentity) < kinds.index(OpenSessions)
    assert script.only(OpenSessions).broker_id == 4
    assert script.core.broker_id == 4


def test_registration_asks_each_controller_in_turn_then_waits(script: Script) -> None:
    script.on(Started())
    targets = [script.only(SendRegister).target]
    for _ in range(2):
        script.on(RegisterReplied(targets[-1], 2007, "not the leader", 0, None))
        targets.append(script.only(SendRegister).target)
    assert targets == [C1, C2, C3]
    script.on(RegisterFailed(C3, "UNAVAILABLE"))
    script.none(SendRegister)
    script.until(script.now_ms + 50)
    assert script.only(SendRegister).target == C1


def test_r17_what_changed_while_the_registration_was_under_way_is_told_after_it(
    script: Script,
) -> None:
    script.on(SuspicionChanged("reboot"))
    script.on(Started())
    first = script.only(SendRegister)
    script.on(SuspicionChanged(""))
    script.none(SendRegister)
    script.on(RegisterReplied(C1, 0, "", ME, None))
    again = script.only(SendRegister)
    assert again.request_id != first.request_id
    assert (first.suspect, again.suspect) == ("reboot", "")
    script.on(RegisterReplied(C1, 0, "", ME, None))
    script.none(SendRegister)
    assert script.core.registered


@pytest.mark.parametrize(("before", "after"), [("reboot", ""), ("", "damage")])
def test_r17_a_repeated_registration_says_the_same_of_the_log(
    script: Script, before: str, after: str
) -> None:
    """Its first attempt may be the one that was recorded: what changed meanwhile is news."""
    script.on(SuspicionChanged(before))
    script.on(Started())
    first = script.only(SendRegister)
    script.on(SuspicionChanged(after))
    script.on(RegisterFailed(C1, "DEADLINE_EXCEEDED"))
    second = script.only(SendRegister)
    assert (second.request_id, second.suspect) == (first.request_id, before)
    script.on(RegisterReplied(C2, 0, "", ME, None))
    third = script.only(SendRegister)
    assert third.request_id != first.request_id and third.suspect == after


def test_r17_a_registration_after_a_refusal_says_what_is_known_by_then(script: Script) -> None:
    script.on(SuspicionChanged("reboot"))
    script.on(Started())
    script.on(RegisterReplied(C1, 2014, "another process with id 1 lives", 0, None))
    script.on(SuspicionChanged(""))
    script.until(script.now_ms + 1_000)
    assert script.only(SendRegister).suspect == ""


def test_a_repeated_registration_keeps_its_request_id(script: Script) -> None:
    """The answer was lost: the controller must be able to tell that it is the same request."""
    script.on(Started())
    first = script.only(SendRegister)
    script.on(RegisterFailed(C1, "DEADLINE_EXCEEDED"))
    second = script.only(SendRegister)
    assert second.request_id == first.request_id
    assert second.broker_id == first.broker_id


def test_a_refused_registration_is_said_and_tried_again_later(script: Script) -> None:
    script.on(Started())
    script.on(RegisterReplied(C1, 2014, "id belongs to another check code", 0, None))
    assert script.only(Notice).warning
    script.none(SendRegister)
    script.until(script.now_ms + 1000)
    assert script.only(SendRegister)


def test_an_attempt_after_a_refusal_is_another_request(script: Script) -> None:
    """Controllers remember answers by request id: the same id would be refused for ever."""
    script.on(Started())
    first = script.only(SendRegister).request_id
    script.on(RegisterReplied(C1, 2014, "another process with id 1 lives", 0, None))
    script.until(script.now_ms + 1000)
    assert script.only(SendRegister).request_id != first


def test_a_leader_that_forgot_the_group_is_registered_with_again(script: Script) -> None:
    """The controllers were wiped: their leader answers with masterEpoch 0. Roles stay as they are
    until it elected above every epoch reported."""
    script.master(epoch=3)
    script.answer(C1, key=(0, 0))
    script.only(SendRegister)
    assert not script.core.registered
    script.on(RegisterReplied(C1, 0, "", ME, view(None, 0, 0, set())))
    script.none(StandDown, BecomeSlave)
    assert script.core.role is Role.MASTER
    script.answer(C1, key=(0, 0))
    script.none(SendRegister)
    script.on(ViewReceived(C1, view(2, 4, 1)))
    script.only(BecomeSlave)


def test_a_hint_of_a_follower_is_asked_next(script: Script) -> None:
    script.on(Started())
    script.on(LeaderHinted(C1, C3))
    script.on(RegisterReplied(C1, 2007, "not the leader", 0, None))
    assert script.only(SendRegister).target == C3


def test_a_session_refused_because_the_broker_is_unknown_registers_again(script: Script) -> None:
    script.register()
    script.on(SessionRefused(C1, 2010, "unknown broker"))
    script.until(script.now_ms + 60)
    assert script.only(SendRegister)


# --------------------------------------------------------------------------------- views and roles


def test_r2_the_epoch_is_persisted_before_the_role_changes(script: Script) -> None:
    script.register()
    script.on(ViewReceived(C2, view(2, 3, 5)))
    kinds = [type(effect) for effect in script.effects]
    assert kinds.index(PersistRole) < kinds.index(BecomeSlave)
    assert script.only(PersistRole).master_epoch == 3


def test_r2_a_view_below_the_highest_accepted_epoch_is_not_acted_on() -> None:
    """1. An earlier life accepted epoch 7. 2. A controller that knows 6 pushes its view."""
    script = Script(highest=7)
    script.register()
    script.on(ViewReceived(C1, view(2, 6, 9)))
    script.none(BecomeSlave, BecomeMaster, StandDown, PersistRole)
    assert script.only(Notice).warning
    script.on(ViewReceived(C1, view(2, 6, 9)))
    script.none(Notice)
    script.on(ViewReceived(C1, view(2, 7, 9)))
    assert script.only(BecomeSlave).view.master_epoch == 7


def test_r3_a_view_that_names_an_earlier_life_makes_nobody_master() -> None:
    """A master was killed and is back: the group still records (1, life-a, 4). It stands down and
    asks for an election only after the controller had time to open its own."""
    script = Script(highest=4)
    script.register()
    script.on(ViewReceived(C1, view(ME, 4, 6, incarnation="life-a")))
    script.only(StandDown)
    script.none(BecomeMaster, SendElect)
    assert not script.core.lease_valid(script.now_ms)
    script.until(script.now_ms + 300)
    assert script.only(SendElect).expected_master_epoch == 4
    script.on(ViewReceived(C1, view(ME, 5, 7)))
    assert script.only(BecomeMaster).view.master_epoch == 5


def test_r3_no_mastership_in_an_epoch_that_an_earlier_life_accepted() -> None:
    """Even if a controller puts the new incarnation beside the old epoch."""
    script = Script(highest=4)
    script.register()
    script.on(ViewReceived(C1, view(ME, 4, 6, incarnation=LIFE)))
    script.only(StandDown)
    assert script.core.role is Role.NONE


def test_r20_views_from_any_controller_are_taken_only_if_the_key_grows(script: Script) -> None:
    """1. C2, no leader, pushes (3,5): taken. 2. C1 pushes the older (2,9): not. 3. C3 pushes the
    same (3,5): nothing. 4. (3,6): adopted. 5. (4,6): the role changes."""
    script.register()
    script.on(ViewReceived(C2, view(2, 3, 5)))
    script.only(BecomeSlave)
    script.on(ViewReceived(C1, view(3, 2, 9)))
    script.none(BecomeSlave, AdoptView)
    script.on(ViewReceived(C3, view(2, 3, 5)))
    script.none(BecomeSlave, AdoptView)
    script.on(ViewReceived(C3, view(2, 3, 6, {2})))
    assert script.only(AdoptView).view.sync_state_set == {2}
    script.none(BecomeSlave, PersistRole)
    script.on(ViewReceived(C1, view(3, 4, 6)))
    assert script.only(BecomeSlave).view.master_broker_id == 3


def test_an_epoch_bump_with_the_same_master_is_a_role_change(script: Script) -> None:
    script.master(epoch=1)
    script.on(ViewReceived(C1, view(ME, 2, 2)))
    assert script.only(PersistRole).master_epoch == 2
    assert script.only(BecomeMaster).view.master_epoch == 2


def test_views_of_other_groups_and_empty_ones_are_ignored(script: Script) -> None:
    script.register()
    script.on(ViewReceived(C1, RoleView("", "")))
    script.on(ViewReceived(C1, RoleView("C", "broker-b", 1, master_epoch=9)))
    assert script.core.view is None


def test_r12_a_new_incarnation_in_a_view_of_the_same_key_is_taken(script: Script) -> None:
    """A slave restarts: its registration bumps no epoch, but an Alter must name its new life."""
    script.master(members={1})
    lives = (replica(1), replica(2, incarnation="life-2b"), replica(3))
    script.on(ViewReceived(C1, view(ME, 1, 1, {1}, replicas=lives, index=999)))
    script.only(AdoptView)
    script.on(ProposalRequested(frozenset({1, 2}), "expand", 50, (1, 1)))
    assert script.only(SendAlter).members == ((1, LIFE), (2, "life-2b"))


def test_an_older_view_of_the_same_key_does_not_bring_back_an_old_incarnation(
    script: Script,
) -> None:
    script.master(members={1})
    lives = (replica(1), replica(2, incarnation="life-2b"), replica(3))
    script.on(ViewReceived(C1, view(ME, 1, 1, {1}, replicas=lives, index=999)))
    script.on(ViewReceived(C2, view(ME, 1, 1, {1}, index=500)))
    script.none(AdoptView)
    assert script.core.view is not None
    assert script.core.view.replica(2) == replica(2, incarnation="life-2b")


def test_alive_flags_count_only_from_the_leader(script: Script) -> None:
    """1. C2, a follower, lost broker 3: nothing. 2. C1, the leader, says so: dead = {3}.
    3. C2 becomes leader and its own verdict rules."""
    script.master()
    script.on(ViewReceived(C2, view(ME, 1, 1, dead=frozenset({3}))))
    script.none(SetDead)
    script.on(ViewReceived(C1, view(ME, 1, 1, dead=frozenset({2}))))
    assert script.only(SetDead).broker_ids == {2}
    script.answer(C2, controller_epoch=2)
    assert script.only(SetDead).broker_ids == {3}


def test_a_failed_role_change_is_tried_again_with_the_view_in_force(script: Script) -> None:
    script.register()
    script.on(ViewReceived(C1, view(2, 3, 5)))
    first = script.only(BecomeSlave).view
    script.on(ActionFailed(first))
    script.none(BecomeSlave)
    script.on(ViewReceived(C1, view(2, 3, 6, {2})))
    script.until(script.now_ms + 50)
    assert script.only(BecomeSlave).view.key == (3, 6)


def test_a_failed_role_change_that_is_overtaken_is_not_tried_again(script: Script) -> None:
    script.register()
    script.on(ViewReceived(C1, view(2, 3, 5)))
    first = script.only(BecomeSlave).view
    script.on(ViewReceived(C1, view(3, 4, 6)))
    script.on(ActionFailed(first))
    script.until(script.now_ms + 2000)
    script.none(BecomeSlave)


def test_a_push_that_did_not_come_is_fetched(script: Script) -> None:
    script.register()
    script.on(ViewReceived(C1, view(2, 3, 5)))
    script.answer(C1, key=(4, 6))
    script.none(FetchView)
    script.until(script.now_ms + 100)
    assert script.only(FetchView).target == C1
    script.on(ViewReceived(C1, view(3, 4, 6), pushed=False))
    script.only(BecomeSlave)


def test_a_remoting_role_notice_fetches_the_view_if_it_is_newer(script: Script) -> None:
    script.register()
    script.on(ViewReceived(C1, view(2, 3, 5)))
    script.on(NoticeReceived(3, 5))
    script.none(FetchView)
    script.on(NoticeReceived(4, 6))
    assert script.only(FetchView).target == C1


# ----------------------------------------------------------------------------------------- lease


def test_r5_the_lease_counts_from_the_send_time_of_the_answered_heartbeat(script: Script) -> None:
    script.register()
    script.on(ViewReceived(C1, view(ME, 1, 1)))
    sent_ms = script.now_ms
    assert not script.core.lease_valid(script.now_ms)
    script.now_ms += 250
    script.answer(C1, sent_ms=sent_ms)
    assert script.only(LeaseChanged).valid
    assert script.core.lease_valid(sent_ms + 599)
    assert not script.core.lease_valid(sent_ms + 600)


def test_r5_only_the_leader_answering_for_this_epoch_grants_the_lease(script: Script) -> None:
    """A follower's answer, a deposed leader's answer, and one for the epoch before give none."""
    script.register()
    script.answer(C1, controller_epoch=5)
    script.on(ViewReceived(C1, view(ME, 2, 3)))
    script.answer(C2, leader=False)
    assert not script.core.lease_valid(script.now_ms)
    script.answer(C3, leader=True, controller_epoch=4)
    assert not script.core.lease_valid(script.now_ms)
    script.answer(C1, controller_epoch=5, key=(1, 2))
    assert not script.core.lease_valid(script.now_ms)
    script.answer(C1, controller_epoch=5)
    assert script.core.lease_valid(script.now_ms)


def test_r5_a_new_epoch_begins_without_a_lease(script: Script) -> None:
    script.master(epoch=1)
    assert script.core.lease_valid(script.now_ms)
    script.on(ViewReceived(C1, view(ME, 2, 2)))
    assert not script.core.lease_valid(script.now_ms)
    assert script.only(LeaseChanged) == LeaseChanged(False, 2)


def test_r36_controllers_gone_the_role_stays_and_the_lease_runs_out(script: Script) -> None:
    """1. A master with a lease. 2. All controllers vanish. 3. The lease lapses after 600 ms, the
    loss is said once, no role changes. 4. One controller comes back as leader: said once."""
    script.master()
    for controller in (C1, C2, C3):
        script.on(SessionClosed(controller))
    seen = script.until(script.now_ms + 5000)
    assert [e for e in seen if isinstance(e, LeaseChanged)] == [LeaseChanged(False, 1)]
    assert [e.kind for e in seen if isinstance(e, ReportEvent)] == ["lease_lost"]
    notices = [e.event for e in seen if isinstance(e, Notice)]
    assert notices == ["lease_lost", "controllers_lost"]
    assert not [e for e in seen if isinstance(e, StandDown | BecomeSlave | BecomeMaster)]
    assert script.core.role is Role.MASTER
    script.on(SessionOpened(C2))
    script.answer(C2, controller_epoch=1)
    assert [e.event for e in script.effects if isinstance(e, Notice)] == [
        "controller_leader",
        "controllers_back",
    ]
    assert script.core.lease_valid(script.now_ms)


# --------------------------------------------------------------------------- heartbeats and leader


def heartbeats(effects: list[Effect]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for effect in effects:
        if isinstance(effect, SendHeartbeat):
            counts[effect.controller] = counts.get(effect.controller, 0) + 1
    return counts


def test_heartbeats_go_fast_to_the_leader_and_slowly_to_the_others(script: Script) -> None:
    script.master()
    script.until(script.now_ms + 1)
    seen: list[Effect] = []
    for _ in range(10):
        script.answer(C1)
        script.answer(C2, leader=False, controller_epoch=1)
        script.answer(C3, leader=False, controller_epoch=1)
        seen += script.until(script.now_ms + 100)
    counts = heartbeats(seen)
    assert counts[C1] == 10
    assert counts[C2] == counts[C3] == 2


def test_a_slave_takes_every_second_turn_and_all_heartbeats_go_together(script: Script) -> None:
    """It has no lease to renew; a session is given up after 800 ms of silence."""
    script.register()
    script.on(ViewReceived(C1, view(2, 1, 1)))
    turns: set[int] = set()
    seen: list[Effect] = []
    for _ in range(10):
        script.answer(C1)
        script.answer(C2, leader=False)
        script.answer(C3, leader=False)
        effects = script.until(script.now_ms + 100)
        turns |= {e.sent_ms for e in effects if isinstance(e, SendHeartbeat)}
        seen += effects
    assert heartbeats(seen)[C1] == 5
    assert heartbeats(seen)[C2] <= 3
    assert len(turns) <= 6


def test_a_silent_leader_makes_all_heartbeats_fast(script: Script) -> None:
    """The leader hangs: its successor must be found before the master's lease ends."""
    script.master()
    script.until(script.now_ms + 300)
    assert script.core.leader is None
    seen = script.until(script.now_ms + 300)
    assert heartbeats(seen) == {C1: 3, C2: 3, C3: 3}


def test_on_a_leader_change_the_new_leader_hears_at_once(script: Script) -> None:
    script.register()
    script.until(script.now_ms + 1)
    script.answer(C3, controller_epoch=2)
    assert [e.controller for e in script.effects if isinstance(e, SendHeartbeat)] == [C3]
    assert script.core.leader == C3
    script.answer(C1, controller_epoch=1)
    assert script.core.leader == C3


def test_r16_a_new_set_is_answered_with_fresh_facts_to_all(script: Script) -> None:
    """An expand keeps its confirmOffset as a floor for candidates. A slave whose last heartbeat is
    older than its last bytes would be passed over if the master died right after it."""
    script.register()
    script.on(ViewReceived(C1, view(2, 1, 1, {2})))
    script.on(ViewReceived(C1, view(2, 1, 2, {1, 2})))
    assert heartbeats(script.effects) == {C1: 1, C2: 1, C3: 1}


def test_changed_facts_are_told_at_once(script: Script) -> None:
    script.register()
    script.on(FactsChanged())
    assert heartbeats(script.effects) == {C1: 1, C2: 1, C3: 1}


def test_a_session_without_answers_is_dropped_once(script: Script) -> None:
    script.register()
    seen: list[Effect] = []
    for _ in range(20):
        script.answer(C1)
        script.answer(C2, leader=False)
        seen += script.until(script.now_ms + 100)
    assert [e.controller for e in seen if isinstance(e, CloseSession)] == [C3]


def test_wiped_controllers_may_lead_with_a_lower_controller_epoch(script: Script) -> None:
    script.register()
    script.answer(C1, controller_epoch=9)
    for controller in (C1, C2, C3):
        script.on(SessionClosed(controller))
    script.on(SessionOpened(C2))
    script.answer(C2, controller_epoch=1)
    assert script.core.leader == C2


# -------------------------------------------------------------------------------------- election


def test_without_a_master_the_broker_asks_for_itself_and_again_each_second(script: Script) -> None:
    script.on(Started())
    script.on(RegisterReplied(C1, 0, "", ME, view(None, 0, 0, set())))
    first = script.only(SendElect)
    assert (first.target, first.expected_master_epoch) == (C1, 0)
    script.on(ElectReplied(C1, 2012, "no candidate", None))
    script.until(script.now_ms + 999)
    script.none(SendElect)
    script.until(script.now_ms + 1)
    script.only(SendElect)


def test_an_elect_reply_with_a_view_is_taken_without_waiting_for_the_push(script: Script) -> None:
    script.on(Started())
    script.on(RegisterReplied(C1, 0, "", ME, view(None, 0, 0, set())))
    script.on(ElectReplied(C1, 2011, "master still exists", view(2, 1, 1, {2})))
    script.only(BecomeSlave)
    script.until(script.now_ms + 3000)
    script.none(SendElect)


def test_an_unanswered_election_goes_to_the_next_controller(script: Script) -> None:
    script.on(Started())
    script.on(RegisterReplied(C1, 0, "", ME, view(None, 0, 0, set())))
    script.on(ElectFailed(C1, "UNAVAILABLE"))
    script.until(script.now_ms + 100)
    assert script.only(SendElect).target == C2


def test_a_learner_never_asks_to_be_elected() -> None:
    script = Script(learner=True)
    script.on(Started())
    script.on(RegisterReplied(C1, 0, "", ME, view(None, 0, 0, set())))
    script.until(script.now_ms + 5000)
    script.none(SendElect)


# ----------------------------------------------------------------------------------------- alter


def propose(script: Script, *members: int, based_on: tuple[int, int] = (1, 1)) -> None:
    script.on(ProposalRequested(frozenset(members), "expand", 77, based_on))


def test_an_alter_names_epochs_members_and_confirm_offset(script: Script) -> None:
    script.master(members={1})
    propose(script, 1, 2)
    alter = script.only(SendAlter)
    assert alter.target == C1
    assert (alter.master_epoch, alter.sync_state_set_epoch) == (1, 1)
    assert alter.members == ((1, LIFE), (2, "life-2"))
    assert (alter.confirm_offset, alter.reason) == (77, "expand")


def test_an_applied_alter_is_told_with_the_new_view(script: Script) -> None:
    script.master(members={1})
    propose(script, 1, 2)
    request = script.only(SendAlter).request_id
    script.on(AlterReplied(request, C1, 0, "", view(ME, 1, 2, {1, 2})))
    assert script.only(ProposalApplied).view.sync_state_set == {1, 2}
    script.none(AdoptView)
    script.on(ViewReceived(C1, view(ME, 1, 2, {1, 2})))
    script.none(AdoptView, ProposalApplied)


def test_a_refused_alter_is_told_with_its_code(script: Script) -> None:
    script.master(members={1})
    propose(script, 1, 2)
    request = script.only(SendAlter).request_id
    script.on(AlterReplied(request, C1, 2006, "broker 2 is not alive", None))
    assert script.only(ProposalRefused) == ProposalRefused(2006, "broker 2 is not alive")
    assert not script.core.alter_open


def test_r11_an_unknown_alter_is_asked_again_with_the_same_request_id(script: Script) -> None:
    """1. The reply is lost. 2. Said once as unknown. 3. The same request goes out again."""
    script.master(members={1})
    propose(script, 1, 2)
    first = script.only(SendAlter)
    script.on(AlterFailed(first.request_id, C1, "DEADLINE_EXCEEDED"))
    script.only(ProposalUnknown)
    for _ in range(3):
        script.until(script.now_ms + 1000)
        again = script.only(SendAlter)
        assert again.request_id == first.request_id
        assert again.members == first.members
        script.on(AlterReplied(again.request_id, again.target, 2007, "not the leader", None))
        script.none(ProposalUnknown, ProposalRefused)
    script.until(script.now_ms + 1000)
    again = script.only(SendAlter)
    script.on(AlterReplied(again.request_id, again.target, 0, "", view(ME, 1, 2)))
    script.only(ProposalApplied)


def test_r11_same_set_does_not_end_an_unknown_alter_but_a_bump_does(script: Script) -> None:
    """1. Timeout. 2. The retry is answered "same set" (2013): not enough, the first may still be
    queued. 3. A view with a higher setEpoch is pushed: that ends it."""
    script.master(members={1})
    propose(script, 1, 2)
    request = script.only(SendAlter).request_id
    script.on(AlterFailed(request, C1, "DEADLINE_EXCEEDED"))
    script.until(script.now_ms + 100)
    script.on(AlterReplied(request, C1, 2013, "same set", None))
    script.none(ProposalRefused, ProposalApplied)
    assert script.core.alter_open
    script.on(ViewReceived(C1, view(ME, 1, 2, {1, 2})))
    script.only(ProposalApplied)
    assert not script.core.alter_open


def test_r11_a_fence_after_unknown_waits_for_the_view_that_raised_it(script: Script) -> None:
    """The retry is told 2001, perhaps because the first attempt was committed: the union may go
    only when a view shows what is recorded."""
    script.master(members={1})
    propose(script, 1, 2)
    request = script.only(SendAlter).request_id
    script.on(AlterFailed(request, C1, "UNAVAILABLE"))
    script.until(script.now_ms + 100)
    script.on(AlterReplied(request, C1, 2001, "set epoch is 2", None))
    script.none(ProposalRefused)
    assert script.core.alter_open
    script.only(FetchView)
    script.on(ViewReceived(C1, view(ME, 1, 2, {1, 2}), pushed=False))
    script.only(ProposalApplied)


def test_r11_a_new_leader_is_asked_the_same_at_once(script: Script) -> None:
    script.master(members={1})
    propose(script, 1, 2)
    request = script.only(SendAlter).request_id
    script.answer(C2, controller_epoch=2)
    script.only(ProposalUnknown)
    again = script.only(SendAlter)
    assert (again.target, again.request_id) == (C2, request)
    script.on(AlterFailed(request, C1, "UNAVAILABLE"))
    script.until(script.now_ms + 90)
    script.none(SendAlter)
    script.on(AlterReplied(request, C2, 0, "", view(ME, 1, 2, {1, 2})))
    script.only(ProposalApplied)


def test_r11_a_role_change_ends_the_alter_without_a_word(script: Script) -> None:
    script.master(members={1})
    propose(script, 1, 2)
    request = script.only(SendAlter).request_id
    script.on(ViewReceived(C1, view(2, 2, 2, {2})))
    script.only(BecomeSlave)
    script.none(ProposalApplied, ProposalRefused, ProposalUnknown)
    script.on(AlterReplied(request, C1, 2000, "fenced", None))
    script.none(ProposalApplied, ProposalRefused, ProposalUnknown)


def test_r1_r11_an_overtaken_proposal_is_not_refused_to_the_one_after_it(script: Script) -> None:
    """1. The master makes a proposal on set epoch 1, which is handed over in the next loop turn.
    2. In between a view of set epoch 2 comes: it ends the proposal at the master, which makes the
    next one at once. 3. The first one arrives here. A refusal would end the second one at the
    master: it would wait for {1} alone while the Alter to {1, 2} is on its way."""
    script.master(set_epoch=1, members={1})
    script.on(ViewReceived(C1, view(ME, 1, 2, {1})))
    script.only(AdoptView)
    propose(script, 1, 2, based_on=(1, 1))
    script.none(ProposalRefused, SendAlter)
    propose(script, 1, 2, based_on=(1, 2))
    assert script.only(SendAlter).sync_state_set_epoch == 2


def test_a_proposal_of_a_slave_a_learner_or_a_stranger_is_refused_at_home(script: Script) -> None:
    lives = (replica(1), replica(2, learner=True))
    script.register()
    script.on(ViewReceived(C1, view(2, 1, 1)))
    propose(script, 1, 2, based_on=(1, 1))
    assert script.only(ProposalRefused).code == 2002
    script.on(ViewReceived(C1, view(ME, 2, 2, {1}, replicas=lives)))
    propose(script, 1, 2, based_on=(2, 2))
    assert script.only(ProposalRefused).code == 2003
    propose(script, 1, 9, based_on=(2, 2))
    assert script.only(ProposalRefused).code == 2003
    propose(script, 1, based_on=(2, 2))
    assert script.only(ProposalRefused).code == 2013


def test_r11_one_alter_in_flight(script: Script) -> None:
    script.master(members={1})
    propose(script, 1, 2)
    with pytest.raises(AssertionError, match="R11"):
        propose(script, 1, 3)


def test_without_a_leader_the_hint_is_followed(script: Script) -> None:
    script.on(Started())
    script.on(RegisterReplied(C1, 0, "", ME, view(None, 1, 1, {1})))
    script.on(SessionOpened(C3))
    script.on(ElectFailed(C1, "UNAVAILABLE"))
    script.answer(C3, leader=False, hint=C2)
    script.until(script.now_ms + 100)
    assert script.only(SendElect).target == C2


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize(
    ("code", "ends_first", "ends_after_unknown"),
    [
        (0, False, False),  # a view shows to what
        (2000, True, False),
        (2001, True, False),
        (2002, True, False),
        (2003, True, True),
        (2005, True, True),
        (2006, True, True),
        (2007, False, False),
        (2010, True, True),
        (2013, True, False),
        (2015, False, False),
    ],
)
def test_r11_what_each_answer_proves_while_a_first_copy_may_be_queued(
    code: int, ends_first: bool, ends_after_unknown: bool, unknown: bool
) -> None:
    """1. The Alter goes to C1, which falls silent: C1 may have it in its queue still. 2. C2 leads
    and answers the same request. A fence (2000-2002) or "same set" may be that copy's own work; the
    other refusals were given by the state that a late copy would meet, too, and are remembered
    there under its id. After no answer but a refusal is the union taken back."""
    script = Script()
    script.master()
    script.on(ProposalRequested(frozenset({1, 3}), "expand", 10, (1, 1)))
    asked = script.only(SendAlter)
    target = C1
    if unknown:
        script.on(AlterFailed(asked.request_id, C1, "DEADLINE_EXCEEDED"))
        script.only(ProposalUnknown)
        script.answer(C2, controller_epoch=2)
        assert script.only(SendAlter).request_id == asked.request_id
        target = C2
    script.on(AlterReplied(asked.request_id, target, code, "", None))
    ended = ends_after_unknown if unknown else ends_first
    assert script.core.alter_open is not ended
    assert bool([e for e in script.effects if isinstance(e, ProposalRefused)]) is ended
    script.on(ViewReceived(C2, view(ME, 1, 2, {1, 2})))
    assert not script.core.alter_open, "a committed bump ends it in any case"
