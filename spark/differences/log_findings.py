"""What is found in stores: findings, and the table of them. Free of Spark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import pyarrow as pa


class LogFinding(msgspec.Struct, frozen=True):
    """One finding; offsets are log and queue offsets, sizes bytes. None: it does not apply.

    `replicas`: those that deviate; `field`: header, body, properties. `identity` pairs a message
    that is missing at one place with one that is extra at another.
    """

    group: str | None
    severity: str
    kind: str
    detail: str
    replicas: tuple[str, ...] = ()
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    physical_offset: int | None = None
    size: int | None = None
    epoch: int | None = None
    unique_key: str | None = None
    field: str | None = None
    file: str | None = None
    identity: int | None = None


_KINDS: Final = {
    "replicas": pa.list_(pa.string()), "queue_id": pa.int32(),
    **dict.fromkeys(("queue_offset", "physical_offset", "size", "epoch", "identity"), pa.int64()),
}  # fmt: skip
IDENTIFIED_SCHEMA: Final = pa.schema(
    [(name, _KINDS.get(name, pa.string())) for name in LogFinding.__struct_fields__]
)
FINDING_SCHEMA: Final = IDENTIFIED_SCHEMA.remove(IDENTIFIED_SCHEMA.get_field_index("identity"))
"""The table of findings."""


def finding_table(found: Iterable[LogFinding], schema: pa.Schema = FINDING_SCHEMA) -> pa.Table:
    return pa.Table.from_pylist([msgspec.to_builtins(each) for each in found], schema)
