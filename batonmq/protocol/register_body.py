"""What a broker registers with a name server (REGISTER_BROKER, 103), plain or compressed. Origin:
Java `RegisterBrokerBody`.

Compressed: one zlib stream of i32 + DataVersion JSON; i32 topics; per topic i32 + text `name
readNums writeNums perm filterType attributesJson`; i32 + filter server JSON array; from version 413
on i32 mappings, each i32 + JSON. A Java broker sends `compressed=false` even with a compressed
body, so the body decides.
"""

import re
import struct
import zlib
from collections.abc import Generator
from typing import Any, Final, Generic, TypeVar

import msgspec

from batonmq.protocol.bodies import DataVersion, TopicConfig, TopicConfigAndMappingSerializeWrapper
from batonmq.protocol.codes import MQ_VERSION, MQ_VERSION_TOPIC_MAPPING
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import NOT_JSON, REQUEST_SIZE_MAX, FastjsonError, loads
from batonmq.protocol.json_body import Body, without_nulls

T = TypeVar("T")

_I32: Final = struct.Struct(">i")
_ZLIB_FIRST_BYTE: Final = b"\x78"
INFLATED_SIZE_MAX: Final = 16 << 20
"""The size of an uncompressed frame. A stream that inflates to more is refused (R58)."""
TOPICS_MAX: Final = 1 << 17
"""More than fit into a plain body of 16 MiB: a broker writes 130 bytes and a name for each."""
_AT_ONCE: Final = 256 << 10  # bytes that are inflated, or read as standard JSON, in one step
_TOPICS_AT_ONCE: Final = 256
_LONG: Final = 1024  # a longer entry is a step of its own, since the dialect is read slowly
_ENTRY_SIZE_MAX: Final = 64 << 10  # Of one topic or mapping.
_REST_MAX: Final = 1 << 20  # Of a plain body without its topics and mappings.
_LOOSE_MEMBERS_MAX: Final = 65_536
"""5,000 topics have 45,000."""

# A member whose value is an object of texts, numbers and objects of such. Nothing here backtracks,
# so the time is linear in the size.
_TEXT: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT: Final = rb'\{[^{}\[\]"]*+(?:' + _TEXT + rb'[^{}\[\]"]*+)*+\}'
_ENTRY: Final = (
    rb"\s*+" + _TEXT + rb'\s*+:\s*+\{[^{}\[\]"]*+(?:(?:'
    + _TEXT + rb"|" + _FLAT + rb')[^{}\[\]"]*+)*+\}\s*+'
)  # fmt: skip
_some_entries: Final = re.compile(rb"(?:%b,){1,%d}+" % (_ENTRY, _TOPICS_AT_ONCE), re.DOTALL).match
_last_entry: Final = re.compile(_ENTRY + rb"(?=\})", re.DOTALL).match
_before_object: Final = re.compile(rb"\s*:\s*(?=\{)").match
_CUT: Final = b"0"
"""Takes the place of a table in the rest of its body: no broker writes a number there."""


class RegisterBrokerBody(Body):
    filter_server_list: list[str] = msgspec.field(default_factory=list)
    topic_config_serialize_wrapper: TopicConfigAndMappingSerializeWrapper = msgspec.field(
        default_factory=TopicConfigAndMappingSerializeWrapper
    )

    @classmethod
    def decode_steps(
        cls, data: bytes, version: int = MQ_VERSION
    ) -> Generator[None, None, "RegisterBrokerBody"]:
        """Reads either form, some hundred topics a step: a body may have 16 MiB of them (R58).
        `version` is the sender's. Raises RemoteProtocolError."""
        if (small := cls.decode_at_once(data)) is not None:
            return small
        if is_compressed(data):
            return (yield from _decode_compressed(data, version))
        return (yield from _decode_plain(data))

    @classmethod
    def decode_at_once(cls, data: bytes) -> "RegisterBrokerBody | None":
        """Reads a body that takes one short step; None for others."""
        if not data:
            return cls()
        if len(data) > _AT_ONCE or is_compressed(data):
            return None
        try:
            return _decode_body(data)
        except NOT_JSON:
            return None  # Java's dialect is read by Python code


_decode_body: Final = msgspec.json.Decoder(RegisterBrokerBody).decode


def is_compressed(data: bytes) -> bool:
    return data[:1] == _ZLIB_FIRST_BYTE


