"""Which delayed message is due when: no loop, no log, the clock is a number."""

from collections import deque
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from batonmq.broker.schedule.delay_queues import NEVER, NOW, DelayQueues, Now, QueueRead

DELAYS_MS = {0: 1_000, 1: 5_000}


def queues(**offsets: int) -> DelayQueues:
    at = {int(name[1:]): offset for name, offset in offsets.items()}
    return DelayQueues(DELAYS_MS.__getitem__, at)


def due_of(
    core: DelayQueues, queue_id: int, due: Sequence[int], wall_ms: int, steady_ms: int = 0
) -> int:
    """Of a queue that has nothing behind `due`."""
    end = core.offset_of(queue_id) + len(due)
    return core.due_of(queue_id, due, end, Now(wall_ms, steady_ms))


def test_a_queue_is_looked_at_when_its_first_message_is_due_and_not_before():
    core = queues(q0=7)
    assert core.wake_ms == NOW and core.next_read(100) == QueueRead(0, 7)
    assert due_of(core, 0, [900, 950], 100) == 0
    assert core.wake_ms == 900 and core.next_read(899) is None
    assert not core.arrived(0), "the first is waited for already"
    assert core.next_read(900) == QueueRead(0, 7)
    assert due_of(core, 0, [900, 950], 900) == 1
    core.delivered(0, 1)
    assert core.next_read(900) == QueueRead(0, 8)
    assert due_of(core, 0, [950], 900) == 0 and core.wake_ms == 950


def test_an_empty_queue_waits_for_an_arrival():
    core = queues(q0=0)
    assert due_of(core, 0, [], 100) == 0
    assert core.wake_ms == NEVER
    assert core.arrived(0) and core.wake_ms == NOW
    assert not core.arrived(5), "a level that is not there"


def test_a_clock_set_back_does_not_keep_a_message_longer_than_its_delay():
    """Stored at 100,000 with a second of delay; then the clock says 50,000."""
    core = queues(q0=0)
    assert due_of(core, 0, [101_000], 100_000) == 0
    assert core.next_read(100_999) is None
    assert core.next_read(50_000) == QueueRead(0, 0), "it was waited for already"
    assert due_of(core, 0, [101_000], 50_000, 700) == 0, "not early"
    assert core.wake_ms == 51_000 and core.next_read(50_999) is None
    assert due_of(core, 0, [101_000], 50_600, 1_699) == 0, "the wall clock leaped"
    assert due_of(core, 0, [101_000, 101_000], 50_600, 1_700) == 1, "the second came later"
    core = queues(q0=0)
    assert due_of(core, 0, [], 50_000) == 0 and core.next_read(50_000) is None


def test_levels_come_in_turn_so_a_long_backlog_starves_none():
    core = queues(q0=0, q1=0)
    seen = deque[int]()
    for _ in range(6):
        read = core.next_read(10_000)
        assert read is not None
        seen.append(read.queue_id)
        core.delivered(read.queue_id, due_of(core, read.queue_id, [1, 2, 3], 10_000))
    assert list(seen) == [0, 1, 0, 1, 0, 1]


def test_a_broker_that_is_no_master_looks_at_nothing():
    core = queues()
    assert core.wake_ms == NEVER and core.next_read(1) is None and not core.arrived(0)


@given(st.lists(st.integers(0, 400), max_size=30), st.integers(1, 7))
def test_each_message_once_in_order_never_early_and_on_time(gaps, slice_):
    """Whatever the gaps between sends: delivered at the very ms at which it is due."""
    stored = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    due = [at + DELAYS_MS[0] for at in stored]
    core, delivered = queues(q0=0), list[tuple[int, int]]()
    now = 0
    while len(delivered) < len(due):
        for at in stored:
            if at == now:
                core.arrived(0)
        while (read := core.next_read(now)) is not None:
            there = [one for one, at in zip(due, stored, strict=True) if at <= now]
            units = there[read.offset :][:slice_]
            count = due_of(core, 0, units, now)
            delivered += [(index, now) for index in range(read.offset, read.offset + count)]
            if count:
                core.delivered(0, count)
        later = [at for at in stored if at > now]
        now = min([core.wake_ms, *later])
    assert delivered == list(enumerate(due))


def test_r30_a_queue_continues_at_its_first_message_that_has_not_expired():
    core = queues(q0=2)
    core.skip_to(0, 7)
    assert core.next_read(0) == QueueRead(0, 7) and core.offset_of(0) == 7
