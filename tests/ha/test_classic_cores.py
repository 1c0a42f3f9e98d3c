"""Classic HA without sockets: what Java 5.3.3 sent, replayed, and the rules of both cores."""

import json
import random
from pathlib import Path

import pytest

from batonmq.ha import slave_effects as fx
from batonmq.ha.classic.master_core import (
    SLAVES_MAX,
    Acknowledged,
    ClassicMasterCore,
    ClassicPolicy,
    SlavesMissing,
)
from batonmq.ha.classic.slave_core import AskLogEnd, ClassicPhase, ClassicSlaveCore, MasterAddresses
from batonmq.ha.classic.wire import (
    BODY_SIZE_MAX,
    ClassicFrameReader,
    FrameHead,
    ReportReader,
    encode_head,
    encode_report,
)
from batonmq.ha.master_core import CloseConnection, SendLog
from batonmq.ha.proof import STRANGERS_MAX
from batonmq.ha.slave_policy import SlavePolicy
from batonmq.protocol.errors import RemoteProtocolError

STREAMS = Path(__file__).parents[1] / "golden" / "java-5.3.3-classic" / "ha-streams.json"
SEGMENT = 1 << 20
NOW = 1_000_000
LOG_END = 0x1976


def java_bytes(direction: str) -> bytes:
    for entry in json.loads(STREAMS.read_text()):
        if entry["direction"].startswith(direction):
            return bytes.fromhex(entry["hex"])
    raise KeyError(direction)


def java_frames() -> list[tuple[FrameHead, bytes]]:
    frames: list[tuple[FrameHead, bytes]] = []
    for item in ClassicFrameReader().feed(memoryview(java_bytes("master"))):
        if isinstance(item, FrameHead):
            frames.append((item, b""))
        else:
            frames[-1] = (frames[-1][0], frames[-1][1] + bytes(item))
    return frames


def a_master(end: int = 0, begin: int = 0, **policy: int) -> ClassicMasterCore:
    return ClassicMasterCore(ClassicPolicy(SEGMENT, **policy), begin, end, NOW)


def a_slave(log_end: int = 0, *, remoting: str = "", **policy: bool) -> ClassicSlaveCore:
    """Connected; without a remoting address it is in TRANSFER."""
    core = ClassicSlaveCore(SlavePolicy(segment_size=SEGMENT, **policy), NOW)
    assert core.follow(MasterAddresses("m:10912", remoting), NOW) == [fx.Dial("m:10912")]
    core.connected(log_end, log_end, NOW)
    return core


# -- what Java sent


def test_the_recorded_reports_and_frames_are_read():
    frames = java_frames()
    heads = [(head.offset, head.size) for head, _ in frames]
    assert heads == [(0, 0x17E5), (0x17E5, 401), *[(LOG_END, 0)] * 4]
    assert ReportReader().feed(java_bytes("slave")) == LOG_END


def test_our_master_sends_the_java_slave_what_javas_sent():
    core = a_master(heartbeat_ms=5_000)
    core.connection_opened(1, "127.0.0.1:5000", NOW)
    reader, sent = ReportReader(), []
    ends = iter([0x17E5, LOG_END])
    reports = java_bytes("slave")
    for at in range(0, len(reports), 8):
        report = reader.feed(reports[at : at + 8])
        assert report is not None
        sent += core.reported(1, report, NOW)
        if (end := next(ends, None)) is not None:
            sent += core.appended(end, NOW)
    sent += core.tick(NOW + 5_000)
    assert all(isinstance(effect, SendLog) for effect in sent)
    expected = [encode_head(head.offset, head.size) for head, _ in java_frames()[:3]]
    assert [effect.header for effect in sent] == expected


@pytest.mark.parametrize("seed", range(5))
def test_our_slave_takes_javas_stream_however_it_is_cut(seed):
    core, reader, log = a_slave(), ClassicFrameReader(), b""
    stream = java_bytes("master")
    cuts = sorted(random.Random(seed).sample(range(1, len(stream)), 30)) if seed else []
    reports = []
    for at, until in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        for item in reader.feed(memoryview(stream)[at:until]):
            if isinstance(item, FrameHead):
                core.frame_received(item, len(log), NOW)
            else:
                piece = core.body_received(item)
                assert piece.offset == len(log)
                log += bytes(piece.data)
        reports += core.turn_ended(len(log), 0, NOW)
    assert len(log) == LOG_END
    assert log == b"".join(body for _, body in java_frames())
    assert reports[-1] == fx.SendToMaster(encode_report(LOG_END))
    assert core.stage is ClassicPhase.TRANSFER


