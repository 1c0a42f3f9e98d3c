"""When a log is suspect, what is remembered of it, and what ends it (R17, R24)."""

import errno
import os
from contextlib import suppress
from unittest.mock import Mock

import pytest
from failing_disk import failing, walk_errors

from batonmq.epoch.entry import EpochEntry
from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.store import message_store
from batonmq.store.errors import PutUnavailable
from batonmq.store.message_store import MessageStore
from batonmq.store.recovery import ConfirmedByLog
from batonmq.store.suspicion import Suspicion

SAFE = {"flush_disk_type": "SYNC_FLUSH", "ha_sync_flush": True}


def reboot(rig):
    """The next stores are opened under another boot of the kernel."""
    rig.before_open = lambda store: setattr(store, "_boot_id", lambda: "another boot")


def test_r17_a_kill_under_the_same_boot_leaves_no_suspicion(rig, store):
    rig.put_confirmed(store, b"a")
    rig.kill(store)
    assert rig.open().trust.reason == ""


def test_r17_an_unclean_stop_under_another_boot_is_remembered_until_it_is_cleared(rig, store):
    """1 the machine loses power. 2 every later life says so. 3 the log has caught up with its
    master."""
    rig.put_confirmed(store, b"a")
    rig.kill(store)
    reboot(rig)
    store = rig.open()
    assert "another boot" in store.trust.reason and store.max_phy_offset > 0
    store.close()
    store = rig.open()
    assert "another boot" in store.trust.reason, "a clean stop does not wash it off"
    assert store.trust.discard_damaged_tail() == store.max_phy_offset > 0, "nothing known is bad"
    store.trust.clear_suspect()
    store.close()
    assert rig.open().trust.reason == ""


def test_r17_a_suspicion_that_the_disk_does_not_let_go_can_be_ended_again(rig, store, monkeypatch):
    """The replica says what the next start would say. An operator's repair can be repeated."""
    rig.put_confirmed(store, b"a")
    rig.kill(store)
    reboot(rig)
    store = rig.open()
    why = store.trust.reason
    with monkeypatch.context() as failing:
        failing.setattr(disk, "remove", Mock(side_effect=OSError(errno.EIO, "cannot unlink")))
        with pytest.raises(OSError, match="cannot unlink"):
            store.repair(why)
        assert store.trust.reason == why
    store.repair(why)
    assert store.trust.reason == ""
    store.close()
    assert rig.open().trust.reason == ""


@pytest.mark.parametrize("error", ["EIO", "EROFS"])
def test_r40_whatever_disk_call_of_a_stop_fails_it_was_no_clean_stop(rig, error):
    """Even the sync after the mark of the run is gone. Only the index may be lost in passing."""

    def attempt(rule, number):
        rig.root = rig.folder / f"life-{number}"
        store = rig.open_master()
        rig.put_confirmed(store, b"a", keys=b"k")
        with failing(rule) as struck, suppress(OSError):
            store.close()
        if struck and not store.health.index_failure:
            assert (rig.root / "abort").exists()
        return bool(struck)

    assert walk_errors(f"changes * {error}", attempt) > 10


def test_r40_a_failed_stop_that_cannot_be_noted_is_logged(rig, store, monkeypatch, caplog):
    """The mark may be gone, and a file system that became read-only takes no other one."""
    broken = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS), "abort"))
    for name in ("remove_file", "show_file"):
        monkeypatch.setattr(message_store, name, broken)
    with pytest.raises(OSError, match="Read-only"):
        store.close()
    assert "stop_not_noted reason='abort: Read-only file system; the file" in caplog.text


@pytest.mark.parametrize("error", ["EIO", "EUCLEAN", "EBADMSG"])
@pytest.mark.parametrize("file", ["abort", "suspect"])
def test_r17_a_mark_that_the_disk_cannot_read_makes_the_log_suspect(rig, store, file, error):
    end = rig.put_confirmed(store, b"a")
    if file == "suspect":
        store.trust.note_rot(CorruptLogError("x", 0, "rotten"))
    rig.kill(store)
    with failing(f"read_bytes {file} {error}"):
        again = rig.open()
    assert again.trust.reason and again.max_phy_offset == end
    assert again.trust.must_refetch == (file == "suspect"), "it may have been a failed sync"
    assert again.trust.discard_damaged_tail() == end


