"""Settings of Spark for a small input, whose queries cost planning and compiling, not work.

What a query on a few thousand rows costs is nearly all tasks, stages, and code that Spark makes and
compiles for each. So a small input has no shuffle worth the name, no adaptive planning and no made
code, in a JVM that compiles lightly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

SMALL: Final[Mapping[str, str]] = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
SMALL_JVM: Final = {"spark_driver_extraJavaOptions": "-XX:TieredStopAtLevel=1"}
"""For a session that is started for a small input: compiling code well costs more than it saves."""
SMALL_LOG_BYTES: Final = 64 << 20
"""Logs of at most so many bytes together are small: some 100,000 messages."""
_UTC: Final = {"spark.sql.session.timeZone": "UTC"}


@contextmanager
def fitted(session: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """With those settings until the end; what the user set when Spark was started wins.

    Days are UTC in any case.
    """
    given = session.sparkContext.getConf()
    used = {key: value for key, value in settings.items() if not given.contains(key)} | _UTC
    before = {key: session.conf.get(key) for key in used}
    for key, value in used.items():
        session.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is not None:
                session.conf.set(key, old)


__all__ = ["SMALL", "SMALL_JVM", "SMALL_LOG_BYTES", "fitted"]
