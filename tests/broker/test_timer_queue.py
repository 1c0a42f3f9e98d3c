"""When which timed message is due: no loop, no log, the clock is a number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.broker.schedule.timer_queue import NEVER, TimerQueue
from batonmq.broker.tables.delay_offset import TimerProgress

ANY = 1 << 40


def fresh(progress: TimerProgress | None = None, least: int = 0) -> TimerQueue:
    return TimerQueue(progress or TimerProgress(), least, ANY)


@pytest.fixture
def queue() -> TimerQueue:
    return fresh()


def test_messages_come_in_the_order_of_their_times(queue):
    for due_ms in (300, 100, 200, 100):
        assert queue.seen(due_ms)
    assert queue.wake_ms == 100 and queue.next_due(99) is None
    seen = []
    while (offset := queue.next_due(250)) is not None:
        seen.append(offset)
        queue.done()
    assert seen == [1, 3, 2] and queue.wake_ms == 300 and len(queue) == 1


def test_a_clock_that_was_set_back_delivers_nothing_early(queue):
    """A message that is due before what was delivered last still waits for its time."""
    queue.seen(1000)
    assert queue.next_due(1000) == 0
    queue.done()
    queue.seen(600)
    assert queue.wake_ms == 600 and queue.next_due(500) is None
    assert queue.next_due(600) == 1
    assert not queue.done(), "it came late"
    assert len(queue) == 0


def test_r30_a_new_master_delivers_nothing_twice_after_a_clock_was_set_back(queue):
    """It reads what was delivered again, since something of that block waits."""
    for due_ms in (1000, 2000):
        assert queue.seen(due_ms)
    assert queue.next_due(1000) == 0 and queue.done()
    queue.clock_shows(500)
    successor = fresh(queue.progress())
    assert not successor.seen(1000) and not successor.waits(0, 1000)
    assert successor.seen(2000) and successor.seen(600), (
        "it came since, and is due by the clock as it is"
    )
    assert successor.next_due(600) == 2


def test_r30_a_new_master_delivers_what_came_late_and_still_waits(queue):
    queue.seen(1000)
    assert queue.next_due(1000) == 0 and queue.done()
    queue.seen(600)
    successor = fresh(queue.progress())
    assert not successor.seen(1000) and successor.seen(600)


def test_r30_a_new_master_whose_clock_is_behind_knows_what_was_delivered_before_it_reads_it():
    queue = fresh(TimerProgress(done_ms=1000, done_offset=8, next_offset=9))
    queue.clock_shows(500)
    assert [queue.seen(due_ms) for due_ms in (700, 1000, 1001)] == [False, False, True]


def test_an_empty_queue_waits_for_nothing(queue):
    assert queue.wake_ms == NEVER and queue.next_due(NEVER) is None


def test_a_recall_counts_until_it_is_due(queue):
    queue.recalled(b"T+K")
    queue.recalled(b"T+K")
    queue.recall_over(b"T+K")
    assert queue.is_recalled(b"T+K"), "the other one waits still"
    queue.recall_over(b"T+K")
    assert not queue.is_recalled(b"T+K")


def test_it_reads_from_the_block_of_the_first_that_waits(queue):
    """So a message that waits for days does not make a new master read all that came meanwhile
    again and again, but for its own block."""
    for number in range(3 * 4096):
        queue.seen(100 if number < 4100 else 900)
    for _ in range(4100):
        assert queue.next_due(100) is not None
        queue.done()
    progress = queue.progress()
    assert (progress.from_offset, progress.next_offset) == (4096, 3 * 4096)
    assert (progress.done_ms, progress.done_offset) == (100, 4099)


def read(due: list[int], progress: TimerProgress) -> TimerQueue:
    """A new master reads all units again."""
    queue = fresh(progress)
    for due_ms in due[queue.next_offset :]:
        queue.seen(due_ms)
    return queue


@given(st.lists(st.integers(0, 50), max_size=60), st.lists(st.integers(0, 8), max_size=30))
def test_r30_a_new_master_delivers_exactly_the_rest(due, steps):
    """Units become visible and messages due in any order; at any moment another master begins from
    the last progress. Each message is delivered once."""
    queue, visible, now, delivered = fresh(), 0, 0, list[int]()
    progress = queue.progress()
    for step in steps:
        if step < 4:
            for due_ms in due[visible : visible + step]:
                queue.seen(due_ms)
            visible = min(len(due), visible + step)
        elif step < 8:
            now += step
            for _ in range(2):
                if (offset := queue.next_due(now)) is not None:
                    delivered.append(offset)
                    queue.done()
                    progress = queue.progress()
        else:
            queue = read(due[:visible], progress)
    queue = read(due, progress)
    while (offset := queue.next_due(60)) is not None:
        delivered.append(offset)
        queue.done()
    assert sorted(delivered) == list(range(len(due)))


def test_a_million_waiting_ones_fit(queue):
    """Counted, not measured: one integer each, and a block for every 4,096."""
    for number in range(20_000):
        queue.seen(1_700_000_000_000 + number * 7 % 1000)
    assert max(map(int.__sizeof__, queue._heap)) <= 40
    assert len(queue._blocks) == 5


def test_r30_nothing_is_delivered_before_all_that_the_log_had_at_the_start_was_seen():
    """The last of it may recall what is due, and is visible only when it is confirmed again."""
    queue = TimerQueue(TimerProgress(next_offset=1), 0, 3)
    for due_ms in (100, 200, -300):
        assert not queue.is_caught_up
        queue.seen(abs(due_ms))
    assert queue.is_caught_up


def test_r44_what_comes_in_place_of_cut_messages_is_not_taken_for_delivered():
    """The last progress knew of 9 messages; the log has 3 of them after an unclean election."""
    queue = TimerQueue(TimerProgress(done_ms=100, next_offset=9), 0, 3)
    assert [queue.seen(50) for _ in range(4)] == [False, False, False, True]
    assert queue.next_due(50) == 3


def test_a_late_message_takes_no_delivery_back():
    queue = TimerQueue(TimerProgress(done_ms=100), 0, ANY)
    assert queue.seen(50) and not queue.done()
    assert queue.progress().done_ms == 100


def test_r30_a_mastership_begins_at_the_end_of_its_log():
    """It ends at 8, whatever the progress of a longer one was."""
    progress = TimerProgress(done_ms=100, done_offset=7, next_offset=9, from_offset=9)
    queue = TimerQueue(progress, 0, 8)
    assert queue.is_caught_up and queue.next_offset == 8
    assert queue.progress() == TimerProgress(
        done_ms=100, done_offset=7, next_offset=8, from_offset=8
    )
    assert queue.seen(50), "late: it came in the place of one that was cut"
