"""The jobs: each module is a command, `python -m spark.jobs.NAME --help`."""

import importlib.util
import sys
from typing import Final

PACKAGES: Final = ("plotly", "pyarrow", "pyspark")

if sys.argv[:1] == ["-m"]:  # being started: a traceback would end it with 1, which is a finding
    lacking = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        print(
            f"error: jobs run on Spark and need {', '.join(lacking)}: `make setup-spark`, or "
            "pip install 'batonmq[spark]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
