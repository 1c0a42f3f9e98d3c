"""The slave's connection: time, acks under haSyncFlush, and what it says when it cannot follow."""

import pytest

from ha.slave_core import Phase, SlaveCore, SlavePolicy
from ha.slave_effects import BeginAt, Dial, Diverged, FlushTo, Hangup, SendToMaster
from ha.wire import MasterHandshake, TransferHeader, encode_ack
from protocol.role_view import RoleView

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


@pytest.fixture
def slave(memory_log, slave_host, entries):
    """A host in TRANSFER on a log of 100 bytes of epoch 1, and a function to make one."""

    def make(policy=None, log=None, peer_end=100, history=((1, 0),)):
        log = log or memory_log(b"1" * 100, (1, 0))
        core = SlaveCore(2, view(), log.facts(), policy or SlavePolicy(), NOW)
        host = slave_host(core, log)
        host.perform(core.begin(NOW), NOW)
        host.connect(NOW)
        peer = MasterHandshake(peer_end, history[-1][0], entries(*history))
        host.perform(core.handshake_received(peer, log.facts(), NOW), NOW)
        return host

    return make


def beat(host, now, offset=100, epoch=1, confirm=0):
    frame = TransferHeader(0, offset, epoch, 0, confirm)
    return host.core.frame_received(frame, now) + host.core.turn_ended(offset, now)


def test_the_first_ack_comes_straight_after_the_handshake(slave):
    """Java waits for the next 5 s heartbeat, and its master streams nothing until then."""
    host = slave()
    assert host.core.phase is Phase.TRANSFER
    assert host.take_sent().endswith(encode_ack(100))


def test_each_heartbeat_is_acked(slave):
    """R14: the master tells a hung slave from an idle one by it."""
    host = slave()
    for ms in (100, 200, 300):
        assert beat(host, NOW + ms) == [SendToMaster(encode_ack(100))]


def test_r24_level_is_up_to_the_masters_confirm_offset_of_this_connection(slave):
    """A slave that fetched its damaged part again is trusted when it holds all that is confirmed.

    1. After the handshake nothing is known of the master's confirmOffset: not level.
    2. A beat says that 150 bytes are confirmed, 100 are here: not level.
    3. 100 are confirmed and here: level.
    """
    host = slave()
    assert not host.core.is_level
    beat(host, NOW + 10, confirm=150)
    assert not host.core.is_level
    beat(host, NOW + 20, confirm=100)
    assert host.core.is_level


def test_r24_a_lagging_confirm_offset_of_a_new_master_is_not_level(memory_log, slave_host, entries):
    """The master of epoch 2 began at 200, its confirmOffset still stands at 50: what lies between
    may have been acknowledged in epoch 1, and this log ends at 100."""
    log = memory_log(b"1" * 100, (1, 0))
    core = SlaveCore(2, view(epoch=2), log.facts(), SlavePolicy(), NOW)
    host = slave_host(core, log)
    host.perform(core.begin(NOW), NOW)
    host.connect(NOW)
    peer = MasterHandshake(200, 2, entries((1, 0), (2, 200)))
    host.perform(core.handshake_received(peer, log.facts(), NOW), NOW)
    assert core.phase is Phase.TRANSFER
    beat(host, NOW + 10, confirm=50)
    assert not core.is_level


def test_a_frame_at_another_offset_ends_the_connection(slave):
    host = slave()
    beat(host, NOW)
    (hangup,) = host.core.frame_received(TransferHeader(10, 90, 1, 0, 0), NOW)
    assert isinstance(hangup, Hangup) and "offset 90" in hangup.reason


def test_r2_a_frame_of_an_older_epoch_is_neither_written_nor_acked(slave, memory_log):
    host = slave(log=memory_log(b"1" * 100, (1, 0), (2, 50)), history=((1, 0), (2, 50)))
    (hangup,) = host.core.frame_received(TransferHeader(10, 100, 1, 0, 0), NOW)
    assert isinstance(hangup, Hangup) and "epoch 1" in hangup.reason
    assert host.core.turn_ended(100, NOW) == []


def test_ha_sync_flush_first_ack_waits_for_the_disk(slave):
    """The first ack chooses where the master starts, so it is all or nothing; later ones tell what
    is flushed and no more."""
    host = slave(SlavePolicy(sync_flush=True))
    assert host.core.turn_ended(60, NOW) == [FlushTo(100)]
    assert host.core.turn_ended(60, NOW) == [], "asked once"
    assert host.core.turn_ended(100, NOW) == [SendToMaster(encode_ack(100))]
    host.core.frame_received(TransferHeader(10, 100, 1, 0, 0), NOW)
    host.core.body_received(memoryview(b"1" * 10))
    assert host.core.turn_ended(100, NOW) == [FlushTo(110), SendToMaster(encode_ack(100))]
    assert host.core.turn_ended(110, NOW) == [SendToMaster(encode_ack(110))]


def test_a_failed_dial_is_repeated_after_20_ms_then_more_rarely(slave, memory_log, slave_host):
    """A failover waits for this: refused means that the new master is not there yet."""
    log = memory_log()
    core = SlaveCore(2, view(), log.facts(), SlavePolicy(), NOW)
    assert core.begin(NOW) == [Dial("master:1")]
    now, waits = NOW, []
    for _ in range(8):
        core.disconnected(now)
        waits.append(core.wakeup_ms - now)
        now = core.wakeup_ms
        assert core.tick(now) == [Dial("master:1")]
    assert waits == [20, 40, 80, 160, 320, 640, 1_000, 1_000]


