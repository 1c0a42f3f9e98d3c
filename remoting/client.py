"""The calling side: one connection per address, made at first use and shared.

Origin: Java `NettyRemotingClient`. Requests that the other side originates go to `processors`.
"""

import asyncio
import logging

from protocol.errors import ConnectError, ResponseError
from protocol.message_id import split_address
from remoting.command import RemotingCommand
from remoting.connection import Connection
from remoting.endpoint import Endpoint
from remoting.processors import Processors

logger = logging.getLogger(__name__)


class RemotingClient(Endpoint):
    """Addresses are "host:port". A lost connection is dialled again at its next use."""

    _server_side = False

    def __init__(
        self,
        processors: Processors | None = None,
        *,
        connect_timeout_ms: int = 3000,
        idle_timeout_s: float = 120,
        name: str = "client",
    ) -> None:
        super().__init__(processors or Processors(), name=name, idle_timeout_s=idle_timeout_s)
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._by_address: dict[str, Connection] = {}
        self._dials: dict[str, asyncio.Task[Connection]] = {}
        self._closed = False

    async def invoke(
        self, address: str, cmd: RemotingCommand, timeout_ms: int = 3000
    ) -> RemotingCommand:
        """Sends a request and waits for its response, whatever its code.

        The time for dialling counts. Raises ConnectError or RequestTimeoutError.
        """
        loop = self._bind()
        started = loop.time()
        connection = self.live_connection(address)
        if connection is None:
            connection = await self.connection(address, timeout_ms=timeout_ms)
        left_ms = timeout_ms - int((loop.time() - started) * 1000)
        return await connection.invoke(cmd, max(left_ms, 1))

    async def call(
        self, address: str, cmd: RemotingCommand, timeout_ms: int = 3000
    ) -> RemotingCommand:
        """As `invoke`, but raises ResponseError for any code but 0."""
        response = await self.invoke(address, cmd, timeout_ms)
        if response.code != 0:
            raise ResponseError(response.code, response.remark, address)
        return response

    async def oneway(self, address: str, cmd: RemotingCommand) -> None:
        """Sends a request that nobody answers. Raises ConnectError."""
        (self.live_connection(address) or await self.connection(address)).oneway(cmd)

    def live_connection(self, address: str) -> Connection | None:
        """The connection to an address if there is one already."""
        connection = self._by_address.get(address)
        return None if connection is None or connection.closed else connection

    async def connection(self, address: str, *, timeout_ms: int | None = None) -> Connection:
        """The connection to an address, dialled if need be; all who wait share one dial.

        Raises ConnectError.
        """
        connection = self.live_connection(address)
        if connection is not None:
            return connection
        dial = self._dials.get(address)
        if dial is None:
            if self._closed:
                raise ConnectError(address, "the client is closed")
            dial = self._bind().create_task(self._dial(address))
            self._dials[address] = dial
            dial.add_done_callback(lambda task: self._dialled(address, task))
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        try:
            return await asyncio.wait_for(asyncio.shield(dial), timeout_s)
        except TimeoutError:
            raise ConnectError(address, f"no connection within {timeout_ms} ms") from None
        except asyncio.CancelledError:
            if dial.cancelled():
                raise ConnectError(address, "the client is closed") from None
            raise

    def _dialled(self, address: str, dial: asyncio.Task[Connection]) -> None:
        self._dials.pop(address, None)
        if not dial.cancelled():
            # Marks the error as seen, though all who waited may have given up.
            dial.exception()

    async def _dial(self, address: str) -> Connection:
        loop = self._bind()
        try:
            host, port = split_address(address)
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(self._new_connection, host, port)
        except ValueError as error:
            raise ConnectError(address, str(error)) from error
        except TimeoutError:
            limit_ms = int(self._connect_timeout_s * 1000)
            raise ConnectError(address, f"no connection within {limit_ms} ms") from None
        except OSError as error:
            raise ConnectError(address, error.strerror or str(error)) from error
        self._by_address[address] = connection
        connection.on_close.append(lambda closed: self._forget(address, closed))
        return connection

    def _forget(self, address: str, connection: Connection) -> None:
        if self._by_address.get(address) is connection:
            del self._by_address[address]

    def close_connection(self, address: str, reason: str = "no longer needed") -> None:
        """Lets go of the connection to an address, if there is one."""
        connection = self._by_address.pop(address, None)
        if connection is not None:
            connection.close(reason)

    async def close(self) -> None:
        """Lets go of all connections; later calls raise ConnectError."""
        self._closed = True
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        if dials:
            await asyncio.wait(dials)
        await self._close_connections("the client is closing")


__all__ = ["RemotingClient"]
