"""Who may stay connected to the gRPC port when strangers crowd it (R58).

gRPC only bounds the number of connections and refuses the next one, which may be a broker's. So
connections without a session of a registered broker share a quarter of the places; more of them are
shut down. gRPC does not show its sockets: they are looked up among this process's descriptors, and
only while many of these are in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final
from urllib.parse import unquote

from batonmq.runtime.eviction import Crowd
from batonmq.runtime.sockets import (
    accepted_at,
    descriptors_allowed,
    descriptors_in_use,
    hang_up,
    plain_address,
)
from batonmq.runtime.turns import in_turns

log = logging.getLogger(__name__)

_CONNECTIONS_MAX: Final = 8_192
_LOOK_S: Final = 0.5


def connections_max() -> int:
    """Of the gRPC port. Files and the other ports need descriptors, too."""
    return min(_CONNECTIONS_MAX, descriptors_allowed() // 4)


class GrpcPlaces:
    """`members` returns the peers that have a session of a registered broker, as gRPC calls them:
    `ipv4:127.0.0.1:5`."""

    def __init__(self, members: Callable[[], Iterable[str]]) -> None:
        self.stranger_places = connections_max() // 4
        self._members = members

    async def watch(self, port: int) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if descriptors_in_use() >= self.stranger_places:
                await self.look(port)

    async def look(self, port: int) -> None:
        """Shuts down the connections of strangers that have no place."""
        found = await asyncio.to_thread(accepted_at, port)
        members = {_address(peer) for peer in self._members()}
        crowd: Crowd[tuple[str, int]] = Crowd(self.stranger_places)
        ended = 0
        async for each in in_turns(each for each in found if each[0] not in members):
            loser = crowd.add(each, each[0])
            if loser is not None:
                hang_up(*loser)
                ended += 1
        if ended:
            log.warning("grpc_connections_crowded_out open=%d ended=%d", len(found), ended)


def _address(peer: str) -> str:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return plain_address(host, port)
