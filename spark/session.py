"""Spark sessions that know `format("batonmq")`."""

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from spark.source import BatonmqSource

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(session: SparkSession) -> SparkSession:
    """Register the data source and let Spark push filters into it; the same session again.

    A session without this setting must read with the option `pushdown` false, or Spark refuses.
    """
    session.dataSource.register(BatonmqSource)
    session.conf.set(PUSHDOWN, "true")
    return session


def open_session(
    name: str, *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """A session of that name, registered. `master` None: what spark-submit says, else local[*].

    Python processes of executors run the interpreter that runs here unless PYSPARK_PYTHON names
    another: Spark itself would take the first `python3` on the path.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    elif "PYSPARK_GATEWAY_PORT" not in os.environ:  # not started by spark-submit
        builder = builder.master("local[*]")
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())


__all__ = ["PUSHDOWN", "open_session", "register"]
