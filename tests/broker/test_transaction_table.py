"""Which transactions are open and due for a check: events in, the clock is a number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.broker.transaction import transaction_records
from batonmq.broker.transaction.transaction_records import (
    OPS_MAX,
    OUTDATED_MAX,
    CheckRules,
    Due,
    Half,
    TransactionTable,
    op_body,
    parse_op,
    transaction_key,
)
from batonmq.protocol.properties import encode_properties
from tests.shared.turns import counted_turns

RULES = CheckRules(timeout_ms=6_000, interval_ms=30_000, check_max=15, age_max_ms=3_600_000)


def half(offset: int, *, stored_ms: int = 0, checks: int = 0, key: str = "", **more: int) -> Half:
    name = (key or f"K{offset}").encode()
    return Half(offset, 1000 + offset, 200, name, "g", stored_ms, checks, **more)


def table(*halves: Half) -> TransactionTable:
    made = TransactionTable(RULES)
    for one in halves:
        made.half_seen(one)
    return made


def test_a_half_is_checked_after_the_timeout_then_each_interval():
    core = table(half(0))
    assert core.wake_ms == 6_000 and core.next_due(5_999, 5_999) is None
    assert core.next_due(6_000, 6_000) == Due(half(0), "check")
    assert core.next_due(99_000, 99_000) is None, "it is written again now"
    copy = half(1, stored_ms=6_000, checks=1, key="K0")
    assert core.half_seen(copy) == 0, "the copy takes its place"
    core.op_seen(0, [0])
    assert core.wake_ms == 36_000 and core.next_due(36_000, 36_000) == Due(copy, "check")


def test_an_ended_one_is_not_checked():
    core = table(half(0), half(1))
    assert core.to_end(0, b"K0") == [0]
    assert core.to_end(0, b"K0") == [], "it is being ended"
    core.op_seen(0, [0])
    assert core.to_end(0, b"K0") == []
    assert (
        core.next_due(6_000, 6_000) == Due(half(1), "check") and core.next_due(6_000, 6_000) is None
    )


def test_an_end_that_names_the_first_copy_ends_the_last_too():
    core = table(half(0), half(3, checks=1, key="K0"))
    assert core.to_end(0, b"K0") == [0, 3]
    core.op_seen(0, [0, 3])
    assert len(core) == 0


def test_half_messages_without_a_key_are_apart():
    core = table(*(half(offset)._replace(key=b"") for offset in (0, 1)))
    assert core.to_end(0, b"") == [0] and not core.is_waiting(b"")
    core.op_seen(0, [0])
    assert core.is_open(1)


def test_one_that_could_not_be_ended_when_it_was_due_is_looked_at_after_the_interval():
    core = table(half(0))
    assert core.to_end(0, b"K0") == [0] and core.next_due(6_000, 6_000) is None
    core.not_ended([0], 6_000)
    assert core.wake_ms == 36_000 and core.next_due(36_000, 36_000) == Due(half(0), "check")


def test_r30_one_that_another_replaced_is_ended_and_not_checked_back():
    """A new master's op for the first copy may wait long for its confirmation: the transaction has
    ended by then, and a third copy would be committed once more."""
    core = table(half(0), half(1, stored_ms=50, key="K0"))
    assert core.next_due(6_000, 6_000) == Due(half(0), "end")
    core.op_seen(0, [0])
    assert core.next_due(6_050, 6_050) == Due(half(1, stored_ms=50, key="K0"), "check")


def test_limits_count_or_age():
    assert table(half(0, checks=15)).next_due(30_000, 30_000) == Due(half(0, checks=15), "give up")
    assert table(half(0, checks=14)).next_due(30_000, 30_000) == Due(half(0, checks=14), "check")
    assert table(half(0)).next_due(3_600_000, 3_600_000) == Due(half(0), "give up")


def test_immunity_moves_the_first_check_only():
    core = table(half(0, immunity_ms=60_000))
    assert core.wake_ms == 60_000
    assert table(half(0, checks=1, immunity_ms=60_000)).wake_ms == 30_000


def test_a_half_that_is_immune_for_years_is_given_up_before_the_log_expires():
    core, endless = table(), half(0, immunity_ms=(2**31 - 1) * 1000)
    core.half_seen(endless)
    assert core.wake_ms == RULES.age_max_ms
    assert core.next_due(RULES.age_max_ms, RULES.age_max_ms) == Due(endless, "give up")


def test_a_half_without_a_producer_waits():
    core = table(half(0))
    due = core.next_due(6_000, 6_000)
    assert due is not None
    core.later(due.half, 6_000)
    assert core.wake_ms == 36_000 and core.next_due(36_000, 36_000) == due


def test_progress_stops_at_the_first_open_half_and_at_the_first_op_that_it_may_need():
    core = table(half(0), half(1), half(2))
    core.op_seen(0, [1])
    assert core.progress() == (0, 0)
    core.op_seen(1, [0])
    assert core.progress() == (2, 2)
    core.op_seen(2, [2])
    assert core.progress() == (3, 3)


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 40), st.sampled_from([4, OPS_MAX]))
def test_r30_reading_again_from_the_progress_finds_the_same_open_ones(ends, when, ops_max):
    """Progress is noted at any moment; a new master that reads from there knows the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction_records, "OPS_MAX", ops_max)
        read_again(ends, when)


