"""A table into Parquet files, written by the tasks' Python processes themselves.

`DataFrame.write.parquet` takes every row through the JVM, one value after another; that costs about
five times what decoding does. Here each task writes the Arrow batches it has decoded. It is for
tables as they are: filters, joins and the like are the data frame's.

A file gets its name only when it is whole, and a repeated task replaces the file of the same name;
`_SUCCESS` comes last. No row leaves its task, so nothing is shuffled.
"""

import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read, Work
from batonmq.spark.read.storage import Storage, locate

_ROW_GROUP_BYTES: Final = 32 << 20
# Few values many times: the others would only fill a dictionary and leave it again.
_REPEATING: Final = (
    "store", "cluster", "broker", "topic", "tags", "born_host", "store_host", "group", "file",
    "controller", "log", "kind", "broker_name", "address", "node", "reason",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """One file that was written."""

    path: str
    rows: int


def write_parquet(
    session: SparkSession, options: Mapping[str, str], folder: str
) -> list[ParquetFile]:
    """Read a table by the data source's options and write it below `folder`; the files, in order.

    Rows of one file are in the order of the log. Raises FileExistsError if the folder holds
    something, ValueError for bad options; what a task raises comes as Spark's error.
    """
    read = Read(ReadOptions.from_mapping(options))
    storage, place = locate(folder)
    if storage.children(place):
        raise FileExistsError(f"{folder} is not empty: files of two reads would be mixed")
    work = read.plan()
    files: list[ParquetFile] = []
    if work:
        files = (
            session.sparkContext.parallelize(work, len(work))
            .flatMap(lambda each: _write(read, each, storage, place))
            .collect()
        )
    system = storage.file_system
    system.create_dir(place)
    if not files:  # else readers had no columns
        with pq.ParquetWriter(f"{place}/part-000000.parquet", read.schema, filesystem=system):
            pass
    if storage.exists(f"{place}/_temporary"):
        system.delete_dir(f"{place}/_temporary")
    with system.open_output_stream(f"{place}/_SUCCESS"):
        pass
    return files


def _write(read: Read, work: Work, storage: Storage, folder: str) -> list[ParquetFile]:
    """Write one partition; no file if it has no rows."""
    system, schema = storage.file_system, read.schema
    name = f"part-{work.number:06d}.parquet"
    growing = f"{folder}/_temporary/{uuid.uuid4().hex}-{name}"
    repeating = [each for each in schema.names if each in _REPEATING]
    rows = seen = 0

    def row_group(batch: pa.RecordBatch) -> int:
        """The number of the row group that a batch goes to."""
        nonlocal seen
        seen += batch.nbytes
        return seen // _ROW_GROUP_BYTES

    with ExitStack() as stack:
        writer = None
        for _, batches in groupby(read.run(work), row_group):
            if writer is None:
                system.create_dir(f"{folder}/_temporary")
                writer = stack.enter_context(pq.ParquetWriter(
                    growing, schema, filesystem=system, compression="snappy",
                    use_dictionary=repeating,
                ))  # fmt: skip
            table = pa.Table.from_batches(batches)
            writer.write_table(table)
            rows += table.num_rows
    if not rows:
        return []
    system.move(growing, f"{folder}/{name}")
    return [ParquetFile(f"{folder}/{name}", rows)]
