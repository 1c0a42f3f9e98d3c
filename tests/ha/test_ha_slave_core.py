"""The slave's connection: time, acks under haSyncFlush, reports when it cannot follow."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from msgspec import structs

from batonmq.ha import slave_effects as fx
from batonmq.ha.java_peer import PeerIdentity, proof_fault
from batonmq.ha.lineage import LogSample
from batonmq.ha.received_log import (
    BeginAgain,
    CutTo,
    Keep,
    LocalLog,
    ReceivedLog,
    Refuse,
    judge_log,
)
from batonmq.ha.slave_core import SlaveCore, SlavePhase
from batonmq.ha.slave_policy import MasterSilence, Redial, SlavePolicy
from batonmq.ha.wire import (
    MasterHandshake,
    SlaveFrameReader,
    SlaveHandshake,
    TransferHeader,
    encode_ack,
    encode_epoch_mark,
    encode_master_handshake,
    encode_slave_handshake,
    encode_tables_mark,
    encode_transfer_header,
)
from batonmq.protocol.role_view import RoleView
from tests.ha.cores import MemoryLog, SlaveHost, entries, identity

NOW = 1_000_000


def view(epoch=1, address="master:1", incarnation="i1", master=1, members=()):
    return RoleView(
        "C",
        "broker-a",
        master_broker_id=master,
        master_ha_address=address,
        master_incarnation=incarnation,
        master_epoch=epoch,
        sync_state_set=frozenset(members),
    )


def answer(max_offset, last_epoch, history, named=None):
    """What the master of `view` answers, naming itself."""
    return MasterHandshake(max_offset, last_epoch, history, named or identity(1))


def connected(log, seen=None, policy=None):
    """A host that has just connected to the master of `seen`."""
    host = SlaveHost(dialling(log, seen, policy), log)
    host.connect(NOW)
    return host


def dialling(log, seen=None, policy=None):
    """A core that has begun to connect."""
    core = SlaveCore(identity(2), seen or view(), log.facts(), policy or SlavePolicy(), NOW)
    core.tick(NOW)
    return core


def answered(host, peer, now=NOW):
    host.perform(host.core.handshake_received(peer, host.log.facts(), now), now)
    return host


def again(host, peer):
    """The connection ends; the master answers on the next one."""
    host.perform(host.core.disconnected(NOW), NOW)
    host.perform(host.core.tick(host.core.wakeup_ms), NOW)
    host.connect(NOW)
    return answered(host, peer)


def slave(policy=None, log=None, history=((1, 0),), incarnation="i1"):
    """A host in TRANSFER, on a log of 100 bytes of epoch 1."""
    log = log or MemoryLog(b"1" * 100, (1, 0))
    host = connected(log, view(history[-1][0], incarnation=incarnation), policy)
    return answered(host, answer(100, history[-1][0], entries(*history)))


def beat(host, now, offset=100, epoch=1, confirm=0):
    frame = TransferHeader(0, offset, epoch, 0, confirm)
    return host.core.frame_received(frame, now) + host.core.turn_ended(offset, now)


@pytest.fixture
def host():
    return slave()


def test_r2_a_slave_follows_its_master_into_no_epoch_that_it_was_not_told_of():
    """1 hears of epoch 1. 2 its master was elected again, for epoch 3: what it confirms on our acks
    could be cut by the master of epoch 2, of whom we may yet hear. 3 hears of epoch 3."""
    log = MemoryLog(b"1" * 100, (1, 0))
    peer = answer(200, 3, entries((1, 0), (3, 200)))
    for epoch, phase in ((1, SlavePhase.READY), (3, SlavePhase.TRANSFER)):
        assert answered(connected(log, view(epoch)), peer).core.phase is phase


def test_r2_a_handshake_while_a_newer_epoch_is_stored_gets_no_first_ack():
    """1 dials the master of epoch 1. 2 a view of epoch 2 comes, and its disk is slow. 3 the
    master answers: it must not count this replica, which may elect another one by now. 4 the view
    of epoch 2 names the same process again: now it does."""
    host = connected(MemoryLog(b"1" * 100, (1, 0)))
    core = host.core
    core.fenced_epoch = 2
    host.take_sent()
    answered(host, answer(100, 1, entries((1, 0))))
    assert core.phase is SlavePhase.TRANSFER and encode_ack(100) not in host.take_sent()
    assert beat(host, NOW + 100) == []
    assert core.follow(view(2), NOW + 150) == []
    assert beat(host, NOW + 200) == [fx.SendToMaster(encode_ack(100))]


def test_each_heartbeat_is_acked(host):
    """R14: that distinguishes a hung slave from an idle one."""
    for ms in (100, 200, 300):
        assert beat(host, NOW + ms) == [fx.SendToMaster(encode_ack(100))]


def test_each_piece_of_a_long_frame_is_acked(host):
    host.perform(host.core.frame_received(TransferHeader(20, 100, 1, 0, 0), NOW), NOW)
    acks = []
    for _ in range(2):
        host.perform(host.core.log.append(memoryview(b"1" * 10)), NOW)
        acks += host.core.turn_ended(0, NOW)
    assert acks == [fx.SendToMaster(encode_ack(end)) for end in (110, 120)]


def test_r24_level_is_up_to_the_masters_confirm_offset_of_this_connection(host):
    """A slave that fetched its damaged part again is trusted when it holds all that is confirmed.

    1. After the handshake nothing is known of the master's confirmOffset: not caught up.
    2. A heartbeat confirms 150 bytes, 100 are here: not caught up.
    3. 100 are confirmed and here, or none: caught up.
    """
    assert not host.core.is_caught_up
    beat(host, NOW + 10, confirm=150)
    assert not host.core.is_caught_up
    for confirm in (100, 0):
        beat(host, NOW + 20, confirm=confirm)
        assert host.core.is_caught_up
    again(host, answer(100, 1, host.log.entries))
    assert not host.core.is_caught_up


def test_r24_a_lagging_confirm_offset_of_a_new_master_is_not_level():
    """The master of epoch 2 began at 200, its confirmOffset still stands at 50: what lies between
    may have been acknowledged in epoch 1, and this log ends at 100."""
    host = connected(MemoryLog(b"1" * 100, (1, 0)), view(epoch=2))
    answered(host, answer(200, 2, entries((1, 0), (2, 200))))
    assert host.core.phase is SlavePhase.TRANSFER
    beat(host, NOW + 10, confirm=50)
    assert not host.core.is_caught_up


def test_a_frame_at_another_offset_ends_the_connection(host):
    beat(host, NOW)
    (hangup,) = host.core.frame_received(TransferHeader(10, 90, 1, 0, 0), NOW)
    assert isinstance(hangup, fx.Hangup) and "offset 90" in hangup.reason


def test_r2_a_frame_of_an_older_epoch_is_neither_written_nor_acked():
    host = slave(log=MemoryLog(b"1" * 100, (1, 0), (2, 50)), history=((1, 0), (2, 50)))
    (hangup,) = host.core.frame_received(TransferHeader(10, 100, 1, 0, 0), NOW)
    assert isinstance(hangup, fx.Hangup) and "epoch 1" in hangup.reason
    assert host.core.turn_ended(100, NOW) == []


@pytest.mark.parametrize("ahead", [1 << 20, 1 + (1 << 20)])
def test_r47_no_frame_uses_up_the_epochs_that_controllers_count(host, ahead):
    """Those that forgot a group begin up to a million above what its replicas report."""
    effects = host.core.frame_received(TransferHeader(0, 100, 1 + ahead, 100, 0), NOW)
    entered = any(isinstance(effect, fx.AppendEpoch) for effect in effects)
    assert entered == (host.core.phase is SlavePhase.TRANSFER) == (ahead == 1 << 20)


def test_ha_sync_flush_first_ack_waits_for_the_disk():
    """The first ack chooses where the master starts, so it is all or nothing; later ones cover
    what is flushed and no more."""
    host = slave(SlavePolicy(sync_flush=True))
    assert host.core.turn_ended(60, NOW) == [fx.FlushTo(100)]
    assert host.core.turn_ended(60, NOW) == [], "requested once"
    assert host.core.turn_ended(100, NOW) == [fx.SendToMaster(encode_ack(100))]
    host.core.frame_received(TransferHeader(10, 100, 1, 0, 0), NOW)
    host.core.log.append(memoryview(b"1" * 10))
    assert host.core.turn_ended(100, NOW) == [fx.FlushTo(110), fx.SendToMaster(encode_ack(100))]
    assert host.core.turn_ended(110, NOW) == [fx.SendToMaster(encode_ack(110))]


def test_a_failed_dial_is_repeated_after_20_ms_then_more_rarely():
    """A failover waits for this: refused means that the new master is not there yet."""
    log = MemoryLog()
    core = SlaveCore(identity(2), view(), log.facts(), SlavePolicy(), NOW)
    assert core.tick(NOW) == [fx.Dial("master:1")]
    now, waits = NOW, []
    for _ in range(8):
        core.disconnected(now)
        waits.append(core.wakeup_ms - now)
        now = core.wakeup_ms
        assert core.tick(now) == [fx.Dial("master:1")]
    assert waits == [20, 40, 80, 160, 320, 640, 1_000, 1_000]


def test_a_master_without_an_address_is_looked_at_again_soon():
    core = SlaveCore(identity(2), view(address=""), MemoryLog().facts(), SlavePolicy(), NOW)
    assert core.tick(NOW) == [] and core.wakeup_ms == NOW + 20


def test_a_new_view_dials_at_once():
    core = dialling(MemoryLog())
    core.disconnected(NOW)
    for _ in range(6):
        core.tick(core.wakeup_ms)
        core.disconnected(NOW)
    assert core.follow(view(2, "other:1"), NOW + 1) == [fx.Dial("other:1")]
    core.disconnected(NOW + 1)
    assert core.wakeup_ms == NOW + 21, "nor are the pauses those of the master before"


def test_the_connection_to_the_same_process_stays(host):
    """An epoch bump without a change of master is no reason to reconnect; a restart is."""
    assert host.core.follow(view(2), NOW) == []
    effects = host.core.follow(view(3, incarnation="i2"), NOW)
    assert [type(e) for e in effects] == [fx.Hangup, fx.Dial]


def hung_up_after(core, times):
    """The first of the times after NOW at which a tick hangs up."""
    for ms in times:
        if [e for e in core.tick(NOW + ms) if isinstance(e, fx.Hangup)]:
            return ms
    return None


def test_a_silent_java_master_is_given_20_s():
    host = slave(incarnation="")
    assert hung_up_after(host.core, range(100, 30_000, 100)) == 20_000


def test_a_master_that_beats_fast_is_given_2_s():
    """Learnt from its heartbeats: after a healed partition TCP alone would take seconds more."""
    host = slave(incarnation="")
    for ms in (100, 200, 300):
        beat(host, NOW + ms)
        host.core.tick(NOW + ms)
    assert hung_up_after(host.core, range(400, 3_000, 100)) == 2_300


def test_a_master_with_an_incarnation_is_given_2_s_from_the_first_byte(host):
    """Under load it sends no heartbeats to learn from; by its incarnation it is none of Java's."""
    for ms in range(100, 1_100, 100):
        end = host.log.end
        host.perform(host.core.frame_received(TransferHeader(10, end, 1, 0, 0), NOW + ms), NOW + ms)
        host.perform(host.core.log.append(memoryview(b"1" * 10)), NOW + ms)
        assert not [e for e in host.core.tick(NOW + ms) if isinstance(e, fx.Hangup)]
    assert hung_up_after(host.core, range(1_100, 4_000, 100)) == 3_000


