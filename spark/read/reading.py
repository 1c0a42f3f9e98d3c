"""Plans a read into pieces of work, and does one: what the data source does, without Spark.

Each table has one kind of piece. A piece carries all that its reader needs, so that it can travel.
Free of Spark.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Final

import pyarrow as pa

from batonmq.spark.read.columns import table_schema
from batonmq.spark.read.damage import Damage, DamageCount, Mode, settle
from batonmq.spark.read.history_table import HistoryRange, plan_history, read_history
from batonmq.spark.read.log_range import LogGap, LogRange
from batonmq.spark.read.log_table import confirmed_end, plan_ranges, read_range
from batonmq.spark.read.options import NARROWING, ReadOptions
from batonmq.spark.read.queues import QueuePiece, gather, plan_pieces
from batonmq.spark.read.selection import Selection
from batonmq.spark.read.storage import COMMA_HINT, Storage, found
from batonmq.spark.read.store_facts import StoreError, StoreFacts, read_facts
from batonmq.spark.read.store_tables import (
    IndexPiece,
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

Parts = (
    tuple[LogRange | LogGap, ...]
    | tuple[QueuePiece, ...]
    | tuple[IndexPiece, ...]
    | tuple[HistoryRange, ...]
    | tuple[StoreFacts, ...]
)
Items = Iterator[pa.RecordBatch | Damage]


@dataclass(frozen=True, slots=True)
class Work:
    """One partition: what to read of the store `facts`; None where a part names its own."""

    number: int
    storage: Storage
    facts: StoreFacts | None
    parts: Parts


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a table."""

    options: ReadOptions

    @property
    def schema(self) -> pa.Schema:
        """Its columns. Raises ValueError for unknown ones."""
        return schema_of(self.options)

    def plan(self) -> list[Work]:
        """The partitions. Raises StoreError, OSError, ValueError for what cannot be read."""
        plan = [
            (storage, facts, parts)
            for storage, places in groupby(found(self.options.paths), itemgetter(0))
            for facts, parts in self._plan(storage, [path for _, path in places])
        ]
        self._hint(plan)
        return [Work(number, *each) for number, each in enumerate(plan)]

    def _hint(self, plan: Sequence[tuple[Storage, StoreFacts | None, Parts]]) -> None:
        """If a large log is read whole: a hint which options would limit the read."""
        ranges = (part for _, _, parts in plan for part in parts if isinstance(part, LogRange))
        size = sum(part.end - part.begin for part in ranges)
        if size >= _LARGE_BYTES and self.options.selection == Selection():
            log.warning(
                "whole_log_read bytes=%d: Spark tells a Python source neither the filters nor the "
                "columns of a query; %s and columns are options",
                size,
                ", ".join(NARROWING[self.options.table]),
            )

    def _plan(
        self, storage: Storage, paths: list[str]
    ) -> Iterator[tuple[StoreFacts | None, Parts]]:
        options = self.options
        if options.table == "history":
            for part in plan_history(storage, paths, options.split_bytes):
                yield None, (part,)
            return
        stores = [self._facts(storage, path) for path in paths]
        if options.table in ("epochs", "offsets"):
            for at in range(0, len(stores), _STORES_PER_PIECE):
                yield None, tuple(stores[at : at + _STORES_PER_PIECE])
            return
        for facts in stores:
            if self._misses_epochs(facts):
                yield None, (facts,)  # the damage; in the rows the epoch is null
            if options.table == "index":
                for entry in plan_index(storage, facts, options.slot_num, options.split_bytes):
                    yield facts, (entry,)
            elif options.table == "consumequeue":
                pieces = plan_pieces(storage, facts, options.selection)
                for group in gather(pieces, options.split_bytes):
                    yield facts, group
            else:
                for log_range in plan_ranges(storage, facts, options):
                    yield facts, (log_range,)

    def _facts(self, storage: Storage, path: str) -> StoreFacts:
        facts = read_facts(storage, path, COMMA_HINT * (len(self.options.paths) > 1))
        if self._misses_epochs(facts) and self.options.mode is Mode.FAILFAST:
            raise StoreError(
                f"{facts.epochs_fault}; read with mode DROPMALFORMED or PERMISSIVE to get the rows "
                "without their epochs"
            )
        return facts

    def _misses_epochs(self, facts: StoreFacts) -> bool:
        return bool(facts.epochs_fault) and self.options.table not in ("epochs", "offsets")

    def run(self, work: Work) -> Iterator[pa.RecordBatch]:
        """The batches of one partition. Raises DamagedFile in mode FAILFAST."""
        options, schema = self.options, self.schema
        count = DamageCount()
        for facts, items in self._items(work, schema):
            known = facts.names if facts is not None else {}
            yield from settle(items, options.mode, known, schema, count)
        if count.stretches:
            log.warning(
                "damage_left_out partition=%d stretches=%d bytes=%d first=%s",
                work.number,
                count.stretches,
                count.size_bytes,
                count.first,
            )

    def _items(self, work: Work, schema: pa.Schema) -> Iterator[tuple[StoreFacts | None, Items]]:
        storage, options = work.storage, self.options
        for part in work.parts:
            if isinstance(part, StoreFacts):
                if options.table == "offsets":
                    yield part, read_offsets(storage, part, options.selection, schema)
                else:
                    yield part, read_epochs(part, schema)
                continue
            if isinstance(part, HistoryRange):
                yield None, read_history(storage, part, schema)
                continue
            facts = work.facts
            assert facts is not None
            if isinstance(part, LogGap):
                yield facts, iter([part.damage()])
                continue
            if isinstance(part, LogRange):
                yield facts, read_range(storage, part, facts, options, schema)
                continue
            confirmed = None if options.unconfirmed else confirmed_end(facts)
            if isinstance(part, IndexPiece):
                yield facts, read_index(storage, part, facts, confirmed, schema)
            else:
                yield facts, read_queue_piece(storage, part, facts, confirmed, schema)


def schema_of(options: ReadOptions) -> pa.Schema:
    """The columns that a read yields. Raises ValueError for unknown ones."""
    return table_schema(
        options.table, options.columns, with_corrupt=options.mode is Mode.PERMISSIVE
    )
