"""36: a consumer gives a message back that it could not consume.

The message is stored again, to come to the group once more after a while, or as a dead letter when
that was often enough. The consumer is answered when the new record is confirmed: then it moves its
offset on, and not before (SAFETY R30). How long a retry waits is a delay level; `put_hooks` makes
it wait. If 36 fails, a stock client sends the message to `%RETRY%group` itself (310), which ends in
the dead letters by the rules of `SendProcessor`.
Origin: AbstractSendMessageProcessor.consumerSendMsgBack in Java, step by step.
"""

from __future__ import annotations

import random
from typing import Final

from batonmq.broker.request_fields import number, text
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.bodies import SubscriptionGroupConfig
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.message import MessageExt
from batonmq.protocol.message_id import host_bytes, split_address
from batonmq.protocol.properties import (
    CRC32,
    DELAY,
    KEYS,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TAGS,
    UNIQ_KEY,
    WAIT,
    decode_properties,
    encode_properties,
)
from batonmq.protocol.record import NewMessage, decode_record
from batonmq.protocol.tags import tags_code
from batonmq.protocol.topic_name import dlq_topic, retry_topic
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors

FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry where the consumer names none; each further one is one higher."""
KNOWS_LIMIT_VERSION: Final = 121
"""From this version on (V3_4_9) a client's own maxReconsumeTimes counts."""


class SendBackProcessor:
    """On masters only; the relay brings what reaches another member."""

    def __init__(self, path: WritePath, topics: TopicService) -> None:
        self._path = path
        self._topics = topics
        self._random = random.Random()

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.CONSUMER_SEND_MSG_BACK, self.send_back)

    async def send_back(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """36. Answered with the code alone."""
        self._path.gate.require_open()
        if self._path.hold.active:
            raise BrokerRefusal(
                ResponseCode.SERVICE_NOT_AVAILABLE,
                "the master of this group is changing: send the message again",
            )
        group = self._topics.group(text(request, "group"), writable=True)
        if group.retry_queue_nums <= 0:
            return RemotingCommand.response_to(request)
        queues = self._topics.of_group(retry_topic(group.group_name), group.retry_queue_nums)
        offset = number(request, "offset")
        record = self._path.store.queries.look_message_by_offset(offset)
        if record is None:
            raise BrokerRefusal(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {offset}"
            )
        level = number(request, "delayLevel")
        failed = decode_record(record)
        if level < 0 or failed.reconsume_times >= _limit(request, group):
            topic, queue_id, level = dlq_topic(group.group_name), 0, 0
            self._topics.of_group(topic, 1)
        else:
            level = level or FIRST_RETRY_LEVEL + failed.reconsume_times
            topic, queue_id = retry_topic(group.group_name), self._random.randrange(queues)
        again = _again(failed, topic, queue_id, level)
        result = self._path.put_message(again)
        self._path.stats.sent_back(failed.topic, group.group_name)
        self._path.schedule_flush()
        await self._path.wait_confirmed(result.end_offset, f"message at {offset} for {topic}")
        return RemotingCommand.response_to(request)


def _limit(request: RemotingCommand, group: SubscriptionGroupConfig) -> int:
    """How often the group may get a message again."""
    if request.version >= KNOWS_LIMIT_VERSION:
        return number(request, "maxReconsumeTimes", group.retry_max_times)
    return group.retry_max_times


def _again(failed: MessageExt, topic: str, queue_id: int, level: int) -> NewMessage:
    """The message once more: what it was, where it came from first, and how often it failed."""
    properties = dict(failed.properties)
    properties.pop(CRC32, None)  # of the record that it was
    properties.setdefault(RETRY_TOPIC, failed.topic)
    properties.setdefault(ORIGIN_MESSAGE_ID, failed.msg_id)
    properties |= {WAIT: "false", DELAY: str(level)}
    keys, unique_key = properties.get(KEYS), properties.get(UNIQ_KEY)
    return NewMessage(
        topic,
        queue_id,
        failed.body,
        encode_properties(properties).encode(),
        tags_code(properties.get(TAGS)),
        keys.encode() if keys else None,
        unique_key.encode() if unique_key else None,
        failed.born_timestamp,
        host_bytes(*split_address(failed.born_host)),
        failed.flag,
        failed.sys_flag,
        failed.reconsume_times + 1,
    )


def dead_letter_properties(properties: str) -> str:
    """The property string of a retry that becomes a dead letter by a send: it waits no more."""
    return encode_properties({**decode_properties(properties), DELAY: "-1"})
