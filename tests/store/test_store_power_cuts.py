"""What a power cut at any moment leaves of a store is read as what it is: what was synced is there,
no checkpoint claims more, a cut is done as a whole or not at all.

`power_cut` leaves of each file its content at its last sync, once with the names of the last sync
of each folder, once with the newest names.
"""

import pytest
from power_cut import every_power_cut, watching

from batonmq.epoch.entry import EpochEntry
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.store_files import abort_path

pytestmark = pytest.mark.usefixtures("allocations_in_order")

COUNT = 20


def log_bytes(root, end):
    """[0, end) of the log in the files below `root`; less if they are missing."""
    found = b""
    for path in sorted((root / "commitlog").glob("0*")):
        if int(path.name) != len(found):
            break
        found += path.read_bytes()
    return found[:end]


def used(left):
    """The files as they were when the power went."""
    return left.with_name(left.name.partition("-")[0] + "-used")


def two_epochs(rig, store):
    """20 records in 3 segments, 5 of them confirmed, epoch 2 from the 12th on; where they are."""
    store.epochs.append(EpochEntry(1, 0))
    puts = [rig.put(store, b"%02d" % n + bytes(1000), uniq_key=b"U%d" % n) for n in range(COUNT)]
    store.end_turn()
    store.epochs.append(EpochEntry(2, puts[12].physical_offset))
    store.advance_confirm_offset(puts[4].end_offset)
    return puts


def opened_after_the_cut(rig, left, boot="another boot"):
    """The store that finds what was left; the kernel's boot is another one after a power cut."""
    rig.root = left
    rig.before_open = lambda store: setattr(store, "_boot_id", lambda: boot)
    store = rig.open()
    rig.before_open = lambda store: None
    return store


@pytest.mark.parametrize("segment_cut", [9, 3, 12])
def test_r22_a_power_cut_at_any_moment_of_a_cut_leaves_all_or_nothing_of_it(
    rig, store, segment_cut
):
    """1. A slave cuts its log, and the power goes. 2. The next start finds the log as it was, or
    finishes the cut. 3. What was cut is kept aside in full (R23)."""
    puts = two_epochs(rig, store)
    whole = log_bytes(rig.root, store.max_phy_offset)
    store.flush()
    store.checkpoints.flush_derived()
    rig.kill(store)
    root, cut, end = rig.root, puts[segment_cut].physical_offset, len(whole)

    def act(folder):
        rig.root = folder
        rig.open().slave_log.truncate_to(cut, unclean_epoch=True)

    seen = set()
    for what, left, returned in every_power_cut(root, act, rig.folder / "left"):
        store = opened_after_the_cut(rig, left)
        damage = store.trust.damage
        assert damage is None or damage.kind == "reboot", (what, damage)
        assert store.max_phy_offset == cut if returned else store.max_phy_offset in (cut, end), what
        seen.add(store.max_phy_offset)
        assert log_bytes(left, store.max_phy_offset) == whole[: store.max_phy_offset], what
        epochs = [entry.epoch for entry in store.epochs.entries]
        if store.max_phy_offset == end:
            assert epochs == [1, 2] and store.confirm_offset == puts[4].end_offset, what
        else:
            assert epochs == ([1] if segment_cut <= 12 else [1, 2]), what
            assert store.confirm_offset == min(cut, puts[4].end_offset), what
            tail = b"".join(p.read_bytes() for p in sorted((left / "commitlog").glob("0*")))[cut:]
            assert tail == bytes(len(tail)), what
            (kept,) = (left / "truncated").iterdir()
            aside = b"".join(path.read_bytes() for path in sorted(kept.iterdir()))
            assert aside[: len(whole) - cut] == whole[cut:], what
        store.abandon()
    assert seen == {cut, end}


def test_r24_no_checkpoint_counts_bytes_that_a_power_cut_takes(rig, store):
    """Log, queues and index first, then the checkpoint that vouches for them."""
    rig.put_confirmed(store, *(b"%02d" % n + bytes(500) for n in range(9)), uniq_key=b"U")
    store.close()
    root = rig.root

    def act(folder):
        rig.root = folder
        store = rig.open_master()
        rig.put_confirmed(store, *(b"%02d" % n + bytes(500) for n in range(9, 30)), uniq_key=b"U")
        store.checkpoints.flush_derived()

    confirmed = set()
    for what, left, returned in every_power_cut(root, act, rig.folder / "left"):
        stored = StoreCheckpoint(left / "checkpoint")
        promised = max(stored.confirm_phy_offset, stored.recovery_offset or 0)
        assert log_bytes(left, promised) == log_bytes(used(left), promised) and promised, what
        confirmed.add(stored.confirm_phy_offset)
        store = opened_after_the_cut(rig, left)
        damage = store.trust.damage
        assert damage is None or damage.kind == "reboot", (what, damage)
        assert store.confirm_offset >= promised, what
        bodies = [body[:2] for body in rig.read_bodies(store)]
        assert bodies == [b"%02d" % n for n in range(len(bodies))] and len(bodies) >= 9, what
        assert len(bodies) == 30 or not returned, what
        assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == len(bodies), what
        store.abandon()
    assert len(confirmed) == 2, "the power went before and after the checkpoint"


