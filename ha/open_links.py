"""Which sockets of the HA service are still open, so that closing it can wait for the last one.

Ending a connection only asks the transport to; the loop must live until it has.
"""

from __future__ import annotations

import asyncio


class OpenLinks:
    """Counts connections from `connection_made` to `connection_lost`."""

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


__all__ = ["OpenLinks"]
