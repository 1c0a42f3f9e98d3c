"""The checker of what clients were promised: in which order a group first gets what has a key."""

from __future__ import annotations

import pytest

from sim.messages import Messages, Sent

TOPIC = "TopicB"
SENT = [Sent(f"m{n}", TOPIC, "key", n) for n in range(1, 4)]


class _Life:
    """Three messages of a key, acknowledged at queue offsets 1 to 3, for one group."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.expired: set[str] = set()
        self._messages = Messages(self.violations.append)
        self._messages.is_expired = self.expired.__contains__
        self._messages.join("GroupA", frozenset({TOPIC}))
        for sent in SENT:
            self._messages.note_acked(sent, (TOPIC, 0, sent.n))

    def deliver(self, *numbers: int) -> None:
        for n in numbers:
            self._messages.note_delivered("GroupA", SENT[n - 1], (TOPIC, 0, n))


@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 2, 1, 2, 3)])
def test_in_turn_and_again(numbers: tuple[int, ...]) -> None:
    life = _Life()
    life.deliver(*numbers)
    assert not life.violations


def test_first_after_a_later_one() -> None:
    life = _Life()
    life.deliver(2, 1)
    assert life.violations == ["order: GroupA gets key 1 first after 2"]


def test_what_had_expired_comes_late_from_a_member_that_pulled_it_before() -> None:
    life = _Life()
    life.expired.add("m1")
    life.deliver(2, 1, 3)
    assert not life.violations


@pytest.mark.parametrize("until_it_comes", [(2,), (2, 3)])
def test_what_expired_only_after_a_later_one_came_was_skipped(
    until_it_comes: tuple[int, ...],
) -> None:
    life = _Life()
    life.deliver(until_it_comes[0])
    life.expired.add("m1")
    life.deliver(*until_it_comes[1:], 1)
    assert life.violations == [f"order: GroupA gets key 1 first after {until_it_comes[-1]}"]


def test_what_expired_excuses_no_other() -> None:
    life = _Life()
    life.expired.add("m1")
    life.deliver(3, 1, 2)
    assert life.violations == ["order: GroupA gets key 2 first after 3"]
