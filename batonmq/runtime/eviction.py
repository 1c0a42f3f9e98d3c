"""Chooses who loses a place if there are too few (R58). Pure. The oldest holder of the host with
the most places loses it, so a flood displaces itself."""

import sys
from typing import Generic, TypeVar

K = TypeVar("K")


class Crowd(Generic[K]):
    """Holders of places, oldest first, by host; a holder may have several. Not thread-safe."""

    def __init__(self, places: int = sys.maxsize) -> None:
        self.places = places
        self._taken = 0
        self._by_host: dict[str, dict[K, int]] = {}
        self._taken_by_host: dict[str, int] = {}
        # Places -> hosts that have so many. A look at all hosts for each loser would be too slow,
        # since a stranger can have one for each connection.
        self._hosts_with: dict[int, dict[str, None]] = {}
        self._host_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __contains__(self, holder: K) -> bool:
        return holder in self._host_of

    @property
    def taken(self) -> int:
        return self._taken

    def add(self, holder: K, address: str) -> K | None:
        """Gives `holder` at `address` (host:port) a place. Returns the holder that lost its own."""
        self.hold(holder, address, 1)
        return self.take_one() if self._taken > self.places else None

    def hold(self, holder: K, address: str, places: int) -> None:
        """Sets the number of places of `holder`, at the host where it was added."""
        host = self._host_of.setdefault(holder, address.rpartition(":")[0])
        holders = self._by_host.setdefault(host, {})
        more = places - holders.get(holder, 0)
        holders[holder] = places
        self._take(host, more)

    def remove(self, holder: K) -> None:
        """Without effect if it holds none."""
        host = self._host_of.pop(holder, None)
        if host is not None:
            self._take(host, -self._by_host[host].pop(holder))
            if not self._by_host[host]:
                del self._by_host[host]
                self._count(host, None)

    def take_one(self) -> K | None:
        """Removes a holder and returns it; None if there is none."""
        if not self._host_of:
            return None
        crowded = next(iter(self._hosts_with[max(self._hosts_with)]))
        holder = next(iter(self._by_host[crowded]))
        self.remove(holder)
        return holder

    def _take(self, host: str, more: int) -> None:
        self._taken += more
        self._count(host, self._taken_by_host.get(host, 0) + more)

    def _count(self, host: str, taken: int | None) -> None:
        """`host` has so many places now; None: it is gone."""
        before = self._taken_by_host.pop(host, None)
        if before is not None:
            self._hosts_with[before].pop(host)
            if not self._hosts_with[before]:
                del self._hosts_with[before]
        if taken is not None:
            self._taken_by_host[host] = taken
            self._hosts_with.setdefault(taken, {})[host] = None
