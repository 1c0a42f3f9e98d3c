"""Where the steps of a job run: in this process, or as tasks of Spark. The steps are the same.

A step is a function of one task and has a small result: what is large goes through files, see
`exchange`. Nothing here imports Spark before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
SMALL_LOG_BYTES: Final = 64 << 20
"""Logs of at most so many bytes together, some 100,000 messages, are done in one process."""
_BUCKETS_MAX: Final = 4_096


class Engine(Protocol):
    """Runs the tasks of one step after the other."""

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task]
    ) -> Iterator[_Result]:
        """The result of each task, in their order. What a task raises ends the job."""
        ...

    def buckets(self, size_bytes: int) -> int:
        """Into how many parts a step divides what was made of so much log."""
        ...


class LocalEngine:
    """This process: one task after the other, and nothing is divided."""

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task]
    ) -> Iterator[_Result]:
        yield from map(function, tasks)

    def buckets(self, size_bytes: int) -> int:
        return 1


class SparkEngine:
    """Tasks of Spark; function, tasks and results travel."""

    def __init__(self, session: SparkSession) -> None:
        self._context = session.sparkContext

    def map(
        self, function: Callable[[_Task], _Result], tasks: Sequence[_Task]
    ) -> Iterator[_Result]:
        if tasks:
            yield from self._context.parallelize(tasks, len(tasks)).map(function).collect()

    def buckets(self, size_bytes: int) -> int:
        wanted = max(self._context.defaultParallelism, size_bytes // SMALL_LOG_BYTES)
        return min(wanted, _BUCKETS_MAX)
