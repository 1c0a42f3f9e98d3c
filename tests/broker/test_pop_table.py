"""What is in flight, by the records alone: time is a number, a new master is a second table."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq.broker.consume.held_requests import KEY_MAX, TAGS_MAX, HeldPop, PopHold
from batonmq.broker.pop.pop_table import NEVER, Acked, Popped, PopRecord, PopTable, Position, PutOff
from batonmq.protocol.errors import RemoteProtocolError

KEY = ("g", "T", 0)


def popped(*offsets: int, at: int = 1000, invisible: int = 60_000, **more: object) -> Popped:
    return Popped(
        key=KEY,
        pop_time=at,
        due=at + invisible,
        offsets=list(offsets),
        last_phy=offsets[-1] * 100,
        **more,
    )


def acked(*offsets: int, at: int = 1000) -> Acked:
    return Acked(key=KEY, pop_time=at, offsets=list(offsets))


def due(table: PopTable, now_ms: int) -> list[tuple[int, list[int]]]:
    """(pop time, open offsets) of all that is due; it is settled then."""
    found = []
    while (point := table.next_due(now_ms)) is not None:
        found.append((point.pop_time, sorted(point.open)))
        done = Acked(key=point.key, pop_time=point.pop_time, offsets=found[-1][1])
        table.apply(PopRecord(acked=[done]), table.next_record)
    return found


def test_what_is_not_acked_is_due_at_its_time_and_once():
    table = PopTable()
    table.apply(PopRecord(popped=[popped(0, 1, 2, next=3)]), 0)
    table.apply(PopRecord(acked=[acked(1)]), 1)
    assert len(table) == 2 and table.oldest_record == 0
    assert table.next_due(60_999) is None and 61_000 <= table.wake_ms <= 61_128
    assert due(table, table.wake_ms) == [(1000, [0, 2])]
    assert len(table) == 0 and table.wake_ms == NEVER
    assert table.oldest_record == table.next_record == 3


def test_an_old_handle_acks_nothing_of_a_newer_pop():
    """Popped again after a reset, or given another time: the newer one counts."""
    table = PopTable()
    table.apply(PopRecord(popped=[popped(0, 1)]), 0)
    table.apply(PopRecord(popped=[popped(1, at=2000)]), 1)
    assert len(table) == 2
    assert table.open_offsets(acked(0, 1)) == [0]
    table.apply(PopRecord(acked=[acked(0, 1)]), 2)
    assert len(table) == 1 and table.oldest_record == 1
    assert table.open_offsets(acked(1, at=2000)) == [1]
    assert due(table, 1 << 40) == [(2000, [1])]


def test_an_orderly_pop_blocks_its_queue_until_acked_or_visible():
    table = PopTable()
    table.apply(PopRecord(popped=[popped(4, 5, 6, order=True, attempt="a")]), 0)
    assert table.is_blocked(KEY, "", 2000) and not table.is_blocked(KEY, "a", 2000)
    table.apply(PopRecord(acked=[acked(4)]), 1)
    order = table.order_of(KEY)
    assert order is not None and order.first_open == 5 and table.is_blocked(KEY, "", 60_999)
    late = PutOff(key=KEY, pop_time=1000, offset=6, visible=70_000)
    table.apply(PopRecord(put_off=[late]), 2)
    stale = PutOff(key=KEY, pop_time=999, offset=6, visible=80_000)
    table.apply(PopRecord(put_off=[stale]), 2)
    assert table.is_blocked(KEY, "", 69_999) and not table.is_blocked(KEY, "", 70_000)
    table.apply(PopRecord(popped=[popped(5, 6, 7, at=71_000, order=True)]), 3)
    again = table.order_of(KEY)
    assert again is not None and again.counts == {5: 1, 6: 1} and len(table) == 3
    table.apply(PopRecord(acked=[acked(5, 6, 7, at=71_000)]), 4)
    assert table.order_of(KEY) is None and not table.is_blocked(KEY, "", 0)


def test_the_same_attempt_keeps_the_counts_of_an_orderly_pop():
    table = PopTable()
    counts = []
    for at, attempt in enumerate(("a", "a", "b", "b", "", "")):
        table.apply(PopRecord(popped=[popped(0, 1, at=at, order=True, attempt=attempt)]), at)
        order = table.order_of(KEY)
        assert order is not None
        counts.append(order.counts.get(0, 0))
    assert counts == [0, 0, 1, 1, 2, 3]


def test_an_orderly_queue_wakes_when_what_is_left_is_visible():
    table = PopTable()
    late = PutOff(key=KEY, pop_time=1000, offset=6, visible=90_000)
    table.apply(PopRecord(popped=[popped(5, 6, order=True)], put_off=[late]), 0)
    assert table.next_due(89_999) is None
    table.apply(PopRecord(acked=[acked(6)]), 1)
    assert table.next_due(61_128) is table.order_of(KEY) is not None


def test_r54_a_record_of_messages_without_offsets_is_unreadable():
    with pytest.raises(RemoteProtocolError, match="without offsets"):
        PopRecord.decode(
            PopRecord(popped=[Popped(key=KEY, pop_time=1, due=2, offsets=[], last_phy=0)]).encode()
        )


def test_r30_a_new_master_continues_in_order_at_the_first_unacked_message():
    table = PopTable()
    table.collects = True
    table.apply(PopRecord(popped=[popped(4, 5, 6, order=True, next=7)]), 0)
    table.apply(PopRecord(acked=[acked(5)]), 1)
    assert table.positions[KEY] == Position(4, 6, 600)
    table.apply(PopRecord(acked=[acked(4)]), 2)
    assert table.positions[KEY] == Position(6, 6, 600)


_STEP = st.one_of(
    st.tuples(st.just("pop"), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("ack"), st.integers(0, 30), st.integers(0, 30)),
    st.tuples(st.just("later"), st.integers(0, 30), st.just(False)),
)


@settings(deadline=None)
@given(st.lists(_STEP, max_size=40), st.integers(0, 40))
def test_r30_a_new_master_knows_what_the_old_one_knew(steps, read_from):
    """It reads from any progress on that the old one may have committed: the same is in flight, and
    the group continues at the same place."""
    records: list[PopRecord] = []
    old, progress = PopTable(), [0]
    old.collects = True
    end, now = 0, 1000

    def put(record: PopRecord) -> None:
        records.append(PopRecord.decode(record.encode()))
        old.apply(record, len(records) - 1)
        progress.append(old.oldest_record)

    for step, first, second in steps:
        now += 7
        if step == "pop":
            offsets = range(end, end + first)
            end += first
            put(PopRecord(popped=[popped(*offsets, at=now, next=end)]))
        elif step == "ack":
            for point in old.of_oldest_record():
                offsets_open = sorted(point.open)[: 1 + second % 3]
                put(PopRecord(acked=[acked(*offsets_open, at=point.pop_time)]))
        elif old.of_oldest_record():
            point = old.of_oldest_record()[0]
            put(PopRecord(popped=[popped(max(point.open), at=now, invisible=90_000)]))
    begin = progress[min(read_from, len(progress) - 1)]
    new = PopTable(begin)
    new.collects = True
    for at in range(begin, len(records)):
        new.apply(records[at], at)
    assert len(new) == len(old)
    position = new.positions.get(KEY)
    if position is not None:
        assert position.next_offset == end
    assert due(new, 1 << 40) == due(old, 1 << 40)


def waiting(group: str = "g", queue: int = -1, deadline: int = 100, owner: str = "c") -> HeldPop:
    return HeldPop("T", queue, deadline, owner, group)


def test_an_arrival_wakes_one_of_each_group():
    hold = PopHold()
    first, second, other, elsewhere = waiting(), waiting(), waiting("h"), waiting("h", 3)
    for one in (first, second, other, elsewhere):
        hold.hold(one)
    assert hold.arrived("T", 1)
    assert [hold.next_ready(), hold.next_ready(), hold.next_ready()] == [first, other, None]
    hold.hold_again(other)
    assert hold.arrived("%RETRY%g_T", 0) and hold.next_ready() is second
    assert hold.next_ready() is None and not hold.arrived("Other", 0)
    assert hold.arrived("T", 3) and {hold.next_ready(), hold.next_ready()} == {other, elsewhere}
    assert len(hold) == 0 and not hold.arrived("%RETRY%h+T", 0)


def test_a_hold_is_bounded_ends_and_forgets_who_left():
    hold = PopHold()
    late, early = waiting(deadline=200, owner="a"), waiting(deadline=100, owner="b")
    hold.hold(late)
    hold.hold(early)
    assert hold.count_of("T", "g", -1) == 2
    assert [*hold.expired(150, 10)] == [early] and not [*hold.expired(150, 10)]
    hold.drop_owner("a")
    assert len(hold) == 0 and not [*hold.expired(1000, 10)]
    for _ in range(KEY_MAX):
        assert hold.may_wait(waiting())
        hold.hold(waiting())
    assert not hold.may_wait(waiting()) and hold.may_wait(waiting("other"))
    many = waiting("other")
    many.tags = TAGS_MAX  # R58
    hold.hold(many)
    last = waiting("another")
    assert hold.may_wait(last)
    last.tags = 1
    assert not hold.may_wait(last)
    assert len(hold.take(KEY_MAX)) == KEY_MAX
    assert len(hold.take(9)) == 1 and not len(hold)
