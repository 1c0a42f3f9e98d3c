"""PullHold: held pulls wake for their message, at their deadline, or never."""

import weakref
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.broker.consume.held_requests import TAGS_MAX, HeldPull, PullHold
from tests.shared.turns import counted_turns


def held(name: str, *, queue: int = 0, offset: int = 0, deadline: int = 100, owner: object = 1):
    return HeldPull("T", queue, deadline, owner, offset, name)


def names(items: Iterable[HeldPull[str]]) -> list[str]:
    return [item.pull for item in items]


@pytest.fixture
def hold() -> PullHold[str]:
    return PullHold()


def test_an_arrival_wakes_those_it_reaches(hold):
    for item in (held("a", offset=5), held("b", offset=6), held("c", queue=1, offset=0)):
        hold.hold(item)
    assert names(hold.arrived("T", 0, 5)) == []
    assert names(hold.arrived("T", 0, 6)) == ["a"]
    assert names(hold.arrived("U", 0, 99)) == []
    assert len(hold) == 2


def test_deadlines_in_order_and_each_pull_answered_once(hold):
    for item in (held("late", deadline=30), held("soon", deadline=10), held("next", deadline=20)):
        hold.hold(item)
    assert names(hold.expired(20, 9)) == ["soon", "next"]
    assert names(hold.arrived("T", 0, 1)) == ["late"]
    assert not names(hold.expired(1000, 9)) and len(hold) == 0


def test_r58_pulls_that_wait_are_bounded_in_number_and_tags(hold, monkeypatch):
    assert hold.has_place(TAGS_MAX) and not hold.has_place(TAGS_MAX + 1)
    many = held("a")
    many.tags = TAGS_MAX
    hold.hold(many)
    assert hold.has_place(0) and not hold.has_place(1)
    monkeypatch.setattr("batonmq.broker.consume.held_requests.ALL_MAX", 1)
    assert not hold.has_place(0)
    hold.drop_owner(1)
    assert hold.has_place(TAGS_MAX)


def test_a_closed_connection_is_forgotten(hold):
    hold.hold(held("a", owner="x"))
    hold.hold(held("b", owner="y"))
    hold.hold(held("c", owner="x", queue=1))
    hold.drop_owner("x")
    assert len(hold) == 1
    assert names(hold.take(9)) == ["b"]
    assert hold.queues() == [] and len(hold) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 50)), max_size=30))
def test_each_held_pull_is_woken_once(pulls):
    hold: PullHold[str] = PullHold()
    for number, (queue, offset, deadline) in enumerate(pulls):
        hold.hold(held(str(number), queue=queue, offset=offset, deadline=deadline))
    woken = (
        names(hold.arrived("T", 0, 5))
        + names(hold.expired(25, 999))
        + names(hold.arrived("T", 1, 9))
    )
    woken += names(hold.take(2))
    woken += names(hold.take(99))
    assert sorted(woken, key=int) == [str(number) for number in range(len(pulls))]


def test_pulls_expire_in_slices_and_leave_with_their_owner_at_any_number(hold):
    """With 10,000 on one queue, each of its own client: none is looked at for another one."""
    for number in range(10_000):
        hold.hold(held(str(number), owner=number, deadline=number))
    with counted_turns() as turns:
        turns.run(lambda: [hold.drop_owner(number) for number in range(100)])
        turns.run(lambda: list(hold.expired(20_000, 128)))
        assert names(hold.expired(230, 9)) == ["228", "229", "230"]
        assert names(hold.arrived("T", 0, 1))
        turns.run(lambda: list(hold.expired(20_000, 128)))
    assert turns.lines < 8 * 128 * 8 and len(hold) == 0
    while hold.is_late(0):
        assert not list(hold.expired(0, 128))


def test_r58_a_closed_connection_is_not_kept_until_the_deadline_of_its_pull(hold):
    """A stranger asks to wait for years, and leaves."""

    class Owner: ...

    owner = Owner()
    gone = weakref.ref(owner)
    hold.hold(held("first", deadline=10))
    hold.hold(held("years", owner=owner, deadline=1 << 60))
    hold.drop_owner(owner)
    del owner
    assert gone() is None and len(hold) == 1


def test_pulls_that_were_woken_leave_no_deadline_behind(hold):
    for number in range(20):
        hold.hold(held(f"{number}", deadline=60_000))
    assert len(names(hold.arrived("T", 0, 1))) == 20
    while hold.is_late(0):
        assert not list(hold.expired(0, 1))
    assert not hold._deadlines
