"""How many groups the liveness check looks at in one turn, and which ones (SAFETY R58). Pure."""

from bisect import bisect
from typing import Final

GROUPS_A_TURN: Final = 64
"""Where the gate opens or a snapshot came: of about 50 µs each, with the views that are pushed."""
GROUPS_A_TICK: Final = 256
"""Of about 10 µs each, twice as much where all of them need an election."""
FRESH_GROUPS_A_TICK: Final = 16
"""Of those that never had a master. Their brokers ask for the first election themselves; a stranger
may register many of them, and no other group is looked at later for that (R58)."""


class Rotation:
    """Which groups a tick looks at: `at_once` of them."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._last = ""

    def next_of(self, names: list[str]) -> list[str]:
        """Of `names`, in order, all or the next ones."""
        if len(names) > self._at_once:
            begin = bisect(names, self._last)
            names = (names[begin:] + names[:begin])[: self._at_once]
            self._last = names[-1]
        return names
