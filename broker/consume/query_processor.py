"""A group's offsets, the range of a queue, single messages, and units of a queue.

Offsets in answers come from the consume queues, which end at confirmOffset (R28); only
GET_MAX_OFFSET (30) with `committed` false may go beyond. All records lie below it (G4). Origin:
ConsumerManageProcessor, AdminBrokerProcessor and QueryMessageProcessor in Java.
"""

from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.broker.filter.consumer_filter import ConsumerFilterManager
from batonmq.broker.request_fields import flag, invalid, number, system_error, text
from batonmq.broker.tables.consumer_offset import ConsumerOffsetManager
from batonmq.broker.tables.offset_clamp import PositionReport, commit_refusal, queue_end
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import ConsumeQueueData, QueryConsumeQueueResponseBody
from batonmq.protocol.codes import UNIQUE_KEY_FIELD, RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.records.codec import without_crc
from batonmq.protocol.topic_name import TOPIC_QUEUES_MAX, check_group
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.store.consume_queue import Boundary
from batonmq.store.message_store import MessageStore


class OffsetProcessor:
    """Offsets of groups and of queues. Slaves answer reads only."""

    def __init__(
        self, path: WritePath, topics: TopicService, offsets: ConsumerOffsetManager
    ) -> None:
        self._store = path.store
        self._topics = topics
        self._offsets = offsets
        self._gate = path.gate

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.QUERY_CONSUMER_OFFSET, self.query_offset)
        processors.register(RequestCode.UPDATE_CONSUMER_OFFSET, self.update_offset)
        processors.register(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search_by_time)
        processors.register(RequestCode.GET_MAX_OFFSET, self.max_offset)
        processors.register(RequestCode.GET_MIN_OFFSET, self.min_offset)
        processors.register(RequestCode.GET_EARLIEST_MSG_STORETIME, self.earliest_time)

    def query_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Where a group begins to read a queue (QUERY_CONSUMER_OFFSET, 14). For a group without an
        offset: 0 if the client allows it and the queue's first message is in memory or still to
        come; else QUERY_NOT_FOUND (22), and the client decides.
        """
        group = text(request, "consumerGroup")
        topic, queue_id = _queue(request)
        # Not `query`: from now on this consumer's positions are of the present topic (R39).
        offset = self._offsets.begins(group, topic, queue_id)
        if offset < 0:
            # Also for an empty queue, unlike Java: a client that begins at the end would ask for
            # the end next, and skip what is sent between its two requests.
            is_zero = self._store.queries.begins_in_memory(topic, queue_id)
            if not is_zero or not flag(request, "setZeroIfNotFound", default=True):
                raise BrokerRefusal(
                    ResponseCode.QUERY_NOT_FOUND,
                    f"group {group} has no offset for {topic} queue {queue_id}",
                )
            offset = 0
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def update_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Commits a group's offset (UPDATE_CONSUMER_OFFSET, 15), on the master or the slave that
        acts for it; slaves copy offsets (R31). As in Java it creates no group. Refused if the topic
        does not exist, because a consumer may keep running for a while after the deletion
        (R39)."""
        if not self._gate.is_acting:
            self._require_master()
        group, (topic, queue_id) = text(request, "consumerGroup"), _queue(request)
        offset = number(request, "commitOffset")
        if self._gate.is_acting:  # it may not have every group of its master
            self._topics.group(group, writable=False)
        elif group not in self._topics.groups:
            check_group(group)
            raise BrokerRefusal(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {group} not exist!"
            )
        self._topics.existing(topic)
        # Only at the first commit of a group in a queue (R58: clients choose the number).
        is_first = self._offsets.query(group, topic, queue_id) < 0
        if is_first and not 0 <= queue_id < TOPIC_QUEUES_MAX:
            raise invalid(f"queueId is {queue_id}, allowed are 0 to {TOPIC_QUEUES_MAX - 1}")
        if self._offsets.resets.runs(group, topic, queue_id):  # progress from before the reset
            return RemotingCommand.response_to(request)
        progress = PositionReport(group, topic, queue_id, offset)
        if refusal := commit_refusal(self._gate, self._store, self._offsets, progress):
            raise refusal
        self._offsets.commit(group, topic, queue_id, offset)
        return RemotingCommand.response_to(request)

    def search_by_time(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The first offset at or after the time (`lower`), or the last at or before it
        (SEARCH_OFFSET_BY_TIMESTAMP, 29)."""
        boundary = request.ext.get("boundaryType", "lower").lower()
        if boundary not in ("lower", "upper"):
            raise invalid(f"boundaryType is {boundary!r}, allowed are lower and upper")
        offset = self._store.queries.offset_in_queue_by_time(
            *_queue(request), number(request, "timestamp"), Boundary(boundary)
        )
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def max_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """One past the last confirmed message of the queue (GET_MAX_OFFSET, 30). With
        `committed=false`, on a master: one past the last message in its log, where a reader may
        wait."""
        topic, queue_id = _queue(request)
        if flag(request, "committed", default=True):
            offset = self._store.queries.max_offset_in_queue(topic, queue_id)
        else:
            self._require_master()
            offset = queue_end(self._store, topic, queue_id)
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def min_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        offset = self._store.queries.min_offset_in_queue(*_queue(request))
        return RemotingCommand.response_to(request, ext={"offset": str(offset)})

    def earliest_time(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Store time of the queue's first message, ms; -1 if it has none
        (GET_EARLIEST_MSG_STORETIME, 32)."""
        when = self._store.queries.earliest_message_time(*_queue(request))
        return RemotingCommand.response_to(request, ext={"timestamp": str(when)})

    def _require_master(self) -> None:
        if not self._gate.is_master:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_BUSY, "this broker is not the master: ask the name server"
            )


