"""A registration as a Java broker compresses it, and as it is read. Brokers of ours send it
plain."""

import json
import struct
import zlib
from collections.abc import Generator
from typing import cast

import msgspec

from batonmq.protocol.bodies import TopicConfig
from batonmq.protocol.codes import MQ_VERSION, MQ_VERSION_TOPIC_MAPPING
from batonmq.protocol.register_body import RegisterBrokerBody


def compressed(body: RegisterBrokerBody, version: int = MQ_VERSION) -> bytes:
    """`version` is the one that the header carries."""
    wrapper = body.topic_config_serialize_wrapper
    topics = [_topic_text(topic) for topic in wrapper.topic_config_table.values()]
    parts = [_sized(wrapper.data_version.encode()), *_counted(topics)]
    parts.append(_sized(msgspec.json.encode(body.filter_server_list)))
    if version >= MQ_VERSION_TOPIC_MAPPING:
        mappings = wrapper.topic_queue_mapping_info_map.values()
        parts += _counted([msgspec.json.encode(mapping) for mapping in mappings])
    return zlib.compress(b"".join(parts))


def registered(data: bytes, version: int = MQ_VERSION) -> RegisterBrokerBody:
    return ended(RegisterBrokerBody.decode_steps(data, version))


def ended(steps: Generator[None, None, RegisterBrokerBody]) -> RegisterBrokerBody:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(RegisterBrokerBody, end.value)


def _sized(text: bytes) -> bytes:
    return struct.pack(">i", len(text)) + text


def _counted(texts: list[bytes]) -> list[bytes]:
    return [struct.pack(">i", len(texts)), *map(_sized, texts)]


def _topic_text(topic: TopicConfig) -> bytes:
    attributes = json.dumps(topic.attributes, separators=(",", ":"), ensure_ascii=False)
    return (
        f"{topic.topic_name} {topic.read_queue_nums} {topic.write_queue_nums} {topic.perm}"
        f" {topic.topic_filter_type} {attributes}"
    ).encode()
