"""Topic and group changes as records of the commit log (SAFETY R31).

A change of a topic or a group is a record of the system topic `rmq_sys_BATON_METADATA`: it is
replicated, confirmed, truncated and recovered like any message, in order with the messages that
need it, so "on every set member before it is answered" is nothing but confirmOffset. A Java replica
stores such a record and makes nothing of it.

Pure: encodes and decodes the records; who applies them is `broker.topics`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from protocol.bodies import SubscriptionGroupConfig, TopicConfig
from protocol.errors import RemoteProtocolError

METADATA_TOPIC: Final = "rmq_sys_BATON_METADATA"
METADATA_VERSION: Final = 1


class MetadataChange(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What one record changes. Names that are absent are untouched."""

    v: int = METADATA_VERSION
    topics: dict[str, TopicConfig] = {}
    deleted_topics: list[str] = []
    groups: dict[str, SubscriptionGroupConfig] = {}

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


_decoder = msgspec.json.Decoder(MetadataChange)


def decode_metadata(body: bytes) -> MetadataChange:
    """Reads a record's body. Raises RemoteProtocolError for one of an unknown version or shape."""
    try:
        change = _decoder.decode(body)
    except msgspec.DecodeError as exc:
        raise RemoteProtocolError(f"metadata record: {exc}") from exc
    if change.v != METADATA_VERSION:
        raise RemoteProtocolError(
            f"metadata record of version {change.v}; this broker reads {METADATA_VERSION}"
        )
    return change
