"""A table into Parquet files, written by the tasks' Python processes themselves.

`DataFrame.write.parquet` takes every row through the JVM, one value after another; that costs about
five times what decoding does. Here each task writes the Arrow batches it has decoded. It is for
tables as they are: filters, joins and the like are the data frame's.
"""

from collections.abc import Mapping
from typing import Final

from pyspark.sql import SparkSession

from batonmq.spark.read.options import ReadOptions
from batonmq.spark.read.reading import Read, Work
from batonmq.spark.read.storage import locate
from batonmq.spark.steps.sql import GROWING, LOCK, ResultTable, locked, names_in, put

# Few values many times: the others would only fill a dictionary and leave it again.
_REPEATING: Final = (
    "store", "cluster", "broker", "topic", "tags", "born_host", "store_host", "group", "file",
    "controller", "log", "kind", "broker_name", "address", "node", "reason",
)  # fmt: skip


def write_parquet(session: SparkSession, options: Mapping[str, str], folder: str) -> int:
    """Read a table by the data source's options and write it into `folder`; the number of rows.

    Files follow each other in the order of the log, `_SUCCESS` comes last. Raises FileExistsError
    if the folder holds something, ValueError for bad options and while another run writes there;
    what a task raises comes as Spark's error. Raises OSError, also for a disk without file locks.
    """
    read = Read(ReadOptions.from_mapping(options))
    _check_empty(folder)
    storage, path = locate(folder)  # tasks may run in another working directory
    table, schema = ResultTable(storage.uri(path)), read.schema
    repeating = [name for name in schema.names if name in _REPEATING]

    def write(work: Work) -> int:
        return table.add(read.run(work), schema, f"{work.number:06}", repeating=repeating)

    plan, rows = read.plan(), 0
    lock = locked(table.place)
    try:
        _check_empty(folder)  # another run may have ended since the first look
        table.begin()
        if plan:
            rows = sum(session.sparkContext.parallelize(plan, len(plan)).map(write).collect())
        table.finish(None if rows else schema)  # without a file readers would have no columns
        put(f"{table.place}/_SUCCESS", "")
    finally:
        lock.release()
    return rows


def _check_empty(folder: str) -> None:
    if {*names_in(folder)} - {GROWING, LOCK}:  # those of a run that failed
        raise FileExistsError(f"{folder} is not empty: files of two reads would be mixed")
