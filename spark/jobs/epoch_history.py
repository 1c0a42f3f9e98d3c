"""`python -m batonmq.spark.jobs.epoch_history`: who was master when, what it cost, what is wrong.

Reads the histories of all controllers and the epoch files of all brokers, and writes tables and a
report; see `docs/spark-jobs.md`.
"""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Any

import click
import msgspec

from batonmq.spark.history.run import Inputs, Output, run
from batonmq.spark.history.summary import lines
from batonmq.spark.jobs.command import (
    EXIT_CODES,
    FOUND,
    Job,
    JobCommand,
    engine_option,
    job_options,
    output_options,
    paths_of,
)
from batonmq.spark.report.epoch_report import write_epoch_report
from batonmq.spark.steps.engine import SMALL_LOG_BYTES
from batonmq.spark.steps.severity import CRITICAL, WARNING

_MOMENTS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]


@click.command(cls=JobCommand, epilog=EXIT_CODES)
@job_options
@engine_option
@click.option(
    "--history",
    multiple=True,
    metavar="PATTERN",
    help="folders with history-*.jsonl of controllers, or such files; repeated, or with commas",
)
@click.option(
    "--history-parquet",
    multiple=True,
    metavar="DIR",
    help="instead of --history: what stream_history wrote",
)
@click.option(
    "--stores",
    multiple=True,
    metavar="PATTERN",
    help="store folders of brokers, for their epoch files; repeated, or with commas",
)
@output_options(required=True)
@click.option("--since", type=click.DateTime(_MOMENTS), help="rows from then on (UTC)")
@click.option("--until", type=click.DateTime(_MOMENTS), help="rows before then (UTC)")
@click.option(
    "--fail-on",
    type=click.Choice([CRITICAL, WARNING, "never"]),
    default=CRITICAL,
    show_default=True,
    help="end with 1 if there are findings of this severity, or a worse one",
)
@click.option("--no-report", is_flag=True, help="tables only")
def main(job: Job, **given: Any) -> None:
    """Failovers as tables: from controllers' histories and brokers' epoch files."""
    options = Options(**given)
    inputs = Inputs(
        paths_of("--history", options.history),
        paths_of("--history-parquet", options.history_parquet),
        paths_of("--stores", options.stores),
        options.since,
        options.until,
    )
    with Output(options.output, overwrite=options.overwrite, form=options.form) as place:
        size = inputs.plan.size_bytes
        with job.engine("epoch_history", size, SMALL_LOG_BYTES, shared=options.output) as engine:
            summary = run(engine, inputs, place, job.progress.step)
        report = None if options.no_report else partial(write_epoch_report, str(place.path))
        job.reported(summary, lines(summary), report)
    found = summary["findings"]
    worse = found[CRITICAL] + (found[WARNING] if options.fail_on == WARNING else 0)
    if worse and options.fail_on != "never":
        click.get_current_context().exit(FOUND)


class Options(msgspec.Struct, kw_only=True):
    """What the command line says."""

    history: tuple[str, ...]
    history_parquet: tuple[str, ...]
    stores: tuple[str, ...]
    output: str
    overwrite: bool
    form: str
    since: datetime | None
    until: datetime | None
    fail_on: str
    no_report: bool


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.epoch_history")
