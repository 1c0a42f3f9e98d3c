"""Which brokers lately ran without a change that others had answered: they cannot obey it yet.

R39 binds who has the deletion of a topic. A broker that is cut off does not have it: outside of the
set nothing waits for it (R31), and it continues to show what it has (R36).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from lab.sim.hosts import BrokerHost
from lab.sim.world import World

_SHOWN_S = 10.0
"""What a client pulled it may deliver so much later."""


class Unaware:
    """`check` is to be called all the time."""

    def __init__(self, world: World, brokers: Collection[BrokerHost]) -> None:
        self._world = world
        self._brokers = brokers
        self._ends: deque[tuple[float, int]] = deque()  # when, the shortest log of a process

    def check(self) -> None:
        services = [host.service for host in self._brokers if host.service is not None]
        now_s = self._world.now_s
        if services:
            shortest = min(service.store.max_phy_offset for service in services)
            self._ends.append((now_s, shortest))
        while self._ends and self._ends[0][0] < now_s - _SHOWN_S:
            self._ends.popleft()

    def of(self, end: int, since_s: float) -> bool:
        """Whether some process lacked a part of the log below `end` after `since_s`."""
        return any(at_s > since_s and shortest < end for at_s, shortest in self._ends)
