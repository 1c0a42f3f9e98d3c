"""How far delays and timers are: what a master sends counts where it goes further (R30)."""

from pathlib import Path

from batonmq.store.delay_offset import DelayOffsetManager, TimerProgress


def manager(path: Path, next_offset: int, offsets: dict[int, int]) -> DelayOffsetManager:
    made = DelayOffsetManager(path)
    made.set_all(offsets)
    made.set_timer(TimerProgress(done_ms=next_offset, next_offset=next_offset))
    return made


def test_r30_nothing_goes_back_by_what_a_master_sends(tmp_path: Path) -> None:
    own = manager(tmp_path / "own.json", 5, {1: 7, 2: 3})
    own.apply_from_master(manager(tmp_path / "a.json", 4, {1: 6, 2: 9, 3: 1}).wrapper().encode())
    assert (own.table, own.timer.next_offset) == ({1: 7, 2: 9, 3: 1}, 5)
    own.apply_from_master(manager(tmp_path / "b.json", 6, {}).wrapper().encode())
    assert own.timer.next_offset == 6


def test_r27_a_log_that_begins_anew_knows_of_no_deliveries(tmp_path: Path) -> None:
    own = manager(tmp_path / "own.json", 5, {1: 7})
    own.begin_anew()
    again = DelayOffsetManager(tmp_path / "own.json")
    again.load()
    for one in (own, again):
        assert (one.table, one.timer) == ({}, TimerProgress())


def test_r27_writes_that_waited_do_not_bring_deliveries_back(tmp_path: Path) -> None:
    own = manager(tmp_path / "own.json", 5, {1: 7})
    waiting = own.writes_due()
    own.begin_anew()
    for write in waiting:
        write()
    again = DelayOffsetManager(tmp_path / "own.json")
    again.load()
    assert (again.table, again.timer) == ({}, TimerProgress())
