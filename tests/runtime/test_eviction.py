"""R58: who makes space where more come than there are places for."""

from batonmq.runtime.eviction import Crowd


def test_r58_of_the_host_with_the_most_places_the_oldest_holder_goes_first() -> None:
    crowd: Crowd[str] = Crowd(4)
    came = ("a:1", "[::1]:1", "[::1]:2", "a:2", "[::1]:3", "[::1]:4", "c:1")
    lost = [crowd.add(each, each) for each in came]
    assert lost == [None] * 4 + ["[::1]:1", "[::1]:2", "a:1"]
    assert len(crowd) == 4 and "a:2" in crowd and "a:1" not in crowd


def test_r58_who_left_holds_no_place() -> None:
    crowd: Crowd[str] = Crowd(1)
    crowd.add("a:1", "a:1")
    crowd.remove("a:1")
    crowd.remove("a:1")
    assert crowd.add("b:1", "b:1") is None
    assert crowd.take_one() == "b:1" and crowd.take_one() is None
