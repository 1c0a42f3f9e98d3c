"""One query text, two engines: Spark, or DuckDB in this process, which needs no JVM.

A job says what it wants in Spark's SQL, of tables of the data source and of its own. Texts use what
both engines read alike, and name no column that needs quotes but behind a dot or `AS`. DuckDB gets
the few functions that it spells differently as macros. Nothing here imports an engine before it is
used.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileType

from batonmq.runtime.lock_file import FolderLock, FolderLockedError
from batonmq.spark.arrow import open_arrow
from batonmq.spark.read import hadoop
from batonmq.spark.read.columns import TIMESTAMP, columns_of
from batonmq.spark.read.storage import locate

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame, SparkSession

SMALL_LOG_BYTES: Final = 64 << 20
"""Logs of at most so many bytes together, some 100,000 messages, are done in this process."""
PARQUET, DELTA, ICEBERG = "parquet", "delta", "iceberg"
GROWING: Final = "_growing"
"""In the folder of a table of Parquet files: rows that are not yet its own."""
LOCK: Final = "_lock"
Options = Mapping[str, str]
Given = Mapping[str, str | int | bool]
Batches = Iterator[pa.RecordBatch]
OfTask = Callable[[Any], Batches]
OfRows = Callable[[Batches], Batches]
Step = Callable[[str], AbstractContextManager[None]]
"""Reports that a step begins, and when its block ends."""
_GROUP_BYTES: Final = 32 << 20
"""So much is a row group of a Parquet file, before it is packed."""
_WRITTEN: Final = columns_of("long: many")
_MACROS: Final = """
    CREATE MACRO unix_millis(t) AS epoch_ms(t);
    CREATE MACRO timestamp_millis(ms) AS
        CAST(make_timestamp(CAST(ms AS BIGINT) * 1000) AS TIMESTAMPTZ);
    CREATE MACRO shiftleft(n, bits) AS n << bits;
    CREATE MACRO shiftright(n, bits) AS n >> bits;
"""


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A table in a folder (path or URI), or of an Iceberg `catalog` (pyiceberg's properties).

    `by`: the columns that are folders. `only`: values that all rows have; they replace the rows
    that have these, and no others.
    """

    place: str
    form: str = PARQUET
    by: Sequence[str] = ()
    only: Options = field(default_factory=dict)
    catalog: Options = field(default_factory=dict)

    @property
    def part(self) -> str:
        """The folder of what is replaced."""
        return "/".join([self.place, *(f"{name}={value}" for name, value in self.only.items())])

    @property
    def made(self) -> str:
        """Where new rows grow. A disk can rename, so there they become the table when all are
        whole; within its folder, which may be a mount."""
        return self.part if locate(self.part)[0].root else f"{self.part}/{GROWING}"

    def begin(self) -> None:
        """Empties `made`. Raises OSError."""
        storage, made = locate(self.made)
        if storage.exists(made):
            storage.file_system.delete_dir(made)
        storage.file_system.create_dir(made)

    def add(
        self, rows: Batches, schema: pa.Schema, writer: str, *, repeating: Sequence[str] = ()
    ) -> int:
        """Rows into files of `made`, and how many they are; files of a writer that is repeated
        replace its first ones, only once they are whole: both may write at the same time.
        `repeating`: columns of which a dictionary is worth its cost; none: all are tried."""
        storage, made = locate(self.made)
        system, own = storage.file_system, f"{made}/_{uuid.uuid4().hex}"
        options = {"use_dictionary": list(repeating)} if repeating else {}
        files = write_files(
            rows, system, own, f"part-{writer}", [schema.field(name) for name in self.by],
            schema=schema, file_options=ds.ParquetFileFormat().make_write_options(**options),
        )  # fmt: skip
        if not files:
            return 0
        whole = {file.path: made + file.path.removeprefix(own) for file in files}
        for folder in {path.rpartition("/")[0] for path in whole.values()}:
            system.create_dir(folder)
        for path, name in whole.items():
            system.move(path, name)
        system.delete_dir(own)
        return sum(file.metadata.num_rows for file in files)

    def finish(self, empty: pa.Schema | None = None) -> None:
        """What grew becomes the table. `empty`: no row was added, so its columns are written."""
        storage, made = locate(self.made)
        system = storage.file_system
        if empty is not None:
            pq.write_table(empty.empty_table(), f"{made}/part-0.parquet", filesystem=system)
        for info in storage.children(made):
            if info.base_name.startswith("_"):  # of a task that was ended
                system.delete_dir(info.path)
        _, folder = locate(self.part)
        if made != folder:
            for info in storage.children(folder):
                if info.base_name not in (GROWING, LOCK):
                    (system.delete_file if info.is_file else system.delete_dir)(info.path)
            for info in storage.children(made):
                system.move(info.path, f"{folder}/{info.base_name}")
            system.delete_dir(made)

    def load_catalog(self) -> Any:
        """Its Iceberg catalog. Raises what pyiceberg does."""
        from pyiceberg.catalog import load_catalog

        given = dict(self.catalog)
        return load_catalog(given.pop("name", None), **given)

    def dataset(self, folders: Any = "hive") -> ds.Dataset:
        """Its rows. `folders`: the partitioning of its Parquet files. Raises OSError, ValueError
        for a URI that pyarrow does not know."""
        if self.form == DELTA:
            import deltalake

            options = hadoop.delta_options(self.place)
            return deltalake.DeltaTable(self.place, storage_options=options).to_pyarrow_dataset()
        if self.form == ICEBERG:
            return ds.dataset(self.load_catalog().load_table(self.place).scan().to_arrow())
        storage, folder = locate(self.place)
        system = storage.file_system
        return ds.dataset(folder, filesystem=system, format="parquet", partitioning=folders)


