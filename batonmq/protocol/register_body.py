"""What a broker registers with a name server (REGISTER_BROKER, 103), plain or compressed. Origin:
Java `RegisterBrokerBody`.

Compressed: one zlib stream of i32 + DataVersion JSON; i32 topics; per topic i32 + text `name
readNums writeNums perm filterType attributesJson`; i32 + filter server JSON array; from version 413
on i32 mappings, each i32 + JSON. A Java broker sends `compressed=false` even with a compressed
body, so the body decides.
"""

import struct
import zlib
from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar, cast

import msgspec

from batonmq.protocol.bodies import DataVersion, TopicConfig, TopicConfigAndMappingSerializeWrapper
from batonmq.protocol.codes import MQ_VERSION, MQ_VERSION_TOPIC_MAPPING
from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import FastjsonError, loads
from batonmq.protocol.json_body import Body

T = TypeVar("T")

_I32: Final = struct.Struct(">i")
_ZLIB_FIRST_BYTE: Final = b"\x78"
INFLATED_SIZE_MAX: Final = 16 << 20
"""What a frame holds uncompressed. A stream that inflates to more is refused (R58)."""
_INFLATED_AT_ONCE: Final = 256 << 10
_TOPICS_AT_ONCE: Final = 256
_AT_ONCE: Final = 256 << 10  # Bytes of a plain body that are read in one step: 1,000 topics.
_ENTRY_SIZE_MAX: Final = 64 << 10  # Of one topic or mapping, in a larger body.
_LOOSE_MEMBERS_MAX: Final = 65_536
"""5,000 topics have 45,000."""


class RegisterBrokerBody(Body):
    filter_server_list: list[str] = msgspec.field(default_factory=list)
    topic_config_serialize_wrapper: TopicConfigAndMappingSerializeWrapper = msgspec.field(
        default_factory=TopicConfigAndMappingSerializeWrapper
    )

    @classmethod
    def decode_wire(cls, data: bytes, version: int = MQ_VERSION) -> "RegisterBrokerBody":
        """Reads either form; `version` is the sender's. Raises RemoteProtocolError."""
        if not data:
            return cls()
        steps = cls.decode_steps(data, version)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cast(RegisterBrokerBody, end.value)

    @classmethod
    def decode_steps(
        cls, data: bytes, version: int = MQ_VERSION
    ) -> Generator[None, None, "RegisterBrokerBody"]:
        """The same in steps, a few hundred topics each: a body may hold 16 MiB of them (R58)."""
        if not data:
            return cls()
        if is_compressed(data):
            return (yield from _decode_compressed(data, version))
        return (yield from _decode_plain(data))


def is_compressed(data: bytes) -> bool:
    return data[:1] == _ZLIB_FIRST_BYTE


def crc32_of(body: bytes) -> int:
    """The header field `bodyCrc32`: never negative; 0: unchecked."""
    return zlib.crc32(body) & 0x7FFFFFFF


class _RawWrapper(msgspec.Struct, rename="camel"):
    """TopicConfigAndMappingSerializeWrapper whose entries are not decoded yet."""

    data_version: DataVersion = DataVersion()
    mapping_data_version: DataVersion = DataVersion()
    topic_config_table: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    topic_queue_mapping_info_map: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


class _RawBody(msgspec.Struct, rename="camel"):
    filter_server_list: list[str] = msgspec.field(default_factory=list)
    topic_config_serialize_wrapper: _RawWrapper = msgspec.field(default_factory=_RawWrapper)


def is_large(data: bytes) -> bool:
    """Whether `data` is decoded in more than one step."""
    return is_compressed(data) or len(data) > _AT_ONCE


