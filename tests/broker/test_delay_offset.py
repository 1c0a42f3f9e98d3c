"""How far delays and timers are: what a master sends counts where it goes further (R30)."""

import struct
from pathlib import Path

from batonmq.broker.tables import delay_offset
from batonmq.broker.tables.delay_offset import DelayOffsetManager, TimerProgress


def manager(path: Path, next_offset: int, offsets: dict[int, int]) -> DelayOffsetManager:
    made = DelayOffsetManager(path)
    made.set_all(offsets)
    made.set_timer(TimerProgress(done_ms=next_offset, next_offset=next_offset))
    return made


def test_r30_nothing_goes_back_by_what_a_master_sends(tmp_path):
    own = manager(tmp_path / "own.json", 5, {1: 7, 2: 3})
    own.apply_from_master(manager(tmp_path / "a.json", 4, {1: 6, 2: 9, 3: 1}).wrapper().encode())
    assert (own.table, own.timer.next_offset) == ({1: 7, 2: 9, 3: 1}, 5)
    own.apply_from_master(manager(tmp_path / "b.json", 6, {}).wrapper().encode())
    assert own.timer.next_offset == 6


def test_r27_an_emptied_log_knows_of_no_deliveries(tmp_path):
    own = manager(tmp_path / "own.json", 5, {1: 7})
    own.clear_for_new_log()
    again = DelayOffsetManager(tmp_path / "own.json")
    again.load()
    for one in (own, again):
        assert (one.table, one.timer) == ({}, TimerProgress())


def test_r27_writes_that_waited_do_not_bring_deliveries_back(tmp_path):
    own = manager(tmp_path / "own.json", 5, {1: 7})
    waiting = own.writes_due()
    own.clear_for_new_log()
    for write in waiting:
        write()
    again = DelayOffsetManager(tmp_path / "own.json")
    again.load()
    assert (again.table, again.timer) == ({}, TimerProgress())


def test_r44_what_lies_above_the_ends_of_its_queues_goes_back_to_them(tmp_path):
    own = manager(tmp_path / "own.json", 5, {1: 7, 2: 3})
    own.set_timer(TimerProgress(done_ms=50, next_offset=9, from_offset=8))
    own.clamp(lambda level: 4, 6)
    assert own.table == {1: 4, 2: 3}
    assert own.timer == TimerProgress(done_ms=50, next_offset=6, from_offset=6)


def test_java_reads_its_timers_from_no_later_than_now(tmp_path, monkeypatch):
    monkeypatch.setattr(delay_offset, "wall_ms", lambda: 100)
    own = DelayOffsetManager(tmp_path / "own.json")
    for done_ms, read_ms in ((500, 100), (60, 60)):
        own.set_timer(TimerProgress(done_ms=done_ms, next_offset=3, from_offset=2))
        assert struct.unpack(">7q", own.timer_check())[:4] == (read_ms, 0, 2, 2)


def test_a_java_masters_check_point_counts_where_it_is_further(tmp_path):
    own = manager(tmp_path / "a.json", 1, {})
    own.apply_timer_check(check_point(5_000, 7))
    assert own.timer == TimerProgress(done_ms=5_000, next_offset=7)
    own.apply_timer_check(check_point(4_000, 7))
    own.apply_timer_check(check_point(9_000, 6))
    own.apply_timer_check(b"short")
    own.apply_timer_check(check_point(0, 0))
    assert own.timer == TimerProgress(done_ms=5_000, next_offset=7)
    own.apply_timer_check(check_point(6_000, 7))
    assert own.timer.done_ms == 6_000


def test_r30_timers_of_a_java_folder_continue_where_it_was(tmp_path):
    """What Java noted counts until there is progress of our own."""
    path, check = tmp_path / "delayOffset.json", tmp_path / "timercheck"
    check.write_bytes(check_point(5_000, 7))
    for noted in (TimerProgress(done_ms=5_000, next_offset=7), TimerProgress(done_ms=9_000)):
        made = DelayOffsetManager(path)
        made.load()
        assert made.timer == noted
        made.set_timer(TimerProgress(done_ms=9_000))
        made.write()
        check.write_bytes(check_point(1_000, 1))


def check_point(read_ms: int, queue_offset: int) -> bytes:
    """As 60 gives it."""
    return struct.pack(">7q", read_ms, 0, queue_offset, queue_offset, 0, 0, 0)
