"""Spark sessions that know `format("batonmq")`."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext
from pyspark.sql import SparkSession

from batonmq.spark.read import hadoop
from batonmq.spark.source import BatonmqSource

# Columns of which nearly every value is another one. Parquet's writer in the JVM would look each
# up in a dictionary that it throws away later: a third of the time of df.write.parquet.
_UNIQUE: Final = (
    "body", "body_crc", "born_at", "keys", "physical_offset", "properties.key_value.value",
    "queue_offset", "store_at", "unique_key",
)  # fmt: skip
# Columns that no filter compares with the least and greatest value of a page.
_UNORDERED: Final = ("body", "properties.key_value.key", "properties.key_value.value")

PYTHON: Final = "PYSPARK_PYTHON"
#: How sessions write Parquet, unless their own settings differ.
PARQUET_DEFAULTS: Final[Mapping[str, str]] = {
    **{f"parquet.enable.dictionary#{column}": "false" for column in _UNIQUE},
    **{f"parquet.column.statistics.enabled#{column}": "false" for column in _UNORDERED},
}
#: The same for sessions of `open_session`: 64-bit numbers in UTC instead of Spark's 96-bit ones.
TIMESTAMP_DEFAULT: Final = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")


def register(session: SparkSession) -> SparkSession:
    """Register the data source and set PARQUET_DEFAULTS; the same session again.

    They concern columns of the tables by name; what the session was started with stays. On one
    machine, Spark's Python processes run the interpreter that runs here, unless PYSPARK_PYTHON
    names another; on a cluster it must.
    """
    context = getattr(session, "_sc", None)  # a client of Spark Connect has none
    if context is not None:
        named = session.conf.get("spark.pyspark.python", os.environ.get(PYTHON, sys.executable))
        if named == sys.executable and context.master.startswith("local"):
            context.pythonExec = _quick_python(context)
        context.environment[hadoop.SHARED] = hadoop.share_settings(dict(context.getConf().getAll()))
    session.dataSource.register(BatonmqSource)
    for key, value in PARQUET_DEFAULTS.items():
        given = (session.conf.get(name, None) for name in (key, f"spark.hadoop.{key}"))
        if not any(given):
            session.conf.set(key, value)
    return session


def _quick_python(context: SparkContext) -> str:
    """A program that runs this interpreter, with the pyspark that is installed beside it.

    Spark puts archives of the same code before that. Python compiles what it imports from them in
    each process again, a second and a half of processor time, and of a stream's processes Spark
    waits for 10 s at most: on a busy machine that was too little.
    """
    home = Path(pyspark.__file__).parent
    if not any(home.glob("python/lib/*.zip")):  # this process runs from them: nothing is installed
        return sys.executable
    program = Path(context._temp_dir) / "python"
    # Spark's archives come first: pyspark's, then py4j's.
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="${{PYTHONPATH#*/pyspark.zip:*/py4j-*.zip:}}" '
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    program.chmod(0o700)
    # Not where its file system is mounted noexec.
    return str(program) if os.access(program, os.X_OK) else sys.executable


def open_session(
    name: str, *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """A session of that name, registered. `master` None: spark-submit's, else local[*].

    Python processes of executors run the interpreter that runs here unless PYSPARK_PYTHON names
    another: Spark itself would take the first `python3` on the path. Times go into Parquet as
    TIMESTAMP_DEFAULT unless there is a setting.
    """
    os.environ.setdefault(PYTHON, sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    elif "PYSPARK_GATEWAY_PORT" not in os.environ:  # not started by spark-submit
        builder = builder.master("local[*]")
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    session = register(builder.getOrCreate())
    key, value = TIMESTAMP_DEFAULT
    if key not in (settings or {}) and not session.sparkContext.getConf().contains(key):
        session.conf.set(key, value)
    return session
