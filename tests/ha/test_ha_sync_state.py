"""Whose acks count, when confirmOffset moves, who joins and leaves. Each test names its rule."""

import random
from itertools import pairwise

import pytest

from batonmq.ha.config import HAConfig
from batonmq.ha.follower import Follower, SyncPolicy
from batonmq.ha.sync_state import ConfirmAdvanced, ProposeSet
from tests.ha.cores import NOW, mastership, recorded_set


def state(recorded=(1,), **kwargs):
    return mastership(recorded, set_epoch=5, **kwargs)


def confirmed(effects):
    return [e.offset for e in effects if isinstance(e, ConfirmAdvanced)]


def proposed(effects):
    return [e.proposal for e in effects if isinstance(e, ProposeSet)]


def follow(sync, broker_id, ack, connection_id=None, now=NOW, **kwargs):
    connection_id = connection_id or broker_id * 10
    sync.connected(broker_id, connection_id, now, **kwargs)
    return sync.acked(broker_id, connection_id, ack, now)


# -- confirmOffset


@pytest.fixture
def sync():
    """A master whose set is {1, 2}, and 2 follows with nothing to ack."""
    sync = state((1, 2))
    follow(sync, 2, 0)
    return sync


def test_r15_confirm_offset_is_the_lowest_required_ack():
    sync = state((1, 2, 3))
    follow(sync, 2, 0)
    follow(sync, 3, 0)
    sync.appended(100, NOW)
    assert confirmed(sync.acked(2, 20, 100, NOW)) == []
    assert confirmed(sync.acked(3, 30, 100, NOW)) == [100]


def test_r15_confirm_offset_is_a_message_end(sync):
    """Acks come in the middle of messages, for frames cut them; confirmOffset does not."""
    for end in (100, 250, 300, 300):
        sync.appended(end, NOW)
    sync.check_invariants()
    assert confirmed(sync.acked(2, 20, 260, NOW)) == [250]
    assert confirmed(sync.acked(2, 20, 299, NOW)) == []
    assert confirmed(sync.acked(2, 20, 300, NOW)) == [300]


def test_issue_6662_confirm_offset_stands_while_a_member_is_not_connected():
    """A cut-off old master must not count the members that it cannot see as if they were not."""
    sync = state((1, 2, 3))
    follow(sync, 2, 0)
    sync.appended(100, NOW)
    assert confirmed(sync.acked(2, 20, 100, NOW)) == []
    assert not sync.required_set_whole
    assert confirmed(follow(sync, 3, 100)) == [100]
    sync.appended(200, NOW)
    sync.disconnected(3, 30, NOW)
    assert confirmed(sync.acked(2, 20, 200, NOW)) == []
    assert sync.acked(3, 30, 200, NOW) == [], "its connection has ended"


def test_issue_6728_an_ack_of_minus_one_counts_for_nothing():
    sync = state((1, 2))
    sync.appended(100, NOW)
    sync.connected(2, 20, NOW)
    assert sync.acked(2, 20, -1, NOW) == []
    assert sync.log.confirm_offset == 0 and not sync.required_set_whole
    sync.acked(2, 20, 50, NOW + 1)
    sync.acked(2, 20, -1, NOW + 900)
    assert sync.follower(2).ack_ms == NOW + 1, "nor is it a sign of life"


def test_r15_however_many_messages_wait_the_newest_end_is_kept(monkeypatch):
    """Else no one's ack could ever confirm the last one."""
    monkeypatch.setattr("batonmq.ha.sync_state._ENDS_MAX", 4)
    sync = state((1, 2))
    follow(sync, 2, 0)
    for end in range(100, 1000, 100):
        sync.appended(end, NOW)
        sync.log.check_invariants()
        assert len(sync.log._ends) <= 4
    assert confirmed(sync.acked(2, 20, 900, NOW)) == [900]


def test_r15_sync_flush_counts_flushed_bytes():
    sync = state((1, 2), policy=SyncPolicy(sync_flush=True))
    follow(sync, 2, 0)
    sync.appended(100, NOW)
    assert confirmed(sync.acked(2, 20, 100, NOW)) == []
    assert confirmed(sync.flushed_to(100, NOW)) == [100]
    sync.appended(200, NOW)
    sync.flushed_to(200, NOW)
    assert sync.flushed_to(150, NOW) == [], "a report that comes late"
    assert confirmed(sync.acked(2, 20, 200, NOW)) == [200]


def test_r15_below_min_in_sync_replicas_confirm_offset_stands():
    """The set may shrink between append and ack: then the ack must not come."""
    sync = state((1, 2), policy=SyncPolicy(min_in_sync_replicas=2))
    follow(sync, 2, 0)
    sync.appended(100, NOW)
    assert confirmed(sync.adopt(recorded_set((1,), 6), NOW)) == []
    assert confirmed(sync.acked(2, 20, 100, NOW)) == []
    assert confirmed(sync.adopt(recorded_set((1, 2), 7), NOW)) == [100]


