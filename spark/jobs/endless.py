"""What jobs share that run until they are stopped."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

from batonmq.spark.jobs.command import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIME: Final = re.compile(r"(\d+) *(ms|s|m|min|h)?")
_UNITS: Final = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "min": "minutes",
                 "h": "hours"}  # fmt: skip


@contextmanager
def streaming(job: Job, name: str) -> Iterator[tuple[SparkSession, threading.Event]]:
    """A session; and what ctrl-C and SIGTERM set, so that a batch is not cut off half-way."""
    asked = threading.Event()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        _listen(asked)
        with job.session(name, spark_sql_shuffle_partitions="4") as session:
            _listen(asked)  # Spark has set a handler of its own meanwhile
            yield session, asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _listen(asked: threading.Event) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        asked.set()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def interval(text: str) -> str:
    """As Spark spells it. Raises ValueError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--trigger {text!r}: it must be a time as 10s, 500ms or 5m")
    return f"{match[1]} {_UNITS[match[2] or 's']}"
