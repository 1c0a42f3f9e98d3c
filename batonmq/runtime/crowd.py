"""Who makes room where more come than there are places for (SAFETY R58). Pure.

A flood pushes out its own: of the host that holds the most places, the oldest holder goes.
"""

from __future__ import annotations

import sys
from typing import Generic, TypeVar

K = TypeVar("K")
"""Hashable."""


class Crowd(Generic[K]):
    """Holders of places in the order of their arrival, by host. Not thread-safe."""

    def __init__(self, places: int = sys.maxsize) -> None:
        self.places = places
        self._by_host: dict[str, dict[K, None]] = {}
        self._host_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._host_of)

    def __contains__(self, holder: K) -> bool:
        return holder in self._host_of

    def add(self, holder: K, address: str) -> K | None:
        """Takes a place for `holder` at `address`, which is host:port. Returns who lost his."""
        host = address.rpartition(":")[0]
        self._host_of[holder] = host
        self._by_host.setdefault(host, {})[holder] = None
        return self.take_one() if len(self._host_of) > self.places else None

    def remove(self, holder: K) -> None:
        """Does nothing for one that holds none."""
        host = self._host_of.pop(holder, None)
        if host is not None:
            del self._by_host[host][holder]
            if not self._by_host[host]:
                del self._by_host[host]

    def take_one(self) -> K | None:
        """Takes the place of one, and returns him; None if nobody holds one."""
        if not self._host_of:
            return None
        crowded = max(self._by_host.values(), key=lambda holders: len(holders))
        holder = next(iter(crowded))
        self.remove(holder)
        return holder
