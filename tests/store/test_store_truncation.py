"""Cutting the log: R22's order survives a crash between any two steps, R23 keeps promises."""

import shutil

import pytest

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.store import upkeep
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.commit_log import Segment
from batonmq.store.errors import StoreFailedError, TruncationRefused
from tests.shared.cut_steps import STEPS
from tests.shared.failing_disk import failing


class Crash(Exception):
    """The process died here."""


def store_with_two_epochs(rig):
    """20 records in 3 segments, 5 of them confirmed, epoch 2 from the 12th on; where that is."""
    store = rig.open_master()
    store.epochs.append(EpochEntry(1, 0))
    puts = [rig.put(store, b"%02d" % n + bytes(1000), uniq_key=b"U%d" % n) for n in range(20)]
    store.end_turn()
    store.epochs.append(EpochEntry(2, puts[12].physical_offset))
    store.advance_confirm_offset(puts[4].end_offset)
    store.checkpoints.flush_derived()
    return store, puts


def check_cut(rig, store, puts, kept):
    """Nothing of the cut part is left anywhere, and the store continues from the cut."""
    cut = puts[kept].physical_offset
    assert store.max_phy_offset == cut and not store.trust.reason
    stored = StoreCheckpoint(rig.root / "checkpoint").confirm_phy_offset
    assert stored <= min(cut, puts[4].end_offset), "what was not confirmed is not by a cut"
    segments = sorted((rig.root / "commitlog").glob("0*"))
    tail = b"".join(path.read_bytes() for path in segments)[cut:]
    assert tail == bytes(len(tail))
    assert not (rig.root / "truncation.intent").exists()
    assert [entry.epoch for entry in store.epochs.entries] == [1]
    assert store.prepare_master() == cut
    assert rig.put(store, b"new").queue_offset == kept
    store.advance_confirm_offset(store.end_turn())
    bodies = [body[:3] for body in rig.read_bodies(store)]
    assert bodies == [b"%02d\0" % n for n in range(kept)] + [b"new"]
    assert len(store.queries.query_message("T", f"U{kept - 1}", 9, 0, 2**62).parts) == 1
    assert store.queries.query_message("T", f"U{kept}", 9, 0, 2**62).parts == []


def test_r22_a_cut_takes_queues_index_files_and_epochs_with_it(rig):
    store, puts = store_with_two_epochs(rig)
    store.slave_log.truncate_to(puts[9].physical_offset)
    check_cut(rig, store, puts, 9)


def test_r22_a_cut_is_finished_though_an_operator_deletes_what_was_kept_aside(rig):
    store, puts = store_with_two_epochs(rig)
    folder = rig.root / "truncated"
    store.truncation.after_step = lambda step: step == "intent" and shutil.rmtree(folder)
    store.slave_log.truncate_to(puts[9].physical_offset)
    check_cut(rig, store, puts, 9)


def test_r22_the_steps_come_in_their_order_under_an_intent_that_goes_last(rig):
    store, puts = store_with_two_epochs(rig)
    intent, seen = rig.root / "truncation.intent", []
    store.truncation.after_step = lambda step: seen.append((step, intent.exists()))
    store.slave_log.truncate_to(puts[9].physical_offset)
    assert seen == [(step, step != "done") for step in STEPS]


def test_r22_an_intent_that_cannot_be_stored_changes_nothing(rig):
    store, puts = store_with_two_epochs(rig)
    store.flush()
    store.checkpoints.flush_derived()

    def files():
        names = ("checkpoint", "epochFileCheckpoint", "consumequeue/**/0*", "commitlog/0*")
        found = [path for name in names for path in rig.root.glob(name) if path.is_file()]
        # A thread makes segments ahead of the log.
        ahead = [path for path in found if path.parent.name == "commitlog" and int(path.name) > end]
        return {path: path.read_bytes() for path in found if path not in ahead}

    end = store.max_phy_offset
    before = files()
    with failing("open *truncation.intent* EIO"), pytest.raises(StoreFailedError, match="Input"):
        store.slave_log.truncate_to(puts[2].physical_offset, unclean_epoch=True)
    assert files() == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "truncated"),
        ('{"offset":0,"end_offset":"9","aside":""}', "Expected `int`"),
        ('{"offset":0,"end_offset":9,"aside":"","version":2}', "its version is 2, 1 is known here"),
    ],
)
def test_r37_an_intent_that_this_version_did_not_write_is_not_carried_out(rig, text, why):
    """A newer version's may mean another cut; that was taken for ours."""
    store, _ = store_with_two_epochs(rig)
    rig.kill(store)
    (rig.root / "truncation.intent").write_text(text)
    before = rig.segment().read_bytes()
    with pytest.raises(CorruptLogError, match=f"no intent of a cut: .*{why}"):
        rig.open()
    assert rig.segment().read_bytes() == before