def test_a_dial_that_nobody_answers_is_made_anew_after_1_s():
    """TCP tries again after 1, 3, 7 ... s: a link that works again would wait for that."""
    core = dialling(MemoryLog())
    dialled = [
        ms
        for ms in range(50, 4_100, 50)
        if [e for e in core.tick(NOW + ms) if isinstance(e, fx.Dial)]
    ]
    assert dialled == [1_050, 2_100, 3_150]
    assert core.wakeup_ms <= NOW + 4_200


def test_r8_a_stall_of_our_own_is_not_the_masters_silence(host):
    for ms in (100, 200, 300):
        beat(host, NOW + ms)
        host.core.tick(NOW + ms)
    assert not [e for e in host.core.tick(NOW + 30_000) if isinstance(e, fx.Hangup)]


def test_an_unanswered_handshake_is_given_3_s():
    """A stopped process still accepts connections."""
    log = MemoryLog()
    core = dialling(log)
    core.connected(log.facts(), NOW + 90)
    hung_up = [
        ms
        for ms in range(100, 3_200, 10)
        if [e for e in core.tick(NOW + ms) if isinstance(e, fx.Hangup)]
    ]
    assert hung_up == [3_090]


def test_an_idle_slave_acks_on_its_own_after_1_s():
    """Java's master beats every 5 s only; it closes a silent connection."""
    host = slave(incarnation="")
    assert host.core.wakeup_ms == NOW + 100
    acks = []
    for ms in range(100, 3_001, 100):
        host.core.tick(NOW + ms)
        if host.core.turn_ended(100, NOW + ms):
            acks.append(ms)
    assert acks == [1_000, 2_000, 3_000]


