"""How a typed JSON body is written and read; the bodies themselves are in `protocol.bodies`.

Written: standard JSON, members in alphabetical order, nulls left out, except that a map keyed by
message queues is written as fastjson does (`{{"brokerName":...}:1}`), because Java reads nothing
else there. Read: fastjson's dialect, unknown members skipped, nulls taken as absent.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, cast

import msgspec

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import FastjsonError, loads
from batonmq.protocol.message import MessageQueue

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_NULL_MEMBER = re.compile(rb',"[A-Za-z]+":null')
_NULL_FIRST = re.compile(rb'\{"[A-Za-z]+":null(,|(?=\}))')
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


class _QueueKey(msgspec.Struct, rename="camel"):
    """A message queue with its members in Java's order."""

    broker_name: str
    queue_id: int
    topic: str


class Json:
    """Writing and reading, for structs."""

    __slots__ = ()

    def encode(self) -> bytes:
        """JSON of this body."""
        return encode_json(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads a body. Raises RemoteProtocolError that names the body and what is wrong."""
        try:
            return decode_json(cls, data)
        except (FastjsonError, msgspec.ValidationError) as error:
            raise RemoteProtocolError(f"{cls.__name__}: {error}") from error


class Body(msgspec.Struct, Json, rename="camel", kw_only=True):
    """Base of all bodies. Attributes are snake_case, members of the JSON as RocketMQ names them."""


class QueueKeyedBody(Body):
    """A body whose member `QUEUE_MAP` is keyed by message queues."""

    QUEUE_MAP: ClassVar[str] = "offsetTable"

    def encode(self) -> bytes:
        members: list[bytes] = []
        for name, member in _members_of(type(self)):
            value = getattr(self, name)
            if value is None:
                continue
            text = encode_queue_map(value) if member == self.QUEUE_MAP else encode_json(value)
            members.append(b'"%b":%b' % (member.encode(), text))
        return b"{%b}" % b",".join(members)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        try:
            members = without_nulls(loads(data))
            if not isinstance(members, dict):
                raise RemoteProtocolError(f"{cls.__name__}: an object was expected")
            table = members.get(cls.QUEUE_MAP, {})
            pairs = [[_queue_of(key), value] for key, value in table.items()]
            members = {str(key): value for key, value in members.items() if key != cls.QUEUE_MAP}
            field = next(f for f in msgspec.structs.fields(cls) if f.encode_name == cls.QUEUE_MAP)
            value_type = field.type.__args__[1]
            body = msgspec.convert(members, cls, strict=False)
            converted = {
                queue: msgspec.convert(value, value_type, strict=False) for queue, value in pairs
            }
            setattr(body, field.name, converted)
            return body
        except (FastjsonError, msgspec.ValidationError, AttributeError) as error:
            raise RemoteProtocolError(f"{cls.__name__}: {error}") from error


@cache
def _members_of(kind: type[Body]) -> tuple[tuple[str, str], ...]:
    """Attribute and member names of a body, sorted by the latter."""
    fields = sorted(msgspec.structs.fields(kind), key=lambda each: each.encode_name)
    return tuple((each.name, each.encode_name) for each in fields)


def encode_json(value: Any) -> bytes:
    """JSON of a body or of plain values, null members left out."""
    text = _encode(value)
    if b":null" not in text:
        return text
    # A quote in front of a letter and behind a comma or brace opens a string: these are members.
    text = _NULL_FIRST.sub(b"{", _NULL_MEMBER.sub(b"", text))
    if b":null" in text:
        text = _encode(without_nulls(msgspec.to_builtins(value)))
    return text


def decode_json(kind: type[T], data: bytes) -> T:
    """A value of `kind` from JSON or fastjson's dialect.

    Raises FastjsonError for other text, msgspec.ValidationError where the shape is not that of
    `kind`.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return cast(T, decoder.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Not standard JSON, or a null or a number in quotes where Java would not mind.
        return msgspec.convert(without_nulls(loads(data)), kind, strict=False, str_keys=True)


def encode_queue_map(table: Mapping[MessageQueue, Any]) -> bytes:
    """A map keyed by message queues, in fastjson's form."""
    # By calls into C: a topic may have 10,000 queues.
    keys = _encode_lines([_QueueKey(q.broker_name, q.queue_id, q.topic) for q in table])
    values = _encode_lines(table.values())
    if b":null" in values:
        values = b"\n".join(map(encode_json, table.values()))
    pairs = zip(keys.splitlines(), values.splitlines(), strict=True)
    return b"{%b}" % b",".join(map(b":".join, pairs))


def without_nulls(value: Any) -> Any:
    """The same value without members that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _queue_of(key: Any) -> MessageQueue:
    members = loads(key) if isinstance(key, str) else dict(key)
    return msgspec.convert(members, MessageQueue, strict=False)