def test_r17_after_a_power_cut_only_a_whole_log_counts_as_stopped_in_order(rig, store):
    """The mark of a run goes last when it stops, and is there before it takes a byte."""
    rig.put_confirmed(store, b"before")
    store.close()
    root = rig.root

    def act(folder):
        rig.root = folder
        store = rig.open_master()
        rig.put_confirmed(store, *(bytes(700) for _ in range(25)), uniq_key=b"U")
        store.close()

    stops = 0
    for what, left, returned in every_power_cut(root, act, rig.folder / "left"):
        if abort_path(left).exists():
            assert not returned
            continue
        store = opened_after_the_cut(rig, left)
        count = len(rig.read_bodies(store))
        assert count in (1, 26) and not store.trust.reason, what
        stops += count == 26
        if count == 1:
            assert not any(log_bytes(left, 1 << 20)[store.max_phy_offset :]), what
        store.abandon()
    assert stops >= 1


def test_r17_a_suspicion_outlives_a_power_cut(rig, store):
    rig.put_confirmed(store, b"x")
    store.close()
    with watching(rig.root) as cut:
        store = rig.open_master()
        store.trust.note_failure(OSError(5, "the disk failed"))
        left = cut.leave(rig.folder / "left")
    assert "the disk failed" in opened_after_the_cut(rig, left).trust.reason


def test_r26_under_sync_flush_what_a_new_master_inherits_is_durable_before_it_opens(rig, master):
    end = rig.put_confirmed(master, *(bytes(900) for _ in range(20)))
    data = rig.log_of(master)
    rig.root = rig.folder / "slave"
    with watching(rig.root) as cut:
        slave = rig.open(flush_disk_type="SYNC_FLUSH")
        slave.slave_log.append_replicated(0, data)
        assert slave.prepare_master() == end
        left = cut.leave(rig.folder / "left")
    assert log_bytes(left, end) == data


def test_r27_a_log_that_starts_empty_leaves_the_old_one_or_none(rig, store):
    """The master has no byte below 16384 any more; the old log is kept aside."""
    two_epochs(rig, store)
    whole = log_bytes(rig.root, store.max_phy_offset)
    store.close()
    root = rig.root

    def act(folder):
        rig.root = folder
        rig.open().slave_log.reset_for_empty_start(16384)

    for what, left, returned in every_power_cut(root, act, rig.folder / "left"):
        store = opened_after_the_cut(rig, left)
        held = log_bytes(left, 1 << 20)[: store.max_phy_offset]
        if returned:
            assert (store.min_phy_offset, store.max_phy_offset) == (16384, 16384), what
            (kept,) = (left / "truncated").iterdir()
            aside = b"".join(path.read_bytes() for path in sorted(kept.iterdir()))
            assert aside[: len(whole)] == whole
        elif store.max_phy_offset > store.min_phy_offset:
            assert held == whole, what
        store.abandon()


def test_expired_segments_go_from_the_front_whatever_a_power_cut_leaves(rig, store):
    rig.put_confirmed(store, *(b"%02d" % n + bytes(1000) for n in range(40)), uniq_key=b"U")
    store.close()
    root = rig.root

    def act(folder):
        rig.root = folder
        store = rig.open_master()
        rig.disk_ratio = 0.99
        assert store.expirer.clean_expired() >= 2
        rig.disk_ratio = 0.1

    for what, left, _ in every_power_cut(root, act, rig.folder / "left"):
        rig.disk_ratio = 0.1
        store = opened_after_the_cut(rig, left)
        assert store.log.gap is None, what
        bodies = [int(body[:2]) for body in rig.read_bodies(store)]
        assert bodies == list(range(40 - len(bodies), 40)) and len(bodies) >= 5, what
        store.abandon()


def test_a_new_segment_is_durable_before_a_byte_is_in_it(rig, store):
    """1. The log rolls to a new file; then only data is synced. 2. Power cut: the file is there, in
    its full length."""
    store.close()
    with watching(rig.root) as cut:
        store = rig.open_master()
        end = rig.put_confirmed(store, *(bytes(1000) for _ in range(30)))
        store.flush()
        left = cut.leave(rig.folder / "left")
    assert log_bytes(left, end) == log_bytes(rig.root, end)
    assert {path.stat().st_size for path in (left / "commitlog").glob("0*")} == {8192}