def test_diverged_is_said_once_per_reason_and_tried_ever_more_rarely():
    log = MemoryLog(b"1" * 100, (1, 0))
    core = dialling(log, view(9))
    now, reports, waits = NOW, 0, []
    for _ in range(9):
        core.connected(log.facts(), now)
        peer = answer(500, 9, entries((9, 0)))
        effects = core.handshake_received(peer, log.facts(), now)
        reports += len([e for e in effects if isinstance(e, fx.Diverged)])
        waits.append(core.wakeup_ms - now)
        now = core.wakeup_ms
        core.tick(now)
    assert reports == 1
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]


def test_a_divergence_that_comes_back_after_the_master_served_is_reported_again(host):
    """Not after a view that changes the set only: nothing has become better."""
    core, log, fits, foreign = host.core, host.log, host.log.entries, entries((1, 50))
    reported = []
    for history, is_served in ((foreign, False), (foreign, False), (fits, True), (foreign, False)):
        core.disconnected(NOW)
        core.tick(core.wakeup_ms)
        core.connected(log.facts(), NOW)
        effects = core.handshake_received(answer(100, 1, history), log.facts(), NOW)
        reported.append(any(isinstance(effect, fx.Diverged) for effect in effects))
        if is_served:
            beat(host, NOW)
        else:
            core._redial.progress()
    assert reported == [True, False, False, True]


def test_an_empty_log_whose_files_cannot_begin_where_the_masters_log_does_says_so():
    log = MemoryLog(b"", (1, 0))
    log.entries = ()
    core = dialling(log, view(1), SlavePolicy(segment_size=4096))
    core.connected(log.facts(), NOW)
    core.handshake_received(answer(9000, 1, entries((1, 0))), log.facts(), NOW)
    effects = core.frame_received(TransferHeader(0, 6144, 1, 0, 0), NOW)
    assert [type(effect) for effect in effects] == [fx.Hangup, fx.Diverged]
    assert "mappedFileSizeCommitLog, 4096" in effects[1].reason


def test_g8_a_damaged_record_is_asked_for_ever_more_rarely(host):
    """Good records before it, on each new connection, do not make the next try come sooner."""
    core, now, waits = host.core, NOW, []
    for _ in range(4):
        beat(host, now)
        core.append_failed(100, 100, "file at offset 100: CRC", now)
        waits.append(core.wakeup_ms - now)
        now = core.wakeup_ms
        core.tick(now)
        core.connected(host.log.facts(), now)
        peer = answer(100, 1, host.log.entries)
        core.handshake_received(peer, host.log.facts(), now)
    core.append_failed(200, 200, "file at offset 200: CRC", now)
    waits.append(core.wakeup_ms - now)
    assert waits == [1_000, 2_000, 4_000, 8_000, 1_000]


def test_a_full_disk_is_said_once_and_tried_ever_more_rarely_until_bytes_were_appended(host):
    """Each connection brings a good frame first: a frame that was not written is no progress."""
    core, now, waits, reports = host.core, NOW, [], 0
    for end in (100, 100, 100, 100, 140, 140):
        beat(host, now)
        effects = core.append_failed(end, end, "[Errno 28] No space left on device", now)
        assert isinstance(effects[0], fx.Hangup)
        reports += len([e for e in effects if isinstance(e, fx.Diverged)])
        waits.append(core.wakeup_ms - now)
        now = core.wakeup_ms
        core.tick(now)
        core.connected(host.log.facts(), now)
        peer = answer(100, 1, host.log.entries)
        core.handshake_received(peer, host.log.facts(), now)
    assert waits == [1_000, 2_000, 4_000, 8_000, 1_000, 2_000]
    assert reports == 2, "at the first failure, and when it was stuck again later in the log"


