"""`python -m batonmq.spark.jobs.stream_history`: the history into Parquet, as it comes.

Reads the history from the controllers of a running cluster and writes the table `history`,
a file for each batch; see `docs/spark-jobs.md`. Runs until it is stopped.
"""

from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from batonmq.spark.history.history_job import Inputs, run
from batonmq.spark.history.output_tables import TABLES
from batonmq.spark.jobs.command import Job, JobCommand, job_options
from batonmq.spark.jobs.endless import stream_options, streaming
from batonmq.spark.read.storage import locate
from batonmq.spark.steps.result_folder import Results
from batonmq.spark.steps.sql import DuckEngine
from batonmq.spark.topic_table.history_stream import HistoryPlan, HistoryStream
from batonmq.spark.topic_table.parquet_table import ParquetTable


@click.command(cls=JobCommand)
@job_options
@stream_options(trigger="30s", checkpoint="OUTPUT/_stream/checkpoint")
@click.option(
    "--controllers",
    required=True,
    metavar="HOST:PORT[;...]",
    help="the controllers of the cluster, by their remoting addresses",
)
@click.option(
    "--output",
    required=True,
    metavar="DIR",
    help="folder (a path or URI) of the Parquet table; an empty one, or one that this job wrote",
)
@click.option(
    "--max-events", default=10_000, type=click.IntRange(1), help="events in one batch, at most"
)
@click.option(
    "--failovers",
    metavar="DIR",
    help="keep the tables of epoch_history up to date there, group by group, behind each batch",
)
def main(job: Job, *, output: str, max_events: int, failovers: str | None, **given: Any) -> None:
    """Stream the history of a running cluster to Parquet.

    Each event comes once, whatever is killed on the way. Ends after the present batch on ctrl-C or
    SIGTERM, and may continue later with the same OUTPUT.
    """
    plan = HistoryPlan(events_max=max_events, **given)
    table = ParquetTable(output)
    table.open()
    try:
        behind = []
        if failovers is not None:
            results = Results(failovers, TABLES, overwrite=True)  # refuses one of something else
            if f"{locate(results.folder)[1]}/".startswith(f"{table.folder}/"):
                raise ValueError(
                    f"--failovers {failovers}: it lies in --output, whose readers would take its "
                    "rows for events; name a folder elsewhere"
                )
            behind = [partial(write_failovers, table.location, failovers)]
            if table.rows:  # a kill may have cut them off behind the commit
                behind[0]()
        stream = HistoryStream(table, plan, job.progress.line, *behind)
        with streaming(job, "stream_history") as (session, asked):
            job.progress.line(f"reading the history into {table.location}")
            stream.run(session, asked)
    finally:
        table.close()
    counts = stream.counts
    line = f"{counts.events} events and {counts.repeats} repeats in {counts.batches} batches; "
    line += f"{table.location} holds {table.rows} events"
    job.result(asdict(counts) | {"output": table.location, "total": table.rows}, [line])


def write_failovers(table: str, output: str) -> None:
    """The tables of epoch_history of all events of a table, in place of earlier ones.

    A change of master is reported when it is over, so it may be of events that came days ago: all
    are folded again. The table is the only state, so this may be killed and repeated at any time.
    Raises OSError.
    """
    inputs = Inputs(history_parquet=(table,))
    results = Results(output, TABLES, overwrite=True)
    with closing(results), DuckEngine() as engine:
        summary, _ = run(engine, inputs, results, lambda _: nullcontext())
        results.publish(summary)


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.stream_history")
