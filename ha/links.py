"""What every HA connection needs, whatever its protocol.

OpenLinks lets a closing service wait for its last socket. WaitingLinks keeps slaves that connect
before the mastership has begun. ByteRate measures throughput.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, Protocol, TypeVar

WAIT_S: Final = 0.5
WAITING_MAX: Final = 64


class OpenLinks:
    """Counts connections from `connection_made` to `connection_lost`.

    A transport needs the loop until it has closed.
    """

    def __init__(self) -> None:
        self._open = 0
        self._none = asyncio.Event()
        self._none.set()

    def made(self) -> None:
        self._open += 1
        self._none.clear()

    def lost(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._none.set()

    async def wait_none(self) -> None:
        """Returns when no connection is open."""
        await self._none.wait()


class Link(Protocol):
    """A connection that can be ended."""

    def end(self) -> None: ...


L = TypeVar("L", bound=Link)


class WaitingLinks(Generic[L]):
    """Connections of slaves to a replica that is not master yet, in the order of their arrival.

    A role change reaches the winner and the others at the same moment, and the others often connect
    before the winner has made its epoch durable. Their connections wait here without a reply until
    the mastership begins, or are closed after half a second. A refused slave would connect again
    20 ms later, which delays the first ack of the new master (R9). Nothing is sent to a waiting
    slave, so none mistakes this replica for the master. At most 64 wait; the oldest are closed
    first.
    """

    def __init__(self) -> None:
        self._links: list[L] = []
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._links)

    def add(self, link: L) -> None:
        """Keeps `link` for half a second at most."""
        if len(self._links) >= WAITING_MAX:
            self._close(self._links[0])
        self._links.append(link)
        loop = asyncio.get_running_loop()
        self._timers[id(link)] = loop.call_later(WAIT_S, self._close, link)

    def remove(self, link: L) -> None:
        """The peer closed it. Does nothing for a link that does not wait."""
        if link in self._links:
            self._links.remove(link)
            self._timers.pop(id(link)).cancel()

    def take_all(self) -> list[L]:
        """Removes and returns all waiting links."""
        links = list(self._links)
        for link in links:
            self.remove(link)
        return links

    def end_all(self) -> None:
        for link in self.take_all():
            link.end()

    def _close(self, link: L) -> None:
        self.remove(link)
        link.end()


class ByteRate:
    """Bytes of the last full second, from a growing total."""

    def __init__(self) -> None:
        self._since_ms = 0
        self._total = 0
        self._per_second = 0

    def sample(self, total: int, now_ms: int) -> int:
        """To be called now and then with the total so far; returns bytes per second."""
        elapsed_ms = now_ms - self._since_ms
        if elapsed_ms >= 1_000:
            self._per_second = (total - self._total) * 1_000 // elapsed_ms
            self._since_ms, self._total = now_ms, total
        return self._per_second
