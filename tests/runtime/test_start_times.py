"""The steps of a start, and how long each took."""

from batonmq.runtime.start_retry import Laps


def test_each_step_lasts_from_the_end_of_the_one_before() -> None:
    times = iter([5, 100, 110, 110, 1110])
    laps = Laps(lambda: next(times))
    laps.begin()
    assert laps.end("code") == "code_ms=10"
    assert laps.end("store") == "code_ms=10 store_ms=0"
    assert laps.end("role") == "code_ms=10 store_ms=0 role_ms=1000"
