"""Starts after clean stops, kills, torn tails and damage (R24, G8)."""

import random
import shutil
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import CHECKPOINT_LOG, CHECKPOINT_LOG_AT
from batonmq.protocol.records.codec import decode_records
from batonmq.store.checkpoint import StoreCheckpoint
from batonmq.store.errors import StoreStateError
from batonmq.store.recovery import ConfirmedByLog, ConfirmedBySet

BODIES = [b"m%03d" % number + bytes(200) for number in range(60)]


def test_a_clean_stop_loses_nothing_and_leaves_no_abort_file(rig, store):
    end = rig.put_confirmed(store, *BODIES, uniq_key=b"U")
    assert (rig.root / "abort").exists()
    store.close()
    assert not (rig.root / "abort").exists()
    store = rig.open()
    assert store.confirm_offset == store.max_phy_offset == store.log.flushed_offset == end
    assert rig.read_bodies(store) == BODIES
    assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == len(BODIES)


def test_a_lost_index_is_built_anew(rig, store):
    rig.put_confirmed(store, *BODIES[:5], uniq_key=b"U")
    store.close()
    shutil.rmtree(rig.root / "index")
    store = rig.open()
    assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == 5


def test_after_a_kill_the_whole_log_is_there_and_numbers_go_on(rig, store):
    """kill -9 loses what is in memory: tails of queues and index. The log builds them again."""
    rig.put_confirmed(store, *BODIES[:30], uniq_key=b"U")
    store.checkpoints.flush_derived()
    end = rig.put_confirmed(store, *BODIES[30:], uniq_key=b"U")
    store = rig.reopen(store)
    assert store.max_phy_offset == end and not store.trust.reason
    assert rig.read_bodies(store) == BODIES[:30]
    store.prepare_master()
    store.advance_confirm_offset(end)
    assert rig.read_bodies(store) == BODIES
    assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == len(BODIES)
    assert rig.put(store).queue_offset == len(BODIES)


def test_the_confirmed_offset_is_stored_and_bounds_what_is_visible_after_a_kill(rig, store):
    """4.6: what is above the stored confirmOffset stays in the log, but is not shown."""
    confirmed = rig.put_confirmed(store, b"a", b"b")
    rig.put(store, b"unconfirmed")
    end = store.end_turn()
    store.checkpoints.flush_derived()
    store = rig.reopen(store)
    assert (store.confirm_offset, store.max_phy_offset) == (confirmed, end)
    assert rig.read_bodies(store) == [b"a", b"b"]
    assert store.prepare_master() == end
    assert rig.put(store).queue_offset == 3


def test_recovery_begins_at_its_own_point_not_at_the_start_of_the_segment(rig, store):
    """A flipped byte below the recovery point is not met at the start, but never served (G8)."""
    rig.put_confirmed(store, *BODIES[:5])
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, *BODIES[5:9])
    rig.kill(store)
    rig.flip(rig.segment(), 100)
    store = rig.open(confirm_rule=ConfirmedByLog())
    assert not store.trust.reason
    with pytest.raises(CorruptLogError) as damage:
        store.queries.get_message("T", 0, 0, 32)
    assert damage.value.offset == 0 and damage.value.file == str(rig.segment())
    assert store.queries.look_message_by_offset(0) is None
    assert store.queries.get_message("T", 0, 1, 32).message_count == 8


def test_g8_a_damaged_record_ends_the_result_before_it(rig, store):
    results = [rig.put(store, body) for body in BODIES[:5]]
    store.advance_confirm_offset(store.end_turn())
    store.close()
    rig.flip(rig.segment(), results[3].physical_offset + 120)
    store = rig.open()
    result = store.queries.get_message("T", 0, 0, 32)
    assert [r.body for r in decode_records(b"".join(result.parts))] == BODIES[:3]
    assert result.next_begin_offset == 3
    with pytest.raises(CorruptLogError):
        store.queries.get_message("T", 0, 3, 32)


def test_r24_a_torn_tail_is_cut_and_zeroed(rig, store):
    """The last record was written in part, nothing stands behind it, nothing confirmed it."""
    end = rig.put_confirmed(store, *BODIES[:5])
    store.checkpoints.flush_derived()
    torn = rig.put(store, bytes(range(256)) * 4)
    store.end_turn()
    rig.kill(store)
    rig.overwrite(rig.segment(), end + 300, bytes(torn.size))
    store = rig.open()
    assert not store.trust.reason and store.max_phy_offset == end
    assert rig.segment().read_bytes()[end:] == bytes(8192 - end)
    store.prepare_master()
    assert rig.put(store, b"next").physical_offset == end


