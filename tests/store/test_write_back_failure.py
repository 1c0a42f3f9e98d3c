"""R40: a write-back that failed is for good, whichever thread meets it.

The kernel reports a write-back error once per descriptor and takes the lost pages for clean: the
next fdatasync returns 0. So the fake here fails once and then says that all is well.
"""

import asyncio
import errno
import functools
import itertools
import os
import threading
from unittest.mock import Mock

import pytest

from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.store import recovery, suspicion, upkeep
from batonmq.store.disk_health import StoreHealth
from batonmq.store.errors import PutRefused, StoreFailedError
from tests.shared.failing_disk import failing


class OnceFailing:
    """fdatasync that fails at the call number `fail_at` (from 0), and then returns 0 again.

    `durable_end`: the end of the log that is on the disk for sure.
    """

    def __init__(self, fail_at=-1):
        self.fail_at = fail_at
        self.calls = 0
        self.failed_path = None
        self.store = None
        self.durable_end = 0

    def __call__(self, fd):
        number, self.calls = self.calls, self.calls + 1
        path = os.readlink(f"/proc/self/fd/{fd}")
        if number == self.fail_at:
            self.failed_path = path
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fdatasync(fd)
        if "/commitlog/" in path and self.failed_path is None and self.store is not None:
            self.durable_end = self.store.max_phy_offset

    @property
    def log_failed(self):
        return self.failed_path is not None and "/commitlog/" in self.failed_path


def live(rig, sync):
    """A life with every kind of sync; ends as the broker does: fatal, then close."""
    store = rig.open_master()
    sync.store = store
    fatal = []
    store._on_fatal = fatal.append
    for body in (b"a", b"b", b"c"):
        put = functools.partial(rig.put_confirmed, store, body, keys=b"k")
        for step in (put, store.flush, store.checkpoints.flush_derived):
            try:
                step()
            except OSError as error:
                store._fail(error)
            except (PutRefused, StoreFailedError):
                assert fatal
    try:
        store.close()
    except OSError:
        assert fatal or sync.calls > sync.fail_at
    return store


def count_syncs(rig, monkeypatch):
    sync = OnceFailing()
    monkeypatch.setattr(disk, "fdatasync", sync)
    live(rig, sync)
    assert sync.calls > 8
    return sync.calls


def test_r40_whatever_sync_fails_once_nothing_counts_as_durable_after_it(rig, monkeypatch):
    """For each sync of a life: it fails once, all later ones say 0, the broker closes, starts."""
    total = count_syncs(rig, monkeypatch)
    seen_log = seen_other = seen_index = 0
    for number in range(total):
        rig.root = rig.folder / f"life-{number}"
        sync = OnceFailing(number)
        monkeypatch.setattr(disk, "fdatasync", sync)
        store = live(rig, sync)
        assert sync.failed_path is not None
        if "/index/" in f"{sync.failed_path}/":
            seen_index += 1
            assert not store.health.has_failed and store.health.index_failure
            monkeypatch.setattr(disk, "fdatasync", os.fdatasync)
            assert rig.open()._files.index.was_cut, "all of it is built again"
            continue
        assert store.health.has_failed, "an error of a queue is not forgotten either"
        assert (rig.root / "abort").exists(), "not a clean stop"
        if sync.log_failed:
            seen_log += 1
            assert store.flushed_offset_at_end <= sync.durable_end
        else:
            seen_other += 1
        monkeypatch.setattr(disk, "fdatasync", os.fdatasync)
        again = rig.open()
        assert again.trust.reason, "suspect"
        assert (again._files.checkpoint.recovery_offset or 0) <= sync.durable_end
        assert again.trust.damage.offset <= sync.durable_end
        assert again.trust.discard_damaged_tail() <= sync.durable_end
        again.abandon()
    assert seen_log >= 3 and seen_other >= 3 and seen_index


@pytest.fixture(autouse=True)
def remember_the_end(monkeypatch):
    """What counted as flushed when the files were closed."""
    from batonmq.store.message_store import MessageStore

    real = MessageStore._abandon_files

    def noted(self):
        self.flushed_offset_at_end = self.log.flushed_offset
        real(self)

    monkeypatch.setattr(MessageStore, "_abandon_files", noted)


def test_r40_the_second_thread_does_not_take_lost_pages_for_synced(rig, store):
    """1 the flush thread meets EIO. 2 before the loop hears of it, the round of the checkpoint
    syncs the same file. 3 the loop hears of it."""
    synced = rig.put_confirmed(store, b"a")
    store.checkpoints.flush_derived()
    end = rig.put_confirmed(store, b"b", b"c")
    fatal = []
    store._on_fatal = fatal.append
    with failing("fdatasync * EIO once"), pytest.raises(OSError, match="Input/output") as info:
        store.log.datasync_to(store.log.max_offset)
    store.checkpoints.flush_derived()
    with pytest.raises(OSError, match="Input/output"):
        store.log.datasync_to(end)
    assert (store.log.flushed_offset, store._files.checkpoint.recovery_offset) == (synced, synced)
    store._fail(info.value)
    assert store.trust.damage.offset == synced
    store.trust.clear_suspect()
    assert store.trust.reason, "nothing in this process ends it"
    with pytest.raises(PutRefused, match="has failed"):
        rig.put_confirmed(store, b"d")
    store = rig.reopen(store)
    assert store.trust.discard_damaged_tail() == synced


