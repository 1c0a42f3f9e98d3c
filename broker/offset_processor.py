"""Offsets: 14, 15 (a group's progress), 29, 30, 31, 32 (what a queue holds).

Every offset told here comes from a consume queue, which ends at confirmOffset (SAFETY R28). Origin:
ConsumerManageProcessor and AdminBrokerProcessor in Java.
"""

from __future__ import annotations

from broker.request_fields import flag, number, text
from broker.role_gate import RoleGate
from protocol.codes import RequestCode, ResponseCode
from protocol.errors import BrokerRefusal
from remoting.command import RemotingCommand
from remoting.connection import Connection
from remoting.server import Processors
from store.consume_queue import Boundary
from store.consumer_offset import ConsumerOffsetManager
from store.message_store import MessageStore


class OffsetProcessor:
    """Answers from the store's queues and the group's offsets. Masters only, but for reading."""

    def __init__(self, store: MessageStore, offsets: ConsumerOffsetManager, gate: RoleGate) -> None:
        self._store = store
        self._offsets = offsets
        self._gate = gate

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.QUERY_CONSUMER_OFFSET, self.query_offset)
        processors.register(RequestCode.UPDATE_CONSUMER_OFFSET, self.update_offset)
        processors.register(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search_by_time)
        processors.register(RequestCode.GET_MAX_OFFSET, self.max_offset)
        processors.register(RequestCode.GET_MIN_OFFSET, self.min_offset)
        processors.register(RequestCode.GET_EARLIEST_MSG_STORETIME, self.earliest_time)

    def query_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """14. A miss is 0 if the queue still begins at 0 and the client allows it, else 22."""
        group, topic = text(request, "consumerGroup"), text(request, "topic")
        queue_id = number(request, "queueId")
        offset = self._offsets.query(group, topic, queue_id)
        if offset < 0:
            begins = self._store.min_offset_in_queue(topic, queue_id)
            if begins > 0 or not flag(request, "setZeroIfNotFound", default=True):
                raise BrokerRefusal(
                    ResponseCode.QUERY_NOT_FOUND,
                    f"group {group} has no offset for {topic} queue {queue_id}",
                )
            offset = 0
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def update_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """15. Only the master keeps progress; a slave's copy comes from it (R31)."""
        self._require_master()
        self._offsets.commit(
            text(request, "consumerGroup"),
            text(request, "topic"),
            number(request, "queueId"),
            number(request, "commitOffset"),
        )
        return RemotingCommand.response_to(request)

    def search_by_time(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """29. The first offset at or after the time (`lower`), or the last at or before it."""
        boundary = request.ext.get("boundaryType", "lower").lower()
        if boundary not in ("lower", "upper"):
            raise BrokerRefusal(
                ResponseCode.INVALID_PARAMETER,
                f"boundaryType is {boundary!r}, allowed are lower and upper",
            )
        offset = self._store.offset_in_queue_by_time(
            text(request, "topic"),
            number(request, "queueId"),
            number(request, "timestamp"),
            Boundary(boundary),
        )
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def max_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """30. One past the last confirmed message of the queue."""
        offset = self._store.max_offset_in_queue(text(request, "topic"), number(request, "queueId"))
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def min_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """31. The first message that the queue still has."""
        offset = self._store.min_offset_in_queue(text(request, "topic"), number(request, "queueId"))
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def earliest_time(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """32. Store time of the queue's first message, ms; -1 if it has none."""
        when = self._store.earliest_message_time(text(request, "topic"), number(request, "queueId"))
        return RemotingCommand.response_to(request, ext={"timestamp": str(when)})

    def _require_master(self) -> None:
        if not self._gate.is_master:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY, "this broker is not the master: ask the name server"
            )
