"""How many groups the liveness core checks in one turn of the loop, and which ones (R58). Pure."""

from bisect import bisect
from typing import Final

GROUPS_A_TURN: Final = 64
"""After a snapshot, or when the gate opens. A check takes about 50 µs then, with the view
pushed."""
GROUPS_A_TICK: Final = 256
"""A check takes about 10 µs, twice as much if the group needs an election."""
FRESH_GROUPS_A_TICK: Final = 16
"""Of the groups that never had a master. Fewer, since their brokers ask for the first election
themselves."""


class GroupRotation:
    """Takes turns through the groups, `at_once` at a time."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._last = ""

    def next_of(self, names: list[str]) -> list[str]:
        """All of `names`, which are sorted, or the next `at_once` of them."""
        if len(names) > self._at_once:
            # By name, not by position: groups may have been added or removed since.
            begin = bisect(names, self._last)
            names = (names[begin:] + names[:begin])[: self._at_once]
            self._last = names[-1]
        return names
