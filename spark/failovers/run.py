"""One run: read, merge, tell the stories, find what is wrong, write. Each step is kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.failovers import (
    epoch_findings,
    events,
    findings,
    members,
    sizing,
    sources,
    stories,
    tables,
)
from spark.failovers.output import Output
from spark.failovers.summary import summarise
from spark.fitting import fitted
from spark.work import Work

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
            raise ValueError("give either --history or --history-parquet, what controllers told")
        given = [_utc(each) for each in (self.since, self.until) if each is not None]
        if len(given) == 2 and given[0] >= given[1]:
            raise ValueError(f"--since {self.since} must be before --until {self.until}")

    def is_small(self) -> bool:
        """Whether what controllers told is little. Raises OSError, ValueError for what is not."""
        return self._size_bytes <= sizing.SMALL_BYTES

    def settings(self) -> Mapping[str, str]:
        """Settings of Spark that suit the size of the input."""
        return sizing.settings_for(self._size_bytes, small=self.is_small())

    @cached_property
    def _size_bytes(self) -> int:
        """Asked of the storage once: files that grow meanwhile change no step's size."""
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
    """Write all tables and the summary; the summary. `step` tells of progress.

    Raises ValueError and OSError for input that cannot be read.
    """
    with fitted(session, inputs.settings()):
        work = Work(session, output.work_folder, small=inputs.is_small())
        return _run(work, inputs, output, step)


def _run(work: Work, inputs: Inputs, output: Output, step: Step) -> dict[str, Any]:
    session, small = work.session, work.small
    if inputs.history:
        controllers = sources.controllers_in_files(inputs.history)
        told = sources.told_in_files(session, inputs.history, small=small)
    else:
        told = sources.told_in_parquet(session, inputs.history_parquet)
        controllers = sources.controllers_in(told)
    files = sources.epoch_files(session, inputs.stores, small=small)
    with step("reading the histories"):
        merged = work.keep(events.merged(told, controllers), "events")
        overview = work.keep(events.overview(merged, controllers), "overview")
        logs = events.logs_of(overview, controllers)
        overview = events.apart(overview, logs)
        every = events.ordered(events.apart(merged, logs), logs)
        told_once = every.where("kind IS NOT NULL")
    with step("telling the stories"):
        told_rows = work.keep(stories.told(told_once, work), "told")
        elected = work.keep(stories.elected(told_rows), "elected")
        bounds = work.keep(tables.bounds(overview), "bounds")
        judged = work.keep(tables.believed(stories.stories(elected), bounds), "stories")
    with step("reading the epoch files"):
        epochs = work.keep(files.rows, "epochs")
    with step("writing the tables"):
        outages = work.keep(tables.outages(judged, bounds), "outages")
        made = {
            "masterships": tables.masterships(judged, controllers),
            "failovers": tables.failovers(judged),
            "unavailability": work.keep_small(tables.unavailability(outages, bounds)),
            "set_changes": tables.set_changes(told_once),
            "truncations": tables.truncations(told_once),
            "controllers": tables.controllers(told_once),
        }
        written = {
            name: output.write(name, within(frame, name, inputs), small=small)
            for name, frame in made.items()
        }
    with step("looking for findings"):
        reigns = members.reigns(judged)
        found = findings.together(
            [
                *findings.of_histories(every, judged, reigns, bounds, overview, logs),
                *epoch_findings.of_files(epochs),
                *epoch_findings.of_bare_stores(files, epochs, judged),
                *epoch_findings.against_histories(epochs, judged, logs.shared),
            ]
        )
        found = work.keep_small(within(_dated(found, bounds), "findings", inputs))
        written["findings"] = output.write("findings", found, small=small)
    with step("summing up"):
        summary = summarise(written, bounds, overview, inputs.document(), controllers)
    output.publish(summary)
    return summary


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
    """A finding without a time is of the last day that is told of."""
    last_ms = bounds.agg(F.max("last_ms").alias("last_ms")).first()
    known = last_ms["last_ms"] if last_ms is not None else None
    day = (
        datetime.fromtimestamp(known / 1000, UTC).date()
        if known is not None
        else datetime.now(UTC).date()
    )
    return found.withColumn("day", F.coalesce("day", F.lit(day)))


__all__ = ["Inputs", "run", "within"]
