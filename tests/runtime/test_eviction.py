"""R58: who makes space where more come than there are places for."""

from collections.abc import Iterable

import pytest

from batonmq.runtime import eviction
from batonmq.runtime.eviction import Crowd


def test_r58_of_the_host_with_the_most_places_the_oldest_holder_goes_first() -> None:
    crowd: Crowd[str] = Crowd(4)
    came = ("a:1", "[::1]:1", "[::1]:2", "a:2", "[::1]:3", "[::1]:4", "c:1")
    lost = [crowd.add(each, each) for each in came]
    assert lost == [None] * 4 + ["[::1]:1", "[::1]:2", "a:1"]
    assert len(crowd) == 4 and "a:2" in crowd and "a:1" not in crowd


def test_r58_places_that_a_holder_gives_back_do_not_count() -> None:
    crowd: Crowd[str] = Crowd()
    for each in ("a:1", "b:1", "c:1"):
        crowd.add(each, each)
    for places, holder in ((5, "a:1"), (3, "b:1"), (0, "a:1")):
        crowd.hold(holder, holder, places)
    assert crowd.taken == 4
    assert [crowd.take_one() for _ in range(3)] == ["b:1", "c:1", "a:1"]


def test_r58_who_left_holds_no_place() -> None:
    crowd: Crowd[str] = Crowd(1)
    crowd.add("a:1", "a:1")
    crowd.remove("a:1")
    crowd.remove("a:1")
    assert crowd.add("b:1", "b:1") is None
    assert crowd.take_one() == "b:1" and crowd.take_one() is None


def test_r58_a_host_for_each_connection_makes_no_search_through_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0

    def counting_max(of: Iterable[int], **how: object) -> int:
        nonlocal looks
        found = list(of)
        looks += len(found)
        return max(found, **how)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(eviction, "max", counting_max, raising=False)
    crowd: Crowd[int] = Crowd(1000)
    lost = [crowd.add(number, f"10.0.{number}.1:1") for number in range(1100)]
    assert lost[1000:] == list(range(100))
    assert looks == 100