# -- frames


@pytest.mark.parametrize("head", [(0, -1), (-1, 10), (0, BODY_SIZE_MAX + 1)])
def test_a_frame_that_cannot_be_is_refused(head):
    with pytest.raises(RemoteProtocolError, match="HA frame"):
        list(ClassicFrameReader().feed(memoryview(encode_head(*head))))


def test_a_negative_report_is_refused():
    with pytest.raises(RemoteProtocolError, match="reports -1"):
        ReportReader().feed(encode_report(-1))


def test_the_largest_frame_that_java_takes_is_taken():
    head = FrameHead(7, BODY_SIZE_MAX)
    assert list(ClassicFrameReader().feed(memoryview(encode_head(*head)))) == [head]


def test_reports_are_read_however_they_are_cut():
    reader, stream = ReportReader(), b"".join(map(encode_report, (5, 70_000, 1 << 40)))
    read = [reader.feed(stream[at : at + 5]) for at in range(0, len(stream), 5)]
    assert read == [None, 5, None, 70_000, 1 << 40]


# -- the master


@pytest.mark.parametrize(
    ("begin", "end", "sent_from"), [(0, 20 * SEGMENT + 300, 20 * SEGMENT), (100, 500, 100)]
)
def test_an_empty_slave_starts_with_the_last_segment(begin, end, sent_from):
    """The bytes in front of that are not under way to it: they fill no window."""
    core = a_master(end=end, begin=begin)
    core.connection_opened(1, "a:1", NOW)
    (sent,) = core.reported(1, 0, NOW)
    assert (sent.offset, sent.size) == (sent_from, end - sent_from)


def test_a_frame_stays_within_its_segment_and_the_window():
    core = a_master(end=SEGMENT + 10, batch_bytes=SEGMENT, window_bytes=SEGMENT - 1)
    core.connection_opened(1, "a:1", NOW)
    (first,) = core.reported(1, 1, NOW)
    assert first.size == SEGMENT - 1
    rest = core.reported(1, SEGMENT, NOW)
    assert [(effect.offset, effect.size) for effect in rest] == [(SEGMENT, 10)]


@pytest.mark.parametrize(
    ("report", "why"), [(501, "above the end of this one, 500"), (99, "begins at 100")]
)
def test_a_slave_with_another_history_is_refused_by_name(report, why):
    core = a_master(end=500, begin=100, needed_slaves=1)
    core.connection_opened(1, "a:1", NOW)
    close, missing = core.reported(1, report, NOW)
    assert isinstance(close, CloseConnection)
    assert why in close.reason
    assert missing == SlavesMissing(1, 0)
    assert not core.connections


def test_enough_slaves_must_have_a_byte():
    core = a_master(end=100, needed_slaves=2)
    for number in (1, 2, 3):
        core.connection_opened(number, f"host{number}:1", NOW)
        core.reported(number, 50, NOW)
    assert core.acknowledged == 50
    assert Acknowledged(100) not in core.reported(1, 100, NOW)
    assert Acknowledged(70) in core.reported(3, 70, NOW)
    assert Acknowledged(100) in core.reported(2, 100, NOW)


def test_a_faster_slave_proves_nothing_about_a_wiped_one():
    """Java keeps one highest offset of all."""
    core = a_master(end=100, needed_slaves=2)
    core.connection_opened(1, "a:1", NOW)
    core.connection_opened(2, "b:1", NOW)
    core.reported(1, 100, NOW)
    core.reported(2, 0, NOW)
    assert core.acknowledged == 0