def test_r18_only_the_newest_connection_of_an_id_counts():
    """1. The slave has caught up. 2. Its id comes on a new connection, before the old one is known
    to have ended: until that one acks, nothing is confirmed by it, and the set is not whole."""
    sync = state((1, 2))
    follow(sync, 2, 100)
    assert confirmed(sync.appended(100, NOW)) == [100]
    assert sync.required_set_whole
    sync.connected(2, 21, NOW + 10)
    assert not sync.required_set_whole and sync.follower(2).ack == -1
    assert not confirmed(sync.appended(200, NOW + 20))
    assert not confirmed(sync.acked(2, 20, 200, NOW + 30))
    assert confirmed(sync.acked(2, 21, 200, NOW + 40)) == [200]
    sync.disconnected(2, 20, NOW + 50)
    assert sync.required_set_whole, "a late close of the older socket is no one's loss"


def test_the_master_itself_is_never_judged():
    """Issue 7219: the master found itself not connected, and removed itself."""
    sync = state((1,), written=100, confirm=100)
    sync.set_dead({1}, NOW)
    assert not proposed(sync.tick(NOW + 60_000))
    sync.connected(1, 99, NOW)
    assert sync.follower(1) is None


# -- the recorded set


def test_r1_a_shrink_counts_when_it_is_committed(sync):
    """1 proposes {1}: until the commit 2's ack is needed, for 2 may be elected."""
    sync.appended(100, NOW)
    (proposal,) = proposed(sync.set_dead({2}, NOW + 600))
    assert proposal.new_set == {1} and proposal.remove == {2} and not sync.follower(2).slow
    assert sync.required_set == {1, 2} and sync.log.confirm_offset == 0
    assert confirmed(sync.adopt(recorded_set((1,), 6), NOW)) == [100]
    sync.check_invariants()


def test_r1_a_new_member_that_never_connected_is_waited_for():
    sync = state((1,))
    assert sync.adopt(recorded_set((1, 2), 6), NOW) == []
    assert sync.appended(100, NOW) == [] and sync.required_set == {1, 2}


def test_r1_an_expand_counts_when_it_is_proposed():
    """Issue 5663: from the proposal on, the newcomer may be elected."""
    sync = state((1,))
    (proposal,) = proposed(follow(sync, 2, 0))
    assert proposal.new_set == {1, 2}
    sync.appended(100, NOW)
    assert sync.log.confirm_offset == 0
    assert confirmed(sync.acked(2, 20, 100, NOW)) == [100]


def test_r11_an_unknown_outcome_keeps_the_union_and_proposes_nothing_else():
    """1 proposes {1,2}; no answer. 2 goes. Nothing is confirmed and nothing new proposed, until a
    higher setEpoch is committed or this very request is answered."""
    sync = state((1,))
    follow(sync, 2, 0)
    sync.disconnected(2, 20, NOW)
    assert sync.appended(100, NOW) == []
    assert not proposed(sync.tick(NOW + 5_000))
    assert sync.refused(2013, NOW) == [], "'same set' may be about an earlier copy"
    assert sync.required_set == {1, 2}
    assert sync.adopt(recorded_set((1, 2), 5), NOW) == [], (
        "a read of the same setEpoch proves nothing"
    )
    assert sync.adopt(recorded_set((1, 2), 6), NOW + 5_000) == [] and sync.proposal is None
    (shrink,) = proposed(sync.set_dead({2}, NOW + 5_001))
    assert shrink.new_set == {1} and shrink.sync_state_set_epoch == 6
    sync.check_invariants()


def test_r11_a_clear_refusal_ends_the_union():
    sync = state((1,))
    follow(sync, 2, 0)
    sync.appended(100, NOW)
    assert confirmed(sync.refused(2001, NOW)) == [100]
    assert sync.required_set == {1}
    assert sync.refused(2001, NOW) == [], "nothing is proposed"
    sync.tick(NOW + 50)
    assert sync.joining, "nor is the next attempt put off by it"


def test_refusals_are_retried_with_growing_delay():
    sync = state((1, 2))
    sync.set_dead({2}, NOW)
    now, waits = NOW, []
    for _ in range(6):
        sync.refused(2006, now)
        started = now
        while sync.proposal is None:
            now += 10
            sync.tick(now)
        waits.append(now - started)
    assert waits == sorted(waits) and waits[0] < waits[-1] <= 1_100


def test_after_a_change_that_was_carried_out_a_refusal_is_retried_soon_again():
    """Earlier refusals were about another set."""
    sync = state((1, 2, 3))
    sync.set_dead({2}, NOW)
    now = NOW
    for _ in range(6):
        sync.refused(2006, now)
        now += 2_000
        sync.tick(now)
    sync.adopt(recorded_set((1, 3), 6), now)
    (again,) = proposed(sync.set_dead({2, 3}, now))
    assert again.new_set == {1}
    sync.refused(2006, now)
    assert proposed(sync.tick(now + 100))


# -- joining


def test_r13_expand_needs_ack_at_confirm_offset():
    """A slave that is behind confirmOffset would make a promise that it cannot keep."""
    sync = state((1,), written=100 << 20, confirm=100 << 20)
    assert not proposed(follow(sync, 2, 0))
    assert sync.required_set == {1}, "far away: it may not hold confirmOffset either"


