"""The narrow rows of messages and entries that the steps of an audit exchange. Free of Spark."""

from __future__ import annotations

from typing import Final, NamedTuple

import pyarrow as pa

from batonmq.spark.audit.acked_list import ENTRY_SCHEMA, Entry
from batonmq.spark.audit.findings import SCAN_SCHEMA, Finding


class Message(NamedTuple):
    """A record as the replicas hold it. `have`, `lack`, `amount`: see `findings.SCAN_SCHEMA`."""

    group: str
    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    epoch: int | None
    unique_key: str | None
    batch_key: str | None
    have: int
    lack: int
    body_crc: int
    amount: int

    def finding(self, severity: str, kind: str, detail: str) -> Finding:
        """One about this message, in no replica's name."""
        return Finding(
            self.group, severity, kind, detail, (), self.topic, self.queue_id, self.queue_offset,
            self.physical_offset, self.size, self.epoch, self.unique_key,
        )  # fmt: skip


class Sought(NamedTuple):
    """An entry, and one text by which messages are found for it; None: by none.

    `is_rest`: it is still looked for; else it only tells that its key is listed. `behind`,
    `epoch_before`: log offset and epoch of the message before its place in its queue.
    """

    link: str | None
    is_rest: bool
    behind: int | None
    epoch_before: int | None
    entry: Entry


MESSAGE_SCHEMA: Final = pa.schema([SCAN_SCHEMA.field(name) for name in Message._fields])
LINKED_SCHEMA: Final = pa.schema([pa.field("link", pa.string()), *MESSAGE_SCHEMA])
"""A message and one of its links."""
SOUGHT_SCHEMA: Final = pa.schema(
    [
        ("link", pa.string()),
        ("is_rest", pa.bool_()),
        ("behind", pa.int64()),
        ("epoch_before", pa.int64()),
        *ENTRY_SCHEMA,
    ]
)
NAMED_SCHEMA: Final = pa.schema([("group", pa.string()), ("physical_offset", pa.int64())])
"""Messages that entries of the list name."""
