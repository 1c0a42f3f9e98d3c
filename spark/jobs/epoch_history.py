"""`python -m batonmq.spark.jobs.epoch_history`: who was master when, what it cost, what is wrong.

Reads the histories of all controllers and the epoch files of all brokers, and writes tables and a
report; see `docs/spark-jobs.md`.
"""

from contextlib import closing
from typing import Any

import click

from batonmq.spark.history.history_job import Inputs, run
from batonmq.spark.history.output_tables import TABLES
from batonmq.spark.history.summary import lines
from batonmq.spark.jobs.command import (
    FOUND,
    MOMENT,
    Job,
    JobCommand,
    engine_option,
    job_options,
    output_options,
    paths_option,
)
from batonmq.spark.report.epoch_report import epoch_page
from batonmq.spark.severity import CRITICAL, WARNING
from batonmq.spark.steps.result_folder import Results


@click.command(cls=JobCommand)
@job_options
@engine_option
@paths_option(
    "--history",
    help="folders with history-*.jsonl of controllers, or such files; repeated, or with commas",
)
@paths_option(
    "--history-parquet", metavar="DIR", help="instead of --history: what stream_history wrote"
)
@paths_option(
    "--stores", help="store folders of brokers, for their epoch files; repeated, or with commas"
)
@output_options(required=True)
@click.option("--since", type=MOMENT, help="rows from then on (UTC)")
@click.option("--until", type=MOMENT, help="rows before then (UTC)")
@click.option(
    "--fail-on",
    type=click.Choice([CRITICAL, WARNING, "never"]),
    default=CRITICAL,
    help="end with 1 if there are findings of this severity, or a worse one",
)
@click.option("--no-report", is_flag=True, help="tables only")
def main(
    job: Job,
    *,
    output: str,
    overwrite: bool,
    form: str,
    catalog: dict[str, str],
    fail_on: str,
    no_report: bool,
    **given: Any,
) -> None:
    """Failovers as tables: from controllers' histories and brokers' epoch files."""
    inputs = Inputs(**given)
    results = Results(output, TABLES, overwrite=overwrite, form=form, catalog=catalog)
    with (
        closing(results),
        job.sql("epoch_history", inputs.plan.size_bytes, few_rows=True) as engine,
    ):
        summary, tables = run(engine, inputs, results, job.progress.step)
        page = None
        if not no_report:
            with job.progress.step("drawing the report"):
                page = epoch_page(tables, summary)
        results.publish(summary, page)
    job.result(summary, [*lines(summary), *results.page_line(page)])
    found = summary["findings"]
    worse = found[CRITICAL] + (found[WARNING] if fail_on == WARNING else 0)
    if worse and fail_on != "never":
        click.get_current_context().exit(FOUND)


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.epoch_history")
