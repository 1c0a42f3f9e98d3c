"""Prepares messages for the wire: checks, unique key, compression. Pure.

The user's object is not changed, so the same `Message` may be sent again.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from batonmq.client.arguments import check_shape
from batonmq.client.errors import MessageIllegalError
from batonmq.protocol import properties as names
from batonmq.protocol.batch import BatchItem, encode_batch
from batonmq.protocol.codes import RequestCode
from batonmq.protocol.message import Message, MessageQueue
from batonmq.protocol.properties import encode_properties, name_value_problem
from batonmq.protocol.sysflag import COMPRESSED, COMPRESSION_ZLIB
from batonmq.protocol.topic_name import NOT_ALLOWED_SEND_TOPICS, RETRY_PREFIX, topic_problem
from batonmq.remoting.command import RemotingCommand

COMPRESS_OVER_BYTES = 4096
COMPRESS_LEVEL = 5
MESSAGE_SIZE_MAX = 4 * 1024 * 1024
_SECONDS_MAX = 1e12

NewKey = Callable[[], str]


@dataclass(frozen=True, slots=True)
class NewTopic:
    """How a send creates a missing topic: like `template` (TBW102), with `queue_nums` queues."""

    template: str
    queue_nums: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """`properties`: the encoded property string. `msg_id`: the unique key (a comma list for a
    batch). `reply`: it is the reply to a request."""

    topic: str
    body: bytes
    flag: int
    sys_flag: int
    properties: str
    msg_id: str
    batch: bool = False
    reply: bool = False

    def command(
        self, group: str, queue: MessageQueue, born_ms: int, new_topic: NewTopic
    ) -> RemotingCommand:
        """The send request; the fields of SendMessageRequestHeaderV2 have one letter each."""
        ext = {
            "a": group,
            "b": self.topic,
            "c": new_topic.template,
            "d": str(new_topic.queue_nums),
            "e": str(queue.queue_id),
            "f": str(self.sys_flag),
            "g": str(born_ms),
            "h": str(self.flag),
            "i": self.properties,
            "j": "0",  # reconsumeTimes
            "k": "false",  # unitMode
            "m": "true" if self.batch else "false",
            "n": queue.broker_name,
        }
        return RemotingCommand.request(self._code, ext, self.body)

    @property
    def _code(self) -> RequestCode:
        if self.reply:
            return RequestCode.SEND_REPLY_MESSAGE_V2
        return RequestCode.SEND_BATCH_MESSAGE if self.batch else RequestCode.SEND_MESSAGE_V2


def outgoing(
    message: Message,
    new_key: NewKey,
    *,
    compress_over_bytes: int = COMPRESS_OVER_BYTES,
    size_max: int = MESSAGE_SIZE_MAX,
) -> Outgoing:
    """Prepares one message. Raises MessageIllegalError."""
    check_message(message, size_max)
    properties, msg_id = _own_properties(message, new_key)
    body, sys_flag = message.body, 0
    if len(body) > compress_over_bytes:
        compressed = zlib.compress(body, COMPRESS_LEVEL)
        if len(compressed) < len(body):
            body, sys_flag = compressed, COMPRESSED | COMPRESSION_ZLIB
    return Outgoing(message.topic, body, message.flag, sys_flag, properties, msg_id)


def timed(
    message: Message, delay: timedelta | float | None, deliver_at: datetime | float | None
) -> Message:
    """The message with its delivery time: after `delay` (seconds) by the broker's clock, or at
    `deliver_at` (seconds since 1970, or a datetime with a time zone); rounded up to a ms. Raises
    MessageIllegalError if both are given, or one is invalid."""
    if delay is None and deliver_at is None:
        return message
    if delay is not None and deliver_at is not None:
        raise MessageIllegalError("delay and deliver_at exclude each other")
    if delay is not None:
        name, seconds = names.TIMER_DELAY_MS, _seconds("delay", delay)
        if seconds < 0:
            raise MessageIllegalError(f"delay is {delay!r}, at least 0 is allowed")
    else:
        name, seconds = names.TIMER_DELIVER_MS, _seconds("deliver_at", deliver_at)
    # 1.1 * 1000 is a little more than 1100, which alone would be rounded up to 1101.
    properties = {**message.properties, name: str(math.ceil(round(seconds * 1000, 3)))}
    return Message(message.topic, message.body, message.flag, properties)


def _seconds(what: str, value: object) -> float:
    if isinstance(value, timedelta) and what == "delay":
        return value.total_seconds()
    if isinstance(value, datetime) and what == "deliver_at":
        if value.tzinfo is None:
            raise MessageIllegalError(f"{what} is {value!r}, which has no time zone")
        return value.timestamp()
    # A bool is an int as well. The limit also refuses NaN, and what no float has in ms.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _SECONDS_MAX:
        return float(value)
    kinds = "seconds or a timedelta" if what == "delay" else "seconds since 1970 or a datetime"
    raise MessageIllegalError(f"{what} is {value!r}, allowed are {kinds}")


def outgoing_batch(
    messages: Sequence[Message], new_key: NewKey, *, size_max: int = MESSAGE_SIZE_MAX
) -> Outgoing:
    """Prepares a batch of at least one message; not compressed, since the broker splits it. Raises
    MessageIllegalError for several topics, or a delayed or retry message."""
    topic = messages[0].topic
    items: list[BatchItem] = []
    msg_ids: list[str] = []
    for message in messages:
        check_message(message, size_max)
        if message.topic != topic:
            raise MessageIllegalError(
                f"a batch has one topic, this one has {topic} and {message.topic}"
            )
        if message.topic.startswith(RETRY_PREFIX) or names.DELAY in message.properties:
            raise MessageIllegalError("retry topics and delayed messages cannot go in a batch")
        properties, msg_id = _own_properties(message, new_key)
        items.append(BatchItem(message.body, properties.encode(), message.flag))
        msg_ids.append(msg_id)
    body = encode_batch(items)
    if len(body) > size_max:
        raise MessageIllegalError(
            f"the batch has {len(body)} bytes, at most {size_max} are taken: split it"
        )
    # As in Java, the batch has a key of its own, beside those of its messages.
    envelope = encode_properties({names.UNIQ_KEY: new_key(), names.WAIT: "true"})
    return Outgoing(topic, body, 0, 0, envelope, ",".join(msg_ids), batch=True)


def check_message(message: Message, size_max: int) -> None:
    check_shape(message)
    problem = topic_problem(message.topic)
    if problem is not None:
        raise MessageIllegalError(problem)
    if message.topic in NOT_ALLOWED_SEND_TOPICS:
        raise MessageIllegalError(f"topic {message.topic} belongs to the broker: choose another")
    if not message.body:
        raise MessageIllegalError("the message body is empty: brokers refuse that")
    if len(message.body) > size_max:
        raise MessageIllegalError(
            f"the message body has {len(message.body)} bytes, at most {size_max} are taken"
        )
    for name, value in message.properties.items():
        if value and (wrong := name_value_problem(name, value)) is not None:
            raise MessageIllegalError(wrong)


def _own_properties(message: Message, new_key: NewKey) -> tuple[str, str]:
    """(encoded properties, unique key). The key is new for each send."""
    properties = dict(message.properties)
    properties[names.UNIQ_KEY] = msg_id = new_key()
    properties.setdefault(names.WAIT, "true")
    encoded = encode_properties(properties)
    if len(encoded.encode()) > names.PROPERTIES_SIZE_MAX:
        raise MessageIllegalError(
            f"the properties have {len(encoded.encode())} bytes, "
            f"at most {names.PROPERTIES_SIZE_MAX} are taken"
        )
    return encoded, msg_id