@pytest.mark.parametrize("is_loop_busy", [False, True])
async def test_r40_both_threads_wait_for_the_device_that_gives_up(rig, monkeypatch, is_loop_busy):
    """1 the flush thread's sync hangs. 2 the round of the checkpoint waits for the same segment.
    3 the device gives up: one of the two is told, both must not continue."""
    hangs, may_fail, second_done = threading.Event(), threading.Event(), threading.Event()
    threads = []

    def sync(fd):
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            hangs.set()
            may_fail.wait(10)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fdatasync(fd)

    loop = asyncio.get_running_loop()
    store = rig.open_master(flush_interval_commit_log=600_000)
    synced = rig.put_confirmed(store, b"a")
    store.checkpoints.flush_derived()
    fatal = loop.create_future()
    store.start(loop, lambda error: fatal.done() or fatal.set_result(error))
    monkeypatch.setattr(disk, "fdatasync", sync)
    rig.put_confirmed(store, b"b", b"c")
    store.background.request_flush()
    await asyncio.to_thread(hangs.wait, 10)
    store.checkpoints.flush_derived()
    jobs = store.background._jobs
    jobs.submit(second_done.set)  # never: the job before it raises
    may_fail.set()
    if is_loop_busy:
        jobs._thread.join(10)
    await asyncio.wait_for(fatal, 10)
    jobs._thread.join(10)
    assert threads == ["store-flush"], "no sync after the one that failed"
    assert not second_done.is_set()
    assert store.log.flushed_offset == synced == store._files.checkpoint.recovery_offset
    assert store.trust.damage.offset == synced
    store.close()
    assert (rig.root / "abort").exists()
    assert rig.open().trust.reason


def test_r40_a_suspicion_that_could_not_be_stored_at_once_is_there_at_the_next_start(
    rig, store, monkeypatch
):
    """1 fdatasync fails once. 2 the disk refuses the `suspect` file, too. 3 the broker closes."""
    synced = rig.put_confirmed(store, b"a")
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, b"b", b"c")
    store._on_fatal = lambda error: None
    refuse = Mock(side_effect=OSError(errno.EIO, "the disk is away for a moment"))
    monkeypatch.setattr(suspicion, "replace_file", refuse)
    monkeypatch.setattr(suspicion, "show_file", refuse)
    with failing("fdatasync * EIO once"), pytest.raises(OSError, match="Input/output"):
        store.flush()
    assert store.trust.reason and not (rig.root / "suspect").exists()
    monkeypatch.undo()
    store.close()
    assert (rig.root / "abort").exists()
    store = rig.open()
    assert store.trust.damage.offset == synced and store.trust.damage.kind == "fsync"


def test_r40_a_suspicion_that_is_not_durable_outlives_a_kill(rig, store, monkeypatch):
    """The disk syncs no file any more, but takes one: the page cache has it for the next start."""
    rig.put_confirmed(store, b"a")
    store._on_fatal = lambda error: None
    refuse = Mock(side_effect=OSError(errno.EIO, "the disk syncs nothing"))
    monkeypatch.setattr(suspicion, "replace_file", refuse)
    with failing("fdatasync * EIO once"), pytest.raises(OSError, match="Input/output"):
        store.flush()
    rig.kill(store)
    monkeypatch.undo()
    assert rig.open().trust.damage.kind == "fsync"


def test_r24_r40_damage_that_a_full_disk_did_not_let_note_is_noted_when_the_store_is_left(
    rig, store, monkeypatch
):
    """The log itself did not fail: no one else notes the suspicion again."""
    end = rig.put_confirmed(store, b"a", b"b")
    refuse = Mock(side_effect=OSError(errno.ENOSPC, "no space for a moment"))
    monkeypatch.setattr(suspicion, "replace_file", refuse)
    monkeypatch.setattr(suspicion, "show_file", refuse)
    store.trust.note_damage(CorruptLogError(store.log.file_of(0), 0, "a flipped bit"))
    assert store.trust.reason and not (rig.root / "suspect").exists()
    monkeypatch.undo()
    store.abandon()
    store = rig.open()
    assert store.trust.damage is not None and "a flipped bit" in store.trust.damage.what
    assert store.trust.damage.end_offset >= end