def test_r22_a_cut_of_confirmed_bytes_takes_their_index_with_it(rig):
    store, puts = store_with_two_epochs(rig)
    store.advance_confirm_offset(puts[11].end_offset)
    assert len(store.queries.query_message("T", "U9", 9, 0, 2**62).parts) == 1
    store.slave_log.truncate_to(puts[9].physical_offset, unclean_epoch=True)
    store.prepare_master()
    for n in range(9, 12):  # their places are taken by records of the same size, of other keys
        rig.put(store, b"%02d" % n + bytes(1000), uniq_key=b"V%d" % n)
    store.advance_confirm_offset(store.end_turn())
    found = [len(store.queries.query_message("T", f"{k}9", 9, 0, 2**62).parts) for k in "UV"]
    assert found == [0, 1]
    assert store.queries.query_message("T", "U8", 9, 0, 2**62).parts


@pytest.mark.parametrize("step", STEPS)
def test_r22_a_crash_after_any_step_is_resumed_at_the_next_start(rig, step):
    """1 the slave cuts, and dies behind one step. 2 it starts: the cut is finished.

    Before `intent` nothing has happened; from then on there is no way back.
    """
    store, puts = store_with_two_epochs(rig)

    def die(done):
        if done == step:
            raise Crash(step)

    store.truncation.after_step = die
    with pytest.raises(Crash):
        store.slave_log.truncate_to(puts[9].physical_offset)
    rig.kill(store)
    check_cut(rig, rig.open(), puts, 9)


def test_r23_a_cut_below_the_own_confirmed_offset_is_refused(rig):
    """It proves a broken promise somewhere; only an unclean epoch may ask for it."""
    store, puts = store_with_two_epochs(rig)
    with pytest.raises(TruncationRefused) as refused:
        store.slave_log.truncate_to(puts[3].physical_offset)
    assert f"confirmOffset {puts[4].end_offset}" in str(refused.value)
    assert len(rig.read_bodies(store)) == 5 and store.max_phy_offset >= puts[-1].end_offset
    store.slave_log.truncate_to(puts[3].physical_offset, unclean_epoch=True)
    assert store.confirm_offset == puts[3].physical_offset
    rig.kill(store)
    check_cut(rig, rig.open(), puts, 3)


def test_r23_what_is_confirmed_and_not_yet_shown_to_readers_is_not_cut(rig, master):
    """A slave that dispatches more slowly than it is told: the cut lies between the two."""
    puts = [rig.put(master, b"%d" % n + bytes(500)) for n in range(4)]
    data = bytes(master.log.view(0, master.end_turn()))
    slave = rig.beside("slave").open()
    slave.slave_log.append_replicated(0, data)
    slave._dispatcher.advance(puts[-1].end_offset, 600)
    assert slave.confirm_offset < puts[2].physical_offset
    with pytest.raises(TruncationRefused) as refused:
        slave.slave_log.truncate_to(puts[2].physical_offset)
    assert f"confirmOffset {puts[-1].end_offset}" in str(refused.value)
    assert slave.max_phy_offset == len(data)


def test_r24_what_the_checkpoint_says_is_confirmed_does_not_fall_at_a_damaged_start(rig, store):
    """1. 20 records are confirmed, the checkpoint says so. 2. One rots, so that less is dispatched.
    3. The next checkpoint still says how far it was: what is missing then is damage."""
    puts = [rig.put(store, b"%02d" % n + bytes(300)) for n in range(20)]
    store.advance_confirm_offset(store.end_turn())
    end = store.confirm_offset
    store.flush()
    store.checkpoints.flush_derived()
    rig.kill(store)
    shutil.rmtree(rig.root / "consumequeue")
    rig.flip(rig.segment(0), puts[7].physical_offset + 120)
    store = rig.open()
    assert store.trust.reason and store.confirm_offset < end
    store.checkpoints.flush_derived()
    rig.kill(store)
    assert StoreCheckpoint(rig.root / "checkpoint").confirm_phy_offset == end