def test_two_connections_of_one_slave_count_once():
    """The older one may be half open; Java counts both."""
    core = a_master(end=100, needed_slaves=2)
    core.connection_opened(1, "a:1", NOW)
    core.reported(1, 100, NOW)
    core.connection_opened(2, "a:2", NOW)
    core.reported(2, 100, NOW)
    assert core.acknowledged == 0
    assert Acknowledged(100) in core.reported(1, 100, NOW), "another slave of the same host"


def test_a_slave_beyond_the_gap_is_missed():
    core = a_master(end=10, needed_slaves=1, gap_bytes=100, window_bytes=1 << 20)
    core.connection_opened(1, "a:1", NOW)
    core.reported(1, 10, NOW)
    assert not any(isinstance(e, SlavesMissing) for e in core.appended(109, NOW))
    assert SlavesMissing(1, 0) in core.appended(110, NOW)


def test_a_silent_slave_is_dropped_and_a_quiet_one_gets_heartbeats():
    core = a_master(end=10, heartbeat_ms=5_000, housekeeping_ms=20_000)
    core.connection_opened(1, "a:1", NOW)
    core.reported(1, 10, NOW)
    assert [e.header for e in core.tick(NOW + 5_000)] == [encode_head(10, 0)]
    assert core.wakeup_ms == NOW + 10_000
    assert core.tick(NOW + 5_001) == [], "one an interval"
    (close,) = core.tick(NOW + 20_000)
    assert isinstance(close, CloseConnection)
    assert "20000 ms" in close.reason


def test_flow_control_counts_bodies():
    """Java counts the headers only."""
    core = a_master(end=1_000, flow_bytes_per_s=300)
    core.connection_opened(1, "a:1", NOW)
    assert [e.size for e in core.reported(1, 1, NOW)] == [300]
    assert core.wakeup_ms <= NOW + 5_000
    assert core.tick(NOW + 999) == []
    assert [e.size for e in core.tick(NOW + 1_000)] == [300]


def test_r58_connections_that_never_report_leave_room_for_a_slave():
    """They name no one, so the host with the most of them loses its oldest."""
    core = a_master(end=100, needed_slaves=1)
    core.connection_opened(1, "slave:1", NOW)
    effects: list[object] = []
    for number in range(2, 2 + 10 * STRANGERS_MAX):
        effects += core.connection_opened(number, f"flood:{number}", NOW)
    closed = [e.connection_id for e in effects if isinstance(e, CloseConnection)]
    assert closed == list(range(2, 3 + 9 * STRANGERS_MAX))
    assert Acknowledged(100) in core.reported(1, 100, NOW)


def test_r58_slaves_that_nobody_names_are_limited_in_number_too():
    core = a_master(end=100, needed_slaves=1)
    core.connection_opened(1, "slave:1", NOW)
    core.reported(1, 100, NOW)
    for number in range(2, 1_000):
        core.connection_opened(number, f"flood:{number}", NOW)
        core.reported(number, 100, NOW)
    assert len(core.connections) == SLAVES_MAX and 1 in core.connections


# -- the slave


def test_a_slave_ahead_of_its_master_does_not_follow():
    core = a_slave(500, remoting="m:10911")
    assert core.stage is ClassicPhase.PROVING
    _, diverged = core.log_end_received(499, 500, 500, NOW)
    assert isinstance(diverged, fx.Diverged)
    assert "above the end of its master's, 499" in diverged.reason
    assert core.stage is ClassicPhase.WAIT
    assert core.wakeup_ms > NOW + 500, "it does not hammer"


def test_r45_a_slave_whose_disk_has_space_again_connects_at_once():
    core = a_slave(500)
    core.append_failed(500, "the disk is full", NOW)
    assert core.wakeup_ms > NOW
    assert core.dial_now(NOW) == [fx.Dial(core.master.ha)] and core.master.ha
    assert core.dial_now(NOW) == [], "it does so already"


def test_the_master_is_asked_before_the_first_report():
    core = ClassicSlaveCore(SlavePolicy(), NOW)
    core.follow(MasterAddresses("m:10912", "m:10911"), NOW)
    assert core.connected(500, 500, NOW) == [AskLogEnd("m:10911")]
    assert core.log_end_received(500, 500, 500, NOW) == [fx.SendToMaster(encode_report(500))]


