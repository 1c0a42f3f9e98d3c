"""Spark's daemon of Python processes, which imports once what each of them would import.

Spark's own imports after the fork: a second of processor time for every process, and a session of
the tests starts dozens. Run by Spark as `python -m`.
"""

from pyspark.daemon import manager

import batonmq.spark.source  # noqa: F401

if __name__ == "__main__":
    manager()
