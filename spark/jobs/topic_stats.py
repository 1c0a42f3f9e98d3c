"""`python -m batonmq.spark.jobs.topic_stats`: volume, sizes, delays, hot queues, slow consumers.

Reads store folders of brokers, and writes tables and a report; see `docs/spark-jobs.md`.
"""

from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import click

from batonmq.spark.jobs.command import (
    FOUND,
    MOMENT,
    Job,
    JobCommand,
    checked,
    engine_option,
    job_options,
    output_options,
    paths_option,
)
from batonmq.spark.read.options import read_words, span_ms
from batonmq.spark.stats.stats_job import LAG, StatsRequest, lines, one_per_group, run
from batonmq.spark.stats.stats_queries import TABLES
from batonmq.spark.stats.stats_report import stats_page
from batonmq.spark.steps.result_folder import Results


@click.command(cls=JobCommand)
@job_options
@engine_option
@paths_option(
    "--stores",
    required=True,
    help="store folders of brokers; repeated, or with commas. Of several replicas of a group the "
    "one with the longest confirmed log is read",
)
@output_options(required=True, replaces="an earlier result; its snapshots of consumer_lag are kept")
@click.option(
    "--bucket",
    "bucket_ms",
    default="1m",
    callback=checked(span_ms),
    metavar="SPAN",
    help="how much time one row covers: a number and ms, s, m, h or d",
)
@click.option(
    "--topics",
    metavar="NAMES",
    callback=checked(lambda names: read_words(names or "")),
    help="only these, by commas",
)
@click.option(
    "--at",
    "snapshot",
    type=MOMENT,
    callback=checked(lambda at: (at or datetime.now(UTC)).replace(tzinfo=UTC, microsecond=0)),
    help="when the offsets were committed, in UTC; default: now. Set it for copied stores",
)
@click.option("--unconfirmed", is_flag=True, help="count what lies above confirmOffset, too")
@click.option(
    "--mode",
    type=click.Choice(["FAILFAST", "DROPMALFORMED"]),
    default="FAILFAST",
    help="what to do where a log is damaged",
)
@click.option(
    "--max-lag",
    type=click.IntRange(0),
    metavar="N",
    help="end with 1 if a group is more messages behind on a topic",
)
@click.option("--no-report", is_flag=True, help="tables only")
def main(
    job: Job,
    *,
    output: str,
    overwrite: bool,
    form: str,
    catalog: dict[str, str],
    max_lag: int | None,
    no_report: bool,
    **given: Any,
) -> None:
    """Statistics of topics, from the stores of brokers."""
    request = StatsRequest(**given)
    with job.progress.step("reading identity and epochs of the stores"):
        chosen = one_per_group(request.stores, unconfirmed=request.unconfirmed)
    keeps = " and keeps its snapshots of consumer_lag"
    results = Results(output, TABLES, overwrite=overwrite, form=form, catalog=catalog, keeps=keeps)
    log_bytes = sum(each.log_bytes for each in chosen)
    with closing(results), job.sql("topic_stats", log_bytes) as engine:
        summary = run(engine, request, chosen, results, job.progress.step)
        page = None
        if not no_report:
            with job.progress.step("drawing the report"):
                engine.read(LAG, results.table(LAG))  # with the snapshots of earlier runs
                page = stats_page(engine, summary)
        results.publish(summary, page)
    job.result(summary, [*lines(summary), *results.page_line(page)])
    slowest = summary["slowest_group"]
    if max_lag is not None and slowest and slowest["lag"] > max_lag:
        click.get_current_context().exit(FOUND)


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.topic_stats")
