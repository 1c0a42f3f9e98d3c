"""What jobs share that run until they are stopped."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from batonmq.spark.jobs.command import Job, checked
from batonmq.spark.read.options import span_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def stream_options(
    *, trigger: str, checkpoint: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of every stream; the function gets it as `StreamSettings` has it. `trigger` and,
    in words, `checkpoint` are the defaults."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        @click.option(
            "--checkpoint",
            default="",
            metavar="URI",
            show_default=checkpoint,
            help="where Spark keeps its place in the stream",
        )
        @click.option(
            "--available-now",
            "--once",
            "once",
            is_flag=True,
            help="read what is there now, then end",
        )
        @click.option(
            "--trigger",
            default=trigger,
            metavar="TIME",
            callback=checked(span_ms),
            help="how often what is new becomes files (10s, 500ms, 5m)",
        )
        @click.option(
            "--accept-loss",
            is_flag=True,
            help="continue behind what was dropped before it was read, instead of stopping there",
        )
        @functools.wraps(function)
        def command(*given: Any, once: bool, trigger: int, **more: Any) -> None:
            function(*given, trigger=None if once else f"{trigger} milliseconds", **more)

        return command

    return add


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
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: asked.set())
