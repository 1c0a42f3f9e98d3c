"""What all jobs share: options of the session, progress, results, exit codes.

Exit codes: 0 done; 1 done, and what the job looks for was found (lost messages, findings); 2 wrong
usage or input; 3 it failed on the way.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click

from batonmq.protocol.errors import BatonError
from batonmq.spark.read import hadoop
from batonmq.spark.read.storage import split_paths
from batonmq.spark.read.store_facts import StoreError
from batonmq.spark.steps import sql
from batonmq.spark.steps.sql import DELTA, ICEBERG, PARQUET, SMALL_LOG_BYTES

if TYPE_CHECKING:  # starting Spark takes seconds, importing it already one: see `Job.is_local`
    from pyspark.sql import SparkSession

DONE: Final = 0
FOUND: Final = 1
WRONG: Final = 2
FAILED: Final = 3
AUTO, LOCAL, SPARK = "auto", "local", "spark"
STOPPED: Final = 130
"""By ctrl-C, as shells have it."""
EXIT_CODES: Final = (
    "Exit codes: 0 done, 1 done and something was found, 2 wrong usage or input, 3 failed."
)
NO_JVM: Final = (
    "Spark's JVM did not start; its output is above. It needs a JDK 17 (JAVA_HOME, or `java` on "
    "the PATH), and settings (--master, --conf) that spark-submit takes"
)
NO_PACKAGE: Final = (
    "Spark's Python processes do not find this package: set PYSPARK_PYTHON to an interpreter that "
    "has it, on every machine of the cluster"
)
_OWN: Final = re.compile(r"\bbatonmq\.[a-z_.]+\.[A-Za-z]+: (.*)")
"""An error of ours by its class: its text is a sentence."""
MOMENT: Final = click.DateTime(
    ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]
)
_REPORT_S: Final = 10.0
_BAR: Final = "spark.ui.showConsoleProgress"
# A query on few rows costs its planning, and the code that Spark makes and compiles for it.
_NO_CODE: Final = {
    "spark_sql_codegen_wholeStage": "false", "spark_sql_codegen_factoryMode": "NO_CODEGEN"
}  # fmt: skip
_SMALL: Final = {
    **_NO_CODE, "spark_sql_shuffle_partitions": "2", "spark_sql_adaptive_enabled": "false"
}  # fmt: skip
# Compiling, by Spark and then by the JVM, costs more than it saves where tasks do the work and hand
# the engine a row for thousands of theirs: of 91 MiB of histories a third of the processor time.
_FEW_ROWS: Final = {
    **_NO_CODE, "spark_driver_extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
}  # fmt: skip
# Days of all tables are UTC, whatever a user's defaults are.
_UTC: Final = {"spark.sql.session.timeZone": "UTC"}


class JobSteps:
    """Progress, on standard error: a line when a step begins, and one when it ends. In between,
    Spark's own bar shows the tasks on a terminal; elsewhere there is a line every 10 s. `quiet`:
    nothing is printed."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Also prints how long the block took, unless it raised."""
        self.line(f"{text} ...")
        began, over = time.monotonic(), threading.Event()

        def report() -> None:
            while not over.wait(_REPORT_S):
                self.line(f"{text}: {time.monotonic() - began:.0f} s so far")

        if not sys.stderr.isatty():
            threading.Thread(target=report, daemon=True).start()
        try:
            yield
        finally:
            over.set()
        self.line(f"{text}: {time.monotonic() - began:.1f} s")

    def line(self, text: str) -> None:
        if not self._quiet:
            click.echo(text, err=True)


