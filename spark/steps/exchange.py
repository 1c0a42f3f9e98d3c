"""Rows between two steps of a job, divided by a key: what has one key comes to one task.

Each task writes one Arrow file with a batch for each bucket, below a folder that all executors
share; a task of the next step reads its batch of every file. A file gets its name when it is whole,
and a repeated task replaces it. Free of Spark.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batonmq.spark.read.storage import locate

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Files below `folder`, a path or URI, with `schema`; `keys`: the columns that divide."""

    folder: str
    schema: pa.Schema
    keys: Sequence[str]
    buckets: int

    def send(self, task: str, table: pa.Table) -> None:
        """Write the rows of a task, whose name is used once. Raises OSError."""
        if not table.num_rows:
            return
        ends = [table.num_rows]
        if self.buckets > 1:
            which = self.buckets_of(table)
            table = table.take(pa.array(np.argsort(which, kind="stable")))
            ends = np.cumsum(np.bincount(which, minlength=self.buckets)).tolist()
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

    def receive(self, bucket: int) -> pa.Table:
        """All rows of a bucket, in the order of the tasks' names. Raises OSError."""
        return pa.Table.from_batches(self.batches(bucket), self.schema)

    def batches(self, bucket: int) -> Iterator[pa.RecordBatch]:
        """The rows of a bucket of each task, in the order of their names and rows. Of local files
        only what is looked at is in memory. Raises OSError.
        """
        storage, place = locate(self.folder)
        opened = storage.file_system.open_input_file if storage.root else pa.memory_map
        for info in storage.children(place):
            if info.base_name.endswith(".arrow"):
                with opened(info.path) as file:
                    yield pa.ipc.open_file(file).get_batch(bucket)

    def buckets_of(self, table: pa.Table) -> npt.NDArray[np.int64]:
        """The bucket of each row by its keys; the same in every process."""
        mixed = np.zeros(table.num_rows, np.uint64)
        for name in self.keys:
            mixed = (mixed ^ _hashes(table.column(name))) * _FACTOR
        return ((mixed >> np.uint64(32)) % np.uint64(self.buckets)).astype(np.int64)


def _hashes(column: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """A number for each value of a column of texts or whole numbers; null has one, too."""
    if pa.types.is_integer(column.type):
        numbers: npt.NDArray[np.int64] = column.cast(pa.int64()).fill_null(-1).to_numpy()
        return numbers.view(np.uint64)
    coded = pa.array(column.to_pylist(), pa.string()).dictionary_encode()
    each = [zlib.crc32(text.encode("utf-8", "replace")) for text in coded.dictionary.to_pylist()]
    codes = coded.indices.fill_null(len(each)).to_numpy()
    return np.array([*each, 1], np.uint64)[codes]
