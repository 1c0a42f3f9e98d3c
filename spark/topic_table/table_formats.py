"""Tables that hold a topic: Delta by deltalake, Iceberg by pyiceberg, without a JVM.

One commit adds the files of a batch, the batch's number as transaction, and a `TableState`. So the
table, not a checkpoint, decides which batches are in it. Free of Spark.
"""

import importlib.util
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from batonmq.spark.read.storage import locate
from batonmq.spark.steps.sql import DELTA, ICEBERG, ResultTable
from batonmq.spark.topic_table.files import (
    DAY,
    FILE_PREFIX,
    NONE,
    PART_TYPES,
    PARTS,
    NewFile,
    Queues,
)
from batonmq.spark.topic_table.rows import OWN

FORMS: Final = (DELTA, ICEBERG)
OWN_FOLDER: Final = "_batonmq"
"""Readers pass over names that begin with an underscore."""
_ABOUT, _STATE, _BATCH = "batonmq.table", "batonmq.state", "batonmq.batch"
_KEPT_LOG_DAYS: Final = 30
_LOOKED_AT: Final = 20
_SMALL_BYTES: Final = 32 << 20
"""Smaller files are put together, as soon as a partition has so many of them:"""
_MANY: Final = 8
_ATTEMPTS: Final = 4
_COMPACT: Final = "compact-"
_WRITTEN_FOR: Final = timedelta(hours=1)
"""Longer than a batch takes: older files are in a commit, or will never be."""


class About(msgspec.Struct, frozen=True):
    """What a table is made of. `bodies`: how its rows are made, for the proof; as of `Bodies`."""

    topic: str
    partition: str
    bodies: Any
    version: int = 1


class TableState(msgspec.Struct, frozen=True):
    """What is in a table: batches up to `batch` of a stream, offsets [begin, end) of each queue.

    `stream`: Spark's id of the query, which its checkpoint keeps.
    """

    stream: str
    batch: int
    queues: Queues
    rows: int = 0


def _fields(schema: pa.Schema) -> pa.Schema:
    return pa.schema([each for each in schema if not each.name.startswith("_")])


class DeltaTopicTable:
    """A table of files below a folder, with its log in `_delta_log`.

    `location`: its folder, as a URI or path; data files go `below` it, what else is ours into the
    folder `own`. Another program may write to it meanwhile, so each call opens it again; only
    `commit` builds on what `state` saw. Every method may raise OSError, or what deltalake raises.
    """

    below, own = "", OWN_FOLDER

    def __init__(self, location: str) -> None:
        storage, path = locate(location)
        self.location = storage.uri(path) if storage.root else path
        self._seen: Any = None

    def _open(self) -> Any:
        import deltalake

        self._seen = deltalake.DeltaTable(self.location)
        return self._seen

    def about(self) -> About | None:
        """None: there is no table. Raises ValueError for one that this program did not make."""
        import deltalake

        if not deltalake.DeltaTable.is_deltatable(self.location):
            storage, path = locate(self.location)
            others = [info.base_name for info in storage.children(path)]
            if any(not name.startswith("_") for name in others):
                raise ValueError(f"{self.location}: the folder holds other things than a table")
            return None
        return _about(self.location, self._open().metadata().configuration)

    def create(self, about: About, fields: pa.Schema) -> None:
        import deltalake

        by = list(PARTS[about.partition])
        columns = pa.schema([*((name, PART_TYPES[name]) for name in by), *OWN, *fields])
        days = f"interval {_KEPT_LOG_DAYS} days"
        # deltalake refuses keys that are not Delta's, unless this setting is off.
        deltalake.DeltaTable.create(
            self.location, columns, partition_by=by, raise_if_key_not_exists=False,
            configuration={_ABOUT: _text(about), "delta.logRetentionDuration": days},
        )  # fmt: skip

    def describe(self, about: About) -> None:
        """Replaces what `create` noted."""
        given = {_ABOUT: _text(about)}
        self._open().alter.set_table_properties(given, raise_if_not_exists=False)

    def fields(self) -> pa.Schema:
        """The columns of the records' fields."""
        return _fields(pa.schema(self._open().schema().to_arrow()))

    def add(self, fields: Sequence[pa.Field]) -> None:
        """Columns, null in all rows so far."""
        import deltalake

        self._open().alter.add_columns([deltalake.Field.from_arrow(each) for each in fields])

    def state(self) -> TableState | None:
        """None: it has no row yet."""
        table = self._open()
        # Mostly the newest commit has it. All, of 30 days, are read only where none of these has.
        for most in (_LOOKED_AT, None):
            for commit in table.history(most):
                if _STATE in commit:
                    return msgspec.json.decode(commit[_STATE], type=TableState)
        return None

    def commit(self, files: Sequence[NewFile], state: TableState) -> None:
        """Adds files. Fails if another batch was committed since `state` was called last: of two
        drivers one continues."""
        from deltalake.transaction import AddAction, CommitProperties, Transaction

        table = self._seen  # as `state` saw it: a commit in between is a conflict then
        now_ms = int(time.time() * 1000)
        table.create_write_transaction(
            [AddAction(f.path, f.size, f.part, now_ms, True, f.stats) for f in files],
            "append", table.schema(), table.metadata().partition_columns,
            commit_properties=CommitProperties(
                custom_metadata={_STATE: _text(state)},
                app_transactions=[Transaction(f"batonmq-{state.stream}", state.batch)],
            ),
        )  # fmt: skip

    def compact(self) -> int:
        """Puts small files together; how many are gone."""
        from deltalake import CommitProperties

        state = self.state()
        kept = CommitProperties(custom_metadata={_STATE: _text(state)} if state else None)
        return int(self._seen.optimize.compact(commit_properties=kept)["numFilesRemoved"])

    def expire(self, hours: float) -> int:
        """Removes versions that are older (in Delta by whole hours), and older files that no other
        version has; how many of these."""
        # `full`: also files that no commit has named, as a killed task leaves them.
        table = self._open()
        table.cleanup_metadata()
        # deltalake enforces a week, and --keep-versions may say less.
        return len(
            table.vacuum(
                math.ceil(hours), dry_run=False, enforce_retention_duration=False, full=True
            )
        )

    def files(self) -> list[str]:
        """The data files by their URIs. Raises ValueError where rows are deleted beside them."""
        table = self._open()
        if "deletionVectors" in (table.protocol().reader_features or ()):
            raise ValueError(f"{self.location}: it may have deletion vectors; rewrite it without")
        return list(table.file_uris())