def test_r17_a_clean_stop_survives_a_reboot(rig, store):
    rig.put_confirmed(store, b"a")
    store.close()
    reboot(rig)
    assert rig.open().trust.reason == ""


def test_r17_a_run_that_acked_only_flushed_bytes_survives_a_reboot(rig):
    store = rig.open_master(**SAFE)
    rig.put_confirmed(store, b"a")
    rig.kill(store)
    reboot(rig)
    assert rig.open().trust.reason == "", "the settings of that run count, not those of this one"


def test_r17_what_an_earlier_run_acked_unflushed_is_flushed_before_a_run_calls_itself_safe(
    rig, store
):
    """1 a run of ASYNC_FLUSH is killed. 2 SYNC_FLUSH from now on. 3 the power goes at once."""
    end = rig.put_confirmed(store, b"a")
    store = rig.reopen(store, **SAFE)
    assert store.log.flushed_offset == end


def test_r17_a_java_folder_says_nothing_about_its_boot(rig, store):
    rig.put_confirmed(store, b"a")
    rig.kill(store)
    (rig.root / "abort").write_text("1234")
    reboot(rig)
    assert rig.open().trust.reason == ""


def test_r17_a_suspect_log_that_is_chosen_all_the_same_is_the_groups_log(rig, store):
    """Every replica lost power; the controllers know, and elect the longest."""
    end = rig.put_confirmed(store, b"a")
    rig.kill(store)
    reboot(rig)
    store = rig.open()
    assert store.prepare_master() == end
    assert store.trust.reason == ""


def test_r17_damage_after_a_loss_of_power_ends_only_when_caught_up_with_a_master(rig, store):
    """What can still be seen is not all that there was."""
    end = rig.put_confirmed(store, b"a", b"b")
    rig.kill(store)
    rig.flip(rig.segment(), end - 10)
    reboot(rig)
    damage = rig.open().trust.damage
    assert damage is not None and damage.until_level


def test_r17_r24_after_a_reboot_nobody_knows_how_far_a_damaged_log_reached(rig, store):
    """1 the power goes, and takes a sector from the middle and all of the end. 2 what can be seen
    is fetched again: only having caught up with the master ends the suspicion."""
    puts = [rig.put(store, os.urandom(600)) for _ in range(5)]
    end = store.end_turn()
    log = bytes(store.log.view(0, end))
    rig.kill(store)
    rig.overwrite(rig.segment(), 1024, bytes(512))
    rig.overwrite(rig.segment(), puts[3].physical_offset, bytes(end - puts[3].physical_offset))
    reboot(rig)
    store = rig.open()
    start = store.trust.damage.offset
    assert (
        start == puts[1].physical_offset
        and store.trust.damage.end_offset <= puts[3].physical_offset
    )
    store.trust.discard_damaged_tail()
    store.slave_log.append_replicated(start, log[start : puts[3].end_offset])
    store.advance_confirm_offset(puts[3].end_offset)
    assert store.trust.reason
    store.trust.clear_suspect()
    assert store.trust.reason == ""


def test_r17_a_failed_fsync_is_remembered_and_what_came_after_the_last_sync_fetched_again(
    rig, store
):
    """The kernel forgets that a page is dirty once it could not write it: what it shows then may
    not be on the disk."""
    synced = rig.put_confirmed(store, b"a")
    store.checkpoints.flush_derived()
    end = rig.put_confirmed(store, b"b", b"c")
    log = bytes(store.log.view(0, end))
    seen = []
    store._on_fatal = seen.append
    fail = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    store.log.datasync_to = fail
    with pytest.raises(OSError):
        store.flush()
    assert seen, "the process must end"
    store = rig.reopen(store)
    assert "the disk failed" in store.trust.reason and store.max_phy_offset == end
    assert store.trust.discard_damaged_tail() == synced
    store.slave_log.append_replicated(synced, log[synced:])
    assert store.trust.reason
    store.advance_confirm_offset(end)
    assert store.trust.reason == "" and rig.read_bodies(store) == [b"a", b"b", b"c"]


def test_a_full_disk_makes_nobody_suspect(store):
    store._on_fatal = lambda error: None
    store._fail(OSError(errno.ENOSPC, "full"))
    assert store.trust.reason == ""


