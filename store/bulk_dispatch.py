"""Dispatch of many common records at once: a run of `RecordColumns` into queues and index.

The outcome is that of `Dispatcher` record by record, byte for byte: whatever is not plain (a queue
that does not just go on, entries that do not fit into the index file) is left to it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from batonmq.store.hash_batch import I64
from batonmq.store.index_service import IndexService
from batonmq.store.queue_table import Queue, QueueTable
from batonmq.store.record_columns import RecordColumns


class _Share(NamedTuple):
    """What one queue gets of a run."""

    queue: Queue
    units: bytes
    next_offset: int


def dispatch_run(
    columns: RecordColumns,
    first: int,
    behind: int,
    queues: QueueTable,
    index: IndexService | None,
    touched: set[Queue],
) -> bool:
    """Make the rows [first, behind) visible; False if they are to be taken one by one, then nothing
    has changed. Raises OSError if the disk fails."""
    shares = _shares(columns, slice(first, behind), queues)
    if shares is None or not (index is None or _put_entries(columns, first, behind, index)):
        return False
    for queue, units, next_offset in shares:
        queue.consume_queue.append_units(units)
        queue.next_offset = max(queue.next_offset, next_offset)
        touched.add(queue)
    return True


def _shares(columns: RecordColumns, run: slice, queues: QueueTable) -> list[_Share] | None:
    """By the first record of each queue; None if one of them does not just go on."""
    keys = columns.topic_numbers[run] << 32 | (columns.queue_ids[run] & 0xFFFFFFFF)
    order = np.argsort(keys, kind="stable")
    sorted_keys, offsets = keys[order], columns.queue_offsets[run][order]
    changes = sorted_keys[1:] != sorted_keys[:-1]
    if (~changes & (offsets[1:] != offsets[:-1] + 1)).any():
        return None
    begins = np.concatenate(([0], np.flatnonzero(changes) + 1))
    stops = np.append(begins[1:], len(keys))
    units = columns.units[run][order].tobytes()
    ends = columns.ends[run][order]
    unit_size = columns.units.itemsize
    shares: list[_Share] = []
    by_first = np.argsort(order[begins])
    for key, begin, stop, offset, first_end in _rows_of(
        by_first, sorted_keys[begins], begins, stops, offsets[begins], ends[begins]
    ):
        queue = queues.of_bytes(columns.topics[key >> 32], _signed(key & 0xFFFFFFFF))
        consume_queue = queue.consume_queue
        if offset != consume_queue.max_offset or first_end <= consume_queue.last_physical_end:
            return None
        packed = units[begin * unit_size : stop * unit_size]
        shares.append(_Share(queue, packed, offset + stop - begin))
    return shares


def _rows_of(order: I64, *columns: I64) -> list[tuple[int, ...]]:
    """The columns as tuples of plain numbers, in `order`."""
    return list(zip(*(column[order].tolist() for column in columns), strict=True))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


def _put_entries(columns: RecordColumns, first: int, behind: int, index: IndexService) -> bool:
    from_entry, to_entry = np.searchsorted(columns.entry_rows, (first, behind)).tolist()
    if from_entry == to_entry:
        return True
    rows = columns.entry_rows[from_entry:to_entry]
    return index.put_entries(
        columns.entry_hashes[from_entry:to_entry], columns.begins[rows], columns.stored_at[rows]
    )
