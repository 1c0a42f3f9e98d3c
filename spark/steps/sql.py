"""One query text, two engines: Spark, or DuckDB in this process, which needs no JVM.

A job says what it wants in Spark's SQL, of tables of the data source and of its own. Texts use what
both engines read alike, and name no column that needs quotes but behind a dot or `AS`. DuckDB gets
the few functions that it spells differently as macros. Nothing here imports an engine before it is
used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileType

from batonmq.spark.arrow import open_arrow
from batonmq.spark.read.storage import locate

if TYPE_CHECKING:
    import duckdb
    from pyspark.sql import DataFrame, SparkSession

SMALL_LOG_BYTES: Final = 64 << 20
"""Logs of at most so many bytes together, some 100,000 messages, are done in this process."""
PARQUET, DELTA = "parquet", "delta"
Options = Mapping[str, str]
Batches = Iterator[pa.RecordBatch]
_MACROS: Final = """
    CREATE MACRO unix_millis(t) AS epoch_ms(t);
    CREATE MACRO timestamp_millis(ms) AS
        CAST(make_timestamp(CAST(ms AS BIGINT) * 1000) AS TIMESTAMPTZ);
    CREATE MACRO shiftleft(n, bits) AS n << bits;
    CREATE MACRO shiftright(n, bits) AS n >> bits;
