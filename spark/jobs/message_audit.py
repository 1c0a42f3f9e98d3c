"""`message_audit`: was anything lost, which replica deviates, where, and since which epoch?

Compares the stores of a group's replicas with each other and with lists of acknowledged sends. The
work is in `batonmq.spark.audit`.
"""

import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

import click
import msgspec

from batonmq.spark.audit.audit import AuditRequest, findings_text, plan_audit, run_audit
from batonmq.spark.audit.summary import lines_of, summary_of
from batonmq.spark.jobs.command import (
    DONE,
    FOUND,
    Job,
    JobCommand,
    engine_option,
    job_options,
    output_options,
    paths_option,
)
from batonmq.spark.steps.result_folder import Results
from batonmq.spark.steps.sql import DELTA, ICEBERG
from batonmq.spark.topic_table.proof import lines_of_proof, prove
from batonmq.spark.topic_table.table_formats import FORMS, open_table

_EPILOG = (
    "Exit codes: 0 clean (information only), 1 something critical or a warning was found, "
    "2 wrong usage or input, 3 failed."
)


@click.command(cls=JobCommand, epilog=_EPILOG)
@job_options
@engine_option
@paths_option(
    "--stores", required=True, help="store folders, with * ? [...]; by commas, or repeated"
)
@paths_option(
    "--acked", metavar="FILE_OR_FOLDER", help="acknowledged sends as JSON lines; may be repeated"
)
@click.option(
    "--group",
    metavar="NAME",
    help="take all stores for replicas of this group, whatever their identity",
)
@click.option("--unconfirmed", is_flag=True, help="compare what lies above confirmOffset, too")
@click.option("--duplicates/--no-duplicates", default=True, help="look for repeated unique keys")
@click.option(
    "--queues/--no-queues", default=True, help="check consume queues, and queue offsets in the log"
)
@click.option("--table", metavar="URI", help="a table of topicTable: compare its rows, too")
@click.option("--table-format", type=click.Choice(FORMS), default=DELTA)
@output_options(required=False, replaces="what --output holds", of="of --table or the result")
@click.option(
    "--limit",
    type=click.IntRange(0, 10_000),
    default=20,
    help="findings that are printed; --output has all of them",
)
def main(job: Job, *, output: str | None, overwrite: bool, form: str, **given: Any) -> None:
    """Compare replicas' stores with each other, with acknowledged sends, and with a table."""
    name, kind, catalog = (given.pop(each) for each in ("table", "table_format", "catalog"))
    if catalog and ICEBERG not in (kind, form):
        raise click.UsageError("--catalog: it is of Iceberg tables")
    own = {key: value for key, value in catalog.items() if key != "namespace"}
    table = open_table(name, kind, own if kind == ICEBERG else {}) if name else None
    request = AuditRequest(**given)
    results, proof = None, None
    if output is not None:
        results = Results(
            output,
            ("findings",),
            overwrite=overwrite,
            form=form,
            catalog=catalog if form == ICEBERG else None,
        )
    with job.progress.step("reading identity and epochs of the stores"):
        plan = plan_audit(request)
    with job.sql("message_audit", plan.size_bytes) as engine:
        if table is not None:
            with job.progress.step(f"comparing {table.location} with the log"):
                proof, found = prove(engine, table, plan.groups)
            plan = replace(plan, found=[*plan.found, *found])
        result = run_audit(engine, request, plan, job.progress.step)
        summary = summary_of(result, request.stores) | {"table": msgspec.to_builtins(proof)}
        if results is not None:
            with closing(results), job.progress.step(f"writing {output}"):
                results.begin()
                engine.write(findings_text(), results.table("findings"))
                results.publish(summary)
    job.result(summary, [*lines_of_proof(proof), *lines_of(summary)])
    sys.exit(DONE if result.is_clean else FOUND)


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.message_audit")
