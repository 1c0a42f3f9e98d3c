"""Rows between two steps of a job, divided by a key: what has one key comes to one task.

Each task writes one Arrow file with a batch for each bucket, below a folder that all executors
share; a task of the next step reads its batch of every file. A file gets its name when it is whole,
and a repeated task replaces it. Free of Spark.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from batonmq.spark.read.storage import locate

_Row = TypeVar("_Row", bound=tuple[Any, ...])


def bucket_of(key: tuple[object, ...], buckets: int) -> int:
    """The bucket of a key; the same in every process."""
    if buckets == 1:
        return 0
    return zlib.crc32("\0".join(map(str, key)).encode("utf-8", "replace")) % buckets


@dataclass(frozen=True, slots=True)
class Exchange:
    """Files below `folder`, a path or URI, with `schema`."""

    folder: str
    schema: pa.Schema
    buckets: int

    def send(self, task: str, table: pa.Table, to: Iterable[int]) -> None:
        """Write the rows of a task; `to`: the bucket of each. The name of a task is used once.

        Raises OSError.
        """
        if not table.num_rows:
            return
        if self.buckets > 1:
            which = np.fromiter(to, np.int64, table.num_rows)
            table = table.take(pa.array(np.argsort(which, kind="stable")))
            ends = np.cumsum(np.bincount(which, minlength=self.buckets)).tolist()
        else:
            ends = [table.num_rows]
        storage, place = locate(self.folder)
        system = storage.file_system
        system.create_dir(place)
        growing = f"{place}/.{uuid.uuid4().hex}"
        with (
            system.open_output_stream(growing) as stream,
            pa.ipc.new_file(stream, self.schema) as writer,
        ):
            for begin, end in zip([0, *ends], ends, strict=False):
                part = table.slice(begin, end - begin).combine_chunks()
                batches = part.to_batches() or [pa.RecordBatch.from_pylist([], self.schema)]
                writer.write_batch(batches[0])
        system.move(growing, f"{place}/{task}.arrow")

    def receive(self, bucket: int) -> Iterator[pa.RecordBatch]:
        """All rows of a bucket, in the order of the tasks' names. Raises OSError."""
        storage, place = locate(self.folder)
        for info in storage.children(place):
            if info.base_name.endswith(".arrow"):
                with storage.file_system.open_input_file(info.path) as file:
                    yield pa.ipc.open_file(file).get_batch(bucket)


def table_of(rows: Sequence[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Rows, whose values are in the order of the columns, as a table."""
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array(each, kind) for each, kind in zip(columns, schema.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def rows_of(batches: Iterable[pa.RecordBatch], kind: type[_Row]) -> Iterator[_Row]:
    """The rows as named tuples whose fields are the columns, in their order."""
    for batch in batches:
        for row in zip(*(_values(column) for column in batch.columns), strict=True):
            yield kind(*row)


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_integer(column.type) and not column.null_count:
        values: list[Any] = column.to_numpy().tolist()
        return values
    listed: list[Any] = column.to_pylist()
    return listed
