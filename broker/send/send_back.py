"""Send-back (CONSUMER_SEND_MSG_BACK, 36): a consumer returns a message that it could not consume.

The message is stored again: as a retry, delivered to the group after a delay (`put_hooks`), or as a
dead letter after too many retries. The reply waits until the new record is confirmed; only then the
consumer moves its offset (R30). If the request fails, a stock client sends the message to
`%RETRY%group` itself, where `SendProcessor` applies the same limit. Origin:
AbstractSendMessageProcessor.consumerSendMsgBack in Java, step by step.
"""

import random
from typing import Final

from batonmq.auth.guard import Require
from batonmq.auth.rights import pop_topic_needs
from batonmq.broker.request_fields import flag, number, system_error, text
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import SubscriptionGroupConfig
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.numbers import INT_MAX
from batonmq.protocol.properties import (
    DELAY,
    decode_properties,
    encode_properties,
    find_property,
    with_properties,
)
from batonmq.protocol.records.codec import NewMessage, message_to_store, msg_id_of
from batonmq.protocol.sysflag import UNIT_SUB_TOPIC
from batonmq.protocol.topic_name import dlq_topic, retry_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors

FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry if the consumer names none; one higher for each further retry."""
KNOWS_LIMIT_VERSION: Final = 121
"""From this version on (V3_4_9) clients send their maxReconsumeTimes."""


class SendBackProcessor:
    """Runs on masters; the relay passes on requests of other replicas."""

    def __init__(self, path: WritePath, topics: TopicService, require: Require) -> None:
        """`require` checks the rights again: the message is named by its offset, so its topic is
        known only once it is read."""
        self._require = require
        self._path = path
        self._topics = topics
        self._random = random.Random()

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.CONSUMER_SEND_MSG_BACK, self.send_back)

    def send_back(self, request: RemotingCommand, connection: Connection) -> RemotingCommand | None:
        """Stores a message again (CONSUMER_SEND_MSG_BACK, 36); the answer has only a code."""
        self._path.gate.require_open()
        self._path.hold.require_inactive()
        group = self._topics.group(text(request, "group"), writable=True)
        # As in Java: this group wants no retries.
        if group.retry_queue_nums <= 0:
            return RemotingCommand.response_to(request)
        unit = UNIT_SUB_TOPIC if flag(request, "unitMode") else 0
        queues = self._topics.of_group(retry_topic(group.group_name), group.retry_queue_nums, unit)
        offset = number(request, "offset")
        record = self._path.store.queries.look_message_by_offset(offset)
        if record is None:
            raise system_error(f"look message by offset failed, {offset}")
        level = number(request, "delayLevel")
        failed = message_to_store(record)
        self._require(request, connection, pop_topic_needs(failed.topic, group.group_name))
        # A negative level asks for a dead letter at once.
        if level < 0 or failed.reconsume_times >= _limit(request, group):
            topic, queue_id, level = dlq_topic(group.group_name), 0, 0
            self._topics.of_group(topic, 1)
        else:
            level = level or FIRST_RETRY_LEVEL + failed.reconsume_times
            topic, queue_id = retry_topic(group.group_name), int(self._random.random() * queues)
        origin = _once_more(failed, record, level)
        failed.topic, failed.queue_id = topic, queue_id
        result = self._path.put_message(failed, stored=True)
        # Each try counts for the topic that was sent to, not for the retry topic.
        self._path.stats.sent_back(origin.decode("utf-8", "replace"), group.group_name)
        self._path.schedule_flush()
        self._path.answer_when_confirmed(result.end_offset, request, connection)
        return None


def _limit(request: RemotingCommand, group: SubscriptionGroupConfig) -> int:
    """The maximum number of retries."""
    if request.version >= KNOWS_LIMIT_VERSION:
        return number(request, "maxReconsumeTimes", group.retry_max_times)
    return group.retry_max_times


def _once_more(failed: NewMessage, record: memoryview, level: int) -> bytes:
    """Sets the properties of a retry: its original topic and id, and its delay level. Returns the
    original topic."""
    raw = failed.properties
    noted = {b"WAIT": b"false", b"DELAY": b"%d" % level}
    origin = find_property(raw, b"RETRY_TOPIC")
    if origin is None:
        origin = noted[b"RETRY_TOPIC"] = failed.topic.encode()
    if find_property(raw, b"ORIGIN_MESSAGE_ID") is None:
        noted[b"ORIGIN_MESSAGE_ID"] = msg_id_of(record).encode()
    failed.properties = with_properties(raw, noted)
    # A client sends any count, so it may be the highest that a record can have.
    failed.reconsume_times = min(failed.reconsume_times + 1, INT_MAX)
    return origin


def dead_letter_properties(properties: str) -> str:
    """The property string of a retry that becomes a dead letter: without a delay."""
    return encode_properties({**decode_properties(properties), DELAY: "-1"})
