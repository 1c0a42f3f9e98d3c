"""The background check of the log: what it reads, what it finds, and what it leaves alone."""

import asyncio

import pytest

from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.store import scrub as module
from batonmq.store.scrub import SLICE_BYTES, check_records
from tests.shared.failing_disk import failing

FLIPPED = bytes(range(0x91, 0x99))


@pytest.fixture
def clock(monkeypatch):
    """What the check takes for the time, in ms."""
    now = [1_000_000]
    monkeypatch.setattr(module, "boot_ms", lambda: now[0])
    return now


def damage(rig, position):
    """Eight bytes of the first segment change."""
    before = rig.segment().read_bytes()[position : position + 8]
    flipped = bytes(a ^ b for a, b in zip(before, FLIPPED, strict=True))
    rig.overwrite(rig.segment(), position, flipped)


def read_all(store):
    """Reads until a pass ends or something is found; how many slices it took."""
    scrub, slices = store.scrub, 0
    before = scrub.passes
    while scrub.passes == before and scrub.found is None:
        scrub.step()
        slices += 1
        assert slices < 1000
    return slices


@pytest.mark.parametrize(
    "at, crc",
    [*((at, True) for at in (0, 4, 8, 20, 28, 60, 95, 110, 150)), (0, False), (95, False)],
)
def test_r24_flipped_bytes_of_an_old_record_are_found_without_a_reader(rig, clock, at, crc):
    store = rig.open_master(enabled_append_prop_crc=crc)
    first = rig.put_confirmed(store, b"a" * 80)
    rig.put_confirmed(store, *[b"b" * 80] * 150)
    assert store.log.min_offset == 0 and len(store.log.segments) > 2
    read_all(store)
    assert not store.trust.reason and store.scrub.passes == 1

    damage(rig, first + at)
    clock[0] += 3_600_000
    read_all(store)
    assert store.scrub.found.offset == first
    damaged = store.trust.damage
    assert damaged.offset == first and damaged.kind == "rot" and store.trust.must_refetch
    offset = store.scrub.offset
    store.scrub.step()
    assert store.scrub.offset == offset, "nothing is read until the log is trusted again"


@pytest.mark.parametrize("reader", ["pull", "units", "query"])
async def test_r24_a_bad_record_that_a_reader_meets_counts_as_found(rig, clock, reader):
    """Without the background check, too: else its queue is stuck until an operator looks."""
    store = rig.open_master(scrub_bytes_per_second=0)
    rig.put_confirmed(store, b"a" * 80, keys=b"K")
    rig.put_confirmed(store, *[b"b" * 80] * 150)
    store.close()
    damage(rig, 60)
    store = rig.open_master(scrub_bytes_per_second=0)
    store.start(asyncio.get_running_loop(), pytest.fail)
    found = []
    store.scrub._on_found = found.append
    read = {
        "pull": lambda: store.queries.get_message("T", 0, 0, 32),
        "units": lambda: store.queries.units("T", 0, 0, 1),
        "query": lambda: store.queries.query_message("T", "K", 64, 0, 1 << 62),
    }[reader]
    for _ in range(3):
        with pytest.raises(CorruptLogError):
            read()
    assert [error.offset for error in found] == [0], "a master is asked to hand over once"
    store.trust.note_rot(found[0])
    assert store.trust.damage.offset == 0 and store.queries.begins_in_memory("T", 0)
    store.abandon()


def test_r24_what_is_not_confirmed_is_not_judged(rig, clock, store):
    confirmed = rig.put_confirmed(store, b"a" * 80, b"b" * 80)
    rig.put(store, b"c" * 80)
    store.end_turn()
    damage(rig, confirmed + 95)
    read_all(store)
    assert not store.trust.reason and store.scrub.passes == 1
    assert store.scrub.bytes_total == confirmed


def test_a_pass_ends_where_the_confirmed_log_did_when_it_began_and_the_next_comes_a_minute_later(
    rig, clock, store
):
    end = rig.put_confirmed(store, b"a" * 80)
    store.scrub.step()
    rig.put_confirmed(store, b"b" * 80)
    store.scrub.step()
    assert store.scrub.passes == 1
    clock[0] += 59_999
    store.scrub.step()
    assert store.scrub.bytes_total == end
    clock[0] += 1
    store.scrub.step()
    assert store.scrub.bytes_total > 2 * end


