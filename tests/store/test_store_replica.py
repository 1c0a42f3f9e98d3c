"""The store as a slave: bytes as they come, dispatch behind confirmOffset, and taking over."""

import asyncio
import errno
import threading
from unittest.mock import Mock

import pytest

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.records.codec import NewMessage, decode_records
from batonmq.protocol.topic_name import SCHEDULE_TOPIC, TIMER_TOPIC
from batonmq.store.commit_log import Segment
from batonmq.store.errors import StoreStateError
from tests.shared.failing_disk import failing
from tests.shared.waiting import until


def master_with(rig, count, size=700):
    store = rig.beside("master").open_master()
    puts = [
        rig.put(store, b"%03d" % n + bytes(size), queue_id=n % 2, uniq_key=b"U%d" % n)
        for n in range(count)
    ]
    store.end_turn()
    return store, puts


def slave_of(rig):
    return rig.beside("slave").open()


@pytest.mark.parametrize("step", [1, 7, 100, 5000, 100_000])
def test_g3_a_slave_is_byte_identical_wherever_frames_are_cut(rig, step):
    """Frames may end within a record, within a blank, and span segments."""
    master, _ = master_with(rig, 30)
    data = rig.log_of(master)
    slave = slave_of(rig)
    for offset in range(0, len(data), step):
        end = slave.slave_log.append_replicated(offset, data[offset : offset + step])
        slave.advance_confirm_offset(end)
        assert slave.confirm_offset <= end
        if step == 1 and offset > 2000:
            break
    if step > 1:
        assert rig.log_of(slave) == data
        assert slave.confirm_offset == len(data)
        assert [body[:3] for body in rig.read_bodies(slave, queue_id=1)] == [
            b"%03d" % n for n in range(1, 30, 2)
        ]
        assert len(slave.queries.query_message("T", "U29", 9, 0, 2**62).parts) == 1


def test_g4_a_slave_shows_nothing_above_the_confirmed_offset(rig):
    master, puts = master_with(rig, 6)
    slave = slave_of(rig)
    slave.slave_log.append_replicated(0, rig.log_of(master))
    assert slave.queries.max_offset_in_queue("T", 0) == 0
    assert slave.advance_confirm_offset(puts[2].end_offset + 9) == puts[2].end_offset
    assert slave.queries.max_offset_in_queue("T", 0) == 2
    assert slave.queries.get_message("T", 0, 5, 32).next_begin_offset == 5, (
        "a slave does not correct"
    )


def test_waiting_messages_have_the_same_units_on_a_slave(rig):
    """Due times: of a level, of a timer, and of a recall, which is negative."""
    master, slave = rig.beside("master").open_master(), slave_of(rig)
    for topic, properties in (
        (SCHEDULE_TOPIC, b"TAGS\x01a\x02DELAY\x013\x02"),
        (TIMER_TOPIC, b"TIMER_OUT_MS\x01123456\x02UNIQ_KEY\x01U1"),
        (TIMER_TOPIC, b"TIMER_OUT_MS\x01123456\x02TIMER_DEL_UNIQKEY\x01T+U1\x02"),
    ):
        message = NewMessage(topic, 0, b"x", properties, 0, None, b"U1", 1, rig.host)
        end = master.appender.put_message(message).end_offset
    master.advance_confirm_offset(master.end_turn())
    slave.slave_log.append_replicated(0, rig.log_of(master))
    assert slave.advance_confirm_offset(end) == end
    for topic, due in ((SCHEDULE_TOPIC, [rig.now_ms + 10_000]), (TIMER_TOPIC, [123456, -123456])):
        units = slave.queries.units(topic, 0, 0, 9)
        assert units == master.queries.units(topic, 0, 0, 9)
        assert [unit[2] for unit in units] == due
    assert len(slave.queries.query_message(TIMER_TOPIC, "U1", 9, 0, 2**62).parts) == 1


def test_bytes_for_another_offset_are_refused(rig):
    master, _ = master_with(rig, 2)
    slave = slave_of(rig)
    with pytest.raises(StoreStateError):
        slave.slave_log.append_replicated(10, rig.log_of(master))
    slave.slave_log.append_replicated(0, rig.log_of(master))
    with pytest.raises(StoreStateError):
        slave.slave_log.append_replicated(0, rig.log_of(master))


