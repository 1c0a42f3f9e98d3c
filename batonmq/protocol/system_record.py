"""A master's own records in the log: JSON with a version, `v`. Pure."""

from functools import cache
from typing import Any, ClassVar, Self

import msgspec

from batonmq.protocol.errors import RemoteProtocolError
from batonmq.protocol.fastjson import NOT_JSON


class SystemRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A subclass is one kind of record, named KIND. All are of version 1."""

    KIND: ClassVar[str]
    v: int = 1

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Reads a record's body. Raises RemoteProtocolError for another shape or version."""
        try:
            record: Self = _decoder(cls).decode(body)
        except NOT_JSON as exc:
            raise RemoteProtocolError(f"{cls.KIND} record: {exc}") from exc
        if record.v != 1:
            raise RemoteProtocolError(
                f"{cls.KIND} record of version {record.v}; this broker reads 1"
            )
        return record


@cache
def _decoder(kind: type[SystemRecord]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
