"""Recall of a timer message (RECALL_MESSAGE, 370).

The reply waits until the recall is confirmed. From then on the message is not delivered, unless it
became due at the same moment. Origin: org.apache.rocketmq.broker.processor.RecallMessageProcessor.
"""

import os

from batonmq.broker.config import BrokerSections
from batonmq.broker.request_fields import text
from batonmq.broker.tables.topics import TopicService
from batonmq.broker.write.write_path import WritePath
from batonmq.protocol.codes import RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.message_id import RecallHandle, UniqIdGenerator, decode_handle, recall_key
from batonmq.protocol.properties import (
    MSG_REGION,
    TAGS,
    TIMER_DEL_UNIQKEY,
    TIMER_DELIVER_MS,
    UNIQ_KEY,
    encode_properties,
)
from batonmq.protocol.records.codec import NewMessage
from batonmq.protocol.tags import tags_code
from batonmq.remoting.command import RemotingCommand
from batonmq.remoting.connection import Connection, Processors
from batonmq.runtime.clock import wall_ms

RECALL_TAG = "_RECALL_TAG_"


class RecallProcessor:
    def __init__(self, config: BrokerSections, path: WritePath, topics: TopicService) -> None:
        broker = config.broker
        self._path = path
        self._topics = topics
        self._config = config
        self._broker_name = broker.broker_name
        # With a hash: sends have a generator of their own in this process.
        self._ids = UniqIdGenerator(broker.store_host[:-4], os.getpid(), wall_ms, instance_hash=370)

    def register(self, processors: Processors) -> None:
        processors.register(RequestCode.RECALL_MESSAGE, self.recall)

    async def recall(self, request: RemotingCommand, _: Connection) -> RemotingCommand:
        """The reply's msgId is the unique key of the recalled message (RECALL_MESSAGE, 370)."""
        if not self._config.broker.recall_message_enable:
            raise BrokerRefusal(
                ResponseCode.NO_PERMISSION, "recall is off: set recallMessageEnable to true"
            )
        self._path.gate.require_open()
        topic = text(request, "topic")
        self._topics.existing(topic)
        handle = self._checked(topic, text(request, "recallHandle"))
        end_offset = self._put(handle)
        await self._path.wait_confirmed(end_offset, "recall")
        region = self._config.broker.region_id  # stock clients need it to trace a recall
        ext = {"msgId": handle.unique_key, MSG_REGION: region}
        return RemotingCommand.response_to(request, ext=ext)

    def _checked(self, topic: str, given: str) -> RecallHandle:
        try:
            handle = decode_handle(given)
        except ValueError as error:
            raise BrokerRefusal(ResponseCode.ILLEGAL_OPERATION, str(error)) from None
        ahead_ms = handle.time_ms - wall_ms()
        wrong = {
            f"the handle is of topic {handle.topic}": handle.topic != topic,
            f"the handle is of broker {handle.broker_name}": handle.broker_name
            != self._broker_name,
            "the message is due already": ahead_ms <= 0,
            "the handle's time is beyond timerMaxDelaySec": ahead_ms
            >= self._config.store.timer_max_delay_ms,
        }
        for why, is_so in wrong.items():
            if is_so:
                raise BrokerRefusal(ResponseCode.ILLEGAL_OPERATION, f"not recalled: {why}")
        return handle

    def _put(self, handle: RecallHandle) -> int:
        key = recall_key(handle.topic.encode(), handle.unique_key.encode())
        own_key = self._ids.next()
        properties = encode_properties(
            {
                TAGS: RECALL_TAG,
                UNIQ_KEY: own_key,
                TIMER_DELIVER_MS: str(handle.time_ms),
                TIMER_DEL_UNIQKEY: key.decode(),
            }
        )
        message = NewMessage(
            topic=handle.topic,
            queue_id=0,
            body=b"0",
            properties=properties.encode(),
            tags_code=tags_code(RECALL_TAG),
            keys=None,
            uniq_key=own_key.encode(),
            born_timestamp=wall_ms(),
            born_host=bytes(8),
        )
        result = self._path.put_message(message)
        self._path.schedule_flush()
        return result.end_offset
