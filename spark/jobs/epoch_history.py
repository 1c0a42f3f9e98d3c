"""`python -m batonmq.spark.jobs.epoch_history`: who was master when, what it cost, what is wrong.

Reads the histories of all controllers and the epoch files of all brokers, and writes tables and a
report; see `docs/spark-jobs.md`.
"""

from __future__ import annotations

from datetime import datetime

import click

from batonmq.spark.failovers.findings import CRITICAL, WARNING
from batonmq.spark.failovers.output import Output
from batonmq.spark.failovers.run import Inputs, run
from batonmq.spark.failovers.summary import lines
from batonmq.spark.fitting import SMALL_JVM, fitted
from batonmq.spark.jobs.command import EXIT_CODES, FOUND, Job, JobCommand, job_options, paths_of
from batonmq.spark.report.epoch_report import write_epoch_report

_MOMENTS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]


@click.command(cls=JobCommand, epilog=EXIT_CODES)
@job_options
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
    with (
        Output(output, overwrite=overwrite) as place,
        job.session("epoch_history", **(SMALL_JVM if inputs.is_small() else {})) as spark,
    ):
        summary = run(spark, inputs, place, job.progress.step)
        if not no_report:
            with (
                job.progress.step("drawing the report"),
                fitted(spark, inputs.settings()),
            ):
                report = write_epoch_report(spark, str(place.path), summary)
    printed = lines(summary)
    job.result(summary, [*printed, f"report: {report}"] if report else printed)
    found = summary["findings"]
    worse = found[CRITICAL] + (found[WARNING] if fail_on == WARNING else 0)
    if worse and fail_on != "never":
        click.get_current_context().exit(FOUND)


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.epoch_history")
