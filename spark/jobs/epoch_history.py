"""`python -m batonmq.spark.jobs.epoch_history`: who was master when, what it cost, what is wrong.

Reads the histories of all controllers and the epoch files of all brokers, and writes tables and a
report; see `docs/spark-jobs.md`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from batonmq.spark.history.findings import CRITICAL, WARNING
from batonmq.spark.history.run import LOCAL_BYTES, Inputs, LocalEngine, Output, run
from batonmq.spark.history.summary import lines
from batonmq.spark.jobs.command import (
    EXIT_CODES,
    FOUND,
    Job,
    JobCommand,
    engine_option,
    job_options,
    paths_of,
)
from batonmq.spark.report.epoch_report import write_epoch_report

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
@click.option("--output", required=True, metavar="DIR", help="where tables and report go")
@click.option("--overwrite", is_flag=True, help="replace an earlier result in --output")
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
def main(
    job: Job,
    history: tuple[str, ...],
    history_parquet: tuple[str, ...],
    stores: tuple[str, ...],
    output: str,
    overwrite: bool,
    since: datetime | None,
    until: datetime | None,
    fail_on: str,
    no_report: bool,
) -> None:
    """Failovers as tables: from controllers' histories and brokers' epoch files."""
    inputs = Inputs(
        paths_of("--history", history),
        paths_of("--history-parquet", history_parquet),
        paths_of("--stores", stores),
        since,
        until,
    )
    report = ""
    with Output(output, overwrite=overwrite) as place:
        summary = _run(job, inputs, place)
        if not no_report:
            with job.progress.step("drawing the report"):
                report = write_epoch_report(str(place.path), summary)
    printed = lines(summary)
    job.result(summary, [*printed, f"report: {report}"] if report else printed)
    found = summary["findings"]
    worse = found[CRITICAL] + (found[WARNING] if fail_on == WARNING else 0)
    if worse and fail_on != "never":
        click.get_current_context().exit(FOUND)


def _run(job: Job, inputs: Inputs, place: Output) -> dict[str, Any]:
    """The summary. The fold is the same, wherever it runs."""
    if job.is_local(inputs.plan.size_bytes, LOCAL_BYTES):
        return run(inputs, place, job.progress.step, LocalEngine())
    from batonmq.spark.history.spark_engine import SparkEngine

    with job.session("epoch_history") as session:
        engine = SparkEngine(session, place.work_folder)
        return run(inputs, place, job.progress.step, engine)


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.epoch_history")
