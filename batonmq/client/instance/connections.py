"""Options, connections and background tasks of a client instance."""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from batonmq.auth.signature import Credentials, Signer
from batonmq.client.arguments import CheckedOptions
from batonmq.client.errors import ClientClosedError, ClientError
from batonmq.client.hooks import Hook
from batonmq.client.instance.name_servers import NameServers, name_servers_from
from batonmq.remoting.connection import Processors
from batonmq.remoting.endpoint import RemotingClient
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.tls import ClientTls, DialTls

log = logging.getLogger(__name__)

T = TypeVar("T")

# Several objects may be made in one millisecond.
_serial = itertools.count(1)


@dataclass(frozen=True, slots=True)
class ClientOptions(CheckedOptions):
    """Times in ms. The defaults are Java's, except `suspicion_ms`, which Java does not have.
    `route_poll_ms`: how often routes are polled. `suspicion_ms`: if a master leaves a request
    unanswered for so long, the name servers are asked for a new master. `instance_name`: gives the
    client a stable id (for offset files of broadcasting consumers); without it each client object
    has its own. `hook`: observes sends and listener calls. `tls`: how to connect with TLS; None:
    plain connections. `credentials`: the user that signs each request; None: unsigned."""

    route_poll_ms: int = 30_000
    heartbeat_ms: int = 30_000
    request_timeout_ms: int = 3_000
    connect_timeout_ms: int = 3_000
    suspicion_ms: int = 300
    instance_name: str | None = None
    hook: Hook | None = None
    tls: ClientTls | None = None
    credentials: Credentials | None = None


class Connections:
    """Open from `connect` to `disconnect`."""

    def __init__(
        self, name_servers: str | Sequence[str] | None = None, options: ClientOptions | None = None
    ) -> None:
        """`name_servers`: `host:port;host:port` or a list; default: NAMESRV_ADDR."""
        self.options = options or ClientOptions()
        self.ip = local_ip()
        self.client_id = new_client_id(self.ip, self.options.instance_name)
        self.name_server_addresses = name_servers_from(name_servers)
        self._remoting: RemotingClient | None = None
        self._name_servers: NameServers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def running(self) -> bool:
        return self._remoting is not None

    @property
    def remoting(self) -> RemotingClient:
        """Raises ClientClosedError."""
        if self._remoting is None:
            raise ClientClosedError("the client")
        # Elsewhere a request would be written and its answer never seen.
        if asyncio.get_running_loop() is not self._loop:
            raise ClientError(
                "a client works in the event loop that started it: start one in each loop, thread"
                " and forked process, or use batonmq.blocking"
            )
        return self._remoting

    @property
    def name_servers(self) -> NameServers:
        """Raises ClientClosedError."""
        if self._name_servers is None:
            raise ClientClosedError("the client")
        return self._name_servers

    def connect(self, processors: Processors) -> None:
        """`processors` serve the requests that brokers send to this client. Raises TlsError."""
        tls, user = self.options.tls, self.options.credentials
        self._loop = asyncio.get_running_loop()
        # Again: processes that were forked since it was made must not have the same.
        self.client_id = new_client_id(self.ip, self.options.instance_name)
        self._remoting = RemotingClient(
            processors,
            connect_timeout_ms=self.options.connect_timeout_ms,
            tls=DialTls(tls) if tls is not None else None,
            sign=Signer(user) if user is not None else None,
        )
        self._name_servers = NameServers(self.name_server_addresses, self._remoting)

    async def disconnect(self) -> None:
        """Ends the tasks, then closes the connections."""
        # First, so that no task connects again while the others end.
        remoting, self._remoting, self._name_servers = self._remoting, None, None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if remoting is not None:
            await remoting.close()

    def spawn(self, work: Coroutine[Any, Any, T], *, log_failure: bool = True) -> asyncio.Task[T]:
        """Runs a background task until this client closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop holds only a weak reference
        task.add_done_callback(self._log_failure if log_failure else self._discard)
        return task

    def _log_failure(self, task: asyncio.Task[Any]) -> None:
        if (error := self._discard(task)) is not None:
            log.error("client_task_failed client_id=%s", self.client_id, exc_info=error)

    def _discard(self, task: asyncio.Task[Any]) -> BaseException | None:
        self._tasks.discard(task)
        return None if task.cancelled() else task.exception()


def local_ip() -> str:
    """The address of the interface for outgoing traffic; 127.0.0.1 without a network. Connecting a
    datagram socket only chooses a route and sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def new_client_id(ip: str, instance_name: str | None = None) -> str:
    """`ip@name`; without a name unique per client object, as Java's `ip@pid#nanos`."""
    return f"{ip}@{instance_name or f'{os.getpid()}#{wall_ms()}{next(_serial)}'}"
