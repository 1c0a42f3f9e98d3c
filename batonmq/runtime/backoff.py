"""Pauses between attempts, doubled up to a limit. Pure: the caller has clock and timer."""

from typing import Final

_DOUBLINGS_MAX: Final = 32


def pause_ms(first_ms: int, max_ms: int, failures: int) -> int:
    # The limit of the shift: the number would grow with each failure for days.
    return min(first_ms << min(failures - 1, _DOUBLINGS_MAX), max_ms)


class Backoff:
    __slots__ = ("_failures", "_first_ms", "_max_ms")

    def __init__(self, first_ms: int, max_ms: int) -> None:
        self._first_ms = first_ms
        self._max_ms = max_ms
        self._failures = 0

    def next_ms(self) -> int:
        """The pause after one more failure: `first_ms`, then doubled, at most `max_ms`."""
        self._failures += 1
        return pause_ms(self._first_ms, self._max_ms, self._failures)

    def reset(self) -> None:
        self._failures = 0