"""


class Engine(Protocol):
    """Views by name, queries over them, and tables written from queries."""

    def source(self, view: str, paths: Sequence[str], options: Options) -> None:
        """A table of the data source. Raises what `open_arrow` does, now or when it is read."""
        ...

    def table(self, view: str, rows: pa.Table) -> None:
        """Rows that this process has."""
        ...

    def define(self, view: str, query: str, *, keep: bool = False) -> None:
        """A query by name; `keep`: it is used more than once, so its rows are kept."""
        ...

    def mapped(
        self, view: str, tasks: Sequence[Any], function: Callable[[Any], Batches], schema: pa.Schema
    ) -> None:
        """The rows that a function makes of each task; they are kept. What it raises ends it."""
        ...

    def applied(
        self,
        view: str,
        query: str,
        function: Callable[[Batches], Batches],
        schema: pa.Schema,
        *,
        by: str = "",
        order: Sequence[str] = (),
    ) -> None:
        """The rows that a function makes of a query's. With `by` those with one value of it come
        together, in that order, and what is made of them is kept.
        """
        ...

    def rows(self, query: str) -> pa.Table:
        """The result of a query, in this process."""
        ...

    def write(
        self,
        query: str,
        place: str,
        *,
        form: str = PARQUET,
        by: Sequence[str] = (),
        only: Options | None = None,
    ) -> None:
        """The result of a query as the table in a folder (path or URI), in place of what is there.

        `by`: the columns that are folders. `only`: the same for all rows, which replace those that
        have these values, and no others. A table without rows has its columns all the same.
        """
        ...

    def read(self, view: str, place: str, *, form: str = PARQUET) -> None:
        """A table that was written."""
        ...

    def names(self, folder: str) -> list[str]:
        """What lies in a folder; nothing if it is missing. Raises OSError."""
        ...

    def put(self, place: str, text: str | None) -> None:
        """A file that is there whole or not at all; None: it is removed. Raises OSError."""
        ...


def names_in(folder: str) -> list[str]:
    """What lies in a folder that pyarrow knows. Raises ValueError for an unknown URI, OSError."""
    storage, path = locate(folder)
    info = storage.file_system.get_file_info(path)
    if info.type == FileType.File:
        raise ValueError(f"{folder}: it must be a folder")
    return [str(info.base_name) for info in storage.children(path)]


def dicts(engine: Engine, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.rows(query).to_pylist()
    return found


def _delta(rows: pa.Table, place: str, by: Sequence[str], only: Options | None) -> None:
    """A new version of a Delta table; earlier ones stay readable. Needs the package deltalake."""
    import deltalake

    for name, value in (only or {}).items():
        rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    replaces = " AND ".join(f"{name} = '{value}'" for name, value in (only or {}).items())
    is_part = bool(replaces) and deltalake.DeltaTable.is_deltatable(place)
    deltalake.write_deltalake(
        place, rows, mode="overwrite", partition_by=list(only or by) or None,
        **{"predicate": replaces} if is_part else {"schema_mode": "overwrite"},
    )  # fmt: skip


def written(place: str, form: str, folders: Any) -> ds.Dataset:
    """A table that was written. `folders`: the partitioning of its Parquet files. Raises OSError,
    ValueError for a URI that pyarrow does not know.
    """
    if form == DELTA:
        import deltalake

        return deltalake.DeltaTable(place).to_pyarrow_dataset()
    storage, folder = locate(place)
    system = storage.file_system
    return ds.dataset(folder, filesystem=system, format="parquet", partitioning=folders)


def _part(place: str, only: Options | None) -> str:
    return "/".join([place, *(f"{name}={value}" for name, value in (only or {}).items())])


class DuckEngine:
    """DuckDB in this process: use it as a context."""

    def __init__(self) -> None:
        import duckdb

        self._db: duckdb.DuckDBPyConnection = duckdb.connect()
        self._db.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
        self._db.execute(_MACROS)

    def __enter__(self) -> DuckEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def source(self, view: str, paths: Sequence[str], options: Options) -> None:
        reader = open_arrow(paths, **options)
        self._stream(view, reader.schema, reader)

    def table(self, view: str, rows: pa.Table) -> None:
        self._store(view, rows)

    def _stream(self, view: str, schema: pa.Schema, rows: Iterable[pa.RecordBatch]) -> None:
        failed: list[Exception] = []

        def batches() -> Batches:
            try:
                yield from rows
            except Exception as error:  # DuckDB would only tell its text
                failed.append(error)
                raise

        try:
            self._store(view, pa.RecordBatchReader.from_batches(schema, batches()))
        except Exception as error:
            raise (failed or [error])[0] from None

    def _store(self, view: str, rows: Any) -> None:
        self._db.register("_rows", rows)
        self._db.execute(f"CREATE OR REPLACE TABLE {view} AS SELECT * FROM _rows")
        self._db.unregister("_rows")

    def define(self, view: str, query: str, *, keep: bool = False) -> None:
        self._db.execute(f"CREATE OR REPLACE {'TABLE' if keep else 'VIEW'} {view} AS {query}")

    def mapped(
        self, view: str, tasks: Sequence[Any], function: Callable[[Any], Batches], schema: pa.Schema
    ) -> None:
        self._stream(view, schema, (batch for task in tasks for batch in function(task)))

    def applied(
        self,
        view: str,
        query: str,
        function: Callable[[Batches], Batches],
        schema: pa.Schema,
        *,
        by: str = "",
        order: Sequence[str] = (),
    ) -> None:
        with self._db.cursor() as reading:
            sorts = f" ORDER BY {', '.join([by, *order])}" if by else ""
            text = f"SELECT * FROM ({query}) q{sorts}"
            self._stream(view, schema, function(reading.sql(text).to_arrow_reader()))

    def rows(self, query: str) -> pa.Table:
        return self._db.sql(query).to_arrow_table()

    def write(
        self,
        query: str,
        place: str,
        *,
        form: str = PARQUET,
        by: Sequence[str] = (),
        only: Options | None = None,
    ) -> None:
        rows = self.rows(query)
        if form == DELTA:
            return _delta(rows, place, by, only)
        storage, folder = locate(_part(place, only))
        system = storage.file_system
        parent, _, name = folder.rpartition("/")
        # A disk can rename: there a table is whole at any time.
        made = folder if storage.root else f"{parent}/_{name}.growing"
        for each in {made, folder} if storage.root else {made}:
            if storage.exists(each):
                system.delete_dir(each)
        if rows.num_rows:
            folders = pa.schema([rows.schema.field(name) for name in by])
            ds.write_dataset(
                rows, made, filesystem=system, format="parquet", max_partitions=1 << 16,
                partitioning=ds.partitioning(folders, flavor="hive") if by else None,
            )  # fmt: skip
        else:
            system.create_dir(made)
            pq.write_table(rows, f"{made}/part-0.parquet", filesystem=system)
        if made != folder:
            if storage.exists(folder):
                system.delete_dir(folder)
            system.move(made, folder)

    def read(self, view: str, place: str, *, form: str = PARQUET) -> None:
        self._store(view, written(place, form, "hive").scanner().to_reader())

    def names(self, folder: str) -> list[str]:
        return names_in(folder)

    def put(self, place: str, text: str | None) -> None:
        storage, path = locate(place)
        system = storage.file_system
        if text is None:
            if storage.exists(path):
                system.delete_file(path)
            return
        with system.open_output_stream(f"{path}.growing") as stream:
            stream.write(text.encode())
        system.move(f"{path}.growing", path)


class SparkEngine:
    """A session of Spark. `name` is called for each step, before its jobs."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._kept: list[DataFrame] = []

    def __enter__(self) -> SparkEngine:
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._kept:
            frame.unpersist()

    def source(self, view: str, paths: Sequence[str], options: Options) -> None:
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
        if keep:
            self._kept.append(frame.persist())
        frame.createOrReplaceTempView(view)

    def mapped(
        self, view: str, tasks: Sequence[Any], function: Callable[[Any], Batches], schema: pa.Schema
    ) -> None:
        every = list(tasks)

        def run(batches: Batches) -> Batches:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from function(every[number])

        numbers = self._session.range(0, len(every), 1, max(1, len(every)))
        self._make(view, numbers, run, schema)

    def applied(
        self,
        view: str,
        query: str,
        function: Callable[[Batches], Batches],
        schema: pa.Schema,
        *,
        by: str = "",
        order: Sequence[str] = (),
    ) -> None:
        rows = self._session.sql(query)
        if by:
            # Sorted, a task holds a few rows at a time; groupBy().applyInArrow would hold a group.
            count = max(self._session.sparkContext.defaultParallelism, rows.rdd.getNumPartitions())
            rows = rows.repartition(count, by).sortWithinPartitions(by, *order)
        self._make(view, rows, function, schema, keep=bool(by))

    def _make(
        self,
        view: str,
        rows: DataFrame,
        function: Callable[[Batches], Batches],
        schema: pa.Schema,
        *,
        keep: bool = True,
    ) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        made = rows.mapInArrow(function, from_arrow_schema(schema))
        if keep:
            self._kept.append(made.persist())
        made.createOrReplaceTempView(view)

    def rows(self, query: str) -> pa.Table:
        with self._named(query):
            return self._session.sql(query).toArrow()

    def write(
        self,
        query: str,
        place: str,
        *,
        form: str = PARQUET,
        by: Sequence[str] = (),
        only: Options | None = None,
    ) -> None:
        from pyspark.sql import Observation
        from pyspark.sql.functions import count, lit

        frame = self._session.sql(query)
        with self._named(f"writing {place}"):
            if form == DELTA:  # result tables are small, whatever they were made of
                return _delta(frame.toArrow(), place, by, only)
            seen = Observation()
            counted = frame.observe(seen, count(lit(1)).alias("rows"))
            place = _part(place, only)
            counted.write.mode("overwrite").partitionBy(*by).parquet(place)
            if by and not seen.get["rows"]:
                frame.limit(0).coalesce(1).write.mode("overwrite").parquet(place)

    def read(self, view: str, place: str, *, form: str = PARQUET) -> None:
        if form == DELTA:
            return self.table(view, pa.table(written(place, form, None).to_table()))
        self._session.read.parquet(place).createOrReplaceTempView(view)

    def names(self, folder: str) -> list[str]:
        system, path = self._hadoop(folder)
        if not system.exists(path):
            return []
        return sorted(each.getPath().getName() for each in system.listStatus(path))

    def put(self, place: str, text: str | None) -> None:
        system, path = self._hadoop(place)
        system.delete(path, False)
        if text is not None:
            growing = path.suffix(".growing")
            stream = system.create(growing, True)
            stream.write(text.encode())
            stream.close()
            system.rename(growing, path)

    def _hadoop(self, place: str) -> tuple[Any, Any]:
        """(file system, path) as Hadoop's settings of the session have them."""
        jvm = self._session.sparkContext._jvm
        assert jvm is not None
        path = jvm.org.apache.hadoop.fs.Path(place)
        conf = self._session._jsparkSession.sessionState().newHadoopConf()
        return path.getFileSystem(conf), path

    @contextmanager
    def _named(self, text: str) -> Iterator[None]:
        """What Spark's pages say of the jobs meanwhile."""
        context = self._session.sparkContext
        context.setJobDescription(" ".join(text.split())[:200])
        try:
            yield
        finally:
            context.setJobDescription(None)