def test_r24_consume_queues_ahead_of_the_log_tell_of_lost_bytes(rig, store):
    """Units are of confirmed records: a log that ends below them lost what it acknowledged.

    1 the units reach the disk, checkpoint and log do not. 2 the power goes.
    """
    end = rig.put_confirmed(store, b"a", b"b")
    last = rig.put(store, b"c")
    store.advance_confirm_offset(store.end_turn())
    rig.write_queues_back(store)
    rig.kill(store)
    rig.overwrite(rig.segment(), end, bytes(last.size))
    store = rig.open()
    assert store.trust.damage is not None and store.trust.damage.offset == end
    assert "consume queues" in store.trust.reason
    with pytest.raises(CorruptLogError):
        store.prepare_master()


@pytest.mark.parametrize("at", [0, 3, 4, 30, 100, -1, -15])
def test_r24_a_whole_last_record_with_a_flipped_byte_is_damage(rig, store, at):
    """No byte of it is missing, so it was whole once and may have been acknowledged."""
    end = rig.put_confirmed(store, b"a")
    last = rig.put(store, os.urandom(300))
    store.end_turn()
    rig.kill(store)
    rig.flip(rig.segment(), (last.physical_offset if at >= 0 else last.end_offset) + at)
    store = rig.open()
    assert store.trust.damage is not None
    assert (store.trust.damage.file, store.trust.damage.offset) == (str(rig.segment()), end)


@pytest.mark.parametrize(("at", "bit"), [(2, 1), (2, 64), (5, 1), (30, 1), (100, 1), (-10, 1)])
def test_g8_a_bad_record_from_the_master_is_refused_and_taken_back(rig, master, at, bit):
    """Whatever byte of it is bad, also a length that swallows what follows; in pieces of 100."""
    puts = [rig.put(master, os.urandom(300)) for _ in range(5)]
    end = master.end_turn()
    data = bytearray(master.log.view(0, end))
    bad = puts[2]
    data[(bad.physical_offset if at >= 0 else bad.end_offset) + at] ^= bit
    slave = rig.beside("slave").open()
    with pytest.raises(CorruptLogError) as damage:
        for start in range(0, end, 100):
            slave.slave_log.append_replicated(start, data[start : start + 100])
    assert damage.value.offset == bad.physical_offset
    assert slave.max_phy_offset < bad.end_offset + 100, "hardly a byte behind it was taken"
    assert slave.slave_log.drop_unverified() == slave.max_phy_offset == bad.physical_offset
    assert slave.trust.reason == "", "it is the master's record that is bad"
    slave.slave_log.append_replicated(
        bad.physical_offset, master.log.view(bad.physical_offset, 1 << 20)
    )
    assert slave.advance_confirm_offset(end) == end


@pytest.mark.parametrize("room", [8, 13, 35, 60])
def test_a_slave_may_go_on_where_a_blank_ends_a_segment(rig, master, room):
    """Too close to the end of the file for a record, or even for the head of one, to begin."""
    overhead = rig.put(master, b"").end_offset
    size = rig.config.mapped_file_size_commit_log
    body = size - room - 2 * overhead
    blank_at = rig.put(master, bytes(body)).end_offset
    assert blank_at == size - room
    rig.put(master, b"in the next segment")
    master.end_turn()
    assert master.trust.fault_at(blank_at) == "" == master.trust.reason


@pytest.mark.parametrize("at", [2, 5, 30, 100, -10])
def test_r24_a_master_finds_its_bad_record_where_a_slave_goes_on(rig, master, at):
    puts = [rig.put(master, os.urandom(300)) for _ in range(3)]
    master.advance_confirm_offset(master.end_turn())
    assert master.trust.fault_at(puts[1].physical_offset) == ""
    assert master.trust.fault_at(puts[1].physical_offset + 50) == "", (
        "a slave's log may end anywhere"
    )
    assert master.trust.fault_at(puts[2].end_offset) == ""
    start = puts[1].physical_offset
    rig.flip(rig.segment(), (start if at >= 0 else puts[1].end_offset) + at)
    assert f"at offset {start}" in master.trust.fault_at(start) == master.trust.reason
    assert master.appender.is_writable
    rig.put(master, b"goes on")
    end = master.end_turn()
    master.close()
    store = rig.open()
    assert store.trust.reason, "it outlives the process"
    assert store.prepare_master() == end and store.trust.reason, "only a master can give it back"
    assert store.trust.discard_damaged_tail() == start


