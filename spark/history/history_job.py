"""One run: read the lines and look over them, fold each group, write the tables. Free of Spark.

Runs of lines are sorted by group and place between the two steps, so that no task holds a history.
"""

import gc
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.history import epoch_files, history_findings
from batonmq.spark.history.group_tables import Files, fold_lines
from batonmq.spark.history.history_findings import HistoryFinding
from batonmq.spark.history.lines import (
    ORDER,
    RUNS,
    LinesPlan,
    RunBuilder,
    Source,
    merged,
    plan_files,
    plan_parquet,
)
from batonmq.spark.history.output_tables import (
    ELECTIONS,
    EVENTS,
    FOLDED,
    FOLDERS,
    TABLES,
    FoldedRows,
    TimeSpan,
    folded_row,
    table_of,
    unpacked,
    written_schema,
)
from batonmq.spark.history.overview import Facts, Overview
from batonmq.spark.history.summary import summarise
from batonmq.spark.read.damage import Damage
from batonmq.spark.read.store_facts import StoreFacts, read_stores
from batonmq.spark.report.epoch_tables import ROWS_HELD, EpochTables
from batonmq.spark.report.quantities import DAY_MS
from batonmq.spark.steps.result_folder import Results
from batonmq.spark.steps.sql import (
    PARQUET,
    Engine,
    ResultTable,
    Step,
    dicts,
    this_task,
    write_version,
)

SPLIT_BYTES: Final = 32 << 20
_FEW: Final = 5_000
"""So many rows of a table a task hands on beside writing them: the summary reads no small files."""


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
    def plan(self) -> LinesPlan:
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


def _read_lines(plan: LinesPlan, source: Source) -> Iterator[pa.RecordBatch]:
    """Reads a piece of the histories: runs of its lines, and a row of what it has seen."""
    runs, seen = RunBuilder(), Overview()
    with _without_cycle_collection():
        for line in plan.lines(source):
            seen.add(line)
            if isinstance(line, Damage):
                continue
            runs.add(line)
            if runs.is_full:
                yield from runs.take().to_batches()
    yield from runs.take(seen).to_batches()


def _fold_groups(
    facts: Facts,
    files: Files,
    rows: FoldedRows,
    tables: Mapping[str, ResultTable],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Folds sorted runs of some groups into rows of all tables, and writes them."""
    with _without_cycle_collection():
        folded = fold_lines(_named(facts, batches), facts, files, rows)
        yield from _write_rows(tables, this_task(), folded)


def _named(facts: Facts, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, bytes]]:
    """Group in tables, controller, line."""
    columns = ("grp", *ORDER, "size", "run")
    rows = (
        row
        for batch in batches
        for row in zip(*(batch.column(name).to_pylist() for name in columns), strict=True)
    )
    for (group, log), runs in groupby(rows, itemgetter(0, 1)):
        name = facts.group_in(group, log)
        for _, _, rank, _, text in merged(row[2:] for row in runs):
            yield name, rank, text


def _write_rows(
    tables: Mapping[str, ResultTable], writer: str, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Writes packed rows into files of their tables: the JVM's writer takes them value by value,
    which costs more than all else together. Of many rows it gives their number; few ones, and
    those that `tables` has no files for, themselves."""
    held: dict[str, list[pa.RecordBatch]] = {}
    for batch in batches:
        held.setdefault(batch["part"][0].as_py(), []).append(batch)
    for name, some in held.items():
        many = 0
        if name in tables:
            packed = [batch["packed"][0].as_py() for batch in some]
            many = tables[name].add(unpacked(packed), written_schema(name), writer)
        if many > _FEW:
            yield folded_row(name, many)
        else:
            yield from some


@contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """No garbage collection of reference cycles: neither step makes any, and it takes a sixth of
    their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run(
    engine: Engine, inputs: Inputs, results: Results, step: Step
) -> tuple[dict[str, Any], EpochTables]:
    """Write all tables; (the content of the summary, the tables). `step` reports progress.

    Raises ValueError and OSError for input that cannot be read.
    """
    plan = inputs.plan
    stores = read_stores(inputs.stores)
    results.begin()
    seen = Overview()
    with step("reading the histories"):
        # A task gets its source beside it: the plan with all of them would travel to each.
        read = partial(_read_lines, replace(plan, sources=()))
        engine.mapped("read", plan.sources, read, RUNS)
        for row in dicts(engine, "SELECT seen FROM read WHERE seen IS NOT NULL"):
            seen.merge(pickle.loads(row["seen"]))
        facts = seen.facts(plan.controllers)
    files = epoch_files.by_group(stores)
    # Histories do not name their cluster, so whose log these files belong to is not known.
    for name in facts.shared.keys() & files.keys():
        files[name].compares = False
    now_ms = datetime.now(UTC).timestamp() * 1000
    rows = FoldedRows(inputs.span, int(facts.last_ms or now_ms) // DAY_MS)
    tables = {name: results.table(name, FOLDERS[name]) for name in TABLES}
    written = tables if results.form == PARQUET else {}
    for table in written.values():
        table.begin()
    with step("folding the events"):
        fold = partial(_fold_groups, facts, files, rows, written)
        runs = "SELECT * FROM read WHERE run IS NOT NULL"
        engine.applied("folded", runs, fold, FOLDED, by=["grp", *ORDER])
        folded = dicts(engine, "SELECT * FROM folded")
    with step("writing the tables"):
        counted = {
            part: {row["grp"]: row["many"] for row in folded if row["part"] == part}
            for part in (EVENTS, ELECTIONS)
        }
        elected = {name for name, many in counted[ELECTIONS].items() if many}
        for found in _of_no_task(seen, facts, files, stores, elected):
            rows.add("findings", found.row, found.group, found.at_ms, found.at_ms)
        for batch in _write_rows(written, "all", rows.take()):
            folded += batch.to_pylist()
        counts, held = _finish(tables, folded)
        epochs = EpochTables(results.table, held)
        facts_of_all = {
            "inputs": inputs.document(), "controllers": list(plan.controllers),
            "events": sum(counted[EVENTS].values()), "lines": seen.lines, "rows": counts,
        }  # fmt: skip
        return summarise(epochs, facts.bounds, counted[EVENTS], facts_of_all), epochs


def _of_no_task(
    seen: Overview, facts: Facts, files: Files, stores: Sequence[StoreFacts], elected: set[str]
) -> Iterator[HistoryFinding]:
    """The findings that no fold of a group gives. `elected`: groups that had a master."""
    yield from history_findings.of_all(facts, seen.damaged)
    for name, each in files.items():
        if name not in facts.groups:  # it has epoch files, and no event
            yield from each.findings()
    yield from epoch_files.of_bare_stores(stores, elected | files.keys())


def _finish(
    tables: Mapping[str, ResultTable], folded: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, int], dict[str, pa.Table]]:
    """What tasks have written becomes the tables, or one commit for each that has versions. How
    many rows each has, and the rows of those of which all are here. Raises OSError."""
    counts: dict[str, int] = {}
    held: dict[str, pa.Table] = {}
    for name, table in tables.items():
        mine = [row for row in folded if row["part"] == name]
        counts[name] = sum(row["many"] for row in mine)
        packed = [row["packed"] for row in mine if row["packed"] is not None]
        if len(packed) == len(mine) and (counts[name] <= ROWS_HELD or table.form != PARQUET):
            held[name] = table_of(name, packed)
        if table.form == PARQUET:
            table.finish(None if counts[name] else written_schema(name))
        else:
            write_version(held[name], table)
    return counts, held
