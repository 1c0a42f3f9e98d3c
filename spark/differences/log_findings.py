"""What comparing stores gives: findings, and the columns of table `differences`. Free of Spark."""

from collections.abc import Iterable
from typing import Final

import msgspec
import pyarrow as pa

from batonmq.spark.read.columns import columns_of

#: By its column `part` a row is one of several things; what does not apply is null.
#: `finding`: see LogFinding.
#: `message`: a record as the replicas hold it; `have`, `lack`: bit i is replica i of the group.
#: `amount`: 1; 0: the other replicas hold something else, or those that have it are behind a later
#: epoch. `batch_key`: the unique key of the batch in which it was sent.
#: `tags`: the hash of its tags. `is_queued`: it has one place in a queue, and all rely on it.
#: `count`: messages in the confirmed log of a range, those that two or more replicas hold alike,
#: and the bytes that were compared.
DIFFERENCES: Final = columns_of("""
    string: part group severity kind detail
    texts: replicas
    string: topic
    int: queue_id
    long: queue_offset physical_offset size epoch
    string: unique_key field file
    long: identity
    string: batch_key
    long: have lack body_crc amount tags
    bool: is_queued
    long: messages agreed log_bytes
""")


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


def finding_table(found: Iterable[LogFinding]) -> pa.Table:
    """Findings as rows of `differences`, of which `part` is null."""
    return pa.Table.from_pylist([msgspec.structs.asdict(each) for each in found], DIFFERENCES)