def test_r13_expand_needs_ack_at_the_start_of_the_last_epoch():
    sync = state((1,), written=200, confirm=100, start=150)
    sync.connected(2, 20, NOW)
    assert not proposed(sync.acked(2, 20, 120, NOW))
    sync.log.confirm_offset = 100
    assert not proposed(sync.tick(NOW + 50))
    assert proposed(sync.acked(2, 20, 200, NOW + 60))


def test_r13_under_load_a_near_slave_joins_first():
    """With the set {1} confirmOffset is the log's end, which 2 never reaches while writes continue.
    So 2 is waited for, 200 ms at most, until its ack has reached confirmOffset."""
    sync = state((1,), written=1_000, confirm=1_000)
    follow(sync, 2, 900)
    assert sync.required_set == {1, 2} and sync.proposal is None
    assert confirmed(sync.appended(1_100, NOW)) == []
    (proposal,) = proposed(sync.acked(2, 20, 1_050, NOW + 5))
    assert proposal.new_set == {1, 2} and proposal.confirm_offset == 1_000
    assert not sync.joining
    sync.check_invariants()


def test_r13_joining_holds_confirm_offset_for_200_ms_at_most():
    sync = state((1,), written=1_000, confirm=1_000)
    follow(sync, 2, 900)
    sync.appended(1_100, NOW)
    assert not confirmed(sync.tick(NOW + 50))
    sync.tick(NOW + 100)
    sync.tick(NOW + 150)
    assert confirmed(sync.tick(NOW + 200)) == [1_100]
    assert sync.required_set == {1}
    assert not sync.joining, "and not again at once"
    for ms in range(250, 1_150, 50):
        sync.tick(NOW + ms)
        assert not sync.joining
    sync.acked(2, 20, 901, NOW + 1_190)
    sync.tick(NOW + 1_200)
    assert sync.joining


def test_r13_a_slave_whose_acks_do_not_flow_does_not_join(sync):
    """A hung or cut-off slave was just shrunk away and is still near: waiting for it would only
    stop the writes once more. It joins with its first ack of something new."""
    sync.appended(100, NOW)
    for ms in range(50, 650, 50):
        sync.tick(NOW + ms)
    assert sync.proposal is not None and sync.proposal.remove == {2}
    sync.adopt(recorded_set({1}, 6), NOW + 650)
    for ms in range(650, 5_000, 50):
        sync.appended(sync.log.written + 10, NOW + ms)
        sync.tick(NOW + ms)
        assert not sync.joining and sync.log.confirm_offset == sync.log.written
    sync.acked(2, 20, 100, NOW + 5_000)
    sync.tick(NOW + 5_000)
    assert sync.joining.keys() == {2}


@pytest.mark.parametrize("write_every", [100, 2_000, 100_000])
def test_r13_a_cut_off_slave_is_shrunk_away_once_and_back_with_its_first_ack(write_every):
    """Its socket stays open, and while nothing is written it lacks nothing: it is not taken back in
    for that, and not barred for having been "slow" ever again."""
    sync = state((1, 2), written=1_000, confirm=1_000)
    follow(sync, 2, 1_000)
    changes, key = [], 5
    for ms in range(0, 31_000, 50):
        now = NOW + ms
        if ms % write_every == 0 and ms:
            sync.appended(sync.log.written + 100, now)
        if ms < 1_000 or ms > 30_000:
            sync.acked(2, 20, sync.log.written, now)
        sync.tick(now)
        if sync.proposal is not None:
            changes.append((ms, sorted(sync.proposal.new_set)))
            key += 1
            sync.adopt(recorded_set(sync.proposal.new_set, key), now)
    (shrunk, without), (grown, whole) = changes
    assert without == [1] and whole == [1, 2]
    assert shrunk <= 1_000 + 2_000 + 600 and grown == 30_050


@pytest.mark.parametrize(
    ("pings", "ms", "joins"), [(0, 3_000, True), (2, 100, True), (2, 101, False)]
)
def test_r13_a_silent_java_slave_that_acked_all_there_is_joins(pings, ms, joins):
    """Java acks every 5 s when nothing is written: only of one that pings is it a sign that it
    hangs."""
    sync = state((1,), written=1_000, confirm=1_000, candidates={1})
    follow(sync, 2, 1_000)
    for _ in range(pings):
        sync.acked(2, 20, 1_000, NOW)
    assert bool(proposed(sync.adopt(recorded_set((1,), 5, {1, 2}), NOW + ms))) is joins


@pytest.mark.parametrize(
    ("ack_ms", "byte_ms", "calm"),
    [(300, None, True), (301, None, False), (300, 50, True), (300, 51, False)],
)
def test_r14_ticks_are_rare_while_acks_and_unacked_bytes_are_young(ack_ms, byte_ms, calm):
    follower = Follower(2, NOW, connection_id=20, ack=0, ack_ms=NOW - ack_ms)
    written_ms = None if byte_ms is None else NOW - byte_ms
    assert follower.is_calm(SyncPolicy(), written_ms, NOW) is calm


def test_r14_a_new_epoch_gives_no_new_time_to_who_was_away_before(sync):
    sync.disconnected(2, 20, NOW)
    for ms in range(50, 600, 50):
        assert not proposed(sync.tick(NOW + ms))
    sync.begin_epoch(2, 0, recorded_set((1, 2), 6), NOW + 560)
    assert proposed(sync.tick(NOW + 600))


