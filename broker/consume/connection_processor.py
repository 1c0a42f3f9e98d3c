"""Connected clients: members of a consumer group, its subscription of a topic, and producers.

Origin: AdminBrokerProcessor, ConsumerManageProcessor in Java.
"""

from collections.abc import Callable, Iterable
from typing import cast

from batonmq.broker.consume.consumer_manager import ClientChannel, ConsumerManager
from batonmq.broker.request_fields import system_error, text
from batonmq.protocol.bodies import (
    ClientConnection,
    ConsumerConnection,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    QuerySubscriptionResponseBody,
)
from batonmq.protocol.codes import LanguageCode, RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.turns import Pace, in_turns


class ConnectionProcessor:
    """What the heartbeats at this broker said. `clock_ms` is the clock of the manager's times."""

    def __init__(self, clients: ConsumerManager, clock_ms: Callable[[], int]) -> None:
        self._clients = clients
        self._clock_ms = clock_ms

    def register(self, processors: Processors) -> None:
        for code, handler in (
            (RequestCode.GET_CONSUMER_CONNECTION_LIST, self.consumers),
            (RequestCode.GET_PRODUCER_CONNECTION_LIST, self.producers),
            (RequestCode.GET_ALL_PRODUCER_INFO, self.all_producers),
        ):
            processors.register(code, handler, large=True)
        processors.register(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, self.subscription)

    async def consumers(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Members and subscriptions (GET_CONSUMER_CONNECTION_LIST, 203). Raises BrokerRefusal
        CONSUMER_NOT_ONLINE."""
        group = text(request, "consumerGroup")
        known = self._clients.groups.get(group)
        if known is None:
            raise BrokerRefusal(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{group}] not online"
            )
        body = ConsumerConnection(
            connection_set=await _connections(known.members.values()),
            consume_from_where=known.consume_from_where,
            consume_type=known.consume_type,
            message_model=known.message_model,
            subscription_table=known.subscriptions,
        )
        return RemotingCommand.response_to(request, body=body.encode())

    async def producers(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The producers of a group (GET_PRODUCER_CONNECTION_LIST, 204). Raises BrokerRefusal if
        there are none."""
        group = text(request, "producerGroup")
        members = self._clients.producers.get(group)
        if not members:
            raise system_error(f"the producer group[{group}] not exist")
        body = ProducerConnection(connection_set=await _connections(members.values()))
        return RemotingCommand.response_to(request, body=body.encode())

    async def all_producers(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The producers of every group, with their last heartbeats (GET_ALL_PRODUCER_INFO, 328)."""
        # Heartbeats are timed by a monotonic clock; tools expect wall clock times.
        behind_ms = wall_ms() - self._clock_ms()
        table, pace = ProducerTableInfo(), Pace()
        # Copies: heartbeats change both tables between the turns.
        for group, members in list(self._clients.producers.items()):
            table.data[group] = [
                ProducerInfo(
                    client_id=each.client_id,
                    language=LanguageCode(each.language).name,
                    last_update_timestamp=each.last_heartbeat_ms + behind_ms,
                    remote_ip=cast(Connection, each.channel).peer,
                    version=each.version,
                )
                async for each in pace.through(list(members.values()))
            ]
        return RemotingCommand.response_to(request, body=table.encode())

    def subscription(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """A connected group's subscription of a topic, if any (QUERY_SUBSCRIPTION_BY_CONSUMER,
        345)."""
        group, topic = text(request, "group"), text(request, "topic")
        body = QuerySubscriptionResponseBody(
            group=group, subscription_data=self._clients.subscription(group, topic), topic=topic
        )
        return RemotingCommand.response_to(request, body=body.encode())


async def _connections(members: Iterable[ClientChannel]) -> list[ClientConnection]:
    return [
        ClientConnection(
            client_addr=cast(Connection, each.channel).peer,
            client_id=each.client_id,
            language=LanguageCode(each.language).name,
            version=each.version,
        )
        async for each in in_turns(list(members))
    ]