def test_the_ack_is_clamped_to_the_own_log():
    """Java quirk: with its last epoch entry above its own end a slave reports more than it has."""
    log = MemoryLog(b"1" * 80, (1, 0), (2, 100))
    host = answered(connected(log, view(2)), answer(300, 2, entries((1, 0), (2, 100))))
    assert host.take_sent().endswith(encode_ack(80))
    assert log.history == [(1, 0)]


def test_an_older_log_without_a_common_epoch_begins_anew():
    """R27: the master's list begins above our end; its older epochs went with its segments."""
    log = MemoryLog(b"1" * 80, (1, 0))
    core = dialling(log, view(3))
    core.connected(log.facts(), NOW)
    peer = answer(900, 3, entries((3, 500)))
    effects = core.handshake_received(peer, log.facts(), NOW)
    assert any(isinstance(e, fx.BeginAt) and e.offset == 0 for e in effects)
    assert core.wakeup_ms == NOW


def test_log_bytes_before_our_ack_are_refused():
    log = MemoryLog()
    core = dialling(log)
    core.connected(log.facts(), NOW)
    assert core.frame_received(TransferHeader(0, -1, 1, 0, 0), NOW) == [], "Java's early beat"
    assert core.frame_received(TransferHeader(0, 0, 9, 0, 0), NOW) == [], "no epoch is entered"
    (hangup,) = core.frame_received(TransferHeader(10, 0, 1, 0, 0), NOW)
    assert isinstance(hangup, fx.Hangup)


# -- R21: proof of the peer


def slave_of_java(log=None):
    log = log or MemoryLog(b"1" * 100, (1, 0))
    core = dialling(log, view(incarnation=""))
    return core, log, MasterHandshake(150, 1, entries((1, 0)))


def shake(core, log, peer, now):
    core.connected(log.facts(), now)
    return core.handshake_received(peer, log.facts(), now)


@pytest.mark.parametrize("data", [b"1" * 100, b""])
def test_r21_each_connection_proves_before_a_byte_is_taken(data):
    """Each group starts with epoch 1 at 0, so the history of whoever answers at a reused address
    may fit; also that of an empty log, which fits any. The first connection of a view is no
    exception."""
    log = MemoryLog(data, *([(1, 0)] if data else []))
    core, log, peer = slave_of_java(log)
    for now in (NOW + 50, NOW + 200):
        assert shake(core, log, peer, now) == [fx.ProveMaster(core.view)]
        assert core.frame_received(TransferHeader(0, -1, 1, 0, 0), now) == []
        assert core.turn_ended(100, now) == [], "not an ack before the proof"
        core.peer_proved(PeerIdentity("C", "broker-a", 0, 1), log.facts(), now + 10)
        assert core.phase is SlavePhase.TRANSFER
        core.disconnected(now + 20)
        core.tick(core.wakeup_ms)


@pytest.mark.parametrize("is_member", [False, True])
def test_bytes_under_an_epoch_of_two_java_masters_are_not_taken_for_equal(is_member):
    """1 led epoch 5 from 100 on, and we got 20 bytes that no one else has. Another Java master with
    nothing of them, in epoch 7, files its own bytes under 5. We cut the 20, and with them what is
    not confirmed; a member waits until it is none, for it may have acknowledged them (R9). What
    came in this mastership stays at the next connection."""
    log = MemoryLog(b"1" * 120, (1, 0), (5, 100), confirm=110)
    members = (1, 2) if is_member else (1,)
    seen = view(epoch=7, incarnation="", members=members)
    core = dialling(log, seen)
    peer = MasterHandshake(150, 5, entries((1, 0), (5, 100)))
    proof = PeerIdentity("C", "broker-a", 0, 5, 7)
    assert shake(core, log, peer, NOW) == [fx.ProveMaster(core.view)]
    effects = core.peer_proved(proof, log.facts(), NOW)
    if is_member:
        (hangup,) = [e for e in effects if isinstance(e, fx.Hangup)]
        assert "lacks epoch 7" in hangup.reason and core.phase is SlavePhase.READY
        return
    assert effects == [fx.TruncateTo(120, 110, False)]
    log.data = log.data[:110]
    core.log_changed(log.facts(), NOW)
    assert core.phase is SlavePhase.TRANSFER
    log.data += b"7" * 30
    core.disconnected(NOW)
    core.tick(NOW + 10_000)
    assert shake(core, log, peer, NOW + 10_000) == [fx.ProveMaster(core.view)]
    assert not [
        e
        for e in core.peer_proved(proof, log.facts(), NOW + 10_000)
        if isinstance(e, fx.TruncateTo)
    ]
    assert core.phase is SlavePhase.TRANSFER
    # Elected again: between its two masterships another one may have led, and we followed that.
    core.disconnected(NOW + 10_000)
    core.follow(replace(seen, master_epoch=8), NOW + 20_000)
    shake(core, log, peer, NOW + 20_000)
    proof = replace(proof, table_epoch=8)
    assert core.peer_proved(proof, log.facts(), NOW + 20_000) == [fx.TruncateTo(140, 110, False)]


@pytest.mark.parametrize(("table_epoch", "is_followed"), [(3, True), (2, False), (-1, False)])
def test_r2_a_java_master_proves_an_epoch_that_its_list_lacks(table_epoch, is_followed):
    """Elected three times without a write, its list ends with epoch 1: Java refuses an entry that
    starts where the one before starts. Its tables say in which epoch it acts."""
    # We led epoch 2, and wrote nothing.
    log = MemoryLog(b"1" * 100, (1, 0), (2, 100), confirm=100)
    core = dialling(log, view(epoch=3, incarnation=""))
    peer = MasterHandshake(150, 1, entries((1, 0)))
    assert shake(core, log, peer, NOW) == [fx.ProveMaster(core.view)]
    proof = PeerIdentity("C", "broker-a", 0, 1, table_epoch)
    effects = core.peer_proved(proof, log.facts(), NOW)
    assert (core.phase is SlavePhase.TRANSFER) == is_followed
    if is_followed:
        (adopted,) = [e.entries for e in effects if isinstance(e, fx.AdoptEpochs)]
        assert [(e.epoch, e.start_offset) for e in adopted] == [(1, 0)]
        core.frame_received(TransferHeader(0, 100, 1, 0, 100), NOW)
        assert core.is_caught_up