def test_r24_a_slice_that_was_cut_while_it_was_read_is_forgotten(rig, clock, store):
    first = rig.put_confirmed(store, b"a" * 80)
    rig.put_confirmed(store, b"b" * 80)
    damage(rig, first + 95)
    jobs = []
    store.background.run_job = jobs.append
    store.scrub.step()
    store.stop_writes()
    store.slave_log.cut(first, keep_aside=True)
    jobs.pop()()
    assert not store.trust.reason and store.scrub.offset == 0
    store.scrub.step()
    jobs.pop()()
    assert not store.trust.reason and store.scrub.offset == first


def test_a_segment_that_expired_is_passed_over(rig, clock, store):
    rig.put_confirmed(store, *[b"b" * 80] * 150)
    with failing(f"open {rig.segment()} ENOENT"):
        store.scrub.step()
    assert store.scrub.offset == 0 and not store.trust.reason
    store.log.take_first_segment()
    clock[0] += 60_000
    read_all(store)
    assert store.scrub.passes == 1 and not store.trust.reason


def test_r24_a_page_that_the_disk_cannot_read_is_damage_and_no_signal(rig, clock, store):
    rig.put_confirmed(store, b"a" * 80)
    with failing("pread * EIO"):
        store.scrub.step()
    assert "cannot read" in store.trust.reason and store.trust.damage.offset == 0


def test_r24_a_size_that_leads_behind_what_is_confirmed_is_damage(rig, clock, store):
    rig.put_confirmed(store, b"a" * 80)
    rig.overwrite(rig.segment(), 2, b"\1")
    read_all(store)
    assert store.scrub.found.offset == 0 and store.trust.damage.offset == 0


def test_r24_bytes_that_are_right_at_a_second_look_are_no_damage(rig, clock, store, monkeypatch):
    end, pread = rig.put_confirmed(store, b"a" * 80), disk.pread

    def flipped(fd, size, at):
        data = bytearray(pread(fd, size, at))
        data[95] ^= 1
        return bytes(data)

    with monkeypatch.context() as first:
        first.setattr(disk, "pread", flipped)
        store.scrub.step()
    assert store.scrub.found is None and not store.trust.reason
    read_all(store)
    assert store.scrub.bytes_total == end


def test_a_record_longer_than_a_slice_is_read_whole(rig, clock):
    store = rig.open_master(mapped_file_size_commit_log=4 << 20)
    long = bytes(2 * SLICE_BYTES)
    end = rig.put_confirmed(store, b"a", long, b"b", long)
    assert 3 <= read_all(store) <= 8
    assert store.scrub.bytes_total == end and not store.trust.reason


def test_it_continues_after_a_restart_where_it_was(rig, clock, caplog):
    store = rig.open_master(mapped_file_size_commit_log=4 << 20)
    end = rig.put_confirmed(store, *[bytes(100_000)] * 12)
    for _ in range(2):
        store.scrub.step()
        clock[0] += 60_000  # a while: the place is kept
    assert 0 < store.scrub.offset < end
    store.close()

    async def offset_after_start():
        again = rig.open(mapped_file_size_commit_log=4 << 20)
        again.start(asyncio.get_running_loop(), lambda error: None)
        offset = again.scrub.offset
        again.close()
        return offset

    begun = asyncio.run(offset_after_start())
    assert begun > 0
    # A place inside a record, as after a cut, is none: its segment is read again.
    (rig.root / "scrub").write_text(
        f'{{"logId":"{store.log.log_id}","offset":{begun + 7},"passedAtMs":0}}'
    )
    again = rig.open(mapped_file_size_commit_log=4 << 20)
    again.scrub._load()
    read_all(again)
    assert not again.trust.reason and again.scrub.bytes_total == again.confirm_offset
    (rig.root / "scrub").write_text('{"logId":"another log","offset":9,"passedAtMs":0}')
    again.scrub._load()
    assert again.scrub.offset == 0
    log_id = store.log.log_id
    for nonsense in ("[", "[]", "{}", f'{{"logId":"{log_id}","offset":"x","passedAtMs":0}}'):
        (rig.root / "scrub").write_text(nonsense)
        again.scrub._load()
    assert again.scrub.offset == 0 and caplog.text.count("scrub_begins_again") == 4


async def test_a_rate_of_0_turns_it_off(rig):
    store = rig.open(scrub_bytes_per_second=0)
    store.start(asyncio.get_running_loop(), lambda error: None)
    assert "scrub" not in store.background._timers
    store.close()


def test_records_are_checked_up_to_the_first_that_is_cut_off(rig, store):
    ends = [rig.put_confirmed(store, b"x" * 80) for _ in range(5)]
    data = bytes(store.log.view(0, ends[-1]))
    assert check_records(data[:-1], 0, 8192) == (0, ends[-2], "", False)
    assert check_records(data, 0, 8192) == (0, ends[-1], "", False)