def test_r40_all_above_the_checkpoint_is_written_again_once(rig, store, monkeypatch):
    """The pages that could not be written count as clean: a sync alone would bring none of them to
    the disk. 1. a is below the checkpoint, b is synced, c and d are not when the sync fails. 2. The
    next start writes b, c and d again, in several pieces, and their index entries. 3. One after a
    clean stop writes nothing."""
    checkpoint = rig.put_confirmed(store, b"a" * 40, keys=b"k")
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, b"b" * 40, keys=b"k")
    store.flush()
    end = rig.put_confirmed(store, b"c" * 40, b"d" * 40, keys=b"k")
    store._files.index.write_back()
    store._on_fatal = lambda error: None
    with failing("fdatasync * EIO once"), pytest.raises(OSError, match="Input/output"):
        store.flush()
    rig.kill(store)
    written, indexed = [], set()
    real = disk.pwrite

    def pwrite(fd, data, position):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/commitlog/" in path:
            written.append((position, position + len(data)))
        if "/index/" in path:
            indexed.update(range(position, position + len(data)))
        return real(fd, data, position)

    monkeypatch.setattr(disk, "pwrite", pwrite)
    monkeypatch.setattr(recovery, "_AGAIN_BYTES", 100)
    store = rig.open()
    assert store.log.flushed_offset == end
    assert written[0][0] == checkpoint and written[-1][1] == end and len(written) > 2
    assert all(before[1] == after[0] for before, after in itertools.pairwise(written))
    store.advance_confirm_offset(end)
    assert len(store.queries.query_message("T", "k", 9, 0, 2**62).parts) == 4
    store.checkpoints.flush_derived()
    first = 40 + 4 * store.config.max_hash_slot_num + 20  # the file's header, slots, entry 0
    assert indexed >= set(range(first + 20, first + 80)), "the entries of b, c and d"
    written.clear()
    store.close()
    assert rig.open().trust.reason, "it ends caught up with a master"
    assert written == []


def test_r40_the_first_failure_of_the_log_is_the_one_that_is_noted(rig, store):
    """Whatever ends the process then: no place in the log is known of another reason."""
    rig.put_confirmed(store, b"a")
    health = store.health
    health.log_failed(OSError(errno.EIO, "the first one"))
    health.log_failed(OSError(errno.EIO, "a later one"))
    store.trust.note_failure(RuntimeError("a bug that came of it"))
    assert store.trust.damage.kind == "fsync" and "the first one" in store.trust.damage.what


def test_r40_an_unreadable_suspicion_is_one_all_the_same(rig):
    """It was written without a sync, and the power went."""
    rig.open_master().close()
    (rig.root / "suspect").write_bytes(b"")
    assert "cannot be read" in rig.open().trust.reason


async def test_r40_a_job_that_fails_while_the_store_closes_leaves_no_clean_stop(
    rig, store, monkeypatch
):
    """The last jobs run within `close`, when the loop hears of nothing any more."""

    store.start(asyncio.get_running_loop(), lambda error: None)
    rig.put_confirmed(store, b"a")
    broken = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    store.background.run_job(broken)
    with pytest.raises(OSError, match="Input/output"):
        store.close()
    assert (rig.root / "abort").exists()
    assert rig.open().trust.reason


async def test_an_abandoned_store_writes_nothing_more(rig, monkeypatch):
    store = rig.open_master(flush_interval_commit_log=600_000)
    store.start(asyncio.get_running_loop(), lambda error: None)
    rig.put_confirmed(store, b"a", keys=b"k")
    calls = []
    for name in ("pwrite", "fdatasync", "fsync", "replace", "unlink"):
        monkeypatch.setattr(disk, name, lambda *args, name=name: calls.append(name))
    store.abandon()
    assert calls == []


def test_r40_a_failed_write_of_the_log_is_noted_there_and_nothing_is_written_after_it(
    store, monkeypatch
):
    """Whoever wrote: a master's turn, a slave's bytes, a blank."""
    log = store.log
    log.ensure_segment(0)
    failed = OSError(errno.EIO, os.strerror(errno.EIO))

    def fail(*_):
        raise failed

    with monkeypatch.context() as broken:
        broken.setattr(disk, "pwrite", fail)
        with pytest.raises(OSError, match="Input/output"):
            log.append(b"data")
    assert log.health.log_failure is failed and log.max_offset == 0
    with pytest.raises(StoreFailedError):
        log.append(b"data")


def test_r40_a_sync_of_derived_files_that_found_no_room_is_a_failed_write_back(
    tmp_path, monkeypatch
):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(upkeep, "sync_below", full)
    with pytest.raises(OSError, match="not written back") as failed:
        upkeep._sync_derived(tmp_path, [])
    assert failed.value.errno == errno.EIO


def test_r40_a_sync_of_the_log_that_found_no_room_does_not_pass():
    """Its pages are lost, as after any other failed write-back."""
    health, full = StoreHealth(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert health.passes(full)
    health.log_failed(full)
    assert not health.passes(full) and health.has_failed
