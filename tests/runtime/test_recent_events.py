"""A core with a wrong rule: its failed assertion shows the events that led to it."""

import traceback

import pytest

from batonmq.runtime.recent_events import EVENTS_MAX, RecentEvents, records_event, shows_events


class Lift:
    """Goes up and down between floor 0 and `top`; the rule `floor <= top` is not enforced."""

    def __init__(self, top: int) -> None:
        self.recent_events = RecentEvents()
        self.top = top
        self.floor = 0

    @records_event
    def moved(self, floors: int, now_ms: int, *, load: bytes = b"") -> int:
        self.floor += floors
        assert self.floor >= 0, "below the ground"
        return self.floor

    @records_event
    def moved_twice(self, floors: int, now_ms: int) -> int:
        self.moved(floors, now_ms)
        return self.moved(floors, now_ms)

    @shows_events
    def check_invariants(self) -> None:
        assert self.floor <= self.top, "above the roof"


def events_shown(error: BaseException) -> list[str]:
    (note,) = error.__notes__
    assert note in "".join(traceback.format_exception(error)), "it is not in the log"
    head, *lines = note.split("\n  ")
    assert head == f"the last {len(lines)} events, oldest first:"
    return lines


def test_a_failed_assertion_shows_the_event_and_those_before_it() -> None:
    lift = Lift(top=3)
    assert lift.moved(2, 1000) == 2
    with pytest.raises(AssertionError, match="below the ground") as caught:
        lift.moved(-3, now_ms=1005, load=b"four")
    assert events_shown(caught.value) == [
        "now_ms=1000 moved(floors=2)",
        "now_ms=1005 moved(floors=-3, load=<4 bytes>)",
    ]


def test_check_invariants_shows_the_last_fifty() -> None:
    lift = Lift(top=69)
    for now_ms in range(70):
        lift.check_invariants()
        lift.moved(1, now_ms)
    with pytest.raises(AssertionError, match="above the roof") as caught:
        lift.check_invariants()
    lines = events_shown(caught.value)
    assert len(lines) == EVENTS_MAX == 50
    assert lines[0] == "now_ms=20 moved(floors=1)"
    assert lines[-1] == "now_ms=69 moved(floors=1)"


def test_an_event_within_an_event_shows_them_once() -> None:
    lift = Lift(top=3)
    with pytest.raises(AssertionError) as caught:
        lift.moved_twice(-1, 7)
    assert events_shown(caught.value) == [
        "now_ms=7 moved_twice(floors=-1)",
        "now_ms=7 moved(floors=-1)",
    ]


def test_a_lookup_that_fails_shows_them_and_an_expected_error_does_not() -> None:
    class Shelf:
        recent_events = RecentEvents()

        @records_event
        def take(self, name: str) -> str:
            return {"a": "b"}[name]

        @records_event
        def refuse(self) -> None:
            raise ValueError("no")

    with pytest.raises(KeyError) as lookup:
        Shelf().take("c")
    assert events_shown(lookup.value) == ["take(name='c')"]
    with pytest.raises(ValueError, match="no") as refusal:
        Shelf().refuse()
    assert not hasattr(refusal.value, "__notes__")


def test_long_arguments_are_shortened() -> None:
    lift = Lift(top=3)
    lift.moved(1, 1, load=memoryview(bytes(1 << 20)))  # type: ignore[arg-type]
    lift.moved(0, 2, load=list(range(1000)))  # type: ignore[arg-type]
    first, second = lift.recent_events.lines()
    assert first.endswith("load=<1048576 bytes>)")
    assert len(second) < 80