class _Engine:
    """What engines have in common. Use one as a context."""

    def __enter__(self) -> Self:
        return self

    def write(self: Any, query: str, table: ResultTable) -> None:
        """The result of a query in place of what is there; without rows it has its columns all the
        same."""
        if table.form != PARQUET:  # result tables are small, whatever they were made of
            write_version(self.rows(query), table)
            return
        table.begin()
        self.applied("_written", query, partial(_into_files, table), _WRITTEN)
        if any(row["many"] for row in dicts(self, "SELECT w.many AS many FROM _written w")):
            table.finish()
        else:
            table.finish(self.rows(f"SELECT * FROM ({query}) q LIMIT 0").schema)

    def read(self: Any, view: str, table: ResultTable) -> None:
        """A table that was written."""
        self.table(view, table.dataset().to_table())


def in_groups(batches: Batches) -> Batches:
    """As many rows together as a row group of Parquet should have; none of no rows."""
    held: list[pa.RecordBatch] = []
    for batch in filter(len, batches):
        held.append(batch)
        if sum(each.nbytes for each in held) >= _GROUP_BYTES:
            yield pa.concat_batches(held)
            held.clear()
    if held:
        yield pa.concat_batches(held)


def write_files(
    rows: Batches, system: Any, folder: str, name: str, by: Sequence[pa.Field], **more: Any
) -> list[Any]:
    """Parquet files NAME-*.parquet of rows below a folder, those of each value of `by` in a folder
    of their own; as pyarrow reports them. None without rows: there would be a file without any."""
    files: list[Any] = []
    groups = in_groups(rows)
    if (first := next(groups, None)) is not None:
        # Names are new, so nothing is overwritten; by default a folder with files is refused. More
        # partitions than pyarrow's 1,024 are six weeks of hours.
        ds.write_dataset(
            chain((first,), groups), folder, filesystem=system, format="parquet",
            use_threads=False, basename_template=f"{name}-{{i}}.parquet", max_partitions=1 << 20,
            existing_data_behavior="overwrite_or_ignore", file_visitor=files.append,
            partitioning=ds.partitioning(pa.schema(by), flavor="hive") if by else None,
            **{"schema": first.schema, **more},
        )  # fmt: skip
    return files


def _into_files(table: ResultTable, batches: Batches) -> Batches:
    """A task: its rows go into files, and how many they are is a row."""
    if (first := next(batches, None)) is not None:
        # Spark names the zone of the machine, though times are UTC.
        kinds = [TIMESTAMP if pa.types.is_timestamp(t) else t for t in first.schema.types]
        schema = pa.schema(zip(first.schema.names, kinds, strict=True))
        rows = (batch.cast(schema) for batch in chain((first,), batches))
        many = table.add(rows, schema, this_task())
        yield pa.record_batch([pa.array([many])], schema=_WRITTEN)