def test_r24_a_record_that_misses_a_sector_is_torn(rig, store):
    """A lost page cache leaves any of a record's sectors, and zeros in place of the others."""
    end = rig.put_confirmed(store, b"a")
    rig.put(store, os.urandom(3000))
    store.end_turn()
    rig.kill(store)
    rig.overwrite(rig.segment(), 1024, bytes(512))
    store = rig.open()
    assert store.trust.reason == "" and store.max_phy_offset == end


@pytest.mark.parametrize("at", [2, 100])
def test_r24_a_new_master_takes_a_bad_last_record_for_damage_not_for_a_tail(rig, master, at):
    """1 a slave's last, unconfirmed record goes bad while it runs. 2 it is elected: it refuses,
    names the place, and keeps the bytes. 3 as a slave it fetches the record again."""
    rig.put(master, b"a")
    last = rig.put(master, os.urandom(300))
    end = master.end_turn()
    data = bytes(master.log.view(0, end))
    slave: MessageStore = rig.beside("slave").open()
    slave.slave_log.append_replicated(0, data)
    rig.flip(rig.segment(), last.physical_offset + at)
    with pytest.raises(CorruptLogError) as damage:
        slave.prepare_master()
    assert damage.value.offset == last.physical_offset
    assert slave.trust.reason and slave.max_phy_offset == end
    assert slave.trust.discard_damaged_tail() == last.physical_offset
    slave.slave_log.append_replicated(last.physical_offset, data[last.physical_offset :])
    slave.advance_confirm_offset(end)
    assert slave.trust.reason == "" and slave.prepare_master() == end


def test_r17_a_damaged_log_that_was_elected_as_such_opens_without_its_bad_end(rig, store):
    """1 all replicas are suspect, this one is the best of them. 2 It counts for what can be read,
    refuses an election that does not know of the damage, and opens for one that does."""
    end = rig.put_confirmed(store, b"a")
    last = rig.put(store, os.urandom(300))
    store.end_turn()
    assert store.trust.end == last.end_offset
    rig.kill(store)
    rig.flip(rig.segment(), last.physical_offset + 30)
    store = rig.open()
    assert store.trust.end == end
    with pytest.raises(CorruptLogError):
        store.prepare_master()
    assert store.prepare_master(discard_damage=True) == end == store.max_phy_offset
    assert store.trust.reason == "" and store.appender.is_writable
    assert any((rig.root / "truncated").iterdir()), "the bad bytes are kept aside"


def test_r24_a_hole_with_records_behind_it_is_no_torn_tail(rig, store):
    """A sector of zeros within a record looks torn; what stands behind may be acknowledged."""
    puts = [rig.put(store, bytes([65 + n]) * 2000) for n in range(3)]
    end = store.end_turn()
    rig.kill(store)
    rig.overwrite(rig.segment(), 1024, bytes(512))
    store = rig.open()
    damage = store.trust.damage
    assert damage is not None and f"at {puts[1].physical_offset}" in damage.what
    assert (damage.offset, damage.end_offset, damage.until_level) == (0, end, False)


@pytest.mark.parametrize("until_level", [False, True])
def test_r24_a_discarded_tail_is_trusted_when_all_that_it_held_is_confirmed(store, until_level):
    bad = Suspicion("file", 100, "bad", 500, discarded=True, until_level=until_level)
    store.trust._mark.set(bad)
    store.trust.confirmed(499)
    assert store.trust.damage == bad
    store.trust.confirmed(500)
    assert store.trust.damage == (bad if until_level else None)


def test_r24_good_bytes_that_came_in_place_of_a_discarded_tail_stay(rig, store):
    end = rig.put_confirmed(store, b"a")
    store.trust._mark.set(Suspicion("file", 0, "bad", end, discarded=True))
    assert store.trust.discard_damaged_tail() == end > 0


