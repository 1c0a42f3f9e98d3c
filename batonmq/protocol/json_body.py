"""Writes and reads typed JSON bodies (`protocol.bodies`). Written: standard JSON with sorted
members and without nulls; but a map keyed by message queues as fastjson does
(`{{"brokerName":...}:1}`), since Java reads nothing else. Read: fastjson's dialect; unknown members
and nulls are skipped."""

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Final, Self, TypeVar, cast, get_args, get_origin

import msgspec

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import NOT_JSON, FastjsonError, loads
from batonmq.protocol.message import MessageQueue

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_NULL_MEMBER = re.compile(rb',"[A-Za-z]+":null')
_NULL_FIRST = re.compile(rb'\{"[A-Za-z]+":null(,|(?=\}))')
_raw_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


ENTRIES_AT_ONCE: Final = 256  # entries of a table in one piece

# Limits for one request, since it is read in one turn of the loop (R58).
REQUEST_SIZE_MAX: Final = 4 << 20
REQUEST_OBJECTS_MAX: Final = 32_768
REQUEST_MEMBERS_MAX: Final = 262_144  # in objects and lists together (counted by commas)
LOOSE_MEMBERS_MAX: Final = 32_768  # with nulls or quoted numbers, which Python code handles


class _QueueKey(msgspec.Struct, rename="camel"):
    """A message queue with its members in Java's order."""

    broker_name: str
    queue_id: int
    topic: str


