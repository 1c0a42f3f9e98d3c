"""R45: a full disk pauses a store; nothing is cut, left out, numbered wrongly or ended."""

import asyncio
import errno
import os
from unittest.mock import Mock

import msgspec
import pytest

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.records.codec import NewMessage
from batonmq.runtime import disk
from batonmq.runtime.durable_file import replace_file
from batonmq.store import upkeep
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.consume_queue import ConsumeQueue
from batonmq.store.errors import PutUnavailable
from tests.shared.failing_disk import failing

WRITES = ("pwrite", "write", "ftruncate", "posix_fallocate", "link", "rename", "replace", "mkdir")
BODY = bytes(range(256)) * 2
FOREVER_MS = 2**62


class FullDisk:
    """The write number `full_from` and all later ones find no space, until `room_again`.

    A `pwrite` writes half of it first. Opening a new file is a write, too.
    """

    def __init__(self, monkeypatch):
        self.writes = 0
        self.full_from = None
        self.full_to = 0
        for name in WRITES:
            monkeypatch.setattr(disk, name, self._failing(name, getattr(os, name)))
        monkeypatch.setattr(disk, "open", self._open)

    def _count(self):
        self.writes += 1
        return self.full_from is not None and self.full_from < self.writes <= self.full_to

    def _failing(self, name, real):
        def call(*args):
            if self._count():
                if name == "pwrite":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        return call

    def _open(self, path, flags, *args):
        if flags & os.O_CREAT and not os.path.exists(path) and self._count():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.open(path, flags, *args)

    def full_after(self, number, writes=1 << 60):
        self.writes, self.full_from, self.full_to = 0, number, number + writes

    def space_again(self):
        self.full_from = None


class Life:
    """A master that puts, confirms and flushes; `acked` are the bodies that were confirmed."""

    def __init__(self, rig):
        self.rig = rig
        self.table = 0
        self.written = None
        rig.before_open = lambda store: setattr(store, "before_checkpoint", self.table_writes)
        self.store = rig.open_master()
        self.acked = []
        self.waiting = []
        self.refused = 0
        self.number = 0

    def table_writes(self):
        self.table += 1
        data = b"%d" % self.table
        return [lambda: replace_file(self.rig.folder / "table", data)]

    def put(self):
        body = b"%04d" % self.number + BODY
        self.number += 1
        try:
            result = self.rig.put(self.store, body, keys=b"k%d" % (self.number % 3))
        except PutUnavailable as error:
            assert error.response_code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert "the disk is full" in str(error)
            self.refused += 1
        else:
            self.waiting.append((body, result))
        self.end_turn()

    def end_turn(self):
        end = self.store.end_turn()
        self.store.advance_confirm_offset(end)
        while self.waiting and self.waiting[0][1].end_offset <= end:
            self.acked.append(self.waiting.pop(0)[0])

    def work(self, puts):
        for number in range(puts):
            self.put()
            if number % 4 == 3:
                self.store.checkpoints.flush_derived()

    def check(self):
        """All that was acknowledged is there: in the queue, densely numbered, and by key."""
        store = self.store
        assert self.rig.read_bodies(store) == self.acked
        queue = store._queues.find_or_create("T", 0)
        assert queue.consume_queue.max_offset == len(self.acked) <= queue.next_offset
        found = [
            record
            for key in ("k0", "k1", "k2")
            for record in store.queries.query_message("T", key, 999, 0, FOREVER_MS).parts
        ]
        assert len(found) == len(self.acked)


def writes_of_a_life(rig, full):
    full.full_after(1 << 60)
    Life(rig).work(20)
    return full.writes


@pytest.fixture
def full(monkeypatch, allocations_in_order):
    return FullDisk(monkeypatch)