def test_r13_a_joining_slave_that_goes_away_has_joined_in_vain():
    """One with a full disk comes and goes: the writes that its joins held up were held up for
    nothing, so it is waited for ever more rarely."""
    sync = state((1,), written=1_000, confirm=1_000)
    joins = []
    for n, ms in enumerate(range(0, 8_000, 50)):
        now = NOW + ms
        follow(sync, 2, 900, connection_id=20 + n, now=now)
        sync.tick(now)
        if sync.joining:
            joins.append(ms)
        sync.disconnected(2, 20 + n, now + 10)
        assert not sync.joining and sync.required_set == {1}
    assert joins == [0, 1_050, 3_100, 7_150]


def test_r13_learners_and_incomplete_logs_do_not_join():
    sync = state((1,), written=100, confirm=100)
    assert not proposed(follow(sync, 2, 100, learner=True))
    sync.connected(3, 30, NOW)
    sync.lacks_beginning(3)
    assert not proposed(sync.acked(3, 30, 100, NOW)) and sync.required_set == {1}


def test_r12_only_registered_replicas_are_proposed():
    sync = state((1,), candidates={1, 3})
    assert not proposed(follow(sync, 2, 0))
    assert proposed(follow(sync, 3, 0))


def test_the_dead_are_not_proposed():
    """The controller would refuse with 2006."""
    sync = state((1,))
    sync.set_dead({2}, NOW)
    assert not proposed(follow(sync, 2, 0))
    (proposal,) = proposed(sync.set_dead((), NOW))
    assert proposal.add == {2}


# -- leaving


def test_r50_a_member_that_acks_is_not_removed_on_the_word_of_the_controllers():
    """The leading controller lost its link to it. Its end is seen on its own connection at once."""
    sync = state((1, 2))
    follow(sync, 2, 0, connection_id=20)
    assert not proposed(sync.set_dead({2}, NOW))
    for now in range(NOW, NOW + 2_000, 100):
        sync.acked(2, 20, 0, now)
        assert not proposed(sync.tick(now))
        assert sync.tick_ms == sync.policy.tick_ms, "it may fall silent any time"
    (proposal,) = proposed(sync.disconnected(2, 20, now + 10))
    assert proposal.remove == {2} and "dead to the controllers" in proposal.reason


def test_r14_an_unacked_byte_may_be_600_ms_old(sync):
    sync.appended(100, NOW)
    now = NOW
    for _ in range(11):
        now += 50
        assert not proposed(sync.tick(now))
        sync.acked(2, 20, 0, now)
    (proposal,) = proposed(sync.tick(now + 50))
    assert proposal.reason == "2 is behind for 600 ms"


def test_r14_a_new_member_is_judged_from_when_it_joined():
    """Bytes that were old already when it became a member are no proof that it is slow."""
    sync = state((1,))
    follow(sync, 2, 0)
    sync.appended(100, NOW)
    now = NOW
    while now < NOW + 1_000:
        now += 50
        sync.tick(now)
        sync.acked(2, 20, 0, now)
    assert not proposed(sync.adopt(recorded_set((1, 2), 9), now))
    joined = now
    while now < joined + 550:
        now += 50
        sync.acked(2, 20, 0, now)
        assert not proposed(sync.tick(now))
    sync.acked(2, 20, 0, now + 50)
    (proposal,) = proposed(sync.tick(now + 50))
    assert proposal.reason == "2 is behind for 600 ms"


def test_r8_bytes_that_were_unacked_while_we_stood_still_count_as_so_much_younger(sync):
    now = NOW
    while now < NOW + 2_000:
        now += 50
        sync.acked(2, 20, 0, now)
        sync.tick(now)
    sync.appended(100, now)
    for _ in range(4):
        now += 50
        assert not proposed(sync.tick(now))
    now += 500
    assert not proposed(sync.tick(now)), "200 ms of ours, 500 of our stall"
    for _ in range(6):
        now += 50
        sync.acked(2, 20, 0, now)
        assert not proposed(sync.tick(now))
    for _ in range(2):
        now += 50
        sync.acked(2, 20, 0, now)
        found = proposed(sync.tick(now))
        if found:
            break
    assert "2 is behind" in found[0].reason


def test_r14_connections_that_end_before_an_ack_keep_no_member(sync):
    sync.disconnected(2, 20, NOW)
    for ms in range(50, 600, 50):
        sync.connected(2, 20 + ms, NOW + ms)
        assert not proposed(sync.disconnected(2, 20 + ms, NOW + ms + 10))
        assert not proposed(sync.tick(NOW + ms + 20))
    (removal,) = proposed(sync.tick(NOW + 600))
    assert removal.remove == {2} and "not connected" in removal.reason


def test_r8_what_a_new_member_lacks_is_not_counted_while_we_stood_still():
    """What was written before it joined counts from its joining on, without our own stall."""
    sync = state((1,))
    sync.appended(100, NOW)
    follow(sync, 2, 0)
    sync.tick(NOW + 50)
    removals, joined = [], NOW + 1_000
    sync.tick(joined)
    sync.adopt(recorded_set((1, 2), 6), joined)
    for ms in (50, 100, 150, 200, 750, 800, 850, 900, 950, 1_000, 1_050, 1_100, 1_150):
        sync.acked(2, 20, 0, joined + ms)
        removals += [(ms, p.remove) for p in proposed(sync.tick(joined + ms))]
    assert removals == [(1_100, {2})], "600 ms of its own and 500 of our stall"


