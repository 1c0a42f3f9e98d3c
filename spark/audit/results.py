"""Findings of many tasks: files with all of them, and what is said about them. Free of Spark."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from batonmq.spark.audit.findings import FINDING_FIELDS, SEVERITIES, Finding
from batonmq.spark.read.storage import locate

FINDING_SCHEMA: Final = pa.schema(FINDING_FIELDS)
_RANK: Final = {severity: rank for rank, severity in enumerate(SEVERITIES)}
_SORTS_MAX: Final = 1000
_Span = tuple[int | None, int | None]


def gravity(row: dict[str, Any]) -> tuple[Any, ...]:
    """The gravest first, then by place; what a row lacks comes before what others have."""
    group, offset = row["group"], row["physical_offset"]
    return (
        _RANK[row["severity"]], group is not None, group, offset is not None, offset, row["kind"]
    )  # fmt: skip


def _span(one: _Span, other: _Span) -> _Span:
    known = [value for value in (*one, *other) if value is not None]
    return (min(known), max(known)) if known else (None, None)


@dataclass(slots=True)
class Sort:
    """Findings of one group, severity, kind and replicas: how many, their offsets and epochs."""

    count: int = 0
    offsets: _Span = (None, None)
    epochs: _Span = (None, None)

    def add(self, other: Sort) -> None:
        self.count += other.count
        self.offsets = _span(self.offsets, other.offsets)
        self.epochs = _span(self.epochs, other.epochs)


@dataclass(slots=True)
class FindingSums:
    """How many findings there are of each sort, exactly, and the gravest `limit` of them."""

    limit: int
    sorts: dict[tuple[str | None, str, str, tuple[str, ...]], Sort] = field(default_factory=dict)
    first: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: FindingSums) -> None:
        for key, value in other.sorts.items():
            self.sorts.setdefault(key, Sort()).add(value)
        self._keep(other.first)

    def add_rows(self, rows: Iterable[dict[str, Any]]) -> None:
        listed = list(rows)
        for row in listed:
            key = (row["group"], row["severity"], row["kind"], tuple(row["replicas"] or ()))
            at, epoch = row["physical_offset"], row["epoch"]
            self.sorts.setdefault(key, Sort()).add(Sort(1, (at, at), (epoch, epoch)))
        self._keep(listed)

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        self.first = heapq.nsmallest(self.limit, [*self.first, *rows], key=gravity)

    def totals(self) -> Counter[tuple[str | None, str]]:
        """(group, severity) -> findings: what the verdict is made of."""
        counts: Counter[tuple[str | None, str]] = Counter()
        for (group, severity, *_), value in self.sorts.items():
            counts[group, severity] += value.count
        return counts

    def kinds(self) -> list[dict[str, Any]]:
        """A row for each sort, the gravest 1,000."""
        order = sorted(
            self.sorts.items(),
            key=lambda each: (_RANK[each[0][1]], each[0][0] or "", each[0][2], each[0][3]),
        )
        return [
            {
                "group": group,
                "severity": severity,
                "kind": kind,
                "replicas": list(replicas),
                "count": value.count,
                "first_offset": value.offsets[0],
                "last_offset": value.offsets[1],
                "first_epoch": value.epochs[0],
                "last_epoch": value.epochs[1],
            }
            for (group, severity, kind, replicas), value in order[:_SORTS_MAX]
        ]


@dataclass(frozen=True, slots=True)
class FindingFiles:
    """Parquet files below `folder`, a path or URI; each task writes one of its own."""

    folder: str
    limit: int

    def write(self, task: str, found: Iterable[Finding]) -> FindingSums:
        """Write the findings of a task, ordered by group and offset; their sums. Raises OSError."""
        sums = FindingSums(self.limit)
        rows = [finding.row() for finding in found]
        if rows:
            sums.add_rows(rows)
            rows.sort(key=lambda row: (row["group"] or "", row["physical_offset"] or 0))
            self._write(task, pa.Table.from_pylist(rows, FINDING_SCHEMA))
        return sums

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
