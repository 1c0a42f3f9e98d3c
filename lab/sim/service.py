"""Service during a fault: how long a group is without an acknowledgement while a fault lasts.

Other checkers look at what is promised; this one looks at the clock. While a partial fault lasts,
and the group could be served in spite of it (`could_serve`), the gap between two acknowledgements
must not exceed the bound of that kind of fault. Senders send all the time, so a gap is the group's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from lab.sim.world import World

#: Kind of fault -> seconds that a group may be without acknowledgements while it lasts. The reasons
#: stand in docs/simulation.md, "Service during a fault".
BOUNDS_S = {
    "one way": 2.0,
    "link": 2.0,
    "zone": 3.0,
    "slow disk": 2.5,
    "slow link": 2.0,
    "full disk": 2.0,
    "pause": 2.0,
    "kill": 2.5,
    "silence": 3.5,
    "foreign volume": 2.5,
    "lost controllers": 3.0,
    "restored controllers": 3.0,
}


@dataclass(frozen=True)
class Reach:
    """Who could work together: hosts by address. `works`: those that run; `hears(one, other)`:
    whether bytes go both ways between them."""

    works: Callable[[str], bool]
    hears: Callable[[str, str], bool]

    def could_serve(
        self, controllers: Collection[str], members: Collection[str], min_in_sync: int
    ) -> bool:
        """Whether some controller has a majority, and a member of the recorded set that it hears
        has as many members beside it as minInSyncReplicas asks for."""
        for lead in filter(self.works, controllers):
            with_it = [one for one in controllers if one == lead or self._meets(lead, one)]
            if 2 * len(with_it) <= len(controllers):
                continue
            heard = [one for one in members if self._meets(lead, one)]
            for master in heard:
                in_sync = [one for one in heard if one == master or self._meets(master, one)]
                if len(in_sync) >= min_in_sync:
                    return True
        return False

    def _meets(self, one: str, other: str) -> bool:
        return self.works(other) and self.hears(one, other)


class Service:
    """`acked` is to be called at each acknowledgement, `check` all the time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last_s = 0.0
        self._fault = ""
        self._bound_s = 0.0
        self.longest_s = 0.0
        """The longest gap since `expect`."""

    def expect(self, fault: str, bound_s: float) -> None:
        """From now on no gap may be longer than `bound_s`."""
        self._fault, self._bound_s = fault, bound_s
        self._last_s, self.longest_s = self._world.now_s, 0.0

    def end(self) -> float:
        """The fault is over, or another one begins: the longest gap of this one, in seconds."""
        self._note()
        self._fault = ""
        return self.longest_s

    def acked(self) -> None:
        self._note()
        self._last_s = self._world.now_s

    def check(self) -> None:
        self._note()
        if self._fault and self.longest_s > self._bound_s:
            fault, self._fault = self._fault, ""
            self._world.violate(
                f"R50, R51: nothing is acknowledged for more than {self._bound_s:g} s"
                f" while {fault} lasts"
            )

    def _note(self) -> None:
        if self._fault:
            self.longest_s = max(self.longest_s, self._world.now_s - self._last_s)