@pytest.mark.parametrize("missing", [1, 2, 11, 12, 20, 21])
def test_r24_a_write_that_ends_within_the_property_crc_is_torn(rig, store, missing):
    """Its name is there already, the digits behind it are not. With all digits only the mark that
    ends them lacks, which a flipped bit may have taken from a whole record: that is damage."""
    end = rig.put_confirmed(store, *BODIES[:5])
    torn = rig.put(store, bytes(range(256)) * 2)
    store.end_turn()
    rig.kill(store)
    rig.overwrite(rig.segment(), torn.end_offset - missing, bytes(missing))
    store = rig.open()
    assert store.max_phy_offset == end
    assert bool(store.trust.reason) == (missing == 1)


def test_r24_a_flipped_byte_with_records_behind_it_is_damage(rig, store):
    """1 a byte flips above the recovery point. 2 the store opens up to it, named, not writable.

    3 as a slave it discards the damaged tail, keeps it aside, and fetches it again.
    """
    results = [rig.put(store, body) for body in BODIES[:30]]
    end = store.end_turn()
    store.advance_confirm_offset(results[3].end_offset)
    log = rig.log_of(store)
    rig.kill(store)
    rig.flip(rig.segment(), results[10].physical_offset + 120)
    store = rig.open()
    bad = results[10].physical_offset
    assert store.trust.reason and not store.trust.damage.discarded
    assert (store.trust.damage.file, store.trust.damage.offset) == (str(rig.segment()), bad)
    assert store.max_phy_offset == bad
    with pytest.raises(CorruptLogError):
        store.prepare_master()
    with pytest.raises(StoreStateError):
        store.slave_log.append_replicated(bad, log[bad:])
    assert rig.segment(1).exists(), "damage is not cut silently"
    assert store.trust.discard_damaged_tail() == bad and store.trust.damage.discarded
    assert list((rig.root / "truncated").iterdir())
    store = rig.reopen(store)
    assert store.trust.damage.discarded, "the suspicion survives a restart"
    assert store.slave_log.append_replicated(bad, log[bad:]) == end
    store.advance_confirm_offset(end)
    assert not store.trust.reason
    assert rig.read_bodies(store) == BODIES[:30]
    assert store.prepare_master() == end


def test_r24_a_log_that_ends_below_its_confirmed_offset_is_damage(rig, store):
    """The tail is gone though it was confirmed: that is no torn tail."""
    end = rig.put_confirmed(store, *BODIES[:5])
    last = rig.put(store, b"confirmed")
    store.advance_confirm_offset(store.end_turn())
    store.checkpoints.flush_derived()
    rig.kill(store)
    rig.overwrite(rig.segment(), end, bytes(last.size))
    checkpoint = rig.root / "checkpoint"
    data = bytearray(checkpoint.read_bytes())
    data[64:84] = bytes(20)  # without our own point, as Java leaves it
    checkpoint.write_bytes(data)
    store = rig.open()
    assert store.trust.reason and store.trust.damage.offset == end
    assert "below the confirmed offset" in store.trust.damage.what
    store.close()
    store = rig.open()
    assert store.trust.reason, "closing and opening does not wash it off"


def test_r24_a_missing_middle_file_is_damage_named_by_its_path(rig, store):
    rig.put_confirmed(store, *BODIES * 2)
    store.close()
    assert rig.segment(3).exists()
    rig.segment(1).unlink()
    store = rig.open()
    assert store.trust.reason
    assert (store.trust.damage.file, store.trust.damage.offset) == (str(rig.segment(1)), 8192)
    bodies = rig.read_bodies(store)
    assert bodies == BODIES[: len(bodies)] and store.max_phy_offset == 8192
    store.trust.discard_damaged_tail()
    assert [path.name for path in sorted((rig.root / "commitlog").glob("0*"))] == [f"{0:020d}"]
    kept = next((rig.root / "truncated").iterdir())
    assert {path.name for path in kept.iterdir()} >= {f"{2 * 8192:020d}", f"{3 * 8192:020d}"}