# -- R41: both ends name themselves


def named_slave():
    log = MemoryLog(b"1" * 100, (1, 0))
    return dialling(log), log


def test_r41_the_slave_names_its_process_in_front_of_its_handshake():
    core, log = named_slave()
    (sent,) = core.connected(log.facts(), NOW)
    handshake, _ = SlaveFrameReader().feed(sent.data)
    assert handshake.identity == identity(2)


def test_r41_a_java_master_gets_javas_handshake_and_no_mark():
    """Also when the tables of its epoch are here, and when a new epoch begins."""
    core, log, _ = slave_of_java()
    host = SlaveHost(core, log)
    host.connect(NOW)
    host.perform(core.tables_followed(1), NOW)
    frame = encode_transfer_header(TransferHeader(0, 100, 2, 100, 0))
    host.receive(encode_master_handshake(100, entries((1, 0))) + frame, NOW)
    assert log.history == [(1, 0), (2, 100)] and core.is_caught_up
    sent = host.take_sent()
    assert sent == encode_slave_handshake(SlaveHandshake(2)) + 2 * encode_ack(100)


@pytest.mark.parametrize(
    ("who", "why"),
    [
        (None, "does not name itself"),
        (identity(1, cluster="Other"), "Other"),
        (identity(1, name="broker-b"), "broker-b"),
        (identity(3, incarnation="i1"), "broker-a/3"),
        (identity(1, incarnation="earlier"), "incarnation earlier"),
    ],
    ids=["nameless", "cluster", "group", "id", "incarnation"],
)
def test_r41_nothing_is_taken_from_another_than_the_elected_process(who, why):
    """Its history fits, its epoch fits; it is the first connection of a fresh view. Yet not a byte
    is acked, and nothing is cut, though its log leaves ours."""
    for end in (150, 50):
        core, log = named_slave()
        peer = MasterHandshake(end, 1, entries((1, 0)), who)
        (hangup,) = shake(core, log, peer, NOW)
        assert isinstance(hangup, fx.Hangup) and why in hangup.reason
        assert core.phase is SlavePhase.READY


def test_r41_the_elected_process_is_followed_without_another_round_trip():
    core, log = named_slave()
    effects = shake(core, log, answer(150, 1, entries((1, 0))), NOW)
    assert core.phase is SlavePhase.TRANSFER
    sent = [effect.data for effect in effects if isinstance(effect, fx.SendToMaster)]
    assert sent == [encode_ack(100)], "no mark of tables that are not here"


def test_r41_an_entered_epoch_is_marked_in_front_of_the_next_ack(host):
    """The epoch is durable first; the master counts the acks behind the mark only."""
    host.take_sent()
    frame = TransferHeader(0, 100, 2, 100, 0)
    effects = host.core.frame_received(frame, NOW) + host.core.turn_ended(100, NOW)
    assert effects == [
        fx.AppendEpoch(2, 100),
        fx.SendToMaster(encode_epoch_mark(2)),
        fx.SendToMaster(encode_ack(100)),
    ]


def test_r42_the_tables_are_marked_once_here_and_on_each_new_connection(host):
    assert host.core.tables_followed(1) == [fx.SendToMaster(encode_tables_mark(1))]
    assert host.core.tables_followed(-1) == [fx.SendToMaster(encode_tables_mark(-1))], "stale"
    host.core.disconnected(NOW + 10)
    assert host.core.tables_followed(1) == [], "no connection"
    host.core.tick(host.core.wakeup_ms)
    effects = shake(host.core, host.log, answer(100, 1, host.log.entries), NOW + 50)
    assert fx.SendToMaster(encode_tables_mark(1)) in effects


# -- R23: below the own confirmOffset


def judged(unclean_epoch, own=((1, 0),), master=((1, 0), (2, 60))):
    log = MemoryLog(b"1" * 100, *own, confirm=90)
    master_log = answer(200, master[-1][0], entries(*master))
    return judge_log(log.facts(), master_log, member=False, unclean_epoch=unclean_epoch)


def test_r23_an_unclean_election_explains_a_cut_below_the_own_confirm_offset():
    """Epoch 2 was won by a replica that held 60 of our 90 confirmed bytes."""
    assert judged(2) == CutTo(60, unclean=True)
    later = ((1, 0), (2, 60), (3, 70))
    assert judged(2, master=later) == CutTo(60, unclean=True)
    # The winner died before it opened, and was elected again, cleanly, as the only member.
    assert judged(2, master=((1, 0), (3, 60))) == CutTo(60, unclean=True)


@pytest.mark.parametrize(
    ("unclean_epoch", "own", "master"),
    [
        (0, ((1, 0),), ((1, 0), (2, 60))),
        (1, ((1, 0),), ((1, 0), (2, 60))),
        (3, ((1, 0),), ((1, 0), (2, 60))),
        (2, ((1, 0), (3, 70)), ((1, 0), (2, 60), (4, 65))),
    ],
    ids=["none", "before ours", "after the master's", "before our last confirmed byte"],
)
def test_r23_nothing_else_does(unclean_epoch, own, master):
    decision = judged(unclean_epoch, own, master)
    assert isinstance(decision, Refuse) and "no unclean election explains it" in decision.reason


