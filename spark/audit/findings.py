"""What an audit finds: findings, files of them, and what is said of all of them. Free of Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batonmq.spark.read.storage import locate
from batonmq.spark.steps.severity import SEVERITIES
from batonmq.spark.steps.tables import Int32, schema_of

_SORT: Final = ["group", "severity", "kind", "who"]
_SUMS: Final = {
    "count": "sum", "first_offset": "min", "last_offset": "max", "first_epoch": "min",
    "last_epoch": "max",
}  # fmt: skip
_SORTS_MAX: Final = 1000
_BETWEEN: Final = "\0"


class Finding(msgspec.Struct, frozen=True):
    """One finding; offsets are log and queue offsets, sizes bytes. None: it does not apply.

    `replicas`: those that deviate; `field`: header, body, properties. `identity` pairs a message
    that is missing at one place with one that is extra at another.
    """

    group: str | None
    severity: str
    kind: str
    detail: str
    replicas: tuple[str, ...] = ()
    topic: str | None = None
    queue_id: Int32 | None = None
    queue_offset: int | None = None
    physical_offset: int | None = None
    size: int | None = None
    epoch: int | None = None
    unique_key: str | None = None
    field: str | None = None
    file: str | None = None
    identity: int | None = None


IDENTIFIED_SCHEMA: Final = schema_of(Finding)
FINDING_SCHEMA: Final = IDENTIFIED_SCHEMA.remove(IDENTIFIED_SCHEMA.get_field_index("identity"))
"""The table of findings."""


def finding_table(found: Iterable[Finding], schema: pa.Schema = FINDING_SCHEMA) -> pa.Table:
    return pa.Table.from_pylist([msgspec.to_builtins(each) for each in found], schema)


def findings_of(table: pa.Table) -> Iterator[Finding]:
    for row in table.to_pylist():
        yield Finding(**row | {"replicas": tuple(row["replicas"] or ())})


@dataclass(frozen=True, slots=True)
class Sums:
    """Of findings: how many there are of each sort (group, severity, kind, replicas), exactly, with
    their first and last offset and epoch; and the gravest `limit` of them.
    """

    sorts: pa.Table
    first: pa.Table

    def totals(self) -> Counter[tuple[str | None, str]]:
        """(group, severity) -> findings: what the verdict is made of."""
        counts: Counter[tuple[str | None, str]] = Counter()
        for row in self.sorts.to_pylist():
            counts[row["group"], row["severity"]] += row["count"]
        return counts

    def kinds(self) -> list[dict[str, Any]]:
        """A row for each sort, the gravest 1,000."""
        rows = self.sorts.to_pylist()
        for row in rows:
            row["replicas"] = [name for name in row.pop("who").split(_BETWEEN) if name]
        rows.sort(key=lambda row: (
            SEVERITIES.index(row["severity"]), row["group"] or "", row["kind"], row["replicas"]
        ))  # fmt: skip
        return rows[:_SORTS_MAX]


def sums_of(found: pa.Table, limit: int) -> Sums:
    """The sums of a table of findings."""
    at, epoch = found["physical_offset"], found["epoch"]
    columns = [
        found["group"], found["severity"], found["kind"],
        pc.binary_join(found["replicas"], _BETWEEN), pa.repeat(1, found.num_rows), at, at, epoch,
        epoch,
    ]  # fmt: skip
    return Sums(_grouped(pa.table(columns, names=[*_SORT, *_SUMS])), _gravest(found, limit))


def merged(every: Iterable[Sums], limit: int) -> Sums:
    """The sums of several tables together; at least one."""
    parts = list(every)
    sorts = pa.concat_tables([each.sorts for each in parts])
    return Sums(_grouped(sorts), _gravest(pa.concat_tables([p.first for p in parts]), limit))


def _grouped(rows: pa.Table) -> pa.Table:
    made = rows.group_by(_SORT, use_threads=False).aggregate(list(_SUMS.items()))
    columns = [made[f"{name}_{how}"] for name, how in _SUMS.items()]
    return pa.table([*made.select(_SORT).columns, *columns], names=[*_SORT, *_SUMS])


def _gravest(found: pa.Table, limit: int) -> pa.Table:
    """The first ones by severity, then by place; what a row lacks comes first."""
    rank = pc.index_in(found["severity"], pa.array(SEVERITIES))
    keys = (
        "rank", "group", "physical_offset", "kind", "topic", "queue_id", "queue_offset",
        "unique_key",
    )  # fmt: skip
    order = pc.sort_indices(found.append_column("rank", rank), _nulls_first(*keys))
    return found.take(order[:limit])


def _nulls_first(*names: str) -> list[tuple[str, str, str]]:
    return [(name, "ascending", "at_start") for name in names]


@dataclass(frozen=True, slots=True)
class FindingFiles:
    """Parquet files below `folder`, a path or URI; each task writes one of its own."""

    folder: str
    limit: int

    def write(self, task: str, found: Iterable[Finding]) -> Sums:
        """Write the findings of a task, ordered by group and offset; their sums. Raises OSError."""
        table = finding_table(found)
        if table.num_rows:
            order = pc.sort_indices(table, _nulls_first("group", "physical_offset"))
            self._write(task, table.take(order))
        return sums_of(table, self.limit)

    def write_none(self) -> None:
        """A file without rows, which has the columns."""
        self._write("none", FINDING_SCHEMA.empty_table())

    def _write(self, task: str, table: pa.Table) -> None:
        storage, place = locate(self.folder)
        system = storage.file_system
        system.create_dir(place)
        growing = f"{place}/.{task}.{uuid4().hex}"  # attempts of one task may run side by side
        pq.write_table(table, growing, filesystem=system)
        system.move(growing, f"{place}/part-{task}.parquet")

    def rows(self) -> Iterator[dict[str, Any]]:
        """All findings, file by file. Raises OSError."""
        storage, place = locate(self.folder)
        for info in storage.children(place):
            yield from pq.read_table(info.path, filesystem=storage.file_system).to_pylist()