def this_task() -> str:
    """The number of Spark's task that runs here; that of the first one without Spark."""
    spark = sys.modules.get("pyspark")
    context = spark.TaskContext.get() if spark is not None else None
    return f"{0 if context is None else int(context.partitionId()):05}"


def names_in(folder: str) -> list[str]:
    """What lies in a folder, nothing if it is missing. Raises UnknownPlace, ValueError for a file,
    OSError."""
    storage, path = locate(folder)
    info = storage.file_system.get_file_info(path)
    if info.type == FileType.File:
        raise ValueError(f"{folder}: it must be a folder")
    return [str(info.base_name) for info in storage.children(path)]


def locked(folder: str, name: str = LOCK) -> FolderLock:
    """The folder is there, and until `release` no other run of this host writes to it. Storage
    other than a disk has no locks. Raises ValueError if another one does, OSError."""
    storage, path = locate(folder)
    storage.file_system.create_dir(path)
    lock = FolderLock(Path(path, name))
    if not storage.root:
        try:
            lock.acquire()
        except FolderLockedError as error:
            raise ValueError(f"{folder}: another run writes there") from error
    return lock


def put(place: str, text: str | None) -> None:
    """A file that is there whole or not at all; None: it is removed. Raises OSError."""
    storage, path = locate(place)
    system = storage.file_system
    if text is None:
        if storage.exists(path):
            system.delete_file(path)
        return
    with system.open_output_stream(f"{path}.growing") as stream:
        stream.write(text.encode())
    system.move(f"{path}.growing", path)


