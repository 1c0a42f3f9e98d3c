"""One run: read the lines and look over them, fold each group, write the tables. Free of Spark.

The engine sorts lines by group and place between the two steps, so no task holds a history.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, Final

import pyarrow as pa

from batonmq.spark.history import epoch_files, history_findings
from batonmq.spark.history.group_tables import Files, fold_lines
from batonmq.spark.history.history_findings import HistoryFinding
from batonmq.spark.history.lines import (
    LINES,
    ORDER,
    LinesPlan,
    Source,
    plan_files,
    plan_parquet,
)
from batonmq.spark.history.output_tables import (
    FOLDED,
    FOLDERS,
    GROUP,
    TABLES,
    FoldedRows,
    query_of,
    span_of,
)
from batonmq.spark.history.overview import DAMAGED, Facts, facts_of
from batonmq.spark.history.summary import summarise
from batonmq.spark.read.store_facts import StoreFacts, read_stores
from batonmq.spark.report.epoch_tables import ROWS_HELD, EpochTables
from batonmq.spark.report.quantities import DAY_MS
from batonmq.spark.steps.result_folder import Results
from batonmq.spark.steps.sql import Engine, Step, dicts

SPLIT_BYTES: Final = 32 << 20
_GROUPS: Final = f"""
    SELECT g.group AS name, g.events AS events, g.elections AS elections
    FROM of_groups g WHERE g.part = '{GROUP}'
"""
_COUNTS: Final = f"""
    SELECT f.part AS part, count(*) AS many FROM folded f WHERE f.part <> '{GROUP}' GROUP BY f.part
"""


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
    def span(self) -> range:
        return span_of(self.since, self.until)

    def document(self) -> dict[str, Any]:
        return {
            "history": list(self.history),
            "history_parquet": list(self.history_parquet),
            "stores": list(self.stores),
            "since": self.since and self.since.isoformat(),
            "until": self.until and self.until.isoformat(),
        }


def _read_lines(plan: LinesPlan, source: Source) -> Iterator[pa.RecordBatch]:
    """A piece of the histories as rows of LINES."""
    with _without_cycle_collection():
        yield from plan.read(source)


def _fold_groups(
    facts: Facts, files: Files, rows: FoldedRows, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Folds sorted lines of some groups into rows of all tables."""
    with _without_cycle_collection():
        yield from fold_lines(_named(facts, batches), facts, files, rows)


def _named(facts: Facts, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, bytes]]:
    """Group in tables, controller, line."""
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("grp", "log", "rank", "line"))
        for group, log, rank, line in zip(*columns, strict=True):
            yield facts.group_in(group, log), rank, line


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
    with step("reading the histories"):
        # A task gets its source beside it: the plan with all of them would travel to each.
        read = partial(_read_lines, replace(plan, sources=()))
        engine.mapped("lines", plan.sources, read, LINES)
        facts, lines = facts_of(engine, plan.controllers)
        damaged = dicts(engine, DAMAGED)
    files = epoch_files.by_group(stores)
    # Histories do not name their cluster, so whose log these files belong to is not known.
    for name in facts.shared.keys() & files.keys():
        files[name].compares = False
    now_ms = datetime.now(UTC).timestamp() * 1000
    rows = FoldedRows(inputs.span, int(facts.last_ms or now_ms) // DAY_MS)
    with step("folding the events"):
        fold = partial(_fold_groups, facts, files, rows)
        events = f"SELECT grp, {', '.join(ORDER)} FROM lines WHERE fault IS NULL"
        engine.applied("of_groups", events, fold, FOLDED, by=["grp", *ORDER])
        groups = dicts(engine, _GROUPS)
    elected = {row["name"] for row in groups if row["elections"]}
    for found in _of_no_task(damaged, facts, files, stores, elected):
        rows.add("findings", found.row, found.group, found.at_ms, found.at_ms)
    with step("writing the tables"):
        engine.table("of_none", pa.Table.from_batches([rows.take()]))
        engine.define("folded", "SELECT * FROM of_groups UNION ALL SELECT * FROM of_none")
        for name in TABLES:
            engine.write(query_of(name), results.table(name, FOLDERS[name]))
        counts = dict.fromkeys(TABLES, 0)
        counts |= {row["part"]: row["many"] for row in dicts(engine, _COUNTS)}
        small = [name for name in TABLES if counts[name] <= ROWS_HELD]
        held = {name: engine.rows(query_of(name)) for name in small}
        epochs = EpochTables(results.table, held)
        facts_of_all = {
            "inputs": inputs.document(), "controllers": list(plan.controllers),
            "events": sum(row["events"] for row in groups), "lines": lines, "rows": counts,
        }  # fmt: skip
        events_of = {row["name"]: row["events"] for row in groups}
        return summarise(epochs, facts.bounds, events_of, facts_of_all), epochs


def _of_no_task(
    damaged: Sequence[Mapping[str, Any]],
    facts: Facts,
    files: Files,
    stores: Sequence[StoreFacts],
    elected: set[str],
) -> Iterator[HistoryFinding]:
    """The findings that no fold of a group gives. `elected`: groups that had a master."""
    yield from history_findings.of_all(facts, damaged)
    for name, each in files.items():
        if name not in facts.groups:  # it has epoch files, and no event
            yield from each.findings()
    yield from epoch_files.of_bare_stores(stores, elected | files.keys())