def test_r23_the_beginning_of_a_confirmed_record_is_no_confirmed_record(rig, master):
    """1 the master confirms a record of which this slave has only a part. 2 a cut to the start of
    that record takes nothing back."""
    first = rig.put(master, b"whole")
    second = rig.put(master, bytes(500))
    data = bytes(master.log.view(0, master.end_turn()))
    slave = rig.beside("slave").open()
    slave.slave_log.append_replicated(0, data[: second.physical_offset + 100])
    slave.advance_confirm_offset(second.end_offset)
    with pytest.raises(TruncationRefused):
        slave.slave_log.truncate_to(0)
    slave.slave_log.truncate_to(first.end_offset)
    assert slave.max_phy_offset == slave.confirm_offset == first.end_offset


def test_r23_the_folders_of_cut_bytes_are_synced(rig, monkeypatch):
    """Their names, too: the folder for the tail that is copied, and the files that are moved."""
    store, puts = store_with_two_epochs(rig)
    synced, real_open, real_fsync, paths = [], disk.open, disk.fsync, {}

    def opens(path, *args, **more):
        fd = real_open(path, *args, **more)
        paths[fd] = str(path)
        return fd

    def syncs(fd):
        synced.append(paths.get(fd))  # None: of another thread, which opened it before
        real_fsync(fd)

    monkeypatch.setattr(disk, "open", opens)
    monkeypatch.setattr(disk, "fsync", syncs)
    store.slave_log.truncate_to(puts[6].physical_offset)
    (kept,) = (rig.root / "truncated").iterdir()
    assert any(path.suffix != ".tail" for path in kept.iterdir()), "a file was moved"
    assert str(kept.parent) in synced and synced[synced.index(str(kept.parent)) :].count(str(kept))


@pytest.mark.parametrize(
    ("limit", "value", "kept"),
    [
        ("truncated_log_max_sets", 2, ["000011", "000012"]),
        ("truncated_log_max_bytes", 2 * 8192, ["000011", "000012"]),
        ("truncated_log_max_bytes", 1, ["000012"]),
    ],
)
def test_r23_kept_sets_are_bounded_and_the_newest_stays_whatever_its_size(rig, limit, value, kept):
    """Each set here is one segment file."""
    store = rig.open_master(**{limit: value})
    for number in range(12):
        store.prepare_master()
        rig.put(store, b"cut %d" % number)
        store.end_turn()
        store.slave_log.truncate_to(0)
    folders = sorted((rig.root / "truncated").iterdir())
    assert [folder.name[:6] for folder in folders] == kept
    assert b"cut 11" in b"".join(path.read_bytes() for path in folders[-1].iterdir())


def test_a_cut_without_keeping_leaves_no_copy(rig):
    store, puts = store_with_two_epochs(rig)
    store.slave_log.truncate_to(puts[9].physical_offset, keep_aside=False)
    assert not (rig.root / "truncated").exists()
    check_cut(rig, store, puts, 9)


def test_a_cut_within_a_record_is_refused(rig):
    store, puts = store_with_two_epochs(rig)
    for number in (9, 3):
        with pytest.raises(TruncationRefused, match="no record ends there"):
            store.slave_log.truncate_to(puts[number].physical_offset + 7, unclean_epoch=True)
    assert store.max_phy_offset >= puts[-1].end_offset