def test_r8_a_joining_slave_does_not_lose_its_time_while_we_stood_still():
    sync = state((1,), written=1_000, confirm=1_000)
    follow(sync, 2, 900)
    sync.appended(1_100, NOW)
    sync.tick(NOW + 50)
    assert sync.joining
    sync.tick(NOW + 800)
    assert sync.joining, "700 ms of these we did not look"
    for ms in range(850, 1_000, 50):
        sync.tick(NOW + ms)
    assert not sync.joining


def test_r14_a_member_that_connects_again_is_given_its_time(sync):
    for now in range(NOW, NOW + 2_000, 50):
        sync.acked(2, 20, 0, now)
        sync.tick(now)
    sync.connected(2, 21, now)
    assert not proposed(sync.tick(now + 50))


def first_removal(sync, write, ms):
    """Ticks every 50 ms; the time of the first proposal to remove somebody, None if none came."""
    for at in range(0, ms, 50):
        write(NOW + at)
        for proposal in proposed(sync.tick(NOW + at)):
            if proposal.remove:
                return at
    return None


def test_r14_the_oldest_unacked_byte_counts_not_the_last_ack(sync):
    """A slave acks what came before 550 ms ago and hangs: the byte of 10 ms later is 600 ms old
    soon after, and no write waits twice that long."""

    def write(now):
        sync.appended(sync.log.written + 10, now)
        if now == NOW + 550:
            sync.acked(2, 20, 10, now)

    assert first_removal(sync, write, 3_000) == 650


def test_r14_coming_back_without_progress_is_being_behind(sync):
    """It connects, acks what it has, gets stuck and starts over, each time before 600 ms are up."""

    def write(now):
        sync.appended(sync.log.written + 10, now)
        if (now - NOW) % 400 == 350:
            connection = now
            sync.disconnected(2, sync.follower(2).connection_id, now)
            sync.connected(2, connection, now)
            sync.acked(2, connection, 0, now)

    assert first_removal(sync, write, 3_000) == 600


@pytest.mark.parametrize("hangs_at", [NOW + 1_010, NOW + 1_100, NOW + 1_190])
def test_r14_calm_ticks_judge_a_slave_as_early_as_quick_ones(sync, hangs_at):
    """While all is well a tick each 200 ms is enough: who hangs is looked at more often long before
    its time is up."""
    now = ticked = acked = NOW
    pauses, removed = set(), False
    while not removed:
        now += 10
        if now < hangs_at and now % 100 == 0:
            acked = now
            sync.acked(2, 20, 0, now)
        if now == ticked + sync.tick_ms:
            ticked = now
            pauses.add(sync.tick_ms)
            removed = any(proposal.remove == {2} for proposal in proposed(sync.tick(now)))
    assert pauses == {sync.policy.tick_ms, sync.policy.calm_tick_ms}
    assert 600 <= now - acked < 650


def test_r14_who_is_slow_again_and_again_comes_back_ever_later(sync):
    """Each time costs all writes 600 ms. The first time is forgiven."""
    now, set_epoch, waits = NOW, 5, []
    for _ in range(5):
        sync.appended(sync.log.written + 10, now)
        proposal = []
        while not proposal:
            now += 50
            proposal = proposed(sync.tick(now))
        assert proposal[0].remove == {2}
        set_epoch += 1
        left_ms = now
        proposal = proposed(sync.adopt(recorded_set((1,), set_epoch), now))
        proposal += proposed(sync.acked(2, 20, sync.log.written, now))
        while not proposal:
            now += 50
            proposal = proposed(sync.acked(2, 20, sync.log.written, now)) + proposed(sync.tick(now))
        assert proposal[0].add == {2}
        waits.append(now - left_ms)
        set_epoch += 1
        sync.adopt(recorded_set((1, 2), set_epoch), now)
    assert waits == [0, 1_000, 2_000, 4_000, 8_000]


def test_r14_a_long_calm_forgives(sync):
    follower = sync.follower(2)
    for _ in range(3):
        follower.slow, follower.joined_ms = True, NOW
        follower.left(sync.policy, NOW + 1_000)
    assert follower.barred_until_ms == NOW + 3_000
    follower.slow = True
    follower.left(sync.policy, NOW + 60_000)
    assert follower.times_slow == 1 and follower.barred_until_ms < NOW + 60_000


def test_r13_a_far_slave_joins_only_if_its_rate_can_close_the_gap_in_time():
    """At 5 MB/s it moves 1 MB in the 200 ms for which confirmOffset would stand for it."""
    sync = state((1,), written=100 << 20, confirm=100 << 20)
    sync.connected(2, 20, NOW)
    for tick in range(20):
        assert sync.acked(2, 20, tick * 500_000, NOW + tick * 100) == []
        sync.tick(NOW + tick * 100)
        assert not sync.joining
    rate = sync.follower(2).rate
    assert rate == 5_000_000
    ack = sync.log.written - 900_000
    sync.acked(2, 20, ack, NOW + 1_950)
    assert sync.joining.keys() == {2}