class Job:
    """One run of a job: where it runs and how it prints its result."""

    def __init__(
        self,
        *,
        master: str | None = None,
        settings: dict[str, str] | None = None,
        as_json: bool = False,
        quiet: bool = False,
        engine: str = AUTO,
    ) -> None:
        """Raises click.BadParameter for Spark's options beside `--engine local`."""
        if engine == LOCAL and (master is not None or settings):
            raise click.BadParameter("--engine local: --master and --conf are Spark's")
        self._engine = engine
        self.as_json = as_json
        self.progress = JobSteps(quiet=quiet)
        self._master = master
        self._wants_spark = master is not None or bool(settings)
        shown = str(sys.stderr.isatty() and not quiet).lower()
        self._settings = {_BAR: shown, "spark.ui.enabled": "false", **(settings or {}), **_UTC}
        hadoop.share_settings(settings or {})  # inputs are looked at before Spark starts

    def is_local(self, size_bytes: int) -> bool:
        """Whether this process does it by itself, without Spark: a small input is done before Spark
        has started. With --master, --conf and spark-submit it is Spark's, whatever its size."""
        if self._engine != AUTO:
            return self._engine == LOCAL
        asked = self._wants_spark or "PYSPARK_GATEWAY_PORT" in os.environ
        return not asked and size_bytes <= SMALL_LOG_BYTES

    @contextmanager
    def sql(self, name: str, size_bytes: int, *, few_rows: bool = False) -> Iterator[sql.Engine]:
        """Where queries run, see `is_local`. `few_rows`: its rows are few for so large an input."""
        if self.is_local(size_bytes):
            with sql.DuckEngine() as duck:
                yield duck
            return
        parts = min(max(8, size_bytes // SMALL_LOG_BYTES), 4096)
        settings = {"spark_sql_shuffle_partitions": str(parts)}
        if size_bytes <= SMALL_LOG_BYTES:
            settings |= _SMALL
        if few_rows:
            settings |= _FEW_ROWS
        with self.session(name, **settings) as session, sql.SparkEngine(session) as spark:
            yield spark

    @contextmanager
    def session(self, name: str, **defaults: str) -> Iterator[SparkSession]:
        """A session with the data source, stopped at the end if it was made here.

        `defaults`: Spark settings of this job, with `_` for `.`; what the user set wins.
        """
        from pyspark.sql import SparkSession

        from batonmq.spark.session import open_session

        theirs = SparkSession.getActiveSession()
        session: SparkSession | None = None
        settings = {key.replace("_", "."): value for key, value in defaults.items()}
        try:
            with self.progress.step("starting Spark"), _ctrl_c_waits(self.progress):
                session = open_session(
                    name, master=self._master, settings=settings | self._settings
                )
                # A failed query is one line of this job and no trace of the JVM before it.
                session.sparkContext.setLogLevel(self._settings.get("spark.log.level", "FATAL"))
            logging.getLogger().addFilter(_is_news)
            yield session
        except KeyboardInterrupt:
            _silence_counters(session)
            raise
        finally:
            started = session or SparkSession.getActiveSession()  # what fails may have begun one
            if theirs is None and started is not None:
                started.stop()

    def result(self, document: object, lines: Sequence[str] = ()) -> None:
        """The result, on standard output: `document` as JSON with --json, else the lines."""
        if self.as_json:
            lines = [json.dumps(document, indent=2, ensure_ascii=False, default=str)]
        for line in lines:
            click.echo(line)


class JobCommand(click.Command):
    """A command whose errors are one line: bad input ends it with 2, a failed query with 3. Its
    help shows defaults."""

    def __init__(self, *args: Any, **given: Any) -> None:
        shown = {"context_settings": {"show_default": True}, "epilog": EXIT_CODES}
        super().__init__(*args, **shown | given)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(STOPPED)
        except Exception as error:
            why = _sentence(error)
            if why is None:  # a bug; only its exit code must not be that of a finding
                traceback.print_exc()
            else:
                click.echo(f"error: {' '.join(why.split())}", err=True)
            is_input = isinstance(error, ValueError | OSError | StoreError)
            ctx.exit(WRONG if is_input or why in (NO_JVM, NO_PACKAGE) else FAILED)


def _sentence(error: Exception) -> str | None:
    """What an error says to people; None for a bug."""
    if isinstance(error, ValueError | OSError | BatonError):
        return str(error)
    return _of_spark(error)


def _of_spark(error: Exception) -> str | None:
    """The sentence of an error of Spark; None for any other."""
    if "pyspark" not in sys.modules:
        return None
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if isinstance(error, PySparkException):
        if error.getCondition() == "JAVA_GATEWAY_EXITED":
            return NO_JVM
        why = what_failed(str(error))
        return NO_PACKAGE if "No module named 'batonmq" in why else why
    return f"Spark: {what_failed(str(error))}" if isinstance(error, Py4JError) else None


def job_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that every job has; the function gets a `Job` instead of them."""

    @click.option(
        "--master", metavar="URL", help="Spark master; default: spark-submit's, or local[*]"
    )
    @click.option(
        "--conf",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        callback=checked(properties),
        help="a Spark setting; may be repeated",
    )
    @click.option("--json", "as_json", is_flag=True, help="the result as one JSON document")
    @click.option("--quiet", "-q", is_flag=True, help="no progress")
    @functools.wraps(function)
    def command(*, engine: str = SPARK, **given: Any) -> None:
        own = {name: given.pop(name) for name in ("master", "settings", "as_json", "quiet")}
        function(Job(engine=engine, **own), **given)

    return command


def output_options(
    *, required: bool, replaces: str = "an earlier result in --output", of: str = "of the result"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Where results go, whether they replace others, and as what."""
    options = (
        click.option("--output", required=required, metavar="DIR", help="where the results go"),
        click.option("--overwrite", is_flag=True, help=f"replace {replaces}"),
        click.option(
            "--format",
            "form",
            type=click.Choice([PARQUET, DELTA, ICEBERG]),
            default=PARQUET,
            callback=checked(_known_form),
            help="what the tables are: folders of Parquet, Delta tables, or those of an Iceberg "
            "catalog",
        ),
        catalog_option(of, "; namespace=NAME: of the result's tables"),
    )

    def add(function: Callable[..., None]) -> Callable[..., None]:
        return functools.reduce(lambda made, option: option(made), reversed(options), function)

    return add


def catalog_option(of: str, more: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--catalog",
        multiple=True,
        metavar="KEY=VALUE",
        callback=checked(properties),
        help=f"an Iceberg catalog {of} by pyiceberg's properties (type, uri, warehouse, ...), "
        f"or name=NAME of one in its configuration{more}",
    )


def _known_form(form: str) -> str:
    package = {DELTA: "deltalake", ICEBERG: "pyiceberg"}.get(form)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(
            f"--format {form} needs the package {package} (pip install 'batonmq[tables]')"
        )
    return form


def engine_option(function: Callable[..., None]) -> Callable[..., None]:
    """The option of a job that has a way without Spark; above it `job_options`."""
    return click.option(
        "--engine",
        type=click.Choice([AUTO, LOCAL, SPARK]),
        default=AUTO,
        help="where the work is done: in this process, on Spark, or by the size of the input",
    )(function)


@contextmanager
def _ctrl_c_waits(progress: JobSteps) -> Iterator[None]:
    """ctrl-C takes effect at the end of the block: a JVM that is left alone while it starts stays
    for good. A second one does at once. A handler that the block sets does not last.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requested = False
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        progress.line("stopping as soon as Spark has started")

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        # Spark's own handler calls the JVM within a call of the JVM.
        signal.signal(signal.SIGINT, before)
    if requested:
        raise KeyboardInterrupt


def _is_news(record: logging.LogRecord) -> bool:
    """False for what the JVM's bridge logs of a call that ctrl-C cuts off."""
    return not str(record.msg).startswith("KeyboardInterrupt while sending command")


def _silence_counters(session: SparkSession | None) -> None:
    """They would print a traceback when the JVM ends in the middle of a message."""
    context = getattr(session, "sparkContext", None)
    server = getattr(context, "_accumulatorServer", None)
    if server is not None:
        server.handle_error = lambda *_: None


def paths_option(
    name: str, *, help: str, metavar: str = "PATTERN", required: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A repeated option, each time a path, a pattern or several with commas."""
    return click.option(
        name, multiple=True, required=required, metavar=metavar, help=help, callback=checked(_paths)
    )


def _paths(given: Sequence[str]) -> tuple[str, ...]:
    """Refuses one that names none: a shell's empty variable must not turn off a check."""
    every: list[str] = []
    for text in given:
        paths = split_paths(text)
        if not paths:
            raise ValueError(f"{text!r}: it must name a path")
        every += paths
    return tuple(every)


def properties(given: Sequence[str]) -> dict[str, str]:
    """Repeated KEY=VALUE. Raises ValueError."""
    parts = [each.partition("=") for each in given]
    if any(not name or not equals for name, equals, _ in parts):
        raise ValueError("it must be KEY=VALUE")
    return {name.strip(): value.strip() for name, _, value in parts}


def checked(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that makes an option's value; a ValueError of `read` is wrong usage."""

    def callback(_: click.Context, __: click.Parameter, given: Any) -> Any:
        try:
            return read(given)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def what_failed(text: str) -> str:
    """The sentence of a Python error inside Spark's report of it; the first line if there is none.

    Spark puts the traceback of the Python process into its own message, and that into a JVM trace.
    """
    if (own := _OWN.search(text)) is not None:
        return own[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if not line.startswith("Traceback (most recent call last)"):
            continue
        for each in lines[at + 1 :]:
            head, colon, _ = each.partition(": ")
            if colon and head.replace(".", "").replace("_", "").isidentifier():
                return each
    return lines[0] if lines else "unknown"
