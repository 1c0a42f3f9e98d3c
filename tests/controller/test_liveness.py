"""The liveness core as scripts of events: what it proposes, and what it must not.

Three native replicas in one group, master 1, set {1,2,3}; time is moved by hand in milliseconds.
"""

import pytest

from controller.commands import ElectMaster
from controller.elect_policy import FIRST_ELECTION_SETTLE_MS
from controller.liveness import LivenessConfig, LivenessCore
from controller.liveness_events import (
    AliveChanged,
    ElectionBlocked,
    ElectionEnded,
    GateClosed,
    GateOpened,
    HeartbeatFacts,
    ProposeElect,
    RefuseSession,
    RemotingChannelClosed,
    RemotingHeartbeat,
    SessionClosed,
    SessionHeartbeat,
    SessionHello,
    StateApplied,
    Tick,
)
from protocol.codes import ResponseCode as Code

NAME = "broker-a"
CONFIG = LivenessConfig()


class Watch:
    """A core beside the replicated state of `script`; `run` moves time, ticking and beating."""

    def __init__(self, script):
        self.script = script
        self.core = LivenessCore(CONFIG)
        self.now_ms = 50_000
        self.done = []
        self.sessions = {}
        self.beating = set()
        self.deaf = set()
        self._next_session = 1
        self._sequences = {}
        self._answered = {}

    def tell(self, event):
        effects = self.core.handle(event, self.now_ms)
        self.done += effects
        return effects

    def applied(self):
        return self.tell(StateApplied(self.script.state))

    def hello(self, broker_id, incarnation=None):
        session_id = self._next_session
        self._next_session += 1
        life = incarnation or self.script.group.replica(broker_id).incarnation
        effects = self.tell(SessionHello(NAME, broker_id, life, session_id))
        if not any(isinstance(effect, RefuseSession) for effect in effects):
            self.sessions[broker_id] = session_id
            self.beating.add(broker_id)
        return session_id

    def beat(self, broker_id, **facts):
        session_id = self.sessions[broker_id]
        sequence = self._sequences.get(session_id, 0) + 1
        self._sequences[session_id] = sequence
        if broker_id not in self.deaf:
            self._answered[session_id] = sequence - 1
        return self.tell(
            SessionHeartbeat(
                NAME,
                broker_id,
                session_id,
                HeartbeatFacts(**facts),
                sequence,
                self._answered.get(session_id, 0),
            )
        )

    def close(self, broker_id, goodbye=False, why=""):
        self.beating.discard(broker_id)
        return self.tell(SessionClosed(NAME, broker_id, self.sessions[broker_id], goodbye, why))

    def run(self, duration_ms):
        """Ticks every 50 ms, heartbeats of the beating every 100 ms; gives what was decided."""
        effects = []
        for _ in range(duration_ms // 50):
            self.now_ms += 50
            if self.now_ms % 100 == 0:
                for broker_id in sorted(self.beating):
                    effects += self.beat(broker_id)
            effects += self.tell(Tick())
        return effects

    def alive(self):
        return [seen.broker_id for seen in self.core.live(NAME, self.now_ms)]

    def carry_out(self, proposal):
        """Applies the election with the liveness of now, as the shell does."""
        result = self.script.apply(
            ElectMaster(
                broker_name=NAME,
                expected_master_epoch=proposal.expected_master_epoch,
                reason=proposal.reason,
                confirm_floor=self.core.confirm_floor(NAME),
                live=self.core.live(NAME, self.now_ms),
            )
        )
        effects = self.applied()
        self.tell(ElectionEnded(NAME, proposal.expected_master_epoch))
        return result, effects


def elections(effects):
    return [effect for effect in effects if isinstance(effect, ProposeElect)]


@pytest.fixture
def watch(script):
    """Three sessions, heartbeats flowing, the gate open for ten seconds."""
    script.three_in_sync()
    made = Watch(script)
    made.applied()
    for broker_id in (1, 2, 3):
        made.hello(broker_id)
    made.tell(GateOpened())
    assert made.run(10_000) == []
    assert made.alive() == [1, 2, 3]
    made.done.clear()
    return made


# --- verdicts ---------------------------------------------------------------------------------


def test_r5_a_closed_session_of_the_master_is_an_election_at_once(watch):
    effects = watch.close(1)
    assert effects == [
        AliveChanged(NAME),
        ProposeElect(NAME, 1, "session_closed", watch.now_ms, silent_ms=0),
    ]
    result, after = watch.carry_out(elections(effects)[0])
    assert result.ok
    assert result.view.sync_state_set == {2, 3}
    assert after == []
    assert elections(watch.run(5_000)) == []


def test_a_goodbye_of_the_master_is_an_election_at_once(watch):
    (effect,) = elections(watch.close(1, goodbye=True))
    assert effect.reason == "goodbye"


def test_a_goodbye_with_a_reason_of_its_own_is_told_with_it(watch):
    (effect,) = elections(watch.close(1, goodbye=True, why="no space"))
    assert effect.reason == "goodbye: no space"


def test_r5_a_silent_master_is_dead_after_the_session_timeout(watch):
    watch.beating.discard(1)
    assert watch.run(CONFIG.session_timeout_ms) == []
    (effect,) = elections(watch.run(100))
    assert effect.reason == "session_silent"
    assert effect.expected_master_epoch == 1


def test_r5_a_master_that_no_answer_reaches_is_silent_though_it_is_heard(watch):
    """1. Only the way to the master is cut: it has no lease, and cannot hear of its end.

    2. A heartbeat later than if it were silent, another is elected; no verdict is taken back.
    3. The way is whole: it lives again.
    """
    watch.deaf.add(1)
    assert watch.run(CONFIG.session_timeout_ms) == []
    (effect,) = elections(watch.run(CONFIG.round_slack_ms + 100))
    assert effect.reason == "session_silent"
    assert effect.silent_ms > CONFIG.session_timeout_ms
    result, _ = watch.carry_out(effect)
    assert result.view.sync_state_set == {2, 3}
    assert watch.run(5_000) == []
    assert watch.alive() == [2, 3]
    watch.deaf.clear()
    assert watch.run(200) == [AliveChanged(NAME)]
    assert watch.alive() == [1, 2, 3]


def test_r34_a_pause_of_300_ms_with_late_answers_costs_nothing(watch):
    """Of the broker, or of this loop: neither makes a round trip look old."""
    watch.deaf.add(1)
    watch.beating.discard(1)
    watch.run(300)
    watch.beating.add(1)
    assert watch.run(300) == []
    watch.deaf.clear()
    assert watch.run(300) == []
    watch.now_ms += 5_000
    watch.deaf.add(1)
    assert elections(watch.run(CONFIG.session_timeout_ms - 300)) == []
    watch.deaf.clear()
    assert elections(watch.run(2_000)) == []


def test_r5_a_new_leader_gives_everybody_a_whole_round(watch):
    """As a follower it was heartbeaten seldom, and its answers granted nothing."""
    watch.tell(GateClosed())
    watch.deaf.add(1)
    watch.run(5_000)
    watch.tell(GateOpened())
    watch.deaf.clear()
    assert elections(watch.run(2_000)) == []


def test_the_death_of_a_slave_elects_nobody(watch):
    """8380/10875: the scan must not take the slave's death for the master's, nor the reverse."""
    assert watch.close(2) == [AliveChanged(NAME)]
    assert elections(watch.run(5_000)) == []
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {1, 3}


def test_issue_11045_a_late_close_of_an_older_session_is_ignored(watch):
    """1. Master 1 opens a second session in the same life. 2. The first one's close comes late."""
    first = watch.sessions[1]
    watch.hello(1)
    assert watch.tell(SessionClosed(NAME, 1, first)) == []
    assert watch.tell(SessionHeartbeat(NAME, 1, first)) == []
    assert watch.alive() == [1, 2, 3]


def test_heartbeats_of_an_older_session_keep_nobody_alive(watch):
    """11045's other side: only the newest session speaks for the broker."""
    first = watch.sessions[1]
    watch.hello(1)
    watch.beating.discard(1)
    for _ in range(20):
        watch.run(50)
        watch.tell(SessionHeartbeat(NAME, 1, first))
    assert watch.alive() == [2, 3]


def test_r18_a_second_life_is_refused_while_the_first_lives(watch):
    clone = watch.hello(2, "clone")
    (refusal,) = watch.done
    assert refusal.session_id == clone
    assert refusal.code is Code.CONTROLLER_BROKER_ID_INVALID
    assert "life-2" in refusal.remark
    assert watch.run(1_000) == []
    watch.close(2)
    again = watch.hello(2, "clone")
    assert watch.sessions[2] == again


def test_r18_a_silent_first_life_makes_room(watch):
    watch.beating.discard(2)
    watch.run(CONFIG.session_timeout_ms + 100)
    session = watch.hello(2, "life-2b")
    assert watch.sessions[2] == session


def test_r3_a_new_life_of_the_master_is_elected_or_replaced(watch):
    """1. The master is killed: a proposal, which gets lost (no quorum just then).

    2. Its new life registers before anything is decided: still an election, for its own reason.
    """
    (first,) = elections(watch.close(1))
    watch.script.register(1, incarnation="life-1b", live=watch.core.live(NAME, watch.now_ms))
    assert elections(watch.applied()) == []
    watch.tell(ElectionEnded(NAME, first.expected_master_epoch))
    watch.hello(1)
    (again,) = elections(watch.run(CONFIG.retry_ms))
    assert again.reason == "master_restarted"
    result, _ = watch.carry_out(again)
    assert result.ok
    assert result.view.master_epoch == 2


def test_r3_a_master_that_restarts_unseen_is_elected_anew(watch):
    """Its old session was never seen closing here: the registration alone opens the election."""
    watch.script.die(1)
    watch.script.register(1, incarnation="life-1b")
    (effect,) = elections(watch.applied())
    assert effect.reason == "master_restarted"


def test_r6_repeated_verdicts_on_one_process_are_held_back_longer_and_longer(watch):
    """A link flaps: the first close counts at once, the second after 200 ms, the third after 400.

    Who reconnects in time was never dead.
    """
    watch.close(2)
    watch.hello(2)
    watch.run(100)
    assert watch.close(2) == []
    assert watch.run(150) == []
    assert AliveChanged(NAME) in watch.run(100)
    watch.hello(2)
    watch.run(100)
    watch.close(2)
    assert AliveChanged(NAME) not in watch.run(350)
    watch.hello(2)
    assert AliveChanged(NAME) not in watch.run(5_000)


def test_r6_a_new_process_is_judged_afresh(watch):
    """kill -9 twice within ten seconds: each is a death of its own, and detected at once."""
    watch.close(1)
    watch.script.register(1, incarnation="life-1b", live=watch.core.live(NAME, watch.now_ms))
    watch.applied()
    watch.hello(1)
    watch.run(500)
    assert AliveChanged(NAME) in watch.close(1)


def test_r8_a_stall_of_the_own_loop_moves_all_deadlines(watch):
    """The controller's machine sleeps for five seconds: nobody is dead because of that."""
    watch.now_ms += 5_000
    assert watch.tell(Tick()) == []
    assert watch.alive() == [1, 2, 3]
    watch.beating.clear()
    assert elections(watch.run(CONFIG.session_timeout_ms - 100)) == []
    assert elections(watch.run(250))


def test_r8_a_woken_judge_waits_for_those_who_dialled_anew(watch):
    """1. This controller stands still for 5 s. 2. Its brokers drop their silent sessions and dial
    again. 3. It wakes, and meets the closings first: nobody is dead, the new sessions follow."""
    watch.now_ms += 5_000
    for broker_id in (1, 2, 3):
        assert elections(watch.close(broker_id)) == []
    assert elections(watch.tell(Tick())) == []
    watch.now_ms += 50
    for broker_id in (1, 2, 3):
        watch.hello(broker_id)
    assert elections(watch.run(2_000)) == []
    assert watch.alive() == [1, 2, 3]


def test_r6_what_a_judge_slept_through_holds_back_no_later_verdict(watch):
    """1. As above, all are back. 2. Within ten seconds the master is killed: elected at once."""
    watch.now_ms += 5_000
    for broker_id in (1, 2, 3):
        watch.close(broker_id)
    watch.now_ms += 50
    for broker_id in (1, 2, 3):
        watch.hello(broker_id)
    assert elections(watch.run(2_000)) == []
    assert elections(watch.close(1)) != []


def test_r8_who_does_not_come_back_to_a_woken_judge_is_dead(watch):
    watch.now_ms += 5_000
    watch.close(1)
    assert elections(watch.run(CONFIG.drain_ms - 50)) == []
    (proposal,) = elections(watch.run(100))
    assert proposal.reason == "session_closed"


def test_r8_a_question_right_after_a_stall_finds_nobody_dead(watch):
    """The first callback after the stall may be a request that stamps liveness, not the tick."""
    watch.now_ms += 5_000
    assert watch.alive() == [1, 2, 3]
    assert watch.tell(Tick()) == []
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {1, 2, 3}


# --- the gate ---------------------------------------------------------------------------------


def test_while_the_gate_is_closed_nothing_is_decided(watch):
    watch.tell(GateClosed())
    assert watch.close(1) == []
    assert watch.run(5_000) == []
    assert watch.alive() == [2, 3]
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {2, 3}


def test_r5_a_young_closure_counts_for_the_new_leader(watch):
    """Master and controller leader die together: this node saw the master's EOF, then took over."""
    watch.tell(GateClosed())
    watch.close(1)
    watch.run(CONFIG.closure_young_ms - 100)
    (effect,) = elections(watch.tell(GateOpened()))
    assert effect.reason == "session_closed"


def test_r14_a_new_leader_tells_anew_who_lives(watch):
    """1. A node that does not lead loses its session of 2 and tells master 1 so, in some view.
    2. The session comes back; that is no reason for a push, since a follower decides nothing.
    3. It becomes the leader. Brokers go by the leader's word, and what it said last is "2 is dead":
    the master would leave 2 out of the set for ever."""
    watch.tell(GateClosed())
    watch.close(2)
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {1, 3}
    watch.hello(2)
    watch.run(1_000)
    assert AliveChanged(NAME) in watch.tell(GateOpened())
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {1, 2, 3}


def test_r5_an_older_closure_gets_a_full_timeout(watch):
    """The broker may have gone on talking to the old leader all the while."""
    watch.tell(GateClosed())
    watch.close(1)
    watch.run(CONFIG.closure_young_ms + 100)
    assert elections(watch.tell(GateOpened())) == []
    assert elections(watch.run(CONFIG.session_timeout_ms)) == []
    assert elections(watch.run(50))


def test_r5_a_silence_before_the_gate_opened_gets_a_full_timeout(watch):
    watch.tell(GateClosed())
    watch.beating.discard(1)
    watch.run(5_000)
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {2, 3}
    assert watch.tell(GateOpened()) == [AliveChanged(NAME)]
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {1, 2, 3}
    assert watch.run(CONFIG.session_timeout_ms) == []
    assert elections(watch.run(50))


def test_r35_after_a_full_restart_unseen_brokers_are_unknown_not_dead(script):
    """5712 and the empty live tables: slaves come back first, the master 700 ms later."""
    script.three_in_sync()
    watch = Watch(script)
    watch.applied()
    watch.tell(GateOpened())
    watch.hello(2)
    watch.hello(3)
    assert watch.run(700) == []
    assert watch.core.presumed_alive(NAME, watch.now_ms) == {1, 2, 3}
    watch.hello(1)
    assert watch.run(5_000) == []


def test_r35_an_unseen_master_is_dead_after_the_timeout(script):
    """9717: the scan does run after the warm-up."""
    script.three_in_sync()
    watch = Watch(script)
    watch.applied()
    watch.tell(GateOpened())
    watch.hello(2)
    watch.hello(3)
    assert elections(watch.run(CONFIG.session_timeout_ms)) == []
    (effect,) = elections(watch.run(50))
    assert effect.reason == "never_seen"


def test_a_broker_that_just_registered_is_not_dead_before_its_session_comes(watch):
    watch.script.register()
    assert watch.applied() == []
    assert watch.run(CONFIG.session_timeout_ms - 100) == []
    assert watch.run(200) == [AliveChanged(NAME)]


# --- elections --------------------------------------------------------------------------------


def test_r10_a_lost_proposal_is_made_again_with_growing_delay(watch):
    """5009: an election write fails; the consumed event must not leave the group alone."""
    (first,) = elections(watch.close(1))
    assert elections(watch.run(1_000)) == []
    delays = []
    for _ in range(6):
        watch.tell(ElectionEnded(NAME, first.expected_master_epoch))
        waited_ms = 0
        while not elections(watch.run(50)):
            waited_ms += 50
        delays.append(waited_ms + 50)
    assert delays == [100, 200, 400, 800, 1600, 2000]


def test_r10_a_proposal_whose_end_is_never_told_is_made_again(watch):
    assert elections(watch.close(1))
    assert elections(watch.run(CONFIG.outcome_timeout_ms - 50)) == []
    assert elections(watch.run(50))


def test_r10_the_scan_covers_a_group_without_a_master(watch):
    """All die; the master is deposed, once; the first member that returns is elected at once."""
    for broker_id in (2, 3):
        watch.close(broker_id)
    (effect,) = elections(watch.close(1))
    result, _ = watch.carry_out(effect)
    assert result.code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert watch.script.group.master_broker_id == 0
    assert elections(watch.run(5_000)) == []
    watch.script.register(2, incarnation="life-2b")
    watch.applied()
    watch.hello(2)
    (effect,) = elections(watch.done[-1:])
    assert effect == ProposeElect(NAME, 2, "no_master", watch.now_ms)
    result, _ = watch.carry_out(effect)
    assert result.view.master_broker_id == 2


def test_a_learner_or_stranger_that_returns_starts_no_election(watch):
    watch.script.register(4)
    watch.applied()
    for broker_id in (2, 3):
        watch.close(broker_id)
    watch.carry_out(elections(watch.close(1))[0])
    watch.hello(4)
    assert elections(watch.run(3_000)) == []


def test_the_first_election_is_the_brokers_affair_for_a_second(script):
    """Then the scan makes good a request that got lost."""
    script.register()
    watch = Watch(script)
    watch.applied()
    watch.tell(GateOpened())
    watch.hello(1)
    assert watch.run(FIRST_ELECTION_SETTLE_MS - 50) == []
    (effect,) = elections(watch.run(50))
    assert effect == ProposeElect(NAME, 0, "first_election", watch.now_ms)
    result, _ = watch.carry_out(effect)
    assert result.view.key == (1, 1)


def test_r16_the_floor_binds_only_what_every_candidate_has_beaten_since(watch):
    """A confirmOffset just heard must not exclude a slave whose heartbeat is 50 ms older."""
    for _ in range(50):
        watch.run(50)
        watch.beat(1, epoch=1, max_offset=1_000, confirm_offset=1_000)
    watch.beat(2, epoch=1, max_offset=900)
    watch.beat(3, epoch=1, max_offset=1_000)
    assert watch.core.confirm_floor(NAME) == 1_000
    watch.beat(1, epoch=1, max_offset=5_000, confirm_offset=5_000)
    assert watch.core.confirm_floor(NAME) == 1_000
    (effect,) = elections(watch.close(1))
    result, _ = watch.carry_out(effect)
    assert result.view.master_broker_id == 3


def test_r16_an_unclean_election_resets_the_floor(watch):
    watch.beating.discard(1)
    for _ in range(70):
        watch.run(50)
        watch.beat(1, epoch=1, max_offset=1_000, confirm_offset=1_000)
    assert watch.core.confirm_floor(NAME) == 1_000
    watch.script.alter(1)
    watch.script.die(1)
    assert watch.script.elect(2, designate=True, unclean=True).ok
    watch.applied()
    assert watch.core.confirm_floor(NAME) == -1


def test_an_election_says_how_long_the_master_had_been_silent(watch):
    """The closing of a session comes 40 ms after its last word; a hang is seen by silence alone."""
    watch.now_ms += 40
    (closed,) = elections(watch.close(1))
    assert (closed.detected_ms, closed.silent_ms) == (watch.now_ms, 40)


def test_a_silent_master_is_told_with_the_length_of_its_silence(watch):
    watch.beating.discard(1)
    began_ms = watch.now_ms
    (silent,) = elections(watch.run(2_000))
    assert silent.reason == "session_silent"
    assert silent.silent_ms > CONFIG.session_timeout_ms
    assert silent.silent_ms == silent.detected_ms - began_ms


def test_a_death_seen_before_the_gate_opened_keeps_its_time_and_its_silence(watch):
    """The controller leader dies with the master: the next one elects by what it saw itself."""
    watch.tell(GateClosed())
    watch.now_ms += 30
    assert elections(watch.close(1)) == []
    closed_ms = watch.now_ms
    watch.now_ms += 60
    (found,) = elections(watch.tell(GateOpened()))
    assert (found.reason, found.detected_ms, found.silent_ms) == ("session_closed", closed_ms, 30)


def test_a_group_that_nobody_may_lead_says_once_whom_it_waits_for(watch):
    watch.script.alter(1)
    watch.applied()
    (proposal,) = elections(watch.close(1))
    result, effects = watch.carry_out(proposal)
    assert result.code is Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert [e for e in effects if isinstance(e, ElectionBlocked)] == []  # told by the failure
    assert [e for e in watch.run(1_000) if isinstance(e, ElectionBlocked)] == []
    watch.tell(GateClosed())
    (said,) = [e for e in watch.tell(GateOpened()) if isinstance(e, ElectionBlocked)]
    assert (said.operator, said.reason) == (False, "no member of the SyncStateSet [1] lives")
    assert [e for e in watch.run(1_000) if isinstance(e, ElectionBlocked)] == []


def test_r19_a_forgetful_controller_says_so_once_and_stops(watch):
    watch.beating.discard(3)
    watch.beat(3, master_epoch=9)
    (blocked,) = [e for e in watch.close(1) if isinstance(e, ElectionBlocked)]
    assert "9" in blocked.reason
    watch.beat(3, master_epoch=9)
    assert [e for e in watch.run(700) if not isinstance(e, AliveChanged)] == []


def test_r19_a_forgetful_controller_says_so_with_a_living_master_too(watch):
    """A replica may be a moment ahead of this node; only what lasts is said."""

    def blocked(effects):
        return [effect.reason for effect in effects if isinstance(effect, ElectionBlocked)]

    watch.beating.discard(3)
    watch.beat(3, master_epoch=1, sync_state_set_epoch=3)
    assert blocked(watch.run(100)) == []
    watch.beat(3, master_epoch=1, sync_state_set_epoch=2)
    assert blocked(watch.run(700)) == []
    said = []
    for _ in range(30):
        watch.beat(3, master_epoch=1, sync_state_set_epoch=3)
        said += blocked(watch.run(100))
    (reason,) = said
    assert "broker 3 knows of masterEpoch 1 with syncStateSetEpoch 3" in reason
    assert watch.core.problems() == (f"{NAME}: {reason}",)
    assert watch.alive() == [1, 2, 3], "the master goes on"
    watch.beat(3, master_epoch=1, sync_state_set_epoch=2)
    watch.run(50)
    assert watch.core.problems() == ()


def test_r17_what_a_new_life_of_a_member_must_hold_is_what_was_heard_last(watch):
    watch.beat(1, confirm_offset=700)
    assert watch.core.confirm_heard(NAME) == 700
    assert watch.core.confirm_floor(NAME) == -1, "candidates may have told older offsets"


def test_r7_an_unclean_election_waits_for_the_last_lease(watch):
    """Counted from the last heartbeat of the master that this leader answered."""
    wait_ms = CONFIG.master_lease_ms + CONFIG.lease_margin_ms
    watch.beat(1)
    assert watch.core.unclean_wait_ms(NAME, watch.now_ms) == wait_ms
    watch.close(1)
    watch.run(wait_ms - 50)
    assert watch.core.unclean_wait_ms(NAME, watch.now_ms) == 50
    watch.run(100)
    assert watch.core.unclean_wait_ms(NAME, watch.now_ms) == 0
    watch.tell(GateClosed())
    assert watch.core.unclean_wait_ms(NAME, watch.now_ms) == wait_ms


def test_a_cleaned_group_is_forgotten(watch):
    watch.script.clean(clean_living_broker=True)
    assert watch.applied() == []
    assert watch.close(1) == []
    assert watch.alive() == []
    assert watch.run(1_000) == []


# --- brokers that speak only remoting ---------------------------------------------------------


@pytest.fixture
def java_watch(script):
    """Two Java brokers with heartbeats over channels 11 and 12, timeout 10 s."""
    for broker_id in (1, 2):
        script.apply_id(broker_id)
        script.register(broker_id, incarnation="", register_check_code="")
    script.elect(1)
    script.alter(1, 2)
    made = Watch(script)
    made.applied()
    made.tell(GateOpened())
    for broker_id in (1, 2):
        made.tell(RemotingHeartbeat(NAME, broker_id, 10 + broker_id, 10_000))
    return made


def test_904_keeps_a_java_broker_alive_for_its_own_timeout(java_watch):
    for _ in range(5):
        assert java_watch.run(1_000) == []
        java_watch.tell(RemotingHeartbeat(NAME, 2, 12, 10_000))
    java_watch.run(4_900)
    assert java_watch.alive() == [1, 2]
    java_watch.tell(RemotingHeartbeat(NAME, 2, 12, 10_000))
    (effect,) = elections(java_watch.run(200))
    assert effect.reason == "heartbeat_silent"


def test_a_closed_channel_of_a_java_master_is_an_election_at_once(java_watch):
    (effect,) = elections(java_watch.tell(RemotingChannelClosed(11)))
    assert effect.reason == "channel_closed"


def test_issue_11045_a_late_close_of_an_older_channel_is_ignored(java_watch):
    """The Java controller keeps the first channel; here the newest heartbeat's one counts."""
    java_watch.tell(RemotingHeartbeat(NAME, 1, 99, 10_000))
    assert java_watch.tell(RemotingChannelClosed(11)) == []
    assert elections(java_watch.tell(RemotingChannelClosed(99)))


def test_heartbeat_facts_are_the_newest_not_the_highest(java_watch):
    """Java keeps offsets only if they grow, so they stay too high after a truncation."""
    java_watch.tell(RemotingHeartbeat(NAME, 2, 12, 10_000, HeartbeatFacts(max_offset=900)))
    java_watch.tell(RemotingHeartbeat(NAME, 2, 12, 10_000, HeartbeatFacts(max_offset=300)))
    seen = java_watch.core.live(NAME, java_watch.now_ms)[1]
    assert (seen.broker_id, seen.max_offset) == (2, 300)