def test_r23_a_new_master_drops_an_incomplete_tail_keeps_it_aside_and_numbers_on(rig):
    """1 the last frame ends a byte before its record does. 2 this slave is elected: that is no
    message, and no damage."""
    master, puts = master_with(rig, 8)
    slave = slave_of(rig)
    slave.slave_log.append_replicated(0, rig.log_of(master)[:-1])
    slave.advance_confirm_offset(puts[3].end_offset)
    assert slave.prepare_master() == puts[6].end_offset == slave.max_phy_offset
    (tail,) = (rig.root / "truncated").glob("*/*.tail")
    assert tail.read_bytes() == rig.log_of(master)[puts[6].end_offset : -1]
    assert not slave.trust.reason
    assert rig.put(slave, queue_id=0).queue_offset == 4
    assert rig.put(slave, queue_id=1).queue_offset == 3
    slave.advance_confirm_offset(slave.end_turn())
    assert len(rig.read_bodies(slave, queue_id=0)) == 5


def test_a_new_master_may_inherit_an_end_within_a_blank(rig):
    """The frame ended behind the 8 bytes of a blank: the next record goes where it would have."""
    master, puts = master_with(rig, 12)
    data = rig.log_of(master)
    last_in_first = [p for p in puts if p.end_offset <= 8192][-1]
    slave = slave_of(rig)
    slave.slave_log.append_replicated(0, data[: last_in_first.end_offset + 4])
    assert slave.prepare_master() == last_in_first.end_offset
    rig.put_confirmed(slave, bytes(700))
    assert rig.log_of(slave)[: 8192 + 100] != b"" and slave.max_phy_offset > 8192


def test_an_old_master_follows_again_and_takes_over_again(rig):
    """master -> slave -> master: dispatch queued in the first reign does not leak."""
    master, _ = master_with(rig, 4)
    other = slave_of(rig)
    other.slave_log.append_replicated(0, rig.log_of(master))
    master.stop_writes()
    assert other.prepare_master() == master.max_phy_offset
    rig.put(other, b"by other", queue_id=0)
    other.end_turn()
    more = rig.log_of(other)[master.max_phy_offset :]
    end = master.slave_log.append_replicated(master.max_phy_offset, more)
    master.advance_confirm_offset(end)
    assert rig.read_bodies(master)[-1] == b"by other"
    assert master.prepare_master() == end
    assert rig.put(master, queue_id=0).queue_offset == 3


def test_r26_what_a_killed_process_left_in_the_page_cache_is_not_durable(rig, monkeypatch):
    """1. A SYNC_FLUSH slave (with `haSyncFlush`: acks what is flushed) is killed before its flush.
    2. It starts again: the bytes are there, but no disk has them. 3. It may neither ack them as
    flushed nor serve as master before an fdatasync, which has to reach every segment of them."""
    master, _ = master_with(rig, 60)
    slave = rig.beside("slave").open(flush_disk_type="SYNC_FLUSH")
    end = slave.slave_log.append_replicated(0, rig.log_of(master))
    assert len(slave.log.segments) > 1
    slave = rig.reopen(slave, flush_disk_type="SYNC_FLUSH")
    assert slave.max_phy_offset == end
    assert slave.log.flushed_offset == 0
    synced = []
    monkeypatch.setattr(Segment, "datasync", lambda segment: synced.append(segment.start_offset))
    assert slave.prepare_master() == end == slave.log.flushed_offset
    assert set(synced) >= {s.start_offset for s in slave.log.segments if s.start_offset < end}


