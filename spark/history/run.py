"""One run: read and look over, fold each group, write. An engine runs the two steps.

Each task of the first one sorts the lines of a piece, each of the second one merges those of some
groups, so that no task holds a history. Free of Spark.
"""

from __future__ import annotations

import gc
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from batonmq.spark.history import epoch_files, findings
from batonmq.spark.history.epoch_files import GroupFiles
from batonmq.spark.history.findings import Finding
from batonmq.spark.history.group_tables import Known, fold_lines
from batonmq.spark.history.lines import Plan, Source, plan_files, plan_parquet
from batonmq.spark.history.overview import Overview
from batonmq.spark.history.summary import FindingSums, GroupSums, summarise
from batonmq.spark.history.tables import TABLES, TableFiles, TimeSpan, write_missing
from batonmq.spark.read.damage import Damage
from batonmq.spark.steps.engine import Engine
from batonmq.spark.steps.exchange import Exchange
from batonmq.spark.steps.result_folder import ResultFolder
from batonmq.spark.steps.sql import PARQUET
from batonmq.spark.steps.tables import DAY_MS, table_of

SPLIT_BYTES: Final = 32 << 20
_ROWS: Final = 512
_LINES: Final = pa.schema(
    [
        ("group", pa.string()), ("log", pa.string()), ("raft_index", pa.int64()),
        ("part", pa.int64()), ("rank", pa.int32()), ("offset", pa.int64()), ("line", pa.binary()),
    ]
)  # fmt: skip
Row = tuple[str, str, int, int, int, int, bytes]
"""Of _LINES, which ascend so: group, log, raft index, part, controller, offset, line."""

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


@dataclass(frozen=True, slots=True)
class Read:
    """Reads pieces of the histories: each line goes on to its group, in the order of the log."""

    plan: Plan
    sorted_lines: Exchange

    def __call__(self, task: tuple[int, Source]) -> Overview:
        number, source = task
        rows: list[Row] = []
        seen = Overview()
        with _without_circles():
            for line in self.plan.lines(source):
                seen.add(line)
                if not isinstance(line, Damage):
                    event = line.event
                    place = (event.broker_name, event.log, event.raft_index, event.part)
                    rows.append((*place, line.rank, line.offset, line.text))
        rows.sort()
        self.sorted_lines.send(f"{number:06}", table_of(rows, _LINES))
        return seen


@dataclass(frozen=True, slots=True)
class FoldGroups:
    """Folds the groups of one bucket; its rows go to the tables."""

    known: Known
    folder: Folder
    sorted_lines: Exchange

    def __call__(self, bucket: int) -> Folded:
        files = self.folder.task(bucket + 1)
        lines = heapq.merge(*map(_rows, self.sorted_lines.batches(bucket)))
        with _without_circles():
            sums = list(fold_lines(self._named(lines), self.known, files))
        files.flush()
        return Folded(files.counts, sums)

    def _named(self, lines: Iterable[Row]) -> Iterator[tuple[str, int, bytes]]:
        """Group in tables, controller, line."""
        facts = self.known.facts
        for group, log, _, _, rank, _, text in lines:
            yield facts.group_in(group, log) if group in facts.shared else group, rank, text


@contextmanager
def _without_circles() -> Iterator[None]:
    """No search for objects that refer to each other in a circle: neither step makes any, and it
    takes a sixth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """A few at a time: of many files only the parts are in memory that are being merged."""
    for at in range(0, batch.num_rows, _ROWS):
        yield from zip(*(column.slice(at, _ROWS).to_pylist() for column in batch), strict=True)


def run(engine: Engine, inputs: Inputs, output: Output, step: Step) -> dict[str, Any]:
    """Write all tables and the summary; the summary. `step` reports progress.

    Raises ValueError and OSError for input that cannot be read.
    """
    plan = inputs.plan
    stores = epoch_files.read_stores(inputs.stores)
    buckets = engine.buckets(plan.size_bytes)
    sorted_lines = Exchange(f"{output.work_folder}/lines", _LINES, ["group"], buckets)
    seen = Overview()
    with step("reading the histories"):
        read = Read(replace(plan, sources=()), sorted_lines)
        for part in engine.map(read, list(enumerate(plan.sources))):
            seen.merge(part)
        facts = seen.facts()
    files = epoch_files.by_group(stores)
    for name in facts.shared.keys() & files.keys():
        files[name].compares = False
    now_ms = datetime.now(UTC).timestamp() * 1000
    folder = Folder(Path(output.table("")), inputs.span, int(facts.last_ms or now_ms) // DAY_MS)
    counts: Counter[str] = Counter(dict.fromkeys(TABLES, 0))
    sums: list[GroupSums] = []
    with step("folding the events"):
        fold = FoldGroups(Known(plan.controllers, facts, files), folder, sorted_lines)
        for folded in engine.map(fold, range(buckets)):
            counts.update(folded.counts)
            sums += folded.sums
    with step("summing up"):
        elected = {each.name for each in sums if each.elections}
        unfolded = [each for name, each in files.items() if name not in facts.groups]
        bare = epoch_files.of_bare_stores(stores, elected | files.keys())
        of_all = findings.of_all(facts, seen.damaged, plan.controllers)
        others = _write_findings([*of_all, *_of_files(unfolded), *bare], folder.task(0), counts)
        write_missing(folder.path)
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
