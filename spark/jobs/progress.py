"""Progress of a long job, on standard error.

On a terminal one line that is written again: step, stages, tasks, seconds. Elsewhere one line when
a step begins, one when it ends, and one every ten seconds of a long one: a log stays short.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from pyspark import SparkContext

_TERMINAL_S: Final = 0.2
_LOG_S: Final = 10.0


class JobSteps:
    """Steps of one job. `quiet`: nothing is printed."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._context: SparkContext | None = None

    def watch(self, context: SparkContext) -> None:
        """From now on print the tasks of this context, too."""
        self._context = context

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Prints `text` while the block runs, and how long it took; steps may not be nested."""
        if self._quiet:
            yield
            return
        began = time.monotonic()
        over = threading.Event()
        if not self._terminal:
            click.echo(f"{text} ...", err=True)
        printer = threading.Thread(target=self._print, args=(text, began, over), daemon=True)
        printer.start()
        try:
            yield
        finally:
            over.set()
            printer.join()
            if self._terminal:
                click.echo("\r\033[K", err=True, nl=False)
        click.echo(f"{text}: {time.monotonic() - began:.1f} s", err=True)

    def line(self, text: str) -> None:
        """One line, unless quiet."""
        if not self._quiet:
            click.echo(text, err=True)

    def _print(self, text: str, began: float, over: threading.Event) -> None:
        while not over.wait(_TERMINAL_S if self._terminal else _LOG_S):
            line = f"{text}: {time.monotonic() - began:.0f} s{self._tasks()}"
            if self._terminal:
                click.echo(f"\r{line}\033[K", err=True, nl=False)
            else:
                click.echo(line, err=True)

    def _tasks(self) -> str:
        if self._context is None:
            return ""
        tracker = self._context.statusTracker()
        parts = [
            f"stage {stage}: {info.numCompletedTasks} of {info.numTasks} tasks"
            for stage in sorted(tracker.getActiveStageIds())
            if (info := tracker.getStageInfo(stage)) is not None
        ]
        return ", " + ", ".join(parts) if parts else ""
