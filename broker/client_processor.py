"""Clients: heartbeat (34), leave (35), members of a group (38), and the notice 40 to members.

Origin: ClientManageProcessor, ConsumerManageProcessor and Broker2Client in Java.
"""

from __future__ import annotations

import logging
from typing import cast

from batonmq.broker.consumer_manager import ConsumerManager, GroupChanged
from batonmq.broker.request_fields import text
from batonmq.broker.topics import TopicService
from batonmq.broker.write_path import WritePath
from batonmq.protocol.bodies import GetConsumerListByGroupResponseBody, HeartbeatData
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.topic_name import retry_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors

log = logging.getLogger(__name__)


class ClientProcessor:
    """Keeps the ConsumerManager and notifies the members of a group that changed."""

    def __init__(
        self,
        clients: ConsumerManager,
        topics: TopicService,
        path: WritePath,
    ) -> None:
        self._clients = clients
        self._topics = topics
        self._gate = path.gate
        self._clock_ms = path.clock_ms

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.HEART_BEAT, self.heartbeat)
        processors.register(RequestCode.UNREGISTER_CLIENT, self.unregister)
        processors.register(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.consumer_list)

    def heartbeat(self, request: RemotingCommand, channel: Connection) -> RemotingCommand:
        """34. A consumer's heartbeat makes its group and its retry topic on a master."""
        data = HeartbeatData.decode(request.body)
        if not data.client_id:
            raise BrokerRefusal(ResponseCode.INVALID_PARAMETER, "heartbeat without a clientID")
        if self._gate.refusal is None:
            for consumer in data.consumer_data_set:
                self._topics.group(consumer.group_name, writable=True)
                retry = retry_topic(consumer.group_name)
                if self._topics.get(retry) is None:
                    self._topics.for_send(retry, "", 1)
        changes = self._clients.heartbeat(
            data, channel, request.language, request.version, self._clock_ms()
        )
        self.notify(changes)
        return RemotingCommand.response_to(
            request,
            ext={
                "IS_SUPPORT_HEART_BEAT_V2": "true",
                "IS_SUB_CHANGE": "true" if changes else "false",
            },
        )

    def unregister(self, request: RemotingCommand, channel: Connection) -> RemotingCommand:
        """35. The client leaves the groups that it names."""
        self.notify(
            self._clients.unregister(
                channel, request.ext.get("producerGroup"), request.ext.get("consumerGroup")
            )
        )
        return RemotingCommand.response_to(request)

    def consumer_list(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """38. The members of a group, the base of every rebalance; code 1 if there are none."""
        group = text(request, "consumerGroup")
        ids = self._clients.client_ids(group)
        if not ids:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_ERROR, f"no consumer of group {group} is connected here"
            )
        body = GetConsumerListByGroupResponseBody(consumer_id_list=ids).encode()
        return RemotingCommand.response_to(request, body=body)

    def disconnected(self, channel: Connection) -> None:
        """A connection closed: its client is gone from all groups."""
        self.notify(self._clients.channel_closed(channel))

    def expire(self, now_ms: int) -> None:
        """Drops clients that went silent."""
        self.notify(self._clients.expire(now_ms))

    def notify(self, changes: list[GroupChanged]) -> None:
        """Sends 40 to the members of every changed group, so that they rebalance now."""
        for change in changes:
            notice = RemotingCommand.request(
                RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": change.group}
            )
            for channel in change.channels:
                connection = cast(Connection, channel)
                if not connection.closed:
                    connection.oneway(notice)