class Json:
    """Writing and reading, for structs."""

    __slots__ = ()

    def encode(self) -> bytes:
        return encode_json(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads a body. Raises RemoteProtocolError with the body's name and the problem."""
        return cls._decode(data, is_request=False)

    @classmethod
    def decode_request(cls, data: bytes) -> Self:
        """`decode` for a request from anyone, with limited cost; raises RemoteProtocolError beyond
        that."""
        return cls._decode(data, is_request=True)

    @classmethod
    def _decode(cls, data: bytes, *, is_request: bool) -> Self:
        try:
            return decode_json(cls, data, is_request=is_request)
        except (FastjsonError, msgspec.ValidationError, RecursionError) as error:
            raise RemoteProtocolError(f"{cls.__name__}: {error}") from error


B = TypeVar("B", bound="Body")


class Body(msgspec.Struct, Json, rename="camel", kw_only=True):
    """Base of all bodies. Attributes are snake_case, JSON members have RocketMQ's names."""


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
        except (FastjsonError, msgspec.ValidationError, AttributeError, RecursionError) as error:
            raise RemoteProtocolError(f"{cls.__name__}: {error}") from error


@cache
def _fields_of(kind: type[Body]) -> tuple[tuple[str, str], ...]:
    """Attribute and member names of a body."""
    return tuple((each.name, each.encode_name) for each in msgspec.structs.fields(kind))


@cache
def _members_of(kind: type[Body]) -> tuple[tuple[str, str], ...]:
    """The same, sorted by member name."""
    return tuple(sorted(_fields_of(kind), key=lambda names: names[1]))


def encode_json(value: Any) -> bytes:
    """JSON of a body or of plain values, without nulls."""
    text = _encode(value)
    if b":null" not in text:
        return text
    # A quote between a comma or brace and a letter opens a string: these are members.
    text = _NULL_FIRST.sub(b"{", _NULL_MEMBER.sub(b"", text))
    if b":null" in text:
        text = _encode(without_nulls(msgspec.to_builtins(value)))
    return text


def check_size(data: bytes) -> None:
    """Raises FastjsonError for a request that holds more than allowed."""
    for what, count, count_max in (
        ("bytes", len(data), REQUEST_SIZE_MAX),
        ("objects", data.count(b"{"), REQUEST_OBJECTS_MAX),
        ("members", data.count(b","), REQUEST_MEMBERS_MAX),
    ):
        if count > count_max:
            raise FastjsonError(f"{count} {what} in one request, at most {count_max} are allowed")


def decode_json(kind: type[T], data: bytes, *, is_request: bool = False) -> T:
    """Decodes a value of `kind` from JSON or fastjson's dialect. Raises FastjsonError for other
    text or too large a request; msgspec.ValidationError for another shape."""
    if is_request:
        check_size(data)
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return cast(T, decoder.decode(data))
    except NOT_JSON:
        # Not standard JSON, or a null or a quoted number, which Java accepts.
        if is_request and (members := data.count(b",")) > LOOSE_MEMBERS_MAX:
            raise FastjsonError(
                f"{members} members in one request: with nulls, or values of other types than"
                f" expected, at most {LOOSE_MEMBERS_MAX} are allowed"
            ) from None
        value = without_nulls(loads(data, is_request=is_request))
        return msgspec.convert(value, kind, strict=False, str_keys=True)


def encoded_parts(body: Body) -> Iterator[tuple[str, bytes, bool]]:
    """The members of a body as (name, JSON, whether more of it follows). A table or list of more
    than `ENTRIES_AT_ONCE` entries comes in several; they must not change meanwhile."""
    queue_map = body.QUEUE_MAP if isinstance(body, QueueKeyedBody) else ""
    for name, member in _fields_of(type(body)):
        value = getattr(body, name)
        if value is None:
            continue
        encode: Callable[[Any], bytes] = encode_queue_map if member == queue_map else encode_json
        if not isinstance(value, dict | list) or len(value) <= ENTRIES_AT_ONCE:
            yield member, encode(value), False
            continue
        left, entries = len(value), iter(value.items() if isinstance(value, dict) else value)
        while left > 0:
            left -= ENTRIES_AT_ONCE
            yield member, encode(type(value)(islice(entries, ENTRIES_AT_ONCE))), left > 0


def encoded_pieces(body: Body) -> Iterator[bytes]:
    """The pieces of `body.encode()`, divided as `encoded_parts`."""
    before, goes_on = b"{", False
    for member, text, more in encoded_parts(body):
        begin = b"," if goes_on else b'%b"%b":%b' % (before, member.encode(), text[:1])
        if goes_on or more:
            yield begin + text[1:-1] + (b"" if more else text[-1:])
        else:
            yield begin[:-1] + text
        before, goes_on = b",", more
    yield b"}" if before == b"," else b"{}"


def decoded_in_steps(kind: type[B], data: bytes) -> Generator[None, None, B]:
    """`kind.decode(data)` with `ENTRIES_AT_ONCE` table entries a step; raises the same."""
    try:
        members = _raw_members.decode(data)
        fields = {}
        for field in msgspec.structs.fields(kind):
            if (text := members.get(field.encode_name)) is None:
                continue
            if get_origin(field.type) is not dict:
                fields[field.name] = msgspec.json.decode(text, type=field.type)
                continue
            key_type, entry_type = get_args(field.type)
            decode = msgspec.json.Decoder(entry_type).decode
            fields[field.name] = table = {}
            raw = msgspec.json.decode(text, type=dict[key_type, msgspec.Raw])  # type: ignore[valid-type]
            for number, (key, entry) in enumerate(raw.items(), 1):
                table[key] = decode(entry)
                if number % ENTRIES_AT_ONCE == 0:
                    yield
        return kind(**fields)
    except NOT_JSON:
        return kind.decode(data)  # fastjson's dialect, or a clear error


def encode_queue_map(table: Mapping[MessageQueue, Any]) -> bytes:
    """A map keyed by message queues, in fastjson's form."""
    # C calls only, since a topic may have 10,000 queues.
    keys = _encode_lines([_QueueKey(q.broker_name, q.queue_id, q.topic) for q in table])
    values = _encode_lines(table.values())
    if b":null" in values:
        values = b"\n".join(map(encode_json, table.values()))
    pairs = zip(keys.splitlines(), values.splitlines(), strict=True)
    return b"{%b}" % b",".join(map(b":".join, pairs))


def without_nulls(value: Any) -> Any:
    """The same value without null members, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _queue_of(key: Any) -> MessageQueue:
    members = loads(key) if isinstance(key, str) else dict(key)
    return msgspec.convert(members, MessageQueue, strict=False)
