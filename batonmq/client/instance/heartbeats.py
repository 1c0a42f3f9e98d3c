"""The producers and consumers of a client, and their heartbeats to the brokers."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable

from batonmq.client.errors import ClientError
from batonmq.client.instance.connections import Connections
from batonmq.client.instance.routes import RouteTable
from batonmq.client.instance.topic_route import TopicRoute
from batonmq.protocol.bodies import ConsumerData, HeartbeatData, ProducerData
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import ConnectError, RequestTimeoutError
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.turns import in_turns

log = logging.getLogger(__name__)

_UNREGISTER_MS = 1_000


class ClientMember:
    """The interface between a client instance and its producers and consumers."""

    def producer_group(self) -> str | None:
        return None

    def consumer_data(self) -> ConsumerData | None:
        return None

    @property
    def shares_queues(self) -> bool:
        """Whether it consumes a share of the queues, which the members' client ids decide."""
        return False

    def topics(self) -> Collection[str]:
        """Topics whose routes must be kept fresh."""
        return ()

    def route_changed(self, route: TopicRoute) -> None:
        """A route differs from the last one."""

    def masters_moved(self, broker_names: Collection[str]) -> None:
        """The masters of these broker groups have new addresses. Called once for all topics."""

    def transaction_asked(self, request: RemotingCommand, address: str) -> None:
        """The broker at `address` asks for the state of a transaction."""

    def replied(self, request: RemotingCommand) -> bool:
        """A broker pushes a reply; returns whether this member waits for it."""
        return False

    def members_changed(self, group: str) -> None:
        """A broker reports that a consumer group gained or lost a member."""

    async def asked(self, request: RemotingCommand) -> RemotingCommand | None:
        """A broker passes on an operator's request to a group member (`member_calls`)."""
        return RemotingCommand.response_to(
            request, ResponseCode.SYSTEM_ERROR, f"{type(self).__name__} does not answer that"
        )


class Heartbeats:
    def __init__(self, connections: Connections, routes: RouteTable) -> None:
        self._connections = connections
        self._routes = routes
        self._members: list[ClientMember] = []

    @property
    def members(self) -> tuple[ClientMember, ...]:
        return tuple(self._members)

    def add(self, member: ClientMember) -> None:
        """Raises ClientError for a second consumer that shares the queues of a group: brokers know
        both by one client id, so both would take the same queues, and every message would be
        consumed twice."""
        if not member.shares_queues:
            self._members.append(member)
            return
        data = member.consumer_data()
        for known in self._members:
            other = known.consumer_data() if known.shares_queues else None
            if data is not None and other is not None and other.group_name == data.group_name:
                raise ClientError(
                    f"this client instance has a consumer of group {data.group_name} already:"
                    " give the second one an instance of its own"
                )
        # First: it speaks for the group if the instance has other consumers of it.
        self._members.insert(0, member)

    async def remove(self, member: ClientMember) -> None:
        """Unregisters a member at the brokers, so that its group can rebalance at once."""
        if member not in self._members:
            return
        # First, or a heartbeat that is sent meanwhile would announce it again.
        self._members.remove(member)
        ext = {"clientID": self._connections.client_id}
        left = self._data()  # a group of which this client has another member keeps it
        producer_group, consumer = member.producer_group(), member.consumer_data()
        of_producers = {data.group_name for data in left.producer_data_set}
        of_consumers = {data.group_name for data in left.consumer_data_set}
        if producer_group is not None and producer_group not in of_producers:
            ext["producerGroup"] = producer_group
        if consumer is not None and consumer.group_name not in of_consumers:
            ext["consumerGroup"] = consumer.group_name
        if len(ext) == 1:
            return
        masters: set[str] = set()
        async for route in in_turns(self._routes.all()):
            masters.update(route.masters().values())
        await asyncio.gather(*(self._unregister(address, ext) for address in sorted(masters)))

    async def _unregister(self, address: str, ext: dict[str, str]) -> None:
        # One for each broker: a request has one id, by which its reply is found.
        request = RemotingCommand.request(RequestCode.UNREGISTER_CLIENT, ext)
        # A broker that does not hear it forgets the member when its heartbeats stop.
        with contextlib.suppress(ConnectError, RequestTimeoutError):
            await self._connections.remoting.invoke(address, request, _UNREGISTER_MS)

    async def send(self, addresses: Iterable[str] | None = None) -> None:
        """Sends heartbeats to all known brokers (slaves only if there is a consumer), or to the
        given ones. Slaves get them so that they know the groups when they become master."""
        data = self._data()
        if not data.producer_data_set and not data.consumer_data_set:
            return
        if addresses is None:
            addresses = await self._broker_addresses(data)
        body = data.encode()  # once for all brokers
        await asyncio.gather(*(self._send_to(address, body) for address in sorted(set(addresses))))

    async def send_forever(self) -> None:
        while True:
            await asyncio.sleep(self._connections.options.heartbeat_ms / 1000)
            try:
                await self.send()
            # Any error: without further heartbeats brokers would give this member's queues away.
            except Exception:
                log.exception("heartbeats_failed")

    async def _send_to(self, address: str, body: bytes) -> None:
        request = RemotingCommand.request(RequestCode.HEART_BEAT, {}, body)
        timeout_ms = self._connections.options.request_timeout_ms
        try:
            reply = await self._connections.remoting.invoke(address, request, timeout_ms)
        except (ConnectError, RequestTimeoutError) as error:
            log.info("heartbeat_failed address=%s reason=%s", address, error)
            return
        if reply.code != ResponseCode.SUCCESS:
            log.warning(
                "heartbeat_refused address=%s code=%d remark=%s", address, reply.code, reply.remark
            )

    def _data(self) -> HeartbeatData:
        producers = {g for m in self._members if (g := m.producer_group()) is not None}
        consumers: dict[str, ConsumerData] = {}
        for data in filter(None, (member.consumer_data() for member in self._members)):
            # One for each group: of two, brokers would keep the subscriptions of the last only.
            known = consumers.setdefault(data.group_name, data)
            topics = {subscription.topic for subscription in known.subscription_data_set}
            known.subscription_data_set += [
                added for added in data.subscription_data_set if added.topic not in topics
            ]
        return HeartbeatData(
            client_id=self._connections.client_id,
            producer_data_set=[ProducerData(group_name=g) for g in sorted(producers)],
            consumer_data_set=list(consumers.values()),
        )

    async def _broker_addresses(self, data: HeartbeatData) -> set[str]:
        found: set[str] = set()
        async for route in in_turns(self._routes.all()):
            if data.consumer_data_set:
                for addresses in route.brokers.values():
                    found.update(addresses.values())
            else:
                found.update(route.masters().values())
        return found
