"""The result of a run, and the lines that show it. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lab.cluster.checks import BrokenPromise
from lab.faults.aftermath.compare import FaultComparison, HistoryComparison
from lab.faults.aftermath.fault_records import FaultRecord
from lab.faults.aftermath.jobs import DONE, JobResult
from lab.faults.aftermath.tables import FailoverRow

HEAD: Final = ("", "fault", "processes", "gap", "epoch", "recorded as", "master", "no writes")
RIGHT: Final = frozenset({0, 3, 4, 7})
SHOWN: Final = 20


@dataclass(slots=True)
class AftermathResult:
    """What a run found. `findings`: of the lab itself, which reads every write back."""

    records: list[FaultRecord] = field(default_factory=list)
    acked: int = 0
    findings: list[BrokenPromise] = field(default_factory=list)
    comparison: HistoryComparison | None = None
    audit: JobResult | None = None
    streamed: int = 0
    stream_wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return (
            not self.findings
            and not self.stream_wrong
            and self.comparison is not None
            and self.comparison.agrees
            and self.audit is not None
            and self.audit.code == DONE
        )

    def finished(self) -> tuple[HistoryComparison, JobResult]:
        """The comparison and the audit. Raises RuntimeError if a job has yet to run."""
        if self.comparison is None or self.audit is None:
            raise RuntimeError("not every job has run")
        return self.comparison, self.audit


def lines(result: AftermathResult) -> list[str]:
    """The table of failovers, then one line for each check, with what is wrong."""
    comparison, audit = result.finished()
    faults = comparison.faults
    elections = sum(len(one.failovers) for one in faults)
    disagree = sum(len(one.wrong) for one in faults) + len(comparison.wrong)
    shown = [
        "all good: nothing acknowledged is missing, and the history agrees with the record"
        if result.is_good
        else "NOT GOOD: what is wrong stands below the table",
        "gap: the longest time between two acknowledgements that the load saw; no writes: what the"
        " history says of it",
        "",
        *table(comparison),
        "",
        f"{len(faults)} faults, {elections} changes of master: the history agrees with every one"
        if comparison.agrees
        else f"{len(faults)} faults, {elections} changes of master: {disagree} DISAGREEMENTS",
    ]
    for one in faults:
        shown += [f"  {one.record.number}: {text}" for text in one.wrong]
    shown += [f"  {text}" for text in comparison.wrong]
    for row in comparison.unplanned:
        shown.append(f"  by itself between two faults: epoch {row.epoch} ({row.kind}, {row.cause})")
    shown.append(
        f"{result.acked:,} acknowledged writes looked for in every store: none is missing"
        if audit.code == 0
        else f"{result.acked:,} acknowledged writes looked for: the audit FOUND something"
    )
    shown += _found(audit.document)
    if result.streamed:
        once = "each once" if not result.stream_wrong else "NOT as the controllers kept them"
        shown.append(f"{result.streamed} events streamed from the controllers, {once}")
    shown += [f"  {text}" for text in result.stream_wrong[:SHOWN]]
    shown += [f"  {one.rule}: {one.text}" for one in result.findings[:SHOWN]]
    return shown


def _found(document: Mapping[str, Any]) -> list[str]:
    """What the audit calls critical or a warning, by kind and replica."""
    rows = [row for row in document.get("kinds", ()) if row["severity"] != "info"]
    shown = [
        f"  {row['severity']}: {row['count']:,} {row['kind'].replace('_', ' ')}"
        + (f" in {', '.join(row['replicas'])}" if row["replicas"] else "")
        for row in rows[:SHOWN]
    ]
    return [*shown, f"  and {len(rows) - SHOWN} sorts more"] if len(rows) > SHOWN else shown


def table(comparison: HistoryComparison) -> list[str]:
    """Each fault beside what the history says of it, in columns."""
    rows = [HEAD, *(row for one in comparison.faults for row in _rows(one))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return [
        "  ".join(
            text.rjust(width) if column in RIGHT else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _rows(fault: FaultComparison) -> Iterable[tuple[str, ...]]:
    record = fault.record
    done = (str(record.number), record.title, record.affected, f"{record.gap_ms:.0f} ms")
    if not fault.failovers:
        yield (*done, str(record.epoch_after), "-", f"{record.master_after} stays", "-")
    for number, row in enumerate(fault.failovers):
        yield (*(done if number == 0 else ("",) * len(done)), *_failover_cells(row))


def _failover_cells(row: FailoverRow) -> tuple[str, ...]:
    lost_ms = row.unavailable_ms if row.without_writes_ms is None else row.without_writes_ms
    cost = "-" if lost_ms is None else f"{lost_ms} ms"
    kind, cause = row.kind.replace("_", " "), row.cause.replace("_", " ")
    why = f"{kind}: {cause}" if cause not in ("", kind) else kind
    return (str(row.epoch), why, f"{row.master_before} -> {row.master}", cost)
