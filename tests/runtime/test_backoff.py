"""Doubling pauses, as HA, the controller and the client use them."""

from hypothesis import given
from hypothesis import strategies as st

from batonmq.runtime.backoff import Backoff, pause_ms


def test_pauses_double_up_to_the_limit_and_begin_again() -> None:
    backoff = Backoff(50, 1_000)
    assert [backoff.next_ms() for _ in range(7)] == [50, 100, 200, 400, 800, 1_000, 1_000]
    backoff.reset()
    assert backoff.next_ms() == 50


@given(st.integers(1, 10_000), st.integers(1, 100_000), st.integers(1, 10**9))
def test_the_pause_is_the_naive_one(first_ms: int, max_ms: int, failures: int) -> None:
    naive = first_ms
    for _ in range(min(failures, 40) - 1):
        naive *= 2
    assert pause_ms(first_ms, max_ms, failures) == min(naive, max_ms)
