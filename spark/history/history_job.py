"""One run: read the lines and look over them, fold each group, write the tables. Free of Spark.

Runs of lines are sorted by group and place between the two steps, so that no task holds a history.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.history import epoch_files, history_findings
from batonmq.spark.history.group_tables import Files, fold_lines
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
    BY_GROUP,
    ELECTIONS,
    EVENTS,
    FOLDED,
    TABLES,
    FoldedRows,
    TimeSpan,
    folded_row,
    unpacked,
    written_schema,
)
from batonmq.spark.history.overview import Facts, Overview
from batonmq.spark.history.summary import summarise
from batonmq.spark.read.damage import Damage
from batonmq.spark.report.epoch_tables import EpochTables
from batonmq.spark.report.quantities import DAY_MS
from batonmq.spark.steps.result_folder import Results
from batonmq.spark.steps.sql import PARQUET, Engine, ResultTable, dicts, task_number, write_version

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
    facts: Facts, files: Files, span: TimeSpan, last_day: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Folds sorted runs of some groups into rows of all tables."""
    with _without_cycle_collection():
        yield from fold_lines(_named(facts, batches), facts, files, FoldedRows(span, last_day))


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
    tables: Mapping[str, ResultTable], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Writes packed rows into files of their tables: the JVM's writer takes them value by value,
    which costs more than all else together. A row for each table tells how many."""
    held: dict[str, list[tuple[int, bytes]]] = {}
    for batch in batches:
        for row in batch.to_pylist():
            held.setdefault(row["part"], []).append((row["many"], row["packed"]))
    for name, some in held.items():
        rows = unpacked(packed for _, packed in some)
        reader = pa.RecordBatchReader.from_batches(written_schema(name), rows)
        tables[name].add(reader, task_number())
        yield folded_row(name, sum(many for many, _ in some))


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
    stores = epoch_files.read_stores(inputs.stores)
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
    last_day = int(facts.last_ms or now_ms) // DAY_MS
    with step("folding the events"):
        fold = partial(_fold_groups, facts, files, inputs.span, last_day)
        runs = "SELECT * FROM read WHERE run IS NOT NULL"
        engine.applied("folded", runs, fold, FOLDED, by=["grp", *ORDER])
        counted: dict[str, dict[str, int]] = {EVENTS: {}, ELECTIONS: {}}
        for row in dicts(engine, "SELECT part, grp, many FROM folded WHERE packed IS NULL"):
            counted[row["part"]][row["grp"]] = row["many"]
    with step("writing the tables"):
        elected = {name for name, many in counted[ELECTIONS].items() if many}
        # A group without any event has epoch files, and no task that folds it.
        unfolded = [each for name, each in files.items() if name not in facts.groups]
        bare = epoch_files.of_bare_stores(stores, elected | files.keys())
        of_all = history_findings.of_all(facts, seen.damaged)
        rows = FoldedRows(inputs.span, last_day)
        for found in [*of_all, *(one for each in unfolded for one in each.findings()), *bare]:
            rows.add("findings", found.row, found.group, found.at_ms, found.at_ms)
        engine.table("others", pa.Table.from_batches(rows.take(), FOLDED))
        engine.define("every", "SELECT * FROM folded UNION ALL SELECT * FROM others")
        counts = _write(engine, results)
        tables = EpochTables(results.table, counts)
        facts_of_all = {
            "inputs": inputs.document(), "controllers": list(plan.controllers),
            "events": sum(counted[EVENTS].values()), "lines": seen.lines, "rows": counts,
        }  # fmt: skip
        return summarise(tables, facts.bounds, counted[EVENTS], facts_of_all), tables


def _write(engine: Engine, results: Results) -> dict[str, int]:
    """The view `every` as tables; their numbers of rows. Raises OSError."""
    tables = {
        name: results.table(name, ["group"] if name == BY_GROUP else ["group", "day"])
        for name in TABLES
    }
    counts = dict.fromkeys(TABLES, 0)
    # Files of tasks would be no version of such a table: one commit has all rows.
    if results.form != PARQUET:
        for name, table in tables.items():
            packed = engine.rows(f"SELECT e.packed AS packed FROM every e WHERE e.part = '{name}'")
            batches = unpacked(packed["packed"].to_pylist())
            made = pa.Table.from_batches(batches, written_schema(name))
            counts[name] = made.num_rows
            write_version(made, table)
        return counts
    for table in tables.values():
        table.begin()
    rows = "SELECT * FROM every WHERE packed IS NOT NULL"
    engine.applied("written", rows, partial(_write_rows, tables), FOLDED)
    for row in dicts(engine, "SELECT w.part AS name, w.many AS many FROM written w"):
        counts[row["name"]] += row["many"]
    for name, table in tables.items():
        table.finish(None if counts[name] else written_schema(name))
    return counts
