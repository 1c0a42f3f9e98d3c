"""A master's own records in the log: JSON with a version, `v`. Pure."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import NOT_JSON


class _Versioned(Protocol):
    @property
    def v(self) -> int: ...


R = TypeVar("R", bound=_Versioned)


def decode_system_record(
    decoder: msgspec.json.Decoder[R], body: bytes, name: str, version: int
) -> R:
    """Reads the body of a record of kind `name`. Raises RemoteProtocolError for another shape or
    version."""
    try:
        record = decoder.decode(body)
    except NOT_JSON as exc:
        raise RemoteProtocolError(f"{name} record: {exc}") from exc
    if record.v != version:
        raise RemoteProtocolError(
            f"{name} record of version {record.v}; this broker reads {version}"
        )
    return record