UNIQUE_QUERY_MAX = 32
"""As in Java (`defaultQueryMaxNum`), whatever the request asks for."""
UNITS_MAX = 1024


class QueryProcessor:
    """Answers with stored records below confirmOffset (G4)."""

    def __init__(
        self, store: MessageStore, clients: ConsumerManager, filters: ConsumerFilterManager
    ) -> None:
        self._store = store
        self._clients = clients
        self._filters = filters

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.QUERY_MESSAGE, self.by_key)
        processors.register(RequestCode.VIEW_MESSAGE_BY_ID, self.by_offset)
        processors.register(RequestCode.QUERY_CONSUME_QUEUE, self.units)

    def by_key(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Messages whose key has this hash (QUERY_MESSAGE, 12). Hashes may collide, so callers
        check the key, as with Java."""
        unique = request.ext.get(UNIQUE_KEY_FIELD, "false").lower() == "true"
        maximum = UNIQUE_QUERY_MAX if unique else number(request, "maxNum")
        found = self._store.queries.query_message(
            text(request, "topic"),
            text(request, "key"),
            maximum,
            number(request, "beginTimestamp"),
            number(request, "endTimestamp"),
        )
        if not found.parts:
            raise BrokerRefusal(
                ResponseCode.QUERY_NOT_FOUND,
                f"no message of topic {request.ext['topic']} with key {request.ext['key']} here",
            )
        return RemotingCommand.response_to(
            request,
            ext={
                "indexLastUpdateTimestamp": str(found.index_last_update_timestamp),
                "indexLastUpdatePhyoffset": str(found.index_last_update_phyoffset),
            },
            # Tools print every property, and this one is internal.
            body=b"".join(map(without_crc, found.parts)),
        )

    def by_offset(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The record that begins at a physical offset (VIEW_MESSAGE_BY_ID, 33)."""
        offset = number(request, "offset")
        record = self._store.queries.look_message_by_offset(offset)
        # As in Java, whose clients take this code for a message that is gone.
        if record is None:
            raise system_error(f"no message begins at physical offset {offset}")
        return RemotingCommand.response_to(request, body=without_crc(record))

    def units(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """Up to `count` units of a queue from `index` on (QUERY_CONSUME_QUEUE, 321); SYSTEM_ERROR
        (1) if it has no messages. With `consumerGroup` also that group's subscription."""
        topic, queue_id = _queue(request)
        index, count = number(request, "index"), number(request, "count")
        if not 1 <= count <= UNITS_MAX:
            raise invalid(f"count is {count}, allowed are 1 to {UNITS_MAX}")
        queries = self._store.queries
        body = QueryConsumeQueueResponseBody(
            max_queue_index=queries.max_offset_in_queue(topic, queue_id),
            min_queue_index=queries.min_offset_in_queue(topic, queue_id),
            queue_data=[
                ConsumeQueueData(physic_offset=offset, physic_size=size, tags_code=tags_code)
                for offset, size, tags_code in queries.units(topic, queue_id, index, count)
            ],
        )
        if group := request.ext.get("consumerGroup"):
            body.subscription_data = self._clients.subscription(group, topic)
            body.filter_data = f"{group}@{topic} is not online!"
            if body.subscription_data is not None:
                found = self._filters.get(group, topic)
                body.filter_data = (found.encode() if found is not None else b"null").decode()
        if not body.max_queue_index:
            raise system_error(f"queue {queue_id} of topic {topic} has no messages here")
        return RemotingCommand.response_to(request, body=body.encode())


def _queue(request: RemotingCommand) -> tuple[str, int]:
    return text(request, "topic"), number(request, "queueId")