def test_r23_after_an_unclean_cut_the_confirm_offset_is_the_logs():
    log = MemoryLog(b"1" * 100, (1, 0), confirm=90)
    host = connected(log, replace(view(2), unclean_epoch=2))
    core = answered(host, answer(60, 2, entries((1, 0), (2, 60)))).core
    assert core.phase is SlavePhase.TRANSFER
    assert core.log.confirm_offset == core.log.max_offset == 60


def test_r2_r25_the_next_epoch_is_stored_before_its_first_byte_and_not_before_the_last_one():
    """Java labels the last chunk of an epoch with the next one: the epoch begins within it."""
    for begins, pieces, expected in (
        (60, [bytes(100)], [(0, 60), (2, 60), (60, 40)]),
        (60, [bytes(30), bytes(70)], [(0, 30), (30, 30), (2, 60), (60, 40)]),
        (60, [bytes(60), bytes(40)], [(0, 60), (2, 60), (60, 40)]),
        (60, [bytes(59), bytes(1), bytes(40)], [(0, 59), (59, 1), (2, 60), (60, 40)]),
        (100, [bytes(100)], [(0, 100), (2, 100)]),
    ):
        log = ReceivedLog(LocalLog(0, 0, 0, entries((1, 0))), SlavePolicy(), 0)
        log.begin_transfer(1, 100)
        done = list(log.frame_begins(2, begins, 0))
        assert not log.is_caught_up(2)
        for piece in pieces:
            done += log.append(memoryview(piece))
        shown = [
            (effect.epoch, effect.start_offset)
            if isinstance(effect, fx.AppendEpoch)
            else (effect.offset, len(effect.data))
            for effect in done
            if isinstance(effect, fx.AppendEpoch | fx.AppendLog)
        ]
        assert shown == expected
        assert log.last_epoch == 2


@pytest.mark.parametrize(
    "changed, proves",
    [
        ({}, True),
        ({"broker_id": 0}, True),  # as a Java master reports itself
        ({"cluster_name": "other"}, False),
        ({"broker_name": "other"}, False),
        ({"broker_id": 3}, False),
        ({"last_epoch": 4}, False),
        ({"last_epoch": 6}, False),  # not what it named on the HA connection
    ],
)
def test_r21_a_proof_names_the_master_and_the_history_that_it_showed(changed, proves):
    named = RoleView("c", "b", master_broker_id=1, master_address="m:1", master_epoch=5)
    identity = replace(PeerIdentity("c", "b", 1, 5), **changed)
    assert (proof_fault(identity, named, 5) == "") is proves
    assert proof_fault(PeerIdentity("c", "b", 1, 5), named, 4), "an older history was shown"


@pytest.mark.parametrize("confirm, cuts", [(60, True), (61, False), (100, False)])
def test_r23_not_one_confirmed_byte_is_cut(confirm, cuts):
    own = MemoryLog(b"1" * 100, (1, 0), confirm=confirm).facts()
    decision = judge_log(own, MasterHandshake(200, 2, entries((1, 0), (2, 60))), member=False)
    assert isinstance(decision, CutTo if cuts else Refuse)


def test_r24_what_an_earlier_connection_said_makes_no_log_level():
    log = ReceivedLog(LocalLog(0, 100, 0, entries((1, 0))), SlavePolicy(), 0)
    log.begin_transfer(1, 100)
    log.frame_begins(1, 0, 80)
    assert log.is_caught_up(1)
    log.end_connection()
    assert not log.is_caught_up(1)
    effects = []
    log.confirm(0, effects)
    assert effects == []


@pytest.mark.parametrize(
    "confirm, begins, member, unclean, drops",
    [
        (60, 100, False, 0, True),  # our end is where its history begins: that is expired, too
        (60, 90, False, 0, True),  # the bytes behind that are of an epoch that ended before
        (90, 90, False, 0, True),
        (95, 90, False, 0, False),  # but not if we know that they are confirmed
        (60, 90, True, 0, False),  # or a member's
        (60, 0, False, 0, False),  # nothing of its history is expired: it is another one
        # An unclean election, of epoch 3, dropped some of them; its epoch has expired, too.
        (95, 90, False, 3, True),
        (95, 90, True, 3, False),
        (95, 90, False, 1, False),  # not one before our bytes were confirmed
        (95, 90, False, 7, False),  # nor one of which this master does not know
        (95, 0, False, 3, True),  # the replica that it chose was empty
    ],
)
def test_r27_a_log_from_before_the_masters_history_begins_again(
    confirm, begins, member, unclean, drops
):
    """The master's first segments are expired, and with them the epochs that both had."""
    own = MemoryLog(b"1" * 100, (1, 0), confirm=confirm).facts()
    master_log = MasterHandshake(200, 5, entries((5, begins)))
    decision = judge_log(own, master_log, member=member, unclean_epoch=unclean)
    assert isinstance(decision, BeginAgain if drops else Refuse)


@pytest.mark.parametrize(
    "unclean, member, again", [(3, False, True), (3, True, False), (0, False, False)]
)
def test_r27_a_log_of_which_an_unclean_election_dropped_all_begins_anew(unclean, member, again):
    """The old master let its first segments expire; the new master's log leaves it below them."""
    own = replace(MemoryLog(b"1" * 100, (1, 0), confirm=100).facts(), min_offset=80)
    master_log = MasterHandshake(90, 3, entries((1, 0), (3, 60)))
    decision = judge_log(own, master_log, member=member, unclean_epoch=unclean)
    assert isinstance(decision, BeginAgain if again else Refuse)
    begins_there = judge_log(
        replace(own, min_offset=60), master_log, member=member, unclean_epoch=3
    )
    assert begins_there == CutTo(60, unclean=True)


