"""Slaves that dial a replica which is not master yet.

A role change reaches the winner and the others at the same moment, and the others often dial before
the winner has made its epoch durable. Their connections wait here, unanswered, until the mastership
begins, or are ended after half a second; a refused slave would come back 20 ms later, and with it
the first ack of the new master (R9). Nothing is said to a waiting slave, so none takes a replica
for the master that is not.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, Protocol, TypeVar

WAIT_S: Final = 0.5
WAITING_MAX: Final = 64


class Link(Protocol):
    """A connection that can be ended."""

    def end(self) -> None: ...


L = TypeVar("L", bound=Link)


class WaitingLinks(Generic[L]):
    """In the order of their arrival; at most 64, the oldest go first."""

    def __init__(self) -> None:
        self._links: list[L] = []
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: L) -> None:
        """Lets a connection wait, for half a second at most."""
        if len(self._links) >= WAITING_MAX:
            self._give_up(self._links[0])
        self._links.append(link)
        loop = asyncio.get_running_loop()
        self._timers[id(link)] = loop.call_later(WAIT_S, self._give_up, link)

    def remove(self, link: L) -> None:
        """The peer went away by itself. Harmless for one that does not wait."""
        if link in self._links:
            self._links.remove(link)
            self._timers.pop(id(link)).cancel()

    def take_all(self) -> list[L]:
        """Everyone who waits; nobody does afterwards."""
        links = list(self._links)
        for link in links:
            self.remove(link)
        return links

    def end_all(self) -> None:
        for link in self.take_all():
            link.end()

    def _give_up(self, link: L) -> None:
        self.remove(link)
        link.end()


__all__ = ["WAITING_MAX", "WAIT_S", "WaitingLinks"]
