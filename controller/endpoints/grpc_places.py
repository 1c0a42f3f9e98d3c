"""Which connections stay open when strangers crowd the gRPC port (R58).

gRPC only limits the number of connections and refuses the next one, which may be a broker's. So
connections without a session of a registered broker get at most a quarter of the places, and others
of them are closed.
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
_CHECK_S: Final = 0.5


def connections_max() -> int:
    """Of the gRPC port. Files and the other ports need descriptors as well."""
    return min(_CONNECTIONS_MAX, descriptors_allowed() // 4)


class GrpcPlaces:
    """`members` returns the connections with a session of a registered broker, by gRPC's names for
    them (`ipv4:127.0.0.1:5`)."""

    def __init__(self, members: Callable[[], Iterable[str]]) -> None:
        self.stranger_places = connections_max() // 4
        self._members = members

    async def watch(self, port: int) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            # gRPC does not show its sockets. Finding them among all descriptors takes time, so it
            # is done only while many are open.
            if descriptors_in_use() >= self.stranger_places:
                await self.close_excess(port)

    async def close_excess(self, port: int) -> None:
        """Closes the connections of strangers that are too many."""
        try:
            found = await asyncio.to_thread(accepted_at, port)
        except (OSError, RuntimeError) as error:  # no descriptor or no thread is left: look again
            log.warning("grpc_connections_unknown reason=%s", error)
            return
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
