"""The jobs: each module is a command, `python -m batonmq.spark.jobs.NAME --help`."""

import sys

from batonmq.runtime.extras import lacking

__all__: list[str] = []

if sys.argv[:1] == ["-m"]:  # being started: a traceback would end it with 1, which is a finding
    missing = lacking("spark")
    if missing:
        print(
            f"error: jobs run on Spark and need {missing} (in a clone: make setup-spark)",
            file=sys.stderr,
        )
        raise SystemExit(2)