def test_r24_damage_behind_what_was_discarded_leaves_what_came_in_its_place(rig):
    """It is suspect from the new damage, up to all that it may once have held."""
    mark = rig.open_master().trust._mark
    mark.set(Suspicion("file", 100, "bad", 500, discarded=True))
    mark.add(Suspicion("file", 300, "worse", 320))
    assert mark.report == Suspicion("file", 300, "worse", 500)
    mark.add(Suspicion("file", 400, "later", 420))
    assert mark.report.offset == 300, "not discarded yet"


def test_r40_a_failed_disk_adds_to_an_earlier_suspicion(rig, store):
    mark = store.trust._mark
    mark.set(Suspicion("file", 100, "bad", 90_000, discarded=True))
    rig.put_confirmed(store, bytes(1000))
    mark.note_disk_failure(OSError(errno.EIO, "gone"), store.log, 400)
    assert mark.report is not None
    assert (mark.report.offset, mark.report.end_offset) == (100, 90_000)
    mark.clear()
    assert mark.report is not None, "nothing in this process ends it"


def test_r24_only_a_truncation_lowers_the_confirmed_end_of_the_checkpoint(rig, store):
    rig.put_confirmed(store, b"a")
    checkpoint = store._files.checkpoint
    checkpoint.confirm_phy_offset = 100_000
    store.checkpoints.flush_derived()
    assert checkpoint.confirm_phy_offset == 100_000


def test_a_broker_without_controllers_takes_writes_again_when_it_was_repaired(rig):
    store = rig.open(confirm_rule=ConfirmedByLog())
    bad = rig.put(store, b"bad")
    rig.put_confirmed(store, b"behind")
    rig.kill(store)
    rig.flip(rig.segment(), bad.physical_offset + 90)
    store = rig.open(confirm_rule=ConfirmedByLog())
    with pytest.raises(PutUnavailable, match="damaged"):
        rig.put(store, b"refused")
    store.repair(store.trust.reason)
    assert rig.put(store, b"taken").physical_offset == bad.physical_offset


def test_r16_a_log_counts_up_to_its_damage(rig, store):
    rig.put_confirmed(store, b"good")
    bad = rig.put(store, b"bad")
    rig.put_confirmed(store, b"behind")
    assert store.trust.end == store.max_phy_offset
    store.trust.note_damage(CorruptLogError("a file", bad.physical_offset, "CRC"))
    assert store.trust.end == bad.physical_offset


def test_r40_what_a_failed_disk_leaves_is_trusted_up_to_a_record(rig, store):
    """The last sync of a slave may have ended within one."""
    end = rig.put_confirmed(store, b"synced")
    rig.put(store, b"half of it is")
    store.end_turn()
    store._verified.end = store.max_phy_offset
    store.log.flushed_offset = end + 7
    store._on_fatal = lambda error: None
    store._fail(OSError(5, "the disk failed"))
    assert store.trust.damage.offset == end


def test_r17_a_disk_that_fails_after_a_reboot_leaves_nobody_who_knows_how_far_the_log_reached(
    rig, store
):
    end = rig.put_confirmed(store, b"a")
    store.flush()
    mark = store._files.suspect_mark
    mark.set(Suspicion("", end, "stopped under another boot", end, kind="reboot"))
    mark.note_disk_failure(OSError(5, "the disk failed"), store.log, end)
    assert mark.report.kind == "fsync" and mark.report.until_level


def test_r48_a_reboot_is_noted_outside_controller_mode_too(rig, store):
    """A life without controllers does not wash it off."""
    rig.put_confirmed(store, b"a")
    rig.kill(store)
    reboot(rig)
    store = rig.open(confirm_rule=ConfirmedByLog())
    assert "another boot" in store.trust.reason
    store.close()
    assert "another boot" in rig.open().trust.reason


def test_r48_a_store_opened_outside_controller_mode_has_no_epochs_from_its_first_write_on(
    rig, store
):
    store.epochs.append(EpochEntry(1, 0))
    rig.put_confirmed(store, b"a")
    store.close()
    rig.open().close()
    store = rig.open(confirm_rule=ConfirmedByLog())
    assert store.epochs.entries == ()
    rig.put_confirmed(store, b"b")
    store = rig.reopen(store)
    assert store.epochs.entries == () and store.trust.lost_epochs
    store.epochs.append(EpochEntry(2, 0))
    assert not store.trust.lost_epochs
