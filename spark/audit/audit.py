"""Runs an audit: plans ranges, scans them as Spark tasks, checks their borders, and sums up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq.spark.audit.acked import AckedCheck, AckedCounts
from batonmq.spark.audit.acked_list import read_acked, size_of_lists
from batonmq.spark.audit.epoch_lists import compare_epochs
from batonmq.spark.audit.findings import COUNT, FINDING, FINDING_NAMES, SEVERITIES, Finding
from batonmq.spark.audit.kept import Kept
from batonmq.spark.audit.relations import (
    duplicates,
    finding_schema,
    queue_breaks,
    queues_behind,
    scan_findings,
)
from batonmq.spark.audit.replicas import ReplicaGroup, find_groups, log_files, outside
from batonmq.spark.audit.scan import RangeTask, ScanOptions, plan_tasks
from batonmq.spark.audit.scan_source import scan_frame
from batonmq.spark.fitting import SMALL, SMALL_LOG_BYTES, fitted
from batonmq.spark.read.storage import Storage, locate

Step = Callable[[str], AbstractContextManager[None]]
_SORTS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What to audit, and how. `group`: all stores are replicas of it. Sizes are bytes."""

    stores: tuple[str, ...]
    acked: tuple[str, ...] = ()
    group: str | None = None
    unconfirmed: bool = False
    check_crc: bool = True
    duplicates: bool = True
    queues: bool = True
    range_bytes: int = 64 << 20
    chunk_bytes: int = 8 << 20
    record_bytes_max: int = 32 << 20

    @property
    def scan(self) -> ScanOptions:
        return ScanOptions(
            check_crc=self.check_crc,
            unconfirmed=self.unconfirmed,
            messages=self.duplicates or bool(self.acked),
            queues=self.queues,
            range_bytes=self.range_bytes,
            chunk_bytes=self.chunk_bytes,
            record_bytes_max=self.record_bytes_max,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be read of the stores, and what was found while that was planned.

    `is_small`: logs, one a group, and lists are both little: Spark is fitted to a small input.
    """

    groups: list[ReplicaGroup]
    tasks: list[RangeTask]
    found: list[Finding]
    is_small: bool


def plan_audit(request: AuditRequest) -> Plan:
    """Reads identities, epochs and confirmOffsets. Raises ValueError, StoreError, OSError."""
    groups = find_groups(
        request.stores,
        group=request.group,
        unconfirmed=request.unconfirmed,
        with_tails=bool(request.acked),
    )
    tasks: list[RangeTask] = []
    found: list[Finding] = []
    for number, group in enumerate(groups):
        files = log_files(group)
        found.extend(outside(group, files, unconfirmed=request.unconfirmed))
        found.extend(compare_epochs(group))
        tasks.extend(plan_tasks(number, group, files, request.range_bytes))
    log_bytes = sum(task.end - task.begin for task in tasks)
    is_small = max(log_bytes, size_of_lists(request.acked)) <= SMALL_LOG_BYTES
    return Plan(groups, tasks, found, is_small)


@dataclass(slots=True)
class GroupCounts:
    """One group: messages in its confirmed log, those that two or more replicas hold alike, and the
    bytes of the log that were compared.
    """

    messages: int = 0
    agreed: int = 0
    log_bytes: int = 0


@dataclass(slots=True)
class AuditResult:
    """The result of an audit. `findings`: the table of findings, kept by Spark until `close`.

    `totals`: how many there are of each (group, severity), all of them. `kinds`: rows of group,
    severity, kind, replicas, count, first and last offset and epoch; the gravest 1,000.
    """

    groups: list[ReplicaGroup]
    counts: dict[str, GroupCounts]
    findings: DataFrame
    totals: dict[tuple[str | None, str], int]
    kinds: list[dict[str, Any]]
    acked: AckedCounts | None
    warnings: list[str] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)

    def close(self) -> None:
        """Forget what Spark keeps of it; `findings` cannot be read any more."""
        self.kept.forget()

    def count(self, severity: str | None = None, *, group: str | None = None) -> int:
        """How many findings there are of a severity, of a group; None: of all."""
        return sum(
            count
            for (theirs, each), count in self.totals.items()
            if severity in (None, each) and group in (None, theirs)
        )

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing but information."""
        return not any(self.count(severity) for severity in SEVERITIES[:2])

    def first(self, limit: int) -> list[dict[str, Any]]:
        """The first findings, the gravest first."""
        if not limit:
            return []
        rows = self.findings.orderBy(_gravity(), "group", "physical_offset", "kind").limit(limit)
        return [row.asDict() for row in rows.collect()]


def _no_step(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def run_audit(
    session: SparkSession,
    request: AuditRequest,
    step: Step = _no_step,
    plan: Plan | None = None,
) -> AuditResult:
    """Audit all groups of the stores. `step` gets the name of each step; `plan` is the request's.

    Raises ValueError, StoreError, OSError for a request that cannot be audited; an error in a task
    is Spark's error. Close the result.
    """
    if plan is None:
        with step("reading identity and epochs of the stores"):
            plan = plan_audit(request)
    kept = Kept(small=plan.is_small)
    try:
        with fitted(session, SMALL if plan.is_small else {}):
            return _audited(session, request, plan, step, kept)
    except BaseException:
        kept.forget()
        raise


def _audited(
    session: SparkSession, request: AuditRequest, plan: Plan, step: Step, kept: Kept
) -> AuditResult:
    groups, known = plan.groups, [*plan.found]
    entries = None
    if request.acked:
        with step("reading the acknowledged list"):
            entries = read_acked(session, request.acked, kept)
    rows = kept.keep(scan_frame(session, plan.tasks, groups, request.scan))
    by_name = {group.name: group for group in groups}
    with step("comparing the replicas"):
        found, counts = _counted(rows, groups)
    parts = [scan_findings(rows, found), queues_behind(rows)]
    warnings = [
        f"{group.name} has one store here: there is nothing to compare it with"
        for group in groups
        if len(group.replicas) == 1
    ]
    acked = None
    with step("looking across ranges"):
        if request.queues:
            breaks, is_all = queue_breaks(rows, by_name)
            known += breaks
            if not is_all:
                warnings.append(
                    f"more than {len(breaks)} gaps between ranges; the rest is left out"
                )
        if request.duplicates:
            parts.append(duplicates(rows))
        if entries is not None:
            check = AckedCheck(session, entries, rows, groups, kept)
            acked = check.counts
            parts += check.findings()
            warnings += entries.notes
        parts.append(
            session.createDataFrame([finding.row() for finding in known], finding_schema()).select(
                *FINDING_NAMES
            )
        )
        findings = reduce(DataFrame.union, parts).coalesce(session.sparkContext.defaultParallelism)
        findings = kept.keep(findings)
        totals, kinds = _totals(findings), _kinds(findings)
        if sum(row["count"] for row in kinds) < sum(totals.values()):
            warnings.append(f"the gravest {len(kinds)} sorts of findings are summed up below")
    return AuditResult(groups, counts, findings, totals, kinds, acked, warnings, kept)


def _counted(
    rows: DataFrame, groups: Sequence[ReplicaGroup]
) -> tuple[dict[str, int], dict[str, GroupCounts]]:
    """(findings of each kind, counts of each group); this runs the scan."""
    summed = (
        rows.where(F.col("part").isin(FINDING, COUNT))
        .groupBy("part", "group", "kind")
        .agg(
            F.count("*").alias("rows"),
            F.sum("amount").alias("messages"),
            F.sum("agreed").alias("agreed"),
            F.sum(F.when(F.col("part") == COUNT, F.col("size"))).alias("log_bytes"),
        )
        .collect()
    )
    counts = {group.name: GroupCounts() for group in groups}
    kinds: dict[str, int] = {}
    for row in summed:
        if row.part == FINDING:
            kinds[row.kind] = kinds.get(row.kind, 0) + row.rows
        else:
            counts[row.group] = GroupCounts(row.messages, row.agreed, row.log_bytes)
    return kinds, counts


def _gravity() -> Column:
    return F.array_position(F.array(*map(F.lit, SEVERITIES)), F.col("severity"))


def _totals(findings: DataFrame) -> dict[tuple[str | None, str], int]:
    """Exact, and what the verdict is made of: at most one row per group and severity."""
    rows = findings.groupBy("group", "severity").agg(F.count("*").alias("rows")).collect()
    return {(row.group, row.severity): row.rows for row in rows}


def _kinds(findings: DataFrame) -> list[dict[str, Any]]:
    grouped = findings.groupBy("group", "severity", "kind", "replicas").agg(
        F.count("*").alias("count"),
        F.min("physical_offset").alias("first_offset"),
        F.max("physical_offset").alias("last_offset"),
        F.min("epoch").alias("first_epoch"),
        F.max("epoch").alias("last_epoch"),
    )
    rows = [
        row.asDict()
        for row in grouped.orderBy(_gravity(), "group", "kind").limit(_SORTS_MAX).collect()
    ]
    order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    return sorted(
        rows,
        key=lambda row: (
            order[row["severity"]],
            row["group"] or "",
            row["kind"],
            row["replicas"] or [],
        ),
    )


def check_output(folder: str, *, overwrite: bool) -> None:
    """Raises FileExistsError if the folder holds something and may not be overwritten."""
    storage, place = locate(folder)
    if storage.children(place) and not overwrite:
        raise FileExistsError(f"--output {folder}: it is not empty; --overwrite replaces it")


def write_result(result: AuditResult, folder: str, summary: dict[str, Any]) -> None:
    """`findings` as Parquet and `summary.json`, which comes last and only whole. Raises OSError."""
    storage, place = locate(folder)
    system = storage.file_system
    system.create_dir(place)
    if storage.exists(f"{place}/summary.json"):
        system.delete_file(f"{place}/summary.json")
    target = f"{folder}/findings" if "://" in folder else f"file://{place}/findings"
    ordered = result.findings.orderBy("group", "physical_offset")
    ordered.write.mode("overwrite").parquet(target)
    _write_whole(storage, f"{place}/summary.json", summary)


def _write_whole(storage: Storage, path: str, document: dict[str, Any]) -> None:
    system = storage.file_system
    growing = f"{path}.growing"
    with system.open_output_stream(growing) as stream:
        text = json.dumps(document, indent=2, ensure_ascii=False, default=str)
        stream.write(f"{text}\n".encode())
    system.move(growing, path)


__all__ = [
    "AuditRequest",
    "AuditResult",
    "GroupCounts",
    "Plan",
    "check_output",
    "plan_audit",
    "run_audit",
    "write_result",
]