def test_r27_what_was_confirmed_of_the_old_log_says_nothing_of_the_new_one():
    """1. An unclean election chose an empty replica: this log of 100 confirmed bytes goes aside.
    2. On the next connection 60 bytes come, all confirmed: readers see them at once."""
    log = MemoryLog(b"1" * 100, (1, 0), confirm=100)
    peer = answer(60, 2, entries((2, 0)))
    host = answered(connected(log, replace(view(2), unclean_epoch=2)), peer)
    core = host.core
    assert (log.end, core.log.known_confirm) == (0, 0)
    again(host, peer)
    host.perform(core.frame_received(TransferHeader(60, 0, 2, 0, 60), NOW), NOW)
    host.perform(core.log.append(memoryview(b"2" * 60)), NOW)
    host.perform(core.turn_ended(60, NOW), NOW)
    assert (log.end, log.confirm) == (60, 60)


@pytest.mark.parametrize(
    "mine, theirs, is_member, decision",
    [
        ("a", "a", True, Keep),
        ("b", "a", False, Refuse),
        ("b", "", True, Keep),  # a master of an earlier version has no name for its history
        ("", "a", False, BeginAgain),
        ("", "a", True, Refuse),
    ],
)
def test_r47_where_no_byte_can_be_compared_the_lineages_decide(mine, theirs, is_member, decision):
    own = LocalLog(0, 100, 0, entries((1, 0)), Mock(lineage=mine, lost_epochs=False))
    master = answer(200, 1, entries((1, 0)), structs.replace(identity(1), lineage=theirs))
    assert isinstance(judge_log(own, master, member=is_member), decision)


@pytest.mark.parametrize("in_classic_mode", [False, True])
def test_r48_equal_bytes_prove_a_log_without_epochs_only_if_it_lost_them_in_classic_mode(
    in_classic_mode,
):
    samples = Mock(lost_epochs=in_classic_mode, crc=lambda end, size: 7)
    named = structs.replace(identity(1), samples=(LogSample(100, 50, 7),))
    decision = judge_log(
        LocalLog(0, 100, 0, (), samples), answer(200, 1, entries((1, 0)), named), member=False
    )
    assert isinstance(decision, Keep if in_classic_mode else Refuse)


def test_r2_a_peer_that_ends_below_the_own_history_gets_no_ack():
    """The view may be older than what this log has accepted."""
    log = MemoryLog(b"1" * 100, (1, 0), (3, 50))
    host = connected(log, view(epoch=2))
    core = host.core
    host.take_sent()
    (hangup,) = core.handshake_received(answer(50, 2, entries((1, 0), (2, 50))), log.facts(), NOW)
    assert isinstance(hangup, fx.Hangup) and "has accepted 3" in hangup.reason
    assert not host.sent and core.phase is SlavePhase.READY


def test_r23_what_was_damaged_and_dropped_is_not_confirmed_here_any_more(host):
    host.core.log.confirm_offset = 100
    host.core.append_failed(80, 80, "a damaged record", NOW)
    assert host.core.log.known_confirm == 80


def test_r25_an_epoch_that_was_announced_on_a_lost_connection_is_not_entered():
    log = slave().core.log
    assert log.frame_begins(2, 110, 0) == []
    log.end_connection()
    assert [type(effect) for effect in log.append(memoryview(b"1" * 20))] == [fx.AppendLog]


def test_ha_sync_flush_each_connection_asks_for_what_its_ack_waits_for():
    """The log may have been cut, and have grown again, in between."""
    log = slave(SlavePolicy(sync_flush=True)).core.log
    for _ in range(2):
        effects = []
        log.acknowledge(60, NOW, effects)
        assert effects == [fx.FlushTo(100)]
        log.end_connection()


@pytest.mark.parametrize("is_member", [False, True])
def test_r27_a_member_drops_no_log_whatever_is_confirmed_of_it(host, is_member):
    """The master's log begins above ours. Nothing of ours is known to be confirmed here; what is,
    the members know together."""
    host.core.follow(view(members=(1, 2) if is_member else (1,)), NOW)
    effects = host.core.frame_received(TransferHeader(0, 500, 1, 0, 500), NOW)
    assert any(isinstance(effect, fx.Diverged) for effect in effects) == is_member
    assert any(isinstance(effect, fx.BeginAt) for effect in effects) != is_member


@pytest.mark.parametrize("confirm", [80, 90])
def test_r23_what_was_never_confirmed_says_nothing_about_an_unclean_election(confirm):
    """Its confirmed bytes are of epoch 1. Those of epoch 3 are no one's, and may go unasked."""
    own = LocalLog(0, 100, confirm, entries((1, 0), (3, 90)))
    master = answer(70, 4, entries((1, 0), (2, 50), (4, 70)))
    assert judge_log(own, master, member=False, unclean_epoch=2) == CutTo(50, unclean=True)


def test_r25_epochs_that_expired_at_the_master_stay_with_their_bytes():
    log = MemoryLog(b"1" * 100, (1, 0), (2, 50))
    host = slave(log=log, history=((2, 50), (3, 80)))
    assert host.core.phase is SlavePhase.TRANSFER and log.cuts == [(100, 80)]
    assert log.history == [(1, 0), (2, 50), (3, 80)]


def test_r28_readers_see_nothing_that_is_not_here(host):
    host.perform(beat(host, NOW, confirm=150), NOW)
    assert host.log.confirm == 100


def test_ha_sync_flush_the_first_ack_of_each_connection_is_of_the_whole_log():
    """It says where the master continues: bytes that are here unflushed would be sent twice."""
    host = slave(SlavePolicy(sync_flush=True))
    host.perform(host.core.turn_ended(100, NOW), NOW)
    assert host.take_sent().endswith(encode_ack(100))
    host.perform(host.core.frame_received(TransferHeader(20, 100, 1, 0, 0), NOW), NOW)
    host.perform(host.core.log.append(memoryview(b"2" * 20)), NOW)
    again(host, answer(120, 1, host.log.entries))
    host.take_sent()
    host.perform(host.core.turn_ended(100, NOW), NOW)
    assert host.take_sent() == b""
    host.perform(host.core.turn_ended(120, NOW), NOW)
    assert host.take_sent() == encode_ack(120)