def test_r13_joins_in_vain_become_rarer():
    sync = state((1,))
    sync.appended(10_000, NOW)
    follow(sync, 2, 0)
    begun, now = [], NOW
    joining = False
    for at in range(0, 20_000, 50):
        now = NOW + at
        sync.appended(sync.log.written + 10, now)
        sync.acked(2, 20, at // 50 + 1, now)  # it moves, but never gets near the end
        sync.tick(now)
        if sync.joining and not joining:
            begun.append(at)
        joining = bool(sync.joining)
    pauses = [later - earlier for earlier, later in pairwise(begun)]
    assert pauses == [1_200, 2_200, 4_200, 8_200]


def test_r14_a_slave_that_keeps_up_under_load_stays(sync):
    """It has never caught up at any instant, but no single byte waits long."""
    end, now = 0, NOW
    for _ in range(200):
        now += 25
        end += 100
        sync.appended(end, now)
        sync.acked(2, 20, end - 50, now)
        assert not proposed(sync.tick(now))


def test_r14_a_pinging_slave_may_be_silent_for_600_ms(sync):
    """Two answers show that it pings."""
    for ms in range(50, 700, 50):
        if ms <= 100:
            sync.acked(2, 20, 0, NOW + ms)
        assert not proposed(sync.tick(NOW + ms))
    (proposal,) = proposed(sync.tick(NOW + 700))
    assert proposal.reason == "2 is silent for 600 ms"


def test_a_java_slave_acks_every_five_seconds_and_stays(sync):
    """Once it acked twice in a row: that is no ping yet."""
    for ms in range(50, 14_000, 50):
        if ms == 50 or ms % 5_000 == 0:
            sync.acked(2, 20, 0, NOW + ms)
        assert not proposed(sync.tick(NOW + ms))


def test_a_member_that_never_connects_leaves_after_600_ms():
    """R9: the winner of an election waits for the old members, or shrinks."""
    sync = state((1, 2))
    for ms in range(50, 600, 50):
        assert not proposed(sync.tick(NOW + ms))
    (proposal,) = proposed(sync.tick(NOW + 600))
    assert proposal.new_set == {1} and "not connected" in proposal.reason
    assert not sync.follower(2).slow


def test_r8_a_stall_of_our_own_is_no_evidence(sync):
    """The loop stood still for 5 s: everybody looks silent, and no one is."""
    for ms in (50, 100, 150):
        sync.acked(2, 20, 0, NOW + ms)
        sync.tick(NOW + ms)
    sync.appended(100, NOW + 150)
    assert not proposed(sync.tick(NOW + 5_150))
    sync.acked(2, 20, 100, NOW + 5_151)
    assert not proposed(sync.tick(NOW + 5_200))


# -- properties


@pytest.mark.parametrize("seed", range(60))
def test_r1_r11_r13_r15_confirm_offset_never_exceeds_any_possible_set(seed):
    """Random appends, acks, lost and reordered answers, deaths and returns. At every step
    confirmOffset is at most what each possibly committed set holds, and never falls."""
    rng = random.Random(seed)
    recorded = frozenset({1, *rng.sample((2, 3), rng.randint(0, 2))})
    sync = state(recorded, policy=SyncPolicy(min_in_sync_replicas=rng.choice((1, 1, 2))))
    committed, set_epoch = recorded, 5
    disk = dict.fromkeys((2, 3), 0)  # what each slave really holds, forever
    written, now, connections = 0, NOW, {}
    in_flight = None  # a proposal at the controller, not yet applied or refused
    lost = False  # whether its answer was lost
    next_connection = 100
    highest = 0

    def run(effects):
        nonlocal in_flight, lost
        for effect in effects:
            if isinstance(effect, ProposeSet):
                assert in_flight is None, "R11: one at a time"
                in_flight, lost = effect.proposal, False

    for _ in range(300):
        now += rng.choice((0, 1, 10, 50, 210))
        step = rng.randrange(11)
        slave = rng.choice((2, 3))
        if step <= 2:
            written += rng.randint(1, 100)
            run(sync.appended(written, now))
        elif step <= 4 and slave in connections:
            disk[slave] = max(disk[slave], rng.randint(disk[slave], written))
            run(sync.acked(slave, connections[slave], disk[slave], now))
        elif step == 5:
            next_connection += 1
            connections[slave] = next_connection
            sync.connected(slave, next_connection, now)
        elif step == 6 and slave in connections:
            run(sync.disconnected(slave, connections.pop(slave), now))
        elif step == 7:
            run(sync.set_dead(rng.sample((2, 3), rng.randint(0, 2)), now))
        elif step == 8 and in_flight is not None:
            outcome = rng.randrange(4)
            if outcome == 0:  # applied, and answered
                committed, set_epoch, in_flight = in_flight.new_set, set_epoch + 1, None
                run(sync.adopt(recorded_set(committed, set_epoch), now))
            elif outcome == 1:  # applied, the answer is lost; a view may follow
                committed, set_epoch = in_flight.new_set, set_epoch + 1
                in_flight = None
            elif outcome == 2:
                in_flight = None
                run(sync.refused(2001, now))
            else:  # lost on the way, may still be applied
                lost = True
        elif step == 9 and in_flight is not None and lost:
            committed, set_epoch, in_flight = in_flight.new_set, set_epoch + 1, None
        elif step == 10:
            if set_epoch > sync.sync_state_set_epoch:
                in_flight = None
            run(sync.adopt(recorded_set(committed, set_epoch), now))
        run(sync.tick(now))
        sync.check_invariants()
        assert sync.log.confirm_offset >= highest, "R15: it fell"
        highest = sync.log.confirm_offset
        for members in (committed, in_flight.new_set if in_flight is not None else committed):
            held = min([disk[i] for i in members if i != 1] + [written])
            assert highest <= held, f"acknowledged {highest}, but {members} holds {held}"


def test_r20_a_late_view_with_an_earlier_set_changes_nothing():
    sync = state((1, 2, 3))
    sync.adopt(recorded_set((1, 2), 7), NOW)
    for late in (6, 7):
        sync.adopt(recorded_set((1,), late), NOW)
        assert sync.required_set == {1, 2} and sync.sync_state_set_epoch == 7


def test_r9_a_member_that_held_all_is_given_its_time_in_a_new_epoch_of_its_master():
    """It acks nothing of the new epoch yet; that all it held is old makes it no slow member."""
    sync = state((1, 2), written=100, confirm=100)
    follow(sync, 2, 100)
    later = NOW + 5_000
    for now in range(NOW, later + 1, 50):
        sync.acked(2, 20, 100, now)
        sync.tick(now)
    effects = sync.begin_epoch(2, 100, recorded_set((1, 2), 6), later)
    assert not proposed(effects) and not proposed(sync.tick(later + 100))
    assert sync.required_set == {1, 2} and not sync.required_set_whole


def test_who_is_not_connected_has_acked_nothing(sync):
    """A planned switch reads it, too."""
    sync.disconnected(2, 20, NOW)
    assert sync.follower(2).ack == -1


def test_r13_who_was_joining_in_the_epoch_before_delays_nothing_in_the_next():
    sync = state((1,), written=1_000, confirm=1_000)
    follow(sync, 2, 900)
    sync.appended(1_100, NOW)
    sync.tick(NOW + 50)
    assert sync.required_set == {1, 2}
    effects = sync.begin_epoch(2, 1_100, recorded_set((1,), 6), NOW + 60)
    assert sync.required_set == {1} and confirmed(effects) == [1_100]


def test_r20_controllers_that_forgot_number_the_sets_of_a_new_epoch_from_the_start():
    sync = state((1, 2), written=100, confirm=100)
    follow(sync, 2, 100)
    late = sync.sync_state_set_epoch - 1
    sync.begin_epoch(4_711, 100, recorded_set((1,), late), NOW)
    assert sync.recorded == {1} and sync.sync_state_set_epoch == late
    assert proposed(sync.acked(2, 20, 100, NOW))[0].add == {2}


def test_r8_r42_the_time_for_tables_does_not_pass_while_we_stood_still():
    sync = state((1, 2))
    follow(sync, 2, 0, tables_awaited=True)
    for now in range(NOW, NOW + 4_000, 50):
        sync.acked(2, 20, 0, now)
        sync.tick(now)
    assert not proposed(sync.tick(NOW + 14_000))


def test_r13_no_rate_lets_a_slave_join_from_beyond_the_limit():
    """Confirming would stand still for all of a log that is as long as that."""
    sync = state((1,), written=1 << 30, confirm=1 << 30)
    sync.connected(2, 20, NOW)
    for tick in range(5):
        sync.acked(2, 20, tick * 200_000_000, NOW + tick * 100)
        sync.tick(NOW + tick * 100)
    assert sync.follower(2).rate == 2_000_000_000
    limit = sync.policy.join_lag_bytes_max
    sync.acked(2, 20, sync.log.written - limit - 1, NOW + 410)
    assert not sync.joining
    sync.acked(2, 20, sync.log.written - limit, NOW + 420)
    assert sync.joining.keys() == {2}


def test_r13_after_the_next_election_a_slave_joins_from_the_start_of_that_epoch_on():
    sync = state((1,), written=100)
    sync.begin_epoch(2, 100, recorded_set((1,), 6), NOW)
    sync.connected(2, 20, NOW)
    assert not proposed(sync.acked(2, 20, 99, NOW)) and not sync.joining
    assert proposed(sync.acked(2, 20, 100, NOW))[0].add == {2}


def test_r14_a_java_slave_that_follows_under_an_id_of_ours_is_given_javas_time(sync):
    """The connection before it answered heartbeats; this one acks every 5 s when idle."""
    for ms in (10, 20):
        sync.acked(2, 20, 0, NOW + ms)
    sync.disconnected(2, 20, NOW + 100)
    follow(sync, 2, 0, 21, NOW + 200)
    sync.acked(2, 21, 0, NOW + 210)
    for now in range(NOW + 250, NOW + 5_000, 50):
        assert not proposed(sync.tick(now))


def test_r13_how_fast_an_earlier_connection_was_lets_nobody_join():
    sync = state((1,), written=10 << 20, confirm=10 << 20)
    follow(sync, 2, 0)
    sync.acked(2, 20, 8 << 20, NOW + 100)
    assert sync.follower(2).rate == 80 << 20
    sync.disconnected(2, 20, NOW + 200)
    follow(sync, 2, 8 << 20, 21, NOW + 5_000)
    assert not sync.joining


def test_r18_r42_tables_that_an_earlier_connection_held_count_no_more():
    sync = state((1,))
    follow(sync, 2, 0, 20, tables_awaited=True)
    follow(sync, 2, 0, 21, tables_awaited=True)
    assert not proposed(sync.tables_held(2, 20, 1, NOW))
    assert proposed(sync.tables_held(2, 21, 1, NOW))[0].add == {2}


def test_r42_a_member_with_stale_tables_stays_in_the_set_and_follows_them_no_more():
    """It has every acknowledged message; what it lacks are the newest offsets of groups."""
    sync = state((1, 2))
    follow(sync, 2, 0, tables_awaited=True)
    sync.tables_held(2, 20, 1, NOW)
    assert sync.follower(2).follows_tables(1)
    for now in range(NOW, NOW + 10_000, 50):
        sync.acked(2, 20, 0, now)
        assert not proposed(sync.tick(now)) and not proposed(sync.tables_held(2, 20, -1, now))
    assert sync.follower(2).holds_tables(1) and not sync.follower(2).follows_tables(1)
    sync.tables_held(2, 20, 1, now)
    assert sync.follower(2).follows_tables(1) and not sync.follower(2).follows_tables(2)


def test_r12_a_view_without_replicas_lets_nobody_in():
    sync = state((1,), candidates=(1, 2))
    sync.adopt(recorded_set((1,), 6, None), NOW)
    assert not proposed(follow(sync, 3, 0))
    assert proposed(follow(sync, 2, 0))[0].add == {2}


def test_r13_who_joined_while_it_was_joining_is_a_member_whose_time_does_not_run_out():
    sync = state((1,), written=1_000, confirm=1_000)
    follow(sync, 2, 900)
    assert sync.joining.keys() == {2}
    sync.adopt(recorded_set((1, 2), 6), NOW + 10)
    sync.check_invariants()
    sync.tick(NOW + 50)
    sync.acked(2, 20, 1_000, NOW + 100)
    sync.tick(NOW + 250)
    assert sync.follower(2).joins_in_vain == 0 and sync.required_set == {1, 2}


def test_r42_the_time_for_the_tables_of_an_epoch_begins_with_it():
    sync = state((1, 2))
    follow(sync, 2, 0, tables_awaited=True)
    sync.tables_held(2, 20, 1, NOW)
    begins = NOW + 10_000
    for now in range(NOW, begins, 50):
        sync.acked(2, 20, 0, now)
        sync.tick(now)
    sync.begin_epoch(2, 0, recorded_set((1, 2), 6), begins)
    for now in range(begins, begins + 5_000, 50):
        assert not proposed(sync.acked(2, 20, 0, now)) and not proposed(sync.tick(now))
    sync.acked(2, 20, 0, begins + 5_000)
    (removal,) = proposed(sync.tick(begins + 5_000))
    assert removal.remove == {2} and "no tables" in removal.reason
    assert not sync.follower(2).slow, "it delayed no write"


def in_vain(sync, now):
    """The slave is near, joins, and disconnects; for how long it may not join again."""
    follow(sync, 2, sync.log.written - 10, 20 + now, now)
    assert sync.joining.keys() == {2}
    sync.disconnected(2, 20 + now, now)
    return sync.follower(2).join_after_ms - now


def test_r13_pauses_after_joins_in_vain_begin_small_again_once_it_was_a_member():
    sync = state((1,), written=1_000, confirm=1_000)
    first, second = in_vain(sync, NOW), in_vain(sync, NOW + 10_000)
    assert second == 2 * first
    sync.adopt(recorded_set((1, 2), 6), NOW + 20_000)
    sync.adopt(recorded_set((1,), 7), NOW + 30_000)
    assert in_vain(sync, NOW + 40_000) == first


def test_r14_only_who_left_for_slowness_is_barred_for_it(sync):
    """It was slow once, then dead twice: that tells nothing of how fast it is."""
    sync.appended(100, NOW)
    for now in range(NOW, NOW + 700, 50):
        sync.tick(now)
    assert sync.proposal is not None and "behind" in sync.proposal.reason
    for set_epoch, members in enumerate([(1,), (1, 2), (1,), (1, 2), (1,)], 6):
        sync.adopt(recorded_set(members, set_epoch), NOW + 1_000 * set_epoch)
    assert sync.follower(2).times_slow == 1


def test_r14_a_slave_may_be_late_with_one_answer_to_a_heartbeat():
    HAConfig(ha_slave_silent_time=600).check_with_controllers()
    with pytest.raises(ValueError, match="haSlaveSilentTime is 599 ms"):
        HAConfig(ha_slave_silent_time=599).check_with_controllers()


def test_r14_a_master_may_be_late_with_some_of_its_heartbeats():
    for interval, given in ((200, 2_000), (1_000, 5_000)):
        config = HAConfig(ha_send_heartbeat_interval=interval)
        policy = config.slave_policy(ha_sync_flush=False, segment_size=1)
        assert policy.silence_limit_ms == given