def crc32_of(body: bytes) -> int:
    """The header field `bodyCrc32`: never negative; 0: unchecked."""
    return zlib.crc32(body) & 0x7FFFFFFF


class _RestWrapper(msgspec.Struct, rename="camel"):
    """TopicConfigAndMappingSerializeWrapper without what its tables held."""

    data_version: DataVersion = DataVersion()
    mapping_data_version: DataVersion = DataVersion()
    topic_config_table: Any = None
    topic_queue_mapping_info_map: Any = None


class _Rest(msgspec.Struct, rename="camel"):
    filter_server_list: list[str] = msgspec.field(default_factory=list)
    topic_config_serialize_wrapper: _RestWrapper = msgspec.field(default_factory=_RestWrapper)


def _decode_plain(data: bytes) -> Generator[None, None, RegisterBrokerBody]:
    """Takes the two tables out, a few hundred entries per step, then reads the rest."""
    topics = _Table("topicConfigTable", TopicConfig)
    mappings = _Table("topicQueueMappingInfoMap", dict[str, Any])
    try:
        rest = yield from topics.take_from(data)
        rest = yield from mappings.take_from(rest)
        left = _decode_rest(rest)
        wrapper = left.topic_config_serialize_wrapper
        topics.require_cut(wrapper.topic_config_table)
        mappings.require_cut(wrapper.topic_queue_mapping_info_map)
    except (FastjsonError, *NOT_JSON) as error:
        if len(data) > REQUEST_SIZE_MAX:
            raise RemoteProtocolError(f"RegisterBrokerBody: {error}") from error
        return RegisterBrokerBody.decode_request(data)  # the tables may be in the dialect, too
    return RegisterBrokerBody(
        filter_server_list=left.filter_server_list,
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=wrapper.data_version,
            mapping_data_version=wrapper.mapping_data_version,
            topic_config_table=topics.entries,
            topic_queue_mapping_info_map=mappings.entries,
        ),
    )


def _decode_rest(rest: bytes) -> _Rest:
    if len(rest) > _REST_MAX:
        raise FastjsonError(f"{len(rest)} bytes beside its topics, at most {_REST_MAX} are allowed")
    try:
        return msgspec.json.decode(rest, type=_Rest)
    except NOT_JSON:
        value = without_nulls(loads(rest, is_request=True))
        return msgspec.convert(value, _Rest, strict=False, str_keys=True)


class _Table(Generic[T]):
    """A table in a plain body: a large object of objects. Raises FastjsonError for unreadable
    text."""

    def __init__(self, name: str, kind: type[T]) -> None:
        self.entries: dict[str, T] = {}
        self._name = name
        self._member = b'"%b"' % name.encode()
        self._kind: type[dict[str, T]] = dict[str, kind]  # type: ignore[valid-type]
        self._decode = msgspec.json.Decoder(self._kind).decode
        self._is_cut = False
        self._loose_members = 0

    def take_from(self, data: bytes) -> Generator[None, None, bytes]:
        """Reads the entries; returns `data` with _CUT in place of the table."""
        place = data.find(self._member)
        found = _before_object(data, place + len(self._member)) if place >= 0 else None
        if found is None:
            return data
        at = found.end() + 1
        while (some := _some_entries(data, at, at + _ENTRY_SIZE_MAX)) is not None:
            self._add(data[at : some.end() - 1])
            at = some.end()
            yield
        last = _last_entry(data, at, at + _ENTRY_SIZE_MAX)
        if last is not None:
            self._add(last.group())
            at = last.end()
        if not data[at : at + _LONG].lstrip().startswith(b"}") or (self.entries and last is None):
            raise FastjsonError(
                f"{self._name}: no entry of at most {_ENTRY_SIZE_MAX} bytes, a name and an object",
                at,
            )
        self._is_cut = True
        return data[: found.end()] + _CUT + data[data.index(b"}", at) + 1 :]

    def require_cut(self, left: Any) -> None:
        """Checks that the rest has _CUT in the table's place. `left`: what is there, or None."""
        if left != (0 if self._is_cut else None):
            raise FastjsonError(f"{self._name}: expected once, an object within its wrapper")

    def _add(self, entries: bytes) -> None:
        """`entries`: members of the table, with commas between them."""
        text = b"{%b}" % entries
        try:
            self.entries |= self._decode(text)
        except NOT_JSON as error:
            self._loose_members += text.count(b",")
            if self._loose_members > _LOOSE_MEMBERS_MAX:
                raise FastjsonError(
                    f"{self._name}: more than {_LOOSE_MEMBERS_MAX} members are read only as"
                    f" standard JSON: {error}"
                ) from error
            value = without_nulls(loads(text, values_max=len(text)))
            self.entries |= msgspec.convert(value, self._kind, strict=False, str_keys=True)
        if len(self.entries) > TOPICS_MAX:
            raise _too_many(len(self.entries))


