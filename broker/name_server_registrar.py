"""Registration with every name server: at once when something changes, and every 30 s.

One task per name server, each with its own event, so that a dead one delays no other. The body is
RegisterBrokerBody, the masterEpoch travels as DataVersion.stateVersion.
Origin: BrokerOuterAPI.registerBrokerAll in Java.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BatonError, RequestTimeoutError
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.endpoint import RemotingClient

log = logging.getLogger(__name__)

RETRY_MS = 200
RPC_TIMEOUT_MS = 3000


@dataclass(frozen=True, slots=True)
class Registration:
    """The content of one registration. `broker_id` is the role id: 0 for a master."""

    cluster_name: str
    broker_name: str
    broker_id: int
    address: str
    ha_address: str
    body: bytes

    def request(self) -> RemotingCommand:
        return RemotingCommand.request(
            RequestCode.REGISTER_BROKER,
            {
                "brokerName": self.broker_name,
                "brokerAddr": self.address,
                "clusterName": self.cluster_name,
                "haServerAddr": self.ha_address,
                "brokerId": str(self.broker_id),
                "compressed": "false",
                "bodyCrc32": str(zlib.crc32(self.body) & 0x7FFFFFFF),
            },
            self.body,
        )

    def farewell(self) -> RemotingCommand:
        return RemotingCommand.request(
            RequestCode.UNREGISTER_BROKER,
            {
                "brokerName": self.broker_name,
                "brokerAddr": self.address,
                "clusterName": self.cluster_name,
                "brokerId": str(self.broker_id),
            },
        )


class NameServerRegistrar:
    """Keeps this broker registered. `current()` is the registration, None while there is none."""

    def __init__(
        self,
        client: RemotingClient,
        name_servers: tuple[str, ...],
        period_ms: int,
        current: Callable[[], Registration | None],
    ) -> None:
        self._client = client
        self._name_servers = name_servers
        self._period_s = period_ms / 1000
        self._current = current
        self._wakers = {address: asyncio.Event() for address in name_servers}
        self._tasks: list[asyncio.Task[None]] = []
        self.registered: dict[str, bool] = dict.fromkeys(name_servers, False)

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(address), name=f"register-{address}")
            for address in self._name_servers
        ]

    def changed(self) -> None:
        """The registration changed: it goes to every name server now."""
        for waker in self._wakers.values():
            waker.set()

    async def close(self) -> None:
        """Stops registering, and unregisters at the name servers that have this broker."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        registration = self._current()
        if registration is not None:
            await asyncio.gather(
                *(
                    self._client.invoke(address, registration.farewell(), 500)
                    for address, known in self.registered.items()
                    if known
                ),
                return_exceptions=True,
            )

    async def _keep(self, address: str) -> None:
        waker = self._wakers[address]
        quiet = False
        while True:
            waker.clear()
            registration = self._current()
            wait_s = self._period_s
            if registration is not None:
                problem = await self._register(address, registration)
                self.registered[address] = problem is None
                if problem is not None:
                    wait_s = RETRY_MS / 1000
                    if not quiet:
                        log.warning("register_failed name_server=%s reason=%s", address, problem)
                quiet = problem is not None
            try:
                async with asyncio.timeout(wait_s):
                    await waker.wait()
            except TimeoutError:
                pass

    async def _register(self, address: str, registration: Registration) -> str | None:
        try:
            connection = await self._client.connection(address)
            if "registrar" not in connection.attachments:
                connection.attachments["registrar"] = self
                connection.on_close.append(lambda _: self._lost(address))
            reply = await connection.invoke(registration.request(), RPC_TIMEOUT_MS)
        except RequestTimeoutError as exc:
            # The host may have come back with another address: the next attempt dials anew.
            self._client.close_connection(address, "no answer to a registration")
            return str(exc)
        except BatonError as exc:
            return str(exc)
        if reply.code != ResponseCode.SUCCESS:
            return f"code {reply.code}: {reply.remark}"
        return None

    def _lost(self, address: str) -> None:
        """A name server drops what came over a closed connection: register again."""
        self.registered[address] = False
        self._wakers[address].set()
