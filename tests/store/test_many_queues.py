"""What a store costs with many queues: no turn grows with their number, and opening looks at each
of them only a few times."""

import asyncio
from pathlib import Path

import pytest

from batonmq.protocol.errors import CorruptLogError
from batonmq.runtime import disk
from batonmq.store.consume_queue import ConsumeQueue
from batonmq.store.index_service import IndexService
from batonmq.store.recovery import ConfirmedByLog
from tests.shared.power_cut import watching
from tests.shared.turns import Turns, counted_turns

QUEUES = 400
LINES_MAX = 12_000
DISK_CALLS_MAX = 250


def put_everywhere(rig, store, queues=QUEUES):
    for number in range(queues):
        rig.put(store, b"%d" % number, topic=f"T{number // 8}", queue_id=number % 8)
        if number % 16 == 15:
            store.advance_confirm_offset(store.end_turn())
    store.advance_confirm_offset(store.end_turn())


async def until_covered(store):
    end = store.confirm_offset
    for _ in range(2000):
        if store._files.checkpoint.recovery_offset == end:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"no checkpoint covers {end}")


def bodies_of(rig, store, queues=QUEUES):
    return [
        rig.read_bodies(store, topic=f"T{number // 8}", queue_id=number % 8)
        for number in range(queues)
    ]


def test_a_round_of_upkeep_goes_to_disk_in_slices(rig):
    """The first round makes a file for each queue, the second one writes to each."""
    IndexService.preload()
    store = rig.open_master(flush_interval_consume_queue=20)

    async def run() -> tuple[Turns, Turns]:
        store.start(asyncio.get_running_loop(), pytest.fail)
        put_everywhere(rig, store)
        with counted_turns() as making:
            await until_covered(store)
        put_everywhere(rig, store)
        with counted_turns() as writing:
            await until_covered(store)
        return making, writing

    for turns in asyncio.run(run()):
        assert 30 < turns.disk_calls < DISK_CALLS_MAX
        assert turns.lines < LINES_MAX


async def test_a_crash_between_two_slices_costs_nothing(rig):
    """1 a round has written some of its queues. 2 more is confirmed, in all of them. 3 kill -9."""
    store = rig.open_master(flush_interval_consume_queue=1)

    store.start(asyncio.get_running_loop(), pytest.fail)
    put_everywhere(rig, store)
    store.checkpoints.flush_derived()
    assert store.background.is_slicing("flush-slices")
    put_everywhere(rig, store)
    store.background.stop_timers()
    store = rig.reopen(store, confirm_rule=ConfirmedByLog())
    expected = [[b"%d" % number] * 2 for number in range(QUEUES)]
    assert bodies_of(rig, store) == expected


async def test_a_stop_between_two_slices_writes_the_rest(rig):
    store = rig.open_master(flush_interval_consume_queue=1)

    store.start(asyncio.get_running_loop(), pytest.fail)
    put_everywhere(rig, store)
    store.checkpoints.flush_derived()
    store.close()
    store = rig.open()
    assert store._files.was_clean
    assert bodies_of(rig, store) == [[b"%d" % number] for number in range(QUEUES)]


def test_r40_many_queues_are_synced_at_once_and_durably(rig, tmp_path):
    """The power fails behind a round: what its checkpoint covers is in the files."""
    queues = 40
    with watching(rig.root) as cut:
        store = rig.open_master()
        put_everywhere(rig, store, queues)
        store.checkpoints.flush_derived()
        assert store._files.checkpoint.recovery_offset == store.confirm_offset
        left = cut.leave(tmp_path / "left")
    store.abandon()
    rig.root = left
    store = rig.open()
    assert store._files.checkpoint.recovery_offset == store.confirm_offset == store.max_phy_offset
    assert bodies_of(rig, store, queues) == [[b"%d" % number] for number in range(queues)]


def test_r22_a_start_syncs_what_it_cuts_of_many_queues_at_once(rig, store, monkeypatch):
    """A kill between two checkpoints leaves units above the last one in every queue's file."""
    put_everywhere(rig, store)
    store.checkpoints.flush_derived()
    put_everywhere(rig, store)
    rig.write_queues_back(store)
    rig.kill(store)
    syncs = []
    for name in ("fsync", "fdatasync", "syncfs"):
        call = getattr(disk, name)
        monkeypatch.setattr(disk, name, lambda fd, call=call: syncs.append(fd) or call(fd))
    store = rig.open(confirm_rule=ConfirmedByLog())
    assert bodies_of(rig, store) == [[b"%d" % number] * 2 for number in range(QUEUES)]
    assert 0 < len(syncs) < 10


def test_queues_follow_expired_segments_in_slices(rig, store):
    """R38: each keeps its place, also where nothing is left of it."""
    put_everywhere(rig, store)
    kept = 40
    while store.max_phy_offset < 40 * store.log.segment_size:
        put_everywhere(rig, store, kept)

    async def run() -> Turns:
        store.start(asyncio.get_running_loop(), pytest.fail)
        with counted_turns() as turns:
            rig.disk_ratio = 0.99
            turns.run(store.expirer.clean_expired)
            while store.background.is_slicing("trim-slices"):
                assert store.expirer.clean_expired() == 0
                await asyncio.sleep(0.01)
        return turns

    turns = asyncio.run(run())
    assert turns.count > QUEUES // 32 and turns.lines < LINES_MAX
    assert store.min_phy_offset > 0
    ends = [store._queues.get(f"T{n // 8}", n % 8).consume_queue for n in range(QUEUES)]
    assert all(queue.min_offset == queue.max_offset == 1 for queue in ends[kept:])
    assert all(0 < queue.min_offset < queue.max_offset for queue in ends[:kept])


def test_opening_reads_little_of_each_queue(rig):
    """However large its file: what was never written is known from the file system."""
    store = rig.open_master(mapped_file_size_consume_queue=6_000_000)
    put_everywhere(rig, store)
    store.close()
    with counted_turns() as turns:
        turns.run(lambda: rig.open(mapped_file_size_consume_queue=6_000_000))
    assert QUEUES < turns.disk_calls < 8 * QUEUES


@pytest.mark.parametrize(("safe_offset", "is_damage"), [(50, False), (200_000, True)])
def test_g8_a_hole_before_units_that_were_synced_is_damage(tmp_path, safe_offset, is_damage):
    """A crash leaves holes among what was not synced. The hole is of whole blocks."""

    def queue():
        return ConsumeQueue(tmp_path / "q", "T", 0, file_size=60_000)

    before = queue()
    for number in range(2000):
        before.append_unit(100 * number, 100, 0)
    before.write_back()
    path = Path(before.place_of(0)[0])
    data = path.read_bytes()
    path.write_bytes(data[:4096])
    with path.open("r+b") as file:
        file.seek(20480)
        file.write(data[20480:40_000])
        file.truncate(60_000)
    if is_damage:
        with pytest.raises(CorruptLogError):
            queue().load(safe_offset)
        return
    after = queue()
    after.load(safe_offset)
    assert after.max_offset == 4096 // 20 + 1 and path.read_bytes()[4100:] == bytes(60_000 - 4100)
