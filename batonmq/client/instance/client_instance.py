"""The common base of producers, consumers and admin. Several of them may share one instance.

Origin: MQClientInstance.
"""

import asyncio
import logging
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from typing import Self

from batonmq.client.arguments import check_text
from batonmq.client.errors import ClientClosedError, MessageIllegalError
from batonmq.client.instance.connections import ClientOptions, Connections
from batonmq.client.instance.heartbeats import ClientMember, Heartbeats
from batonmq.client.instance.master_calls import MasterCalls
from batonmq.client.instance.routes import RouteListener, RouteTable
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.topic_name import group_problem
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.turns import to_the_end

log = logging.getLogger(__name__)


ASKED_OF_MEMBERS = (
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT,
    RequestCode.GET_CONSUMER_RUNNING_INFO,
    RequestCode.CONSUME_MESSAGE_DIRECTLY,
)


class ClientInstance(Connections, RouteListener):
    """Start it inside a running loop. `routes`, `masters` and `heartbeats` are its parts."""

    def __init__(
        self, name_servers: str | Sequence[str] | None = None, options: ClientOptions | None = None
    ) -> None:
        """`name_servers`: `host:port;host:port` or a list; default: NAMESRV_ADDR."""
        super().__init__(name_servers, options)
        self.routes = RouteTable(self, self)
        self.masters = MasterCalls(self, self.routes)
        self.heartbeats = Heartbeats(self, self.routes)

    async def start(self) -> None:
        """Belongs to the running loop from now on; a second call does nothing."""
        if self.running:
            return
        processors = Processors()
        processors.register(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, self._on_members_changed)
        for code in ASKED_OF_MEMBERS:
            processors.register(code, self._on_asked)
        processors.register(RequestCode.CHECK_TRANSACTION_STATE, self._on_transaction_check)
        processors.register(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, self._on_reply)
        self.connect(processors)
        self.spawn(self.routes.poll(self._used_topics))
        self.spawn(self.heartbeats.send_forever())

    async def close(self) -> None:
        """Close its producers and consumers first."""
        self.masters.close()
        await to_the_end(self.disconnect())

    def _on_members_changed(self, request: RemotingCommand, connection: Connection) -> None:
        group = request.ext.get("consumerGroup", "")
        for member in self.heartbeats.members:
            member.members_changed(group)

    def _on_asked(
        self, request: RemotingCommand, _: Connection
    ) -> Awaitable[RemotingCommand | None]:
        # As in Java: requests about offsets name it `group`, the others `consumerGroup`.
        group = request.ext.get("group") or request.ext.get("consumerGroup", "")
        for member in self.heartbeats.members:
            data = member.consumer_data()
            if data is not None and data.group_name == group:
                return member.asked(request)
        raise BrokerRefusal(
            ResponseCode.SYSTEM_ERROR, f"client {self.client_id} is no member of group {group}"
        )

    def _on_transaction_check(self, request: RemotingCommand, connection: Connection) -> None:
        for member in self.heartbeats.members:
            member.transaction_asked(request, connection.peer)

    def _on_reply(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """A reply was pushed. The code of the response shows the replier whether its requester
        still waits."""
        if not any(member.replied(request) for member in self.heartbeats.members):
            raise BrokerRefusal(
                ResponseCode.SYSTEM_ERROR, f"client {self.client_id} does not wait for this reply"
            )
        return RemotingCommand.response_to(request)

    def _used_topics(self) -> Iterable[str]:
        return (topic for member in self.heartbeats.members for topic in member.topics())

    def route_changed(self, route: TopicRoute) -> None:
        for member in self.heartbeats.members:
            member.route_changed(route)

    def masters_moved(self, moved: Mapping[str, str], known: Collection[str], topic: str) -> None:
        log.info("masters_moved topic=%s masters=%s", topic, moved)
        # A new master lists this client's consumers to others only after a heartbeat. Groups that
        # were unknown get theirs from the producer or consumer that looked them up.
        if known:
            self.spawn(self.heartbeats.send([moved[name] for name in known]))
        for member in self.heartbeats.members:
            member.masters_moved(moved.keys())

    def masters_left(self, addresses: Collection[str]) -> None:
        """Closes connections to former masters, after a pause for their last replies."""
        # A deposed master answers what waits at once. From a hung process no reply will come, and
        # its pending requests are retried elsewhere when the connection closes.
        loop = asyncio.get_running_loop()
        for address in addresses:
            loop.call_later(self.options.suspicion_ms / 1000, self._close_if_no_master, address)

    def _close_if_no_master(self, address: str) -> None:
        # It may have been elected again during the pause.
        if self.running and not self.routes.is_master(address):
            self.remoting.close_connection(address)


class InstanceUser:
    """Uses a given instance, or starts and closes its own; also by `async with`."""

    def __init__(
        self,
        name_servers: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
    ) -> None:
        self._own_client = client is None
        self._client = client or ClientInstance(name_servers, client_options)
        self._closing: asyncio.Task[None] | None = None

    @property
    def client(self) -> ClientInstance:
        """The instance that was given, else one of its own."""
        return self._client

    async def start(self) -> None:
        """Opens its own instance; one that was given is started by its owner."""
        if self._own_client:
            await self._client.start()

    async def close(self) -> None:
        """Closing continues if its caller is cancelled; a second call waits for the first."""
        # One task for all callers: closed half-way, it would leave its tasks and connections open.
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            self._closing.add_done_callback(lambda done: setattr(self, "_closing", None))
        # A callback that closing calls may close as well: it must not wait for itself.
        if self._closing is not asyncio.current_task():
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._own_client:
            await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()


class GroupMember(InstanceUser, ClientMember):
    """A producer or consumer: between `start` and `close` heartbeats announce it to the brokers."""

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
    ) -> None:
        """`client`: an instance to share, started and closed by its owner.

        Raises MessageIllegalError for a bad group name, NoNameServerError without addresses."""
        check_text("group", group)
        if (problem := group_problem(group)) is not None:
            raise MessageIllegalError(problem)
        super().__init__(name_servers, client, client_options)
        self.group = group
        self._running = False

    async def start(self) -> None:
        if self._running:
            return
        await super().start()
        self._client.heartbeats.add(self)
        self._running = True

    async def _close(self) -> None:
        if not self._running:
            return
        self._running = False
        try:
            await self._client.heartbeats.remove(self)
        finally:
            await super()._close()

    def _check_running(self) -> None:
        if not self._running:
            raise ClientClosedError(f"{type(self).__name__} of group {self.group}")
