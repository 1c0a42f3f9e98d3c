"""`python -m batonmq.spark.jobs.topic_table`: a topic kept as a Delta or Iceberg table.

Runs until it is stopped; see `docs/spark-tables.md`.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType, StructType

from batonmq.spark.jobs.command import Job, JobCommand, catalog_option, checked, job_options
from batonmq.spark.jobs.endless import stream_options, streaming
from batonmq.spark.read.options import span_ms
from batonmq.spark.steps.sql import DELTA
from batonmq.spark.topic_table.bodies import AVRO, JSON, PROTOBUF, RAW, Bodies
from batonmq.spark.topic_table.fields import columns_of
from batonmq.spark.topic_table.files import DAY, HOUR, NONE
from batonmq.spark.topic_table.stream import TablePlan, TopicStream
from batonmq.spark.topic_table.table_formats import FORMS, open_table


def _seconds(text: str) -> float:
    """A time as 30s, 10m, 12h or 7d; "never" is 0. Raises ValueError."""
    return 0 if text == "never" else span_ms(text) / 1000


@click.command(cls=JobCommand)
@job_options
@stream_options(trigger="5s", checkpoint="_batonmq/checkpoint in the table's folder")
@click.argument("topic")
@click.option("--name-servers", required=True, metavar="HOST:PORT[;...]", help="of the cluster")
@click.option(
    "--to",
    required=True,
    metavar="URI",
    help="folder of the Delta table, or the name NAMESPACE.TABLE of an Iceberg table",
)
@click.option("--format", "form", type=click.Choice(FORMS), default=DELTA)
@catalog_option("of the table")
@click.option(
    "--value",
    type=click.Choice([JSON, AVRO, PROTOBUF, RAW]),
    default=JSON,
    help="what the bodies are",
)
@click.option(
    "--schema",
    multiple=True,
    metavar="FILE_OR_DDL",
    help="of JSON: columns as "
    "'id BIGINT, at TIMESTAMP', or the file of a JSON schema (default: inferred); of "
    "Avro: files, the newest last; of Protobuf: a descriptor file",
)
@click.option("--message", metavar="NAME", help="the Protobuf message, with package")
@click.option(
    "--header-bytes",
    type=click.IntRange(0, 1024),
    default=0,
    help="what serializers put before each record: 5 of Confluent's Avro",
)
@click.option(
    "--partition",
    type=click.Choice([DAY, HOUR, NONE]),
    default=DAY,
    help="by the time at which messages were stored (UTC)",
)
@click.option(
    "--from-table",
    is_flag=True,
    help="with a new checkpoint: continue behind the table's last rows",
)
@click.option(
    "--starting",
    default="earliest",
    metavar="earliest|latest|JSON",
    help="where a new table begins; JSON: offsets by topic, broker, queue",
)
@click.option(
    "--max-offsets", type=click.IntRange(1), default=200_000, help="messages in one batch, at most"
)
@click.option(
    "--max-columns",
    type=click.IntRange(0, 10_000),
    default=500,
    help="columns of fields, at most, if they are inferred",
)
@click.option(
    "--compact-every",
    default="10m",
    metavar="TIME|never",
    callback=checked(_seconds),
    help="when small files are put together",
)
@click.option(
    "--keep-versions",
    default="7d",
    metavar="TIME|never",
    callback=checked(_seconds),
    help="how long old versions can be read",
)
def main(job: Job, **given: Any) -> None:
    """Keep TOPIC as a table, each message once.

    Whatever is killed on the way, a start with the same options continues. Ends after the present
    batch on ctrl-C or SIGTERM.
    """
    pop = given.pop
    table = open_table(pop("to"), pop("form"), pop("catalog"))
    value, schemas = pop("value"), pop("schema")
    if value in (AVRO, PROTOBUF) and not schemas:
        raise click.UsageError(f"--value {value} needs --schema FILE")
    files = tuple(Path(each).read_bytes() for each in schemas) if value in (AVRO, PROTOBUF) else ()
    bodies = Bodies(value, files, pop("message") or "", pop("header_bytes"))
    with streaming(job, "topic_table") as (session, asked):
        plan = TablePlan(
            bodies=bodies,
            columns=_columns(session, schemas) if value == JSON else None,
            compact_s=pop("compact_every"),
            keep_hours=pop("keep_versions") / 3600,
            offsets_max=pop("max_offsets"),
            columns_max=pop("max_columns"),
            **given,
        )
        stream = TopicStream(table, plan, job.progress.line)
        job.progress.line(f"topic {plan.topic} into {table.location}, from {stream.checkpoint}")
        stream.run(session, asked)
    state, counts = table.state(), stream.counts
    total = state.rows if state is not None else 0
    job.result(
        asdict(counts) | {"table": table.location, "checkpoint": stream.checkpoint, "total": total},
        [
            f"{counts.rows:,} rows in {counts.batches:,} batches, {counts.broken:,} of them broken "
            f"({counts.repeats:,} batches were there already); {table.location} has {total:,} rows"
        ],
    )


def _columns(session: SparkSession, given: tuple[str, ...]) -> pa.Schema | None:
    """The columns of JSON bodies; None: they are to be inferred. Raises ValueError."""
    if not given:
        return None
    if len(given) > 1:
        raise ValueError("--schema: JSON bodies have one")
    (text,) = given
    if os.path.isfile(text):  # no OSError for columns that are longer than a name may be
        text = Path(text).read_text()
    if text.lstrip().startswith("{"):
        return columns_of(json.loads(text))
    from pyspark.sql.pandas.types import to_arrow_schema

    kind = DataType.fromDDL(text)
    if not isinstance(kind, StructType):
        raise ValueError(f"--schema {text!r}: it must be columns as 'id BIGINT, at TIMESTAMP'")
    columns: pa.Schema = to_arrow_schema(kind)
    return columns


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.topic_table")