def test_a_store_without_queues_builds_them_from_the_log(rig, store):
    """An operator deletes consumequeue and index: both come back, unit for unit."""
    rig.put_confirmed(store, *BODIES, uniq_key=b"U")
    store.close()
    before = {p.name: p.read_bytes() for p in (rig.root / "consumequeue").rglob("0" * 17 + "*")}
    shutil.rmtree(rig.root / "consumequeue")
    shutil.rmtree(rig.root / "index")
    store = rig.open()
    assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == len(BODIES)
    store.close()
    after = {p.name: p.read_bytes() for p in (rig.root / "consumequeue").rglob("0" * 17 + "*")}
    assert after == before


def test_r25_epochs_above_the_log_end_are_dropped(rig):
    from batonmq.epoch.entry import EpochEntry

    store = rig.open_master()
    store.epochs.append(EpochEntry(1, 0))
    end = rig.put_confirmed(store, b"m")
    store.epochs.append(EpochEntry(2, end))
    store.epochs.append(EpochEntry(3, end + 500))
    rig.kill(store)
    assert [e.epoch for e in rig.open().epochs.entries] == [1, 2]


def test_a_preallocated_segment_survives_a_restart_and_is_used(rig, store):
    rig.put_confirmed(store, bytes(5000))
    store.log.preallocate_next()
    assert rig.segment(1).exists()
    store = rig.reopen(store, confirm_rule=ConfirmedByLog())
    assert rig.put(store, bytes(5000)).physical_offset == 8192
    store.advance_confirm_offset(store.end_turn())
    assert [len(body) for body in rig.read_bodies(store)] == [5000, 5000]


@example(sizes=[0], confirmed=1, checkpoint_at=0, mishap="flip", where=0.0)
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 1500), min_size=1, max_size=25),
    confirmed=st.integers(0, 25),
    checkpoint_at=st.integers(0, 25),
    mishap=st.sampled_from(["none", "cut", "flip", "zero page"]),
    where=st.floats(0, 1, exclude_max=True),
)
def test_r24_whatever_happens_to_the_tail(store_in, sizes, confirmed, checkpoint_at, mishap, where):
    """A random log, a kill, and a mishap above the recovery point, against a naive model.

    The model knows the records and the first byte that changed. Everything before the record that
    holds it must be there. If that record was confirmed in the checkpoint, whole ones stand behind
    it, or nothing of it is missing, the store must be suspect; else the tail is cut and the store
    continues.
    """
    with store_in() as (rig, store):
        puts = []
        for number, size in enumerate(sizes):
            puts.append(rig.put(store, random.Random(number).randbytes(size)))
            store.end_turn()
            if number < confirmed:
                store.advance_confirm_offset(store.max_phy_offset)
            if number == checkpoint_at:
                store.checkpoints.flush_derived()
        end, start = store.max_phy_offset, store._files.checkpoint.recovery_offset or 0
        stored_confirm = store._files.checkpoint.confirm_phy_offset
        rig.kill(store)
        changed = start + int((end - start) * where)
        before = log_bytes(rig)
        make_mishap(rig, mishap, changed, end)
        after = log_bytes(rig)
        hurt_at = first_hurt(puts, before, after)
        expected_end = end if hurt_at is None else hurt_at
        whole_behind = hurt_at is not None and any(
            before[p.physical_offset : p.end_offset] == after[p.physical_offset : p.end_offset]
            for p in puts
            if p.physical_offset > hurt_at
        )
        hurt_end = next((p.end_offset for p in puts if p.physical_offset == hurt_at), end)
        # With all digits of the property CRC it was whole. What is hurt at the log's very end was
        # no record.
        is_whole = (hurt_at is not None and hurt_at < end) and (
            mishap == "flip" or (mishap == "cut" and changed >= hurt_end - 1)
        )
        store = rig.open()
        assert bool(store.trust.reason) == (
            whole_behind or expected_end < stored_confirm or is_whole
        )
        assert store.max_phy_offset in (expected_end, expected_end + -expected_end % 8192)
        if not store.trust.reason:
            assert store.confirm_offset >= stored_confirm
            store.prepare_master()
            rig.put_confirmed(store, b"goes on")
            good = [p for p in puts if p.end_offset <= expected_end]
            assert len(rig.read_bodies(store)) == len(good) + 1


