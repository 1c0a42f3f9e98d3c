"""The master's connections: time, flow, and the few things that the scripts do not show."""

import pytest

from batonmq.ha.master_core import CloseConnection, MasterCore, MasterPolicy, SendBytes, SendLog
from batonmq.ha.sync_state import ConfirmAdvanced
from batonmq.ha.wire import MasterFrameReader, SlaveHandshake, decode_transfer_header
from batonmq.protocol.role_view import Replica
from tests.ha.cores import NOW, entries, identity, mastership, registered, registrations


def master(*, written=0, recorded=(1, 2), **policy):
    sync = mastership(recorded, written=written)
    policy.setdefault("segment_size", 1 << 20)
    return MasterCore(
        sync,
        MasterPolicy(**policy),
        entries((1, 0)),
        min_offset=0,
        now_ms=NOW,
        registrations=registrations(Replica(2), Replica(3), Replica(9)),
    )


def following(core, ack=0, connection_id=7, broker_id=2, **handshake):
    core.connection_opened(connection_id, "slave", NOW)
    core.handshake_received(connection_id, SlaveHandshake(broker_id, **handshake), NOW)
    return core.acks_received(connection_id, [ack], NOW)


def sent(effects):
    return [(e.offset, e.size) for e in effects if isinstance(e, SendLog)]


@pytest.fixture
def core():
    return master()


def test_a_risen_confirm_offset_travels_within_20_ms(core):
    """Slaves show messages to no one, but a new master does what its slaves know: so when nothing
    else carries it, confirmOffset goes out on its own, at most every 20 ms."""
    following(core)
    core.appended(100, NOW + 5)
    (confirm,) = core.acks_received(7, [100], NOW + 6)
    assert confirm == ConfirmAdvanced(100)
    assert core.wakeup_ms == NOW + 25
    (beat,) = core.tick(NOW + 25)
    assert beat.size == 0 and decode_transfer_header(beat.header).confirm_offset == 100
    assert core.wakeup_ms > NOW + 25 + 20


def test_data_carries_confirm_offset_so_no_beat_is_sent(core):
    following(core)
    core.appended(100, NOW + 5)
    core.acks_received(7, [100], NOW + 6)
    core.appended(200, NOW + 7)
    assert sent(core.tick(NOW + 25)) == []


def test_nothing_read_for_20_s_ends_a_connection(core):
    following(core)
    assert not [e for e in core.tick(NOW + 19_999) if isinstance(e, CloseConnection)]
    (close,) = [e for e in core.tick(NOW + 20_000) if isinstance(e, CloseConnection)]
    assert "20000 ms" in close.reason and not core.connections
    assert core.acks_received(7, [0], NOW + 20_001) == [], "late bytes of a closed connection"
    assert core.connection_closed(7, NOW + 20_002) == []


def test_flow_control_allows_so_many_bytes_a_second():
    core = master(written=1_000, flow_bytes_per_s=300, batch_bytes=200)
    assert sent(following(core)) == [(0, 200), (200, 100)]
    core.acks_received(7, [300], NOW + 100)
    assert sent(core.tick(NOW + 200)) == [(300, 0)]
    assert sent(core.tick(NOW + 1_000)) == [(300, 200), (500, 100)]


def test_sync_from_last_file_begins_at_the_last_segment():
    """And such a slave is no candidate for the set: it lacks old messages (R13)."""
    core = master(written=1_000, recorded=(1,), segment_size=256)
    effects = following(core, sync_from_last_file=True)
    assert sent(effects) == [(768, 232)]
    assert core.sync.required_set == {1}
    core.acks_received(7, [1_000], NOW + 1)
    assert core.sync.proposal is None


def test_a_non_empty_slave_goes_on_at_its_end_whatever_it_asks():
    core = master(written=1_000, segment_size=256)
    assert sent(following(core, ack=100, sync_from_last_file=True))[0] == (100, 156)


def test_an_offset_that_no_epoch_covers_is_refused():
    """Java computes a negative size here and sends heartbeats forever."""
    core = master(written=1_000)
    core.epochs_changed(entries((3, 500)), NOW)
    (close,) = [e for e in following(core, ack=100) if isinstance(e, CloseConnection)]
    assert "no epoch covers offset 100" in close.reason


def test_the_handshake_shows_the_whole_history():
    core = master(written=1_000)
    core.epochs_changed(entries((1, 0), (2, 500), (3, 500)), NOW)
    core.replicas_changed([registered(2)], NOW)
    core.connection_opened(7, "slave", NOW)
    (reply,) = core.handshake_received(7, SlaveHandshake(2, identity=identity(2)), NOW)
    assert isinstance(reply, SendBytes)
    reader = MasterFrameReader()
    (handshake,) = reader.feed(memoryview(reply.data))
    assert [e.epoch for e in handshake.entries] == [1, 2, 3]


def test_a_learner_receives_everything_and_counts_for_nothing():
    core = master(written=100, recorded=(1,))
    assert sent(following(core, async_learner=True)) == [(0, 100)]
    core.acks_received(7, [100], NOW)
    assert core.sync.proposal is None and core.sync.required_set == {1}


