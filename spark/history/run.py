"""One run: read, look over, fold each group, write. The engine decides only where the fold runs.

On this machine the lines are sorted in memory; Spark shuffles them and gives each task whole
groups. Rows, files and summary come from the same functions. Free of Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from batonmq.spark.history import epoch_files, findings
from batonmq.spark.history.epoch_files import GroupFiles
from batonmq.spark.history.findings import Finding
from batonmq.spark.history.group_tables import Known, fold_lines
from batonmq.spark.history.lines import Plan, plan_files, plan_parquet
from batonmq.spark.history.overview import DAY_MS, Facts, Overview
from batonmq.spark.history.summary import FindingSums, GroupSums, summarise
from batonmq.spark.history.tables import TABLES, TableFiles, TimeSpan, write_empty
from batonmq.spark.read.damage import Damage
from batonmq.spark.steps.result_folder import PARQUET, ResultFolder

LOCAL_BYTES: Final = 64 << 20
"""Histories of at most so many bytes, as lines of text, are folded on this machine: some 200,000
lines, in less time than Spark takes to start."""
SPLIT_BYTES: Final = 32 << 20

Step = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Inputs:
    """What to read: history files or Parquet of them, and stores; what to write: [since, until)."""

    history: tuple[str, ...] = ()
    history_parquet: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        if bool(self.history) == bool(self.history_parquet):
            raise ValueError(
                "give either --history or --history-parquet: the events of controllers"
            )
        assert self.span is not None

    @cached_property
    def plan(self) -> Plan:
        """Made once, so that files which grow meanwhile are the same for all steps. Raises OSError,
        ValueError for bad paths."""
        if self.history:
            return plan_files(self.history, SPLIT_BYTES)
        return plan_parquet(self.history_parquet)

    @cached_property
    def span(self) -> TimeSpan:
        return TimeSpan.of(self.since, self.until)

    def document(self) -> dict[str, Any]:
        return {
            "history": list(self.history),
            "history_parquet": list(self.history_parquet),
            "stores": list(self.stores),
            "since": self.since and self.since.isoformat(),
            "until": self.until and self.until.isoformat(),
        }


class Output(ResultFolder):
    """The folder of results. Use it as a context: what is not published is removed at its end."""

    def __init__(self, folder: str, *, overwrite: bool = False, form: str = PARQUET) -> None:
        """Raises ValueError if the folder holds something and may not, or is no local path."""
        super().__init__(folder, tuple(TABLES), overwrite=overwrite, form=form)


@dataclass(frozen=True, slots=True)
class Folder:
    """Where the tasks of a run write, and what of it."""

    path: Path
    span: TimeSpan
    last_day: int

    def task(self, number: int) -> TableFiles:
        return TableFiles(self.path, number, self.span, self.last_day)


class Folded(NamedTuple):
    """What the fold of one task made: rows by table, and the sums of its groups."""

    counts: Counter[str]
    sums: list[GroupSums]


class Engine(Protocol):
    """Where the work is done."""

    def overview(self, plan: Plan) -> Overview:
        """Of all lines. Raises OSError."""
        ...

    def fold(self, plan: Plan, known: Known, folder: Folder) -> Iterable[Folded]:
        """Fold all groups, each in one task from 1 on. Raises OSError."""
        ...


class LocalEngine:
    """This process: lines are sorted in memory."""

    def overview(self, plan: Plan) -> Overview:
        seen = Overview()
        for source in plan.sources:
            seen.add(plan.lines(source))
        return seen

    def fold(self, plan: Plan, known: Known, folder: Folder) -> Iterator[Folded]:
        rows = sorted(row for source in plan.sources for row in keyed(plan, source, known.facts))
        yield fold_task(((row[0], row[4], row[6]) for row in rows), known, folder.task(1))


def run(inputs: Inputs, output: Output, step: Step, engine: Engine) -> dict[str, Any]:
    """Write all tables and the summary; the summary. `step` reports progress.

    Raises ValueError and OSError for input that cannot be read.
    """
    plan = inputs.plan
    stores = epoch_files.read_stores(inputs.stores)
    with step("reading the histories"):
        seen = engine.overview(plan)
        facts = seen.facts()
    files = epoch_files.by_group(stores)
    for name in facts.shared.keys() & files.keys():
        files[name].compares = False
    now_ms = datetime.now(UTC).timestamp() * 1000
    folder = Folder(Path(output.table("")), inputs.span, int(facts.last_ms or now_ms) // DAY_MS)
    counts: Counter[str] = Counter(dict.fromkeys(TABLES, 0))
    sums: list[GroupSums] = []
    with step("folding the events"):
        for folded in engine.fold(plan, Known(plan.controllers, facts, files), folder):
            counts.update(folded.counts)
            sums += folded.sums
    with step("summing up"):
        elected = {each.name for each in sums if each.elections}
        unfolded = [each for name, each in files.items() if name not in facts.groups]
        bare = epoch_files.of_bare_stores(stores, elected | files.keys())
        of_all = findings.of_all(facts, seen.damaged, plan.controllers)
        others = _write_findings([*of_all, *_of_files(unfolded), *bare], folder.task(0), counts)
        write_empty(folder.path)
        summary = summarise(sums, others, counts, inputs.document(), plan.controllers)
    output.publish(summary)
    return summary


def _of_files(groups: Iterable[GroupFiles]) -> Iterator[Finding]:
    for group in groups:
        yield from group.findings()


def _write_findings(
    found: Iterable[Finding], files: TableFiles, counts: Counter[str]
) -> FindingSums:
    """Findings that are of no fold."""
    sums = FindingSums()
    for each in found:
        if files.add(each.row, each.group, each.at_ms, each.at_ms):
            sums.add(each)
    files.flush()
    counts.update(files.counts)
    return sums


Row = tuple[str, str, int, int, int, int, bytes]
"""Group in tables, log, raft index, part, controller, offset, line: in the order of the fold."""


def keyed(plan: Plan, source: Any, facts: Facts) -> Iterator[Row]:
    """The lines of one source with that by which they are sorted."""
    shared: Mapping[str, Any] = facts.shared
    for line in plan.lines(source):
        if isinstance(line, Damage):
            continue
        rank, offset, event, text = line
        group = event.broker_name
        if group in shared:
            group = facts.group_in(group, event.log)
        yield group, event.log, event.raft_index, event.part, rank, offset, text


def fold_task(lines: Iterable[Any], known: Known, files: TableFiles) -> Folded:
    """Fold whole groups, sorted; `lines`: group, controller, line. Raises OSError."""
    sums = list(fold_lines(lines, known, files))
    files.flush()
    return Folded(files.counts, sums)