def dicts(engine: Engine, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.rows(query).to_pylist()
    return found


def write_version(rows: pa.Table, table: ResultTable) -> None:
    """A new version of a Delta or Iceberg table; earlier ones stay readable. Raises what deltalake
    or pyiceberg does."""
    for name, value in table.only.items():
        rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    (_write_iceberg if table.form == ICEBERG else _write_delta)(rows, table)


def _write_delta(rows: pa.Table, table: ResultTable) -> None:
    import deltalake

    place, only, options = table.place, table.only, hadoop.delta_options(table.place)
    replaces = " AND ".join(f"{name} = '{value}'" for name, value in only.items())
    is_part = bool(replaces) and deltalake.DeltaTable.is_deltatable(place, options)
    deltalake.write_deltalake(
        place, rows, mode="overwrite", partition_by=list(only or table.by) or None,
        storage_options=options,
        **{"predicate": replaces} if is_part else {"schema_mode": "overwrite"},
    )  # fmt: skip


def _write_iceberg(rows: pa.Table, table: ResultTable) -> None:
    from pyiceberg.expressions import AlwaysTrue, And, EqualTo

    catalog, name = table.load_catalog(), table.place
    catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
    is_new = not catalog.table_exists(name)
    made = catalog.create_table(name, rows.schema) if is_new else catalog.load_table(name)
    only = [EqualTo(column, value) for column, value in table.only.items()]
    with warnings.catch_warnings(), made.transaction() as change:
        warnings.simplefilter("ignore", UserWarning)  # that there was nothing to replace
        if is_new:
            with change.update_spec() as spec:
                for column in table.only or table.by:
                    spec.add_identity(column)
        with change.update_schema() as schema:
            schema.union_by_name(rows.schema)
        change.overwrite(rows, And(AlwaysTrue(), AlwaysTrue(), *only))


class DuckEngine(_Engine):
    """DuckDB in this process: views by name, queries over them, and tables written from queries."""

    def __init__(self) -> None:
        import duckdb

        self._db: duckdb.DuckDBPyConnection = duckdb.connect()
        self._db.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
        self._db.execute(_MACROS)

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def source(self, view: str, paths: Sequence[str], options: Given) -> None:
        """A table of the data source. Raises what `open_arrow` does, now or when it is read."""
        reader = open_arrow(paths, **options)
        self._stream(view, reader.schema, reader)

    def table(self, view: str, rows: Any) -> None:
        """Rows that this process has."""
        self._db.register("_rows", rows)
        self._db.execute(f"CREATE OR REPLACE TABLE {view} AS SELECT * FROM _rows")
        self._db.unregister("_rows")

    def _stream(self, view: str, schema: pa.Schema, rows: Iterable[pa.RecordBatch]) -> None:
        failed: list[Exception] = []

        def batches() -> Batches:
            try:
                yield from rows
            except Exception as error:  # DuckDB would only tell its text
                failed.append(error)
                raise

        try:
            self.table(view, pa.RecordBatchReader.from_batches(schema, batches()))
        except Exception as error:
            raise (failed or [error])[0] from None

    def define(self, view: str, query: str, *, keep: bool = False) -> None:
        """A query by name; `keep`: it is used more than once, so its rows are kept."""
        self._db.execute(f"CREATE OR REPLACE {'TABLE' if keep else 'VIEW'} {view} AS {query}")

    def mapped(self, view: str, tasks: Sequence[Any], function: OfTask, schema: pa.Schema) -> None:
        """The rows that a function makes of each task; they are kept. What it raises ends it."""
        self._stream(view, schema, (batch for task in tasks for batch in function(task)))

    def applied(
        self, view: str, query: str, function: OfRows, schema: pa.Schema, by: Sequence[str] = ()
    ) -> None:
        """The rows that a function makes of a query's. With `by` they come in that order, those
        with one value of its first column in one task."""
        with self._db.cursor() as reading:
            sorts = f" ORDER BY {', '.join(by)}" if by else ""
            text = f"SELECT * FROM ({query}) q{sorts}"
            self._stream(view, schema, function(reading.sql(text).to_arrow_reader()))

    def rows(self, query: str) -> pa.Table:
        """The result of a query, in this process."""
        return self._db.sql(query).to_arrow_table()


class SparkEngine(_Engine):
    """A session of Spark; its methods do what those of DuckEngine do."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._is_alone = re.match(r"local(\[|$)", session.sparkContext.master) is not None
        self._kept: list[DataFrame] = []

    def __exit__(self, *_: object) -> None:
        for frame in self._kept:
            frame.unpersist()

    def source(self, view: str, paths: Sequence[str], options: Given) -> None:
        given = {"paths": json.dumps(list(paths)), **options}
        frame = self._session.read.format("batonmq").options(**given).load()
        frame.createOrReplaceTempView(view)

    def table(self, view: str, rows: pa.Table) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        # Of a table without rows Spark takes no columns.
        frame = (
            self._session.createDataFrame(rows)
            if rows.num_rows
            else self._session.createDataFrame([], from_arrow_schema(rows.schema))
        )
        frame.createOrReplaceTempView(view)

    def define(self, view: str, query: str, *, keep: bool = False) -> None:
        frame = self._session.sql(query)
        if keep and self._is_alone:
            # Else each query that follows would plan all that these rows were made of again. Where
            # an executor may be lost they must be made again, so there they are only kept.
            frame = frame.localCheckpoint(eager=False)
        elif keep:
            self._kept.append(frame.persist())
        frame.createOrReplaceTempView(view)

    def mapped(self, view: str, tasks: Sequence[Any], function: OfTask, schema: pa.Schema) -> None:
        every = list(tasks)

        def run(batches: Batches) -> Batches:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from function(every[number])

        from pyspark import StorageLevel

        numbers = self._session.range(0, len(every), 1, max(1, len(every)))
        made = self._make(view, numbers, run, schema)
        # On the disk: rows of tasks may be many, and are read in order.
        self._kept.append(made.persist(StorageLevel.DISK_ONLY))

    def applied(
        self, view: str, query: str, function: OfRows, schema: pa.Schema, by: Sequence[str] = ()
    ) -> None:
        rows = self._session.sql(query)
        if by:
            # Sorted, a task holds a few rows at a time; groupBy().applyInArrow would hold a group.
            count = max(self._session.sparkContext.defaultParallelism, rows.rdd.getNumPartitions())
            rows = rows.repartition(count, by[0]).sortWithinPartitions(*by)
        self._make(view, rows, function, schema)

    def _make(self, view: str, rows: DataFrame, function: OfRows, schema: pa.Schema) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        made = rows.mapInArrow(function, from_arrow_schema(schema))
        made.createOrReplaceTempView(view)
        return made

    def rows(self, query: str) -> pa.Table:
        context = self._session.sparkContext
        context.setJobDescription(" ".join(query.split())[:200])  # for Spark's pages
        try:
            return self._session.sql(query).toArrow()
        finally:
            context.setJobDescription(None)


Engine = DuckEngine | SparkEngine