def test_an_unclean_cut_at_the_last_record_of_a_segment_is_done(rig):
    """1. A message is the last that fits into its segment; a blank follows it. 2. It and later ones
    are confirmed. 3. An unclean election dropped all behind it: the cut begins at the blank."""
    store, puts = store_with_two_epochs(rig)
    store.advance_confirm_offset(store.max_phy_offset)
    last = next(n for n, put in enumerate(puts) if puts[n + 1].physical_offset > put.end_offset)
    end = puts[last].end_offset
    assert end % 8192 and puts[last + 1].physical_offset == 8192
    for within in (end + 1, end + 8):
        with pytest.raises(TruncationRefused, match="no record ends there"):
            store.slave_log.truncate_to(within, unclean_epoch=True)
    store.slave_log.truncate_to(end, unclean_epoch=True)
    assert store.max_phy_offset == store.confirm_offset == end
    store = rig.reopen(store)
    assert store.max_phy_offset == end and not store.trust.reason
    assert store.advance_confirm_offset(end) == end and len(rig.read_bodies(store)) == last + 1
    assert rig.segment().read_bytes()[end:] == bytes(8192 - end)
    store.prepare_master()
    assert rig.put(store, bytes(1000)).physical_offset == 8192
    store.end_turn()
    rig.kill(store)
    assert rig.open().max_phy_offset > 8192


def test_a_cut_at_or_above_the_end_does_nothing(rig):
    store, _ = store_with_two_epochs(rig)
    end = store.max_phy_offset
    store.slave_log.truncate_to(end)
    store.slave_log.truncate_to(end + 5)
    assert store.max_phy_offset == end and store.epochs.last_epoch == 2


def test_no_checkpoint_speaks_of_bytes_that_were_cut(rig):
    """1 a flush round is under way in its thread. 2 the log is cut. 3 the round is void."""
    store, puts = store_with_two_epochs(rig)
    store.advance_confirm_offset(puts[15].end_offset)
    late_round = store.checkpoints.begin()
    assert late_round is not None
    store.slave_log.truncate_to(puts[5].physical_offset, unclean_epoch=True)
    store.checkpoints.finish(late_round, [], [])
    store = rig.reopen(store)
    assert not store.trust.reason
    assert store.confirm_offset == store.max_phy_offset == puts[5].physical_offset
    assert store.log.flushed_offset <= store.max_phy_offset


def test_a_sync_that_a_cut_overtakes_vouches_for_nothing_behind_the_cut(rig, store, monkeypatch):
    """1. The flush thread syncs up to the end. 2. Meanwhile the log is cut, and grows again. 3. The
    new bytes were never synced."""
    puts = [rig.put(store, b"%d" % n + bytes(500)) for n in range(4)]
    end = store.end_turn()
    real = Segment.datasync

    def cut_meanwhile(segment):
        real(segment)
        monkeypatch.setattr(Segment, "datasync", real)
        store.slave_log.truncate_to(puts[1].physical_offset)
        store.prepare_master()
        rig.put(store, bytes(1500))
        assert store.end_turn() > puts[2].end_offset

    monkeypatch.setattr(Segment, "datasync", cut_meanwhile)
    store.log.datasync_to(end)
    assert store.log.flushed_offset <= puts[1].physical_offset
    store.flush()
    assert store.log.flushed_offset == store.max_phy_offset


def test_r24_a_log_that_ends_with_its_last_segment_survives_an_unclean_stop(rig):
    """1 the slave cuts its log where a segment begins, so that it ends with the segment before; 2
    it is killed. At the next start no segment holds the log's end, and all of them stay."""
    store, puts = store_with_two_epochs(rig)
    size = store.log.segment_size
    begins = next(p for p in puts[5:] if p.physical_offset % size == 0)
    store.slave_log.truncate_to(begins.physical_offset)
    kept = begins.queue_offset
    store = rig.reopen(store)
    assert store.max_phy_offset == begins.physical_offset and not store.trust.reason
    store.advance_confirm_offset(store.max_phy_offset)
    assert [body[:2] for body in rig.read_bodies(store)] == [b"%02d" % n for n in range(kept)]


def test_what_comes_in_place_of_cut_bytes_is_neither_flushed_nor_checked_yet(rig):
    """1 all is on the disk. 2 a cut. 3 as many bytes come again: they are on no disk, and a bad
    record among them is refused."""
    master, puts = store_with_two_epochs(rig)
    begin, end = puts[9].physical_offset, puts[11].end_offset
    good = bytes(master.log.view(begin, end - begin))
    master.close()
    store = rig.open()
    store.advance_confirm_offset(puts[4].end_offset)
    assert store.flush() == store.max_phy_offset
    store.slave_log.truncate_to(begin)
    assert store.log.flushed_offset == begin
    bad = bytearray(good)
    bad[200] ^= 1
    with pytest.raises(CorruptLogError):
        store.slave_log.append_replicated(begin, bytes(bad))
    assert store.slave_log.drop_unverified() == begin
    store.slave_log.append_replicated(begin, good)
    assert store.log.flushed_offset == begin
    assert store.flush() == begin + len(good)