@pytest.mark.parametrize(
    ("head", "log_end"),
    [((501, 10), 500), ((499, 10), 500), ((0, 10), 500), ((600, 0), 500), ((77, 5), 0)],
)
def test_a_frame_that_goes_on_elsewhere_ends_the_connection(head, log_end):
    core = a_slave(log_end)
    _, diverged = core.frame_received(FrameHead(*head), log_end, NOW)
    assert core.stage is ClassicPhase.WAIT
    assert isinstance(diverged, fx.Diverged)
    assert f"continues at {head[0]}" in diverged.reason


def test_an_empty_log_begins_where_the_masters_segment_does():
    core = a_slave(0)
    begin, _ = core.frame_received(FrameHead(3 * SEGMENT, 10), 0, NOW)
    assert isinstance(begin, fx.BeginAt)
    assert begin.offset == 3 * SEGMENT
    assert core.body_received(memoryview(b"x" * 10)).offset == 3 * SEGMENT


def test_reports_wait_for_the_disk_under_haSyncFlush():
    core = ClassicSlaveCore(SlavePolicy(sync_flush=True), NOW)
    core.follow(MasterAddresses("m:10912"), NOW)
    assert core.connected(100, 40, NOW) == [fx.FlushTo(100)]
    assert core.tick(core.wakeup_ms) == [], "a report of 0 would have the log sent again"
    assert core.turn_ended(100, 100, NOW) == [fx.SendToMaster(encode_report(100))]
    core.frame_received(FrameHead(100, 20), 100, NOW)
    assert isinstance(core.body_received(memoryview(b"x" * 20)), fx.AppendLog)
    assert core.turn_ended(120, 100, NOW) == [fx.FlushTo(120)]
    assert core.turn_ended(120, 120, NOW) == [fx.SendToMaster(encode_report(120))]


def test_a_quiet_slave_reports_again_and_leaves_a_silent_master():
    core = a_slave(7)
    (report,) = core.tick(core.wakeup_ms)
    assert report == fx.SendToMaster(encode_report(7))
    (_,) = core.tick(NOW + SlavePolicy().housekeeping_ms)
    assert core.stage is ClassicPhase.WAIT


def test_a_new_address_counts_from_the_next_dial():
    """A connection that works is left alone."""
    core = a_slave(7)
    assert core.follow(MasterAddresses("n:10912"), NOW) == []
    core.disconnected(NOW)
    assert core.tick(core.wakeup_ms) == [fx.Dial("n:10912")]


def test_a_report_of_bytes_that_wait_for_the_window_acknowledges_nothing():
    """Its own log may hold such an end; no one has sent those bytes to this slave yet."""
    core = a_master(end=1_000, needed_slaves=1, window_bytes=100, batch_bytes=100)
    core.connection_opened(1, "a:1", NOW)
    core.reported(1, 500, NOW)
    effects = core.reported(1, 601, NOW)
    assert [type(effect) for effect in effects][:1] == [CloseConnection]
    assert core.acknowledged == 500 and not core.connections


def test_only_connections_that_vouch_count_as_near():
    core = a_master(end=1_000, needed_slaves=1)
    for number in (1, 2):
        core.connection_opened(number, f"a:{number}", NOW)
        core.reported(number, 1_000, NOW)
    core.connection_opened(3, "a:3", NOW)
    assert core.slaves_within_gap() == 0
    core.reported(2, 1_000, NOW)
    assert core.slaves_within_gap() == 1


def test_each_connection_begins_with_a_report_though_nothing_is_new():
    """It says where the master continues: without it nothing more comes."""
    core = a_slave(7)
    core.disconnected(NOW)
    assert core.tick(core.wakeup_ms) == [fx.Dial("m:10912")]
    assert core.connected(7, 7, NOW) == [fx.SendToMaster(encode_report(7))]


def test_what_keeps_a_connection_up_reports_nothing_that_is_not_flushed():
    core = a_slave(100, sync_flush=True)
    core.frame_received(FrameHead(100, 20), 100, NOW)
    core.body_received(memoryview(b"x" * 20))
    assert core.turn_ended(120, 100, NOW) == [fx.FlushTo(120)]
    assert core.tick(core.wakeup_ms) == [fx.SendToMaster(encode_report(100))]