def test_r45_wherever_the_disk_is_full_all_continues_with_disk_space(rig, full):
    """For every n: the n-th and later writes find no space, for some time; then there is space."""
    total = writes_of_a_life(rig, full)
    assert total > 90
    for number in range(total):
        full.space_again()
        rig.root = rig.folder / f"life-{number}"
        life = Life(rig)
        full.full_after(number)
        life.work(24)
        if number < total - 40:
            assert life.refused, number
            assert life.store.health.full and "No space left" in life.store.disk_space.reason
        life.check()
        full.space_again()
        life.store.checkpoints.flush_derived()
        life.store.checkpoints.flush_derived()
        life.end_turn()
        assert not life.store.disk_space.reason and not life.waiting
        before = life.refused
        life.work(8)
        assert life.refused == before, "puts are taken again"
        life.check()
        assert not life.store.health.has_failed and not life.store.trust.reason
        assert (rig.folder / "table").read_bytes() == b"%d" % life.table
        life.store.close()
        assert not (rig.root / "abort").exists()
        life.store = rig.open()
        life.check()
        life.store.close()


def test_r45_kill_minus_9_on_a_full_disk_loses_nothing_either(rig, full):
    """The same, and the process is killed while the disk is full; there is space at the start."""
    total = writes_of_a_life(rig, full)
    for number in range(0, total, 3):
        full.space_again()
        rig.root = rig.folder / f"killed-{number}"
        life = Life(rig)
        full.full_after(number)
        life.work(24)
        rig.kill(life.store)
        full.space_again()
        life.store = rig.open()
        assert not life.store.trust.reason
        assert life.store.prepare_master() >= 0
        life.store.advance_confirm_offset(life.store.max_phy_offset)
        bodies = rig.read_bodies(life.store)
        kept = len(life.acked)
        assert bodies[:kept] == life.acked
        assert bodies[kept:] == [body for body, _ in life.waiting][: len(bodies) - kept]
        life.acked, life.waiting = bodies, []
        life.check()
        life.work(4)
        life.check()
        life.store.abandon()


def test_r45_closing_on_a_full_disk_is_no_clean_stop_and_no_error(rig, full):
    life = Life(rig)
    life.work(10)
    full.full_after(0)
    life.work(10)
    life.store.close()
    assert (rig.root / "abort").exists()
    full.space_again()
    life.store = rig.open()
    assert not life.store.trust.reason
    life.store.prepare_master()
    life.store.advance_confirm_offset(life.store.max_phy_offset)
    assert rig.read_bodies(life.store)[: len(life.acked)] == life.acked


def test_r45_a_running_store_takes_puts_again_by_itself(rig, full):
    """With its threads and timers, as in a broker: no one calls anything but put."""

    async def play():
        fatal = []
        rig.config = msgspec.structs.replace(rig.config, flush_interval_consume_queue=20)
        life = Life(rig)
        life.store.start(asyncio.get_running_loop(), fatal.append)
        life.work(6)
        full.full_after(0)
        while not life.refused:
            life.put()
            await asyncio.sleep(0)
        refused, acked = life.refused, len(life.acked)
        full.space_again()
        while len(life.acked) < acked + 10:
            life.put()
            await asyncio.sleep(0.001)
        assert refused and not fatal
        life.check()
        life.store.close()

    asyncio.run(asyncio.wait_for(play(), 30))


def test_r45_a_master_that_leaves_its_role_forgets_what_it_could_not_write(rig, full):
    """1 records wait for space. 2 another master is elected. 3 its bytes come to their offsets."""
    life = Life(rig)
    life.work(3)
    end = life.store.max_phy_offset
    full.full_after(0)
    life.put()
    assert life.waiting and life.store.max_phy_offset == end
    with pytest.raises(OSError, match="No space left"):
        life.store.stop_writes()
    full.full_after(0, writes=1)
    assert life.store.stop_writes() == end
    assert not any(rig.segment().read_bytes()[end:]), "no half of a record stays"
    assert life.store._queues.get("T", 0).next_offset == 3
    life.waiting.clear()
    life.store.prepare_master()
    life.store.checkpoints.flush_derived()
    life.store.checkpoints.flush_derived()
    life.work(3)
    life.check()


