"""Who stands for election at once when the leader's connection breaks, and who a little later.

A killed leader's sockets close at once, so waiting for a whole election time-out would be idle. If
both followers stood at the same moment they would split the votes and wait it out after all; so
they stand one after the other, in the order of their addresses. A broken connection proves nothing
(R6): an election that was not needed costs some milliseconds of lead, and one link that breaks
again and again does it only once in `PAUSE_S`. Any word of a leader puts the time-out back.
"""

from collections.abc import Collection, Iterable
from typing import Final

__all__ = ["Succession", "election_window_ms"]

STEP_S: Final = 0.1
"""Between one follower and the next: more than an election of one candidate takes."""
PAUSE_S: Final = 10.0


def election_window_ms(
    own: str, members: Collection[str], min_ms: int, max_ms: int
) -> tuple[float, float]:
    """Between which times of silence `own` stands for election, within [min_ms, max_ms].

    Each member has a window of its own, with as much time between two as each is long: members
    that all draw from the whole range split their votes about once in ten elections.
    """
    width_ms = (max_ms - min_ms) / len(members)
    begin_ms = min_ms + width_ms * sorted(members).index(own)
    return begin_ms, begin_ms + width_ms / 2


class Succession:
    """One node's view. Times are seconds of the Raft clock."""

    def __init__(self) -> None:
        self._pause_until_s = 0.0

    def stand_at(self, now_s: float, own: str, leader: str, members: Iterable[str]) -> float | None:
        """When `own` is to ask for votes, now that the connection to `leader` broke; None if its
        ordinary time-out is to decide."""
        if now_s < self._pause_until_s:
            return None
        self._pause_until_s = now_s + PAUSE_S
        heirs = sorted(member for member in members if member != leader)
        return now_s + STEP_S * heirs.index(own)