@pytest.mark.parametrize(
    ("behind", "ms", "master_end", "shown"),
    [(10, 0, 99, 0), (11, 0, 99, 11), (10, 19, 99, 0), (10, 20, 99, 10), (10, 0, 60, 10)],
)
def test_a_flood_of_old_bytes_is_shown_to_readers_before_they_are_far_behind(
    behind, ms, master_end, shown
):
    """The last full read was `ms` ago, and the master's log ended at `master_end` then."""
    own = LocalLog(0, 50, 50, entries((1, 0)))
    log = ReceivedLog(own, SlavePolicy(backlog_lag_bytes=10), NOW)
    log.begin_transfer(1, master_end)
    log.frame_begins(1, 0, 100)
    log.append(memoryview(b"1" * behind))
    log.read_filled(NOW)
    log.confirm(NOW + ms, [])
    assert (log.confirm_offset, log.known_confirm) == (50 + shown, 50 + behind)


def test_pauses_begin_small_again_once_it_could_follow():
    redial = Redial(SlavePolicy(), NOW)
    pauses = []
    for follows in (False, False, True):
        if follows:
            redial.progress()
        redial.diverged("another history", NOW)
        pauses.append(redial.at_ms - NOW)
    assert pauses == [1_000, 2_000, 1_000]


def test_r14_how_fast_a_master_beats_is_known_of_its_own_connection_only():
    policy = SlavePolicy()
    silence = MasterSilence(policy, NOW)
    for ms in (0, 500, 1_000):
        silence.note_beat(NOW + ms)
    assert silence.limit_ms(beats_regularly=False) == policy.silence_limit_ms
    silence.end_connection()
    assert silence.limit_ms(beats_regularly=False) == policy.housekeeping_ms


def test_r2_the_elected_process_gets_no_ack_before_it_is_in_the_epoch_of_the_view():
    """It was elected again, and this replica heard of it first."""
    log = MemoryLog(b"1" * 100, (1, 0))
    core = dialling(log, view(epoch=3))
    core.connected(log.facts(), NOW)
    peer = answer(100, 2, entries((1, 0), (2, 100)))
    (hangup,) = core.handshake_received(peer, log.facts(), NOW)
    assert isinstance(hangup, fx.Hangup) and "last epoch is 2" in hangup.reason


def test_r41_after_a_master_of_ours_a_java_master_gets_javas_handshake(host):
    core = host.core
    host.perform(core.follow(view(epoch=2, master=3, incarnation=""), NOW), NOW)
    host.take_sent()
    host.connect(NOW)
    assert host.take_sent() == encode_slave_handshake(SlaveHandshake(2))
    assert core.handshake_received(
        MasterHandshake(100, 1, host.log.entries), host.log.facts(), NOW
    ) == [fx.ProveMaster(core.view)]


@pytest.mark.parametrize(
    ("is_first", "size", "offset"), [(False, 0, 500), (True, 10, 500), (True, 0, 90)]
)
def test_r27_only_a_first_heartbeat_behind_our_end_says_that_the_next_byte_is_gone(
    host, is_first, size, offset
):
    """Else frames were lost: the log is whole, and stays."""
    if not is_first:
        beat(host, NOW)
    effects = host.core.frame_received(TransferHeader(size, offset, 1, 0, 0), NOW)
    assert [type(effect) for effect in effects] == [fx.Hangup]


def test_a_late_end_of_a_connection_changes_nothing(host):
    host.perform(host.core.disconnected(NOW), NOW)
    due_ms = host.core.wakeup_ms
    assert host.core.disconnected(NOW + 9) == [] and host.core.wakeup_ms == due_ms
    host.core.stop()
    assert host.core.disconnected(NOW + 9) == []


def test_r27_a_slave_that_was_served_before_hears_that_its_next_byte_is_gone(host):
    """It was cut off until the master's segments had expired."""
    beat(host, NOW)
    again(host, answer(900, 1, host.log.entries))
    effects = host.core.frame_received(TransferHeader(0, 500, 1, 0, 0), NOW)
    assert any(isinstance(effect, fx.BeginAt) for effect in effects)


def test_a_java_master_that_proves_nothing_is_given_3_s():
    core, log, peer = slave_of_java()
    assert shake(core, log, peer, NOW) == [fx.ProveMaster(core.view)]
    for ms in range(100, 3_000, 100):
        assert core.tick(NOW + ms) == []
    (hangup,) = core.tick(NOW + 3_000)
    assert isinstance(hangup, fx.Hangup) and "3000 ms" in hangup.reason


def test_r23_what_a_frame_confirmed_is_not_cut_though_no_reader_has_seen_it():
    """1. The master confirms all 100 bytes; this store is still busy showing them. 2. The next
    master's log leaves ours at 60, by no unclean election."""
    log = MemoryLog(b"1" * 100, (1, 0), confirm=0)
    host = answered(connected(log), answer(100, 1, entries((1, 0))))
    core = host.core
    beat(host, NOW + 10, confirm=100)
    assert log.confirm == 0 and core.log.confirm_offset == 100
    host.perform(core.follow(view(2, "master:3", "i3", 3), NOW + 20), NOW + 20)
    host.connect(NOW + 20)
    second = answer(200, 2, entries((1, 0), (2, 60)), identity(3))
    effects = core.handshake_received(second, log.facts(), NOW + 20)
    assert [type(effect) for effect in effects] == [fx.Hangup, fx.Diverged]
    assert log.cuts == [] and log.end == 100
