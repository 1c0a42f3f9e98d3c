"""`message_audit`: was anything lost, which replica deviates, where, and since which epoch?

Compares the stores of a group's replicas with each other and with lists of acknowledged sends. The
work is in `batonmq.spark.audit`.
"""

from __future__ import annotations

import sys
from typing import Any

import click

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
    "--acked",
    metavar="FILE_OR_FOLDER",
    help="acknowledged sends as JSON lines; may be repeated",
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
@output_options(required=False, replaces="what --output holds")
@click.option(
    "--limit",
    type=click.IntRange(0, 10_000),
    default=20,
    show_default=True,
    help="findings that are printed; --output has all of them",
)
def main(job: Job, *, output: str | None, overwrite: bool, form: str, **given: Any) -> None:
    """Compare replicas' stores with each other, and with acknowledged sends."""
    request = AuditRequest(**given)
    results = None
    if output is not None:
        results = Results(output, ("findings",), overwrite=overwrite, form=form)
    with job.progress.step("reading identity and epochs of the stores"):
        plan = plan_audit(request)
    with job.sql("message_audit", plan.size_bytes) as engine:
        result = run_audit(engine, request, plan, job.progress.step)
        summary = summary_of(result, request.stores)
        if results is not None:
            with job.progress.step(f"writing {output}"):
                results.begin(engine)
                engine.write(findings_text(), results.table("findings"), form=form)
                results.publish(engine, summary)
    job.result(summary, lines_of(summary))
    sys.exit(DONE if result.is_clean else FOUND)


if __name__ == "__main__":
    main(prog_name="python -m batonmq.spark.jobs.message_audit")
