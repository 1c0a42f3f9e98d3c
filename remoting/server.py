"""The listening side: any number of addresses, one table of processors.

Origin: Java `NettyRemotingServer`. A broker listens on its port and on port-2 with one server.
"""

import asyncio
import logging

from remoting.endpoint import Endpoint
from remoting.processors import Processors

logger = logging.getLogger(__name__)


class RemotingServer(Endpoint):
    """`on_batch_end` is called once after each buffer's frames of one connection were handed out;
    set the hooks before `listen`."""

    _server_side = True

    def __init__(
        self, processors: Processors, *, name: str = "server", idle_timeout_s: float = 120
    ) -> None:
        super().__init__(processors, name=name, idle_timeout_s=idle_timeout_s)
        self._listeners: list[asyncio.Server] = []

    async def listen(self, host: str, port: int) -> int:
        """Listens on one more address and returns the port bound (`port` 0: any free one).

        Raises OSError, for example where the port is taken.
        """
        loop = self._bind()
        listener = await loop.create_server(self._new_connection, host, port, backlog=1024)
        self._listeners.append(listener)
        bound = int(listener.sockets[0].getsockname()[1])
        logger.info("listening endpoint=%s address=%s:%d", self.name, host, bound)
        return bound

    async def close(self) -> None:
        """Stops listening, lets go of all connections, ends the handlers that still run."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.close()
        await self._close_connections("the server is closing")
        for listener in listeners:
            await listener.wait_closed()


__all__ = ["Processors", "RemotingServer"]