def _too_many(count: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"RegisterBrokerBody: {count} topics or more, at most {TOPICS_MAX} are allowed"
    )


def _inflated(data: bytes) -> Generator[None, None, bytes]:
    inflater = zlib.decompressobj()
    parts: list[bytes] = []
    size = 0
    while not inflater.eof:
        part = inflater.decompress(data, _AT_ONCE)
        data = inflater.unconsumed_tail
        size += len(part)
        if size > INFLATED_SIZE_MAX or not (part or data):
            raise RemoteProtocolError("RegisterBrokerBody: the zlib stream is cut off or too long")
        parts.append(part)
        yield
    return b"".join(parts)


def _decode_compressed(data: bytes, version: int) -> Generator[None, None, RegisterBrokerBody]:
    try:
        reader = _BodyReader((yield from _inflated(data)))
        data_version = DataVersion.decode_request(reader.text())
        topics: dict[str, TopicConfig] = {}
        for number in range(reader.entries()):
            text = reader.text(_ENTRY_SIZE_MAX)
            topic = _topic_of(text)
            topics[topic.topic_name] = topic
            if number % _TOPICS_AT_ONCE == 0 or len(text) > _LONG:
                yield
        filters = loads(reader.text(_ENTRY_SIZE_MAX), is_request=True)
        mappings: dict[str, Any] = {}
        if version >= MQ_VERSION_TOPIC_MAPPING and not reader.at_end:
            for number in range(reader.entries()):
                text = reader.text(_ENTRY_SIZE_MAX)
                mapping = loads(text, is_request=True)
                mappings[str(mapping.get("topic", ""))] = mapping
                if number % _TOPICS_AT_ONCE == 0 or len(text) > _LONG:
                    yield
        filter_servers = [str(name) for name in filters or []]
    # ValueError: also of FastjsonError. RecursionError: a value nested deeply, without its nulls.
    except (zlib.error, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(f"RegisterBrokerBody: {error}") from error
    return RegisterBrokerBody(
        filter_server_list=filter_servers,
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=data_version,
            topic_config_table=topics,
            topic_queue_mapping_info_map=mappings,
        ),
    )


class _BodyReader:
    """Length-prefixed pieces of an inflated body."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._data)

    def count(self) -> int:
        if self._at + 4 > len(self._data):
            raise RemoteProtocolError("RegisterBrokerBody: cut off")
        (value,) = _I32.unpack_from(self._data, self._at)
        self._at += 4
        if not 0 <= value <= len(self._data):
            raise RemoteProtocolError(f"RegisterBrokerBody: a length of {value}")
        return int(value)

    def entries(self) -> int:
        """How many entries follow."""
        count = self.count()
        if count > TOPICS_MAX:
            raise _too_many(count)
        return count

    def text(self, size_max: int = INFLATED_SIZE_MAX) -> bytes:
        size = self.count()
        if size > size_max:
            raise RemoteProtocolError(
                f"RegisterBrokerBody: a text of {size} bytes, at most {size_max} are allowed"
            )
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise RemoteProtocolError("RegisterBrokerBody: cut off")
        return self._data[start : self._at]


def _topic_of(text: bytes) -> TopicConfig:
    fields = text.decode().split(" ", 5)
    if len(fields) < 5:
        raise RemoteProtocolError(f"RegisterBrokerBody: topic {text!r} has too few fields")
    attributes = loads(fields[5], is_request=True) if len(fields) > 5 and fields[5] else {}
    return TopicConfig(
        topic_name=fields[0],
        read_queue_nums=int(fields[1]),
        write_queue_nums=int(fields[2]),
        perm=int(fields[3]),
        topic_filter_type=fields[4],
        attributes={str(key): str(value) for key, value in (attributes or {}).items()},
    )