def test_a_new_view_dials_at_once(memory_log):
    core = SlaveCore(2, view(), memory_log().facts(), SlavePolicy(), NOW)
    core.begin(NOW)
    core.disconnected(NOW)
    assert core.follow(view(2, "other:1"), NOW + 1) == [Dial("other:1")]


def test_the_connection_to_the_same_process_stays(slave):
    """An epoch bump without a change of master is no reason to reconnect; a restart is."""
    host = slave()
    assert host.core.follow(view(2), NOW) == []
    effects = host.core.follow(view(3, incarnation="i2"), NOW)
    assert [type(e) for e in effects] == [Hangup, Dial]


def test_a_silent_java_master_is_given_20_s(slave):
    host = slave()
    assert not [e for e in host.core.tick(NOW + 100) if isinstance(e, Hangup)]
    for ms in range(200, 20_000, 100):
        assert not [e for e in host.core.tick(NOW + ms) if isinstance(e, Hangup)]
    assert [e for e in host.core.tick(NOW + 20_000) if isinstance(e, Hangup)]


def test_a_master_that_beats_fast_is_given_2_s(slave):
    """Learnt from its heartbeats: after a healed partition TCP alone would take seconds more."""
    host = slave()
    for ms in (100, 200, 300):
        beat(host, NOW + ms)
        host.core.tick(NOW + ms)
    hung_up = None
    for ms in range(400, 3_000, 100):
        if [e for e in host.core.tick(NOW + ms) if isinstance(e, Hangup)]:
            hung_up = ms
            break
    assert hung_up == 2_300


def test_r8_a_stall_of_our_own_is_not_the_masters_silence(slave):
    host = slave()
    for ms in (100, 200, 300):
        beat(host, NOW + ms)
        host.core.tick(NOW + ms)
    assert not [e for e in host.core.tick(NOW + 30_000) if isinstance(e, Hangup)]


def test_an_unanswered_handshake_is_given_3_s(memory_log, slave_host):
    """A stopped process still accepts connections."""
    log = memory_log()
    core = SlaveCore(2, view(), log.facts(), SlavePolicy(), NOW)
    core.begin(NOW)
    core.connected(log.facts(), NOW)
    hung_up = [
        ms
        for ms in range(100, 3_100, 100)
        if [e for e in core.tick(NOW + ms) if isinstance(e, Hangup)]
    ]
    assert hung_up == [3_000]


def test_an_idle_slave_acks_on_its_own_after_1_s(slave):
    """Java's master beats every 5 s only; it closes what it does not hear of."""
    host = slave()
    acks = []
    for ms in range(100, 3_001, 100):
        host.core.tick(NOW + ms)
        if host.core.turn_ended(100, NOW + ms):
            acks.append(ms)
    assert acks == [1_000, 2_000, 3_000]


def test_diverged_is_said_once_per_reason_and_tried_ever_more_rarely(memory_log, entries):
    log = memory_log(b"1" * 100, (1, 0))
    core = SlaveCore(2, view(9), log.facts(), SlavePolicy(), NOW)
    now, said, waits = NOW, 0, []
    core.begin(now)
    for _ in range(9):
        core.connected(log.facts(), now)
        peer = MasterHandshake(500, 9, entries((9, 0)))
        effects = core.handshake_received(peer, log.facts(), now)
        said += len([e for e in effects if isinstance(e, Diverged)])
        waits.append(core.wakeup_ms - now)
        now = core.wakeup_ms
        core.tick(now)
    assert said == 1
    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000, 60_000]


def test_the_ack_is_clamped_to_the_own_log(memory_log, slave_host, entries):
    """Java quirk: with its last epoch entry above its own end a slave reports more than it has."""
    log = memory_log(b"1" * 80, (1, 0), (2, 100))
    core = SlaveCore(2, view(2), log.facts(), SlavePolicy(), NOW)
    host = slave_host(core, log)
    host.perform(core.begin(NOW), NOW)
    host.connect(NOW)
    peer = MasterHandshake(300, 2, entries((1, 0), (2, 100)))
    host.perform(core.handshake_received(peer, log.facts(), NOW), NOW)
    assert host.take_sent().endswith(encode_ack(80))
    assert log.history == [(1, 0)]


def test_an_older_log_without_a_common_epoch_begins_anew(memory_log, entries):
    """R27: the master's list begins above our end; its older epochs went with its segments."""
    log = memory_log(b"1" * 80, (1, 0))
    core = SlaveCore(2, view(3), log.facts(), SlavePolicy(), NOW)
    core.begin(NOW)
    core.connected(log.facts(), NOW)
    peer = MasterHandshake(900, 3, entries((3, 500)))
    effects = core.handshake_received(peer, log.facts(), NOW)
    assert any(isinstance(e, BeginAt) and e.offset == 0 for e in effects)
    assert core.wakeup_ms == NOW


def test_log_bytes_before_our_ack_are_refused(memory_log):
    log = memory_log()
    core = SlaveCore(2, view(), log.facts(), SlavePolicy(), NOW)
    core.begin(NOW)
    core.connected(log.facts(), NOW)
    assert core.frame_received(TransferHeader(0, -1, 1, 0, 0), NOW) == [], "Java's early beat"
    (hangup,) = core.frame_received(TransferHeader(10, 0, 1, 0, 0), NOW)
    assert isinstance(hangup, Hangup)