class IcebergTopicTable:
    """A table of a catalog that pyiceberg knows; its methods do what those of a Delta table do."""

    below, own = "/data", OWN_FOLDER

    def __init__(self, name: str, properties: Mapping[str, str]) -> None:
        self._name = name
        if "." not in name:
            raise ValueError(f"--to {name!r}: an Iceberg table is namespace.table of a catalog")
        try:
            self._catalog = ResultTable(name, ICEBERG, catalog=properties).load_catalog()
        except ValueError as error:
            # pyiceberg speaks of options of its own commands.
            raise ValueError(f"--catalog type=... uri=...: {error}") from error
        self._seen: Any = None
        exists = self._catalog.table_exists(name)
        self.location = self._open().location() if exists else ""

    def _open(self) -> Any:
        # Here only: pyiceberg would add the files of a batch once more behind a commit of them. And
        # it would give each batch a list of files of its own, which all later commits name.
        ours = {"commit.retry.num-retries": "0", "commit.manifest-merge.enabled": "true"}
        table = self._catalog.load_table(self._name)
        known = table.metadata.properties | ours
        table.metadata = table.metadata.model_copy(update={"properties": known})
        self._seen = table
        return table

    def about(self) -> About | None:
        return _about(self._name, self._open().properties) if self.location else None

    def create(self, about: About, fields: pa.Schema) -> None:
        from pyiceberg.transforms import DayTransform, HourTransform

        self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
        columns = pa.schema([*OWN, *fields])
        # Each commit writes all metadata again; only the newest hundred copies are kept.
        properties = {_ABOUT: _text(about), "write.metadata.delete-after-commit.enabled": "true"}
        with self._catalog.create_table_transaction(
            self._name, schema=columns, properties=properties
        ) as change:
            if about.partition != NONE:
                by = DayTransform() if about.partition == DAY else HourTransform()
                with change.update_spec() as spec:
                    spec.add_field("_store_at", by, f"_store_{about.partition}")
        self.location = self._open().location()

    def describe(self, about: About) -> None:
        with self._open().transaction() as change:
            change.set_properties(**{_ABOUT: _text(about)})

    def fields(self) -> pa.Schema:
        return _fields(self._open().schema().as_arrow())

    def add(self, fields: Sequence[pa.Field]) -> None:
        with self._open().update_schema() as change:
            change.union_by_name(pa.schema(list(fields)))

    def state(self) -> TableState | None:
        text = self._open().properties.get(_STATE)
        return None if text is None else msgspec.json.decode(text, type=TableState)

    def commit(self, files: Sequence[NewFile], state: TableState) -> None:
        from pyiceberg.exceptions import CommitFailedException

        before = self._seen.properties.get(_STATE)
        for attempt in range(_ATTEMPTS):
            try:
                return self._commit(files, state)
            except CommitFailedException:  # another program put files together, say
                self._open()
                if self._seen.properties.get(_STATE) != before or attempt == _ATTEMPTS - 1:
                    raise

    def _commit(self, files: Sequence[NewFile], state: TableState) -> None:
        with self._seen.transaction() as change:
            change.add_files(
                [f"{self.location}/{each.path}" for each in files],
                snapshot_properties={_BATCH: f"{state.stream}/{state.batch}"},
                check_duplicate_files=False,  # names are new; it would read the whole table's list
            )
            # In the same commit: summaries of snapshots expire with them.
            change.set_properties(**{_STATE: _text(state)})

    def compact(self) -> int:
        table = self._open()
        groups: dict[Any, list[Any]] = {}
        for task in table.scan().plan_files():
            if task.file.file_size_in_bytes < _SMALL_BYTES and not task.delete_files:
                groups.setdefault(task.file.partition, []).append(task.file)
        old = [file for group in groups.values() if len(group) >= _MANY for file in group]
        if not old:
            return 0
        made = [self._together(group, table) for group in groups.values() if len(group) >= _MANY]
        from pyiceberg.io.pyarrow import parquet_files_to_data_files

        with table.transaction() as change, change.update_snapshot().overwrite() as snapshot:
            for file in old:
                snapshot.delete_data_file(file)
            for file in parquet_files_to_data_files(table.io, table.metadata, iter(made)):
                snapshot.append_data_file(file)
        return len(old)

    def _together(self, files: Sequence[Any], table: Any) -> str:
        """One file with the rows of several, by the columns that the table has now."""
        storage, folder = locate(self.location)
        columns = pa.schema([*OWN, *_fields(table.schema().as_arrow())])
        name = f"data/{_COMPACT}{time.time_ns():x}.parquet"
        with pq.ParquetWriter(
            f"{folder}/{name}", columns, filesystem=storage.file_system, compression="snappy"
        ) as writer:
            for file in files:
                for rows in read_rows(file.file_path, columns):
                    writer.write_batch(rows)
        return f"{self.location}/{name}"

    def expire(self, hours: float) -> int:
        moment = datetime.now(UTC) - timedelta(hours=hours)
        self._open().maintenance.expire_snapshots().older_than(moment).commit()
        return self._remove_unnamed(moment - _WRITTEN_FOR)

    def _remove_unnamed(self, before: datetime) -> int:
        """Removes our data files from before a moment that no snapshot has: pyiceberg leaves those
        of expired snapshots, and a driver that died those of its last batch."""
        from pyiceberg.table.snapshots import ancestors_of

        metadata = self._open().metadata
        line = [each.snapshot_id for each in ancestors_of(metadata.current_snapshot(), metadata)]
        # A tag, a branch or a rollback keeps versions beside this line, with files of their own.
        if not line or len(line) < len(metadata.snapshots):
            return 0
        # What is in neither end is in none between them: a file that went does not come back.
        ends = {line[0], line[-1]}
        tasks = [task for end in ends for task in self._seen.scan(snapshot_id=end).plan_files()]
        named = {locate(task.file.file_path)[1] for task in tasks}
        storage, folder = locate(f"{self.location}{self.below}")
        every = fs.FileSelector(folder, allow_not_found=True, recursive=True)
        gone = [
            each.path
            for each in storage.file_system.get_file_info(every)
            if each.base_name.startswith((FILE_PREFIX, _COMPACT))
            and each.mtime < before
            and each.path not in named
        ]
        for path in gone:
            storage.file_system.delete_file(path)
        return len(gone)

    def files(self) -> list[str]:
        tasks = list(self._open().scan().plan_files())
        if any(task.delete_files for task in tasks):
            raise ValueError(f"{self._name}: rows are deleted beside their files; rewrite them")
        return [task.file.file_path for task in tasks]


TopicTable = DeltaTopicTable | IcebergTopicTable


def open_table(to: str, form: str, catalog: Mapping[str, str]) -> TopicTable:
    """`to`: the folder of a Delta table, or namespace.table of a catalog, which is given by
    pyiceberg's properties (`name` is its name in the configuration). Raises ValueError.
    """
    package = {DELTA: "deltalake", ICEBERG: "pyiceberg"}[form]
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{form} tables need the package {package}: pip install 'batonmq[tables]'")
    if form == DELTA:
        if catalog:
            raise ValueError("--catalog: it is of Iceberg tables")
        return DeltaTopicTable(to)
    return IcebergTopicTable(to, catalog)


def read_rows(uri: str, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file; columns that it does not have are null."""
    storage, path = locate(uri)
    file = ds.dataset(path, schema=columns, format="parquet", filesystem=storage.file_system)
    yield from file.to_batches(batch_size=8192, use_threads=False)


def _text(value: About | TableState) -> str:
    return msgspec.json.encode(value).decode()


def _about(name: str, properties: Mapping[str, str | None]) -> About:
    text = properties.get(_ABOUT)
    if text is None:
        raise ValueError(f"{name}: it is a table, but none that topicTable made; name another one")
    return msgspec.json.decode(text, type=About)