def test_r45_a_slave_takes_nothing_more_while_its_queues_find_no_room(rig, full):
    master = Life(rig)
    master.work(12)
    log_bytes = rig.log_of(master.store)
    rig.before_open = lambda store: None
    slave = rig.beside("slave").open()
    half = len(log_bytes) // 2
    slave.slave_log.append_replicated(0, log_bytes[:half])
    slave.advance_confirm_offset(half)
    rooms = []
    slave.disk_space.on_space = lambda: rooms.append(slave.disk_space.reason)
    full.full_after(0)
    slave.checkpoints.flush_derived()
    with pytest.raises(OSError, match="No space left") as info:
        slave.slave_log.append_replicated(half, log_bytes[half:])
    assert disk.is_short(info.value) and slave.max_phy_offset == half
    full.space_again()
    slave.checkpoints.flush_derived()
    assert rooms == [""], "time to dial"
    slave.slave_log.append_replicated(half, log_bytes[half:])
    slave.advance_confirm_offset(len(log_bytes))
    assert rig.read_bodies(slave) == master.acked


def test_r45_a_tail_can_grow_though_somebody_keeps_the_exception(rig, full):
    """The kept exception held a slice of the tail: the next unit raised BufferError."""
    life = Life(rig)
    life.work(3)
    queue = life.store._queues.get("T", 0).consume_queue
    queue.append_unit(life.store.max_phy_offset, 100, 0)
    full.full_after(0)
    with pytest.raises(OSError, match="No space left") as kept:
        queue.write_tail()
    queue.append_unit(life.store.max_phy_offset + 100, 100, 0)
    full.space_again()
    queue.write_tail()
    assert queue.max_offset == 5 and kept.value.errno == errno.ENOSPC


def test_r45_expired_segments_go_though_the_epoch_list_finds_no_room(rig, full):
    """They are what makes space."""
    life = Life(rig)
    life.store.epochs.append(EpochEntry(1, 0))
    life.work(15)
    life.store.epochs.append(EpochEntry(2, life.store.max_phy_offset))
    life.work(28)
    life.store.checkpoints.flush_derived()
    full.full_after(0)
    rig.disk_ratio = 0.95
    assert life.store.expirer.clean_expired() >= 2
    assert not rig.segment(0).exists() and not rig.segment(1).exists()
    assert not life.store.appender.is_writable


def test_r45_a_sync_of_the_log_that_finds_no_room_is_a_failed_write_back(rig, store):
    """R40: thin storage is full, and the pages are lost. That does not pass by itself."""
    rig.put_confirmed(store, b"a")
    fatal = []
    store._on_fatal = fatal.append
    with failing("fdatasync * ENOSPC"), pytest.raises(OSError, match="No space left"):
        store.flush()
    assert fatal and store.trust.reason and store.health.has_failed


def test_too_little_room_for_a_segment_is_known_without_allocating_it(rig, store, monkeypatch):
    rig.put_confirmed(store, b"a")
    store.log.ensure_segment(8192)
    allocated = []
    monkeypatch.setattr(disk, "posix_fallocate", lambda *args: allocated.append(args))
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 8191)
    with pytest.raises(OSError, match="No space left"):
        store.log.ensure_segment(16384)
    assert not allocated


def test_r45_room_again_opens_no_replica_that_refuses_for_another_reason(rig, store):
    """1 a slave's disk is full. 2 there is space: it is a slave still, and becomes master later."""
    store.stop_writes()
    refusal = store.appender.refusal
    for reason in ("the disk is full", ""):
        store.appender.pause(reason)
        assert store.appender.refusal == refusal
    store.prepare_master()
    rig.put_confirmed(store, b"a")
    store.appender.pause("the disk is full")
    with pytest.raises(PutUnavailable, match="the disk is full"):
        rig.put(store, b"b")
    store.appender.refuse("another reason")
    store.appender.pause("")
    assert store.appender.refusal == "another reason"


