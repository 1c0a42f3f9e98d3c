"""Plans a read into pieces of work, and does one: what the data source does, without Spark.

Each table has one kind of piece. A piece carries all that its reader needs, so that it can travel.
Free of Spark.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.read.columns import table_schema
from batonmq.spark.read.damage import Damage, DamageCount, Mode, settle
from batonmq.spark.read.history_table import plan_history, read_history
from batonmq.spark.read.log_range import LogRange
from batonmq.spark.read.log_table import plan_ranges, read_range
from batonmq.spark.read.options import NARROWING, ReadOptions
from batonmq.spark.read.queues import QueuePiece, plan_pieces
from batonmq.spark.read.selection import Selection
from batonmq.spark.read.storage import TextPart, found
from batonmq.spark.read.store_facts import StoreError, StoreFacts, read_stores
from batonmq.spark.read.store_tables import (
    IndexPiece,
    epochs_damage,
    plan_index,
    read_epochs,
    read_index,
    read_offsets,
    read_queue_piece,
)

log = logging.getLogger(__name__)

# Stores whose small files one task reads.
_STORES_PER_PIECE: Final = 64
_LARGE_BYTES: Final = 1 << 30

Items = Iterator[pa.RecordBatch | Damage]
_READERS: Final[dict[type, Any]] = {
    LogRange: read_range, QueuePiece: read_queue_piece, IndexPiece: read_index
}  # fmt: skip
Part = LogRange | Damage | QueuePiece | IndexPiece | TextPart | StoreFacts


@dataclass(frozen=True, slots=True)
class Work:
    """One partition: what to read of the store `facts`; None where a part names its own."""

    number: int
    facts: StoreFacts | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a table."""

    options: ReadOptions

    @property
    def schema(self) -> pa.Schema:
        """Its columns. Raises ValueError for unknown ones."""
        options = self.options
        with_corrupt = options.mode is Mode.PERMISSIVE
        return table_schema(options.table, options.columns, with_corrupt=with_corrupt)

    def plan(self) -> list[Work]:
        """The partitions. Raises StoreError, OSError, ValueError for what cannot be read."""
        plan = [Work(number, *piece) for number, piece in enumerate(self._plan())]
        ranges = (part for work in plan for part in work.parts if isinstance(part, LogRange))
        size = sum(part.end - part.begin for part in ranges)
        if size >= _LARGE_BYTES and self.options.selection == Selection():
            log.warning(
                "whole_log_read bytes=%d: Spark tells a Python source neither the filters nor the "
                "columns of a query; %s and columns are options",
                size,
                ", ".join(NARROWING[self.options.table]),
            )
        return plan

    def _plan(self) -> Iterator[tuple[StoreFacts | None, tuple[Part, ...]]]:
        options = self.options
        if options.table == "history":
            for lines in plan_history(found(options.paths), options.split_bytes):
                yield None, (lines,)
            return
        stores = read_stores(options.paths)
        if options.table in ("epochs", "offsets"):
            for at in range(0, len(stores), _STORES_PER_PIECE):
                yield None, tuple(stores[at : at + _STORES_PER_PIECE])
            return
        for facts in stores:
            if facts.epochs_fault:
                if options.mode is Mode.FAILFAST:
                    raise StoreError(
                        f"{facts.epochs_fault}; read with mode DROPMALFORMED or PERMISSIVE to get "
                        "the rows without their epochs"
                    )
                yield facts, (epochs_damage(facts),)  # in the rows the epoch is null
            if options.table == "consumequeue":
                yield from ((facts, parts) for parts in plan_pieces(facts, options))
                continue
            plan = plan_index if options.table == "index" else plan_ranges
            for part in plan(facts, options):
                yield facts, (part,)

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """The batches of one partition. Raises DamagedFile in mode FAILFAST."""
        schema, count = self.schema, DamageCount()
        for part in work.parts:
            facts = part if isinstance(part, StoreFacts) else work.facts
            known = facts.names if facts is not None else {}
            items = self._items(work, part, schema)
            yield from settle(items, self.options.mode, known, schema, count)
        if count.stretches:
            log.warning(
                "damage_left_out partition=%d stretches=%d bytes=%d first=%s",
                work.number,
                count.stretches,
                count.size_bytes,
                count.first,
            )

    def _items(self, work: Work, part: Part, schema: pa.Schema) -> Items:
        if isinstance(part, Damage):
            return iter([part])
        if isinstance(part, TextPart):
            return read_history(part, schema)
        if isinstance(part, StoreFacts):
            read = read_offsets if self.options.table == "offsets" else read_epochs
            return read(part, self.options, schema)
        items: Items = _READERS[type(part)](part, work.facts, self.options, schema)
        return items
