"""The fold on Spark: tasks read pieces of the files, one shuffle brings together a group's lines.

A line travels as it is, with its group and place beside it, and lies sorted in Parquet before the
fold; a task streams whole groups and writes their rows itself. (`applyInArrow` would do the same,
but needs pandas.)
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from batonmq.spark.history.group_tables import Known
from batonmq.spark.history.lines import Plan, Source
from batonmq.spark.history.overview import Facts, Overview
from batonmq.spark.history.run import Folded, Folder, fold_task, keyed

_SCHEMA: Final = pa.schema(
    [
        ("group", pa.string()), ("log", pa.string()), ("raft_index", pa.int64()),
        ("part", pa.int64()), ("rank", pa.int32()), ("offset", pa.int64()), ("line", pa.binary()),
    ]
)  # fmt: skip
_ORDER: Final = ("group", "log", "raft_index", "part", "rank", "offset")
_ROWS: Final = 4_096
_TASK_BYTES: Final = 32 << 20
_TASKS_MOST: Final = 2_000


class SparkEngine:
    """`work` is a folder that the executors share; it is removed by who made it."""

    def __init__(self, session: SparkSession, work: str) -> None:
        self._session = session
        self._work = Path(work)

    def overview(self, plan: Plan) -> Overview:
        bare = replace(plan, sources=())
        seen = self._session.sparkContext.parallelize(plan.sources, max(1, len(plan.sources)))
        return seen.map(lambda source: Overview().add(bare.lines(source))).fold(
            Overview(), Overview.merge
        )

    def fold(self, plan: Plan, known: Known, folder: Folder) -> Iterator[Folded]:
        self._work.mkdir(parents=True, exist_ok=True)
        reads = self._work / "reads.pickle"
        reads.write_bytes(pickle.dumps((plan, known.facts)))
        placed = self._work / "by_group"
        most = min(len(known.facts.groups) + 1, _TASKS_MOST)
        tasks = max(1, min(most, plan.size_bytes // _TASK_BYTES + 2))
        session = self._session
        session.dataSource.register(LinesSource)
        lines = session.read.format(LinesSource.name()).option("reads", str(reads)).load()
        sorted_lines = lines.repartition(tasks, "group").sortWithinPartitions(*_ORDER)
        sorted_lines.select("group", "rank", "line").write.parquet(str(placed))
        files = [(n + 1, str(path)) for n, path in enumerate(sorted(placed.glob("*.parquet")))]
        if files:
            fold = _FoldFile(known, folder)
            yield from session.sparkContext.parallelize(files, len(files)).map(fold).collect()


@dataclass(frozen=True, slots=True)
class _FoldFile:
    """Folds one file of sorted lines, in a task."""

    known: Known
    folder: Folder

    def __call__(self, task: tuple[int, str]) -> Folded:
        number, path = task
        batches = pq.ParquetFile(path).iter_batches(_ROWS)
        lines = (
            line
            for batch in batches
            for line in zip(*(column.to_pylist() for column in batch.columns), strict=True)
        )
        return fold_task(lines, self.known, self.folder.task(number))


class LinesSource(DataSource):
    """The lines of a plan; option `reads` names the file that has it."""

    @classmethod
    def name(cls) -> str:
        return "batonmq_lines"

    def schema(self) -> StructType:
        return from_arrow_schema(_SCHEMA)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _LinesReader(*pickle.loads(Path(self.options["reads"]).read_bytes()))


class _Range(InputPartition):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.source = source


class _LinesReader(DataSourceReader):
    def __init__(self, plan: Plan, facts: Facts) -> None:
        self._sources = plan.sources
        self._plan = replace(plan, sources=())
        self._facts = facts

    def partitions(self) -> Sequence[InputPartition]:
        return [_Range(source) for source in self._sources]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Without any source Spark makes a partition of its own.
        if not isinstance(partition, _Range):
            return
        rows: list[Any] = []
        for row in keyed(self._plan, partition.source, self._facts):
            rows.append(row)
            if len(rows) == _ROWS:
                yield _batch(rows)
                rows = []
        if rows:
            yield _batch(rows)


def _batch(rows: list[Any]) -> pa.RecordBatch:
    columns = zip(zip(*rows, strict=True), _SCHEMA.types, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, kind) for values, kind in columns], schema=_SCHEMA
    )