def test_r26_a_flush_asked_for_before_a_cut_says_nothing_of_bytes_after_it(rig):
    """1. The flush thread reads the log's end. 2. The log is cut, before the thread continues. 3.
    New bytes come to the same offsets: they are not flushed yet, and neither is a late report."""
    master, puts = master_with(rig, 10)
    slave = rig.beside("slave").open(flush_disk_type="SYNC_FLUSH")
    target = slave.slave_log.append_replicated(0, rig.log_of(master))
    cut_at = puts[5].physical_offset
    slave.slave_log.truncate_to(cut_at)
    slave.log.datasync_to(target)
    assert slave.log.flushed_offset == cut_at
    heard = []
    slave.flushed_listeners.append(heard.append)
    slave._report_flushed(target)
    assert heard == [cut_at]


def test_r27_an_empty_start_at_the_masters_first_offset(rig):
    """The master no longer has what the slave would need next; the old log is kept aside."""
    master, puts = master_with(rig, 30)
    data = rig.log_of(master)
    slave = slave_of(rig)
    slave.slave_log.append_replicated(0, data[:3000])
    slave.slave_log.reset_for_empty_start(8192)
    assert slave.min_phy_offset == slave.max_phy_offset == slave.confirm_offset == 8192
    assert list((rig.root / "truncated").iterdir())
    end = slave.slave_log.append_replicated(8192, data[8192:])
    slave.advance_confirm_offset(end)
    first = next(p for p in puts[::2] if p.physical_offset >= 8192)
    assert slave.queries.min_offset_in_queue("T", 0) == first.queue_offset
    assert slave.queries.get_message("T", 0, 0, 32).next_begin_offset == 0
    slave.checkpoints.flush_derived()
    slave = rig.reopen(slave)
    assert (slave.min_phy_offset, slave.confirm_offset) == (8192, end)
    assert slave.queries.min_offset_in_queue("T", 0) == first.queue_offset
    with pytest.raises(ValueError):
        slave.slave_log.reset_for_empty_start(100)


@pytest.mark.parametrize("comes_again", [0, 4000])
def test_r27_what_was_confirmed_of_the_old_log_is_not_of_the_new_one(rig, comes_again):
    """1. The first segments of a slave's log expired; an unclean election dropped all the rest.
    2. It starts again below that, gets some bytes that no one confirmed to it, and is killed."""
    master, _ = master_with(rig, 60)
    data = rig.log_of(master)
    assert len(data) > 3 * 8192
    slave = slave_of(rig)
    slave.slave_log.reset_for_empty_start(16384)
    end = slave.slave_log.append_replicated(16384, data[16384:])
    slave.advance_confirm_offset(end)
    slave.checkpoints.flush_derived()
    slave.slave_log.reset_for_empty_start(0)
    if comes_again:
        slave.slave_log.append_replicated(0, data[:comes_again])
    whole = slave.slave_log.whole_end
    slave = rig.reopen(slave)
    assert (slave.min_phy_offset, slave.max_phy_offset) == (0, whole)
    assert slave.confirm_offset == 0
    assert slave.trust.damage is None and not slave.trust.reason


async def test_a_slave_far_behind_dispatches_in_slices_of_the_loop(rig, monkeypatch):
    """A long catch-up must not stop the loop from reading its sockets."""
    from batonmq.store import message_store

    monkeypatch.setattr(message_store, "_DISPATCH_SLICE_BYTES", 2000)
    master, puts = master_with(rig, 30)
    slave = slave_of(rig)

    slave.start(asyncio.get_running_loop(), pytest.fail)
    end = slave.slave_log.append_replicated(0, rig.log_of(master))
    first = slave.advance_confirm_offset(end)
    assert 0 < first < end
    await until(lambda: slave.confirm_offset == end)
    slave.close()
    assert slave.confirm_offset == master.max_phy_offset >= puts[-1].end_offset


# The flush thread.


async def test_sync_flush_requests_share_one_fdatasync(rig):
    """Group commit: everything written so far is covered, and the loop is told once."""
    store = rig.open_master(flush_disk_type="SYNC_FLUSH", flush_interval_commit_log=3_600_000)
    flushed = asyncio.get_running_loop().create_future()
    store.flushed_listeners.append(lambda offset: flushed.done() or flushed.set_result(offset))
    store.start(asyncio.get_running_loop(), pytest.fail)
    for _ in range(3):
        rig.put(store)
    end = store.end_turn()
    store.background.request_flush()
    assert await flushed == end == store.log.flushed_offset
    store.close()


