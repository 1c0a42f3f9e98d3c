"""Tables of stores and histories as Arrow streams, for pandas, polars and DuckDB: without a JVM.

Free of Spark.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read


def open_arrow(path: str | Sequence[str], **options: str | int | bool) -> pa.RecordBatchReader:
    """The rows of a table, batch by batch as they are asked for, in one thread.

    `path` and `options` as of `spark.read.format("batonmq")`, with its columns and its rules: only
    what is confirmed, damage by `mode`. All that takes an Arrow stream (`__arrow_c_stream__`) reads
    it. Raises ValueError, OSError, StoreError for what cannot be read, and DamagedFile meanwhile.
    """
    paths = [path] if isinstance(path, str) else list(path)
    given = {name: _text(value) for name, value in options.items()}
    read = read_of({"paths": json.dumps(paths), **given})
    plan = read.plan()

    def batches() -> Iterator[pa.RecordBatch]:
        for work in plan:
            yield from read.run(work)

    return pa.RecordBatchReader.from_batches(read.schema, batches())


def read_of(options: Mapping[str, str]) -> Any:
    """The read of a table by its options: it has `schema`, `plan()` and `run(work)`."""
    given = {name.lower(): text.strip().lower() for name, text in options.items()}
    table = given.get("table", "")
    if table in ("differences", "acknowledged"):  # other tables' tasks need it not
        from batonmq.spark.differences.table import table_read

        return table_read(table, options)
    return Read(ReadOptions.from_mapping(options))


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