def test_a_broken_invariant_shows_the_last_events(core):
    following(core)
    for written in range(1, 61):
        core.appended(written, NOW + written)
    core.dead_changed(frozenset({2}), NOW + 60)
    core.log.confirm_offset = 99
    with pytest.raises(AssertionError, match="R15") as caught:
        core.check_invariants()
    (note,) = caught.value.__notes__
    _, *events = [line.strip() for line in note.splitlines()]
    assert len(events) == 50
    assert events[-2:] == [
        f"now_ms={NOW + 60} appended(written=60)",
        f"now_ms={NOW + 60} dead_changed(broker_ids=frozenset({{2}}))",
    ]


def java_beats(effects):
    """(epoch, size) of each frame."""
    headers = [decode_transfer_header(e.header) for e in effects if isinstance(e, SendLog)]
    return [(header.epoch, header.body_size) for header in headers]


def test_a_java_slave_hears_of_no_epoch_before_it_has_a_byte():
    """Java's list refuses an epoch that starts where the one before starts: had it heard of the
    empty epoch 2, it would file the bytes of epoch 3 under it, find no such bytes in our list at
    its next connection, and cut them although they are confirmed."""
    core = master(written=500)
    core.epochs_changed(entries((1, 0), (2, 500), (3, 500)), NOW)
    core.connection_opened(7, "slave", NOW)
    (reply,) = core.handshake_received(7, SlaveHandshake(2), NOW)
    (handshake,) = MasterFrameReader().feed(memoryview(reply.data))
    assert [(e.epoch, e.start_offset) for e in handshake.entries] == [(1, 0)]
    assert {epoch for epoch, _ in java_beats(core.acks_received(7, [500], NOW))} == {-1}
    assert java_beats(core.tick(NOW + 1_000)) == [(-1, 0)]
    assert java_beats(core.appended(600, NOW + 1_000)) == [(3, 100)]
    core.acks_received(7, [600], NOW + 1_000)
    assert java_beats(core.tick(NOW + 2_000)) == [(3, 0)]


def test_a_java_slave_at_the_beginning_of_an_epoch_does_not_hear_of_it():
    """The window is full just there: what counts is whether the slave has a byte of the epoch. A
    connection that ends then would leave it with an epoch that it never notes again."""
    core = master(written=500, window_bytes=300)
    core.epochs_changed(entries((1, 0), (2, 300)), NOW)
    assert java_beats(following(core, ack=0)) == [(1, 300)]
    assert java_beats(core.tick(NOW + 1_000)) == [(-1, 0)]
    assert java_beats(core.acks_received(7, [300], NOW + 1_000)) == [(2, 200)]


def test_a_java_slave_that_is_behind_gets_the_epochs_with_bytes_only():
    core = master(written=500)
    core.epochs_changed(entries((1, 0), (2, 200), (3, 200), (4, 500)), NOW)
    frames = java_beats(following(core, ack=0))
    assert [frame for frame in frames if frame[0] != -1] == [(1, 200), (3, 300)]


def closed(effects):
    return [(e.connection_id, e.flush) for e in effects if isinstance(e, CloseConnection)]


def test_r18_the_newest_handshake_of_an_id_ends_one_that_has_not_acked_yet(core):
    for connection_id in (7, 8):
        core.connection_opened(connection_id, "slave", NOW)
    core.handshake_received(7, SlaveHandshake(2), NOW)
    effects = core.handshake_received(8, SlaveHandshake(2), NOW)
    assert closed(effects) == [(7, False)] and core.connections.keys() == {8}
    core.check_invariants()


def test_r41_a_process_that_is_not_registered_waits_from_its_handshake_on(core):
    """However long its connection was open before."""
    core.connection_opened(7, "slave", NOW - 5_000)
    assert core.handshake_received(7, SlaveHandshake(2, identity=identity(2)), NOW) == []
    assert not closed(core.replicas_changed([registered(3)], NOW + 100)), "it waits for its own"
    assert not closed(core.tick(NOW + 499))
    assert closed(core.tick(NOW + 500)) == [(7, False)]


def test_r27_a_new_slave_of_a_log_that_begins_far_in_gets_it():
    """The expired bytes in front of it are not under way: they fill no window."""
    core = master(written=30 << 20)
    core.log_trimmed(20 << 20, NOW)
    assert sent(following(core))[0] == (20 << 20, 1 << 20)


def test_r27_a_slave_is_told_where_the_log_begins_before_it_is_left():
    core = master(written=1_000)
    following(core, ack=500)
    assert not core.log_trimmed(500, NOW), "its next byte is here"
    core = master(written=1_000, window_bytes=100, batch_bytes=100)
    assert sent(following(core, ack=500)) == [(500, 100)]
    assert not core.log_trimmed(600, NOW), "the log begins with its next byte"
    notice, close = core.log_trimmed(700, NOW)[:2]
    assert decode_transfer_header(notice.data).offset == 700
    assert closed([close]) == [(7, True)], "what was sent is delivered"
    assert not sent(core.appended(1_100, NOW + 1)), "and nothing more"