async def test_r17_an_fdatasync_that_fails_once_is_fatal(rig):
    """Linux tells of a lost page once; the next fdatasync succeeds and has lost it all the same."""
    store = rig.open_master(
        flush_interval_commit_log=3_600_000, flush_interval_consume_queue=3_600_000
    )
    fatal = asyncio.get_running_loop().create_future()
    store.start(asyncio.get_running_loop(), fatal.set_result)
    rig.put(store)
    store.end_turn()
    with failing("fdatasync * EIO once"):
        store.background.request_flush()
        async with asyncio.timeout(10):
            assert (await fatal).errno == errno.EIO
        assert store.log.flushed_offset == 0 and "disk failed" in store.trust.reason
    store.abandon()


def test_a_failed_write_is_fatal_and_ends_all_puts(rig, store):
    rig.put(store)
    fatal = []
    store._on_fatal = fatal.append
    with failing("pwrite * EIO"), pytest.raises(OSError):
        store.end_turn()
    assert len(fatal) == 1 and not store.appender.is_writable


def test_a_failed_write_within_a_put_is_fatal_too(rig, store):
    """1. A turn has records in its buffer. 2. The next put leaves the segment, so they are written
    at once, and the disk fails: the turn is lost, the broker must stop."""
    fatal = []
    store._on_fatal = fatal.append
    rig.put(store)
    store.log.preallocate_next()
    store.log.ensure_segment(store.config.mapped_file_size_commit_log)
    with failing("pwrite * EIO"), pytest.raises(OSError):
        while True:
            rig.put(store, b"x" * 1000)
    assert len(fatal) == 1 and not store.appender.is_writable
    assert store.max_phy_offset == 0


async def test_r31_tables_reach_the_disk_off_the_loop_and_before_the_checkpoint(rig):
    """A role change alters the tables; a fsync on the loop a second later is the next failover's
    delay when the disk is busy."""
    due, seen = [], []

    def set_hook(store):
        store.before_checkpoint = lambda: [due.pop()] if due else []

    rig.before_open = set_hook
    store = rig.open_master(flush_interval_consume_queue=1)

    def write():
        seen.append((threading.current_thread(), store._files.checkpoint.recovery_offset))

    store.start(asyncio.get_running_loop(), pytest.fail)
    end = rig.put_confirmed(store, b"m")
    due.append(write)
    await until(lambda: store._files.checkpoint.recovery_offset == end)
    store.abandon()
    ((thread, checkpoint_then),) = seen
    assert thread is not threading.main_thread()
    assert checkpoint_then != end


def test_g4_a_confirmed_end_above_the_own_log_shows_nothing_that_comes_later(rig):
    master, _ = master_with(rig, 2)
    data = rig.log_of(master)
    slave = slave_of(rig)
    assert slave.advance_confirm_offset(len(data)) == 0
    slave.slave_log.append_replicated(0, data)
    slave.advance_confirm_offset(1)
    assert slave.confirm_offset == 0


def test_r23_a_deposed_master_keeps_its_own_bytes_when_it_drops_what_it_could_not_verify(rig):
    store, _ = master_with(rig, 3)
    store.stop_writes()
    assert store.slave_log.whole_end == store.max_phy_offset
    assert store.slave_log.drop_unverified() == store.max_phy_offset > 0


def test_r38_a_new_master_numbers_on_from_the_newest_record_of_each_queue(rig):
    """Its log begins in the middle, and nothing of it was shown yet."""
    master, puts = master_with(rig, 30)
    start = master.config.mapped_file_size_commit_log
    data = rig.log_of(master)
    replica = slave_of(rig)
    replica.slave_log.reset_for_empty_start(start)
    replica.slave_log.append_replicated(start, data[start:])
    replica.prepare_master()
    last = puts[-1].queue_offset
    assert rig.put(replica, b"new", queue_id=1).queue_offset == last + 1
    replica.advance_confirm_offset(replica.end_turn())
    shown = decode_records(b"".join(replica.queries.get_message("T", 1, last, 9).parts))
    assert [(each.queue_offset, each.body[:3]) for each in shown] == [
        (last, b"029"),
        (last + 1, b"new"),
    ]