def test_a_sync_covers_every_segment_that_was_written_since_the_last(rig, store, monkeypatch):
    synced = []
    monkeypatch.setattr(Segment, "datasync", lambda segment: synced.append(segment.start_offset))
    for _ in range(20):
        rig.put(store, bytes(1000))
    end = store.end_turn()
    store.log.datasync_to(end)
    assert synced == [0, 8192, 16384] and store.log.flushed_offset == end
    rig.put(store, b"one more")
    store.log.datasync_to(store.end_turn())
    assert synced[3:] == [16384]


def test_r28_what_comes_in_place_of_cut_bytes_is_not_confirmed_by_what_was(rig):
    """An unclean election dropped what was confirmed; the new master's bytes are not yet."""
    master, puts = store_with_two_epochs(rig)
    begin, end = puts[2].physical_offset, puts[4].end_offset
    again = bytes(master.log.view(begin, end - begin))
    master.close()
    store = rig.open()
    store.advance_confirm_offset(end)
    store.slave_log.truncate_to(begin, unclean_epoch=True)
    store.slave_log.append_replicated(begin, again)
    store.advance_confirm_offset(puts[2].end_offset)
    assert store.confirm_offset == puts[2].end_offset and len(rig.read_bodies(store)) == 3


def test_r23_a_cut_at_the_first_byte_of_a_file_keeps_that_file(rig):
    store, puts = store_with_two_epochs(rig)
    (first,) = [put for put in puts if put.physical_offset == 8192]
    whole = rig.segment(1).read_bytes()
    store.slave_log.truncate_to(first.physical_offset)
    (kept,) = (rig.root / "truncated").iterdir()
    assert (kept / rig.segment(1).name).read_bytes() == whole
    assert store.max_phy_offset == 8192


def test_r24_a_checkpoint_tells_of_what_its_round_has_synced(rig):
    """More is put and shown while the round waits for the disk."""
    store, puts = store_with_two_epochs(rig)
    store.advance_confirm_offset(puts[9].end_offset)
    running = store.checkpoints.begin()
    store.advance_confirm_offset(puts[15].end_offset)
    store.checkpoints.finish(running, [], [])
    stored = StoreCheckpoint(rig.root / "checkpoint")
    assert stored.recovery_offset == stored.confirm_phy_offset == puts[9].end_offset


def test_r40_a_round_during_which_the_store_fails_writes_no_checkpoint(rig, monkeypatch):
    store, puts = store_with_two_epochs(rig)
    store.advance_confirm_offset(puts[9].end_offset)
    running = store.checkpoints.begin()
    before = (rig.root / "checkpoint").read_bytes()
    failed = OSError(5, "the disk failed")
    monkeypatch.setattr(upkeep, "sync_below", lambda *_: store.log.health.give_up(failed))
    with pytest.raises(StoreFailedError):
        store.checkpoints.finish(running, [], [])
    assert (rig.root / "checkpoint").read_bytes() == before


def test_r27_no_checkpoint_speaks_of_a_log_that_began_anew_since(rig):
    """Empty as well: nothing of it was cut."""
    store = rig.open()
    store.slave_log.reset_for_empty_start(2 * 8192)
    late_round = store.checkpoints.begin()
    store.slave_log.reset_for_empty_start(8192)
    store.checkpoints.finish(late_round, [], [])
    store = rig.reopen(store)
    assert not store.trust.reason and store.confirm_offset == store.max_phy_offset == 8192


def test_r44_after_a_cut_a_queue_ends_where_the_log_does(rig):
    """Offsets of groups are set back to that end, here as well as at the new master."""
    store, puts = store_with_two_epochs(rig)
    assert store.queries.next_offset_in_queue("T", 0) == 20
    store.slave_log.truncate_to(puts[9].physical_offset)
    assert store.queries.next_offset_in_queue("T", 0) <= 9
