"""One run: read, merge, fold, look for findings, write. Each step is kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batonmq.spark.failovers import (
    epoch_findings,
    events,
    findings,
    sizing,
    sources,
    story_rows,
    tables,
)
from batonmq.spark.failovers.output import Output
from batonmq.spark.failovers.summary import summarise
from batonmq.spark.fitting import fitted
from batonmq.spark.work import Work

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
        given = [_utc(each) for each in (self.since, self.until) if each is not None]
        if len(given) == 2 and given[0] >= given[1]:
            raise ValueError(f"--since {self.since} must be before --until {self.until}")

    def is_small(self) -> bool:
        """Whether the histories are small. Raises OSError, ValueError for bad paths."""
        return self._size_bytes <= sizing.SMALL_BYTES

    def settings(self) -> Mapping[str, str]:
        """Settings of Spark that suit the size of the input."""
        return sizing.settings_for(self._size_bytes, small=self.is_small())

    @cached_property
    def _size_bytes(self) -> int:
        """Measured once, so that files which grow meanwhile have one size for all steps."""
        if self.history:
            return sizing.history_bytes(self.history)
        return sizing.parquet_bytes(self.history_parquet)

    def document(self) -> dict[str, Any]:
        return {
            "history": list(self.history),
            "history_parquet": list(self.history_parquet),
            "stores": list(self.stores),
            "since": self.since and self.since.isoformat(),
            "until": self.until and self.until.isoformat(),
        }


def run(session: SparkSession, inputs: Inputs, output: Output, step: Step) -> dict[str, Any]:
    """Write all tables and the summary; the summary. `step` reports progress.

    Raises ValueError and OSError for input that cannot be read.
    """
    with fitted(session, inputs.settings()):
        work = Work(session, output.work_folder, small=inputs.is_small())
        return _run(work, inputs, output, step)


def _run(work: Work, inputs: Inputs, output: Output, step: Step) -> dict[str, Any]:
    small = work.small
    lines, controllers = _histories(work, inputs)
    files = sources.epoch_files(work.session, inputs.stores, small=small)
    with step("reading the histories"):
        merged = work.keep(events.merged(lines, controllers), "events")
        overview = work.keep(events.overview(merged, controllers), "overview")
        logs = events.logs_of(overview, controllers)
        overview = events.apart(overview, logs)
        every = events.ordered(events.apart(merged, logs), logs)
        valid = every.where("kind IS NOT NULL")
    with step("folding the events"):
        rows = work.keep(story_rows.stories(valid, work), "rows")
        bounds = work.keep(tables.bounds(overview), "bounds")
        stories = work.keep(tables.with_implausible(rows, bounds), "stories")
    with step("reading the epoch files"):
        epochs = work.keep(files.rows, "epochs")
    with step("writing the tables"):
        outages = work.keep(tables.outages(stories, bounds), "outages")
        made = {
            "masterships": tables.masterships(stories, controllers),
            "failovers": tables.failovers(stories),
            "unavailability": work.keep_small(tables.unavailability(outages, bounds)),
            "set_changes": tables.set_changes(valid),
            "truncations": tables.truncations(valid),
            "controllers": tables.controllers(valid),
        }
        written = {
            name: output.write(name, within(frame, name, inputs), small=small)
            for name, frame in made.items()
        }
    with step("looking for findings"):
        found = findings.together(
            [
                *findings.of_histories(every, stories, bounds, overview, logs),
                *epoch_findings.of_files(epochs),
                *epoch_findings.of_bare_stores(files, epochs, stories),
                *epoch_findings.against_histories(epochs, stories, logs.shared),
            ]
        )
        found = work.keep_small(within(_dated(found, bounds), "findings", inputs))
        written["findings"] = output.write("findings", found, small=small)
    with step("summing up"):
        summary = summarise(written, bounds, overview, inputs.document(), controllers)
    output.publish(summary)
    return summary


def _histories(work: Work, inputs: Inputs) -> tuple[DataFrame, list[str]]:
    """The lines of all histories, and the controllers that wrote them."""
    if inputs.history:
        lines = sources.told_in_files(work.session, inputs.history, small=work.small)
        return lines, sources.controllers_in_files(inputs.history)
    lines = sources.told_in_parquet(work.session, inputs.history_parquet)
    return lines, sources.controllers_in(lines)


_TIME_OF = {
    "masterships": "began_at",
    "failovers": "coalesce(detected_at, elected_at)",
    "set_changes": "at",
    "truncations": "at",
    "findings": "at",
    "controllers": "at",
}


def within(frame: DataFrame, name: str, inputs: Inputs) -> DataFrame:
    """Rows whose first time is in [since, until); findings without a time stay; days are whole."""
    if name == "unavailability":
        if inputs.since is not None:
            frame = frame.where(F.col("day") >= F.lit(_utc(inputs.since).date()))
        if inputs.until is not None:
            frame = frame.where(
                F.col("day").cast("timestamp") < F.lit(_utc(inputs.until)).cast("timestamp")
            )
        return frame
    time = F.expr(_TIME_OF[name])
    keep = time.isNull()
    if inputs.since is not None:
        frame = frame.where(keep | (time >= F.lit(_utc(inputs.since))))
    if inputs.until is not None:
        frame = frame.where(keep | (time < F.lit(_utc(inputs.until))))
    return frame


def _utc(moment: datetime) -> datetime:
    """Without a zone it is UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _dated(found: DataFrame, bounds: DataFrame) -> DataFrame:
    """A finding without a time gets the last day with events."""
    last_ms = bounds.agg(F.max("last_ms").alias("last_ms")).first()
    known = last_ms["last_ms"] if last_ms is not None else None
    day = (
        datetime.fromtimestamp(known / 1000, UTC).date()
        if known is not None
        else datetime.now(UTC).date()
    )
    return found.withColumn("day", F.coalesce("day", F.lit(day)))


__all__ = ["Inputs", "run", "within"]