def _decode_plain(data: bytes) -> Generator[None, None, RegisterBrokerBody]:
    """Java's dialect is read by Python code, so a large body has to be standard JSON (R58)."""
    if not is_large(data):
        return RegisterBrokerBody.decode(data)
    try:
        return (yield from _decode_standard(data))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        members = data.count(b",")
        if members <= _LOOSE_MEMBERS_MAX:
            return RegisterBrokerBody.decode(data)
        raise RemoteProtocolError(
            f"RegisterBrokerBody: {members} members, more than {_LOOSE_MEMBERS_MAX} are read only"
            f" as standard JSON: {error}"
        ) from error


def _decode_standard(data: bytes) -> Generator[None, None, RegisterBrokerBody]:
    raw = _decode_raw(data)  # finds the entries, and makes no object of one
    wrapper = raw.topic_config_serialize_wrapper
    yield
    topics: dict[str, TopicConfig] = {}
    yield from _decode_entries(wrapper.topic_config_table, _decode_topic, topics)
    mappings: dict[str, Any] = {}
    yield from _decode_entries(wrapper.topic_queue_mapping_info_map, msgspec.json.decode, mappings)
    return RegisterBrokerBody(
        filter_server_list=raw.filter_server_list,
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=wrapper.data_version,
            mapping_data_version=wrapper.mapping_data_version,
            topic_config_table=topics,
            topic_queue_mapping_info_map=mappings,
        ),
    )


_decode_raw: Final = msgspec.json.Decoder(_RawBody).decode
_decode_topic: Final = msgspec.json.Decoder(TopicConfig).decode


def _decode_entries(
    raw: dict[str, msgspec.Raw], decode: Callable[[msgspec.Raw], T], into: dict[str, T]
) -> Generator[None, None, None]:
    for number, (name, entry) in enumerate(raw.items(), 1):
        size = len(memoryview(entry))
        if size > _ENTRY_SIZE_MAX:
            raise RemoteProtocolError(
                f"RegisterBrokerBody: topic {name[:255]!r} has {size} bytes, at most"
                f" {_ENTRY_SIZE_MAX} are allowed"
            )
        into[name] = decode(entry)
        if number % _TOPICS_AT_ONCE == 0:
            yield


def _inflated(data: bytes) -> Generator[None, None, bytes]:
    inflater = zlib.decompressobj()
    parts: list[bytes] = []
    size = 0
    while not inflater.eof:
        part = inflater.decompress(data, _INFLATED_AT_ONCE)
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
        data_version = DataVersion.decode(reader.text())
        topics = []
        for number in range(reader.count()):
            topics.append(_topic_of(reader.text()))
            if number % _TOPICS_AT_ONCE == 0:
                yield
        filters = loads(reader.text())
        mappings: dict[str, Any] = {}
        if version >= MQ_VERSION_TOPIC_MAPPING and not reader.at_end:
            for _ in range(reader.count()):
                mapping = loads(reader.text())
                mappings[str(mapping.get("topic", ""))] = mapping
    except (zlib.error, FastjsonError, ValueError, AttributeError) as error:
        raise RemoteProtocolError(f"RegisterBrokerBody: {error}") from error
    return RegisterBrokerBody(
        filter_server_list=[str(name) for name in filters or []],
        topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
            data_version=data_version,
            topic_config_table={topic.topic_name: topic for topic in topics},
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

    def text(self) -> bytes:
        size = self.count()
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise RemoteProtocolError("RegisterBrokerBody: cut off")
        return self._data[start : self._at]


def _topic_of(text: bytes) -> TopicConfig:
    fields = text.decode().split(" ", 5)
    if len(fields) < 5:
        raise RemoteProtocolError(f"RegisterBrokerBody: topic {text!r} has too few fields")
    attributes = loads(fields[5]) if len(fields) > 5 and fields[5] else {}
    return TopicConfig(
        topic_name=fields[0],
        read_queue_nums=int(fields[1]),
        write_queue_nums=int(fields[2]),
        perm=int(fields[3]),
        topic_filter_type=fields[4],
        attributes={str(key): str(value) for key, value in (attributes or {}).items()},
    )