def test_r45_a_put_after_records_that_wait_has_its_own_time(rig, full):
    """1 a record finds no space. 2 what expiry needs comes in a later turn, with that time."""
    life = Life(rig)
    life.work(1)
    full.full_after(0)
    life.put()
    _, waits = life.waiting[0]
    rig.now_ms += 5_000
    message = NewMessage(
        "T", 0, b"later", b"", 0, None, None, born_timestamp=rig.now_ms, born_host=rig.host
    )
    later = life.store.appender.put_though_full(message)
    assert later.store_timestamp == waits.store_timestamp + 5_000
    full.space_again()
    assert life.store.end_turn() == later.end_offset


def test_r45_a_put_that_found_no_segment_pauses_the_store(rig, full):
    """Its status then says that it refuses writes, and later puts do not ask the disk again."""
    life = Life(rig)
    life.store.log.preallocate_when_due = lambda: None
    while life.store.log.space > 2 * len(BODY):
        life.put()
    full.full_after(0)
    rest = life.store.log.space
    with pytest.raises(PutUnavailable, match="the disk is full"):
        rig.put(life.store, bytes(rest))
    assert not life.store.appender.is_writable
    asked = full.writes
    life.put()
    assert full.writes == asked and life.refused == 1
    full.space_again()
    life.store.checkpoints.flush_derived()
    life.work(3)
    life.check()


def test_r45_a_slave_takes_no_bytes_while_earlier_ones_wait_for_room(rig):
    """They repeat one error in the same words, so it is reported once."""
    store = rig.open()
    found = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/the/file")
    store.health.note_full(found)
    with pytest.raises(OSError, match="No space") as refused:
        store.slave_log.append_replicated(0, b"some")
    assert str(refused.value) == str(found) and store.max_phy_offset == 0


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_r45_there_is_room_again_when_a_whole_round_met_none(rig, store):
    """Not if something found no space meanwhile, and not while records of a turn wait."""
    space, health = store.disk_space, store.health
    health.note_full(no_space())
    probe = space.begin_probe()
    health.note_full(no_space())
    space._probed(probe)
    assert health.full, "the second one was in this round"
    probe = space.begin_probe()
    store.appender.pause("")
    rig.put(store, b"waits")
    space._probed(probe)
    assert health.full, "a record waits"
    store.end_turn()
    space._probed(space.begin_probe())
    assert not health.full and store.appender.is_writable


def test_r45_what_found_no_room_keeps_its_place_before_what_came_later(rig):
    """A checkpoint must not come before what it vouches for."""
    store, done = rig.open_master(), []
    refused = [True, True]

    def first():
        if refused:
            refused.pop()
            raise no_space()
        done.append(1)

    store.background.run_job(first)
    store.background.run_job(lambda: done.append(2))
    store.background.retry_jobs()
    assert done == [1, 2]


def test_r45_one_round_at_a_time_waits_for_the_disk(rig, store, monkeypatch):
    """One that found no space comes again by itself; a second one behind it would only pile up."""
    rig.put_confirmed(store, b"a")
    jobs = []
    monkeypatch.setattr(store.background, "run_job", jobs.append)
    store.checkpoints.flush_derived()
    finish, handed = jobs[-1], len(jobs)
    rig.put_confirmed(store, b"b")
    store.checkpoints.flush_derived()
    assert len(jobs) == handed
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(StoreCheckpoint, "flush", refusing)
        finish()
    store.checkpoints.flush_derived()
    assert len(jobs) == handed
    finish()
    store.checkpoints.flush_derived()
    assert len(jobs) > handed


def refusing(*_):
    raise no_space()


def test_r45_what_a_round_wrote_before_it_found_no_room_is_synced_by_the_next(rig, monkeypatch):
    """Index files were written, queue files were not: the checkpoint of the next round vouches for
    both."""
    store, synced = rig.open_master(), []
    rig.put_confirmed(store, b"a", keys=b"k")
    with monkeypatch.context() as patch:
        patch.setattr(ConsumeQueue, "write_back", refusing)
        store.checkpoints.flush_derived()
    monkeypatch.setattr(upkeep, "sync_below", lambda folder, paths: synced.extend(paths))
    store.checkpoints.flush_derived()
    index = [path for path in synced if path.is_file() and path.parent.name == "index"]
    assert len(index) == 1


