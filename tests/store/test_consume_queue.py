"""The consume queue: units in memory and on disk are one array, and Java's files open."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.protocol.errors import CorruptLogError
from batonmq.protocol.layout import FILLER_SIZE, UNIT, UNIT_SIZE
from batonmq.runtime import disk
from batonmq.runtime.durable_file import sync_file
from batonmq.store.consume_queue import Boundary, ConsumeQueue, SharedByQueues
from batonmq.store.file_handles import FileHandles
from batonmq.store.queue_table import ConsumeQueueStore
from tests.shared.failing_disk import failing

FILE_SIZE = 10 * UNIT_SIZE


def queue_at(path: Path, **kwargs: int) -> ConsumeQueue:
    return ConsumeQueue(path / "T" / "0", "T", 0, **({"file_size": FILE_SIZE} | kwargs))


def filled(path: Path, count: int, *, size: int = 100) -> ConsumeQueue:
    queue = queue_at(path)
    for index in range(count):
        queue.append_unit(index * size, size, index)
    return queue


def flush(queues: ConsumeQueue | ConsumeQueueStore) -> None:
    for path in queues.write_back():
        sync_file(path)


def folder_of(queue: ConsumeQueue) -> Path:
    return Path(queue.place_of(0)[0]).parent


def reopened(queue: ConsumeQueue) -> ConsumeQueue:
    queue.close()
    again = ConsumeQueue(folder_of(queue), "T", 0, file_size=FILE_SIZE)
    again.load()
    return again


def indexes(queue: ConsumeQueue) -> list[int]:
    return [index for index, *_ in queue.iter_units()]


def test_units_are_read_from_the_tail_and_from_the_file_alike(tmp_path):
    queue = filled(tmp_path, 7)
    queue.write_back()
    for index in range(7, 12):
        queue.append_unit(index * 100, 100, index)
    assert queue.max_offset == 12
    units = queue.read_units(5, 32)
    assert [u[2] for u in UNIT.struct.iter_unpack(units)] == [5, 6, 7, 8, 9]  # one file per call
    assert [u[2] for u in UNIT.struct.iter_unpack(queue.read_units(10, 32))] == [10, 11]
    assert queue.read_units(12, 1) == b""
    assert queue.read_units(3, 0) == b""
    assert queue.read_units(-1, 5) == b""
    assert indexes(queue) == list(range(12))
    queue.close()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["append", "write", "reopen", "cut"]), max_size=40), st.data())
def test_a_queue_is_an_array(steps, data):
    """Whatever the order of appends, write-backs, cuts and restarts, it reads like a list."""
    with tempfile.TemporaryDirectory() as folder:
        queue = queue_at(Path(folder))
        model: list[tuple[int, int, int]] = []
        end = 0
        for step in steps:
            if step == "append":
                for _ in range(data.draw(st.integers(1, 7))):
                    model.append((end, 50, len(model)))
                    queue.append_unit(*model[-1])
                    end += 50
            elif step == "write":
                queue.write_back()
            elif step == "reopen":
                queue = reopened(queue)
            else:
                cut = data.draw(st.integers(0, end))
                queue.truncate_dirty(cut)
                model = [unit for unit in model if unit[0] < cut]
                end = model[-1][0] + 50 if model else 0
            assert [unit[1:] for unit in queue.iter_units()] == model
            assert queue.max_offset == len(model)
            assert queue.last_physical_end == end
        queue.close()


def test_r22_truncated_units_do_not_come_back(tmp_path):
    """Units 0-24 are on disk; the log is cut at unit 7; the process dies; 7 stays the end."""
    queue = filled(tmp_path, 25)
    flush(queue)
    assert queue.truncate_dirty(700)
    assert not queue.truncate_dirty(700)
    names = sorted(path.name for path in folder_of(queue).iterdir())
    assert names == [f"{0:020d}"]
    after_crash = ConsumeQueue(folder_of(queue), "T", 0, file_size=FILE_SIZE)
    after_crash.load()
    assert indexes(after_crash) == list(range(7))
    after_crash.append_unit(700, 50, 70)
    assert after_crash.unit_at(7) == (700, 50, 70)
    after_crash.close()
    queue.close()


def test_a_wholly_truncated_queue_keeps_its_place(tmp_path):
    """First file expired, the rest cut: the next message still gets index 10, not 0."""
    queue = filled(tmp_path, 25)
    queue.write_back()
    assert queue.delete_expired(1000) == 1
    queue.truncate_dirty(0)
    assert (queue.min_offset, queue.max_offset) == (10, 10)
    queue.close()


def test_first_unit_not_zero_is_preceded_by_filler(tmp_path):
    """A slave that starts at message 23 of the queue: filler 20-22 as Java writes it."""
    queue = queue_at(tmp_path)
    assert queue.put_unit_at(23, 5000, 100, 9)
    assert (queue.min_offset, queue.max_offset) == (23, 24)
    queue.write_back()
    assert [path.name for path in folder_of(queue).iterdir()] == [f"{400:020d}"]
    assert queue.unit_at(22) == (0, FILLER_SIZE, 0)
    assert queue.unit_at(19) is None
    again = reopened(queue)
    again.correct_min_offset(4000)
    assert (again.min_offset, again.max_offset) == (23, 24)
    assert again.last_physical_end == 5100
    assert again.truncate_dirty(5000)
    assert (again.min_offset, again.max_offset) == (23, 23)
    assert again.last_physical_end == 0
    again.close()


def test_put_unit_at_skips_what_is_built_and_closes_gaps(tmp_path):
    queue = queue_at(tmp_path)
    assert queue.put_unit_at(0, 0, 100, 1)
    assert not queue.put_unit_at(0, 0, 100, 1)
    assert queue.put_unit_at(1, 100, 100, 2)
    assert not queue.put_unit_at(1, 900, 100, 2)
    assert queue.put_unit_at(4, 400, 100, 3)
    assert queue.unit_at(2) == (0, FILLER_SIZE, 0)
    with pytest.raises(CorruptLogError, match="jumps from 5 to 500"):
        queue.put_unit_at(500, 1000, 100, 1)
    queue.close()


def test_r38_a_queue_whose_messages_all_expired_goes_on_behind_any_gap(tmp_path):
    """1 five units are in the file. 2 the log now begins behind all of them. 3 a message comes, by
    more than two files of units later."""
    queue = filled(tmp_path, 5)
    queue.correct_min_offset(500)
    assert queue.put_unit_at(33, 5000, 100, 9)
    assert (queue.min_offset, queue.max_offset) == (33, 34)
    assert queue.unit_at(32) == (0, FILLER_SIZE, 0)
    queue.write_back()
    again = reopened(queue)
    again.correct_min_offset(500)
    assert (again.min_offset, again.max_offset) == (33, 34)
    assert again.unit_at(33) == (5000, 100, 9)
    again.delete_expired(5000)
    assert [path.name for path in folder_of(again).iterdir()] == [f"{600:020d}"]
    again.close()


@pytest.mark.parametrize(
    ("time", "lower", "upper"),
    [(5, 0, 0), (10, 0, 0), (15, 1, 0), (20, 1, 3), (25, 4, 3), (30, 4, 4), (31, 5, 4)],
)
def test_offset_by_time(tmp_path, time, lower, upper):
    """LOWER: first at or after. UPPER: last at or before; the first if all are younger."""
    times = [10, 20, 20, 20, 30]
    queue = filled(tmp_path, 5)

    def stored(phy_offset: int, size: int) -> int:
        return times[phy_offset // size]

    assert queue.offset_by_time(time, Boundary.LOWER, stored) == lower
    assert queue.offset_by_time(time, Boundary.UPPER, stored) == upper
    queue.close()


@pytest.mark.parametrize("begun", [False, True], ids=["new queue", "behind a gap"])
def test_filler_is_written_in_slices_also_where_the_disk_is_full_in_between(
    tmp_path, monkeypatch, begun
):
    """20 bytes for each of 20,000 messages that are gone; while there is space no write has more
    than a slice of it."""
    sizes: list[int] = []
    monkeypatch.setattr(
        disk, "pwrite", lambda *call: sizes.append(len(call[1])) or os.pwrite(*call)
    )
    for number in range(9):
        path = tmp_path / str(number)
        queue = queue_at(path, file_size=1_000_000)
        if begun:
            assert queue.put_unit_at(0, 0, 100, 0)
            queue.write_back()
        sizes.clear()
        with failing(f"pwrite {path} ENOSPC once after {number}") as struck:
            assert queue.put_unit_at(20_000, 5_000, 100, 0)
            with contextlib.suppress(OSError):
                queue.write_back()
        flush(queue)
        queue.close()
        again = queue_at(path, file_size=1_000_000)
        again.load()
        assert again.max_offset == 20_001
        units = UNIT.struct.iter_unpack(again.read_units(1, 20_000))
        assert list(units) == [(0, FILLER_SIZE, 0)] * 19_999 + [(5_000, 100, 0)]
    assert not struck and max(sizes) <= 2 * 64 * 1024


def test_offset_by_time_of_an_empty_queue_and_of_filler(tmp_path):
    queue = queue_at(tmp_path)
    assert queue.offset_by_time(5, Boundary.LOWER, lambda _o, _s: 1) == 0
    queue.put_unit_at(13, 100, 10, 0)
    for boundary in Boundary:  # UPPER, too: Java's ConsumeQueueStore answers nothing below
        assert queue.offset_by_time(1, boundary, lambda _o, _s: 7) == 13
    assert queue.offset_by_time(8, Boundary.LOWER, lambda _o, _s: 7) == 14
    queue.close()


def test_min_offset_follows_the_log(tmp_path):
    queue = filled(tmp_path, 35)
    queue.write_back()
    queue.correct_min_offset(1250)
    assert queue.min_offset == 13
    assert queue.delete_expired(2500) == 2
    assert queue.min_offset == 25
    assert queue.read_units(5, 1) == b""
    assert queue.delete_expired(10**9) == 1  # the last file stays
    assert queue.min_offset == queue.max_offset == 35
    queue.close()


def test_load_cuts_behind_a_hole_and_what_followed_stays_gone(tmp_path):
    """Power loss left a zero page in the middle: units behind it must never resurface."""
    queue = filled(tmp_path, 25)
    flush(queue)
    queue.close()
    second = folder_of(queue) / f"{FILE_SIZE:020d}"
    data = bytearray(second.read_bytes())
    data[3 * UNIT_SIZE : 4 * UNIT_SIZE] = bytes(UNIT_SIZE)
    second.write_bytes(data)
    queue = ConsumeQueue(folder_of(queue), "T", 0, file_size=FILE_SIZE)
    queue.load()
    assert queue.max_offset == 13
    queue.append_unit(1300, 100, 0)
    queue = reopened(queue)
    assert queue.max_offset == 14
    queue.close()


def test_load_refuses_wrong_length_and_missing_file(tmp_path):
    queue = filled(tmp_path, 35)
    queue.close()
    second = folder_of(queue) / f"{FILE_SIZE:020d}"
    last = folder_of(queue) / f"{3 * FILE_SIZE:020d}"
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    with pytest.raises(CorruptLogError, match=f"{FILE_SIZE:020d}.*199 bytes where 200"):
        queue.load()
    second.unlink()
    with pytest.raises(CorruptLogError, match=f"{FILE_SIZE:020d}.*missing"):
        queue.load()
    second.write_bytes(content)
    last.write_bytes(b"")
    queue.load()
    assert queue.max_offset == 30
    assert not last.exists()
    queue.close()


@pytest.mark.parametrize(
    ("unit", "end"),
    [((-1, 100, 0), 4), ((400, -1, 0), 4), ((400, 0, -1), 4), ((400, 1 << 24, 0), 8)],
)
def test_a_unit_that_no_writer_made_ends_the_queue(tmp_path, unit, end):
    queue = filled(tmp_path, 8)
    queue.close()
    with open(folder_of(queue) / f"{0:020d}", "r+b") as file:
        file.seek(4 * UNIT_SIZE)
        file.write(UNIT.struct.pack(*unit))
    queue.load()
    assert queue.max_offset == end
    queue.close()


def test_a_full_tail_writes_itself_and_new_files_stay_sparse(tmp_path):
    queue = ConsumeQueue(tmp_path / "T" / "0", "T", 0)
    for index in range(4000):
        queue.append_unit(index, 1, 0)
    file = next(iter(folder_of(queue).iterdir()))
    stat = file.stat()
    assert stat.st_size == 6_000_000
    assert stat.st_blocks * 512 < 1_000_000
    queue.close()
    queue.load()
    assert queue.max_offset == 4000
    assert file.stat().st_blocks * 512 < 1_000_000
    queue.close()


def test_descriptors_are_bounded(tmp_path):
    handles = FileHandles(3)
    paths = [tmp_path / str(n) for n in range(9)]
    for path in paths:
        path.write_bytes(b"x")
    for path in paths:
        handles.fd(str(path))
        assert len(handles._fds) <= 3
    handles.forget(str(paths[-1]))
    handles.forget(str(paths[0]))
    assert len(handles._fds) == 2
    handles.close()
    assert not handles._fds


def test_store_of_queues_over_a_restart(tmp_path):
    root = tmp_path / "consumequeue"
    store = ConsumeQueueStore(root, file_size=FILE_SIZE, open_files_max=2)
    for topic in ("A", "%RETRY%g"):
        for queue_id in range(3):
            queue = store.find_or_create(topic, queue_id)
            for index in range(15):
                queue.put_unit_at(index, index * 100 + queue_id, 10, 0)
    assert store.find("A", 9) is None
    flush(store)
    assert store.write_back() == []
    store.close()

    store = ConsumeQueueStore(root, file_size=FILE_SIZE)
    assert store.load() == []
    assert store.topics() == {"A", "%RETRY%g"}
    assert sorted(q.queue_id for q in store.queues() if q.topic == "A") == [0, 1, 2]
    assert store.last_physical_end == 1412
    assert store.truncate_dirty(1401) == 4
    assert store.find("A", 0).max_offset == 15
    assert store.find("A", 2).max_offset == 14
    for queue in store.queues():
        queue.correct_min_offset(500)
    assert {queue.min_offset for queue in store.queues()} == {5}
    assert store.delete_topic("A") == 3
    assert not (root / "A").exists()
    store.destroy_all()
    assert len(store) == 0
    assert list(root.iterdir()) == []
    store.close()


def test_r22_a_file_that_a_cut_drops_is_gone_for_good(tmp_path):
    """Came it back after a power cut, its units would point into newer records."""
    queue = filled(tmp_path, 25)
    flush(queue)
    paths = queue.truncate_dirty(1500)
    assert paths is not None and folder_of(queue) in paths


def test_r24_a_unit_that_a_cut_made_room_for_is_this_process_s_own(tmp_path):
    """Those found in the files are checked when they are read."""
    queue = reopened(filled(tmp_path, 15))
    assert queue.loaded_end == 15
    queue.truncate_dirty(1200)
    assert queue.loaded_end == 12
    queue.append_unit(1200, 100, 0)
    assert queue.loaded_end == 12 < queue.max_offset


def test_r24_a_hole_is_damage_also_where_the_synced_units_are_in_the_next_file(tmp_path):
    queue = filled(tmp_path, 25)
    queue.close()
    with Path(queue.place_of(0)[0]).open("r+b") as file:
        file.seek(8 * UNIT_SIZE)
        file.write(bytes(2 * UNIT_SIZE))
    again = ConsumeQueue(folder_of(queue), "T", 0, file_size=FILE_SIZE)
    with pytest.raises(CorruptLogError, match="synced ones behind it"):
        again.load(2500)


def test_a_mended_unit_is_synced_with_the_next_flush(tmp_path):
    queue = filled(tmp_path, 15)
    flush(queue)
    assert queue not in queue._shared.dirty
    queue.replace_unit(3, 300, 100, 7)
    assert queue in queue._shared.dirty and Path(queue.place_of(3)[0]) in queue.write_back()
    assert reopened(queue).unit_at(3) == (300, 100, 7)


def test_r24_what_a_large_tail_wrote_by_itself_is_synced_with_the_next_flush(tmp_path):
    shared = SharedByQueues()
    queue = ConsumeQueue(tmp_path / "T" / "0", "T", 0, shared=shared)
    for index in range(-(-64 * 1024 // UNIT_SIZE)):
        queue.append_unit(index * 100, 100, 0)
    path = Path(queue.place_of(0)[0])
    assert path.exists() and queue in shared.dirty
    assert {path, folder_of(queue), tmp_path / "T", tmp_path} <= set(queue.write_back())