def read_again(ends: list[bool], when: int) -> None:
    halves = [half(number) for number in range(len(ends))]
    ops = [number for number, is_ended in enumerate(ends) if is_ended][::-1]
    first, at = TransactionTable(RULES), (0, 0)
    for one in halves:
        first.half_seen(one)
    for number, ended in enumerate(ops):
        if number == when:
            at = first.progress()
        first.op_seen(number, [ended])
    second = TransactionTable(RULES, *at)
    for one in halves[at[0] :]:
        second.half_seen(one)
    for number, ended in enumerate(ops):
        if number >= at[1]:
            second.op_seen(number, [ended])
    is_open = [number for number in range(len(ends)) if second.is_open(number)]
    assert is_open == [number for number, is_ended in enumerate(ends) if not is_ended]


def test_the_body_of_an_op_is_javas():
    assert op_body([7, 12]) == b"7,12," and parse_op(b"7,12,") == [7, 12]
    assert parse_op(b"") == [] and parse_op(b"x,3,\xff") == [3]


def test_r30_an_op_is_kept_as_long_as_one_that_it_names_may_be_read_again():
    core = table(half(0), half(1), half(2))
    core.op_seen(0, [0, 2])
    assert core.progress() == (1, 0), "2 is read again, and has ended"
    core.op_seen(1, [1])
    assert core.progress() == (3, 2)
    core.op_seen(2, [3])
    assert core.progress() == (3, 2), "3 is read later than its end"


def test_an_op_of_the_first_copy_leaves_the_last_one_under_its_key():
    core = table(half(0), half(1, checks=1, key="K0"))
    core.op_seen(0, [0])
    assert core.is_waiting(b"K0") and core.to_end(0, b"K0") == [1]


def test_producers_that_come_and_are_not_asked_do_not_multiply_the_checks():
    """A producer that may not see the half comes again and again: each time it is checked once."""
    core, checks = table(half(0)), 0
    for second in range(6, 306, 3):
        core.group_came("g")
        while (due := core.next_due(second * 1000, second * 1000)) is not None:
            checks += 1
            core.no_producer(due.half, second * 1000)
    assert checks <= 101, "one for each that came, and the first one"
    core.op_seen(0, [0])
    assert core.next_due(400_000, 400_000) is None and len(core) == 0


def test_r58_what_has_ended_leaves_little_behind_and_no_long_turn(monkeypatch):
    """A producer says for how long a half is not checked, ends it at once, and sends the next."""
    core = table()
    for number in range(3 * OUTDATED_MAX):
        core.half_seen(half(number, immunity_ms=RULES.age_max_ms))
        core.op_seen(number, [number])
    assert len(core._due) <= OUTDATED_MAX + 1
    core = table(*map(half, range(3 * OUTDATED_MAX)))
    core.op_seen(0, list(range(3 * OUTDATED_MAX)))
    with counted_turns() as turns:
        turns.run(core.next_due, 6_000, 6_000)
    assert turns.lines < 6 * OUTDATED_MAX and core.wake_ms == 6_000


def test_r58_one_half_that_stays_open_keeps_few_ops_in_memory(monkeypatch):
    monkeypatch.setattr(transaction_records, "OPS_MAX", 16)
    core = table(half(0))
    for number in range(1, 100):
        core.half_seen(half(number))
        core.op_seen(number, [number])
        assert len(core._ops) < 16 and core.progress() == (0, 1)
    core.op_seen(100, [0])
    assert core.progress() == (100, 101)


def test_r58_a_half_that_waited_for_a_producer_and_ended_is_forgotten():
    core = table(half(0))
    due = core.next_due(6_000, 6_000)
    assert due is not None
    core.no_producer(due.half, 6_000)
    core.op_seen(0, [0])
    assert not core.group_came("g") and not core._without_producer


def test_r58_names_of_any_length_take_little_memory_and_tell_transactions_apart():
    """Two properties of 32 KiB would stay in memory for hours."""

    def key(name: str) -> bytes:
        found = {"UNIQ_KEY": name, "REAL_TOPIC": "T", "REAL_QID": "0", "PGROUP": "pg"}
        return transaction_key(encode_properties(found).encode())

    long = "k" * 30_000
    assert key("K") == b"K\x01T\x010\x01pg"
    assert key(long) == key(long) != key(long + "k")
    assert len(key(long)) < 256


def test_r58_a_producer_that_comes_costs_no_more_with_many_halves_that_wait_for_it():
    core = table(*map(half, range(1000)))
    while (due := core.next_due(6_000, 6_000)) is not None:
        core.no_producer(due.half, 6_000)
    with counted_turns() as turns:
        turns.run(core.group_came, "g")
    assert turns.lines < 20 and core.wake_ms == 0
    checked = [core.next_due(6_001, 6_001) for _ in range(1001)]
    assert len({due.half for due in checked if due is not None}) == 1000
