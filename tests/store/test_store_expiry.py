"""Old segments go by age, or because the disk fills up; what points into them goes with them."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from batonmq.epoch.entry import EpochEntry
from batonmq.runtime import disk
from batonmq.store import upkeep
from batonmq.store.config import StoreConfig
from batonmq.store.errors import PutUnavailable
from batonmq.store.upkeep import decide_expiry
from tests.shared.failing_disk import failing

HOUR_MS = 3_600_000
NOW_MS = 1_000 * HOUR_MS
CONFIG = StoreConfig()
OLD, YOUNG = NOW_MS - 80 * HOUR_MS, NOW_MS - HOUR_MS


@pytest.mark.parametrize(
    ("ages", "hour", "disk", "manual", "count", "full"),
    [
        ([OLD, OLD, YOUNG], 4, 0.1, False, 2, False),
        ([OLD, OLD, YOUNG], 5, 0.1, False, 0, False),
        ([OLD, YOUNG, OLD], 4, 0.1, False, 1, False),
        ([OLD, YOUNG], 5, 0.76, False, 1, False),
        ([YOUNG, YOUNG], 5, 0.84, False, 0, False),
        ([YOUNG, YOUNG], 5, 0.86, False, 2, False),
        ([YOUNG], 5, 0.91, False, 1, True),
        ([OLD, YOUNG], 5, 0.1, True, 1, False),
        ([OLD] * 30, 4, 0.1, False, 10, False),
        ([], 4, 0.95, False, 0, True),
        # Just old enough, and exactly at each watermark.
        ([NOW_MS - 72 * HOUR_MS], 4, 0.1, False, 1, False),
        ([NOW_MS - 72 * HOUR_MS + 1], 4, 0.1, False, 0, False),
        ([OLD], 5, 0.75, False, 0, False),
        ([YOUNG], 5, 0.85, False, 0, False),
        ([YOUNG], 5, 0.90, False, 1, False),
    ],
)
def test_what_may_go(ages, hour, disk, manual, count, full):
    """deleteWhen and fileReservedTime by day, watermarks 75/85/90 at any hour, 10 a round."""
    decision = decide_expiry(CONFIG, ages, now_ms=NOW_MS, hour=hour, use=disk, manual=manual)
    assert (decision.count, decision.disk_full) == (count, full)


def test_without_forced_cleaning_young_files_stay():
    config = StoreConfig(clean_file_forcibly_enable=False)
    decision = decide_expiry(config, [YOUNG], now_ms=NOW_MS, hour=5, use=0.95)
    assert (decision.count, decision.disk_full) == (0, True)


@pytest.mark.parametrize("text", ["4 am", "24", "04;x", "²", "-1"])
def test_delete_when_must_list_hours(text):
    with pytest.raises(ValueError, match="deleteWhen"):
        StoreConfig(delete_when=text)


def filled(rig):
    store = rig.open_master(delete_when="")
    store.epochs.append(EpochEntry(1, 0))
    rig.put_confirmed(store, *[b"%02d" % n + bytes(1000) for n in range(30)], uniq_key=b"U")
    store.epochs.append(EpochEntry(2, store.max_phy_offset))
    return store


def age(rig, count):
    for number in range(count):
        os.utime(rig.segment(number), (0, 0))


def test_expired_segments_take_their_units_with_them(rig):
    store = filled(rig)
    age(rig, 2)
    assert store.expirer.clean_expired() == 0, "not at this hour"
    assert store.expirer.clean_expired(manual=True) == 2
    assert store.min_phy_offset == 16384 and not rig.segment(1).exists()
    first = store.queries.min_offset_in_queue("T", 0)
    assert 0 < first == 30 - len(rig.read_bodies(store))
    assert store.queries.get_message("T", 0, 0, 32).next_begin_offset == first
    assert store.queries.look_message_by_offset(0) is None
    assert all(store.queries.query_message("T", "U", 64, 0, 2**62).parts)
    store.close()
    store = rig.open()
    assert (store.min_phy_offset, store.queries.min_offset_in_queue("T", 0)) == (16384, first)
    assert not store.trust.reason


def test_the_last_segment_and_what_is_not_confirmed_stay(rig):
    store = rig.open_master(delete_when="")
    puts = []
    for _ in range(30):
        puts.append(rig.put(store, bytes(1000)))
        store.end_turn()
    store.advance_confirm_offset(puts[9].end_offset)
    age(rig, 5)
    assert store.expirer.clean_expired(manual=True) == 1
    store.advance_confirm_offset(puts[-1].end_offset)
    store.expirer.clean_expired(manual=True)
    assert not rig.segment(3).exists() and rig.segment(4).exists()


def test_r25_the_epoch_prefix_goes_with_the_segments_but_never_the_last_entry(rig):
    store = filled(rig)
    store.epochs.append(EpochEntry(3, store.max_phy_offset))
    age(rig, 5)
    store.expirer.clean_expired(manual=True)
    assert [entry.epoch for entry in store.epochs.entries][-1] == 3
    assert store.epochs.entries[0].end_offset > store.min_phy_offset


def test_r25_epochs_stay_until_the_files_of_their_bytes_are_gone(rig, monkeypatch):
    """A process is killed while it unlinks: the next start finds the files, and must be able to
    give them to a slave, with their epochs."""
    store = rig.open_master(delete_when="")
    for epoch in (1, 2):
        store.epochs.append(EpochEntry(epoch, store.max_phy_offset))
        rig.put_confirmed(store, *(bytes(1000) for _ in range(12)))
    age(rig, 2)
    freeing = []
    monkeypatch.setattr(store.expirer._background, "free_space", freeing.append)
    assert store.expirer.clean_expired(manual=True) == 2
    assert [entry.epoch for entry in store.epochs.entries] == [1, 2]
    for job in freeing:
        job()
    assert [entry.epoch for entry in store.epochs.entries] == [2]


def test_a_full_disk_refuses_puts_until_there_is_room(rig, store):
    rig.put_confirmed(store, b"m")
    rig.disk_ratio = 0.95
    store.expirer.clean_expired()
    with pytest.raises(PutUnavailable, match="disk is full"):
        rig.put(store)
    store.prepare_master()
    assert not store.appender.is_writable
    rig.disk_ratio = 0.5
    store.expirer.clean_expired()
    assert rig.put(store).queue_offset == 1


async def test_views_of_an_expired_segment_stay_readable(rig):
    """A reply is still being sent from a segment that is taken away under it."""
    store = filled(rig)
    view = store.log.view(0, 100)
    before = bytes(view)
    age(rig, 1)

    store.start(asyncio.get_running_loop(), pytest.fail)
    assert store.expirer.clean_expired(manual=True) == 1
    async with asyncio.timeout(10):
        while rig.segment(0).exists():  # noqa: ASYNC110  a thread unlinks it
            await asyncio.sleep(0)
    store.abandon()
    assert bytes(view) == before


YEAR_MS = 365 * 24 * HOUR_MS


def automatic(rig, **config):
    """A store whose hour for deletion is always, with stamps and file times of one moment."""
    store = rig.open_master(delete_when=";".join(map(str, range(24))), **config)
    rig.put_confirmed(store, *[bytes(1000) for _ in range(30)])
    for path in rig.segment().parent.glob("0*"):
        os.utime(path, (rig.now_ms / 1000, rig.now_ms / 1000))
    return store


def test_a_clock_that_jumps_past_delete_when_deletes_nothing(rig):
    """1 the clock jumps by a year. 2 a message is stored, with a stamp of next year. 3 the hour of
    deletion comes, again and again. Neither does an operator's order delete what the log's own
    times do not make old."""
    store = automatic(rig)
    rig.now_ms += YEAR_MS
    assert store.expirer.clean_expired() == 0
    assert store.expirer.clean_expired(manual=True) == 0
    rig.put_confirmed(store, b"stored in the jumped year")
    for _ in range(3):
        assert store.expirer.clean_expired() == 0
    assert len(rig.read_bodies(store)) == 31


def test_a_clock_that_has_jumped_before_the_start_deletes_nothing_that_the_log_does_not_say(rig):
    automatic(rig).close()
    rig.now_ms += YEAR_MS
    store = rig.open_master(delete_when=";".join(map(str, range(24))))
    assert store.expirer.clean_expired() == 0
    assert store.expirer.clean_expired(manual=True) == 0


def test_what_grows_old_while_the_process_runs_goes_by_itself(rig, monkeypatch):
    """The clock of the process confirms what the wall clock says: also for a log that is idle."""
    ran = [5_000_000]
    monkeypatch.setattr(upkeep, "boot_ms", lambda: ran[0])
    store = automatic(rig)
    store.expirer.clean_expired()
    ran[0] += 71 * HOUR_MS
    rig.now_ms += 71 * HOUR_MS
    assert store.expirer.clean_expired() == 0
    ran[0] += 2 * HOUR_MS
    rig.now_ms += 2 * HOUR_MS
    assert store.expirer.clean_expired() > 0


def test_a_new_start_believes_the_stamps_that_it_finds(rig):
    """1 stored at two times, far apart, as the log says. 2 started again: the older ones go."""
    store = automatic(rig)
    rig.now_ms += 80 * HOUR_MS
    rig.put_confirmed(store, b"later")
    store.close()
    store = rig.open_master(delete_when=";".join(map(str, range(24))))
    assert store.expirer.clean_expired() > 0


@pytest.mark.parametrize("unbuilt", [12, 60], ids=["few", "more than a file of the queue holds"])
def test_segments_that_expired_beyond_the_checkpoint_take_no_later_messages_along(rig, unbuilt):
    """1 a checkpoint. 2 the clock goes back; messages are stored. 3 a full disk takes all segments
    but the last, those of the checkpoint among them. 4 killed before the next one. What is left of
    the log was in no queue file: it is read from its beginning, whatever its timestamps say."""
    store = rig.open_master(delete_file_batch_max=100)
    rig.put_confirmed(store, *[bytes(1000) for _ in range(3)])
    store.checkpoints.flush_derived()
    rig.now_ms -= HOUR_MS
    rig.put_confirmed(store, *[b"%02d" % n + bytes(1000) for n in range(unbuilt)])
    # One more may have been made ahead: the last one is that which holds the end of the log.
    last = sum(each.start_offset < store.max_phy_offset for each in store.log.segments) - 1
    keep = store.log.segments[last].start_offset
    rig.disk_ratio = 0.89
    assert store.expirer.clean_expired() == last
    rig.disk_ratio = 0.1
    left = rig.put(store, b"one segment more" + bytes(6000)), rig.put(store, bytes(6000))
    store.advance_confirm_offset(store.end_turn())
    assert left[1].physical_offset >= keep + 8192
    bodies, first = rig.read_bodies(store), store.queries.min_offset_in_queue("T", 0)
    assert first + len(bodies) == 3 + unbuilt + 2
    for _ in range(2):  # the second start finds what the first one has built, half of it written
        rig.kill(store)
        store = rig.open_master()
        store.advance_confirm_offset(store.max_phy_offset)
        assert store.queries.min_offset_in_queue("T", 0) == first
        assert rig.read_bodies(store) == bodies
        store.checkpoints.flush_derived()
    assert rig.put(store).queue_offset == 3 + unbuilt + 2


@pytest.mark.parametrize(
    "blocks, free, available, used",
    [(100, 60, 60, 0.4), (100, 60, 10, 0.8), (100, 60, 0, 1.0), (0, 0, 0, 0.0)],
)
def test_a_disk_is_as_full_as_df_says(monkeypatch, tmp_path, blocks, free, available, used):
    """What a quota keeps back is neither used nor free: of 252 GB with 48 used and 42 to have, more
    than half is used, not five sixths."""
    space = SimpleNamespace(f_blocks=blocks, f_bfree=free, f_bavail=available, f_frsize=1)
    empty = SimpleNamespace(f_blocks=9, f_bfree=9, f_bavail=9, f_frsize=1)
    monkeypatch.setattr(upkeep.os, "statvfs", lambda path: empty if path.name == "y" else space)
    assert upkeep.disk_use((tmp_path / "y", tmp_path)) == pytest.approx(used), "the fullest counts"
    assert upkeep.disk_capacity(tmp_path) == f"Total : {blocks} B, Free : {available} B."


def test_r38_units_that_were_in_memory_only_may_expire_and_the_process_be_killed(rig):
    """1 five units are in the queue's file. 2 sixty messages come, three files of units, in memory
    only: the disk is full. 3 their segments expire. 4 the process is killed."""
    store = rig.open_master(delete_when="")
    rig.put_confirmed(store, *[bytes(1000)] * 5)
    store.checkpoints.flush_derived()
    for _ in range(60):
        rig.put_confirmed(store, bytes(1000))
    age(rig, 7)
    assert store.expirer.clean_expired(manual=True) == 7
    kept = rig.read_bodies(store)
    rig.kill(store)
    store = rig.open_master(delete_when="")
    store.advance_confirm_offset(store.max_phy_offset)
    assert not store.trust.reason and rig.read_bodies(store) == kept
    assert store.queries.min_offset_in_queue("T", 0) == 65 - len(kept)
    assert rig.put(store).queue_offset == 65


@pytest.mark.parametrize("recovers", ["by itself", "by an operator", ""])
def test_r24_a_segment_that_could_not_be_unlinked_leaves_no_hole_behind_it(rig, recovers):
    """1. Two segments expire, and the first cannot be unlinked. 2. Two more expire. 3. The process
    is killed: a hole would end the log there, and hide all that follows."""
    store = rig.open_master(delete_when="")
    rig.put_confirmed(store, *[bytes(1000)] * 60)
    store.checkpoints.flush_derived()
    age(rig, 2)
    with failing(f"unlink {rig.segment()} EBUSY" + " once" * bool(recovers)):
        assert store.expirer.clean_expired(manual=True) == 2
        if recovers == "by an operator":
            rig.segment().unlink()
        for number in (2, 3):
            os.utime(rig.segment(number), (0, 0))
        assert store.expirer.clean_expired(manual=True) == 2
    assert [rig.segment(number).exists() for number in (1, 2, 3)] == [not recovers] * 3
    kept = rig.read_bodies(store)
    store = rig.reopen(store, delete_when="")
    assert not store.trust.reason
    assert rig.read_bodies(store)[-len(kept) :] == kept
    assert (store.min_phy_offset > 0) == bool(recovers)


def test_r45_a_queue_that_cannot_be_read_keeps_no_expired_segment_on_the_disk(rig, caplog):
    store = filled(rig)
    store.checkpoints.flush_derived()
    age(rig, 2)
    with failing("pread /consumequeue EIO"):
        assert store.expirer.clean_expired(manual=True) == 2
    assert "consume_queue_not_trimmed" in caplog.text
    assert not rig.segment(0).exists() and not rig.segment(1).exists()


def test_r39_what_a_start_would_read_of_an_expired_segment_is_written_before_it_goes(
    rig, monkeypatch
):
    """A topic was deleted a moment ago, and the disk fills up: the record of it expires with its
    segment. The offsets without that topic are on the disk before the segment is not."""
    done = []
    rig.before_open = lambda store: setattr(
        store, "before_checkpoint", lambda: [lambda: done.append("tables")]
    )
    store = rig.open_master()
    rig.put_confirmed(store, *(bytes(1000) for _ in range(40)))
    unlink = disk.unlink

    def unlinked(path):
        name = os.path.basename(path)  # not the one that was made ahead
        if name.isdigit() and int(name) < store.max_phy_offset:
            done.append("segment")
        unlink(path)

    monkeypatch.setattr(disk, "unlink", unlinked)
    rig.disk_ratio = 0.87
    assert store.expirer.clean_expired() >= 2
    assert done[:2] == ["tables", "segment"]
    rig.disk_ratio = 0.1
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, *(bytes(1000) for _ in range(40)))
    store.checkpoints.flush_derived()
    done.clear()
    rig.disk_ratio = 0.87
    assert store.expirer.clean_expired() >= 2
    assert "tables" not in done and "segment" in done, "they wait for no space that they would make"


def test_what_expired_does_not_come_back_in_part_after_a_power_cut(rig, monkeypatch):
    """The first of two files without the second would be a gap: damage."""
    synced = []
    store = filled(rig)
    store.checkpoints.flush_derived()
    monkeypatch.setattr(upkeep, "sync_directory", synced.append)
    monkeypatch.setattr(upkeep, "sync_below", lambda root, folders: synced.extend(folders))
    age(rig, 3)
    assert store.expirer.clean_expired(manual=True) == 3
    assert rig.root / "commitlog" in synced and rig.root / "consumequeue" / "T" / "0" in synced
