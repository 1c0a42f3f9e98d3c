"""How long TCP itself waits for a peer whose kernel acknowledges nothing.

Both ends of an HA connection say something several times a second, so after a silent cut bytes lie
unacknowledged at both. TCP would send them again ever more seldom, for minutes, and notice the
mending of the link as late as the cut was long; a connection that ends can be dialled anew.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

UNANSWERED_MS: Final = 2_500


def limit_unanswered(transport: asyncio.Transport) -> None:
    """The connection ends with an error once sent bytes are unacknowledged for UNANSWERED_MS."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)


__all__ = ["UNANSWERED_MS", "limit_unanswered"]