def test_what_was_rolled_back_is_in_no_queue_and_found_by_no_key(rig):
    master = rig.beside("master").open_master()
    for body, flag in ((b"a", 0), (b"half", 4), (b"rolled back", 12), (b"b", 8)):
        rig.put(master, body, uniq_key=b"U%d" % flag, keys=b"K%d" % flag, sys_flag=flag)
    end = master.end_turn()
    slave = slave_of(rig)
    slave.slave_log.append_replicated(0, rig.log_of(master))
    for store in (master, slave):
        store.advance_confirm_offset(end)
        assert rig.read_bodies(store) == [b"a", b"b"]
        found = [
            len(store.queries.query_message("T", key, 9, 0, 2**62).parts)
            for key in ("U8", "K8", "U12", "K12")
        ]
        assert found == [1, 1, 0, 0]


def test_a_master_that_is_elected_again_shows_each_message_once(rig, store):
    """It lost its role with messages not yet confirmed, and nothing was cut meanwhile."""
    rig.put_confirmed(store, b"a")
    for body in (b"b", b"c"):
        rig.put(store, body)
    store.end_turn()
    store.stop_writes()
    end = store.prepare_master()
    assert rig.put(store, b"d").queue_offset == 3
    store.end_turn()
    store.advance_confirm_offset(end)
    assert rig.read_bodies(store) == [b"a", b"b", b"c"]
    store.advance_confirm_offset(store.max_phy_offset)
    assert rig.read_bodies(store) == [b"a", b"b", b"c", b"d"]


def test_what_was_confirmed_is_shown_before_a_new_master_opens(rig):
    """It was elected while it still showed what it had: clients may have seen it elsewhere."""
    master, puts = master_with(rig, 30)
    data = rig.log_of(master)
    slave = slave_of(rig)
    slave.slave_log.append_replicated(0, data)
    slave._dispatcher.advance(puts[19].end_offset, 1)
    assert slave.confirm_offset < puts[19].end_offset
    slave.prepare_master()
    assert slave.confirm_offset == puts[19].end_offset


def test_g8_bytes_that_are_no_records_end_the_process_also_between_reads(rig, monkeypatch):
    """The slices that follow a confirmation meet them first; again and again would help no one."""
    store = rig.open()
    failed = []
    store._on_fatal = failed.append

    def advance(*_):
        raise CorruptLogError("a file", 0, "no record")

    monkeypatch.setattr(store._dispatcher, "advance", advance)
    store._dispatch_slice()
    assert len(failed) == 1 and store.health.has_failed and store._next_slice is None
    store._dispatch_slice()
    assert len(failed) == 1


def test_a_dispatch_that_fails_while_it_keeps_up_with_a_master_ends_the_process(rig, monkeypatch):
    """It keeps up once it is further behind than the limit."""
    master, puts = master_with(rig, 3)
    data, ends = rig.log_of(master), [0, *(put.end_offset for put in puts)]
    slave = slave_of(rig)
    slave.slave_log.append_replicated(0, data[: ends[1]])
    slave.advance_confirm_offset(ends[1])
    slave._on_fatal = failed = Mock()
    error = OSError(errno.EIO, "a queue file")
    monkeypatch.setattr(slave._dispatcher, "advance", Mock(side_effect=error))
    for number, limit in ((1, 0), (2, -1)):
        monkeypatch.setattr("batonmq.store.slave_log._DISPATCH_LAG_MAX", limit)
        assert not failed.called
        slave.slave_log.append_replicated(ends[number], data[ends[number] : ends[number + 1]])
    failed.assert_called_once_with(error)


def test_r39_what_waits_behind_a_deletion_keeps_the_number_that_the_log_gave_it(rig, store):
    """A slave finds it in the log so: both number the same."""
    rig.put_confirmed(store, b"old", b"old")
    assert rig.put(store, b"behind the deletion").queue_offset == 2
    store.delete_topic("T")
    assert rig.put(store, b"next").queue_offset == 3