def first_hurt(puts, before, after):
    """Where the first record or blank begins that differs in a byte that counts; None if none."""
    for put, following in zip(puts, [*puts[1:], None], strict=True):
        start, end = put.physical_offset, put.end_offset
        if before[start:end] != after[start:end]:
            return start
        is_last = following is None or following.physical_offset != end
        if is_last and before[end : end + 8] != after[end : end + 8]:
            return end
    return None


def log_bytes(rig):
    return b"".join(path.read_bytes() for path in sorted((rig.root / "commitlog").glob("0*")))


def make_mishap(rig, mishap, at, end):
    if mishap == "flip":
        rig.flip(rig.segment(at // 8192), at % 8192)
    elif mishap == "zero page":
        at += -at % 512
        zero(rig, at, min(at + 512, end))
    elif mishap == "cut":
        zero(rig, at, end)


def zero(rig, start, end):
    while start < end:
        stop = min(end, start - start % 8192 + 8192)
        rig.overwrite(rig.segment(start // 8192), start % 8192, bytes(stop - start))
        start = stop


def test_recovery_does_not_go_back_to_the_last_key_of_the_index(rig, store):
    """Messages without keys leave the index behind; below the recovery point it is whole."""
    rig.put_confirmed(store, b"keyed", uniq_key=b"U")
    end = rig.put_confirmed(store, *BODIES[:20])
    store.checkpoints.flush_derived()
    store = rig.reopen(store)
    assert store._verified.start == end
    assert len(store.queries.query_message("T", "U", 9, 0, 2**62).parts) == 1


@pytest.mark.parametrize("stop", ["clean", "kill"])
def test_an_old_copy_of_the_index_is_completed_from_the_log(rig, store, stop):
    """An operator put it back. The log below the checkpoint is not read for anything else."""

    def put(name):
        rig.put_confirmed(store, name, keys=name)
        store.checkpoints.flush_derived()

    put(b"first")
    store.close()
    shutil.copytree(rig.root / "index", rig.folder / "old index")
    store = rig.open_master()
    rig.now_ms += 5_000
    put(b"second")
    store.close()
    if stop == "kill":
        rig.kill(rig.open_master())
    shutil.rmtree(rig.root / "index")
    shutil.copytree(rig.folder / "old index", rig.root / "index")
    store = rig.open()
    for key in ("first", "second"):
        assert len(store.queries.query_message("T", key, 9, 0, 2**62).parts) == 1


@pytest.mark.parametrize("max_index_num", [8, 400])
def test_entries_of_a_damaged_last_index_file_are_built_again_from_the_log(rig, max_index_num):
    """Its records lie below the checkpoint, and the files before it, if any, are whole."""
    store = rig.open_master(max_index_num=max_index_num)
    for number in range(20):
        rig.put_confirmed(store, b"m", uniq_key=b"U%d" % number)
    store.checkpoints.flush_derived()
    rig.kill(store)
    last = sorted((rig.root / "index").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:100])
    store = rig.open(max_index_num=max_index_num)
    assert all(
        len(store.queries.query_message("T", f"U{number}", 9, 0, 2**62).parts) == 1
        for number in range(20)
    )


def test_g8_a_start_that_begins_below_the_checkpoint_may_be_killed(rig):
    """For the index it cuts the queues as well, and has what they lost in memory for a while."""
    store = rig.open_master(max_index_num=8)
    for number in range(20):
        rig.put_confirmed(store, b"m%d" % number, uniq_key=b"U%d" % number)
    store.checkpoints.flush_derived()
    rig.kill(store)
    last = sorted((rig.root / "index").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:100])
    rig.kill(rig.open(max_index_num=8))
    store = rig.open(max_index_num=8)
    assert rig.read_bodies(store) == [b"m%d" % number for number in range(20)]
    assert len(store.queries.query_message("T", "U19", 9, 0, 2**62).parts) == 1


@pytest.fixture
def ahead(rig):
    """30 confirmed records, 20 of them below the checkpoint; index and queues are written for all,
    the log has lost what is behind the 25th: power went, and the file system kept the rest."""

    def lose(*, clean):
        store = rig.open_master()
        rig.put_confirmed(store, *BODIES[:20], uniq_key=b"U")
        store.checkpoints.flush_derived()
        ends = [rig.put_confirmed(store, body, uniq_key=b"U") for body in BODIES[20:30]]
        store._files.index.write_back()
        rig.write_queues_back(store)
        if clean:
            store.close()
        else:
            rig.kill(store)
        rig.overwrite(rig.segment(ends[4] // 8192), ends[4] % 8192, bytes(8192 - ends[4] % 8192))
        for path in sorted((rig.root / "commitlog").glob("0*"))[ends[4] // 8192 + 1 :]:
            path.unlink()
        return ends[4]

    return lose


@pytest.mark.parametrize("clean", [False, True])
def test_queues_and_index_that_are_ahead_of_the_log_are_cut(rig, ahead, clean):
    """New records come to the places of those that were lost: each is in its queue, and found by
    its key, once."""
    end = ahead(clean=clean)
    store = rig.open(confirm_rule=ConfirmedByLog())
    assert store.max_phy_offset == end
    assert rig.read_bodies(store) == BODIES[:25]
    assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == 25
    if clean:  # then it is damage, and an operator decides
        assert store.queries.max_offset_in_queue("T", 0) == 25
        return
    assert rig.put(store, b"new", uniq_key=b"NEW").queue_offset == 25
    store.advance_confirm_offset(store.end_turn())
    assert rig.read_bodies(store) == [*BODIES[:25], b"new"]
    assert len(store.queries.query_message("T", "NEW", 64, 0, 2**62).parts) == 1


@pytest.mark.parametrize("missing", [20, 8])
def test_a_unit_of_which_a_sector_is_missing_above_the_checkpoint_is_built_again(
    rig, store, missing
):
    """Its place is there and its tags code is not, which for a timer says when it is due. Nothing
    but the log tells that from a good one, and who reads due times reads the units only."""
    rig.put_confirmed(store, *BODIES[:10], tag="A")
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, *BODIES[10:18], tag="A")
    written = store.queries.raw_units("T", 0, 0, 18)
    rig.write_queues_back(store)
    rig.kill(store)
    path = rig.root / "consumequeue" / "T" / "0" / f"{0:020d}"
    rig.overwrite(path, 15 * 20 - missing, bytes(missing))
    store = rig.open(confirm_rule=ConfirmedByLog())
    assert store.queries.raw_units("T", 0, 0, 18) == written


def test_a_queue_that_is_dropped_for_its_damage_is_built_again_from_the_logs_beginning(rig, store):
    """R24: also what lies below the checkpoint, where the other queues are whole."""
    for queue_id in (0, 1):
        rig.put_confirmed(store, *BODIES[:10], queue_id=queue_id)
    store.checkpoints.flush_derived()
    rig.put_confirmed(store, *BODIES[10:12])
    rig.write_queues_back(store)
    rig.kill(store)
    rig.flip(rig.root / "consumequeue" / "T" / "0" / f"{0:020d}", 6 * 20 + 3)  # it points too far
    store = rig.open(confirm_rule=ConfirmedByLog())
    assert rig.read_bodies(store) == BODIES[:12]
    assert rig.read_bodies(store, queue_id=1) == BODIES[:10]


def test_r26_what_a_killed_process_wrote_counts_as_flushed_when_this_one_has_flushed_it(rig, store):
    """It may be in the page cache only, and the power may go next."""
    rig.put_confirmed(store, b"checkpointed")
    store.checkpoints.flush_derived()
    begin = store.max_phy_offset
    rig.put_confirmed(store, b"written")
    store = rig.reopen(store)
    assert store.max_phy_offset > begin == store.log.flushed_offset
    assert store.flush() == store.max_phy_offset == store.log.flushed_offset


def test_r24_torn_bytes_go_also_from_a_file_with_an_empty_one_behind_it(rig, store):
    """Two files were made ahead, one began to be written, and nothing of it was whole."""
    end = rig.put_confirmed(store, b"whole")
    for number in (1, 2):
        store.log.ensure_segment(number * 8192)
    rig.kill(store)
    with rig.segment(1).open("r+b") as file:
        file.write(b"\0\0\1\0 torn")
    store = rig.open()
    assert store.max_phy_offset == end and not store.trust.reason
    assert not rig.segment(2).exists()
    assert not rig.segment(1).exists() or not any(rig.segment(1).read_bytes())


def _random(checkpoint, log_end, seed):
    return random.Random(seed).randbytes(4096)


def _random_javas(checkpoint, log_end, seed):
    """Of a broker that is not ours: only the first 40 bytes are not zero."""
    return random.Random(seed).randbytes(40).ljust(4096, b"\0")


def _too_new(checkpoint, log_end, seed):
    newest = 1_700_000_000_000 + 10_000 * (seed + 1)
    return struct.pack(">5q", newest, newest, newest, 0, 0).ljust(4096, b"\0")


def _at(checkpoint, offset):
    checkpoint.recovery_offset = offset
    return checkpoint.encode()


def _behind_the_log(checkpoint, log_end, seed):
    return _at(checkpoint, log_end + 1 + 37 * seed)


def _in_a_record(checkpoint, log_end, seed):
    return _at(checkpoint, log_end - 1 - 37 * seed)


def _elsewhere(checkpoint, log_end, seed):
    return _at(checkpoint, log_end * (seed + 2))


def _cut_short(checkpoint, log_end, seed):
    return checkpoint.encode()[: 100 * seed]


@pytest.mark.parametrize(
    "rule", [ConfirmedBySet(), ConfirmedByLog()], ids=["controlled", "classic"]
)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "content",
    [_random, _random_javas, _too_new, _behind_the_log, _in_a_record, _elsewhere, _cut_short],
)
def test_r38_a_checkpoint_that_cannot_be_true_hides_no_message(rig, content, seed, rule, caplog):
    """What the killed process had in memory is built from the log, wherever the file says that a
    start may begin."""
    store = rig.open_master(confirm_rule=rule)
    rig.put_confirmed(store, *BODIES[:30], uniq_key=b"U")
    store.checkpoints.flush_derived()
    end = rig.put_confirmed(store, *BODIES[30:], uniq_key=b"U")
    rig.kill(store)
    path = rig.root / "checkpoint"
    path.write_bytes(content(StoreCheckpoint(path), end, seed))
    store = rig.open_master(confirm_rule=rule)
    assert not store.trust.reason
    assert store.advance_confirm_offset(end) == store.max_phy_offset == end
    assert rig.read_bodies(store) == BODIES
    assert store.queries.next_offset_in_queue("T", 0) == len(BODIES)
    assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == len(BODIES)
    assert content is _cut_short or "checkpoint_" in caplog.text
    store.close()
    assert StoreCheckpoint(path).recovery_offset == end


def test_r38_a_checkpoint_of_another_replica_hides_no_message(rig, caplog):
    """Its CRC is good, and its end is an end of a record here too: the logs are the same."""
    other = rig.open_master()
    rig.put_confirmed(other, *BODIES, uniq_key=b"U")
    end = other.max_phy_offset
    data = rig.log_of(other)
    other.close()
    copied = rig.root / "checkpoint"
    replica = rig.beside("replica").open()
    replica.slave_log.append_replicated(0, data)
    own = replica.advance_confirm_offset(end // 2)
    replica.checkpoints.flush_derived()
    replica.close()
    shutil.copy(copied, rig.root / "checkpoint")
    store = rig.open()
    assert "checkpoint_of_other_log" in caplog.text
    assert store.confirm_offset == own and not store.trust.reason
    store.prepare_master()
    assert store.advance_confirm_offset(end) == end
    assert rig.read_bodies(store) == BODIES
    assert len(store.queries.query_message("T", "U", 64, 0, 2**62).parts) == len(BODIES)
    store.close()


def test_r38_a_checkpoint_of_the_version_before_is_believed(rig, store):
    """It does not say which log it is about."""
    rig.put_confirmed(store, *BODIES)
    store.close()
    path = rig.root / "checkpoint"
    data = bytearray(path.read_bytes())
    data[CHECKPOINT_LOG_AT : CHECKPOINT_LOG_AT + CHECKPOINT_LOG.size] = bytes(CHECKPOINT_LOG.size)
    path.write_bytes(data)
    found = StoreCheckpoint(path)
    assert found.recovery_offset == store.max_phy_offset
    assert (found.queue_totals.ends, found.queue_totals.begins) == (len(BODIES), -1)
    rig.open().close()
    assert StoreCheckpoint(path).queue_totals.begins == 0
