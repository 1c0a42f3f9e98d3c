"""A message as the user creates it, as the store has it, and its queue; how many queues a route may
have. Origin: Java `Message`, `MessageExt`, `MessageQueue`."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from batonmq.protocol import properties as names
from batonmq.protocol.sysflag import COMPRESSED, COMPRESSION_MASK, COMPRESSION_ZLIB
from batonmq.protocol.topic_name import TOPIC_QUEUES_MAX

ROUTE_QUEUES_MAX: Final = 8 * TOPIC_QUEUES_MAX


class MessageQueue(msgspec.Struct, frozen=True, order=True, rename="camel"):
    """One queue of a topic on one broker group, in Java's order: topic, broker name, number."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


def route_problem(queue_nums: Iterable[int]) -> str:
    """Why a route to groups with so many queues each is not used, or "": each queue becomes an
    object, and a name server believes what a broker registers."""
    queues = sum(max(number, 0) for number in queue_nums)
    if queues <= ROUTE_QUEUES_MAX:
        return ""
    return f"its route has {queues} queues, at most {ROUTE_QUEUES_MAX} are allowed"


@dataclass(slots=True)
class Message:
    """A message to send. `properties`: those of the broker and of the user."""

    topic: str
    body: bytes = b""
    flag: int = 0
    properties: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, topic: str, body: bytes | str, *, tags: str = "", keys: str | Iterable[str] = ""
    ) -> Self:
        """`keys`: a key, several keys separated by single spaces, or a list of keys. Raises
        TypeError and ValueError that name the parameter."""
        for name, value in (("topic", topic), ("tags", tags)):
            if not isinstance(value, str):
                raise TypeError(f"{name} is {value!r}, a text is allowed")
        if not isinstance(body, str | bytes | bytearray | memoryview):
            raise TypeError(f"body is {body!r}, bytes or a text are allowed")
        message = cls(topic, body.encode() if isinstance(body, str) else body)
        if tags:
            message.tags = tags
        if keys:
            message.keys = keys if isinstance(keys, str) else _joined(keys)
        return message

    @property
    def tags(self) -> str:
        """The tag by which consumers may filter, one a message; "" if none."""
        return self.properties.get(names.TAGS, "")

    @tags.setter
    def tags(self, value: str) -> None:
        self.properties[names.TAGS] = value

    @property
    def keys(self) -> str:
        """Keys under which the broker indexes the message, separated by single spaces."""
        return self.properties.get(names.KEYS, "")

    @keys.setter
    def keys(self, value: str) -> None:
        self.properties[names.KEYS] = value

    @property
    def delay_level(self) -> int:
        """The delay level, 1 to 18; 0 without one."""
        return _int_or_zero(self.properties.get(names.DELAY))

    @delay_level.setter
    def delay_level(self, level: int) -> None:
        self.properties[names.DELAY] = str(level)

    @property
    def uniq_key(self) -> str:
        """The id that the producer gave the message; "" if none."""
        return self.properties.get(names.UNIQ_KEY, "")


def _joined(keys: Iterable[str]) -> str:
    """Raises TypeError, and ValueError for a key that could not be searched for."""
    if not isinstance(keys, Iterable):
        raise TypeError(f"keys is {keys!r}, a text or a list of texts is allowed")
    found = list(keys)
    for key in found:
        if not isinstance(key, str) or not key or " " in key:
            raise ValueError(f"keys has {key!r}: texts without a space are allowed, not empty")
    return " ".join(found)


@dataclass(slots=True)
class MessageExt:
    """A stored message with all fields of its record. Consumers and checks get the original `body`;
    what Admin finds is as stored, perhaps compressed: see `uncompressed_body()`. `physical_offset`
    counts bytes of the commit log, `queue_offset` messages; hosts are "ip:port". `msg_id` is the
    offset id, `uniq_key` the producer's id."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_size: int
    msg_id: str
    body: bytes
    body_crc: int
    flag: int
    sys_flag: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    properties: dict[str, str]
    broker_name: str = ""

    @property
    def tags(self) -> str:
        """As in Message."""
        return self.properties.get(names.TAGS, "")

    @property
    def keys(self) -> str:
        """As in Message."""
        return self.properties.get(names.KEYS, "")

    @property
    def delay_level(self) -> int:
        """As in Message."""
        return _int_or_zero(self.properties.get(names.DELAY))

    @property
    def uniq_key(self) -> str:
        """The producer's id, or the offset id if it gave none."""
        return self.properties.get(names.UNIQ_KEY) or self.msg_id

    @property
    def end_offset(self) -> int:
        """First byte of the commit log behind this record."""
        return self.physical_offset + self.store_size

    def uncompressed_body(self) -> bytes:
        """The original body. Raises ValueError for a codec other than zlib or a body above
        INFLATED_BODY_SIZE_MAX, zlib.error for bad bytes."""
        return uncompress(self.body, self.sys_flag)


#: 64 KiB may inflate to 64 MiB. Java's default for `maxMessageSize` is 4 MiB, which its producers
#: check before they compress.
INFLATED_BODY_SIZE_MAX = 128 * 1024 * 1024


def uncompress(body: bytes, sys_flag: int) -> bytes:
    """See `MessageExt.uncompressed_body`."""
    if not sys_flag & COMPRESSED:
        return body
    codec = sys_flag & COMPRESSION_MASK
    if codec not in (0, COMPRESSION_ZLIB):
        raise ValueError(f"body is compressed with codec 0x{codec:x}, only zlib is supported")
    inflater = zlib.decompressobj()
    plain = inflater.decompress(body, INFLATED_BODY_SIZE_MAX)
    if inflater.unconsumed_tail:
        raise ValueError(f"body inflates to more than {INFLATED_BODY_SIZE_MAX} bytes")
    if not inflater.eof:
        raise zlib.error("incomplete zlib stream")
    return plain


def _int_or_zero(text: str | None) -> int:
    try:
        return int(text) if text else 0
    except ValueError:
        return 0