class HeldLoop:
    """A loop whose timers run when the test moves its clock."""

    def __init__(self):
        self.now = 0.0
        self.timers = []

    def call_later(self, delay, work):
        timer = asyncio.TimerHandle(self.now + delay, work, (), self)
        self.timers.append(timer)
        return timer

    def call_soon_threadsafe(self, work):
        return self.call_later(0, work)

    def get_debug(self):
        return False

    def _timer_handle_cancelled(self, timer):
        pass

    def move(self, seconds):
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer.when() <= end]:
            timer = min(due, key=asyncio.TimerHandle.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when())
            if not timer.cancelled():
                timer._run()
        self.now = end


def test_r45_puts_are_taken_a_second_after_the_disk_has_space_again(rig, store):
    """Not only at the next round of expiry, 10 s later. At the edge of the level that round
    decides, so that one segment more or less does not switch puts on and off each second."""
    loop = HeldLoop()
    store.start(loop, lambda error: pytest.fail(str(error)))
    rig.disk_ratio = 0.91
    loop.move(10.5)
    assert not store.appender.is_writable and "90 %" in store.disk_space.reason
    loop.move(2)
    assert not store.appender.is_writable
    rig.disk_ratio = 0.895
    loop.move(2)
    assert not store.appender.is_writable, "at the edge"
    rig.disk_ratio = 0.89
    loop.move(1)
    assert store.appender.is_writable and not store.disk_space.reason
    rig.disk_ratio = 0.91
    loop.move(2)
    assert store.appender.is_writable, "refused by the next round only"
    rig.put_confirmed(store, b"a")
    store.close()


def test_r22_what_a_full_disk_cut_short_is_gone_before_other_bytes_come(rig, monkeypatch):
    """1. A slave's disk is full in the middle of a write: of ten records five are in the file. 2.
    It is elected, and writes one message of the same size in their place. 3. It is killed. The next
    start must not take the second of the old records for what follows."""
    master = rig.open_master()
    rig.put_confirmed(master, b"both")
    begin = master.max_phy_offset
    rig.put_confirmed(master, *[b"old %d" % n for n in range(10)])
    data = rig.log_of(master)
    slave = rig.beside("slave").open()
    slave.slave_log.append_replicated(0, data[:begin])
    full = FullDisk(monkeypatch)
    full.full_after(0)
    with pytest.raises(OSError, match="No space"):
        slave.slave_log.append_replicated(begin, data[begin:])
    full.space_again()
    slave.checkpoints.flush_derived()
    slave.prepare_master()
    end = rig.put_confirmed(slave, b"new 0")
    slave = rig.reopen(slave)
    assert (slave.max_phy_offset, slave.trust.reason) == (end, "")
    slave.advance_confirm_offset(end)
    assert rig.read_bodies(slave) == [b"both", b"new 0"]


def test_a_torn_end_that_a_cut_removed_zeroes_nothing(rig, monkeypatch):
    """1. A write in the second segment is cut short by a full disk. 2. A cut goes back into the
    first. 3. The next write zeroed the rest of the first, up to a segment of 1 GiB in one turn."""
    store = rig.open_master()
    while store.log.max_offset < store.log.segment_size:
        rig.put_confirmed(store, b"x" * 1000)
    full = FullDisk(monkeypatch)
    full.full_after(0)
    with pytest.raises(OSError, match="No space"):
        store.log.append(b"torn")
    full.space_again()
    store.log.drop_last_segment(None)
    store.log.zero_from(1000, store.log.segment_size)
    monkeypatch.setattr(store.log, "zero_from", Mock())
    store.log.append(b"new")
    store.log.zero_from.assert_not_called()
